"""Block attention's Triton kernels on a GPU: the error rule at real sizes, determinism, memory, graphs, compilation."""

import pytest
import torch

from nearsight import AttentionStem2d
from nearsight.ops import block_attention
from nearsight.ops.block import pooled
from tests.ops.triton.test_block import BFLOAT, FLOAT, HALF, clear_winners, composed, fused, make
from tests.support.accuracy import assert_by_error_rule
from tests.support.graphs import assert_captured

pytestmark = pytest.mark.gpu


def on_gpu(inputs):
    return {n: None if t is None else t.cuda() for n, t in inputs.items()}


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, HALF])
@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((64, 36), {"heads": 4, "dim": 16, "batch": 5}),
        ((33, 70), {"heads": 4, "dim": 16, "mask": 0.8}),
        ((9, 130), {"heads": 3, "dim": 8, "inputs": 1, "tables": "row"}),
        ((41, 12), {"heads": 2, "dim": 32, "inputs": 4, "places": False}),
        ((16, 19), {"heads": 1, "dim": 64, "inputs": 8, "tables": "none", "mask": 0.3}),
        ((1, 2), {"heads": 5, "dim": 6}),
    ],
)
def test_error_rule(dtype, size, options):
    def run(backend):
        return lambda **tensors: block_attention(**tensors, heads=options["heads"], backend=backend)

    assert_by_error_rule(run("triton"), run("reference"), on_gpu(make(dtype, size, **options)))


def test_twice_gives_the_same_bits():
    inputs = on_gpu(make(BFLOAT, (56, 61), batch=8, heads=4, dim=16))
    leaves = [t.requires_grad_() for t in inputs.values() if t is not None]

    def gradients():
        out = block_attention(**inputs, heads=4, backend="triton")
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for one, other in zip(gradients(), gradients(), strict=True):
        assert torch.equal(one, other)


def test_memory_is_that_of_the_image_and_the_output():
    stem = AttentionStem2d(3, 64).cuda()
    x = torch.randn(16, 3, 112, 112, device="cuda", dtype=BFLOAT).to(memory_format=torch.channels_last)
    one = 16 * 64 * 112 * 112 * 2

    def step():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", BFLOAT):
            out = stem(x)
        grad = torch.ones_like(out)
        torch.autograd.grad(out, list(stem.parameters()), grad)
        return torch.cuda.max_memory_allocated() - before

    step()
    # The output, its gradient, and every program's share of the weights' gradients.
    assert step() <= 2 * one + 2**26


def test_captured_in_a_graph():
    inputs = on_gpu(make(BFLOAT, (28, 30), batch=2, heads=4, dim=16))
    leaves = [t.requires_grad_() for t in inputs.values() if t is not None]

    def step():
        out = block_attention(**inputs, heads=4)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    assert_captured(step)


def test_compiled_without_breaks():
    torch._dynamo.reset()
    stem = AttentionStem2d(3, 64).cuda()
    compiled = torch.compile(stem, fullgraph=True, dynamic=True)
    for size in ((9, 7), (12, 20), (17, 8)):
        x = torch.randn(2, 3, *size, device="cuda")
        with torch.autocast("cuda", BFLOAT):
            torch.testing.assert_close(compiled(x), stem(x), atol=3e-2, rtol=3e-2)
    torch._dynamo.reset()


def test_the_layer_trains_alike_with_and_without_the_kernel():
    torch.manual_seed(0)
    stem, up = AttentionStem2d(3, 64).cuda(), torch.randn(2, 64, 13, 22, device="cuda")
    x = torch.randn(2, 3, 13, 22, device="cuda")
    got = torch.autograd.grad(stem(x), list(stem.parameters()), up)
    wide = torch.autograd.grad(stem.cpu().double()(x.cpu().double()), list(stem.parameters()), up.cpu().double())
    for one, other in zip(got, wide, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, atol=1e-4 * float(other.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, HALF])
@pytest.mark.parametrize("size", [(24, 20), (13, 30)])
@pytest.mark.parametrize("of_batch", [True, False])
@pytest.mark.parametrize("at_once", [1, 2])
def test_pooled(dtype, size, of_batch, at_once, monkeypatch):
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(pooled, name, getattr(pooled, name)._replace(heads=at_once))
    inputs = make(dtype, size, batch=3, heads=2, dim=16)
    generator = torch.Generator().manual_seed(1)
    inputs["weight"] = torch.randn(32, generator=generator).to(dtype)
    inputs["bias"] = torch.randn(32, generator=generator).to(dtype)
    running = None if of_batch else (torch.rand(2, 32, generator=generator) + 0.5).cuda()
    inputs = on_gpu(inputs)
    # Rounding to a half type may name another pixel the largest of its pool, which moves a whole gradient.
    clear = True if dtype == FLOAT else clear_winners(running, 0.1, **inputs)
    assert_by_error_rule(
        lambda **tensors: fused(running=running, **tensors) * clear,
        lambda **tensors: composed(running=running, **tensors) * clear,
        inputs,
    )


def test_the_pooled_layer_trains_alike_with_and_without_the_kernel():
    """A hook on the norm asks for the layers one by one. float32: losses equal to 1e-3 relative."""
    x, target = torch.randn(8, 3, 30, 44, device="cuda"), torch.randn(8, 64, 8, 11, device="cuda")

    def losses(watch):
        torch.manual_seed(0)
        stem, norm = AttentionStem2d(3, 64).cuda(), torch.nn.BatchNorm2d(64).cuda()
        if watch:
            norm.register_forward_hook(lambda module, inputs, output: None)
        optimizer = torch.optim.SGD([*stem.parameters(), *norm.parameters()], lr=0.1)
        found = []
        for _ in range(10):
            loss = (stem.pooled(x, norm) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found, norm.running_var

    (one, var), (other, want) = losses(False), losses(True)
    assert one == pytest.approx(other, rel=1e-3)
    torch.testing.assert_close(var, want, rtol=1e-3, atol=1e-6)
