"""Use what was trained: the network of a checkpoint, its evaluation, labels for image files, timm's hub format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor, nn

from nearsight.errors import UserError
from nearsight.train import checkpoints
from nearsight.train.config import ModelConfig, given, merge, parse_override
from nearsight.train.data.augment import normalise
from nearsight.train.data.batches import Where
from nearsight.train.data.config import DataConfig
from nearsight.train.data.decoded import eval_transform
from nearsight.train.data.images import BadImageError, decode, image_mode
from nearsight.train.state import load_model
from nearsight.train.tasks import build_task, config_from, task_class

__all__ = [
    "Detections",
    "Network",
    "Prediction",
    "detect",
    "evaluate",
    "load_network",
    "pixels_of",
    "predict",
    "push",
    "read_images",
]

LOCAL = "local-dir:"


class Network(NamedTuple):
    """A trained network in evaluation mode and what its checkpoint says of it."""

    model: nn.Module
    checkpoint: checkpoints.Checkpoint
    weights: str

    @property
    def task(self) -> str:
        return str(self.checkpoint.state["task"])

    @property
    def card(self) -> dict[str, Any]:
        card: dict[str, Any] = self.checkpoint.state["card"]
        return card

    @property
    def data(self) -> DataConfig:
        """The evaluation's preparation of an image."""
        wanted = {key: self.card["input"][key] for key in ("image_size", "channels", "crop_pct", "interpolation")}
        return DataConfig(source=self.checkpoint.state["config"]["data"]["source"], **wanted)


class Prediction(NamedTuple):
    """The likeliest classes of one image file, best first."""

    file: str
    labels: list[str]
    probabilities: list[float]


class Detections(NamedTuple):
    """What a detector found in one image file, surest first: boxes (x0, y0, x1, y1) in its pixels."""

    file: str
    image: Image.Image
    boxes: list[list[float]]
    labels: list[int]
    names: list[str]
    scores: list[float]


def load_network(path: str | Path, *, average: bool = True) -> Network:
    """The network of a run (its best checkpoint) or of a checkpoint; the moving average where there is one."""
    checkpoint = checkpoints.find(path)
    checkpoint.want("task", "card", "config")
    card = checkpoint.state["card"]
    weights = "ema" if average and checkpoint.has("ema") else "model"
    tensors = checkpoint.tensors(weights)
    try:
        model: nn.Module = task_class(checkpoint.state["task"]).network(card)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"checkpoint {checkpoint.path}: its card describes no network ({error!r}).") from error
    load_model(model, tensors, f"checkpoint {checkpoint.path}")
    return Network(model.eval(), checkpoint, weights)


def evaluate(
    path: str | Path, overrides: Sequence[str] = (), *, average: bool = True, device: str | None = None
) -> dict[str, Any]:
    """Metrics of a run or checkpoint on its evaluation split (or on another: `data.source=…`)."""
    network = load_network(path, average=average)
    # A run may have been trained with settings that had no effect and are refused since.
    saved: Any = config_from(network.checkpoint.state["config"], str(network.checkpoint.path), known=None)
    keys = network.checkpoint.state["config"]
    for override in overrides:
        keys = merge(keys, parse_override(override))
    config: Any = config_from(keys, str(network.checkpoint.path), known=saved.faults())
    if config.model != saved.model:
        raise UserError(
            f"{path}: got other keys of model for a trained network, wanted only those of data and train.seed."
        )
    if config.task != network.task:
        raise UserError(f"{path}: got a checkpoint of task {network.task!r} with task={config.task}, wanted the same.")
    # As the card has it: what the weights started from need not be there any more.
    model = ModelConfig.model_validate({**network.card["model"], "pretrained": False})
    # Wherever its images come from now, the network wants them in the units that it was trained in.
    units = {
        key: network.card["input"][key]
        for key in ("mean", "std")
        if key in network.card.get("input", {}) and getattr(config.data, key, None) is None
    }
    config = config.model_copy(update={"model": model, "data": config.data.model_copy(update=units)})
    where = Where(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    notes: list[str] = []
    task: Any = build_task(config, where, notes.append, evaluation_only=True)
    source, wanted = task.config.data.source, network.card.get("classes")
    if config.data.holdout and source != saved.data.source:
        notes.append(f"data.holdout={config.data.holdout:g}: that share of {source} is evaluated; all: data.holdout=0")
    if wanted is not None and hasattr(task, "match"):
        task.match(wanted)
    if wanted is not None and task.classes != wanted:
        odd = sorted(set(task.classes) ^ set(wanted))[:5]
        raise UserError(
            f"data.source: {source!r} has {len(task.classes)} classes, the checkpoint {len(wanted)}; wanted the same ones"
            + (f"; they differ in {', '.join(odd)}." if odd else " in the same order.")
        )
    metrics = task.evaluate(network.model.to(where.device))
    return {
        "checkpoint": str(network.checkpoint.path),
        "step": network.checkpoint.step,
        "weights": network.weights,
        "source": source,
        **metrics,
        **({"notes": notes} if notes else {}),
    }


def read_images(network: Network, files: Sequence[str | Path]) -> Tensor:
    """Image files as the network wants them: float32 [N, C, S, S]."""
    data = network.data
    return pixels_of(network, [_open(file, data.channels, data.max_pixels) for file in files])


def _open(file: str | Path, channels: int, max_pixels: int) -> Image.Image:
    if not Path(file).is_file():
        raise UserError(f"no image file {str(file)!r}.")
    try:
        return decode(Path(file), image_mode(channels), max_pixels)
    except BadImageError as error:
        raise UserError(f"{file}: {error}.") from error


def pixels_of(network: Network, images: Sequence[Image.Image]) -> Tensor:
    """Images as the network wants them: resized, cropped, normalised, float32 [N, C, S, S]."""
    transform, card = eval_transform(network.data), network.card["input"]
    pixels = torch.stack([torch.as_tensor(transform(image)) for image in images]).permute(0, 2, 3, 1)
    return normalise(pixels, torch.tensor(card["mean"]), torch.tensor(card["std"]), channels_last=False)


@torch.inference_mode()
def predict(network: Network, files: Sequence[str | Path], top: int = 5) -> list[Prediction]:
    """The `top` likeliest classes of each file."""
    classes = network.card["classes"]
    found = []
    for start in range(0, len(files), 64):
        part = files[start : start + 64]
        values, indices = network.model(read_images(network, part)).softmax(1).topk(min(top, len(classes)))
        for file, row, where in zip(part, values.tolist(), indices.tolist(), strict=True):
            found.append(Prediction(str(file), [classes[i] for i in where], [round(v, 6) for v in row]))
    return found


@torch.inference_mode()
def detect(network: Network, files: Sequence[str | Path], threshold: float = 0.5) -> list[Detections]:
    """The objects a detector is at least `threshold` sure of, in each file."""
    from nearsight.train.data.detection import DetectionDataConfig, eval_resize, pixels_of
    from nearsight.train.tasks.detect import on_file

    card = network.card
    data = DetectionDataConfig(source=network.checkpoint.state["config"]["data"]["source"], **card["input"])
    resize = eval_resize(data)
    model: Any = network.model
    kept = model.score_thresh  # the detector's own, 0.05 for a RetinaNet
    results = []
    for file in files:
        image = _open(file, 3, data.max_pixels)
        pixels = resize(pixels_of(image)).float().div(255)
        model.score_thresh = min(kept, threshold)
        try:
            found = on_file(model([pixels])[0], pixels, torch.tensor([image.height, image.width]))
        finally:
            model.score_thresh = kept
        order = [i for i in found["scores"].argsort(descending=True).tolist() if found["scores"][i] >= threshold]
        labels = found["labels"][order].tolist()
        boxes = [[round(v, 2) for v in box] for box in found["boxes"][order].tolist()]
        scores = [round(v, 6) for v in found["scores"][order].tolist()]
        results.append(Detections(str(file), image, boxes, labels, [card["classes"][i] for i in labels], scores))
    return results


def push(path: str | Path, target: str, *, average: bool = True) -> str:
    """Publish a checkpoint in timm's hub format: to `local-dir:FOLDER` or to a Hugging Face repository.

    Afterwards `timm.create_model("local-dir:FOLDER", pretrained=True)` (or "hf-hub:OWNER/NAME") gives the network back,
    once `import nearsight` has registered it. Weights are written as safetensors only.
    """
    from timm.models import _hub

    if target.removeprefix(LOCAL) == "":
        raise UserError(f"got the target {target!r}, wanted {LOCAL}FOLDER or OWNER/NAME.")
    network = load_network(path, average=average)
    if hasattr(network.model, "save_pretrained"):
        return _push_transformers(network, target)
    if network.task != "classify":
        raise UserError(
            f"{path} is a checkpoint of task {network.task!r}, and timm's hub format holds classifiers; "
            f"copy {network.checkpoint.path} instead: nearsight opens it anywhere."
        )
    card = network.card
    facts = card["input"]
    shape = (facts["channels"], facts["image_size"], facts["image_size"])
    model: Any = network.model
    cfg = model.pretrained_cfg
    model.pretrained_cfg = {
        **(cfg if isinstance(cfg, dict) else cfg.to_dict()),
        "architecture": card["model"]["name"].partition(".")[0],
        # Of the network, not of weights that its plain name could have had.
        "tag": card["model"]["name"].partition(".")[2] or None,
        "num_classes": card["sizes"]["num_classes"],
        "input_size": shape,
        "mean": tuple(facts["mean"]),
        "std": tuple(facts["std"]),
        "crop_pct": facts["crop_pct"],
        "interpolation": facts["interpolation"],
    }
    arguments = {**given(card["model"]["options"]), "in_chans": card["sizes"]["in_chans"]}
    shared: dict[str, Any] = {
        "model_config": {"label_names": card["classes"]},
        "model_args": arguments,
        "safe_serialization": True,
    }
    if target.startswith(LOCAL):
        folder = target.removeprefix(LOCAL)
        with _unwritten(folder):
            _hub.save_for_hf(model, folder, **shared)
        return folder
    with _hub_refusals(target):
        return str(_hub.push_to_hf_hub(model, target, **shared))


def _push_transformers(network: Network, target: str) -> str:
    """A network made of a transformers model, in that library's own format."""
    model: Any = network.model
    model.network.config.id2label = dict(enumerate(network.card["classes"]))
    model.network.config.label2id = {name: label for label, name in enumerate(network.card["classes"])}
    if target.startswith(LOCAL):
        folder = target.removeprefix(LOCAL)
        with _unwritten(folder):
            model.save_pretrained(folder)
        return folder
    with _hub_refusals(target):
        return str(model.network.push_to_hub(target))


@contextmanager
def _unwritten(folder: str) -> Iterator[None]:
    """A sentence where safetensors, whose error is no OSError, cannot write."""
    try:
        yield
    except SafetensorError as error:
        raise UserError(f"cannot write {folder!r} ({error}).") from error


@contextmanager
def _hub_refusals(target: str) -> Iterator[None]:
    """A sentence instead of whatever the hub, or the way to it, says."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(
            f"cannot push to {target!r} on the Hugging Face hub ({reason}); log in with 'hf auth login', or write a "
            f"folder with {LOCAL}FOLDER."
        ) from error


def confidence(metrics: dict[str, Any]) -> float | None:
    """Half the width of a 95 % interval of an accuracy over `images`, to say how much of it is chance.

    >>> round(confidence({"accuracy": 0.98, "images": 450}), 4)
    0.0129
    """
    share, images = metrics.get("accuracy"), metrics.get("images")
    if share is None or not images:
        return None
    return 1.96 * math.sqrt(share * (1 - share) / images)
