"""nearsight export from the outside: what it writes and says, for names, runs and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image

from nearsight.cli import main
from nearsight.train.engine import fit
from nearsight.train.inference import load_network, predict
from tests.train.support import small


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("export") / "run"
    fit(small(train={"max_steps": 4}, data={"crop_pct": 0.8, "interpolation": "bilinear"}), folder, quiet=True)
    return folder


def exported(words: list[str], capsys: Any) -> dict[str, Any]:
    assert main(["export", *words, "--json"]) == 0
    row: dict[str, Any] = json.loads(capsys.readouterr().out)
    return row


def test_a_run_predicts_as_it_does_here(run: Path, tmp_path: Path, capsys: Any) -> None:
    """Prepared by what the file says of itself, an image gets the probabilities that `nearsight predict` gives it."""
    row = exported([str(run), "-o", str(tmp_path / "run.onnx"), "--pixels"], capsys)
    stored = {entry.key: entry.value for entry in onnx.load(tmp_path / "run.onnx").metadata_props}
    facts = json.loads(stored["nearsight.json"])
    assert {key: row[key] for key in facts if key != "shape"} == {k: v for k, v in facts.items() if k != "shape"}
    assert (facts["task"], facts["trained"], facts["classes"]) == ("classify", True, [str(n) for n in range(10)])
    assert facts["input"]["values"] == "pixels in 0…1"
    assert (facts["input"]["crop_pct"], facts["input"]["interpolation"]) == (0.8, "bilinear")

    image = Image.fromarray((torch.rand(20, 20, 3) * 255).byte().numpy())
    image.save(tmp_path / "x.png")
    channels, *size = facts["shape"][1:]
    rows, columns = (int(n / facts["input"]["crop_pct"]) for n in size)
    resized = image.convert("L" if channels == 1 else "RGB").resize((columns, rows), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(resized, dtype=np.float32)).view(rows, columns, channels) / 255
    top, left = (rows - size[0]) // 2, (columns - size[1]) // 2
    pixels = pixels[top : top + size[0], left : left + size[1]].permute(2, 0, 1)[None]
    session = onnxruntime.InferenceSession(tmp_path / "run.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"images": pixels.numpy()})
    (wanted,) = predict(load_network(run), [tmp_path / "x.png"], top=10)
    found = torch.from_numpy(logits).softmax(1)[0]
    for name, probability in zip(wanted.labels, wanted.probabilities, strict=True):
        assert float(found[int(name)]) == pytest.approx(probability, abs=1e-5)


def test_what_a_person_reads(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "deep" / "nano.pt2"
    assert main(["export", "resnet_nano", "-o", str(file), "--size", "24,40", "--batch", "2"]) == 0
    out = capsys.readouterr().out
    assert str(file) in out
    for words in ("2×3×24×40", "logits", "pixels in 0…1, minus mean, divided by std", "of the largest output"):
        assert words in out
    assert out.splitlines()[-1] == "resnet_nano has untrained weights."
    program = torch.export.load(file).module()
    assert program(torch.zeros(2, 3, 24, 40)).shape == (2, 10)


def test_a_network_that_ships(tmp_path: Path, capsys: Any) -> None:
    row = exported(["resnet_nano.cifar10", "-o", str(tmp_path / "nano.onnx"), "--any-size"], capsys)
    assert row["images"] == ["batch", 3, "rows", "columns"]
    assert (row["network"], row["trained"], len(row["classes"])) == ("resnet_nano.cifar10", True, 10)
    assert row["largest_difference"] < 1e-5
    assert row["bytes"] == (tmp_path / "nano.onnx").stat().st_size > 1e6
    assert row["checked"][0] == [1, 3, 32, 32]
    assert len({tuple(shape[2:]) for shape in row["checked"]}) == 3


def test_an_auto_encoder_gives_images(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "again.pt2"
    row = exported(["qna_autoencoder", "-o", str(file), "--size", "32,64", "--pixels", "--batch", "1"], capsys)
    assert (row["task"], row["output"]) == ("reconstruct", "rebuilt")
    rebuilt = torch.export.load(file).module()(torch.rand(1, 3, 32, 64))
    assert rebuilt.shape == (1, 3, 32, 64)
    assert 0 <= rebuilt.min().item() < rebuilt.max().item() <= 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["resnet_nano", "-o", "a.pt"], "got the file 'a.pt', wanted a name that ends in .onnx or .pt2."),
        (["resnet_nano", "-o", "a.onnx", "--size", "3x4"], "--size: got '3x4', wanted Y,X or one number for both."),
        (["resnet_nano", "-o", "a.onnx", "--size", "²"], "--size: got '²', wanted Y,X or one number for both."),
        (["resnet_nano", "-o", "a.onnx", "--size", "0"], "--size: got '0', wanted Y,X or one number for both."),
        (["resnet_nano", "-o", "a.onnx", "--size", "1,2,3"], "--size: got '1,2,3', wanted Y,X or one number for both."),
        (["runs/none", "-o", "a.onnx"], "no run or checkpoint 'runs/none'."),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    words: list[str], line: str, capsys: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", *words]) == 2
    assert capsys.readouterr() == ("", f"nearsight export: {line}\n")
    assert not list(tmp_path.iterdir())


def test_a_typo_is_met_with_the_name(capsys: Any) -> None:
    assert main(["export", "resnet_nan", "-o", "a.onnx"]) == 2
    assert "Did you mean 'resnet_nano'?" in capsys.readouterr().err
