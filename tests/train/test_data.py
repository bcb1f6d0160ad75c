"""Images in: every source, what is wrong with it, and batches that depend on seed, epoch and position alone."""

from __future__ import annotations

import io
import itertools
import json
import random
import re
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError

from nearsight.errors import UserError
from nearsight.train.data.augment import Draw, cut_out, draw, draw_patches, erase, gather, pad_images
from nearsight.train.data.batches import Order, Where, build_batches, plan, seeded
from nearsight.train.data.config import AugmentConfig, DataConfig
from nearsight.train.data.decoded import eval_transform, materialise, train_transform
from nearsight.train.data.sources import PACKAGES, open_source
from nearsight.train.data.splits import hold_out
from nearsight.train.data.streams import Encoded, Stream, _plain_sample, stream_length

CPU = Where(torch.device("cpu"))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARSIGHT_CACHE", str(tmp_path / "cache"))


def settings(source: str, **keys: Any) -> DataConfig:
    return DataConfig.model_validate({"source": source, "image_size": 8, "batch_size": 4, "workers": 0, **keys})


def batches(data: DataConfig, training: bool = True, where: Where = CPU, seed: int = 0, notes: Any = None) -> Any:
    source = open_source(data)
    split = source.train if training else source.evaluation
    note = (notes if notes is not None else []).append
    return build_batches(split, source, data, where, training=training, seed=seed, channels_last=False, note=note)


def picture(value: int, size: tuple[int, int] = (9, 7)) -> Image.Image:
    return Image.fromarray(np.full((*size, 3), value, np.uint8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes, 8 training and 3 evaluation images each, of odd sizes."""
    for split, count in (("train", 8), ("val", 3)):
        for label, name in enumerate(("cat", "dog")):
            place = tmp_path / "set" / split / name
            place.mkdir(parents=True)
            for i in range(count):
                picture(100 * label + i, (9 + i, 12)).save(place / f"{i}.png")
    return tmp_path / "set"


def encoded(value: int) -> bytes:
    buffer = io.BytesIO()
    picture(value).save(buffer, "PNG")
    return buffer.getvalue()


def parquet(
    path: Path,
    rows: int,
    *,
    names: bool = True,
    label: str = "label",
    image: str = "img",
    classes: tuple[str, ...] = ("a", "b", "c"),
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {
            image: [{"bytes": encoded(i), "path": f"{i}.png"} for i in range(rows)],
            label: pa.array([i % 3 for i in range(rows)]),
        }
    )
    if names:
        features = {label: {"names": classes, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


# ---- sources ----


def test_digits() -> None:
    source = open_source(settings("digits", channels=1))
    assert (len(source.train), len(source.evaluation), len(source.classes)) == (1347, 450, 10)
    image, label = source.evaluation.read(3)
    assert image.size == (8, 8)
    assert image.mode == "L"
    assert 0 <= label < 10
    counts = np.bincount([source.evaluation.read(i)[1] for i in range(450)])
    assert counts.min() >= 43


def test_folder(folder: Path) -> None:
    data = settings(f"folder:{folder}")
    source = open_source(data)
    assert source.classes == ["cat", "dog"]
    assert (len(source.train), len(source.evaluation)) == (16, 6)
    seen = [(batch.images, batch.targets) for batch in batches(data).epoch(0)]
    assert [tuple(images.shape) for images, _ in seen] == [(4, 3, 8, 8)] * 4
    # Grey levels 0…7 are cats, 100…107 dogs: images and labels stay together.
    for images, targets in seen:
        level = images[:, 0].mean((1, 2)) * 0.229 + 0.485
        assert ((level * 255 > 50).long() == targets).all()


@pytest.mark.parametrize("names", [True, False])
def test_parquet(tmp_path: Path, names: bool) -> None:
    parquet(tmp_path / "p" / "train-00000-of-00002.parquet", 6, names=names)
    parquet(tmp_path / "p" / "train-00001-of-00002.parquet", 3, names=names)
    parquet(tmp_path / "p" / "test-00000-of-00001.parquet", 3, names=names)
    source = open_source(settings(f"parquet:{tmp_path / 'p'}"))
    assert (len(source.train), len(source.evaluation)) == (9, 3)
    assert source.classes == (["a", "b", "c"] if names else ["0", "1", "2"])
    assert source.train.read(7)[1] == 1
    assert source.train.name(7) == "row 7 of train-00000-of-00002.parquet (1.png)"


def test_cifar_from_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet(tmp_path / "cifar100" / "train-0.parquet", 6, label="fine_label")
    parquet(tmp_path / "cifar100" / "test-0.parquet", 3, label="fine_label")
    for data in (settings("cifar100", root=str(tmp_path / "cifar100")), settings(f"cifar100:{tmp_path / 'cifar100'}")):
        assert len(open_source(data).train) == 6
    monkeypatch.setenv("NEARSIGHT_DATA", str(tmp_path))
    assert open_source(settings("cifar100")).mean[0] == pytest.approx(0.5071)


def test_cifar_from_torchvisions_folder(tmp_path: Path) -> None:
    """The same files torchvision reads, made small: its digests are those of the real ones, so they are left out."""
    import pickle

    from torchvision import datasets

    base = tmp_path / datasets.CIFAR10.base_folder
    base.mkdir()
    for file in (*(f for f, _ in datasets.CIFAR10.train_list), "test_batch"):
        pixels = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
        (base / file).write_bytes(pickle.dumps({"data": pixels, "labels": [1, 0]}))
    (base / "batches.meta").write_bytes(pickle.dumps({"label_names": ["plane", "car"]}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
        patch.setattr(datasets.cifar, "check_integrity", lambda *a: True)
        source = open_source(settings("cifar10", root=str(tmp_path)))
    assert (len(source.train), len(source.evaluation), source.classes) == (10, 2, ["plane", "car"])


def test_statistics_are_the_sources_unless_told() -> None:
    assert open_source(settings("digits", channels=1)).mean == (0.305,)
    source = open_source(settings("digits", channels=3, mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6]))
    assert (source.mean, source.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def test_grey_images_have_the_mean_of_the_colours(folder: Path) -> None:
    source = open_source(settings(f"folder:{folder}", channels=1))
    assert source.mean == pytest.approx(((0.485 + 0.456 + 0.406) / 3,))
    assert source.std == pytest.approx(((0.229 + 0.224 + 0.225) / 3,))


def shards(folder: Path, sizes: dict[str, list[int]], bad: tuple[int, ...] = ()) -> None:
    """Tar files of a WebDataset: per split, shards of so many images; `bad` ones are cut short."""
    import tarfile

    splits = {}
    for split, counts in sizes.items():
        names = [f"x-{split}-{shard:04d}.tar" for shard in range(len(counts))]
        number = 0
        for name, count in zip(names, counts, strict=True):
            with tarfile.open(folder / name, "w") as tar:
                for _ in range(count):
                    image = encoded(number)[:45] if number in bad else encoded(number)
                    for suffix, data in (("png", image), ("cls", str(number % 2).encode())):
                        info = tarfile.TarInfo(f"{number:04d}.{suffix}")
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
                    number += 1
        splits[split] = {"name": split, "filenames": names, "shard_lengths": counts, "num_samples": number}
    (folder / "_info.json").write_text(json.dumps({"splits": splits}))


def test_webdataset_stream(tmp_path: Path) -> None:
    shards(tmp_path, {"train": [12], "validation": [5]})
    data = settings("wds/x", root=str(tmp_path), num_classes=2)
    train, evaluation = batches(data), batches(data, training=False)
    assert (len(train), train.images, evaluation.images) == (3, 12, 5)
    assert open_source(data).images == 12
    assert [len(batch.targets) for batch in train.epoch(0)] == [4, 4, 4]
    assert len(list(train.epoch(0, start=2))) == 1
    assert sum(int(b.valid.sum()) for b in evaluation.epoch(0)) == 5


def hugging_face_set(folder: Path, bad: tuple[int, ...] = ()) -> None:
    for split, count in (("train", 12), ("validation", 5)):
        for i in range(count):
            part = folder / split / "ab"[i % 2]
            part.mkdir(parents=True, exist_ok=True)
            (part / f"{i}.png").write_bytes(encoded(i)[:45] if i in bad else encoded(i))


@pytest.mark.parametrize("kind", ["wds", "hfids"])
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_files_of_a_stream(kind: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last image of the evaluation is bad, one of the training's; more workers than shards."""
    if kind == "wds":
        pytest.importorskip("webdataset")
        shards(tmp_path, {"train": [12], "validation": [5]}, bad=(4,))
        data = settings("wds/x", root=str(tmp_path), num_classes=2, workers=workers)
    else:
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        hugging_face_set(tmp_path / "set", bad=(4,))
        keys = {"num_classes": 2, "train_images": 12, "eval_images": 5, "workers": workers}
        data = settings(f"hfids/{tmp_path / 'set'}", root=str(tmp_path / "cache"), **keys)
    for training in (True, False):
        with pytest.raises(
            UserError, match=r"4\.png: damaged \(.*\); mend or remove it, or leave such files out with data"
        ):
            list(batches(data, training).epoch(0))
    data = data.model_copy(update={"on_bad": "skip"})
    train, held = (list(batches(data, training).epoch(0)) for training in (True, False))
    assert [len(batch.targets) for batch in train] == [4, 4, 4]
    assert sum(int(batch.valid.sum()) for batch in held) == 4
    for part in (train, held):
        assert any(name.endswith("4.png") for batch in part for name in batch.bad)
    limited = data.model_copy(update={"max_pixels": 20})  # all of them are too large
    with pytest.raises(UserError, match=r"9×7 pixels exceed data\.max_pixels=20|7×9 pixels exceed data\.max_pixels=20"):
        next(batches(limited).epoch(0))


@pytest.mark.parametrize("kind", ["hfds", "hfids"])
def test_hugging_face_sets(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local set through timm's readers, indexed and streamed: every image once, with its label."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    hugging_face_set(tmp_path / "set")
    sizes = {"num_classes": 2, "train_images": 12, "eval_images": 5} if kind == "hfids" else {}
    data = settings(f"{kind}/{tmp_path / 'set'}", root=str(tmp_path / "cache"), **sizes)
    train, evaluation = batches(data), batches(data, training=False)
    assert (train.images, evaluation.images) == (12, 5)
    assert torch.cat([batch.targets for batch in train.epoch(0)]).bincount().tolist() == [6, 6]
    counted = [b.targets if b.valid is None else b.targets[b.valid] for b in evaluation.epoch(0)]
    assert torch.cat(counted).bincount().tolist() == [3, 2]


# ---- mistakes ----


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("digit", "data.source: got 'digit', wanted one of digits, cifar10"),
        ("folder:/nowhere", "data.source: no folder '/nowhere'"),
        ("parquet:/nowhere", "data.source: no Parquet files in '/nowhere'"),
        ("cifar10:/nowhere", "data.root: no cifar10 in /nowhere; set data.root=FOLDER"),
        ("wds/nothing", "data.source: cannot open 'wds/nothing'"),
        ("wds/rootless", "data.root: missing; 'wds/rootless' wants the folder (or address) of its shards"),
        ("tfds/mnist", "data.source: 'tfds/mnist' needs TensorFlow, which no extra brings"),
    ],
)
def test_missing_things_are_one_line(
    source: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGES, "tfds", "no_such_package")
    with pytest.raises(UserError, match=re.escape(sentence)) as caught:
        open_source(settings(source, root=str(tmp_path) if source == "wds/nothing" else None))
    assert "\n" not in str(caught.value)


def test_a_hub_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **keys: Any) -> None:
        raise ConnectionError("Couldn't reach\nthe Hub")

    monkeypatch.setattr("timm.data.readers.reader_factory.create_reader", unreachable)
    with pytest.raises(UserError, match=r"cannot open 'hfds/a/b' \(Couldn't reach the Hub\)\.$"):
        open_source(settings("hfds/a/b"))
    monkeypatch.setitem(PACKAGES, "hfds", "no_such_package")
    with pytest.raises(ModuleNotFoundError) as caught:  # the command line names the extra
        open_source(settings("hfds/a/b"))
    assert caught.value.name == "no_such_package"


def test_bad_folders_are_one_line(folder: Path, tmp_path: Path) -> None:
    (folder / "val" / "dog").rename(folder / "val" / "fox")
    with pytest.raises(UserError, match=r"has 2 classes in train and 2 in evaluation, .* differ in dog, fox\.$"):
        open_source(settings(f"folder:{folder}"))
    one = tmp_path / "one"
    (one / "train" / "cat").mkdir(parents=True)
    picture(1).save(one / "train" / "cat" / "a.png")
    with pytest.raises(UserError, match="has 1 class, wanted at least 2"):
        open_source(settings(f"folder:{one}"))
    (one / "train" / "dog").mkdir()
    with pytest.raises(UserError, match=r"class folder '.*dog' has no images"):
        open_source(settings(f"folder:{one}"))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="has no images; wanted a sub-folder per class"):
        open_source(settings(f"folder:{empty}"))


def test_bad_parquet_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UserError, match="is not a readable Parquet file"):
        open_source(settings(f"parquet:{tmp_path}"))
    parquet(tmp_path / "train.parquet", 3, image="pixels")
    with pytest.raises(UserError, match="has columns pixels, label, wanted image or img"):
        open_source(settings(f"parquet:{tmp_path}"))
    parquet(tmp_path / "train.parquet", 3, classes=("a", "b"))
    with pytest.raises(UserError, match=r"train\.parquet has label 2, wanted less than its 2 classes"):
        open_source(settings(f"parquet:{tmp_path}"))


def spoil(folder: Path) -> list[str]:
    cut = folder / "train" / "cat" / "2.png"
    cut.write_bytes(cut.read_bytes()[:45])
    text = folder / "train" / "dog" / "5.png"
    text.write_text("no image")
    link = folder / "train" / "dog" / "9.png"
    link.symlink_to(folder / "gone.png")
    bomb = folder / "val" / "cat" / "0.png"
    picture(3, (100, 100)).save(bomb)
    return [str(cut), str(text), str(link), str(bomb)]


@pytest.mark.parametrize("on_device", [True, False])
def test_damaged_files(folder: Path, on_device: bool) -> None:
    bad = spoil(folder)
    keys = {"on_device": on_device, "max_pixels": 5000}
    for training in (True, False):
        with pytest.raises(
            UserError, match=r"mend or remove it, or leave such files out with data\.on_bad=skip"
        ) as caught:
            list(batches(settings(f"folder:{folder}", **keys), training).epoch(0))
        assert any(name in str(caught.value) for name in bad)
        assert "\n" not in str(caught.value)
    keys["on_bad"] = "skip"
    notes: list[str] = []
    train = list(batches(settings(f"folder:{folder}", **keys), notes=notes).epoch(0))
    held = list(batches(settings(f"folder:{folder}", **keys), training=False, notes=notes).epoch(0))
    told = " ".join([*notes, *(name for batch in (*train, *held) for name in batch.bad)])
    assert all(name in told for name in bad)
    # Evaluation counts each good image once, however many are bad.
    assert sum(int(batch.valid.sum()) for batch in held) == 5


def test_a_bomb_is_refused_before_it_unpacks() -> None:
    from nearsight.train.data.images import BadImageError, decode

    def claims(side: int) -> bytes:
        """A PNG of a few bytes that says it is side×side."""
        kind = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        return encoded(0)[:8] + struct.pack(">I", 13) + kind + struct.pack(">I", zlib.crc32(kind)) + encoded(0)[33:]

    for side in (10_000, 100_000):
        with pytest.raises(BadImageError, match=r"pixels"):
            decode(claims(side), "RGB", 89_478_485)
    assert decode(encoded(0), "RGB", 63).size == (7, 9)
    with pytest.raises(BadImageError, match=r"^7×9 pixels exceed data\.max_pixels=62$"):
        decode(encoded(0), "RGB", 62)


def test_formats_that_pillow_half_knows_are_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    from nearsight.train.data.images import BadImageError, decode

    def refuses(source: Any) -> None:
        raise NotImplementedError("Unimplemented pixel format 0")

    monkeypatch.setattr(Image, "open", refuses)
    with pytest.raises(BadImageError, match=r"damaged \(Unimplemented pixel format 0\)"):
        decode(b"DDS", "RGB", 100)


def test_too_few_images_for_a_batch(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"data.batch_size: got 20 × 2 processes = 40, wanted at most the 16 training images"
    ):
        batches(settings(f"folder:{folder}", batch_size=20), where=Where(torch.device("cpu"), 0, 2))


# ---- batches ----


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


def test_alternative_labels_of_a_tar_file() -> None:
    """timm's: a label in the JSON beside the image; below 0 the image is left out."""
    sample = {"__key__": "7", "png": b"...", "cls": b"3", "json": b'{"other": 5, "none": -1}'}
    assert _plain_sample(sample, "jpg;png") == {"jpg": Encoded("7.png", b"..."), "cls": 3}
    other = _plain_sample(sample, "jpg;png", alt_label="other")
    assert other is not None
    assert other["cls"] == 5
    assert _plain_sample(sample, "jpg;png", alt_label="none") is None
    with pytest.raises(ValueError, match=r"^7 has none of jpg;webp$"):
        _plain_sample(sample, "jpg;webp")


def test_a_stream_is_shuffled_anew_in_every_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    hugging_face_set(tmp_path / "set")
    keys = {"num_classes": 2, "train_images": 12, "eval_images": 5, "root": str(tmp_path / "cache")}

    def seen(stream: Any, epoch: int) -> list[float]:
        return [float(image[0, 0, 0]) for batch in stream.epoch(epoch) for image in batch.images]

    data = settings(f"hfids/{tmp_path / 'set'}", **keys)
    stream = batches(data)
    first, second = seen(stream, 0), seen(stream, 1)
    assert sorted(first) == sorted(second)
    assert first != second
    assert seen(batches(data), 1) == second


def test_a_stream_of_decoded_images() -> None:
    """As TensorFlow's reader gives them: it decodes by itself, and repeats its last image where processes have unequal shares."""
    passes = []

    class Reader:
        num_samples = 3

        def __iter__(self) -> Any:
            passes.append(1)
            pairs = [(picture(i), np.int64(i)) for i in range(3)]
            yield from [*pairs, pairs[-1], pairs[-1]]

    dataset = SimpleNamespace(reader=Reader())
    assert stream_length(dataset) == 3
    data = settings("digits", channels=1)
    once = list(Stream(dataset, lambda image: image.mode, data, training=False))
    assert once == [("L", i, True, []) for i in range(3)]
    on_and_on = Stream(dataset, lambda image: image.mode, data, training=True)
    assert [label for _, label, _, _ in itertools.islice(on_and_on, 7)] == [0, 1, 2, 0, 1, 2, 0]
    assert len(passes) == 4
