"""Triton kernels of attention with relative positions, interpreted: output and every gradient by the error rule, tiny shapes."""

from contextlib import contextmanager

import pytest
import torch

from nearsight.errors import BackendError
from nearsight.layers import relative_attention
from nearsight.layers.relative_attention import RelativeAttention2d
from nearsight.ops.relative import launches, small, triton_impl
from tests.ops.test_relative import definition
from tests.ops.triton.interpreter import interpreted
from tests.support.accuracy import assert_by_error_rule

FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16


def make(dtype=FLOAT, size=(3, 5), batch=1, heads=1, dim=4, values=2, shared=True, mask=None, spread=1.0):
    """Inputs of one call; `mask` is the share of pixels that may be attended."""
    height, width = size
    generator = torch.Generator().manual_seed(height * 31 + width + dim)
    tables = 1 if shared else heads
    shapes = {
        "packed": (batch, height, width, heads * (2 * dim + values)),
        "rel_row": (tables, 2 * height - 1, dim),
        "rel_col": (tables, 2 * width - 1, dim),
    }
    inputs = {name: (spread * torch.randn(s, generator=generator)).to(dtype) for name, s in shapes.items()}
    allowed = None if mask is None else torch.rand(batch, height, width, generator=generator) < mask
    if allowed is not None:
        allowed[:, 0, 0] = True
    return {**inputs, "key_mask": allowed}


def by_triton(heads=1, dim=4, scale=0.5):
    return lambda **tensors: triton_impl.run(**tensors, heads=heads, dim=dim, scale=scale)


def by_definition(heads=1, dim=4, scale=0.5):
    def run(packed, rel_row, rel_col, key_mask):
        q, k, v = packed.split([heads * dim, heads * dim, packed.shape[-1] - 2 * heads * dim], -1)
        q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
        return definition(q * scale, k, v, rel_row, rel_col, key_mask)

    return run


@contextmanager
def changed(module, **constants):
    before = {name: getattr(module, name) for name in constants}
    try:
        for name, value in constants.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def bounded_from(pixels):
    return changed(launches, BOUNDED=pixels)


def small_up_to(longest):
    """Maps of longer sides take the general kernels; with 0 all do."""
    return changed(small, LONGEST=longest)


def compare(inputs, heads=1, dim=4, **options):
    assert_by_error_rule(by_triton(heads, dim, **options), by_definition(heads, dim, **options), inputs)


@interpreted
@pytest.mark.parametrize(("dtype", "shared"), [(FLOAT, True), (FLOAT, False), (BFLOAT, True), (HALF, False)])
@pytest.mark.parametrize("longest", [0, 8])
def test_every_dtype(dtype, shared, longest):
    with small_up_to(longest):
        compare(make(dtype, heads=2, shared=shared), heads=2)


@interpreted
@pytest.mark.parametrize("size", [(7, 5), (5, 7), (1, 1), (1, 9), (9, 1), (3, 17), (1, 40)])
def test_sizes(size):
    """Rectangles that fill no tile, one row, one column, and a map wider than a block of columns."""
    compare(make(size=size))


@interpreted
@pytest.mark.parametrize(("dim", "values"), [(4, 1), (20, 3), (20, 17), (40, 8), (128, 2)])
def test_head_dims(dim, values):
    compare(make(dim=dim, values=values, size=(3, 4), heads=1), heads=1, dim=dim, scale=dim**-0.5)


@interpreted
def test_heads():
    compare(make(size=(2, 3), heads=3, shared=False), heads=3)


@interpreted
@pytest.mark.parametrize(("dtype", "size"), [(FLOAT, (5, 3)), (BFLOAT, (2, 18))])
def test_masks(dtype, size):
    compare(make(dtype, size=size, mask=0.5, batch=2))


@interpreted
def test_first_rows_masked():
    """The softmax starts with nothing to attend to."""
    inputs = make(size=(5, 4), mask=1.0)
    inputs["key_mask"][:, :4] = False
    compare(inputs)


@interpreted
def test_nothing_to_attend_to():
    """Everything is attended alike, as far as float32 tells those logits apart; where v is 0, so are y and its gradients."""
    inputs = make(size=(3, 4), mask=1.0)
    inputs["key_mask"][:] = False
    inputs["packed"][:] = 0
    leaves = [inputs[n].requires_grad_() for n in ("packed", "rel_row", "rel_col")]
    out = by_triton()(**inputs)
    assert (out == 0).all()
    dpacked, *tables = torch.autograd.grad(out.sum(), leaves)
    torch.testing.assert_close(dpacked[..., -2:], torch.ones(1, 3, 4, 2), atol=1e-2, rtol=0)
    assert all((t == 0).all() for t in (dpacked[..., :-2], *tables))


@interpreted
@pytest.mark.parametrize("rows", [1, 2])
def test_rows_of_keys_at_a_time(rows):
    """The softmax carried over several steps, the last of which may be smaller."""
    names = ("FORWARD_LARGE", "QUERY_GRADIENTS_LARGE")
    before = [getattr(launches, n) for n in names]
    try:
        for name, tile in zip(names, before, strict=True):
            setattr(launches, name, tile._replace(queries=16, rows=rows))
        compare(make(size=(3, 17)))
    finally:
        for name, tile in zip(names, before, strict=True):
            setattr(launches, name, tile)


@interpreted
@pytest.mark.parametrize(("keys", "queries"), [(16, 16), (64, 32)])
def test_keys_of_a_program(keys, queries):
    """One row of keys, whose logits by row are added, and several, whose come by a product."""
    before = launches.KEY_GRADIENTS_LARGE
    try:
        launches.KEY_GRADIENTS_LARGE = before._replace(keys=keys, queries=queries)
        compare(make(size=(5, 11)))
    finally:
        launches.KEY_GRADIENTS_LARGE = before


@interpreted
@pytest.mark.parametrize("pixels", [1, 10**9])
def test_large_logits(pixels):
    """Several hundred: only differences from the largest may be exponentiated, and a later row brings it.

    All keys of a query are large alike but for the row's slope: were they far apart, one would have all the weight of nearly
    every query, and the errors of the few others, ours and torch's, would be a matter of luck.
    """
    inputs = make(size=(9, 10), batch=2)
    inputs["packed"][..., 0] += 20  # of q
    inputs["packed"][..., 4] = 8.0  # of k
    inputs["rel_col"][..., 0] = 8.0
    inputs["rel_row"][..., 0] = 8.0 + 0.15 * torch.arange(17)
    with bounded_from(pixels):
        compare(inputs, scale=1.0)


@interpreted
@pytest.mark.parametrize(("dtype", "size"), [(FLOAT, (7, 5)), (FLOAT, (5, 17)), (BFLOAT, (2, 9))])
def test_bounded_logits(dtype, size):
    """What larger maps do: a bound of the logits instead of their maximum."""
    with bounded_from(1), small_up_to(0):
        compare(make(dtype, size, heads=2, shared=False), heads=2)


@interpreted
def test_the_bound_is_for_large_maps_without_a_mask_whose_weights_keep_their_bits():
    def bounded(size, mask=None, dtype=BFLOAT):
        inputs = make(dtype, size, mask=mask)
        packed, *rest = inputs.values()
        return launches.make_call(packed.flatten(1, 2), *rest, 1, 4, size[0], 0.5).bounded()

    assert bounded((32, 32))
    assert not bounded((31, 33))
    assert not bounded((32, 32), mask=0.5)
    assert not bounded((32, 32), dtype=HALF)


@interpreted
def test_more_images_than_programs_along_the_batch():
    before = launches.PROGRAMS
    try:
        launches.PROGRAMS = 2
        compare(make(batch=3, size=(2, 3)))
    finally:
        launches.PROGRAMS = before


@interpreted
@pytest.mark.parametrize(
    ("dtype", "size"), [(BFLOAT, (8, 8)), (HALF, (7, 5)), (BFLOAT, (1, 7)), (BFLOAT, (8, 2)), (HALF, (1, 1))]
)
def test_small_maps(dtype, size):
    """Full, with padding, one row, one pixel."""
    compare(make(dtype, size, 2, 2, 20, 3, shared=False), 2, 20)


@interpreted
@pytest.mark.parametrize("size", [(1, 9), (16, 2), (11, 9)])
def test_maps_just_not_small(size):
    """Half types of such sizes take the general kernels."""
    compare(make(BFLOAT, size, 1, 2, 20, 3, shared=False), 2, 20)


@interpreted
@pytest.mark.parametrize(("dim", "values"), [(4, 1), (64, 17)])
def test_small_maps_head_dims(dim, values):
    compare(make(BFLOAT, (3, 4), dim=dim, values=values), dim=dim, scale=dim**-0.5)


@interpreted
@pytest.mark.parametrize("size", [(7, 8), (9, 10)])
def test_large_logits_in_half_types(size):
    """On a small map, and on one that is not."""
    compare(make(BFLOAT, size, batch=2, spread=8.0), scale=1.0)


@interpreted
def test_small_maps_more_images_than_programs():
    with changed(small, PROGRAMS=2):
        compare(make(BFLOAT, (2, 3), batch=3))


@interpreted
def test_which_maps_are_small():
    def fits(dtype=BFLOAT, size=(7, 8), dim=64, values=64, mask=None):
        inputs = make(dtype, size, dim=dim, values=values, mask=mask)
        packed, *rest = inputs.values()
        return small.fits(launches.make_call(packed.flatten(1, 2), *rest, 1, dim, size[0], 0.5))

    assert fits()
    assert fits(HALF)
    assert not fits(FLOAT)
    assert fits(size=(8, 1))
    assert not fits(size=(9, 2))
    assert not fits(size=(2, 9))
    assert not fits(dim=65)
    assert not fits(values=65)
    assert not fits(mask=0.5)


@interpreted
def test_strided():
    """Some channels of a wider tensor: of some pixels, of every second pixel, and every second one."""
    inputs = make(size=(2, 4))
    wide = torch.randn(1, 2, 8, 24, generator=torch.Generator().manual_seed(0))
    for view in (wide[..., 2:12][:, :, :4], wide[..., 3:13][:, :, ::2], wide[..., ::2][:, :, :4, :10]):
        out = by_triton()(**{**inputs, "packed": view})
        assert torch.equal(out, by_triton()(**{**inputs, "packed": view.contiguous()}))


@interpreted
def test_empty_batch():
    inputs = make(batch=0)
    leaves = [inputs[n].requires_grad_() for n in ("packed", "rel_row", "rel_col")]
    out = by_triton()(**inputs)
    assert out.shape == (0, 3, 5, 1, 2)
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), leaves))


@interpreted
def test_twice_gives_the_same_bits():
    inputs = make(size=(3, 4), heads=2)
    leaves = [inputs[n].requires_grad_() for n in ("packed", "rel_row", "rel_col")]

    def gradients():
        out = by_triton(2)(**inputs)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for one, other in zip(gradients(), gradients(), strict=True):
        assert torch.equal(one, other)


@interpreted
def test_opcheck():
    inputs = make(size=(2, 3), mask=0.7)
    leaves = [inputs[n].requires_grad_() for n in ("packed", "rel_row", "rel_col")]
    arguments = (leaves[0].detach().flatten(1, 2).requires_grad_(), *leaves[1:], inputs["key_mask"], 1, 4, 2, 0.5)
    torch.library.opcheck(torch.ops.nearsight.relative_attention_triton.default, arguments)


@interpreted
@pytest.mark.parametrize("options", [{}, {"stride": 2, "per_head_position": True}])
def test_the_layer_takes_it_and_agrees_with_its_other_way(options):
    torch.manual_seed(0)
    layer = RelativeAttention2d(6, 8, key_channels=12, feature_size=(4, 5), num_heads=2, **options)
    x, mask = torch.randn(2, 6, 3, 2), torch.rand(2, 3, 2) > 0.3
    mask[1] = False
    results = []
    before = relative_attention.SMALLEST
    try:
        for smallest in (1, 10**9):
            relative_attention.SMALLEST = smallest
            layer.zero_grad()
            out = layer(x, mask)
            out.square().sum().backward()
            results.append([out.detach(), *(p.grad for p in layer.parameters())])
    finally:
        relative_attention.SMALLEST = before
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max()))
    assert not results[0][0][1].any()
    assert not torch.equal(results[0][0], results[1][0]), "both ran the same code"


@interpreted
def test_the_layer_under_autocast():
    torch.manual_seed(0)
    layer = RelativeAttention2d(6, 8, key_channels=12, feature_size=(4, 5), num_heads=2)
    x = torch.randn(1, 6, 3, 2)
    with torch.autocast("cpu", BFLOAT):
        got = layer(x)
    got.sum().backward()
    assert got.dtype == BFLOAT
    assert layer.rel_row.grad is not None
    assert layer.rel_row.grad.dtype == FLOAT
    torch.testing.assert_close(got.float(), layer(x), atol=0.05, rtol=0.05)


@interpreted
def test_the_layer_compiles_once_for_all_maps_it_takes_and_once_for_those_it_refuses():
    torch._dynamo.reset()
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    layer = RelativeAttention2d(6, 2, key_channels=4, feature_size=(4, 5), num_heads=1)
    compiled = torch.compile(layer, backend=count, fullgraph=True, dynamic=True)
    for size, wanted in (((3, 5), 1), ((2, 4), 1), ((65, 3), 2), ((66, 2), 2)):
        x = torch.randn(1, 6, *size)
        torch.testing.assert_close(compiled(x), layer(x))
        assert len(graphs) == wanted
    takes = [any("relative_attention_triton" in str(n.target) for n in g.graph.nodes) for g in graphs]
    assert takes == [True, False]


@interpreted
def test_what_it_refuses():
    def reason(height=4, width=5, dim=4, values=2, dtype=FLOAT):
        packed = torch.empty(1, height, width, 2 * (2 * dim + values), dtype=dtype)
        return triton_impl.refusal(packed, height, width, dim, values)

    assert reason() is None
    assert reason(dtype=torch.float64) == "needs float32, bfloat16 or float16, got float64"
    assert reason(dim=129) == "needs head dims from 1 to 128, got 129 and 2"
    text = "needs maps of at most {} rows and columns at head dim {} in {}, got {}"
    assert reason(height=65) == text.format(64, 4, "float32", "65×5")
    assert reason(height=129, dtype=HALF) == text.format(128, 4, "float16", "129×5")
    assert reason(width=33, dim=65) == text.format(32, 65, "float32", "4×33")
    assert reason(width=65, dim=65, dtype=BFLOAT) == text.format(64, 65, "bfloat16", "4×65")


def test_without_a_gpu_it_says_so():
    assert triton_impl.refusal(torch.empty(1, 4, 5, 20), 4, 5, 4, 2) == "needs CUDA tensors, got cpu"


@pytest.mark.parametrize(
    ("room", "sides"),
    [
        (232_448, {(FLOAT, 20): 64, (FLOAT, 128): 32, (BFLOAT, 64): 128, (BFLOAT, 128): 64}),
        (166_912, {(FLOAT, 64): 64, (BFLOAT, 128): 64}),
        (101_376, {(FLOAT, 64): 32, (FLOAT, 128): 16, (BFLOAT, 20): 64, (BFLOAT, 128): 32}),
        (65_536, {(FLOAT, 20): 16, (BFLOAT, 32): 32, (BFLOAT, 40): 0}),
    ],
)
def test_maps_are_smaller_where_shared_memory_is(monkeypatch, room, sides):
    class OnGpu:
        device = torch.device("cuda", 0)

        def __init__(self, dtype):
            self.dtype = dtype

        def element_size(self):
            return self.dtype.itemsize

    monkeypatch.setattr(triton_impl, "shared_memory", lambda index: room)
    assert {key: triton_impl.longest_side(OnGpu(key[0]), key[1]) for key in sides} == sides


@interpreted
def test_a_gradient_of_a_gradient_is_refused():
    inputs = make(size=(2, 3))
    inputs["packed"].requires_grad_()
    out = by_triton()(**inputs)
    (grad,) = torch.autograd.grad(out.square().sum(), inputs["packed"], create_graph=True)
    with pytest.raises(BackendError, match=r"got a gradient of a gradient, .*; call it in float64"):
        grad.sum().backward()
