"""Launches of the kernels for small maps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.ops.relative.launches import RelativeCall, empty_outputs, per_head
from nearsight.ops.sums import sum_rows
from nearsight.ops.triton_support import dot_precision, launch, next_power_of_two, register_cap

__all__ = ["attend", "fits", "gradients"]

# The longest side of a small map; 0: none is.
LONGEST = 16


class Tile(NamedTuple):
    """Queries, keys and warps of a program, and the most registers of a thread (None: the compiler's choice)."""

    queries: int
    keys: int
    warps: int
    registers: int | None = None
    stages: int = 2


# Not timed yet.
FORWARD = Tile(64, 64, 4, 128, 1)
GRADIENTS = Tile(64, 64, 4, 168, 1)
KEY_GRADIENTS = Tile(64, 64, 4, 128, 1)
# Programs wanted: each goes along the batch.
PROGRAMS = 1024


def fits(call: RelativeCall) -> bool:
    """Whether a call is one for these kernels: what its tiles have no room for takes the others."""
    half = call.packed.dtype != torch.float32
    widest = max(call.dim, call.value_dim)
    return half and call.mask is None and widest <= 64 and max(call.height, call.width) <= LONGEST


def _constants(call: RelativeCall, tile: Tile) -> dict[str, Any]:
    columns = next_power_of_two(call.width)
    side = max(4, next_power_of_two(max(call.height, call.width)))
    pixels = max(16, columns * next_power_of_two(call.height))
    queries, keys = min(tile.queries, pixels), min(tile.keys, pixels)
    warps = max(1, tile.warps * queries // tile.queries)
    return {
        **call.head_dims(),
        "M": queries,
        "N": keys,
        "COLS": columns,
        "SIDE": side,
        "PB": max(16, 2 * side),
        "UNIT": call.stride_unit,
        "PRECISION": dot_precision(call.packed.dtype),
        "num_warps": warps,
        "num_stages": tile.stages,
        **register_cap(tile.registers if warps >= 4 else None),
    }


def _blocks(call: RelativeCall, constants: dict[str, Any], of: str) -> int:
    """How many blocks of M queries or N keys the map has."""
    return -(-call.height * constants["COLS"] // constants[of])


def _of_keys(call: RelativeCall, constants: dict[str, Any]) -> dict[str, Any]:
    """The blocks of keys, and whether all blocks hold nothing but pixels of the map."""
    rows = max(constants["M"], constants["N"]) // constants["COLS"]
    full = constants["COLS"] == call.width and call.height % rows == 0
    return {"BLOCKS": _blocks(call, constants, "N"), "FULL": full}


def _grid(call: RelativeCall, constants: dict[str, Any]) -> tuple[int, tuple[int, int], int]:
    """Tiles of queries of a map, the grid of the kernels that go along the batch, and images per program."""
    batch = call.packed.shape[0]
    tiles = _blocks(call, constants, "M")
    lines = call.heads * tiles
    span = -(-batch // max(1, min(batch, -(-PROGRAMS // lines))))
    return tiles, (lines, -(-batch // span)), span


def _sizes(call: RelativeCall) -> tuple[int, ...]:
    batch, n, _ = call.packed.shape
    return batch, call.heads, call.height, call.width, n


def attend(call: RelativeCall) -> tuple[Tensor, Tensor]:
    from nearsight.ops.relative import small_kernels

    out, lse = empty_outputs(call.packed, call.heads, call.dim)
    if out.numel() == 0:
        return out, lse
    constants = _constants(call, FORWARD)
    tiles, grid, span = _grid(call, constants)
    launch(
        small_kernels.small_forward,
        grid,
        *(*call.views(call.packed), call.rel_row, call.rel_col, out, lse, *call.strides()),
        *(per_head(call.rel_row), per_head(call.rel_col), *_sizes(call), tiles, span, call.unit),
        **constants,
        **_of_keys(call, constants),
    )
    return out, lse


def gradients(call: RelativeCall, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `packed` and, in float32, of both tables, one below the other: [heads, 2·H + 2·W − 2, D]."""
    from nearsight.ops.relative import small_kernels

    batch, n, channels = call.packed.shape
    device = call.packed.device
    dpacked = torch.empty(call.packed.shape, dtype=call.packed.dtype, device=device)
    views = call.views(call.packed)
    dq, dk, dv = call.views(dpacked)
    constants = _constants(call, GRADIENTS)
    tiles, grid, span = _grid(call, constants)
    whole = tiles == 1
    position = delta = None
    if not whole:
        position = torch.empty((batch * call.heads, n, constants["PB"]), dtype=dq.dtype, device=device)
        delta = torch.empty((batch, call.heads, n), dtype=torch.float32, device=device)
    offsets = 2 * call.height + 2 * call.width - 2
    shares = torch.empty((grid[1] * tiles, call.heads, offsets, call.dim), dtype=torch.float32, device=device)
    launch(
        small_kernels.small_gradients,
        grid,
        *(*views, call.rel_row, call.rel_col, grad, out, lse, dq, dk, dv, position, delta, shares, *call.strides()),
        *(per_head(call.rel_row), per_head(call.rel_col), *_sizes(call), tiles, span, call.unit, call.scale),
        CHANNELS=channels,
        WHOLE=whole,
        **constants,
        **_of_keys(call, constants),
    )
    if not whole:
        constants = _constants(call, KEY_GRADIENTS)
        tiles = _blocks(call, constants, "N")
        launch(
            small_kernels.small_key_gradients,
            (batch * call.heads * tiles,),
            *(*views, grad, lse, dk, dv, position, delta, *call.strides()),
            *(*_sizes(call)[1:], tiles, call.unit, call.scale),
            CHANNELS=channels,
            **constants,
        )
    return dpacked, sum_rows(shares)
