"""Results for people (tables of one screen) and for programs (CSV, JSON)."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from nearsight.bench.driver import Result
from nearsight.bench.models import NetworkResult

__all__ = ["contest_tables", "milliseconds", "network_table", "rows_of", "write_csv", "write_json"]

# Above this many rows one contender per row no longer fits a screen.
LONG_ROWS = 24
# Letters of a note that a cell among many shows; the files hold all of it.
BRIEF = 90
# A spread above this is worth saying: smaller differences than it mean nothing.
NOISY = 0.15

Row = Mapping[str, object]


def rows_of(suite: str, results: Sequence[Result | NetworkResult], stamp: Row) -> list[dict[str, object]]:
    """One flat row per result, each with the machine, the versions, the commit and the date."""
    return [{**stamp, "suite": suite, **result.columns()} for result in results]


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows with a header; numbers unrounded, empty where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(rows), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def contest_tables(results: Sequence[Result], title: str) -> list[Table]:
    """A table with one contender per row; for many, one table per subject with one shape per row."""
    if len(results) <= LONG_ROWS:
        return [_long(results, title)]
    subjects = dict.fromkeys(r.subject for r in results)
    return [_wide([r for r in results if r.subject == subject], f"{subject}: {title}") for subject in subjects]


def _long(results: Sequence[Result], title: str) -> Table:
    cuda = any(r.total_eager_ms is not None for r in results)
    floors = any(r.floor_total_ms is not None for r in results)
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    table.add_column("contender")
    heads = ["fwd ms", "fwd+bwd ms", *(["eager ms"] if cuda else []), "fwd MiB", "fwd+bwd MiB"]
    heads += [*(["÷ floor"] if floors else []), "ours ÷ it", "memory ÷"]
    for head in heads:
        table.add_column(head, justify="right")
    table.add_column("note", overflow="fold")
    for contest in dict.fromkeys(r.contest for r in results):
        rows = [r for r in results if r.contest == contest]
        table.add_section()
        table.add_row(f"[bold]{contest}[/bold]")
        for row in rows:
            cells = [milliseconds(row.forward_ms), milliseconds(row.total_ms)]
            cells += [milliseconds(row.total_eager_ms)] if cuda else []
            cells += [_mib(row.forward_bytes), _mib(row.total_bytes)]
            cells += [_ratio(row.total_over_floor)] if floors else []
            cells += [_ratio(row.ours_over_this_total), _ratio(row.ours_over_this_bytes)]
            table.add_row("  " + _who(row), *cells, _shown_note(row))
        if rows[0].floor_total_ms is not None:
            floor = (milliseconds(rows[0].floor_forward_ms), milliseconds(rows[0].floor_total_ms))
            table.add_row("  [dim]floor: bytes ÷ bandwidth[/dim]", *[f"[dim]{cell}[/dim]" for cell in floor])
    return table


def _wide(results: Sequence[Result], title: str) -> Table:
    """Forward+backward ms of every contender, a row per shape; under it the forward, behind it ours ÷ it."""
    names = list(dict.fromkeys(r.contender for r in results))
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    table.add_column("shape")
    table.add_column("floor", justify="right")
    for name in names:
        table.add_column(name, justify="right", overflow="fold", max_width=24)
    cells = {(r.shape, r.contender): r for r in results}
    for shape in dict.fromkeys(r.shape for r in results):
        floor = next(r.floor_total_ms for r in results if r.shape == shape)
        row = [cells.get((shape, name)) for name in names]
        table.add_row(shape, milliseconds(floor), *[_cell(result) for result in row])
    table.caption = r"ms forward+backward (forward) \[ours ÷ it]"
    table.caption_justify = "left"
    return table


def network_table(results: Sequence[NetworkResult], title: str) -> Table:
    """One network per row: training images per second and memory, and both over those of its peer."""
    # How a step ran: as it is; compiled; compiled and replayed as a CUDA graph.
    ways = ["eager", *(way for way in ("compiled", "replayed") if any(_rate(r, way) is not None for r in results))]
    heads = ["params M", *(f"{way} img/s" for way in ways), "GiB", *(f"{way} ÷ peer" for way in ways), "memory ÷"]
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    table.add_column("network")
    for head in heads:
        table.add_column(head, justify="right")
    table.add_column("peer, note", overflow="fold")
    for r in results:
        held = r.eager_bytes if r.compiled_bytes is None else r.compiled_bytes
        cells = ["" if r.parameters is None else f"{r.parameters / 1e6:.1f}", *(_speed(_rate(r, way)) for way in ways)]
        cells += [
            "" if held is None else f"{held / 2**30:.2f}",
            *(_ratio(getattr(r, f"{way}_over_peer")) for way in ways),
        ]
        note = "; ".join(text for text in (r.peer, r.note) if text)
        name = f"[green]{r.network}[/green]" if r.ours else r.network
        table.add_row(name, *cells, _ratio(r.bytes_over_peer), _escape(note))
    return table


def _rate(result: NetworkResult, way: str) -> float | None:
    rate: float | None = getattr(result, f"{way}_images_s")
    return rate


def _speed(value: float | None) -> str:
    return "" if value is None else f"{value:.{0 if value >= 100 else 1}f}"


def _cell(result: Result | None) -> str:
    if result is None:
        return ""
    if result.total_ms is None:
        note = result.note or result.status
        return f"[dim]{_escape(note if len(note) <= BRIEF else note[: BRIEF - 1] + '…')}[/dim]"
    ratio = f" \\[{_ratio(result.ours_over_this_total)}]" if result.ours_over_this_total is not None else ""
    text = f"{milliseconds(result.total_ms)} ({milliseconds(result.forward_ms)}){ratio}"
    text = f"[green]{text}[/green]" if result.ours else text
    return text if result.total_eager_ms is None else f"{text}\n[dim]eager {milliseconds(result.total_eager_ms)}[/dim]"


def _who(row: Result) -> str:
    return f"[green]{row.contender}[/green]" if row.ours else row.contender


def _shown_note(row: Result) -> str:
    noisy = row.spread is not None and row.spread > NOISY
    note = _escape("; ".join(text for text in (row.note, f"spread {row.spread:.0%}" if noisy else None) if text))
    return f"[red]{note}[/red]" if row.status in ("wrong", "failed") else note


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


def milliseconds(value: float | None) -> str:
    """Three digits that count.

    >>> milliseconds(0.0712), milliseconds(1.234), milliseconds(45.67), milliseconds(1234.5), milliseconds(None)
    ('0.071', '1.23', '45.7', '1234', '')
    """
    if value is None:
        return ""
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f}"


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:.1f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.{3 if value < 0.1 else 2 if value < 10 else 0}f}"
