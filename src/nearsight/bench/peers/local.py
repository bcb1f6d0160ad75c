"""Local attention as it is done elsewhere: windows unfolded in memory, and FlexAttention with a window as its mask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["flex_local", "unfold_local"]


def unfold_local(window: int) -> Callable[..., Tensor]:
    """`F.unfold` on keys and values, one softmax over the copied windows; pixels outside the image masked."""

    def run(q: Tensor, k: Tensor, v: Tensor, rel_row: Tensor, rel_col: Tensor) -> Tensor:
        batch, height, width, heads, dim = q.shape
        pixels, taps, half = height * width, window * window, dim // 2

        def windows(x: Tensor) -> Tensor:
            image = x.flatten(3).permute(0, 3, 1, 2)
            return F.unfold(image, window, padding=window // 2).view(batch, heads, dim, taps, pixels)

        query = q.flatten(1, 2).permute(0, 2, 3, 1)
        logits = (query[:, :, :, None] * windows(k)).sum(2).view(batch, heads, window, window, pixels)
        logits = logits + torch.einsum("bndp,td->bntp", query[:, :, :half], rel_row)[:, :, :, None]
        logits = logits + torch.einsum("bndp,td->bntp", query[:, :, half:], rel_col)[:, :, None]
        inside = F.unfold(q.new_ones(1, 1, height, width), window, padding=window // 2)
        logits = logits.flatten(2, 3).masked_fill(inside[:, None] == 0, float("-inf"))
        out = (logits.softmax(2)[:, :, None] * windows(v)).sum(3)
        return out.permute(0, 3, 1, 2).unflatten(1, (height, width))

    return run


def flex_local(
    height: int, width: int, window: int, device: torch.device, *, positions: bool, compiled: bool
) -> Callable[..., Tensor]:
    """FlexAttention over all pixels with the window as its block mask.

    `positions` adds q·r in `score_mod`, read from one table per axis of each query's products with the embeddings; their
    gradients flow through the captured tables.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    reach = window // 2
    pixels = height * width

    def near(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        dy, dx = key // width - query // width, key % width - query % width
        return (dy.abs() <= reach) & (dx.abs() <= reach)

    block_mask = create_block_mask(near, None, None, pixels, pixels, device=device)

    def tokens(x: Tensor) -> Tensor:
        return x.flatten(1, 2).transpose(1, 2)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_attention(query, key, value, block_mask=block_mask, scale=1.0)

    def with_positions(query: Tensor, key: Tensor, value: Tensor, rel_row: Tensor, rel_col: Tensor) -> Tensor:
        half = query.shape[-1] // 2
        # Float32: their gradients are summed by atomic additions.
        rows = torch.matmul(query[..., :half], rel_row.t()).float()
        columns = torch.matmul(query[..., half:], rel_col.t()).float()

        def add_position(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            dy = (j // width - i // width + reach).clamp(0, window - 1)
            dx = (j % width - i % width + reach).clamp(0, window - 1)
            return score + rows[b, h, i, dy] + columns[b, h, i, dx]

        return flex_attention(query, key, value, score_mod=add_position, block_mask=block_mask, scale=1.0)

    inner: Callable[..., Tensor] = with_positions if positions else plain
    if compiled:
        inner = torch.compile(inner, dynamic=False, fullgraph=True)

    def run(q: Tensor, k: Tensor, v: Tensor, **tables: Tensor) -> Tensor:
        out = inner(tokens(q), tokens(k), tokens(v), **tables)
        return out.transpose(1, 2).unflatten(1, (height, width))

    return run
