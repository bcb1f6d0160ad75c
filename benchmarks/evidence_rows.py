"""The rows of evidence.yaml and the files that hold their results."""

from __future__ import annotations

import fnmatch
import json
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ROWS = HERE / "evidence.yaml"
RESULTS = HERE / "results" / "evidence"
LOG_LINES = 40


@dataclass(frozen=True)
class Row:
    """One line of a table; `set` are the overrides of its recipe, `data` says where it finds its images.

    `metrics` are the numbers of the last evaluation that are kept, the one it is judged by first.
    """

    table: str
    name: str
    says: str
    recipe: str
    set: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    published: str | None = None
    ship: str | None = None
    data: str = "data.root=FOLDER"
    metrics: tuple[str, ...] = ("accuracy",)

    @property
    def key(self) -> str:
        return f"{self.table}/{self.name}"

    def command(self, seed: int) -> str:
        """What a reader types to repeat it."""
        return shlex.join(["nearsight", "train", self.recipe, self.data, *self.set, f"train.seed={seed}"])

    def at(self, folder: str) -> str:
        """`data` with a real folder.

        >>> Row("faces", "qna", "QnA", "faces/qna_autoencoder", data="data.source=parquet:FOLDER").at("x")
        'data.source=parquet:x'
        """
        return self.data.replace("FOLDER", folder)


@dataclass(frozen=True)
class Claim:
    """Rows from the worst to the best as published; `slack` points are forgiven."""

    says: str
    order: tuple[str, ...]
    published: str
    slack: float = 0.0


@dataclass(frozen=True)
class Table:
    """A group of rows that may be compared; `picture` is (file, caption) of one that was drawn apart.

    `part` is "claims" of the papers, or "settings": how those of our recipes were chosen.
    """

    name: str
    title: str
    about: str
    rows: dict[str, Row]
    claims: list[Claim] = field(default_factory=list)
    picture: tuple[str, str] | None = None
    part: str = "claims"


def _changes(given: Iterable[str | list[str]]) -> tuple[str, ...]:
    """Overrides in a row, those of shared lists among them.

    >>> _changes(["a=1", ["b=2", "c=3"]])
    ('a=1', 'b=2', 'c=3')
    """
    return tuple(change for one in given for change in ([one] if isinstance(one, str) else one))


def read_tables(path: Path = ROWS) -> dict[str, Table]:
    """Every table of the file, by name."""
    tables = {}
    for name, keys in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        if name.startswith("."):  # holds what others refer to
            continue
        rows = {}
        for row, values in keys["rows"].items():
            made = {key: keys[key] for key in ("recipe", "data", "metrics") if key in keys} | values
            made["metrics"] = tuple(made.get("metrics", ("accuracy",)))
            made["set"] = _changes(keys.get("set", ())) + _changes(values.get("set", ()))
            made["seeds"] = tuple(values.get("seeds", (0,)))
            rows[row] = Row(name, row, **made)
        claims = [Claim(**{**claim, "order": tuple(claim["order"])}) for claim in keys.get("claims", {}).values()]
        picture = (keys["picture"]["file"], keys["picture"]["says"]) if "picture" in keys else None
        tables[name] = Table(name, keys["title"], keys["about"], rows, claims, picture, keys.get("part", "claims"))
    return tables


def chosen(patterns: Sequence[str]) -> list[Row]:
    """The rows whose TABLE/ROW matches a pattern, in the file's order; a pattern that matches none is refused."""
    rows = [row for table in read_tables().values() for row in table.rows.values()]
    for pattern in patterns:
        if not any(fnmatch.fnmatch(row.key, pattern) for row in rows):
            raise SystemExit(f"evidence: no row {pattern!r}; see: evidence.py list")
    return [row for row in rows if any(fnmatch.fnmatch(row.key, pattern) for pattern in patterns)]


# Shares are shown in percent.
SHARES = ("accuracy", "mAP", "mAP50", "mAP75")


def shown(name: str, value: float) -> str:
    """A metric as people read it.

    >>> shown("accuracy", 0.945), shown("psnr", 31.234), shown("l1", 0.01234)
    ('94.50 %', '31.23', '0.0123')
    """
    return f"{100 * value:.2f} %" if name in SHARES else f"{value:.4f}" if value < 1 else f"{value:.2f}"


def headline(row: Row, result: dict[str, Any]) -> str:
    """The number a run is judged by."""
    return shown(row.metrics[0], result[row.metrics[0]])


def result_file(out: Path, row: Row, seed: int) -> Path:
    return out / row.table / f"{row.name}-s{seed}.jsonl"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A run's file: the result and the log; where there is none, an empty result."""
    if not path.is_file():
        return [{}]
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_result(path: Path) -> dict[str, Any] | None:
    """The first line of a run's file, or None where there is none."""
    return read_lines(path)[0] or None


def write_result(path: Path, result: dict[str, Any], log: Sequence[dict[str, Any]] = ()) -> None:
    """The result and the thinned log, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}")
    part.write_text("".join(json.dumps(line) + "\n" for line in [result, *thin(log)]), encoding="utf-8")
    part.replace(path)


def thin(log: Sequence[dict[str, Any]], lines: int = LOG_LINES) -> list[dict[str, Any]]:
    """About `lines` training lines, evenly spread, the last among them, and every evaluation; without clock times."""
    trained = [row for row in log if row["kind"] == "train"]
    step = max(1, math.ceil(len(trained) / lines))
    kept = {id(row) for row in trained[::-1][::step]}
    wanted = [row for row in log if id(row) in kept or row["kind"] == "eval"]
    return [{key: value for key, value in row.items() if key != "time"} for row in wanted]
