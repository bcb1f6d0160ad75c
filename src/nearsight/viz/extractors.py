"""How each kind of attention layer gives its weights: of some queries, and what every pixel receives from all of them.

The layers' own projections and the ops' own weight functions are asked, for the windows that are wanted alone; nothing here
knows an equation. Weights are float32 (float64 where the layer computes in that).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nearsight.layers import AttentionStem2d, ExplicitAttention2d, LocalAttention2d, QnA2d, QnAUpsample2d
from nearsight.layers import WindowAttention2d as Window2d
from nearsight.layers.relative_attention import RelativeAttention2d
from nearsight.ops import explicit_weights, local_attention_weights, qna_weights
from nearsight.ops.dispatch import full_precision
from nearsight.ops.windows import tap_offsets, window_padding

__all__ = ["EXTRACTORS", "Extractor", "Given", "extractor_of"]

Pair = tuple[int, int]
# Numbers held at once while summing what is received: 32 MB of float32.
BUDGET = 1 << 23


class Given(NamedTuple):
    """What N queries give to the pixels of a map.

    weights [B, N, heads, h, w] act on the values; softmax [B, N, L, heads, h, w] is before QnA's tap scale and for each of
    its L learned queries (elsewhere L = 1 and both are the same); outside [B, N, heads] is the softmax mass on padding.
    """

    weights: Tensor
    softmax: Tensor
    outside: Tensor


class Extractor:
    """Weights of one kind of layer; maps x are the layer's input [B, C, h, w], cells are (y, x) on its query grid."""

    kind: str

    def heads(self, layer: Any) -> int:
        return int(layer.num_heads)

    def query_grid(self, layer: Any, size: Pair) -> Pair:
        """Queries per axis, before any pooling, for an input map of `size`."""
        return size

    def centre(self, layer: Any, cell: Pair) -> Pair:
        """The pixel of the input map at which a query stands."""
        return cell

    def has_parts(self, layer: Any) -> bool:
        """Whether logits are a content and a position term, so that content alone is something to show."""
        return False

    def given(self, layer: Any, x: Tensor, key_mask: Tensor | None, cells: Sequence[Pair], position: bool) -> Given:
        raise TypeError(f"{type(self).__name__} gives no weights")

    def received(self, layer: Any, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """Σ over all queries of their softmax at each pixel, [B, heads, h, w]."""
        raise TypeError(f"{type(self).__name__} receives nothing")

    def kernels(self, layer: Any, x: Tensor, key_mask: Tensor | None) -> Tensor | None:
        """Every window's weights as they act, [B, rows, columns, heads, kh, kw]; None for layers without windows of taps."""
        return None


class Taps(NamedTuple):
    """Where the windows of a layer lie."""

    window: Pair
    dilation: Pair
    stride: Pair

    def slab(self, axis: int, first: int, last: int, size: int) -> Pair:
        """Pixels [start, end) of an axis that hold all taps of the queries first…last; start is a query's own pixel."""
        before, after = window_padding(self.window[axis], self.dilation[axis])
        step = self.stride[axis]
        start = max(0, first * step - before)
        return start - start % step, min(size, last * step + after + 1)


class _Windowed(Extractor):
    """Layers whose every query sees a window around its own pixel; the work is done on the slab such windows cover."""

    def taps(self, layer: Any) -> Taps:
        return Taps(layer.kernel_size, (1, 1), (1, 1))

    def project(self, layer: Any, x: Tensor) -> list[Tensor | None]:
        """What the weights are made from, each [B, h, w, …]."""
        return []

    def windows(self, layer: Any, parts: list[Tensor | None], key_mask: Tensor | None, position: bool) -> Tensor:
        """Softmax over the taps of every window of a slab: [B, rows, columns, L, heads, kh·kw]."""
        return torch.empty(0)

    def tap_scale(self, layer: Any) -> Tensor | None:
        """What the softmax is multiplied with before it meets the values: [L, heads, kh·kw] or None."""
        return None

    def locate(self, layer: Any, cell: Pair) -> tuple[Pair, slice]:
        """A query cell's window and which of the layer's learned queries it is."""
        return cell, slice(None)

    def _slab(
        self,
        layer: Any,
        parts: list[Tensor | None],
        key_mask: Tensor | None,
        rows: Pair,
        columns: Pair,
        position: bool,
    ) -> Tensor:
        """Softmax of the windows in rows first…last and columns first…last."""
        taps = self.taps(layer)
        first = next(part for part in parts if part is not None)
        top, bottom = taps.slab(0, *rows, first.shape[1])
        left, right = taps.slab(1, *columns, first.shape[2])
        cut = [None if part is None else part[:, top:bottom, left:right] for part in parts]
        mask = None if key_mask is None else key_mask[:, top:bottom, left:right]
        with full_precision(first):
            found = self.windows(layer, cut, mask, position)
        y, x = rows[0] - top // taps.stride[0], columns[0] - left // taps.stride[1]
        return found[:, y : y + rows[1] - rows[0] + 1, x : x + columns[1] - columns[0] + 1]

    def given(self, layer: Any, x: Tensor, key_mask: Tensor | None, cells: Sequence[Pair], position: bool) -> Given:
        parts, taps = self.project(layer, x), self.taps(layer)
        scale = self.tap_scale(layer)
        (batch, _, height, width), heads, (kh, kw) = x.shape, self.heads(layer), taps.window
        seen: list[Tensor] = []
        acting: list[Tensor] = []
        outside: list[Tensor] = []
        for cell in cells:
            (row, column), query = self.locate(layer, cell)
            weights = self._slab(layer, parts, key_mask, (row, row), (column, column), position)[:, 0, 0, query]
            scaled = weights if scale is None else weights * scale[query].to(weights)
            lines = row * taps.stride[0] + torch.tensor(tap_offsets(kh, taps.dilation[0]), device=x.device)
            places = column * taps.stride[1] + torch.tensor(tap_offsets(kw, taps.dilation[1]), device=x.device)
            line_in, place_in = (lines >= 0) & (lines < height), (places >= 0) & (places < width)
            inside = (line_in[:, None] & place_in).flatten()
            at = (lines[line_in][:, None] * width + places[place_in]).flatten()
            for into, taken in ((seen, weights), (acting, scaled.sum(1))):
                empty = taken.new_zeros(*taken.shape[:-1], height * width)
                empty[..., at] = taken[..., inside]
                into.append(empty.unflatten(-1, (height, width)))
            outside.append(weights[..., ~inside].sum((1, 3)))
        if not cells:
            none = x.new_zeros(batch, 0, heads, height, width, dtype=_wide(x))
            return Given(none, none[:, :, None], none[..., 0, 0])
        return Given(*(torch.stack(part, 1) for part in (acting, seen, outside)))

    def kernels(self, layer: Any, x: Tensor, key_mask: Tensor | None) -> Tensor:
        parts, taps, scale = self.project(layer, x), self.taps(layer), self.tap_scale(layer)
        last = [-(-size // step) - 1 for size, step in zip(x.shape[2:], taps.stride, strict=True)]
        found = self._slab(layer, parts, key_mask, (0, last[0]), (0, last[1]), True)
        acting = found if scale is None else found * scale.to(found)
        return acting.sum(3).unflatten(-1, taps.window)

    def received(self, layer: Any, x: Tensor, key_mask: Tensor | None) -> Tensor:
        parts, taps = self.project(layer, x), self.taps(layer)
        (batch, _, height, width), heads, (kh, kw) = x.shape, self.heads(layer), taps.window
        (top, bottom), (left, right) = (window_padding(taps.window[a], taps.dilation[a]) for a in (0, 1))
        rows, columns = (-(-n // s) for n, s in zip((height, width), taps.stride, strict=True))
        total = x.new_zeros(batch, heads, top + height + bottom, left + width + right, dtype=_wide(x))
        per_row = max(
            1, batch * columns * kh * kw * max(math.prod(part.shape[3:]) for part in parts if part is not None)
        )
        step = max(1, BUDGET // per_row - kh)
        for first in range(0, rows, step):
            last = min(first + step, rows) - 1
            found = self._slab(layer, parts, key_mask, (first, last), (0, columns - 1), True)
            found = found.sum(3).movedim(3, 1)  # [B, heads, rows, columns, taps]
            for tap in range(kh * kw):
                y = tap // kw * taps.dilation[0] + first * taps.stride[0]
                z = tap % kw * taps.dilation[1]
                into = total[:, :, y : y + (last - first) * taps.stride[0] + 1 : taps.stride[0]]
                into[..., z : z + (columns - 1) * taps.stride[1] + 1 : taps.stride[1]] += found[..., tap]
        return total[:, :, top : top + height, left : left + width]


class _Local(_Windowed):
    kind = "local"

    def taps(self, layer: LocalAttention2d) -> Taps:
        return Taps(layer.kernel_size, layer.dilation, (1, 1))

    def has_parts(self, layer: LocalAttention2d) -> bool:
        return layer.content and layer.position == "relative"

    def project(self, layer: LocalAttention2d, x: Tensor) -> list[Tensor | None]:
        q, k, _ = layer.project(x)
        return [t if t is None else t.to(_wide(t)) for t in (q, k)]

    def windows(
        self, layer: LocalAttention2d, parts: list[Tensor | None], key_mask: Tensor | None, position: bool
    ) -> Tensor:
        q, k = parts
        assert q is not None
        rows, columns = (t if t is None or not position else t.to(q.dtype) for t in (layer.rel_row, layer.rel_col))
        weights = local_attention_weights(
            q,
            k,
            window=layer.kernel_size,
            rel_row=rows if position else None,
            rel_col=columns if position else None,
            key_mask=key_mask,
            dilation=layer.dilation,
            border=layer.border,
        )
        return weights[:, :, :, None]


class _QnA(_Windowed):
    kind = "qna"

    def taps(self, layer: Any) -> Taps:
        return Taps(layer.kernel_size, (1, 1), getattr(layer, "stride", (1, 1)))

    def query_grid(self, layer: QnA2d, size: Pair) -> Pair:
        return -(-size[0] // layer.stride[0]), -(-size[1] // layer.stride[1])

    def centre(self, layer: QnA2d, cell: Pair) -> Pair:
        return cell[0] * layer.stride[0], cell[1] * layer.stride[1]

    def has_parts(self, layer: Any) -> bool:
        return bool(layer.position != "none")

    def project(self, layer: Any, x: Tensor) -> list[Tensor | None]:
        return [layer.project(x)[0]]

    def windows(self, layer: Any, parts: list[Tensor | None], key_mask: Tensor | None, position: bool) -> Tensor:
        (scores,) = parts
        assert scores is not None
        bias = layer.tables()[0] if position else None
        return qna_weights(
            scores,
            window=layer.kernel_size,
            stride=self.taps(layer).stride,
            position_bias=bias,
            key_mask=key_mask,
        )

    def tap_scale(self, layer: Any) -> Tensor | None:
        scale = layer.tables()[1]
        return None if scale is None else scale.flatten(0, 1).movedim(0, -1)


class _QnAUpsample(_QnA):
    kind = "qna_upsample"

    def query_grid(self, layer: Any, size: Pair) -> Pair:
        return size[0] * layer.scale_factor, size[1] * layer.scale_factor

    def centre(self, layer: Any, cell: Pair) -> Pair:
        return cell[0] // layer.scale_factor, cell[1] // layer.scale_factor

    def locate(self, layer: QnAUpsample2d, cell: Pair) -> tuple[Pair, slice]:
        s = layer.scale_factor
        query = cell[0] % s * s + cell[1] % s
        return self.centre(layer, cell), slice(query, query + 1)


class _Blocks(Extractor):
    """Layers that cut the map into windows whose pixels see each other; weights are as large as the layer's own."""

    def has_parts(self, layer: Any) -> bool:
        return getattr(layer, "position", "relative") == "relative"

    def given(self, layer: Any, x: Tensor, key_mask: Tensor | None, cells: Sequence[Pair], position: bool) -> Given:
        kh, kw = _sides(layer)
        (batch, _, height, width), heads = x.shape, self.heads(layer)
        out = x.new_zeros(batch, len(cells), heads, height, width, dtype=_wide(x))
        for number, (row, column) in enumerate(cells):
            top, left = row // kh * kh, column // kw * kw
            bottom, right = min(top + kh, height), min(left + kw, width)
            # What a query sees ends with its window, so the layer is asked about that window alone.
            crop = (slice(None), slice(top, bottom), slice(left, right))
            mask = None if key_mask is None else key_mask[crop]
            weights = self.weights(layer, x[:, :, top:bottom, left:right], mask, position)[:, 0, 0]
            seen = weights[:, :, (row - top) * kw + column - left].unflatten(-1, (kh, kw))
            out[:, number, :, top:bottom, left:right] = seen[..., : bottom - top, : right - left].to(out.dtype)
        return Given(out, out[:, :, None], out.new_zeros(out.shape[:3]))

    def received(self, layer: Any, x: Tensor, key_mask: Tensor | None) -> Tensor:
        kh, kw = _sides(layer)
        height, width = x.shape[2:]
        rows = torch.arange(-(-height // kh) * kh, device=x.device) < height
        columns = torch.arange(-(-width // kw) * kw, device=x.device) < width
        # Queries in the padding are cut off by the layer: they give nothing.
        real = (rows[:, None] & columns).unflatten(1, (-1, kw)).unflatten(0, (-1, kh)).transpose(1, 2).flatten(2)
        weights = self.weights(layer, x, key_mask, True).to(_wide(x))
        got = (weights * real[None, :, :, None, :, None]).sum(-2).unflatten(-1, (kh, kw))
        return got.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)[..., :height, :width]

    def weights(self, layer: Any, x: Tensor, key_mask: Tensor | None, position: bool) -> Tensor:
        found: Tensor = layer.attention_weights(x, key_mask, position=position)
        return found


class _Window(_Blocks):
    kind = "window"


class _Stem(_Blocks):
    kind = "stem"


class _Explicit(Extractor):
    kind = "explicit"

    def given(
        self,
        layer: ExplicitAttention2d,
        x: Tensor,
        key_mask: Tensor | None,
        cells: Sequence[Pair],
        position: bool,
        radius: float | Tensor | None = None,
    ) -> Given:
        heads = self.heads(layer)
        where = torch.tensor(cells, device=x.device, dtype=torch.long).view(-1, 2)
        rows = explicit_weights(
            (x.shape[2], x.shape[3]),
            kind=layer.kind,
            radius=layer.radius if radius is None else radius,
            offset=layer.offset,
            key_mask=key_mask,
            queries=where,
        )
        # Fixed kinds have no tensor of their own to say where they live.
        weights = rows.to(x.device, _wide(x)).expand(x.shape[0], -1, heads, -1, -1)
        return Given(weights, weights[:, :, None], weights.new_zeros(weights.shape[:3]))

    def received(self, layer: ExplicitAttention2d, x: Tensor, key_mask: Tensor | None) -> Tensor:
        return _sum_in_parts(self, layer, x, key_mask)


class _Global(Extractor):
    kind = "global"

    def has_parts(self, layer: RelativeAttention2d) -> bool:
        return True

    def given(
        self, layer: RelativeAttention2d, x: Tensor, key_mask: Tensor | None, cells: Sequence[Pair], position: bool
    ) -> Given:
        q, k, _ = layer.project(x, key_mask)
        wide = _wide(q)
        q, k = q.to(wide), k.to(wide)
        where = torch.tensor(cells, device=x.device, dtype=torch.long).view(-1, 2)
        y, z = where.unbind(1)
        with full_precision(x):
            positions = [t[:, :, y, z] for t in layer.position_logits(q)] if position else []
            weights = layer.weights_from(q[:, y, z], k, *positions, key_mask=key_mask)
        return Given(weights, weights[:, :, None], weights.new_zeros(weights.shape[:3]))

    def received(self, layer: RelativeAttention2d, x: Tensor, key_mask: Tensor | None) -> Tensor:
        return _sum_in_parts(self, layer, x, key_mask)


def _sum_in_parts(extractor: Extractor, layer: Any, x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Received attention where every query sees the whole map: some queries at a time, never all of them."""
    batch, _, height, width = x.shape
    heads = extractor.heads(layer)
    total = x.new_zeros(batch, heads, height, width, dtype=_wide(x))
    step = max(1, BUDGET // max(1, batch * heads * height * width))
    cells = [(i // width, i % width) for i in range(height * width)]
    for first in range(0, len(cells), step):
        total += extractor.given(layer, x, key_mask, cells[first : first + step], True).weights.sum(1)
    return total


def _sides(layer: Any) -> Pair:
    side = layer.kernel_size
    return (side, side) if isinstance(side, int) else side


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


EXTRACTORS: dict[type[nn.Module], Extractor] = {
    LocalAttention2d: _Local(),
    AttentionStem2d: _Stem(),
    QnA2d: _QnA(),
    QnAUpsample2d: _QnAUpsample(),
    Window2d: _Window(),
    ExplicitAttention2d: _Explicit(),
    RelativeAttention2d: _Global(),
}


def extractor_of(module: nn.Module) -> Extractor | None:
    """How a module's weights are had, or None when it is no attention layer of ours.

    >>> from nearsight import QnA2d
    >>> extractor_of(QnA2d(8, 8)).kind, extractor_of(nn.Conv2d(8, 8, 3))
    ('qna', None)
    """
    return next((EXTRACTORS[kind] for kind in type(module).__mro__ if kind in EXTRACTORS), None)
