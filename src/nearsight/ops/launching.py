"""Launches of Triton kernels, replayed.

A call of an op makes a plan and views, allocates, and lets Triton look at every argument of every launch to choose a compilation
(20 µs where there are fifty): up to 0.3 ms of Python, longer than the kernels of a small map run. All of it depends on the class
of the call alone: shapes, strides, dtypes and alignment of its tensors, and its numbers. So the launches of a class are
recorded once, as loaded kernels with their numbers, and which tensor each pointer lies in; from then on a call of that class
allocates, adds up pointers and launches. The temporary tensors are one allocation.

`torch.library.triton_op` would let a compiled graph launch the kernels itself. It does not serve here: it traces the body of an
op with tensors that have no address and with symbols for sizes, where our choices read alignment and numbers; a product that an
op makes again to save memory would be seen, and kept after all; and calls outside a compiled graph would cost what they did.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["beside", "join", "launch", "replayed", "without_replays"]

Result = TypeVar("Result", bound="Tensor | tuple[Tensor, ...] | list[Tensor]")

# Sizes may come without end.
MOST_KEPT = 2_000
ALIGNMENT = 512  # of the temporary tensors, as torch allocates them

_recorder: contextvars.ContextVar[_Recorder | None] = contextvars.ContextVar("nearsight_recorder", default=None)


def launch(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], constants: Mapping[str, Any]) -> None:
    """`kernel[grid](*arguments, **constants)`, remembered where a call is being recorded."""
    compiled = kernel[grid](*arguments, **constants)
    recorder = _recorder.get()
    if recorder is not None:
        recorder.add(kernel, compiled, grid, arguments, constants)


class _Mark(Enum):
    """Where launches go from here on: to the second stream, back to the first; and where the first waits for the second."""

    BESIDE = auto()
    BACK = auto()
    JOIN = auto()


@contextmanager
def beside(tensor: Tensor) -> Iterator[None]:
    """Launches within go to a second stream of a tensor's GPU, after all that came before: they run beside what follows, which
    waits for them from `join` on. Memory that is allocated within may be given out again before they are done."""
    if not tensor.is_cuda:  # on a CPU they only come one after the other, and so do stand-ins of a compilation
        yield
        return
    _mark(_Mark.BESIDE, tensor.device)
    try:
        with torch.cuda.stream(_second_stream(tensor.device)):
            yield
    finally:
        _mark(_Mark.BACK, tensor.device)


def join(tensor: Tensor) -> None:
    """What follows waits for the launches `beside` it."""
    if tensor.is_cuda:
        _mark(_Mark.JOIN, tensor.device)


def _mark(mark: _Mark, device: torch.device) -> None:
    """Do what a mark says, and remember it where a call is being recorded."""
    _follow(mark, device)
    recorder = _recorder.get()
    if recorder is not None:
        recorder.steps.append(mark)


def _follow(mark: _Mark, device: torch.device) -> int:
    """Let one stream wait for the other, as a mark says; the one that the next launches go to."""
    first, second = torch.cuda.current_stream(device), _second_stream(device)
    if mark is _Mark.BESIDE:
        second.wait_stream(first)
        return int(second.cuda_stream)
    if mark is _Mark.JOIN:
        first.wait_stream(second)
    return int(first.cuda_stream)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """Its programs go before those of other streams: the sooner they are done, the sooner begins what waits for them."""
    return torch.cuda.Stream(device, priority=-1)


class _Replays:
    """One switch for all threads: autograd has its own."""

    on = True


@contextmanager
def without_replays() -> Iterator[None]:
    """Nothing is recorded or replayed meanwhile, in any thread: every call is launched by Triton."""
    before, _Replays.on = _Replays.on, False
    try:
        yield
    finally:
        _Replays.on = before


class _Seen(Enum):
    """A class of calls that is to be recorded, and one that cannot be."""

    ONCE = auto()
    PLAIN = auto()


def replayed(function: Callable[..., Result]) -> Callable[..., Result]:
    """Replay the launches of `function`, whose arguments are tensors on one device (the first one is a tensor), None, numbers
    and lists of numbers, and whose results are tensors that it allocates.

    The first call of a class only runs, the second is recorded. A class stays as it is where it does more than allocate, take
    views and launch: what a copy or a product leaves is no argument of the next call.
    """
    calls: dict[Hashable, _Replay | _Seen] = {}

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        key, tensors, pointers = _class_of(arguments)
        call = calls.get(key)
        if isinstance(call, _Replay) and _Replays.on and not _watched():
            return call.run(tensors[0].device, pointers)
        with torch.cuda.device_of(tensors[0]):
            if call is _Seen.ONCE and _Replays.on:
                recorder = _Recorder(tensors)
                result = recorder.run(function, arguments)
                calls[key] = recorder.replay(result)
                return result
            if call is None and _can_replay(tensors[0]):
                if len(calls) >= MOST_KEPT:
                    calls.clear()
                calls[key] = _Seen.ONCE
            return function(*arguments)

    return run


def _class_of(arguments: Sequence[Any]) -> tuple[Hashable, list[Tensor], list[int]]:
    """What the launches of a call depend on, its tensors, and where they begin."""
    key: list[Hashable] = []
    tensors, pointers = [], []
    for argument in arguments:
        if isinstance(argument, Tensor):
            pointer = argument.data_ptr()
            tensors.append(argument)
            pointers.append(pointer)
            # Last, the first tensor that begins here: of two that do, a launch may mean either.
            key += (argument.shape, argument.stride(), argument.dtype, pointer % 16, pointers.index(pointer))
        elif isinstance(argument, list):
            key.append(tuple(argument))
        else:
            key.append(argument)
    return (tensors[0].device, *key), tensors, pointers


def _can_replay(tensor: Tensor) -> bool:
    """On NVIDIA's GPUs: elsewhere compilations may depend on more. Tensors without memory stand for others."""
    from nearsight.ops.triton_support import INTERPRETED

    return not INTERPRETED and torch.version.hip is None and not tensor.is_meta


@functools.cache
def _triton() -> tuple[Any, Any]:
    """Triton's place for the driver, and its settings of launches."""
    from triton import knobs
    from triton.runtime import driver

    return driver, knobs.runtime


def _watched() -> bool:
    """Whether hooks of Triton's (a profiler's) want to see the launches."""
    _, settings = _triton()
    enter, leave = settings.launch_enter_hook, settings.launch_exit_hook
    # A function, or a chain of them.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class _Place(NamedTuple):
    """An argument that points into the tensor `base` of a call, or a tensor descriptor of what begins there."""

    argument: int
    base: int
    offset: int
    descriptor: Any = None


class _Launch(NamedTuple):
    """A loaded kernel: the driver's launcher, the grid, what the launcher takes next, and all arguments.

    The kernel is kept, because Triton unloads one that nobody has.
    """

    run: Callable[..., None]
    grid: tuple[int, int, int]
    handles: tuple[Any, ...]
    arguments: list[Any]
    places: list[_Place]
    kernel: Any


class _Allocation(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Replay(NamedTuple):
    """A class of calls: bytes of the temporary tensors, those that must read as zero, results, and launches with their marks.

    The bases of the places are the call's tensors, the temporary bytes, the zeros and the results, in this order.
    """

    temporary: int
    zeros: list[int]
    results: list[_Allocation]
    kind: type
    steps: list[_Launch | _Mark]

    def run(self, device: torch.device, pointers: list[int]) -> Any:
        driver = _triton()[0].active
        current = driver.get_current_device()
        if device.index in (None, current):
            return self._launch(device, driver.get_current_stream(current), pointers)
        with torch.cuda.device(device):
            return self._launch(device, driver.get_current_stream(device.index), pointers)

    def _launch(self, device: torch.device, stream: int, pointers: list[int]) -> Any:
        temporary = torch.empty(self.temporary, dtype=torch.uint8, device=device)
        zeros = [torch.zeros(size, dtype=torch.uint8, device=device) for size in self.zeros]
        results = [torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device=device) for a in self.results]
        bases = [*pointers, *[t.data_ptr() for t in (temporary, *zeros, *results)]]
        for step in self.steps:
            if isinstance(step, _Mark):
                stream = _follow(step, device)
                continue
            run, grid, handles, template, places, _ = step
            arguments = template.copy()
            for argument, base, offset, descriptor in places:
                pointer = bases[base] + offset
                arguments[argument] = pointer if descriptor is None else _described(descriptor, pointer)
            # No metadata for hooks, and no hooks.
            run(*grid, stream, *handles, None, None, None, *arguments)
        return results[0] if self.kind is Tensor else self.kind(results)


class _At:
    """What a launcher asks of the tensor of a descriptor."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def data_ptr(self) -> int:
        return self.pointer


def _described(descriptor: Any, pointer: int) -> Any:
    """The descriptor, of what begins at `pointer`."""
    copy = object.__new__(type(descriptor))
    copy.__dict__.update(descriptor.__dict__, base=_At(pointer))
    return copy


class _Recorder(TorchDispatchMode):
    """Sees the allocations and, through `launch`, the launches of one call."""

    EMPTY = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"})
    ZEROS = frozenset({"zeros", "new_zeros", "zeros_like"})

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.tensors = tensors
        self.empty: list[Tensor] = []
        self.zeros: list[Tensor] = []
        self.steps: list[tuple[Any, Any, tuple[int, ...], Sequence[Any], Mapping[str, Any]] | _Mark] = []
        self.pure = True

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        token = _recorder.set(self)
        try:
            with self:
                return function(*arguments)
        finally:
            _recorder.reset(token)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        # All are kept, so that no memory is given out twice while this call is recorded.
        if isinstance(result, Tensor) and result.is_meta:
            pass  # a stand-in, of a compilation
        elif name in self.EMPTY:
            self.empty.append(result)
        elif name in self.ZEROS:
            self.zeros.append(result)
        elif not _is_view(func._schema):
            self.pure = False
        return result

    def add(
        self, kernel: Any, compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any], constants: Mapping[str, Any]
    ) -> None:
        self.steps.append((kernel, compiled, grid, arguments, constants))

    def replay(self, result: Any) -> _Replay | _Seen:
        """What was recorded, if it can be replayed."""
        results = [result] if isinstance(result, Tensor) else list(result)
        own = {_storage(t): t for t in self.empty if t.numel()}
        kept = {_storage(t) for t in results if t.numel()}
        fresh = all(t.numel() == 0 or (_storage(t) in own and t.data_ptr() == _storage(t)) for t in results)
        if not self.pure or not fresh or len(kept) < sum(t.numel() > 0 for t in results):
            return _Seen.PLAIN
        # Where each storage of this call is found in the next: its base, and the bytes before it.
        found: dict[int, tuple[int, int]] = {}
        first, size = len(self.tensors), 0
        for storage, t in own.items():
            if storage not in kept:
                found[storage] = first, size
                size += -(-t.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
        for i, t in enumerate((*self.zeros, *results)):
            found[_storage(t)] = first + 1 + i, 0
        steps: list[_Launch | _Mark] = []
        for step in self.steps:
            if isinstance(step, _Mark):
                steps.append(step)
                continue
            kernel, compiled, grid, arguments, constants = step
            given = (*arguments, *_named(kernel, len(arguments), constants))
            places = [self._place(found, i, a) for i, a in enumerate(given) if _points(a)]
            if None in places:
                return _Seen.PLAIN
            template = [None if _points(a) else a for a in given]
            x, y, z = (*grid, 1, 1)[:3]
            handles = compiled.function, compiled.packed_metadata
            steps.append(_Launch(compiled.run, (x, y, z), handles, template, [p for p in places if p], compiled))
        allocations = [_Allocation(t.shape, t.stride(), t.dtype) for t in results]
        zeros = [t.untyped_storage().nbytes() for t in self.zeros]
        kind = Tensor if isinstance(result, Tensor) else type(result)
        return _Replay(size, zeros, allocations, kind, steps)

    def _place(self, found: dict[int, tuple[int, int]], argument: int, value: Any) -> _Place | None:
        """Where to find an argument's pointer in the next call; None where several of the call's tensors may hold it."""
        tensor, descriptor = (value, None) if isinstance(value, Tensor) else (value.base, _described(value, 0))
        pointer, storage = tensor.data_ptr(), _storage(tensor)
        if tensor.untyped_storage().nbytes() == 0:
            return _Place(argument, len(self.tensors), 0, descriptor)
        if storage in found:
            base, offset = found[storage]
            return _Place(argument, base, offset + pointer - storage, descriptor)
        near = [i for i, t in enumerate(self.tensors) if _storage(t) == storage]
        if len(near) > 1:
            near = [i for i in near if self.tensors[i].data_ptr() == pointer]
        if not near:
            return None
        return _Place(argument, near[0], pointer - self.tensors[near[0]].data_ptr(), descriptor)


def _is_view(schema: Any) -> bool:
    """Whether an operator only gives other views of its arguments."""
    aliases = [r.alias_info for r in schema.returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


def _points(argument: Any) -> bool:
    """Whether an argument is a tensor or the descriptor of one."""
    return isinstance(argument, Tensor) or isinstance(getattr(argument, "base", None), Tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _named(kernel: Any, given: int, constants: Mapping[str, Any]) -> list[Any]:
    """The arguments that came by name, in the kernel's order."""
    parameters = list(inspect.signature(kernel.fn).parameters.values())[given:]
    return [constants.get(p.name, p.default) for p in parameters]
