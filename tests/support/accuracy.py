"""The error rule every backend is judged by, for the output and each gradient.

With truth = the reference in float64 and plain = the reference in the backend's dtype:
err(backend, truth) ≤ 2·err(plain, truth) + c·eps·max|truth|, c = 16 in float32 and 4 in half types (float64: 16).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["assert_by_error_rule", "output_and_gradients"]

Tensors = Mapping[str, Tensor | None]


def output_and_gradients(run: Callable[..., Tensor], inputs: Tensors, upstream: Tensor) -> dict[str, Tensor]:
    """The output of `run(**inputs)` and the gradient of every floating-point input, on fresh leaves."""
    leaves = {
        name: t.detach().clone().requires_grad_() if t is not None and t.dtype.is_floating_point else t
        for name, t in inputs.items()
    }
    out = run(**leaves)
    wanted = {n: t for n, t in leaves.items() if t is not None and t.requires_grad}
    gradients = torch.autograd.grad(out, list(wanted.values()), upstream.to(out.dtype).to(out.device))
    return {"output": out.detach(), **{f"gradient of {n}": g for n, g in zip(wanted, gradients, strict=True)}}


def assert_by_error_rule(
    backend: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: Tensors, seed: int = 0
) -> None:
    """Compare `backend` with `reference` on `inputs` (whose dtype is the one tested); fail naming what is off and where."""
    dtype = next(t.dtype for t in inputs.values() if t is not None and t.dtype.is_floating_point)
    double = {n: t.double() if t is not None and t.dtype.is_floating_point else t for n, t in inputs.items()}
    shape = reference(**double).shape
    # Rounded to the tested dtype first, so that all three runs see the same upstream gradient.
    upstream = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    truth = output_and_gradients(reference, double, upstream)
    plain = output_and_gradients(reference, inputs, upstream)
    got = output_and_gradients(backend, inputs, upstream)
    factor = 16 if dtype in (torch.float32, torch.float64) else 4
    for name, want in truth.items():
        have = got[name]
        assert have.shape == want.shape, f"{name}: got shape {list(have.shape)}, wanted {list(want.shape)}"
        assert have.dtype == plain[name].dtype, f"{name}: got dtype {have.dtype}, wanted {plain[name].dtype}"
        if want.numel() == 0:
            continue
        assert torch.isfinite(have).all(), f"{name}: not finite"
        error = (have.double() - want.to(have.device)).abs()
        allowed = 2 * (plain[name].double() - want).abs().max() + factor * torch.finfo(dtype).eps * want.abs().max()
        if error.max() > allowed:
            where = [int(i) for i in torch.unravel_index(error.argmax().cpu(), error.shape)]
            raise AssertionError(f"{name}: error {error.max():.3e} at {where} exceeds {allowed:.3e}")
