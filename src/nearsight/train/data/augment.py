"""Augmentation of whole batches on their device: shift, flip, cut out, normalise, from images kept there as uint8.

Random numbers are drawn for the batch of all processes and each takes its share, so a run on two processes sees the
images of a run on one with twice the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nearsight.train.data.config import AugmentConfig

__all__ = ["Draw", "cut_out", "draw", "gather", "normalise", "pad_images"]


class Draw(NamedTuple):
    """One batch's random choices, each [B]: shift down and right, whether to flip, centre of the blanked square."""

    rows: Tensor
    columns: Tensor
    flip: Tensor
    hole_row: Tensor
    hole_column: Tensor

    def share(self, rank: int, batch: int) -> Draw:
        return Draw(*(t[rank * batch : (rank + 1) * batch] for t in self))


def draw(config: AugmentConfig, count: int, size: tuple[int, int], generator: torch.Generator) -> Draw:
    """The choices for `count` images of `size` (rows, columns)."""
    device = generator.device
    reach = 2 * config.pad + 1 if config.crop == "pad" else 1

    def integers(high: int) -> Tensor:
        return torch.randint(high, (count,), generator=generator, device=device)

    rows, columns = integers(reach), integers(reach)
    flip = torch.rand(count, generator=generator, device=device) < config.flip
    return Draw(rows, columns, flip, integers(size[0]), integers(size[1]))


def pad_images(images: Tensor, config: AugmentConfig) -> Tensor:
    """[N, H, W, C] with a border of `pad` pixels, when the config shifts images."""
    if config.crop != "pad" or config.pad == 0:
        return images
    mode = "reflect" if config.pad_mode == "reflect" and config.pad < min(images.shape[1:3]) else "constant"
    # Reflection is not written for uint8; in parts, so that a large set never exists in float.
    parts = [
        F.pad(part.permute(0, 3, 1, 2).float(), [config.pad] * 4, mode=mode).to(torch.uint8).permute(0, 2, 3, 1)
        for part in images.split(4096)
    ]
    return torch.cat(parts).contiguous()


def gather(images: Tensor, indices: Tensor, size: tuple[int, int], choice: Draw | None = None) -> Tensor:
    """Images `indices` of [N, H', W', C], shifted and flipped by `choice`, as uint8 [B, H, W, C]; one indexed read."""
    if choice is None:
        return images[indices]
    device = images.device
    rows = choice.rows[:, None] + torch.arange(size[0], device=device)
    columns = torch.arange(size[1], device=device).expand(len(indices), -1)
    columns = torch.where(choice.flip[:, None], size[1] - 1 - columns, columns) + choice.columns[:, None]
    return images[indices[:, None, None], rows[:, :, None], columns[:, None, :]]


def cut_out(images: Tensor, side: int, choice: Draw) -> Tensor:
    """Normalised [B, C, H, W] with a square of `side` pixels around each centre set to 0 (the mean)."""
    if side == 0:
        return images
    height, width = images.shape[-2:]

    def inside(centre: Tensor, length: int) -> Tensor:
        first = (centre - side // 2)[:, None]
        at = torch.arange(length, device=images.device)
        return (at >= first) & (at < first + side)

    hole = inside(choice.hole_row, height)[:, :, None] & inside(choice.hole_column, width)[:, None, :]
    return images.masked_fill(hole[:, None], 0.0)


def normalise(images: Tensor, mean: Tensor, std: Tensor, channels_last: bool) -> Tensor:
    """uint8 [B, H, W, C] → float32 [B, C, H, W], (x/255 − mean)/std per channel."""
    scale = 1 / (255 * std)
    out = images.to(torch.float32).mul_(scale).sub_(mean / std).permute(0, 3, 1, 2)
    return out if channels_last else out.contiguous()
