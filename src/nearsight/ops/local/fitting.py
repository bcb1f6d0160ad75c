"""Launches for GPUs with less shared memory than the measured ones take."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from nearsight.errors import BackendError
from nearsight.ops.local.call import OP, LocalCall

__all__ = ["LEANEST", "fitted"]

Result = TypeVar("Result")

LEANEST = 4
# How lean the launches of a class must be, where the measured ones do not fit.
_lean: dict[Hashable, int] = {}


def fitted(key: Hashable, call: LocalCall, launches: Callable[[int], Result]) -> Result:
    """`launches(lean)`, as lean as the GPU needs them for this class of calls: what does not fit says so before it runs."""
    from triton.runtime.errors import OutOfResources

    first = _lean.get(key, 0)
    for lean in range(first, LEANEST + 1):
        try:
            result = launches(lean)
        except OutOfResources as error:
            short = error
        else:
            if lean > first:
                _lean[key] = lean
            return result
    raise BackendError(
        f"{OP}: backend 'triton' cannot run this call: window {call.window[0]}×{call.window[1]} with head dim "
        f"{call.q.shape[-1]} needs {short.required} bytes of {short.name}, got a GPU with {short.limit}; use backend='torch'."
    )
