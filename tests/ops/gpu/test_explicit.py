"""Explicit attention's Triton kernels on a GPU, at the sizes networks use."""

import pytest
import torch

from nearsight.ops import explicit_attention
from tests.support.accuracy import assert_by_error_rule
from tests.support.compiled import watch_compilations
from tests.support.draws import picker
from tests.support.graphs import assert_captured

pytestmark = pytest.mark.gpu


def make(dtype, size, channels, heads=4, batch=2, mask=False, mean=0.0, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return {
        "values": (mean + torch.randn(batch, *size, channels, generator=generator, device="cuda")).to(dtype),
        "radius": 0.3 + torch.rand(heads, generator=generator, device="cuda"),
        "key_mask": torch.rand(batch, *size, generator=generator, device="cuda") < 0.8 if mask else None,
    }


def compare(inputs, kind="gaussian", **options):
    """By the reference; on maps whose dense form would take gigabytes by the torch backend, which is tested against it."""

    def run(backend):
        return lambda **tensors: explicit_attention(**tensors, kind=kind, **options, backend=backend)

    height, width = inputs["values"].shape[1:3]
    assert_by_error_rule(run("triton"), run("reference" if height * width <= 1024 else "torch"), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(
    ("size", "channels"), [((112, 112), 64), ((56, 56), 64), ((32, 32), 32), ((28, 28), 16), ((14, 14), 24)]
)
def test_the_networks_shapes(dtype, mask, size, channels):
    compare(make(dtype, size, channels, batch=1 if size[0] > 56 else 2, mask=mask, mean=1.0))


@pytest.mark.parametrize("seed", range(12))
def test_random_rectangles(seed):
    pick = picker(seed)
    heads = pick(2, 5)
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    size = (pick(1, 150), pick(1, 60)) if seed % 2 else (pick(1, 60), pick(1, 150))
    inputs = make(dtype, size, heads * pick(1, 40), heads, mask=seed % 4 == 0, seed=seed)
    compare(inputs, ("gaussian", "exp_manhattan")[seed % 4 // 2], offset=(1.0, 0.0, 0.5)[seed % 3])


def step(inputs):
    leaves = [inputs[n].detach().requires_grad_() for n in ("values", "radius")]
    out = explicit_attention(leaves[0], kind="gaussian", radius=leaves[1], backend="triton")
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def test_two_runs_agree_to_the_bit():
    inputs = make(torch.bfloat16, (56, 56), 64, batch=32)
    for one, two in zip(step(inputs), step(inputs), strict=True):
        assert torch.equal(one, two)


def test_memory_is_that_of_the_map():
    """The output, one product at a time in the forward, two in the backward, two gradients: nothing of size (HW)²."""
    inputs = make(torch.bfloat16, (112, 112), 64, batch=8)
    step(inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(inputs)
    assert torch.cuda.max_memory_allocated() - before < 5.5 * inputs["values"].numel() * 2


def test_capture_and_compile():
    inputs = make(torch.bfloat16, (28, 28), 16, batch=4)
    want = assert_captured(lambda: step(inputs))

    leaves = [inputs[n].detach().requires_grad_() for n in ("values", "radius")]
    compiled = torch.compile(lambda v, r: explicit_attention(v, kind="gaussian", radius=r), fullgraph=True)
    out = compiled(*leaves)
    for one, two in zip([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))], want, strict=True):
        assert torch.equal(one, two)


def test_the_gradient_is_compiled_with_the_output(monkeypatch):
    """Side by side, on the first call of a class (72 channels a head: nobody else's); nothing is left to the backward."""
    compiled = watch_compilations(monkeypatch)
    inputs = make(torch.bfloat16, (40, 50), 72, heads=1)
    values, radius = inputs["values"].requires_grad_(), inputs["radius"].requires_grad_()
    out = explicit_attention(values, kind="gaussian", radius=radius, backend="triton")
    before = len(compiled)
    # Those that depend on the channels; the others may be there from other tests.
    assert {"forward", "forward_x", "forward_y", "backward", "backward_y", "backward_x"} <= set(compiled)
    torch.autograd.grad(out, (values, radius), torch.ones_like(out).contiguous())
    assert len(compiled) == before, compiled[before:]


def test_opcheck():
    from nearsight.ops.explicit import triton_impl

    inputs = make(torch.float32, (9, 7), 8)
    leaves = [inputs["values"].unflatten(3, (4, -1)).requires_grad_(), inputs["radius"].requires_grad_()]
    torch.library.opcheck(triton_impl._forward, (*leaves, None, True, 1.0, True))
