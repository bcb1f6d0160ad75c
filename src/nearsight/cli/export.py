"""Write a network as a program of its own, ONNX or torch.export, that runs without nearsight."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from nearsight.cli.app import examples, new_app
from nearsight.cli.output import console, print_json, table
from nearsight.errors import UserError

app = new_app()

EXAMPLES = examples(
    "nearsight export sasa_resnet_nano.cifar10 -o nano.onnx  # a network that ships, any batch, 32×32",
    "nearsight export runs/flowers -o flowers.onnx --any-size --pixels  # rows and columns free; takes pixels in 0…1",
    "nearsight export qna_vit_tiny -o tiny.pt2 --size 256,320 --batch 1  # for torch.export.load, shapes fixed",
)


@app.command(epilog=EXAMPLES)
def export(
    source: Annotated[
        str, typer.Argument(metavar="CHECKPOINT|MODEL", help="A run's folder, a checkpoint, or a network's name.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write: NAME.onnx or NAME.pt2.")],
    size: Annotated[
        str | None,
        typer.Option(metavar="Y,X", help="Rows and columns of the images.", show_default="the network's own"),
    ] = None,
    any_size: Annotated[bool, typer.Option("--any-size", help="Leave rows and columns free.")] = False,
    batch: Annotated[int | None, typer.Option(min=1, help="Images per call.", show_default="free")] = None,
    pixels: Annotated[
        bool, typer.Option("--pixels", help="Take pixels in 0…1 and normalise them inside; else they come normalised.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write a network as a program of its own, ONNX or torch.export, that runs without nearsight.

    The file is kept only if it gives the network's numbers, at the size it was made for and, with --any-size, at others.
    It carries what its input and output mean: mean and std, interpolation, crop, classes.
    """
    import nearsight
    from nearsight.cli.pictures import open_network
    from nearsight.export.program import FACTS, Graph
    from nearsight.export.program import export as write

    began = time.monotonic()
    wanted = None if size is None else _pair(size)
    opened = open_network(source)
    rebuilds = opened.task == "reconstruct"
    output = "rebuilt" if rebuilds else "logits"
    facts: dict[str, Any] = {
        "network": opened.name,
        "task": opened.task,
        "trained": opened.trained,
        "input": {
            "values": "pixels in 0…1" if pixels else "pixels in 0…1, minus mean, divided by std",
            "mean": list(opened.mean),
            "std": list(opened.std),
            **opened.preparation,
        },
        "classes": opened.classes,
        "made_by": f"nearsight {nearsight.__version__}",
    }
    made = write(
        Graph(opened.model, (opened.mean, opened.std) if pixels else None, rebuilds),
        out,
        channels=opened.channels,
        size=wanted or opened.size,
        batch=batch,
        any_size=any_size,
        output=output,
        facts=facts,
    )
    row: dict[str, Any] = {
        "file": str(made.file),
        "bytes": made.file.stat().st_size,
        "operators": made.operators,
        "images": made.shape,
        "output": output,
        "checked": [list(shape) for shape in made.checked],
        "largest_difference": made.error,
        "seconds": round(time.monotonic() - began, 1),
        **facts,
    }
    if as_json:
        print_json(row)
        return
    rows = [
        ("file", made.file),
        ("images", "×".join(map(str, made.shape))),
        ("values", facts["input"]["values"]),
        ("output", output),
        ("operators", made.operators),
        ("size", f"{row['bytes'] / 1e6:.1f} MB"),
        ("checked at", ", ".join("×".join(map(str, shape)) for shape in made.checked)),
        ("largest difference", f"{made.error:.1e} of the largest output"),
        ("what it means", f"{FACTS} in the file"),
    ]
    console().print(table(opened.name, ("what", "value"), [(a, escape(str(b))) for a, b in rows]))
    if not opened.trained:
        console().print(f"{opened.name} has untrained weights.", markup=False)


def _pair(text: str) -> tuple[int, int]:
    """Rows and columns.

    >>> _pair("224,320"), _pair("64")
    ((224, 320), (64, 64))
    """
    numbers = text.split(",")
    if len(numbers) > 2 or not all(n.strip().isdecimal() and int(n) > 0 for n in numbers):
        raise UserError(f"--size: got {text!r}, wanted Y,X or one number for both.")
    return int(numbers[0]), int(numbers[-1])
