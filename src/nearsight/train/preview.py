"""What a run would do, without doing it: steps, images, learning rates, parameters, an estimate of its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nearsight.ops.triton_support import planned_for_gpus
from nearsight.train.config import RunConfig
from nearsight.train.data.batches import Where, count_batches
from nearsight.train.schedule import learning_rates, scaled_lr
from nearsight.train.tasks import task_class

__all__ = ["activation_bytes", "memory_estimate", "preview"]

# Moments an optimiser keeps per weight.
MOMENTS = {"sgd": 1, "momentum": 1, "lion": 1, "muon": 1, "nmuon": 1, "adamw": 2, "adam": 2, "lamb": 2}


def preview(config: Any, world: int = 1) -> dict[str, Any]:
    """The facts of a run, from its config and its data (or the sizes the recipe states, when the data is not here)."""
    images, classes, model, forward, notes = task_class(config.task).facts(config)
    size, accumulate = config.data.batch_size, config.train.accumulate
    steps = count_batches(images, size, Where(torch.device("cpu"), 0, world), training=True) // accumulate
    batch = size * world * accumulate
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
        "memory_bytes": memory_estimate(model, forward, config, size),
        "notes": notes,
    }


def memory_estimate(
    model: nn.Module, forward: Callable[[], Any] | None, config: RunConfig, batch: int
) -> dict[str, int | None]:
    """Bytes of weights, gradients, moments and averages, and of the activations a backward pass keeps for one micro-batch: by
    torch's own operators, as on a CPU, and with the kernels for GPUs.

    `forward` runs the model on two images, on the meta device.
    """
    weights = sum(p.numel() * 4 for p in model.parameters())
    copies = 2 + MOMENTS.get(config.optimizer.name, 2) + (config.ema.decay is not None)
    half = 0.5 if config.train.precision != "fp32" else 1.0

    def kept() -> int | None:
        two = None if forward is None else activation_bytes(model, forward)
        return None if two is None else round(two / 2 * batch * half)

    with planned_for_gpus():
        by_kernels = kept()
    return {"weights_and_moments": weights * copies, "activations": kept(), "activations_with_kernels": by_kernels}


def activation_bytes(model: nn.Module, forward: Callable[[], Any]) -> int | None:
    """Bytes saved for the backward pass, counted on the meta device; None for a model that cannot run there."""
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
            forward()
    except (RuntimeError, NotImplementedError):
        return None
    return sum(seen.values())
