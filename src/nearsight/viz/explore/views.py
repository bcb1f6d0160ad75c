"""What the page shows, as numbers: pure functions of a network, an image, a place in it and the visitor's choices."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from nearsight.layers import ExplicitAttention2d
from nearsight.viz.explore.subjects import Subject
from nearsight.viz.maps import LayerMaps, attention_maps, layer_maps

__all__ = ["GIVEN", "RECEIVED", "Peak", "View", "look", "peaks", "pixel_at", "place_of", "predict", "radius_of"]

GIVEN, RECEIVED = "given", "received"
Pair = tuple[int, int]
# A place in an image that holds for every network's size of it: (down, across), from 0 to 1.
Place = tuple[float, float]


class View(NamedTuple):
    """One layer's answer: the input as an image [H, W] or [H, W, 3] in 0…1, the pixel asked about, the layer's maps."""

    shown: Any
    pixel: Pair
    mode: str
    maps: LayerMaps

    @property
    def heads(self) -> Tensor:
        """The maps of all heads, [heads, h, w]: of the pixel, or what each location receives."""
        found = self.maps.received if self.mode == RECEIVED else self.maps.weights
        assert found is not None
        return found[0] if self.mode == RECEIVED else found[0, 0]


class Peak(NamedTuple):
    """Where a head's map is strongest: cell (y, x) of the layer's grid, and the number there."""

    head: int
    cell: Pair
    value: float


def pixel_at(place: Place, size: Pair) -> Pair:
    """The pixel of an image of `size` at a place.

    >>> pixel_at((0.5, 0.99), (10, 20)), pixel_at((1.0, -0.1), (10, 20))
    ((5, 19), (9, 0))
    """
    y, x = (min(max(int(part * n), 0), n - 1) for part, n in zip(place, size, strict=True))
    return y, x


def place_of(pixel: Pair, size: Pair) -> Place:
    """The middle of a pixel of an image of `size`.

    >>> place_of((5, 19), (10, 20))
    (0.55, 0.975)
    """
    return (pixel[0] + 0.5) / size[0], (pixel[1] + 0.5) / size[1]


def look(
    subject: Subject, image: Image.Image, layer: str, place: Place, mode: str = GIVEN, radius: float | None = None
) -> View:
    """What a layer attends to at a place of an image, or what every location receives.

    `radius` stands in for what an explicit layer has learned; other layers have none and ignore it.
    """
    pixels = subject.prepare(image)
    size = (pixels.shape[2], pixels.shape[3])
    pixel = pixel_at(place, size)
    with subject.lock:
        found = attention_maps(subject.model, pixels, layers=layer, pixels=[pixel], received=mode == RECEIVED)
    maps = found[layer]
    if radius is not None and radius_of(subject, layer) is not None:
        maps = _with_radius(subject.model.get_submodule(layer), maps, mode, radius)
    return View(subject.shown(pixels[0]), pixel, mode, maps)


def radius_of(subject: Subject, layer: str) -> float | None:
    """The radius an explicit layer has learned (the mean where each head has its own); None for other layers."""
    module = subject.model.get_submodule(layer)
    radius = module.radius if isinstance(module, ExplicitAttention2d) else None
    return None if radius is None else float(radius.detach().mean())


def _with_radius(layer: Any, maps: LayerMaps, mode: str, radius: float) -> LayerMaps:
    """The maps of an explicit layer, had it learned another radius; its own is left alone, for others look at it too."""
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.log_radius.fill_(math.log(radius))
    # Explicit attention looks at no image, so any input of the right size will do.
    empty = torch.zeros(1, layer.in_channels, *maps.grid)
    changed = layer_maps(other, empty, maps.cells, received=mode == RECEIVED)
    return dataclasses.replace(changed, name=maps.name, image_size=maps.image_size)


@torch.no_grad()
def predict(subject: Subject, image: Image.Image) -> dict[str, float] | None:
    """The probability of each class; None for a network that does not classify."""
    if subject.classes is None:
        return None
    with subject.lock:
        logits = subject.model(subject.prepare(image))[0]
    return dict(zip(subject.classes, logits.float().softmax(0).tolist(), strict=True))


def peaks(view: View) -> list[Peak]:
    """Where each head's map is strongest; for QnA's signed weights, the largest positive one."""
    width = view.heads.shape[-1]
    values, where = view.heads.flatten(1).max(1)
    return [
        Peak(head, (at // width, at % width), value)
        for head, (value, at) in enumerate(zip(values.tolist(), where.tolist(), strict=True))
    ]
