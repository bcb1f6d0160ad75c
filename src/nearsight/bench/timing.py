"""How long a call takes: medians after a warm-up; on CUDA by replays of a captured graph, with the plain launches beside.

On small maps the host's launches would otherwise be what is measured.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

__all__ = [
    "Effort",
    "Timing",
    "copy_bandwidth",
    "launched_ms",
    "not_captured",
    "replayed_ms",
    "time_on_cpu",
    "time_on_cuda",
]

Step = Callable[[], object]


class Effort(NamedTuple):
    """How much to measure: seconds to spend on one call, and the bounds of its repetitions."""

    seconds: float
    least: int
    most: int


class Timing(NamedTuple):
    """Median milliseconds of one call; `eager_ms` the plain launches' (CUDA); `spread` the quartiles' distance ÷ median."""

    ms: float
    spread: float
    repeats: int
    eager_ms: float | None = None
    note: str | None = None


def _median(samples: Sequence[float]) -> tuple[float, float]:
    middle = statistics.median(samples)
    if len(samples) < 4:
        return middle, (max(samples) - min(samples)) / middle
    low, _, high = statistics.quantiles(samples, n=4)
    return middle, (high - low) / middle


def time_on_cpu(steps: Mapping[str, Step], effort: Effort) -> dict[str, Timing]:
    """Time the steps in turn, round after round, so that whatever else the machine does meets all of them alike."""
    # glibc hands freed memory back to the system until a large block was freed once; before that every step, whoever's it is,
    # would pay for its pages again, in some runs and not in others.
    torch.empty(31 << 18)
    once = {}
    for name, step in steps.items():
        step()
        start = time.perf_counter()
        step()
        once[name] = time.perf_counter() - start
    samples: dict[str, list[float]] = {name: [] for name in steps}
    wanted = {n: min(effort.most, max(effort.least, round(effort.seconds / max(t, 1e-7)))) for n, t in once.items()}
    with _without_collector():
        while any(len(samples[name]) < wanted[name] for name in steps):
            for name, step in steps.items():
                if len(samples[name]) < wanted[name]:
                    start = time.perf_counter()
                    step()
                    samples[name].append((time.perf_counter() - start) * 1e3)
    return {name: Timing(*_median(taken), len(taken)) for name, taken in samples.items()}


@contextmanager
def _without_collector() -> Iterator[None]:
    """Python's collector would run in some step and count as its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def time_on_cuda(step: Step, effort: Effort) -> Timing:
    """Median time of a graph replay; where the step cannot be captured, of its plain launches, and `note` says so."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    eager, eager_spread, repeats = _launched(step, effort)
    # Several calls in one graph: a graph of a few microseconds would time its own launch.
    calls = min(20, max(1, round(4 / eager)))
    try:
        graph = _capture(step, calls)
    except Exception as error:
        return Timing(eager, eager_spread, repeats, eager, f"launched eagerly: {not_captured(error)}")
    replays, spread, repeats = _launched(graph.replay, effort)
    graph.reset()
    return Timing(replays / calls, spread, repeats, eager)


def _capture(step: Step, calls: int) -> torch.cuda.CUDAGraph:
    """`calls` steps in one graph, replayed once."""
    before = torch.cuda.current_stream()
    side = torch.cuda.Stream()
    side.wait_stream(before)
    with torch.cuda.stream(side):
        step()
    before.wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=side):
            for _ in range(calls):
                step()
    except Exception:
        _recover(before)
        raise
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _recover(stream: torch.cuda.Stream) -> None:
    """Leave a failed capture behind: its stream is still the current one, and the GPU's random generator believes that a
    capture is under way until one ends well."""
    torch.cuda.set_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        torch.zeros(1, device="cuda")
    torch.cuda.synchronize()


def _launched(step: Step, effort: Effort) -> tuple[float, float, int]:
    """Median milliseconds between events recorded around each call, the calls queued without waiting in between."""

    def run(count: int) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]

    first = max(statistics.median(run(3)), 1e-4)
    count = min(effort.most, max(effort.least, round(effort.seconds * 1e3 / first)))
    middle, spread = _median(run(count))
    return middle, spread, count


def launched_ms(step: Step, effort: Effort) -> tuple[float, float]:
    """Median milliseconds and spread of a CUDA step launched as it is, without a graph."""
    middle, spread, _ = _launched(step, effort)
    return middle, spread


def not_captured(error: Exception) -> str:
    """What to note of a capture that failed.

    >>> not_captured(RuntimeError("operation not permitted\\nand more"))
    'cannot be captured (operation not permitted)'
    """
    return f"cannot be captured ({str(error).strip().partition(chr(10))[0]})"


def replayed_ms(step: Step, effort: Effort) -> tuple[float, float]:
    """Median milliseconds and spread of a CUDA step replayed as a graph, or the capture's error."""
    graph = _capture(step, 1)
    try:
        middle, spread, _ = _launched(graph.replay, effort)
    finally:
        graph.reset()
    return middle, spread


def copy_bandwidth(device: torch.device, effort: Effort) -> float:
    """Bytes per second of a large copy on `device`, counting those read and those written: the faster of the library's copy and
    of a kernel that reads and writes every number, so that a slow copy makes no floor look near."""
    size = 2**31 if device.type == "cuda" else 2**27
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    steps: dict[str, Step] = {
        "copy": lambda: target.copy_(source),
        "kernel": lambda: torch.neg(source, out=target),
    }
    if device.type == "cuda":
        timings = [time_on_cuda(step, effort) for step in steps.values()]
    else:
        timings = list(time_on_cpu(steps, effort).values())
    return 2 * size / (min(timing.ms for timing in timings) * 1e-3)
