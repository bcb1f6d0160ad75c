"""Detection's data: the `data:` section, its sources, what is done to an image and its boxes, batches.

As in classification, order and augmentation follow from (seed, epoch, position) alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from nearsight.errors import UserError, did_you_mean
from nearsight.train.config import Section
from nearsight.train.data import coco, voc
from nearsight.train.data.batches import ON_DEVICE_BYTES, Order, Where, make_loader, read_good, seeded
from nearsight.train.data.boxes import AnnotatedImages, Objects
from nearsight.train.data.config import Place
from nearsight.train.data.images import BadImageError, refuse_bad
from nearsight.train.data.parquet import EVALUATION
from nearsight.train.data.splits import hold_out

__all__ = [
    "BoxAugmentConfig",
    "DetectionBatch",
    "DetectionBatches",
    "DetectionDataConfig",
    "DetectionSource",
    "TrainTransform",
    "eval_resize",
    "open_detection",
]

KINDS = ("coco:FOLDER", "voc:FOLDER")


class BoxAugmentConfig(Section):
    scale: tuple[float, float] = Field(
        default=(1.0, 1.0), description="factors on the evaluation's size, one drawn per image (multi-scale jitter)"
    )
    short_sides: list[int] = Field(
        default_factory=list, description="short sides to draw from, instead of `scale`; the long side stays in bounds"
    )
    crop: int | None = Field(default=None, ge=1, description="cut to at most so many rows and columns, anywhere")
    flip: float = Field(default=0.0, ge=0, le=1, description="chance of a horizontal flip")
    flip_rows: float = Field(default=0.0, ge=0, le=1, description="chance of a vertical flip")
    color_jitter: float = Field(default=0.0, ge=0, description="of brightness, contrast and saturation")


class DetectionDataConfig(Section):
    source: Place = Field(description="coco:FOLDER or voc:FOLDER")
    train_split: str = "train"
    eval_split: str | None = Field(default=None, description="null: the first there is of val, validation, valid, test")
    holdout: float = Field(default=0.0, ge=0, lt=1, description="share of train held out; evaluated instead")
    train_images: int | None = Field(default=None, ge=1, description="for --dry-run without the data")
    num_classes: int | None = Field(default=None, ge=1, description="for --dry-run without the data")
    short_side: int | None = Field(default=None, ge=1, description="null: only the long side counts")
    long_side: int = Field(default=640, ge=1, description="images are resized to fit into both sides, and no further")
    batch_size: int = Field(default=8, ge=1, description="per process and micro-batch")
    eval_batch_size: int | None = Field(default=None, ge=1)
    workers: int = Field(default=4, ge=0)
    keep: bool | Literal["auto"] = Field(default="auto", description="keep decoded images in memory; auto: up to 4 GiB")
    on_bad: Literal["stop", "skip"] = Field(default="stop", description="what to do about a file that is no image")
    max_pixels: int = Field(default=89_478_485, ge=1, description="refuse larger images (decompression bombs)")
    augment: BoxAugmentConfig = BoxAugmentConfig()

    def faults(self) -> list[str]:
        found, low, high = [], *self.augment.scale
        if self.holdout and self.eval_split is not None:
            found.append(
                f"data.eval_split: got {self.eval_split} with data.holdout={self.holdout:g}, whose images are evaluated; wanted "
                "data.holdout=0 with it"
            )
        if not 0 < low <= high:
            found.append(f"data.augment.scale: got {[low, high]}, wanted two positive factors, the smaller first")
        if self.augment.short_sides and (low, high) != (1, 1):
            found.append("data.augment.short_sides: got it with data.augment.scale, wanted one of them")
        if self.short_side is not None and (low, high) != (1, 1):
            found.append("data.augment.scale: got it with data.short_side, wanted data.augment.short_sides")
        if any(side < 1 for side in self.augment.short_sides):
            found.append(f"data.augment.short_sides: got {self.augment.short_sides}, wanted positive numbers")
        if self.short_side is not None and self.short_side > self.long_side:
            found.append(f"data.short_side: got {self.short_side}, wanted at most data.long_side={self.long_side}")
        return found


# ---- sources ----


class DetectionSource(NamedTuple):
    """Train and evaluation split (train is None when only evaluation was asked for), class names."""

    train: Any
    evaluation: Any
    classes: list[str]


def open_detection(
    data: DetectionDataConfig, note: Callable[[str], None], *, seed: int = 0, training: bool = True
) -> DetectionSource:
    """The source a config names, checked entry by entry; `note` is told what each split holds and lost."""
    kind, _, path = data.source.partition(":")
    if kind not in ("coco", "voc") or not path:
        raise UserError(
            f"data.source: got {data.source!r}, wanted {' or '.join(KINDS)}.{did_you_mean(data.source, KINDS)}"
        )
    root = Path(path)
    if not root.is_dir():
        raise UserError(f"data.source: no folder {path!r}; wanted {kind}:FOLDER.")
    open_split = _open_coco(root, data, note) if kind == "coco" else _open_voc(root, data, note)
    if data.holdout:
        whole, classes = open_split(data.train_split)
        kept, held = (whole.take(part.indices) for part in hold_out(whole, data.holdout, seed))
        return DetectionSource(kept, held, classes)
    train, classes = open_split(data.train_split) if training else (None, None)
    evaluation, eval_classes = open_split(data.eval_split)
    if classes is not None and eval_classes != classes:
        odd = sorted(set(eval_classes) - set(classes))
        if odd or len(set(classes)) < len(classes):
            raise UserError(
                f"data.source: {path!r} has {len(classes)} classes in train and {len(eval_classes)} in evaluation, "
                f"wanted the same ones" + (f"; train lacks {', '.join(odd[:5])}." if odd else ".")
            )
        evaluation = evaluation.relabelled([classes.index(name) for name in eval_classes])
    return DetectionSource(train, evaluation, eval_classes if classes is None else classes)


def _open_coco(root: Path, data: DetectionDataConfig, note: Callable[[str], None]) -> Callable[[str | None], Any]:
    def open_split(wanted: str | None) -> tuple[AnnotatedImages, list[str]]:
        names = EVALUATION if wanted is None else (wanted,)
        found = next(filter(None, (coco.find_split(root, name) for name in names)), None)
        if found is None:
            have = ", ".join(coco.splits(root)) or "none"
            raise UserError(
                f"data.source: {str(root)!r} has no split {' or '.join(names)} (it has {have}); {coco.WANTED}."
            )
        return coco.read_coco(root, *found, data.max_pixels, note)

    return open_split


def _open_voc(root: Path, data: DetectionDataConfig, note: Callable[[str], None]) -> Callable[[str | None], Any]:
    classes = voc.class_names(root)

    def open_split(wanted: str | None) -> tuple[AnnotatedImages, list[str]]:
        names = EVALUATION if wanted is None else (wanted,)
        found = next(filter(None, (voc.find_list(root, name) for name in names)), None)
        if found is None:
            have = ", ".join(sorted(p.stem for p in (root / "ImageSets" / "Main").glob("*.txt"))[:8]) or "none"
            raise UserError(
                f"data.source: {str(root)!r} has no split {' or '.join(names)} (it has {have}); wanted Annotations/, "
                f"JPEGImages/ and ImageSets/Main/SPLIT.txt."
            )
        return voc.read_voc(root, found, classes, data.max_pixels, note), classes

    return open_split


class KeptImages:
    """A split decoded once into one block of memory, which worker processes share."""

    def __init__(self, split: AnnotatedImages, on_bad: str) -> None:
        self.split = split

        def pixels(index: int) -> Tensor | BadImageError:
            try:
                return pixels_of(split.read(index)[0])
            except BadImageError as error:
                return error

        # Decoders release the interpreter's lock, so threads serve as well as processes here.
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            decoded = list(pool.map(pixels, range(len(split))))
        self.bad = {i: one for i, one in enumerate(decoded) if isinstance(one, BadImageError)}
        if self.bad and on_bad == "stop":
            index, reason = next(iter(self.bad.items()))
            raise refuse_bad(split.name(index), str(reason))
        good = [one if isinstance(one, Tensor) else torch.zeros(3, 0, 0, dtype=torch.uint8) for one in decoded]
        self.shapes = [tuple(one.shape) for one in good]
        self.starts = torch.tensor([0] + [one.numel() for one in good]).cumsum(0)
        self.block = torch.cat([one.flatten() for one in good])

    def __len__(self) -> int:
        return len(self.split)

    def name(self, index: int) -> str:
        return self.split.name(index)

    def read(self, index: int) -> tuple[Tensor, Objects]:
        if index in self.bad:
            raise BadImageError(str(self.bad[index]))
        pixels = self.block[self.starts[index] : self.starts[index + 1]].view(self.shapes[index])
        return pixels, self.split.objects_of(index)


def _keeps(split: AnnotatedImages, data: DetectionDataConfig) -> bool:
    if data.keep != "auto":
        return data.keep
    return 3 * int(split.sizes.prod(1).sum()) <= ON_DEVICE_BYTES


# ---- one image ----


class _WholePixels:
    """A resize of torchvision's that never ends below one pixel, however thin the image."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        rows, columns = super().make_params(flat_inputs)["size"]  # type: ignore[misc]
        return {"size": (max(1, int(rows)), max(1, int(columns)))}


class _ScaleJitter(_WholePixels, v2.ScaleJitter):
    pass


class _ShortestSize(_WholePixels, v2.RandomShortestSize):
    pass


class _CropAtMost(torch.nn.Module):
    """A random part of at most `side` rows and columns; smaller images stay whole."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, image: Tensor, target: Any) -> Any:
        size = [min(length, self.side) for length in image.shape[-2:]]
        return v2.RandomCrop(size)(image, target)


def pixels_of(image: Image.Image | Tensor) -> Tensor:
    """uint8 [3, H, W] of an RGB image."""
    return image if isinstance(image, Tensor) else v2.functional.pil_to_tensor(image)


def eval_resize(data: DetectionDataConfig) -> v2.Transform:
    """The image as large as fits into (short_side, long_side), boxes with it.

    >>> resize = eval_resize(DetectionDataConfig(source="coco:x", short_side=60, long_side=100))
    >>> tuple(resize(torch.zeros(3, 30, 40)).shape), tuple(resize(torch.zeros(3, 100, 20)).shape)
    ((3, 60, 80), (3, 100, 20))
    """
    return _ShortestSize(data.short_side or data.long_side, data.long_side)


def _labels(inputs: Any) -> Tensor:
    labels: Tensor = inputs[1]["labels"]
    return labels


class TrainTransform:
    """(uint8 [3, H, W], objects) → (augmented uint8 [3, H', W'], {"boxes" [N, 4], "labels" [N]}), without crowds."""

    def __init__(self, data: DetectionDataConfig) -> None:
        wanted = data.augment
        if wanted.short_sides:
            resize: v2.Transform = _ShortestSize(wanted.short_sides, data.long_side)
        elif wanted.scale == (1.0, 1.0):
            resize = eval_resize(data)
        else:
            resize = _ScaleJitter((data.long_side, data.long_side), wanted.scale)
        # After the resize: its factor, rounded, may push a box at the border out by a hair, and it would be left out.
        steps: list[Any] = [resize, v2.ClampBoundingBoxes()]
        if wanted.crop is not None:
            steps.append(_CropAtMost(wanted.crop))
        steps += [v2.RandomHorizontalFlip(wanted.flip), v2.RandomVerticalFlip(wanted.flip_rows)]
        if wanted.color_jitter:
            steps.append(v2.ColorJitter(*[wanted.color_jitter] * 3))
        # After the crop: what is left of a box may be nothing.
        steps.append(v2.SanitizeBoundingBoxes(labels_getter=_labels))
        self.steps = v2.Compose(steps)

    def __call__(self, image: Tensor, objects: Objects) -> tuple[Tensor, dict[str, Tensor]]:
        single = ~objects.crowd
        canvas = (image.shape[-2], image.shape[-1])
        boxes = tv_tensors.BoundingBoxes(objects.boxes[single], format="XYXY", canvas_size=canvas)
        target = {"boxes": boxes, "labels": objects.labels[single]}
        out, target = self.steps(tv_tensors.Image(image), target)
        return out.as_subclass(Tensor), {key: value.as_subclass(Tensor) for key, value in target.items()}


# ---- batches ----


@dataclass
class DetectionBatch:
    """Images float32 [3, H, W] in 0…1, each of its own size, and per image its target.

    In training a target is {"boxes", "labels"} in pixels of the image as given. In evaluation it is the truth in pixels of the
    file, on the CPU, with "area", "iscrowd" and "size" (rows, columns) of the file; `valid` says which images count.
    """

    images: list[Tensor]
    targets: list[dict[str, Tensor]]
    valid: list[bool]
    bad: list[str] = field(default_factory=list)


class _Samples(torch.utils.data.Dataset[Any]):
    """Decoded, augmented images with their targets; each drawn from its own seed, whichever worker makes it."""

    def __init__(self, split: Any, data: DetectionDataConfig, training: bool) -> None:
        self.split, self.training = split, training
        self.augment = TrainTransform(data) if training else None
        self.resize = eval_resize(data)

    def __getitem__(self, at: tuple[int, int]) -> tuple[Tensor, dict[str, Tensor], bool, list[tuple[str, str]]]:
        index, seed = at
        read, bad = read_good(self.split, index, self.training)
        if read is None:
            return torch.zeros(3, 32, 32, dtype=torch.uint8), {}, False, bad
        image, objects = pixels_of(read[0]), read[1]
        if self.augment is None:
            size = torch.tensor(image.shape[-2:])
            truth = {"boxes": objects.boxes, "labels": objects.labels, "area": objects.areas}
            return self.resize(image), {**truth, "iscrowd": objects.crowd.long(), "size": size}, True, bad
        with seeded(seed):
            image, target = self.augment(image, objects)
        return image, target, True, bad


def _collate(samples: list[Any]) -> tuple[list[Any], ...]:
    images, targets, valid, bad = zip(*samples, strict=True)
    return list(images), list(targets), list(valid), [one for many in bad for one in many]


class DetectionBatches:
    """Batches of a split for the engine, decoded and augmented by worker processes."""

    fast = False

    def __init__(
        self, split: AnnotatedImages, data: DetectionDataConfig, where: Where, seed: int, training: bool
    ) -> None:
        self.where, self.training, self.on_bad = where, training, data.on_bad
        self.batch_size = data.batch_size if training or data.eval_batch_size is None else data.eval_batch_size
        self.order = Order(len(split), self.batch_size, where, seed, training)
        self.images = len(self.order) * self.batch_size * where.world if training else len(split)
        kept = KeptImages(split, data.on_bad) if _keeps(split, data) else split
        self.loader = make_loader(_Samples(kept, data, training), self.order, _collate, data.workers, where)

    def __len__(self) -> int:
        return len(self.order)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[DetectionBatch]:
        self.order.epoch, self.order.start = epoch, start
        device = self.where.device
        for images, targets, valid, bad in self.loader:
            if bad and (self.on_bad == "stop" or (self.training and not all(valid))):
                raise refuse_bad(*bad[-1])
            pixels = [image.to(device, non_blocking=True).float().div_(255) for image in images]
            if self.training:
                targets = [{k: v.to(device, non_blocking=True) for k, v in target.items()} for target in targets]
            yield DetectionBatch(pixels, targets, valid, [name for name, _ in bad])
