"""Every shipped recipe: its header; of classifiers the keys, one step of network and optimiser on stand-in images."""

from __future__ import annotations

import re

import pytest
import torch

from nearsight import recipes
from nearsight.errors import UserError
from nearsight.train.config import to_yaml
from nearsight.train.data.augment import draw, gather, normalise, pad_images
from nearsight.train.data.decoded import eval_transform, train_transform
from nearsight.train.preview import preview
from nearsight.train.schedule import build_optimizer, learning_rates
from nearsight.train.tasks import config_from, load_config
from nearsight.train.tasks.classify import create_network

# transformers asks whether its mask is all true, which a tensor without memory cannot say.
UNCOUNTED = ("coco/detr_qna_vit_tiny",)
CLASSIFIERS = [name for name in recipes.names() if load_config(name).task == "classify"]
CLASSES = {"digits": 10, "cifar10": 10, "cifar100": 100, "imagenet": 1000, "tiny_imagenet": 200}
WANTED = {
    *(f"digits/{n}_nano" for n in ("sasa", "qna", "expatt", "conv")),
    *(f"cifar{c}/{n}resnet50" for c in (10, 100) for n in ("", "aa_", "expatt_", "short_", "short_expatt_")),
    *(f"cifar{c}/short_{n}" for c in (10, 100) for n in ("sasa_resnet26", "resnet26", "qna_vit")),
    *(f"imagenet/sasa_resnet{d}" for d in (26, 38, 50)),
    *(f"imagenet/qna_vit_{n}" for n in ("tiny", "tiny_7x7", "small", "base")),
    *(f"imagenet/{m}_resnet{d}" for m in ("aa", "expatt") for d in (34, 50, 101, 152)),
    "imagenet/plain90",
    *(f"tiny_imagenet/{n}mobilenetv2" for n in ("", "aa_", "expatt_")),
    *(f"coco/sasa_retinanet50{n}" for n in ("", "_convstem", "_convheads", "_convstem_convheads")),
    *("coco/retinanet50", "coco/detr_qna_vit_tiny", "bccd/sasa_retinanet"),
}


def test_what_the_papers_need_is_there():
    assert set(recipes.names()) >= WANTED


@pytest.mark.parametrize("name", recipes.names())
def test_header(name):
    lines = recipes.header(name)
    assert lines[0].startswith(f"nearsight train {name}")
    facts = dict(line.split(": ", 1) for line in lines[1:] if re.match(r"\w+: ", line))
    assert {"hardware", "time", "expected"} <= set(facts)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_builds_and_steps(name):
    """The recipe's network on the meta device: forward, loss, backward, one step of its optimiser, its learning rates."""
    config = load_config(name)
    assert config_from(recipes.read_yaml(to_yaml(config), name), name) == config
    data = config.data
    with torch.device("meta"):
        model = create_network(config.model, num_classes=CLASSES[name.partition("/")[0]], in_chans=data.channels)
        images = torch.empty(2, data.channels, data.image_size, data.image_size)
    optimizer = build_optimizer(model, config.optimizer, data.batch_size)
    model.train()(images).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    rates = [lr for _, lr in learning_rates(config, data.batch_size, steps_per_epoch=100)]
    assert max(rates) > rates[-1] >= 0
    assert min(rates) >= 0


@pytest.mark.parametrize(
    "name", ["cifar100/short_resnet26", *(pytest.param(n, marks=pytest.mark.slow) for n in recipes.names())]
)
def test_says_what_it_would_do_without_its_data(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NEARSIGHT_DATA", raising=False)
    facts = preview(load_config(name))
    assert facts["steps"] > 0
    assert facts["parameters"] > 100_000
    memory = facts["memory_bytes"]
    assert (memory["activations"] is None) == (memory["activations_with_kernels"] is None) == (name in UNCOUNTED)
    assert facts["classes"] == CLASSES.get(name.partition("/")[0], facts["classes"])
    assert any("data not opened" in note for note in facts["notes"]) == (not name.startswith("digits/"))


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_prepares_an_image(name):
    from PIL import Image

    config = load_config(name)
    data, size = config.data, config.data.image_size
    image = Image.new("L" if data.channels == 1 else "RGB", (size + 9, size + 4), 77)
    for transform in (eval_transform(data), train_transform(data, (0.5,) * data.channels)):
        assert tuple(torch.as_tensor(transform(image)).shape) == (data.channels, size, size)
    if data.augment.needs_workers is None:
        pixels = pad_images(torch.zeros(3, size, size, data.channels, dtype=torch.uint8), data.augment)
        choice = draw(data.augment, 2, (size, size), torch.Generator().manual_seed(0))
        batch = gather(pixels, torch.tensor([2, 0]), (size, size), choice)
        one = torch.ones(data.channels)
        assert normalise(batch, one, one, True).shape == (2, data.channels, size, size)


def test_expatt_restarts_where_the_paper_says():
    config = load_config("cifar10/expatt_resnet50")
    rates = dict(learning_rates(config, 128, steps_per_epoch=1, points=450))
    assert rates[15] == pytest.approx(0.05)
    for epoch in (25, 45, 85, 165):
        assert rates[epoch] == pytest.approx(0.05)
        assert rates[epoch - 1] < 0.003
    assert rates[324] < 1e-4
    assert {rates[epoch] for epoch in range(325, 450)} == {2e-4}


def test_extends_is_laid_under():
    short, sasa = (load_config(f"cifar10/short_{n}resnet26") for n in ("", "sasa_"))
    assert sasa.data == short.data
    assert sasa.model.options == {"stem": "cifar", "stages": "aaaa", "per_head_position": True}


def test_unknown_names_and_circles_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"^no recipe 'digits/sasa_nanno'. Did you mean 'digits/sasa_nano'\?"):
        recipes.resolve("digits/sasa_nanno")
    with pytest.raises(UserError, match=r"no recipe file 'gone\.yaml'"):
        recipes.resolve("gone.yaml")
    path = tmp_path / "own.yaml"
    path.write_text(f"extends: {path}\n")
    with pytest.raises(UserError, match="extends itself"):
        recipes.resolve(str(path))
    path.write_text("extends: digits/conv_nano\nschedule: {epochs: 2}\n")
    assert load_config(str(path)).schedule.epochs == 2


def test_a_file_extends_the_one_beside_it_from_wherever_it_is_called(tmp_path, monkeypatch):
    for folder in ("recipes", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "recipes" / "base.yaml").write_text("extends: digits/conv_nano\nschedule: {epochs: 2}\n")
    (tmp_path / "recipes" / "own.yaml").write_text("extends: base.yaml\ntrain: {seed: 5}\n")
    (tmp_path / "recipes" / "loop.yaml").write_text("extends: ../recipes/loop.yaml\n")
    for here, name in ((tmp_path / "elsewhere", "../recipes/own.yaml"), (tmp_path, "recipes/own.yaml")):
        monkeypatch.chdir(here)
        config = load_config(name)
        assert (config.schedule.epochs, config.train.seed) == (2, 5)
    with pytest.raises(UserError, match="extends itself"):
        recipes.resolve("recipes/loop.yaml")
