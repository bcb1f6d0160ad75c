"""The demo: its table, its pictures, its page. Training itself is shortened to a few steps, except in the slow test."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nearsight.cli import demo, main


@pytest.fixture
def short(monkeypatch: Any, capsys: Any) -> None:
    """Train in this process, on 8×8 images, for three steps."""

    def start(member: demo.Member, out: Path, epochs: Any, threads: int) -> Any:
        run = out / member.model
        run.mkdir(parents=True)
        words = ["train", member.recipe, "--out", str(run), "--json", "train.device=cpu", "log.every=1"]
        code = main([*words, "train.max_steps=3", "data.image_size=8", "log.tensorboard=false"])
        (run / "stdout.json").write_text(capsys.readouterr().out)
        (run / "stderr.txt").write_text("why it failed\n")
        process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
        process.wait()
        return process

    monkeypatch.setattr(demo, "_start", start)


@pytest.mark.usefixtures("short")
def test_what_the_demo_leaves(tmp_path: Path, capsys: Any) -> None:
    assert main(["demo", "--out", str(tmp_path / "d"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["network"] for row in found["networks"]] == [member.model for member in demo.MEMBERS]
    for row in found["networks"]:
        assert row["parameters"] > 100_000
        assert row["flops"] > 1e6
        assert Path(row["checkpoint"]).is_dir()
    for name in ("curves.png", "attention.png"):
        assert (tmp_path / "d" / name).read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "d" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    # Self-contained: nothing is fetched from anywhere.
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert all(member.model in page for member in demo.MEMBERS)


@pytest.mark.usefixtures("short")
def test_a_network_that_fails_is_named(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    broken = demo.MEMBERS[0]._replace(recipe="digits/none")
    monkeypatch.setattr(demo, "MEMBERS", (broken, *demo.MEMBERS[1:]))
    assert main(["demo", "--out", str(tmp_path / "d"), "--workers", "1"]) == 2
    assert "training sasa_resnet_nano ended with code 2: why it failed" in capsys.readouterr().err


def test_sigterm_ends_the_networks_in_training_too(tmp_path: Path, monkeypatch: Any) -> None:
    started: list[Any] = []

    def start(*args: Any) -> Any:
        if started:
            os.kill(os.getpid(), signal.SIGTERM)
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return started[-1]

    monkeypatch.setattr(demo, "_start", start)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--out", str(tmp_path), "--workers", "2", "--json"])
    assert caught.value.code == 143
    assert started[0].poll() == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("epochs", [None, 3])
def test_each_network_is_trained_by_the_program(tmp_path: Path, monkeypatch: Any, epochs: int | None) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(demo.subprocess, "Popen", lambda command, **options: asked.append((command, options["env"])))
    demo._start(demo.MEMBERS[0], tmp_path, epochs, threads=2)
    ((command, env),) = asked
    assert command[1:5] == ["-m", "nearsight", "train", "digits/sasa_nano"]
    assert [word for word in command if word.startswith("schedule.")] == (["schedule.epochs=3"] if epochs else [])
    assert env["OMP_NUM_THREADS"] == "2"


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nearsight", "demo", "--out", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    for row in found["networks"]:
        assert row["accuracy"] >= 0.97, row
    assert found["seconds"] < 180
