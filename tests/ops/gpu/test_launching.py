"""Replayed launches on a GPU: the same bits as launches by Triton, on other memory, streams and threads."""

import pytest
import torch

from nearsight.ops import explicit_attention, launching, local_attention, local_attention_projected, qna

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
