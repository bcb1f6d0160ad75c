"""QnA's aggregation in C, compiled where it runs: registered operators around the loops of `native/qna.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nearsight.ops import native_support
from nearsight.ops.dispatch import exporting, transform_refusal
from nearsight.ops.qna import torch_impl
from nearsight.ops.qna.call import QnACall

__all__ = ["refusal", "run"]

SOURCE = Path(__file__).parent / "native" / "qna.c"
BAND = 16  # rows of windows whose exponentials are kept at a time
GROUPS = 64  # shares of the tables' gradients
STACK_FLOATS = 1 << 14  # what a thread keeps of one window
# Multiply-adds from which a call gets a library of its own, its sizes constants: 0.6 s of compilation, once per machine.
OWN_LIBRARY = 1 << 18


def refusal(call: QnACall) -> str | None:
    """Why the loops cannot run this call ("needs …, got …"), or None."""
    if exporting():
        return "needs a call that runs, got one that is being exported"
    if call.values.device.type != "cpu":
        return f"needs CPU tensors, got {call.values.device.type}"
    for tensor in (call.values, call.scores, call.position_bias, call.tap_scale):
        if tensor is not None and tensor.dtype != torch.float32:
            return f"needs float32, got {str(tensor.dtype).removeprefix('torch.')}"
    queries, heads, dim = call.scores.shape[3], *call.values.shape[3:]
    kept = max(call.window[0] * call.window[1], dim) * queries * heads
    if kept > STACK_FLOATS:
        return f"needs windows of at most {STACK_FLOATS} scores (or outputs), got {kept}"
    # Otherwise the loops run number by number, and torch is faster.
    if heads % 4 != 0 and dim % 8 != 0 and _work(call.values, queries, call.window, call.stride) >= OWN_LIBRARY:
        return f"needs heads by fours or channels by eights for a call as large as this, got {heads} heads of {dim}"
    return transform_refusal() or _machine_refusal()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def _machine_refusal() -> str | None:
    return native_support.common_refusal(SOURCE)


def run(call: QnACall) -> Tensor:
    options = (list(call.window), list(call.stride), call.combine == "stack")
    return qna_native(call.scores, call.values, call.position_bias, call.tap_scale, call.key_mask, *options)


def _work(values: Tensor, queries: int, window: Sequence[int], stride: Sequence[int]) -> int:
    """Multiply-adds of the forward."""
    batch, height, width, heads, dim = values.shape
    windows = batch * -(-height // stride[0]) * -(-width // stride[1])
    return windows * window[0] * window[1] * heads * (dim + 3 * queries)


class _Sizes(ctypes.Structure):
    """The struct of the same name in qna.c."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("batch", "height", "width", "out_height", "out_width", "stride_y", "stride_x", "band", "threads"),
            *("dim", "queries", "heads", "kh", "kw", "stack"),
        )
    )


class _Problem(NamedTuple):
    """A call as the loops take it: dense tensors, both tables there."""

    scores: Tensor
    values: Tensor
    bias: Tensor
    bias_exponential: Tensor
    scale: Tensor
    mask: Tensor | None
    sizes: _Sizes

    @classmethod
    def of(
        cls,
        scores: Tensor,
        values: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        mask: Tensor | None,
        window: list[int],
        stride: list[int],
        stack: bool,
    ) -> _Problem:
        batch, height, width, heads, dim = values.shape
        queries = scores.shape[3]
        table = (*window, queries, heads)
        bias = scores.new_zeros(table) if bias is None else bias.contiguous()
        scale = scores.new_ones(table) if scale is None else scale.contiguous()
        out = (-(-height // stride[0]), -(-width // stride[1]))
        # Two bands of the same parity must not meet.
        band = max(BAND, -(-window[0] // stride[0]))
        sizes = (
            batch,
            height,
            width,
            *out,
            *stride,
            band,
            torch.get_num_threads(),
            dim,
            queries,
            heads,
            *window,
            stack,
        )
        highest = bias.amax((0, 1), keepdim=True)
        exponential = (bias - highest).exp_()
        dense = scores.contiguous(), values.contiguous()
        return cls(*dense, bias, exponential, scale, None if mask is None else mask.contiguous(), _Sizes(*sizes))

    def library(self) -> ctypes.CDLL:
        z = self.sizes
        if _work(self.values, z.queries, (z.kh, z.kw), (z.stride_y, z.stride_x)) < OWN_LIBRARY:
            return native_support.library(SOURCE)
        constants = {"DIM": z.dim, "QUERIES": z.queries, "HEADS": z.heads, "KH": z.kh, "KW": z.kw, "STACK": z.stack}
        try:
            return native_support.library(SOURCE, **constants)
        except native_support.BuildError:  # a full disk, say; the one for all sizes is there, or the call were refused
            return native_support.library(SOURCE)

    def arguments(self) -> tuple[object, ...]:
        tensors = (self.scores, self.values, self.bias, self.bias_exponential, self.scale, self.mask)
        return ctypes.byref(self.sizes), *map(_pointer, tensors)

    def forward(self, out: Tensor) -> None:
        _check(self.library().qna_forward(*self.arguments(), _pointer(out)))

    def backward(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of scores, values, bias and scale."""
        grad = grad.contiguous()
        scores, values = torch.zeros_like(self.scores), torch.zeros_like(self.values)
        bands = -(-self.sizes.out_height // self.sizes.band)
        groups = min(GROUPS, self.sizes.batch * -(-bands // 2))
        partial = self.bias.new_zeros((groups, 2, *self.bias.shape), dtype=torch.float64)
        targets = map(_pointer, (grad, scores, values, partial))
        _check(self.library().qna_backward(*self.arguments(), *targets, ctypes.c_int64(groups)))
        tables = partial.sum(0).float()
        return scores, values, tables[0], tables[1]


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _check(status: int) -> None:
    if status != 0:
        raise MemoryError("qna: no memory for the exponentials of a band of windows")


@torch.library.custom_op("nearsight::qna_native", mutates_args=(), device_types="cpu")
def qna_native(
    scores: Tensor,
    values: Tensor,
    position_bias: Tensor | None,
    tap_scale: Tensor | None,
    key_mask: Tensor | None,
    window: list[int],
    stride: list[int],
    stack: bool,
) -> Tensor:
    out = torch_impl.empty_output(scores, values, stride, stack)
    if out.numel() > 0:
        _Problem.of(scores, values, position_bias, tap_scale, key_mask, window, stride, stack).forward(out)
    return out


@torch.library.custom_op("nearsight::qna_native_backward", mutates_args=(), device_types="cpu")
def qna_native_backward(
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
    tables = (position_bias, tap_scale)
    if grad.numel() == 0:
        return tuple(t.zero_() for t in torch_impl.like_inputs(scores, values, *tables))  # type: ignore[return-value]
    found = _Problem.of(scores, values, *tables, key_mask, window, stride, stack).backward(grad)
    kept = [values.new_empty(0) if t is None else g.clone() for t, g in zip(tables, found[2:], strict=True)]
    return found[0], found[1], *kept  # type: ignore[return-value]


torch_impl.complete(qna_native, qna_native_backward)
