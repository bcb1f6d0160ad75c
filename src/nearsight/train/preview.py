"""What a run would do, without doing it: steps, images, learning rates, parameters, an estimate of its memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nearsight.errors import UserError
from nearsight.train.data.batches import Where, _count
from nearsight.train.data.sources import open_source
from nearsight.train.schedule import learning_rates, scaled_lr
from nearsight.train.tasks.classify import ClassifyConfig, create_network

__all__ = ["activation_bytes", "memory_estimate", "preview"]

# Moments an optimiser keeps per weight.
MOMENTS = {"sgd": 1, "momentum": 1, "lion": 1, "adamw": 2, "adam": 2, "lamb": 2}


def preview(config: ClassifyConfig, world: int = 1) -> dict[str, Any]:
    """The facts of a run, from its config and its data (or the sizes the recipe states, when the data is not here)."""
    data, notes = config.data, list[str]()
    try:
        source = open_source(data)
        images, classes = len(source.train), len(source.classes)
        images -= round(images * data.holdout)
    except UserError as error:
        if data.train_images is None or data.num_classes is None:
            raise
        notes.append(f"data not opened, sizes taken from the recipe: {error}")
        images, classes = round(data.train_images * (1 - data.holdout)), data.num_classes
    batches = _count(images, data.batch_size, Where(torch.device("cpu"), 0, world), training=True)
    steps = batches // config.train.accumulate
    batch = data.batch_size * world * config.train.accumulate
    with torch.device("meta"):
        model = create_network(
            config.model.model_copy(update={"pretrained": False}), num_classes=classes, in_chans=data.channels
        )
    total = steps * config.schedule.epochs
    return {
        "images_per_epoch": steps * batch,
        "classes": classes,
        "batch": batch,
        "processes": world,
        "steps_per_epoch": steps,
        "steps": total if config.train.max_steps is None else min(total, config.train.max_steps),
        "lr": scaled_lr(config.optimizer, batch),
        "lr_curve": learning_rates(config, batch, steps),
        "parameters": sum(p.numel() for p in model.parameters()),
        "memory_bytes": memory_estimate(model, config),
        "notes": notes,
    }


def memory_estimate(model: nn.Module, config: ClassifyConfig) -> dict[str, int | None]:
    """Bytes of weights, gradients, moments and averages, and of the activations a backward pass keeps for one micro-batch."""
    weights = sum(p.numel() * 4 for p in model.parameters())
    copies = 2 + MOMENTS.get(config.optimizer.name, 2) + (config.ema.decay is not None)
    data = config.data
    one = activation_bytes(model, (2, data.channels, data.image_size, data.image_size))
    half = 0.5 if config.train.precision != "fp32" else 1.0
    kept = None if one is None else round(one / 2 * data.batch_size * half)
    return {"weights_and_moments": weights * copies, "activations": kept}


def activation_bytes(model: nn.Module, shape: tuple[int, ...]) -> int | None:
    """Bytes saved for the backward pass of one input, counted on the meta device; None for a model that cannot run there."""
    seen: dict[int, int] = {}
    parameters = {id(p) for p in model.parameters()}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in parameters:
            seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            held.append(tensor)  # so that no other storage gets its address
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.train()(torch.zeros(shape, device="meta"))
    except (RuntimeError, NotImplementedError):
        return None
    return sum(seen.values())
