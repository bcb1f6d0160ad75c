"""Train a network from a recipe, on a laptop, a GPU or many."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from nearsight.cli.app import examples, new_app
from nearsight.cli.output import console, print_json, table
from nearsight.errors import UserError

app = new_app()

EXAMPLES = examples(
    "nearsight train --list  # the recipes",
    "nearsight train digits/sasa_nano  # a minute on a laptop",
    "nearsight train cifar10/short_sasa_resnet26 data.root=DATA optimizer.lr=0.01  # keys of the recipe, changed",
    "nearsight train imagenet/qna_vit_tiny --dry-run  # what it would do",
    "nearsight train --copy cifar10/short_resnet26  # a file of your own to edit",
    "nearsight train --resume runs/cifar10-short_resnet26  # go on after an interruption",
)


@app.command(epilog=EXAMPLES)
def train(
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name or a YAML file.", show_default=False)] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe to change.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder.", show_default="runs/RECIPE")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on from a run or one of its checkpoints.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would happen, then stop.")] = False,
    list_recipes: Annotated[bool, typer.Option("--list", help="List the recipes.")] = False,
    show: Annotated[str | None, typer.Option(metavar="NAME", help="Print a recipe.")] = None,
    copy: Annotated[str | None, typer.Option(metavar="NAME", help="Copy a recipe into this folder, to edit.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as one JSON document.")] = False,
) -> None:
    """Train a network from a recipe, on a laptop, a GPU or many.

    Writes checkpoints, log.jsonl, TensorBoard curves and summary.json into the run's folder. Ctrl-C saves and stops.

    On many GPUs the same command runs under a launcher: torchrun --nproc-per-node 8 -m nearsight train RECIPE.
    """
    from nearsight import recipes

    if list_recipes:
        _list(as_json)
    elif show is not None:
        typer.echo(recipes.text_of(show), nl=False)
    elif copy is not None:
        _copy(copy, out)
    else:
        _train(recipe, overrides or [], out, resume, dry_run, as_json)


def _list(as_json: bool) -> None:
    from nearsight import recipes

    rows = []
    for name in recipes.names():
        facts = dict(line.split(": ", 1) for line in recipes.header(name)[1:] if ": " in line)
        rows.append({"name": name, **facts})
    if as_json:
        print_json(rows)
    else:
        columns = ("name", "hardware", "expected")
        console().print(table("Recipes", columns, [[escape(row.get(c, "")) for c in columns] for row in rows]))


def _copy(name: str, out: Path | None) -> None:
    from nearsight import recipes

    target = out or Path(f"{name.replace('/', '-')}.yaml")
    text = recipes.text_of(name)
    if target.exists():
        raise UserError(f"{target} exists already; name another file with --out.")
    target.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {target}; train it with: nearsight train {target}")


def _train(
    recipe: str | None, overrides: list[str], out: Path | None, resume: Path | None, dry_run: bool, as_json: bool
) -> None:
    if recipe is not None and "=" in recipe and resume is not None:
        overrides, recipe = [recipe, *overrides], None
    if recipe is None and resume is None:
        raise UserError("no recipe given; choose one with: nearsight train --list.")
    config, run = _config(recipe, overrides, out, resume)
    if dry_run:
        _preview(config, as_json)
        return
    from nearsight.train.engine import Stopped, fit

    try:
        result = fit(config, run, resume=resume, quiet=as_json)
    except Stopped as stopped:
        typer.echo(f"nearsight train: {stopped}.", err=True)
        raise typer.Exit(128 + stopped.number) from stopped
    except KeyboardInterrupt as error:
        raise typer.Exit(128 + signal.SIGINT) from error
    if os.environ.get("RANK", "0") != "0":
        return
    summary = {
        "run": str(result.run),
        "checkpoint": str(result.checkpoint),
        "step": result.step,
        "parameters": result.parameters,
        "seconds": round(result.seconds, 1),
        "seconds_per_epoch": round(result.seconds_per_epoch, 2),
        "images_per_s": round(result.images_per_s, 1),
        "best": result.best,
        **result.metrics,
    }
    if as_json:
        print_json(summary)
    else:
        rows = [(key, f"{value:.6g}" if isinstance(value, float) else value) for key, value in summary.items()]
        console().print(table(config.model.name, ("what", "value"), rows))


def _config(recipe: str | None, overrides: list[str], out: Path | None, resume: Path | None) -> tuple[Any, Path]:
    from nearsight.train import checkpoints
    from nearsight.train.config import merge, parse_override, read_yaml
    from nearsight.train.tasks import config_from, load_config

    if recipe is not None:
        config = load_config(recipe, overrides)
        name = recipe.removesuffix(".yaml").removesuffix(".yml").replace("/", "-").strip("-.")
        return config, out or (_run_of(resume) if resume is not None else Path("runs") / name)
    assert resume is not None
    run = _run_of(resume)
    saved = run / "config.yaml"
    if saved.is_file():
        keys = read_yaml(saved.read_text(encoding="utf-8"), str(saved))
    else:
        keys = checkpoints.find(resume, which="last").state["config"]
    for override in overrides:
        keys = merge(keys, parse_override(override))
    return config_from(keys, str(saved)), out or run


def _run_of(path: Path) -> Path:
    """The run a checkpoint belongs to; a run is itself."""
    from nearsight.train.checkpoints import FOLDER

    # Named from inside the folder of checkpoints, its own name does not say.
    folder = path if path.parent.name else path.absolute()
    return folder.parent.parent if folder.parent.name == FOLDER else path


def _preview(config: Any, as_json: bool) -> None:
    from nearsight.train.config import to_yaml
    from nearsight.train.preview import preview

    facts = preview(config, int(os.environ.get("WORLD_SIZE", "1")))
    if as_json:
        print_json({"config": config.model_dump(mode="json"), **facts})
        return
    typer.echo(to_yaml(config))
    memory = facts["memory_bytes"]
    shown = [
        ("images per epoch", f"{facts['images_per_epoch']:,}"),
        ("classes", facts["classes"]),
        (
            "images per step",
            f"{facts['batch']:,} ({facts['processes']} process{'es' if facts['processes'] > 1 else ''})",
        ),
        ("steps per epoch", f"{facts['steps_per_epoch']:,}"),
        ("steps", f"{facts['steps']:,}"),
        ("peak learning rate", f"{facts['lr']:.6g}"),
        ("learning rate", spark([lr for _, lr in facts["lr_curve"]])),
        ("parameters", f"{facts['parameters']:,}"),
        ("weights, gradients, moments", _mebibytes(memory["weights_and_moments"])),
        ("activations (estimate)", _activations(memory["activations"], memory["activations_with_kernels"])),
    ]
    out = console()
    out.print(table(config.model.name, ("what", "value"), shown))
    for note in facts["notes"]:
        out.print(note, markup=False)


def _activations(plain: int | None, with_kernels: int | None) -> str:
    if plain == with_kernels:
        return _mebibytes(plain)
    return f"{_mebibytes(with_kernels)} with the kernels for GPUs, {_mebibytes(plain)} without"


def _mebibytes(count: int | None) -> str:
    return "not known" if count is None else f"{count / 2**20:,.0f} MiB"


def spark(values: list[float]) -> str:
    """A row of bars.

    >>> spark([0, 1, 2, 1, 0])
    '▁▅█▅▁'
    """
    bars, top = "▁▂▃▄▅▆▇█", max(values) or 1.0
    return "".join(bars[min(7, int(value / top * 8))] for value in values)
