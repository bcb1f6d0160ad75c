"""Augmentation of whole batches on their device: shift, flip, cut out, erase, normalise, from images kept there as uint8.

Random numbers are drawn for the batch of all processes and each takes its share, so a run on two processes sees the
images of a run on one with twice the batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nearsight.train.data.config import AugmentConfig

__all__ = ["Draw", "cut_out", "draw", "draw_patches", "erase", "gather", "normalise", "pad_images"]

# Random erasing as in timm: the patch's share of the image, the logarithm of its height over its width, tries until one fits.
AREA = (0.02, 1 / 3)
LOG_ASPECT = (math.log(0.3), -math.log(0.3))
TRIES = 10


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


def cut_out(images: Tensor, side: int, row: Tensor, column: Tensor) -> Tensor:
    """Normalised [B, C, H, W] with a square of `side` pixels around each centre, [B] and [B], set to 0 (the mean)."""
    height, width = images.shape[-2:]

    def inside(centre: Tensor, length: int) -> Tensor:
        first = (centre - side // 2)[:, None]
        at = torch.arange(length, device=images.device)
        return (at >= first) & (at < first + side)

    hole = inside(row, height)[:, :, None] & inside(column, width)[:, None, :]
    return images.masked_fill(hole[:, None], 0.0)


def draw_patches(
    chance: float, count: int, size: tuple[int, int], device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Where to erase `count` images of `size` (rows, columns): [count, 4], top, left, height and width; 0 high and wide: nowhere.

    Area and aspect are drawn as timm's RandomErasing draws them, for all images at once instead of one after the other.

    >>> draw_patches(1.0, 5, (32, 48), torch.device("cpu")).shape
    torch.Size([5, 4])
    """

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device).mul_(high - low).add_(low)

    rows, columns = size
    area = uniform(*AREA, TRIES, count).mul_(rows * columns)
    aspect = uniform(*LOG_ASPECT, TRIES, count).exp_()
    height, width = (area * aspect).sqrt_().round_(), (area / aspect).sqrt_().round_()
    fits = (height < rows) & (width < columns)
    first = fits.int().argmax(0, keepdim=True)  # the first try that fits
    wanted = (uniform(0, 1, count) < chance) & fits.any(0)
    height, width = (side.gather(0, first)[0] * wanted for side in (height, width))
    top = (uniform(0, 1, count) * (rows - height + 1)).floor_()
    left = (uniform(0, 1, count) * (columns - width + 1)).floor_()
    return torch.stack([top, left, height, width], 1).long()


def erase(images: Tensor, patches: Tensor, noise: Tensor) -> Tensor:
    """Normalised [B, C, H, W] with each patch (see `draw_patches`) filled from `noise` of the same shape."""

    def inside(first: Tensor, side: Tensor, length: int) -> Tensor:
        at = torch.arange(length, device=images.device)
        return (at >= first[:, None]) & (at < (first + side)[:, None])

    top, left, height, width = patches.unbind(1)
    hole = inside(top, height, images.shape[2])[:, :, None] & inside(left, width, images.shape[3])[:, None, :]
    return torch.where(hole[:, None], noise, images)


def normalise(images: Tensor, mean: Tensor, std: Tensor, channels_last: bool) -> Tensor:
    """uint8 [B, H, W, C] → float32 [B, C, H, W], (x/255 − mean)/std per channel."""
    scale = 1 / (255 * std)
    out = images.to(torch.float32).mul_(scale).sub_(mean / std).permute(0, 3, 1, 2)
    return out if channels_last else out.contiguous()
