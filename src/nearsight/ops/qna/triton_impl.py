"""QnA's aggregation in Triton: launches, registered torch ops with their gradients, and when this backend refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.ops.qna.call import QnACall
from nearsight.ops.sums import sum_rows
from nearsight.ops.triton_support import common_refusal, next_power_of_two

__all__ = ["Geometry", "Problem", "geometry", "launch_backward", "launch_delta", "launch_forward", "refusal", "run"]

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
        # Enough pixels per program that its sums for the tables weigh little beside the maps.
        steps = 4 if unroll else 7
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


class Problem(NamedTuple):
    """The tensors of a call as the kernels take them: channels dense, any stride of batch and pixel."""

    scores: Tensor
    values: Tensor
    bias: Tensor | None
    scale: Tensor | None
    key_mask: Tensor | None
    window: Sequence[int]
    stride: Sequence[int]
    stack: bool

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """H, W of the map and of the output."""
        return _sizes(self.values, self.stride)

    def geometry(self, kernel: str) -> Geometry:
        heads, dim = self.values.shape[3:]
        half = self.values.dtype != torch.float32
        return geometry(kernel, heads, self.scores.shape[3], dim, self.window, self.stride, self.stack, half)

    def tensors(self) -> tuple[Tensor, ...]:
        """Scores, values, tables and mask; any tensor stands for an absent one."""
        return (
            self.scores,
            self.values,
            self.scores if self.bias is None else self.bias,
            self.scores if self.scale is None else self.scale,
            self.values if self.key_mask is None else self.key_mask.view(torch.uint8),
        )

    def strides(self) -> tuple[int, ...]:
        mask = (0, 0, 0) if self.key_mask is None else self.key_mask.stride()
        return (*self.scores.stride()[:3], *self.values.stride()[:3], *mask)

    def constants(self, g: Geometry) -> dict[str, Any]:
        heads, dim = self.values.shape[3:]
        return {
            "HEADS": heads,
            "L": self.scores.shape[3],
            "D": dim,
            "DP": next_power_of_two(dim),
            "KH": self.window[0],
            "KW": self.window[1],
            "SY": self.stride[0],
            "SX": self.stride[1],
            "BX": g.columns,
            "HB": g.heads,
            "ROWS": g.rows,
            "UNROLL": g.unroll,
            "BIASED": self.bias is not None,
            "SCALED": self.scale is not None,
            "MASKED": self.key_mask is not None,
            "STACK": self.stack,
            "num_warps": g.warps,
            "enable_fp_fusion": True,
        }


def _problem(
    scores: Tensor,
    values: Tensor,
    position_bias: Tensor | None,
    tap_scale: Tensor | None,
    key_mask: Tensor | None,
    window: Sequence[int],
    stride: Sequence[int],
    stack: bool,
) -> Problem:
    tables = [table if table is None else table.contiguous() for table in (position_bias, tap_scale)]
    return Problem(_dense(scores, 2), _dense(values, 2), tables[0], tables[1], key_mask, window, stride, stack)


def _dense(tensor: Tensor, inner: int) -> Tensor:
    """The tensor itself where its last `inner` axes are dense, else a copy."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[-inner:]), reversed(tensor.stride()[-inner:]), strict=True):
        if size != 1 and stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


def _sizes(values: Tensor, stride: Sequence[int]) -> tuple[int, int, int, int]:
    height, width = values.shape[1:3]
    return height, width, -(-height // stride[0]), -(-width // stride[1])


def launch_forward(p: Problem, out: Tensor, lse: Tensor) -> None:
    from nearsight.ops.qna import kernels

    g = p.geometry("forward")
    kernels.forward[_window_grid(p, g)](*p.tensors(), out, lse, *p.sizes, *p.strides(), **p.constants(g))


def launch_delta(p: Problem, grad: Tensor, lse: Tensor, delta: Tensor) -> None:
    from nearsight.ops.qna import kernels

    g = p.geometry("delta")
    kernels.backward_delta[_window_grid(p, g)](
        *p.tensors(), grad, lse, delta, *p.sizes, *p.strides(), *grad.stride()[:3], **p.constants(g)
    )


def launch_backward(
    p: Problem, grad: Tensor, lse: Tensor, delta: Tensor, dscores: Tensor, dvalues: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Fill dscores and dvalues; return each program's sums for the tables, [programs, kh, kw, L, heads]."""
    from nearsight.ops.qna import kernels

    g = p.geometry("backward")
    (batch, height, width, heads), (kh, _), (sy, sx) = p.values.shape[:4], p.window, p.stride
    tile_rows = -(-height // (g.rows * g.steps))
    programs = batch * tile_rows * -(-width // (g.columns * sx)) * sx
    # With a stride along x a program meets only the taps of its phase; the others must read as zero.
    new = p.values.new_empty if sx == 1 else p.values.new_zeros
    sums = [None if t is None else new([programs, *t.shape], dtype=torch.float32) for t in (p.bias, p.scale)]
    # The rows of windows that see a tile begin this far above its first row's.
    first = -(-((kh - 1) // 2 - kh + 1) // sy)
    last = (g.rows - 1 + (kh - 1) // 2) // sy
    kernels.backward[(programs * -(-heads // g.heads), 1, 1)](
        *p.tensors(),
        grad,
        lse,
        delta,
        dscores,
        dvalues,
        *[delta if each is None else each for each in sums],
        *p.sizes,
        tile_rows,
        *p.strides(),
        *grad.stride()[:3],
        STEPS=g.steps,
        QLOW=first,
        QROWS=last - first + 1,
        WANT_BIAS=p.bias is not None,
        WANT_SCALE=p.scale is not None,
        **p.constants(g),
    )
    return sums[0], sums[1]


def _window_grid(p: Problem, g: Geometry) -> tuple[int, int, int]:
    _, _, out_height, out_width = p.sizes
    batch, heads = p.values.shape[0], p.values.shape[3]
    return batch * -(-out_height // g.rows) * -(-out_width // g.columns) * -(-heads // g.heads), 1, 1


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
    out, lse = _empty_outputs(scores, values, position_bias, tap_scale, key_mask, window, stride, stack)
    if out.numel():
        launch_forward(_problem(scores, values, position_bias, tap_scale, key_mask, window, stride, stack), out, lse)
    return out, lse


@_forward.register_fake
def _empty_outputs(
    scores: Tensor,
    values: Tensor,
    position_bias: Tensor | None,
    tap_scale: Tensor | None,
    key_mask: Tensor | None,
    window: list[int],
    stride: list[int],
    stack: bool,
) -> tuple[Tensor, Tensor]:
    (batch, _, _, queries, heads), dim = scores.shape, values.shape[4]
    _, _, out_height, out_width = _sizes(values, stride)
    per_query = [queries] if stack else []
    out = values.new_empty([batch, out_height, out_width, *per_query, heads, dim])
    return out, values.new_empty([batch, out_height, out_width, queries, heads], dtype=torch.float32)


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
    gradients = _empty_gradients(grad, scores, values, position_bias, tap_scale, key_mask, lse, window, stride, stack)
    dscores, dvalues, dbias, dscale = gradients
    if values.numel() == 0:
        return dscores, dvalues, dbias.zero_(), dscale.zero_()
    problem = _problem(scores, values, position_bias, tap_scale, key_mask, window, stride, stack)
    grad = _dense(grad, 3 if stack else 2)
    delta = torch.empty_like(lse)
    launch_delta(problem, grad, lse, delta)
    bias_sums, scale_sums = launch_backward(problem, grad, lse, delta, dscores, dvalues)
    if bias_sums is not None:
        dbias = sum_rows(bias_sums).to(dbias.dtype)
    if scale_sums is not None:
        dscale = sum_rows(scale_sums).to(dscale.dtype)
    return dscores, dvalues, dbias, dscale


@_backward.register_fake
def _empty_gradients(
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
    return (
        scores.new_empty(scores.shape),
        values.new_empty(values.shape),
        values.new_empty([0]) if position_bias is None else position_bias.new_empty(position_bias.shape),
        values.new_empty([0]) if tap_scale is None else tap_scale.new_empty(tap_scale.shape),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, window, stride, stack = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for the log-sum-exp
    ctx.options = (window, stride, stack)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    scores, values, bias, scale, key_mask, lse = ctx.saved_tensors
    dscores, dvalues, dbias, dscale = _backward(grad, scores, values, bias, scale, key_mask, lse, *ctx.options)
    return (
        dscores,
        dvalues,
        None if bias is None else dbias,
        None if scale is None else dscale,
        None,
        None,
        None,
        None,
    )


_forward.register_autograd(_differentiate, setup_context=_save)
