"""What the verbs print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nearsight.train.log import finite

__all__ = ["console", "print_json", "table"]

# A pipe or a file has no width: wide enough that no table is cut.
PIPE_WIDTH = 200


def console(stderr: bool = False) -> Console:
    """A rich console on stdout (or stderr) as it is now, so that redirection works."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PIPE_WIDTH, highlight=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: Iterable[str] = ()) -> Table:
    """A rich table; the columns named in `right` hold numbers."""
    shown = Table(title=Text(title, no_wrap=True), title_justify="left", header_style="bold", title_style="bold")
    numbers = set(right)
    for name in columns:
        shown.add_column(name, justify="right" if name in numbers else "left")
    for row in rows:
        shown.add_row(*["" if cell is None else str(cell) for cell in row])
    return shown


def print_json(data: Any) -> None:
    """One JSON document on stdout; a number that is not finite is null."""
    typer.echo(json.dumps(finite(data), indent=2, ensure_ascii=False))
