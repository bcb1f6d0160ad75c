"""Optimiser and learning rate from the config: timm's, plus a cosine that restarts at given epochs.

Schedules count steps. They stay outside `accelerator.prepare`, which would step them once per process.
"""

from __future__ import annotations

import bisect
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.optim._optim_factory import create_optimizer_v2, list_optimizers
from timm.scheduler.cosine_lr import CosineLRScheduler
from timm.scheduler.multistep_lr import MultiStepLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import nn

from nearsight.errors import UserError, nearest
from nearsight.train.config import OptimizerConfig, RunConfig, ScheduleConfig, given

__all__ = ["RestartScheduler", "build_optimizer", "build_schedule", "learning_rates", "scaled_lr"]


REFUSED = {"adahessian": "needs gradients of gradients", "kron": "keeps what no checkpoint here holds"}


class RestartScheduler(Scheduler):
    """Linear warm-up, then a cosine from lr to `min_lr` between restarts, all in steps.

    lr(t) = min + ½ (lr − min)(1 + cos(π (t − a)/(b − a))) for a ≤ t < b, neighbours in [warm-up, *restarts, end]; from the
    last restart on `tail_lr`, if given.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total: int,
        restarts: Sequence[int],
        warmup: int = 0,
        warmup_lr: float = 0.0,
        min_lr: float = 0.0,
        tail_lr: float | None = None,
    ) -> None:
        super().__init__(optimizer, param_group_field="lr", t_in_epochs=False)
        self.edges = [warmup, *restarts]
        self.total, self.warmup, self.warmup_lr, self.min_lr, self.tail_lr = total, warmup, warmup_lr, min_lr, tail_lr
        self.update_groups(self._get_lr(0))

    def _get_lr(self, t: int) -> list[float]:
        if t < self.warmup:
            return [self.warmup_lr + (lr - self.warmup_lr) * t / self.warmup for lr in self.base_values]
        cycle = bisect.bisect_right(self.edges, t) - 1
        start = self.edges[cycle]
        if cycle == len(self.edges) - 1 and self.tail_lr is not None:
            return [self.tail_lr for _ in self.base_values]
        end = self.edges[cycle + 1] if cycle + 1 < len(self.edges) else max(self.total, start + 1)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, (t - start) / (end - start))))
        return [self.min_lr + (lr - self.min_lr) * share for lr in self.base_values]


def scaled_lr(optimizer: OptimizerConfig, batch: int) -> float:
    """The learning rate for a batch over all processes and micro-batches: lr · batch / base_batch.

    >>> scaled_lr(OptimizerConfig(lr=0.1, base_batch=256), 512)
    0.2
    """
    return optimizer.lr if optimizer.base_batch is None else optimizer.lr * batch / optimizer.base_batch


def build_optimizer(model: nn.Module, config: OptimizerConfig, batch: int) -> torch.optim.Optimizer:
    """timm's optimiser of that name; weight decay skips biases and norms unless `decay_1d`."""
    known = [str(name) for name in list_optimizers()]
    if config.name not in known:
        near = nearest(config.name, known)
        raise UserError(
            f"optimizer.name: got {config.name!r}, wanted one of timm's" + (f", e.g. {near}." if near else ".")
        )
    for name, why in REFUSED.items():
        if config.name.startswith(name):
            raise UserError(f"optimizer.name: got {config.name!r}, which {why}; wanted another of timm's, e.g. adamw.")
    try:
        optimizer = create_optimizer_v2(
            model,
            opt=config.name,
            lr=scaled_lr(config, batch),
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            filter_bias_and_bn=not config.decay_1d,
            layer_decay=config.layer_decay,
            **given(config.options),
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"optimizer.options: {config.name} refuses {given(config.options)} ({error}).") from error
    _scale_groups(model, optimizer, "lr_scale", config.lr_scale)
    _scale_groups(model, optimizer, "decay_scale", config.decay_scale)
    return optimizer


def _scale_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer, option: str, factors: Mapping[str, float | None]
) -> None:
    """Give parameters whose names match a pattern a group of their own, with a factor on its decay or `lr_scale`.

    timm's schedules multiply `lr_scale` in at every step; the decay of a group stays what it is here.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decays = any(group["weight_decay"] for group in optimizer.param_groups)
    for pattern, factor in factors.items():
        if factor is None:
            continue
        matched = {key for key, name in names.items() if fnmatch.fnmatchcase(name, pattern)}
        if not matched:
            near = nearest(pattern, names.values())
            raise UserError(
                f"optimizer.{option}: {pattern!r} matches no parameter" + (f"; one is {near}." if near else ".")
            )
        touched = [g for g in optimizer.param_groups if any(id(p) in matched for p in g["params"])]
        if option == "decay_scale" and factor and decays and not any(g["weight_decay"] for g in touched):
            raise UserError(
                f"optimizer.decay_scale: {pattern!r} matches only parameters without weight decay, which a factor leaves at 0; "
                "leave it out, or see optimizer.decay_1d."
            )
        for group in list(optimizer.param_groups):
            moved = [p for p in group["params"] if id(p) in matched]
            if not moved:
                continue
            changed = (
                {"lr_scale": group.get("lr_scale", 1.0) * factor}
                if option == "lr_scale"
                else {"weight_decay": group["weight_decay"] * factor}
            )
            scaled = {**group, "params": moved, **changed}
            group["params"] = [p for p in group["params"] if id(p) not in matched]
            if group["params"]:
                optimizer.param_groups.append(scaled)
            else:
                group.update(scaled)


def build_schedule(
    optimizer: torch.optim.Optimizer, config: ScheduleConfig, steps_per_epoch: int, total: int | None = None
) -> Scheduler:
    """A timm scheduler that counts steps: call `step_update(steps done)` after each."""
    total = config.epochs * steps_per_epoch if total is None else total
    warmup = round(config.warmup_epochs * steps_per_epoch)
    warm: dict[str, Any] = {"warmup_t": warmup, "warmup_lr_init": config.warmup_lr, "t_in_epochs": False}
    if config.name == "restarts":
        return RestartScheduler(
            optimizer,
            total,
            [epoch * steps_per_epoch for epoch in config.restarts],
            warmup,
            config.warmup_lr,
            config.min_lr,
            config.tail_lr,
        )
    if config.name == "cosine":
        return CosineLRScheduler(
            optimizer, t_initial=max(1, total - warmup), lr_min=config.min_lr, warmup_prefix=True, **warm
        )
    # timm multiplies one step before each, and would count from the end of the warm-up.
    milestones = [m * steps_per_epoch + 1 for m in config.milestones] if config.name == "step" else []
    return MultiStepLRScheduler(optimizer, decay_t=milestones, decay_rate=config.gamma, warmup_prefix=False, **warm)


def learning_rates(config: RunConfig, batch: int, steps_per_epoch: int, points: int = 60) -> list[tuple[int, float]]:
    """(step, lr) along a run, at most `points` of them, for a picture of the schedule."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer: Any = torch.optim.SGD([parameter], lr=scaled_lr(config.optimizer, batch))
    schedule = build_schedule(optimizer, config.schedule, steps_per_epoch)
    total = min(config.schedule.epochs * steps_per_epoch, config.train.max_steps or math.inf)
    curve = []
    for step in sorted({round(i * (total - 1) / max(1, points - 1)) for i in range(points)}):
        schedule.step_update(step)
        curve.append((step, optimizer.param_groups[0]["lr"]))
    return curve
