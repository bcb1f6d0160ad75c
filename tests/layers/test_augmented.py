"""The augmented convolutions of ExpAtt and AA-Net, and the global attention inside the latter."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import nearsight
from nearsight import AttentionAugmentedConv2d, ExplicitAugmentedConv2d
from nearsight.layers import relative_attention
from nearsight.layers.augmented import attention_width, key_width
from nearsight.layers.relative_attention import RelativeAttention2d, resize_table
from tests.support.largest import LargestTensor
from tests.support.torch_versions import POOLS_ASK_PARITY


def attention(feature_size=(4, 6), **options) -> RelativeAttention2d:
    settings = {"key_channels": 10, "num_heads": 2, **options}
    return RelativeAttention2d(6, 8, feature_size=feature_size, **settings)


def by_pixels(layer: RelativeAttention2d, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """AA-Net's equation, query by query and head by head."""
    batch, _, height, width = x.shape
    heads, dk, dv = layer.num_heads, layer.key_channels // layer.num_heads, layer.out_channels // layer.num_heads
    qkv = torch.einsum("oc,bchw->bhwo", layer.qkv.weight, x)
    q, k, v = qkv.split([layer.key_channels, layer.key_channels, layer.out_channels], dim=-1)
    row, column = resize_table(layer.rel_row, height), resize_table(layer.rel_col, width)
    out = x.new_zeros(batch, height, width, layer.out_channels)
    for b in range(batch):
        for n in range(heads):
            table = n if layer.per_head_position else 0
            for y in range(height):
                for x_ in range(width):
                    query = q[b, y, x_, n * dk : (n + 1) * dk]
                    logits, values = [], []
                    for i in range(height):
                        for j in range(width):
                            if key_mask is None or key_mask[b, i, j]:
                                key = k[b, i, j, n * dk : (n + 1) * dk]
                                relative = row[table, i - y + height - 1] + column[table, j - x_ + width - 1]
                                logits.append(query @ (key + relative) / math.sqrt(dk))
                                values.append(v[b, i, j, n * dv : (n + 1) * dv])
                    if logits:
                        weights = torch.stack(logits).softmax(0)
                        out[b, y, x_, n * dv : (n + 1) * dv] = weights @ torch.stack(values)
    return torch.einsum("oc,bhwc->bohw", layer.proj.weight, out)


# AA-Net's attention.


@pytest.mark.parametrize("per_head_position", [False, True])
@pytest.mark.parametrize("size", [(4, 6), (3, 5), (1, 1), (1, 4)])
def test_relative_attention_is_the_equation(size: tuple[int, int], per_head_position: bool):
    """Pixels in place, rows and columns not swapped, H ≠ W, sizes other than the tables' own."""
    layer = attention(per_head_position=per_head_position).double()
    x = torch.randn(2, 6, *size, dtype=torch.float64)
    mask = torch.rand(2, *size) > 0.3
    mask[1] = False
    torch.testing.assert_close(layer(x), by_pixels(layer, x), atol=1e-12, rtol=1e-10)
    x = x.masked_fill(~mask[:, None], 0.0)
    torch.testing.assert_close(layer(x, mask), by_pixels(layer, x, mask), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("by_rows", [False, True])
def test_no_position_is_steep_enough_to_reach_a_masked_pixel(monkeypatch, by_rows: bool):
    """Position logits of several hundred, those of masked pixels often the largest."""
    monkeypatch.setattr(relative_attention, "LARGE", 1 if by_rows else 10**9)
    layer = attention().double()
    with torch.no_grad():
        layer.rel_row.mul_(300)
        layer.rel_col.mul_(300)
    x, mask = torch.randn(2, 6, 4, 6, dtype=torch.float64), torch.rand(2, 4, 6) > 0.5
    assert max(t.abs().max() for t in layer.position_logits(layer.project(x)[0])) > 300
    x = x.masked_fill(~mask[:, None], 0.0)
    torch.testing.assert_close(layer(x, mask), by_pixels(layer, x, mask), atol=1e-10, rtol=1e-8)


def test_swapped_tables_are_noticed():
    """The comparison above fails for the fault it is there for."""
    layer = attention((5, 5)).double()
    x = torch.randn(1, 6, 5, 5, dtype=torch.float64)
    want = by_pixels(layer, x)
    layer.rel_row, layer.rel_col = layer.rel_col, layer.rel_row
    assert (layer(x) - want).abs().max() > 1e-4


def test_relative_tables_are_parameters_and_train():
    layer = AttentionAugmentedConv2d(8, 32, feature_size=(5, 7), num_heads=4)
    tables = {n: p for n, p in layer.named_parameters() if "rel_" in n}
    assert {n: tuple(p.shape) for n, p in tables.items()} == {
        "attention.rel_row": (1, 9, 20),
        "attention.rel_col": (1, 13, 20),
    }
    layer(torch.randn(2, 8, 5, 7)).square().sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None, name
        assert (p.grad != 0).any(), name
    assert all((p.grad.abs().sum(-1) > 0).all() for p in tables.values())


def test_gradcheck():
    layer = attention((3, 4), key_channels=4).double()
    mask = torch.rand(1, 2, 3) > 0.3
    mask[0, 0, 0] = True
    x = torch.randn(1, 6, 2, 3, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        state = dict(zip([n for n, _ in layer.named_parameters()], parameters, strict=True))
        return torch.func.functional_call(layer, state, (x, mask))

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()), fast_mode=True)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 15])
def test_tables_stretch_linearly(size: int):
    table = torch.randn(2, 2 * 8 - 1, 3)
    got = resize_table(table, size)
    assert got.shape == (2, 2 * size - 1, 3)
    assert torch.equal(got[:, size - 1], table[:, 7])
    if size == 8:
        assert torch.equal(got, table)
    if size > 1:
        want = F.interpolate(table.transpose(1, 2), 2 * size - 1, mode="linear", align_corners=True).transpose(1, 2)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_never_makes_the_logits():
    """Not even once: n×n logits of every head stay inside the fused kernel."""
    layer = attention((24, 20), key_channels=8)
    x = torch.randn(1, 6, 24, 20)
    with LargestTensor() as largest:
        layer(x).sum().backward()
    pixels = 24 * 20
    assert largest.elements <= layer.num_heads * pixels * (4 + 24 + 20 + 8)
    with LargestTensor() as largest:
        layer.attention_weights(x)
    assert largest.elements >= layer.num_heads * pixels**2


def test_attention_weights_are_those_of_the_layer():
    layer = attention()
    x, mask = torch.randn(2, 6, 4, 6), torch.rand(2, 4, 6) > 0.3
    weights = layer.attention_weights(x, mask)
    assert weights.shape == (2, 4, 6, 2, 4, 6)
    torch.testing.assert_close(weights.sum((-2, -1)), torch.ones(2, 4, 6, 2))
    _, _, v = layer.project(x, mask)
    out = torch.einsum("byxnij,bijnd->byxnd", weights, v).flatten(3) @ layer.proj.weight.T
    torch.testing.assert_close(layer(x, mask), out.permute(0, 3, 1, 2), atol=1e-6, rtol=1e-4)
    plain = layer.attention_weights(x, mask, position=False)
    assert (plain - weights).abs().max() > 1e-3


def test_masked_pixels_may_be_nan():
    layer = attention(stride=2)
    x, mask = torch.randn(2, 6, 5, 7, requires_grad=True), torch.rand(2, 5, 7) > 0.4
    mask[1] = False
    dirty = x.detach().masked_fill(~mask[:, None], math.nan).requires_grad_()
    layer(x, mask).sum().backward()
    clean = {n: p.grad.clone() for n, p in layer.named_parameters()}
    layer.zero_grad()
    out = layer(dirty, mask)
    out.sum().backward()
    assert torch.equal(out, layer(x, mask))
    assert not out[1].any()
    assert not dirty.grad[1].any()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p.grad, clean[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype: torch.dtype):
    """Large masks' logits fit float16; results follow float64 within the dtype's rounding."""
    layer, x, mask = attention(), torch.randn(2, 6, 4, 6), torch.rand(2, 4, 6) > 0.3
    half = copy.deepcopy(layer).to(dtype)
    want = copy.deepcopy(half).double()(x.to(dtype).double(), mask)
    got = half(x.to(dtype), mask)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, atol=8 * torch.finfo(dtype).eps, rtol=0)


# The two augmented convolutions.


def expatt(**options) -> ExplicitAugmentedConv2d:
    return ExplicitAugmentedConv2d(**{"in_channels": 6, "out_channels": 40, "num_heads": 4, **options})


def aa(**options) -> AttentionAugmentedConv2d:
    settings = {"in_channels": 6, "out_channels": 40, "num_heads": 4, "feature_size": (5, 7), **options}
    return AttentionAugmentedConv2d(**settings)


def both(**options) -> ExplicitAugmentedConv2d:
    return expatt(with_aa=True, feature_size=(5, 7), **options)


@pytest.mark.parametrize("make", [expatt, aa, both])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(5, 7), (8, 4), (1, 1)])
def test_is_convolution_and_attention_side_by_side(make, stride: int, size: tuple[int, int]):
    layer = make(stride=stride)
    x = torch.randn(2, 6, *size)
    out = layer(x)
    assert out.shape == (2, 40, *(-(-n // stride) for n in size))
    convolution, attended = out.split([layer.conv.out_channels, 40 - layer.conv.out_channels], dim=1)
    conv = layer.conv
    torch.testing.assert_close(convolution, F.conv2d(x, conv.weight, conv.bias, stride=stride, padding=1))
    parts = [getattr(layer, name) for name in layer.branches if getattr(layer, name) is not None]
    torch.testing.assert_close(attended, torch.cat([part(x) for part in parts], 1))
    if stride == 2:
        layer.attention.stride = 1
        want = F.avg_pool2d(layer.attention(x), 3, 2, padding=1, count_include_pad=False)
        torch.testing.assert_close(attended[:, : layer.attention_channels], want, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("make", [expatt, aa, both])
@pytest.mark.parametrize("stride", [1, 2])
def test_masked_pixels_do_not_matter(make, stride: int):
    layer = make(stride=stride, kernel_size=3)
    x, mask = torch.randn(2, 6, 9, 6), torch.rand(2, 9, 6) > 0.4
    dirty = x.masked_fill(~mask[:, None], math.nan)
    assert torch.equal(layer(dirty, mask), layer(x, mask))


def test_padding_with_a_mask_changes_nothing():
    """Map kinds that measure in map sizes aside, a padded image gives what the image alone gives."""
    layer = expatt(kind="constant", stride=2)
    x = torch.randn(2, 6, 5, 7)
    mask = F.pad(torch.ones(2, 5, 7), (0, 3, 0, 4)).bool()
    got = layer(F.pad(x, (0, 3, 0, 4), value=9.0), mask)[..., :3, :4]
    torch.testing.assert_close(got, layer(x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("make", [aa, both])
def test_the_pool_averages_valid_pixels_only(make):
    layer = make(stride=2).double()
    x, mask = torch.randn(2, 6, 5, 8, dtype=torch.float64), torch.rand(2, 5, 8) > 0.4
    branch = layer.attention if isinstance(layer, AttentionAugmentedConv2d) else layer.aa
    got = branch(x, mask)
    branch.stride = 1
    whole = branch(x, mask)
    for b in range(2):
        for i in range(3):
            for j in range(4):
                near = [
                    whole[b, :, y, z]
                    for y in range(max(2 * i - 1, 0), min(2 * i + 2, 5))
                    for z in range(max(2 * j - 1, 0), min(2 * j + 2, 8))
                    if mask[b, y, z]
                ]
                want = torch.stack(near).mean(0) if near else torch.zeros_like(got[b, :, i, j])
                torch.testing.assert_close(got[b, :, i, j], want)


@torch.no_grad()
def test_starts_near_unit_variance():
    """W_q, W_k, W_v and W_o keep the variance; q·r is about as large as one entry of q, as in AA-Net."""
    torch.manual_seed(0)
    layer = RelativeAttention2d(256, 128, key_channels=160, feature_size=(6, 9))
    q, k, v = layer.project(torch.randn(4, 256, 6, 9))
    assert q.std() * layer.head_dim**0.5 == pytest.approx(1, abs=0.1)
    assert k.std() == pytest.approx(1, abs=0.1)
    assert v.std() == pytest.approx(1, abs=0.1)
    assert layer.proj(torch.randn(50, 128)).std() == pytest.approx(1, abs=0.1)
    for logits in layer.position_logits(q):
        assert logits.std() * layer.head_dim**0.5 == pytest.approx(1, abs=0.3)


def test_channel_rules():
    """The paper's closest multiple of the heads, AA-Net's 20 key channels per head."""
    assert [attention_width(c, 0.1, 8) for c in (64, 128, 256, 512)] == [8, 16, 24, 48]
    assert [attention_width(c, 0.25, 8) for c in (128, 256, 512)] == [32, 64, 128]
    assert [attention_width(c, 0.05, 4) for c in (144, 192, 384, 576, 960)] == [8, 8, 20, 28, 48]
    assert attention_width(16, 0.01, 8) == 8
    assert key_width(128, 0.1, 8) == 160
    assert expatt(attention_channels=12).conv.out_channels == 28
    assert expatt(ratio=0.5).conv.out_channels == 20
    assert both().conv.out_channels == 32


def test_other_convolutions():
    layer = expatt(kernel_size=(5, 1), dilation=(2, 1), groups=2, bias=False, stride=2)
    assert layer.conv.bias is None
    assert layer.conv.groups == 2
    assert layer(torch.randn(1, 6, 9, 5)).shape == (1, 40, 5, 3)
    assert expatt(kernel_size=1)(torch.randn(1, 6, 9, 5)).shape == (1, 40, 9, 5)


@pytest.mark.parametrize(
    "layer",
    [
        expatt(),
        expatt(kernel_size=(3, 5), stride=2, dilation=2, groups=2, bias=False, kind="linear", attention_channels=8),
        expatt(per_head=True, radius=0.3, offset=0.0, ratio=0.3, backend="torch"),
        both(),
        aa(),
        aa(stride=2, key_channels=8, per_head_position=True, feature_size=3),
    ],
)
def test_repr_can_be_typed_back(layer):
    name = type(layer).__name__
    again = eval(f"{name}({layer.extra_repr()})", vars(nearsight))
    assert again.extra_repr() == layer.extra_repr()
    again.load_state_dict(copy.deepcopy(layer.state_dict()))
    x = torch.randn(1, 6, 5, 6)
    assert torch.equal(again(x), layer(x))


@pytest.mark.parametrize("make", [expatt, aa, both])
def test_builds_on_meta(make):
    with torch.device("meta"):
        layer = make()
    assert all(p.is_meta for p in layer.parameters())


@pytest.mark.parametrize("make", [expatt, aa, both])
def test_one_state_for_every_image_size(make):
    layer = make()
    shapes = {n: t.shape for n, t in layer.state_dict().items()}
    layer(torch.randn(1, 6, 3, 11))
    assert {n: t.shape for n, t in layer.state_dict().items()} == shapes


@pytest.mark.parametrize("make", [expatt, aa, both])
def test_compiles_once_for_all_image_sizes(make):
    torch._dynamo.reset()
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    layer = make(stride=2).eval()
    compiled = torch.compile(layer, backend=count, fullgraph=True, dynamic=True)
    for shape in [(2, 6, 5, 7), (3, 6, 8, 9), (2, 6, 16, 11)]:
        x, mask = torch.randn(shape), torch.rand(shape[0], *shape[2:]) > 0.2
        torch.testing.assert_close(compiled(x, mask), layer(x, mask))
    assert len(graphs) == 1 or POOLS_ASK_PARITY


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_with_free_sizes_it_trains(backend):
    """AOTAutograd's promises about memory hold, and Inductor understands the indices."""
    torch.compiler.reset()
    layer = RelativeAttention2d(6, 8, key_channels=24, feature_size=(5, 7), num_heads=2)
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for shape in [(2, 6, 5, 7), (3, 6, 8, 4)]:
        x = torch.randn(shape, requires_grad=True)
        wanted, found = (f(x) for f in (layer, compiled))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        inputs = [x, *layer.parameters()]
        gradients = (torch.autograd.grad(y.square().sum(), inputs) for y in (found, wanted))
        for got, want in zip(*gradients, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    torch.compiler.reset()


@pytest.mark.parametrize("make", [expatt, aa, both])
def test_exports_with_free_sizes(make):
    layer = make(stride=2).eval()
    free = torch.export.Dim.AUTO
    exported = torch.export.export(layer, (torch.randn(2, 6, 5, 7),), dynamic_shapes=({0: free, 2: free, 3: free},))
    for shape in [(2, 6, 5, 7), (3, 6, 9, 11 if POOLS_ASK_PARITY else 6)]:
        x = torch.randn(shape)
        torch.testing.assert_close(exported.module()(x), layer(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("make", [expatt, aa, both])
def test_batch_of_none_and_autocast(make):
    layer = make(stride=2)
    assert layer(torch.randn(0, 6, 5, 7)).shape == (0, 40, 3, 4)
    x = torch.randn(2, 6, 5, 7)
    with torch.autocast("cpu", torch.bfloat16):
        got = layer(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), layer(x), atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    ("make", "arguments", "text"),
    [
        (expatt, {"kernel_size": 4}, "ExplicitAugmentedConv2d: got kernel_size=4, wanted odd sizes"),
        (expatt, {"stride": 3}, "ExplicitAugmentedConv2d: got stride=3, wanted 1 or 2"),
        (expatt, {"out_channels": 4}, "ExplicitAugmentedConv2d: got out_channels=4 of which attention takes 4"),
        (expatt, {"attention_channels": 6}, "got attention_channels=6 and num_heads=4, wanted channels that divide"),
        (expatt, {"attention_channels": 0}, "got attention_channels=0, wanted an int of at least 1"),
        (
            expatt,
            {"groups": 5},
            "got groups=5 with 6 input and 36 convolution channels, wanted groups that divide both",
        ),
        (expatt, {"ratio": -0.1}, "got ratio=-0.1, wanted a finite positive number"),
        (expatt, {"in_channels": 0}, "got in_channels=0, wanted an int of at least 1"),
        (expatt, {"num_heads": 0}, "got num_heads=0, wanted an int of at least 1"),
        (expatt, {"kind": "wide"}, "got kind='wide', wanted one of"),
        (expatt, {"with_aa": True}, "got with_aa=True without feature_size, wanted the map size"),
        (aa, {"feature_size": 0}, "RelativeAttention2d: got feature_size=0, wanted at least 1"),
        (aa, {"key_channels": 30}, "RelativeAttention2d: got key_channels=30 and num_heads=4"),
    ],
)
def test_refuses(make, arguments, text):
    with pytest.raises(ValueError, match=text):
        make(**arguments)


def test_refuses_inputs():
    for layer in (expatt(), aa()):
        with pytest.raises(ValueError, match=rf"^{type(layer).__name__}: got shape \[6, 5, 5\]"):
            layer(torch.randn(6, 5, 5))
