"""Sources that are read as they come: shards, and sets of the Hugging Face hub."""

from __future__ import annotations

import itertools
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nearsight.errors import UserError
from nearsight.train.data.batches import build_batches
from nearsight.train.data.sources import PACKAGES, open_source
from nearsight.train.data.streams import Encoded, Stream, _plain_sample, stream_length
from tests.train.data.support import CPU, batches, encoded, picture, settings, shards


def test_webdataset_stream(tmp_path: Path) -> None:
    shards(tmp_path, {"train": [12], "validation": [5]})
    data = settings("wds/x", root=str(tmp_path), num_classes=2)
    train, evaluation = batches(data), batches(data, training=False)
    assert (len(train), train.images, evaluation.images) == (3, 12, 5)
    assert open_source(data).images == 12
    assert [len(batch.targets) for batch in train.epoch(0)] == [4, 4, 4]
    assert len(list(train.epoch(0, start=2))) == 1
    assert sum(int(b.valid.sum()) for b in evaluation.epoch(0)) == 5


def test_labels_beyond_the_classes_are_one_line(tmp_path: Path) -> None:
    """A loss would fail with an index out of bounds; a GPU, with its device."""
    shards(tmp_path, {"train": [12], "validation": [5]})
    data = settings("wds/x", root=str(tmp_path), num_classes=3)
    for shard in tmp_path.glob("*.tar"):
        shard.write_bytes(shard.read_bytes().replace(b"1" + bytes(511), b"3" + bytes(511)))
    for training in (True, False):
        with pytest.raises(
            UserError, match=r"^data\.num_classes: got 3 and an image with the label 3, wanted 0 to 2\.$"
        ):
            list(batches(data, training).epoch(0))


@pytest.mark.parametrize("on_device", [True, False])
def test_labels_beyond_the_classes_of_a_set_in_memory(on_device: bool, folder: Path) -> None:
    data = settings(f"folder:{folder}", on_device=on_device)
    source = open_source(data)
    source.train.files[3] = (source.train.files[3][0], -1)
    finish = {"training": True, "seed": 0, "channels_last": False, "note": print}
    with pytest.raises(UserError, match=r"^data\.num_classes: got 2 and an image with the label -1, wanted 0 to 1\.$"):
        list(build_batches(source.train, source, data, CPU, **finish).epoch(0))


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


def images_without_labels(data: Any) -> None:
    """Reconstruction wants none; classification refuses an image without one, in a sentence."""
    source = open_source(data, labelled=False)
    options = {"training": False, "seed": 0, "channels_last": False, "note": print}
    found = build_batches(source.evaluation, source, data, CPU, **options)
    assert sum(len(b.targets) if b.valid is None else int(b.valid.sum()) for b in found.epoch(0)) == 5
    with pytest.raises(UserError, match=r"got 2 and an image with the label -1, wanted 0 to 1\.$"):
        list(batches(data, training=False).epoch(0))


@pytest.mark.parametrize("kind", ["hfds", "hfids"])
def test_labels_without_names_and_no_labels(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    images = [{"bytes": encoded(i), "path": None} for i in range(5)]
    for name, columns in (("named", {"label": [0, 1, 1, 0, 1]}), ("bare", {})):
        table = datasets.Dataset.from_dict({"image": images, **columns}).cast_column("image", datasets.Image())
        for split in ("train", "validation"):
            table.to_parquet(str(tmp_path / name / f"{split}-00000-of-00001.parquet"))
    named, bare = (
        settings(
            f"{kind}/{tmp_path / name}", root=str(tmp_path / "cache"), num_classes=2, train_images=5, eval_images=5
        )
        for name in ("named", "bare")
    )
    found = [b.targets if b.valid is None else b.targets[b.valid] for b in batches(named, training=False).epoch(0)]
    assert torch.cat(found).tolist() == [0, 1, 1, 0, 1]
    images_without_labels(bare)


def test_shards_without_labels(tmp_path: Path) -> None:
    shards(tmp_path, {"train": [12], "validation": [5]})
    for shard in tmp_path.glob("*.tar"):
        with tarfile.open(shard) as old, tarfile.open(f"{shard}.new", "w") as bare:
            for member in old:
                if not member.name.endswith(".cls"):
                    bare.addfile(member, old.extractfile(member))
        Path(f"{shard}.new").replace(shard)
    images_without_labels(settings("wds/x", root=str(tmp_path), num_classes=2))


def test_an_empty_cell_is_a_bad_image(tmp_path: Path) -> None:
    rows = [({"path": None, "bytes": encoded(0)}, 0), (None, 1)]
    stream = Stream(SimpleNamespace(reader=rows), lambda image: image.size, settings("wds/x"), False)
    assert [sample[2:] for sample in stream] == [(True, []), (False, [("an image", "not an image")])]


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
