"""The runner of the interpreted tests, and what Triton backends refuse on any op."""

import contextlib
import gc
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch

from nearsight.ops import launching, triton_support
from nearsight.ops.triton_support import common_refusal, dot_precision
from tests.ops.triton.interpreter import interpreted


@interpreted
def test_the_child_interprets_and_fills_with_nan():
    assert triton_support.INTERPRETED
    assert torch.empty(3).isnan().all()
    assert common_refusal(torch.zeros(1, 2)) is None


@interpreted
def fails(text):
    raise ValueError(text)


def test_a_failure_in_the_child_is_a_failure_here():
    with pytest.raises(AssertionError, match="told so"):
        fails(text="told so")


@interpreted
def test_refuses_double():
    assert common_refusal(torch.zeros(1, dtype=torch.float64)) == "needs float32, bfloat16 or float16, got float64"


def test_refuses_the_cpu_when_not_interpreting():
    assert common_refusal(torch.zeros(1)) == "needs CUDA tensors, got cpu"


def test_refuses_images_out_of_reach_of_32_bit_offsets():
    huge = torch.empty(1, device="meta").as_strided((2, 3), (1, 2**30))
    assert triton_support._image_reach(huge) == 2**31
    assert triton_support._image_reach(torch.empty(5, 0, 3)) < 2**31


def test_refuses_images_whose_results_are_out_of_reach():
    """Of an expanded tensor the gradient is dense."""
    one = torch.empty(1, device="meta").expand(3, 2**16, 2**15, 1)
    assert triton_support._image_reach(one) == 0
    assert triton_support._image_size(one) == 2**31
    wide = torch.zeros(1).expand(3, 2**16, 2**15 + 1, 1)
    assert common_refusal_interpreted(wide) == f"needs images of fewer than 2³¹ elements, got shape {list(wide.shape)}"


def common_refusal_interpreted(tensor):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_support, "INTERPRETED", True)
        return common_refusal(tensor)


def kernel_like(**given):
    """What `launch` asks of a kernel."""
    return types.SimpleNamespace(__module__=__name__, **given)


def stand_in(stride, device="cpu"):
    """What a refusal asks of a tensor [1, 2], without its memory."""
    return types.SimpleNamespace(
        device=torch.device(device), dtype=torch.float32, shape=torch.Size([1, 2]), stride=lambda: (1, stride)
    )


def test_every_tensor_must_be_in_reach(monkeypatch):
    monkeypatch.setattr(triton_support, "INTERPRETED", True)
    near, far = stand_in(2**31 - 1), stand_in(2**31)
    assert common_refusal(near, None, near) is None
    for given in ((far,), (near, far), (near, None, far)):
        assert common_refusal(*given) == "needs images of fewer than 2³¹ elements, got shape [1, 2]"


@pytest.mark.parametrize(("capability", "refuses"), [((7, 5), True), ((8, 0), False), ((9, 0), False)])
def test_refuses_gpus_that_are_too_old(monkeypatch, capability, refuses):
    monkeypatch.setattr(triton_support, "_capability", lambda index: capability)
    wanted = f"needs a GPU of compute capability 8.0 or later, got {capability}" if refuses else None
    assert common_refusal(stand_in(1, "cuda")) == wanted


def test_refuses_to_be_exported_and_to_run_without_triton(monkeypatch):
    monkeypatch.setattr(triton_support, "INTERPRETED", True)
    with monkeypatch.context() as patch:
        patch.setattr(triton_support, "exporting", lambda: True)
        assert common_refusal(stand_in(1)) == "needs a call that runs, got one that is being exported"
    monkeypatch.setattr(triton_support, "HAS_TRITON", False)
    assert common_refusal(stand_in(1)) == "needs the triton package, got a Python without it; install triton"


def test_float32_products_are_float32():
    assert dot_precision(torch.float32) == ("tf32x3" if torch.version.hip is None else "ieee")


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

    with triton_support._Loader(0) as pool:
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
        triton_support.compile_together("nothing", lambda: triton_support.launch(kernel, (1,)))
        assert during == [False]
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


def test_nothing_is_compiled_beforehand_while_a_graph_is_captured(driver, monkeypatch):
    order = []
    kernel = kernel_like(src="", warmup=lambda grid, **_: order.append(grid))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    triton_support.compile_together("later", lambda: triton_support.launch(kernel, (1,)))
    assert order == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(2):
        triton_support.compile_together("later", lambda: triton_support.launch(kernel, (1,)))
    assert order == [(1,)]


def test_what_only_the_threads_got_wrong_is_mended(driver, monkeypatch):
    order = []

    def warmup(name, grid, **_):
        order.append(name)

    class Failed(triton_support._Loader):
        def __exit__(self, *error):
            self.failed = True
            return super().__exit__(*error)

    kernels = {name: kernel_like(src="x" * size, warmup=warmup) for name, size in (("a", 3), ("c", 2))}
    monkeypatch.setattr(triton_support, "_Loader", Failed)
    triton_support.compile_together(
        "two", lambda: [triton_support.launch(kernel, (1,), name) for name, kernel in kernels.items()]
    )
    assert order == ["a", "c", "a", "c"]


def test_tensors_without_memory_begin_as_far_from_16_bytes():
    memory = torch.zeros(40)
    assert memory.data_ptr() % 16 == 0
    for start in (0, 1, 2, 3, 5):
        like = triton_support.meta_like(memory[start : start + 12].view(3, 4)[:, 1:])
        assert (like.shape, like.stride()) == ((3, 3), (4, 1))
        assert 4 * like.storage_offset() == 4 * (start + 1) % 16
    assert triton_support.meta_like(memory[:0].view(0, 3)).shape == (0, 3)


def test_the_longest_kernel_is_compiled_first(driver):
    """What follows Triton's Python takes longest for it."""
    order = []

    def launches():
        for length in (3, 5, 1):
            kernel = kernel_like(src="x" * length, warmup=lambda n, grid, **_: order.append((n, grid)))
            triton_support.launch(kernel, (length,), length)

    triton_support.compile_together("three", launches)
    assert order == [(5, (5,)), (3, (3,)), (1, (1,))]


def test_products_and_sums_are_one_step(driver, monkeypatch):
    """Said to every launch and compilation: what Triton does unasked changes with its version."""
    given = []
    kernel = kernel_like(src="", warmup=lambda grid, **options: given.append(options))
    triton_support.compile_together("one step", lambda: triton_support.launch(kernel, (1,), num_warps=2))
    monkeypatch.setattr(launching, "launch", lambda kernel, grid, arguments, constants: given.append(constants))
    triton_support.launch(kernel, (1,), num_warps=2)
    assert given == [{"enable_fp_fusion": True, "num_warps": 2}] * 2


def test_the_python_of_two_compilations_takes_turns(monkeypatch):
    """Then the first is done with it early, and what it needs no Python for runs beside the second's."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(triton_support.os, "cpu_count", lambda: 4)
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

    with triton_support._Loader(0) as pool:
        for future in [pool.submit(compilation(name)) for name in "abc"]:
            future.result()
    assert sorted(turns) == ["a", "b", "c"]
    assert all(len(names) == 1 for names in seen)


@pytest.mark.parametrize(
    ("device", "capability", "early"), [("cpu", (9, 0), 0), ("cuda", (8, 9), 0), ("cuda", (9, 0), 1)]
)
def test_kernels_start_early_where_the_gpu_can(monkeypatch, device, capability, early):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_support, "_capability", lambda index: capability)
    wanted = {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
    assert triton_support.early_launch(torch.device(device)) == wanted


KEYS = """
import importlib, sys
from triton.runtime.jit import DependenciesFinder, JITFunction
from nearsight.ops import triton_support

late, update = set(), DependenciesFinder._update_hash

def note(finder, called):
    if called.hash is None and not called.fn.__module__.startswith("triton."):
        late.add(f"{finder.name} asked for the key of {called.fn.__name__}")
    return update(finder, called)

DependenciesFinder._update_hash = note
modules = [importlib.import_module(name) for name in sys.argv[2:]]
if sys.argv[1] == "settled":
    for name in reversed(sys.argv[2:]):
        triton_support._settle_keys(name)
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
    root = Path(triton_support.__file__).parent
    files = sorted(file.relative_to(root).with_suffix("") for file in root.rglob("*kernels.py"))
    names = [".".join(("nearsight", "ops", *file.parts)) for file in files]
    assert len(names) > 10
    command = [sys.executable, "-c", KEYS, "settled" if settled else "unsettled", *names]
    late, *which = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    assert (int(late) == 0) == settled, which
