"""Parquet files as Hugging Face writes them: which are of which split, what is in them, and what is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nearsight.errors import UserError
from nearsight.train.data.config import DataConfig
from nearsight.train.data.images import image_mode
from nearsight.train.data.splits import ParquetImages

__all__ = ["EVALUATION", "parquet_files", "read_parquet", "split_of"]

# What evaluation splits are called.
EVALUATION = ("val", "validation", "valid", "test")


def parquet_files(root: Path) -> list[Path]:
    """The Parquet files of a folder and those below it; a file is itself."""
    if root.is_file():
        return [root] if root.suffix == ".parquet" else []
    return sorted(root.rglob("*.parquet")) if root.is_dir() else []


def split_of(file: Path, root: Path) -> str:
    """The split a file is of: by its name (test-00000-of-00001.parquet) or a folder's (test/0000.parquet), else train."""
    inside = file.relative_to(root) if file != root else Path(file.name)
    for part in reversed(inside.parts):
        split = re.match(rf"(train|{'|'.join(EVALUATION)})(?![a-z])", part.lower())
        if split:
            return split[1]
    return "train"


def read_parquet(files: list[Path], data: DataConfig, labelled: bool) -> tuple[ParquetImages, list[str]]:
    """The images of one split's files and the names of their classes, or a sentence."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for file in files:
        try:
            tables.append(pq.read_table(file))
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"data.source: {file} is not a readable Parquet file ({error}).") from error
        if tables[-1].schema != tables[0].schema:
            raise UserError(
                f"data.source: {files[0]} has columns {_columns(tables[0])}, {file} {_columns(tables[-1])}; wanted the "
                f"files of one set."
            )
    table = pa.concat_tables(tables)
    image = _column(table, ("image", "img", "jpg", "png", "webp"), files[0])
    kind = table.schema.field(image).type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise UserError(
            f"data.source: column {image!r} of {files[0]} holds {kind}, wanted encoded images (binary, or a struct with bytes)."
        )
    if not table.num_rows:
        raise UserError(f"data.source: {files[0]} has no rows.")
    if not labelled:
        return ParquetImages(table, (image, None), files, image_mode(data.channels), data.max_pixels), []
    label = _column(table, ("label", "fine_label", "labels", "cls", "class"), files[0])
    labels = table[label].to_numpy()
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
        raise UserError(f"data.source: column {label!r} of {files[0]} holds {labels.dtype}, wanted numbers from 0.")
    classes = _class_names(table, label) or [str(n) for n in range(int(labels.max()) + 1)]
    if labels.max() >= len(classes):
        raise UserError(
            f"data.source: {files[0]} has label {labels.max()}, wanted less than its {len(classes)} classes."
        )
    return ParquetImages(table, (image, label), files, image_mode(data.channels), data.max_pixels), classes


def _columns(table: Any) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in table.schema)


def _column(table: Any, wanted: Sequence[str], file: Path) -> str:
    found = next((name for name in wanted if name in table.column_names), None)
    if found is None:
        raise UserError(
            f"data.source: {file} has columns {', '.join(table.column_names)}, wanted {' or '.join(wanted)}."
        )
    return found


def _class_names(table: Any, label: str) -> list[str] | None:
    """The names Hugging Face keeps in the schema's metadata."""
    try:
        info = json.loads((table.schema.metadata or {})[b"huggingface"])
        return [str(name) for name in info["info"]["features"][label]["names"]]
    except (KeyError, TypeError, ValueError):
        return None
