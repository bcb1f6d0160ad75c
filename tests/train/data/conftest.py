"""A set of images in a folder, and a cache of its own for every test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.data.support import picture


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARSIGHT_CACHE", str(tmp_path / "cache"))


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
