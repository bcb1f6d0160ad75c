"""Whether kernels that start while the one before ends wait for what they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["assert_waits"]


def assert_waits(
    step: Callable[[dict[str, Tensor]], Sequence[Tensor]], kept: Sequence[dict[str, Tensor]], captured: bool
) -> None:
    """Inputs written right before a step and overwritten right after: a kernel that looked too soon, or too late, would show.

    `step` gives the results of one of the sets of inputs `kept`. By Triton's launches and replayed ones, or by a CUDA graph's.
    """
    want = []
    for inputs in kept:
        torch.cuda.synchronize()
        want.append(step(inputs))
        torch.cuda.synchronize()
    buffers = {name: torch.empty_like(t) for name, t in kept[0].items()}

    def turns() -> list[Sequence[Tensor]]:
        results = []
        for inputs in kept:
            for name, buffer in buffers.items():
                buffer.copy_(inputs[name])
            results.append(step(buffers))
            for buffer in buffers.values():
                buffer.fill_(float("nan"))
        return results

    def check(results: list[Sequence[Tensor]]) -> None:
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
