"""The loop: what it writes, what it does about trouble, and that its options change what they say."""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import random
import re
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nearsight.errors import UserError
from nearsight.train import checkpoints, engine, process, state
from nearsight.train.config import OptimizerConfig
from nearsight.train.data.batches import Where
from nearsight.train.engine import Trainer, fit
from nearsight.train.log import Reporter, read_log
from nearsight.train.replay import ReplayedUpdate
from nearsight.train.schedule import build_optimizer
from tests.train.support import small

DONE = SimpleNamespace(close=lambda: None)
PLAIN: dict[str, Any] = {
    "data": {"augment": {"crop": "none", "cutout": 0, "erase": 0}},
    "loss": {"label_smoothing": 0.0, "mixup": 0.0},
    "model": {"name": "test_vit2", "drop_path": None, "options": {"img_size": 16, "patch_size": 4}},
    "ema": {"decay": None},
}


def plain(**sections: Any) -> Any:
    from nearsight.train.config import merge

    return small(**merge(merge(PLAIN, {"data": {"image_size": 16}}), sections))


def weights(run: Path, name: str = "model") -> dict[str, torch.Tensor]:
    return checkpoints.open_checkpoint(checkpoints.listed(run)[-1]).tensors(name)


def test_what_a_run_leaves(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = fit(small(log={"tensorboard": True}), run, quiet=True)
    assert sorted(p.name for p in run.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "log.jsonl",
        "summary.json",
        "tensorboard",
    ]
    rows = read_log(run)
    assert [row["kind"] for row in rows] == ["plan", "train", "train", "train", "train", "eval"]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [2, 4, 6, 8]
    assert {"loss", "accuracy", "images_per_s", "lr"} <= set(rows[1])
    assert rows[-1]["images"] == 450
    summary = json.loads((run / "summary.json").read_text())
    assert summary["metrics"] == pytest.approx(result.metrics)
    assert summary["step"] == 8
    assert any((run / "tensorboard").iterdir())
    saved = checkpoints.load_checkpoint(result.checkpoint or "").state
    assert saved["score"] == result.metrics["ema_accuracy"]
    assert {p.suffix for p in (result.checkpoint or run).iterdir()} == {".safetensors", ".json"}
    # It was deterministic; whoever called it is not.
    assert not torch.are_deterministic_algorithms_enabled()


def test_rates_evaluations_and_checkpoints_come_when_due(tmp_path: Path) -> None:
    """Two steps an epoch, five epochs, and the last one whatever is due."""
    config = small(
        data={"batch_size": 640},
        ema={"decay": None},
        schedule={"epochs": 5},
        train={"max_steps": 99, "eval_every": 2},
        checkpoint={"every_steps": None, "every_epochs": 3, "keep": 9},
        log={"every": 1},
    )
    seen: list[float] = []
    result = fit(config, tmp_path, quiet=True, on_step=lambda t: seen.append(t.inner.param_groups[0]["lr"]))
    assert result.step == 10
    rows = read_log(tmp_path)
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [4, 8, 10]
    assert [checkpoints.open_checkpoint(p).step for p in checkpoints.listed(tmp_path)] == [6, 10]
    # What stands after a step is the rate of the next one.
    wanted = [3e-3 * (1 + math.cos(math.pi * step / 10)) / 2 for step in range(1, 11)]
    assert seen == pytest.approx(wanted)
    assert [row["lr"] for row in rows if row["kind"] == "train"] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(("averaged", "larger", "score"), [(True, True, 0.7), (False, True, 0.4), (False, False, -0.4)])
def test_the_best_is_the_largest_or_the_smallest_of_the_metric(averaged: bool, larger: bool, score: float) -> None:
    trainer: Any = SimpleNamespace(
        ema=object() if averaged else None, task=SimpleNamespace(metric="m", larger_is_better=larger)
    )
    assert Trainer._score(trainer, {"m": 0.4, "ema_m": 0.7}) == score


def test_what_is_logged_is_the_mean_of_the_steps_since() -> None:
    trainer: Any = SimpleNamespace(where=Where(torch.device("cpu")))
    steps = [{"loss": torch.tensor(loss), "accuracy": torch.tensor(1 / loss)} for loss in (1.0, 4.0)]
    assert Trainer._means(trainer, steps) == {"loss": 2.5, "accuracy": 0.625}


def test_a_run_goes_on_from_its_last_checkpoint_not_its_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, score in ((1, 0.9), (2, 0.1)):
        checkpoints.write(tmp_path, {"step": step, "score": score}, {"model": {"a": torch.ones(1)}})
    asked: list[Path] = []

    def trainer(config: Any, run: Path, *, resume: Path, **options: Any) -> Any:
        asked.append(resume)
        return SimpleNamespace(fit=lambda: None)

    monkeypatch.setattr(engine, "Trainer", trainer)
    fit(small(), tmp_path, resume=tmp_path)
    assert asked == [checkpoints.listed(tmp_path)[1]]


def test_a_second_signal_ends_at_once() -> None:
    trainer: Any = SimpleNamespace(signal=None)
    before = signal.getsignal(signal.SIGTERM)
    with Trainer._signals(trainer):
        os.kill(os.getpid(), signal.SIGTERM)
        assert trainer.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


def test_batchnorms_of_several_processes_are_joined_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "Where", lambda device, rank, world: Where(device, 0, 2))
    for wanted in (False, True):
        trainer = Trainer(small(model={"sync_bn": wanted}), tmp_path / str(wanted), quiet=True)
        trainer.report.close()
        joined = [
            isinstance(m, torch.nn.SyncBatchNorm) for m in trainer.bare.modules() if "BatchNorm" in type(m).__name__
        ]
        assert joined
        assert set(joined) == {wanted}
    monkeypatch.setattr(
        process, "Accelerator", lambda **keys: SimpleNamespace(num_processes=2, device=torch.device("cpu"))
    )
    with pytest.raises(
        UserError, match=r"^model\.sync_bn: got true on CPUs, where torch cannot join BatchNorms; wanted f"
    ):
        process.make_accelerator(small(model={"sync_bn": True}))
    process.make_accelerator(small())


def test_an_optimiser_comes_back_with_its_own_settings_and_memory() -> None:
    """Moments lie as their weights do, which a fused step needs; a group's settings are the config's."""

    def build(momentum: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Conv2d(3, 4, (2, 3)).to(memory_format=torch.channels_last)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    model, optimizer = build(0.9)
    model(torch.randn(2, 3, 4, 5)).sum().backward()
    optimizer.step()
    tensors, values = state.optimizer_state(model, optimizer)
    plain_moments = {name: tensor.contiguous() for name, tensor in tensors.items()}  # as a file has them
    other, loaded = build(0.5)
    state.load_optimizer(other, loaded, plain_moments, values)
    assert loaded.param_groups[0]["momentum"] == 0.5
    for parameter, before in zip(other.parameters(), model.parameters(), strict=True):
        moment = loaded.state[parameter]["momentum_buffer"]
        assert moment.stride() == parameter.stride()
        assert torch.equal(moment, optimizer.state[before]["momentum_buffer"])


def test_a_second_run_does_not_overwrite_the_first(tmp_path: Path) -> None:
    config = small(train={"max_steps": 1})
    fit(config, tmp_path, quiet=True)
    with pytest.raises(UserError, match=r"has checkpoints already; go on with --resume .* or name another --out"):
        fit(config, tmp_path, quiet=True)


def test_accumulation_is_a_larger_batch(tmp_path: Path) -> None:
    """In a network without BatchNorm, two micro-batches of 32 make the step of one batch of 64."""
    whole = fit(plain(train={"max_steps": 3}), tmp_path / "a", quiet=True)
    parts = fit(plain(train={"max_steps": 3, "accumulate": 2}, data={"batch_size": 32}), tmp_path / "b", quiet=True)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)
    for name, tensor in weights(tmp_path / "a").items():
        torch.testing.assert_close(weights(tmp_path / "b")[name], tensor, rtol=1e-4, atol=1e-5)


def test_clipping_bounds_the_step(tmp_path: Path) -> None:
    """Plain SGD moves the weights by lr times the gradient, so by at most lr times the bound."""
    sgd = {"name": "momentum", "lr": 0.5, "momentum": 0.0, "weight_decay": 0.0}
    moved = []
    for clip in (None, 1e-3):
        config = plain(optimizer=sgd, train={"max_steps": 1, "clip": clip}, schedule={"name": "constant"})
        trainer = Trainer(config, tmp_path / str(clip), quiet=True)
        before = {n: p.detach().clone() for n, p in trainer.bare.named_parameters()}
        trainer.fit()
        moved.append(
            sum(float((p.detach() - before[n]).square().sum()) for n, p in trainer.bare.named_parameters()) ** 0.5
        )
    assert moved[0] > 0.01
    assert moved[1] == pytest.approx(0.5e-3, rel=1e-3)


def test_the_average_follows_the_weights(tmp_path: Path) -> None:
    fit(small(train={"max_steps": 1}, ema={"decay": 0.5}), tmp_path / "a", quiet=True)
    # timm takes the first update whole.
    for name, tensor in weights(tmp_path / "a").items():
        torch.testing.assert_close(weights(tmp_path / "a", "ema")[name], tensor)
    trail: list[dict[str, torch.Tensor]] = []

    def follow(trainer: Trainer) -> None:
        trail.append({n: p.detach().clone() for n, p in trainer.bare.named_parameters()})

    config = small(train={"max_steps": 2}, ema={"decay": 0.75, "buffers": False}, log={"every": 1})
    fit(config, tmp_path / "b", quiet=True, on_step=follow)
    averaged = weights(tmp_path / "b", "ema")
    for name in trail[0]:
        torch.testing.assert_close(averaged[name], 0.75 * trail[0][name] + 0.25 * trail[1][name])
    trail.clear()
    warm = small(train={"max_steps": 2}, ema={"decay": 0.75, "warmup": True}, log={"every": 1})
    fit(warm, tmp_path / "c", quiet=True, on_step=follow)
    share = 1 - 2 ** (-2 / 3)  # timm's, at the second step
    for name in trail[0]:
        wanted = share * trail[0][name] + (1 - share) * trail[1][name]
        torch.testing.assert_close(weights(tmp_path / "c", "ema")[name], wanted)
    buffers = {n: t for n, t in weights(tmp_path / "b").items() if n not in trail[0]}
    assert buffers
    for name, tensor in buffers.items():
        assert torch.equal(averaged[name], tensor)


def test_bfloat16_runs_and_half_is_refused_on_a_cpu(tmp_path: Path) -> None:
    # Not the small network: torch leaves taps of a bfloat16 gradient unwritten where a strided convolution meets a 1×1 map.
    keys = {"precision": "bf16", "max_steps": 2, "deterministic": False}
    result = fit(plain(train=keys), tmp_path / "a", quiet=True)
    assert all(loss == loss for loss in result.losses)
    assert weights(tmp_path / "a")["patch_embed.proj.weight"].dtype == torch.float32
    with pytest.raises(UserError, match=r"train\.precision: got fp16 on a CPU, wanted bf16 or fp32"):
        fit(small(train={"precision": "fp16"}), tmp_path / "b", quiet=True)


def test_channels_last_checkpointing_and_compile(tmp_path: Path) -> None:
    """Neither the memory format nor recomputation changes what is learnt; compilation is let through to its backend."""
    one = fit(plain(train={"max_steps": 2}, log={"every": 1}), tmp_path / "a", quiet=True)
    model = {"channels_last": True, "grad_checkpointing": True}
    two = fit(plain(train={"max_steps": 2}, log={"every": 1}, model=model), tmp_path / "b", quiet=True)
    assert two.losses == pytest.approx(one.losses, rel=1e-4)
    trainer = Trainer(plain(model={"compile": True}), tmp_path / "c", quiet=True)
    assert hasattr(trainer.model, "_orig_mod")
    # An evaluation compiles nothing: it runs the bare network.
    assert trainer._evaluate(1)["images"] == 450
    trainer.report.close()


def test_float32_stays_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate switches TF32 on where a network is compiled without mixed precision, and it stays on after the run."""

    class Eager(process.Accelerator):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            torch.backends.cuda.matmul.allow_tf32 = True

    monkeypatch.setattr(process, "Accelerator", Eager)
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (True, False):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            process.make_accelerator(plain(model={"compile": True}))
            assert torch.backends.cuda.matmul.allow_tf32 == allowed
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def poison(at: set[int]) -> Any:
    """From now on the loss of these steps is not a number."""

    def on_step(trainer: Trainer) -> None:
        task: Any = trainer.task
        if not hasattr(task, "healthy"):
            task.healthy = task.loss

            def loss(model: Any, batch: Any, epoch: int) -> Any:
                if trainer.place.step + 1 in at:
                    batch.images = batch.images * float("nan")
                return task.healthy(model, batch, epoch)

            task.loss = loss

    return on_step


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        fit(small(checkpoint={"every_steps": 2}), tmp_path, quiet=True, on_step=poison({5}))
    good = checkpoints.listed(tmp_path)[-1]
    assert good.name == "step-00000004"
    assert str(caught.value).startswith(f"the loss is not finite at step 5; the last good checkpoint is {good}; ")
    assert all(torch.isfinite(t).all() for t in weights(tmp_path).values())


def test_numbers_that_are_not_finite_are_null_in_every_file(tmp_path: Path) -> None:
    def overflowing(trainer: Trainer) -> None:
        task: Any = trainer.task
        task.evaluate = lambda model: {"accuracy": 0.5, "loss": float("nan"), "images": 3.0}

    fit(plain(train={"max_steps": 1}), tmp_path, quiet=True, on_step=overflowing)
    files = [tmp_path / "summary.json", checkpoints.listed(tmp_path)[-1] / "state.json"]
    read = [json.loads(file.read_text(), parse_constant=pytest.fail) for file in files]
    assert [one["metrics"]["loss"] for one in read] == [None, None]
    (row,) = [row for row in read_log(tmp_path) if row["kind"] == "eval"]
    assert math.isnan(row["loss"])
    assert '"loss": null' in (tmp_path / "log.jsonl").read_text()


def test_bad_steps_are_skipped_when_told_so(tmp_path: Path) -> None:
    fit(small(train={"bad_steps": 2}), tmp_path / "a", quiet=True, on_step=poison({3, 5}))
    assert checkpoints.open_checkpoint(checkpoints.listed(tmp_path / "a")[-1]).state["skipped"] == 2
    # The log is JSON, which has no NaN: a skipped step is left out of the means (of steps 3 and 4, 5 and 6).
    lines = (tmp_path / "a" / "log.jsonl").read_text()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines.splitlines()]
    assert all(0 < row["loss"] < 10 for row in rows if row["kind"] == "train")
    # BatchNorm's statistics saw the bad images too: they must have been taken back.
    assert all(torch.isfinite(t).all() for t in weights(tmp_path / "a").values())
    with pytest.raises(UserError, match=r"the loss is not finite at step 7; .* after 2 skipped ones"):
        fit(small(train={"bad_steps": 2}), tmp_path / "b", quiet=True, on_step=poison({3, 5, 7}))
    # It goes on from step 6, with what was skipped by then.
    with pytest.raises(UserError, match=r"the loss is not finite at step 8; .* after 2 skipped ones"):
        fit(small(train={"bad_steps": 2}), tmp_path / "b", resume=tmp_path / "b", quiet=True, on_step=poison({8}))


def test_a_full_disk_ends_the_run_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_write, calls = checkpoints._write_bytes, [0]

    def full(path: Path, data: bytes) -> None:
        calls[0] += 1
        if calls[0] > 7:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain_write(path, data)

    monkeypatch.setattr(checkpoints, "_write_bytes", full)
    with pytest.raises(
        UserError, match=r"step-00000006: the disk is full; the last good checkpoint is .*step-00000003"
    ):
        fit(small(), tmp_path, quiet=True)
    assert checkpoints.load_checkpoint(checkpoints.listed(tmp_path)[-1]).step == 3


def test_a_disk_too_full_for_the_log_ends_it_likewise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_row = Reporter.row

    def row(self: Reporter, kind: str, step: int, epoch: int, values: dict[str, float]) -> None:
        if step > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain_row(self, kind, step, epoch, values)

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Reporter, "row", row)
    trainer = Trainer(small(), tmp_path, quiet=True)
    monkeypatch.setattr(trainer.report, "file", SimpleNamespace(close=full, write=print, flush=print))
    with pytest.raises(UserError, match=r"cannot write into .*: the disk is full; the last good .* is .*step-00000003"):
        trainer.fit()


def test_tensorboard_keeps_the_point_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It forgets the points from a step on: of a resumed run those after its checkpoint."""
    asked: list[Any] = []
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", lambda folder, **keys: asked.append(keys) or DONE)
    Reporter(tmp_path, leader=True, total=9, start=4, tensorboard=True, quiet=True).close()
    assert asked == [{"purge_step": 5}]


def test_tensorboards_thread_keeps_quiet_about_a_full_disk(tmp_path: Path, capsys: Any) -> None:
    before = threading.excepthook
    reporter = Reporter(tmp_path, leader=True, total=1, start=0, tensorboard=True, quiet=True)

    def fails(error: Exception) -> str:
        def run() -> None:
            raise error

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return str(capsys.readouterr().err)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporter, "excepthook", threading.__excepthook__)  # not pytest's
        assert fails(OSError(errno.ENOSPC, "No space left on device")) == ""
        assert "ValueError: ours" in fails(ValueError("ours"))
        patch.undo()
    reporter.close()
    assert threading.excepthook == before


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    """The loss of step 3 was fine, its gradient was not: the checkpoint due then would be called good."""

    def spoil(trainer: Trainer) -> None:
        if trainer.place.step == 3:
            next(trainer.bare.parameters()).data[0] = float("inf")

    with pytest.raises(
        UserError, match=r"the weights are not finite at step 3; .* is .*step-00000002; lower optimizer"
    ):
        fit(small(checkpoint={"every_steps": 1}), tmp_path, quiet=True, on_step=spoil)
    assert all(torch.isfinite(t).all() for t in weights(tmp_path).values())


def test_a_run_that_goes_on_from_an_earlier_checkpoint_keeps_its_own(tmp_path: Path) -> None:
    config = small(checkpoint={"every_steps": 2, "keep": 9})
    fit(config, tmp_path, quiet=True)
    assert [p.name[-1] for p in checkpoints.listed(tmp_path)] == ["2", "4", "6", "8"]
    part = small(checkpoint={"every_steps": 1, "keep": 1}, train={"max_steps": 5})
    fit(part, tmp_path, resume=checkpoints.listed(tmp_path)[0], quiet=True)
    # Neither the latest of the first attempt nor its best: the run is at step 5.
    assert [p.name[-1] for p in checkpoints.listed(tmp_path)] == ["5"]
    assert checkpoints.find(tmp_path).step == 5
    aside = sorted(p.name for p in (tmp_path / "checkpoints").glob("aside-*"))
    assert aside == ["aside-step-00000004", "aside-step-00000006", "aside-step-00000008"]


def test_steps_counted_anew_do_not_fall_behind_the_old_ones(tmp_path: Path) -> None:
    fit(small(train={"max_steps": 6}), tmp_path, quiet=True)
    larger = small(data={"batch_size": 128}, checkpoint={"keep": 1}, train={"max_steps": 4})
    Trainer(larger, tmp_path, resume=checkpoints.listed(tmp_path)[-1], quiet=True).report.close()
    # Ended here, it would go on from here.
    now = checkpoints.find(tmp_path, which="last")
    assert (now.step, now.state["images_per_step"]) == (3, 128)
    result = fit(larger, tmp_path, resume=tmp_path, quiet=True)
    assert checkpoints.listed(tmp_path) == [result.checkpoint]
    assert checkpoints.find(tmp_path, which="last").step == 4


def test_steps_counted_anew_do_not_mix_with_later_old_ones(tmp_path: Path) -> None:
    fit(small(checkpoint={"every_steps": 2, "keep": 9}), tmp_path, quiet=True)
    half = small(data={"batch_size": 32})
    # As far as step 2 of 64 images is step 4 of 32; the old step 4 is twice as far.
    Trainer(half, tmp_path, resume=checkpoints.listed(tmp_path)[0], quiet=True).report.close()
    assert [p.name[-1] for p in checkpoints.listed(tmp_path)] == ["2"]


def test_a_resumed_run_with_other_images_keeps_its_epoch(tmp_path: Path) -> None:
    """It went by the old steps: fewer images ended the run early, and in the middle of an epoch it never ended."""
    long = {"schedule": {"epochs": 3}, "checkpoint": {"every_steps": 9, "keep": 9}, "ema": {"decay": None}}
    fit(small(**long, train={"max_steps": 42}), tmp_path, quiet=True)
    fewer = small(**long, train={"max_steps": None}, data={"holdout": 0.8})
    places = []
    for path in checkpoints.listed(tmp_path)[::-1]:
        trainer = Trainer(fewer, tmp_path / "other", resume=path, quiet=True)
        trainer.report.close()
        places.append((trainer.place.step, trainer.place.epoch, trainer.place.in_epoch))
    # 21 steps in an epoch before, 4 now.
    assert places == [(8, 2, 0), (8, 1, 4), (8, 1, 4), (4, 1, 0), (4, 0, 4), (4, 0, 4)]
    assert fit(fewer, tmp_path, resume=checkpoints.listed(tmp_path)[-2], quiet=True).step == 12


def test_a_run_goes_not_on_in_the_folder_of_another(tmp_path: Path) -> None:
    """What it saved was deleted at once: the other run's checkpoints had higher steps."""
    one, two = tmp_path / "one", tmp_path / "two"
    fit(small(train={"max_steps": 1}), one, quiet=True)
    fit(small(train={"max_steps": 2}), two, quiet=True)
    with pytest.raises(
        UserError, match=r"run .*two has checkpoints already; go on with --resume .*two or name another"
    ):
        fit(small(train={"max_steps": 2}), two, resume=one, quiet=True)
    assert fit(small(train={"max_steps": 2}), tmp_path / "three", resume=one, quiet=True).step == 2


def test_a_run_that_is_done_says_so(tmp_path: Path, capsys: Any) -> None:
    done = fit(small(), tmp_path, quiet=True)
    again = fit(small(), tmp_path, resume=tmp_path)
    assert (again.metrics, again.checkpoint, again.step) == (done.metrics, done.checkpoint, 8)
    assert "has done its 8 steps already; for more set" in " ".join(capsys.readouterr().err.split())


def test_settings_of_the_optimiser_follow_the_config_on_resume(tmp_path: Path) -> None:
    fit(small(train={"max_steps": 2}), tmp_path, quiet=True)
    # As a run with replayed updates leaves it on a GPU: on a CPU torch would refuse to step.
    path = checkpoints.listed(tmp_path)[-1]
    saved = json.loads((path / "state.json").read_text())
    for group in saved["optimizer"]["groups"]:
        group["capturable"] = True
    (path / "state.json").write_text(json.dumps(saved))
    keys = {"weight_decay": 0.3, "options": {"betas": [0.7, 0.8]}, "lr_scale": {"fc.*": 0.5}}
    trainer = Trainer(small(optimizer=keys), tmp_path, resume=path, quiet=True)
    for group in trainer.inner.param_groups:
        assert (tuple(group["betas"]), group["capturable"]) == ((0.7, 0.8), False)
    decays = {group["weight_decay"] for group in trainer.inner.param_groups}
    scales = {group.get("lr_scale") for group in trainer.inner.param_groups}
    assert (decays, scales) == ({0.0, 0.3}, {None, 0.5})
    assert trainer.fit().step == 8


@pytest.mark.parametrize("name", ["adafactor", "lamb", "adafactorbv", "adan"])
def test_plain_numbers_of_an_optimiser_come_back(name: str) -> None:
    """Adafactor counts its steps in a number, LAMB in a tensor of its groups; the first step after a resumption depends on it."""

    def build(**keys: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(3, 2)
        return model, build_optimizer(model, OptimizerConfig(name=name, lr=0.01, **keys), 1)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        model(torch.full((1, 3), 1.0 + number)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build()
    for number in range(3):
        step(model, optimizer, number)
    tensors, values = state.optimizer_state(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), tensors, json.loads(json.dumps(values))))
    step(model, optimizer, 3)
    # A factor makes another group, which goes on counting.
    for factors in ({}, {"bias": 1.0}):
        other, loaded = build(lr_scale=factors)
        start, moments, numbers = copy.deepcopy(saved)
        state.load_optimizer(other, loaded, moments, numbers)
        other.load_state_dict(start)
        step(other, loaded, 3)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["adahessian", "kronw"])
def test_optimisers_that_no_run_could_save_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"optimizer\.name: got '{name}', which .*; wanted another of timm's"):
        build_optimizer(torch.nn.Linear(3, 2), OptimizerConfig(name=name), 1)


def test_a_factor_can_be_taken_back_on_resume(tmp_path: Path) -> None:
    part = {"max_steps": 2}
    fit(small(train=part, optimizer={"lr_scale": {"*": 0.5, "fc.*": 0.1}}), tmp_path, quiet=True)
    plain_keys = small(train={"max_steps": 3}, optimizer={"lr_scale": {"*": None, "fc.*": None}})
    trainer = Trainer(plain_keys, tmp_path, resume=checkpoints.listed(tmp_path)[-1], quiet=True)
    assert [group.get("lr_scale") for group in trainer.inner.param_groups] == [None, None]
    assert trainer.fit().step == 3


def test_weights_come_back_whatever_the_optimiser_does_to_them(tmp_path: Path) -> None:
    """torch loads an optimiser's state by a step of size 0, which MADGRAD rounds."""
    config = small(optimizer={"name": "madgradw"}, train={"max_steps": 2}, ema={"decay": None})
    fit(config, tmp_path, quiet=True)
    trainer = Trainer(config, tmp_path, resume=checkpoints.listed(tmp_path)[-1], quiet=True)
    trainer.report.close()
    for name, tensor in weights(tmp_path).items():
        assert torch.equal(trainer.bare.state_dict()[name], tensor), name


def test_all_generators_come_back() -> None:
    def drawn() -> list[float]:
        return [random.random(), random.gauss(), np.random.rand(), np.random.randn(), float(torch.rand(()))]

    drawn()  # one gaussian of each pair is kept for the next call
    saved = state.random_state(torch.device("cpu"))
    wanted = [drawn(), drawn()]
    state.load_random(saved, torch.device("cpu"))
    assert [drawn(), drawn()] == wanted


def test_another_optimiser_cannot_go_on(tmp_path: Path) -> None:
    fit(small(train={"max_steps": 1}), tmp_path, quiet=True)
    for name in ("momentum", "lion", "adopt"):
        with pytest.raises(UserError, match=rf"holds what optimizer\.name=adamw had gathered, which {name} with these"):
            fit(small(optimizer={"name": name}), tmp_path, resume=tmp_path, quiet=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there are such graphs")
def test_graphs_where_there_are_none_are_told(tmp_path: Path, capsys: Any) -> None:
    trainer = Trainer(plain(model={"compile": True, "cuda_graphs": True}), tmp_path)
    trainer.report.close()
    assert trainer.replayed is None
    wanted = "model.cuda_graphs: got true on cpu, which has none; the network is launched"
    assert wanted in " ".join(capsys.readouterr().err.split())


def test_resume_refuses_what_does_not_fit(tmp_path: Path) -> None:
    fit(small(train={"max_steps": 1}), tmp_path, quiet=True)
    other = small(model={"name": "test_vit2", "drop_path": None, "options": {"img_size": 8, "patch_size": 4}})
    with pytest.raises(UserError, match=r"does not fit the model: \d+ tensors differ, first .*: got .*, wanted "):
        fit(other, tmp_path, resume=tmp_path, quiet=True)
    (checkpoints.listed(tmp_path)[-1] / "model.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match=r"is damaged: model\.safetensors has 1 bytes"):
        fit(small(), tmp_path, resume=tmp_path, quiet=True)


def test_resume_with_another_batch_keeps_the_share_of_the_epoch(tmp_path: Path) -> None:
    fit(small(train={"max_steps": 4}), tmp_path, quiet=True)
    trainer = Trainer(small(data={"batch_size": 128}), tmp_path, resume=checkpoints.listed(tmp_path)[-1], quiet=True)
    assert (trainer.place.step, trainer.place.in_epoch) == (2, 2)
    # The rate of step 2 of 10, not what step 4 of 21 left in the optimiser.
    wanted = 3e-3 * (1 + math.cos(math.pi * 2 / 10)) / 2
    assert [group["lr"] for group in trainer.inner.param_groups] == pytest.approx([wanted] * 2)
    trainer.report.close()


@pytest.mark.parametrize("loss", [{"name": "bce"}, {"cutmix": 1.0, "mixup": 0.0}, {"mix_off_epoch": 0}])
def test_losses(tmp_path: Path, loss: dict[str, Any]) -> None:
    result = fit(small(loss=loss, train={"max_steps": 2}), tmp_path, quiet=True)
    assert all(0 < value < 10 for value in result.losses)


def test_held_out_images_are_evaluated_instead(tmp_path: Path) -> None:
    result = fit(small(data={"holdout": 0.1}, train={"max_steps": 1}), tmp_path, quiet=True)
    assert result.metrics["images"] == 135


def test_grad_checkpointing_is_refused_by_name(tmp_path: Path) -> None:
    import timm

    from nearsight.train.tasks.classify import create_network

    config = small(model={"grad_checkpointing": True}).model
    plain_model = timm.create_model("test_resnet")
    refuses = type(plain_model).set_grad_checkpointing
    with pytest.MonkeyPatch.context() as patch:

        def no(self: Any, enable: bool = True) -> None:
            assert not enable

        patch.setattr(type(plain_model), "set_grad_checkpointing", no)
        with pytest.raises(UserError, match=re.escape("model.grad_checkpointing: test_resnet does not offer it")):
            create_network(config, num_classes=2, in_chans=1)
    assert type(plain_model).set_grad_checkpointing is refuses


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_a_compiled_run_learns_what_an_eager_one_does(tmp_path: Path) -> None:
    keys = {"train": {"max_steps": 3, "deterministic": False}, "log": {"every": 1}}
    eager = fit(plain(**keys), tmp_path / "a", quiet=True)
    compiled = fit(plain(**keys, model={"compile": True}), tmp_path / "b", quiet=True)
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-3)
    # The names in a checkpoint are the bare model's.
    assert weights(tmp_path / "a").keys() == weights(tmp_path / "b").keys()
    fit(plain(**keys, model={"compile": False}), tmp_path / "b", resume=tmp_path / "b", quiet=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_compiled_blocks_learn_what_an_eager_run_does(tmp_path: Path) -> None:
    """Blocks of one kind are compiled once, and an evaluation compiles nothing."""
    from torch._dynamo.utils import counters

    keys = {"train": {"max_steps": 3, "deterministic": False}, "log": {"every": 1}}
    options = {"depth": 4, "embed_dim": 32, "num_heads": 2, "img_size": 8, "patch_size": 4}
    vit = {"name": "test_vit2", "drop_path": None, "options": options}
    eager = fit(plain(**keys, model=vit), tmp_path / "a", quiet=True)
    torch._dynamo.reset()
    counters.clear()
    compiled = fit(plain(**keys, model={**vit, "compile": "blocks"}), tmp_path / "b", quiet=True)
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-3)
    assert compiled.metrics["loss"] == pytest.approx(eager.metrics["loss"], rel=1e-2)
    assert counters["stats"]["unique_graphs"] == 1
    assert weights(tmp_path / "a").keys() == weights(tmp_path / "b").keys()


@pytest.mark.gpu
def test_replayed_graphs_learn_what_launches_do(tmp_path: Path) -> None:
    keys = {"train": {"max_steps": 12, "deterministic": False, "device": "auto"}, "log": {"every": 1}}
    model = {"compile": True, "channels_last": True}
    launched = fit(plain(**keys, model=model), tmp_path / "a", quiet=True)
    for form in (True, "blocks"):
        graphs = {**model, "compile": form, "cuda_graphs": True}
        replayed = fit(plain(**keys, model=graphs), tmp_path / str(form), quiet=True)
        assert replayed.losses == pytest.approx(launched.losses, rel=1e-3)
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.gpu
@pytest.mark.parametrize(
    "optimizer", [{"name": "adamw", "lr": 1e-3}, {"name": "nmuon", "lr": 0.01}], ids=["adamw", "muon"]
)
def test_replayed_updates_learn_what_launched_ones_do(
    tmp_path: Path, optimizer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a schedule and clipping, and resumed in the middle: both runs agree (step by step: test_replay.py)."""
    keys = {
        "train": {"max_steps": 14, "deterministic": False, "device": "auto", "clip": 0.1},
        "log": {"every": 1},
        "optimizer": {**optimizer, "weight_decay": 0.1},
        "schedule": {"warmup_epochs": 0.5},
        "model": {"compile": True, "cuda_graphs": True},
    }
    with monkeypatch.context() as patch:
        patch.setattr(ReplayedUpdate, "suits", staticmethod(lambda optimizer: False))
        launched = fit(plain(**keys), tmp_path / "a", quiet=True)
    losses = []
    for steps, resume in ((8, None), (14, tmp_path / "b")):
        part = {**keys, "train": {**keys["train"], "max_steps": steps}}
        trainer = Trainer(plain(**part), tmp_path / "b", quiet=True, resume=resume and checkpoints.listed(resume)[-1])
        losses += trainer.fit().losses
        assert trainer.replayed is not None
        assert trainer.replayed.graph is not None
    assert losses == pytest.approx(launched.losses, rel=2e-3)
    ours, theirs = weights(tmp_path / "b"), weights(tmp_path / "a")
    assert all(tensor.isfinite().all() for tensor in ours.values())
    if optimizer["name"] == "adamw":  # Muon makes whole steps of gradients that differ in their last bits only
        for name, tensor in ours.items():
            torch.testing.assert_close(
                tensor, theirs[name], rtol=2e-2, atol=2e-3, msg=lambda text, n=name: f"{n}: {text}"
            )
