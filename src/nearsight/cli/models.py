"""List the networks: parameters, FLOPs, default image size, paper."""

from __future__ import annotations

from typing import Annotated, Any

import timm
import torch
import typer

from nearsight.cli.app import examples, new_app
from nearsight.cli.output import console, print_json, table
from nearsight.errors import UserError, did_you_mean
from nearsight.models.flops import CONVENTIONS, count_parameters, measure_work
from nearsight.models.listing import model_names
from nearsight.models.published import paper_of

app = new_app()

EXAMPLES = examples(
    "nearsight models  # all of them",
    "nearsight models 'sasa*'  # those of one paper",
    "nearsight models '*nano' --json  # for a program",
)


@app.command(epilog=EXAMPLES)
def models(
    pattern: Annotated[
        str, typer.Argument(help="A name with * and ?, such as 'qna*'; without either, part of a name.")
    ] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the networks: parameters, FLOPs, default image size, paper.

    Each is built without weights and counted at its default size.
    """
    rows = [describe(name) for name in find(pattern)]
    if as_json:
        print_json(rows)
        return
    shown = [
        (
            row["name"],
            f"{row['parameters'] / 1e6:.3f}",
            f"{row['flops'] / 1e9:.3f}",
            "{1} × {2}".format(*row["input_size"]),
            row["num_classes"] or "–",
            row["paper"] or "–",
        )
        for row in rows
    ]
    columns = ("name", "params M", "GFLOPs", "size", "classes", "paper")
    out = console()
    out.print(table(f"{len(rows)} networks", columns, shown, right=("params M", "GFLOPs", "size", "classes")))
    out.print(f"FLOPs: {CONVENTIONS['matmul'].text}.", style="dim")


def find(pattern: str) -> list[str]:
    """The names a pattern matches, or a sentence."""
    wildcard = pattern if set(pattern) & set("*?[") else f"*{pattern}*"
    names = model_names(wildcard)
    if not names:
        raise UserError(
            f"no network matches {pattern!r}.{did_you_mean(pattern.strip('*'), model_names())} All: nearsight models."
        )
    return names


def describe(name: str) -> dict[str, Any]:
    """One network as plain data."""
    with torch.device("meta"):
        network = timm.create_model(name)
    cfg: Any = network.pretrained_cfg
    paper = paper_of(name)
    return {
        "name": name,
        "parameters": count_parameters(network),
        "flops": CONVENTIONS["matmul"].total(measure_work(network)),
        "convention": "matmul",
        "input_size": list(cfg["input_size"]),
        "num_classes": max(cfg["num_classes"], 0),  # an auto-encoder has none
        "paper": f"{paper.short}, {paper.url}" if paper else None,
    }
