"""Object detection: boxes with labels in every image, the detector's own losses, COCO's average precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn

from nearsight.detect import create_detector
from nearsight.detect.evaluate import mean_average_precision
from nearsight.errors import UserError
from nearsight.train.config import ModelConfig, RunConfig, given
from nearsight.train.data.batches import Where
from nearsight.train.data.detection import (
    DetectionBatch,
    DetectionBatches,
    DetectionDataConfig,
    open_detection,
)
from nearsight.train.data.images import LeftOut
from nearsight.train.tasks import Facts, Note
from nearsight.train.tasks.classify import finish_network, refusals

__all__ = ["CONFIG", "TASK", "Detect", "DetectConfig", "build_detector", "on_file"]

# Where the first weights come from: a trained network has its own.
STARTING_POINTS = ("backbone_weights",)


class DetectConfig(RunConfig):
    task: str = "detect"
    data: DetectionDataConfig

    def faults(self) -> list[str]:
        found = super().faults() + self.data.faults()
        for key, value in (("drop", self.model.drop), ("drop_path", self.model.drop_path)):
            if value:
                found.append(f"model.{key}: got {value:g}, wanted it in model.options, as the detector names it")
        return found


def build_detector(config: ModelConfig, num_classes: int) -> nn.Module:
    """The detector a config names, or a sentence."""
    options = given(config.options)
    with refusals(config, options):
        model = create_detector(config.name, num_classes=num_classes, pretrained=config.pretrained, **options)
    return finish_network(model, config)


def on_file(found: dict[str, Tensor], image: Tensor, size: Tensor) -> dict[str, Tensor]:
    """Detections in pixels of the file of `size` (rows, columns), from those in pixels of the resized `image` [3, H, W].

    >>> on_file({"boxes": torch.tensor([[1.0, 2.0, 3.0, 4.0]])}, torch.zeros(3, 10, 20), torch.tensor([30, 40]))
    {'boxes': tensor([[ 2.,  6.,  6., 12.]])}
    """
    rows, columns = (float(side) for side in size)
    height, width = image.shape[-2:]
    factors = torch.tensor([columns / width, rows / height] * 2)
    return {**{key: value.cpu() for key, value in found.items()}, "boxes": found["boxes"].float().cpu() * factors}


def _forward(model: Any, data: DetectionDataConfig) -> Callable[[], Any] | None:
    """Two of the largest images through a network on the meta device, up to its heads; None for one that hides them."""
    if not hasattr(model, "dense"):
        return None
    rows = columns = data.augment.crop or data.long_side
    if data.augment.crop is None and data.short_side is not None:
        rows = data.short_side
    step = model.strides[-1]
    pixels = torch.zeros(2, 3, -(-rows // step) * step, -(-columns // step) * step, device="meta")
    return lambda: model.dense(pixels)


class Detect:
    """The detection task of a config."""

    metric = "mAP"
    larger_is_better = True

    def __init__(self, config: DetectConfig, where: Where, note: Note, *, evaluation_only: bool = False) -> None:
        self.config, self.where, self.note = config, where, note
        data, seed = config.data, config.train.seed
        source = open_detection(data, note, seed=seed, training=not evaluation_only)
        self.classes = source.classes
        if not evaluation_only:
            self.train = DetectionBatches(source.train, data, where, seed, training=True)
        self.evaluation = DetectionBatches(source.evaluation, data, where, seed, training=False)
        self.labels = torch.arange(len(self.classes))
        self.model = build_detector(config.model, len(self.classes))
        self.left_out = LeftOut(note)

    @staticmethod
    def facts(config: DetectConfig) -> Facts:
        data, notes = config.data, list[str]()
        try:
            source = open_detection(data, notes.append, seed=config.train.seed)
            images, classes = len(source.train), len(source.classes)
        except UserError as error:
            if data.train_images is None or data.num_classes is None or Path(data.source.partition(":")[2]).is_dir():
                raise
            notes.append(f"data not opened, sizes taken from the recipe: {error}")
            images, classes = round(data.train_images * (1 - data.holdout)), data.num_classes
        with torch.device("meta"):
            fresh = {key: value for key, value in config.model.options.items() if key not in STARTING_POINTS}
            settings = config.model.model_copy(update={"pretrained": False, "options": fresh})
            model: Any = build_detector(settings, classes).train()
        return Facts(images, classes, model, _forward(model, data), notes)

    @staticmethod
    def network(card: dict[str, Any]) -> nn.Module:
        settings = ModelConfig.model_validate({**card["model"], "pretrained": False})
        return build_detector(settings, len(card["classes"]))

    def card(self) -> dict[str, Any]:
        model, data = self.config.model.model_dump(mode="json"), self.config.data
        model["options"] = {key: value for key, value in model["options"].items() if key not in STARTING_POINTS}
        return {
            "model": model,
            "classes": self.classes,
            "input": {"short_side": data.short_side, "long_side": data.long_side},
        }

    def match(self, classes: list[str]) -> None:
        """Evaluate a network of these classes, where the evaluation's are among them: by name, as in training."""
        if set(self.classes) <= set(classes) and len(set(classes)) == len(classes):
            self.labels = torch.tensor([classes.index(name) for name in self.classes])
            self.classes = classes

    def loss(self, model: nn.Module, batch: DetectionBatch, epoch: int) -> tuple[Tensor, dict[str, Tensor]]:
        self.left_out.tell(batch.bad)
        losses: dict[str, Tensor] = model(batch.images, batch.targets)
        total = torch.stack(list(losses.values())).sum()
        return total, {name: value.detach() for name, value in losses.items()}

    @torch.inference_mode()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        was_training = model.training
        model.eval()
        pairs: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
        for batch in self.evaluation.epoch(0):
            self.left_out.tell(batch.bad)
            # Images that only fill the batch up are detected in too: every process must call the model as often.
            for image, found, truth, valid in zip(
                batch.images, model(batch.images), batch.targets, batch.valid, strict=True
            ):
                if valid:
                    truth = {**truth, "labels": self.labels[truth["labels"]]}
                    pairs.append((on_file(found, image, truth["size"]), truth))
        model.train(was_training)
        if self.where.world > 1:
            pairs = gather_object(pairs)
        if not pairs:
            raise UserError("data.source: none of the evaluation's files is an image.")
        metrics = [self._metrics(pairs) if self.where.rank == 0 else {}]
        if self.where.world > 1:
            broadcast_object_list(metrics)
        return metrics[0]

    def _metrics(self, pairs: list[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> dict[str, float]:
        found, truth = zip(*pairs, strict=True)
        metrics = mean_average_precision(found, [{k: v for k, v in one.items() if k != "size"} for one in truth])
        return {"mAP": 0.0, **metrics, "images": float(len(pairs))}


CONFIG = DetectConfig
TASK = Detect
