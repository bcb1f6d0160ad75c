"""Explicit attention's Triton kernels, interpreted on the CPU: output and every gradient by the error rule, on small maps."""

import pytest
import torch

from nearsight.ops import backends, explicit_attention
from tests.ops.triton.interpreter import interpreted
from tests.support.accuracy import assert_by_error_rule

FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16


def make(dtype=FLOAT, size=(5, 7), batch=2, channels=6, heads=3, mask=None, mean=0.0, radius=0.75):
    """Inputs of one call; heads=None is a 0-d radius, `mask` the share of pixels that may be attended.

    Three heads, because one radius' gradient, a sum of random terms, may nearly vanish: then only rounding would be compared.
    """
    generator = torch.Generator().manual_seed(sum(size) + channels)
    spread = 1.0 if heads is None else 0.5 + torch.rand(heads, generator=generator)
    return {
        "values": (mean + torch.randn(batch, *size, channels, generator=generator)).to(dtype),
        "radius": torch.as_tensor(radius * spread),
        "key_mask": torch.rand(batch, *size, generator=generator) < mask if mask is not None else None,
    }


def compare(inputs, kind="gaussian", **options):
    def run(backend):
        return lambda **tensors: explicit_attention(**tensors, kind=kind, **options, backend=backend)

    assert_by_error_rule(run("triton"), run("reference"), inputs)


@interpreted
@pytest.mark.parametrize("kind", ["gaussian", "exp_manhattan"])
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, HALF])
@pytest.mark.parametrize("mask", [None, 0.6])
def test_every_dtype(kind, dtype, mask):
    compare(make(dtype, mask=mask), kind)


@interpreted
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
@pytest.mark.parametrize(("heads", "channels"), [(None, 4), (1, 5), (5, 5), (2, 40), (1, 70)])
def test_one_radius_and_one_per_head(dtype, heads, channels):
    compare(make(dtype, size=(3, 4), heads=heads, channels=channels, mask=0.8))


@interpreted
@pytest.mark.parametrize("size", [(1, 1), (1, 19), (18, 1), (3, 16)])
def test_slender_maps(size):
    compare(make(size=size, batch=1))


@interpreted
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, HALF])
@pytest.mark.parametrize("mask", [None, 0.7])
def test_maps_of_many_tiles(dtype, mask):
    """More than 32 pixels: bfloat16 products; in float32 several tiles along the product, too."""
    compare(make(dtype, size=(35, 20), batch=1, channels=6, mask=mask))


@interpreted
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("mask", [None, 0.7])
@pytest.mark.parametrize("size", [(20, 34), (18, 9)])
def test_wide_and_narrow_heads_of_one_call(dtype, offset, mask, size):
    """Each head goes its own way: by nodes where the Gaussian is smooth; else by axis products, or whole on a small map."""
    inputs = make(dtype, size=size, batch=1, channels=6, mask=mask)
    inputs["radius"] = torch.tensor([0.05, 0.31, 0.9])
    compare(inputs, offset=offset)


@interpreted
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, HALF])
@pytest.mark.parametrize(("heads", "channels"), [(2, 64), (1, 40), (2, 50)])
def test_many_channels_between_the_nodes(dtype, heads, channels):
    """One program for all channels of a head, several, and a last one with channels to spare."""
    compare(make(dtype, size=(18, 7), batch=1, channels=channels, heads=heads, mask=0.8 if heads == 2 else None))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
def test_maps_beyond_one_tile(dtype):
    compare(make(dtype, size=(131, 6), batch=1, channels=3))
    compare(make(dtype, size=(5, 140), batch=1, channels=3))


@interpreted
@pytest.mark.slow
def test_what_the_values_are_centred_by_is_near_their_mean():
    """On a large map without a mean, the mean of a few pixels would be larger than the output, and round it at its own size."""
    compare(make(size=(70, 38), batch=1, channels=8, heads=4), "exp_manhattan")


@interpreted
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
@pytest.mark.parametrize("size", [(6, 5), (20, 33)])
def test_a_large_mean_leaves_the_radius_its_gradient(dtype, size):
    """Without centring the values, rounding would be larger than the radius' gradient."""
    compare(make(dtype, size=size, batch=1, mean=5.0))
    compare(make(dtype, size=size, batch=1, mean=5.0, mask=0.7))


@interpreted
def test_the_radius_gradient_of_bfloat16_is_that_of_float32():
    """Maps are read in two parts, though they are written from one: the gradient is a sum of terms that nearly cancel."""
    inputs = make(BFLOAT, size=(18, 21), batch=1, channels=8, heads=4, mean=2.0)
    upstream = torch.randn(inputs["values"].shape, generator=torch.Generator().manual_seed(1)).to(BFLOAT)
    gradients = []
    for dtype in (BFLOAT, FLOAT):
        radius = inputs["radius"].detach().requires_grad_()
        out = explicit_attention(inputs["values"].to(dtype), kind="gaussian", radius=radius, backend="triton")
        gradients += torch.autograd.grad(out, radius, upstream.to(dtype))
    assert (gradients[0] - gradients[1]).norm() <= 5e-4 * gradients[1].norm()


@interpreted
@pytest.mark.parametrize("radius", [1e-7, 0.02, 0.2, 30.0])
@pytest.mark.parametrize("offset", [0.0, 0.5])
def test_radius_and_offset(radius, offset):
    compare(make(radius=radius, size=(6, 4)), offset=offset)


@interpreted
def test_nothing_to_attend_to():
    inputs = make(mask=0.5)
    inputs["key_mask"][0] = False
    inputs["values"][0] = float("nan")  # what may not be attended may hold anything
    leaves = {n: inputs[n].requires_grad_() for n in ("values", "radius")}
    out = explicit_attention(**leaves, key_mask=inputs["key_mask"], kind="gaussian", offset=0.0, backend="triton")
    assert (out[0] == 0).all()
    dvalues, dradius = torch.autograd.grad(out.sum(), list(leaves.values()))
    assert (dvalues[0] == 0).all()
    assert torch.isfinite(dradius).all()


@interpreted
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, HALF])
@pytest.mark.parametrize("radius", [0.1, 0.5])
def test_a_constant_map_stays_constant(dtype, radius):
    values = torch.full((1, 9, 40, 3), 1.2345678).to(dtype)
    out = explicit_attention(values, kind="gaussian", radius=radius, backend="triton")
    assert (out - values).abs().max() <= (1e-6 if dtype == FLOAT else 0.0)


@interpreted
def test_views_and_an_expanded_upstream():
    inputs = make(channels=8, heads=2)
    wide = torch.cat([inputs["values"], inputs["values"]], -1)
    dense = explicit_attention(**inputs, kind="gaussian", backend="triton")
    for view in (wide[..., 8:], inputs["values"].permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)):
        assert torch.equal(dense, explicit_attention(view, radius=inputs["radius"], kind="gaussian", backend="triton"))
    gradients = []
    for upstream in (torch.ones(()).expand(dense.shape), torch.ones(dense.shape)):
        leaf = inputs["values"].detach().requires_grad_()
        out = explicit_attention(leaf, radius=0.5, kind="gaussian", backend="triton")
        gradients.append(torch.autograd.grad(out, leaf, upstream)[0])
    assert torch.equal(*gradients)


@interpreted
@pytest.mark.parametrize("size", [(18, 9), (5, 34)])
def test_a_radius_that_does_not_learn(size):
    """The same output and gradient of the values; and none, not zero, for the radius."""
    results = []
    for learns in (True, False):
        inputs = make(BFLOAT, size=size, batch=1)
        values, radius = inputs["values"].requires_grad_(), inputs["radius"].requires_grad_(learns)
        out = explicit_attention(values, radius=radius, kind="gaussian", backend="triton")
        (out.float() * values.detach()).sum().backward()
        results.append((out, values.grad))
        assert (radius.grad is not None) is learns
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@interpreted
def test_batch_of_none():
    compare(make(batch=0))


@interpreted
def test_two_runs_agree_to_the_bit():
    inputs = make(BFLOAT, size=(20, 35), channels=3)
    results = []
    for _ in range(2):
        leaves = {n: inputs[n].detach().requires_grad_() for n in ("values", "radius")}
        out = explicit_attention(**leaves, kind="gaussian", backend="triton")
        results.append([out, *torch.autograd.grad(out.float().square().sum(), list(leaves.values()))])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@interpreted
@pytest.mark.parametrize("mask", [None, 0.7])
def test_the_registered_op_is_sound(mask):
    """Schema, fake kernel, autograd registration and tracing, as torch checks them; then one graph through a compiler."""
    from nearsight.ops.explicit import triton_impl

    inputs = make(mask=mask)
    leaves = [inputs[n].requires_grad_() for n in ("values", "radius")]
    heads = leaves[0].detach().unflatten(3, (3, -1)).requires_grad_()
    torch.library.opcheck(triton_impl._forward, (heads, leaves[1], inputs["key_mask"], True, 1.0, True))

    def run(values, radius):
        return explicit_attention(values, kind="gaussian", radius=radius, key_mask=inputs["key_mask"], backend="triton")

    out, want = torch.compile(run, backend="aot_eager", fullgraph=True)(*leaves), run(*leaves)
    assert torch.equal(out, want)
    for got, expected in zip(
        torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True
    ):
        assert torch.equal(got, expected)


@interpreted
@pytest.mark.parametrize(
    ("kind", "size", "dtype", "sentence"),
    [
        ("linear", (3, 4), FLOAT, "needs one of the kinds gaussian, exp_manhattan, got linear"),
        ("exp_euclidean", (3, 4), FLOAT, "needs one of the kinds gaussian, exp_manhattan, got exp_euclidean"),
        ("gaussian", (1, 1025), FLOAT, "needs maps of at most 1024 pixels per axis, got 1×1025"),
        ("gaussian", (3, 4), torch.float64, "needs float32, bfloat16 or float16, got float64"),
    ],
)
def test_refusals(kind, size, dtype, sentence):
    radius = None if kind == "linear" else 0.75
    report = backends("explicit_attention", torch.zeros(1, *size, 2, dtype=dtype), kind=kind, radius=radius)[0]
    assert report == ("triton", False, sentence)


@interpreted
@pytest.mark.parametrize(
    ("radii", "size", "sentence"),
    [
        (512, (3, 33), "needs at most 511 radii on maps of more than 32 pixels, got 512"),
        (511, (3, 33), None),
        (512, (3, 32), None),
    ],
)
def test_refuses_tables_out_of_reach_of_32_bit_offsets(radii, size, sentence):
    """Of 1024 pixels a side: 512 · 4 · 2²⁰ numbers."""
    values = torch.zeros(1, *size, radii)
    report = backends("explicit_attention", values, kind="gaussian", radius=torch.ones(radii))[0]
    assert report == ("triton", sentence is None, sentence)
