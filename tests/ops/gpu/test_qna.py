"""QnA's Triton kernels on a GPU, at the sizes networks use."""

import os
import subprocess
import sys

import pytest
import torch

from nearsight.ops import qna
from tests.support.accuracy import assert_by_error_rule
from tests.support.draws import picker
from tests.support.graphs import assert_captured

pytestmark = pytest.mark.gpu


def make(dtype, size, heads, dim, window, queries=2, batch=2, mask=False, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def draw(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    return {
        "values": draw(batch, *size, heads, dim),
        "scores": draw(batch, *size, queries, heads),
        "position_bias": draw(*window, queries, heads, dtype=torch.float32),
        "tap_scale": draw(*window, queries, heads, dtype=torch.float32),
        "key_mask": torch.rand(batch, *size, generator=generator, device="cuda") < 0.8 if mask else None,
    }


def compare(inputs, window, **options):
    def run(backend):
        return lambda **tensors: qna(**tensors, window=window, **options, backend=backend)

    assert_by_error_rule(run("triton"), run("reference"), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("size", "heads", "dim", "window"),
    [
        ((56, 56), 8, 8, 3),
        ((28, 28), 16, 8, 3),
        ((14, 14), 32, 8, 3),
        ((56, 56), 8, 8, 7),
        ((7, 7), 64, 8, 3),
        ((28, 28), 6, 16, 3),
    ],
)
@pytest.mark.parametrize("stride", [1, 2])
def test_the_networks_shapes(dtype, size, heads, dim, window, stride):
    compare(make(dtype, size, heads, dim, (window, window)), (window, window), stride=stride)


@pytest.mark.parametrize("seed", range(12))
def test_random_rectangles(seed):
    pick = picker(seed)
    size, window, stride = (pick(1, 40), pick(1, 40)), (pick(1, 11), pick(1, 11)), (pick(1, 3), pick(1, 3))
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    inputs = make(dtype, size, pick(1, 20), pick(1, 33), window, queries=pick(1, 5), mask=seed % 2 == 0, seed=seed)
    compare(inputs, window, stride=stride, combine=("sum", "stack")[seed % 4 // 2])


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 8), (torch.float32, 32)])
@pytest.mark.parametrize(("combine", "stride", "mask"), [("sum", 1, False), ("sum", 2, True), ("stack", 1, True)])
def test_tall_windows_of_many_queries(dtype, dim, combine, stride, mask):
    """Whose columns of taps are taken in pieces."""
    inputs = make(dtype, (21, 17), 8, dim, (11, 11), queries=9, mask=mask)
    compare(inputs, (11, 11), stride=stride, combine=combine)


@pytest.mark.parametrize("queries", [4, 9])
def test_up_sampling(queries):
    compare(make(torch.bfloat16, (33, 20), 4, 8, (3, 3), queries=queries), 3, combine="stack")


@pytest.mark.parametrize("window", [(3, 3), (7, 5)])
@pytest.mark.parametrize("spread", [25.0, 1e4])
def test_scores_that_no_common_reference_can_hold(window, spread):
    """Some windows of a thread by exponentials once per pixel, the others from their own maximum."""
    inputs = make(torch.bfloat16, (39, 37), 8, 8, window)
    inputs["scores"][:, ::2] *= spread
    compare(inputs, window)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("window", [3, 7])
def test_steep_softmaxes_in_float32(window, stride, mask):
    """One tap has nearly all the weight: a log-sum-exp kept as one number would be rounded too much for the gradients."""
    inputs = make(torch.float32, (29, 23), 8, 8, (window, window), mask=mask)
    inputs["scores"] *= 60
    compare(inputs, window, stride=stride)


def step(inputs, window=3):
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items() if t is not None}
    out = qna(**leaves, window=window, backend="triton")
    return [out, *torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "window"), [((9, 11), 1), ((1, 1), 3)])
def test_where_a_window_has_one_pixel_its_score_has_no_gradient(dtype, size, window):
    inputs = make(dtype, size, 8, 8, (window, window))
    _, dvalues, dscores, dbias, dscale = step(inputs, window)
    assert not dscores.any()
    assert not dbias.any()
    assert dvalues.any()
    assert dscale.any()


@pytest.mark.parametrize("window", [3, 7])
def test_two_runs_agree_to_the_bit(window):
    inputs = make(torch.bfloat16, (56, 56), 8, 8, (window, window), batch=32)
    for one, two in zip(step(inputs, window), step(inputs, window), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("size", [(56, 56), (14, 14)])
@pytest.mark.parametrize("captured", [False, True])
def test_kernels_that_start_early_wait_for_what_they_read(size, captured):
    """Inputs written right before a step and overwritten right after: a kernel that looked too soon, or too late, would show.

    By Triton's launches, replayed ones and a CUDA graph's; the batch is large enough that every kernel overlaps the next.
    """
    kept = [make(torch.bfloat16, size, 8, 8, (3, 3), batch=128, seed=seed) for seed in range(3)]
    want = []
    for inputs in kept:
        torch.cuda.synchronize()
        want.append(step(inputs))
        torch.cuda.synchronize()
    buffers = {name: torch.empty_like(t) for name, t in kept[0].items() if t is not None}

    def turns():
        results = []
        for inputs in kept:
            for name, buffer in buffers.items():
                buffer.copy_(inputs[name])
            results.append(step(buffers))
            for buffer in buffers.values():
                buffer.fill_(float("nan"))
        return results

    def check(results):
        torch.cuda.synchronize()
        for got, expected in zip(results, want, strict=True):
            for one, two in zip(got, expected, strict=True):
                assert torch.equal(one, two)

    if not captured:
        for _ in range(8):
            check(turns())
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        turns()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = turns()
    for _ in range(8):
        for got in results:
            for tensor in got:
                tensor.detach().fill_(float("nan"))
        graph.replay()
        check(results)


@pytest.mark.parametrize("batch", [1, 37, 128])
def test_batches_that_end_within_what_is_fetched_ahead(batch):
    """A program asks for the rows of an image further on, or none, and takes tiles in chunks that may be short."""
    compare(make(torch.bfloat16, (15, 9), 8, 8, (3, 3), batch=batch), 3)


@pytest.mark.parametrize("window", [3, 7])
def test_memory_is_that_of_the_map(window):
    """Inputs, their gradients, the output, LSE and δ, and the tables' partial sums: nothing of size k²·HW."""
    inputs = make(torch.bfloat16, (56, 56), 8, 8, (window, window), batch=32)
    step(inputs, window)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(inputs, window)
    values = inputs["values"].numel() * 2
    assert torch.cuda.max_memory_allocated() - before < 6 * values


def test_capture_and_compile():
    inputs = make(torch.bfloat16, (28, 28), 16, 8, (3, 3), batch=4)
    want = assert_captured(lambda: step(inputs))

    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items() if t is not None}
    compiled = torch.compile(lambda **t: qna(**t, window=3), fullgraph=True)
    out = compiled(**leaves)
    for one, two in zip(
        [out, *torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))], want, strict=True
    ):
        assert torch.equal(one, two)


def test_opcheck():
    from nearsight.ops.qna import triton_impl

    inputs = {n: t.requires_grad_() for n, t in make(torch.float32, (9, 7), 4, 8, (3, 3)).items() if t is not None}
    tables = [inputs[n].detach().flatten(0, 1).requires_grad_() for n in ("position_bias", "tap_scale")]
    torch.library.opcheck(
        triton_impl._forward, (inputs["scores"], inputs["values"], *tables, None, [3, 3], [1, 1], False)
    )


def test_chosen_on_its_own_and_compiled_once_per_class():
    """One compilation for all image sizes and head counts."""
    from nearsight.ops import backends
    from nearsight.ops.qna import delta_kernels, gradient_kernels, kernels

    def compiled_kernels():
        each = (kernels.pack, kernels.forward, delta_kernels.delta, gradient_kernels.backward)
        return sum(len(cache[0]) for kernel in each for cache in kernel.device_caches.values())

    first = make(torch.bfloat16, (16, 16), 8, 8, (3, 3))
    assert backends("qna", first["scores"], first["values"], window=3)[0].usable
    step(first)
    count = compiled_kernels()
    for size, heads in (((17, 31), 8), ((1, 5), 16), ((40, 8), 3), ((7, 7), 64)):
        step(make(torch.bfloat16, size, heads, 8, (3, 3)))
    assert compiled_kernels() == count


def test_the_first_call_takes_seconds(tmp_path):
    """Forward and backward with nothing compiled, in processor time of all threads, compilers of other languages included.

    It was 8 to 11; Triton's coalescing alone took 15 more.
    """
    program = """
import os, torch
from nearsight.ops import qna
draw = lambda *shape: torch.randn(*shape, device="cuda", requires_grad=True)
tensors = draw(2, 16, 16, 2, 8), draw(2, 16, 16, 8, 8).bfloat16()
tables = {"position_bias": draw(3, 3, 2, 8), "tap_scale": draw(3, 3, 2, 8)}
torch.cuda.synchronize()
before = os.times()
qna(*tensors, **tables, window=3, backend="triton").sum().backward()
torch.cuda.synchronize()
print(sum(b - a for a, b in zip(before[:4], os.times()[:4])))
"""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 14
