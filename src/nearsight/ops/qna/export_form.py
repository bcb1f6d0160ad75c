"""QnA's aggregation in plain torch operators, for programs that trace it: one slice per tap."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nearsight.ops.qna.call import QnACall, math_dtype, output_size
from nearsight.ops.windows import window_padding

__all__ = ["run"]


def run(call: QnACall) -> Tensor:
    dtype = math_dtype(call)
    scores, values = call.scores.to(dtype), call.values.to(dtype)
    if call.key_mask is not None:
        scores = scores.masked_fill(~call.key_mask[..., None, None], float("-inf"))
    # A stride that does not divide the size needs a little more at the end.
    (top, bottom), (left, right) = (window_padding(taps) for taps in call.window)
    pad = [0, 0, 0, 0, left, right + call.stride[1], top, bottom + call.stride[0]]
    scores, values = F.pad(scores, pad, value=float("-inf")), F.pad(values, pad)

    logits = []
    for tap, seen in enumerate(_taps(scores, call)):
        bias = None if call.position_bias is None else call.position_bias.to(dtype).flatten(0, 1)[tap]
        logits.append(seen if bias is None else seen + bias)
    largest = logits[0]
    for logit in logits[1:]:
        largest = torch.maximum(largest, logit)
    # A window that sees nothing has the maximum −∞; any finite one leaves its weights exp(−∞) = 0.
    largest = largest.clamp(min=torch.finfo(dtype).min).detach()
    weights = [(logit - largest).exp() for logit in logits]
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    total = torch.where(total > 0, total, torch.ones_like(total))

    out: Tensor | None = None
    for tap, (weight, seen) in enumerate(zip(weights, _taps(values, call), strict=True)):
        acting = weight / total
        if call.tap_scale is not None:
            acting = acting * call.tap_scale.to(dtype).flatten(0, 1)[tap]
        acting = acting[..., None] if call.combine == "stack" else acting.sum(3, keepdim=True)[..., None]
        out = acting * seen[:, :, :, None] if out is None else out + acting * seen[:, :, :, None]
    assert out is not None
    return (out if call.combine == "stack" else out.squeeze(3)).to(call.values.dtype)


def _taps(padded: Tensor, call: QnACall) -> list[Tensor]:
    """What each tap of every window sees, [B, H', W', …] each."""
    rows, columns = output_size(call)
    (sy, sx), (kh, kw) = call.stride, call.window
    return [
        padded[:, y : y + rows * sy : sy, x : x + columns * sx : sx][:, :rows, :columns]
        for y in range(kh)
        for x in range(kw)
    ]
