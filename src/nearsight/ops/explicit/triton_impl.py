"""Explicit attention's separable kinds in Triton: registered torch ops with their gradients, refusals, and who runs what.

Each head goes its way, decided on the GPU by its radius: through nodes (`nodes/`: a wide Gaussian), through one kernel per
direction (`whole/`: a small map) or through axis products (`axes/`: all else).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.ops.dispatch import refuse_second_derivatives
from nearsight.ops.explicit import axes, nodes, problem, whole
from nearsight.ops.explicit.call import OP, SEPARABLE_KINDS, ExplicitCall
from nearsight.ops.first_calls import class_of, compile_together, gradient_traced, launch, stand_in, trains
from nearsight.ops.launching import replayed
from nearsight.ops.triton_support import common_refusal

__all__ = ["refusal", "run"]

MAX_SIDE = 1024
# Each has four matrices of up to MAX_SIDE², reached by 32-bit offsets.
MAX_RADII = 511


def refusal(call: ExplicitCall) -> str | None:
    """Why Triton cannot run this call, or None."""
    reason = common_refusal(call.values)
    if reason is not None:
        return reason
    if call.kind not in SEPARABLE_KINDS:
        return f"needs one of the kinds {', '.join(SEPARABLE_KINDS)}, got {call.kind}"
    if max(call.values.shape[1:3]) > MAX_SIDE:
        return f"needs maps of at most {MAX_SIDE} pixels per axis, got {call.values.shape[1]}×{call.values.shape[2]}"
    if call.heads > MAX_RADII and not _is_small(call.values):
        return f"needs at most {MAX_RADII} radii on maps of more than {whole.LARGEST} pixels, got {call.heads}"
    return None


def run(call: ExplicitCall) -> Tensor:
    assert call.radius is not None
    # Five axes: a compiler takes four for NCHW and lays them out anew, by copies, where they meet convolutions.
    values = call.values.unflatten(3, (call.heads, -1))
    want_radius = call.radius.requires_grad and torch.is_grad_enabled()
    return _forward(values, call.radius, call.key_mask, call.kind == "gaussian", call.offset, want_radius)[0].flatten(3)


class _Tables(NamedTuple):
    """What depends on the sizes and radii alone, made once for both directions; None where no head can go that way."""

    nodes: nodes.Tables | None
    axes: axes.Tables | None


def _is_small(values: Tensor) -> bool:
    return max(values.shape[1:3]) <= whole.LARGEST


def _specs(
    values: Tensor, radius: Tensor, key_mask: Tensor | None, gaussian: bool, offset: float
) -> tuple[list[problem.Spec], list[problem.Spec]]:
    """The tables of the nodes and of the axes."""
    between = nodes.can_run((values.shape[1], values.shape[2]), key_mask, gaussian, offset)
    heads = radius.shape[0]
    return (
        nodes.Tables.specs(values, heads, key_mask) if between else [],
        [] if _is_small(values) else axes.Tables.specs(values, heads),
    )


def _tables(p: problem.Problem, buffer: Tensor) -> _Tables:
    of_nodes, of_axes = _specs(p.values, p.radius, p.key_mask, p.gaussian, p.offset)
    tables = problem.carve(buffer, of_nodes + of_axes)
    first, second = tables[: len(of_nodes)], tables[len(of_nodes) :]
    return _Tables(nodes.Tables(*first) if first else None, axes.Tables(*second) if second else None)


@torch.library.custom_op("nearsight::explicit_triton", mutates_args=())
@replayed
def _forward(
    values: Tensor, radius: Tensor, key_mask: Tensor | None, gaussian: bool, offset: float, want_radius: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The output of values [B, H, W, heads, D]; for the backward the nodes' slopes (empty where the radius' gradient is not
    wanted or no head can go that way) and the tables."""
    outputs = _empty_outputs(values, radius, key_mask, gaussian, offset, want_radius)
    if values.numel() > 0:
        p = problem.make(values.flatten(3), radius, key_mask, gaussian, offset)
        wanted = want_radius or trains(OP, (values,))
        compile_together(class_of(OP, *p, wanted, want_radius), lambda: _compile(p, wanted, want_radius))
        _launch_forward(p, *outputs)
    return outputs


def _compile(p: problem.Problem, gradients: bool, want_radius: bool) -> None:
    """Launch on tensors without memory what a call launches, and what its gradient will."""
    p = stand_in(p)
    heads = p.values.unflatten(3, (p.heads, -1))
    out, slopes, buffer = _empty_outputs(heads, p.radius, p.key_mask, p.gaussian, p.offset, want_radius)
    _launch_forward(p, out, slopes, buffer)
    if gradients:
        _launch_backward(p, out.flatten(3), slopes, buffer, out, torch.empty_like(p.radius), want_radius)


def _launch_forward(p: problem.Problem, out: Tensor, slopes: Tensor, buffer: Tensor) -> None:
    least, tables = nodes.least_radius(p), _tables(p, buffer)
    if tables.nodes is not None:
        nodes.prepare(p, tables.nodes)
        nodes.forward(p, tables.nodes, out, slopes, least)
    if tables.axes is not None:
        axes.prepare(p, tables.axes, least)
        axes.forward(p, tables.axes, out, least)
    else:
        whole.forward(p, out, least)


@_forward.register_fake
def _empty_outputs(
    values: Tensor, radius: Tensor, key_mask: Tensor | None, gaussian: bool, offset: float, want_radius: bool
) -> tuple[Tensor, Tensor, Tensor]:
    of_nodes, of_axes = _specs(values, radius, key_mask, gaussian, offset)
    sloped = want_radius and of_nodes
    shape = nodes.slopes_shape(values) if sloped else [0]
    words = sum(spec.words for spec in of_nodes + of_axes)
    return (
        values.new_empty(values.shape),
        values.new_empty(shape, dtype=torch.float32),
        values.new_empty([words], dtype=torch.float32),
    )


@torch.library.custom_op("nearsight::explicit_triton_backward", mutates_args=())
@replayed
def _backward(
    grad: Tensor,
    values: Tensor,
    radius: Tensor,
    key_mask: Tensor | None,
    slopes: Tensor,
    buffer: Tensor,
    gaussian: bool,
    offset: float,
    want_radius: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of values and radius; the latter is empty where it is not wanted."""
    dvalues, dradius = _empty_gradients(grad, values, radius, key_mask, slopes, buffer, gaussian, offset, want_radius)
    if values.numel() == 0:
        return dvalues, dradius.zero_()
    p = problem.make(values.flatten(3), radius, key_mask, gaussian, offset)
    _launch_backward(p, problem.dense(grad.flatten(3)), slopes, buffer, dvalues, dradius, want_radius)
    return dvalues, dradius


def _launch_backward(
    p: problem.Problem,
    grad: Tensor,
    slopes: Tensor,
    buffer: Tensor,
    dvalues: Tensor,
    dradius: Tensor,
    want_radius: bool,
) -> None:
    from nearsight.ops.explicit import kernels

    def empty_shares(count: int) -> Tensor:
        return grad.new_empty([p.heads, count if want_radius else 0], dtype=torch.float32)

    least, tables = nodes.least_radius(p), _tables(p, buffer)
    if tables.axes is not None:
        wide = narrow = empty_shares(axes.share_count(p))
        axes.backward(p, tables.axes, grad, dvalues, narrow, least, want_radius)
    else:
        wide = narrow = empty_shares(whole.share_count(p))
        whole.backward(p, grad, dvalues, narrow, least, want_radius)
    if tables.nodes is not None:
        wide = empty_shares(nodes.share_count(p))
        nodes.backward(p, tables.nodes, grad, slopes, dvalues, wide, least, want_radius)
    if want_radius:
        counts = wide.shape[1], narrow.shape[1]
        shares = p.radius, wide, narrow
        launch(kernels.add_shares, (p.heads, 1, 1), *shares, dradius, *counts, least, BLOCK=1024, num_warps=8)


def _empty_gradients(
    grad: Tensor,
    values: Tensor,
    radius: Tensor,
    key_mask: Tensor | None,
    slopes: Tensor,
    buffer: Tensor,
    gaussian: bool,
    offset: float,
    want_radius: bool,
) -> tuple[Tensor, Tensor]:
    return values.new_empty(values.shape), radius.new_empty(radius.shape if want_radius else [0])


@_backward.register_fake
def _(grad: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    gradient_traced(OP, values)
    return _empty_gradients(grad, values, *rest)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    values, radius, key_mask, gaussian, offset, ctx.want_radius = inputs
    ctx.save_for_backward(values, radius, key_mask, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros for the outputs that only the backward reads
    ctx.options = gaussian, offset


def _differentiate(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    want_radius = ctx.needs_input_grad[1] and ctx.want_radius
    dvalues, dradius = _backward(grad, *ctx.saved_tensors, *ctx.options, want_radius)
    return dvalues, dradius if want_radius else None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
refuse_second_derivatives(OP, _backward)
