"""A run killed at any moment and resumed ends with the same bits as one that was left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nearsight.errors import UserError
from nearsight.train import checkpoints
from nearsight.train.config import RunConfig
from nearsight.train.engine import fit
from nearsight.train.log import read_log
from tests.train.support import small, start, train

FILES = ("model", "ema", "optimizer", "random")


def exact(**sections: Any) -> RunConfig:
    """Parameter groups of their own rate belong to what must come back."""
    return small(optimizer={"lr_scale": {"fc.*": 2.0}}, **sections)


def last_bytes(run: Path) -> dict[str, bytes]:
    folder = checkpoints.listed(run)[-1]
    assert folder.name == "step-00000008"
    return {name: (folder / f"{name}.safetensors").read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: Any) -> dict[str, bytes]:
    run = tmp_path_factory.mktemp("straight") / "run"
    assert train(exact(), run) == 0
    return last_bytes(run)


def resume_to_the_end(config: RunConfig, run: Path) -> dict[str, bytes]:
    resume = run if checkpoints.listed(run) else None
    assert train(config, run, resume=resume) == 0
    return last_bytes(run)


# Step 2 dies before the first checkpoint, 3 right at it, 7 between two.
@pytest.mark.parametrize("step", [2, 3, 7])
def test_killed_at_a_step(straight: dict[str, bytes], tmp_path: Path, step: int) -> None:
    assert train(exact(), tmp_path / "run", die_at=step) == -signal.SIGKILL
    assert resume_to_the_end(exact(), tmp_path / "run") == straight
    # What a run had written after the checkpoint it goes on from is written once.
    assert [row["step"] for row in read_log(tmp_path / "run") if row["kind"] == "train"] == [2, 4, 6, 8]


# Five files make a checkpoint; the second one of the run dies in its model file, its optimiser file, its state.
@pytest.mark.parametrize("file", [6, 10])
def test_killed_while_writing(straight: dict[str, bytes], tmp_path: Path, file: int) -> None:
    run = tmp_path / "run"
    assert train(exact(), run, die_writing=file) == -signal.SIGKILL
    assert [path.name for path in checkpoints.listed(run)] == ["step-00000003"]
    assert any(path.name.startswith(checkpoints.PARTIAL) for path in (run / checkpoints.FOLDER).iterdir())
    assert resume_to_the_end(exact(), run) == straight
    assert not any(path.name.startswith(checkpoints.PARTIAL) for path in (run / checkpoints.FOLDER).iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_cleanly(straight: dict[str, bytes], tmp_path: Path, number: int) -> None:
    run = tmp_path / "run"
    assert train(exact(), run, stop_at=4, signal=number) == 128 + number
    assert checkpoints.listed(run)[-1].name == "step-00000004"
    assert resume_to_the_end(exact(), run) == straight
    steps = [row["step"] for row in read_log(run) if row["kind"] == "train"]
    assert steps == [2, 4, 6, 8]  # each once, that of the checkpoint too


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_to_the_whole_group_leaves_the_workers_alone(tmp_path: Path, number: int) -> None:
    """As Ctrl-C in a terminal, `timeout` and job schedulers send it: to the run and to its data workers."""
    run = tmp_path / "run"
    keys = ["data.on_device=false", "data.workers=2", "schedule.epochs=1000", "log.every=1", "train.device=cpu"]
    command = [sys.executable, "-m", "nearsight", "train", "digits/conv_nano", *keys, "--out", str(run)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        log = run / "log.jsonl"
        while process.poll() is None and (not log.is_file() or '"step": 3' not in log.read_text()):
            time.sleep(0.1)
        os.killpg(process.pid, number)
        _, said = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert "Traceback" not in said.decode()
    assert f"stopped by {signal.Signals(number).name} after step" in " ".join(said.decode().split())
    assert checkpoints.listed(run)


def test_a_run_has_one_process_at_a_time(tmp_path: Path) -> None:
    """A second one would write the same files: it is refused, and the first one's are left alone."""
    first = start(small(train={"max_steps": 4000}, schedule={"epochs": 400}), tmp_path)
    while not checkpoints.listed(tmp_path):
        assert first.is_alive()
        time.sleep(0.05)
    with pytest.raises(UserError, match="is in training in another process; wait for its end or stop it, or name"):
        fit(small(train={"max_steps": 9}), tmp_path, resume=tmp_path, quiet=True)
    assert "max_steps: 4000" in (tmp_path / "config.yaml").read_text()
    first.kill()
    first.join()
    more = checkpoints.find(tmp_path, "last").step + 1
    assert train(small(train={"max_steps": more}), tmp_path, resume=tmp_path) == 0


def test_loader_path_and_accumulation_resume_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    config = exact(
        data={"on_device": False, "batch_size": 32, "augment": {"auto": "rand-m3-n1"}}, train={"accumulate": 2}
    )
    assert train(config, tmp_path / "a") == 0
    assert train(config, tmp_path / "b", die_at=5) == -signal.SIGKILL
    assert resume_to_the_end(config, tmp_path / "b") == last_bytes(tmp_path / "a")


@pytest.mark.slow
def test_killed_again_and_again(tmp_path: Path) -> None:
    config = exact(train={"max_steps": 40}, schedule={"epochs": 3}, checkpoint={"every_steps": 4, "keep": 1})
    assert train(config, tmp_path / "a") == 0
    wanted = {p.name: p.read_bytes() for p in checkpoints.listed(tmp_path / "a")[-1].glob("*.safetensors")}
    for seed in range(4):
        dice, run = random.Random(seed), tmp_path / f"b{seed}"
        for _ in range(6):
            resume = run if checkpoints.listed(run) else None
            done = checkpoints.open_checkpoint(checkpoints.listed(run)[-1]).step if resume else 0
            how = {"die_at": done + dice.randint(1, 9)} if dice.random() < 0.5 else {"die_writing": dice.randint(1, 15)}
            if train(config, run, resume=resume, **how) == 0:
                break
        else:
            assert train(config, run, resume=run) == 0
        assert {p.name: p.read_bytes() for p in checkpoints.listed(run)[-1].glob("*.safetensors")} == wanted
