"""Block attention by Triton: folded weights, launches, the registered op, its gradient, and what it refuses."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.ops.block.call import BlockCall
from nearsight.ops.block.partition import count_blocks
from nearsight.ops.dispatch import full_precision
from nearsight.ops.sums import sum_rows
from nearsight.ops.triton_support import INT32_LIMIT, common_refusal, dot_precision, multiprocessors, next_power_of_two

__all__ = [
    "Choice",
    "Launch",
    "add_shares",
    "make_launch",
    "refusal",
    "run",
    "score_table",
    "share_buffers",
    "tables",
]

SIDE = 4
MOST_CHANNELS = 8  # beside the 8 codes of row and column, a key's features then fill one product
WIDEST_HEAD = 64


def refusal(call: BlockCall) -> str | None:
    """Why Triton cannot run this call, or None."""
    reason = common_refusal(call.x)
    if reason is not None:
        return reason
    if call.block != SIDE:
        return f"needs blocks of {SIDE}×{SIDE} pixels, got block={call.block}"
    if not 1 <= call.x.shape[3] <= MOST_CHANNELS:
        return f"needs 1 to {MOST_CHANNELS} input channels, got {call.x.shape[3]}"
    if call.head_dim > WIDEST_HEAD:
        return f"needs a head dim of at most {WIDEST_HEAD}, got {call.head_dim}"
    size = call.x.shape[1] * call.x.shape[2] * call.w_q.shape[0]
    if size >= INT32_LIMIT:
        return f"needs outputs of fewer than 2³¹ elements per image, got {size}"
    return None


def run(call: BlockCall) -> Tensor:
    return _forward_op(call.x, *tables(call), call.key_mask)


def tables(call: BlockCall) -> tuple[Tensor, Tensor]:
    """The weights as the kernels take them, float32: `score_table`, and W_V of each place, [16, C, Cin]."""
    with full_precision(call.x):
        score = score_table(call)
    value = call.w_v.float()
    return score, value.expand(SIDE * SIDE, -1, -1) if value.dim() == 2 else value


def score_table(call: BlockCall) -> Tensor:
    """W_Q, W_K and the relative embeddings as one bilinear form per head, [heads, Cin, 8, 8 + Cin], times log₂e.

    Query features: x_c at its row (4) and at its column (4). Key features: row and column one-hot, then x. A query's row
    and column features each carry half of x for the content term.
    """
    w_q, w_k = (w.float().unflatten(0, (call.heads, -1)) for w in (call.w_q, call.w_k))  # [heads, D, Cin]
    # Sums, not products of matrices: too small to be worth one, and never TF32.
    content = (w_q[..., :, None] * w_k[..., None, :]).sum(1) * (0.5 * math.log2(math.e))
    heads, inputs = content.shape[:2]
    position = content.new_zeros(heads, inputs, 2 * SIDE, 2 * SIDE)
    if call.rel_row is not None or call.rel_col is not None:
        half = call.head_dim // 2
        like = next(t for t in (call.rel_row, call.rel_col) if t is not None)
        tables = [torch.zeros_like(like) if t is None else t for t in (call.rel_row, call.rel_col)]
        # Row a of place i sees row b through embedding b − a: a window of the table that moves up as a grows.
        windows = torch.stack(tables).float().unfold(1, SIDE, 1).flip(1)  # [axis, a, D/2, b]
        terms = w_q.unflatten(1, (2, half))[..., None, None] * windows.permute(0, 2, 1, 3)[None, :, :, None]
        terms = terms.sum(2) * math.log2(math.e)  # [heads, axis, Cin, a, b]
        position = torch.diag_embed(terms.permute(0, 2, 3, 4, 1), dim1=2, dim2=4).flatten(2, 3).flatten(3, 4)
    return torch.cat([position, content[:, :, None].expand(-1, -1, 2 * SIDE, -1)], -1)


class Choice(NamedTuple):
    """Heads at once, and programs per multiprocessor."""

    heads: int
    programs: int


# Measured on an H200 with 4 heads of 16 channels (README). float32 was not timed.
FORWARD, BACKWARD = Choice(4, 8), Choice(2, 8)
FORWARD_FLOAT, BACKWARD_FLOAT = Choice(1, 16), Choice(1, 8)


class Launch(NamedTuple):
    grid: tuple[int, int]
    runtime: dict[str, Any]
    constants: dict[str, Any]


def make_launch(x: Tensor, score: Tensor, value: Tensor, key_mask: Tensor | None, choice: Choice) -> Launch:
    batch, height, width, inputs = x.shape
    heads = score.shape[0]
    dim = value.shape[1] // heads
    lines = batch * count_blocks(height, SIDE)
    at_once = min(choice.heads, next_power_of_two(heads)) if dim <= 16 and inputs <= 4 else 1
    groups = -(-heads // at_once)
    wanted = choice.programs * multiprocessors(x.device) if x.device.type == "cuda" else 4
    runtime = {
        "H": height,
        "W": width,
        "lines": lines,
        "across": count_blocks(width, SIDE),
        "heads": heads,
        "x_b": x.stride(0),
        "x_y": x.stride(1),
        "x_x": x.stride(2),
        "x_c": x.stride(3),
    }
    constants = {
        "CIN": inputs,
        "D": dim,
        "DP": max(16, next_power_of_two(dim)),
        "FP": max(16, next_power_of_two(8 * inputs)),
        "G": at_once,
        "EDGE": height % SIDE != 0 or width % SIDE != 0,
        "HAS_MASK": key_mask is not None,
        "PRECISION": dot_precision(x.dtype),
        "num_warps": 1,
        "num_stages": 1,
    }
    return Launch((min(lines, max(1, wanted // groups)), groups), runtime, constants)


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


@torch.library.custom_op("nearsight::block_attention_triton", mutates_args=())
def _forward_op(x: Tensor, score: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
    """x [B, H, W, Cin], score [heads, Cin, 8, 8 + Cin] and value [16, C, Cin] in float32 → [B, H, W, C]."""
    out = torch.empty((*x.shape[:3], value.shape[1]), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    from nearsight.ops.block import kernels

    launch = make_launch(x, score, value, key_mask, FORWARD_FLOAT if x.dtype == torch.float32 else FORWARD)
    with torch.cuda.device_of(x):
        kernels.forward[launch.grid](
            *(x, score.contiguous(), value.contiguous(), _bytes(key_mask), out, None, None, None),
            **launch.runtime,
            POOL=False,
            **launch.constants,
        )
    return out


@_forward_op.register_fake
def _(x: Tensor, score: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:3], value.shape[1]))


@torch.library.custom_op("nearsight::block_attention_triton_backward", mutates_args=())
def _backward_op(
    grad: Tensor, x: Tensor, score: Tensor, value: Tensor, key_mask: Tensor | None, need_x: bool
) -> list[Tensor]:
    """d score, d value, and d x where needed."""
    if grad.numel() == 0:
        return [torch.zeros_like(t) for t in ((score, value, x) if need_x else (score, value))]
    from nearsight.ops.block import kernels

    launch = make_launch(x, score, value, key_mask, BACKWARD_FLOAT if x.dtype == torch.float32 else BACKWARD)
    shares, dx = share_buffers(launch, x, score, value, need_x)
    with torch.cuda.device_of(x):
        kernels.backward[launch.grid](
            *(x, score.contiguous(), value.contiguous(), _bytes(key_mask), grad.contiguous(), None, None, shares, dx),
            **launch.runtime,
            NEED_DX=need_x,
            POOL=False,
            **launch.constants,
        )
        return add_shares(shares, dx, x, score, value, need_x)


def share_buffers(launch: Launch, x: Tensor, score: Tensor, value: Tensor, need_x: bool) -> tuple[Tensor, Tensor]:
    """Where the backward's programs leave d score and d value, side by side for one sum, and its groups of heads d x."""
    programs, groups = launch.grid
    shares = torch.empty(programs, score.numel() + value.numel(), dtype=torch.float32, device=x.device)
    return shares, torch.empty((groups, *x.shape) if need_x else (0,), dtype=torch.float32, device=x.device)


def add_shares(shares: Tensor, dx: Tensor, x: Tensor, score: Tensor, value: Tensor, need_x: bool) -> list[Tensor]:
    dscore, dvalue = sum_rows(shares).split([score.numel(), value.numel()])
    # Copies: an op's results may not share memory.
    found = [dscore.clone().view(score.shape), dvalue.clone().view(value.shape)]
    return [*found, dx.sum(0).to(x.dtype)] if need_x else found


@_backward_op.register_fake
def _(grad: Tensor, x: Tensor, score: Tensor, value: Tensor, key_mask: Tensor | None, need_x: bool) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in ((score, value, x) if need_x else (score, value))]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # The input of a network needs no gradient, and would cost as much again as the weights'.
    need_x = ctx.needs_input_grad[0]
    found = _backward_op(grad, *ctx.saved_tensors, need_x)
    return found[2] if need_x else None, found[0], found[1], None


_forward_op.register_autograd(_backward, setup_context=_setup)
