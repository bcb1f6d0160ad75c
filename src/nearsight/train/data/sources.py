"""Where images come from: an embedded set, CIFAR, folders, Parquet files, timm's readers."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError

import numpy as np

from nearsight.errors import UserError, nearest
from nearsight.train.data.config import DataConfig
from nearsight.train.data.images import image_mode
from nearsight.train.data.parquet import EVALUATION, parquet_files, read_parquet, split_of
from nearsight.train.data.splits import ArrayImages, FileImages, ReaderImages, hold_out
from nearsight.train.data.streams import stream_length

__all__ = ["Source", "input_facts", "open_source", "sizes_without_data", "split_source", "training_images"]

KINDS = (
    "digits",
    "cifar10",
    "cifar100",
    "folder:PATH",
    "parquet:PATH",
    "hfds/NAME",
    "hfids/NAME",
    "wds/NAME",
    "tfds/NAME",
)
# What timm's readers read with.
PACKAGES = {"hfds": "datasets", "hfids": "datasets", "wds": "webdataset", "tfds": "tensorflow_datasets"}
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
STATISTICS = {
    "digits": ((0.305,), (0.376,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}

# What `data.train_split` and `data.eval_split` are when nobody has named one: whatever a set calls them.
TRAIN, HELD = (DataConfig.model_fields[key].default for key in ("train_split", "eval_split"))
# Training images and classes of sets that are always the same.
SIZES = {"cifar10": (50_000, 10), "cifar100": (50_000, 100)}
TORCHVISIONS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


class Source(NamedTuple):
    """Train and evaluation split (None: hold out some of train), class names, the pixels' statistics."""

    train: Any
    evaluation: Any | None
    classes: list[str]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    streamed: bool = False

    @property
    def images(self) -> int:
        """How many there are to train on."""
        return stream_length(self.train) if self.streamed else len(self.train)


def input_facts(data: DataConfig, source: Source) -> dict[str, Any]:
    """What a checkpoint's card says of the images its network takes: plain values, enough to prepare one."""
    return {
        "image_size": data.image_size,
        "channels": data.channels,
        "crop_pct": data.crop_pct,
        "interpolation": data.interpolation,
        "mean": list(source.mean),
        "std": list(source.std),
    }


def open_source(data: DataConfig, *, labelled: bool = True) -> Source:
    """The source a config names, checked: it exists, has images, at least two classes, the same ones in both splits.

    Without `labelled` the images alone count: any folder, any Parquet file with an image column; there are no classes.
    """
    kind, _, path = data.source.partition(":")
    if kind == "digits":
        source = _digits(data)
    elif kind in ("cifar10", "cifar100"):
        source = _cifar(kind, data, path or data.root)
    elif kind == "folder":
        source = _folder(data, path or data.root, labelled)
    elif kind == "parquet":
        source = _parquet(data, path or data.root, labelled=labelled)
    elif kind.partition("/")[0] in PACKAGES:
        source = _reader(data, labelled)
    else:
        near = nearest(data.source, KINDS)
        hint = f" Did you mean {near!r}?" if near else ""
        raise UserError(f"data.source: got {data.source!r}, wanted one of {', '.join(KINDS)}.{hint}")
    if not labelled:
        source = source._replace(classes=[])
    elif len(source.classes) < 2:
        raise UserError(f"data.source: {data.source!r} has {len(source.classes)} class, wanted at least 2.")
    if data.mean is not None:
        source = source._replace(mean=tuple(data.mean))
    if data.std is not None:
        source = source._replace(std=tuple(data.std))
    return source


def _statistics(kind: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    mean, std = STATISTICS.get(kind, IMAGENET)
    if len(mean) == channels:
        return mean, std
    if len(mean) == 1:
        return mean * channels, std * channels
    return (sum(mean) / 3,), (sum(std) / 3,)


def _digits(data: DataConfig) -> Source:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    # One split for everybody, whatever the run's seed: test numbers stay comparable.
    train, test = train_test_split(np.arange(len(images)), test_size=0.25, stratify=digits.target, random_state=0)
    mode = image_mode(data.channels)
    splits = [ArrayImages(images[part], digits.target[part], mode) for part in (train, test)]
    named = _of_two(splits[0], splits[1], data)
    return Source(*named, [str(n) for n in range(10)], *_statistics("digits", data.channels))


def _of_two(train: Any, test: Any, data: DataConfig) -> tuple[Any, Any]:
    """The splits to train on and to evaluate of a set that has these two."""
    _only_train(data)
    if data.eval_split not in (*EVALUATION, TRAIN):
        raise _no_split("eval_split", data, (TRAIN, "test"))
    return train, train if data.eval_split == TRAIN else test


def _only_train(data: DataConfig) -> None:
    if data.train_split != TRAIN:
        raise _no_split("train_split", data, (TRAIN,))


def _no_split(key: str, data: DataConfig, there: Sequence[str]) -> UserError:
    have = ", ".join(there) or "none"
    return UserError(f"data.{key}: got {getattr(data, key)!r}, wanted a split of {data.source!r}, which has {have}.")


def _cifar(kind: str, data: DataConfig, path: str | None) -> Source:
    from torchvision import datasets

    root = _cifar_folder(kind, path)
    if root is not None and parquet_files(root):
        return _right_classes(kind, str(root), _parquet(data, str(root), kind))
    if root is None and data.download:
        root = Path("data")
    if root is None or (not root.exists() and not data.download):
        raise UserError(
            f"data.root: no {kind} in {str(root) if root else './data or $NEARSIGHT_DATA'}; set data.root=FOLDER "
            f"(torchvision's folder or Hugging Face Parquet files) or data.download=true."
        )
    dataset = getattr(datasets, kind.upper())
    try:
        parts = [dataset(str(root), train=train, download=data.download) for train in (True, False)]
    except RuntimeError as error:
        raise UserError(f"data.root: {str(root)!r} holds neither torchvision's {kind} nor Parquet files.") from error
    except URLError as error:
        raise UserError(f"data.download: {kind} cannot be fetched ({error.reason}); set data.root=FOLDER.") from error
    mode = image_mode(data.channels)
    train, test = (ArrayImages(part.data, part.targets, mode) for part in parts)
    return Source(*_of_two(train, test, data), list(parts[0].classes), *_statistics(kind, data.channels))


def _cifar_folder(kind: str, path: str | None) -> Path | None:
    """The folder named, or its sub-folder for this set; without a name, one where the set is."""
    if path:
        inside = Path(path) / kind
        return inside if parquet_files(inside) else Path(path)
    for folder in (os.environ.get("NEARSIGHT_DATA"), "data"):
        for root in [Path(folder) / kind, Path(folder)] if folder else []:
            if any(root.glob("*.parquet")) or any(root.glob(TORCHVISIONS[kind])) or parquet_files(root / kind):
                return root
    return None


def _right_classes(kind: str, path: str, source: Source) -> Source:
    wanted = SIZES[kind][1]
    if len(source.classes) != wanted:
        raise UserError(
            f"data.root: {path!r} has {len(source.classes)} classes, wanted the {wanted} of {kind}; another set is "
            f"data.source=parquet:{path}."
        )
    return source


def _folder(data: DataConfig, path: str | None, labelled: bool = True) -> Source:
    if not path or not Path(path).is_dir():
        inside = "a sub-folder per class" if labelled else "images"
        raise UserError(f"data.source: no folder {path!r}; wanted folder:PATH with {inside}.")
    root = Path(path)
    train = _split_folder(root, "train_split", (TRAIN,), data) or root
    if labelled and train == root:
        _are_classes(root)
    evaluation = _split_folder(root, "eval_split", EVALUATION, data) if train != root else None
    statistics = _statistics("folder", data.channels)
    if not labelled:
        held_out = None if evaluation is None else _all_files(evaluation, data)
        return Source(_all_files(train, data), held_out, [], *statistics)
    classes, images = _class_files(train, data)
    held = None
    if evaluation is not None:
        eval_classes, held = _class_files(evaluation, data)
        _same_classes(str(path), classes, eval_classes)
    return Source(images, held, classes, *statistics)


def _split_folder(root: Path, key: str, usual: Sequence[str], data: DataConfig) -> Path | None:
    """The folder of the split that a key names; when nobody has named one the first there is of the usual names."""
    wanted = getattr(data, key)
    named = wanted != DataConfig.model_fields[key].default
    found = next((root / name for name in ((wanted,) if named else usual) if (root / name).is_dir()), None)
    if named and found is None:
        raise _no_split(key, data, _folders_in(root)[:8])
    return found


def _are_classes(root: Path) -> None:
    """Refuse to take splits for classes: a set whose training split has another name."""
    names = _folders_in(root)
    if names and all(name.lower() in (*EVALUATION, "train", "training") for name in names):
        raise UserError(
            f"data.source: {str(root)!r} has {', '.join(names)}, wanted train and one of {', '.join(EVALUATION)}, each "
            f"with a sub-folder per class; rename them."
        )


def _folders_in(root: Path) -> list[str]:
    """The names of a folder's folders; not of hidden ones, which programs make for themselves (.ipynb_checkpoints)."""
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _images_under(root: Path) -> list[str]:
    """Image files below a folder, linked folders' too, each folder once; hidden files and folders are left out."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    found, seen = [], set[str]()
    for folder, inner, files in os.walk(root, followlinks=True):
        place = os.path.realpath(folder)
        if place in seen:
            inner.clear()
            continue
        seen.add(place)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        found += [os.path.join(folder, name) for name in files if not name.startswith(".")]
    return sorted(file for file in found if Path(file).suffix.lower() in IMG_EXTENSIONS)


def _all_files(root: Path, data: DataConfig) -> FileImages:
    found = _images_under(root)
    if not found:
        raise UserError(f"data.source: {str(root)!r} has no images.")
    return FileImages([(file, 0) for file in found], image_mode(data.channels), data.max_pixels)


def _class_files(root: Path, data: DataConfig) -> tuple[list[str], FileImages]:
    classes = _folders_in(root)
    files = []
    for label, name in enumerate(classes):
        found = _images_under(root / name)
        if not found:
            raise UserError(f"data.source: class folder {str(root / name)!r} has no images.")
        files += [(file, label) for file in found]
    if not files:
        raise UserError(f"data.source: {str(root)!r} has no images; wanted a sub-folder per class.")
    return classes, FileImages(files, image_mode(data.channels), data.max_pixels)


def _same_classes(where: str, train: list[str], evaluation: list[str]) -> None:
    if train != evaluation:
        odd = sorted(set(train) ^ set(evaluation))[:5]
        raise UserError(
            f"data.source: {where!r} has {len(train)} classes in train and {len(evaluation)} in evaluation, wanted the "
            f"same ones; they differ in {', '.join(odd)}."
        )


def _parquet(data: DataConfig, path: str | None, kind: str = "parquet", labelled: bool = True) -> Source:
    files = parquet_files(Path(path)) if path else []
    if not files:
        raise UserError(f"data.source: no Parquet files in {path!r}.")
    _only_train(data)
    splits = {file: split_of(file, Path(str(path))) for file in files}
    training = [file for file in files if splits[file] == TRAIN]
    usual = (name for name in EVALUATION if name in splits.values())
    wanted = data.eval_split if data.eval_split != HELD else next(usual, None)
    evaluation = [file for file in files if splits[file] == wanted]
    if wanted is not None and not evaluation:
        raise _no_split("eval_split", data, sorted(set(splits.values())))
    train, classes = read_parquet(training or evaluation, data, labelled)
    held = None
    if evaluation and training:
        held, eval_classes = read_parquet(evaluation, data, labelled)
        # Classes without names are counted to the highest label, of which evaluation may have no image.
        if eval_classes != classes[: len(eval_classes)]:
            _same_classes(str(path), classes, eval_classes)
    return Source(train, held, classes, *_statistics(kind, data.channels))


@contextmanager
def _as_timm_calls(kind: str) -> Iterator[None]:
    """timm's readers want named labels, and pass `trust_remote_code`, which datasets 4 and later take for a key of the set."""
    if kind not in ("hfds", "hfids"):
        yield
        return
    import datasets

    names = ("load_dataset", "load_dataset_builder")
    plain = {name: getattr(datasets, name) for name in names}

    def without(call: Any) -> Any:
        return lambda *args, trust_remote_code=False, **keys: call(*args, **keys)

    from timm.data.readers import reader_hfds

    labels = reader_hfds.get_class_labels
    try:
        reader_hfds.get_class_labels = _class_labels
        for name, call in plain.items():
            if "trust_remote_code" not in inspect.signature(call).parameters:
                setattr(datasets, name, without(call))
        yield
    finally:
        reader_hfds.get_class_labels = labels
        for name, call in plain.items():
            setattr(datasets, name, call)


def _class_labels(info: Any, label_key: str = "label") -> dict[str, int]:
    """The classes of a Hugging Face set by name; none where its labels are plain numbers, over which timm's fails."""
    names = getattr(info.features.get(label_key), "names", None) or []
    return {name: number for number, name in enumerate(names)}


def _reader(data: DataConfig, labelled: bool) -> Source:
    kind = data.source.partition("/")[0]
    if importlib.util.find_spec(PACKAGES[kind]) is None:
        if kind == "tfds":
            raise UserError(
                f"data.source: {data.source!r} needs TensorFlow, which no extra brings; run: pip install tensorflow "
                "tensorflow-datasets."
            )
        raise ModuleNotFoundError(f"No module named {PACKAGES[kind]!r}", name=PACKAGES[kind])
    if kind == "wds" and data.root is None:
        raise UserError(f"data.root: missing; {data.source!r} wants the folder (or address) of its shards.")
    with _as_timm_calls(kind):
        return _open_reader(kind, data, labelled)


def _open_reader(kind: str, data: DataConfig, labelled: bool) -> Source:
    from timm.data.dataset_factory import create_dataset
    from timm.data.readers.reader_factory import create_reader

    mode = image_mode(data.channels)
    statistics = _statistics(kind, data.channels)
    try:
        if kind == "hfds":
            readers = [create_reader(data.source, root=data.root, split=s) for s in (data.train_split, data.eval_split)]
            classes = sorted(readers[0].class_to_idx, key=readers[0].class_to_idx.__getitem__)
            parts = [ReaderImages(reader, mode, data.max_pixels) for reader in readers]
            return Source(parts[0], parts[1], classes if classes or not labelled else _numbered(data), *statistics)
        splits = [
            create_dataset(
                data.source,
                root=data.root,
                split=split,
                is_training=training,
                batch_size=data.batch_size,
                num_samples=images,
                download=data.download,
                input_img_mode=mode,
            )
            for split, training, images in (
                (data.train_split, True, data.train_images),
                (data.eval_split, False, data.eval_images),
            )
        ]
    except (OSError, AssertionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        reason = reason if len(reason) < 300 else f"{reason[:300]} …"
        raise UserError(f"data.source: cannot open {data.source!r} ({reason}).") from error
    return Source(splits[0], splits[1], _numbered(data) if labelled else [], *statistics, streamed=True)


def _numbered(data: DataConfig) -> list[str]:
    if data.num_classes is None:
        raise UserError(f"data.num_classes: missing; {data.source!r} does not say how many classes it has.")
    return [str(n) for n in range(data.num_classes)]


def sizes_without_data(data: DataConfig, error: UserError) -> tuple[int, int]:
    """(training images, classes; 0: unknown) that a recipe states of data that is not here; what is here and wrong is refused."""
    place = data.source.partition(":")[2] or data.root
    if place is not None and Path(place).exists():
        raise error
    known = SIZES.get(data.source, (0, 0))
    images = data.train_images or known[0]
    return images - round(images * data.holdout), data.num_classes or known[1]


def split_source(
    source: Source, data: DataConfig, seed: int, tell_whole: Callable[[str], None] | None = None
) -> tuple[Any, Any]:
    """(train, evaluation) of a source: its own splits, or `data.holdout` of train, or a sentence.

    With `tell_whole`, which is for where nothing is trained, all images of a source without splits are evaluated, and it is told.
    """
    if data.holdout:
        if source.streamed:
            raise UserError("data.holdout: a streamed source cannot be split; name a split in data.eval_split.")
        return hold_out(source.train, data.holdout, seed)
    if source.evaluation is None:
        if tell_whole is not None:
            tell_whole(f"{data.source} has no splits: all of its {len(source.train)} images are evaluated")
            return source.train, source.train
        raise UserError(
            f"data.source: {data.source!r} has no evaluation split; hold some of train out: data.holdout=0.1."
        )
    return source.train, source.evaluation


def training_images(source: Source, data: DataConfig) -> int:
    """How many images a run would train on, or the sentence that would end it."""
    train, _ = split_source(source, data, seed=0)
    return source.images if source.streamed else len(train)
