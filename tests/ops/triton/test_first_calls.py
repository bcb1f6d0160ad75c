"""What a class of calls compiles on its first one, and how: beside each other, the longest first, in caches that others find."""

import contextlib
import gc
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from nearsight.ops import first_calls, launching


def kernel_like(**given):
    """What `launch` asks of a kernel."""
    return types.SimpleNamespace(__module__=__name__, **given)


@pytest.mark.parametrize(("kind", "makes"), [("*fp32", True), ("tensordesc<fp32[16, 16]>", False)])
def test_a_launcher_is_made_while_its_kernel_is_compiled(monkeypatch, kind, makes):
    """As versions of Triton do it after the compilation; one for descriptors depends on what the compilation chooses."""
    triton = pytest.importorskip("triton")
    made, seen = threading.Event(), []

    class Launcher:
        def __init__(self, source, metadata):
            seen.append((source, metadata.global_scratch_size))
            made.set()

    monkeypatch.setattr(sys.modules[__name__], "make_launcher", None, raising=False)
    monkeypatch.setattr(triton.runtime.driver, "_active", types.SimpleNamespace(launcher_cls=Launcher))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    src = types.SimpleNamespace(signature={"x": kind})

    def compilation():
        assert not makes or made.wait(30), "the launcher waited for the kernel"
        return types.SimpleNamespace(run=None, source=src)

    with first_calls._Loader(0) as pool:
        assert pool.submit(compilation).result().source is src
    assert not pool.failed
    assert seen == ([(src, None)] if makes else [])


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_kernels_compile(driver, collects):
    """A search walks all objects that torch has, several times in a first call."""
    during, before = [], gc.isenabled()
    kernel = kernel_like(src="", warmup=lambda grid, **_: during.append(gc.isenabled()))
    (gc.enable if collects else gc.disable)()
    try:
        first_calls.compile_together("nothing", lambda: first_calls.launch(kernel, (1,)))
        assert during == [False]
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


def test_nothing_is_compiled_beforehand_while_a_graph_is_captured(driver, monkeypatch):
    order = []
    kernel = kernel_like(src="", warmup=lambda grid, **_: order.append(grid))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    first_calls.compile_together("later", lambda: first_calls.launch(kernel, (1,)))
    assert order == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(2):
        first_calls.compile_together("later", lambda: first_calls.launch(kernel, (1,)))
    assert order == [(1,)]


def test_what_only_the_threads_got_wrong_is_mended(driver, monkeypatch):
    order = []

    def warmup(name, grid, **_):
        order.append(name)

    class Failed(first_calls._Loader):
        def __exit__(self, *error):
            self.failed = True
            return super().__exit__(*error)

    kernels = {name: kernel_like(src="x" * size, warmup=warmup) for name, size in (("a", 3), ("c", 2))}
    monkeypatch.setattr(first_calls, "_Loader", Failed)
    first_calls.compile_together(
        "two", lambda: [first_calls.launch(kernel, (1,), name) for name, kernel in kernels.items()]
    )
    assert order == ["a", "c", "a", "c"]


def test_tensors_without_memory_begin_as_far_from_16_bytes():
    memory = torch.zeros(40)
    assert memory.data_ptr() % 16 == 0
    for start in (0, 1, 2, 3, 5):
        like = first_calls.meta_like(memory[start : start + 12].view(3, 4)[:, 1:])
        assert (like.shape, like.stride()) == ((3, 3), (4, 1))
        assert 4 * like.storage_offset() == 4 * (start + 1) % 16
    assert first_calls.meta_like(memory[:0].view(0, 3)).shape == (0, 3)


def test_the_longest_kernel_is_compiled_first(driver):
    """What follows Triton's Python takes longest for it."""
    order = []

    def launches():
        for length in (3, 5, 1):
            kernel = kernel_like(src="x" * length, warmup=lambda n, grid, **_: order.append((n, grid)))
            first_calls.launch(kernel, (length,), length)

    first_calls.compile_together("three", launches)
    assert order == [(5, (5,)), (3, (3,)), (1, (1,))]


def test_products_and_sums_are_one_step(driver, monkeypatch):
    """Said to every launch and compilation: what Triton does unasked changes with its version."""
    given = []
    kernel = kernel_like(src="", warmup=lambda grid, **options: given.append(options))
    first_calls.compile_together("one step", lambda: first_calls.launch(kernel, (1,), num_warps=2))
    monkeypatch.setattr(launching, "launch", lambda kernel, grid, arguments, constants: given.append(constants))
    first_calls.launch(kernel, (1,), num_warps=2)
    assert given == [{"enable_fp_fusion": True, "num_warps": 2}] * 2


def test_the_python_of_two_compilations_takes_turns(monkeypatch):
    """Then the first is done with it early, and what it needs no Python for runs beside the second's."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(first_calls.os, "cpu_count", lambda: 4)
    inside, seen, turns, passed = [], [], [], threading.Barrier(3)

    class Source:
        def make_ir(self, name):
            inside.append(name)
            time.sleep(0.05)
            seen.append(list(inside))
            inside.remove(name)
            turns.append(name)

    def compilation(name):
        src = Source()

        def compile_kernel():
            src.make_ir(name)
            passed.wait(30)  # all are here at a time: what follows runs side by side
            assert "make_ir" not in vars(src)
            return types.SimpleNamespace(run=None)

        return compile_kernel

    with first_calls._Loader(0) as pool:
        for future in [pool.submit(compilation(name)) for name in "abc"]:
            future.result()
    assert sorted(turns) == ["a", "b", "c"]
    assert all(len(names) == 1 for names in seen)


KEYS = """
import importlib, sys
from triton.runtime.jit import DependenciesFinder, JITFunction
from nearsight.ops import first_calls

late, update = set(), DependenciesFinder._update_hash

def note(finder, called):
    if called.hash is None and not called.fn.__module__.startswith("triton."):
        late.add(f"{finder.name} asked for the key of {called.fn.__name__}")
    return update(finder, called)

DependenciesFinder._update_hash = note
modules = [importlib.import_module(name) for name in sys.argv[2:]]
if sys.argv[1] == "settled":
    for name in reversed(sys.argv[2:]):
        first_calls._settle_keys(name)
for module in modules:
    for each in reversed(list(vars(module).values())):
        if isinstance(each, JITFunction):
            each.cache_key
print(len(late), *sorted(late), sep="\\n")
"""


@pytest.mark.parametrize("settled", [True, False])
def test_what_a_kernel_calls_has_its_key_before_it(settled):
    """Else a kernel's key in the cache on disk depends, up to Triton 3.6, on which kernels a process asked for before."""
    pytest.importorskip("triton.experimental.gluon", reason="needs a Triton with Gluon")
    root = Path(first_calls.__file__).parent
    files = sorted(file.relative_to(root).with_suffix("") for file in root.rglob("*kernels.py"))
    names = [".".join(("nearsight", "ops", *file.parts)) for file in files]
    assert len(names) > 10
    command = [sys.executable, "-c", KEYS, "settled" if settled else "unsettled", *names]
    late, *which = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    assert (int(late) == 0) == settled, which


def test_what_a_class_is():
    """Everything that kernels are chosen by: not the numbers, nor where they lie but for 16 bytes."""
    memory = torch.zeros(4, 6, 8)
    wanted = first_calls.class_of("op", memory, None, [3, 5], 0.5)
    assert first_calls.class_of("op", memory + 1, None, (3, 5), 0.5) == wanted
    others = (memory[1:], memory.mT, memory.half(), torch.zeros(4 * 6 * 8 + 1)[1:].view(4, 6, 8), memory.to("meta"))
    for other in others:
        assert first_calls.class_of("op", other, None, [3, 5], 0.5) != wanted
    for parts in (
        ("other", memory, None, [3, 5], 0.5),
        ("op", memory, memory, [3, 5], 0.5),
        ("op", memory, None, [5, 3], 0.5),
    ):
        assert first_calls.class_of(*parts) != wanted


def test_a_call_is_stood_in_for_part_by_part():
    class Call(NamedTuple):
        q: torch.Tensor
        mask: torch.Tensor | None
        window: tuple[int, int]

    call = Call(torch.zeros(4, 6).mT, None, (3, 5))
    like = first_calls.stand_in(call)
    assert (type(like), like.mask, like.window) == (Call, None, (3, 5))
    assert (like.q.device.type, like.q.shape, like.q.stride()) == ("meta", call.q.shape, call.q.stride())
