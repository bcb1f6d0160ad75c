"""explicit_attention: every kind and backend against the dense map in float64, masks, dtypes, compile, export, memory."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nearsight.ops import backends, explicit_attention, explicit_weights
from nearsight.ops.explicit.call import FIXED_KINDS, KINDS
from tests.support.accuracy import assert_by_error_rule, output_and_gradients
from tests.support.largest import LargestTensor

RADIUS_KINDS = [k for k in KINDS if k not in FIXED_KINDS]
SHAPES = [(2, 5, 9, 6), (1, 11, 4, 2), (3, 1, 1, 4), (2, 1, 7, 2), (2, 8, 1, 4), (0, 3, 5, 4), (1, 16, 13, 8)]


def inputs(shape: tuple[int, ...], kind: str, *, heads: int = 0, mask: bool = False, dtype=torch.float32, seed=0):
    """Tensors of one call: heads = 0 is a 0-d radius. The last image of a masked batch may attend to nothing."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor | None] = {"values": torch.randn(shape, generator=generator).to(dtype)}
    if kind not in FIXED_KINDS:
        radius = 0.1 + torch.rand(max(heads, 1), generator=generator)
        tensors["radius"] = (radius if heads else radius[0]).to(dtype)
    if mask:
        tensors["key_mask"] = torch.rand(shape[:3], generator=generator) > 0.4
        tensors["key_mask"][-1:] = False
    return tensors


def by(backend: str, kind: str, **options):
    return partial(explicit_attention, kind=kind, backend=backend, **options)


def check(kind: str, tensors, backend: str = "torch", **options) -> None:
    assert_by_error_rule(by(backend, kind, **options), by("reference", kind, **options), tensors)


# The definition itself.


def brute_force(values: Tensor, kind: str, radius: float, offset: float, key_mask: Tensor) -> Tensor:
    """The paper's formulas, pixel by pixel, in Python numbers."""
    batch, height, width, _ = values.shape
    diagonal = math.hypot(height, width)

    def g(dy: int, dx: int) -> float:
        distance = math.hypot(dy, dx) / diagonal
        return {
            "constant": 1.0,
            "linear": 1 - distance,
            "cosine": 0.5 * (1 + math.cos(math.pi * distance)),
            "gaussian": math.exp(-((dx / width) ** 2 + (dy / height) ** 2) / (2 * radius**2)),
            "exp_euclidean": math.exp(-math.hypot(dx / width, dy / height) / radius),
            "exp_manhattan": math.exp(-(abs(dx) / width + abs(dy) / height) / radius),
        }[kind]

    out = torch.zeros_like(values)
    for b in range(batch):
        for y in range(height):
            for x in range(width):
                total = 0.0
                for a in range(height):
                    for c in range(width):
                        if key_mask[b, a, c]:
                            weight = g(y - a, x - c) + offset
                            out[b, y, x] += weight * values[b, a, c]
                            total += weight
                out[b, y, x] /= total
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_is_the_papers_formula(kind: str, backend: str):
    tensors = inputs((1, 3, 5, 2), kind, dtype=torch.float64)
    mask = torch.ones(1, 3, 5, dtype=torch.bool)
    mask[0, 2, 1] = False
    want = brute_force(tensors["values"], kind, float(tensors.get("radius", torch.tensor(1.0))), 0.5, mask)
    got = explicit_attention(**tensors, kind=kind, offset=0.5, key_mask=mask, backend=backend)
    torch.testing.assert_close(got, want, atol=1e-14, rtol=1e-13)


# Error rule, gradients.


# One radius per channel here: a scalar's gradient is a single sum of both signs, which may come out near 0 and then has no
# digits in any arithmetic; the largest of several says what the rule asks. The scalar is that sum, tested below.


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_obeys_the_error_rule(kind: str, mask: bool):
    for shape in SHAPES:
        check(kind, inputs(shape, kind, heads=shape[-1], mask=mask))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_obeys_the_error_rule_in_half_types(kind: str, dtype: torch.dtype):
    check(kind, inputs((2, 9, 14, 6), kind, heads=6, mask=True, dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_in_float64(kind: str):
    tensors = inputs((2, 9, 14, 6), kind, heads=6, mask=True, dtype=torch.float64)
    upstream = torch.randn(2, 9, 14, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = output_and_gradients(by("reference", kind), tensors, upstream)
    for name, got in output_and_gradients(by("torch", kind), tensors, upstream).items():
        torch.testing.assert_close(got, want[name], atol=1e-13 * float(want[name].abs().max()), rtol=0)


@pytest.mark.parametrize("kind", RADIUS_KINDS)
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("heads", [1, 3])
def test_gradient_of_a_shared_radius_is_the_sum_of_its_channels(kind: str, backend: str, heads: int):
    """heads = 1: a 0-d radius; heads = 3: three, each for two channels."""
    tensors = inputs((2, 9, 14, 6), kind, heads=heads, mask=True)
    shared = tensors["radius"] if heads > 1 else tensors["radius"][0]
    upstream = torch.randn(2, 9, 14, 6, generator=torch.Generator().manual_seed(0))
    own = {**tensors, "radius": tensors["radius"].repeat_interleave(6 // heads)}
    parts = output_and_gradients(by(backend, kind), own, upstream)["gradient of radius"].unflatten(0, (heads, -1))
    got = output_and_gradients(by(backend, kind), {**tensors, "radius": shared}, upstream)["gradient of radius"]
    assert got.shape == shared.shape
    error = (got.reshape(heads) - parts.sum(1)).abs()
    assert (error <= 1e-5 * parts.abs().sum(1)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0, 0.25])
def test_obeys_the_error_rule_with_another_offset(kind: str, offset: float):
    check(kind, inputs((2, 7, 10, 4), kind, heads=4, mask=True), offset=offset)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(KINDS),
    shape=st.tuples(st.integers(0, 2), st.integers(1, 19), st.integers(1, 19)),
    heads=st.integers(4, 6),
    width=st.integers(1, 2),
    mask=st.booleans(),
    offset=st.sampled_from([0.0, 1.0, 3.0]),
    seed=st.integers(0, 99),
)
def test_obeys_the_error_rule_anywhere(kind, shape, heads, width, mask, offset, seed):
    shape = (*shape, heads * width)
    check(kind, inputs(shape, kind, heads=heads, mask=mask, seed=seed), offset=offset)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_gradcheck(kind: str, backend: str):
    for heads in [0] if kind in FIXED_KINDS else [0, 2]:
        tensors = inputs((2, 2, 3, 4), kind, heads=heads, mask=True, dtype=torch.float64)
        mask = tensors.pop("key_mask")
        leaves = [t.requires_grad_() for t in tensors.values()]

        def run(values: Tensor, radius: Tensor | None = None, mask: Tensor = mask) -> Tensor:
            return explicit_attention(values, radius=radius, key_mask=mask, kind=kind, backend=backend)

        assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_catches_faults(kind: str):
    """Rows for columns, a gradient 3 % off, an element never written: each must fail the comparison above."""
    tensors = inputs((1, 6, 9, 4), kind, heads=4)
    run = by("torch", kind)

    def swapped(values: Tensor, **rest: Tensor) -> Tensor:
        return run(values.reshape(1, 9, 6, 4), **rest).reshape(values.shape)

    def stretched(name: str):
        def mutant(**t: Tensor) -> Tensor:
            return run(**{n: 1.03 * v - 0.03 * v.detach() if n == name else v for n, v in t.items()})

        return mutant

    def unwritten(**t: Tensor) -> Tensor:
        out = run(**t).clone()
        out[0, 5, 8, 3] = 0.0
        return out

    mutants = [unwritten, *[stretched(name) for name in tensors]]
    for mutant in mutants if kind == "constant" else [swapped, *mutants]:
        with pytest.raises(AssertionError):
            assert_by_error_rule(mutant, by("reference", kind), tensors)


# Radius, heads, mask.


@pytest.mark.parametrize("kind", RADIUS_KINDS)
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("radius", [-1.0, 0.0, 1e-30, 1e-7, 1e-3, 1e4, 1e30])
def test_extreme_radii_stay_finite(kind: str, backend: str, radius: float):
    """A tensor's value is not refused: below the floor the map is the pixel itself, far above it is flat."""
    tensors = {**inputs((2, 6, 5, 4), kind), "radius": torch.tensor(radius)}
    for offset in (0.0, 1.0):
        got = output_and_gradients(by(backend, kind, offset=offset), tensors, torch.ones(2, 6, 5, 4))
        assert all(torch.isfinite(t).all() for t in got.values())
        values = tensors["values"]
        mean = values.mean((1, 2), keepdim=True).expand_as(values)
        want = mean if radius > 1 else (values + offset * 30 * mean) / (1 + offset * 30)
        torch.testing.assert_close(got["output"], want, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", RADIUS_KINDS)
def test_a_number_is_a_radius_for_all_heads(kind: str):
    values = torch.randn(2, 5, 7, 6)
    one = explicit_attention(values, kind=kind, radius=0.4)
    for radius in (torch.tensor(0.4), torch.tensor([0.4]), torch.full((3,), 0.4)):
        torch.testing.assert_close(explicit_attention(values, kind=kind, radius=radius), one, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_channels_take_the_radius_of_their_head(backend: str):
    values = torch.randn(1, 5, 7, 6)
    both = explicit_attention(values, kind="gaussian", radius=torch.tensor([0.2, 0.9]), backend=backend)
    for part, radius in ((slice(0, 3), 0.2), (slice(3, 6), 0.9)):
        alone = explicit_attention(values[..., part], kind="gaussian", radius=radius, backend=backend)
        torch.testing.assert_close(both[..., part], alone, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_masked_pixels_do_not_matter(kind: str, backend: str):
    """Not even when they are NaN; and where nothing is left the output and every gradient are 0."""
    tensors = inputs((3, 6, 5, 4), kind, mask=True)
    run = by(backend, kind)
    dirty = tensors["values"].masked_fill(~tensors["key_mask"][..., None], math.nan)
    upstream = torch.randn(3, 6, 5, 4)
    clean = output_and_gradients(run, tensors, upstream)
    got = output_and_gradients(run, {**tensors, "values": dirty}, upstream)
    for name, want in clean.items():
        torch.testing.assert_close(got[name], want, atol=0, rtol=0)
    assert not clean["output"][-1].any()
    assert not clean["gradient of values"][~tensors["key_mask"]].any()
    only_empty = {n: t[-1:] if n != "radius" else t for n, t in tensors.items()}
    assert not any(t.any() for t in output_and_gradients(run, only_empty, upstream[-1:]).values())


def test_vanishing_weights_give_zero():
    """Without the offset, a query whose only keys are infinitely far by its radius has nothing to attend to."""
    mask = torch.zeros(1, 1, 40, dtype=torch.bool)
    mask[..., 0] = True
    for backend in ("reference", "torch"):
        tensors = {"values": torch.ones(1, 1, 40, 2), "radius": torch.tensor(0.01), "key_mask": mask}
        got = output_and_gradients(by(backend, "gaussian", offset=0.0), tensors, torch.ones(1, 1, 40, 2))
        assert got["output"][0, 0, 0, 0] == 1
        assert not got["output"][0, 0, 20:].any()
        assert all(torch.isfinite(t).all() for t in got.values())


def test_a_small_radius_is_taken_as_it_is():
    """The floor lies far below a radius that still reaches the next pixel of a wide map."""
    got = explicit_weights((1, 1000), kind="exp_manhattan", radius=torch.tensor(3e-4), offset=0.0, queries=[(0, 500)])
    beside = got[0, 0, 0, 0, 501] / got[0, 0, 0, 0, 500]
    assert float(beside) == pytest.approx(math.exp(-(1 / 1000) / 3e-4), rel=1e-4)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(("weight", "sees"), [(1e-17, True), (1e-21, False)])
def test_weights_too_small_to_divide_by_count_as_none(backend: str, weight: float, sees: bool):
    """Their sum's inverse, or its square in the gradient of the radius, would not be finite."""
    values = torch.randn(1, 1, 4, 3).requires_grad_()
    # The one valid key lies a quarter of the width from the first query: exp(−(¼/σ)²/2) = weight.
    radius = torch.tensor(0.25 / math.sqrt(-2 * math.log(weight)), requires_grad=True)
    mask = torch.tensor([[[False, True, False, False]]])
    out = explicit_attention(values, kind="gaussian", radius=radius, offset=0.0, key_mask=mask, backend=backend)
    torch.testing.assert_close(out[0, 0, 0], values[0, 0, 1] if sees else torch.zeros(3), atol=0, rtol=1e-5)
    for gradient in torch.autograd.grad(out.square().sum(), (values, radius)):
        assert torch.isfinite(gradient).all()


# Weights for pictures.


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_op(kind: str):
    tensors = inputs((2, 4, 6, 4), kind, heads=2, mask=True)
    values = tensors.pop("values")
    tensors["key_mask"][-1, 1, 2] = True
    weights = explicit_weights((4, 6), kind=kind, **tensors)
    heads = 1 if kind in FIXED_KINDS else 2
    assert weights.shape == (2, 24, heads, 4, 6)
    torch.testing.assert_close(weights.sum((-2, -1)), torch.ones(2, 24, heads))
    out = torch.einsum("bqnyx,byxnd->bqnd", weights, values.unflatten(-1, (heads, -1))).reshape(values.shape)
    torch.testing.assert_close(out, explicit_attention(values, kind=kind, **tensors), atol=1e-6, rtol=1e-5)


def test_weights_of_some_pixels():
    every = explicit_weights((4, 6), kind="cosine")
    assert every.shape == (1, 24, 1, 4, 6)
    for queries in ([(3, 1), (0, 5)], torch.tensor([[3, 1], [0, 5]])):
        some = explicit_weights((4, 6), kind="cosine", queries=queries)
        assert torch.equal(some, every[:, [3 * 6 + 1, 5]])


# Refusals.


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"values": torch.randn(3, 4, 5)}, ValueError, r"got values of shape \[3, 4, 5\] \(rank 3\), wanted rank 4"),
        ({"values": torch.ones(1, 2, 2, 4).long()}, TypeError, "got values of dtype torch.int64, wanted a floating-point"),
        ({"values": [1.0]}, TypeError, r"got values of type list, wanted a tensor \[B, H, W, C\]"),
        ({"kind": "box"}, ValueError, "got kind='box', wanted one of 'constant', 'linear'"),
        ({"radius": None}, ValueError, "got radius=None with kind='gaussian', wanted a positive number"),
        ({"radius": -1.0}, ValueError, "got radius=-1.0, wanted a finite positive number"),
        ({"radius": 0}, ValueError, "got radius=0, wanted a finite positive number"),
        ({"radius": math.nan}, ValueError, "got radius=nan, wanted a finite positive number"),
        ({"radius": math.inf}, ValueError, "got radius=inf, wanted a finite positive number"),
        ({"radius": "0.5"}, TypeError, "got radius of type str, wanted a number"),
        ({"radius": torch.ones(1, 2)}, ValueError, r"got radius of shape \[1, 2\], wanted a 0-d tensor or \[heads\]"),
        ({"radius": torch.ones(0)}, ValueError, r"got radius of shape \[0\]"),
        ({"radius": torch.ones(2).long()}, TypeError, "got radius of dtype torch.int64, wanted a floating-point dtype"),
        ({"radius": torch.ones(3)}, ValueError, "got 3 radii and 4 channels, wanted channels that divide"),
        ({"radius": torch.ones(2, device="meta")}, TypeError, "got values of device cpu and radius of device meta"),
        ({"kind": "linear"}, ValueError, "got a radius with kind='linear', wanted radius=None"),
        ({"offset": -1.0}, ValueError, "got offset=-1.0, wanted at least 0"),
        ({"offset": math.nan}, ValueError, "got offset=nan, wanted a finite number"),
        ({"key_mask": torch.ones(1, 3, 2).bool()}, ValueError, r"got key_mask of shape \[1, 3, 2\], wanted \[1, 2, 3\]"),
        ({"key_mask": torch.ones(1, 2, 3)}, TypeError, "got key_mask of dtype torch.float32, wanted a bool tensor"),
        ({"backend": "cuda"}, ValueError, "got backend='cuda', wanted one of"),
    ],
)  # fmt: skip
def test_refuses(change, error, text):
    arguments = {"values": torch.randn(1, 2, 3, 4), "kind": "gaussian", "radius": 0.5, **change}
    with pytest.raises(error, match=f"^explicit_attention: {text}"):
        explicit_attention(arguments.pop("values"), **arguments)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"size": 0}, ValueError, "got size=0, wanted at least 1"),
        ({"kind": "gaussian"}, ValueError, "got radius=None with kind='gaussian'"),
        ({"queries": [(4, 0)]}, ValueError, r"got the query pixel \(4, 0\), wanted one on the 4×6 map"),
        ({"queries": [(1, -2)]}, ValueError, r"got queries=\(1, -2\), wanted at least 0"),
        ({"queries": (1, 2)}, TypeError, r"got queries=\(1, 2\), wanted pixels \(y, x\)"),
        ({"queries": []}, TypeError, r"got queries=\[\], wanted pixels"),
        ({"queries": [None]}, TypeError, r"got queries=\[None\], wanted pixels"),
        ({"queries": torch.ones(2, 3)}, TypeError, r"got queries of shape \[2, 3\] and dtype torch.float32, wanted pixels"),
        ({"key_mask": torch.ones(2, 6, 4).bool()}, ValueError, r"got key_mask of shape \[2, 6, 4\], wanted \[2, 4, 6\]"),
    ],
)  # fmt: skip
def test_weights_refuse(change, error, text):
    with pytest.raises(error, match=f"^explicit_weights: {text}"):
        explicit_weights(**{"size": (4, 6), "kind": "linear", **change})


# Autocast, compile, export.


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_autocast_computes_the_map_in_float32(backend: str):
    values, radius = torch.randn(2, 9, 14, 4), torch.tensor(0.3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = explicit_attention(values, kind="gaussian", radius=radius, backend=backend)
        untouched = explicit_attention(values.double(), kind="gaussian", radius=radius, backend=backend)
    want = explicit_attention(values.bfloat16(), kind="gaussian", radius=radius, backend=backend)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)
    assert untouched.dtype == torch.float64
    (gradient,) = torch.autograd.grad(got.float().sum(), radius)
    assert gradient.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_once_for_all_image_sizes(kind: str):
    torch._dynamo.reset()
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def run(values: Tensor, radius: Tensor | None, key_mask: Tensor | None) -> Tensor:
        return explicit_attention(values, radius=radius, key_mask=key_mask, kind=kind)

    compiled = torch.compile(run, backend=count, fullgraph=True, dynamic=True)
    for shape in [(2, 5, 7, 4), (3, 6, 9, 4), (2, 16, 11, 4), (5, 31, 64, 4)]:
        tensors = inputs(shape, kind, mask=True)
        arguments = tensors["values"], tensors.get("radius"), tensors["key_mask"]
        torch.testing.assert_close(compiled(*arguments), run(*arguments))
    assert len(graphs) == 1


@pytest.mark.parametrize("kind", ["constant", "gaussian", "exp_euclidean"])
def test_exports_with_free_sizes(kind: str):
    class Module(torch.nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            radius = None if kind in FIXED_KINDS else 0.4
            return explicit_attention(values, kind=kind, radius=radius)

    free = torch.export.Dim.AUTO
    exported = torch.export.export(Module(), (torch.randn(2, 5, 7, 4),), dynamic_shapes=({0: free, 1: free, 2: free},))
    for shape in [(2, 5, 7, 4), (3, 9, 6, 4)]:
        values = torch.randn(shape)
        torch.testing.assert_close(exported.module()(values), Module()(values))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_inductor_agrees(kind: str):
    tensors = inputs((2, 9, 12, 4), kind, mask=True)
    run = by("torch", kind)
    compiled = torch.compile(run, fullgraph=True)
    upstream = torch.randn(2, 9, 12, 4)
    want = output_and_gradients(run, tensors, upstream)
    for name, got in output_and_gradients(compiled, tensors, upstream).items():
        torch.testing.assert_close(got, want[name], atol=1e-5, rtol=1e-4)


# Cost, and who runs it.


@pytest.mark.parametrize("kind", KINDS)
def test_never_makes_the_whole_map(kind: str):
    """Separable kinds stay at the size of the values, the others at 2H/W of one map row each: far below (HW)²."""
    height, width = 40, 48
    tensors = inputs((1, height, width, 4), kind, mask=True)
    tensors["key_mask"][:] = True
    with LargestTensor() as largest:
        output_and_gradients(by("torch", kind), tensors, torch.ones(1, height, width, 4))
    whole = (height * width) ** 2
    limit = height * width * 4 if kind in ("constant", "gaussian", "exp_manhattan") else height * width * width
    assert largest.elements <= limit < whole / 30
    with LargestTensor() as largest:
        output_and_gradients(by("reference", kind), tensors, torch.ones(1, height, width, 4))
    assert largest.elements >= whole


def test_backends_are_reported():
    reports = {r.name: r for r in backends("explicit_attention", torch.randn(1, 4, 5, 4), kind="gaussian", radius=0.5)}
    assert reports["torch"].usable
    assert reports["reference"].usable


def test_channels_last_map_needs_no_copy():
    """A channels-last NCHW map is a view of the op's layout, and the result is one too."""
    x = torch.randn(2, 4, 5, 7).to(memory_format=torch.channels_last)
    out = explicit_attention(x.permute(0, 2, 3, 1), kind="gaussian", radius=0.5).permute(0, 3, 1, 2)
    assert out.is_contiguous(memory_format=torch.channels_last)
