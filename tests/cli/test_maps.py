"""`nearsight maps`: the files it leaves, what it prints, and what it says to mistakes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import nearsight
from nearsight.cli import main
from nearsight.cli.pictures import open_network, open_picture, shown

pytest.importorskip("matplotlib", reason="pictures need the extra viz")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two short runs on digits."""
    folder = tmp_path_factory.mktemp("runs")
    for recipe, name in (("digits/qna_nano", "qna"), ("digits/expatt_nano", "expatt")):
        words = ["train", recipe, "--out", str(folder / name), "--json", "train.device=cpu", "log.every=1"]
        assert main([*words, "train.max_steps=2", "data.image_size=16", "log.tensorboard=false"]) == 0
    return folder


def document(capsys, *words):
    capsys.readouterr()
    assert main(["maps", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def mistake(capsys, *words):
    capsys.readouterr()
    assert main(["maps", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def test_all_figures_of_a_run(runs, tmp_path, capsys):
    found = document(capsys, str(runs / "qna"), "test:3", "-o", str(tmp_path / "out"), "--layers", "stages.1.blocks.0")
    layer = "stages.1.blocks.0.mixer"
    assert [row["figure"] for row in found["figures"]] == ["received", "given", "kernels", "parts"]
    assert {row["layer"] for row in found["figures"]} == {layer}
    for row in found["figures"]:
        assert [Path(file).suffix for file in row["files"]] == [".png", ".svg", ".npz"]
        assert all(Path(file).stat().st_size > 500 for file in row["files"])
    opened = open_network(str(runs / "qna"))
    x = opened.prepare(open_picture(opened, "test:3"))
    maps = nearsight.attention_maps(opened.model, x[None], layer, [(8, 8)])[layer]
    numbers = np.load(found["figures"][0]["files"][2])
    assert np.allclose(numbers["received"], maps.received[0], atol=1e-5)
    assert np.allclose(np.load(found["figures"][1]["files"][2])["weights"], maps.weights[0, 0], atol=1e-5)
    assert numbers["image"].shape == (16, 16)
    assert 0 <= numbers["image"].min() < numbers["image"].max() <= 1


def test_chosen_figures_pixels_and_heads(runs, tmp_path, capsys):
    words = [str(runs / "expatt"), "test:0", "test:1", "-o", str(tmp_path), "--figures", "given,radius"]
    found = document(
        capsys, *words, "--pixels", "3,12", "--pixels", "0,0", "--heads", "1-2", "--layers", "layer2,layer2.0"
    )
    assert [(row["figure"], row["image"], row["pixel"]) for row in found["figures"]] == [
        ("given", "test0", [3, 12]),
        ("given", "test0", [0, 0]),
        ("given", "test1", [3, 12]),
        ("given", "test1", [0, 0]),
        ("radius", "", None),
    ]
    assert np.load(found["figures"][0]["files"][2])["heads"].tolist() == [1, 2]


def test_images_of_one_name_keep_their_pictures(runs, tmp_path, capsys):
    for kind in ("png", "bmp"):
        Image.new("RGB", (20, 20), "red" if kind == "png" else "blue").save(tmp_path / f"a.{kind}")
    files = [str(tmp_path / "a.png"), str(tmp_path / "a.bmp")]
    words = ["--figures", "given", "--layers", "layer2.0.conv2", "-o", str(tmp_path / "out")]
    found = document(capsys, str(runs / "expatt"), *files, *words)
    assert [row["image"] for row in found["figures"]] == ["a", "a-1"]
    assert len({file for row in found["figures"] for file in row["files"]}) == 6


def test_several_runs(runs, tmp_path, capsys):
    # Two evaluations, so that the last one is not any one.
    log = runs / "expatt" / "log.jsonl"
    rows = log.read_text().splitlines()
    first = {**json.loads(next(row for row in rows if '"eval"' in row)), "accuracy": 0.03125, "step": 1}
    log.write_text("\n".join([json.dumps(first), *rows, ""]))
    found = document(capsys, str(runs / "qna"), str(runs / "expatt"), "--compare", "-o", str(tmp_path))
    assert [row["figure"] for row in found["figures"]] == ["curves", "costs", "radius"]
    costs = np.load(tmp_path / "accuracy-against-cost.npz")
    assert costs["runs"].tolist() == ["qna", "expatt"]
    assert costs["parameters"].min() > 100_000
    curves = np.load(tmp_path / "curves.npz")
    assert costs["accuracy"][1] == curves["expatt/eval/accuracy"][-1] != curves["expatt/eval/accuracy"][0] == 0.03125
    assert len(curves["expatt/train/loss"]) == 2
    assert len(np.load(tmp_path / "radius-against-depth.npz")["expatt/mean"]) == 4


def test_an_untrained_network_and_an_image_file(tmp_path, capsys):
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "noise.png")
    words = ["sasa_resnet_nano", str(tmp_path / "noise.png"), "--layers", "layer1", "-o", str(tmp_path / "out")]
    found = document(capsys, *words)
    assert found["notes"] == ["sasa_resnet_nano has untrained weights: the maps show its initialisation."]
    assert [row["figure"] for row in found["figures"]] == ["received", "given", "parts", "embeddings"]
    assert found["figures"][0]["image"] == "noise"
    assert main(["maps", *words, "--figures", "embeddings"]) == 0
    out = capsys.readouterr().out
    assert "layer1.0.conv2_embeddings.png" in out
    assert "untrained" in out


def test_the_stem_of_a_large_network(tmp_path, capsys):
    found = document(
        capsys, "sasa_resnet26", "--figures", "mixture,embeddings", "--layers", "conv1*", "-o", str(tmp_path)
    )
    assert sorted(row["figure"] for row in found["figures"]) == ["embeddings", "mixture"]


def test_built_in_pictures_are_undone_for_drawing():
    opened = open_network("qna_vit_nano")
    image = open_picture(opened, "flower")
    x = opened.prepare(image)
    drawn = shown(opened, x)
    assert drawn.shape == (*x.shape[1:], 3)
    mean = torch.tensor(np.asarray(image)).float().mean((0, 1)) / 255
    assert np.allclose(drawn.mean((0, 1)), mean, atol=0.1)


def test_mistakes(runs, tmp_path, capsys):
    run = str(runs / "qna")
    assert mistake(capsys, "qna_vit_nanno", "flower") == (
        "nearsight maps: no run, checkpoint or network 'qna_vit_nanno'. Did you mean 'qna_vit_nano'? Ours: nearsight models."
    )
    assert "no run, checkpoint or network 'sasa_resnet_nano.cifar'. Did you mean 'sasa_resnet_nano.cifar10'?" in (
        mistake(capsys, "sasa_resnet_nano.cifar", "flower")
    )
    assert mistake(capsys, "runs/none", "flower") == "nearsight maps: no run or checkpoint 'runs/none'."
    assert (
        mistake(capsys, "qna_vit_nano")
        == "nearsight maps: got no image for qna_vit_nano; give a file, or flower or china."
    )
    assert "no image 'flwer'; wanted a file, test:N, or one of flower, china." in mistake(capsys, run, "flwer")
    assert "test:450: the evaluation split of 'digits' has 450 images, from 0 on." in mistake(capsys, run, "test:450")
    assert "got the image 'test:x', wanted test:N with N from 0 on." in mistake(capsys, run, "test:x")
    assert "which was not trained here; give an image file." in mistake(capsys, "qna_vit_nano", "test:0")
    assert "got the image 'test:²', wanted test:N with N from 0 on." in mistake(capsys, run, "test:²")
    assert "--pixels: got '²,8', wanted Y,X as in 8,12" in mistake(capsys, run, "--pixels", "²,8")
    assert "--heads: got '0-²', wanted numbers from 0 on" in mistake(capsys, run, "--heads", "0-²")
    assert "--pixels: got '8', wanted Y,X as in 8,12" in mistake(capsys, run, "--pixels", "8")
    assert "got the pixel (8, 99), wanted (y, x) inside 16×16." in mistake(capsys, run, "--pixels", "8,99")
    assert "--heads: got 'x', wanted numbers from 0 on, as in 0,2-5." in mistake(capsys, run, "--heads", "x")
    said = re.search(r"--heads: got 99, wanted 0 to (\d+): no layer", mistake(capsys, run, "--heads", "0,99"))
    beyond = int(said[1]) + 1
    assert f"--heads: got {beyond}, wanted 0 to {beyond - 1}" in mistake(capsys, run, "--heads", f"0-{beyond}")
    assert "--figures: no figure 'recieved'. Did you mean 'received'?" in mistake(capsys, run, "--figures", "recieved")
    assert "no attention layer is named 'stages.9'." in mistake(capsys, run, "--layers", "stages.9")
    assert mistake(capsys, f"local-dir:{tmp_path}", "flower") == (
        f"nearsight maps: cannot load 'local-dir:{tmp_path}' (FileNotFoundError: Config file not found: "
        f"{tmp_path}/config.json); wanted what nearsight push writes."
    )
    assert "cannot load 'hf-hub:' (" in mistake(capsys, "hf-hub:", "flower")
    assert "has none of the figures asked for" in mistake(capsys, run, "--figures", "mixture")
    assert mistake(capsys, "nowhere", "--compare") == (
        "nearsight maps: no run 'nowhere'; --compare takes runs' folders and the names of shipped networks."
    )
    assert "which has no attention layer of nearsight" in mistake(capsys, "resnet10t", "flower")
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    assert mistake(capsys, run, str(bad)) == f"nearsight maps: {bad}: not an image."


@pytest.mark.parametrize("recipe", ["digits/expatt_nano", "faces/qna_autoencoder"])
def test_images_of_a_run_are_those_it_was_evaluated_on(recipe, tmp_path, capsys, monkeypatch):
    """Held out of training images where there is no split for it; images alone where the task asks for no classes."""
    from nearsight.train.data.sources import open_source, split_source
    from nearsight.train.tasks import config_from

    labelled, images, run = "digits" in recipe, tmp_path / "images", tmp_path / "run"
    for number in range(12):
        file = images / ("ab"[number % 2] if labelled else "") / f"{number:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (20 * number, 255 - 20 * number, 99)).save(file)
    words = ["train", recipe, f"data.source=folder:{images}", "data.holdout=0.5", "train.seed=3", "data.image_size=32"]
    words += ["data.channels=3", "data.batch_size=4", "train.max_steps=1", "train.device=cpu", "log.tensorboard=false"]
    assert main([*words, "--out", str(run), "--json"]) == 0
    opened = open_network(str(run))
    config = config_from(json.loads((next(run.rglob("state.json"))).read_text())["config"], "")
    held = split_source(open_source(config.data, labelled=labelled), config.data, 3)[1]
    for number in range(6):
        assert np.array_equal(open_picture(opened, f"test:{number}"), held.read(number)[0])
    layer = nearsight.viz.maps.attention_layers(opened.model)
    found = document(capsys, str(run), "-o", str(tmp_path / "out"), "--layers", next(iter(layer)), "--figures", "given")
    assert [row["image"] for row in found["figures"]] == ["test0"]
    assert "test:6: the evaluation split of " in mistake(capsys, str(run), "test:6")

    for file in images.rglob("*.png"):
        file.write_bytes(b"no image")
    assert re.search(r"test:0: .*not an image", mistake(capsys, str(run), "test:0"))
    images.rename(tmp_path / "elsewhere")
    assert re.search(
        rf"^nearsight maps: test:0: data\.source: no folder '{images}'; .*; or give an image file, or flower or china\.$",
        mistake(capsys, str(run)),
    )


def test_images_that_come_as_a_stream_have_no_numbers(runs, capsys, monkeypatch):
    from nearsight.train.data import sources

    stream = sources.Source([], [], ["a", "b"], (0.5,), (0.5,), streamed=True)
    monkeypatch.setattr(sources, "open_source", lambda data, labelled: stream)
    assert mistake(capsys, str(runs / "qna")) == (
        "nearsight maps: test:0: 'digits' is read from its beginning to its end alone; give an image file."
    )
