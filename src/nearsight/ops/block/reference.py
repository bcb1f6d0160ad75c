"""Block attention by its definition: every pair of places with its own relative embedding. Slow, large, exact."""

from __future__ import annotations

import torch
from torch import Tensor

from nearsight.ops.block.call import BlockCall
from nearsight.ops.block.partition import from_blocks, to_blocks, valid_places

__all__ = ["run"]


def run(call: BlockCall) -> Tensor:
    call = call.in_one_dtype()
    batch, height, width, _ = call.x.shape
    side, heads, half = call.block, call.heads, call.head_dim // 2
    x = to_blocks(call.x, side)
    q, k = ((x @ w.t()).unflatten(-1, (heads, -1)) for w in (call.w_q, call.w_k))  # [blocks, places, heads, D]
    v = torch.einsum("npc,poc->npo", x, call.w_v.expand(side * side, -1, -1)).unflatten(-1, (heads, -1))

    row = torch.arange(side * side, device=x.device) // side
    column = torch.arange(side * side, device=x.device) % side
    logits = torch.einsum("nihd,njhd->nhij", q, k)
    if call.rel_row is not None:
        r = call.rel_row[row[None, :] - row[:, None] + side - 1]
        logits = logits + torch.einsum("nihd,ijd->nhij", q[..., :half], r)
    if call.rel_col is not None:
        r = call.rel_col[column[None, :] - column[:, None] + side - 1]
        logits = logits + torch.einsum("nihd,ijd->nhij", q[..., half:], r)

    valid = valid_places(call.x, call.key_mask, side)
    if valid is not None:
        invalid = ~valid[:, None, None, :]
        logits = logits.masked_fill(invalid, float("-inf"))
        # A block with nothing to attend to: a softmax over zeros, then masked, gives 0 and zero gradients instead of NaN.
        logits = logits.masked_fill(~valid.any(-1)[:, None, None, None], 0.0)
        weights = logits.softmax(-1).masked_fill(invalid, 0.0)
    else:
        weights = logits.softmax(-1)
    y = torch.einsum("nhij,njhd->nihd", weights, v).flatten(2)
    return from_blocks(y, batch, height, width, side)
