"""Peak extra memory of a call: what torch's allocator holds at its highest, above what was held when the call began."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

__all__ = ["free", "peak_extra_bytes"]

_MEMORY_EVENT = "[memory]"


def peak_extra_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most memory `call()` holds at one time on `device`, its result included, its arguments not.

    Counted at the allocator: buffers that a kernel takes for itself count, also inside registered ops. What a library keeps
    outside torch's allocator (oneDNN's own scratch) does not.

    >>> import torch
    >>> a = torch.zeros(1000)
    >>> peak_extra_bytes(lambda: (a + a).sum(), torch.device("cpu"))
    4004
    """
    return _cuda(call, device) if device.type == "cuda" else _cpu(call)


def _cuda(call: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del result
    return int(peak - before)


def _cpu(call: Callable[[], object]) -> int:
    # Read when the profiler first starts; below this it writes a line to stderr at every start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # Else garbage of before might be freed meanwhile, and the allocator complain that it does not know it.
    gc.collect()
    # There is one cycle; older versions of torch warn of the events of others where these are not kept.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        result = call()
    del result
    events = [
        event
        for event in recorded.profiler.kineto_results.events()
        if event.name() == _MEMORY_EVENT and event.device_type() == DeviceType.CPU
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def free(device: torch.device) -> None:
    """Give a GPU's memory that nobody holds any more back, so that the next contender finds what the last one had."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
