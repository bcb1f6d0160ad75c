"""The error rule every backend is judged by, for the output and each gradient: in the tests, and before anything is timed.

With truth = the reference in float64 and plain = the reference in the backend's dtype:
err(backend, truth) ≤ 2·err(plain, truth) + c·eps·max|truth|, c = 16 in float32 and 4 in half types (float64: 16). The backend
runs in memory full of NaN, so that an element it leaves unwritten shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Comparison", "compare", "find_fault", "find_gross_fault", "output_and_gradients", "poisoned_memory"]

Tensors = Mapping[str, Tensor | None]
Function = Callable[..., Tensor]


def output_and_gradients(run: Function, inputs: Tensors, upstream: Tensor) -> dict[str, Tensor]:
    """The output of `run(**inputs)` and the gradient of every floating-point input, on fresh leaves.

    The output alone where it has another shape than `upstream`: whoever compares it says so.
    """
    leaves = {
        name: t.detach().clone().requires_grad_() if t is not None and t.dtype.is_floating_point else t
        for name, t in inputs.items()
    }
    out = run(**leaves)
    if out.shape != upstream.shape:
        return {"output": out.detach()}
    wanted = {n: t for n, t in leaves.items() if t is not None and t.requires_grad}
    gradients = torch.autograd.grad(out, list(wanted.values()), upstream.to(out.dtype).to(out.device))
    return {"output": out.detach(), **{f"gradient of {n}": g for n, g in zip(wanted, gradients, strict=True)}}


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN.

    >>> with poisoned_memory():
    ...     torch.empty(2)
    tensor([nan, nan])
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            # Torch's products say that they may add up in another order next time; that is not asked here.
            warnings.filterwarnings("ignore", message=".*[dD]eterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


class Comparison(NamedTuple):
    """One call three times: the reference in float64, the reference in the tested dtype, and the function under test."""

    dtype: torch.dtype
    truth: dict[str, Tensor]
    plain: dict[str, Tensor]
    got: dict[str, Tensor]


def compare(
    run: Function,
    reference: Function,
    inputs: Tensors,
    *,
    seed: int = 0,
    samples: Sequence[int] | None = None,
    shared: Collection[str] = (),
    poisoned: bool = False,
) -> Comparison:
    """Run `run` and `reference` on `inputs`, whose dtype is the one tested, with one random upstream gradient.

    With `samples`, `run` still gets the whole batch, but the reference only these samples of it. Elsewhere the upstream
    gradient is zero, so that gradients of inputs without a batch axis (named in `shared`) agree too: the shape that is
    timed is the shape that is checked, even where the reference of the whole batch would not fit in memory. `poisoned`
    gives `run` memory full of NaN.
    """
    dtype = next(t.dtype for t in inputs.values() if t is not None and t.dtype.is_floating_point)

    def pick(name: str, tensor: Tensor | None) -> Tensor | None:
        return tensor if samples is None or tensor is None or name in shared else tensor[list(samples)]

    few = {name: pick(name, t) for name, t in inputs.items()}
    double = {n: t.double() if t is not None and t.dtype.is_floating_point else t for n, t in few.items()}
    shape = reference(**double).shape
    # Rounded to the tested dtype first, so that all three runs see the same upstream gradient.
    upstream = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    truth = output_and_gradients(reference, double, upstream)
    plain = output_and_gradients(reference, few, upstream)
    memory = poisoned_memory if poisoned else nullcontext
    if samples is None:
        with memory():
            return Comparison(dtype, truth, plain, output_and_gradients(run, inputs, upstream))

    batch = next(len(t) for n, t in inputs.items() if t is not None and n not in shared)
    whole = torch.zeros(batch, *shape[1:], dtype=dtype)
    whole[list(samples)] = upstream
    with memory():
        got = output_and_gradients(run, inputs, whole)
    for name, tensor in got.items():
        if not name.endswith(tuple(f" of {n}" for n in shared)):
            # An element left unwritten in another sample would otherwise go unseen.
            finite = torch.isfinite(tensor).all()
            got[name] = tensor[list(samples)] if finite else tensor
    return Comparison(dtype, truth, plain, got)


def find_fault(
    run: Function,
    reference: Function,
    inputs: Tensors,
    *,
    seed: int = 0,
    samples: Sequence[int] | None = None,
    shared: Collection[str] = (),
) -> str | None:
    """What the error rule finds wrong with `run`, and where; None when it holds for the output and every gradient."""
    dtype, truth, plain, got = compare(run, reference, inputs, seed=seed, samples=samples, shared=shared, poisoned=True)
    factor = 16 if dtype in (torch.float32, torch.float64) else 4
    for name, want in truth.items():
        have = got[name]
        if have.numel() and not torch.isfinite(have).all():
            return f"{name}: not finite"
        if have.shape != want.shape:
            return f"{name}: got shape {list(have.shape)}, wanted {list(want.shape)}"
        if have.dtype != plain[name].dtype:
            return f"{name}: got dtype {have.dtype}, wanted {plain[name].dtype}"
        if want.numel() == 0:
            continue
        error = (have.double() - want.to(have.device)).abs()
        allowed = 2 * (plain[name].double() - want).abs().max() + factor * torch.finfo(dtype).eps * want.abs().max()
        if error.max() > allowed:
            where = [int(i) for i in torch.unravel_index(error.argmax().cpu(), error.shape)]
            return f"{name}: error {error.max():.3e} at {where} exceeds {allowed:.3e}"
    return None


def find_gross_fault(
    run: Function,
    reference: Function,
    inputs: Tensors,
    *,
    seed: int = 0,
    samples: Sequence[int] | None = None,
    shared: Collection[str] = (),
) -> str | None:
    """Whether `run` computes another function than `reference`: ‖got − truth‖ / ‖truth‖ above 5 % (float32: 0.1 %), or None.

    For peers: whether they round as well as ours do is not ours to judge, what they compute is.
    """
    dtype, truth, _, got = compare(run, reference, inputs, seed=seed, samples=samples, shared=shared)
    limit = 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2
    for name, want in truth.items():
        have = got[name]
        if have.shape != want.shape:
            return f"{name}: got shape {list(have.shape)}, wanted {list(want.shape)}"
        error = (have.double() - want.to(have.device)).norm() / want.norm().clamp_min(1e-30)
        if not error <= limit:
            return f"{name}: relative error {error:.2e} exceeds {limit:g}"
    return None
