"""Evaluate a run or a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nearsight.cli.app import examples, new_app
from nearsight.cli.output import console, print_json, table

app = new_app()

EXAMPLES = examples(
    "nearsight eval runs/demo/sasa_resnet_nano  # the run's best checkpoint",
    "nearsight eval runs/demo/sasa_resnet_nano/checkpoints/step-00000147 --json",
    "nearsight eval sasa_resnet_nano.cifar10 data.root=FOLDER  # a network that comes with nearsight",
    "nearsight eval runs/flowers data.source=folder:OTHER_FLOWERS  # on other images of the same classes",
)


@app.command("eval", epilog=EXAMPLES)
def evaluate(
    path: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run's folder or one of its checkpoints.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the run's config to change.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The weights themselves, not their moving average.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Evaluate a run (its best checkpoint) or a checkpoint on its evaluation split."""
    from nearsight.train.inference import confidence
    from nearsight.train.inference import evaluate as measure

    found = measure(path, overrides or (), average=not raw)
    if as_json:
        print_json(found)
        return
    notes = found.pop("notes", [])
    rows = [(key, f"{value:.6g}" if isinstance(value, float) else value) for key, value in found.items()]
    half = confidence(found)
    if half is not None:
        rows.append(("95 % interval of accuracy", f"± {half:.4f}"))
    console().print(table(str(path), ("what", "value"), rows))
    for note in notes:
        console().print(note, markup=False)
