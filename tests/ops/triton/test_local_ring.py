"""Local attention's Gluon kernels, which no interpreter runs: compiled for an H200 and emulated, by nearsight's own launches.

Whatever a call launches is emulated (`tests/support/ptx`): the kernels of the ring, and the sums of their shares.
"""

import contextlib
import functools
import math
import types
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from nearsight.bench.accuracy import poisoned_memory
from nearsight.ops import local_attention, local_attention_projected
from nearsight.ops.local import reference
from nearsight.ops.local.call import prepare
from tests.ops.triton.conftest import Driver
from tests.support import ptx
from tests.support.accuracy import assert_by_error_rule, output_and_gradients
from tests.support.draws import picker

pytest.importorskip("triton", reason="needs Triton")
pytest.importorskip("triton.experimental.gluon", reason="needs a Triton with Gluon")

HALF_TYPES = [torch.bfloat16, torch.float16]
RING = ["ring_forward", "ring_backward"]
# Every second strip, then those between: heads of 16 channels. Heads of 8, and strips cut into splits: shares, and their sum.
IN_TURNS = ["ring_forward", "ring_backward", "ring_backward", "finish_relative"]
IN_SHARES = ["ring_forward", "ring_backward", "merge", "finish_relative"]
WALKED = {8: IN_SHARES, 16: IN_TURNS}


class Emulator(Driver):
    """A driver whose launches run on the CPU, on the CPU's tensors: how many programs of which kernel, and what was found."""

    def __init__(self, cache):
        super().__init__()
        self.cache = cache
        self.programs: list[tuple[str, int]] = []
        self.replayed: list[str] = []
        self.reports: list[tuple[str, ptx.Report]] = []
        properties = Driver.utils.get_device_properties
        self.utils = types.SimpleNamespace(load_binary=self.load, get_device_properties=properties)

    def load(self, name, binary, shared, device):
        """As the loaded function, what the kernel's PTX says."""
        made = next(file for file in self.cache.rglob("*.cubin") if file.read_bytes() == binary)
        return 1, made.with_suffix(".ptx"), 0, 0, 1024

    def launcher_cls(self, source, metadata):
        name, kinds = source.fn.fn.__name__, list(source.signature.values())
        reaches = {}

        def launch(x, y, z, _stream, file, _metadata, _launch, _enter, _leave, *given):
            given = [(a, kind) for a, kind in zip(given, kinds, strict=True) if kind != "constexpr"]
            numbers = (x, y, z, *[a for a, kind in given if not kind.startswith("*")])
            addresses = [a if isinstance(a, int) else a.data_ptr() for a, kind in given if kind.startswith("*")]
            if all(isinstance(a, int) for a, kind in given if kind.startswith("*")):
                self.replayed.append(name)
            else:
                reaches[numbers] = [reach(a) for a, kind in given if kind.startswith("*")]
            # Replays know addresses alone; how far one may go from there is what it was when they were recorded.
            memory = list(zip(addresses, reaches[numbers], strict=True))
            pointers = iter(addresses)
            arguments = [next(pointers) if kind.startswith("*") else a for a, kind in given]
            report = ptx.run(parsed(file), (x, y, z), arguments, memory, metadata.shared)
            self.launched.append(name)
            self.programs.append((name, x * y * z))
            self.reports.append((name, report))

        return launch


@functools.cache
def parsed(file: Path) -> ptx.Program:
    return ptx.parse(file.read_text())


def reach(tensor):
    """Bytes from a tensor's first to the end of its memory."""
    return tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """One for all tests here, so that a kernel is compiled once."""
    import triton

    from nearsight.ops import first_calls
    from nearsight.ops.local import launches, triton_impl

    emulator = Emulator(tmp_path_factory.mktemp("triton"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(emulator.cache))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "current_device", emulator.get_current_device)
        patch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        patch.setattr(first_calls, "_compiled", set())
        patch.setattr(triton.runtime.driver, "_active", emulator)
        patch.setattr(triton_impl, "common_refusal", lambda *_: None)
        patch.setattr(launches, "_has_copy_engine", lambda index: True)
        # A compilation that fails switches it off, which is then seen below, and must not last.
        patch.setattr(launches, "RING", True)
        # Tensors of the CPU are taken for those of a GPU.
        may_ring = launches._may_ring
        patch.setattr(launches, "_may_ring", lambda call, *more: may_ring(first_calls.stand_in(call), *more))
        yield emulator


@pytest.fixture(autouse=True)
def launched(emulator):
    """The kernels that a test launched. None of the ring may have missed a barrier, or met in a bank.

    Of sums some versions of Triton let a thread write without a barrier what it read itself, which is reported as well.
    """
    for kept in (emulator.launched, emulator.programs, emulator.replayed, emulator.reports):
        kept.clear()
    yield emulator.launched
    for name, report in emulator.reports:
        assert name not in RING or not (report.missing_barriers or report.bank_conflicts), name


def draw(dtype, size, batch=1, heads=2, dim=16, window=(7, 7), tables="shared"):
    def normal(*shape):
        return torch.randn(shape).to(dtype)

    lead = (heads,) if tables == "heads" else ()
    rel = {name: normal(*lead, taps, dim // 2) for name, taps in zip(("rel_row", "rel_col"), window, strict=True)}
    return {name: normal(batch, *size, heads, dim) for name in "qkv"} | rel


def attend(backend, window=(7, 7), packed=3):
    """With q, k and v as slices of one tensor, side by side on axis `packed`, or on their own (None)."""

    def run(q, k, v, **tables):
        if packed is not None:
            q, k, v = torch.stack([q, k, v], packed).unbind(packed)
        return local_attention(q, k, v, **tables, window=window, scale=q.shape[-1] ** -0.5, backend=backend)

    return run


def compare(inputs, window=(7, 7), packed=3):
    assert_by_error_rule(attend("triton", window, packed), attend("reference", window, packed), inputs)


# Wider than the maps that fit a tile: three or four strips, the last one whole or cut.
SHAPES = {
    "odd": {"size": (7, 21), "batch": 2},
    "per head": {"size": (6, 28), "heads": 4, "tables": "heads"},
    "one row": {"size": (1, 20), "batch": 2},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [8, 16])
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_output_and_gradients(launched, dtype, dim, shape):
    compare(draw(dtype, dim=dim, **SHAPES[shape]), packed=None if shape == "per head" else 3)
    assert launched == WALKED[dim]


# Half a strip or less is left of each image.
PAIRS = [
    ((5, 20), (7, 7), 8),
    ((4, 28), (7, 7), 16),
    ((3, 18), (3, 7), 16),
    ((7, 17), (6, 4), 8),
    ((5, 19), (7, 1), 16),
]


@pytest.mark.parametrize(("size", "window", "dim"), PAIRS, ids=str)
@pytest.mark.parametrize("images", [2, 3])
def test_pairs_of_images(emulator, images, size, window, dim):
    """In the forward their last columns are one strip; of an odd number the last one has it to itself."""
    dtype = HALF_TYPES[images % 2]
    compare(draw(dtype, size=size, batch=images, dim=dim, window=window, tables="heads"), window)
    whole, groups = images * (size[1] // 8), 2 * dim // 16
    forward, *backward = (programs for name, programs in emulator.programs if name in RING)
    assert forward == (whole + -(-images // 2)) * groups
    assert len(backward) == dim // 8
    assert sum(backward) == (whole + images) * groups


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 16), (torch.float16, 8)], ids=str)
def test_a_strip_in_several_splits(emulator, dtype, dim):
    """The last one shorter: 9 tiles in 5 and 4."""
    inputs = draw(dtype, size=(17, 20), heads=16 // dim, dim=dim)
    compare(inputs)
    assert emulator.launched == IN_SHARES
    assert [programs for name, programs in emulator.programs if name in RING] == [3 * 2] * 2


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float16, 8), (torch.bfloat16, 16)], ids=str)
def test_large_calls_in_two_parts(emulator, monkeypatch, dtype, dim):
    """Four images beside the other one or six: as many programs as without a GPU are more than two for each place."""
    from nearsight.ops.local import ring_launches

    batch, together = (5, False) if dim == 8 else (10, True)
    inputs = draw(dtype, size=(3, 18), batch=batch, heads=32 // dim, dim=dim)
    compare(inputs)
    walks, rest = WALKED[dim][1:-1], WALKED[dim][-1]
    assert emulator.launched == ["ring_forward", *walks, *walks, rest]
    first, second = ([4 * 3 * 2], [1 * 3 * 2]) if dim == 8 else ([4 * 2 * 2, 4 * 1 * 2], [6 * 2 * 2, 6 * 1 * 2])
    assert [programs for name, programs in emulator.programs if name == "ring_backward"] == first + second
    upstream = torch.randn(batch, 3, 18, 32 // dim, dim)
    parts = output_and_gradients(attend("triton"), inputs, upstream)
    monkeypatch.setattr(ring_launches, "PLACES", 99)
    whole = output_and_gradients(attend("triton"), inputs, upstream)
    assert emulator.launched[-len(WALKED[dim]) :] == WALKED[dim]
    # In turns the tables' shares come in another order.
    same = [name for name in whole if not (together and name.startswith("rel_"))]
    assert all(torch.equal(parts[name], whole[name]) for name in same)


@pytest.mark.parametrize(("size", "batch"), [((5, 12), 1), ((3, 1), 2), ((2, 7), 1)], ids=str)
def test_narrow_maps(launched, monkeypatch, size, batch):
    """They have kernels of their own; those of the ring take them, too, as they must where a tall one is cut into splits."""
    from nearsight.ops.local import geometry

    monkeypatch.setattr(geometry, "_fit", lambda *_: "")
    compare(draw(torch.bfloat16, size=size, batch=batch))
    # A single strip has no neighbour to wait for.
    assert launched == (IN_TURNS if size[1] > 8 else [*RING, "finish_relative"])


WINDOWS = [((3, 5), torch.bfloat16, 16), ((6, 2), torch.float16, 8), ((1, 7), torch.bfloat16, 8)]


@pytest.mark.parametrize(("window", "dtype", "dim"), WINDOWS, ids=str)
def test_smaller_windows(launched, window, dtype, dim):
    compare(draw(dtype, size=(5, 19), heads=4, dim=dim, window=window), window)
    assert launched == WALKED[dim]


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 16), (torch.float16, 8)], ids=str)
def test_many_tables_are_added_up_first(launched, monkeypatch, dtype, dim):
    """Beside the shares, where there are any, else in a launch of their own."""
    from nearsight.ops.local import sum_launches

    monkeypatch.setattr(sum_launches, "MOST_ROWS", 16)
    monkeypatch.setitem(sum_launches.TABLE_SUM, "PARTS", 4)
    compare(draw(dtype, size=(3, 22), batch=3, heads=32 // dim, dim=dim))
    assert launched == (IN_SHARES if dim == 8 else [*IN_TURNS[:3], "add_rows", "finish_relative"])
    launched.clear()
    compare(draw(dtype, size=(17, 20), heads=16 // dim, dim=dim))
    assert launched == IN_SHARES


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_random_calls(launched, seed):
    pick = picker(seed)
    dim, window = 8 * pick(1, 2), (pick(1, 7), pick(1, 7))
    shape = {"size": (pick(1, 25), pick(17, 40)), "batch": pick(1, 3), "heads": pick(1, 3) * 16 // dim}
    inputs = draw(HALF_TYPES[pick(0, 1)], dim=dim, window=window, tables=("shared", "heads")[pick(0, 1)], **shape)
    compare(inputs, window, packed=(None, 3)[pick(0, 1)])
    assert launched in (WALKED[dim], IN_SHARES)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 8), (torch.float16, 16)], ids=str)
def test_log_sum_exp(launched, dtype, dim):
    """By the error rule; of the reference's weights, the middle tap's says what its logit was less."""
    from nearsight.ops.local import triton_impl

    inputs = draw(dtype, size=(3, 21), dim=dim)
    call = prepare(**inputs, window=7, scale=dim**-0.5)

    def plain(call):
        middle = torch.cat([call.rel_row[0, 3], call.rel_col[0, 3]])
        logit = (call.q * (call.k + middle)).sum(-1) * call.scale
        return logit * math.log2(math.e) - reference.weights(call)[..., 24].log2()

    truth = plain(call._replace(**{name: getattr(call, name).double() for name in inputs}))
    with poisoned_memory():
        lse = triton_impl._forward_op(call.q, call.k, call.v, *triton_impl._rest(call))[1].view(truth.shape)
    allowed = 2 * (plain(call) - truth).abs().max() + 4 * torch.finfo(dtype).eps * truth.abs().max()
    assert (lse - truth).abs().max() <= allowed
    assert launched == RING[:1]


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 16), (torch.float16, 8)], ids=str)
def test_large_logits(launched, dtype, dim):
    """Hundreds, at borders too: what is beyond them must stay far below."""
    inputs = draw(dtype, size=(3, 20), dim=dim)
    inputs["q"] *= 12
    inputs["k"] *= 12
    inputs["rel_row"] -= 20
    compare(inputs)
    assert launched == WALKED[dim]


def compare_outputs(inputs):
    """The error rule without gradients."""
    with torch.no_grad():
        truth = attend("reference")(**{name: t.double() for name, t in inputs.items()})
        plain, got = (attend(backend)(**inputs) for backend in ("reference", "triton"))
    allowed = 2 * (plain - truth).abs().max() + 4 * torch.finfo(got.dtype).eps * truth.abs().max()
    assert (got - truth).abs().max() <= allowed


def steps_of_forward(emulator, inputs, window=(7, 7)):
    emulator.reports.clear()
    with torch.no_grad():
        attend("triton", window)(**inputs)
    return next(report.steps for name, report in emulator.reports if name == "ring_forward")


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dim", [8, 16])
def test_tiles_far_from_zero_are_done_again(emulator, dim, sign):
    """In bfloat16 exponentials are of the logits as they are. Where they overflow, or all vanish, a tile is done again, alone."""
    plain = draw(torch.bfloat16, size=(7, 21), dim=dim)
    plain["k"][..., 0] = 6 + plain["k"][..., 0] / 4

    def far(*queries):
        q = plain["q"].clone()
        for y, x, head in queries:
            q[0, y, x, head, 0] = sign * (90 if head else 70)
        return plain | {"q": q}

    once = steps_of_forward(emulator, plain)
    more = steps_of_forward(emulator, far((0, 0, 0))) - once
    assert more > 0
    # Anywhere, and whatever else of the tile is far: the two heads of eight are one program's, those of sixteen two programs'.
    for y, x in ((6, 20), (6, 0), (3, 12)):
        assert steps_of_forward(emulator, far((y, x, 1))) - once == more
    assert steps_of_forward(emulator, far((0, 0, 0), (1, 7, 0), (0, 3, 1))) - once == more * dim // 8
    # Two tiles of one strip in one go; of two strips, each program its own.
    assert more < steps_of_forward(emulator, far((0, 0, 0), (4, 0, 0))) - once < 2 * more
    assert steps_of_forward(emulator, far((0, 0, 0), (0, 8, 0))) - once == 2 * more
    compare(far((0, 0, 0), (1, 7, 1), (3, 12, 1), (6, 20, 0)))


@pytest.mark.parametrize("window", [(1, 3), (2, 7), (7, 7)], ids=str)
def test_queries_beyond_the_image_are_not_far(emulator, window):
    inside, cut = (draw(torch.bfloat16, size=size, dim=8, window=window) for size in ((8, 24), (7, 17)))
    assert steps_of_forward(emulator, inside, window) == steps_of_forward(emulator, cut, window)


def test_more_tiles_than_bits(emulator):
    """A strip of 34 tiles: the last two share their bits with the first."""
    inputs = draw(torch.bfloat16, size=(68, 17), dim=8)
    once = steps_of_forward(emulator, inputs)
    inputs["q"][0, 67, 16, 1] *= 100
    assert steps_of_forward(emulator, inputs) > once
    compare_outputs(inputs)


@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_values_of_any_size(emulator, size):
    """With sums of exponentials about as large, or as small, as they may be."""
    inputs = draw(torch.bfloat16, size=(3, 20), dim=8)
    once = steps_of_forward(emulator, inputs)
    inputs["k"][..., 0] = 6
    inputs["q"][..., 0] = 14 if size > 1 else -16
    inputs["rel_row"][:, 0] = 0
    inputs["v"] = (inputs["v"].double() * size).bfloat16()
    compare_outputs(inputs)
    assert steps_of_forward(emulator, inputs) == once


def test_heads_apart(launched):
    """q, k and v of a head side by side, as some layers keep them."""
    compare(draw(torch.float16, size=(4, 17)), packed=4)
    assert launched == IN_TURNS


def test_slices_of_a_product(launched):
    """As the layers call it: gradients of q, k and v go into one tensor."""

    def run(backend):
        def project(pixels, weight, bias, rel_row, rel_col):
            tables = {"rel_row": rel_row, "rel_col": rel_col}
            return local_attention_projected(
                pixels, weight, bias, **tables, num_heads=2, window=7, scale=0.25, backend=backend
            )

        return project

    sizes = {"pixels": (2, 4, 18, 12), "weight": (96, 12), "bias": (96,), "rel_row": (7, 8), "rel_col": (7, 8)}
    inputs = {name: (torch.randn(size) * (0.3 if name == "weight" else 1)).bfloat16() for name, size in sizes.items()}
    assert_by_error_rule(run("triton"), run("reference"), inputs)
    assert launched == IN_TURNS


@pytest.mark.parametrize("dim", [8, 16])
def test_calls_again_give_the_same_bits(emulator, dim):
    """The second is recorded, the third replayed: without Triton, from addresses alone."""
    inputs = draw(torch.bfloat16, size=(5, 20), dim=dim, batch=2)
    upstream = torch.randn(2, 5, 20, 2, dim)
    with poisoned_memory():
        first, *others = (output_and_gradients(attend("triton"), inputs, upstream) for _ in range(3))
    for other in others:
        for name, want in first.items():
            assert torch.equal(other[name], want), name
    assert emulator.launched == WALKED[dim] * 3
    assert emulator.replayed == WALKED[dim]


# The emulator itself, on a few instructions.


def emulate(body, out=None, given=(), grid=(1,), threads=32, shared=0):
    """What a kernel of these instructions finds; %rd1 is where `out` lies, the next registers where those `given` do."""
    tensors = [torch.zeros(threads, dtype=torch.int32) if out is None else out, *given]
    parameters = ", ".join(f".param .u64 .ptr .global .align 16 p{i}" for i in range(len(tensors)))
    loads = "".join(f"ld.param.b64 %rd{i + 1}, [p{i}];\n" for i in range(len(tensors)))
    text = f".visible .entry kernel({parameters})\n.reqntid {threads}\n{{\n{loads}{body}\nret;\n}}"
    pointers = [t.data_ptr() for t in tensors]
    return ptx.run(ptx.parse(text), grid, pointers, [(t.data_ptr(), reach(t)) for t in tensors], shared)


# %r1: the thread; %r2: where its four bytes of shared memory lie; %r3: where a neighbour's; %rd41: its own in global memory,
# %rd40 behind the first.
PLACES = """
mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, 2;
xor.b32 %r3, %r2, 4;
mul.wide.u32 %rd40, %r1, 4;
add.s64 %rd41, %rd1, %rd40;
"""


def test_an_unknown_instruction_is_refused_by_name():
    with pytest.raises(ptx.UnknownInstructionError, match=r"tanh\.approx\.f32"):
        emulate("tanh.approx.f32 %r1, %r2;")
    with pytest.raises(ptx.UnknownInstructionError, match=r"add\.sat\.s32"):
        emulate("add.sat.s32 %r1, %r2, %r3;")


@pytest.mark.parametrize("barrier", ["", "bar.sync 0;"])
def test_a_missing_barrier_is_reported(barrier):
    out = torch.zeros(32, dtype=torch.int32)
    moves = f"st.shared.b32 [%r2], %r1; {barrier} ld.shared.b32 %r4, [%r3]; st.global.b32 [%rd41], %r4;"
    report = emulate(PLACES + moves, out, shared=128)
    assert out.tolist() == [i ^ 1 for i in range(32)]
    assert report.missing_barriers == ([] if barrier else ["ld.shared.b32 %r4, [%r3]"])
    # Nor may anyone write what others read since the last one.
    report = emulate(PLACES + f"ld.shared.b32 %r4, [%r3]; {barrier} st.shared.b32 [%r2], %r1;", shared=128)
    assert report.missing_barriers == ([] if barrier else ["st.shared.b32 [%r2], %r1"])


@pytest.mark.parametrize(
    ("between", "good"),
    [
        ("cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;", True),
        ("cp.async.commit_group; cp.async.wait_group 0;", False),
        ("cp.async.commit_group; bar.sync 0;", False),
        ("cp.async.wait_group 0; bar.sync 0; cp.async.commit_group;", False),
    ],
)
def test_copies_are_in_flight_until_they_are_waited_for(between, good):
    source, out = torch.arange(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    start = (
        PLACES + "shl.b32 %r5, %r1, 4; mul.wide.u32 %rd3, %r1, 16; add.s64 %rd4, %rd2, %rd3; add.s64 %rd5, %rd1, %rd3;"
    )
    copy = "cp.async.cg.shared.global [%r5], [%rd4], 0x10;"
    back = "ld.shared.v4.b32 {%r6, %r7, %r8, %r9}, [%r5]; st.global.v4.b32 [%rd5], {%r6, %r7, %r8, %r9};"
    report = emulate(start + copy + between + back, out, [source], shared=512)
    assert bool(report.missing_barriers) != good
    assert torch.equal(out, source) or not good
    # Nor may another copy go there meanwhile.
    assert emulate(start + copy + copy, out, [source], shared=512).missing_barriers


@pytest.mark.parametrize(("stride", "size", "conflict"), [(4, 1, False), (8, 1, True), (16, 4, False), (32, 4, True)])
def test_bank_conflicts_are_reported(stride, size, conflict):
    registers = "{%r6, %r7, %r8, %r9}" if size == 4 else "%r6"
    load = f"ld.shared.{'v4.' if size == 4 else ''}b32 {registers}, [%r5];"
    report = emulate(PLACES + f"mul.lo.s32 %r5, %r1, {stride};" + load, shared=1024)
    assert bool(report.bank_conflicts) == conflict


def test_all_threads_may_read_the_same_bytes():
    assert not emulate(PLACES + "mul.lo.s32 %r5, %r1, 0; ld.shared.b32 %r6, [%r5];", shared=16).bank_conflicts


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("ld.global.b32 %r4, [%rd41+4];", "outside the given memory"),
        ("st.global.b32 [%rd41+-4], %r1;", "outside the given memory"),
        ("ld.global.b32 %r4, [%rd41+2];", "misaligned"),
        ("ld.shared.b32 %r4, [%r2+4];", "outside shared memory"),
        ("add.s32 %r4, %r1, %r77;", "nobody wrote '%r77'"),
        ("setp.lt.u32 %p1, %r1, 5; @%p1 bra $L1; $L1:", "threads of one program part"),
    ],
)
def test_what_a_gpu_would_stop_at(body, said):
    with pytest.raises(ptx.FaultError, match=said):
        emulate(PLACES + body.replace("$L1:", "\n$L1:\n"), shared=128)


def test_programs_that_part_go_on_alone():
    """Loops of different lengths: program n counts to n + 1."""
    out = torch.zeros(4, dtype=torch.int32)
    body = """
    mov.u32 %r1, %ctaid.x;
    mov.b32 %r2, 0;
    $again:
    add.s32 %r2, %r2, 1;
    setp.le.u32 %p1, %r2, %r1;
    @%p1 bra $again;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.b32 [%rd3], %r2;
    """
    emulate(body, out, grid=(4,))
    assert out.tolist() == [1, 2, 3, 4]


def lanewise(name, *sources):
    """What an instruction makes of 32 numbers."""
    out = torch.zeros(32, dtype=torch.int32)
    loads, places = "", []
    for i, _ in enumerate(sources):
        loads += f"add.s64 %rd42, %rd{2 + i}, %rd40; ld.global.b32 %r{20 + i}, [%rd42];"
        places.append(f"%r{20 + i}")
    emulate(PLACES + loads + f"{name} %r9, {', '.join(places)}; st.global.b32 [%rd41], %r9;", out, sources)
    return out


def test_sums_of_products_are_rounded_once():
    x, y, z = torch.randn(3, 32) * torch.logspace(-3, 3, 32)
    # A product just above the middle between two numbers, by less than float64 can add to the third.
    x[0], y[0], z[0] = 1 + 2**-12, 1 + 2**-12, 2.0**-60
    x[1], y[1], z[1] = 1 + 2**-23, 2.0**-24, 1.0
    got = lanewise("fma.rn.f32", x, y, z).view(torch.float32)
    for i in range(32):
        exact = Fraction(float(x[i])) * Fraction(float(y[i])) + Fraction(float(z[i]))
        neighbours = (torch.nextafter(got[i], torch.tensor(way)) for way in (math.inf, -math.inf))
        error, *others = (abs(Fraction(float(n)) - exact) for n in (got[i], *neighbours))
        assert error < min(others), i


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_conversions_are_torchs(name, dtype):
    x, y = torch.randn(2, 32) * torch.logspace(-9, 6, 32)
    x[:3] = torch.tensor([math.inf, 1 + 2**-8, 1 + 3 * 2**-8])
    got = lanewise(f"cvt.rn.{name}x2.f32", x, y).view(dtype).view(32, 2)
    assert torch.equal(got[:, 1], x.to(dtype))
    assert torch.equal(got[:, 0], y.to(dtype))


def test_approximations_flush_subnormals():
    x = torch.tensor([0.0, 1.0, -126.0, -127.0, 0.5, -math.inf, 2.0**-130, 3.0]).repeat(4)
    want = torch.tensor([1.0, 2.0, 2.0**-126, 0.0, 2**0.5, 0.0, 1.0, 8.0]).repeat(4)
    assert torch.equal(lanewise("ex2.approx.ftz.f32", x).view(torch.float32), want)
    assert lanewise("lg2.approx.ftz.f32", x).view(torch.float32)[[0, 1, 6]].tolist() == [-math.inf, 0.0, -math.inf]
    assert lanewise("rcp.approx.ftz.f32", x).view(torch.float32)[[1, 4, 6]].tolist() == [1.0, 2.0, math.inf]


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_products_spread_over_a_warp(name, dtype):
    """By the places PTX gives: thread 4g + t has row g and columns 2t and 2t + 1 of every block of 8×8, and so on."""
    a, b, c = torch.randn(16, 16).to(dtype), torch.randn(16, 8).to(dtype), torch.randn(16, 8)
    lane = torch.arange(32)
    g, t = lane // 4, lane % 4
    pairs = []
    for i in range(4):
        rows, columns = g + 8 * (i % 2), 2 * t + 8 * (i // 2)
        pairs.append(torch.stack([a[rows, columns], a[rows, columns + 1]], -1))
    for i in range(2):
        rows = 2 * t + 8 * i
        pairs.append(torch.stack([b[rows, g], b[rows + 1, g]], -1))
    starts = [c[g + 8 * (i // 2), 2 * t + i % 2] for i in range(4)]
    given = [*(p.contiguous() for p in pairs), *starts]
    loads = "".join(f"add.s64 %rd42, %rd{2 + i}, %rd40; ld.global.b32 %r{30 + i}, [%rd42];" for i in range(len(given)))
    product = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {{%r1, %r2, %r3, %r4}}, {{%r30, %r31, %r32, %r33}}, "
        "{%r34, %r35}, {%r36, %r37, %r38, %r39};"
    )
    stores = "".join(f"st.global.b32 [%rd41+{128 * i}], %r{1 + i};" for i in range(4))
    out = torch.zeros(4, 32)
    emulate(PLACES + loads + product + stores, out, given)
    want = (a.double() @ b.double() + c).float()
    assert torch.equal(out, torch.stack([want[g + 8 * (i // 2), 2 * t + i % 2] for i in range(4)]))


def test_matrices_of_shared_memory():
    """Rows of 16 bytes, two numbers of one a thread; turned on the way or in registers, it is the same."""
    matrix = torch.arange(64, dtype=torch.int16).view(8, 8)
    # The first eight threads bring a row each, and say where it lies.
    start = (
        PLACES
        + """
    and.b32 %r5, %r1, 7;
    shl.b32 %r6, %r5, 4;
    mul.wide.u32 %rd3, %r5, 16;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd4];
    st.shared.v4.b32 [%r6], {%r10, %r11, %r12, %r13};
    bar.sync 0;
    """
    )
    load = "ldmatrix.sync.aligned.m8n8.x1{}.shared.b16 {{%r7}}, [%r6];"
    plain, turned = load.format(""), load.format(".trans")
    turn = "movmatrix.sync.aligned.m8n8.trans.b16 %r7, %r7;"
    store = "bar.sync 0; stmatrix.sync.aligned.m8n8.x1{}.shared.b16 [%r6], {{%r7}}; bar.sync 0;"
    cases = {
        plain: matrix,
        turned: matrix.T,
        plain + turn: matrix.T,
        turned + store.format("") + plain: matrix.T,
        turned + store.format(".trans") + plain: matrix,
    }
    for moves, want in cases.items():
        out = torch.zeros(32, dtype=torch.int32)
        report = emulate(start + moves + "st.global.b32 [%rd41], %r7;", out, [matrix], shared=128)
        assert torch.equal(out.view(torch.int16).view(8, 8), want), moves
        assert not report.missing_barriers
