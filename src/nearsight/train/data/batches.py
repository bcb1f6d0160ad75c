"""Batches for the engine. The same order and the same augmentation follow from (seed, epoch, position) alone, so a run can
be resumed at any step and split over any number of workers without changing a pixel.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from nearsight.errors import UserError
from nearsight.train.data import augment
from nearsight.train.data.config import DataConfig
from nearsight.train.data.decoded import eval_transform, materialise, train_transform
from nearsight.train.data.images import BadImageError, refuse_bad
from nearsight.train.data.policy import Policy, apply_policy, draw_policy, fill_of
from nearsight.train.data.sources import Source
from nearsight.train.data.splits import Split
from nearsight.train.data.streams import Stream, stream_length

__all__ = [
    "Batch",
    "Batches",
    "Order",
    "Where",
    "build_batches",
    "count_batches",
    "example_images",
    "leave_signals_to_the_run",
    "make_loader",
    "plan",
    "read_good",
    "seed_of",
    "seeded",
]

# Above this, "auto" leaves images where they are.
ON_DEVICE_BYTES = 4 << 30
# A policy's hundred launches serve up to this many batches, of up to so many bytes.
POLICY_BATCHES, POLICY_BYTES = 8, 16 << 20


class Where(NamedTuple):
    """This process: its device, its number, how many there are."""

    device: torch.device
    rank: int = 0
    world: int = 1


@dataclass
class Batch:
    """Normalised images [B, C, H, W], targets [B], which of them count (None: all), files left out of it."""

    images: Tensor
    targets: Tensor
    valid: Tensor | None = None
    bad: list[str] = field(default_factory=list)


class Batches(Protocol):
    """What the engine asks of data. `images` counts the images of an epoch over all processes."""

    batch_size: int
    images: int
    fast: bool

    def __len__(self) -> int: ...

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's batches of an epoch, from batch `start` on."""
        ...


def seed_of(*numbers: int) -> int:
    """A 63-bit seed from several numbers, without the overlaps of their sum.

    >>> seed_of(0, 1) != seed_of(1, 0)
    True
    """
    data = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def plan(count: int, batch: int, where: Where, *, order: int | None = None) -> Tensor:
    """Which images this process takes: [batches, batch].

    With `order` (a seed) they are shuffled and what fills no whole batch is left out; without, they come in order, each once,
    and −1 fills the last batch up.

    >>> plan(5, 2, Where(torch.device("cpu"), 1, 2)).tolist()
    [[2, 3], [-1, -1]]
    """
    whole = batch * where.world
    if order is None:
        indices = torch.full((-(-count // whole) * whole,), -1)
        indices[:count] = torch.arange(count)
    else:
        indices = torch.randperm(count, generator=torch.Generator().manual_seed(order))[: count // whole * whole]
    return indices.view(-1, where.world, batch)[:, where.rank]


class _Finish:
    """The last steps on the device, shared by all kinds of batches: normalise, cut out, erase."""

    def __init__(self, data: DataConfig, source: Source, where: Where, training: bool, channels_last: bool) -> None:
        self.where, self.average = where, source.mean
        self.mean = torch.tensor(source.mean, device=where.device)
        self.std = torch.tensor(source.std, device=where.device)
        self.channels_last = channels_last
        self.cutout = data.augment.cutout if training else 0
        self.erase = data.augment.erase if training else 0.0

    def __call__(self, images: Tensor, choice: augment.Draw | None, generator: torch.Generator | None = None) -> Tensor:
        """`choice` and `generator`: what all processes drew together; without, each draws on its own."""
        out = augment.normalise(images, self.mean, self.std, self.channels_last)
        if self.cutout:
            row, column = (choice.hole_row, choice.hole_column) if choice is not None else _places(out)
            out = augment.cut_out(out, self.cutout, row, column)
        return self._erased(out, generator) if self.erase else out

    def _erased(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        batch, channels, rows, columns = images.shape
        world, rank = (1, 0) if generator is None else (self.where.world, self.where.rank)
        mine = slice(rank * batch, (rank + 1) * batch)
        patches = augment.draw_patches(self.erase, world * batch, (rows, columns), images.device, generator)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        noise = torch.empty(world * batch, channels, rows, columns, device=images.device, memory_format=layout)
        return augment.erase(images, patches[mine], noise.normal_(generator=generator)[mine])


def _places(images: Tensor) -> tuple[Tensor, Tensor]:
    """A row and a column of each image, anywhere."""
    row, column = (torch.randint(side, (len(images),), device=images.device) for side in images.shape[-2:])
    return row, column


def example_images(data: DataConfig, channels_last: bool, device: torch.device) -> Tensor:
    """A training batch's images but for their values, made as a batch is: sizes, strides and dtype are the same."""
    plain: Any = SimpleNamespace(mean=[0.0] * data.channels, std=[1.0] * data.channels)
    finish = _Finish(data, plain, Where(device), True, channels_last)
    size = (data.batch_size, data.image_size, data.image_size, data.channels)
    return finish(torch.empty(size, dtype=torch.uint8, device=device), None)


class OnDeviceBatches:
    """A small set, decoded once and kept on the device; a batch is one indexed read."""

    fast = True

    def __init__(
        self, pixels: Tensor, labels: Tensor, data: DataConfig, where: Where, finish: _Finish, seed: int, training: bool
    ) -> None:
        self.size = (pixels.shape[1], pixels.shape[2])
        self.where, self.finish, self.seed, self.training = where, finish, seed, training
        self.augment = data.augment
        pixels = pixels.to(where.device)
        self.pixels = augment.pad_images(pixels, data.augment) if training else pixels
        self.labels = labels.to(where.device)
        self.fill = torch.tensor(fill_of(finish.average), dtype=torch.uint8, device=where.device)
        self.batch_size = batch_size_of(data, training)
        self.batches = count_batches(len(labels), self.batch_size, where, training)
        self.images = self.batches * self.batch_size * where.world if training else len(labels)
        self.trivial = training and data.augment.trivial
        fit = POLICY_BYTES // (self.batch_size * pixels[0].numel())
        self.together = max(1, min(POLICY_BATCHES, fit)) if self.trivial else 1

    def __len__(self) -> int:
        return self.batches

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        order = seed_of(self.seed, epoch) if self.training else None
        indices = plan(len(self.labels), self.batch_size, self.where, order=order).to(self.where.device)
        generators = [torch.Generator(self.where.device) for _ in range(self.together)]
        policy = self._policy(epoch) if self.trivial else None
        for first in range(start, len(indices), self.together):
            group = indices[first : first + self.together]
            choices = [
                self._draw(seed_of(self.seed, epoch, first + n), generators[n]) if self.training else None
                for n in range(len(group))
            ]
            read = [
                augment.gather(self.pixels, which, self.size, choice)
                for which, choice in zip(group, choices, strict=True)
            ]
            if policy is not None:
                mine = Policy(*(t[first : first + len(group)].flatten() for t in policy))
                read = list(apply_policy(torch.cat(read), mine, self.fill).split(self.batch_size))
            for which, choice, pixels, generator in zip(group, choices, read, generators, strict=False):
                images = self.finish(pixels, choice, generator if self.training else None)
                yield Batch(images, self.labels[which], None if self.training else which >= 0)

    def _draw(self, seed: int, generator: torch.Generator) -> augment.Draw:
        generator.manual_seed(seed)
        everybody = augment.draw(self.augment, self.batch_size * self.where.world, self.size, generator)
        return everybody.share(self.where.rank, self.batch_size)

    def _policy(self, epoch: int) -> Policy:
        """This process's share of an epoch's policy, [batches, batch]."""
        # A stream of its own: the other draws are the same with it and without.
        generator = torch.Generator().manual_seed(seed_of(self.seed, epoch, 0, 1))
        everybody = draw_policy(self.batches * self.where.world * self.batch_size, self.size, generator)
        shape = (self.batches, self.where.world, self.batch_size)
        return Policy(*(t.view(shape)[:, self.where.rank] for t in everybody))


def read_good(split: Any, index: int, training: bool) -> tuple[Any | None, list[tuple[str, str]]]:
    """What `split.read` gives for an image (None for one that does not count), and the files that were none: names, reasons.

    In training the next image takes a bad one's place; an index below 0 fills the last batch of an evaluation.
    """
    bad: list[tuple[str, str]] = []
    for _ in range(64 if index >= 0 else 0):
        try:
            return split.read(index), bad
        except BadImageError as error:
            bad.append((split.name(index), str(error)))
            if not training:
                break
            index = (index + 1) % len(split)
    return None, bad


class _Samples(torch.utils.data.Dataset[Any]):
    """Decoded, augmented samples; each drawn from its own seed, whichever worker makes it."""

    def __init__(self, split: Split, transform: Any, data: DataConfig, training: bool) -> None:
        self.split, self.transform, self.data, self.training = split, transform, data, training

    def __getitem__(self, at: tuple[int, int]) -> tuple[Any, int, bool, list[tuple[str, str]]]:
        """Pixels, label, whether they count, and the files that were none: names and reasons.

        Nothing is raised here: an exception would leave a worker as a page of traceback.
        """
        index, seed = at
        read, bad = read_good(self.split, index, self.training)
        if read is None:
            return self._blank(), 0, False, bad
        image, label = read
        with seeded(seed):
            return self.transform(image), label, True, bad

    def _blank(self) -> np.ndarray:
        return np.zeros((self.data.channels, self.data.image_size, self.data.image_size), np.uint8)


class seeded:  # noqa: N801  (used like a function)
    """Python's, NumPy's and torch's generators at a seed, and back as they were."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __enter__(self) -> None:
        self.before = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        random.seed(self.seed)
        np.random.seed(self.seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(self.seed)

    def __exit__(self, *_: object) -> None:
        random.setstate(self.before[0])
        np.random.set_state(self.before[1])
        torch.set_rng_state(self.before[2])


class Order:
    """The batch sampler: reads which epoch and batch to start from each time it is iterated."""

    def __init__(self, count: int, batch: int, where: Where, seed: int, training: bool) -> None:
        self.count, self.batch, self.where, self.seed, self.training = count, batch, where, seed, training
        self.epoch = self.start = 0

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = seed_of(self.seed, self.epoch) if self.training else None
        indices = plan(self.count, self.batch, self.where, order=order).tolist()
        for number in range(self.start, len(indices)):
            first = (number * self.where.world + self.where.rank) * self.batch
            yield [(i, seed_of(self.seed, self.epoch, first + n)) for n, i in enumerate(indices[number])]

    def __len__(self) -> int:
        return count_batches(self.count, self.batch, self.where, self.training)


def _collate(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor, list[tuple[str, str]]]:
    images, labels, valid, bad = zip(*samples, strict=True)
    return (
        torch.stack([torch.as_tensor(image) for image in images]),
        torch.tensor(labels),
        torch.tensor(valid),
        [n for b in bad for n in b],
    )


def refuse_some(bad: list[tuple[str, str]], valid: Tensor, on_bad: str, training: bool) -> None:
    """End the run over a batch's bad files: when told so, or when nothing could take their place."""
    if bad and (on_bad == "stop" or (training and not valid.all())):
        raise refuse_bad(*bad[-1])


def refuse_labels(labels: Tensor, classes: int) -> None:
    """End the run over labels that a set without a list of its classes turns out to have; 0 classes: labels do not count."""
    odd = labels[(labels < 0) | (labels >= classes)] if classes else labels[:0]
    if len(odd):
        raise UserError(
            f"data.num_classes: got {classes} and an image with the label {int(odd[0])}, wanted 0 to {classes - 1}."
        )


def leave_signals_to_the_run(worker: int) -> None:
    """In a worker: stay out of reach of what Ctrl-C and `timeout` send to the run's process group; the run ends its workers."""
    if hasattr(os, "setpgrp"):  # not on Windows
        os.setpgrp()


def make_loader(
    samples: Any, order: Order, collate: Any, workers: int, where: Where
) -> torch.utils.data.DataLoader[Any]:
    """Samples in the order given, made by `workers` processes (at most one per core) that live as long as the loader."""
    workers = min(workers, os.cpu_count() or 1)
    return torch.utils.data.DataLoader(
        samples,
        batch_sampler=order,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=where.device.type == "cuda",
        persistent_workers=workers > 0,
        worker_init_fn=leave_signals_to_the_run,
        # Its own, so that making an iterator leaves the run's random state alone.
        generator=torch.Generator(),
    )


class LoadedBatches:
    """A set of any size, decoded and augmented by worker processes."""

    fast = False

    def __init__(
        self, split: Split, data: DataConfig, where: Where, finish: _Finish, seed: int, training: bool, classes: int
    ) -> None:
        self.classes = classes
        self.where, self.finish, self.training, self.on_bad = where, finish, training, data.on_bad
        self.batch_size = batch_size_of(data, training)
        self.order = Order(len(split), self.batch_size, where, seed, training)
        self.images = len(self.order) * self.batch_size * where.world if training else len(split)
        transform = train_transform(data, finish.average) if training else eval_transform(data)
        samples = _Samples(split, transform, data, training)
        self.loader = make_loader(samples, self.order, _collate, data.workers, where)

    def __len__(self) -> int:
        return len(self.order)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        self.order.epoch, self.order.start = epoch, start
        device = self.where.device
        for images, labels, valid, bad in self.loader:
            refuse_some(bad, valid, self.on_bad, self.training)
            refuse_labels(labels, self.classes)
            pixels = images.to(device, non_blocking=True).permute(0, 2, 3, 1)
            batch = Batch(
                self.finish(pixels, None), labels.to(device, non_blocking=True), None, [name for name, _ in bad]
            )
            if not self.training:
                batch.valid = valid.to(device, non_blocking=True)
            yield batch


class StreamedBatches:
    """Shards read in order by timm's readers, which deal them out to processes and workers themselves.

    A resumed epoch is read from its start and the batches already seen are dropped.
    """

    fast = False

    def __init__(
        self, dataset: Any, data: DataConfig, where: Where, finish: _Finish, training: bool, classes: int
    ) -> None:
        self.classes = classes
        self.dataset, self.where, self.finish, self.training = dataset, where, finish, training
        self.batch_size, self.on_bad = batch_size_of(data, training), data.on_bad
        self.channels, self.image_size = data.channels, data.image_size
        transform = train_transform(data, finish.average) if training else eval_transform(data)
        dataset.set_loader_cfg(num_workers=max(data.workers, 1))
        stated = data.train_images if training else data.eval_images
        self.images = stated or stream_length(dataset)
        if not self.images:
            key = "train_images" if training else "eval_images"
            raise UserError(f"data.{key}: missing; {data.source!r} does not say how many images it has.")
        self.batches = count_batches(self.images, self.batch_size, where, training)
        self.loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            Stream(dataset, transform, data, training),
            batch_size=self.batch_size,
            num_workers=data.workers,
            collate_fn=_collate,
            pin_memory=where.device.type == "cuda",
            worker_init_fn=leave_signals_to_the_run,
            generator=torch.Generator(),
        )

    def __len__(self) -> int:
        return self.batches

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        self.dataset.set_epoch(epoch)
        own = self._own(start)
        if self.training:
            yield from islice(own, self.batches - start)
        elif self.where.world == 1:
            yield from own
        else:
            # Shards of unequal length: those who are done still take part in the others' collective work.
            while self._anybody_has(batch := next(own, None)):
                yield batch or self._blank()

    def _own(self, start: int) -> Iterator[Batch]:
        device = self.where.device
        for number, (images, labels, valid, bad) in enumerate(self.loader):
            refuse_some(bad, valid, self.on_bad, self.training)
            refuse_labels(labels, self.classes)
            if number >= start:
                pixels = images.to(device, non_blocking=True).permute(0, 2, 3, 1)
                counts = None if self.training else valid.to(device, non_blocking=True)
                targets = labels.to(device, non_blocking=True)
                yield Batch(self.finish(pixels, None), targets, counts, [name for name, _ in bad])

    def _anybody_has(self, batch: Batch | None) -> bool:
        some = torch.tensor(batch is not None, dtype=torch.int32, device=self.where.device)
        torch.distributed.all_reduce(some, op=torch.distributed.ReduceOp.MAX)
        return bool(some)

    def _blank(self) -> Batch:
        device, size = self.where.device, self.image_size
        pixels = torch.zeros(1, size, size, self.channels, dtype=torch.uint8, device=device)
        none = torch.zeros(1, dtype=torch.bool, device=device)
        return Batch(self.finish(pixels, None), torch.zeros(1, dtype=torch.long, device=device), none)


def build_batches(
    split: Any,
    source: Source,
    data: DataConfig,
    where: Where,
    *,
    training: bool,
    seed: int,
    channels_last: bool,
    note: Any,
) -> Batches:
    """The fastest kind of batches that can serve a split; `note` is told about files left out."""
    finish = _Finish(data, source, where, training, channels_last)
    if source.streamed:
        return StreamedBatches(split, data, where, finish, training, len(source.classes))
    size = len(split) * data.channels * data.image_size**2
    fits = data.on_device is True or (data.on_device == "auto" and size <= ON_DEVICE_BYTES)
    if fits and data.augment.needs_workers is None:
        pixels, labels, bad = materialise(split, data)
        if bad:
            shown = ", ".join(bad[:5]) + (", …" if len(bad) > 5 else "")
            note(f"left out {len(bad)} files that are no images: {shown}")
        refuse_labels(labels, len(source.classes))
        return OnDeviceBatches(pixels, labels, data, where, finish, seed, training)
    return LoadedBatches(split, data, where, finish, seed, training, len(source.classes))


def batch_size_of(data: DataConfig, training: bool) -> int:
    return data.batch_size if training or data.eval_batch_size is None else data.eval_batch_size


def count_batches(images: int, batch: int, where: Where, training: bool) -> int:
    whole = batch * where.world
    if training and images < whole:
        asked = f"{batch} × {where.world} processes = {whole}" if where.world > 1 else batch
        raise UserError(f"data.batch_size: got {asked}, wanted at most the {images} training images; lower it.")
    return images // whole if training else -(-images // whole)
