"""CUDA graphs of what a test runs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def assert_captured(step: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    """A captured step gives, replayed, the bits that it gives launched; the latter are returned."""
    # One stream for both: autograd would join the one that a leaf was first used on.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        want = [tensor.clone() for tensor in step()]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = step()
    with torch.no_grad():
        for tensor in got:
            tensor.fill_(float("nan"))
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    for one, two in zip(got, want, strict=True):
        assert torch.equal(one, two)
    return want
