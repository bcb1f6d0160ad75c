"""Global attention with two-dimensional relative positions, one row of queries at a time: what large maps need on a CPU.

    y_i = Σ_j softmax_j( q_i·k_j + q_i·r^row_{y_j−y_i} + q_i·r^col_{x_j−x_i} ) v_j

The queries of one row share their row offsets, so all their position logits are two small products. They meet the rows of keys
a few at a time, and the softmax is carried along; nothing of n×n exists, n·(H + W) neither. The backward computes the
weights again. The work of the products is n²·d, where positions appended to q and k make it n²·(d + H + W).

Measured, forward and backward of the layer, 8 heads, d = 20, one image, ms of CPU time of one thread, beside torch's fused
attention with the positions appended (AMD EPYC, torch 2.15, float32, 15 November 2026, best of 3, alternating): 28×28 58 and 75,
46×46 395 and 761, 56×56 827 and 1873, 47×91 1501 and 3941.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.ops.dispatch import full_precision, refuse_second_derivatives

__all__ = ["MASKED_LOGIT", "attend_by_rows", "backward_by_rows", "forward_by_rows"]

# Added to the logit of a masked key; its exponential is 0 in every dtype, and float16 still holds it.
MASKED_LOGIT = -3e4
# Logits held at a time, all heads counted: 4 MB. A quarter or four times as many are up to 15 % slower.
BLOCK = 1 << 20


def attend_by_rows(
    q: Tensor, k: Tensor, v: Tensor, rel_row: Tensor, rel_col: Tensor, key_mask: Tensor | None = None
) -> Tensor:
    """Every pixel attends to every pixel, by content and by relative position: [B, H, W, heads, Dv].

    Args:
        q, k: [B, H, W, heads, D]; q is already divided by √D.
        v: [B, H, W, heads, Dv].
        rel_row, rel_col: [heads or 1, 2·H − 1, D] and [heads or 1, 2·W − 1, D], the embedding of offset o at o + H − 1 and
            o + W − 1.
        key_mask: bool [B, H, W], True where a pixel may be attended. An image with nothing to attend to attends to
            everything alike.

    >>> import torch
    >>> q, v = torch.randn(2, 5, 7, 3, 4), torch.randn(2, 5, 7, 3, 1)
    >>> attend_by_rows(q, q, v, torch.randn(1, 9, 4), torch.randn(1, 13, 4)).shape
    torch.Size([2, 5, 7, 3, 1])
    """
    return relative_rows(q, k, v, rel_row, rel_col, key_mask)[0].to(v.dtype)


class _Map(NamedTuple):
    """One image's keys and values, heads first, and its mask as an addend."""

    keys: Tensor  # [heads, H·W, D]
    values: Tensor  # [heads, H·W, Dv + 1]: the last channel is 1, so that a weighted sum brings its weights' sum along
    mask: Tensor | None  # [H, W]


class _Rows:
    """The images of a call, and the logits of one row of queries with some rows of keys."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, rel_row: Tensor, rel_col: Tensor, key_mask: Tensor | None
    ) -> None:
        dtype = self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.batch, self.height, self.width, self.heads, self.dim = q.shape
        self.q, self.k, self.v = (t.to(dtype).permute(0, 1, 3, 2, 4) for t in (q, k, v))
        self.rel_row, self.rel_col = (t.to(dtype).expand(self.heads, -1, -1) for t in (rel_row, rel_col))
        self.mask = None if key_mask is None else (~key_mask).to(dtype) * MASKED_LOGIT

    def image(self, index: int) -> _Map:
        keys, values = (t[index].transpose(0, 1).flatten(1, 2) for t in (self.k, self.v))
        values = torch.cat([values, torch.ones_like(values[..., :1])], dim=-1)
        return _Map(keys, values, None if self.mask is None else self.mask[index])

    def offsets(self, y: int) -> slice:
        """Where `rel_row` holds the offsets of every row from row y."""
        return slice(self.height - 1 - y, 2 * self.height - 1 - y)

    def positions(self, q: Tensor, y: int) -> tuple[Tensor, Tensor]:
        """q·r of the queries [heads, W, D] of row y: [heads, W, H] and [heads, W, W]."""
        row = q @ self.rel_row[:, self.offsets(y)].transpose(1, 2)
        return row, self.by_column(q @ self.rel_col.transpose(1, 2))

    def by_column(self, offsets: Tensor) -> Tensor:
        """[heads, W, 2·W − 1], by offset → [heads, W, W], by column: a view, since each query starts one offset earlier."""
        width = self.width
        return offsets.as_strided((self.heads, width, width), (width * (2 * width - 1), 2 * width - 2, 1), width - 1)

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Some rows of keys, as rows and as pixels."""
        step = max(1, BLOCK // (self.heads * self.width**2))
        for first in range(0, self.height, step):
            rows = slice(first, min(first + step, self.height))
            yield rows, slice(rows.start * self.width, rows.stop * self.width)

    def logits(self, q: Tensor, row: Tensor, column: Tensor, image: _Map, rows: slice, pixels: slice) -> Tensor:
        """[heads, W, pixels]."""
        logits = torch.bmm(q, image.keys[:, pixels].transpose(1, 2)).unflatten(2, (-1, self.width))
        logits += row[:, :, rows, None]
        logits += column[:, :, None]
        if image.mask is not None:
            logits += image.mask[rows]
        return logits.flatten(2)


def forward_by_rows(
    q: Tensor, k: Tensor, v: Tensor, rel_row: Tensor, rel_col: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output [B, H, W, heads, Dv], and each query's largest logit and sum of exponentials below it, [B, H, 2, heads, W, 1].

    Both in float32 for half types: the backward takes differences of them.
    """
    call = _Rows(q, k, v, rel_row, rel_col, key_mask)
    out = torch.empty(v.shape, dtype=call.dtype, device=v.device)
    softmax = out.new_empty(call.batch, call.height, 2, call.heads, call.width, 1)
    for index in range(call.batch):
        image = call.image(index)
        for y in range(call.height):
            queries = call.q[index, y].contiguous()
            row, column = call.positions(queries, y)
            largest = torch.full_like(softmax[index, y, 0], float("-inf"))
            gathered = largest.new_zeros(call.heads, call.width, v.shape[-1] + 1)
            for rows, pixels in call.blocks():
                weights = call.logits(queries, row, column, image, rows, pixels)
                top = torch.maximum(largest, weights.amax(-1, keepdim=True))
                gathered.mul_(largest.sub_(top).exp_())
                gathered.baddbmm_(weights.sub_(top).exp_(), image.values[:, pixels])
                largest = top
            total = gathered[..., -1:]
            out[index, y] = (gathered[..., :-1] / total).transpose(0, 1)
            softmax[index, y, 0], softmax[index, y, 1] = largest, total
    return out, softmax


def backward_by_rows(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel_row: Tensor,
    rel_col: Tensor,
    key_mask: Tensor | None,
    out: Tensor,
    softmax: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and both tables."""
    call = _Rows(q, k, v, rel_row, rel_col, key_mask)
    of_q, of_k, of_v = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    of_rows, of_columns = (
        torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (call.rel_row, call.rel_col)
    )
    grad = grad.to(call.dtype)
    # How the loss answers to a weight is g·v − g·y; divided by the sum, so that exponentials can be the weights.
    upstream = torch.cat([grad, -(grad * out).sum(-1, keepdim=True)], dim=-1).transpose(2, 3) / softmax[:, :, 1]
    for index in range(call.batch):
        image = call.image(index)
        of_keys, of_values = torch.zeros_like(image.keys), torch.zeros_like(image.values[..., :-1])
        for y in range(call.height):
            queries, answer = call.q[index, y].contiguous(), upstream[index, y]
            row, column = call.positions(queries, y)
            largest = softmax[index, y, 0]
            of_row = torch.empty_like(row)
            by_offset = row.new_zeros(call.heads, call.width, 2 * call.width - 1)
            of_column = call.by_column(by_offset)
            of_queries = torch.zeros_like(queries)
            for rows, pixels in call.blocks():
                weights = call.logits(queries, row, column, image, rows, pixels).sub_(largest).exp_()
                of_values[:, pixels].baddbmm_(weights.transpose(1, 2), answer[..., :-1])
                of_logits = torch.bmm(answer, image.values[:, pixels].transpose(1, 2)).mul_(weights)
                of_queries.baddbmm_(of_logits, image.keys[:, pixels])
                of_keys[:, pixels].baddbmm_(of_logits.transpose(1, 2), queries)
                of_pixels = of_logits.unflatten(2, (-1, call.width))
                of_row[:, :, rows] = of_pixels.sum(3)
                of_column += of_pixels.sum(2)
            here = call.offsets(y)
            of_queries.baddbmm_(of_row, call.rel_row[:, here]).baddbmm_(by_offset, call.rel_col)
            of_rows[:, here].baddbmm_(of_row.transpose(1, 2), queries)
            of_columns.baddbmm_(by_offset.transpose(1, 2), queries)
            of_q[index, y] = of_queries.transpose(0, 1)
        size = (call.heads, call.height, call.width, -1)
        of_k[index] = of_keys.view(size).permute(1, 2, 0, 3)
        of_v[index] = of_values.view(size).permute(1, 2, 0, 3)
    tables = (
        of_table.sum_to_size(table.shape).to(table.dtype)
        for of_table, table in ((of_rows, rel_row), (of_columns, rel_col))
    )
    return of_q, of_k, of_v, *tables  # type: ignore[return-value]


@torch.library.custom_op("nearsight::relative_rows", mutates_args=())
def relative_rows(
    q: Tensor, k: Tensor, v: Tensor, rel_row: Tensor, rel_col: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    with full_precision(q):
        return forward_by_rows(q, k, v, rel_row, rel_col, key_mask)


@torch.library.custom_op("nearsight::relative_rows_backward", mutates_args=())
def relative_rows_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel_row: Tensor,
    rel_col: Tensor,
    key_mask: Tensor | None,
    out: Tensor,
    softmax: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with full_precision(q):
        return backward_by_rows(grad, q, k, v, rel_row, rel_col, key_mask, out, softmax)


@relative_rows.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, rel_row: Tensor, rel_col: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, height, width, heads, _ = q.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return v.new_empty(v.shape, dtype=dtype), v.new_empty(batch, height, 2, heads, width, 1, dtype=dtype)


@relative_rows_backward.register_fake
def _(grad: Tensor, *inputs: Any) -> Any:
    return tuple(t.new_empty(t.shape) for t in inputs[:5])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *relative_rows_backward(grad, *ctx.saved_tensors), None


relative_rows.register_autograd(_backward, setup_context=_setup_context)
refuse_second_derivatives(
    "RelativeAttention2d", relative_rows_backward, "use torch.func.grad twice, under sdpa_kernel(SDPBackend.MATH)"
)
