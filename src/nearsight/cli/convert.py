"""Turn the QnA authors' Flax weights into a checkpoint that timm loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import timm
import typer
from safetensors.torch import save

from nearsight.cli.app import examples, new_app
from nearsight.errors import UserError, did_you_mean
from nearsight.export.flax_weights import convert_flax, read_flax

app = new_app()

EXAMPLES = examples(
    "nearsight convert checkpoint_300 --model qna_vit_tiny -o qna_vit_tiny.safetensors  # the authors' file",
    "nearsight convert params.npz --model qna_vit_base -o base.safetensors --num-classes 10  # a fine-tuned head",
)


@app.command(epilog=EXAMPLES)
def convert(
    source: Annotated[
        Path, typer.Argument(help="A Flax msgpack checkpoint, or an .npz of '/'-joined Flax parameter names.")
    ],
    model: Annotated[str, typer.Option("--model", "-m", help="The network the weights belong to.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The .safetensors file to write.")],
    num_classes: Annotated[int, typer.Option(help="Classes of the head in SOURCE.")] = 1000,
) -> None:
    """Turn the QnA authors' Flax weights into a checkpoint that timm loads.

    Nothing in SOURCE is executed or unpickled. Every parameter of SOURCE is used exactly once and every parameter of the
    model is filled, or the command says what is missing, unused or of the wrong shape and writes nothing. Load the result with
    timm.create_model(MODEL, checkpoint_path=OUT).
    """
    if out.suffix != ".safetensors":
        raise UserError(f"got --out {str(out)!r}, wanted a file name that ends in .safetensors.")
    if not timm.is_model(model):
        raise UserError(
            f"no model {model!r}.{did_you_mean(model, timm.list_models('qna_*'))} See: nearsight models qna*."
        )
    try:
        network = timm.create_model(model, num_classes=num_classes)
    except (TypeError, RuntimeError) as error:
        raise UserError(f"got --model {model!r}, wanted a QnA-ViT such as qna_vit_tiny ({error}).") from error
    state = convert_flax(read_flax(source), network)
    network.load_state_dict(state)
    out.write_bytes(save(state, metadata={"format": "pt", "architecture": model}))
    count = sum(tensor.numel() for tensor in state.values())
    typer.echo(f"{out}: {len(state)} tensors, {count:,} parameters of {model}")
