"""Global attention with relative positions by Triton: what it refuses, the registered op and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearsight.ops.dispatch import refuse_second_derivatives
from nearsight.ops.first_calls import class_of, compile_together, gradient_traced, meta_like, stand_in, trains
from nearsight.ops.launching import replayed
from nearsight.ops.relative import launches, small
from nearsight.ops.relative.launches import RelativeCall, empty_outputs, make_call, padded
from nearsight.ops.triton_support import common_refusal, shared_memory

__all__ = ["longest_side", "refusal", "run"]

OP = "RelativeAttention2d"
WIDEST_HEAD = 128
# Bytes of one number per column, and of one embedding per column: a program holds a square of the former, and some of the latter.
LONGEST_SIDE, LARGEST_TABLE = 2**8, 2**14
# Bytes of shared memory that the largest maps take, as compiled: 152,000; those of half the side 92,000 (GPUs have 163,000 and
# more, or 101,000; AMD's 65,536).
LARGEST_ROOM, SMALLEST_ROOM = 152_000, 93_000


def refusal(packed: Tensor, height: int, width: int, dim: int, value_dim: int) -> str | None:
    """Why Triton cannot run this call, or None."""
    reason = common_refusal(packed)
    if reason is not None:
        return reason
    if not 1 <= dim <= WIDEST_HEAD or not 1 <= value_dim <= WIDEST_HEAD:
        return f"needs head dims from 1 to {WIDEST_HEAD}, got {dim} and {value_dim}"
    longest = longest_side(packed, dim)
    if max(height, width) > longest:
        dtype = str(packed.dtype).removeprefix("torch.")
        return f"needs maps of at most {longest} rows and columns at head dim {dim} in {dtype}, got {height}×{width}"
    return None


def longest_side(packed: Tensor, dim: int) -> int:
    """The most rows and columns of a map at this head dim, fewer on GPUs with less shared memory."""
    room = shared_memory(packed.device.index or 0) if packed.device.type == "cuda" else LARGEST_ROOM
    if room < SMALLEST_ROOM and padded(dim) > 32:
        return 0
    part = 1 if room >= LARGEST_ROOM else 2 if room >= SMALLEST_ROOM else 4
    return min(LONGEST_SIDE, LARGEST_TABLE // padded(dim)) // packed.element_size() // part


def run(
    packed: Tensor,
    rel_row: Tensor,
    rel_col: Tensor,
    key_mask: Tensor | None = None,
    *,
    heads: int,
    dim: int,
    scale: float = 1.0,
) -> Tensor:
    """Every pixel attends to every pixel, by content and by relative position: [B, H, W, heads, Dv].

        y_i = Σ_j softmax_j( scale·(q_i·k_j + q_i·r^row_{y_j−y_i} + q_i·r^col_{x_j−x_i}) ) v_j

    Args:
        packed: q, k and v of all heads side by side, [B, H, W, heads·(2·D + Dv)].
        rel_row, rel_col: [heads or 1, 2·H − 1, D] and [heads or 1, 2·W − 1, D], the embedding of offset o at o + H − 1 and
            o + W − 1.
        key_mask: bool [B, H, W], True where a pixel may be attended. An image with nothing to attend to attends to
            everything alike.
        heads, dim: the heads, and D.
    """
    height, width = packed.shape[1:3]
    out, _ = _forward_op(packed.flatten(1, 2), rel_row, rel_col, key_mask, heads, dim, height, scale)
    return out.unflatten(2, (heads, packed.shape[3] // heads - 2 * dim)).unflatten(1, (height, width))


def _by_offset(pairs: Tensor) -> Tensor:
    """[heads, L, L, D], by line of the query and of the key → [heads, 2·L − 1, D], summed by offset."""
    lines = pairs.shape[1]
    # Written one below the other with a period of 2·L − 1, line l starts at L − 1 − l: where offset −l belongs.
    wide = torch.nn.functional.pad(pairs.flip(1), (0, 0, 0, lines)).flatten(1, 2)
    return wide[:, : lines * (2 * lines - 1)].unflatten(1, (lines, 2 * lines - 1)).sum(1)


def _tables(found: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Of rows and of columns by offset, from what the launches leave: that, or what lines of queries and keys have."""
    sides = (height, width)
    if found.shape[1] == 2 * height + 2 * width - 2:
        of_row, of_col = found.split([2 * s - 1 for s in sides], 1)
        return of_row, of_col
    of_row, of_col = (
        _by_offset(part.unflatten(1, (s, s)))
        for s, part in zip(sides, found.split([s * s for s in sides], 1), strict=True)
    )
    return of_row, of_col


def _of_table(found: Tensor, table: Tensor) -> Tensor:
    # On a map of one row or column all keys have the one offset; what all logits share has no gradient but rounding's.
    found = found if table.shape[1] > 1 else torch.zeros_like(found)
    return found.sum_to_size(table.shape).to(table.dtype)


@torch.library.custom_op("nearsight::relative_attention_triton", mutates_args=())
@replayed
def _forward_op(
    packed: Tensor,
    rel_row: Tensor,
    rel_col: Tensor,
    key_mask: Tensor | None,
    heads: int,
    dim: int,
    height: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """packed [B, n, heads·(2·D + Dv)] → [B, n, heads·Dv], and log₂ Σ 2^logit, [B, heads, n] (float32: two numbers)."""
    call = make_call(packed, rel_row, rel_col, key_mask, heads, dim, height, scale)
    if packed.numel():
        wanted = trains(OP, (packed, rel_row, rel_col))
        compile_together(class_of(OP, *call, wanted), lambda: _compile(call, wanted))
    found: tuple[Tensor, Tensor] = _kernels_of(call).attend(call)
    return found


def _kernels_of(call: RelativeCall) -> Any:
    """The module that launches them."""
    return small if small.fits(call) else launches


def _compile(call: RelativeCall, gradients: bool) -> None:
    call = stand_in(call)
    out, lse = _kernels_of(call).attend(call)
    if gradients:
        _kernels_of(call).gradients(call, out, out, lse)


@_forward_op.register_fake
def _(
    packed: Tensor, rel_row: Tensor, rel_col: Tensor, key_mask: Tensor | None, heads: int, dim: int, *_: Any
) -> tuple[Tensor, Tensor]:
    return empty_outputs(packed, heads, dim)


@torch.library.custom_op("nearsight::relative_attention_triton_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    packed: Tensor,
    rel_row: Tensor,
    rel_col: Tensor,
    key_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    heads: int,
    dim: int,
    height: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of packed, rel_row and rel_col."""
    if grad.numel() == 0:
        return packed.new_zeros(packed.shape), torch.zeros_like(rel_row), torch.zeros_like(rel_col)
    dpacked, found = _launch_backward(
        grad.contiguous(), packed, rel_row, rel_col, key_mask, out, lse, heads, dim, height, scale
    )
    of_row, of_col = _tables(found, height, packed.shape[1] // height)
    return dpacked, _of_table(of_row, rel_row), _of_table(of_col, rel_col)


@replayed
def _launch_backward(
    grad: Tensor,
    packed: Tensor,
    rel_row: Tensor,
    rel_col: Tensor,
    key_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    call = make_call(packed, rel_row, rel_col, key_mask, *options)

    def compile_own() -> None:  # a compiled graph's forward may not know that a backward follows
        _kernels_of(call).gradients(stand_in(call), meta_like(grad), meta_like(out), meta_like(lse))

    compile_together(class_of(OP, *call, "gradients"), compile_own)
    found: tuple[Tensor, Tensor] = _kernels_of(call).gradients(call, grad, out, lse)
    return found


@_backward_op.register_fake
def _(grad: Tensor, packed: Tensor, rel_row: Tensor, rel_col: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    gradient_traced(OP, packed, rel_row, rel_col)
    return packed.new_empty(packed.shape), rel_row.new_empty(rel_row.shape), rel_col.new_empty(rel_col.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    packed, rel_row, rel_col, key_mask, *ctx.options = inputs
    ctx.save_for_backward(packed, rel_row, rel_col, key_mask, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for the log-sum-exp


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = _backward_op(grad, *ctx.saved_tensors, *ctx.options)
    return *found, None, None, None, None, None


_forward_op.register_autograd(_backward, setup_context=_setup)
refuse_second_derivatives(OP, _backward_op, "call it in float64")
