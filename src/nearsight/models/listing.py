"""Which of timm's registered networks are ours."""

from __future__ import annotations

import timm
from timm.models import model_entrypoint

__all__ = ["model_names"]


def model_names(pattern: str = "") -> list[str]:
    """Names of nearsight's networks, sorted; `pattern` is timm's ("sasa*").

    >>> "sasa_resnet50" in model_names("sasa*"), "resnet50" in model_names()
    (True, False)
    """
    names = timm.list_models(pattern or "*")
    return [name for name in names if model_entrypoint(name).__module__.startswith("nearsight.")]
