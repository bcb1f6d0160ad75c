"""Local attention in a few plain operators, for graphs that leave PyTorch and must hold for every image size."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nearsight.ops.local.call import LocalCall
from nearsight.ops.windows import window_padding

__all__ = ["run"]


def run(call: LocalCall) -> Tensor:
    """The columns of the windows are gathered once, kw times the map; their rows are slices of that."""
    q = call.q * call.scale
    batch, height, width, heads, dim = q.shape
    kh, kw = call.window

    def rows(x: Tensor, t: int) -> Tensor:
        return x.index_select(1, torch.arange(height, device=x.device) + t * call.dilation[0])

    keys = None if call.k is None else _gather_columns(call.k, call)
    column = q.new_zeros(1, 1, 1, kw, 1)
    if call.rel_col is not None:
        column = torch.einsum("bhwnd,ntd->bhwtn", q[..., dim // 2 :], call.rel_col.expand(heads, -1, -1))
    row = q.new_zeros(1, 1, 1, kh, 1)
    if call.rel_row is not None:
        row = torch.einsum("bhwnd,ntd->bhwtn", q[..., : dim // 2], call.rel_row.expand(heads, -1, -1))
    parts = []
    for t in range(kh):
        part = row[:, :, :, t : t + 1] + column
        if keys is not None:
            part = part + (q[:, :, :, None] * rows(keys, t)).sum(-1)
        parts.append(part.expand(batch, height, width, kw, heads))
    logits = torch.cat(parts, 3)

    mask = call.key_mask
    if mask is None:
        mask = torch.ones(batch, height, width, dtype=torch.bool, device=q.device)
    # Padding fills with 0, so what is gathered says "may not be attended" with border "zeros", "may" otherwise.
    zeros = call.border == "zeros"
    gathered = _gather_columns((~mask if zeros else mask).to(q.dtype)[..., None, None], call)[..., 0]
    marked = torch.cat([rows(gathered, t) for t in range(kh)], 3) > 0
    invalid = marked if zeros else ~marked
    logits = logits.masked_fill(invalid, torch.finfo(q.dtype).min)
    weights = logits.softmax(3).masked_fill(invalid, 0.0)

    values = _gather_columns(call.v, call)
    out = torch.zeros_like(q)
    for t, weight in enumerate(weights.split(kw, 3)):
        out = out + (weight[..., None] * rows(values, t)).sum(3)
    return out


def _gather_columns(x: Tensor, call: LocalCall) -> Tensor:
    """[B, H, W, …] → [B, H + padding, W, kw, …], zeros outside the image."""
    width = x.shape[2]
    padding = (*window_padding(call.window[1], call.dilation[1]), *window_padding(call.window[0], call.dilation[0]))
    padded = F.pad(x, (0, 0, 0, 0, *padding))
    taps = torch.arange(call.window[1], device=x.device) * call.dilation[1]
    index = torch.arange(width, device=x.device)[:, None] + taps
    return padded.index_select(2, index.flatten()).unflatten(2, (width, call.window[1]))
