"""Runs tests where Triton's kernels are interpreted on the CPU.

Triton reads TRITON_INTERPRET when a kernel is decorated, so it must be set before nearsight is imported. A test marked
`@interpreted` is sent, with its parameters, to one child process that has it set; the child lives as long as pytest does, so
torch is imported there once. In the child `torch.empty` gives NaN, so that an element no kernel wrote shows.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["interpreted"]

ROOT = Path(__file__).resolve().parents[3]


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Run this test function in the interpreting process; its parameters must pickle."""

    @functools.wraps(test)
    def send(**kwargs: Any) -> None:
        child = _child()
        assert child.stdin is not None
        assert child.stdout is not None
        pickle.dump((test.__module__, test.__name__, kwargs), child.stdin)
        child.stdin.flush()
        try:
            failure = pickle.load(child.stdout)
        except EOFError:
            code = child.wait()
            _child.cache_clear()
            raise AssertionError(f"the interpreting process ended with code {code}") from None
        if failure is not None:
            raise AssertionError(f"in the interpreting process:\n{failure}")

    return send


@functools.cache
def _child() -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.ops.triton.interpreter"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(child.kill)
    return child


def _mend_arithmetic() -> None:
    """Make the interpreter compute what a GPU does.

    It keeps bfloat16 as bits; its `dot` multiplies those, and its conversion cuts instead of rounding. And its `dot` is BLAS's,
    which on some CPUs adds the terms of q·k in another order than those of k·q, so that a logit made again in the backward is
    not the forward's. A GPU adds them in one order; adding in float64 and rounding once gives that on every CPU.
    """
    import numpy as np
    import torch
    from triton import language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    plain_cast = builder.cast_impl

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return handle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        kinds = (source.dtype.scalar, dtype.scalar)
        if kinds == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
            return handle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return widened(source)
        return plain_cast(self, source, dtype)

    def create_dot(_self: Any, a: Any, b: Any, added: Any, *_precision: Any) -> Any:
        products = np.matmul(widened(a).data, widened(b).data, dtype=np.float64)
        return handle(products.astype(added.data.dtype) + added.data, added.dtype.scalar)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    if not hasattr(builder, "get_bf16"):  # before Triton 3.9
        builder.get_bf16 = lambda self, value: self.create_fp_trunc(self.get_fp32(value), tl.bfloat16)


def _serve() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a test prints must not mix with the answers
    import torch

    torch.use_deterministic_algorithms(True)  # with it, torch.empty is filled with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    _mend_arithmetic()
    while True:
        try:
            module, name, kwargs = pickle.load(requests)
        except EOFError:
            return
        failure = None
        try:
            getattr(importlib.import_module(module), name).__wrapped__(**kwargs)
        except BaseException:
            failure = traceback.format_exc()
        pickle.dump(failure, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
