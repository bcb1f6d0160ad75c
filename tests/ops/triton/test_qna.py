"""QnA's Triton kernels, interpreted on the CPU: output and every gradient by the error rule, on tiny shapes."""

import re

import pytest
import torch

from nearsight.ops import backends, qna
from tests.ops.triton.interpreter import interpreted
from tests.support.accuracy import assert_by_error_rule

FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16


def make(
    dtype=FLOAT,
    size=(3, 5),
    batch=1,
    queries=2,
    heads=2,
    dim=8,
    window=(3, 3),
    mask=None,
    tables="bias scale",
    spread=1.0,
):
    """Inputs of one call; `mask` is the share of pixels that may be attended."""
    generator = torch.Generator().manual_seed(sum(size) + heads)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "scores": draw(batch, *size, queries, heads) * spread,
        "values": draw(batch, *size, heads, dim),
        "position_bias": draw(*window, queries, heads) if "bias" in tables else None,
        "tap_scale": draw(*window, queries, heads) if "scale" in tables else None,
        "key_mask": torch.rand(batch, *size, generator=generator) < mask if mask is not None else None,
    }


def compare(inputs, window=(3, 3), **options):
    def run(backend):
        return lambda **tensors: qna(**tensors, window=window, **options, backend=backend)

    assert_by_error_rule(run("triton"), run("reference"), inputs)


@interpreted
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, HALF])
def test_every_dtype(dtype):
    compare(make(dtype, mask=0.7))


@interpreted
@pytest.mark.parametrize("tables", ["", "bias", "scale"])
def test_without_tables(tables):
    compare(make(tables=tables, size=(2, 4)))


@interpreted
@pytest.mark.parametrize(
    ("window", "size"), [((1, 1), (2, 3)), ((5, 3), (4, 3)), ((2, 5), (3, 4)), ((4, 4), (2, 3)), ((7, 3), (3, 2))]
)
def test_windows(window, size):
    compare(make(window=window, size=size), window)


@interpreted
@pytest.mark.parametrize(
    ("stride", "window", "size"),
    [((2, 2), (3, 3), (5, 6)), ((1, 2), (3, 5), (3, 5)), ((2, 1), (5, 3), (6, 3)), ((3, 2), (2, 4), (5, 4))],
)
def test_strides(stride, window, size):
    compare(make(window=window, size=size, mask=0.8), window, stride=stride)


@interpreted
@pytest.mark.parametrize(
    ("queries", "window", "stride", "combine", "dtype", "heads", "tables", "mask"),
    [
        (9, (11, 2), (1, 1), "sum", BFLOAT, 4, "bias scale", None),
        (9, (7, 2), (1, 1), "stack", FLOAT, 2, "bias scale", 0.7),
        (9, (11, 2), (2, 2), "sum", BFLOAT, 3, "bias scale", 0.7),
        (9, (5, 3), (2, 1), "sum", FLOAT, 2, "scale", None),
        (9, (10, 1), (3, 1), "sum", HALF, 2, "bias", None),
        (5, (11, 1), (1, 1), "sum", FLOAT, 2, "bias scale", None),
        (5, (11, 2), (2, 1), "stack", BFLOAT, 2, "", 0.7),
        (5, (9, 3), (1, 2), "sum", BFLOAT, 2, "bias", None),
        (8, (7, 3), (1, 1), "sum", BFLOAT, 8, "bias scale", None),  # sums dealt out to the lanes
        (2, (11, 3), (1, 1), "sum", BFLOAT, 8, "bias scale", None),  # and of two windows in a thread
        (2, (11, 2), (2, 2), "sum", FLOAT, 2, "bias scale", 0.7),
    ],
)
@pytest.mark.parametrize("batch", [1, 0])
def test_columns_of_taps_in_bands(batch, queries, window, stride, combine, dtype, heads, tables, mask):
    """So many taps and queries that a part of a column is written out at a time, with and without taps left over."""
    from nearsight.ops.qna.geometry import band_of

    assert band_of(window[0], queries, stride[0]) < window[0]
    inputs = make(dtype, (5, 4), batch, queries, heads, window=window, tables=tables, mask=mask)
    compare(inputs, window, stride=stride, combine=combine)


@interpreted
@pytest.mark.parametrize("combine", ["sum", "stack"])
def test_bands_of_any_height(combine):
    """A window's taps one by one, and in a band with two left over."""
    from nearsight.ops.qna import triton_impl

    inputs = make(BFLOAT, (7, 2), queries=3, window=(6, 2), mask=0.8 if combine == "stack" else None)
    band_of = triton_impl.band_of
    try:
        for band in (1, 4):
            triton_impl.band_of = lambda *_, band=band: band
            compare(inputs, (6, 2), combine=combine)
    finally:
        triton_impl.band_of = band_of


def test_bands_keep_the_code_small():
    """Whatever the window, and no shape that was timed whole is cut."""
    from nearsight.ops.qna.geometry import band_of

    for taps in range(1, 16):
        for queries in range(1, 17):
            for stride in (1, 2):
                band = band_of(taps, queries, stride)
                assert band == taps or band % stride == 0
                assert (band + taps % band) * queries <= 28 or queries > 9
    assert all(
        band_of(taps, queries, stride) == taps for taps in (1, 2, 3, 5, 7) for queries in (1, 2) for stride in (1, 2)
    )
    assert band_of(3, 4, 1) == 3


@interpreted
@pytest.mark.parametrize(("combine", "queries"), [("sum", 1), ("sum", 9), ("stack", 1), ("stack", 4)])
def test_queries(combine, queries):
    compare(make(queries=queries, size=(2, 4)), combine=combine)


@interpreted
def test_stack_with_stride():
    compare(make(queries=2, size=(3, 4), mask=0.8), combine="stack", stride=2)


@interpreted
@pytest.mark.parametrize(("heads", "dim"), [(3, 5), (1, 32), (20, 8), (11, 32), (5, 1), (70, 2)])
def test_heads_and_head_dims(heads, dim):
    """Head counts and dims that fill no tile, more heads than a program takes, and more than the tables' usual gap holds."""
    compare(make(BFLOAT, heads=heads, dim=dim, size=(2, 3)))


@interpreted
@pytest.mark.parametrize(
    ("heads", "size", "window"), [(4, (2, 9), (3, 5)), (3, (2, 11), (3, 5)), (3, (2, 11), (3, 3)), (8, (9, 2), (3, 5))]
)
def test_sums_of_the_tables(heads, size, window):
    """Lanes of one head a fixed number apart or not, several steps, a last block with fewer lanes than heads."""
    compare(make(BFLOAT, heads=heads, size=size, window=window), window)


@interpreted
@pytest.mark.parametrize("window", [(3, 3), (3, 5)])
@pytest.mark.parametrize("steps", [3, 4, 6])
def test_tiles_are_dealt_out_in_chunks(steps, window):
    """Of 9 tiles a program takes so many: one by one, all at once but the last, or by twos, the last two cut short."""
    from nearsight.ops.qna import triton_impl

    triton_impl.steps_of = lambda *_: steps
    compare(make(BFLOAT, size=(5, 4), batch=3, window=window), window)


@interpreted
def test_more_heads_than_a_program_takes_with_a_stride():
    compare(make(BFLOAT, heads=11, dim=32, size=(2, 3), window=(1, 3)), (1, 3), stride=(1, 2))


@interpreted
@pytest.mark.parametrize("size", [(1, 1), (1, 7), (6, 1)])
def test_slender_maps(size):
    compare(make(size=size))


@interpreted
def test_windows_without_any_key():
    inputs = make(size=(4, 5), mask=0.5)
    inputs["key_mask"][:, :3, :4] = False
    compare(inputs)
    inputs["key_mask"][:] = False
    leaves = {n: t.requires_grad_() for n, t in inputs.items() if n != "key_mask"}
    out = qna(**leaves, key_mask=inputs["key_mask"], window=3, backend="triton")
    assert (out == 0).all()
    for gradient in torch.autograd.grad(out.sum(), list(leaves.values())):
        assert (gradient == 0).all()


@interpreted
def test_scores_beyond_the_exponential_range():
    compare(make(HALF, spread=60.0))
    inputs = make()
    inputs["scores"][0, 1, 2] = 200.0
    compare(inputs)


@interpreted
@pytest.mark.parametrize(("window", "queries"), [((3, 3), 2), ((5, 3), 2), ((5, 2), 9)])
@pytest.mark.parametrize(
    ("what", "factor"), [("scores", 40.0), ("scores", 1e4), ("position_bias", 25.0), ("tap_scale", 1e30)]
)
def test_what_no_common_factor_can_hold(what, factor, window, queries):
    """Windows of one thread so far apart, or tables so steep, that each is computed from its own maximum; beside others."""
    inputs = make(BFLOAT, size=(5, 3), window=window, queries=queries)
    inputs[what][0, :2] *= factor
    inputs["scores"][0, 3] += 35.0
    compare(inputs, window)


@interpreted
@pytest.mark.parametrize(
    ("window", "size", "stride", "mask", "spread"),
    [
        ((3, 3), (5, 4), 1, None, 60.0),
        ((3, 3), (5, 4), 1, None, 200.0),
        ((3, 3), (5, 6), 2, 0.7, 60.0),
        ((7, 7), (5, 4), 2, None, 60.0),
    ],
)
def test_steep_softmaxes_in_float32(window, size, stride, mask, spread):
    """Probabilities are made again in the backward, from a log-sum-exp of some hundreds: one float32 is too coarse for that."""
    compare(make(window=window, size=size, mask=mask, spread=spread), window, stride=stride)


@interpreted
@pytest.mark.parametrize(("dtype", "parts"), [(FLOAT, 2), (BFLOAT, 1)])
def test_what_is_kept_is_a_few_numbers_per_window_head_and_query(dtype, parts):
    from nearsight.ops.qna import triton_impl

    inputs = make(dtype, size=(4, 5), heads=3, tables="")
    _, kept, tables = triton_impl._forward(inputs["scores"], inputs["values"], None, None, None, [3, 3], [2, 1], False)
    assert kept.shape == (1, 2, 5, 3, parts * 2)
    assert tables.numel() == 0
    assert torch.isfinite(kept).all()


@interpreted
def test_half_values_with_float_scores():
    """What a layer passes under autocast."""
    inputs = make(BFLOAT)
    inputs = {n: t.float() if t is not None and n != "values" else t for n, t in inputs.items()}
    inputs = {"values": inputs.pop("values"), **inputs}
    compare(inputs)


@interpreted
def test_views_of_one_projection_and_an_expanded_upstream():
    inputs = make(dim=8, heads=2, batch=2)
    packed = torch.cat([inputs["values"].flatten(3), inputs["scores"].flatten(3)], -1)
    values, scores = packed[..., :16].unflatten(-1, (2, 8)), packed[..., 16:].unflatten(-1, (2, 2))
    tables = {"position_bias": inputs["position_bias"], "tap_scale": inputs["tap_scale"]}
    got = qna(scores, values, **tables, window=3, backend="triton")
    assert torch.equal(got, qna(inputs["scores"], inputs["values"], **tables, window=3, backend="triton"))
    channels_first = values.flatten(3).permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1).unflatten(-1, (2, 8))
    assert torch.equal(got, qna(scores, channels_first, **tables, window=3, backend="triton"))

    gradients = []
    for upstream in (torch.ones(()).expand(got.shape), torch.ones(got.shape)):
        leaf = values.detach().requires_grad_()
        out = qna(scores, leaf, **tables, window=3, backend="triton")
        gradients.append(torch.autograd.grad(out, leaf, upstream)[0])
    assert torch.equal(*gradients)


@interpreted
def test_batch_of_none():
    compare(make(batch=0))


@interpreted
def test_two_runs_agree_to_the_bit():
    inputs = make(BFLOAT, size=(5, 6))
    results = []
    for _ in range(2):
        leaves = {n: t.detach().requires_grad_() for n, t in inputs.items() if t is not None}
        out = qna(**leaves, window=3, backend="triton")
        results.append([out, *torch.autograd.grad(out.float().square().sum(), list(leaves.values()))])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@interpreted
def test_the_registered_op_is_sound():
    """Schema, fake kernel, autograd registration and tracing, as torch checks them; then one graph through a compiler."""
    from nearsight.ops.qna import triton_impl

    inputs = {n: t.requires_grad_() if t is not None else t for n, t in make(size=(2, 3)).items()}
    scores, values, *tables, mask = inputs.values()
    arguments = (scores, values, *[table.detach().flatten(0, 1).requires_grad_() for table in tables], mask)
    arguments = (*arguments, [3, 3], [1, 1], False)
    torch.library.opcheck(triton_impl._forward, arguments)
    compiled = torch.compile(lambda **t: qna(**t, window=3, backend="triton"), backend="aot_eager", fullgraph=True)
    out, want = compiled(**inputs), qna(**inputs, window=3, backend="triton")
    assert torch.equal(out, want)
    leaves = [t for t in inputs.values() if t is not None]
    for got, expected in zip(
        torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kernel", ["forward", "delta", "backward"])
def test_loops_carry_every_pointer(kernel, masked):
    """Triton's coalescing pass walks nearly the whole program for any other: a network's first step then takes minutes.

    Compiled for a GPU that need not be here; once masked and as in float32, so that every load is in it, once with exponentials
    per pixel. Nor may anything be read before the kernel has waited for the one before.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from nearsight.ops.qna import delta_kernels, gradient_kernels, kernels

    function = {"forward": kernels.forward, "delta": delta_kernels.delta, "backward": gradient_kernels.backward}[kernel]
    constants = {"ALIGN": 8, "HP": 64, "L": 2, "D": 8, "DP": 8, "KH": 3, "KW": 3, "SY": 1, "SX": 1, "N": 32, "ROWS": 2}
    constants |= {"HB": 0, "BAND": 3, "UNROLL": True, "BIASED": True, "SCALED": True, "MASKED": masked}
    constants |= {"STACK": False, "SHARED": not masked, "SHARE": 0, "PARTS": 1 + masked, "LONE": False}
    constants |= {"FETCH": not masked, "EARLY": True}
    if not masked:
        # As of larger windows, two taps of a column at a time and the one left over, their sums dealt out.
        constants |= {"UNROLL": False, "BAND": 2, "HB": 8, "SHARE": 1}
    halves = ("scores", "values", "out", "grad", "dscores", "dvalues")
    signature = {}
    for name in function.arg_names:
        pointer = "*bf16" if name in halves else "*u8" if name == "key_mask" else "*fp32"
        number = name in ("H", "W", "OH", "OW", "HEADS", "tiles", "chunk", "ahead") or name[2:] in ("_b", "_y", "_x")
        signature[name] = "constexpr" if name in constants else "i32" if number else pointer
    taken = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(fn=function, signature=signature, constexprs=taken)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1, "enable_fp_fusion": True}
    )
    program, machine = compiled.asm["ttir"], compiled.asm["ptx"]
    touched = [machine.find(each) for each in ("ld.global", "st.global", "prefetch.global")]
    assert machine.index("griddepcontrol.wait") < min(place for place in touched if place >= 0), (
        "a load that does not wait"
    )
    carried = re.findall(r"(%[\w.#-]+) = ", " ".join(re.findall(r"iter_args\((.*?)\) ->", program)))
    pointers = re.findall(r"tt\.(?:load|store) (%[\w.#-]+)", program)
    assert len(pointers) > 30
    assert set(pointers) <= set(carried)


@interpreted
@pytest.mark.parametrize(
    ("window", "stride", "heads"), [((3, 3), 1, 3), ((3, 3), 2, 2), ((7, 3), 1, 4), ((5, 3), 1, 33), ((5, 5), 2, 3)]
)
def test_programs_of_several_tiles(window, stride, heads):
    """As many as a small GPU runs at a time share the tiles of all images; the last ones have fewer."""
    from nearsight.ops.qna import triton_impl

    taken, steps_of = [], triton_impl.steps_of
    triton_impl.steps_of = lambda *_: taken.append(_[2]) or 3
    try:
        compare(make(BFLOAT, size=(5, 3), batch=3, heads=heads, window=window), window, stride=stride)
    finally:
        triton_impl.steps_of = steps_of
    assert all(tiles % 3 or tiles > 3 for tiles in taken)
    assert taken


@interpreted
@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (700, 17), (2561, 5)])
def test_the_tables_shares_are_added_up(rows, columns):
    """In one launch and, from 2561 rows on, in two."""
    from nearsight.ops.sums import sum_rows

    shares = torch.randn(rows, 2, columns)
    want = shares.double().sum(0)
    assert sum_rows(shares).shape == want.shape
    assert (sum_rows(shares) - want).abs().max() < 1e-6 * shares.abs().sum(0).max()


@pytest.mark.parametrize("multiprocessors", [20, 108, 132])
@pytest.mark.parametrize("registers", [128, 160])
@pytest.mark.parametrize(
    ("blocks", "tiles"), [(14, 3584), (14, 1792), (14, 896), (13, 512), (1, 7), (5000, 64), (3, 10**6)]
)
def test_all_of_a_gpu_is_busy_until_the_end(multiprocessors, registers, blocks, tiles):
    from nearsight.ops.qna.geometry import MOST_PROGRAMS, Geometry, steps_of

    steps = steps_of(Geometry(32, 2, 0, True, registers), blocks, tiles, multiprocessors)
    programs = -(-tiles // steps)
    assert 1 <= programs <= MOST_PROGRAMS
    at_once = multiprocessors * (65536 // (32 * registers))
    if tiles * blocks < at_once:
        assert steps == 1
    else:
        rounds = -(-programs * blocks // at_once)
        assert tiles * blocks / (rounds * steps * at_once) > 0.75


@interpreted
def test_export_takes_the_torch_path():
    class Model(torch.nn.Module):
        def forward(self, scores, values):
            return qna(scores, values, window=3)

    inputs = make()
    program = torch.export.export(Model(), (inputs["scores"], inputs["values"]))
    assert "nearsight" not in str(program.graph)


@interpreted
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"window": (3, 17)}, "needs a window of at most 15 taps per axis, got 3×17"),
        ({"queries": 17}, "needs at most 16 queries, got 17"),
        ({"dim": 257}, "needs a head dim of 1 to 256, got 257"),
        ({"dtype": torch.float64}, "needs float32, bfloat16 or float16, got float64"),
        ({"batch": 65536, "size": (1, 2)}, "needs at most 65535 images and rows, got 65536 and 1"),
    ],
)
def test_refusals(change, sentence):
    window = change.get("window", (3, 3))
    inputs = make(**change)
    report = backends("qna", **inputs, window=window)[0]
    assert report == ("triton", False, sentence)


@interpreted
@pytest.mark.parametrize(
    ("dtype", "sentence"), [(FLOAT, "needs fewer than 2³⁰ scores per image in float32, got more"), (BFLOAT, None)]
)
def test_refuses_a_map_whose_kept_numbers_have_no_place(dtype, sentence):
    pixels = torch.zeros((), dtype=dtype).expand(1, 2**15, 2**14, 2, 1)
    report = backends("qna", pixels, pixels[..., :1, :], window=3)[0]
    assert report == ("triton", sentence is None, sentence)
