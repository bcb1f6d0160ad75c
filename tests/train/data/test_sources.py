"""Images in: every source, and what is wrong with it."""

from __future__ import annotations

import io
import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nearsight.errors import UserError
from nearsight.train.data.sources import PACKAGES, open_source
from tests.train.data.support import batches, encoded, picture, settings, spoil


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
    assert source.train.name(5) == "row 5 of train-00000-of-00002.parquet (5.png)"
    assert source.train.name(7) == "row 1 of train-00001-of-00002.parquet (1.png)"


def test_parquet_whose_evaluation_lacks_the_last_class(tmp_path: Path) -> None:
    parquet(tmp_path / "train-0.parquet", 9, names=False)
    parquet(tmp_path / "test-0.parquet", 2, names=False)
    source = open_source(settings(f"parquet:{tmp_path}"))
    assert (source.classes, len(source.evaluation)) == (["0", "1", "2"], 2)
    parquet(tmp_path / "train-0.parquet", 2, names=False)
    parquet(tmp_path / "test-0.parquet", 9, names=False)
    with pytest.raises(UserError, match=r"has 2 classes in train and 3 in evaluation, wanted the same ones; .* in 2\."):
        open_source(settings(f"parquet:{tmp_path}"))


def test_cifar_from_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hundred = tuple(str(n) for n in range(100))
    parquet(tmp_path / "cifar100" / "train-0.parquet", 6, label="fine_label", classes=hundred)
    parquet(tmp_path / "cifar100" / "test-0.parquet", 3, label="fine_label", classes=hundred)
    parquet(tmp_path / "another" / "train-0.parquet", 6)
    for root in (tmp_path / "cifar100", tmp_path):
        for data in (settings("cifar100", root=str(root)), settings(f"cifar100:{root}")):
            assert len(open_source(data).train) == 6
    monkeypatch.setenv("NEARSIGHT_DATA", str(tmp_path))
    assert open_source(settings("cifar100")).mean[0] == pytest.approx(0.5071)
    # Neither another set beside it nor one with other classes is taken for it.
    with pytest.raises(UserError, match=r"data\.root: no cifar10 in \./data or \$NEARSIGHT_DATA"):
        open_source(settings("cifar10"))
    with pytest.raises(UserError, match=r"has 100 classes, wanted the 10 of cifar10; .* data\.source=parquet:"):
        open_source(settings("cifar10", root=str(tmp_path / "cifar100")))


def test_a_download_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from urllib.error import URLError

    from torchvision import datasets

    def unreachable(self: Any) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr(datasets.CIFAR10, "download", unreachable)
    with pytest.raises(UserError, match=r"data\.download: cifar10 cannot be fetched \(Name or service not known\)"):
        open_source(settings("cifar10", root=str(tmp_path), download=True))


def test_splits_of_parquet_files_by_their_folders(tmp_path: Path) -> None:
    """As the hub converts sets: config/split/0000.parquet; the name nearest to the images decides."""
    rows = {"train/0000": 6, "test/0000": 3, "test/train-1": 3, "valuable": 3}
    for name, count in rows.items():
        parquet(tmp_path / "default" / f"{name}.parquet", count)
    source = open_source(settings(f"parquet:{tmp_path}"))
    assert (len(source.train), len(source.evaluation)) == (12, 3)


def test_the_split_that_is_named_is_evaluated(folder: Path, tmp_path: Path) -> None:
    """Not the first there is: whoever asks for test must not be told of val."""
    for name in ("test", "trainval"):
        for kind in ("cat", "dog"):
            (folder / name / kind).mkdir(parents=True)
            picture(1).save(folder / name / kind / "a.png")

    def sizes(source: str, **keys: Any) -> tuple[int, int]:
        opened = open_source(settings(source, **keys))
        return len(opened.train), len(opened.evaluation)

    assert sizes(f"folder:{folder}") == (16, 6)
    assert sizes(f"folder:{folder}", eval_split="test") == (16, 2)
    assert sizes(f"folder:{folder}", eval_split="train", train_split="trainval") == (2, 16)
    plain = open_source(settings(f"folder:{folder}", eval_split="test"), labelled=False)
    assert (len(plain.train), len(plain.evaluation)) == (16, 2)
    with pytest.raises(UserError, match=r"data\.eval_split: got 'dev', wanted .*, which has test, train, trainval"):
        sizes(f"folder:{folder}", eval_split="dev")
    with pytest.raises(UserError, match=r"data\.train_split: got 'training', wanted a split of .*, which has test, t"):
        sizes(f"folder:{folder}", train_split="training")
    for name, count in {"train-0": 9, "validation-0": 6, "test-0": 3}.items():
        parquet(tmp_path / "p" / f"{name}.parquet", count)
    assert sizes(f"parquet:{tmp_path / 'p'}") == (9, 6)
    assert sizes(f"parquet:{tmp_path / 'p'}", eval_split="test") == (9, 3)
    assert sizes(f"parquet:{tmp_path / 'p'}", eval_split="train") == (9, 9)
    with pytest.raises(UserError, match=r"data\.eval_split: got 'val', wanted .* which has test, train, validation\.$"):
        sizes(f"parquet:{tmp_path / 'p'}", eval_split="val")
    with pytest.raises(UserError, match=r"data\.train_split: got 'test', wanted .*, which has train\."):
        sizes(f"parquet:{tmp_path / 'p'}", train_split="test")
    assert sizes("digits", eval_split="test") == (1347, 450)
    assert sizes("digits", eval_split="train") == (1347, 1347)
    with pytest.raises(UserError, match=r"data\.eval_split: got 'dev', wanted .*'digits', which has train, test\."):
        sizes("digits", eval_split="dev")
    (fault,) = settings("digits", eval_split="test", holdout=0.1).faults()
    assert fault.startswith("data.eval_split: got test with data.holdout=0.1, whose images are evaluated; wanted data")


def test_linked_folders_are_read_and_hidden_ones_are_not(folder: Path, tmp_path: Path) -> None:
    """A set put together of links has its images; what notebooks and file managers leave behind are no images of it."""
    cats = folder / "train" / "cat"
    more = tmp_path / "store" / "more cats"
    more.mkdir(parents=True)
    picture(2).save(more / "a.png")
    (more / "round").symlink_to(cats, target_is_directory=True)  # back to where it is linked from
    for name in ("linked", "linked again"):
        (cats / name).symlink_to(more, target_is_directory=True)
    for hidden in (folder / "train" / ".ipynb_checkpoints", cats / ".ipynb_checkpoints"):
        hidden.mkdir()
        picture(3).save(hidden / "a-checkpoint.png")
    (cats / "._a.png").write_bytes(b"of a Mac")
    source = open_source(settings(f"folder:{folder}"))
    assert source.classes == ["cat", "dog"]
    assert len(source.train) == 17
    assert [source.train.name(i) for i in range(17)].count(str(cats / "linked" / "a.png")) == 1
    assert len(open_source(settings(f"folder:{folder}"), labelled=False).train) == 17


def test_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert len(open_source(settings(f"folder:~/{folder.name}")).train) == 16
    assert settings("cifar10", root="~/x").root == str(folder.parent / "x")


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
    (folder / "train").rename(folder / "training")
    with pytest.raises(UserError, match=r"has training, val, wanted train and one of val, .* rename them"):
        open_source(settings(f"folder:{folder}"))
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
    parquet(tmp_path / "trailing.parquet", 3, image="png")
    with pytest.raises(
        UserError, match=r"trailing\.parquet has columns png .*, .*train\.parquet img .*; wanted the files of one set"
    ):
        open_source(settings(f"parquet:{tmp_path}"))


def test_parquet_that_holds_no_encoded_images(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"image": [[0, 1], [2, 3]], "label": [0, 1]}), tmp_path / "train.parquet")
    with pytest.raises(UserError, match=r"column 'image' of .* holds list<.*, wanted encoded images"):
        open_source(settings(f"parquet:{tmp_path}"))


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


def test_sixteen_bits_a_pixel_keep_their_greys() -> None:
    from nearsight.train.data.images import BadImageError, decode

    def file(levels: np.ndarray, kind: str) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(levels).save(buffer, kind)
        return buffer.getvalue()

    levels = np.array([[0, 255, 256], [25700, 65279, 65535]], np.uint16)
    for kind in ("PNG", "TIFF"):
        assert np.asarray(decode(file(levels, kind), "L", 100)).tolist() == [[0, 0, 1], [100, 254, 255]]
        assert np.asarray(decode(file(levels, kind), "RGB", 100))[1].tolist() == [[100] * 3, [254] * 3, [255] * 3]
    # A range nobody states: PIL would make 0…1 black and 0…70000 white.
    for levels in (np.array([[0.5, 1.0]], np.float32), np.array([[7, 70000]], np.int32)):
        with pytest.raises(BadImageError, match=r"^32 bits a pixel"):
            decode(file(levels, "TIFF"), "L", 100)


def test_what_is_transparent_is_white() -> None:
    from nearsight.train.data.images import decode

    def file(image: Image.Image, **options: Any) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, "PNG", **options)
        return buffer.getvalue()

    half = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    half.putpixel((1, 0), (255, 0, 0, 204))
    assert np.asarray(decode(file(half), "RGB", 100)).tolist() == [[[255] * 3, [255, 51, 51]]]
    grey = Image.new("LA", (2, 1), (0, 0))
    grey.putpixel((1, 0), (100, 255))
    assert np.asarray(decode(file(grey), "L", 100)).tolist() == [[255, 100]]
    palette = Image.new("P", (1, 1), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    assert decode(file(palette, transparency=1), "RGB", 100).getpixel((0, 0)) == (255, 255, 255)
    assert decode(file(palette), "RGB", 100).getpixel((0, 0)) == (255, 0, 0)


def test_photographs_are_upright() -> None:
    from nearsight.train.data.images import decode

    def photo(exif: bytes) -> bytes:
        buffer = io.BytesIO()
        wide = Image.new("RGB", (32, 16), "red")
        wide.paste("blue", (0, 0, 16, 16))
        wide.save(buffer, "JPEG", exif=exif)
        return buffer.getvalue()

    held = Image.Exif()
    held[0x0112] = 6  # the camera was turned: the file's first row is the right-hand column
    turned = decode(photo(held.tobytes()), "RGB", 1000)
    assert turned.size == (16, 32)
    assert [max(range(3), key=turned.getpixel((8, y)).__getitem__) for y in (4, 28)] == [2, 0]
    assert decode(photo(held.tobytes()), "RGB", 1000, as_stored=True).size == (32, 16)
    for broken in (b"Exif\0\0garbage", b"Exif\0\0MM\0*\0\0\0\x08\0\x09\x01\x12\0\x03"):
        assert decode(photo(broken), "RGB", 1000).size == (32, 16)


def test_a_line_is_refused_before_it_is_resized() -> None:
    from nearsight.train.data.images import BadImageError, decode

    def line(width: int) -> bytes:
        buffer = io.BytesIO()
        Image.new("L", (width, 2)).save(buffer, "PNG")
        return buffer.getvalue()

    assert decode(line(2000), "L", 10_000).size == (2000, 2)
    with pytest.raises(BadImageError, match=r"^2001×2 pixels: one side is more than 1000 times the other$"):
        decode(line(2001), "L", 10_000)


def test_formats_that_pillow_half_knows_are_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    from nearsight.train.data.images import BadImageError, decode

    def refuses(source: Any) -> None:
        raise NotImplementedError("Unimplemented pixel format 0")

    monkeypatch.setattr(Image, "open", refuses)
    with pytest.raises(BadImageError, match=r"damaged \(Unimplemented pixel format 0\)"):
        decode(b"DDS", "RGB", 100)
