"""Local attention by its definition: every window copied out, one softmax over its taps. Slow, large, exact."""

from __future__ import annotations

import torch
from torch import Tensor

from nearsight.ops.local.call import LocalCall
from nearsight.ops.windows import gather_taps, tap_inside

__all__ = ["run", "weights"]


def weights(call: LocalCall) -> Tensor:
    """Softmax weights [B, H, W, heads, kh·kw]; zero at taps that may not be attended."""
    q, k = call.q, call.k
    batch, height, width, heads, dim = q.shape
    kh, kw = call.window
    logits = q.new_zeros(batch, height, width, heads, kh * kw)
    if k is not None:
        logits = torch.einsum("bhwnd,bhwtnd->bhwnt", q, gather_taps(k, call.window, call.dilation))
    if call.rel_row is not None:
        row = torch.einsum("bhwnd,ntd->bhwnt", q[..., : dim // 2], call.rel_row.expand(heads, -1, -1))
        logits = logits + row.repeat_interleave(kw, dim=-1)
    if call.rel_col is not None:
        column = torch.einsum("bhwnd,ntd->bhwnt", q[..., dim // 2 :], call.rel_col.expand(heads, -1, -1))
        logits = logits + column.repeat(1, 1, 1, 1, kh)
    logits = logits * call.scale

    valid = torch.ones(1, 1, 1, 1, 1, dtype=torch.bool, device=q.device)
    inside = tap_inside(height, width, call.window, call.dilation, (1, 1), q.device)
    if call.border == "mask":
        valid = valid & inside[None, :, :, None]
    if call.key_mask is not None:
        attended = gather_taps(call.key_mask, call.window, call.dilation) | ~inside
        valid = valid & attended[:, :, :, None]
    valid = valid.expand(logits.shape)
    logits = logits.masked_fill(~valid, float("-inf"))
    # A query with nothing to attend to: a softmax over zeros, then masked, gives 0 and zero gradients instead of NaN.
    logits = logits.masked_fill(~valid.any(-1, keepdim=True), 0.0)
    return logits.softmax(-1).masked_fill(~valid, 0.0)


def run(call: LocalCall) -> Tensor:
    return torch.einsum("bhwnt,bhwtnd->bhwnd", weights(call), gather_taps(call.v, call.window, call.dilation))
