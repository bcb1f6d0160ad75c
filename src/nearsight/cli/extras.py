"""What nearsight needs, read from its own package metadata: by whom, which version, and whether it is here."""

from __future__ import annotations

from importlib import metadata
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["Need", "extra_of", "needs"]

# Distributions imported under another name.
_IMPORTED_AS = {"sklearn": "scikit-learn", "PIL": "pillow", "yaml": "pyyaml"}


class Need(NamedTuple):
    """One required distribution; `extra` is None when nearsight always needs it, `installed` None when it is absent."""

    name: str
    extra: str | None
    wanted: str
    installed: str | None

    @property
    def met(self) -> bool:
        return self.installed is not None and Requirement(self.name + self.wanted).specifier.contains(
            self.installed, prereleases=True
        )


def needs() -> list[Need]:
    """Every distribution nearsight's metadata names, once per extra; "all", the sum of the others, is left out."""
    lines = [Requirement(line) for line in metadata.requires("nearsight") or []]
    core = [line for line in lines if _applies(line, "")]
    found: list[tuple[Requirement, str | None]] = [(line, None) for line in core]
    for extra in metadata.metadata("nearsight").get_all("Provides-Extra") or []:
        if extra != "all":
            found += [(line, extra) for line in lines if line not in core and _applies(line, extra)]
    return [Need(line.name, extra, str(line.specifier), _installed(line.name)) for line, extra in found]


def extra_of(module: str) -> str | None:
    """The extra that brings a missing module, or None when no extra does."""
    top = module.partition(".")[0]
    wanted = canonicalize_name(_IMPORTED_AS.get(top, top))
    brings: dict[str, set[str]] = {}
    for need in needs():
        if need.extra:
            brings.setdefault(need.extra, set()).add(canonicalize_name(need.name))
    able = {extra: names for extra, names in brings.items() if wanted in names}
    # An extra that contains another one that serves brings more than is missing.
    return next((extra for extra, names in able.items() if not any(other < names for other in able.values())), None)


def _applies(line: Requirement, extra: str) -> bool:
    return line.marker is None or line.marker.evaluate({"extra": extra})


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
