"""What was trained is used: evaluation, labels, timm's hub format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image

from nearsight.errors import UserError
from nearsight.train.data.config import DataConfig
from nearsight.train.data.sources import open_source
from nearsight.train.engine import fit
from nearsight.train.inference import evaluate, load_network, pixels_of, predict, push
from nearsight.train.tasks import task_class
from tests.train.support import small


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("run")
    options = {"name": "sasa_resnet_nano", "drop_path": None, "options": {"stages": "ccca"}}
    data = {"crop_pct": 0.9, "interpolation": "bicubic"}
    result = fit(small(model=options, data=data, train={"max_steps": 6}), folder, quiet=True)
    return folder, result


def test_evaluation_repeats_the_runs_own(run: Any) -> None:
    folder, result = run
    averaged, raw = evaluate(folder, device="cpu"), evaluate(folder, average=False, device="cpu")
    assert (averaged["weights"], raw["weights"]) == ("ema", "model")
    assert averaged["accuracy"] == result.metrics["ema_accuracy"]
    assert raw["accuracy"] == result.metrics["accuracy"]
    assert raw["loss"] == pytest.approx(result.metrics["loss"], rel=1e-6)
    assert (
        evaluate(folder, ["data.on_device=false", "data.eval_batch_size=31"], device="cpu")["accuracy"]
        == averaged["accuracy"]
    )


def test_other_images_are_normalised_as_those_of_the_training_were(run: Any, tmp_path: Path) -> None:
    """The same digits as files: of a folder nobody states the mean, and ImageNet's is not what the network was trained with."""
    test: Any = open_source(load_network(run[0]).data).evaluation
    for index in range(len(test)):
        image, label = test.read(index)
        for split in ("train", "test"):
            (tmp_path / split / str(label)).mkdir(parents=True, exist_ok=True)
            image.save(tmp_path / split / str(label) / f"{index}.png")
    own, other = evaluate(run[0], device="cpu"), evaluate(run[0], [f"data.source=folder:{tmp_path}"], device="cpu")
    assert (other["accuracy"], other["images"]) == (own["accuracy"], 450)
    assert other["loss"] == pytest.approx(own["loss"], rel=1e-5)
    all_of_it = evaluate(run[0], [f"data.source=folder:{tmp_path / 'test'}"], device="cpu")
    assert (all_of_it["accuracy"], all_of_it["images"]) == (own["accuracy"], 450)
    assert all_of_it["notes"] == [f"folder:{tmp_path / 'test'} has no splits: all of its 450 images are evaluated"]
    some = evaluate(run[0], [f"data.source=folder:{tmp_path / 'test'}", "data.holdout=0.1"], device="cpu")
    assert (some["images"], some["notes"]) == (
        45,
        [f"data.holdout=0.1: that share of folder:{tmp_path / 'test'} is evaluated; all: data.holdout=0"],
    )
    shifted = evaluate(run[0], [f"data.source=folder:{tmp_path}", "data.mean=[0.9]"], device="cpu")
    assert shifted["loss"] != pytest.approx(own["loss"], rel=1e-4)


def test_what_a_run_was_trained_with_is_no_fault_of_its_evaluation(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later versions may refuse settings that earlier ones took; those that are new are checked as ever."""
    before = DataConfig.faults
    monkeypatch.setattr(DataConfig, "faults", lambda data: ["data.crop: no longer taken", *before(data)])
    assert evaluate(run[0], device="cpu")["accuracy"] == run[1].metrics["ema_accuracy"]
    with pytest.raises(UserError, match=r"step-\d+: data\.eval_split: got test with data\.holdout=0\.1, whose"):
        evaluate(run[0], ["data.holdout=0.1", "data.eval_split=test"], device="cpu")


def test_evaluation_wants_the_same_classes(run: Any, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "val" / name).mkdir(parents=True)
        (tmp_path / "train" / name).mkdir(parents=True)
        for split in ("train", "val"):
            Image.new("L", (9, 7)).save(tmp_path / split / name / "a.png")
    with pytest.raises(UserError, match="has 2 classes, the checkpoint 10; wanted the same ones"):
        evaluate(run[0], [f"data.source=folder:{tmp_path}"], device="cpu")


def test_another_network_is_not_what_was_trained(run: Any) -> None:
    with pytest.raises(UserError, match=r"got other keys of model for a trained network, wanted only those of data"):
        evaluate(run[0], ["model.name=qna_vit_nano"], device="cpu")


def test_predictions_are_the_networks(run: Any, tmp_path: Path) -> None:
    network = load_network(run[0])
    test: Any = open_source(network.data).evaluation
    files = []
    for i in range(3):
        files.append(tmp_path / f"{i}.png")
        test.read(i)[0].save(files[-1])
    found = predict(network, files, top=4)
    logits = network.model(pixels_of(network, [test.read(i)[0] for i in range(3)]))
    for one, row in zip(found, logits.softmax(1), strict=True):
        assert one.labels == [str(int(i)) for i in row.topk(4).indices]
        assert one.probabilities == pytest.approx(row.topk(4).values.tolist(), abs=1e-5)
    assert len(predict(network, files[:1], top=99)[0].labels) == 10
    many = files * 43  # two parts of 64, and a rest
    again = [found[i % 3]._replace(labels=found[i % 3].labels[:1]) for i in range(129)]
    assert [(one.file, one.labels) for one in predict(network, many, top=1)] == [
        (one.file, one.labels) for one in again
    ]
    with pytest.raises(UserError, match="no image file"):
        predict(network, [tmp_path / "gone.png"])
    files[0].write_text("no image")
    with pytest.raises(UserError, match=r"0\.png: not an image\.$"):
        predict(network, files)


def test_options_taken_back_do_not_reach_the_hub(tmp_path: Path) -> None:
    options = {"name": "sasa_resnet_nano", "drop_path": None, "options": {"stages": "cccc", "another_recipes": None}}
    fit(small(model=options, train={"max_steps": 1}), tmp_path / "run", quiet=True)
    folder = push(tmp_path / "run", f"local-dir:{tmp_path / 'hub'}")
    assert timm.create_model(f"local-dir:{folder}", pretrained=True).num_classes == 10


def test_pushing_nowhere_is_one_sentence(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"got the target 'local-dir:', wanted local-dir:FOLDER or OWNER/NAME\.$"):
        push(run[0], "local-dir:")

    (tmp_path / "hub" / "model.safetensors").mkdir(parents=True)
    with pytest.raises(UserError, match=r"cannot write '.*hub' \(.*Is a directory.*\)\.$"):
        push(run[0], f"local-dir:{tmp_path / 'hub'}")

    def unreachable(*args: Any, **keys: Any) -> None:
        raise ConnectionError("Name or service\nnot known")

    monkeypatch.setattr("timm.models._hub.push_to_hf_hub", unreachable)
    with pytest.raises(UserError, match=r"cannot push to 'a/b' on the Hugging Face hub \(ConnectionError: Name or ser"):
        push(run[0], "a/b")


def test_a_card_that_describes_no_network_is_refused(run: Any, tmp_path: Path) -> None:
    shutil.copytree(run[0], tmp_path / "run")
    (state,) = (tmp_path / "run" / "checkpoints").glob("*6/state.json")
    saved = json.loads(state.read_text())
    for card, sentence in (({"model": {"name": "resnet18"}}, "its card describes no network"), (None, "lacks 'card'")):
        state.write_text(json.dumps({k: v for k, v in {**saved, "card": card}.items() if v is not None}))
        with pytest.raises(UserError, match=sentence):
            load_network(state.parent)


@pytest.mark.parametrize("name", ["resnet_nano.cifar10", "qna_vit_nano.cifar10", "expatt_resnet_nano.cifar10"])
def test_hub_round_trip_of_a_network_with_a_tag(name: str, tmp_path: Path) -> None:
    """The tag stands for a wider network than the plain name, which the hub's format has for an architecture."""
    folder = push(name, f"local-dir:{tmp_path / 'hub'}")
    images = torch.randn(2, 3, 16, 19)
    back = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert torch.equal(back(images), load_network(name).model(images))


def test_hub_round_trip_of_a_nano_network(tmp_path: Path) -> None:
    fit(small(model={"name": "resnet_nano"}, train={"max_steps": 1}), tmp_path / "run", quiet=True)
    folder = push(tmp_path / "run", f"local-dir:{tmp_path / 'hub'}")
    back = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = torch.randn(2, 1, 8, 11)
    assert torch.equal(back(images), load_network(tmp_path / "run").model(images))


def test_a_network_that_went_on_from_published_weights(tmp_path: Path) -> None:
    config: Any = small(model={"name": "resnet_nano", "pretrained": True}, train={"max_steps": 1})
    trained = fit(config, tmp_path, quiet=True)
    network = load_network(tmp_path)
    assert sum(p.numel() for p in network.model.parameters()) == trained.parameters
    facts = task_class("classify").facts(config)
    assert sum(p.numel() for p in facts.model.parameters()) == trained.parameters


def test_hub_round_trip(run: Any, tmp_path: Path) -> None:
    network = load_network(run[0])
    folder = push(run[0], f"local-dir:{tmp_path / 'hub'}")
    assert sorted(p.name for p in Path(folder).iterdir()) == ["config.json", "model.safetensors"]
    back = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = torch.randn(2, 1, 8, 11)
    assert torch.equal(back(images), network.model(images))
    settings = timm.data.resolve_model_data_config(back)
    assert list(settings["input_size"]) == [1, 8, 8]
    assert list(settings["mean"]) == pytest.approx([0.305])
    assert (settings["crop_pct"], settings["interpolation"]) == (0.9, "bicubic")
    assert back.pretrained_cfg["label_names"] == [str(n) for n in range(10)]
