"""The demo: its table, its pictures, its page. Training itself is shortened to a few steps, except in the slow test."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nearsight", "demo", "--out", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    for row in found["networks"]:
        assert row["accuracy"] >= 0.97, row
    assert found["seconds"] < 180


def test_maps_are_where_the_ops_put_their_weights() -> None:
    """A layer's output is linear in its values: its weights times the values of the map give the output at the pixel."""
    import timm

    from nearsight.layers import LocalAttention2d
    from nearsight.viz.demo_maps import pixel_maps

    torch.manual_seed(1)
    layer = LocalAttention2d(4, 6, 5, num_heads=1).eval()
    x = torch.randn(4, 7, 9)
    for query in ((3, 4), (0, 8), (6, 0)):
        (one,) = pixel_maps(layer, x, query)
        values = layer.project(x[None])[2][0, :, :, 0]
        wanted = layer(x[None])[0, :, query[0], query[1]]
        torch.testing.assert_close((one.weights[..., None] * values).sum((0, 1)), wanted, rtol=1e-4, atol=1e-5)
    model = timm.create_model("qna_vit_nano", in_chans=1).eval()
    for one in pixel_maps(model, torch.randn(1, 12, 20), (5, 13)):
        assert float(one.weights.sum()) == pytest.approx(1, abs=1e-5)
    model = timm.create_model("expatt_resnet_nano", in_chans=1).eval()
    first = pixel_maps(model, torch.randn(1, 12, 20), (5, 13))[0]
    assert int(first.weights.argmax()) == 5 * 20 + 13
