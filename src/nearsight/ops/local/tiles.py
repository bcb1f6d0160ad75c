"""Local attention on part of a batch, as small matrix products: tiles of queries against the band of keys they can see.

A tile of ty×tx queries sees (ty+kh−1)×(tx+kw−1) keys. Its logits are one product plus a bias per key row and a bias per key
column; outside the band these are −large, so nothing is compared or gathered per logit. Only one tile's logits exist at a time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nearsight.ops.windows import window_padding

__all__ = ["Gradients", "Plan", "Tiles", "make_plan"]

# Finite, so that a query with nothing to attend to gives a number, replaced by 0, and not NaN. Sums of a few fit float32.
MASKED = -1e30
# What starting the operations of one tile costs, in logits, and how many queries a product needs to run at half its speed.
TILE_COST = 20_000
HALF_SPEED = 20


class Plan(NamedTuple):
    """How a map is cut: rows and columns of queries per tile, and images worked on at once."""

    rows: int
    columns: int
    images: int


class Gradients(NamedTuple):
    """Gradients of the maps, in their layout, and of the tables, [heads, taps, D/2]."""

    q: Tensor
    k: Tensor | None
    v: Tensor
    rel_row: Tensor | None
    rel_col: Tensor | None


@lru_cache(maxsize=512)
def make_plan(
    batch: int, height: int, width: int, heads: int, window: tuple[int, int], zeros: bool, budget: int
) -> Plan:
    """The cut with the least work, among those that hold about `budget` logits at once."""
    best, plan = float("inf"), Plan(1, 1, 1)
    for columns in sorted({min(c, width) for c in (7, 8, 10, 12, 14, 16, 20, 24, 28, 32)}):
        count = -(-width // columns)
        keys_across = columns + window[1] - 1 if zeros or count > 1 else width
        for rows in sorted({min(r, height) for r in (1, 2, 3, 4, 6, 8, 12, 16, 32)}):
            keys_down = rows + window[0] - 1 if zeros else min(rows + window[0] - 1, height)
            each = heads * count * columns * rows * keys_across * keys_down
            images = max(1, min(batch, budget // each))
            tiles = -(-batch // images) * -(-height // rows)
            speed = rows * columns / (rows * columns + HALF_SPEED)
            work = tiles * (images * each / speed + TILE_COST + max(0, each - budget))
            if work < best:
                best, plan = work, Plan(rows, columns, images)
    return plan


class Tiles:
    """Maps [B, H, W, heads, D] laid out for the products: image, head and column tile are one axis, the group.

    q becomes [groups, H, tx, D], k and v [groups, key rows, key columns, D], all in `dtype`. Keys outside the image exist where
    they count (border "zeros"), and on the sides where more than one column tile must be equally wide.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        rel_row: Tensor | None,
        rel_col: Tensor | None,
        key_mask: Tensor | None,
        *,
        window: tuple[int, int],
        zeros: bool,
        scale: float,
        plan: Plan,
        dtype: torch.dtype,
    ) -> None:
        self.batch, self.height, self.width, self.heads, self.dim = q.shape
        self.window, self.zeros, self.scale, self.dtype = window, zeros, scale, dtype
        self.tile_rows, self.tile_columns = plan.rows, plan.columns
        self.count = -(-self.width // plan.columns)
        self.groups = (self.batch, self.heads, self.count)
        self.reach = window_padding(window[0])
        left, right = window_padding(window[1])
        padded = zeros or self.count > 1
        self.pad_rows = self.reach if zeros else (0, 0)
        self.pad_columns = (left, right + self.count * plan.columns - self.width) if padded else (0, 0)
        self.key_rows = self.height + sum(self.pad_rows)
        self.key_columns = plan.columns + window[1] - 1 if padded else self.width
        self.band = slice(0, None) if padded else slice(left, left + self.width)

        self.q = self._query_tiles(q)
        if scale != 1.0:
            self.q *= scale
        self.k = None if k is None else self._key_tiles(k)
        self.v = self._key_tiles(v)
        self.rel_row, self.rel_col = (
            None if table is None else table.to(dtype).expand(self.heads, -1, -1) for table in (rel_row, rel_col)
        )
        first, second = self.q.split((self.dim // 2, self.dim - self.dim // 2), dim=-1)
        self.row = None if self.rel_row is None else self._meet(first, self.rel_row)
        self.column_bias = self._column_bias(None if self.rel_col is None else self._meet(second, self.rel_col))
        self.key_bias, self.dead = self._masks(key_mask)

    def forward(self) -> Tensor:
        """The output, [B, H, W, heads, D]."""
        out = torch.empty_like(self.q)
        for y in range(0, self.height, self.tile_rows):
            queries, keys = self._rows(y)
            weights = self._logits(queries, keys).softmax(-1)
            torch.bmm(weights, self.v[:, keys].flatten(1, 2), out=out[:, queries].flatten(1, 2))
        y_map = self._query_map(out)
        return y_map if self.dead is None else y_map.masked_fill(self.dead[..., None, None], 0.0)

    def backward(self, grad: Tensor) -> Gradients:
        """The gradients, given that of the output."""
        if self.dead is not None:
            grad = grad.masked_fill(self.dead[..., None, None], 0.0)
        grad_out = self._query_tiles(grad)
        grad_q, grad_v = torch.empty_like(self.q), torch.zeros_like(self.v)
        grad_k = None if self.k is None else torch.zeros_like(self.k)
        grad_row = None if self.row is None else torch.empty_like(self.row)
        grad_column = None if self.rel_col is None else torch.empty_like(self.column_bias)
        for y in range(0, self.height, self.tile_rows):
            queries, keys = self._rows(y)
            shape = (-1, queries.stop - y, self.tile_columns, keys.stop - keys.start, self.key_columns)
            tile = grad_out[:, queries].flatten(1, 2)
            weights = self._logits(queries, keys).softmax(-1)
            grad_v[:, keys].flatten(1, 2).baddbmm_(weights.mT, tile)
            upstream = torch.bmm(tile, self.v[:, keys].flatten(1, 2).mT)
            slope = torch._softmax_backward_data(upstream, weights, -1, self.dtype)
            if self.k is not None and grad_k is not None:
                torch.bmm(slope, self.k[:, keys].flatten(1, 2), out=grad_q[:, queries].flatten(1, 2))
                grad_k[:, keys].flatten(1, 2).baddbmm_(slope.mT, self.q[:, queries].flatten(1, 2))
            if grad_row is not None:
                grad_row[:, queries] = self._from_row_band(slope.view(shape).sum(-1), y, keys)
            if grad_column is not None:
                grad_column[:, queries] = slope.view(shape).sum(-2)
        if self.k is None:
            grad_q.zero_()
        first, second = self.dim // 2, self.dim - self.dim // 2
        rel_row = rel_col = None
        if grad_row is not None and self.rel_row is not None:
            rel_row = self._spread(grad_row, self.rel_row, grad_q[..., :first], self.q[..., :first])
        if grad_column is not None and self.rel_col is not None:
            taps = self._from_column_band(grad_column)
            rel_col = self._spread(taps, self.rel_col, grad_q[..., -second:], self.q[..., -second:])
        if self.scale != 1.0:
            grad_q *= self.scale
        return Gradients(
            self._query_map(grad_q),
            None if grad_k is None else self._key_map(grad_k),
            self._key_map(grad_v),
            rel_row,
            rel_col,
        )

    # Which rows of queries and keys meet.

    def _rows(self, y: int) -> tuple[slice, slice]:
        """The query rows of the tile at y, and the key rows they see."""
        stop = min(y + self.tile_rows, self.height)
        start_key, stop_key = self._unclipped(y, stop)
        return slice(y, stop), slice(max(start_key, 0), min(stop_key, self.key_rows))

    def _unclipped(self, y: int, stop: int) -> tuple[int, int]:
        return y - self.reach[0] + self.pad_rows[0], stop + self.reach[1] + self.pad_rows[0]

    # Logits of a tile.

    def _logits(self, queries: slice, keys: slice) -> Tensor:
        """[groups, queries, keys] of one tile: products, positions, −large where a key may not be attended."""
        groups, rows = self.q.shape[0], queries.stop - queries.start
        logits = self.q.new_empty(groups, rows, self.tile_columns, keys.stop - keys.start, self.key_columns)
        column = self.column_bias[:, queries] if self.column_bias.shape[1] > 1 else self.column_bias
        column, row = column[..., None, :], self._row_bias(queries, keys)
        if row is None:
            logits.copy_(column)
        else:
            torch.add(row.expand(groups, -1, -1, -1, -1), column, out=logits)
        logits = logits.view(groups, rows * self.tile_columns, -1)
        if self.key_bias is not None:
            by_group = logits.view(*self.groups, *logits.shape[1:])
            by_group += self.key_bias[:, :, :, keys].flatten(3)[:, :, :, None]
        if self.k is not None:
            logits.baddbmm_(self.q[:, queries].flatten(1, 2), self.k[:, keys].flatten(1, 2).mT)
        return logits

    def _row_bias(self, queries: slice, keys: slice) -> Tensor | None:
        """[groups or 1, ty, tx or 1, key rows, 1], or None where all are 0."""
        rows = queries.stop - queries.start
        if self.row is not None:
            row = self.row[:, queries]
        elif rows > 1:
            row = self.q.new_zeros(1, rows, 1, self.window[0])
        else:
            return None
        start, _ = self._unclipped(queries.start, queries.stop)
        banded = _to_band(row.transpose(1, 2)).transpose(1, 2)
        return banded[..., keys.start - start : keys.stop - start, None]

    def _column_bias(self, column: Tensor | None) -> Tensor:
        """[groups, H, tx, key columns], or with ones where nothing depends on the query."""
        if column is None:
            column = self.q.new_zeros(1, 1, self.tile_columns, self.window[1])
        bias = _to_band(column)[..., self.band]
        if self.zeros or self.count == 1:
            return bias
        position = torch.arange(self.count, device=bias.device)[:, None] * self.tile_columns
        position = position + torch.arange(self.key_columns, device=bias.device) - self.pad_columns[0]
        outside = ((position < 0) | (position >= self.width)).to(self.dtype) * MASKED
        outside = outside.repeat(self.batch * self.heads, 1)[:, None, None]
        return bias + outside

    def _from_row_band(self, band: Tensor, y: int, keys: slice) -> Tensor:
        """What `_row_bias` did, transposed: [groups, ty, tx, key rows] → [groups, ty, tx, kh]."""
        start, stop = self._unclipped(y, y + band.shape[1])
        band = F.pad(band, (keys.start - start, stop - keys.stop))
        return _from_band(band.transpose(1, 2), self.window[0]).transpose(1, 2)

    def _from_column_band(self, band: Tensor) -> Tensor:
        """[groups, H, tx, key columns] → [groups, H, tx, kw]."""
        before = self.band.start
        band = F.pad(band, (before, self.tile_columns + self.window[1] - 1 - before - self.key_columns))
        return _from_band(band, self.window[1])

    # Positions.

    def _meet(self, half: Tensor, table: Tensor) -> Tensor:
        """q·r per tap: [groups, H, tx, D/2] with [heads, taps, D/2] → [groups, H, tx, taps]."""
        by_head = half.unflatten(0, self.groups).flatten(2, 4)
        return (by_head @ table.mT).view(*half.shape[:3], -1)

    def _spread(self, grad: Tensor, table: Tensor, grad_half: Tensor, half: Tensor) -> Tensor:
        """Add q·r's gradient to that of q (a half of it, in place) and return the table's, [heads, taps, D/2]."""
        by_head = grad.unflatten(0, self.groups).flatten(2, 4)
        grad_half += (by_head @ table).view(half.shape)
        return (by_head.mT @ half.unflatten(0, self.groups).flatten(2, 4)).sum(0)

    # Masks.

    def _masks(self, key_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The bias of each key, [B, 1, column tiles, key rows, key columns], and which queries reach no valid pixel."""
        if key_mask is None:
            return None, None
        masked = key_mask.logical_not().to(self.dtype)
        bias = self._key_tiles(masked[..., None, None]).unflatten(0, (self.batch, 1, self.count))[..., 0] * MASKED
        left, right = window_padding(self.window[1])
        reachable = F.pad(1.0 - masked, (left, right, *self.reach))
        return bias, F.max_pool2d(reachable[:, None], self.window, stride=1)[:, 0] == 0

    # Layouts.

    def _query_tiles(self, x: Tensor) -> Tensor:
        """[B, H, W, heads, D] → [groups, H, tx, D]; columns beyond the image are 0."""
        spare = self.count * self.tile_columns - self.width
        return self._tiles(x, (0, 0), (0, spare), self.tile_columns)

    def _key_tiles(self, x: Tensor) -> Tensor:
        """[B, H, W, heads, D] → [groups, key rows, key columns, D]."""
        return self._tiles(x, self.pad_rows, self.pad_columns, self.key_columns)

    def _tiles(self, x: Tensor, rows: tuple[int, int], columns: tuple[int, int], size: int) -> Tensor:
        if any(rows) or any(columns):
            x = F.pad(x, (0, 0, 0, 0, *columns, *rows))
        tiles = x.unfold(2, size, self.tile_columns).permute(0, 3, 2, 1, 5, 4)
        return torch.empty(tiles.shape, dtype=self.dtype, device=x.device).copy_(tiles).flatten(0, 2)

    def _query_map(self, tiles: Tensor) -> Tensor:
        """[groups, H, tx, D] → [B, H, W, heads, D], a view where one tile spans the map."""
        tiles = tiles.unflatten(0, self.groups).permute(0, 3, 2, 4, 1, 5)
        return tiles.flatten(2, 3)[:, :, : self.width]

    def _key_map(self, tiles: Tensor) -> Tensor:
        """Sum what each tile has for a key: [groups, key rows, key columns, D] → [B, H, W, heads, D]."""
        tiles = tiles.unflatten(0, self.groups)[:, :, :, self.pad_rows[0] :][:, :, :, : self.height]
        whole = tiles[:, :, 0]
        if self.count > 1:
            columns = self.width + sum(self.pad_columns)
            whole = tiles.new_zeros(*tiles.shape[:2], self.height, columns, self.dim)
            for i in range(self.count):
                start = i * self.tile_columns
                whole[:, :, :, start : start + self.key_columns] += tiles[:, :, i]
        return whole[:, :, :, self.pad_columns[0] :][:, :, :, : self.width].permute(0, 2, 3, 1, 4)


def _to_band(taps: Tensor) -> Tensor:
    """Move tap t of query i to key i + t: [..., n, taps] → [..., n, n + taps − 1], −large elsewhere.

    One pad and two views: rows one longer than they are read shift by one each.
    """
    n, size = taps.shape[-2:]
    if n == 1:
        return taps
    return F.pad(taps, (0, n), value=MASKED).flatten(-2)[..., : n * (n + size - 1)].unflatten(-1, (n, n + size - 1))


def _from_band(band: Tensor, size: int) -> Tensor:
    """Take tap t of query i from key i + t: [..., n, n + taps − 1] → [..., n, taps]."""
    n = band.shape[-2]
    if n == 1:
        return band
    return F.pad(band.flatten(-2), (0, n)).unflatten(-1, (n, n + size))[..., :size]
