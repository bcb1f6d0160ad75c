"""Local attention's Triton kernels on a GPU: the error rule at real sizes, determinism, memory, graphs, compilation."""

import pytest
import torch

from nearsight.layers import LocalAttention2d
from nearsight.ops import launching, local_attention
from nearsight.ops.launching import without_replays
from nearsight.ops.local import launches
from tests.ops.triton.test_local import BFLOAT, FLOAT, HALF, make
from tests.support.accuracy import assert_by_error_rule
from tests.support.compiled import watch_compilations
from tests.support.draws import picker
from tests.support.graphs import assert_captured

pytestmark = pytest.mark.gpu

# Sizes, heads, head dim, window: rectangles that fill no tile, every head-dim class.
CASES = [
    ((19, 45), 8, 8, (7, 7)),
    ((28, 13), 4, 16, (7, 7)),
    ((14, 15), 3, 32, (5, 9)),
    ((7, 9), 2, 64, (7, 7)),
    ((8, 7), 3, 64, (7, 7)),
    ((21, 11), 2, 32, (4, 7)),
    ((9, 21), 1, 128, (3, 3)),
    ((33, 17), 5, 6, (4, 2)),
    ((31, 11), 2, 16, (13, 3)),
    ((37, 35), 2, 16, (31, 31)),
    ((26, 18), 4, 8, (9, 11)),
    ((18, 29), 2, 16, (11, 11)),
    ((25, 19), 2, 32, (11, 10)),
    ((23, 18), 2, 64, (13, 12)),
    ((13, 21), 1, 128, (7, 7)),
    ((14, 22), 1, 128, (11, 13)),
]


def on_gpu(inputs):
    return {n: None if t is None else t.cuda() for n, t in inputs.items()}


def compare(inputs, window, **options):
    def run(backend):
        return lambda **tensors: local_attention(**tensors, window=window, **options, backend=backend)

    assert_by_error_rule(run("triton"), run("reference"), on_gpu(inputs))


def random_call(seed):
    """Inputs and window of a call whose sizes nobody chose."""
    pick = picker(seed)
    size, window = (pick(1, 40), pick(1, 40)), (pick(1, 11), pick(1, 11))
    change = {"tables": ("shared", "heads", "column")[pick(0, 2)], "mask": (None, 0.6)[seed % 2]}
    return make((FLOAT, BFLOAT, HALF)[seed % 3], size, 2, pick(1, 6), 2 * pick(2, 20), window, **change), window


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, HALF])
@pytest.mark.parametrize(("size", "heads", "dim", "window"), CASES)
def test_error_rule(dtype, size, heads, dim, window):
    compare(make(dtype, size, 2, heads, dim, window), window)


@pytest.mark.parametrize("seed", range(9))
def test_random_rectangles(seed):
    compare(*random_call(seed))


def launched(monkeypatch):
    """The names of the kernels launched from now on; nothing is replayed unseen if the test says so."""
    names: list[str] = []
    launch = launching.launch

    def remember(kernel, *arguments):
        names.append(kernel.fn.__name__)
        launch(kernel, *arguments)

    monkeypatch.setattr(launching, "launch", remember)
    return names


def output_and_gradients(inputs, window, **options):
    """The output and every gradient."""
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items() if t is not None and t.is_floating_point()}
    out = local_attention(**{**inputs, **leaves}, window=window, **options, backend="triton")
    weights = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad(out, [*leaves.values()], weights)]


@pytest.fixture
def hopper():
    """A GPU whose strips keep their halo in shared memory."""
    if torch.version.hip is not None or torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs an NVIDIA GPU of compute capability 9.0 or later")


# Rectangles that fill no tile, maps narrower or lower than the window, windows of every height, tall maps of one image in splits;
# first, strips without splits, as large batches have them, of 2880 tables and of few.
RINGS = [
    (60, (13, 45), 8, 8, (7, 7), "shared"),
    (3, (14, 28), 8, 16, (7, 7), "heads"),
    (2, (19, 45), 8, 8, (7, 7), "shared"),
    (2, (57, 33), 2, 16, (7, 7), "heads"),
    (3, (9, 3), 4, 8, (7, 7), "heads"),
    (2, (1, 40), 2, 16, (7, 7), "shared"),
    (2, (40, 1), 2, 8, (7, 7), "shared"),
    (1, (200, 20), 2, 8, (7, 7), "shared"),
    (1, (131, 17), 1, 16, (7, 5), "heads"),
    (1, (90, 7), 3, 16, (6, 6), "shared"),
    (2, (20, 23), 4, 8, (3, 3), "shared"),
    (2, (11, 30), 2, 16, (5, 5), "heads"),
    (2, (12, 19), 2, 8, (1, 7), "shared"),
    (2, (13, 18), 2, 16, (7, 1), "shared"),
    (2, (13, 21), 6, 8, (2, 4), "heads"),
    (2, (14, 25), 3, 16, (4, 2), "shared"),
]


@pytest.mark.parametrize("dtype", [BFLOAT, HALF])
@pytest.mark.parametrize(("batch", "size", "heads", "dim", "window", "tables"), RINGS)
def test_strips_with_a_ring(hopper, monkeypatch, dtype, batch, size, heads, dim, window, tables):
    names = launched(monkeypatch)
    with without_replays():
        compare(make(dtype, size, batch, heads, dim, window, tables=tables), window)
    assert {"ring_forward", "ring_backward"} <= set(names)
    assert not {"forward", "backward"} & set(names)


@pytest.mark.parametrize(("size", "dim"), [((56, 56), 8), ((28, 28), 16)])
@pytest.mark.parametrize("dtype", [BFLOAT, HALF])
def test_the_ring_and_the_kernels_without_agree(hopper, monkeypatch, dtype, size, dim):
    """At the sizes that were timed the ring is what runs; without it the results are those of Triton's kernels."""
    # So many images that no strip is cut into splits.
    inputs = on_gpu(make(dtype, size, 72, 8, dim, (7, 7)))
    names = launched(monkeypatch)
    with without_replays():
        by_ring = output_and_gradients(inputs, 7, scale=dim**-0.5)
        # Heads of 16 channels in two turns.
        expected = ["ring_forward", *["ring_backward"] * (dim // 8)]
        assert names[: len(expected)] == expected
        assert not {"forward", "backward"} & set(names)
        names.clear()
        monkeypatch.setattr(launches, "RING", False)
        without = output_and_gradients(inputs, 7, scale=dim**-0.5)
        assert {"forward", "backward"} <= set(names)
        assert not {"ring_forward", "ring_backward"} & set(names)
    for one, other in zip(by_ring, without, strict=True):
        torch.testing.assert_close(one, other, atol=0.02 * float(other.abs().max()), rtol=0)


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("dim", [8, 16])
def test_either_direction_with_the_other_without_a_ring(hopper, monkeypatch, dim, forward):
    """The log-sum-exp is the same number, the shares lie alike."""

    def run(**tensors):
        monkeypatch.setattr(launches, "RING", forward)
        out = local_attention(**tensors, window=7, backend="triton")
        monkeypatch.setattr(launches, "RING", not forward)
        return out

    def reference(**tensors):
        return local_attention(**tensors, window=7, backend="reference")

    with without_replays():
        assert_by_error_rule(run, reference, on_gpu(make(BFLOAT, (21, 35), 2, 4, dim, (7, 7))))


@pytest.mark.parametrize(("heads", "dim"), [(4, 8), (3, 16)])
def test_slices_of_one_projection_in_a_ring(hopper, monkeypatch, heads, dim):
    names = launched(monkeypatch)
    inputs = on_gpu(make(BFLOAT, (23, 27), 2, heads, dim, (7, 7), tables="heads"))
    packed = torch.stack([inputs["q"], inputs["k"], inputs["v"]], 3)

    def run(backend):
        def attend(packed, rel_row, rel_col):
            q, k, v = packed.unbind(3)
            return local_attention(q, k, v, window=7, rel_row=rel_row, rel_col=rel_col, backend=backend)

        return attend

    tensors = {"packed": packed, "rel_row": inputs["rel_row"], "rel_col": inputs["rel_col"]}
    with without_replays():
        assert_by_error_rule(run("triton"), run("reference"), tensors)
    assert {"ring_forward", "ring_backward"} <= set(names)


def slices(tensor, step, first=0):
    """The same numbers with `step` numbers a pixel, from place `first` on."""
    *pixels, heads, dim = tensor.shape
    whole = torch.zeros(*pixels, step, dtype=tensor.dtype, device=tensor.device)
    whole[..., first : first + heads * dim] = tensor.flatten(-2)
    return whole[..., first : first + heads * dim].unflatten(-1, (heads, dim))


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({"mask": 0.7}, {}),
        ({"content": False}, {}),
        ({"tables": "row"}, {}),
        ({"heads": 3}, {}),
        ({"dim": 32}, {}),
        ({"window": (7, 8)}, {}),
        ({"window": (8, 7)}, {}),
        ({"dtype": FLOAT}, {}),
        ({}, {"border": "zeros"}),
        ({}, {"dilation": (1, 2)}),
        ({"step": 40}, {}),
        ({"step": 48, "first": 4}, {}),
    ],
)
def test_what_no_ring_was_written_for(monkeypatch, change, options):
    given = {"dtype": BFLOAT, "size": (21, 37), "batch": 2, "heads": 4, "dim": 8, "window": (7, 7), **change}
    step, first = given.pop("step", None), given.pop("first", 0)
    names = launched(monkeypatch)

    def run(backend):
        def attend(**tensors):
            if step is not None:
                tensors["k"] = slices(tensors["k"], step, first)
            return local_attention(**tensors, window=given["window"], **options, backend=backend)

        return attend

    with without_replays():
        assert_by_error_rule(run("triton"), run("reference"), on_gpu(make(**given)))
    assert {"forward", "backward"} <= set(names)
    assert not {"ring_forward", "ring_backward"} & set(names)


@pytest.mark.parametrize(
    ("dtype", "window"), [(BFLOAT, (5, 7)), (FLOAT, (5, 7)), (HALF, (8, 11)), (FLOAT, (9, 12))], ids=str
)
@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"border": "zeros"}, {"mask": 0.7}),
        ({"dilation": (2, 3)}, {"tables": "heads"}),
        ({"scale": 0.3}, {"tables": "row"}),
        ({}, {"content": False, "mask": 0.5}),
        ({}, {"tables": "none", "mask": 0.0}),
    ],
)
def test_options(options, change, dtype, window):
    compare(make(dtype, (21, 18), 2, 4, 8, window, **change), window, **options)


@pytest.mark.parametrize(
    ("size", "dim", "window"), [((19, 23), 16, (9, 5)), ((6, 7), 32, (3, 5)), ((20, 30), 24, (3, 9))]
)
@pytest.mark.parametrize("layer", [False, True])
def test_the_gradient_is_compiled_with_the_output(monkeypatch, size, dim, window, layer):
    """Side by side, on the first call of a class (windows that are nobody else's); nothing is left to the backward."""
    compiled = watch_compilations(monkeypatch)
    if layer:
        net = LocalAttention2d(2 * dim, 2 * dim, kernel_size=window, num_heads=2).cuda()
        leaves = [*net.parameters()]
        with torch.autocast("cuda", torch.bfloat16):
            out = net(torch.randn(2, 2 * dim, *size, device="cuda").to(memory_format=torch.channels_last))
    else:
        inputs = on_gpu(make(BFLOAT, size, 2, 2, dim, window))
        leaves = [t.requires_grad_() for t in inputs.values() if t is not None and t.is_floating_point()]
        out = local_attention(**inputs, window=window, backend="triton")
    before = len(compiled)
    assert {"forward", "backward"} <= set(compiled) or layer  # the two forms share kernels
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert len(compiled) == before, compiled[before:]


def test_twice_gives_the_same_bits():
    inputs = on_gpu(make(BFLOAT, (37, 29), 4, 8, 8, (7, 7)))
    leaves = [t.requires_grad_() for t in inputs.values() if t is not None]

    def gradients():
        out = local_attention(**inputs, window=7, backend="triton")
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for one, other in zip(gradients(), gradients(), strict=True):
        assert torch.equal(one, other)


def test_slices_of_one_projection_are_not_copied():
    """q, k and v as strided views: peak memory is that of the results."""
    packed = torch.randn(4, 56, 56, 3, 8, 8, device="cuda", dtype=BFLOAT)
    q, k, v = packed.unbind(3)
    rows, columns = (torch.randn(7, 4, device="cuda", dtype=BFLOAT) for _ in range(2))
    local_attention(q, k, v, window=7, rel_row=rows, rel_col=columns)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = local_attention(q, k, v, window=7, rel_row=rows, rel_col=columns)
    lse = out.numel() // 8 * 4
    assert torch.cuda.max_memory_allocated() - before <= out.numel() * 2 + lse + 2**20


def test_memory_of_the_backward():
    """Saved: the output and its log-sum-exp (1.5). In flight: three gradients, the upstream one, the strips' overlapping shares
    of dk and dv (5) and of the tables: O(HWC), never k²·HW."""
    inputs = on_gpu(make(BFLOAT, (56, 56), 8, 8, 8, (7, 7)))
    leaves = [t.requires_grad_() for t in inputs.values() if t is not None]
    one = inputs["q"].numel() * 2

    def step():
        before = torch.cuda.memory_allocated()
        out = local_attention(**inputs, window=7)
        saved = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        return saved, torch.cuda.max_memory_allocated() - before

    step()
    saved, peak = step()
    assert saved <= 1.6 * one
    assert peak <= 14 * one


@pytest.mark.parametrize(("size", "dim"), [((14, 14), 32), ((37, 41), 8), ((28, 28), 16)])
def test_captured_in_a_graph(size, dim):
    inputs = on_gpu(make(BFLOAT, size, 2, 8, dim, (7, 7)))
    leaves = [t.requires_grad_() for t in inputs.values() if t is not None]

    def step():
        out = local_attention(**inputs, window=7)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    assert_captured(step)


def test_compiled_without_breaks_and_without_recompiling():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: local_attention(q, k, v, window=3).sin(), fullgraph=True, dynamic=True)
    for size in ((9, 7), (12, 5), (17, 8)):
        q = torch.randn(1, *size, 2, 16, device="cuda", dtype=BFLOAT)
        torch.testing.assert_close(compiled(q, q, q), local_attention(q, q, q, window=3).sin(), atol=2e-2, rtol=2e-2)
    torch._dynamo.reset()


def test_opcheck():
    inputs = on_gpu(make(FLOAT, (5, 9), 1, 2, 8, (3, 3)))
    q, k, v, row, column = (t.requires_grad_() for t in inputs.values() if t is not None)
    arguments = (q, k, v, row[None], column[None], None, [3, 3], [1, 1], False, 1.0)
    torch.library.opcheck(torch.ops.nearsight.local_attention_triton.default, arguments)


def test_autocast_uses_the_kernel():
    inputs = on_gpu(make(FLOAT, (9, 14), 2, 4, 8, (7, 7)))
    with torch.autocast("cuda", BFLOAT):
        out = local_attention(**inputs, window=7, backend="triton")
    assert out.dtype == BFLOAT
