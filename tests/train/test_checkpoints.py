"""Checkpoints are whole or absent, and what is not one is refused with a sentence."""

from __future__ import annotations

import errno
import hashlib
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nearsight.errors import UserError
from nearsight.train import checkpoints
from nearsight.train.checkpoints import (
    best,
    clean,
    find,
    listed,
    load_checkpoint,
    open_checkpoint,
    prune,
    set_aside_later,
    write,
)


def put(run: Path, step: int, score: float | None = None) -> Path:
    tensors = {"a": torch.arange(6.0).view(2, 3) + step, "b": torch.tensor(7)}
    return write(run, {"step": step, "score": score}, {"model": tensors, "optimizer": {"m": torch.ones(5)}})


def test_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    odd = {
        "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "strided": torch.randn(4, 6, 3, 2).to(memory_format=torch.channels_last),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.25),
    }
    odd["shared"] = odd["strided"]
    path = write(tmp_path, {"step": 3}, {"model": odd})
    back = load_checkpoint(path).tensors("model")
    for name, tensor in odd.items():
        assert back[name].dtype == tensor.dtype
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=0, equal_nan=True)


def test_keeps_the_latest_and_the_best(tmp_path: Path) -> None:
    for step, score in ((1, 0.5), (2, 0.9), (3, None), (4, 0.7), (5, 0.9), (6, 0.1)):
        put(tmp_path, step, score)
        prune(tmp_path, keep=2)
    # 2 and 5 tie: the later one is the best, and 5 is among the latest anyway.
    assert [p.name[-1] for p in listed(tmp_path)] == ["5", "6"]
    put(tmp_path, 7, 0.2)
    put(tmp_path, 8, 0.3)
    prune(tmp_path, keep=2)
    assert [p.name[-1] for p in listed(tmp_path)] == ["5", "7", "8"]
    assert best(tmp_path) == listed(tmp_path)[0]
    assert find(tmp_path).step == 5
    assert find(tmp_path, which="last").step == 8
    assert find(listed(tmp_path)[1]).step == 7


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda p: cut(p / "model.safetensors"), r"model\.safetensors has \d+ bytes, wanted \d+"),
        (lambda p: flip(p / "model.safetensors"), r"model\.safetensors does not match its digest"),
        (lambda p: (p / "optimizer.safetensors").unlink(), r"optimizer\.safetensors is missing"),
        (lambda p: cut(p / "state.json"), r"state\.json is not readable"),
    ],
)
def test_damage_is_named_and_the_previous_one_offered(tmp_path: Path, damage: Any, fault: str) -> None:
    first, second, third = (put(tmp_path, step) for step in (1, 2, 3))
    damage(third)
    with pytest.raises(UserError, match=rf"{third} is damaged: {fault}; the previous one is whole: {second}\.$"):
        load_checkpoint(third)
    damage(second)
    with pytest.raises(UserError, match=rf"the previous one is whole: {first}\.$"):
        load_checkpoint(third)
    damage(first)
    with pytest.raises(UserError, match=r"there is no earlier one\.$"):
        load_checkpoint(third)


def test_foreign_things_are_refused(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "version": 99}))
    with pytest.raises(UserError, match="of version 99, wanted 1"):
        open_checkpoint(path)
    (path / "state.json").write_text('{"step": 1}')
    with pytest.raises(UserError, match="is not a checkpoint that nearsight wrote"):
        open_checkpoint(path)
    (path / "state.json").unlink()
    with pytest.raises(UserError, match=r"is no checkpoint: it has no state\.json"):
        open_checkpoint(path)
    with pytest.raises(UserError, match="no run or checkpoint at"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="has no checkpoint yet"):
        find(tmp_path / "run")


def change(path: Path, **keys: Any) -> None:
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, **keys}))


@pytest.mark.parametrize(
    "files",
    [
        None,
        {"model.safetensors": 3},
        {"model.safetensors": {"bytes": 1}},
        {"../model.safetensors": {"bytes": 1, "sha256": "0"}},
    ],
)
def test_a_list_of_files_that_is_none_is_refused(tmp_path: Path, files: Any) -> None:
    path = put(tmp_path, 1)
    change(path, files=files)
    with pytest.raises(UserError, match=r"is damaged: state\.json lacks its step or files; there is no earlier one\.$"):
        open_checkpoint(path)


def test_what_a_state_lacks_is_named(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    with pytest.raises(UserError, match=r"is damaged: state\.json lacks 'card'; there is no earlier one\.$"):
        open_checkpoint(path).want("step", "card")
    with pytest.raises(UserError, match=r"is damaged: state\.json names no ema\.safetensors"):
        open_checkpoint(path).tensors("ema")
    (path / "model.safetensors").write_bytes(b"x")
    digest = hashlib.sha256(b"x").hexdigest()
    change(path, files={"model.safetensors": {"bytes": 1, "sha256": digest}})
    with pytest.raises(UserError, match=r"is damaged: model\.safetensors holds no tensors"):
        open_checkpoint(path).tensors("model")


def test_later_ones_are_set_aside(tmp_path: Path) -> None:
    first, second, third = (put(tmp_path, step, score=0.1 * step) for step in (1, 2, 3))
    assert [p.name for p in set_aside_later(tmp_path, 1)] == [f"aside-{second.name}", f"aside-{third.name}"]
    assert listed(tmp_path) == [first]
    assert best(tmp_path) == first
    again = put(tmp_path, 3)
    clean(tmp_path)
    assert set_aside_later(tmp_path, 2) == [third.with_name(f"aside-{third.name}")]
    assert load_checkpoint(again.with_name(f"aside-{again.name}")).score is None


def test_a_second_one_of_the_same_step_takes_the_firsts_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 1)
    put(tmp_path, 2, score=0.1)
    put(tmp_path, 2, score=0.2)
    assert load_checkpoint(listed(tmp_path)[-1]).score == 0.2

    # Killed in the middle of taking the old one away: what is left of it is no checkpoint.
    def killed(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            (path / "state.json").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        put(tmp_path, 2, score=0.3)
    monkeypatch.undo()
    assert [load_checkpoint(path).step for path in listed(tmp_path)] == [1]


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.write_text, (Path("exploded"), "x"))


def test_nothing_is_ever_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "model.pth"
    file.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError, match="is a pickled file, which nearsight never opens"):
        open_checkpoint(file)
    path = put(tmp_path, 1)
    shutil.copy(file, path / "model.safetensors")
    with pytest.raises(UserError, match="is damaged"):
        load_checkpoint(path)
    assert not (tmp_path / "exploded").exists()


def test_a_full_disk_leaves_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = put(tmp_path, 1)
    plain = checkpoints._write_bytes

    def full(path: Path, data: bytes) -> None:
        if path.name == "optimizer.safetensors":
            plain(path, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(path, data)

    monkeypatch.setattr(checkpoints, "_write_bytes", full)
    with pytest.raises(
        UserError, match=rf"the disk is full; the last good checkpoint is {good}\. Make room and resume\."
    ):
        put(tmp_path, 2)
    monkeypatch.undo()
    assert listed(tmp_path) == [good]
    assert [p.name for p in (tmp_path / checkpoints.FOLDER).iterdir()] == [good.name]
    assert load_checkpoint(good).step == 1
    assert put(tmp_path, 2).is_dir()
