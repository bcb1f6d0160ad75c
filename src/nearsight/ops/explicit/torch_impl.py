"""Explicit attention without its HW×HW matrix: one small matrix per axis, applied one axis after the other."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nearsight.ops.dispatch import full_precision
from nearsight.ops.explicit.call import SEPARABLE_KINDS, ExplicitCall
from nearsight.ops.explicit.reference import map_at, smallest_normaliser

__all__ = ["run"]

Product = Callable[[Tensor], Tensor]


def run(call: ExplicitCall) -> Tensor:
    values = call.values
    height, width, channels = values.shape[1:]
    with full_precision(values):
        v = values.to(call.map_dtype).unflatten(3, (call.heads, channels // call.heads))
        if call.key_mask is None:
            valid = v.new_ones(1, height, width, 1, 1)
        else:
            valid = call.key_mask[..., None, None].to(v.dtype)
            v = v.masked_fill(~call.key_mask[..., None, None], 0.0)
        if call.kind == "constant":
            weighted, mass = v.sum((1, 2), keepdim=True), valid.sum((1, 2), keepdim=True)
        else:
            times_map = (_separable if call.kind in SEPARABLE_KINDS else _fourier)(call, height, width)
            weighted = times_map(v) + call.offset * v.sum((1, 2), keepdim=True)
            valid = valid.expand(-1, -1, -1, call.heads, -1)
            mass = times_map(valid) + call.offset * valid.sum((1, 2), keepdim=True)
        nothing = mass <= smallest_normaliser(v.dtype)
        out = weighted.masked_fill(nothing, 0.0) / mass.masked_fill(nothing, 1.0)
        return out.expand_as(v).reshape(values.shape).to(values.dtype)


def _separable(call: ExplicitCall, height: int, width: int) -> Product:
    """G = g_y ⊗ g_x, so G v = g_y v g_x: O(HW(H + W)C)."""
    wide = _wide(call)
    zero = torch.zeros((), dtype=wide, device=call.values.device)
    rows = _map(call, _distances(height, call, wide), zero, height, width).to(call.map_dtype)
    columns = _map(call, zero, _distances(width, call, wide), height, width).to(call.map_dtype)

    def product(v: Tensor) -> Tensor:
        v = torch.einsum("nyk,bkxnd->byxnd", rows, v)
        return torch.einsum("nxk,byknd->byxnd", columns, v)

    return product


def _fourier(call: ExplicitCall, height: int, width: int) -> Product:
    """G depends on (|dy|, |dx|) alone, so a real Fourier transform along y leaves one W×W matrix per frequency.

    With F = 2H − 1 frequencies f and ω = 2πf/F, G(dy, dx) = Σ_f K_f(dx) cos(ω dy), and cos(ω(y − y′)) splits into
    cos ωy cos ωy′ + sin ωy sin ωy′. The transforms are matrix products: faster here than an FFT, and without complex numbers.
    """
    wide, device = _wide(call), call.values.device
    pixel = torch.arange(height, device=device)
    # A tensor, for ONNX has no remainder by a symbolic number.
    period = 2 * pixel[-1:] + 1
    # Reduced as integers: the angle of a large product would lose its digits.
    angle = ((pixel[:, None] * pixel) % period).to(wide) * (2 * math.pi / period.to(wide))
    basis = torch.stack((angle.cos(), angle.sin()))
    # Each distance and each frequency stands for its negative too, 0 only for itself.
    both = 2.0 - (pixel == 0).to(wide)
    analysis = basis[0] * both * both[:, None] / period

    dy, dx = pixel.to(wide), torch.arange(width, dtype=wide, device=device)
    spectrum = (analysis @ _map(call, dy[:, None], dx, height, width)).to(call.map_dtype)
    columns = spectrum[..., _distances(width, call, wide).abs().long()]
    basis = basis.to(call.map_dtype)

    def product(v: Tensor) -> Tensor:
        v = torch.einsum("pfy,byxnd->fxnpbd", basis, v)
        v = torch.einsum("nfxk,fknpbd->fxnpbd", columns, v)
        return torch.einsum("pfy,fxnpbd->byxnd", basis, v)

    return product


def _wide(call: ExplicitCall) -> torch.dtype:
    """The small matrices are made in float64 where it exists: the gradient of the radius is one long sum of both signs."""
    return torch.float32 if call.values.device.type == "mps" else torch.float64


def _map(call: ExplicitCall, dy: Tensor, dx: Tensor, height: int, width: int) -> Tensor:
    radius = None if call.radius is None else call.radius.to(dy.dtype)
    return map_at(call.kind, dy, dx, height, width, radius)


def _distances(size: int, call: ExplicitCall, dtype: torch.dtype) -> Tensor:
    """i − j of one axis: [size, size]."""
    pixel = torch.arange(size, dtype=dtype, device=call.values.device)
    return pixel[:, None] - pixel
