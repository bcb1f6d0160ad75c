"""Sets of small images, and batches of them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from nearsight.train.data.batches import Where, build_batches
from nearsight.train.data.config import DataConfig
from nearsight.train.data.sources import open_source

CPU = Where(torch.device("cpu"))


def settings(source: str, **keys: Any) -> DataConfig:
    return DataConfig.model_validate({"source": source, "image_size": 8, "batch_size": 4, "workers": 0, **keys})


def batches(data: DataConfig, training: bool = True, where: Where = CPU, seed: int = 0, notes: Any = None) -> Any:
    source = open_source(data)
    split = source.train if training else source.evaluation
    note = (notes if notes is not None else []).append
    return build_batches(split, source, data, where, training=training, seed=seed, channels_last=False, note=note)


def picture(value: int, size: tuple[int, int] = (9, 7)) -> Image.Image:
    return Image.fromarray(np.full((*size, 3), value, np.uint8))


def encoded(value: int) -> bytes:
    buffer = io.BytesIO()
    picture(value).save(buffer, "PNG")
    return buffer.getvalue()


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
