"""Where the taps of a window lie: the one rule that local attention and QnA share.

Tap t of k sits at (t − (k−1)//2)·dilation from the centre, so k = 4 covers −1…2. A window is never shifted inward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["gather_taps", "tap_inside", "tap_offsets", "window_padding"]

Pair = tuple[int, int]


def tap_offsets(size: int, dilation: int = 1) -> list[int]:
    """Offsets of the taps of one axis from the centre, in pixels.

    >>> tap_offsets(4), tap_offsets(3, dilation=2)
    ([-1, 0, 1, 2], [-2, 0, 2])
    """
    return [(t - (size - 1) // 2) * dilation for t in range(size)]


def window_padding(size: int, dilation: int = 1) -> Pair:
    """Pixels one axis needs (before, after) so that every tap of every window exists."""
    before = (size - 1) // 2 * dilation
    return before, (size - 1) * dilation - before


def gather_taps(x: Tensor, window: Pair, dilation: Pair = (1, 1), stride: Pair = (1, 1)) -> Tensor:
    """Copy each window's pixels beside its centre: [B, H, W, …] → [B, ⌈H/s⌉, ⌈W/s⌉, kh·kw, …], zeros outside the image.

    The definition, at k² times the memory; only references use it.
    """
    height, width = x.shape[1:3]
    top, bottom = window_padding(window[0], dilation[0])
    left, right = window_padding(window[1], dilation[1])
    tail = [0, 0] * (x.dim() - 3)
    padded = F.pad(x, [*tail, left, right, top, bottom])
    taps = [
        padded[:, dy * dilation[0] :][:, :height][:, :: stride[0]][:, :, dx * dilation[1] :][:, :, :width][
            :, :, :: stride[1]
        ]
        for dy in range(window[0])
        for dx in range(window[1])
    ]
    return torch.stack(taps, dim=3)


def tap_inside(height: int, width: int, window: Pair, dilation: Pair, stride: Pair, device: torch.device) -> Tensor:
    """True where a tap lies inside the image: [⌈H/s⌉, ⌈W/s⌉, kh·kw]."""
    rows = torch.arange(0, height, stride[0], device=device)[:, None] + torch.tensor(
        tap_offsets(window[0], dilation[0]), device=device
    )
    columns = torch.arange(0, width, stride[1], device=device)[:, None] + torch.tensor(
        tap_offsets(window[1], dilation[1]), device=device
    )
    row_in = (rows >= 0) & (rows < height)
    column_in = (columns >= 0) & (columns < width)
    return (row_in[:, None, :, None] & column_in[None, :, None, :]).flatten(2)
