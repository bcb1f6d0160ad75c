"""Fixed positions: two-dimensional sines and cosines, made for the size of the map that comes."""

from __future__ import annotations

import torch
from torch import Tensor

from nearsight.errors import ArgumentValueError

__all__ = ["sincos_2d"]


def sincos_2d(
    height: int,
    width: int,
    channels: int,
    *,
    temperature: float = 10000.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sine-cosine positions of a map, [H, W, channels].

        p(y, x) = [sin(y·ω), cos(y·ω), sin(x·ω), cos(x·ω)] ,   ω_i = temperature^(−i / (channels/4))

    The first half of the channels tells the row, the second half the column.

    >>> sincos_2d(5, 7, 8).shape
    torch.Size([5, 7, 8])
    """
    if channels < 4 or channels % 4:
        raise ArgumentValueError(
            f"sincos_2d: got channels={channels}, wanted a multiple of 4: sine and cosine of row and column."
        )
    quarter = channels // 4
    omega = temperature ** (-torch.arange(quarter, device=device, dtype=torch.float32) / quarter)
    rows = torch.arange(height, device=device, dtype=torch.float32)[:, None] * omega
    columns = torch.arange(width, device=device, dtype=torch.float32)[:, None] * omega
    row = torch.cat([rows.sin(), rows.cos()], -1)[:, None].expand(height, width, channels // 2)
    column = torch.cat([columns.sin(), columns.cos()], -1)[None].expand(height, width, channels // 2)
    return torch.cat([row, column], -1).to(dtype or torch.get_default_dtype())
