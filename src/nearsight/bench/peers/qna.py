"""QnA's aggregation as the released code does it: raw exponentials and two depthwise convolutions, channels-last.

Not safe: scores above 88 overflow, in half types above 11.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

__all__ = ["eager_qna"]


def eager_qna(scores: Tensor, values: Tensor, position_bias: Tensor, tap_scale: Tensor) -> Tensor:
    """Σ_l conv(e^s·v, e^b·w) / conv(e^s, e^b), all in the dtype of the values."""
    heads, dim = values.shape[3:]
    window = position_bias.shape[0]
    queries = scores.shape[3]
    weights = scores.to(values.dtype).exp()
    weighted = (weights[..., None] * values[:, :, :, None]).flatten(3).permute(0, 3, 1, 2)
    bias = position_bias.to(values.dtype).exp()
    kernel = bias * tap_scale.to(values.dtype)

    def depthwise(x: Tensor, table: Tensor) -> Tensor:
        taps = table.permute(2, 3, 0, 1).flatten(0, 1)[:, None]
        return F.conv2d(x, taps, padding=window // 2, groups=x.shape[1])

    wide = kernel[..., None].expand(-1, -1, -1, -1, dim).flatten(3)
    top = depthwise(weighted, wide).permute(0, 2, 3, 1).unflatten(3, (queries, heads, dim))
    bottom = depthwise(weights.flatten(3).permute(0, 3, 1, 2), bias).permute(0, 2, 3, 1).unflatten(3, (queries, heads))
    return (top / bottom[..., None]).sum(3)
