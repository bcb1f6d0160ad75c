"""QnA's aggregation in a few plain torch operators, for programs that trace it and must hold for every image size."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nearsight.ops.qna.call import QnACall, math_dtype, output_size
from nearsight.ops.windows import window_padding

__all__ = ["run"]


def run(call: QnACall) -> Tensor:
    """The columns of the windows are laid beside each other once, kw times the map; their rows are slices of that."""
    dtype = math_dtype(call)
    scores, values = call.scores.to(dtype), call.values.to(dtype)
    if call.key_mask is not None:
        scores = scores.masked_fill(~call.key_mask[..., None, None], float("-inf"))
    logits = torch.stack(_rows(_columns(scores, call, float("-inf")), call), 3)  # [B, H', W', kh, kw, L, heads]
    if call.position_bias is not None:
        logits = logits + call.position_bias.to(dtype)
    # A window that sees nothing has the maximum −∞; any finite one leaves its weights exp(−∞) = 0.
    largest = logits.amax((3, 4), keepdim=True).clamp(min=torch.finfo(dtype).min).detach()
    weights = (logits - largest).exp()
    total = weights.sum((3, 4), keepdim=True)
    acting = weights / torch.where(total > 0, total, torch.ones_like(total))
    if call.tap_scale is not None:
        acting = acting * call.tap_scale.to(dtype)
    if call.combine == "sum":
        acting = acting.sum(5, keepdim=True)

    out: Tensor | None = None
    for weight, seen in zip(acting.unbind(3), _rows(_columns(values, call, 0.0), call), strict=True):
        part = (weight[..., None] * seen[:, :, :, :, None]).sum(3)  # over the columns: [B, H', W', L or 1, heads, D]
        out = part if out is None else out + part
    assert out is not None
    return (out if call.combine == "stack" else out.squeeze(3)).to(call.values.dtype)


def _columns(x: Tensor, call: QnACall, outside: float) -> Tensor:
    """[B, H, W, …] → [B, H and padding, W', kw, …]: what each column of taps sees."""
    (top, bottom), (left, right) = (window_padding(taps) for taps in call.window)
    (down, across), (_, count) = call.stride, output_size(call)
    # A stride that does not divide the size needs a little more at the end.
    x = F.pad(x, [0, 0, 0, 0, left, right + across, top, bottom + down], value=outside)
    return torch.stack([x[:, :, t : t + count * across : across][:, :, :count] for t in range(call.window[1])], 3)


def _rows(columns: Tensor, call: QnACall) -> list[Tensor]:
    """What each row of taps sees, [B, H', W', kw, …] each."""
    step, (count, _) = call.stride[0], output_size(call)
    return [columns[:, t : t + count * step : step][:, :count] for t in range(call.window[0])]
