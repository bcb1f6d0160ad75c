"""Trained networks that come with the package, each a checkpoint folder of float16 weights with a model card (README.md).

timm.create_model("sasa_resnet_nano.cifar10", pretrained=True)   # offline
nearsight predict photo.jpg                                      # DEFAULT
nearsight eval sasa_resnet_nano.cifar10 data.root=FOLDER         # the card's number again
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

__all__ = ["DEFAULT", "file", "find", "names"]

# What verbs use when no network is named.
DEFAULT = "sasa_resnet_nano.cifar10"

_ROOT = Path(str(resources.files(__name__)))
_WEIGHTS = "model.safetensors"


def names() -> list[str]:
    """Networks whose weights are here, by timm's names (architecture.tag), sorted.

    >>> all("." in name for name in names())
    True
    """
    return sorted(path.parent.name for path in _ROOT.glob(f"*.*/{_WEIGHTS}"))


def find(name: str) -> Path | None:
    """The folder of a shipped network, or None.

    >>> find("qna_vit_nano.moonlight") is None
    True
    """
    return _ROOT / name if name in names() else None


def file(name: str) -> str | None:
    """The weights of a shipped network as timm's `file` entry; None where there are none."""
    folder = find(name)
    return None if folder is None else str(folder / _WEIGHTS)
