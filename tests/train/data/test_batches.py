"""Batches depend on seed, epoch and position alone; held-out shares and decoded images kept."""

from __future__ import annotations

import multiprocessing
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from nearsight.errors import UserError
from nearsight.train.data import decoded
from nearsight.train.data.batches import Order, Where, plan, seeded
from nearsight.train.data.decoded import materialise
from nearsight.train.data.sources import open_source
from nearsight.train.data.splits import hold_out
from tests.train.data.support import batches, picture, settings, spoil


def test_too_few_images_for_a_batch(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"data.batch_size: got 20 × 2 processes = 40, wanted at most the 16 training images"
    ):
        batches(settings(f"folder:{folder}", batch_size=20), where=Where(torch.device("cpu"), 0, 2))


@pytest.mark.parametrize("on_device", [True, False])
def test_an_epoch_can_be_entered_anywhere(on_device: bool) -> None:
    augment = {"crop": "pad", "pad": 2, "flip": 0.5, "cutout": 3 if on_device else 0}
    data = settings("digits", channels=1, batch_size=64, on_device=on_device, augment=augment)
    whole = list(batches(data, seed=5).epoch(3))
    torch.manual_seed(99)  # the run's own generator must not matter
    part = list(batches(data, seed=5).epoch(3, start=17))
    assert len(whole) == 21
    for a, b in zip(whole[17:], part, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.targets, b.targets)
    other = next(batches(data, seed=5).epoch(4))
    assert not torch.equal(other.targets, whole[0].targets)


def test_workers_do_not_change_a_pixel(folder: Path) -> None:
    keys = {"on_device": False, "augment": {"crop": "resized", "flip": 0.5, "color_jitter": 0.4}}
    alone, helped = (list(batches(settings(f"folder:{folder}", workers=n, **keys)).epoch(1)) for n in (0, 2))
    for a, b in zip(alone, helped, strict=True):
        assert torch.equal(a.images, b.images)


@pytest.mark.parametrize("on_device", [True, False])
def test_two_processes_share_the_batch_of_one(on_device: bool) -> None:
    augment = {"crop": "pad", "pad": 1, "flip": 0.5}
    one = settings("digits", channels=1, batch_size=64, on_device=on_device, augment=augment)
    half = settings("digits", channels=1, batch_size=32, on_device=on_device, augment=augment)
    for training in (True, False):
        whole = batches(one, training)
        parts = [batches(half, training, Where(torch.device("cpu"), rank, 2)) for rank in (0, 1)]
        assert len(whole) == len(parts[0]) == len(parts[1])
        for a, b, c in zip(whole.epoch(2), parts[0].epoch(2), parts[1].epoch(2), strict=True):
            assert torch.equal(a.images, torch.cat([b.images, c.images]))
            assert torch.equal(a.targets, torch.cat([b.targets, c.targets]))


def test_no_two_images_are_drawn_from_one_seed() -> None:
    orders = [Order(50, 4, Where(torch.device("cpu"), rank, 2), seed=1, training=True) for rank in range(2)]
    seeds = []
    for orders[0].epoch, orders[1].epoch in ((0, 0), (1, 1)):
        seeds += [seed for order in orders for batch in order for _, seed in batch]
    assert len(seeds) == len(set(seeds)) == 2 * 48


def test_drawing_from_a_seed_leaves_the_runs_generators_alone() -> None:
    def drawn() -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    plain = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    with seeded(5):
        first = drawn()
    with seeded(5):
        assert drawn() == first
    assert drawn() == plain


@pytest.mark.parametrize("on_device", [True, False])
def test_evaluation_has_a_batch_size_of_its_own(on_device: bool) -> None:
    data = settings("digits", channels=1, batch_size=64, eval_batch_size=200, on_device=on_device)
    held = batches(data, training=False)
    assert [len(batch.targets) for batch in held.epoch(0)] == [200, 200, 200]
    assert len(held) == 3
    assert len(next(batches(data).epoch(0)).targets) == 64


def test_evaluation_takes_each_image_once() -> None:
    for count, batch, world in ((5, 2, 2), (450, 64, 3), (7, 7, 1), (1, 4, 2)):
        taken = [plan(count, batch, Where(torch.device("cpu"), rank, world)) for rank in range(world)]
        assert len({tuple(t.shape) for t in taken}) == 1
        real = torch.cat([t.flatten() for t in taken])
        assert sorted(real[real >= 0].tolist()) == list(range(count))


def test_hold_out_is_a_fixed_share() -> None:
    train = open_source(settings("digits", channels=1)).train
    rest, held = hold_out(train, 0.04, seed=7)
    assert (len(rest), len(held)) == (1293, 54)
    assert not set(rest.indices) & set(held.indices)
    assert hold_out(train, 0.04, seed=7)[1].indices == held.indices
    assert hold_out(train, 0.04, seed=8)[1].indices != held.indices


def test_a_held_out_share_is_cut_from_one_decoded_set(folder: Path, tmp_path: Path) -> None:
    data = settings(f"folder:{folder}")
    train = open_source(data).train
    pixels, labels, _ = materialise(train, data)
    for seed in (1, 2):
        for part in hold_out(train, 0.4, seed):
            got = materialise(part, data)
            assert torch.equal(got[0], pixels[part.indices])
            assert torch.equal(got[1], labels[part.indices])
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 1


def test_decoded_images_are_cached(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = settings(f"folder:{folder}")
    first = next(batches(data).epoch(0)).images
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 1
    monkeypatch.setattr("nearsight.train.data.decoded._decode_all", lambda *a: pytest.fail("decoded again"))
    assert torch.equal(next(batches(data).epoch(0)).images, first)
    monkeypatch.undo()
    monkeypatch.setenv("NEARSIGHT_CACHE", str(tmp_path / "cache"))
    picture(200, (9, 12)).save(folder / "train" / "cat" / "0.png")  # a changed file makes another entry
    batches(data)
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 2


@pytest.mark.parametrize(
    "keys", [{"image_size": 6}, {"crop_pct": 0.5}, {"interpolation": "bicubic"}, {"channels": 1}, {"max_pixels": 10**6}]
)
def test_images_prepared_otherwise_are_cached_apart(keys: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    train = open_source(settings(f"folder:{folder}")).train
    for data in (settings(f"folder:{folder}"), settings(f"folder:{folder}", **keys)):
        pixels, _, _ = materialise(train if data.channels == 3 else open_source(data).train, data)
        assert pixels.shape == (16, data.image_size, data.image_size, data.channels)
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 2


def test_a_held_out_share_of_a_set_with_bad_files(folder: Path) -> None:
    """Numbers of images mean those of the folder, whichever of them are none."""
    bad = spoil(folder)
    data = settings(f"folder:{folder}", on_bad="skip")
    train = open_source(data).train
    for part in hold_out(train, 0.5, seed=3):
        pixels, labels, left_out = materialise(part, data)
        good = [i for i in range(len(part)) if part.name(i) not in bad]
        assert sorted(left_out) == sorted(part.name(i) for i in range(len(part)) if i not in good)
        levels = [100 * (Path(part.name(i)).parent.name == "dog") + int(Path(part.name(i)).stem) for i in good]
        assert pixels[:, 0, 0, 0].tolist() == levels
        assert labels.tolist() == [level // 100 for level in levels]


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs processes by fork")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_many_small_images_are_decoded_by_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same order, with the same left out."""
    spoil(folder)
    data = settings(f"folder:{folder}", on_bad="skip", cache=False)
    train = open_source(data).train
    before = torch.get_rng_state()
    pixels, labels, left_out = materialise(train, data)
    monkeypatch.setattr(decoded, "MANY", 10)
    monkeypatch.setattr(decoded, "CHUNK", 3)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    here, seen = os.getpid(), []
    read = type(train).read

    def watched(self: Any, index: int) -> Any:
        seen.append(index)
        assert os.getpid() != here
        return read(self, index)

    monkeypatch.setattr(type(train), "read", watched)
    by_processes = materialise(train, data)
    assert torch.equal(by_processes[0], pixels)
    assert torch.equal(by_processes[1], labels)
    assert by_processes[2] == left_out != []
    assert not seen
    # A run draws the same whether its images were decoded, and by whom, or kept from before.
    assert torch.equal(torch.get_rng_state(), before)


def test_a_cache_that_is_damaged_or_cannot_be_written_costs_time_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = settings(f"folder:{folder}")
    first = next(batches(data).epoch(0)).images
    (file,) = (tmp_path / "cache").glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:20])
    assert torch.equal(next(batches(data).epoch(0)).images, first)
    assert file.read_bytes() == whole

    def full(tensors: Any, path: Path) -> None:
        path.write_bytes(whole[:20])
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    file.unlink()
    with monkeypatch.context() as patch:
        patch.setattr("nearsight.train.data.decoded.save_file", full)
        assert torch.equal(next(batches(data).epoch(0)).images, first)
    assert not any((tmp_path / "cache").iterdir())
    (tmp_path / "cache").rmdir()
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert torch.equal(next(batches(data).epoch(0)).images, first)
