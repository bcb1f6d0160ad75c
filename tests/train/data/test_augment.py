"""What is done to training images, on the device and by workers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from nearsight.train.data.augment import Draw, cut_out, draw, draw_patches, erase, gather, pad_images
from nearsight.train.data.batches import Where, build_batches
from nearsight.train.data.config import AugmentConfig
from nearsight.train.data.decoded import eval_transform, train_transform
from nearsight.train.data.sources import open_source
from tests.train.data.support import batches, settings


def test_shift_and_flip_by_hand() -> None:
    images = torch.arange(2 * 2 * 3, dtype=torch.uint8).view(2, 2, 3, 1)
    padded = pad_images(images, AugmentConfig(crop="pad", pad=1, pad_mode="zeros"))
    assert padded.shape == (2, 4, 5, 1)
    zero = torch.tensor([0, 0])
    choice = Draw(torch.tensor([0, 2]), torch.tensor([1, 0]), torch.tensor([False, True]), zero, zero)
    got = gather(padded, torch.tensor([1, 0]), (2, 3), choice)[..., 0]
    # Image 1 moved down by one row; image 0 moved up by one and right by one, then flipped.
    assert got.tolist() == [[[0, 0, 0], [6, 7, 8]], [[4, 3, 0], [0, 0, 0]]]


def test_borders_by_hand() -> None:
    image = torch.arange(6, dtype=torch.uint8).view(1, 2, 3, 1)
    padded = pad_images(image, AugmentConfig(crop="pad", pad=1))[0, :, :, 0]
    assert padded.tolist() == [[4, 3, 4, 5, 4], [1, 0, 1, 2, 1], [4, 3, 4, 5, 4], [1, 0, 1, 2, 1]]
    wide = pad_images(image, AugmentConfig(crop="pad", pad=2))  # more than there is to reflect
    assert (wide.shape, int(wide[0, :2].max())) == ((1, 6, 7, 1), 0)
    assert pad_images(image, AugmentConfig(pad=1)) is image


def test_every_shift_is_drawn_and_flips_as_often_as_asked() -> None:
    generator = torch.Generator().manual_seed(2)

    def choices(**keys: Any) -> Draw:
        return draw(AugmentConfig(**keys), 4000, (5, 9), generator)

    shifted = choices(crop="pad", pad=2, flip=0.2)
    for part, values in zip(shifted, (5, 5, None, 5, 9), strict=True):
        if values is not None:
            assert part.unique().tolist() == list(range(values))
            assert part.bincount().min() > 0.8 * 4000 / values
    assert shifted.flip.float().mean() == pytest.approx(0.2, abs=0.03)
    still = choices(pad=2)
    assert not torch.stack([still.rows, still.columns, still.flip]).any()
    assert choices(flip=1.0).flip.all()


def striped() -> Image.Image:
    """12×12 pixels, brighter to the right and below, a dark border of 3 around."""
    ramp = 100 + 10 * np.arange(12)[None, :] + np.arange(12)[:, None]
    ramp[[0, 1, 2, 9, 10, 11]] = ramp[:, [0, 1, 2, 9, 10, 11]] = 0
    return Image.fromarray(np.repeat(ramp[..., None], 3, 2).astype(np.uint8))


def test_the_share_that_evaluation_keeps() -> None:
    whole = torch.as_tensor(eval_transform(settings("x", image_size=12))(striped()))
    inner = torch.as_tensor(eval_transform(settings("x", image_size=6, crop_pct=0.5))(striped()))
    assert torch.equal(inner, whole[:, 3:9, 3:9])
    assert inner.min() > 0


@pytest.mark.parametrize("crop", [{"crop": "none"}, {"crop": "resized", "scale": (1, 1), "ratio": (1, 1)}])
def test_workers_flip_left_and_right(crop: dict[str, Any]) -> None:
    whole = torch.as_tensor(eval_transform(settings("x", image_size=12))(striped()))
    for flip in (0.0, 1.0):
        data = settings("x", image_size=12, augment={**crop, "flip": flip})
        got = torch.as_tensor(train_transform(data, (0.5,) * 3)(striped()))
        assert torch.equal(got, whole.flip(2) if flip else whole)


@pytest.mark.parametrize("crop", ["none", "resized"])
def test_workers_change_colours_when_told(crop: str) -> None:
    keys = {"crop": crop, "scale": (1, 1), "ratio": (1, 1)}
    plain, other = (
        train_transform(settings("x", image_size=12, augment={**keys, "color_jitter": strength}), (0.5,) * 3)
        for strength in (0.0, 0.9)
    )
    images = [torch.as_tensor(make(striped())) for make in (plain, plain, other, other)]
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])
    assert not torch.equal(images[2], images[3])


def test_cutout_by_hand() -> None:
    got = cut_out(torch.ones(2, 1, 4, 5), 2, torch.tensor([0, 3]), torch.tensor([4, 1]))
    assert got[0, 0].tolist() == [[1, 1, 1, 0, 0], [1] * 5, [1] * 5, [1] * 5]
    assert got[1, 0].tolist() == [[1] * 5, [1] * 5, [0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]


@pytest.mark.parametrize("on_device", [True, False])
def test_a_square_is_cut_out_of_every_training_image(on_device: bool, folder: Path) -> None:
    """Images of one level, wherever they are made; at the border less of the square is inside."""
    data = settings(f"folder:{folder}", on_device=on_device, augment={"cutout": 3})
    blank = torch.cat([batch.images for batch in batches(data).epoch(0)]) == 0
    assert torch.equal(blank.all(1), blank.any(1))
    sizes = blank[:, 0].sum((1, 2))
    assert set(sizes.tolist()) <= {4, 6, 9}
    assert torch.equal(blank[:, 0].any(2).sum(1) * blank[:, 0].any(1).sum(1), sizes)
    assert len(blank.unique(dim=0)) > 8
    assert not any((batch.images == 0).any() for batch in batches(data, training=False).epoch(0))


def test_erasing_by_hand() -> None:
    images, noise = torch.zeros(2, 1, 4, 5), torch.ones(2, 1, 4, 5)
    got = erase(images, torch.tensor([[1, 2, 3, 2], [0, 0, 0, 0]]), noise)
    assert got[0, 0].tolist() == [[0] * 5, *[[0, 0, 1, 1, 0]] * 3]
    assert not got[1].any()


def test_patches_are_drawn_like_timms() -> None:
    """On a rectangle: how often, how large, how high and where, beside timm's own loop over images."""
    from timm.data.random_erasing import RandomErasing

    count, (rows, columns) = 4000, (16, 40)
    patches = draw_patches(0.4, count, (rows, columns), torch.device("cpu"), torch.Generator().manual_seed(1)).float()
    random.seed(2)
    marks = RandomErasing(0.4, mode="pixel", device="cpu")(torch.full((count, 1, rows, columns), -9.0))[:, 0] > -9
    down, across = marks.any(2), marks.any(1)
    there = [down.int().argmax(1), across.int().argmax(1), down.sum(1), across.sum(1)]
    timms = torch.stack(there, 1).float()
    ours, theirs = patches[patches[:, 2] > 0], timms[marks.flatten(1).any(1)]
    assert len(ours) == pytest.approx(0.4 * count, rel=0.06)
    assert len(theirs) == pytest.approx(0.4 * count, rel=0.06)
    torch.testing.assert_close(ours.mean(0), theirs.mean(0), rtol=0.06, atol=0.25)
    torch.testing.assert_close(ours.std(0), theirs.std(0), rtol=0.06, atol=0.25)
    assert (ours[:, 0] + ours[:, 2]).max() == rows
    assert (ours[:, 1] + ours[:, 3]).max() == columns
    assert draw_patches(0.4, 0, (rows, columns), torch.device("cpu")).shape == (0, 4)
    assert not draw_patches(0.0, 50, (rows, columns), torch.device("cpu"))[:, 2:].any()


@pytest.mark.parametrize("channels_last", [False, True])
def test_processes_erase_what_one_would(channels_last: bool, folder: Path) -> None:
    data = settings(f"folder:{folder}", batch_size=8, augment={"erase": 0.5})
    source = open_source(data)

    def first(batch: int, rank: int, world: int) -> torch.Tensor:
        keys = data.model_copy(update={"batch_size": batch})
        where = Where(torch.device("cpu"), rank, world)
        built = build_batches(
            source.train, source, keys, where, training=True, seed=3, channels_last=channels_last, note=print
        )
        return next(built.epoch(0)).images

    whole, halves = first(8, 0, 1), [first(4, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat(halves), whole)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert whole.is_contiguous(memory_format=layout)
    plain = data.model_copy(update={"augment": AugmentConfig()})
    untouched = build_batches(
        source.train, source, plain, Where(torch.device("cpu")), training=True, seed=3, channels_last=False, note=print
    )
    changed = (next(untouched.epoch(0)).images != whole).flatten(1).any(1)
    assert 0 < changed.sum() < 8
