"""Every recipe for detection: its keys, and one step of its own network and optimiser on two small scenes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nearsight import recipes
from nearsight.train.config import to_yaml
from nearsight.train.data.batches import Where
from nearsight.train.schedule import build_optimizer, learning_rates
from nearsight.train.tasks import build_task, config_from, load_config
from tests.support.scenes import scene, write_coco

DETECTORS = [name for name in recipes.names() if load_config(name).task == "detect"]
# The recipe's own network and steps, at a size for a CPU.
SMALL = ["data.long_side=64", "data.batch_size=1", "data.workers=0", "train.device=cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    scenes = [scene(seed) for seed in range(2)]
    return write_coco(tmp_path_factory.mktemp("coco"), scenes, scenes[:1])


@pytest.mark.parametrize("name", DETECTORS)
def test_builds_and_steps(name: str, folder: Path) -> None:
    config: Any = load_config(name)
    assert config_from(recipes.read_yaml(to_yaml(config), name), name) == config
    small = [*SMALL, f"data.source=coco:{folder}"]
    if config.data.augment.short_sides:
        small += ["data.augment.short_sides=[48, 64]", "data.short_side=64"]
    config = load_config(name, small)
    notes: list[str] = []
    task = build_task(config, Where(torch.device("cpu")), notes.append)
    assert notes == ["train: 2 images, 4 objects", "val: 1 image, 2 objects"]
    optimizer = build_optimizer(task.model, config.optimizer, 1)
    batch = next(task.train.epoch(0))
    loss, shown = task.loss(task.model.train(), batch, 0)
    loss.backward()
    assert torch.isfinite(loss)
    assert set(shown)
    wanted = {n for n, p in task.model.named_parameters() if p.requires_grad}
    assert {n for n, p in task.model.named_parameters() if p.grad is not None} == wanted
    optimizer.step()
    rates = [lr for _, lr in learning_rates(config, config.data.batch_size, steps_per_epoch=100)]
    assert max(rates) > rates[-1] >= 0
    assert min(rates) >= 0
