"""Block attention without Triton: a few batched products, also for `torch.export`, valid for every image size."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nearsight.ops.block.call import BlockCall
from nearsight.ops.block.partition import from_blocks, to_blocks, valid_places

__all__ = ["attend", "run", "weights"]


def run(call: BlockCall) -> Tensor:
    call = call.in_one_dtype()
    blocks = to_blocks(call.x, call.block)
    if call.w_v.dim() == 2:
        v = F.linear(blocks, call.w_v)
    else:
        v = torch.einsum("npc,poc->npo", blocks, call.w_v)
    return attend(call, v)


def attend(call: BlockCall, v: Tensor, qk: Tensor | None = None) -> Tensor:
    """[B, H, W, C] from the call's weights and the values v [blocks, places, C]; `qk` as in `weights`."""
    v = v.unflatten(-1, (call.heads, -1)).transpose(1, 2)
    y = (weights(call, qk).to(v.dtype) @ v).transpose(1, 2).flatten(2)
    batch, height, width, _ = call.x.shape
    return from_blocks(y, batch, height, width, call.block)


def weights(call: BlockCall, qk: Tensor | None = None) -> Tensor:
    """Softmax weights [blocks, heads, places, places]; zero at places that may not be attended.

    `qk` are queries and keys side by side, [blocks, places, 2·C], where w_q and w_k do not make them.
    """
    call = call.in_one_dtype()
    if qk is None:
        qk = F.linear(to_blocks(call.x, call.block), torch.cat([call.w_q, call.w_k]))
    # Each [blocks, heads, places, D].
    q, k = qk.unflatten(-1, (2, call.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    logits = q @ k.transpose(-1, -2)
    if call.rel_row is not None or call.rel_col is not None:
        logits = logits + _relative_logits(call, q)
    valid = valid_places(call.x, call.key_mask, call.block)
    if valid is None:
        return logits.softmax(-1)
    invalid = ~valid[:, None, None, :]
    # A finite floor instead of −∞: a block with nothing to attend to gives 0, not NaN, after the second fill.
    return logits.masked_fill(invalid, torch.finfo(logits.dtype).min).softmax(-1).masked_fill(invalid, 0.0)


def _relative_logits(call: BlockCall, q: Tensor) -> Tensor:
    """q_ij·r_{a−i,b−j} for all pairs of places in a block, broadcastable to [blocks, heads, places, places]."""
    side, half = call.block, call.head_dim // 2
    place = torch.arange(side, device=q.device)
    offset = place[None, :] - place[:, None] + side - 1
    q = q.unflatten(2, (side, side))
    logits = q.new_zeros(())
    # A table per head and place, whose gradient adds up blocks alone: one long sum of all three rounds past the error rule.
    if call.rel_row is not None:
        rows = call.rel_row[offset][None, :, None].expand(call.heads, -1, side, -1, -1)
        logits = logits + torch.einsum("nhijd,hijad->nhija", q[..., :half], rows)[..., :, None]
    if call.rel_col is not None:
        columns = call.rel_col[offset].expand(call.heads, side, -1, -1, -1)
        logits = logits + torch.einsum("nhijd,hijbd->nhijb", q[..., half:], columns)[..., None, :]
    return logits.expand(*q.shape[:4], side, side).flatten(4).flatten(2, 3)
