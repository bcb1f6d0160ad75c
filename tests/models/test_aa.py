"""The AA networks: parameters beside the published ones, table sizes, masks."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from torch import nn

import nearsight  # noqa: F401  (registers the models)
from nearsight.layers.augmented import AttentionAugmentedConv2d

TINY = {"layers": (1, 1, 1, 1), "channels": (32, 32, 32, 48), "stem_width": 16, "key_channels": 16, "num_classes": 5}


def build(name: str, **options) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **options)


def tiny(**options) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("aa_resnet50_cifar", **{**TINY, "zero_init_last": False, **options})


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("aa_resnet34", 20.697),
        ("aa_resnet50", 25.786),
        ("aa_resnet101", 45.363),
        ("aa_resnet152", 61.562),
        ("aa_resnet50_cifar", 23.989),
        ("aa_mobilenetv2_100", 3.743),
    ],
)
def test_parameters(name: str, count: float):
    assert sum(p.numel() for p in build(name).parameters()) / 1e6 == pytest.approx(count, abs=0.002)


def test_tables_fit_the_maps_of_the_image():
    """Attention of a strided convolution runs on its input's map, so the first block of a stage has the larger tables."""
    layers = {n: m for n, m in build("aa_resnet50", img_size=(224, 160)).named_modules() if hasattr(m, "feature_size")}
    sizes = {n.removesuffix(".conv2.attention"): m.feature_size for n, m in layers.items()}
    assert sizes["layer2.0"] == (56, 40)
    assert sizes["layer2.1"] == sizes["layer3.0"] == (28, 20)
    assert sizes["layer3.1"] == sizes["layer4.0"] == (14, 10)
    assert sizes["layer4.2"] == (7, 5)
    assert layers["layer2.0.conv2.attention"].rel_row.shape == (1, 111, 20)
    assert layers["layer2.0.conv2.attention"].rel_col.shape == (1, 79, 20)
    widths = [m.attention_channels for m in build("aa_resnet50").modules() if isinstance(m, AttentionAugmentedConv2d)]
    assert widths == [16] * 4 + [24] * 6 + [48] * 3


def test_relative_tables_train():
    model = tiny()
    model(torch.randn(2, 3, 16, 9)).square().sum().backward()
    tables = {n: p for n, p in model.named_parameters() if "rel_" in n}
    assert len(tables) == 8
    assert model.no_weight_decay() == set(tables)
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        # A 1-pixel-wide map has no offset but 0, whose embedding shifts all logits alike.
        assert p.grad.any() or "layer4" in name, name


@pytest.mark.parametrize("size", [(8, 8), (33, 17), (32, 48)])
def test_any_image_size(size: tuple[int, int]):
    out = tiny()(torch.randn(2, 3, *size))
    assert out.shape == (2, 5)
    assert torch.isfinite(out).all()


def test_what_is_masked_does_not_matter():
    model = tiny().eval()
    x, mask = torch.randn(2, 3, 19, 24), torch.zeros(2, 19, 24, dtype=torch.bool)
    mask[:, :12, :17] = True
    dirty = x.masked_fill(~mask[:, None], math.nan)
    assert torch.equal(model(dirty, mask), model(x, mask))
    assert not torch.allclose(model(x, mask), model(x))
    everything = torch.ones_like(mask)
    torch.testing.assert_close(model(x, everything), model(x), atol=1e-5, rtol=1e-4)


def test_checkpointing_with_a_mask_changes_nothing():
    model = tiny().eval()
    x, mask = torch.randn(2, 3, 19, 24), torch.rand(2, 19, 24) > 0.2
    parameters = list(model.parameters())
    want = torch.autograd.grad(model(x, mask).square().sum(), parameters)
    model.set_grad_checkpointing()
    for got, gradient in zip(torch.autograd.grad(model(x, mask).square().sum(), parameters), want, strict=True):
        torch.testing.assert_close(got, gradient)
