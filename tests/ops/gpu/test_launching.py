"""Replayed launches on a GPU: the same bits as launches by Triton, on other memory, streams and threads."""

import pytest
import torch

from nearsight.ops import explicit_attention, launching, local_attention, local_attention_projected, qna
from nearsight.ops.local import ring_launches
from tests.support.graphs import assert_captured

pytestmark = pytest.mark.gpu


def explicit(values, radius):
    return explicit_attention(values, kind="gaussian", radius=radius, backend="triton")


def gather(scores, values, bias, scale):
    return qna(scores, values, window=3, position_bias=bias, tap_scale=scale, backend="triton")


def attend(q, k, v, rows, columns):
    return local_attention(q, k, v, window=(5, 7), rel_row=rows, rel_col=columns, backend="triton")


def attend_slices(packed, rows):
    return local_attention(*packed.unbind(3), window=7, rel_row=rows, backend="triton")


def attend_by_tables(packed, rows, columns):
    return local_attention(*packed.unbind(3), window=7, rel_row=rows, rel_col=columns, backend="triton")


def attend_projected(pixels, weight, bias, rows):
    options = {"num_heads": 2, "window": 7, "rel_row": rows, "backend": "triton"}
    return local_attention_projected(pixels, weight, bias, **options)


CASES = {
    "nodes and axes": (explicit, (2, 56, 40, 32), (2,)),
    "nodes": (explicit, (2, 28, 20, 32), (2,)),
    "whole": (explicit, (2, 14, 9, 32), (2,)),
    "qna": (gather, (2, 14, 11, 2, 4), (2, 14, 11, 4, 8), (3, 3, 2, 4), (3, 3, 2, 4)),
    "local": (attend, *[(2, 12, 19, 2, 16)] * 3, (5, 8), (7, 8)),
    "slices": (attend_slices, (2, 12, 19, 3, 2, 16), (7, 8)),
    "slices in a ring": (attend_by_tables, (2, 20, 37, 3, 4, 8), (7, 4), (7, 4)),
    # So many programs that two parts run beside each other.
    "shares in two parts": (attend_by_tables, (256, 20, 37, 3, 4, 8), (7, 4), (7, 4)),
    "turns in two parts": (attend_by_tables, (256, 20, 37, 3, 2, 16), (7, 8), (7, 8)),
    "projected": (attend_projected, (2, 12, 19, 24), (96, 24), (96,), (7, 8)),
}


def inputs(shapes, seed):
    """Radii are positive; everything but a radius and QnA's scores is bfloat16."""
    torch.manual_seed(seed)
    found = [torch.randn(shape, device="cuda") for shape in shapes]
    return [t.abs() + 0.1 if t.dim() == 1 and len(shapes) == 2 else t.bfloat16() for t in found]


def results(op, tensors):
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = op(*leaves)
    out.backward(torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).to(out.dtype))
    return [out, *(t.grad for t in leaves)]


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits(case):
    op, *shapes = CASES[case]
    kept = []
    for seed in range(4):
        tensors = inputs(shapes, seed)
        kept.append(tensors)  # so that every turn has other memory
        with launching.without_replays():
            wanted = results(op, tensors)
        for got, want in zip(results(op, tensors), wanted, strict=True):
            assert torch.equal(got, want)


def test_on_another_stream():
    op, *shapes = CASES["nodes"]
    stream = torch.cuda.Stream()
    for seed in range(4):
        tensors = inputs(shapes, seed)
        with launching.without_replays():
            wanted = results(op, tensors)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)  # what is launched elsewhere would overtake
            tensors = [t.clone() for t in tensors]
            got = results(op, tensors)
        torch.cuda.current_stream().wait_stream(stream)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("case", ["shares in two parts", "turns in two parts"])
def test_parts_beside_each_other_wait_for_what_came_before(case, monkeypatch):
    """On a stream that is behind: whatever does not wait for it reads what is not there yet, and what does not wait for both
    parts reads half of the gradients. As one part, the same bits but for sums of tables in another order."""
    op, *shapes = CASES[case]
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs a GPU with the ring's kernels")
    assert shapes[0][0] * 5 * 2 >= 2 * ring_launches.PLACES * torch.cuda.get_device_properties(0).multi_processor_count
    tensors = inputs(shapes, 5)
    with monkeypatch.context() as patch, launching.without_replays():
        patch.setattr(ring_launches, "PLACES", 10**6)
        out, packed, *tables = results(op, tensors)
    stream = torch.cuda.Stream()
    for _ in range(4):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late = [t.clone() for t in tensors]
            got = [t.clone() for t in results(op, late)]
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(got[0], out)
        assert torch.equal(got[1], packed)
        for a, b in zip(got[2:], tables, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * float(b.abs().max()))
        tensors = [t.clone() for t in tensors]


@pytest.mark.parametrize("case", ["shares in two parts", "turns in two parts"])
def test_parts_beside_each_other_in_a_captured_graph(case):
    op, *shapes = CASES[case]
    leaves = [t.requires_grad_() for t in inputs(shapes, 6)]

    def step():
        out = op(*leaves)
        return [out, *torch.autograd.grad(out, leaves, out.detach())]

    assert_captured(step)


def test_as_a_captured_graph():
    op, *shapes = CASES["local"]
    tensors = inputs(shapes, 0)
    with torch.no_grad():
        for _ in range(3):
            op(*tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = op(*tensors)
        for t, other in zip(tensors, inputs(shapes, 1), strict=True):
            t.copy_(other)
        graph.replay()
        assert torch.equal(out, op(*tensors))
