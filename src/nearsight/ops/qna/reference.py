"""QnA's aggregation by its definition: every window copied out, one softmax over its taps per query. Slow, large, exact."""

from __future__ import annotations

from torch import Tensor

from nearsight.ops.qna.call import QnACall, math_dtype
from nearsight.ops.windows import gather_taps, tap_inside

__all__ = ["run", "weights"]


def weights(call: QnACall) -> Tensor:
    """Softmax weights [B, H', W', L, heads, kh·kw] in `math_dtype`; zero at taps that may not be attended."""
    dtype = math_dtype(call)
    height, width = call.scores.shape[1:3]
    logits = gather_taps(call.scores.to(dtype), call.window, stride=call.stride).movedim(3, -1)
    if call.position_bias is not None:
        logits = logits + call.position_bias.to(dtype).flatten(0, 1).movedim(0, -1)

    valid = tap_inside(height, width, call.window, (1, 1), call.stride, call.scores.device)[None]
    if call.key_mask is not None:
        valid = gather_taps(call.key_mask, call.window, stride=call.stride) & valid
    valid = valid[:, :, :, None, None].expand(logits.shape)
    logits = logits.masked_fill(~valid, float("-inf"))
    # A window with nothing to attend to: a softmax over zeros, then masked, gives 0 and zero gradients instead of NaN.
    logits = logits.masked_fill(~valid.any(-1, keepdim=True), 0.0)
    return logits.softmax(-1).masked_fill(~valid, 0.0)


def run(call: QnACall) -> Tensor:
    acting = weights(call)
    if call.tap_scale is not None:
        acting = acting * call.tap_scale.to(acting.dtype).flatten(0, 1).movedim(0, -1)
    if call.combine == "sum":
        acting = acting.sum(3, keepdim=True)
    taps = gather_taps(call.values.to(acting.dtype), call.window, stride=call.stride).movedim(3, -2)
    # A product and a sum, not an einsum: autocast would run that in a half type.
    out = (acting[..., None] * taps[:, :, :, None]).sum(-2)
    out = out.squeeze(3) if call.combine == "sum" else out
    return out.to(call.values.dtype)
