"""QnA's aggregation on planes: every channel one long row of pixels, so that a tap of all windows is one slice.

The images of a batch lie one after the other in a plane, each padded so that every tap of every window exists; outside the
image scores are −∞ and values 0. Pixel (y, x) of output image b sits at b·P + y·pitch + x of its plane, and what a tap sees there
lies a constant shift further on: one slice of the input's plane, in one piece. With stride s the input is first dealt out
into the s² planes of every s-th pixel. Windows that wrap around a row's end are computed too and never read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nearsight.ops.windows import window_padding

__all__ = ["Gradients", "Pieces", "aggregate", "aggregate_backward"]

# Numbers a piece of the planes may hold at once: on a CPU about what its cache holds, elsewhere enough to fill the machine.
BUDGET_CPU, BUDGET = 1 << 20, 1 << 24


class Gradients(NamedTuple):
    """Each in the shape of its input; tables [kh, kw, L, heads] or None."""

    scores: Tensor
    values: Tensor
    position_bias: Tensor | None
    tap_scale: Tensor | None


class _Axis(NamedTuple):
    """One axis of the layout: `size` pixels in, `out` windows, dealt out into `phases` planes of `pitch` pixels."""

    size: int
    taps: int
    stride: int

    @property
    def out(self) -> int:
        return -(-self.size // self.stride)

    @property
    def phases(self) -> int:
        return min(self.stride, self.taps)

    @property
    def pitch(self) -> int:
        return self.out + (self.taps - 1) // self.stride

    def piece(self, phase: int) -> tuple[slice, slice]:
        """Which pixels belong to a phase, and where in its plane they go."""
        before = window_padding(self.taps)[0]
        first = max(0, -(-(before - phase) // self.stride))
        start = first * self.stride + phase - before
        count = max(0, min(len(range(start, self.size, self.stride)), self.pitch - first))
        return slice(start, start + count * self.stride, self.stride), slice(first, first + count)


class _Layout:
    """Where every pixel of [B, H, W] lies in the planes."""

    def __init__(self, batch: int, size: tuple[int, int], window: tuple[int, int], stride: tuple[int, int]) -> None:
        self.batch = batch
        self.rows, self.columns = (_Axis(*axis) for axis in zip(size, window, stride, strict=True))
        self.length = batch * self.rows.pitch * self.columns.pitch
        self.taps = [
            (
                ty % stride[0] * self.columns.phases + tx % stride[1],
                ty // stride[0] * self.columns.pitch + tx // stride[1],
            )
            for ty in range(window[0])
            for tx in range(window[1])
        ]
        self.span = self.length - max(shift for _, shift in self.taps)

    def phases(self) -> Iterator[tuple[int, tuple[slice, slice], tuple[slice, slice]]]:
        for py in range(self.rows.phases):
            for px in range(self.columns.phases):
                (rows, to_rows), (columns, to_columns) = self.rows.piece(py), self.columns.piece(px)
                yield py * self.columns.phases + px, (rows, columns), (to_rows, to_columns)

    def _maps(self, planes: Tensor) -> Tensor:
        return planes.unflatten(-1, (self.batch, self.rows.pitch, self.columns.pitch))

    def inputs(self, x: Tensor, dtype: torch.dtype, fill: float) -> Tensor:
        """[B, H, W, …] → [channels, phases, length]."""
        flat = x.flatten(3)
        planes = torch.full(
            (flat.shape[3], self.rows.phases * self.columns.phases, self.length), fill, dtype=dtype, device=x.device
        )
        maps = self._maps(planes)
        for phase, (rows, columns), (to_rows, to_columns) in self.phases():
            maps[:, phase, :, to_rows, to_columns] = flat[:, rows, columns].permute(3, 0, 1, 2)
        return planes

    def input_gradient(self, planes: Tensor, like: Tensor) -> Tensor:
        """[channels, phases, length] → [B, H, W, …], 0 where no window looks."""
        new = torch.empty if self.rows.stride == self.columns.stride == 1 else torch.zeros
        out = new(like.shape, dtype=like.dtype, device=like.device)
        flat, maps = out.flatten(3), self._maps(planes)
        for phase, (rows, columns), (to_rows, to_columns) in self.phases():
            flat[:, rows, columns] = maps[:, phase, :, to_rows, to_columns].permute(1, 2, 3, 0)
        return out

    def windows(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A gradient [B, H', W', …] → [channels, length], 0 between the images and at the ends of their rows."""
        flat = x.flatten(3)
        planes = torch.zeros((flat.shape[3], self.length), dtype=dtype, device=x.device)
        self._maps(planes)[:, :, : self.rows.out, : self.columns.out] = flat.permute(3, 0, 1, 2)
        return planes

    def outputs(self, planes: Tensor, out: Tensor) -> Tensor:
        """[channels, length] into [B, H', W', …]."""
        out.flatten(3).copy_(self._maps(planes)[:, :, : self.rows.out, : self.columns.out].permute(1, 2, 3, 0))
        return out


class Pieces:
    """The inputs of a call as planes, and the softmax of one piece of them at a time."""

    def __init__(
        self,
        scores: Tensor,
        values: Tensor,
        position_bias: Tensor | None,
        tap_scale: Tensor | None,
        key_mask: Tensor | None,
        window: tuple[int, int],
        stride: tuple[int, int],
        stack: bool,
        dtype: torch.dtype,
    ) -> None:
        batch, height, width, queries, heads = scores.shape
        self.layout = _Layout(batch, (height, width), window, stride)
        self.queries, self.heads, self.dim = queries, heads, values.shape[-1]
        self.kept = queries if stack else 1
        if key_mask is not None:
            scores = scores.masked_fill(~key_mask[..., None, None], float("-inf"))
        self.scores = self.layout.inputs(scores, dtype, float("-inf")).unflatten(0, (queries, heads))
        self.values = self.layout.inputs(values, dtype, 0.0).unflatten(0, (heads, self.dim))
        # [taps, L, heads, 1]
        self.bias, self.scale = (
            None if table is None else table.to(dtype).flatten(0, 1)[..., None] for table in (position_bias, tap_scale)
        )

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Stretches [start, end) of the planes."""
        held = self.heads * (3 * len(self.layout.taps) * self.queries + 3 * self.dim * self.kept)
        budget = BUDGET_CPU if self.values.device.type == "cpu" else BUDGET
        pieces = -(-self.layout.span * held // budget)
        length = max(1, -(-self.layout.span // max(1, pieces)))
        for start in range(0, self.layout.span, length):
            yield start, min(start + length, self.layout.span)

    def slices(self, planes: Tensor, start: int, end: int) -> Iterator[Tensor]:
        """What each tap sees of the planes [..., phases, length]."""
        for phase, shift in self.layout.taps:
            yield planes[..., phase, start + shift : end + shift]

    def softmax(self, start: int, end: int) -> Tensor:
        """[taps, L, heads, pixels]; all 0 where a window sees nothing."""
        weights = self.scores.new_empty(len(self.layout.taps), self.queries, self.heads, end - start)
        for tap, seen in enumerate(self.slices(self.scores, start, end)):
            if self.bias is None:
                weights[tap] = seen
            else:
                torch.add(seen, self.bias[tap], out=weights[tap])
        # A window that sees nothing has the maximum −∞; any finite one leaves its weights exp(−∞) = 0.
        largest = weights.amax(0).clamp_(min=torch.finfo(weights.dtype).min)
        weights.sub_(largest).exp_()
        # The largest weight is 1, so the sum is at least 1 unless the window sees nothing.
        return weights.div_(weights.sum(0).clamp_(min=1.0))

    def acting(self, weights: Tensor) -> Tensor:
        """What multiplies the values: [taps, L or 1, heads, pixels]."""
        if self.scale is not None:
            weights = weights * self.scale
        return weights if self.kept == self.queries else weights.sum(1, keepdim=True)


def aggregate(pieces: Pieces, out: Tensor) -> Tensor:
    """Fill out [B, H', W', (L,) heads, D]."""
    planes = pieces.values.new_empty(pieces.kept, pieces.heads, pieces.dim, pieces.layout.length)
    for start, end in pieces:
        acting = pieces.acting(pieces.softmax(start, end))[:, :, :, None]
        here = planes[..., start:end]
        for tap, seen in enumerate(pieces.slices(pieces.values, start, end)):
            if tap == 0:
                torch.mul(acting[tap], seen, out=here)
            else:
                here.addcmul_(acting[tap], seen)
    return pieces.layout.outputs(planes.flatten(0, 2), out)


def aggregate_backward(pieces: Pieces, grad: Tensor, scores: Tensor, values: Tensor) -> Gradients:
    """Gradients of everything, by computing the weights again. `scores` and `values` say shapes and dtypes."""
    layout, dtype = pieces.layout, pieces.values.dtype
    upstream = layout.windows(grad, dtype).unflatten(0, (pieces.kept, pieces.heads, pieces.dim))
    grad_scores, grad_values = torch.zeros_like(pieces.scores), torch.zeros_like(pieces.values)
    shape = (len(layout.taps), pieces.queries, pieces.heads)
    grad_bias, grad_scale = (
        None if table is None else torch.zeros(shape, dtype=torch.float64, device=grad.device)
        for table in (pieces.bias, pieces.scale)
    )
    for start, end in pieces:
        weights = pieces.softmax(start, end)
        acting = pieces.acting(weights)[:, :, :, None]
        here = upstream[..., start:end]
        # How the loss answers to each acting weight.
        answer = acting.new_empty(len(layout.taps), pieces.kept, pieces.heads, end - start)
        product = torch.empty_like(here, memory_format=torch.contiguous_format)
        seen = pieces.slices(pieces.values, start, end)
        seen_gradient = pieces.slices(grad_values, start, end)
        for tap, (value, value_gradient) in enumerate(zip(seen, seen_gradient, strict=True)):
            torch.mul(here, value, out=product)
            torch.sum(product, 2, out=answer[tap])
            for kept in range(pieces.kept):
                value_gradient.addcmul_(acting[tap, kept], here[kept])
        if grad_scale is not None:
            grad_scale += (weights * answer).sum(-1)
        inner = answer * pieces.scale if pieces.scale is not None else answer.expand_as(weights).clone()
        # The difference first: where one tap has all the weight, it is exactly 0.
        inner.sub_((weights * inner).sum(0)).mul_(weights)
        if grad_bias is not None:
            grad_bias += inner.sum(-1)
        for tap, score_gradient in enumerate(pieces.slices(grad_scores, start, end)):
            score_gradient += inner[tap]
    return Gradients(
        layout.input_gradient(grad_scores.flatten(0, 1), scores),
        layout.input_gradient(grad_values.flatten(0, 1), values),
        grad_bias,
        grad_scale,
    )
