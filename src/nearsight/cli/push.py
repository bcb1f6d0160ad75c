"""Publish a trained network in timm's hub format, in a folder or on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nearsight.cli.app import examples, new_app

app = new_app()

EXAMPLES = examples(
    "nearsight push runs/demo/qna_vit_nano local-dir:out  # then timm.create_model('local-dir:out', pretrained=True)",
    "nearsight push runs/flowers OWNER/NAME  # to the hub, with the token of 'hf auth login'",
)


@app.command(epilog=EXAMPLES)
def push(
    path: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run's folder or one of its checkpoints.")],
    target: Annotated[str, typer.Argument(help="local-dir:FOLDER, or OWNER/NAME on the Hugging Face hub.")],
) -> None:
    """Publish a trained network in timm's hub format: safetensors and a config.json."""
    from nearsight.train import inference

    typer.echo(f"wrote {inference.push(path, target)}")
