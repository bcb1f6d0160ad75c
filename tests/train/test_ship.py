"""Networks that ship: from a run to float16 weights with a card, and back by name, by timm and by the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import nearsight
from nearsight import weights
from nearsight.cli import main
from nearsight.errors import UserError
from nearsight.models.flops import count_parameters
from nearsight.train import checkpoints
from nearsight.train.engine import fit
from nearsight.train.inference import evaluate, load_network
from nearsight.train.ship import ship
from nearsight.train.tasks import load_config
from tests.train.support import small

NAMES = [f"{name}.cifar10" for name in ("sasa_resnet_nano", "resnet_nano", "expatt_resnet_nano", "qna_vit_nano")]
LIMIT = 8_000_000


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: Any) -> Path:
    """A run of eight steps, shipped as net.digits."""
    root = tmp_path_factory.mktemp("ship")
    config = small(data={"root": "secret/place"}, train={"max_steps": 8})
    result = fit(config, root / "run", quiet=True)
    metrics = ship(result.run, root / "weights" / "net.digits", recipe="digits/conv_nano", seconds=61.4, commit="abc12")
    assert metrics["images"] == 450
    return root / "weights" / "net.digits"


def test_the_card_says_what_was_measured(shipped: Path) -> None:
    state = json.loads((shipped / "state.json").read_text())
    card = (shipped / "README.md").read_text()
    assert card.startswith("# net.digits\n")
    assert f"{100 * state['metrics']['accuracy']:.2f} % of 450 test images" in card
    assert "`nearsight train digits/conv_nano` (61 s, commit abc12)" in card
    assert "Limits: " in card
    again = evaluate(shipped)
    assert again["accuracy"] == state["metrics"]["accuracy"]
    # Of the float16 weights, not of those they were rounded from.
    assert again["loss"] == state["metrics"]["loss"]
    assert again["loss"] != evaluate(shipped.parent.parent / "run")["loss"]
    assert "secret" not in (shipped / "state.json").read_text()


def test_weights_are_half_the_moving_average(shipped: Path) -> None:
    tensors = load_file(shipped / "model.safetensors")
    source = load_network(shipped.parent.parent / "run")
    assert source.weights == "ema"
    for name, tensor in source.model.state_dict().items():
        floating = tensor.is_floating_point()
        assert tensors[name].dtype == (torch.float16 if floating else tensor.dtype)
        assert torch.equal(tensors[name], tensor.half() if floating else tensor)
    assert set(tensors) == set(source.model.state_dict())
    parameter = next(load_network(shipped).model.parameters())
    assert parameter.dtype == torch.float32


def test_what_does_not_fit_or_has_no_tag_is_refused(shipped: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(UserError, match=r"ship: got the folder 'net', wanted a name like 'qna_vit_nano\.cifar10'\."):
        ship(shipped, tmp_path / "net")
    network = load_network(shipped)
    with torch.no_grad():
        network.model.get_parameter("fc.bias")[0] = 1e5
    monkeypatch.setattr("nearsight.train.ship.load_network", lambda path: network)
    with pytest.raises(UserError, match=r"ship: fc\.bias does not fit into float16; got values beyond 65504\."):
        ship(shipped, tmp_path / "net.big")


def test_by_name_and_by_default(shipped: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^no run or checkpoint at 'net\.digits'\."):
        checkpoints.find("net.digits")
    monkeypatch.setattr(weights, "_ROOT", shipped.parent)
    monkeypatch.setattr(weights, "DEFAULT", "net.digits")
    assert weights.names() == ["net.digits"]
    assert weights.file("net.digits") == str(shipped / "model.safetensors")
    with pytest.raises(UserError, match=r"^no run or checkpoint at 'nett\.digits'\. Did you mean 'net\.digits'\?$"):
        checkpoints.find("nett.digits")
    with pytest.raises(UserError, match=r"Networks that come with nearsight: net\.digits\."):
        checkpoints.find("runs/mine")
    Image.new("L", (20, 13), 90).save("photo.png")
    assert main(["predict", "photo.png", "photo.png", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert len(alone) == 2
    assert main(["predict", "net.digits", "photo.png", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == alone[:1]
    assert main(["eval", "net.digits", "--json"]) == 0
    state = json.loads((shipped / "state.json").read_text())
    assert json.loads(capsys.readouterr().out)["accuracy"] == state["metrics"]["accuracy"]
    assert main(["predict", "phot.png"]) == 2
    assert capsys.readouterr().err == "nearsight predict: no image file 'phot.png'.\n"


@pytest.mark.parametrize("name", NAMES)
def test_timm_takes_half_weights_of_the_tag(name: str, tmp_path: Path) -> None:
    """The tag alone chooses the network, with or without weights; they load into float32 and take another head."""
    bare = timm.create_model(name.partition(".")[0])
    model = timm.create_model(name).eval()
    assert count_parameters(model) > 2 * count_parameters(bare)
    state = {k: v.half() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    save_file(state, tmp_path / "x.safetensors")
    overlay = {"file": str(tmp_path / "x.safetensors")}
    loaded = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay).eval()
    for key, value in loaded.state_dict().items():
        assert value.dtype == model.state_dict()[key].dtype
        assert torch.equal(value, state[key].to(value.dtype)), key
    other = timm.create_model(name, pretrained=True, num_classes=3, pretrained_cfg_overlay=overlay)
    assert other(torch.rand(2, 3, 32, 40)).shape == (2, 3)
    assert model.pretrained_cfg["mean"] == (0.4914, 0.4822, 0.4465)
    assert len(model.pretrained_cfg["label_names"]) == 10


def test_the_recipes_train_what_ships() -> None:
    for name, recipe in zip(NAMES, ("sasa", "conv", "expatt", "qna"), strict=True):
        config = load_config(f"cifar10/nano_{recipe}")
        assert config.model.name == name
        assert not {k: v for k, v in config.model.options.items() if v is not None}


def test_all_of_them_are_small() -> None:
    with torch.device("meta"):
        count = sum(count_parameters(timm.create_model(name)) for name in NAMES)
    assert 2 * count < LIMIT
    assert sum(path.stat().st_size for path in Path(nearsight.__file__).parent.glob("weights/*/*")) < LIMIT


def test_what_is_in_the_package_loads() -> None:
    """Every network that is here: its digest, its card's number, timm's own loading beside ours."""
    for name in weights.names():
        network = load_network(name)
        checkpoints.load_checkpoint(network.checkpoint.path)
        card = (network.checkpoint.path / "README.md").read_text()
        assert f"{100 * network.checkpoint.state['metrics']['accuracy']:.2f} % of 10,000 test images" in card
        model = timm.create_model(name, pretrained=True).eval()
        assert list(model.pretrained_cfg["label_names"]) == network.card["classes"]
        facts = network.card["input"]
        assert model.pretrained_cfg["mean"] == pytest.approx(tuple(facts["mean"]))
        assert model.pretrained_cfg["std"] == pytest.approx(tuple(facts["std"]))
        assert model.pretrained_cfg["interpolation"] == facts["interpolation"]
        x = torch.rand(2, 3, 32, 32)
        torch.testing.assert_close(model(x), network.model(x))
