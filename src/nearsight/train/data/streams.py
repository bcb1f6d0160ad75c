"""Shards as timm's readers deal them out, with the images decoded here: `max_pixels` and bad files as with any other source."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from nearsight.train.data.config import DataConfig
from nearsight.train.data.images import BadImageError, decode, image_mode
from nearsight.train.data.splits import NO_LABEL

__all__ = ["Sample", "Stream", "stream_length"]

# Pixels, label, whether it counts, the bad files before it with the reasons.
Sample = tuple[Any, int, bool, list[tuple[str, str]]]


class Encoded(NamedTuple):
    """An image that is still bytes; None: they are where its name says."""

    name: str
    data: bytes | None


class Stream(torch.utils.data.IterableDataset[Sample]):
    """A split of a timm reader as samples; in training it never ends, unless it has no image at all.

    Bad files are named with the next good one; behind the last, with a blank sample that does not count.
    """

    def __init__(self, dataset: Any, transform: Callable[[Any], Any], data: DataConfig, training: bool) -> None:
        self.dataset, self.transform, self.data, self.training = dataset, transform, data, training

    def __iter__(self) -> Iterator[Sample]:
        bad: list[tuple[str, str]] = []
        going = True
        while going:
            going = False
            for found, label in _undecoded(self.dataset.reader):
                if found is None:  # an empty cell
                    found = {"path": None, "bytes": b""}
                file = Encoded(found["path"] or "an image", found["bytes"]) if isinstance(found, dict) else found
                try:
                    image = self._image(file)
                except BadImageError as error:
                    bad.append((file.name, str(error)))
                    continue
                yield self.transform(image), int(label), True, bad
                bad, going = [], self.training
        if bad:
            blank = np.zeros((self.data.channels, self.data.image_size, self.data.image_size), np.uint8)
            yield blank, 0, False, bad

    def _image(self, found: Any) -> Image.Image:
        mode = image_mode(self.data.channels)
        if isinstance(found, Encoded):
            return decode(found.data if found.data is not None else _fetch(found.name), mode, self.data.max_pixels)
        image: Image.Image = found.convert(mode)  # TensorFlow's are decoded
        return image


def stream_length(dataset: Any) -> int:
    """The images of a split; its own length is that of one process's workers, rounded up to their batches."""
    return int(getattr(dataset.reader, "num_samples", None) or 0)


def _fetch(name: str) -> bytes:
    """The bytes of a file that a Hugging Face set names by its path or address."""
    from datasets.utils.file_utils import xopen

    try:
        with xopen(name, "rb") as file:
            data: bytes = file.read()
    except OSError as error:
        raise BadImageError(f"cannot be read ({error})") from error
    return data


def _undecoded(reader: Any) -> Iterator[tuple[Any, Any]]:
    """One pass over this worker's share of a reader's (image, label) pairs, the images not decoded where it can be helped.

    Not the readers' own passes, which repeat some images and miss others where shards do not divide evenly, and never end where
    a worker has none.
    """
    kind, fresh = type(reader).__name__, getattr(reader, "ds", None) is None
    if kind == "ReaderHfids":
        if fresh:
            _open_hfids(reader)
        reader.ds.set_epoch(reader.epoch.value)
        yield from ((sample[reader.input_key], _or_none(sample.get(reader.target_key))) for sample in reader.ds)
    elif kind == "ReaderWds":
        if fresh:
            _open_wds(reader)
        yield from ((sample["image"], sample["target"]) for sample in reader.ds)
    else:
        last = None
        for found, label in reader:
            if found is not last:  # TensorFlow's fills a process's share up with its last image again
                yield found, label
            last = found


def _or_none(label: Any) -> Any:
    return NO_LABEL if label is None else label


def _open_hfids(reader: Any) -> None:
    from datasets import Image as Feature

    reader._lazy_init()
    reader.ds = reader.ds.cast_column(reader.input_key, Feature(decode=False))


def _open_wds(reader: Any) -> None:
    from timm.data.readers import reader_wds

    timms = reader_wds._decode
    try:
        reader_wds._decode = _plain_sample  # type: ignore[assignment]
        reader._lazy_init()
    finally:
        reader_wds._decode = timms


def _plain_sample(
    sample: dict[str, Any], image_key: str = "jpg", target_key: str = "cls", alt_label: str = "", **_: Any
) -> dict[str, Any] | None:
    """What timm makes of a sample in a tar file, but for its image; None where an alternative label says to leave it out."""
    label = int(json.loads(sample["json"])[alt_label] if alt_label else sample.get(target_key, NO_LABEL))
    if alt_label and label < 0:
        return None
    found = [key for key in image_key.split(";") if key in sample]
    if not found:
        raise ValueError(f"{sample['__key__']} has none of {image_key}")
    return {"jpg": Encoded(f"{sample['__key__']}.{found[0]}", sample[found[0]]), "cls": label}
