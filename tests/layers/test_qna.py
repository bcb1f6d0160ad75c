"""QnA2d and QnAUpsample2d: the authors' numbers, every option, any map."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nearsight import QnA2d, QnAUpsample2d
from nearsight.errors import ArgumentTypeError, ArgumentValueError
from nearsight.ops import qna

VECTORS = np.load(Path(__file__).parents[1] / "vectors" / "qna_layer.npz")
CASES = [name for name in VECTORS.files if name.startswith("y/")]


def vector(name):
    return torch.from_numpy(VECTORS[name])


def authors_layer(case):
    """`k3_s2_b1`: window 3, stride 2, with biases; `nonorm` and `scalenone` switch an option off."""
    kernel, stride, bias, *off = case.split("_")
    k = int(kernel[1:])
    layer = QnA2d(
        64,
        64,
        k,
        stride=int(stride[1:]),
        num_heads=8,
        bias=bias == "b1",
        unit_queries="nonorm" not in off,
        tap_scale="none" if "scalenone" in off else "tap",
    )
    state = {
        "query": vector("p/query"),
        "key_weight": vector("p/Wk").T,
        "value.weight": vector("p/to_v/kernel").T,
        "proj.weight": vector("p/to_out/kernel").T,
        "position_bias": vector(f"p/k{k}/rpe_bias").view(k, k, 2, 8),
    }
    if "scalenone" not in off:
        state["tap_scale_weight"] = vector(f"p/k{k}/attn_scale_weights").view(k, k, 2, 8)
    if bias == "b1":
        state |= {"key_bias": vector("p/Wk_b").flatten(), "value.bias": vector("p/to_v/bias")}
        state["proj.bias"] = vector("p/to_out/bias")
    layer.load_state_dict(state)
    return layer


def test_there_are_vectors():
    assert len(CASES) == 18


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_is_the_authors_layer(name, memory_format):
    _, case, x = name.split("/")
    image = vector(x).permute(0, 3, 1, 2).contiguous(memory_format=memory_format)
    got = authors_layer(case)(image).permute(0, 2, 3, 1)
    assert (got - vector(name)).abs().max() <= 2e-6


OPTIONS = [
    {},
    {"stride": 2},
    {"num_queries": 1},
    {"num_queries": 3, "tap_scale": "mean"},
    {"tap_scale": "head"},
    {"tap_scale": "sign"},
    {"tap_scale": "ones"},
    {"tap_scale": "none"},
    {"position": "contextual"},
    {"position": "absolute"},
    {"position": "none"},
    {"unit_queries": False},
    {"bias": True},
]


def randomised(layer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return layer


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_is_the_equation(options):
    """Keys made in full, queries and tables by their definitions, then the op."""
    layer = randomised(QnA2d(6, 12, (3, 2), num_heads=4, **options)).double()
    x = torch.randn(2, 6, 5, 7, dtype=torch.float64)
    pixels = x.permute(0, 2, 3, 1)
    count, heads, dim = layer.num_queries, 4, 3
    q = layer.query.view(count, heads, dim)
    if layer.unit_queries:
        q = q / (q.norm(dim=-1, keepdim=True) + 1e-6)
    q = q / dim**0.5
    keys = pixels @ layer.key_weight.T
    keys = keys if layer.key_bias is None else keys + layer.key_bias
    scores = torch.einsum("bhwnd,lnd->bhwln", keys.unflatten(-1, (heads, dim)), q)
    values = layer.value(pixels).unflatten(-1, (heads, dim))
    position = options.get("position", "relative")
    bias = layer.position_bias
    if position == "contextual":
        bias = torch.einsum("lc,yxnc->yxln", q.flatten(1), layer.position_weight) + layer.position_bias
    elif position == "absolute":
        bias = torch.einsum("lnd,yxlnd->yxln", q, layer.position_weight.view(3, 2, count, heads, dim))
    scale = {
        "tap": lambda: layer.tap_scale_weight,
        "ones": lambda: layer.tap_scale_weight,
        "head": lambda: layer.tap_scale_weight.expand(3, 2, count, heads),
        "sign": lambda: torch.tensor([1.0, -1.0]).double()[:, None].expand(3, 2, 2, heads),
        "mean": lambda: torch.full((3, 2, count, heads), 1 / count, dtype=torch.float64),
        "none": lambda: None,
    }[options.get("tap_scale", "tap")]()
    z = qna(
        scores,
        values,
        window=(3, 2),
        stride=options.get("stride", 1),
        position_bias=bias,
        tap_scale=scale,
        backend="reference",
    )
    want = layer.proj(z.flatten(3)).permute(0, 3, 1, 2)
    torch.testing.assert_close(layer(x), want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_parameter_gets_a_gradient(options):
    layer = randomised(QnA2d(6, 12, 3, num_heads=4, **options))
    layer(torch.randn(2, 6, 5, 7)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all()
        # A shift of all scores of a query changes no softmax; what is left is rounding.
        assert parameter.grad.abs().max() > (0 if name == "key_bias" else 1e-6), name


def test_upsampling_deals_the_queries_out_over_the_new_pixels():
    layer = randomised(QnAUpsample2d(6, 8, 3, scale_factor=2, num_heads=2)).double()
    x = torch.randn(1, 6, 3, 5, dtype=torch.float64)
    got = layer(x)
    assert got.shape == (1, 8, 6, 10)
    scores, values = layer.project(x)
    bias, scale = layer.tables()
    z = qna(scores, values, window=3, position_bias=bias, tap_scale=scale, combine="stack", backend="reference")
    for i in range(3):
        for j in range(5):
            for a in range(2):
                for b in range(2):
                    want = layer.proj(z[0, i, j, a * 2 + b].flatten())
                    torch.testing.assert_close(got[0, :, 2 * i + a, 2 * j + b], want)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (4, 3), (13, 8)])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_any_map_size(shape, stride):
    layer = QnA2d(4, 6, 5, stride=stride, num_heads=2)
    y = layer(torch.randn(2, 4, *shape))
    assert y.shape == (2, 6, *(-(-n // stride) for n in shape))
    assert torch.isfinite(y).all()
    assert QnAUpsample2d(4, 6, 3, scale_factor=3, num_heads=2)(torch.randn(1, 4, *shape)).shape[2:] == (
        shape[0] * 3,
        shape[1] * 3,
    )


def test_batch_of_nothing():
    x = torch.randn(0, 4, 5, 6, requires_grad=True)
    y = QnA2d(4, 6, 3, num_heads=2)(x)
    y.sum().backward()
    assert y.shape == (0, 6, 5, 6)
    assert QnAUpsample2d(4, 6, num_heads=2)(x.detach()).shape == (0, 6, 10, 12)


@pytest.mark.parametrize(
    "make", [lambda: QnA2d(4, 6, 3, stride=2, num_heads=2), lambda: QnAUpsample2d(4, 6, num_heads=2)]
)
def test_masked_pixels_change_nothing(make):
    torch.manual_seed(0)
    layer, x = randomised(make()), torch.randn(2, 4, 6, 7)
    mask = torch.ones(2, 6, 7, dtype=torch.bool)
    mask[1, 4:], mask[1, :, 5:] = False, False
    y = layer(x, mask)
    other = layer(torch.where(mask[:, None], x, 9.0), mask)
    torch.testing.assert_close(y, other, rtol=0, atol=0)
    crop = layer(x[1:, :, :4, :5])
    torch.testing.assert_close(y[1:, :, : crop.shape[2], : crop.shape[3]], crop)
    assert (layer(x) - y)[1].abs().max() > 1e-3


def test_channels_last_is_kept_and_keys_are_never_made():
    layer = QnA2d(8, 8, 3, num_heads=2)
    x = torch.randn(2, 8, 5, 6).contiguous(memory_format=torch.channels_last)
    assert layer(x).is_contiguous(memory_format=torch.channels_last)
    scores, values = layer.project(x)
    assert scores.shape == (2, 5, 6, 2, 2)
    assert scores.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    assert scores.untyped_storage().nbytes() == 4 * 2 * 5 * 6 * (8 + 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_stay_in_float32(dtype):
    layer, x = randomised(QnA2d(8, 8, 3, num_heads=2)), torch.randn(2, 8, 5, 6)
    plain_scores, plain = layer.project(x)[0], layer(x)
    with torch.autocast("cpu", dtype=dtype):
        scores, values = layer.project(x)
        y = layer(x)
    assert scores.dtype == torch.float32
    assert values.dtype == y.dtype == dtype
    torch.testing.assert_close(scores, plain_scores, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y.float(), plain, rtol=0.1, atol=0.1)
    half = layer.to(dtype)
    scores, _ = half.project(x.to(dtype))
    assert scores.dtype == torch.float32
    assert half(x.to(dtype)).dtype == dtype


@pytest.mark.parametrize("options", [*OPTIONS, {"stride": (2, 1), "backend": "torch"}], ids=str)
def test_repr_can_be_typed_back(options):
    layer = QnA2d(6, 12, (3, 2), num_heads=4, **options)
    again = eval(f"QnA2d({layer.extra_repr()})")
    assert again.extra_repr() == layer.extra_repr()
    assert {n: p.shape for n, p in again.named_parameters()} == {n: p.shape for n, p in layer.named_parameters()}


def test_repr_of_the_upsampling_can_be_typed_back():
    layer = QnAUpsample2d(6, 12, 5, scale_factor=3, num_heads=4, tap_scale="head", position="none", bias=True)
    again = eval(f"QnAUpsample2d({layer.extra_repr()})")
    assert again.extra_repr() == layer.extra_repr()
    assert again.num_queries == 9


def test_meta_build_and_a_state_that_survives(tmp_path):
    with torch.device("meta"):
        layer = QnA2d(4, 6, 3, num_heads=2, position="contextual", bias=True)
    assert all(p.is_meta for p in layer.parameters())
    assert not list(layer.buffers())
    trained = randomised(QnA2d(4, 6, 3, num_heads=2, position="contextual", bias=True))
    torch.save(trained.state_dict(), tmp_path / "layer.pt")
    layer.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True), assign=True)
    x = torch.randn(1, 4, 5, 6)
    torch.testing.assert_close(layer(x), trained(x), rtol=0, atol=0)


def test_initialisation_of_the_paper():
    torch.manual_seed(0)
    layer = QnA2d(64, 128, 3, num_heads=8)
    # Cut at two standard deviations, as the authors' is: what remains has 0.88 of them.
    assert layer.query.std().item() == pytest.approx(0.88 * 16**-0.5, rel=0.1)
    assert layer.key_weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert not layer.position_bias.any()
    assert layer.tap_scale_weight.std().item() == pytest.approx(0.02, rel=0.15)
    assert (QnA2d(4, 4, num_heads=2, tap_scale="ones").tap_scale_weight == 1).all()


def test_replaces_a_convolution_in_place():
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), QnA2d(8, 8, 3, stride=2, num_heads=4))
    assert net(torch.randn(1, 3, 9, 10)).shape == nn.Conv2d(3, 8, 3, 2, 1)(torch.randn(1, 3, 9, 10)).shape


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((0, 8), {}, "QnA2d: got in_channels=0, wanted an int of at least 1."),
        (
            (8, 9),
            {"num_heads": 4},
            "QnA2d: got out_channels=9 and num_heads=4, wanted channels that divide by the heads",
        ),
        ((8, 8), {"num_heads": 0}, "QnA2d: got num_heads=0, wanted an int of at least 1."),
        ((8, 8), {"num_queries": 0}, "QnA2d: got num_queries=0, wanted an int of at least 1."),
        ((8, 8, 0), {}, "QnA2d: got kernel_size=0, wanted at least 1 on each axis."),
        ((8, 8), {"stride": 0}, "QnA2d: got stride=0, wanted at least 1 on each axis."),
        (
            (8, 8),
            {"tap_scale": "two"},
            "got tap_scale='two', wanted one of 'tap', 'head', 'sign', 'ones', 'mean', 'none'.",
        ),
        (
            (8, 8),
            {"position": "sine"},
            "QnA2d: got position='sine', wanted one of 'relative', 'contextual', 'absolute', 'none'.",
        ),
        ((9, 9), {"tap_scale": "sign", "num_heads": 3, "num_queries": 1}, "wanted an even number of query heads"),
    ],
)
def test_refusals(arguments, options, text):
    with pytest.raises(ArgumentValueError) as caught:
        QnA2d(*arguments, **options)
    assert text in str(caught.value)


def test_refused_inputs():
    layer = QnA2d(4, 6, 3, num_heads=2)
    with pytest.raises(
        ArgumentValueError, match=r"QnA2d: got shape \[4, 5, 6\], wanted \[B, 4, H, W\]; add the batch axis"
    ):
        layer(torch.randn(4, 5, 6))
    with pytest.raises(ArgumentTypeError, match=r"QnA2d: got dtype torch\.int64"):
        layer(torch.zeros(1, 4, 5, 6).long())
    with pytest.raises(ArgumentValueError, match="key_mask of shape"):
        layer(torch.randn(1, 4, 5, 6), torch.ones(1, 6, 5, dtype=torch.bool))
    with pytest.raises(ArgumentValueError, match="QnAUpsample2d: got scale_factor=0, wanted an int of at least 1"):
        QnAUpsample2d(4, 6, scale_factor=0)
