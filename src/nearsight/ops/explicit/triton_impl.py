"""Explicit attention's separable kinds in Triton: registered torch ops with their gradients, refusals, and who runs what.

Small maps go whole through one kernel per direction (`whole/`). Larger ones go, head by head and decided on the GPU by the
radius, through nodes (`nodes/`: a wide Gaussian) or through axis products (`axes/`: all else).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearsight.ops.explicit import axes, nodes, problem, whole
from nearsight.ops.explicit.call import SEPARABLE_KINDS, ExplicitCall
from nearsight.ops.triton_support import common_refusal

__all__ = ["refusal", "run"]

MAX_SIDE = 1024


def refusal(call: ExplicitCall) -> str | None:
    """Why Triton cannot run this call, or None."""
    reason = common_refusal(call.values)
    if reason is not None:
        return reason
    if call.kind not in SEPARABLE_KINDS:
        return f"needs one of the kinds {', '.join(SEPARABLE_KINDS)}, got {call.kind}"
    if max(call.values.shape[1:3]) > MAX_SIDE:
        return f"needs maps of at most {MAX_SIDE} pixels per axis, got {call.values.shape[1]}×{call.values.shape[2]}"
    return None


def run(call: ExplicitCall) -> Tensor:
    assert call.radius is not None
    return _forward(call.values, call.radius, call.key_mask, call.kind == "gaussian", call.offset)[0]


def _is_whole(values: Tensor) -> bool:
    return max(values.shape[1:3]) <= whole.LARGEST


@torch.library.custom_op("nearsight::explicit_triton", mutates_args=())
def _forward(
    values: Tensor, radius: Tensor, key_mask: Tensor | None, gaussian: bool, offset: float
) -> tuple[Tensor, Tensor]:
    """The output, and the centred coefficients of the values between the nodes (empty where no head can go that way)."""
    out, coefficients = _empty_outputs(values, radius, key_mask, gaussian, offset)
    if out.numel() == 0:
        return out, coefficients
    p = problem.make(values, radius, key_mask, gaussian, offset)
    if _is_whole(values):
        whole.forward(p, out)
        return out, coefficients
    least = nodes.least_radius(p)
    axes.forward(p, out, least)
    if coefficients.numel():
        nodes.forward(p, out, coefficients, least)
    return out, coefficients


@_forward.register_fake
def _empty_outputs(
    values: Tensor, radius: Tensor, key_mask: Tensor | None, gaussian: bool, offset: float
) -> tuple[Tensor, Tensor]:
    between = not _is_whole(values) and nodes.can_run(key_mask, gaussian, offset)
    shape = nodes.coefficients_shape(values.shape[0], values.shape[3]) if between else [0]
    return values.new_empty(values.shape), values.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("nearsight::explicit_triton_backward", mutates_args=())
def _backward(
    grad: Tensor,
    values: Tensor,
    radius: Tensor,
    key_mask: Tensor | None,
    coefficients: Tensor,
    gaussian: bool,
    offset: float,
    want_radius: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of values and radius; the latter is empty where it is not wanted."""
    from nearsight.ops.explicit import kernels

    dvalues, dradius = _empty_gradients(grad, values, radius, key_mask, coefficients, gaussian, offset, want_radius)
    if values.numel() == 0:
        return dvalues, dradius.zero_()
    p, grad = problem.make(values, radius, key_mask, gaussian, offset), problem.dense_channels(grad)

    def empty_shares(count: int) -> Tensor:
        return values.new_empty([p.heads, count if want_radius else 0], dtype=torch.float32)

    if _is_whole(values):
        least = -1.0  # every head's shares are the first ones
        wide = narrow = empty_shares(whole.share_count(p))
        whole.backward(p, grad, dvalues, wide, want_radius)
    else:
        least = nodes.least_radius(p)
        wide = narrow = empty_shares(axes.share_count(p))
        axes.backward(p, grad, dvalues, narrow, least, want_radius)
        if coefficients.numel():
            wide = empty_shares(nodes.share_count(p))
            nodes.backward(p, grad, coefficients, dvalues, wide, least, want_radius)
    if want_radius:
        counts = wide.shape[1], narrow.shape[1]
        kernels.add_shares[(p.heads, 1, 1)](p.radius, wide, narrow, dradius, *counts, least, BLOCK=1024, num_warps=8)
    return dvalues, dradius


@_backward.register_fake
def _empty_gradients(
    grad: Tensor,
    values: Tensor,
    radius: Tensor,
    key_mask: Tensor | None,
    coefficients: Tensor,
    gaussian: bool,
    offset: float,
    want_radius: bool,
) -> tuple[Tensor, Tensor]:
    return values.new_empty(values.shape), radius.new_empty(radius.shape if want_radius else [0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    values, radius, key_mask, gaussian, offset = inputs
    ctx.save_for_backward(values, radius, key_mask, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for the output that only the backward reads
    ctx.options = gaussian, offset


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    want_radius = ctx.needs_input_grad[1]
    dvalues, dradius = _backward(grad, *ctx.saved_tensors, *ctx.options, want_radius)
    return dvalues, dradius if want_radius else None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
