"""QnA's aggregation without Triton: a registered operator around the planes, and its gradient, which computes them again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearsight.ops.dispatch import exporting, full_precision, refuse_second_derivatives, transform_refusal
from nearsight.ops.qna import export_form
from nearsight.ops.qna.call import OP, QnACall
from nearsight.ops.qna.planes import Pieces, aggregate, aggregate_backward
from nearsight.ops.qna.sums import Sums

__all__ = ["complete", "empty_output", "like_inputs", "refusal", "run"]


def refusal(call: QnACall) -> str | None:
    """Why the operator cannot run this call, or None."""
    return None if exporting() else transform_refusal()


def run(call: QnACall) -> Tensor:
    if exporting():
        return export_form.run(call)
    return qna_planes(
        call.scores,
        call.values,
        call.position_bias,
        call.tap_scale,
        call.key_mask,
        list(call.window),
        list(call.stride),
        call.combine == "stack",
    )


@torch.library.custom_op("nearsight::qna_planes", mutates_args=())
def qna_planes(
    scores: Tensor,
    values: Tensor,
    position_bias: Tensor | None,
    tap_scale: Tensor | None,
    key_mask: Tensor | None,
    window: list[int],
    stride: list[int],
    stack: bool,
) -> Tensor:
    out = empty_output(scores, values, stride, stack)
    if out.numel() > 0:
        with full_precision(values):
            arguments = (scores, values, position_bias, tap_scale, key_mask, *_pairs(window, stride), stack)
            sums = Sums.of(*arguments)
            if sums is not None:
                sums.forward(out)
            else:
                aggregate(Pieces(*arguments, _math(scores, values)), out)
    return out


@torch.library.custom_op("nearsight::qna_planes_backward", mutates_args=())
def qna_planes_backward(
    grad: Tensor,
    scores: Tensor,
    values: Tensor,
    position_bias: Tensor | None,
    tap_scale: Tensor | None,
    key_mask: Tensor | None,
    window: list[int],
    stride: list[int],
    stack: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of scores, values, position_bias and tap_scale; empty for what was not given."""
    inputs = (scores, values, position_bias, tap_scale)
    if grad.numel() == 0:
        return tuple(t.zero_() for t in like_inputs(*inputs))  # type: ignore[return-value]
    with full_precision(values):
        arguments = (*inputs, key_mask, *_pairs(window, stride), stack)
        sums = Sums.of(*arguments)
        if sums is not None:
            found = sums.backward(grad, scores, values)
        else:
            found = aggregate_backward(Pieces(*arguments, _math(scores, values)), grad, scores, values)
    tables = [
        scores.new_empty(0) if table is None or gradient is None else _as_promised(gradient, table)
        for table, gradient in zip(inputs[2:], found[2:], strict=True)
    ]
    return found.scores, found.values, *tables  # type: ignore[return-value]


def _as_promised(gradient: Tensor, table: Tensor) -> Tensor:
    """Dense, as the fake kernel says: compiled code reads it so."""
    return gradient.reshape(table.shape).to(table.dtype).contiguous()


def empty_output(scores: Tensor, values: Tensor, stride: list[int], stack: bool) -> Tensor:
    batch, height, width, heads, dim = values.shape
    size = (batch, -(-height // stride[0]), -(-width // stride[1]))
    return values.new_empty(*size, *((scores.shape[3],) if stack else ()), heads, dim)


def like_inputs(*inputs: Tensor | None) -> tuple[Tensor, ...]:
    first = inputs[0]
    assert first is not None
    return tuple(
        first.new_empty(0) if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs
    )


def _pairs(window: list[int], stride: list[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    return (window[0], window[1]), (stride[0], stride[1])


def _math(scores: Tensor, values: Tensor) -> torch.dtype:
    return torch.float64 if torch.float64 in (scores.dtype, values.dtype) else torch.float32


def complete(forward: Any, backward: Any) -> None:
    """Give a pair of operators with the signatures above their fake kernels and their autograd formula."""

    def fake(
        scores: Tensor,
        values: Tensor,
        position_bias: Tensor | None,
        tap_scale: Tensor | None,
        key_mask: Tensor | None,
        window: list[int],
        stride: list[int],
        stack: bool,
    ) -> Tensor:
        return empty_output(scores, values, stride, stack)

    def fake_backward(grad: Tensor, *inputs: Any) -> Any:
        return like_inputs(*inputs[:4])

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.options = inputs[5:]

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        grads = backward(grad, *tensors, *ctx.options)
        return *(None if t is None else g for t, g in zip(tensors[:4], grads, strict=True)), *(None,) * 4

    forward.register_fake(fake)
    backward.register_fake(fake_backward)
    forward.register_autograd(differentiate, setup_context=save)
    refuse_second_derivatives(OP, backward)


complete(qna_planes, qna_planes_backward)
