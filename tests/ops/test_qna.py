"""`qna`: every backend against the float64 reference, and the meaning of each argument."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nearsight.errors import ArgumentTypeError, ArgumentValueError, BackendError
from nearsight.ops import backends, qna, qna_weights
from nearsight.ops.qna import export_form, planes, sums, torch_impl
from nearsight.ops.qna.call import prepare
from nearsight.ops.qna.sums import Sums
from tests.support.accuracy import assert_by_error_rule
from tests.support.largest import LargestTensor

L, HEADS, DIM = 2, 3, 4


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * len(shape) + sum(shape))
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def inputs(
    batch: int,
    height: int,
    width: int,
    window: tuple[int, int],
    *,
    queries: int = L,
    heads: int = HEADS,
    dim: int = DIM,
    tables: bool = True,
    dtype: torch.dtype = torch.float32,
    spread: float = 3.0,
    seed: int = 0,
) -> dict[str, Tensor | None]:
    shape = (*window, queries, heads)
    return {
        "scores": draw(batch, height, width, queries, heads, seed=seed, dtype=dtype, scale=spread),
        "values": draw(batch, height, width, heads, dim, seed=seed + 1, dtype=dtype),
        "position_bias": draw(*shape, seed=seed + 2, dtype=dtype) if tables else None,
        "tap_scale": draw(*shape, seed=seed + 3, dtype=dtype) if tables else None,
    }


def on(backend: str | None, **options):
    def run(scores, values, position_bias, tap_scale):
        return qna(scores, values, position_bias=position_bias, tap_scale=tap_scale, backend=backend, **options)

    return run


def exported(**options):
    def run(scores, values, position_bias, tap_scale):
        return export_form.run(prepare(scores, values, position_bias=position_bias, tap_scale=tap_scale, **options))

    return run


def some_mask(batch: int, height: int, width: int, seed: int = 0) -> Tensor:
    """About half the pixels, none of the first image."""
    mask = torch.rand(batch, height, width, generator=torch.Generator().manual_seed(seed)) > 0.5
    mask[:1] = False
    return mask


@st.composite
def calls(choose, rows: int, **more: st.SearchStrategy) -> tuple[dict[str, Tensor | None], dict]:
    """Any small call of at most `rows` rows: its tensors, of which `inputs` may be told `more`, and its options."""
    size = choose(st.tuples(st.integers(1, rows), st.integers(1, 9)))
    window = choose(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    batch, seed = choose(st.integers(0, 3)), choose(st.integers(0, 100))
    numbers = {
        "queries": st.integers(1, 3),
        "heads": st.integers(1, 3),
        "dim": st.integers(1, 5),
        "tables": st.booleans(),
    }
    chosen = {name: choose(strategy) for name, strategy in {**numbers, **more}.items()}
    options = {
        "window": window,
        "stride": choose(st.tuples(st.integers(1, 4), st.integers(1, 4))),
        "combine": choose(st.sampled_from(["sum", "stack"])),
    }
    options["key_mask"] = some_mask(batch, *size, seed) if choose(st.booleans()) else None
    return inputs(batch, *size, window, seed=seed, **chosen), options


# ── The definition ──


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(("window", "stride"), [((3, 3), (1, 1)), ((2, 4), (2, 1)), ((5, 3), (2, 3))])
def test_is_the_papers_formula(backend: str, window: tuple[int, int], stride: tuple[int, int]):
    """Pixel by pixel, written from the equation and the rule of the taps, without any code of the package."""
    batch, height, width = 2, 5, 7
    given = inputs(batch, height, width, window, dtype=torch.float64)
    mask = some_mask(batch, height, width)
    got = on(backend, window=window, stride=stride, key_mask=mask, combine="stack")(**given)
    rows, columns = -(-height // stride[0]), -(-width // stride[1])
    assert got.shape == (batch, rows, columns, L, HEADS, DIM)
    s, v, bias, scale = given.values()
    for b in range(batch):
        for i in range(rows):
            for j in range(columns):
                taps = [
                    (ty, tx, y, x)
                    for ty in range(window[0])
                    for tx in range(window[1])
                    if 0 <= (y := i * stride[0] + ty - (window[0] - 1) // 2) < height
                    and 0 <= (x := j * stride[1] + tx - (window[1] - 1) // 2) < width
                    and mask[b, y, x]
                ]
                for q in range(L):
                    for h in range(HEADS):
                        want = torch.zeros(DIM, dtype=torch.float64)
                        if taps:
                            logits = torch.stack([s[b, y, x, q, h] + bias[ty, tx, q, h] for ty, tx, y, x in taps])
                            for weight, (ty, tx, y, x) in zip(logits.softmax(0), taps, strict=True):
                                want += weight * scale[ty, tx, q, h] * v[b, y, x, h]
                        torch.testing.assert_close(got[b, i, j, q, h], want, rtol=1e-10, atol=1e-12)


def test_sum_adds_what_stack_keeps():
    given = inputs(2, 5, 7, (3, 3), dtype=torch.float64)
    stacked, summed = (on(None, window=3, stride=2, combine=c)(**given) for c in ("stack", "sum"))
    torch.testing.assert_close(stacked.sum(3), summed)


def test_weights_are_those_of_the_op():
    given = inputs(2, 5, 7, (3, 2), dtype=torch.float64)
    mask = some_mask(2, 5, 7)
    weights = qna_weights(given["scores"], window=(3, 2), stride=2, position_bias=given["position_bias"], key_mask=mask)
    assert weights.shape == (2, 3, 4, L, HEADS, 6)
    total = weights.sum(-1)
    sees = torch.nn.functional.max_pool2d(mask[:, None].double(), (3, 2), 2, (1, 0), ceil_mode=True)[:, 0]
    torch.testing.assert_close(total, sees[..., None, None].expand_as(total))
    assert sees[1].any()
    assert not weights[0].any()
    one = {**given, "values": torch.ones_like(given["values"]), "tap_scale": None}
    out = on(None, window=(3, 2), stride=2, key_mask=mask, combine="stack")(**one)
    torch.testing.assert_close(out[..., 0], total)


# ── The error rule ──

CASES = [
    ((5, 9), (3, 3), (1, 1)),
    ((4, 7), (7, 7), (1, 1)),
    ((9, 5), (3, 5), (2, 2)),
    ((6, 7), (2, 4), (1, 2)),
    ((1, 1), (3, 3), (1, 1)),
    ((1, 8), (5, 1), (3, 2)),
    ((3, 2), (9, 8), (2, 1)),
    ((8, 6), (2, 2), (3, 4)),
    ((5, 6), (1, 1), (2, 2)),
]


@pytest.mark.parametrize("combine", ["sum", "stack"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("size", "window", "stride"), CASES)
def test_obeys_the_error_rule(size, window, stride, masked, combine):
    options = {"window": window, "stride": stride, "combine": combine}
    options["key_mask"] = some_mask(2, *size) if masked else None
    given = inputs(2, *size, window)
    assert_by_error_rule(on("torch", **options), on("reference", **options), given)
    assert_by_error_rule(exported(**options), on("reference", **options), given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tables", [False, True])
def test_obeys_the_error_rule_in_other_dtypes(dtype, tables):
    for stride in (1, 2):
        options = {"window": (3, 5), "stride": stride}
        given = inputs(2, 7, 10, (3, 5), dtype=dtype, tables=tables)
        assert_by_error_rule(on("torch", **options), on("reference", **options), given)


@pytest.mark.parametrize("combine", ["sum", "stack"])
@pytest.mark.parametrize(("size", "window", "stride"), CASES)
def test_planes_alone_obey_the_error_rule(monkeypatch, size, window, stride, combine):
    monkeypatch.setattr(Sums, "of", no_sums)
    options = {"window": window, "stride": stride, "combine": combine}
    for dtype in (torch.float32, torch.bfloat16):
        assert_by_error_rule(on("torch", **options), on("reference", **options), inputs(2, *size, window, dtype=dtype))


@pytest.mark.parametrize("combine", ["sum", "stack"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize("kept", [0, sums.KEPT])
def test_sums_alone_obey_the_error_rule(monkeypatch, stride, combine, tables, kept):
    """Three images in groups of two (the wider heads: of one), with an index made for the call or found from the last."""
    monkeypatch.setattr(Sums, "of", classmethod(lambda cls, *a: cls(*a[:4], *a[5:])))
    monkeypatch.setattr(sums, "GROUP", -(-2 * 7 * 10 * L * HEADS * DIM // torch.get_num_threads()))
    monkeypatch.setattr(sums, "KEPT", kept)
    options = {"window": (3, 5), "stride": stride, "combine": combine}
    for dtype, dim in ((torch.float32, DIM), (torch.float32, 17), (torch.bfloat16, DIM), (torch.float16, DIM)):
        given = inputs(3, 7, 10, (3, 5), dtype=dtype, tables=tables, spread=1.5, dim=dim)
        assert_by_error_rule(on("torch", **options), on("reference", **options), given)


@pytest.mark.parametrize("window", [(7, 5), (1, 9), (11, 3), (13, 13)])
def test_sums_over_large_windows_obey_the_error_rule(monkeypatch, window):
    """Their tables' gradients are made in blocks of taps, from several images at once."""
    monkeypatch.setattr(Sums, "of", classmethod(lambda cls, *a: cls(*a[:4], *a[5:])))
    given = inputs(3, 6, 8, window, spread=1.0)
    assert_by_error_rule(on("torch", window=window), on("reference", window=window), given)


@pytest.mark.parametrize(("batch", "size", "window", "stride"), [(2, 112, 3, 1), (8, 112, 3, 2), (2, 112, 7, 1)])
def test_sums_over_many_pixels_obey_the_error_rule(batch, size, window, stride):
    """The position biases' gradient is a small difference of two sums over all of them."""
    options = {"window": window, "stride": stride}
    for seed in range(0, 12, 4):
        given = inputs(batch, size, size, (window, window), queries=1, heads=2, dim=8, spread=1.0, seed=seed)
        given["position_bias"] *= 0.5
        assert_by_error_rule(on("torch", **options), on("reference", **options), given)


def no_sums(*arguments):
    return None


def test_sums_are_given_up_where_they_would_lose_digits():
    def form(given, window=(3, 3), mask=None):
        return Sums.of(*given.values(), mask, window, (1, 1), False)

    mild = inputs(2, 6, 7, (3, 3), spread=1.0)
    assert isinstance(form(mild), Sums)
    outlier = {**mild, "scores": mild["scores"].clone()}
    outlier["scores"][0, 0, 0] = 40.0
    assert form(outlier) is None
    steep = {**mild, "position_bias": mild["position_bias"] * 100}
    assert form(steep) is None
    assert form({n: t.double() for n, t in mild.items()}) is None
    assert form(mild, mask=some_mask(2, 6, 7)) is None
    assert form(inputs(2, 6, 7, (2, 3), spread=1.0), (2, 3)) is None
    assert form(inputs(2, 6, 1, (1, 3), spread=1.0), (1, 3)) is None
    wide = torch.where(torch.arange(42).view(6, 7, 1, 1) % 5 == 0, 15.0, 0.0).expand(2, 6, 7, L, HEADS)
    assert_by_error_rule(on("torch", window=3), on("reference", window=3), {**mild, "scores": wide.contiguous()})


@pytest.mark.parametrize("budget", [1, 500])
def test_pieces_fit_together(monkeypatch, budget):
    """Cut into stretches of a pixel or a few, the planes give the same."""
    monkeypatch.setattr(planes, "BUDGET_CPU", budget)
    monkeypatch.setattr(Sums, "of", no_sums)
    for stride, combine in ((1, "sum"), (2, "stack")):
        options = {"window": 3, "stride": stride, "combine": combine, "key_mask": some_mask(2, 5, 6)}
        assert_by_error_rule(on("torch", **options), on("reference", **options), inputs(2, 5, 6, (3, 3)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(calls(9, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))
def test_obeys_the_error_rule_anywhere(call):
    given, options = call
    assert_by_error_rule(on("torch", **options), on("reference", **options), given)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("combine", ["sum", "stack"])
def test_gradcheck(backend, combine):
    given = inputs(2, 3, 4, (3, 2), queries=2, heads=1, dim=2, dtype=torch.float64, spread=1.0)
    leaves = [t.requires_grad_() for t in given.values()]
    options = {"window": (3, 2), "stride": (1, 2), "key_mask": some_mask(2, 3, 4), "combine": combine}
    assert torch.autograd.gradcheck(lambda *t: on(backend, **options)(*t), leaves)


def test_the_rule_catches_faults():
    """Swapped axes, a gradient 3 % off, an element nobody wrote, a forgotten mask: each must fail."""
    mask = some_mask(2, 5, 9)
    options = {"window": (3, 5), "key_mask": mask}
    right, given = on("torch", **options), inputs(2, 5, 9, (3, 5))
    assert_by_error_rule(right, on("reference", **options), given)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 1.03 * grad

    def swapped(scores, values, position_bias, tap_scale):
        def turn(t):
            return t.transpose(1, 2)

        turned = {"position_bias": position_bias.transpose(0, 1).reshape(3, 5, L, HEADS), "tap_scale": tap_scale}
        out = qna(turn(scores), turn(values), window=(3, 5), key_mask=turn(mask), backend="torch", **turned)
        return turn(out)

    def scaled(name):
        def run(**tensors):
            return right(**{**tensors, name: Scaled.apply(tensors[name])})

        return run

    def unwritten(**tensors):
        out = right(**tensors).clone()
        out[1, 4, 8, -1, -1] = float("nan")
        return out

    faults = [swapped, unwritten, on("torch", window=(3, 5)), *(scaled(name) for name in given)]
    for fault in faults:
        with pytest.raises(AssertionError):
            assert_by_error_rule(fault, on("reference", **options), given)


def test_every_element_is_written():
    """Deterministic mode fills new memory with NaN; none may show."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        for size, window, stride in CASES:
            options = {"window": window, "stride": stride, "combine": "stack"}
            given = {n: t.requires_grad_() for n, t in inputs(2, *size, window).items()}
            out = on("torch", **options)(**given)
            assert torch.isfinite(out).all()
            for gradient in torch.autograd.grad(out.sum(), list(given.values())):
                assert torch.isfinite(gradient).all()
    finally:
        torch.use_deterministic_algorithms(False)


# ── Numerics ──


@pytest.mark.parametrize("backend", ["torch", "reference", "export"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scores_of_ten_thousand(backend, dtype):
    """±1e4: the largest tap takes all, exactly; nothing overflows, nothing is 0/0."""
    given = inputs(1, 6, 7, (3, 3), dtype=dtype, tables=False)
    given["scores"] = torch.where(given["scores"] > 0, 1e4, -1e4).to(dtype)
    run = exported(window=3) if backend == "export" else on(backend, window=3)
    assert_by_error_rule(run, on("reference", window=3), given)
    out = run(**given)
    assert torch.isfinite(out).all()
    double = {n: None if t is None else t.double() for n, t in given.items()}
    truth = on("reference", window=3)(**double)
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=8 * torch.finfo(dtype).eps * float(truth.abs().max()))


@pytest.mark.parametrize("backend", ["torch", "reference", "export"])
@pytest.mark.parametrize("outlier", [110.0, -110.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_one_outlier_among_zeros(backend, outlier, dtype):
    """Windows that do not see the outlier average as if it were not there."""
    scores = torch.zeros(1, 12, 9, 1, 1, dtype=dtype)
    scores[0, 5, 4] = outlier
    values = draw(1, 12, 9, 1, 4, dtype=dtype)
    run = exported(window=3) if backend == "export" else on(backend, window=3)
    out = run(scores, values, None, None)
    counted = torch.nn.functional.avg_pool2d(
        values[:, :, :, 0].double().permute(0, 3, 1, 2), 3, 1, 1, count_include_pad=False
    ).permute(0, 2, 3, 1)
    far = torch.ones(12, 9, dtype=torch.bool)
    far[4:7, 3:6] = False
    eps = torch.finfo(dtype).eps
    assert (out[0, far, 0].double() - counted[0, far]).abs().max() <= 4 * eps * counted.abs().max()
    if outlier > 0:
        assert (out[0, ~far, 0] - values[0, 5, 4]).abs().max() <= 4 * eps * values.abs().max()


def test_nothing_to_attend_gives_zero_and_zero_gradients():
    given = {n: t.requires_grad_() for n, t in inputs(2, 4, 5, (3, 3)).items()}
    mask = torch.ones(2, 4, 5, dtype=torch.bool)
    mask[0] = False
    for backend in ("torch", "reference"):
        out = on(backend, window=3, key_mask=mask)(**given)
        assert not out[0].any()
        gradients = torch.autograd.grad(out.square().sum() + out[0].sum(), list(given.values()))
        assert all(torch.isfinite(g).all() for g in gradients)
        assert not gradients[0][0].any()
        assert not gradients[1][0].any()


def test_masked_pixels_do_not_matter():
    given = inputs(2, 5, 6, (3, 3))
    mask = some_mask(2, 5, 6)
    out = on("torch", window=3, key_mask=mask)(**given)
    for name in ("scores", "values"):
        changed = {**given, name: torch.where(mask[..., None, None], given[name], 77.0)}
        torch.testing.assert_close(on("torch", window=3, key_mask=mask)(**changed), out, rtol=0, atol=0)


def test_dtypes_and_autocast():
    """Scores stay as they came, values follow autocast, the output follows the values."""
    given = inputs(1, 5, 6, (3, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = on(None, window=3)(**given)
        assert out.dtype == torch.bfloat16
    half = {**given, "values": given["values"].bfloat16()}
    mixed = on(None, window=3)(**half)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(out, mixed, rtol=0, atol=0)
    rounded = {**half, "scores": given["scores"].bfloat16()}
    assert (on(None, window=3)(**rounded) - mixed).abs().max() > 0
    double = on(None, window=3)(**{n: t.double() for n, t in given.items()})
    assert double.dtype == torch.float64
    leaves = {n: t.requires_grad_() for n, t in given.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = on(None, window=3)(**leaves)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum(), list(leaves.values())))


# ── Memory, tracing, threads ──


def test_memory_does_not_grow_with_the_window(monkeypatch):
    """No tensor larger than the planes (the padded inputs) or the budget of a piece, forward and backward."""
    monkeypatch.setattr(planes, "BUDGET_CPU", 1 << 12)
    height, width, window = 12, 14, (7, 7)
    given = {n: t.requires_grad_() for n, t in inputs(1, height, width, window, heads=2, dim=8).items()}
    with LargestTensor() as seen:
        out = planes_forward_and_backward(given, window)
    assert torch.isfinite(out).all()
    padded = (height + 6) * (width + 6)
    assert seen.elements <= padded * 2 * 8
    assert seen.elements < window[0] * window[1] * height * width


def planes_forward_and_backward(given, window):
    """The work inside the registered operators, where a dispatch mode can see it."""
    arguments = [t.detach() for t in given.values()]
    pieces = planes.Pieces(*arguments, None, window, (1, 1), False, torch.float32)
    out = planes.aggregate(pieces, torch.empty_like(arguments[1]))
    planes.aggregate_backward(pieces, torch.ones_like(out), arguments[0], arguments[1])
    return out


def test_registered_operators_are_sound():
    given = [t.requires_grad_() for t in inputs(2, 4, 5, (3, 2)).values()]
    arguments = (*given, some_mask(2, 4, 5), [3, 2], [1, 2], True)
    torch.library.opcheck(torch.ops.nearsight.qna_planes.default, arguments)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("tables", [True, False])
@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scores", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [(3, 3), (3, 2)], ids=str)
def test_results_lie_as_compiled_code_is_told(window, scores, values, tables, stride):
    """Its fake kernels say where; `opcheck` does not look at gradients."""
    sizes = inputs(2, 5, 9, window, heads=6, tables=tables)
    sizes["scores"], sizes["values"] = sizes["scores"].to(scores), sizes["values"].to(values)
    arguments = (*sizes.values(), None, list(window), [stride, stride], False)

    def promised(op, *given):
        with FakeTensorMode() as mode:
            return op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in given))

    out = torch_impl.qna_planes(*arguments)
    upstream = torch.randn_like(out)
    found = (out, *torch_impl.qna_planes_backward(upstream, *arguments))
    told = (
        promised(torch_impl.qna_planes, *arguments),
        *promised(torch_impl.qna_planes_backward, upstream, *arguments),
    )
    for got, want in zip(found, told, strict=True):
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


@pytest.mark.parametrize("combine", ["sum", "stack"])
def test_compiles_once_for_all_image_sizes(combine):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    @torch.compile(backend=counter, fullgraph=True, dynamic=None)
    def step(scores, values, bias, scale):
        return qna(scores, values, window=3, stride=2, position_bias=bias, tap_scale=scale, combine=combine).sum()

    for height, width in ((8, 11), (9, 12), (14, 7), (21, 30), (5, 6)):
        given = {n: t.requires_grad_() for n, t in inputs(2, height, width, (3, 3)).items()}
        loss = step(*given.values())
        loss.backward()
        want = on("reference", window=3, stride=2, combine=combine)(**given).sum()
        torch.testing.assert_close(loss, want, rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2


def test_exports_with_free_sizes():
    class Op(torch.nn.Module):
        def forward(self, scores, values, bias):
            return qna(scores, values, window=(3, 2), stride=2, position_bias=bias)

    free = {1: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO}
    given = inputs(2, 6, 9, (3, 2))
    program = torch.export.export(
        Op(), (given["scores"], given["values"], given["position_bias"]), dynamic_shapes=(free, free, None)
    )
    assert "nearsight" not in str(program.graph)
    for size in ((6, 9), (7, 12), (11, 4)):
        other = inputs(2, *size, (3, 2), seed=5)
        arguments = (other["scores"], other["values"], other["position_bias"])
        torch.testing.assert_close(program.module()(*arguments), Op()(*arguments))


def check_callers_at_once(backend):
    given = [inputs(1, 9, 7, (3, 3), seed=i) for i in range(4)]
    want = [on(backend, window=3)(**g) for g in given]
    got: list[list[Tensor]] = [[] for _ in given]

    def work(i):
        for _ in range(5):
            got[i].append(on(backend, window=3)(**given[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outs, one in zip(got, want, strict=True):
        assert len(outs) == 5
        assert all(torch.equal(out, one) for out in outs)


def test_threads_do_not_disturb_each_other():
    check_callers_at_once("torch")


def test_runs_are_bitwise_the_same():
    given = {n: t.requires_grad_() for n, t in inputs(3, 9, 7, (3, 3)).items()}
    runs = [torch.autograd.grad(on("torch", window=3)(**given).square().sum(), list(given.values())) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_processs_defaults_do_not_matter():
    """Neither a default dtype of a half type nor a default device that is not the call's."""
    given = [t.requires_grad_() for t in inputs(2, 5, 7, (3, 3), spread=1.0).values()]
    bare = inputs(2, 5, 7, (3, 3), spread=1.0, tables=False)

    def results():
        out = on("torch", window=3)(*given)
        return out, *torch.autograd.grad(out.sum(), given), on("torch", window=3)(**bare)

    wanted = results()
    sums._kept_bags.cache_clear()
    try:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        found = results()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_empty_batch_and_strided_inputs():
    given = {n: t.requires_grad_() for n, t in inputs(0, 5, 6, (3, 3)).items()}
    out = on("torch", window=3, stride=2)(**given)
    assert out.shape == (0, 3, 3, HEADS, DIM)
    assert [g.shape for g in torch.autograd.grad(out.sum(), list(given.values()))] == [t.shape for t in given.values()]
    full = inputs(2, 5, 6, (3, 3))
    both = torch.cat([full["values"].flatten(3), full["scores"].flatten(3)], -1)
    values, scores = both.split([HEADS * DIM, L * HEADS], -1)
    views = {**full, "values": values.unflatten(-1, (HEADS, DIM)), "scores": scores.unflatten(-1, (L, HEADS))}
    assert torch.equal(on("torch", window=3)(**views), on("torch", window=3)(**full))


@pytest.mark.parametrize("spread", [1.0, 30.0], ids=["as sums", "as planes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_maps_may_lie_channels_first(dtype, spread):
    """Scores and values of a convolution."""
    full = inputs(2, 5, 6, (3, 3), dtype=dtype, spread=spread)

    def results(**maps):
        given = [t.detach().requires_grad_() for t in {**full, **maps}.values()]
        out = on("torch", window=3)(*given)
        return out, *torch.autograd.grad(out.sum(), given)

    apart = {
        name: full[name].movedim((3, 4), (1, 2)).contiguous().movedim((1, 2), (3, 4)) for name in ("scores", "values")
    }
    for got, want in zip(results(**apart), results(), strict=True):
        assert torch.equal(got, want)


# ── Refusals ──

GOOD = inputs(2, 4, 5, (3, 3))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"scores": torch.zeros(4, 5, 2, 3)}, ArgumentValueError, "got scores of shape [4, 5, 2, 3] (rank 4)"),
        ({"values": torch.zeros(2, 4, 5, 12)}, ArgumentValueError, "wanted rank 5: [B, H, W, heads, D]"),
        ({"values": torch.zeros(2, 4, 5, 3, 4).long()}, ArgumentTypeError, "convert it with .float()"),
        ({"scores": torch.zeros(2, 5, 4, 2, 3)}, ArgumentValueError, "wanted [2, 4, 5, 2, 3]"),
        ({"scores": torch.zeros(2, 4, 5, 2, 4)}, ArgumentValueError, "B, H, W and heads of values"),
        ({"scores": torch.zeros(2, 4, 5, 0, 3)}, ArgumentValueError, "wanted at least one query"),
        ({"position_bias": torch.zeros(3, 3, 3, 2)}, ArgumentValueError, "wanted [3, 3, 2, 3]: [kh, kw, L, heads]"),
        ({"tap_scale": torch.zeros(9, 2, 3)}, ArgumentValueError, "got tap_scale of shape [9, 2, 3]"),
        ({"window": 0}, ArgumentValueError, "got window=0, wanted at least 1"),
        ({"window": 3.0}, ArgumentTypeError, "wanted an int or a (rows, columns) pair"),
        ({"stride": 0}, ArgumentValueError, "got stride=0, wanted at least 1"),
        ({"combine": "mean"}, ArgumentValueError, "got combine='mean', wanted one of 'sum', 'stack'"),
        ({"key_mask": torch.ones(2, 4, 5)}, ArgumentTypeError, "wanted a bool tensor [B, H, W]"),
        ({"key_mask": torch.ones(2, 5, 4, dtype=torch.bool)}, ArgumentValueError, "wanted [2, 4, 5]"),
        ({"scores": torch.zeros(2, 4, 5, 2, 3, device="meta")}, ArgumentTypeError, "move them to one device"),
        ({"scores": [1.0]}, ArgumentTypeError, "got scores of type list"),
        ({"backend": "cuda"}, ArgumentValueError, "got backend='cuda', wanted one of"),
    ],
)
def test_refuses(change, error, text):
    arguments = {**GOOD, "window": 3, **change}
    with pytest.raises(error) as caught:
        qna(arguments.pop("scores"), arguments.pop("values"), **arguments)
    assert text in str(caught.value)
    assert str(caught.value).startswith("qna: got ")


def test_a_named_backend_runs_or_says_why():
    reports = {r.name: r for r in backends("qna", GOOD["scores"], GOOD["values"], window=3)}
    assert reports["torch"].usable
    assert reports["reference"].usable
    if "triton" in reports and not reports["triton"].usable:
        with pytest.raises(
            BackendError, match=r"qna: backend 'triton' cannot run this call: .* Usable here: (native, )?torch, ref"
        ):
            on("triton", window=3)(**GOOD)
