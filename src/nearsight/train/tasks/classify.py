"""Image classification: one label per image, cross-entropy, accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import timm
import timm.models
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from nearsight.errors import NearsightError, UserError, nearest
from nearsight.train.config import ModelConfig, RunConfig, Section, given
from nearsight.train.data.batches import Batch, Where, build_batches, example_images
from nearsight.train.data.config import DataConfig
from nearsight.train.data.images import LeftOut
from nearsight.train.data.sources import input_facts, open_source, sizes_without_data, split_source, training_images
from nearsight.train.tasks import Facts, Note

__all__ = ["CONFIG", "TASK", "Classify", "ClassifyConfig", "create_network", "finish_network", "refusals"]


class LossConfig(Section):
    name: Literal["cross_entropy", "bce"] = "cross_entropy"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    mixup: float = Field(default=0.0, ge=0, description="alpha of mixup's Beta distribution; 0: off")
    cutmix: float = Field(default=0.0, ge=0)
    mix_prob: float = Field(default=1.0, ge=0, le=1, description="share of batches mixed")
    switch_prob: float = Field(default=0.5, ge=0, le=1, description="share of CutMix when both are on")
    mix_off_epoch: int | None = Field(default=None, ge=0, description="no mixing from this epoch on")

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0


class ClassifyConfig(RunConfig):
    data: DataConfig
    loss: LossConfig = LossConfig()

    def faults(self) -> list[str]:
        found = super().faults() + self.data.faults()
        if self.loss.mixes and self.data.batch_size % 2:
            found.append(f"data.batch_size: got {self.data.batch_size} with mixing, wanted an even number")
        return found


def with_tag(config: ModelConfig) -> ModelConfig:
    """A name that asks for weights with the tag of those it gets: some tags stand for another network than the plain name.

    >>> with_tag(ModelConfig(name="resnet_nano", pretrained=True)).name, with_tag(ModelConfig(name="resnet_nano")).name
    ('resnet_nano.cifar10', 'resnet_nano')
    """
    known = timm.models.get_pretrained_cfg(config.name) if config.pretrained and "." not in config.name else None
    if known is None or not known.tag:
        return config
    return config.model_copy(update={"name": f"{config.name}.{known.tag}"})


def create_network(config: ModelConfig, **sizes: Any) -> nn.Module:
    """The timm model a config names, with its `num_classes` and `in_chans`, or a sentence."""
    if not timm.is_model(config.name.partition(".")[0]):
        near = nearest(config.name, timm.list_models())
        hint = f" Did you mean {near!r}?" if near else ""
        raise UserError(f"model.name: timm has no model {config.name!r}.{hint}")
    options = {**sizes, **given(config.options)}
    for key, size in sizes.items():
        if options[key] != size:
            raise UserError(
                f"model.options: got {key}={options[key]}, wanted {size}, as the data have it; leave it out."
            )
    if config.drop:
        options["drop_rate"] = config.drop
    if config.drop_path is not None:
        options["drop_path_rate"] = config.drop_path
    with refusals(config, options):
        model: nn.Module = timm.create_model(config.name, pretrained=config.pretrained, **options)
    return finish_network(model, config)


@contextmanager
def refusals(config: ModelConfig, options: Mapping[str, Any]) -> Iterator[None]:
    """A sentence instead of whatever a network, or the hub its weights are on, does about what it is asked for."""
    try:
        yield
    except NearsightError:
        raise
    except Exception as error:
        asked = {**options, "pretrained": True} if config.pretrained else dict(options)
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UserError(f"model: {config.name} cannot be built with {asked} ({reason}).") from error


@contextmanager
def shown(config: ClassifyConfig) -> Iterator[None]:
    """A sentence instead of what a network says about images it is not made for: their size, or too few at a time."""
    try:
        yield
    except NearsightError:
        raise
    except (AssertionError, ValueError) as error:
        size, batch = config.data.image_size, config.data.batch_size
        raise UserError(
            f"model: {config.model.name} cannot take data.batch_size={batch} images of {size}×{size} ({error}); "
            f"set data.image_size, data.batch_size or what it has for that in model.options."
        ) from error


def finish_network(model: nn.Module, config: ModelConfig) -> nn.Module:
    """The config's settings that are no arguments of a model: BatchNorm's decay, recomputation."""
    if config.bn_decay is not None:
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = 1 - config.bn_decay
    if config.grad_checkpointing:
        try:
            model.set_grad_checkpointing(True)  # type: ignore[operator]
        except (AttributeError, AssertionError) as error:
            raise UserError(f"model.grad_checkpointing: {config.name} does not offer it.") from error
    return model


class Classify:
    """The classification task of a config."""

    metric = "accuracy"
    larger_is_better = True

    def __init__(self, config: ClassifyConfig, where: Where, note: Note, *, evaluation_only: bool = False) -> None:
        self.config, self.where = config, where
        data = config.data
        source = open_source(data)
        self.source, self.classes = source, source.classes
        train, evaluation = split_source(source, data, config.train.seed, note if evaluation_only else None)
        shared: dict[str, Any] = {
            "seed": config.train.seed,
            "channels_last": config.model.channels_last,
            "note": note,
        }
        if not evaluation_only:
            self.train = build_batches(train, source, data, where, training=True, **shared)
        self.evaluation = build_batches(evaluation, source, data, where, training=False, **shared)
        self.model = create_network(config.model, **self.sizes())
        self.mixup = self._mixup()
        self.left_out = LeftOut(note)

    @staticmethod
    def facts(config: ClassifyConfig) -> Facts:
        data, notes = config.data, list[str]()
        try:
            source = open_source(data)
        except UserError as error:
            images, classes = sizes_without_data(data, error)
            if not (images and classes):
                raise
            notes.append(f"data not opened, sizes taken from the recipe: {error}")
        else:
            images, classes = training_images(source, data), len(source.classes)
        with torch.device("meta"):
            settings = with_tag(config.model).model_copy(update={"pretrained": False})
            model = create_network(settings, num_classes=classes, in_chans=data.channels)
            pixels = torch.zeros(2, data.channels, data.image_size, data.image_size)

        def forward() -> Any:
            with shown(config):
                return model.train()(pixels)

        return Facts(images, classes, model, forward, notes)

    @staticmethod
    def example(config: ClassifyConfig, device: torch.device) -> Tensor:
        """What the network is given in a training step, but for its values."""
        return example_images(config.data, config.model.channels_last, device)

    @staticmethod
    def network(card: dict[str, Any]) -> nn.Module:
        settings = ModelConfig.model_validate({**card["model"], "pretrained": False})
        return create_network(settings, **card["sizes"])

    def sizes(self) -> dict[str, int]:
        return {"num_classes": len(self.classes), "in_chans": self.config.data.channels}

    def _mixup(self) -> Any:
        loss = self.config.loss
        if not loss.mixes:
            return None
        from timm.data.mixup import Mixup

        return Mixup(
            mixup_alpha=loss.mixup,
            cutmix_alpha=loss.cutmix,
            prob=loss.mix_prob,
            switch_prob=loss.switch_prob,
            label_smoothing=loss.label_smoothing,
            num_classes=len(self.classes),
        )

    def card(self) -> dict[str, Any]:
        return {
            "model": with_tag(self.config.model).model_dump(mode="json"),
            "sizes": self.sizes(),
            "classes": self.classes,
            "input": input_facts(self.config.data, self.source),
        }

    def loss(self, model: nn.Module, batch: Batch, epoch: int) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config.loss
        self.left_out.tell(batch.bad)
        images, targets = batch.images, batch.targets
        smoothing = config.label_smoothing
        if self.mixup is not None and (config.mix_off_epoch is None or epoch < config.mix_off_epoch):
            images, targets = self.mixup(images, targets)
            smoothing = 0.0  # the mixed targets are smoothed already
        with shown(self.config):
            logits = model(images)
        if config.name == "bce":
            hot = targets if targets.dim() == 2 else F.one_hot(targets, logits.shape[1])
            hot = hot.to(logits.dtype) * (1 - smoothing) + smoothing / logits.shape[1]
            loss = F.binary_cross_entropy_with_logits(logits, hot)
        else:
            loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
        labels = targets.argmax(1) if targets.dim() == 2 else targets
        return loss, {"accuracy": (logits.detach().argmax(1) == labels).float().mean()}

    @torch.inference_mode()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        from torchmetrics import MeanMetric, SumMetric
        from torchmetrics.classification import MulticlassAccuracy

        device, count = self.where.device, len(self.classes)

        def accuracy(top: int) -> Any:
            return MulticlassAccuracy(count, top_k=top, average="micro", validate_args=False).to(device)

        metrics = {"accuracy": accuracy(1), **({"top5": accuracy(5)} if count > 10 else {})}
        mean_loss, images = MeanMetric().to(device), SumMetric().to(device)
        was_training = model.training
        model.eval()
        for batch in self.evaluation.epoch(0):
            self.left_out.tell(batch.bad)
            with shown(self.config):
                logits, targets = model(batch.images).float(), batch.targets
            if batch.valid is not None:
                logits, targets = logits[batch.valid], targets[batch.valid]
            images.update(len(targets))
            if len(targets):
                mean_loss.update(F.cross_entropy(logits, targets, reduction="none"))
                for metric in metrics.values():
                    metric.update(logits, targets)
        model.train(was_training)
        return {
            **{name: float(metric.compute()) for name, metric in metrics.items()},
            "loss": float(mean_loss.compute()),
            "images": float(images.compute()),
        }


CONFIG = ClassifyConfig
TASK = Classify
