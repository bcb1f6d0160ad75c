"""An image as its blocks and back, padded below and on the right to whole blocks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nearsight.ops.dispatch import always, exporting

__all__ = ["count_blocks", "from_blocks", "to_blocks", "valid_places"]


def count_blocks(size: int, block: int) -> int:
    """How many blocks cover `size` pixels."""
    return (size + block - 1) // block


def to_blocks(x: Tensor, block: int) -> Tensor:
    """[B, H, W, C] → [B·blocks, block², C], zeros beyond the image.

    >>> to_blocks(torch.arange(6.0).view(1, 2, 3, 1), 2)[..., 0]
    tensor([[0., 1., 3., 4.],
            [2., 0., 5., 0.]])
    """
    batch, height, width, channels = x.shape
    rows, columns = count_blocks(height, block), count_blocks(width, block)
    x = F.pad(x, (0, 0, 0, columns * block - width, 0, rows * block - height))
    x = x.reshape(batch, rows, block, columns, block, channels)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, block * block, channels)


def from_blocks(blocks: Tensor, batch: int, height: int, width: int, block: int) -> Tensor:
    """[B·blocks, block², C] → [B, H, W, C]: what `to_blocks` cut, without the padding."""
    rows, columns, channels = count_blocks(height, block), count_blocks(width, block), blocks.shape[-1]
    x = blocks.reshape(batch, rows, columns, block, block, channels).permute(0, 1, 3, 2, 4, 5)
    x = x.reshape(batch, rows * block, columns * block, channels)
    if exporting():  # a fresh tensor: strides of a slice would tie the graph to this size
        return F.pad(x, (0, 0, 0, width - columns * block, 0, height - rows * block))
    return x[:, :height, :width]


def valid_places(x: Tensor, key_mask: Tensor | None, block: int) -> Tensor | None:
    """Which places of [B, H, W, C] may be attended, [B·blocks, block²], or None when all may."""
    batch, height, width = x.shape[:3]
    whole = always(height % block == 0) and always(width % block == 0)
    if key_mask is None and whole:
        return None
    if key_mask is None:
        key_mask = torch.ones(batch, height, width, dtype=torch.bool, device=x.device)
    return to_blocks(key_mask[..., None].to(x.dtype), block)[..., 0] > 0
