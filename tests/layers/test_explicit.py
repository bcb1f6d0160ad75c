"""ExplicitAttention2d."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn import functional as F

import nearsight
from nearsight import ExplicitAttention2d
from nearsight.ops import explicit_weights
from nearsight.ops.explicit.call import FIXED_KINDS, KINDS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stride", [1, 2])
def test_is_the_papers_module(kind: str, stride: int):
    """Norm(G + 1) X W_v W_o, then the 3×3 average; on a map with odd and even sides."""
    layer = ExplicitAttention2d(6, 4, kind=kind, stride=stride).double()
    x = torch.randn(2, 6, 5, 8, dtype=torch.float64)
    radius = None if layer.radius is None else layer.radius.detach()
    weights = explicit_weights((5, 8), kind=kind, radius=radius)[0, :, 0].flatten(1).double()
    pixels = x.flatten(2).transpose(1, 2) @ layer.value.weight.T
    want = (weights @ pixels @ layer.proj.weight.T).transpose(1, 2).unflatten(2, (5, 8))
    if stride == 2:
        want = F.avg_pool2d(want, 3, 2, padding=1, count_include_pad=False)
    torch.testing.assert_close(layer(x), want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_a_gradient(kind: str):
    layer = ExplicitAttention2d(6, 4, kind=kind, num_heads=2, per_head=True)
    layer(torch.randn(2, 6, 5, 7)).square().sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().min() > 0, name
    assert (layer.log_radius is None) == (kind in FIXED_KINDS)


def test_the_radius_learns():
    """Pixels that should copy themselves pull the radius down, pixels that should average push it up."""
    for target, smaller in (("self", True), ("mean", False)):
        torch.manual_seed(0)
        layer = ExplicitAttention2d(4, 4, kind="gaussian", offset=0.0)
        with torch.no_grad():
            layer.value.weight.copy_(torch.eye(4))
            layer.proj.weight.copy_(torch.eye(4))
        optimizer = torch.optim.SGD([layer.log_radius], lr=1.0)
        x = torch.randn(4, 4, 6, 9)
        want = x if target == "self" else x.mean((2, 3), keepdim=True).expand_as(x)
        for _ in range(20):
            optimizer.zero_grad()
            F.mse_loss(layer(x), want).backward()
            optimizer.step()
        assert (layer.radius.item() < 0.75) == smaller


@torch.no_grad()
def test_projections_start_with_unit_variance():
    torch.manual_seed(0)
    layer = ExplicitAttention2d(256, 128)
    assert layer.value(torch.randn(50, 256)).std() == pytest.approx(1, abs=0.1)
    assert layer.proj(torch.randn(50, 128)).std() == pytest.approx(1, abs=0.1)


def test_starts_at_the_papers_radius():
    assert ExplicitAttention2d(8, 8).radius.item() == pytest.approx(0.75)
    assert ExplicitAttention2d(8, 8, radius=0.2, num_heads=4, per_head=True).radius.tolist() == pytest.approx([0.2] * 4)


@pytest.mark.parametrize("stride", [1, 2])
def test_padding_with_a_mask_changes_nothing(stride: int):
    """The kinds measure distance in map sizes, so only the constant one is free of the padded size."""
    layer = ExplicitAttention2d(6, 4, kind="constant", stride=stride)
    x = torch.randn(2, 6, 5, 7)
    padded = F.pad(x, (0, 3, 0, 4), value=math.nan)
    mask = F.pad(torch.ones(2, 5, 7), (0, 3, 0, 4)).bool()
    want = layer(x)
    got = layer(padded, mask)[..., : want.shape[2], : want.shape[3]]
    torch.testing.assert_close(got, want)


def test_the_pool_averages_valid_pixels_only():
    layer = ExplicitAttention2d(6, 4, stride=2)
    plain = copy.deepcopy(layer)
    plain.stride = 1
    x, mask = torch.randn(2, 6, 7, 8), torch.rand(2, 7, 8, generator=torch.Generator().manual_seed(0)) > 0.5
    y, got = plain(x, mask), layer(x, mask)
    for i in range(4):
        for j in range(4):
            rows, columns = slice(max(2 * i - 1, 0), 2 * i + 2), slice(max(2 * j - 1, 0), 2 * j + 2)
            for b in range(2):
                valid = y[b, :, rows, columns][:, mask[b, rows, columns]]
                want = valid.mean(1) if valid.shape[1] else torch.zeros(4)
                torch.testing.assert_close(got[b, :, i, j], want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (4, 3), (33, 17)])
@pytest.mark.parametrize("stride", [1, 2])
def test_output_size(size: tuple[int, int], stride: int):
    out = ExplicitAttention2d(3, 5, stride=stride)(torch.randn(2, 3, *size))
    assert out.shape == (2, 5, *(-(-n // stride) for n in size))


def test_batch_of_none():
    assert ExplicitAttention2d(3, 5, stride=2)(torch.randn(0, 3, 7, 4)).shape == (0, 5, 4, 2)


def test_keeps_channels_last():
    x = torch.randn(2, 8, 5, 7).to(memory_format=torch.channels_last)
    assert ExplicitAttention2d(8, 8)(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "layer",
    [
        ExplicitAttention2d(8, 4),
        ExplicitAttention2d(8, 4, kind="cosine", stride=2, offset=0.0),
        ExplicitAttention2d(8, 4, num_heads=2, per_head=True, radius=0.1, backend="torch"),
    ],
)
def test_repr_can_be_typed_back(layer: ExplicitAttention2d):
    again = eval(f"ExplicitAttention2d({layer.extra_repr()})", vars(nearsight))
    assert again.extra_repr() == layer.extra_repr()
    again.load_state_dict(copy.deepcopy(layer.state_dict()))
    x = torch.randn(1, 8, 5, 6)
    assert torch.equal(again(x), layer(x))


def test_builds_on_meta():
    with torch.device("meta"):
        layer = ExplicitAttention2d(8, 4)
    assert all(p.is_meta for p in layer.parameters())
    layer.to_empty(device="cpu").reset_parameters()
    assert layer.radius.item() == pytest.approx(0.75)


def test_state_holds_no_image_size():
    layer = ExplicitAttention2d(8, 4)
    before = set(layer.state_dict())
    layer(torch.randn(1, 8, 9, 5))
    assert before == set(layer.state_dict()) == {"value.weight", "proj.weight", "log_radius"}


def test_autocast_and_half():
    layer, x = ExplicitAttention2d(8, 4, stride=2), torch.randn(2, 8, 6, 5)
    want = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = layer(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, atol=0.05, rtol=0.05)
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"in_channels": 0}, ValueError, "got in_channels=0, wanted an int of at least 1"),
        ({"out_channels": 7, "num_heads": 2}, ValueError, "got out_channels=7 and num_heads=2"),
        ({"kind": "square"}, ValueError, "got kind='square', wanted one of"),
        ({"stride": 3}, ValueError, "got stride=3, wanted 1 or 2"),
        ({"radius": -1.0}, ValueError, "got radius=-1.0, wanted a finite positive number"),
        ({"offset": -0.5}, ValueError, "got offset=-0.5, wanted at least 0"),
    ],
)
def test_refuses_arguments(arguments, error, text):
    with pytest.raises(error, match=f"^ExplicitAttention2d: {text}"):
        ExplicitAttention2d(**{"in_channels": 8, "out_channels": 8, **arguments})


def test_refuses_inputs():
    layer = ExplicitAttention2d(8, 8)
    with pytest.raises(ValueError, match=r"got shape \[8, 5, 5\], wanted \[B, 8, H, W\]; add the batch axis"):
        layer(torch.randn(8, 5, 5))
    with pytest.raises(ValueError, match=r"got shape \[1, 4, 5, 5\], wanted \[B, 8, H, W\]"):
        layer(torch.randn(1, 4, 5, 5))
    with pytest.raises(TypeError, match=r"got key_mask of dtype torch\.float32"):
        layer(torch.randn(1, 8, 5, 5), torch.ones(1, 5, 5))
