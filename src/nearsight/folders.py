"""Where nearsight keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """$NEARSIGHT_CACHE, or `nearsight` in the user's cache folder; not made here.

    >>> cache_folder().is_absolute() or "NEARSIGHT_CACHE" in os.environ
    True
    """
    root = os.environ.get("NEARSIGHT_CACHE")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "nearsight"
