"""QnA's aggregation in Triton: launches, registered torch ops with their gradients, and when this backend refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.ops.qna.call import QnACall
from nearsight.ops.triton_support import common_refusal, next_power_of_two

__all__ = ["Geometry", "geometry", "refusal", "run"]

MAX_WINDOW = 15
MAX_QUERIES = 16
MAX_HEAD_DIM = 256
# Columns of taps are unrolled while the tables' sums of a program fit its registers: 3×3 with two queries.
UNROLLED_SUMS = 18


class Geometry(NamedTuple):
    """What a program takes: columns, heads and rows of pixels (`steps` tiles of rows in the backward), and how it runs."""

    columns: int
    heads: int
    rows: int
    steps: int
    unroll: bool
    warps: int


def geometry(
    kernel: str,
    heads: int,
    queries: int,
    dim: int,
    window: Sequence[int],
    stride: Sequence[int],
    stack: bool,
    half: bool,
) -> Geometry:
    """The launch geometry of `kernel` ("forward", "delta" or "backward"): a fixed table, no tuning at run time.

    One warp per program; with half types a thread holds 8 channels of one pixel, so one pixel's head when D = 8.
    """
    padded = next_power_of_two(dim)
    per_thread = min(padded, 8 if half else 4)
    tile = max(32 * per_thread, padded)
    head_block = min(next_power_of_two(heads), tile // padded)
    columns = tile // (head_block * padded)
    rows = 1 if stack and queries > 2 else 2 if queries > 2 or max(window) > 7 else 4
    unroll = window[0] * window[1] * queries <= UNROLLED_SUMS
    steps = 1
    if kernel == "backward":
        rows = -(-min(rows, 2) // stride[0]) * stride[0]
        unroll = unroll and stride[1] == 1
        steps = 4 if unroll else 1
    return Geometry(columns, head_block, rows, steps, unroll, 1)


def refusal(call: QnACall) -> str | None:
    """Why Triton cannot run this call, or None."""
    reason = common_refusal(call.values, call.scores)
    if reason is not None:
        return reason
    if call.scores.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"needs scores of float32, bfloat16 or float16, got {str(call.scores.dtype).removeprefix('torch.')}"
    if max(call.window) > MAX_WINDOW:
        return f"needs a window of at most {MAX_WINDOW} taps per axis, got {call.window[0]}×{call.window[1]}"
    if call.scores.shape[3] > MAX_QUERIES:
        return f"needs at most {MAX_QUERIES} queries, got {call.scores.shape[3]}"
    if call.values.shape[4] > MAX_HEAD_DIM or call.values.shape[4] == 0:
        return f"needs a head dim of 1 to {MAX_HEAD_DIM}, got {call.values.shape[4]}"
    return None


def run(call: QnACall) -> Tensor:
    return _forward(
        call.scores,
        call.values,
        call.position_bias,
        call.tap_scale,
        call.key_mask,
        list(call.window),
        list(call.stride),
        call.combine == "stack",
    )[0]


def _dense_inside(tensor: Tensor, inner: int) -> Tensor:
    """The tensor itself where its last `inner` axes are dense, else a copy: the kernels take any stride of batch and pixel."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[-inner:]), reversed(tensor.stride()[-inner:]), strict=True):
        if size != 1 and stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


def _pixel_strides(tensor: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1), tensor.stride(2))


def _sizes(values: Tensor, stride: list[int]) -> tuple[int, int, int, int]:
    height, width = values.shape[1:3]
    return height, width, -(-height // stride[0]), -(-width // stride[1])


def _constants(g: Geometry, scores: Tensor, values: Tensor, window: list[int], stride: list[int]) -> dict[str, Any]:
    heads, dim = values.shape[3:]
    return {
        "HEADS": heads,
        "L": scores.shape[3],
        "D": dim,
        "DP": next_power_of_two(dim),
        "KH": window[0],
        "KW": window[1],
        "SY": stride[0],
        "SX": stride[1],
        "BX": g.columns,
        "HB": g.heads,
        "ROWS": g.rows,
        "UNROLL": g.unroll,
        "num_warps": g.warps,
        "enable_fp_fusion": True,
    }


def _empty_like_output(scores: Tensor, values: Tensor, stride: list[int], stack: bool) -> tuple[Tensor, Tensor]:
    batch = values.shape[0]
    _, _, out_height, out_width = _sizes(values, stride)
    queries, heads, dim = scores.shape[3], values.shape[3], values.shape[4]
    per_query = [queries] if stack else []
    out = values.new_empty([batch, out_height, out_width, *per_query, heads, dim])
    lse = values.new_empty([batch, out_height, out_width, queries, heads], dtype=torch.float32)
    return out, lse


@torch.library.custom_op("nearsight::qna_triton", mutates_args=())
def _forward(
    scores: Tensor,
    values: Tensor,
    position_bias: Tensor | None,
    tap_scale: Tensor | None,
    key_mask: Tensor | None,
    window: list[int],
    stride: list[int],
    stack: bool,
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp (base 2) of every window, query and head."""
    from nearsight.ops.qna import kernels

    scores, values = _dense_inside(scores, 2), _dense_inside(values, 2)
    out, lse = _empty_like_output(scores, values, stride, stack)
    if out.numel() == 0:
        return out, lse
    height, width, out_height, out_width = _sizes(values, stride)
    heads, dim = values.shape[3:]
    g = geometry("forward", heads, scores.shape[3], dim, window, stride, stack, values.dtype != torch.float32)
    grid = (
        values.shape[0] * -(-out_height // g.rows) * -(-out_width // g.columns) * -(-heads // g.heads),
        1,
        1,
    )
    kernels.forward[grid](
        scores,
        values,
        _dense_table(position_bias, scores),
        _dense_table(tap_scale, scores),
        values if key_mask is None else key_mask.view(torch.uint8),
        out,
        lse,
        height,
        width,
        out_height,
        out_width,
        *_pixel_strides(scores),
        *_pixel_strides(values),
        *_pixel_strides(key_mask),
        BIASED=position_bias is not None,
        SCALED=tap_scale is not None,
        MASKED=key_mask is not None,
        STACK=stack,
        **_constants(g, scores, values, window, stride),
    )
    return out, lse


def _dense_table(table: Tensor | None, placeholder: Tensor) -> Tensor:
    return placeholder if table is None else table.contiguous()


@_forward.register_fake
def _(
    scores: Tensor,
    values: Tensor,
    position_bias: Tensor | None,
    tap_scale: Tensor | None,
    key_mask: Tensor | None,
    window: list[int],
    stride: list[int],
    stack: bool,
) -> tuple[Tensor, Tensor]:
    return _empty_like_output(scores, values, stride, stack)


@torch.library.custom_op("nearsight::qna_triton_backward", mutates_args=())
def _backward(
    grad: Tensor,
    scores: Tensor,
    values: Tensor,
    position_bias: Tensor | None,
    tap_scale: Tensor | None,
    key_mask: Tensor | None,
    lse: Tensor,
    window: list[int],
    stride: list[int],
    stack: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of scores, values, position_bias and tap_scale; an absent table's is empty."""
    from nearsight.ops.qna import kernels

    scores, values = _dense_inside(scores, 2), _dense_inside(values, 2)
    grad = _dense_inside(grad, 3 if stack else 2)
    dscores, dvalues, dbias, dscale = _empty_gradients(scores, values, position_bias, tap_scale)
    if values.numel() == 0:
        return dscores, dvalues, dbias.zero_(), dscale.zero_()
    batch, (height, width, out_height, out_width) = values.shape[0], _sizes(values, stride)
    queries, heads, dim = scores.shape[3], values.shape[3], values.shape[4]
    half = values.dtype != torch.float32
    shared = (
        scores,
        values,
        _dense_table(position_bias, scores),
        _dense_table(tap_scale, scores),
        values if key_mask is None else key_mask.view(torch.uint8),
        grad,
        lse,
    )
    strides = (
        *_pixel_strides(scores),
        *_pixel_strides(values),
        *_pixel_strides(key_mask),
        *_pixel_strides(grad),
    )
    flags = {
        "BIASED": position_bias is not None,
        "SCALED": tap_scale is not None,
        "MASKED": key_mask is not None,
        "STACK": stack,
    }
    delta = torch.empty_like(lse)
    g = geometry("delta", heads, queries, dim, window, stride, stack, half)
    grid = (batch * -(-out_height // g.rows) * -(-out_width // g.columns) * -(-heads // g.heads), 1, 1)
    kernels.backward_delta[grid](
        *shared,
        delta,
        height,
        width,
        out_height,
        out_width,
        *strides,
        **flags,
        **_constants(g, scores, values, window, stride),
    )

    g = geometry("backward", heads, queries, dim, window, stride, stack, half)
    tile_rows = -(-height // (g.rows * g.steps))
    programs = batch * tile_rows * -(-width // (g.columns * stride[1])) * stride[1]
    # With a stride along x a program meets only the taps of its phase; the others must read as zero.
    new = values.new_empty if stride[1] == 1 else values.new_zeros
    tables = [None if t is None else new([programs, *t.shape], dtype=torch.float32) for t in (position_bias, tap_scale)]
    top = (window[0] - 1) // 2
    first = -(-(top - window[0] + 1) // stride[0])
    last = (g.rows - 1 + top) // stride[0]
    kernels.backward[(programs * -(-heads // g.heads), 1, 1)](
        *shared,
        delta,
        dscores,
        dvalues,
        delta if tables[0] is None else tables[0],
        delta if tables[1] is None else tables[1],
        height,
        width,
        out_height,
        out_width,
        tile_rows,
        *strides,
        STEPS=g.steps,
        QLOW=first,
        QROWS=last - first + 1,
        WANT_BIAS=position_bias is not None,
        WANT_SCALE=tap_scale is not None,
        **flags,
        **_constants(g, scores, values, window, stride),
    )
    if tables[0] is not None:
        dbias = tables[0].sum(0).to(dbias.dtype)
    if tables[1] is not None:
        dscale = tables[1].sum(0).to(dscale.dtype)
    return dscores, dvalues, dbias, dscale


def _empty_gradients(
    scores: Tensor, values: Tensor, position_bias: Tensor | None, tap_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        scores.new_empty(scores.shape),
        values.new_empty(values.shape),
        values.new_empty([0]) if position_bias is None else position_bias.new_empty(position_bias.shape),
        values.new_empty([0]) if tap_scale is None else tap_scale.new_empty(tap_scale.shape),
    )


@_backward.register_fake
def _(
    grad: Tensor,
    scores: Tensor,
    values: Tensor,
    position_bias: Tensor | None,
    tap_scale: Tensor | None,
    key_mask: Tensor | None,
    lse: Tensor,
    window: list[int],
    stride: list[int],
    stack: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_gradients(scores, values, position_bias, tap_scale)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    scores, values, position_bias, tap_scale, key_mask, window, stride, stack = inputs
    ctx.save_for_backward(scores, values, position_bias, tap_scale, key_mask, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.options = (window, stride, stack)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    scores, values, position_bias, tap_scale, key_mask, lse = ctx.saved_tensors
    dscores, dvalues, dbias, dscale = _backward(
        grad, scores, values, position_bias, tap_scale, key_mask, lse, *ctx.options
    )
    return (
        dscores,
        dvalues,
        None if position_bias is None else dbias,
        None if tap_scale is None else dscale,
        None,
        None,
        None,
        None,
    )


_forward.register_autograd(_differentiate, setup_context=_save)
