"""Results read again from the CSV file they were written to."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from nearsight.bench.driver import SIZES, Result
from nearsight.bench.models import NetworkResult
from nearsight.errors import UserError

__all__ = ["read_csv"]

CONTESTS, NETWORKS = TypeAdapter(list[Result]), TypeAdapter(list[NetworkResult])


def read_csv(path: Path, suite: str) -> tuple[list[Result], list[NetworkResult], dict[str, str]]:
    """The contests' or the networks' rows of a file, and the first row's other columns: machine, versions, commit, date."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        if not rows or any(row.get("suite") != suite for row in rows):
            raise ValueError
        adapter = NETWORKS if suite == "models" else CONTESTS
        found = adapter.validate_python([_arguments(row, suite) for row in rows])
    except (OSError, UnicodeDecodeError, ValueError, ValidationError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else "other content"
        raise UserError(
            f"got {str(path)!r} ({reason}), wanted a file that `nearsight bench {suite} --csv` wrote."
        ) from error
    results = [r for r in found if isinstance(r, Result)]
    return results, [r for r in found if isinstance(r, NetworkResult)], rows[0]


def _arguments(row: dict[str, str], suite: str) -> dict[str, object]:
    """A row as the arguments of its dataclass; an empty cell is left to the default."""
    names = {field.name for field in fields(NetworkResult if suite == "models" else Result)}
    given: dict[str, object] = {name: cell for name, cell in row.items() if name in names and cell}
    if suite == "models":
        given.setdefault("peer", None)
    else:
        given["sizes"] = {name: row[name] for name in SIZES if row.get(name)}
    return given
