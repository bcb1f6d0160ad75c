"""Launches, and the first call of a class of calls: its kernels, those of its gradient too, are compiled side by side."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import inspect
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from nearsight.ops import launching
from nearsight.ops.triton_support import INTERPRETED

__all__ = ["class_of", "compile_together", "gradient_traced", "launch", "meta_like", "stand_in", "trains"]

Call = TypeVar("Call", bound="tuple[Any, ...]")

# Calls of which a compiled graph was traced with its gradient.
_traced: set[Hashable] = set()


def gradient_traced(op: str, *tensors: Tensor) -> None:
    """Said where the gradient's op is traced: calls on such tensors will be asked for their gradient (`trains`)."""
    # Sizes may come without end, or be symbols.
    if len(_traced) < 10_000 and all(type(size) is int for t in tensors for size in t.shape):
        _traced.add(_alike(op, tensors))


def trains(op: str, tensors: Sequence[Tensor], *others: Tensor | None) -> bool:
    """Whether the gradient of a call will be asked for: it requires one, or it is one of a compiled graph, within which nothing
    does, that was traced with the gradient of such `tensors`."""
    required = any(t is not None and t.requires_grad for t in (*tensors, *others))
    return required or _alike(op, tensors) in _traced


def _alike(op: str, tensors: Sequence[Tensor]) -> Hashable:
    return (op, *((tuple(t.shape), t.dtype) for t in tensors))


# More threads than this only wait for each other: the first tenth of a kernel's compilation is Python's.
COMPILER_THREADS = 8

# The kernels to compile, while launches only say which.
_waiting: contextvars.ContextVar[list[_Kernel] | None] = contextvars.ContextVar("nearsight_waiting", default=None)
_compiled: set[Hashable] = set()


class _Kernel(NamedTuple):
    """A kernel to compile: how long its text is, and what compiles it."""

    size: int
    compile: Callable[[], object]


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """`kernel[grid](*arguments, **constants)`; within `compile_together` the kernel is only compiled, in another thread.

    Products and sums are one step, which versions of Triton may or may not do unasked.
    """
    constants = {"enable_fp_fusion": True, **constants}
    if not INTERPRETED:
        _settle_keys(kernel.__module__)
    waiting = _waiting.get()
    if waiting is None:
        launching.launch(kernel, grid, arguments, constants)
    else:
        compilation = functools.partial(kernel.warmup, *arguments, grid=grid, **constants)
        waiting.append(_Kernel(len(kernel.src), compilation))


@functools.cache
def _settle_keys(module: str) -> None:
    """Give every function of a module of kernels its key in Triton's cache on disk, those that it imports first.

    Up to Triton 3.6 a kernel's key depends on which of the functions that it calls have theirs already. Kernels that one process
    asked for in one order, forward and gradients, another did not find that began with the forward alone.
    """
    from triton.runtime.jit import JITFunction

    functions = [each for each in vars(sys.modules[module]).values() if isinstance(each, JITFunction)]
    for other in sorted({each.fn.__module__ for each in functions} - {module}):
        if not other.startswith("triton."):
            _settle_keys(other)
    for each in sorted(functions, key=lambda each: each.starting_line_number):
        each.cache_key  # noqa: B018, the property keeps it


def compile_together(key: Hashable, launches: Callable[[], None]) -> None:
    """Compile the kernels that `launches` launches (through `launch`, on tensors made by `meta_like`) side by side, once per key.

    Without it each is compiled when it is first launched, one after the other: seconds for a call of nine. The key is anything
    that tells calls apart, the device among it; a kernel that is compiled already costs microseconds.
    """
    if key in _compiled or INTERPRETED or torch.cuda.is_current_stream_capturing():
        return
    # Sizes may come without end.
    if len(_compiled) >= 10_000:
        _compiled.clear()
    _compiled.add(key)
    # In a context of its own, so that nothing stays switched on after an interrupt.
    contextvars.copy_context().run(_compile, launches)


def _compile(launches: Callable[[], None]) -> None:
    import triton

    waiting: list[_Kernel] = []
    _waiting.set(waiting)
    launches()
    # Triton's Python takes one after the other; what follows it takes longest for the longest.
    waiting.sort(key=lambda kernel: kernel.size, reverse=True)
    loader = _Loader(torch.cuda.current_device())
    with _without_collections(), loader as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        # What Triton does once per process, one after the other: a checksum of itself, and a run of the C compiler.
        with _meanwhile(_triton_key):
            triton.runtime.driver.active  # noqa: B018
        for kernel in waiting:
            kernel.compile()
    if pool.failed:
        # Once more, one after the other: what only the threads got wrong is mended, and an error of the kernel's own comes
        # again, and is shown, where it is launched.
        with contextlib.suppress(Exception):
            for kernel in waiting:
                kernel.compile()


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """No search for unreachable objects: a compilation makes many that stay, and each search walks all that torch has."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _meanwhile(function: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """`function` in another thread."""
    thread = threading.Thread(target=function, args=arguments, name="nearsight-meanwhile")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _triton_key() -> None:
    """The checksum, kept by Triton; where it has none here, it will make its own."""
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()


class _Loader(ThreadPoolExecutor):
    """Threads that also load what they compiled; in some versions of Triton that means a run of the C compiler, too."""

    def __init__(self, device: int) -> None:
        super().__init__(min(COMPILER_THREADS, os.cpu_count() or 1), "nearsight-compiler")
        self.device, self.failed = device, False
        self.python = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        _take_turns(fn, self.python)

        def load() -> Any:
            try:
                with _meanwhile(_make_launcher, fn):
                    kernel = fn(*args, **kwargs)
                with torch.cuda.device(self.device):
                    kernel.run  # noqa: B018, the property loads
            except Exception:
                self.failed = True
                raise
            return kernel

        return super().submit(load)


def _source(compilation: Callable[..., Any]) -> Any:
    """What is compiled, as Triton's own function for it knows it."""
    return inspect.getclosurevars(compilation).nonlocals["src"]


def _take_turns(compilation: Callable[..., Any], turn: threading.Lock) -> None:
    """Have Triton's Python, which no two threads can run at a time, finish a kernel before it goes to the next.

    Otherwise all are done with it at the same time, and all that needs no Python comes after that.
    """
    with contextlib.suppress(Exception):
        source = _source(compilation)

        def make_ir(*arguments: Any, **options: Any) -> Any:
            with turn:
                del source.make_ir  # the class has its own
                return source.make_ir(*arguments, **options)

        source.make_ir = make_ir


def _make_launcher(compilation: Callable[..., Any]) -> None:
    """Have the C compiler make the launcher that some versions of Triton have for every signature.

    They would do so after the kernel's compilation. What it made they find again by its text, so nothing of it is kept here;
    where this does not find what it needs, they make it then.
    """
    with contextlib.suppress(Exception):
        from triton.runtime import driver

        source = _source(compilation)
        kind = driver.active.launcher_cls
        # A descriptor's launcher depends on what the compilation chooses.
        described = any(str(each).startswith("tensordesc") for each in source.signature.values())
        if hasattr(sys.modules[kind.__module__], "make_launcher") and not described:
            kind(source, _Unknown())


class _Unknown:
    """The metadata of a kernel that is not compiled yet."""

    def __getattr__(self, name: str) -> None:
        return None


def class_of(*parts: Any) -> Hashable:
    """All that the choice of kernels for a call may depend on, of its parts: of a tensor all but its numbers.

    >>> x = torch.zeros(4, 6)
    >>> class_of(x, [3, 3]) == class_of(x + 1, [3, 3]), class_of(x, [3, 3]) == class_of(x.mT, [3, 3])
    (True, False)
    """
    return tuple(_kind(part) for part in parts)


def _kind(part: Any) -> Hashable:
    if isinstance(part, Tensor):
        return part.device, part.dtype, part.shape, part.stride(), part.data_ptr() % 16
    return tuple(part) if isinstance(part, list) else part


def stand_in(call: Call) -> Call:
    """A call, a named tuple, on tensors without memory."""
    parts: Any = (meta_like(part) if isinstance(part, Tensor) else part for part in call)
    return type(call)(*parts)


def meta_like(tensor: Tensor) -> Tensor:
    """A tensor without memory, of the same sizes, strides, dtype and alignment.

    >>> meta_like(torch.zeros(4, 6)[:, 1:]).stride()
    (6, 1)
    """
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    shift = tensor.data_ptr() % 16 // tensor.element_size()
    memory = torch.empty(max(reach, 0) + 1 + shift, dtype=tensor.dtype, device="meta")
    return memory.as_strided(tensor.shape, tensor.stride(), shift)
