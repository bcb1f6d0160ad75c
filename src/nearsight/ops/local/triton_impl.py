"""Local attention by Triton: what it refuses, and the registered ops with their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nearsight.ops.dispatch import full_precision, refuse_second_derivatives
from nearsight.ops.first_calls import gradient_traced, trains
from nearsight.ops.launching import replayed
from nearsight.ops.local.call import OP, LocalCall
from nearsight.ops.local.launches import Gradients, attend, empty_outputs, gradients
from nearsight.ops.triton_support import common_refusal

__all__ = ["refusal", "run", "run_projected"]

LONGEST_WINDOW = 64


def refusal(call: LocalCall) -> str | None:
    """Why Triton cannot run this call, or None."""
    reason = common_refusal(call.q, call.k, call.v)
    if reason is not None:
        return reason
    dim = call.q.shape[-1]
    if not 1 <= dim <= 128:
        return f"needs a head dim from 1 to 128, got {dim}"
    if max(call.window) > LONGEST_WINDOW:
        return f"needs at most {LONGEST_WINDOW} taps per axis, got window {call.window}"
    smallest = 0.01 if call.q.dtype == torch.float16 else 1e-6
    if call.scale < smallest:
        return f"needs a scale of at least {smallest}, got {call.scale}"
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v)):
        if tensor is not None and tensor.stride(-1) != 1 and dim > 1:
            return f"needs {name} with its channels next to each other, got stride {tensor.stride(-1)} on the last axis"
    return None


def run(call: LocalCall) -> Tensor:
    return _forward_op(call.q, call.k, call.v, *_rest(call))[0]


def run_projected(packed: Tensor, pixels: Tensor, weight: Tensor, bias: Tensor | None, call: LocalCall) -> Tensor:
    """`run` for a call whose q, k and v are the slices of `packed`, which is `pixels` [B, H·W, Cin] projected."""
    return _projected_forward_op(packed, pixels, weight, bias, *_rest(call))[0]


def _rest(call: LocalCall) -> tuple[Any, ...]:
    """A call but for q, k and v, as the ops take it."""
    options = (list(call.window), list(call.dilation), call.border == "zeros", call.scale)
    return call.rel_row, call.rel_col, call.key_mask, *options


def _call(q: Tensor, k: Tensor | None, v: Tensor, *rest: Any) -> LocalCall:
    """The call again, from what `_rest` left."""
    rel_row, rel_col, key_mask, (kh, kw), dilation, zeros, scale = rest
    # Taps farther apart than the map is long lie outside it all the same, and each step of dilation is a program.
    dil_y, dil_x = (min(step, max(size, 1)) for step, size in zip(dilation, q.shape[1:3], strict=True))
    return LocalCall(q, k, v, rel_row, rel_col, key_mask, (kh, kw), (dil_y, dil_x), "zeros" if zeros else "mask", scale)


@torch.library.custom_op("nearsight::local_attention_triton", mutates_args=())
@replayed
def _forward_op(
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
) -> tuple[Tensor, Tensor]:
    call = _call(q, k, v, rel_row, rel_col, key_mask, window, dilation, zeros, scale)
    return attend(call, _dense if trains(OP, (q, v), k, rel_row, rel_col) else None)


def _dense(call: LocalCall) -> Gradients:
    dq, dv = (torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device) for _ in range(2))
    return Gradients(dq, None if call.k is None else torch.empty_like(dq), dv)


@_forward_op.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_outputs(q)


@torch.library.custom_op("nearsight::local_attention_triton_backward", mutates_args=())
@replayed
def _backward_op(
    grad: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    rel_row: Tensor | None,
    rel_col: Tensor | None,
    key_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    window: list[int],
    dilation: list[int],
    zeros: bool,
    scale: float,
) -> list[Tensor]:
    """dq, dv, then dk, d rel_row and d rel_col where those inputs exist."""
    call = _call(q, k, v, rel_row, rel_col, key_mask, window, dilation, zeros, scale)
    into = _dense(call)
    tables = gradients(call, grad, out, lse, into)
    return [into.q, into.v, *([] if into.k is None else [into.k]), *tables]


@_backward_op.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor | None, v: Tensor, rel_row: Tensor | None, rel_col: Tensor | None, *_: Any
) -> list[Tensor]:
    gradient_traced(OP, q, v)
    like = [q.new_empty(q.shape) for t in (q, v, k) if t is not None]
    return [*like, *(t.new_empty(t.shape) for t in (rel_row, rel_col) if t is not None)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, rel_row, rel_col, key_mask, *ctx.options = inputs
    _keep(ctx, (q, k, v, rel_row, rel_col, key_mask), output)


def _keep(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for the log-sum-exp


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, rel_row, rel_col, key_mask, out, lse = ctx.saved_tensors
    found = iter(_backward_op(grad, q, k, v, rel_row, rel_col, key_mask, out, lse, *ctx.options))
    dq, dv = next(found), next(found)
    dk, drow, dcol = (None if t is None else next(found) for t in (k, rel_row, rel_col))
    return dq, dk, dv, drow, dcol, None, None, None, None, None


_forward_op.register_autograd(_backward, setup_context=_setup)
refuse_second_derivatives(OP, _backward_op)


# The same with q, k and v (or q and v) packed as one product of `pixels` leaves them, [B, H, W, 3 or 2, heads, D]. The product
# is not kept: the backward makes it again, inside the op, where no compiler can merge it with the first and keep it after all.


def _unpack(packed: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    return packed.select(3, 0), packed.select(3, 1) if packed.shape[3] == 3 else None, packed.select(3, -1)


@torch.library.custom_op("nearsight::local_attention_projected_triton", mutates_args=())
@replayed
def _projected_forward_op(
    packed: Tensor,
    pixels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rel_row: Tensor | None,
    rel_col: Tensor | None,
    key_mask: Tensor | None,
    window: list[int],
    dilation: list[int],
    zeros: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    call = _call(*_unpack(packed), rel_row, rel_col, key_mask, window, dilation, zeros, scale)
    wanted = trains(OP, (pixels, weight), packed, bias, rel_row, rel_col)
    return attend(call, (lambda call: _packed(packed, call)) if wanted else None)


def _packed(packed: Tensor, call: LocalCall) -> Gradients:
    """Places for the gradients of q, k and v as the slices of one tensor, like `packed`."""
    return Gradients(*_unpack(torch.empty(packed.shape, dtype=packed.dtype, device=call.q.device)))


@_projected_forward_op.register_fake
def _(packed: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_outputs(packed.select(3, 0))


@torch.library.custom_op("nearsight::local_attention_projected_triton_backward", mutates_args=())
def _projected_backward_op(
    grad: Tensor,
    pixels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rel_row: Tensor | None,
    rel_col: Tensor | None,
    key_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    window: list[int],
    dilation: list[int],
    zeros: bool,
    scale: float,
) -> list[Tensor]:
    """d packed, then d rel_row and d rel_col where those inputs exist."""
    with full_precision(grad):
        packed = F.linear(pixels, weight, bias)
    return _packed_gradients(grad, packed, out, lse, rel_row, rel_col, key_mask, window, dilation, zeros, scale)


@replayed
def _packed_gradients(grad: Tensor, packed: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> list[Tensor]:
    """The same, of q, k and v as their product leaves them, [B, H·W, 3 or 2·heads·D]."""
    packed = packed.unflatten(-1, (-1, *out.shape[3:])).unflatten(1, out.shape[1:3])
    dpacked = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
    tables = gradients(_call(*_unpack(packed), *rest), grad, out, lse, Gradients(*_unpack(dpacked)))
    return [dpacked, *tables]


@_projected_backward_op.register_fake
def _(
    grad: Tensor,
    pixels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rel_row: Tensor | None,
    rel_col: Tensor | None,
    key_mask: Tensor | None,
    out: Tensor,
    *_: Any,
) -> list[Tensor]:
    gradient_traced(OP, pixels, weight)
    parts = weight.shape[0] // (out.shape[3] * out.shape[4])
    packed = pixels.new_empty((*out.shape[:3], parts, *out.shape[3:]))
    return [packed, *(t.new_empty(t.shape) for t in (rel_row, rel_col) if t is not None)]


def _projected_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, pixels, weight, bias, rel_row, rel_col, key_mask, *ctx.options = inputs
    _keep(ctx, (pixels, weight, bias, rel_row, rel_col, key_mask), output)


def _projected_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    pixels, weight, bias, rel_row, rel_col, key_mask, out, lse = ctx.saved_tensors
    found = iter(_projected_backward_op(grad, pixels, weight, bias, rel_row, rel_col, key_mask, out, lse, *ctx.options))
    rows = next(found).flatten(3).flatten(0, 2)
    drow, dcol = (None if t is None else next(found) for t in (rel_row, rel_col))
    _, wants_pixels, wants_weight, *_ = ctx.needs_input_grad
    dpixels = (rows @ weight).view(pixels.shape) if wants_pixels else None
    dweight = rows.t() @ pixels.reshape(-1, pixels.shape[-1]) if wants_weight else None
    dbias = None if bias is None else rows.sum(0)
    return None, dpixels, dweight, dbias, drow, dcol, None, None, None, None, None


_projected_forward_op.register_autograd(_projected_backward, setup_context=_projected_setup)
refuse_second_derivatives(OP, _projected_backward_op)
