"""WindowAttention2d: the equation pixel by pixel, on maps that fit the window and maps that do not."""

import pytest
import torch

from nearsight import WindowAttention2d
from nearsight.errors import ArgumentValueError


def made(*arguments, seed=0, **options):
    layer = WindowAttention2d(*arguments, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return layer


def by_definition(layer, x, mask=None):
    """Window by window, pair by pair; the q, k, v channels of a head lie side by side."""
    batch, _, height, width = x.shape
    (kh, kw), heads, dim = layer.kernel_size, layer.num_heads, layer.head_dim
    out = x.new_zeros(batch, layer.out_channels, height, width)
    for b in range(batch):
        for top in range(0, height, kh):
            for left in range(0, width, kw):
                window = [(y, z) for y in range(top, min(height, top + kh)) for z in range(left, min(width, left + kw))]
                pixels = torch.stack([x[b, :, y, z] for y, z in window])
                q, k, v = layer.qkv(pixels).view(len(window), heads, 3 * dim).split(dim, -1)
                logits = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
                if layer.relative_bias is not None:
                    logits = logits + torch.stack(
                        [
                            torch.stack([layer.relative_bias[a - c + kh - 1, e - f + kw - 1] for c, f in window], -1)
                            for a, e in window
                        ],
                        1,
                    )
                result = x.new_zeros(len(window), layer.out_channels)
                valid = torch.tensor([mask is None or bool(mask[b, y, z]) for y, z in window])
                if valid.any():
                    weights = logits.masked_fill(~valid, float("-inf")).softmax(-1)
                    result = torch.einsum("hij,jhd->ihd", weights, v).reshape(len(window), -1)
                result = layer.proj(result)
                for i, (y, z) in enumerate(window):
                    out[b, :, y, z] = result[i]
    return out


@pytest.mark.parametrize("size", [(6, 8), (5, 7), (1, 1), (3, 4), (2, 9)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [{}, {"position": "none"}, {"bias": True}], ids=str)
def test_is_the_equation(size, masked, options):
    layer = made(6, 12, (3, 4), num_heads=3, **options).double()
    x = torch.randn(2, 6, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    mask = None
    if masked:
        mask = torch.rand(2, *size, generator=torch.Generator().manual_seed(2)) > 0.5
        mask[0, :3] = False
    got, want = layer(x, mask), by_definition(layer, x, mask)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    parameters = [x, *layer.parameters()]
    upstream = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ours = torch.autograd.grad(got, parameters, upstream, allow_unused=True)
    theirs = torch.autograd.grad(want, parameters, upstream, allow_unused=True)
    for one, other in zip(ours, theirs, strict=True):
        zero = torch.zeros(1, dtype=torch.float64)
        torch.testing.assert_close(
            zero if one is None else one, (zero if one is None else torch.zeros_like(one)) if other is None else other
        )


def test_padding_is_as_if_it_were_not_there():
    """A map that does not fill its windows: the same as each of its windows alone."""
    layer = made(4, 4, 5, num_heads=2).eval()
    x = torch.randn(1, 4, 7, 8)
    y = layer(x)
    for rows in (slice(0, 5), slice(5, 7)):
        for columns in (slice(0, 5), slice(5, 8)):
            torch.testing.assert_close(y[:, :, rows, columns], layer(x[:, :, rows, columns]), rtol=1e-5, atol=1e-6)


def test_masked_pixels_change_nothing():
    layer, x = made(4, 6, 4, num_heads=2), torch.randn(2, 4, 6, 7)
    mask = torch.rand(2, 6, 7) > 0.4
    y = layer(x, mask)
    torch.testing.assert_close(
        y.masked_fill(~mask[:, None], 0), layer(torch.where(mask[:, None], x, 5.0), mask).masked_fill(~mask[:, None], 0)
    )


def test_a_window_without_keys_gives_zero_and_zero_gradients():
    layer = made(4, 6, 3, num_heads=2)
    x = torch.randn(1, 4, 6, 6, requires_grad=True)
    mask = torch.ones(1, 6, 6, dtype=torch.bool)
    mask[:, :3, :3] = False
    y = layer(x, mask)
    assert not y[:, :, :3, :3].any()
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.isfinite(gradient).all()
    assert not gradient[:, :, :3, :3].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_and_autocast(dtype):
    layer, x = made(4, 6, 3, num_heads=2), torch.randn(2, 4, 5, 7)
    plain = layer(x)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), plain, rtol=0.1, atol=0.1)
    torch.testing.assert_close(layer.to(dtype)(x.to(dtype)).float(), plain, rtol=0.1, atol=0.1)


def test_layout_state_and_repr():
    layer = made(8, 12, (3, 4), num_heads=3, bias=True, position="none")
    again = eval(f"WindowAttention2d({layer.extra_repr()})")
    again.load_state_dict(layer.state_dict())
    x = torch.randn(2, 8, 6, 8).contiguous(memory_format=torch.channels_last)
    y = layer(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(again(x), y)
    assert layer(torch.randn(0, 8, 5, 5)).shape == (0, 12, 5, 5)
    with torch.device("meta"):
        assert WindowAttention2d(8, 12, 7, num_heads=3)(torch.empty(2, 8, 9, 15)).shape == (2, 12, 9, 15)
    assert not list(WindowAttention2d(8, 12, 7, num_heads=3).buffers())


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((8, 9), {"num_heads": 4}, "WindowAttention2d: got out_channels=9 and num_heads=4"),
        ((8, 8, 0), {}, "WindowAttention2d: got kernel_size=0, wanted at least 1"),
        ((8, 8), {"position": "sine"}, "WindowAttention2d: got position='sine', wanted one of 'relative', 'none'."),
        ((0, 8), {}, "WindowAttention2d: got in_channels=0"),
    ],
)
def test_refusals(arguments, options, text):
    with pytest.raises(ArgumentValueError) as caught:
        WindowAttention2d(*arguments, **options)
    assert text in str(caught.value)


def test_refused_inputs():
    with pytest.raises(ArgumentValueError, match=r"WindowAttention2d: got shape \[1, 5, 6, 7\], wanted \[B, 4, H, W\]"):
        WindowAttention2d(4, 8, 3)(torch.randn(1, 5, 6, 7))
