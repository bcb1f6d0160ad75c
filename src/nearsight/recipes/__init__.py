"""Recipes: a YAML file per training run, shipped in the package.

A recipe opens with a header (command, hardware, time, the number to expect) and may start from another one with
`extends: NAME`; what follows is laid over it.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from nearsight.errors import UserError, did_you_mean
from nearsight.train.config import merge, read_yaml

__all__ = ["Recipe", "find", "header", "names", "resolve", "text_of"]

_ROOT = Path(str(resources.files(__name__)))


class Recipe(NamedTuple):
    """A recipe as written (`keys`, after `extends`) and where it came from."""

    name: str
    keys: dict[str, Any]


def names() -> list[str]:
    """Every shipped recipe.

    >>> "digits/conv_nano" in names()
    True
    """
    return sorted(path.relative_to(_ROOT).with_suffix("").as_posix() for path in _ROOT.rglob("*.yaml"))


def find(name: str) -> Path:
    """The file of a shipped recipe, or of a YAML file on disk."""
    if name in names():
        return _ROOT / f"{name}.yaml"
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise UserError(f"no recipe file {name!r}; shipped recipes: nearsight train --list.")
    raise UserError(f"no recipe {name!r}.{did_you_mean(name, names())} All: nearsight train --list.")


def text_of(name: str) -> str:
    """A recipe as its file has it, header and all."""
    path = find(name)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: got no text, wanted YAML in UTF-8.") from error


def header(name: str) -> list[str]:
    """The comment lines a recipe opens with, without '#'.

    >>> header("digits/sasa_nano")[0].startswith("nearsight train digits/sasa_nano")
    True
    """
    lines = []
    for line in text_of(name).splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").rstrip())
    return lines


def resolve(name: str, _seen: tuple[str, ...] = ()) -> Recipe:
    """A recipe's keys, those of the recipes it extends underneath."""
    if name in _seen:
        raise UserError(f"recipe {name!r} extends itself: {' → '.join([*_seen, name])}.")
    keys = read_yaml(text_of(name), name)
    base = keys.pop("extends", None)
    if base is not None:
        # A file of one's own is named as it lies beside this one, from wherever the program is called.
        beside = (find(name).parent / Path(str(base)).expanduser()).resolve()
        base = str(beside) if str(base) not in names() and beside.is_file() else str(base)
        keys = merge(resolve(base, (*_seen, name)).keys, keys)
    return Recipe(name, keys)
