"""Splits of a set: images that can be asked for by number, wherever they lie."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nearsight.train.data.images import BadImageError, decode

__all__ = ["NO_LABEL", "ArrayImages", "FileImages", "ParquetImages", "ReaderImages", "Split", "Subset", "hold_out"]

# Of an image without one; refused where labels count.
NO_LABEL = -1


class Split(Protocol):
    """Images that can be asked for by number."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What to call an image when it is damaged."""
        ...

    def read(self, index: int) -> tuple[Image.Image, int]:
        """An image and its label, or `BadImageError`."""
        ...

    def key(self) -> str | None:
        """A text that changes with the images, for the cache on disk; None when they are not worth caching."""
        ...


class ArrayImages:
    """Images that are in memory already: uint8 [N, H, W] or [N, H, W, C]."""

    def __init__(self, images: np.ndarray, labels: Sequence[int], mode: str) -> None:
        self.images, self.labels, self.mode = images, labels, mode

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        return f"image {index}"

    def read(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]).convert(self.mode), int(self.labels[index])

    def key(self) -> str | None:
        return None


class FileImages:
    """Image files with labels."""

    def __init__(self, files: list[tuple[str, int]], mode: str, max_pixels: int) -> None:
        self.files, self.mode, self.max_pixels = files, mode, max_pixels

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        return self.files[index][0]

    def read(self, index: int) -> tuple[Image.Image, int]:
        path, label = self.files[index]
        return decode(Path(path), self.mode, self.max_pixels), label

    def key(self) -> str | None:
        return "\n".join(f"{path} {label} {_stamp(path)}" for path, label in self.files)


class ParquetImages:
    """Encoded images in Parquet files, as Hugging Face writes them; the label's column may be None."""

    def __init__(
        self, table: Any, columns: tuple[str, str | None], files: list[Path], mode: str, max_pixels: int
    ) -> None:
        self.table, (self.image, self.label), self.files = table, columns, files
        self.mode, self.max_pixels = mode, max_pixels

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def name(self, index: int) -> str:
        from pyarrow.parquet import read_metadata

        row, file = index, self.files[0]
        for file in self.files:
            rows = read_metadata(file).num_rows
            if row < rows:
                break
            row -= rows
        cell = self.table[self.image][index].as_py()
        path = cell.get("path") if isinstance(cell, dict) else None
        return f"row {row} of {file.name}" + (f" ({path})" if path else "")

    def read(self, index: int) -> tuple[Image.Image, int]:
        cell = self.table[self.image][index].as_py()
        data = cell.get("bytes") if isinstance(cell, dict) else cell
        if not data:
            raise BadImageError("no bytes")
        label = 0 if self.label is None else int(self.table[self.label][index].as_py())
        return decode(data, self.mode, self.max_pixels), label

    def key(self) -> str | None:
        files = [f"{path.resolve()} {_stamp(path)}" for path in self.files]
        # The cache keeps labels too: a set read without them must not stand for one with.
        return "\n".join(files if self.label is not None else [*files, "no labels"])


class ReaderImages:
    """A timm reader that can be indexed (`hfds/NAME`)."""

    def __init__(self, reader: Any, mode: str, max_pixels: int) -> None:
        self.reader, self.mode, self.max_pixels = reader, mode, max_pixels

    def __len__(self) -> int:
        return len(self.reader)

    def name(self, index: int) -> str:
        return f"image {index}"

    def read(self, index: int) -> tuple[Image.Image, int]:
        row = self.reader.dataset[index]
        cell, label = row[self.reader.image_key] or {}, row.get(self.reader.label_key)
        file = cell.get("bytes") or (Path(cell["path"]) if cell.get("path") else None)
        if file is None:
            raise BadImageError("no bytes")
        return decode(file, self.mode, self.max_pixels), NO_LABEL if label is None else int(label)

    def key(self) -> str | None:
        return None


class Subset:
    """Some images of a split."""

    def __init__(self, split: Split, indices: Tensor) -> None:
        self.split, self.indices = split, indices.tolist()

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, index: int) -> str:
        return self.split.name(self.indices[index])

    def read(self, index: int) -> tuple[Image.Image, int]:
        return self.split.read(self.indices[index])

    def key(self) -> str | None:
        key = self.split.key()
        return None if key is None else f"{key}\n{self.indices}"


def hold_out(split: Split, share: float, seed: int) -> tuple[Subset, Subset]:
    """(train, held out): a random share of a split, the same for the same seed."""
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))
    count = max(1, round(share * len(split)))
    return Subset(split, order[count:].sort().values), Subset(split, order[:count].sort().values)


def _stamp(path: str | Path) -> str:
    try:
        status = os.stat(path)
    except OSError:  # a link to nowhere; reading it will be told
        return "missing"
    return f"{status.st_size} {status.st_mtime_ns}"
