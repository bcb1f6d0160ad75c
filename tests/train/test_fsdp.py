"""A network sharded by Accelerate's FSDP, in the engine: the losses of DDP, evaluation on the way, exact resume."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nearsight.train import checkpoints, state
from nearsight.train.config import merge
from nearsight.train.log import read_log
from nearsight.train.tasks import config_from
from tests.train.support import _together, small
from tests.train.test_distributed import SAME

# Two steps an epoch, so that training goes on after an evaluation; weights that DDP would make channels-last.
KEYS = merge(
    SAME,
    {
        "model": {"channels_last": True},
        "data": {"batch_size": 256, "eval_batch_size": 100},
        "schedule": {"epochs": 3},
        "optimizer": {"lr": 1e-3, "base_batch": None},
        "train": {"max_steps": 5},
    },
)


def _child(run: str, keys: dict[str, Any], sharded: bool, resume: bool, env: dict[str, str]) -> None:
    os.environ.update(env)
    torch.set_num_threads(1)
    from nearsight.train import engine

    if sharded:
        # What `accelerate launch --use_fsdp` sets up, which Accelerate offers on GPUs only.
        from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

        plain = engine.make_accelerator

        def make(config: Any) -> Any:
            accelerator = plain(config)
            accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                cpu_ram_efficient_loading=False,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["QnABlock"],
            )
            accelerator.state.distributed_type = DistributedType.FSDP
            return accelerator

        engine.make_accelerator = make
    engine.fit(config_from(keys, "test"), run, quiet=True, resume=run if resume else None)


def launch(run: Path, *, sharded: bool, resume: bool = False, **sections: Any) -> None:
    keys = small(**merge(KEYS, sections)).model_dump(mode="json")
    assert _together(_child, (str(run), keys, sharded, resume), 2) == [0, 0]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_log(run) if row["kind"] in ("train", "eval")]


@pytest.mark.slow
def test_sharded_runs_learn_what_others_do_and_resume_exactly(tmp_path: Path) -> None:
    launch(tmp_path / "plain", sharded=False)
    launch(tmp_path / "whole", sharded=True)
    assert len(losses(tmp_path / "whole")) == 8
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
    launch(tmp_path / "broken", sharded=True, train={"max_steps": 3})
    launch(tmp_path / "broken", sharded=True, resume=True)
    ends = [checkpoints.listed(tmp_path / name)[-1] for name in ("whole", "broken")]
    assert [path.name for path in ends] == ["step-00000005"] * 2
    for name in ("model", "optimizer"):
        first, second = (checkpoints.open_checkpoint(path).tensors(name) for path in ends)
        assert first.keys() == second.keys()
        assert [key for key in first if not torch.equal(first[key], second[key])] == []
    # A checkpoint does not say who wrote it: the one of two plain processes goes on sharded.
    launch(tmp_path / "changed", sharded=False, train={"max_steps": 3})
    launch(tmp_path / "changed", sharded=True, resume=True)
    assert losses(tmp_path / "changed")[-3:] == pytest.approx(losses(tmp_path / "plain")[-3:], rel=1e-4)


def test_tensors_are_loaded_in_the_models_order(monkeypatch: Any) -> None:
    """A sharded network scatters them one by one: an order of each process's own would mix them up."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tensors, (moments, values) = state.model_state(model), state.optimizer_state(model, optimizer)
    seen: dict[str, list[str]] = {}
    monkeypatch.setattr(state, "set_model_state_dict", lambda m, given, options: seen.update(model=list(given)))
    monkeypatch.setattr(
        state, "set_optimizer_state_dict", lambda m, o, given, options: seen.update(optimizer=list(given["state"]))
    )
    state.load_model(model, dict(reversed(tensors.items())), "test")
    state.load_optimizer(model, optimizer, dict(reversed(moments.items())), values)
    assert seen == {"model": list(model.state_dict()), "optimizer": sorted(model.state_dict())}
