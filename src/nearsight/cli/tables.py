"""Build every network of the papers' tables and print its counts beside the published ones."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from nearsight.cli.app import examples, new_app
from nearsight.cli.output import console, print_json, table
from nearsight.detect.dense import dense_retinanet
from nearsight.errors import UserError, did_you_mean
from nearsight.models.flops import CONVENTIONS
from nearsight.models.published import TABLES as CLASSIFIERS
from nearsight.models.published import Cell, Comparison, Table, compare
from nearsight.models.published.detection import TABLES as DETECTORS

app = new_app()

TABLES = {**CLASSIFIERS, "detection": DETECTORS}

EXAMPLES = examples(
    "nearsight tables  # all papers",
    "nearsight tables sasa  # one of them",
    "nearsight tables detection  # RetinaNets at 640×640",
    "nearsight tables qna --json  # for a program",
)


@app.command(epilog=EXAMPLES)
def tables(
    paper: Annotated[str | None, typer.Argument(help=f"One of {', '.join(TABLES)}; all when left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Build every network of the papers' tables and print its counts beside the published ones.

    Networks are built without weights. A number that would be printed like the published one is marked =; any other shows its
    difference and a footnote.
    """
    if paper is not None and paper not in TABLES:
        raise UserError(f"no tables of {paper!r}.{did_you_mean(paper, TABLES)} There are: {', '.join(TABLES)}.")
    chosen = [one for name, several in TABLES.items() if paper in (None, name) for one in several]
    if as_json:
        print_json([_as_data(one, _compare(one)) for one in chosen])
        return
    out = console()
    for one in chosen:
        _show(out, one, _compare(one))


def _compare(one: Table) -> list[Comparison]:
    return compare(one, dense_retinanet) if one in DETECTORS else compare(one)


def _show(out: Console, one: Table, comparisons: list[Comparison]) -> None:
    used = list(dict.fromkeys(note for c in comparisons for note in c.row.notes.values()))
    marks = {note: "¹²³⁴⁵⁶⁷⁸⁹"[i] for i, note in enumerate(used)}
    same = one.convention == "matmul"
    counted = ("published G", "ours G", "±") if any(c.row.flops for c in comparisons) else ("ours G",)
    weighed = ("published M", "ours M", "±") if any(c.row.params for c in comparisons) else ("ours M",)
    results = list(dict.fromkeys(name for c in comparisons for name in c.row.results))
    columns = [
        "network",
        *weighed,
        *counted,
        *([] if same else ["matmul G"]),
        *[f"published {name}" for name in results],
    ]
    rows = []
    for c in comparisons:
        cells = [c.row.label]
        for name, ours, wide in (
            ("params", c.parameters / 1e6, len(weighed) > 1),
            ("flops", c.flops[one.convention] / 1e9, len(counted) > 1),
        ):
            cells += _cells(c.cells.get(name), ours, marks) if wide else [f"{ours:.3f}"]
        cells += [] if same else [f"{c.flops['matmul'] / 1e9:.3f}"]
        rows.append([*cells, *[c.row.results.get(name, "") for name in results]])
    out.print(table(f"{one.title} – {one.source}", columns, rows, right=columns[1:]))
    out.print(f"G: {CONVENTIONS[one.convention].text}.", style="dim")
    if not same:
        out.print(f"matmul G: {CONVENTIONS['matmul'].text}.", style="dim")
    if one.remark:
        out.print(f"{one.remark}.", style="dim")
    for note, mark in marks.items():
        out.print(f"{mark} {one.notes[note]}.", style="dim")
    out.print()


def _cells(cell: Cell | None, ours: float, marks: dict[str, str]) -> list[str]:
    """Published, ours, difference; the footnote's mark stands on the difference."""
    if cell is None:
        return ["–", f"{ours:.3f}", ""]
    mark = marks[cell.note] if cell.note else ""
    verdict = "[green]=[/green]" if cell.agrees else f"[yellow]{cell.difference:+.3f}[/yellow]"
    return [cell.published, f"{ours:.3f}", verdict + mark]


def _as_data(one: Table, comparisons: list[Comparison]) -> dict[str, Any]:
    return {
        "title": one.title,
        "source": one.source,
        "convention": {"name": one.convention, "text": CONVENTIONS[one.convention].text},
        "remark": one.remark,
        "notes": dict(one.notes),
        "rows": [
            {
                "label": c.row.label,
                "model": c.row.model,
                "options": dict(c.row.options),
                "published": {"params": c.row.params, "flops": c.row.flops, **c.row.results},
                "ours": {"parameters": c.parameters, "flops": c.flops},
                "cells": {
                    name: {"difference": cell.difference, "agrees": cell.agrees, "note": cell.note}
                    for name, cell in c.cells.items()
                },
            }
            for c in comparisons
        ],
    }
