"""Replayed launches: the same bits as launches by Triton, whatever memory the next call's tensors have."""

import contextlib
import ctypes
import gc
import inspect
import re
import types
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from nearsight.ops import explicit_attention, launching, local_attention, local_attention_projected, qna
from nearsight.ops.sums import add_rows
from tests.ops.triton.interpreter import interpreted

FLOAT, BFLOAT = torch.float32, torch.bfloat16


class Compiled:
    """An interpreted kernel as a replay runs it: given addresses."""

    function = packed_metadata = None

    def __init__(self, kernel, arguments):
        tensors = [getattr(a, "base", a) for a in arguments]
        self.kernel = kernel
        self.kinds = [(t.dtype, reach(t)) if isinstance(t, torch.Tensor) else None for t in tensors]

    def run(self, *arguments):
        grid, arguments = arguments[:3], list(arguments[9:])
        for i, kind in enumerate(self.kinds):
            if isinstance(arguments[i], int) and kind is not None:
                arguments[i] = at(arguments[i], *kind)
            elif kind is not None:
                box = arguments[i]
                box.base = at(box.base.data_ptr(), *kind).as_strided(box.shape, box.strides)
        self.kernel[grid](*arguments)


def reach(tensor):
    return tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize


def at(address, dtype, size):
    """What lies at an address: the interpreter asks for no more."""
    found = (ctypes.c_uint8 * size).from_address(address) if size else bytearray(8)
    return torch.frombuffer(found, dtype=torch.uint8).view(dtype)


@contextlib.contextmanager
def recorded():
    """Interpreted kernels are recorded and replayed, too. Gives the list of kernels that were not replayed."""
    launched = []

    def launch(kernel, grid, arguments, constants):
        with _disable_current_modes():  # the interpreter calls torch
            kernel[grid](*arguments, **constants)
        launched.append(kernel.fn.__name__)
        if (recorder := launching._recorder.get()) is not None:
            recorder.add(kernel, Compiled(kernel, arguments), grid, arguments, constants)

    active = types.SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 0)
    runtime = types.SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    with (
        mock.patch.object(launching, "launch", launch),
        mock.patch.object(launching, "_can_replay", return_value=True),
        mock.patch.object(launching, "_triton", return_value=(types.SimpleNamespace(active=active), runtime)),
    ):
        yield launched


def results(op, inputs, **options):
    """The output and every gradient."""
    leaves = [t.detach().clone().requires_grad_() if t is not None and t.is_floating_point() else t for t in inputs]
    out = op(*leaves, **options, backend="triton")
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype))
    return [out, *(t.grad for t in leaves if t is not None and t.requires_grad)]


def compare(op, make, replays=True, **options):
    """Pairs of calls on other numbers each time: the first ever only runs, the second is recorded, the rest are replayed."""
    with recorded() as launched:
        for turn in range(2):
            torch.manual_seed(turn)
            inputs = make()
            with launching.without_replays():
                wanted = results(op, inputs, **options)
            launched.clear()
            for got, want in zip(results(op, inputs, **options), wanted, strict=True):
                assert torch.equal(got, want), f"call {turn}"
            assert bool(launched) == (turn == 0 or not replays), f"call {turn}"


@interpreted
@pytest.mark.parametrize(("size", "dtype"), [((5, 7), BFLOAT), ((17, 20), BFLOAT), ((35, 20), FLOAT)], ids=str)
def test_explicit(size, dtype):
    def op(values, radius, **options):
        return explicit_attention(values, radius=radius, kind="gaussian", **options)

    compare(op, lambda: (torch.randn(1, *size, 4).to(dtype), torch.rand(2) + 0.2))


@interpreted
@pytest.mark.parametrize("stride", [1, 2])
def test_qna(stride):
    def op(scores, values, bias, scale, mask, **options):
        return qna(scores, values, position_bias=bias, tap_scale=scale, key_mask=mask, window=3, **options)

    def make():
        tables = torch.randn(2, 3, 3, 1, 2)
        return torch.randn(1, 3, 4, 1, 2), torch.randn(1, 3, 4, 2, 8).to(BFLOAT), *tables, torch.rand(1, 3, 4) < 0.8

    compare(op, make, stride=stride)


def attend(q, k, v, rel_row, rel_col, mask, **options):
    return local_attention(q, k, v, rel_row=rel_row, rel_col=rel_col, key_mask=mask, **options)


@interpreted
@pytest.mark.parametrize(
    ("window", "dtype", "dim", "content"),
    [((3, 5), FLOAT, 6, True), ((3, 5), BFLOAT, 8, True), ((3, 2), BFLOAT, 16, False), ((12, 1), FLOAT, 6, True)],
)
def test_local(window, dtype, dim, content):
    """A table of one tap is set to zero after the launches: such classes of calls are not replayed."""

    def make():
        q, k, v = torch.randn(3, 1, 3, 5, 2, dim).to(dtype)
        rows, columns = (torch.randn(n, dim // 2).to(dtype) for n in window)
        return q, k if content else None, v, rows, columns, torch.rand(1, 3, 5) < 0.8

    compare(attend, make, replays=min(window) > 1, window=window)


@interpreted
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
def test_local_projected(dtype):
    def op(pixels, weight, bias, rel_row, **options):
        return local_attention_projected(pixels, weight, bias, rel_row=rel_row, num_heads=2, window=3, **options)

    def make():
        sizes = (1, 5, 6, 4), (3 * 2 * 8, 4), (3 * 2 * 8,), (3, 4)
        return [torch.randn(size).to(dtype) for size in sizes]

    compare(op, make)


@interpreted
def test_slices_of_one_tensor_and_tensors_of_their_own():
    """What a call's tensors share is no part of its class: recorded with slices, replayed without, and back."""
    with recorded() as launched:
        for turn in range(4):
            packed = torch.randn(1, 5, 6, 3, 2, 8)
            slices = packed.unbind(3)
            if turn == 3:
                slices = [torch.randn(packed.shape).unbind(3)[i] for i in range(3)]
            launched.clear()
            got = local_attention(*slices, window=3, backend="triton")
            assert bool(launched) == (turn < 2)
            with launching.without_replays():
                assert torch.equal(got, local_attention(*slices, window=3, backend="triton"))


@interpreted
def test_one_tensor_given_twice_is_a_class_of_its_own():
    with recorded() as launched:
        for turn in range(6):
            x = torch.randn(1, 4, 3, 1, 8)
            given = [x, x, x.clone()] if turn % 2 else [x, x.clone(), x]
            launched.clear()
            got = local_attention(*given, window=3, backend="triton")
            assert bool(launched) == (turn < 4)
            with launching.without_replays():
                assert torch.equal(got, local_attention(*given, window=3, backend="triton"))


@interpreted
def test_what_is_recorded_keeps_no_tensor():
    with recorded():
        for _ in range(2):
            given = list(torch.randn(3, 1, 4, 3, 1, 8).bfloat16())
            local_attention(*given, window=3, backend="triton")
        kept = [weakref.ref(t) for t in given]
        del given
        gc.collect()
        assert all(t() is None for t in kept)


def transposed(shares):
    return add_rows(shares.T.contiguous(), 2)


def cleared(shares):
    mine = torch.empty_like(shares)
    return add_rows(mine.zero_(), 2)


def cleared_together(shares):
    mine = torch.empty_like(shares)
    torch._foreach_zero_([mine])
    return add_rows(mine, 2)


def sliced(shares):
    return add_rows(shares, 2)[:1]


@interpreted
@pytest.mark.parametrize("function", [transposed, cleared, cleared_together, sliced])
def test_what_does_more_than_launch(function):
    """It is left alone, but for views of results, which are not missed."""
    replays = function is sliced
    function = launching.replayed(function)
    with recorded() as launched:
        for turn in range(4):
            shares = torch.randn(5, 3)
            with launching.without_replays():
                want = function(shares)
            launched.clear()
            assert torch.equal(function(shares), want)
            assert bool(launched) == (turn == 0 or not replays)


@interpreted
def test_a_profiler_sees_triton_launch():
    make = lambda: torch.randn(1, 4, 3, 2)  # noqa: E731
    with recorded() as launched:
        for _ in range(3):
            explicit_attention(make(), kind="gaussian", radius=0.5, backend="triton")
        assert len(launched) == 2
        launching._triton()[1].launch_enter_hook = print
        explicit_attention(make(), kind="gaussian", radius=0.5, backend="triton")
        assert len(launched) == 3


def test_all_launches_are_seen():
    """A replay lacks what was launched past `first_calls.launch`."""
    folder = Path(launching.__file__).parent
    files = [file for part in ("local", "qna", "explicit", "sums") for file in (folder / part).rglob("*.py")]
    past = [str(file) for file in files if re.search(r"kernels\.\w+\[", file.read_text())]
    assert not past


def test_what_a_class_is():
    def key(tensor, *rest):
        return launching._class_of((tensor, None, *rest))[0]

    memory = torch.zeros(200)
    plain = key(memory[:24].view(4, 6), [3, 5], 1.0)
    assert plain == key(torch.ones(4, 6), [3, 5], 1.0)
    others = [
        key(memory[1:25].view(4, 6), [3, 5], 1.0),  # begins elsewhere within 16 bytes
        key(memory[2:26].view(4, 6), [3, 5], 1.0),
        key(memory[:24].view(6, 4), [3, 5], 1.0),
        key(memory[:24].view(6, 4).T, [3, 5], 1.0),
        key(memory.bfloat16()[:24].view(4, 6), [3, 5], 1.0),
        key(memory[:24].view(4, 6), [5, 3], 1.0),
        key(memory[:24].view(4, 6), [3, 5], 0.5),
    ]
    assert len({plain, *others}) == 8


def test_without_replays_within_itself():
    with launching.without_replays():
        with launching.without_replays():
            pass
        assert not launching._Replays.on
    assert launching._Replays.on


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_either_hook_is_a_profilers(hook, chained):
    """Triton has a function there, or a chain of them."""
    none, some = (types.SimpleNamespace(calls=[]), types.SimpleNamespace(calls=[print])) if chained else (None, print)
    for given, watched in ((none, False), (some, True)):
        runtime = types.SimpleNamespace(**{"launch_enter_hook": none, "launch_exit_hook": none, hook: given})
        with mock.patch.object(launching, "_triton", return_value=(None, runtime)):
            assert launching._watched() == watched


def test_where_launches_are_replayed(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    assert launching._can_replay(torch.ones(1))
    assert not launching._can_replay(torch.ones(1, device="meta"))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert not launching._can_replay(torch.ones(1))


def test_sizes_may_come_without_end(monkeypatch):
    monkeypatch.setattr(launching, "MOST_KEPT", 3)
    function = launching.replayed(torch.empty_like)
    for size in range(1, 9):
        assert function(torch.ones(size)).shape == (size,)
        assert len(inspect.getclosurevars(function).nonlocals["calls"]) <= 3


class Stream:
    """Of a GPU that is not there: writes down who waited for whom."""

    def __init__(self, number, waits):
        self.cuda_stream, self.waits = number, waits

    def wait_stream(self, other):
        self.waits.append((self.cuda_stream, other.cuda_stream))


def test_what_was_launched_beside_is_replayed_beside(driver, monkeypatch):
    """On the second stream, after all that came before; what follows waits for it where it is joined."""
    order = []
    first, second = Stream(1, order), Stream(2, order)
    current = [first]

    @contextlib.contextmanager
    def stream(which):
        current.append(which)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(launching, "_second_stream", lambda device: second)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(driver, "get_current_stream", lambda _: current[-1].cuda_stream)
    driver.launcher_cls = lambda *_: lambda x, y, z, stream, *_: order.append(stream)

    @launching.replayed
    def sums(shares):
        with launching.beside(shares):
            early = add_rows(shares, 2)
        add_rows(shares, 2)
        launching.join(shares)
        return add_rows(early, 1)

    for _ in range(3):
        order.clear()
        sums(torch.ones(5, 3))
        assert order == [(2, 1), 2, 1, (1, 2), 1]


def test_without_a_gpu_nothing_is_beside():
    with launching.beside(torch.ones(1)):
        launching.join(torch.ones(1))


def test_the_launcher_gets_what_triton_gives_it(driver):
    given = []
    driver.launcher_cls = lambda *_: lambda *arguments: given.append(arguments)
    add = launching.replayed(add_rows)
    shares = torch.ones(5, 3)
    sums = [add(shares, 2) for _ in range(3)]
    plain, _, replayed = given
    hooks = slice(6, 9)
    assert replayed[hooks] == (None, None, None)
    for out, call in ((sums[0], plain), (sums[2], replayed)):
        tensors = call[9:11]
        assert [getattr(t, "data_ptr", lambda t=t: t)() for t in tensors] == [shares.data_ptr(), out.data_ptr()]
    assert plain[:6] + plain[11:] == replayed[:6] + replayed[11:]
    assert sums[2].shape == sums[0].shape
    assert sums[2].dtype == sums[0].dtype
