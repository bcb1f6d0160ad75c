"""replace_conv: what it swaps, what it refuses, and that the models still run and train."""

from __future__ import annotations

import functools
import re

import pytest
import timm
import torch
import torchvision
from timm.layers import Conv2dSame, ScaledStdConv2dSame, StdConv2dSame
from torch import nn

import nearsight
from nearsight import LocalAttention2d, QnA2d, replace_conv

OPTIONS = {
    "local": {"num_heads": 8},
    "qna": {"num_heads": 8},
    "explicit": {},
    "explicit_augmented": {},
    "attention_augmented": {"feature_size": 4, "key_channels": 16},
}


class Small(nn.Module):
    """Two spatial convolutions, one 1×1, and one shared under two names."""

    def __init__(self, **conv) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.point = nn.Conv2d(16, 16, 1)
        self.body = nn.Sequential(nn.Conv2d(16, 16, **{"kernel_size": 3, "padding": 1, **conv}), nn.ReLU())
        self.again = self.stem

    def forward(self, x):
        return self.body(self.point(self.stem(x)))


@pytest.mark.parametrize("layer", sorted(OPTIONS))
@pytest.mark.parametrize("source", ["timm", "torchvision"])
def test_resnet50_still_trains(layer: str, source: str):
    """Every spatial convolution, the 7×7 stem included: 17 of them, forward and backward."""
    model = (
        timm.create_model("resnet50", num_classes=4) if source == "timm" else torchvision.models.resnet50(num_classes=4)
    )
    spatial = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1)}
    done = replace_conv(model, layer, **OPTIONS[layer])
    assert [r.name for r in done] == list(spatial)
    assert len(done) == 17
    assert all(model.get_submodule(r.name) is r.new and r.old is spatial[r.name] for r in done)
    out = model(torch.randn(2, 3, 33, 40))
    assert out.shape == (2, 4)
    out.square().sum().backward()
    for r in done:
        for name, p in r.new.named_parameters():
            assert p.grad is not None, (r.name, name)


def test_output_sizes_are_those_of_the_convolution():
    for stride in (1, 2):
        for padding in (1, "same") if stride == 1 else (1,):
            model = Small(stride=stride, padding=padding)
            x = torch.randn(2, 3, 9, 12)
            want = model(x).shape
            for layer in ("local", "qna", "explicit", "explicit_augmented"):
                copy = Small(stride=stride, padding=padding)
                replace_conv(copy, layer, num_heads=4)
                assert copy(x).shape == want


def test_a_shared_convolution_stays_shared():
    model = Small()
    stem = model.stem
    done = replace_conv(model, "local", num_heads=4)
    assert [r.name for r in done] == ["stem", "body.0"]
    assert done[0].old is stem
    assert model.stem is model.again is done[0].new
    assert isinstance(model.point, nn.Conv2d)


def test_where():
    names = lambda **picks: [r.name for r in replace_conv(Small(), "local", num_heads=4, **picks)]  # noqa: E731
    assert names(where="body") == ["body.0"]
    assert names(where="again") == ["stem"]
    assert names(where=lambda name, conv: conv.in_channels == 3) == ["stem"]
    assert names(where=r"^s|body\.0$") == ["stem", "body.0"]


def test_arguments_come_from_the_convolution_and_options_overrule():
    model = Small(kernel_size=(3, 5), padding=(2, 4), dilation=2, bias=False)
    new = replace_conv(model, "local", num_heads=4, where="body")[0].new
    assert (new.in_channels, new.out_channels, new.kernel_size, new.dilation) == (16, 16, (3, 5), (2, 2))
    assert new.qkv.bias is None
    model = Small()
    new = replace_conv(model, LocalAttention2d, kernel_size=7, num_heads=2, where="body")[0].new
    assert new.kernel_size == (7, 7)
    assert new.qkv.bias is not None
    new = replace_conv(Small(), functools.partial(QnA2d, num_heads=2, kernel_size=5), where="body")[0].new
    assert isinstance(new, QnA2d)
    assert (new.num_heads, new.kernel_size) == (2, (5, 5))
    augmented = replace_conv(Small(groups=2), "explicit_augmented", num_heads=2, where="body")[0].new
    assert augmented.conv.groups == 2


@pytest.mark.parametrize("kind", [Conv2dSame, StdConv2dSame, ScaledStdConv2dSame])
@pytest.mark.parametrize("stride", [1, 2])
def test_tensorflows_padding_keeps_the_map(kind, stride: int):
    """As in timm's `tf_…` networks and NFNets, whose convolutions hold a padding of 0 and pad by themselves."""
    model = nn.Sequential(kind(4, 8, 3, stride=stride))
    sizes = [model(torch.randn(1, 4, *size)).shape for size in ((6, 8), (7, 5))]
    replace_conv(model, "local", num_heads=2)
    assert [model(torch.randn(1, 4, *size)).shape for size in ((6, 8), (7, 5))] == sizes


def test_a_function_gets_the_convolution():
    seen = []

    def make(conv: nn.Conv2d, width: int) -> nn.Module:
        seen.append(conv)
        return nn.Conv2d(conv.in_channels, conv.out_channels, width, padding=width // 2)

    model = Small(groups=4)
    body = model.body[0]
    done = replace_conv(model, make, where="body", width=5)
    assert seen == [body]
    assert done[0].new.kernel_size == (5, 5)


def test_mode_device_and_dtype_follow():
    model = Small().eval().double()
    new = replace_conv(model, "explicit", where="body")[0].new
    assert not new.training
    assert new.value.weight.dtype == torch.float64
    assert model(torch.randn(1, 3, 5, 5, dtype=torch.float64)).dtype == torch.float64
    with torch.device("meta"):
        model = Small()
    assert all(p.is_meta for p in replace_conv(model, "local", num_heads=4)[0].new.parameters())


@pytest.mark.parametrize(
    ("conv", "layer", "options", "error", "text"),
    [
        ({"groups": 4}, "local", {}, ValueError, "cannot replace 'body.0', Conv2d(16, 16, kernel_size=(3, 3), stride=(1, 1), "
         "padding=(1, 1), groups=4): LocalAttention2d: got groups=4, wanted 1: the layer has no groups; change that or leave "
         "it out with where=."),
        ({"stride": 3}, "local", {}, ValueError, "LocalAttention2d: got stride=3, wanted 1 or 2"),
        ({"stride": 2}, "window", {}, ValueError, "WindowAttention2d: got stride=2, wanted 1: the layer has no stride"),
        ({"dilation": 2, "padding": 2}, "qna", {}, ValueError, "QnA2d: got dilation=2, wanted 1: the layer has no dilation"),
        ({"padding": 0}, "local", {}, ValueError, "got padding=(0, 0) with kernel_size=(3, 3) and dilation=(1, 1), wanted the "
         "padding that keeps the map"),
        ({"padding": "valid"}, "explicit", {}, ValueError, "got padding='valid'"),
        ({"kernel_size": 4, "padding": 2}, "local", {}, ValueError, "got padding=(2, 2) with kernel_size=(4, 4)"),
        ({"padding_mode": "reflect"}, "local", {}, ValueError, "got padding_mode='reflect', wanted 'zeros'"),
        ({}, "local", {"num_heads": 5}, ValueError, "got out_channels=16 and num_heads=5"),
        ({}, "local", {"num_head": 4}, ValueError, "got the unknown argument 'num_head', wanted one of in_channels"),
        ({}, "attention_augmented", {}, ValueError, "AttentionAugmentedConv2d: got no feature_size, wanted it as an option"),
        ({}, "conv", {}, ValueError, "replace_conv: got layer='conv', wanted one of 'local', 'qna'"),
        ({}, 3, {}, TypeError, "replace_conv: got layer of type int, wanted a name, a layer class, or a function"),
        ({}, lambda conv: "no", {}, TypeError, "replace_conv: got str as the replacement of 'body.0', wanted a torch.nn.Module"),
        ({}, "local", {"where": "nowhere"}, ValueError, "2 spatial convolutions of which where='nowhere' picks none"),
        ({}, "local", {"where": "(body"}, ValueError, "got where='(body', wanted a regular expression (missing ), unterminated"),
        ({}, "local", {"where": 7}, TypeError, "got where of type int, wanted a regular expression"),
    ],
)  # fmt: skip
def test_refuses_and_changes_nothing(conv, layer, options, error, text):
    model = Small(**conv)
    before = [type(m) for m in model.modules()]
    with pytest.raises(error, match=re.escape(text)):
        replace_conv(model, layer, **{"where": "body", **options})
    assert [type(m) for m in model.modules()] == before


def test_all_or_nothing():
    """The first of two could be replaced, the second not: neither is."""
    model = Small(groups=4)
    with pytest.raises(ValueError, match=r"cannot replace 'body\.0'"):
        replace_conv(model, "local", num_heads=4)
    assert isinstance(model.stem, nn.Conv2d)


def test_refuses_other_things():
    with pytest.raises(TypeError, match="got model of type str, wanted a torch"):
        replace_conv("resnet50")
    with pytest.raises(TypeError, match="got a bare convolution, wanted a model around it"):
        replace_conv(nn.Conv2d(3, 8, 3))
    with pytest.raises(ValueError, match="got the lazy convolution '0', wanted known channels"):
        replace_conv(nn.Sequential(nn.LazyConv2d(8, 3, padding=1)))


def test_is_public():
    assert nearsight.replace_conv is replace_conv
