"""TrivialAugment (Müller & Hutter 2021), its wide space, for whole batches on their device: one operation per image.

The pixels are those of torchvision's operations on PIL images, in integers wherever PIL uses them, so that workers and devices
agree. What each image gets is drawn on the host, which then knows how many images each operation has: they are brought into the
order of operations, each operation changes one slice, and all go back to their places. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["OPERATIONS", "Policy", "apply_policy", "draw_policy", "fill_of", "image_policy", "space"]

OPERATIONS = (
    "Identity",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Rotate",
    "Brightness",
    "Color",
    "Contrast",
    "Sharpness",
    "Posterize",
    "Solarize",
    "AutoContrast",
    "Equalize",
)
AT = {name: number for number, name in enumerate(OPERATIONS)}
# torchvision's number of magnitudes; its longest translation, and the share of an image that none exceeds here: the 32 pixels
# would empty an image of that size.
BINS = 31
REACH = 32.0
SHARE = 1 / 3
# PIL's grey, (19595 R + 38470 G + 7471 B + 2^15) / 2^16: whole numbers below 2^24, exact in float32.
GREY = (19595.0, 38470.0, 7471.0)
FIXED = 1 << 16


def space(size: tuple[int, int]) -> dict[str, tuple[Tensor, bool]]:
    """Every operation's magnitudes for images of `size` (rows, columns), and whether their sign is drawn.

    torchvision's wide space, but translations end at a third of the image.

    >>> float(space((32, 32))["TranslateX"][0].max()), float(space((224, 224))["TranslateX"][0].max())
    (10.666666984558105, 32.0)
    """

    def up_to(end: float) -> tuple[Tensor, bool]:
        return torch.linspace(0.0, end, BINS), True

    def reach(length: int) -> tuple[Tensor, bool]:
        return up_to(min(REACH, length * SHARE))

    none = (torch.tensor(0.0), False)
    bits = 8 - (torch.arange(BINS) * 6 / (BINS - 1)).round()
    values = (
        *(none, up_to(0.99), up_to(0.99), reach(size[1]), reach(size[0]), up_to(135.0)),
        *[up_to(0.99)] * 4,
        *((bits, False), (torch.linspace(255.0, 0.0, BINS), False), none, none),
    )
    return dict(zip(OPERATIONS, values, strict=True))


class Policy(NamedTuple):
    """Operations (numbers in OPERATIONS) and signed magnitudes of images, each [B], on the host."""

    operation: Tensor
    magnitude: Tensor


def draw_policy(count: int, size: tuple[int, int], generator: torch.Generator) -> Policy:
    """Operations and magnitudes for `count` images of `size` (rows, columns), all equally likely, from a generator of the host.

    >>> policy = draw_policy(3, (32, 32), torch.Generator().manual_seed(0))
    >>> [OPERATIONS[number] for number in policy.operation]
    ['TranslateY', 'TranslateX', 'Color']
    """
    magnitudes, signed = _table(size)
    operation = torch.randint(len(OPERATIONS), (count,), generator=generator)
    level = torch.randint(BINS, (count,), generator=generator)
    turned = torch.randint(2, (count,), generator=generator).bool() & signed[operation]
    magnitude = magnitudes[operation, level]
    return Policy(operation, torch.where(turned, -magnitude, magnitude))


@cache
def _table(size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """`space` as one tensor [operations, BINS] and one [operations]."""
    values, signed = zip(*space(size).values(), strict=True)
    return torch.stack([value.expand(BINS) for value in values]), torch.tensor(signed)


def fill_of(mean: tuple[float, ...]) -> tuple[int, ...]:
    """The mean colour in levels, for what a policy uncovers.

    >>> fill_of((0.5, 0.25, 1.0))
    (128, 64, 255)
    """
    return tuple(round(255 * m) for m in mean)


def image_policy(size: int, mean: tuple[float, ...]) -> Callable[[Any], Any]:
    """PIL image of size×size → PIL image, by torchvision's transform over the same space, for workers."""
    from torchvision.transforms import TrivialAugmentWide

    transform = TrivialAugmentWide(BINS, fill=[float(level) for level in fill_of(mean)])
    transform._augmentation_space = partial(_space_of, (size, size))
    return transform


def _space_of(size: tuple[int, int], bins: int) -> dict[str, tuple[Tensor, bool]]:
    return space(size)


def apply_policy(images: Tensor, policy: Policy, fill: Tensor) -> Tensor:
    """uint8 [B, H, W, C] → the same, each image changed by its operation; `fill`, uint8 [C], for what a shift uncovers.

    >>> images = torch.full((2, 4, 6, 3), 200, dtype=torch.uint8)
    >>> policy = Policy(torch.tensor([AT["Solarize"], AT["Identity"]]), torch.tensor([128.0, 0.0]))
    >>> apply_policy(images, policy, torch.zeros(3, dtype=torch.uint8))[:, 0, 0, 0]
    tensor([ 55, 200], dtype=torch.uint8)
    """
    order = policy.operation.argsort(stable=True)
    operation, magnitude = policy.operation[order], policy.magnitude[order].double()
    starts = [0, *torch.bincount(operation, minlength=len(OPERATIONS)).cumsum(0).tolist()]
    table = torch.stack([order.int(), order.argsort().int(), _amounts(operation, magnitude)])
    table = torch.cat([table, _inverse(operation, magnitude, (images.shape[1], images.shape[2]))])
    if images.is_cuda:
        table = table.pin_memory()
    table = table.to(images.device, non_blocking=True)
    place, back, matrix = table[0], table[1], table[3:]
    amount = table[2].view(torch.float32)[:, None, None, None]
    out = images.index_select(0, place)
    faded = torch.zeros(out.shape, device=out.device)

    def change(first: str, last: str, step: Callable[[slice], Tensor], what: Tensor = out) -> None:
        at = slice(starts[AT[first]], starts[AT[last] + 1])
        if at.stop > at.start:
            what[at] = step(at)

    change("ShearX", "Rotate", lambda at: _warp(out[at], matrix[:, at], fill))
    change("Color", "Contrast", lambda at: _grey(out[at]), faded)
    change("Contrast", "Contrast", lambda at: _mean(faded[at]), faded)
    change("Sharpness", "Sharpness", lambda at: _smooth(out[at]), faded)
    change("Brightness", "Sharpness", lambda at: _blend(out[at], faded[at], amount[at]))
    change("Posterize", "Posterize", lambda at: out[at] & amount[at].to(torch.uint8))
    change("Solarize", "Solarize", lambda at: torch.where(out[at] >= amount[at], ~out[at], out[at]))
    change("AutoContrast", "AutoContrast", lambda at: _auto_contrast(out[at]))
    change("Equalize", "Equalize", lambda at: _equalize(out[at]))
    return out.index_select(0, back)


def _amounts(operation: Tensor, magnitude: Tensor) -> Tensor:
    """[B], the bits of float32: the factor of a blend, the mask of a posterisation, else the magnitude."""
    mask = 256 - torch.exp2(8 - magnitude.clamp(0, 8))
    blended = (operation >= AT["Brightness"]) & (operation <= AT["Sharpness"])
    amount = torch.where(blended, 1 + magnitude, torch.where(operation == AT["Posterize"], mask, magnitude))
    return amount.float().view(torch.int32)


def _inverse(operation: Tensor, magnitude: Tensor, size: tuple[int, int]) -> Tensor:
    """[6, B], 16 bits behind the point: a pixel's source lies at x = (m₀ column + m₁ row + m₂), y = (m₃ column + m₄ row + m₅)."""

    def of(name: str) -> Tensor:
        return torch.where(operation == AT[name], magnitude, 0.0)

    centre_y, centre_x = size[0] / 2, size[1] / 2
    angle = of("Rotate").deg2rad()
    cos, sin = angle.cos(), angle.sin()
    across, down = of("ShearX") - sin, of("ShearY") + sin
    x = centre_x - cos * centre_x + sin * centre_y - of("TranslateX").trunc()
    y = centre_y - sin * centre_x - cos * centre_y - of("TranslateY").trunc()
    # A pixel's centre is half a pixel from its corner.
    rows = [cos, across, x + 0.5 * (cos + across), down, cos, y + 0.5 * (down + cos)]
    return torch.stack(rows).mul_(FIXED).add_(0.5).floor_().int()


def _warp(images: Tensor, matrix: Tensor, fill: Tensor) -> Tensor:
    batch, height, width, _ = images.shape
    row = torch.arange(height, dtype=torch.int32, device=images.device)[:, None]
    column = torch.arange(width, dtype=torch.int32, device=images.device)
    xx, xy, x, yx, yy, y = matrix[:, :, None, None]
    x, y = (xx * column + xy * row + x) >> 16, (yx * column + yy * row + y) >> 16
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    image = torch.arange(batch, device=images.device)[:, None, None]
    found = images[image, y.clamp_(0, height - 1), x.clamp_(0, width - 1)]
    return torch.where(inside[..., None], found, fill)


def _blend(images: Tensor, faded: Tensor, factor: Tensor) -> Tensor:
    """faded + factor·(images − faded), in PIL's order: an image that equals its faded self stays as it is."""
    return (images - faded).mul_(factor).add_(faded).clamp_(0, 255).to(torch.uint8)


def _grey(images: Tensor) -> Tensor:
    """float32 [B, H, W, 1] of whole numbers."""
    if images.shape[3] == 1:
        return images.float()
    red, green, blue = (images[..., c].float().mul_(weight) for c, weight in enumerate(GREY))
    return red.add_(green).add_(blue).add_(FIXED / 2).div_(FIXED).floor_()[..., None]


def _mean(grey: Tensor) -> Tensor:
    """[B, H, W, C], all channels alike → [B, 1, 1, 1], rounded as PIL does."""
    pixels = grey.shape[1] * grey.shape[2]
    total = grey[..., 0].sum((1, 2), dtype=torch.int64)
    return ((2 * total + pixels) // (2 * pixels))[:, None, None, None].float()


def _smooth(images: Tensor) -> Tensor:
    """float32 [B, H, W, C]: every pixel but the border's averaged with its neighbours, itself five times."""
    out = images.float()
    if min(out.shape[1:3]) < 3:
        return out
    around = F.avg_pool2d(out.permute(0, 3, 1, 2), 3, 1, divisor_override=1).permute(0, 2, 3, 1)
    inner = out[:, 1:-1, 1:-1]
    inner[:] = (around + 4 * inner).div_(13).add_(0.5).floor_()
    return out


def _auto_contrast(images: Tensor) -> Tensor:
    low, high = images.amin((1, 2), keepdim=True).int(), images.amax((1, 2), keepdim=True).int()
    stretched = ((images - low) * 255).div_((high - low).clamp_(min=1), rounding_mode="floor")
    return torch.where(high > low, stretched, images).to(torch.uint8)


def _equalize(images: Tensor) -> Tensor:
    """Each channel through the table that makes its histogram flat."""
    batch, height, width, channels = images.shape
    device = images.device
    band = torch.arange(batch * channels, device=device).view(batch, 1, 1, channels) * 256
    at = (band + images).flatten()
    count = torch.zeros(batch * channels * 256, dtype=torch.int32, device=device)
    count.scatter_add_(0, at, torch.ones((), dtype=torch.int32, device=device).expand(at.shape))
    count = count.view(-1, 256)
    highest = images.amax((1, 2)).view(-1, 1).long()
    step = (height * width - count.gather(1, highest)) // 255
    below = count.cumsum(1) - count
    level = torch.arange(256, device=device)
    table = torch.where(step > 0, ((below + step // 2) // step.clamp(min=1)).clamp_(max=255), level)
    return table.to(torch.uint8).flatten()[at].view(images.shape)
