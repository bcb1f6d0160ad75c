"""Tasks: one file each. A task owns data, model, loss and metrics; the engine knows nothing else of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from nearsight import recipes
from nearsight.errors import UserError, nearest
from nearsight.train.config import RunConfig, merge, parse_override, validate
from nearsight.train.data.batches import Batches, Where

__all__ = ["TASKS", "Facts", "Note", "Task", "build_task", "config_from", "load_config", "task_class"]

Note = Callable[[str], None]

# A new task is one line here: its module has `CONFIG` (a RunConfig class) and `TASK` (a Task class).
TASKS: Mapping[str, str] = {
    "classify": "nearsight.train.tasks.classify",
    "detect": "nearsight.train.tasks.detect",
    "reconstruct": "nearsight.train.tasks.reconstruct",
}


class Facts(NamedTuple):
    """What `--dry-run` asks of a task: its training images, its classes (None: it has none), its network on the meta device.

    `forward` runs the network on two images there, for an estimate of its memory; None where it cannot.
    """

    images: int
    classes: int | None
    model: nn.Module
    forward: Callable[[], Any] | None
    notes: list[str]


class Task(Protocol):
    """What the engine asks of a task; built by `TASK(config, where, note, evaluation_only=False)`.

    Where all training batches have one shape, a static `example(config, device)` gives what the network is given in a step,
    but for its values; blocks are compiled ahead with it.
    A `match(classes)` is told whose classes are evaluated, where the data may list them otherwise than a network's card.
    """

    config: Any
    model: nn.Module
    train: Batches
    metric: str
    larger_is_better: bool

    @staticmethod
    def facts(config: Any) -> Facts:
        """What a run would train on, without its data in memory."""
        ...

    @staticmethod
    def network(card: dict[str, Any]) -> nn.Module:
        """The model of a card, without its weights."""
        ...

    def card(self) -> dict[str, Any]:
        """Plain values from which `network` rebuilds the model without the data."""
        ...

    def loss(self, model: nn.Module, batch: Any, epoch: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a training batch, and what the progress bar shows beside it."""
        ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics over the evaluation split, reduced over the processes."""
        ...


def _module(task: Any) -> Any:
    if not isinstance(task, str) or task not in TASKS:
        near = nearest(str(task), TASKS)
        hint = f" Did you mean {near!r}?" if near else ""
        raise UserError(f"task: got {task!r}, wanted one of {', '.join(TASKS)}.{hint}")
    return importlib.import_module(TASKS[task])


def config_from(keys: Mapping[str, Any], name: str, known: Collection[str] | None = ()) -> RunConfig:
    """The typed config of whichever task the keys name; `known` as in `validate`."""
    config: RunConfig = validate(_module(keys.get("task", "classify")).CONFIG, keys, name, known)
    return config


def load_config(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a recipe (a shipped name or a YAML file) with `key=value` overrides.

    >>> load_config("digits/conv_nano", ["schedule.epochs=3"]).schedule.epochs
    3
    """
    keys = recipes.resolve(recipe).keys
    for override in overrides:
        keys = merge(keys, parse_override(override))
    return config_from(keys, recipe)


def task_class(name: str) -> Any:
    """The Task class of that name.

    >>> task_class("classify").metric
    'accuracy'
    """
    return _module(name).TASK


def build_task(config: RunConfig, where: Where, note: Note, *, evaluation_only: bool = False) -> Task:
    """Data and model of a config, on this process's device; `evaluation_only` leaves the training batches out."""
    task: Task = task_class(config.task)(config, where, note, evaluation_only=evaluation_only)
    return task
