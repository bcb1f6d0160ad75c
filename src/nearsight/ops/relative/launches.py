"""Launches of attention with relative positions by Triton: tiles, sizes, and the kernels of the forward and of the backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.ops.first_calls import launch
from nearsight.ops.sums import sum_rows
from nearsight.ops.triton_support import dot_precision, next_power_of_two, register_cap

__all__ = [
    "KeyTile",
    "QueryTile",
    "RelativeCall",
    "attend",
    "empty_outputs",
    "gradients",
    "make_call",
    "padded",
    "per_head",
]


class QueryTile(NamedTuple):
    """Queries and warps of a program, rows of keys at a time, and the most registers of a thread (None: the compiler's choice).

    Rows are of WIDEST_BLOCK columns; on a narrower map there are as many more at a time.
    """

    queries: int
    warps: int
    rows: int
    registers: int | None = None
    stages: int = 2


class KeyTile(NamedTuple):
    """Keys and warps of a program, queries at a time, and registers as above."""

    keys: int
    warps: int
    queries: int
    registers: int | None = None
    stages: int = 2


# Columns of keys in one product: a wider map is walked in blocks of so many.
WIDEST_BLOCK = 32
# The fastest of those timed on an H200 at head dim 20 (README).
FORWARD, QUERY_GRADIENTS, KEY_GRADIENTS = (
    QueryTile(128, 8, 2, 128),
    QueryTile(128, 8, 2, 128),
    KeyTile(64, 4, 64, 128, 1),
)
# Pixels from which the forward does without a running maximum; below, the bound costs more than it saves.
BOUNDED = 1024
FORWARD_BOUNDED = QueryTile(128, 8, 2, 128, 3)
# Maps of fewer pixels than SMALL.
SMALL = 512
QUERY_GRADIENTS_SMALL = QueryTile(64, 4, 2, 168)
# float32, or heads wider than 64: three products for one, or operands of twice the size.
FORWARD_LARGE, QUERY_GRADIENTS_LARGE, KEY_GRADIENTS_LARGE = QueryTile(64, 4, 1), QueryTile(64, 4, 1), KeyTile(64, 4, 32)
# Both.
FORWARD_LARGEST, QUERY_GRADIENTS_LARGEST = QueryTile(32, 4, 1), QueryTile(32, 4, 1)
KEY_GRADIENTS_LARGEST = KeyTile(32, 4, 16)
# Programs wanted of the kernels that go along the batch.
PROGRAMS = 2048


class RelativeCall(NamedTuple):
    """q, k and v as views of one tensor, and the sizes that every launch needs."""

    packed: Tensor  # [B, n, channels]
    rel_row: Tensor
    rel_col: Tensor
    mask: Tensor | None
    heads: int
    dim: int
    height: int
    scale: float

    @property
    def width(self) -> int:
        return self.packed.shape[1] // max(self.height, 1)

    @property
    def value_dim(self) -> int:
        return self.packed.shape[2] // self.heads - 2 * self.dim

    @property
    def unit(self) -> float:
        return self.scale * math.log2(math.e)

    @property
    def large(self) -> int:
        """How many of both hold: float32, and heads wider than 64."""
        return (self.packed.dtype == torch.float32) + (max(self.dim, self.value_dim) > 64)

    def views(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys = self.heads * self.dim
        return packed[..., :keys], packed[..., keys : 2 * keys], packed[..., 2 * keys :]

    def head_dims(self) -> dict[str, int]:
        dims = {"D": self.dim, "DV": self.value_dim}
        return {**dims, "DP": padded(self.dim), "DVP": padded(self.value_dim)}

    def flags(self) -> dict[str, Any]:
        return {
            "HAS_MASK": self.mask is not None,
            "UNIT": self.stride_unit,
            "PRECISION": dot_precision(self.packed.dtype),
        }

    @property
    def stride_unit(self) -> int:
        """The largest power of two, up to what one load takes, that divides the strides of images and of pixels."""
        return math.gcd(self.packed.stride(0), self.packed.stride(1), 8)

    def strides(self) -> tuple[int, int]:
        """Of images and of pixels, in units: the compiler is told no divisor but 16 of a number that it is passed."""
        return self.packed.stride(0) // self.stride_unit, self.packed.stride(1) // self.stride_unit

    def block(self) -> int:
        """Columns of keys in one product of the kernels that have queries along the first axis."""
        return min(padded(self.width), WIDEST_BLOCK)

    def sizes(self) -> tuple[int, ...]:
        """What follows the strides of every launch."""
        return self.heads, self.height, self.width, self.packed.shape[1], self.pitch

    @property
    def pitch(self) -> int:
        """Elements from one query's logits by column to the next one's: they lie as wide loads want them."""
        return -(-self.width // 16) * 16

    def bounded(self) -> bool:
        """Whether the forward takes a bound of the logits for their maximum: not where the query's best key may be masked,
        nor in float16, whose weights would lose bits."""
        return self.mask is None and self.packed.dtype != torch.float16 and self.packed.shape[1] >= BOUNDED

    def positions(self) -> tuple[Tensor, Tensor]:
        """Places for the position logits by row and by column of the key: [B·heads, H, n] and [B·heads, n, pitch]."""
        batch, n, _ = self.packed.shape
        like: dict[str, Any] = {"dtype": self.packed.dtype, "device": self.packed.device}
        by_row = torch.empty((batch * self.heads, self.height, n), **like)
        by_col = torch.empty((batch * self.heads, n, self.pitch), **like)
        return by_row, by_col

    def along_batch(self, of_rows: bool) -> tuple[tuple[int, int], int, dict[str, Any]]:
        """Grid, images per program and constants of the kernels that take one row, or one column, of queries of many images."""
        batch = self.packed.shape[0]
        lines, length = (self.height, self.width) if of_rows else (self.width, self.height)
        # As many along the batch for columns as for rows: they leave their shares side by side.
        most = self.heads * max(lines, length)
        span = -(-batch // max(1, min(batch, -(-PROGRAMS // most))))
        constants = {
            "D": self.dim,
            "DP": padded(self.dim),
            "LB": padded(length),
            "KB": padded(lines),
            "OF_ROWS": of_rows,
            "UNIT": self.stride_unit,
            "PRECISION": dot_precision(self.packed.dtype),
            "num_warps": 8 if max(self.height, self.width) > 32 or self.large else 2,
            "num_stages": 2,
        }
        return (self.heads * lines, -(-batch // span)), span, constants

    def tables(self) -> tuple[tuple[bool, Tensor], tuple[bool, Tensor]]:
        """Of rows and of columns."""
        return (True, self.rel_row), (False, self.rel_col)


def _resources(tile: QueryTile | KeyTile, share: float) -> dict[str, Any]:
    """The options of a launch that uses `share` of a tile."""
    warps = max(1, int(tile.warps * share))
    return {"num_warps": warps, "num_stages": tile.stages, **_capped(tile.registers, warps)}


def _capped(registers: int | None, warps: int) -> dict[str, int]:
    """The option that caps the registers of a thread. A few warps may have all they want."""
    return register_cap(registers if warps >= 4 else None)


def padded(size: int) -> int:
    """The length of a range that holds `size` and that a product can sum over."""
    return max(16, next_power_of_two(size))


def make_call(
    packed: Tensor,
    rel_row: Tensor,
    rel_col: Tensor,
    key_mask: Tensor | None,
    heads: int,
    dim: int,
    height: int,
    scale: float,
) -> RelativeCall:
    if packed.stride(2) != 1:
        packed = packed.contiguous()
    mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
    return RelativeCall(packed, rel_row.contiguous(), rel_col.contiguous(), mask, heads, dim, height, scale)


def _fill_positions(call: RelativeCall, by_row: Tensor, by_col: Tensor, norms: Tensor | None = None) -> None:
    from nearsight.ops.relative import kernels

    q, k, _ = call.views(call.packed)
    for of_rows, table in call.tables():
        grid, span, constants = call.along_batch(of_rows)
        launch(
            kernels.positions,
            grid,
            *(q, k, table, by_row if of_rows else by_col, norms, *call.strides(), per_head(table)),
            *(call.packed.shape[0], *call.sizes(), span),
            BOUND=of_rows and norms is not None,
            **constants,
        )


def per_head(table: Tensor) -> int:
    """Elements from one head's table to the next one's; all heads may share one."""
    return 0 if table.shape[0] == 1 else table.stride(0)


def _fit(tile: QueryTile, call: RelativeCall) -> tuple[int, dict[str, Any]]:
    """Programs per image and head, and constants, of a kernel with queries along the first axis."""
    n = call.packed.shape[1]
    queries = min(tile.queries, padded(n))
    constants = {
        **call.head_dims(),
        "M": queries,
        "WB": call.block(),
        "ROWS": min(tile.rows * WIDEST_BLOCK // call.block(), next_power_of_two(call.height)),
        **call.flags(),
        **_resources(tile, queries / tile.queries),
    }
    return -(-n // queries), constants


def attend(call: RelativeCall, tile: QueryTile | None = None) -> tuple[Tensor, Tensor]:
    from nearsight.ops.relative import kernels

    batch = call.packed.shape[0]
    out, lse = empty_outputs(call.packed, call.heads, call.dim)
    if out.numel() == 0:
        return out, lse
    by_row, by_col = call.positions()
    # Of each row of keys the largest k·k.
    norms = _numbers(call, call.height) if call.bounded() else None
    _fill_positions(call, by_row, by_col, norms)
    tile = tile or (FORWARD_BOUNDED if call.bounded() else FORWARD, FORWARD_LARGE, FORWARD_LARGEST)[call.large]
    tiles, constants = _fit(tile, call)
    launch(
        kernels.forward,
        (batch * call.heads * tiles,),
        *(*call.views(call.packed), by_row, by_col, norms, call.mask, out, lse),
        *(*call.strides(), *call.sizes(), tiles, call.unit),
        HB=padded(call.height),
        BOUND=call.bounded(),
        **constants,
    )
    return out, lse


def empty_outputs(packed: Tensor, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    batch, n, channels = packed.shape
    out = torch.empty((batch, n, channels - 2 * heads * dim), dtype=packed.dtype, device=packed.device)
    # In float32 two numbers a query: `_load_lse` of the backward.
    numbers = 2 * n if packed.dtype == torch.float32 else n
    return out, torch.empty((batch, heads, numbers), dtype=torch.float32, device=packed.device)


def _numbers(call: RelativeCall, count: int) -> Tensor:
    """Room for so many of each image and head."""
    shape = (call.packed.shape[0], call.heads, count)
    return torch.empty(shape, dtype=torch.float32, device=call.packed.device)


def gradients(
    call: RelativeCall,
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query: QueryTile | None = None,
    key: KeyTile | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of `packed` and, in float32, of the tables with one head each, by row of the query and of the key and then
    by column of both: [heads, H·H + W·W, D]."""
    from nearsight.ops.relative import gradient_kernels

    batch, n, channels = call.packed.shape
    device = call.packed.device
    dpacked = torch.empty(call.packed.shape, dtype=call.packed.dtype, device=device)
    dq, dk, dv = call.views(dpacked)
    by_row, by_col = call.positions()
    _fill_positions(call, by_row, by_col)
    common = QUERY_GRADIENTS_SMALL if n < SMALL else QUERY_GRADIENTS
    query = query or (common, QUERY_GRADIENTS_LARGE, QUERY_GRADIENTS_LARGEST)[call.large]
    key = key or (KEY_GRADIENTS, KEY_GRADIENTS_LARGE, KEY_GRADIENTS_LARGEST)[call.large]

    tiles, constants = _fit(query, call)
    parts = -(-call.width // constants["WB"])
    of_row = torch.empty((batch * call.heads, parts, *by_row.shape[1:]), dtype=by_row.dtype, device=device)
    of_col = torch.empty_like(by_col)
    delta = _numbers(call, n)
    inputs = (*call.views(call.packed), by_row, by_col, call.mask, grad)
    launch(
        gradient_kernels.query_gradients,
        (batch * call.heads * tiles,),
        *(*inputs, out, lse, dq, of_row, of_col, delta, *call.strides()),
        *(*call.sizes(), tiles, call.unit),
        PARTS=parts,
        CHANNELS=channels,
        **constants,
    )

    columns = min(next_power_of_two(call.width), WIDEST_BLOCK)
    rows = max(1, min(key.keys, padded(n)) // columns)
    # As many one-hot rows as one step of a product sums over.
    rows = min(rows, 16, max(next_power_of_two(call.height), -(-16 // columns)))
    across = -(-call.width // columns)
    tiles = across * -(-call.height // rows)
    launch(
        gradient_kernels.key_gradients,
        (batch * call.heads * tiles,),
        *(*inputs, lse, delta, dk, dv, *call.strides()),
        *(*call.sizes(), tiles, across, call.unit, call.scale),
        **call.head_dims(),
        WB=columns,
        KR=rows,
        N=min(key.queries, padded(n)),
        CB=max(16, columns),
        CHANNELS=channels,
        **call.flags(),
        **_resources(key, rows * columns / key.keys),
    )

    along = call.along_batch(True)[0][1]
    pairs = call.height**2 + call.width**2
    shares = torch.empty((along, call.heads, pairs, call.dim), dtype=torch.float32, device=device)
    for of_rows, table in call.tables():
        grid, span, constants = call.along_batch(of_rows)
        launch(
            gradient_kernels.position_gradients,
            grid,
            *(inputs[0], table, of_row if of_rows else of_col, dq, shares, *call.strides(), per_head(table)),
            *(batch, *call.sizes(), span, call.scale),
            CHANNELS=channels,
            PARTS=parts,
            **constants,
        )
    return dpacked, sum_rows(shares)
