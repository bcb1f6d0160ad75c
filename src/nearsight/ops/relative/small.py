"""Launches of the kernels for small maps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearsight.ops.first_calls import launch
from nearsight.ops.relative.launches import RelativeCall, empty_outputs, padded, per_head
from nearsight.ops.sums import sum_rows
from nearsight.ops.triton_support import dot_precision, next_power_of_two, register_cap

__all__ = ["attend", "fits", "gradients"]

# The longest side of a small map (0: none is), all of whose pixels one program has. With sides of 16, as compiled, results
# were wrong on an H200 (README).
LONGEST = 8
# The most registers of a thread of the forward; the gradients are faster with all they want.
REGISTERS = 128
# Programs wanted: each goes along the batch.
PROGRAMS = 1024


def fits(call: RelativeCall) -> bool:
    """Whether a call is one for these kernels: what its tiles have no room for takes the others."""
    half = call.packed.dtype != torch.float32
    widest = max(call.dim, call.value_dim)
    return half and call.mask is None and widest <= 64 and max(call.height, call.width) <= LONGEST


def _constants(call: RelativeCall) -> dict[str, Any]:
    columns = next_power_of_two(call.width)
    side = max(4, next_power_of_two(max(call.height, call.width)))
    pixels = padded(columns * next_power_of_two(call.height))
    return {
        **call.head_dims(),
        "N": pixels,
        "COLS": columns,
        "SIDE": side,
        "PB": padded(2 * side),
        "FULL": call.height * call.width == pixels,
        "UNIT": call.stride_unit,
        "PRECISION": dot_precision(call.packed.dtype),
        # A warp has 16 rows of a product.
        "num_warps": pixels // 16,
        "num_stages": 1,
    }


def _grid(call: RelativeCall) -> tuple[tuple[int, int], int]:
    """The grid, and images per program."""
    batch = call.packed.shape[0]
    span = -(-batch // max(1, min(batch, -(-PROGRAMS // call.heads))))
    return (call.heads, -(-batch // span)), span


def _sizes(call: RelativeCall) -> tuple[int, ...]:
    batch, n, _ = call.packed.shape
    return batch, call.heads, call.height, call.width, n


def attend(call: RelativeCall) -> tuple[Tensor, Tensor]:
    from nearsight.ops.relative import small_kernels

    out, lse = empty_outputs(call.packed, call.heads, call.dim)
    if out.numel() == 0:
        return out, lse
    grid, span = _grid(call)
    constants = _constants(call)
    launch(
        small_kernels.small_forward,
        grid,
        *(*call.views(call.packed), call.rel_row, call.rel_col, out, lse, *call.strides()),
        *(per_head(call.rel_row), per_head(call.rel_col), *_sizes(call), span, call.unit),
        **constants,
        **register_cap(REGISTERS if constants["num_warps"] >= 4 else None),
    )
    return out, lse


def gradients(call: RelativeCall, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `packed` and, in float32, of both tables, one below the other: [heads, 2·H + 2·W − 2, D]."""
    from nearsight.ops.relative import small_kernels

    device = call.packed.device
    dpacked = torch.empty(call.packed.shape, dtype=call.packed.dtype, device=device)
    grid, span = _grid(call)
    offsets = 2 * call.height + 2 * call.width - 2
    shares = torch.empty((grid[1], call.heads, offsets, call.dim), dtype=torch.float32, device=device)
    launch(
        small_kernels.small_gradients,
        grid,
        *(*call.views(call.packed), call.rel_row, call.rel_col, grad, out, lse, *call.views(dpacked), shares),
        *(*call.strides(), per_head(call.rel_row), per_head(call.rel_col), *_sizes(call), span, call.unit, call.scale),
        CHANNELS=call.packed.shape[2],
        **_constants(call),
    )
    return dpacked, sum_rows(shares)
