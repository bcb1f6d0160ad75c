"""Relative attention's Triton kernels on a GPU: the error rule at real sizes, determinism, memory, graphs, compilation."""

import pytest
import torch

from nearsight.layers import relative_attention
from nearsight.layers.relative_attention import RelativeAttention2d
from nearsight.ops.relative import triton_impl
from tests.ops.triton.test_relative import BFLOAT, FLOAT, HALF, by_definition, by_triton, make
from tests.support.accuracy import assert_by_error_rule
from tests.support.draws import picker
from tests.support.graphs import assert_captured

pytestmark = pytest.mark.gpu

# Sizes, heads, head dim, channels of a value: the networks' maps, rectangles that fill no tile, every head-dim class.
CASES = [
    ((32, 32), 8, 20, 2),
    ((16, 16), 8, 20, 3),
    ((8, 8), 8, 20, 6),
    ((4, 4), 8, 20, 13),
    ((28, 28), 2, 20, 3),
    ((7, 5), 3, 4, 1),
    ((1, 1), 2, 16, 2),
    ((13, 21), 2, 64, 17),
    ((9, 30), 1, 128, 128),
    ((3, 64), 2, 24, 5),
    ((61, 3), 2, 40, 9),
]


def on_gpu(inputs):
    return {n: None if t is None else t.cuda() for n, t in inputs.items()}


def compare(inputs, heads, dim):
    scale = dim**-0.5
    definition = by_definition(heads, dim, scale)
    assert_by_error_rule(by_triton(heads, dim, scale), definition, on_gpu(inputs))


def leaves_of(inputs):
    return [inputs[n].requires_grad_() for n in ("packed", "rel_row", "rel_col")]


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, HALF])
@pytest.mark.parametrize(("size", "heads", "dim", "values"), CASES)
def test_error_rule(dtype, size, heads, dim, values):
    compare(make(dtype, size, 2, heads, dim, values), heads, dim)


@pytest.mark.parametrize("seed", range(9))
def test_random_rectangles(seed):
    pick = picker(seed)
    heads, dim = pick(1, 4), pick(4, 70)
    dtype, mask, shared = (FLOAT, BFLOAT, HALF)[seed % 3], (None, 0.6)[seed % 2], seed % 4 < 2
    compare(make(dtype, (pick(1, 40), pick(1, 40)), 2, heads, dim, pick(1, 20), shared, mask), heads, dim)


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, HALF])
@pytest.mark.parametrize("size", [(11, 14), (32, 33)])
def test_large_logits(size, dtype):
    """Too far apart for the bound that the larger map would take: the maximum is carried along."""
    compare(make(dtype, size, 2, 2, 20, 3, spread=6.0), 2, 20)


@pytest.mark.parametrize("size", [(12, 20), (56, 56)])
def test_masks(size):
    compare(make(BFLOAT, size, 2, 2, 20, 3, mask=0.5), 2, 20)


@pytest.mark.parametrize(("size", "dim"), [((56, 56), 20), ((2, 128), 64), ((128, 2), 64), ((3, 64), 128)])
def test_large_maps(size, dim):
    compare(make(BFLOAT, size, 1, 2, dim, 3), 2, dim)


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
def test_twice_gives_the_same_bits(dtype):
    inputs = on_gpu(make(dtype, (32, 29), 16, 8, 20, 3))
    leaves = leaves_of(inputs)

    def gradients():
        out = by_triton(8, 20)(**inputs)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for one, other in zip(gradients(), gradients(), strict=True):
        assert torch.equal(one, other)


def test_keeps_no_more_than_its_input_and_output():
    """Between forward and backward: q, k, v, y and one number per query and head; n·(H + W) numbers only meanwhile."""
    inputs = on_gpu(make(BFLOAT, (32, 32), 16, 8, 20, 2))
    leaves_of(inputs)
    run = by_triton(8, 20)
    run(**inputs)
    before = torch.cuda.memory_allocated()
    out = run(**inputs)
    pixels = 16 * 32 * 32
    assert torch.cuda.memory_allocated() - before <= pixels * 8 * (2 * 2 + 4) + 2**16
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out.sum(), [inputs["packed"]])
    # The gradient of q, k and v, the position logits and theirs (64 each per query and head), shares of the tables' gradients.
    assert torch.cuda.max_memory_allocated() - before <= pixels * 8 * (2 * (42 + 128) + 32) + 2**26


def test_captured_in_a_graph():
    inputs = on_gpu(make(BFLOAT, (14, 15), 2, 4, 20, 3))
    leaves = leaves_of(inputs)

    def step():
        out = by_triton(4, 20)(**inputs)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    assert_captured(step)


def test_replayed_calls_are_the_same():
    inputs = on_gpu(make(BFLOAT, (9, 14), 3, 4, 20, 3, mask=0.7))
    leaves = leaves_of(inputs)
    results = []
    for _ in range(4):
        out = by_triton(4, 20)(**inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for later in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], later, strict=True))


def test_opcheck():
    inputs = on_gpu(make(FLOAT, (6, 5), 2, heads=2))
    packed, rel_row, rel_col = (t.detach().requires_grad_() for t in leaves_of(inputs))
    arguments = (packed.detach().flatten(1, 2).requires_grad_(), rel_row, rel_col, None, 2, 4, 6, 0.5)
    torch.library.opcheck(torch.ops.nearsight.relative_attention_triton.default, arguments)


def test_compiled_without_breaks():
    torch._dynamo.reset()
    layer = RelativeAttention2d(32, 16, key_channels=160, feature_size=16).cuda()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for size in ((9, 7), (12, 20), (17, 8)):
        x = torch.randn(2, 32, *size, device="cuda").to(memory_format=torch.channels_last)
        with torch.autocast("cuda", BFLOAT):
            torch.testing.assert_close(compiled(x), layer(x), atol=3e-2, rtol=3e-2)
    torch._dynamo.reset()


@pytest.mark.parametrize("options", [{}, {"stride": 2, "per_head_position": True}])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_layer_trains_alike_with_and_without_the_kernels(options, autocast, monkeypatch):
    torch.manual_seed(0)
    layer = RelativeAttention2d(16, 16, key_channels=160, feature_size=(12, 9), **options).cuda()
    x, mask = torch.randn(3, 16, 12, 9, device="cuda"), torch.rand(3, 12, 9, device="cuda") > 0.3
    mask[2] = False
    results = []
    for smallest in (1, 10**9):
        monkeypatch.setattr(relative_attention, "SMALLEST", smallest)
        layer.zero_grad()
        with torch.autocast("cuda", BFLOAT, enabled=autocast):
            out = layer(x, mask)
        out.float().square().sum().backward()
        results.append([out.detach(), *(p.grad for p in layer.parameters())])
    tolerance = 5e-2 if autocast else 2e-3
    for fused, plain in zip(*results, strict=True):
        assert fused.dtype == plain.dtype
        torch.testing.assert_close(fused, plain, rtol=tolerance, atol=tolerance * float(plain.abs().max()))
    assert not results[0][0][2].any()
    assert not torch.equal(results[0][0], results[1][0]), "both ran the same code"


def test_refuses_what_it_cannot_run():
    packed = torch.empty(1, 4, 5, 20, device="cuda", dtype=torch.float64)
    assert triton_impl.refusal(packed, 4, 5, 4, 2) == "needs float32, bfloat16 or float16, got float64"
