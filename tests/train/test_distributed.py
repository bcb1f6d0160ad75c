"""Several gloo processes on a CPU: the run of one process with the whole batch, and rank 0 alone writes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from nearsight.ops import native_support
from nearsight.train import checkpoints
from nearsight.train.inference import evaluate
from nearsight.train.log import read_log
from tests.train.data.support import shards
from tests.train.support import processes, sharded, small, train

# Without BatchNorm, drop path and mixing, the two runs differ by the order of additions alone.
SAME: dict[str, Any] = {
    "model": {"name": "qna_vit_nano", "drop_path": None},
    "loss": {"label_smoothing": 0.1, "mixup": 0.0},
    "data": {"augment": {"crop": "pad", "pad": 1, "cutout": 2, "erase": 0.3}, "eval_batch_size": 64},
    "ema": {"decay": None},
    "optimizer": {"lr": 3e-3, "base_batch": 64},
    "train": {"max_steps": 6, "clip": 1.0},
    "log": {"every": 1},
}


def rows(run: Path, kind: str, key: str) -> list[float]:
    return [row[key] for row in read_log(run) if row["kind"] == kind]


def final(run: Path) -> dict[str, torch.Tensor]:
    return checkpoints.open_checkpoint(checkpoints.listed(run)[-1]).tensors("model")


def config(batch: int, **train_keys: Any) -> Any:
    from nearsight.train.config import merge

    return small(**merge(SAME, {"data": {"batch_size": batch}, "train": train_keys}))


def test_two_processes_learn_what_one_with_twice_the_batch_does(tmp_path: Path) -> None:
    # QnA's C loop takes other code for smaller calls, and AdamW makes 5e-5 of a rounding where a gradient is nearly 0.
    plain = {native_support.SWITCH: "0"}
    assert train(config(64), tmp_path / "one", env=plain) == 0
    assert processes(config(32), tmp_path / "two", 2, env=plain) == [0, 0]
    one, two = tmp_path / "one", tmp_path / "two"
    for name, tensor in final(one).items():
        torch.testing.assert_close(final(two)[name], tensor, rtol=1e-4, atol=2e-5)
    # Every evaluation image counted once, by whichever process: 450 does not divide by 2 × 64.
    assert rows(two, "eval", "images") == rows(one, "eval", "images") == [450]
    assert rows(two, "eval", "accuracy") == rows(one, "eval", "accuracy")
    assert rows(two, "eval", "loss") == pytest.approx(rows(one, "eval", "loss"), rel=1e-4)
    assert rows(two, "train", "loss") == pytest.approx(rows(one, "train", "loss"), rel=1e-4)
    # Linear scaling: the same images per step, the same learning rate.
    assert rows(two, "train", "lr") == rows(one, "train", "lr")
    assert sorted(p.name for p in two.iterdir()) == sorted(p.name for p in one.iterdir())


def test_two_processes_resume_exactly(tmp_path: Path) -> None:
    keys = {"model": {"drop_path": 0.2}, "loss": {"mixup": 0.2}, "train": {"max_steps": 5}, "data": {"batch_size": 32}}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    from nearsight.train.config import merge

    wanted = small(**merge(SAME, keys))
    assert processes(wanted, whole, 2) == [0, 0]
    assert processes(wanted, broken, 2, die_at=4) == [-signal.SIGKILL] * 2
    assert checkpoints.listed(broken)[-1].name == "step-00000003"
    assert processes(wanted, broken, 2, resume=str(broken)) == [0, 0]
    for name in ("model", "optimizer", "random"):
        file = f"{checkpoints.FOLDER}/step-00000005/{name}.safetensors"
        assert (broken / file).read_bytes() == (whole / file).read_bytes(), name
    drawn = checkpoints.open_checkpoint(checkpoints.listed(whole)[-1]).tensors("random")
    for name in ("torch", "numpy", "python"):  # each process its own dropout and mixing
        assert not torch.equal(drawn[f"0.{name}"], drawn[f"1.{name}"]), name


def test_a_sharded_network_is_saved_whole_and_resumed(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    assert sharded(tmp_path) == [0, 0]
    resumed, whole = (load_file(tmp_path / f"{name}.safetensors") for name in ("resumed", "whole"))
    assert resumed.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-5, atol=1e-6)


def test_streamed_evaluation_takes_each_image_once(tmp_path: Path) -> None:
    """One shard for two processes: one of them has all the images, the other takes part with none."""
    pytest.importorskip("webdataset")
    shards(tmp_path, {"train": [40, 40], "validation": [9]})
    keys = {"source": "wds/x", "root": str(tmp_path), "num_classes": 2, "batch_size": 8, "eval_batch_size": 3}
    run = tmp_path / "run"
    assert processes(small(data=keys, train={"max_steps": 2}), run, 2) == [0, 0]
    assert rows(run, "eval", "images") == [9]
    alone = evaluate(run, average=False, device="cpu")
    assert rows(run, "eval", "loss") == pytest.approx([alone["loss"]], rel=1e-4)
    assert rows(run, "plan", "epoch_steps") == [80 // (2 * 8)]


@pytest.mark.slow
def test_torchrun_runs_the_same_command(tmp_path: Path) -> None:
    import subprocess
    import sys

    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    words = [
        "nearsight",
        "train",
        "digits/qna_nano",
        "train.max_steps=3",
        "train.device=cpu",
        "--out",
        str(tmp_path),
        "--json",
    ]
    done = subprocess.run([*launcher, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"step": 3') == 1
    assert checkpoints.open_checkpoint(checkpoints.listed(tmp_path)[-1]).state["world"] == 2
