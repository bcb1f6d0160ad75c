"""Small runs, and runs in processes of their own: started from a fork server that has imported everything already."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from pathlib import Path
from typing import Any

from nearsight.train.config import RunConfig
from nearsight.train.tasks import config_from

# A network without BatchNorm would hide a lost buffer; this one has both, and drop path.
NETWORK = "test_resnet"
SMALL: dict[str, Any] = {
    "model": {"name": NETWORK, "drop_path": 0.1},
    "data": {
        "source": "digits",
        "image_size": 8,
        "channels": 1,
        "batch_size": 64,
        "workers": 0,
        "augment": {"crop": "pad", "pad": 1, "cutout": 2, "erase": 0.3},
    },
    "loss": {"label_smoothing": 0.1, "mixup": 0.2},
    "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.05},
    "schedule": {"epochs": 1},
    "ema": {"decay": 0.9},
    "train": {"seed": 3, "deterministic": True, "device": "cpu", "max_steps": 8},
    "checkpoint": {"every_steps": 3},
    "log": {"every": 2, "tensorboard": False},
}


def small(**sections: Any) -> RunConfig:
    """The small config with keys of some sections replaced: `small(train={"seed": 1})`."""
    from nearsight.train.config import merge

    return config_from(merge(SMALL, sections), "test")


def _child(keys: dict[str, Any], run: str, options: dict[str, Any], env: dict[str, str]) -> None:
    os.environ.update(env | options.get("env", {}))
    if options.get("group"):
        os.setpgid(0, 0)
    import torch

    torch.set_num_threads(1)
    from nearsight.train import checkpoints
    from nearsight.train.engine import Stopped, fit

    die_at, die_writing, stop_at = (options.get(key) for key in ("die_at", "die_writing", "stop_at"))

    def on_step(trainer: Any) -> None:
        if trainer.place.step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.place.step == stop_at:
            number = options.get("signal", signal.SIGTERM)
            os.killpg(0, number) if options.get("group") else os.kill(os.getpid(), number)

    if die_writing is not None:
        plain, written = checkpoints._write_bytes, [0]

        def write(path: Path, data: bytes) -> None:
            written[0] += 1
            if written[0] == die_writing:
                plain(path, data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            plain(path, data)

        checkpoints._write_bytes = write
    try:
        fit(config_from(keys, "test"), run, resume=options.get("resume"), quiet=True, on_step=on_step)
    except Stopped as stopped:
        os._exit(128 + stopped.number)


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["nearsight.train.engine", "torchmetrics.classification", "sklearn.datasets", "timm"]
    )
    return context


def start(config: RunConfig, run: Path, **options: Any) -> Any:
    """A run in a child process. Options: resume, die_at=step, die_writing=file number, stop_at=step, signal, group (its
    process group gets the signal, workers too), env (the child's; it does not see what changes in the parent's)."""
    process = _context().Process(target=_child, args=(config.model_dump(mode="json"), str(run), options, {}))
    process.start()
    return process


def finish(process: Any, seconds: float = 120) -> int:
    """The child's exit code: negative when a signal killed it."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError("the run did not end")
    return int(process.exitcode)


def train(config: RunConfig, run: Path, **options: Any) -> int:
    return finish(start(config, run, **options))


def processes(config: RunConfig, run: Path, world: int, **options: Any) -> list[int]:
    """The same run on several gloo processes; their exit codes."""
    return _together(_child, (config.model_dump(mode="json"), str(run), options), world)


def _together(target: Any, args: tuple[Any, ...], world: int) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(world):
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        process = _context().Process(target=target, args=(*args, env))
        process.start()
        started.append(process)
    return [finish(process) for process in started]


def shard_child(folder: str, env: dict[str, str]) -> None:
    """Two steps of a sharded network (FSDP2), its state gathered, written, and loaded into a fresh sharded network."""
    os.environ.update(env)
    import torch
    from safetensors.torch import save_file
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from nearsight.train import state

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()

    def build(sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
        if sharded:
            fully_shard(model[0])
            fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = build(True)
    steps(model, optimizer, range(2))
    assert isinstance(next(model.parameters()), DTensor)
    weights, (moments, values) = state.model_state(model), state.optimizer_state(model, optimizer)
    shared = [weights, moments, values]
    torch.distributed.broadcast_object_list(shared)
    weights, moments, values = shared
    again, other = build(True)
    state.load_model(again, weights, "test")
    state.load_optimizer(again, other, moments, values)
    steps(again, other, range(2, 3))
    resumed = state.model_state(again)
    if rank == 0:
        whole, plain = build(False)
        steps(whole, plain, range(3))
        save_file({f"resumed.{k}": v for k, v in resumed.items()}, f"{folder}/resumed.safetensors")
        save_file({f"resumed.{k}": v for k, v in whole.state_dict().items()}, f"{folder}/whole.safetensors")
    torch.distributed.barrier()


def sharded(folder: Path) -> list[int]:
    """The exit codes of `shard_child` on two processes."""
    return _together(shard_child, (str(folder),), 2)
