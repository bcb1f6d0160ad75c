"""Block attention with the batch norm, ReLU and max-pool that follow it in a network: the full-size map is never written.

    z = ReLU( max over the block of  weight·(y − mean)/√(var + eps) + bias ) ,   y = block_attention(…)

The norm is one line per channel, so that the largest normalised value is that of the largest y (of the smallest where weight
is negative): the kernel keeps one number per block and channel, its place, and the sums that give mean and variance. The
backward computes y again where it computes everything else again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearsight.ops.block.call import BlockCall
from nearsight.ops.block.partition import count_blocks
from nearsight.ops.block.triton_impl import (
    SIDE,
    Choice,
    add_shares,
    make_launch,
    share_buffers,
    tables,
)
from nearsight.ops.sums import sum_rows
from nearsight.ops.triton_support import multiprocessors, next_power_of_two

__all__ = ["attend_norm_pool"]

# Measured on an H200 with 4 heads of 16 channels (README). float32 was not timed.
FORWARD, BACKWARD = Choice(2, 12), Choice(1, 8)
FORWARD_FLOAT, BACKWARD_FLOAT = Choice(1, 8), Choice(1, 8)
ROWS = 64


def attend_norm_pool(
    call: BlockCall, weight: Tensor, bias: Tensor, mean: Tensor | None, var: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """z [B, ⌈H/4⌉, ⌈W/4⌉, C], and the mean and (biased) variance it was normalised by: the batch's where none is given.

    For calls that `triton_impl.refusal` does not refuse, without a key mask.
    """
    given = None if mean is None or var is None else torch.stack([mean.float(), var.float()])
    out, _, _, stats = _forward_op(call.x, *tables(call), weight.float(), bias.float(), given, eps)
    return out, stats[0], stats[1]


@torch.library.custom_op("nearsight::block_attention_pooled_triton", mutates_args=())
def _forward_op(
    x: Tensor, score: Tensor, value: Tensor, weight: Tensor, bias: Tensor, given: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z; for the backward the y that won each block and its place (255: the ReLU stopped it); mean and variance, [2, C]."""
    from nearsight.ops.block import kernels

    channels = value.shape[1]
    best, place = _pooled_like(x, channels, x.dtype), _pooled_like(x, channels, torch.uint8)
    out = torch.empty_like(best)
    launch = make_launch(x, score, value, None, FORWARD_FLOAT if x.dtype == torch.float32 else FORWARD)
    sums = torch.empty(launch.grid[0], 2, channels, dtype=torch.float32, device=x.device)
    sign = torch.where(weight < 0, -1.0, 1.0)
    with torch.cuda.device_of(x):
        kernels.forward[launch.grid](
            *(x, score.contiguous(), value.contiguous(), None, best, place, sign, sums),
            **launch.runtime,
            POOL=True,
            **launch.constants,
        )
        if given is None:
            # In float64, where E[y²] − E[y]² loses nothing that float32 would show.
            mean, square = (sums.double().sum(0) / (x.numel() // x.shape[3])).unbind(0)
            stats = torch.stack([mean, (square - mean * mean).clamp(min=0.0)]).float()
        else:
            stats = given.clone()
        scale = weight * torch.rsqrt(stats[1] + eps)
        norm = torch.stack([scale, bias - stats[0] * scale])
        rows = best.numel() // channels
        kernels.normalise[(-(-rows // ROWS),)](
            best, norm, place, out, rows, C=channels, CP=next_power_of_two(channels), ROWS=ROWS, num_warps=4
        )
    return out, best, place, stats


def _pooled_like(x: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    batch, height, width, _ = x.shape
    return x.new_empty((batch, count_blocks(height, SIDE), count_blocks(width, SIDE), channels), dtype=dtype)


@_forward_op.register_fake
def _(x: Tensor, score: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    channels = value.shape[1]
    out, best, place = (_pooled_like(x, channels, dtype) for dtype in (x.dtype, x.dtype, torch.uint8))
    return out, best, place, value.new_empty(2, channels)


@torch.library.custom_op("nearsight::block_attention_pooled_triton_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    x: Tensor,
    score: Tensor,
    value: Tensor,
    weight: Tensor,
    best: Tensor,
    place: Tensor,
    stats: Tensor,
    eps: float,
    of_batch: bool,
    need_x: bool,
) -> list[Tensor]:
    """d score, d value, d weight, d bias, and d x where needed. `of_batch`: the statistics depend on the outputs."""
    from nearsight.ops.block import kernels

    channels = value.shape[1]
    grad = grad.contiguous()
    rows = grad.numel() // channels
    programs = min(-(-rows // ROWS), 8 * multiprocessors(x.device))
    sums = torch.empty(programs, 2, channels, dtype=torch.float32, device=x.device)
    launch = make_launch(x, score, value, None, BACKWARD_FLOAT if x.dtype == torch.float32 else BACKWARD)
    shares, dx = share_buffers(launch, x, score, value, need_x)
    with torch.cuda.device_of(x):
        kernels.gradient_sums[(programs,)](
            *(grad, best, place, stats, sums, rows),
            C=channels,
            CP=next_power_of_two(channels),
            ROWS=ROWS,
            num_warps=4,
        )
        dbias, centred = sum_rows(sums).unbind(0)
        deviation = torch.rsqrt(stats[1] + eps)
        scale, dweight = weight * deviation, centred * deviation
        # What the batch's mean and variance take back: scale·(d bias + (y − mean)·deviation·d weight) / pixels.
        slope = scale * deviation * dweight / (x.numel() // x.shape[3])
        offset = scale * dbias / (x.numel() // x.shape[3]) - slope * stats[0]
        taken = torch.stack([offset, slope]) if of_batch else torch.zeros_like(stats)
        norm = torch.cat([scale[None], taken])
        kernels.backward[launch.grid](
            *(x, score.contiguous(), value.contiguous(), None, grad, place, norm, shares, dx),
            **launch.runtime,
            NEED_DX=need_x,
            POOL=True,
            **launch.constants,
        )
        dscore, dvalue, *rest = add_shares(shares, dx, x, score, value, need_x)
    return [dscore, dvalue, dweight, dbias.clone(), *rest]


@_backward_op.register_fake
def _(grad: Tensor, x: Tensor, score: Tensor, value: Tensor, weight: Tensor, *rest: Any) -> list[Tensor]:
    like = (score, value, weight, weight, x) if rest[-1] else (score, value, weight, weight)
    return [t.new_empty(t.shape) for t in like]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, score, value, weight, _, given, eps = inputs
    ctx.save_for_backward(x, score, value, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.options = (eps, given is None)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    need_x = ctx.needs_input_grad[0]
    dscore, dvalue, dweight, dbias, *dx = _backward_op(grad, *ctx.saved_tensors, *ctx.options, need_x)
    return dx[0] if dx else None, dscore, dvalue, dweight, dbias, None, None


_forward_op.register_autograd(_backward, setup_context=_setup)
