"""The first call of a class of local attention: its kernels are compiled side by side, the gradient's with them, and none later.

Compiled for an H200 by a driver without a GPU, which loads and launches nothing.
"""

import pytest
import torch

pytest.importorskip("triton")

STRIPS = ["backward", "merge", "finish_relative"]
# Heads of 16 channels: every second strip, then those between, each a kernel of its own.
RINGS = {8: ["ring_backward", *STRIPS[1:]], 16: ["ring_backward", "ring_backward", "finish_relative"]}


@pytest.fixture(autouse=True)
def copy_engine(monkeypatch):
    """The driver's GPU has one."""
    from nearsight.ops.local import launches

    monkeypatch.setattr(launches, "_has_copy_engine", lambda index: True)


@pytest.fixture
def no_ring(monkeypatch):
    from nearsight.ops.local import launches

    monkeypatch.setattr(launches, "RING", False)


def draw(*shape, trains=True, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta").requires_grad_(trains)


def options(window=3, trains=True, dim=16, dtype=torch.bfloat16, heads=1):
    rel = [draw(heads, window, dim // 2, trains=trains, dtype=dtype) for _ in range(2)]
    return (*rel, None, [window, window], [1, 1], False, 1.0)


def run_both(driver, qkv, rest):
    """The names that the forward compiled and launched, then those of forward and backward."""
    from nearsight.ops.local import triton_impl

    out, lse = triton_impl._forward_op._init_fn(*qkv, *rest)
    first = list(driver.compiled), list(driver.launched)
    triton_impl._backward_op._init_fn(out, *qkv, *rest[:3], out, lse, *rest[3:])
    return first, (driver.compiled, driver.launched)


def test_everything_is_compiled_before_the_first_launch(driver, no_ring):
    (compiled, launched), later = run_both(driver, [draw(2, 9, 21, 2, 16) for _ in range(3)], options())
    assert sorted(compiled) == sorted(["forward", *STRIPS])
    assert launched == ["forward"]
    assert later == (compiled, ["forward", *STRIPS]), "something was left to the backward"


@pytest.mark.parametrize(
    ("size", "heads", "dim", "window", "dtype", "own"),
    [
        ((56, 56), 8, 8, 7, torch.bfloat16, False),
        ((28, 28), 8, 16, 7, torch.bfloat16, False),
        ((9, 21), 2, 16, 3, torch.float16, True),
        ((40, 3), 6, 8, 6, torch.float16, True),
    ],
)
def test_strips_with_a_ring_too(driver, size, heads, dim, window, dtype, own):
    qkv = [draw(2, *size, heads, dim, dtype=dtype) for _ in range(3)]
    rest = options(window, dim=dim, dtype=dtype, heads=heads if own else 1)
    (compiled, launched), later = run_both(driver, qkv, rest)
    gradients = RINGS[dim]
    assert sorted(compiled) == sorted(["ring_forward", *gradients])
    assert launched == ["ring_forward"]
    assert later == (compiled, ["ring_forward", *gradients]), "something was left to the backward"


def strided(step, *shape):
    """As a slice of pixels with `step` numbers each."""
    batch, height, width, heads, dim = shape
    whole = draw(batch, height, width, step, trains=False)
    return whole[..., : heads * dim].unflatten(-1, (heads, dim))


def test_what_no_ring_was_written_for(driver, monkeypatch):
    """Masks, borders of zeros, dilation, missing tables and keys, other sizes, steps of no whole 32 bytes, small maps."""
    from nearsight.ops.local import launches, triton_impl

    shape = (2, 20, 20, 2, 8)
    q, k, v = (draw(*shape) for _ in range(3))
    row, col = (draw(1, 7, 4) for _ in range(2))
    plain = {"window": [7, 7], "dilation": [1, 1], "zeros": False, "scale": 1.0}

    def walks(q=q, k=k, v=v, row=row, col=col, mask=None, **options):
        call = triton_impl._call(q, k, v, row, col, mask, *{**plain, **options}.values())
        ring = launches._may_ring(call)
        both = {bool(launches.prepare_launch(call, kernel, ring=ring).shape.ahead) for kernel in ("forward", "walk")}
        assert len(both) == 1
        return both.pop()

    assert walks()
    assert walks(window=[5, 4], row=draw(1, 5, 4), col=draw(1, 4, 4))
    assert walks(*(strided(48, *shape) for _ in range(3)))
    assert walks(*(draw(2, 3, 40, 3, 16) for _ in range(3)), draw(3, 7, 8), draw(3, 7, 8))
    assert not walks(mask=torch.empty(2, 20, 20, dtype=torch.bool, device="meta"))
    assert not walks(zeros=True)
    assert not walks(dilation=[1, 2])
    assert not walks(k=None)
    assert not walks(row=None)
    assert not walks(col=None)
    assert not walks(window=[7, 8], col=draw(1, 8, 4))
    assert not walks(window=[8, 7], row=draw(1, 8, 4))
    assert not walks(k=strided(40, *shape))
    assert not walks(v=strided(17, *shape))
    assert not walks(q=draw(2, 20, 20, 3, 8)[..., 1:, :])
    assert not walks(*(draw(2, 20, 20, 3, 8) for _ in range(3)))
    assert not walks(*(draw(2, 20, 20, 2, 32) for _ in range(3)), draw(1, 7, 16), draw(1, 7, 16))
    assert not walks(*(draw(2, 20, 20, 2, 8, dtype=torch.float32) for _ in range(5)))
    assert not walks(*(draw(500, 20, 16, 2, 8) for _ in range(3)))
    assert not walks(*(draw(2, 8, 8, 2, 8) for _ in range(3)))
    monkeypatch.setattr(launches, "_has_copy_engine", lambda index: False)
    assert not walks()


def test_without_gluon_as_before(driver, monkeypatch):
    from nearsight.ops.local import launches

    monkeypatch.setattr(launches, "_ring_kernels", lambda: None)
    _, (compiled, launched) = run_both(driver, [draw(2, 9, 21, 2, 16) for _ in range(3)], options())
    assert "ring_forward" not in compiled
    assert launched == ["forward", *STRIPS]


def test_with_another_gluon_as_before(driver, monkeypatch):
    """It is experimental: what a later version does not compile must not stop a call."""
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    from nearsight.ops.local import launches

    @gluon.jit
    def ring_forward(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, row_ptr, col_ptr, H):
        gl.a_name_of_long_ago(q_ptr)

    monkeypatch.setattr(launches, "RING", True)  # so that the test leaves it as it was
    monkeypatch.setattr(launches, "_ring_kernels", lambda: (ring_forward, None))
    _, (_, launched) = run_both(driver, [draw(2, 9, 21, 2, 16, trains=False) for _ in range(3)], options(trains=False))
    assert launched == ["forward", *STRIPS]
    assert not launches.RING


def test_a_gradient_off_its_alignment_takes_the_other_walk(driver):
    from nearsight.ops.local import triton_impl

    qkv, rest = [draw(2, 9, 21, 2, 16) for _ in range(3)], options()
    out, lse = triton_impl._forward_op._init_fn(*qkv, *rest)
    grad = torch.empty(out.numel() + 1, dtype=out.dtype, device="meta")[1:].view(out.shape)
    triton_impl._backward_op._init_fn(grad, *qkv, *rest[:3], out, lse, *rest[3:])
    assert driver.launched == ["ring_forward", *STRIPS]


def test_the_layers_form_too(driver):
    """q, k and v as slices of one product; a small map, whose strips share nothing."""
    from nearsight.ops.local import triton_impl

    packed, pixels, weight = draw(2, 7, 5, 3, 2, 16), draw(2, 35, 32), draw(96, 32)
    rest = options()
    out, lse = triton_impl._projected_forward_op._init_fn(packed.detach(), pixels, weight, None, *rest)
    compiled = ["backward", "finish_relative", "forward"]
    assert sorted(driver.compiled) == compiled
    triton_impl._packed_gradients(out, packed.flatten(3).flatten(1, 2).detach(), out, lse, *rest)
    assert sorted(driver.launched) == compiled
    assert len(driver.compiled) == 3, "something was left to the backward"


def test_a_ring_is_replayed(driver, monkeypatch):
    """Gluon's kernels are launched again as Triton's are: on tensors of a CPU, by a driver that only writes down."""
    from nearsight.ops.local import launches, triton_impl

    calls = []

    def launcher(source, _):
        return lambda *arguments: calls.append((source.fn.fn.__name__, arguments))

    monkeypatch.setattr(driver, "launcher_cls", launcher)
    monkeypatch.setattr(launches, "_may_ring", lambda *_: True)
    # Numbers of no other test: classes of calls are kept.
    qkv = [torch.zeros(3, 9, 22, 2, 8, dtype=torch.bfloat16) for _ in range(3)]
    rel = [torch.zeros(2, 5, 4, dtype=torch.bfloat16) for _ in range(2)]
    options = ([5, 5], [1, 1], False, 0.25)
    seen = []
    for _ in range(3):
        calls.clear()
        out, lse = triton_impl._forward_op._init_fn(*qkv, *rel, None, *options)
        triton_impl._backward_op._init_fn(out, *qkv, *rel, None, out, lse, *options)
        seen.append(list(calls))
    assert [name for name, _ in seen[2]] == ["ring_forward", *RINGS[8]]
    for (name, direct), (_, replay) in zip(seen[1], seen[2], strict=True):
        # Grid, stream and handles, then what hooks would want, then the arguments.
        assert direct[:6] == replay[:6], name
        tensors = [i for i, argument in enumerate(direct) if isinstance(argument, torch.Tensor)]
        assert all(isinstance(replay[i], int) for i in tensors), name
        rest = [i for i in range(9, len(direct)) if i not in tensors]
        assert [direct[i] for i in rest] == [replay[i] for i in rest], name
        assert len(direct) == len(replay), name


def test_two_parts_are_compiled_once(driver):
    """Large calls: the second part's pointers are aligned as the first's, so no kernel is compiled for it."""
    (compiled, _), later = run_both(driver, [draw(10, 7, 21, 2, 16) for _ in range(3)], options())
    assert sorted(compiled) == sorted(["ring_forward", *RINGS[16]])
    assert later == (compiled, ["ring_forward", *RINGS[16][:2], *RINGS[16]])


def test_what_does_not_train_compiles_no_gradient(driver):
    """As a compiled graph calls it; its backward then compiles its own kernels side by side."""
    from nearsight.ops.local import triton_impl

    qkv = [draw(2, 9, 21, 2, 16, trains=False) for _ in range(3)]
    rest = options(trains=False)
    out, lse = triton_impl._forward_op._init_fn(*qkv, *rest)
    assert driver.compiled == ["ring_forward"]
    triton_impl._backward_op._init_fn(out, *qkv, *rest[:3], out, lse, *rest[3:])
    assert sorted(driver.compiled[1:]) == sorted(RINGS[16])
    assert driver.launched == ["ring_forward", *RINGS[16]]


@pytest.mark.parametrize("layer", [False, True])
def test_what_was_traced_with_its_gradient_compiles_it(driver, layer):
    """In a compiled graph nothing requires a gradient; tracing it, tensors without memory went through both ops."""
    from nearsight.ops.local import triton_impl

    rest = options(trains=False)
    if layer:
        given = [draw(2, 9, 21, 3, 2, 16, trains=False), draw(2, 189, 32), draw(96, 32), None]
        op = triton_impl._projected_forward_op
    else:
        given = [draw(2, 9, 23, 2, 16) for _ in range(3)]
        op = triton_impl._forward_op
    op(*given, *rest)[0].float().sum().backward()
    op._init_fn(*(None if t is None else t.detach() for t in given), *rest)
    assert sorted(driver.compiled) == sorted(["ring_forward", *RINGS[16]])


def test_tall_windows_make_no_more_code(driver, tmp_path):
    """Unrolled, the 16 to 32 chunks of this window's halo took five minutes to compile."""
    from nearsight.ops.local import triton_impl

    triton_impl._forward_op._init_fn(*[draw(2, 40, 40, 2, 16) for _ in range(3)], *options(window=31))
    products = {file.stem: file.read_text().count("mma.sync") for file in tmp_path.rglob("*.ptx")}
    tall = {"forward", "backward_queries", "backward_keys"}
    assert tall <= set(products)
    assert all(0 < products[name] < 400 for name in tall), products


@pytest.mark.parametrize(
    ("dtype", "window", "dim", "most"),
    [
        (torch.float32, 7, 16, 3000),
        (torch.float32, 7, 128, 4000),
        (torch.float32, 13, 64, 3200),
        (torch.float32, 31, 64, 4200),
        (torch.bfloat16, 9, 16, 3900),
        (torch.bfloat16, 11, 16, 5200),
    ],
)
def test_no_class_makes_more_code(driver, tmp_path, dtype, window, dim, most):
    """A compiler's work grows with a kernel's instructions, which are the same on a busy machine; a fifth more than there are.

    While an H200's host took 5 to 8 s for such classes, their longest kernels had 5799 to 6670, at 31×31 9544.
    """
    from nearsight.ops.local import triton_impl

    qkv = [draw(2, 40, 40, 2, dim, dtype=dtype) for _ in range(3)]
    triton_impl._forward_op._init_fn(*qkv, *options(window=window, dim=dim, dtype=dtype))
    lengths = {file.stem: file.read_text().count(";") for file in tmp_path.rglob("*.ptx")}
    assert len(lengths) == 4
    assert max(lengths.values()) < most, lengths
