"""Annotated images: files with boxes, checked once when they are read, whatever format they came in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nearsight.errors import UserError
from nearsight.train.data.images import BadImageError, decode

__all__ = ["AnnotatedImages", "Collector", "Objects", "nothing_to_learn", "numbers"]


class Objects(NamedTuple):
    """The objects of one image: boxes [N, 4] as x0, y0, x1, y1 in pixels, labels [N], areas [N], which are crowds [N].

    A crowd is a region of many: it is no target in training, and detections inside it are not counted in evaluation.
    """

    boxes: Tensor
    labels: Tensor
    areas: Tensor
    crowd: Tensor


class AnnotatedImages:
    """Image files and their objects, kept in a few flat tensors so that worker processes share them."""

    def __init__(self, files: list[str], sizes: Tensor, objects: Objects, starts: Tensor, max_pixels: int) -> None:
        self.files, self.sizes, self.objects, self.starts = files, sizes, objects, starts
        self.max_pixels = max_pixels

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        return self.files[index]

    def size(self, index: int) -> tuple[int, int]:
        """(rows, columns), as the annotations state them."""
        rows, columns = self.sizes[index].tolist()
        return rows, columns

    def objects_of(self, index: int) -> Objects:
        part = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return Objects(*(tensor[part] for tensor in self.objects))

    def read(self, index: int) -> tuple[Image.Image, Objects]:
        """An RGB image and its objects, or `BadImageError`."""
        # Annotations count pixels as they lie in the file.
        image = decode(Path(self.files[index]), "RGB", self.max_pixels, as_stored=True)
        rows, columns = self.size(index)
        if (image.height, image.width) != (rows, columns):
            raise BadImageError(f"{image.width}×{image.height} pixels, its annotation says {columns}×{rows}")
        return image, self.objects_of(index)

    def take(self, indices: Sequence[int]) -> AnnotatedImages:
        """Some of the images, in that order."""
        lengths = torch.diff(self.starts)[list(indices)]
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        parts = [torch.arange(int(self.starts[i]), int(self.starts[i + 1])) for i in indices]
        which = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
        objects = Objects(*(tensor[which] for tensor in self.objects))
        files = [self.files[i] for i in indices]
        return AnnotatedImages(files, self.sizes[list(indices)], objects, starts, self.max_pixels)

    def relabelled(self, labels: Sequence[int]) -> AnnotatedImages:
        """The same with label i replaced by labels[i]."""
        changed = self.objects._replace(labels=torch.tensor(labels, dtype=torch.int64)[self.objects.labels])
        return AnnotatedImages(self.files, self.sizes, changed, self.starts, self.max_pixels)


class Collector:
    """Gathers images and boxes in any order; counts what it leaves out or cuts.

    >>> kept = Collector()
    >>> number = kept.image("a.jpg", rows=30, columns=40)
    >>> kept.box(number, (10, 5, 45, 25), label=0)
    >>> kept.box(number, (10, 5, 10, 25), label=1)
    >>> images = kept.done(max_pixels=10**6)
    >>> images.objects_of(0).boxes.tolist()
    [[10.0, 5.0, 45.0, 25.0]]
    >>> kept.report("train")
    'train: 1 image, 1 object; left out 1 box without area; 1 box reaches over the border, cut in training'
    """

    def __init__(self) -> None:
        self.files: list[str] = []
        self.sizes: list[tuple[int, int]] = []
        self.rows: list[tuple[float, ...]] = []
        self.counts: Counter[str] = Counter()

    def image(self, file: str | Path, *, rows: int, columns: int) -> int:
        """Add an image; its number, for `box`."""
        self.files.append(str(file))
        self.sizes.append((rows, columns))
        return len(self.files) - 1

    def empty(self) -> None:
        """An annotation without a box."""
        self.counts["empty"] += 1

    def box(
        self, image: int, xyxy: Sequence[float], *, label: int, area: float | None = None, crowd: bool = False
    ) -> None:
        """Add a box of an image unless it has no area or lies outside; one that reaches over the border stays as it is."""
        x0, y0, x1, y1 = xyxy
        rows, columns = self.sizes[image]
        if x1 <= x0 or y1 <= y0:
            self.counts["degenerate"] += 1
        elif x1 <= 0 or y1 <= 0 or x0 >= columns or y0 >= rows:
            self.counts["outside"] += 1
        else:
            self.counts["over"] += x0 < 0 or y0 < 0 or x1 > columns or y1 > rows
            self.counts["crowd"] += crowd
            self.rows.append((image, x0, y0, x1, y1, label, (x1 - x0) * (y1 - y0) if area is None else area, crowd))

    def done(self, max_pixels: int) -> AnnotatedImages:
        table = np.array(self.rows, dtype=np.float64).reshape(-1, 8)
        table = table[np.argsort(table[:, 0], kind="stable")]
        per_image = np.bincount(table[:, 0].astype(np.int64), minlength=len(self.files))
        self.counts["objects"], self.counts["bare"] = len(table), int((per_image == 0).sum())
        columns = torch.from_numpy(np.ascontiguousarray(table))
        objects = Objects(columns[:, 1:5].float(), columns[:, 5].long(), columns[:, 6].float(), columns[:, 7].bool())
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(per_image)]))
        return AnnotatedImages(self.files, torch.tensor(self.sizes).reshape(-1, 2), objects, starts, max_pixels)

    def report(self, split: str) -> str:
        """One line: what a split holds and what was left out of it."""
        count = self.counts
        parts = [f"{split}: {_number(len(self.files), 'image')}, {_number(count['objects'], 'object')}"]
        left = [
            f"{_number(count['degenerate'], 'box')} without area" if count["degenerate"] else "",
            f"{_number(count['outside'], 'box')} outside the image" if count["outside"] else "",
            f"{_number(count['empty'], 'annotation')} without a box" if count["empty"] else "",
        ]
        if any(left):
            parts.append("left out " + ", ".join(filter(None, left)))
        if count["over"]:
            verb = "reaches" if count["over"] == 1 else "reach"
            parts.append(f"{_number(count['over'], 'box')} {verb} over the border, cut in training")
        if count["crowd"]:
            parts.append(f"{_number(count['crowd'], 'crowd')}, not trained on and not counted")
        if count["bare"]:
            parts.append(f"{_number(count['bare'], 'image')} without objects")
        return "; ".join(parts)


def _number(count: int, word: str) -> str:
    plural = {"box": "boxes"}.get(word, f"{word}s")
    return f"{count:,} {word if count == 1 else plural}"


def numbers(values: Any, count: int) -> list[float] | None:
    """`count` finite numbers, or None for anything else.

    >>> numbers([1, 2.5], 2), numbers([1, "2"], 2), numbers([1, float("nan")], 2), numbers(None, 2)
    ([1.0, 2.5], None, None, None)
    """
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, dict)):
        return None
    found = list(values)
    # bool is an int to Python, and no coordinate.
    if len(found) != count or any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in found):
        return None
    try:
        plain = [float(v) for v in found]
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return plain if np.isfinite(plain).all() else None


def nothing_to_learn(path: str | Path, images: AnnotatedImages) -> None:
    """Refuse a split without images or without a single object."""
    if not len(images):
        raise UserError(f"{path}: no images, wanted at least one.")
    if not len(images.objects.labels) or bool(images.objects.crowd.all()):
        raise UserError(f"{path}: no object in {len(images)} images, wanted at least one box.")
