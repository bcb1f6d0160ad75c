"""What the Triton backends share: whether Triton can run here, and the sentences they refuse with.

Nothing here imports Triton: an installation without it imports nearsight all the same. Only kernels and their helpers do
(`*kernels.py` of an op, `ring_parts.py` of local attention, `lanes.py`, `powers.py` and `shares.py` of QnA), and they are
imported inside the functions that launch.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import importlib.util
import inspect
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.ops import launching
from nearsight.ops.dispatch import exporting, transform_refusal

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "common_refusal",
    "compile_together",
    "dot_precision",
    "early_launch",
    "launch",
    "meta_like",
    "multiprocessors",
    "next_power_of_two",
    "register_cap",
    "shared_memory",
]

# Read once, as Triton does when it decorates a kernel, and constants to torch.compile.
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INT32_LIMIT = 2**31


def common_refusal(tensor: Tensor, *others: Tensor | None) -> str | None:
    """Why no Triton kernel can run on these tensors ("needs …, got …"), or None.

    `tensor` decides device and dtype; in each tensor one image must be reachable by 32-bit offsets (batches are not limited).
    """
    if exporting():
        return "needs a call that runs, got one that is being exported"
    if not HAS_TRITON:
        return "needs the triton package, got a Python without it; install triton"
    if tensor.device.type != "cuda" and not (INTERPRETED and tensor.device.type == "cpu"):
        return f"needs CUDA tensors, got {tensor.device.type}"
    if tensor.device.type == "cuda" and _capability(tensor.device.index or 0) < (8, 0):
        return f"needs a GPU of compute capability 8.0 or later, got {_capability(tensor.device.index or 0)}"
    if tensor.dtype not in DTYPES:
        return f"needs float32, bfloat16 or float16, got {str(tensor.dtype).removeprefix('torch.')}"
    for each in (tensor, *others):
        if each is not None and (_image_reach(each) >= INT32_LIMIT or _image_size(each) > INT32_LIMIT):
            return f"needs images of fewer than 2³¹ elements, got shape {list(each.shape)}"
    return transform_refusal()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def _capability(index: int) -> tuple[int, int]:
    if torch.version.hip is not None:
        return (9, 0)
    return torch.cuda.get_device_capability(index)


def early_launch(device: torch.device) -> dict[str, bool]:
    """The constant EARLY of a kernel and, where the GPU can, the option that goes with it: it starts while the one before ends.

    Such a kernel waits itself for all that came before, in every program and before it reads or writes anything. Whatever
    follows it, written for this or not, then finds everything finished, as ever.
    """
    if INTERPRETED or torch.version.hip is not None or device.type == "cpu" or not torch.cuda.is_available():
        return {"EARLY": False}
    if _capability(torch.cuda.current_device() if device.index is None else device.index) < (9, 0):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


def register_cap(registers: int | None) -> dict[str, int]:
    """The option of a launch that caps the registers of a thread, one of NVIDIA's compiler alone; None: none."""
    return {} if registers is None or torch.version.hip is not None else {"maxnreg": registers}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def shared_memory(index: int) -> int:
    """Bytes of it that a program can have on a GPU."""
    properties = torch.cuda.get_device_properties(index)
    return int(getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block)


def multiprocessors(device: torch.device) -> int:
    """How many the GPU has, the current one for tensors without memory; 1 without a GPU."""
    if device.type == "cpu" or not torch.cuda.is_available():
        return 1
    return _multiprocessors(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _image_reach(tensor: Tensor) -> int:
    """Elements from the first of an image (all axes but the batch) to its last."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))


def _image_size(tensor: Tensor) -> int:
    """Elements of an image, which results like it have side by side, whatever the tensor's own strides."""
    size = 1
    for each in tensor.shape[1:]:
        size *= each
    return size


def dot_precision(dtype: torch.dtype) -> str:
    """`input_precision` of a kernel's products: float32 means float32, never TF32 behind the user's back.

    Three TF32 products give its accuracy (the error rule holds) on NVIDIA's tensor cores; exact ones compile for minutes.
    """
    if dtype != torch.float32:
        return "tf32"
    return "tf32x3" if torch.version.hip is None else "ieee"


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (1 for n ≤ 1): the length of a Triton range that holds n.

    >>> [next_power_of_two(n) for n in (1, 3, 8, 9)]
    [1, 4, 8, 16]
    """
    return 1 << max(n - 1, 0).bit_length()


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


def meta_like(tensor: Tensor) -> Tensor:
    """A tensor without memory, of the same sizes, strides, dtype and alignment.

    >>> meta_like(torch.zeros(4, 6)[:, 1:]).stride()
    (6, 1)
    """
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    shift = tensor.data_ptr() % 16 // tensor.element_size()
    memory = torch.empty(max(reach, 0) + 1 + shift, dtype=tensor.dtype, device="meta")
    return memory.as_strided(tensor.shape, tensor.stride(), shift)
