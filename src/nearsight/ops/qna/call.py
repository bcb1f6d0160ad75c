"""A checked call of QnA's aggregation: what every backend receives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nearsight.errors import ArgumentValueError
from nearsight.ops import checks
from nearsight.ops.dispatch import autocast_dtype

__all__ = ["OP", "QnACall", "math_dtype", "output_size", "prepare"]

OP = "qna"
COMBINES = ("sum", "stack")


class QnACall(NamedTuple):
    """Arguments in one form: pairs for window and stride; scores and tables in the dtype they came in, computed with in
    `math_dtype`; values in the dtype of the output."""

    scores: Tensor
    values: Tensor
    position_bias: Tensor | None
    tap_scale: Tensor | None
    key_mask: Tensor | None
    window: tuple[int, int]
    stride: tuple[int, int]
    combine: str


def math_dtype(call: QnACall) -> torch.dtype:
    """The dtype of softmax and accumulators: float32 whatever comes in, float64 where scores or values have it."""
    return torch.float64 if torch.float64 in (call.scores.dtype, call.values.dtype) else torch.float32


def output_size(call: QnACall) -> tuple[int, int]:
    """(⌈H/stride⌉, ⌈W/stride⌉)."""
    # Not as −(−H // s): ONNX divides towards zero.
    rows, columns = ((size + step - 1) // step for size, step in zip(call.values.shape[1:3], call.stride, strict=True))
    return rows, columns


def prepare(
    scores: Tensor,
    values: Tensor,
    *,
    window: int | tuple[int, int],
    stride: int | tuple[int, int] = 1,
    position_bias: Tensor | None = None,
    tap_scale: Tensor | None = None,
    key_mask: Tensor | None = None,
    combine: str = "sum",
) -> QnACall:
    """Check the arguments of `qna` and bring them into one form (under autocast: values in autocast's dtype)."""
    checks.check_float_tensor(OP, "scores", scores, 5, "[B, H, W, L, heads]")
    checks.check_float_tensor(OP, "values", values, 5, "[B, H, W, heads, D]")
    batch, height, width, heads = values.shape[:4]
    queries = scores.shape[3]
    if queries == 0:
        raise ArgumentValueError(
            f"{OP}: got scores of shape {checks.shape_text(scores.shape)}, wanted at least one query: [B, H, W, L, heads]."
        )
    wanted = (batch, height, width, queries, heads)
    checks.check_shape(OP, "scores", scores, wanted, "[B, H, W, L, heads] with B, H, W and heads of values")
    taps = checks.check_pair(OP, "window", window)
    steps = checks.check_pair(OP, "stride", stride)
    for name, table in (("position_bias", position_bias), ("tap_scale", tap_scale)):
        if table is not None:
            checks.check_float_tensor(OP, name, table, 4, "[kh, kw, L, heads]")
            checks.check_shape(OP, name, table, (*taps, queries, heads), "[kh, kw, L, heads]")
    checks.check_key_mask(OP, key_mask, batch, height, width)
    checks.check_choice(OP, "combine", combine, COMBINES)
    checks.check_same_device(
        OP, values=values, scores=scores, position_bias=position_bias, tap_scale=tap_scale, key_mask=key_mask
    )
    cast = autocast_dtype(values)
    if cast is not None:
        values = values.to(cast)
    return QnACall(scores, values, position_bias, tap_scale, key_mask, taps, steps, combine)
