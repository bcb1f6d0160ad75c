"""Turn a run into a network to hand on: half-precision weights, what is needed to rebuild it, and a model card.

python -m nearsight.train.ship RUN FOLDER/qna_vit_nano.cifar10 data.root=DATA
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nearsight.errors import UserError
from nearsight.train import checkpoints
from nearsight.train.inference import confidence, evaluate, load_network

__all__ = ["ship"]

CARD = """# {name}

{classes} classes of {source}, {size}×{size} pixels. {parameters:,} parameters, float16, {kilobytes:,.0f} kB.

| | |
|---|---|
| accuracy | {accuracy} |
| data | {source}: {data} |
| training | `nearsight train {recipe}`{trained} |
| check | `nearsight eval {name} data.root=FOLDER` |
| use | `nearsight predict {name} photo.jpg`; `timm.create_model("{name}", pretrained=True)` after `import nearsight` |
| classes | {labels} |

Limits: it knows these {classes} classes and nothing else, and names one of them for whatever it is shown; it has seen
images of {size} pixels only, so a photograph is shrunk to that first. Made to show that the layers learn and to try the
tools on, not for decisions about people or safety.
"""


def ship(path: str | Path, folder: str | Path, overrides: Sequence[str] = (), **trained: Any) -> dict[str, Any]:
    """Write a run's network to `folder` (named architecture.tag) as float16 with a card, evaluated as it is written.

    `overrides` say where the data is; `trained` is told in the card: recipe, machine, seconds, commit, date, note.
    Returns the metrics.
    """
    target = Path(folder)
    network = load_network(path)
    config = {**network.checkpoint.state["config"]}
    if "." not in target.name:
        raise UserError(f"ship: got the folder {target.name!r}, wanted a name like 'qna_vit_nano.cifar10'.")
    # Where the data lay is nobody's business but the trainer's.
    config["data"] = {**config["data"], "root": None}
    state = {
        "step": network.checkpoint.step,
        "task": network.checkpoint.state["task"],
        "card": network.card,
        "config": config,
        "metrics": None,
        "trained": trained,
    }
    tensors = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in network.model.state_dict().items()
    }
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise UserError(f"ship: {broken[0]} does not fit into float16; got values beyond 65504.")
    target.parent.mkdir(parents=True, exist_ok=True)
    checkpoints.write_folder(target, state, {"model": tensors})
    found = evaluate(target, overrides)
    metrics = {key: found[key] for key in ("accuracy", "loss", "images")}
    checkpoints.write_folder(target, {**state, "metrics": metrics, "score": metrics["accuracy"]}, {"model": tensors})
    (target / "README.md").write_text(_card(target.name, network, metrics, trained, tensors), encoding="utf-8")
    return metrics


def _card(name: str, network: Any, metrics: dict[str, Any], trained: dict[str, Any], tensors: dict[str, Any]) -> str:
    card, source = network.card, network.checkpoint.state["config"]["data"]["source"]
    half = confidence(metrics) or 0.0
    told = [
        f"{trained['seconds']:.0f} s" if "seconds" in trained else "",
        f"on one {trained['machine']}" if "machine" in trained else "",
        f"commit {trained['commit']}" if "commit" in trained else "",
        str(trained.get("date", "")),
        str(trained.get("note", "")),
    ]
    shown = ", ".join(part for part in told if part)
    kept = sum(p.numel() for p in network.model.parameters())
    held = network.checkpoint.state["config"]["data"].get("holdout")
    return CARD.format(
        name=name,
        classes=len(card["classes"]),
        source=source,
        size=card["input"]["image_size"],
        parameters=kept,
        kilobytes=sum(t.numel() * t.element_size() for t in tensors.values()) / 1e3,
        accuracy=f"{100 * metrics['accuracy']:.2f} % of {metrics['images']:,.0f} test images "
        f"(± {100 * half:.2f} by chance; one seed)",
        data=f"trained on its training split{f' less {held:.0%}' if held else ''}, evaluated once on its test split",
        recipe=trained.get("recipe", "RECIPE"),
        trained=f" ({shown})" if shown else "",
        labels=", ".join(card["classes"]),
    )


if __name__ == "__main__":
    try:
        print(ship(sys.argv[1], sys.argv[2], sys.argv[3:]))
    except IndexError:
        raise SystemExit("ship: wanted RUN FOLDER [KEY=VALUE]...") from None
    except UserError as error:
        raise SystemExit(f"ship: {error}") from error
