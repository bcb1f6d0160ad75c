"""Say what is in an image, with a trained network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from nearsight.cli.app import examples, new_app
from nearsight.cli.output import console, print_json, table
from nearsight.errors import UserError

app = new_app()

EXAMPLES = examples(
    "nearsight predict photo.jpg  # with the network that comes with nearsight: ten classes of CIFAR-10",
    "nearsight predict runs/demo/qna_vit_nano digit.png",
    "nearsight predict runs/flowers *.jpg --top 3 --json  # for a program",
    "nearsight predict runs/bccd-sasa_retinanet *.jpg -o found  # a detector: boxes, labels and scores drawn into copies",
    "nearsight predict runs/faces-qna_autoencoder *.jpg -o faces  # an auto-encoder: each image above what it became",
    "nearsight predict runs/qna --beside runs/conv -o faces  # two of them on the first one's held-out images",
)


@app.command(epilog=EXAMPLES)
def predict(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="[CHECKPOINT]", help="A run's folder, one of its checkpoints, or the name of a network that ships."
        ),
    ],
    images: Annotated[
        list[Path] | None, typer.Argument(metavar="IMAGE...", help="Image files.", show_default=False)
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Classifiers: how many classes to name.")] = 5,
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Detectors: how sure to be of an object.")] = 0.5,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Detectors, auto-encoders: where to put the pictures."),
    ] = None,
    beside: Annotated[
        list[Path] | None, typer.Option(metavar="CHECKPOINT", help="Auto-encoders: another one to compare with.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Name the likeliest classes of image files, find the objects in them, rebuild them: what the network was trained for.

    An auto-encoder without image files rebuilds the first held-out images of its run.
    """
    from nearsight.train.inference import load_network

    path, images = _or_default(path, images or [])
    network = load_network(path)
    if network.task == "reconstruct":
        rows = _rebuild([network, *map(load_network, beside or [])], images, out)
    elif beside:
        raise UserError(f"--beside: got it for a network of task {network.task!r}, wanted auto-encoders; leave it out.")
    elif not images:
        raise UserError("no image files given; name some after the checkpoint.")
    elif network.task == "detect":
        rows = _detect(network, images, threshold, out)
    elif out is not None:
        raise UserError(f"-o: got {str(out)!r}, but a network of task {network.task!r} draws nothing; leave it out.")
    else:
        rows = _label(network, images, top)
    if as_json:
        print_json(rows)
        return
    what = WHAT[network.task]
    shown = [(escape(row["file"]), escape(_line(row[what]))) for row in rows]
    console().print(table(str(path), ("image", what), shown))


WHAT = {"classify": "classes", "detect": "objects", "reconstruct": "reconstructions"}


def _label(network: Any, images: list[Path], top: int) -> list[dict[str, Any]]:
    from nearsight.train.inference import predict as label

    return [
        {
            "file": one.file,
            "classes": [
                {"label": name, "probability": p} for name, p in zip(one.labels, one.probabilities, strict=True)
            ],
        }
        for one in label(network, images, top)
    ]


def _detect(network: Any, images: list[Path], threshold: float, out: Path | None) -> list[dict[str, Any]]:
    from nearsight.cli.pictures import free_name
    from nearsight.detect.draw import draw_boxes
    from nearsight.train.inference import detect

    rows, names = [], set[str]()
    for one in detect(network, images, threshold):
        found = zip(one.names, one.scores, one.boxes, strict=True)
        row: dict[str, Any] = {
            "file": one.file,
            "objects": [{"label": name, "score": score, "box": box} for name, score, box in found],
        }
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            name = free_name(Path(one.file).stem, names)
            texts = [f"{name} {score:.2f}" for name, score in zip(one.names, one.scores, strict=True)]
            draw_boxes(one.image, one.boxes, one.labels, texts).save(out / f"{name}.png")
            row["picture"] = str(out / f"{name}.png")
        rows.append(row)
    return rows


def _or_default(path: Path, images: list[Path]) -> tuple[Path, list[Path]]:
    """The network that ships, where the first word is an image already."""
    from PIL.Image import registered_extensions

    from nearsight.train.checkpoints import PICKLED
    from nearsight.weights import DEFAULT

    if path.is_file() and path.suffix not in (*PICKLED, ".safetensors"):
        return Path(DEFAULT), [path, *images]
    if not path.exists() and path.suffix.lower() in registered_extensions():
        raise UserError(f"no image file {str(path)!r}.")
    return path, images


def _rebuild(networks: list[Any], images: list[Path], out: Path | None) -> list[dict[str, Any]]:
    from nearsight.train.tasks.reconstruct import PICTURE, compare

    odd = next((network for network in networks if network.task != "reconstruct"), None)
    if odd is not None:
        raise UserError(f"--beside: {odd.checkpoint.path} is of task {odd.task!r}, wanted an auto-encoder.")
    found = compare(networks, images)
    rows = found.rows()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        found.picture().save(out / PICTURE)
        rows = [{**row, "picture": str(out / PICTURE)} for row in rows]
    return rows


def _line(found: list[dict[str, Any]]) -> str:
    """What the table shows of one image: classes with their probabilities, objects counted by class, how close each came.

    >>> _line([{"label": "a", "probability": 0.5}]), _line([{"label": "b", "score": 0.9}] * 2), _line([])
    ('a 50.0 %', '2 b', 'none')
    """
    if found and "probability" in found[0]:
        return ", ".join(f"{one['label']} {100 * one['probability']:.1f} %" for one in found)
    if found and "psnr" in found[0]:
        return ", ".join(f"{one['network']} L1 {one['l1']:.4f} {one['psnr']:.2f} dB" for one in found)
    names = [one["label"] for one in found]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or "none"
