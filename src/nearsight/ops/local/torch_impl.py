"""Local attention without Triton: a registered operator around the tiles, and its gradient, which computes them again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nearsight.ops.dispatch import exporting, refuse_second_derivatives, transform_refusal
from nearsight.ops.local import export_form
from nearsight.ops.local.call import OP, LocalCall
from nearsight.ops.local.tiles import Tiles, make_plan

__all__ = ["refusal", "run"]

# Logits held at once: on a CPU about what its cache holds, elsewhere enough to fill the machine.
BUDGET_CPU, BUDGET = 1 << 18, 1 << 24


def refusal(call: LocalCall) -> str | None:
    """Why the operator cannot run this call, or None."""
    return None if exporting() else transform_refusal()


def run(call: LocalCall) -> Tensor:
    if exporting():
        return export_form.run(call)
    return local_attention_tiles(
        call.q,
        call.k,
        call.v,
        call.rel_row,
        call.rel_col,
        call.key_mask,
        list(call.window),
        list(call.dilation),
        call.border == "zeros",
        call.scale,
    )


@torch.library.custom_op("nearsight::local_attention_tiles", mutates_args=())
def local_attention_tiles(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    rel_row: Tensor | None,
    rel_col: Tensor | None,
    key_mask: Tensor | None,
    window: list[int],
    dilation: list[int],
    zeros: bool,
    scale: float,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        for index, tiles in _pieces(q, k, v, rel_row, rel_col, key_mask, window, dilation, zeros, scale):
            out[index] = tiles.forward()
    return out


@torch.library.custom_op("nearsight::local_attention_tiles_backward", mutates_args=())
def local_attention_tiles_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    rel_row: Tensor | None,
    rel_col: Tensor | None,
    key_mask: Tensor | None,
    window: list[int],
    dilation: list[int],
    zeros: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, rel_row and rel_col; empty for what was not given."""
    grad_q, grad_k, grad_v, _, _ = _like_inputs(q, k, rel_row, rel_col)
    wide = _compute_dtype(q)
    tables = [None if t is None else torch.zeros(t.shape, dtype=wide, device=q.device) for t in (rel_row, rel_col)]
    with torch.autocast(q.device.type, enabled=False):
        for index, tiles in _pieces(q, k, v, rel_row, rel_col, key_mask, window, dilation, zeros, scale):
            piece = tiles.backward(grad[index])
            grad_q[index], grad_v[index] = piece.q, piece.v
            if piece.k is not None:
                grad_k[index] = piece.k
            for total, table in zip(tables, (piece.rel_row, piece.rel_col), strict=True):
                if total is not None and table is not None:
                    total += table.sum_to_size(total.shape)
    grad_row, grad_col = (q.new_empty(0) if t is None else t.to(q.dtype) for t in tables)
    return grad_q, grad_k, grad_v, grad_row, grad_col


@local_attention_tiles.register_fake
def _(q: Tensor, *rest: Any) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@local_attention_tiles_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor | None, v: Tensor, rel_row: Tensor | None, rel_col: Tensor | None, *rest: Any
) -> Any:
    return _like_inputs(q, k, rel_row, rel_col)


def _like_inputs(q: Tensor, k: Tensor | None, rel_row: Tensor | None, rel_col: Tensor | None) -> tuple[Tensor, ...]:
    shapes = (
        q.shape,
        None if k is None else q.shape,
        q.shape,
        *(None if t is None else t.shape for t in (rel_row, rel_col)),
    )
    return tuple(torch.empty(0 if s is None else s, dtype=q.dtype, device=q.device) for s in shapes)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grads = local_attention_tiles_backward(grad, *tensors, *ctx.options)
    return *(None if t is None else g for t, g in zip(tensors[:5], grads, strict=True)), *(None,) * 5


local_attention_tiles.register_autograd(_backward, setup_context=_setup_context)
refuse_second_derivatives(OP, local_attention_tiles_backward)


def _compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _pieces(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    rel_row: Tensor | None,
    rel_col: Tensor | None,
    key_mask: Tensor | None,
    window: list[int],
    dilation: list[int],
    zeros: bool,
    scale: float,
) -> Iterator[tuple[Any, Tiles]]:
    """A few images of one interleaved map at a time: with dilation d, every d-th pixel sees only every d-th pixel."""
    if q.numel() == 0:
        return
    size = (window[0], window[1])
    # A table of one tap adds the same to every logit of a query, which the softmax takes out again.
    rel_row = None if size[0] == 1 else rel_row
    rel_col = None if size[1] == 1 else rel_col
    for row in range(dilation[0]):
        for column in range(dilation[1]):
            part = (slice(row, None, dilation[0]), slice(column, None, dilation[1]))
            batch, height, width, heads, _ = q[:, part[0], part[1]].shape
            if height == 0 or width == 0:
                continue
            budget = BUDGET_CPU if q.device.type == "cpu" else BUDGET
            plan = make_plan(batch, height, width, heads, size, zeros, budget)
            for start in range(0, batch, plan.images):
                index = (slice(start, start + plan.images), *part)
                yield (
                    index,
                    Tiles(
                        q[index],
                        None if k is None else k[index],
                        v[index],
                        rel_row,
                        rel_col,
                        None if key_mask is None else key_mask[index],
                        window=size,
                        zeros=zeros,
                        scale=scale,
                        plan=plan,
                        dtype=_compute_dtype(q),
                    ),
                )
