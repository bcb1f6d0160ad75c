"""AttentionStem2d: the appendix's equations pixel by pixel, any size, masks, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from nearsight import AttentionStem2d
from nearsight.errors import ArgumentTypeError, ArgumentValueError, BackendError


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make(*args: int, **options) -> AttentionStem2d:
    torch.manual_seed(0)
    return AttentionStem2d(*args, **options).double()


def by_hand(stem: AttentionStem2d, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Every pixel against the pixels of its block that exist, the values mixed after the products, as written."""
    batch, _, height, width = x.shape
    side, heads, dim = stem.kernel_size, stem.num_heads, stem.head_dim
    mask = torch.ones(batch, height, width, dtype=torch.bool) if mask is None else mask
    q, k = F.conv2d(x, stem.qk.weight).unflatten(1, (2, heads, dim)).unbind(1)
    if stem.values == "conv":
        clean = F.pad(x * mask[:, None], (1, 2, 1, 2))
        v = F.conv2d(clean, stem.v.weight).unflatten(1, (heads, dim))
    elif stem.values == "plain":
        v = F.conv2d(x, stem.v.weight).unflatten(1, (heads, dim))
    else:
        each = F.conv2d(x, stem.v.weight).unflatten(1, (stem.mixtures, heads, dim))
        v = torch.zeros_like(each[:, 0])
        for y in range(height):
            for z in range(width):
                p = ((stem.emb_row[y % side] + stem.emb_col[z % side]) @ stem.nu.t()).softmax(0)
                v[..., y, z] = torch.einsum("m,bmhd->bhd", p, each[..., y, z])
    out = torch.zeros(batch, heads, dim, height, width, dtype=x.dtype)
    for b in range(batch):
        for i in range(height):
            for j in range(width):
                top, left = i // side * side, j // side * side
                keys = [
                    (y, z)
                    for y in range(top, min(top + side, height))
                    for z in range(left, min(left + side, width))
                    if mask[b, y, z]
                ]
                if not keys:
                    continue
                r = [torch.cat([stem.rel_row[y - i + side - 1], stem.rel_col[z - j + side - 1]]) for y, z in keys]
                logits = torch.stack(
                    [(q[b, ..., i, j] * (k[b, ..., y, z] + e)).sum(-1) for (y, z), e in zip(keys, r, strict=True)]
                )
                values = torch.stack([v[b, ..., y, z] for y, z in keys])
                out[b, ..., i, j] = (logits.softmax(0)[..., None] * values).sum(0)
    return out.flatten(1, 2)


@pytest.mark.parametrize("values", ["mixture", "plain", "conv"])
@pytest.mark.parametrize("size", [(8, 12), (5, 11), (1, 3)])
def test_stem_is_the_equation(values, size):
    stem = make(3, 8, num_heads=2, values=values)
    x = randn(2, 3, *size)
    torch.testing.assert_close(stem(x), by_hand(stem, x))


@pytest.mark.parametrize("values", ["mixture", "conv"])
def test_masked_pixels_change_nothing(values):
    stem = make(3, 8, num_heads=2, values=values)
    x = randn(2, 3, 6, 9)
    mask = torch.rand(2, 6, 9, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[0, :4, 4:8] = False
    torch.testing.assert_close(stem(x, mask)[:, :, mask[0]], by_hand(stem, x * mask[:, None], mask)[:, :, mask[0]])
    noise = torch.where(mask[:, None], x, torch.full_like(x, float("nan")))
    assert torch.equal(stem(noise, mask), stem(x, mask))
    assert stem(x, mask)[0, :, :4, 4:8].eq(0).all()


def test_gradients_of_padded_and_masked_blocks_are_finite_and_right():
    stem = make(3, 4, 2, num_heads=1, mixtures=2)
    x = randn(1, 3, 3, 5).requires_grad_()
    mask = torch.ones(1, 3, 5, dtype=torch.bool)
    mask[:, :2, 2:4] = False
    assert torch.autograd.gradcheck(lambda t: stem(t, mask), (x,))
    names, parameters = zip(*stem.named_parameters(), strict=True)

    def of_parameters(*tensors):
        return torch.func.functional_call(stem, dict(zip(names, tensors, strict=True)), (x.detach(), mask))

    assert torch.autograd.gradcheck(of_parameters, parameters)


def test_every_parameter_learns():
    for values in ("mixture", "plain", "conv"):
        stem = make(3, 8, num_heads=2, values=values)
        stem(randn(2, 3, 8, 8)).square().mul(randn(8, 8)).sum().backward()
        for name, parameter in stem.named_parameters():
            assert parameter.grad.abs().max() > 1e-6, name


def test_parameters_are_those_of_the_paper():
    stem = AttentionStem2d(3, 64)
    shapes = {n: tuple(p.shape) for n, p in stem.named_parameters()}
    assert shapes == {
        "qk.weight": (128, 3, 1, 1),
        "v.weight": (384, 3, 1, 1),
        "rel_row": (7, 8),
        "rel_col": (7, 8),
        "emb_row": (4, 16),
        "emb_col": (4, 16),
        "nu": (6, 16),
    }


@pytest.mark.parametrize("values", ["mixture", "plain", "conv"])
def test_logits_and_mixture_start_near_one(values):
    """Of images with unit variance: neither a flat softmax nor one that has chosen already."""
    torch.manual_seed(0)
    stems = [AttentionStem2d(3, 256, values=values, num_heads=2) for _ in range(8)]
    pixels = torch.randn(400, 3)
    q, k = (
        torch.cat(parts) for parts in zip(*[(s.qk.weight.flatten(1) @ pixels.T).chunk(2) for s in stems], strict=True)
    )
    heads = [part.unflatten(0, (-1, 128)) for part in (q, k)]
    assert 0.7 < torch.einsum("hdi,hdj->hij", *heads).std() < 1.4
    v = torch.stack([s(torch.randn(1, 3, 8, 8)).std() for s in stems])
    assert 0.2 < v.mean() < 1.4
    if values == "mixture":
        assert 0.6 < torch.cat([s.mixture().log() for s in stems]).std() < 1.4


def test_values_cost_one_product_whatever_the_mixtures():
    from torch.utils.flop_counter import FlopCounterMode

    def flops(mixtures: int) -> int:
        stem = AttentionStem2d(3, 64, mixtures=mixtures)
        with FlopCounterMode(display=False) as counter:
            stem(torch.zeros(1, 3, 64, 64))
        return counter.get_total_flops()

    assert flops(12) < 1.01 * flops(1)


def test_batch_of_nothing_and_one_pixel():
    stem = AttentionStem2d(3, 8, num_heads=2)
    assert stem(torch.zeros(0, 3, 5, 4)).shape == (0, 8, 5, 4)
    x = torch.randn(1, 3, 1, 1)
    want = torch.einsum("oc,bchw->bohw", stem.value_weights()[0], x)
    torch.testing.assert_close(stem(x), want)


def test_output_is_channels_last_and_input_layout_does_not_matter():
    stem = AttentionStem2d(3, 8, num_heads=2)
    x = torch.randn(2, 3, 8, 12)
    y = stem(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(stem(x.to(memory_format=torch.channels_last)), y)


@pytest.mark.parametrize(
    "options",
    [{}, {"mixtures": 3, "num_heads": 2}, {"values": "conv", "kernel_size": 2}, {"backend": "reference"}],
)
def test_repr_can_be_typed_back(options):
    stem = AttentionStem2d(3, 16, **options)
    again = eval(f"AttentionStem2d({stem.extra_repr()})")
    again.load_state_dict(stem.state_dict())
    x = torch.randn(1, 3, 6, 5)
    torch.testing.assert_close(again(x), stem(x))
    assert again.backend == stem.backend


def test_a_backend_is_a_promise():
    x, norm = torch.randn(2, 3, 9, 6), torch.nn.BatchNorm2d(8)
    stem = AttentionStem2d(3, 8, num_heads=2, backend="triton")
    for call in (lambda: stem(x), lambda: stem.pooled(x, norm)):
        with pytest.raises(BackendError, match=r"^block_attention: backend 'triton' cannot run this call: needs CUDA"):
            call()
    stem.backend = "reference"
    by_reference = stem(x)
    stem.backend = None
    torch.testing.assert_close(by_reference, stem(x))


def test_meta_build():
    with torch.device("meta"):
        stem = AttentionStem2d(3, 64)
    assert stem(torch.empty(2, 3, 9, 14, device="meta")).shape == (2, 64, 9, 14)
    assert not list(stem.buffers())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_and_autocast(dtype):
    torch.manual_seed(0)
    stem = AttentionStem2d(3, 16, num_heads=2)
    x = torch.randn(1, 3, 6, 9)
    want = stem(x)
    half = copy.deepcopy(stem).to(dtype)(x.to(dtype))
    assert half.dtype == dtype
    torch.testing.assert_close(half.float(), want, atol=0.05, rtol=0.05)
    with torch.autocast("cpu", dtype):
        cast = stem(x)
    assert cast.dtype == dtype
    torch.testing.assert_close(cast.float(), want, atol=0.05, rtol=0.05)


def test_compiles_whole_and_not_for_every_size():
    torch._dynamo.reset()
    stem = AttentionStem2d(3, 8, num_heads=2)
    counter = CompileCounter()
    compiled = torch.compile(stem, backend=counter, fullgraph=True, dynamic=True)
    for size in ((9, 14), (17, 7), (23, 33), (5, 6)):
        x = torch.randn(2, 3, *size)
        torch.testing.assert_close(compiled(x), stem(x))
    assert counter.frame_count == 1


def test_exports_for_every_size():
    stem = AttentionStem2d(3, 8, num_heads=2).eval()
    sizes = {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    program = torch.export.export(stem, (torch.randn(1, 3, 9, 14),), dynamic_shapes=(sizes,))
    for size in ((9, 14), (12, 16), (5, 31)):
        x = torch.randn(1, 3, *size)
        torch.testing.assert_close(program.module()(x), stem(x))


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((3, 8), {"num_heads": 3}, "got out_channels=8 and num_heads=3, wanted channels that divide by the heads"),
        ((3, 6), {"num_heads": 2}, r"\(head dim 3\), wanted an even head dim"),
        ((3, 8), {"values": "fixed"}, "got values='fixed', wanted one of 'mixture', 'plain', 'conv'"),
        ((3, 8), {"values": "conv", "backend": "triton"}, "got backend='triton' with values='conv', wanted None or"),
        ((3, 8), {"mixtures": 0}, "got mixtures=0, wanted an int of at least 1"),
        ((3, 8, 0), {}, "got kernel_size=0, wanted an int of at least 1"),
        ((0, 8), {}, "got in_channels=0, wanted an int of at least 1"),
    ],
)
def test_refusals(arguments, options, text):
    with pytest.raises(ArgumentValueError, match=f"^AttentionStem2d: .*{text}"):
        AttentionStem2d(*arguments, **options)


def test_refused_inputs():
    stem = AttentionStem2d(3, 8, num_heads=2)
    with pytest.raises(ArgumentValueError, match=r"AttentionStem2d: got shape \[1, 4, 5, 5\], wanted \[B, 3, H, W\]"):
        stem(torch.zeros(1, 4, 5, 5))
    with pytest.raises(ArgumentTypeError, match=r"AttentionStem2d: got key_mask of dtype torch.float32"):
        stem(torch.zeros(1, 3, 5, 5), torch.ones(1, 5, 5))


@pytest.mark.parametrize("values", ["mixture", "conv"])
def test_pooled_is_norm_relu_and_max_pool(values):
    stem = make(3, 8, num_heads=2, values=values)
    norm = torch.nn.BatchNorm2d(8).double()
    torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(2))
    other = copy.deepcopy(norm)
    x = randn(2, 3, 9, 14)
    got = stem.pooled(x, norm)
    want = F.max_pool2d(F.relu(other(stem(x))), 4, 4, ceil_mode=True)
    assert torch.equal(got, want)
    assert torch.equal(norm.running_var, other.running_var)
    up = randn(*got.shape, seed=1)
    parameters = list(stem.parameters())
    for one, two in zip(
        torch.autograd.grad(got, parameters, up), torch.autograd.grad(want, parameters, up), strict=True
    ):
        assert torch.equal(one, two)
