"""From a split's images to pixels: what evaluation and training do to one image, and whole small sets, decoded once."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from nearsight.errors import UserError
from nearsight.folders import cache_folder
from nearsight.train.data.config import DataConfig
from nearsight.train.data.images import BadImageError, refuse_bad
from nearsight.train.data.policy import fill_of, image_policy
from nearsight.train.data.splits import Split, Subset

__all__ = ["eval_transform", "materialise", "train_transform"]

SMALL = 96  # pixels a side
MANY = 10_000
CHUNK = 500
DECODING = 2  # to be counted up when `images.decode` makes other pixels of the same bytes


def eval_transform(data: DataConfig) -> Callable[[Any], Any]:
    """PIL image → uint8 [C, S, S]: resized and centre-cropped, as at evaluation."""
    from timm.data.transforms_factory import create_transform

    size = (data.channels, data.image_size, data.image_size)
    transform: Callable[[Any], Any] = create_transform(
        size, crop_pct=data.crop_pct, interpolation=data.interpolation, use_prefetcher=True
    )
    return transform


def train_transform(data: DataConfig, mean: tuple[float, ...]) -> Callable[[Any], Any]:
    """PIL image → augmented uint8 [C, S, S]; what a policy uncovers gets the mean colour."""
    from timm.data.auto_augment import rand_augment_transform
    from timm.data.transforms import ToNumpy
    from timm.data.transforms_factory import create_transform
    from torchvision import transforms

    wanted, size = data.augment, data.image_size
    if wanted.crop == "resized":
        made: Callable[[Any], Any] = create_transform(
            (data.channels, size, size),
            is_training=True,
            scale=wanted.scale,
            ratio=wanted.ratio,
            hflip=wanted.flip,
            color_jitter=wanted.color_jitter,
            auto_augment=None if wanted.trivial else wanted.auto,
            interpolation=data.interpolation,
            mean=mean,
            use_prefetcher=True,
        )
        if wanted.trivial:
            made.transforms.insert(-1, image_policy(size, mean))  # type: ignore[attr-defined]
        return made
    steps: list[Any] = list(eval_transform(data).transforms[:-1])  # type: ignore[attr-defined]
    if wanted.crop == "pad":
        mode = "constant" if wanted.pad_mode == "zeros" else "reflect"
        steps.append(transforms.RandomCrop(size, padding=wanted.pad, padding_mode=mode))
    steps.append(transforms.RandomHorizontalFlip(wanted.flip))
    if wanted.trivial:
        steps.append(image_policy(size, mean))
    elif wanted.auto:
        steps.append(rand_augment_transform(wanted.auto, {"img_mean": fill_of(mean)}))
    elif wanted.color_jitter:
        steps.append(transforms.ColorJitter(*[wanted.color_jitter] * 3))
    composed: Callable[[Any], Any] = transforms.Compose([*steps, ToNumpy()])
    return composed


def materialise(split: Split, data: DataConfig) -> tuple[Tensor, Tensor, list[str]]:
    """All images of a split as uint8 [N, S, S, C], their labels, and the names of those left out; cached on disk."""
    if isinstance(split, Subset):  # one decoded set serves every share held out of it
        pixels, labels, bad = materialise(split.split, data)
        if not bad:
            return pixels[split.indices], labels[split.indices], []
    key = split.key()
    file = None
    if key is not None and data.cache:
        how = f"{key}\n{DECODING} {data.image_size} {data.channels} {data.crop_pct} {data.interpolation} {data.max_pixels}"
        file = cache_folder() / f"{hashlib.blake2b(how.encode(), digest_size=16).hexdigest()}.safetensors"
        kept = _cached(file)
        if kept is not None:
            return (*kept, [])
    pixels, labels, bad = _decode_all(split, data)
    if file is not None and not bad:
        _cache(file, pixels, labels)
    return pixels, labels, bad


def _cached(file: Path) -> tuple[Tensor, Tensor] | None:
    """The pixels and labels of a cache file; None where there is none, or one that is damaged."""
    try:
        kept = load_file(file)
        return kept["pixels"], kept["labels"]
    except (OSError, SafetensorError, KeyError):
        return None


def _cache(file: Path, pixels: Tensor, labels: Tensor) -> None:
    """Write a cache file; one that cannot be written costs time, nothing else."""
    part = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"pixels": pixels, "labels": labels}, part)
        part.replace(file)
    except (OSError, SafetensorError):
        with suppress(OSError):
            part.unlink(missing_ok=True)


class _Chunks(Dataset[list[Any]]):
    """A split's images, decoded by the hundreds; of those that cannot be, what is wrong."""

    def __init__(self, split: Split, data: DataConfig) -> None:
        self.split, self.transform = split, eval_transform(data)

    def __len__(self) -> int:
        return -(-len(self.split) // CHUNK)

    def __getitem__(self, chunk: int) -> list[tuple[Any, int] | BadImageError]:
        return [self.one(i) for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, len(self.split)))]

    def one(self, index: int) -> tuple[Any, int] | BadImageError:
        try:
            image, label = self.split.read(index)
        except BadImageError as error:
            return error
        return np.asarray(self.transform(image)), label


def _decode_all(split: Split, data: DataConfig) -> tuple[Tensor, Tensor, list[str]]:
    chunks = _Chunks(split, data)
    processors = os.cpu_count() or 1
    if data.image_size >= SMALL:
        # Decoders release the interpreter's lock, so threads serve as well as processes.
        with ThreadPoolExecutor(min(16, processors)) as pool:
            done = list(pool.map(chunks.one, range(len(split)), chunksize=64))
    else:
        # On small images threads would only take it from each other. Processes cost more than a few images take.
        forks = "fork" in multiprocessing.get_all_start_methods() and processors > 2 and len(split) >= MANY
        workers = min(8, processors) if forks else 0
        context = "fork" if forks else None
        loader = DataLoader(
            chunks,
            batch_size=None,
            collate_fn=list,  # as they are: as tensors each image would be a file that processes share
            num_workers=workers,
            multiprocessing_context=context,
            # Not torch's own: what a run draws must not depend on whether its images were decoded before.
            generator=torch.Generator(),
        )
        done = [result for chunk in loader for result in chunk]
    good, bad = [], []
    for index, result in enumerate(done):
        if isinstance(result, BadImageError):
            if data.on_bad == "stop":
                raise refuse_bad(split.name(index), str(result))
            bad.append(split.name(index))
        else:
            good.append(result)
    if not good:
        raise UserError(f"data.source: none of the {len(split)} files is an image, the first is {bad[0]}.")
    pixels = torch.stack([torch.as_tensor(image) for image, _ in good]).permute(0, 2, 3, 1).contiguous()
    return pixels, torch.tensor([label for _, label in good]), bad
