"""Say what is in an image, with a trained network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from nearsight.cli.app import examples, new_app
from nearsight.cli.output import console, print_json, table

app = new_app()

EXAMPLES = examples(
    "nearsight predict runs/demo/qna_vit_nano digit.png",
    "nearsight predict runs/flowers *.jpg --top 3 --json  # for a program",
)


@app.command(epilog=EXAMPLES)
def predict(
    path: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A run's folder or one of its checkpoints.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files.")],
    top: Annotated[int, typer.Option(min=1, help="How many classes to name.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Name the likeliest classes of image files."""
    from nearsight.train.inference import load_network
    from nearsight.train.inference import predict as label

    found = label(load_network(path), images, top)
    if as_json:
        print_json(
            [
                {
                    "file": one.file,
                    "classes": [
                        {"label": name, "probability": p} for name, p in zip(one.labels, one.probabilities, strict=True)
                    ],
                }
                for one in found
            ]
        )
        return
    rows = [
        (
            escape(one.file),
            escape(", ".join(f"{n} {100 * p:.1f} %" for n, p in zip(one.labels, one.probabilities, strict=True))),
        )
        for one in found
    ]
    console().print(table(str(path), ("image", "classes"), rows))
