"""LocalAttention2d: the equation from its parameters, shapes, options, masks, refusals."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.nn import functional as F

from nearsight import LocalAttention2d
from nearsight.errors import ArgumentTypeError, ArgumentValueError
from nearsight.layers.positions import sincos_2d
from nearsight.ops.local.call import prepare
from nearsight.ops.local.reference import run as reference_run


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_hand(layer: LocalAttention2d, x: torch.Tensor) -> torch.Tensor:
    """The paper's sentence, pixel by pixel, from the layer's parameters (stride 1, mask border, shared positions)."""
    batch, _, height, width = x.shape
    kh, kw = layer.kernel_size
    weights = layer.qkv.weight.split(layer.out_channels)
    q, k, v = (F.conv2d(x, w[:, :, None, None]).unflatten(1, (layer.num_heads, -1)) for w in weights)
    out = torch.zeros(batch, layer.num_heads, layer.head_dim, height, width, dtype=x.dtype)
    for i in range(height):
        for j in range(width):
            taps = [
                (a, b, i + a - (kh - 1) // 2, j + b - (kw - 1) // 2)
                for a in range(kh)
                for b in range(kw)
                if 0 <= i + a - (kh - 1) // 2 < height and 0 <= j + b - (kw - 1) // 2 < width
            ]
            r = torch.stack([torch.cat([layer.rel_row[a], layer.rel_col[b]]) for a, b, _, _ in taps])
            keys = torch.stack([k[..., y, z] for _, _, y, z in taps]) + r[:, None, None]
            values = torch.stack([v[..., y, z] for _, _, y, z in taps])
            p = (q[..., i, j] * keys).sum(-1).softmax(0)
            out[..., i, j] = (p[..., None] * values).sum(0)
    return out.flatten(1, 2)


@pytest.mark.parametrize("kernel", [3, (3, 5), (4, 2), 7])
def test_layer_is_the_equation(kernel):
    torch.manual_seed(0)
    layer = LocalAttention2d(6, 8, kernel, num_heads=2).double()
    x = randn(2, 6, 5, 7, dtype=torch.float64)
    torch.testing.assert_close(layer(x), by_hand(layer, x))


@pytest.mark.parametrize("options", [{"dilation": (2, 3)}, {"border": "zeros"}])
def test_options_reach_the_op(options):
    layer = LocalAttention2d(6, 8, (3, 5), num_heads=2, **options)
    x = randn(1, 6, 7, 9)
    q, k, v = layer.project(x)
    want = reference_run(prepare(q, k, v, window=(3, 5), rel_row=layer.rel_row, rel_col=layer.rel_col, **options))
    torch.testing.assert_close(layer(x), want.flatten(3).permute(0, 3, 1, 2))


def test_stride_two_averages_two_by_two_after_the_attention():
    torch.manual_seed(0)
    layer = LocalAttention2d(6, 8, 3, stride=2, num_heads=2)
    x = randn(2, 6, 5, 8)
    full = by_hand(layer, x)
    want = F.avg_pool2d(full, 2, 2, ceil_mode=True, count_include_pad=False)
    assert want.shape == (2, 8, 3, 4)
    torch.testing.assert_close(layer(x), want)


def test_stride_two_leaves_masked_pixels_out_of_the_average():
    layer = LocalAttention2d(6, 8, 3, stride=2, num_heads=2)
    x = randn(1, 6, 6, 8)
    mask = torch.zeros(1, 6, 8, dtype=torch.bool)
    mask[:, :3, :5] = True
    cropped = layer(x[:, :, :3, :5])
    torch.testing.assert_close(layer(x, mask)[:, :, :2, :3], cropped)
    assert layer(x, mask)[:, :, 2:].eq(0).all()


def test_masked_pixels_change_nothing():
    layer = LocalAttention2d(4, 8, 5, num_heads=2)
    x, other = randn(1, 4, 6, 9), randn(1, 4, 6, 9, seed=1)
    mask = torch.rand(1, 6, 9, generator=torch.Generator().manual_seed(2)) > 0.4
    mixed = torch.where(mask[:, None], x, other)
    a, b = layer(x, mask), layer(mixed, mask)
    torch.testing.assert_close(a * mask[:, None], b * mask[:, None])
    assert not torch.allclose(layer(x), layer(mixed))


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (33, 2), (13, 17)])
@pytest.mark.parametrize("stride", [1, 2])
def test_any_map_size(shape, stride):
    layer = LocalAttention2d(3, 8, 7, stride=stride, num_heads=4)
    y = layer(randn(2, 3, *shape))
    assert y.shape == (2, 8, -(-shape[0] // stride), -(-shape[1] // stride))
    y.square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())


def test_batch_of_nothing():
    layer = LocalAttention2d(3, 8, 3, num_heads=4)
    y = layer(torch.zeros(0, 3, 5, 4))
    y.sum().backward()
    assert y.shape == (0, 8, 5, 4)


def test_content_off_has_no_key_projection():
    layer = LocalAttention2d(6, 8, 3, num_heads=2, content=False)
    assert layer.qkv.weight.shape == (16, 6)
    x = randn(1, 6, 4, 5)
    q, k, v = layer.project(x)
    assert k is None
    want = reference_run(prepare(q, None, v, window=3, rel_row=layer.rel_row, rel_col=layer.rel_col))
    torch.testing.assert_close(layer(x), want.flatten(3).permute(0, 3, 1, 2))


def test_absolute_positions_are_added_to_the_input():
    layer = LocalAttention2d(8, 8, 3, num_heads=2, position="absolute")
    plain = LocalAttention2d(8, 8, 3, num_heads=2, position="none")
    plain.load_state_dict(layer.state_dict())
    x = randn(1, 8, 4, 6)
    torch.testing.assert_close(layer(x), plain(x + sincos_2d(4, 6, 8).permute(2, 0, 1)))


def test_sincos_tells_rows_then_columns():
    p = sincos_2d(3, 5, 8)
    assert p[:, 0, :4].unique(dim=0).shape[0] == 3
    assert (p[:, :, :4] == p[:, :1, :4]).all()
    assert (p[:, :, 4:] == p[:1, :, 4:]).all()
    torch.testing.assert_close(
        p[2, 0, :4],
        torch.tensor([2.0, 0.02, 2.0, 0.02])
        .sin()
        .where(torch.tensor([True, True, False, False]), torch.tensor([2.0, 0.02, 2.0, 0.02]).cos()),
    )
    with pytest.raises(ArgumentValueError, match=r"sincos_2d: got channels=6, wanted a multiple of 4"):
        sincos_2d(3, 5, 6)


def test_per_head_positions():
    layer = LocalAttention2d(6, 8, (3, 5), num_heads=2, per_head_position=True)
    assert layer.rel_row.shape == (2, 3, 2)
    assert layer.rel_col.shape == (2, 5, 2)
    shared = LocalAttention2d(6, 8, (3, 5), num_heads=2)
    with torch.no_grad():
        shared.qkv.weight.copy_(layer.qkv.weight)
        for name in ("rel_row", "rel_col"):
            getattr(layer, name).copy_(getattr(shared, name).expand(2, -1, -1))
    x = randn(1, 6, 4, 5)
    torch.testing.assert_close(layer(x), shared(x))


def test_projection_and_bias():
    layer = LocalAttention2d(6, 8, 3, stride=2, num_heads=2, qkv_bias=True, proj=True)
    bare = LocalAttention2d(6, 8, 3, stride=2, num_heads=2, qkv_bias=True)
    bare.load_state_dict({n: t for n, t in layer.state_dict().items() if not n.startswith("proj")})
    x = randn(1, 6, 5, 4)
    torch.testing.assert_close(layer(x), F.conv2d(bare(x), layer.proj.weight[:, :, None, None], layer.proj.bias))


def test_channels_last_input_gives_channels_last_without_copies():
    layer = LocalAttention2d(16, 16, 3, num_heads=2)
    x = randn(2, 16, 6, 7)
    last = x.to(memory_format=torch.channels_last)
    q, k, v = layer.project(last)
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    with torch.profiler.profile() as profile:
        layer.project(last)
    assert not {"aten::copy_", "aten::clone", "aten::contiguous"} & {e.key for e in profile.key_averages()}
    y = layer(last)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, layer(x))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kernel_size": (3, 5), "stride": 2, "dilation": (1, 2), "num_heads": 2},
        {"position": "absolute", "border": "zeros", "qkv_bias": True, "proj": True},
        {"content": False, "per_head_position": True, "backend": "reference"},
    ],
)
def test_repr_can_be_typed_back(options):
    layer = LocalAttention2d(16, 32, **options)
    again = eval(f"LocalAttention2d({layer.extra_repr()})")
    assert again.extra_repr() == layer.extra_repr()
    again.load_state_dict(layer.state_dict())
    x = randn(1, 16, 4, 6)
    torch.testing.assert_close(again(x), layer(x))


def test_meta_build_and_a_state_that_survives():
    with torch.device("meta"):
        empty = LocalAttention2d(8, 8, 3, num_heads=2)
    assert empty(torch.empty(2, 8, 5, 7, device="meta")).shape == (2, 8, 5, 7)
    layer = LocalAttention2d(8, 8, 3, num_heads=2)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    empty.to_empty(device="cpu").load_state_dict(torch.load(buffer))
    x = randn(1, 8, 5, 7)
    torch.testing.assert_close(empty(x), layer(x), rtol=0, atol=0)
    assert not list(layer.buffers())
    assert LocalAttention2d(8, 8, 3, num_heads=2, dtype=torch.float64).qkv.weight.dtype == torch.float64


def test_initial_logits_are_near_one_whatever_the_width():
    torch.manual_seed(0)
    for channels, heads in ((32, 8), (256, 4)):
        layer = LocalAttention2d(channels, channels, 7, num_heads=heads)
        q, k, v = layer.project(randn(2, channels, 9, 8))
        assert 0.7 < torch.einsum("bhwnd,bhwnd->bhwn", q, k).std() < 1.4
        assert 0.8 < v.std() < 1.2
        position = torch.cat([layer.rel_row[0], layer.rel_col[3]])
        assert 0.3 < (q @ position).std() < 2.0
    assert layer.value_weight.data_ptr() == layer.qkv.weight[2 * 256 :].data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_and_autocast(dtype):
    torch.manual_seed(0)
    layer = LocalAttention2d(16, 16, 3, num_heads=2)
    x = randn(1, 16, 6, 7)
    want = layer(x)
    half = copy.deepcopy(layer).to(dtype)(x.to(dtype))
    assert half.dtype == dtype
    torch.testing.assert_close(half.float(), want, atol=0.05, rtol=0.05)
    with torch.autocast("cpu", dtype):
        cast = layer(x)
    assert cast.dtype == dtype
    torch.testing.assert_close(cast.float(), want, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((6, 8), {"num_heads": 3}, "got out_channels=8 and num_heads=3, wanted channels that divide by the heads"),
        ((6, 6), {"num_heads": 2}, r"\(head dim 3\), wanted an even head dim for position='relative'"),
        ((6, 8), {"position": "learned"}, "got position='learned', wanted one of 'relative', 'absolute', 'none'"),
        ((6, 8), {"position": "absolute"}, "got in_channels=6 with position='absolute', wanted a multiple of 4"),
        ((6, 8), {"content": False, "position": "none"}, "got content=False with position='none'"),
        ((6, 8), {"border": "reflect"}, "got border='reflect', wanted one of 'mask', 'zeros'"),
        ((6, 8), {"stride": 3, "num_heads": 2}, "got stride=3, wanted 1 or 2; pool separately"),
        ((6, 8, 0), {"num_heads": 2}, "got kernel_size=0, wanted at least 1"),
        ((0, 8), {}, "got in_channels=0, wanted an int of at least 1"),
        ((6, "8"), {}, "got out_channels='8', wanted an int of at least 1"),
        ((6, 8.0), {}, "got out_channels=8.0, wanted an int of at least 1"),
    ],
)
def test_refusals(arguments, options, text):
    with pytest.raises(ArgumentValueError, match=f"^LocalAttention2d: .*{text}"):
        LocalAttention2d(*arguments, **options)


def test_refused_inputs():
    layer = LocalAttention2d(6, 8, 3, num_heads=2)
    with pytest.raises(
        ArgumentValueError, match=r"LocalAttention2d: got shape \[6, 5, 5\], wanted \[B, 6, H, W\]; add"
    ):
        layer(torch.zeros(6, 5, 5))
    with pytest.raises(ArgumentValueError, match=r"got shape \[1, 5, 5, 5\], wanted \[B, 6, H, W\]"):
        layer(torch.zeros(1, 5, 5, 5))
    with pytest.raises(ArgumentTypeError, match=r"got dtype torch.int64"):
        layer(torch.zeros(1, 6, 5, 5, dtype=torch.int64))
    with pytest.raises(ArgumentValueError, match=r"got key_mask of shape \[1, 5, 4\], wanted \[1, 5, 5\]"):
        layer(torch.zeros(1, 6, 5, 5), torch.ones(1, 5, 4, dtype=torch.bool))
    with pytest.raises(ArgumentTypeError, match=r"got key_mask of dtype torch.float32, wanted a bool"):
        layer(torch.zeros(1, 6, 5, 5), torch.ones(1, 5, 5))
