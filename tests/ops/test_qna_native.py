"""`qna` in C: the loops against the float64 reference, and what happens without a compiler or with a damaged library."""

from __future__ import annotations

import shutil
import stat
import threading

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from nearsight.errors import BackendError
from nearsight.ops import backends, native_support, qna
from nearsight.ops.qna import native_impl
from tests.ops.test_qna import CASES, calls, check_callers_at_once, inputs, on, some_mask
from tests.support.accuracy import assert_by_error_rule

COMPILER = native_support._compiler()
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler (cc or $CC)")


@pytest.fixture
def own(monkeypatch):
    """Every call gets a library of its own, as large calls do, and no other will do."""
    monkeypatch.setattr(native_impl, "OWN_LIBRARY", 0)
    built = native_support.library

    def strictly(source, **constants):
        assert constants, "the library of its own could not be built"
        return built(source, **constants)

    monkeypatch.setattr(native_support, "library", strictly)
    monkeypatch.setattr(native_support, "common_refusal", lambda source: None)


def reason(call=None, **options) -> str | None:
    tensors = call or inputs(1, 4, 5, (3, 3))
    reports = backends("qna", tensors["scores"], tensors["values"], window=3, **options)
    return {report.name: report.reason for report in reports}["native"]


def test_is_what_a_plain_call_takes():
    assert reason() is None
    given = inputs(2, 5, 6, (3, 3))
    assert torch.equal(on(None, window=3)(**given), on("native", window=3)(**given))


@pytest.mark.parametrize("heads", [3, 4, 8])
@pytest.mark.parametrize("where", ["scores", "bias"])
def test_what_counts_minus_infinity_is_left_out(where, heads):
    """As by a mask of one's own, per query; far below the rest, some windows are computed again from their own maximum."""
    made = torch.Generator().manual_seed(heads)
    scores, values = torch.randn(2, 9, 7, 2, heads, generator=made) * 15, torch.randn(2, 9, 7, heads, 4, generator=made)
    bias = torch.randn(3, 3, 2, heads, generator=made)
    if where == "scores":
        scores[:, ::2, 1::3, 0] = scores[0, 5, :, 1, :2] = float("-inf")
    else:
        bias[0, 0] = bias[2, 1, 1] = float("-inf")

    def results(backend, dtype):
        tensors = [t.to(dtype).requires_grad_() for t in (scores, values, bias)]
        out = qna(*tensors[:2], window=3, position_bias=tensors[2], backend=backend)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), tensors)]

    for got, wanted in zip(results("native", torch.float32), results("reference", torch.float64), strict=True):
        assert wanted.isfinite().all()
        torch.testing.assert_close(got.double(), wanted, atol=1e-4 * float(wanted.abs().max()), rtol=1e-3)


# ── The error rule ──


@pytest.mark.parametrize("combine", ["sum", "stack"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("size", "window", "stride"), CASES)
def test_obeys_the_error_rule(size, window, stride, masked, combine):
    options = {"window": window, "stride": stride, "combine": combine}
    options["key_mask"] = some_mask(2, *size) if masked else None
    assert_by_error_rule(on("native", **options), on("reference", **options), inputs(2, *size, window))


# Heads and channels of 8, 4 and 1 at a time, each of both forms.
SIZES = [
    (8, 8, 2, "sum"),
    (16, 16, 2, "stack"),
    (8, 4, 1, "stack"),
    (4, 8, 3, "sum"),
    (4, 12, 2, "stack"),
    (3, 8, 2, "sum"),
    (4, 5, 1, "sum"),
]


@pytest.mark.parametrize(("heads", "dim", "queries", "combine"), SIZES)
def test_libraries_of_their_own_obey_the_error_rule(own, heads, dim, queries, combine):
    """Several bands of rows, the last one short; mask and outlier in the second round, without a second library."""
    window = (3, 2)
    given = inputs(2, 35, 6, window, heads=heads, dim=dim, queries=queries)
    options = {"window": window, "combine": combine}
    assert_by_error_rule(on("native", **options), on("reference", **options), given)
    given["scores"][1, 3, 2] = 40.0
    options |= {"key_mask": some_mask(2, 35, 6), "stride": (2, 1)}
    assert_by_error_rule(on("native", **options), on("reference", **options), given)


@pytest.mark.parametrize("missing", [["position_bias"], ["tap_scale"], ["position_bias", "tap_scale"]])
def test_tables_may_be_missing(missing):
    given = {**inputs(2, 5, 7, (3, 3)), **dict.fromkeys(missing)}
    assert_by_error_rule(on("native", window=3), on("reference", window=3), given)


@pytest.mark.parametrize("window", [(33, 3), (40, 1), (21, 5)])
def test_bands_and_windows_taller_than_bands(window):
    """Bands of the same parity must not share a pixel, whatever the window."""
    given = inputs(1, 70, 3, window, heads=1, dim=2)
    for stride in (1, 2):
        options = {"window": window, "stride": stride}
        assert_by_error_rule(on("native", **options), on("reference", **options), given)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(calls(20, spread=st.sampled_from([0.1, 3.0, 30.0])))
def test_obeys_the_error_rule_anywhere(call):
    given, options = call
    assert_by_error_rule(on("native", **options), on("reference", **options), given)


# ── Numerics ──


def test_scores_of_ten_thousand():
    given = inputs(1, 6, 7, (3, 3), tables=False)
    given["scores"] = torch.where(given["scores"] > 0, 1e4, -1e4)
    assert_by_error_rule(on("native", window=3), on("reference", window=3), given)
    assert torch.isfinite(on("native", window=3)(**given)).all()


@pytest.mark.parametrize("outlier", [110.0, -110.0, 1e4])
def test_one_outlier_among_zeros(outlier):
    given = inputs(1, 20, 9, (3, 3), spread=0.0)
    given["scores"][0, 5, 4] = outlier
    assert_by_error_rule(on("native", window=3), on("reference", window=3), given)


def test_all_the_weight_at_one_tap_has_gradient_zero():
    given = {n: t.requires_grad_() for n, t in inputs(2, 4, 5, (3, 3)).items()}
    lone = torch.zeros(2, 4, 5, dtype=torch.bool)
    lone[:, 2, 3] = True
    far = given["scores"].detach().clone()
    far[:, 2, 3] += 1e3
    for scores, mask, window in ((given["scores"], lone, 3), (far.requires_grad_(), None, 9)):
        tables = {
            n: t.repeat(3, 3, 1, 1) if window == 9 else t for n, t in given.items() if n.endswith(("bias", "scale"))
        }
        out = qna(scores, given["values"], window=window, key_mask=mask, **tables, backend="native")
        grads = torch.autograd.grad(out.square().sum(), [scores, tables["position_bias"]])
        assert out.any()
        assert not any(g.any() for g in grads)


def test_nothing_to_attend_gives_zero_and_zero_gradients():
    given = {n: t.requires_grad_() for n, t in inputs(2, 4, 5, (3, 3)).items()}
    mask = torch.ones(2, 4, 5, dtype=torch.bool)
    mask[0] = False
    out = on("native", window=3, key_mask=mask)(**given)
    assert not out[0].any()
    gradients = torch.autograd.grad(out.square().sum() + out[0].sum(), list(given.values()))
    assert all(torch.isfinite(g).all() for g in gradients)
    assert not gradients[0][0].any()
    assert not gradients[1][0].any()


def test_masked_pixels_do_not_matter_whatever_they_hold():
    given, mask = inputs(2, 5, 6, (3, 3)), some_mask(2, 5, 6)
    out = on("native", window=3, key_mask=mask)(**given)
    for name in ("scores", "values"):
        for what in (77.0, float("nan")):
            changed = {**given, name: torch.where(mask[..., None, None], given[name], what)}
            assert torch.equal(on("native", window=3, key_mask=mask)(**changed), out)


def test_a_nan_stays_where_it_is():
    given = inputs(1, 9, 7, (3, 3))
    given["scores"][0, 4, 3] = float("nan")
    bad = on("native", window=3)(**given).isnan().any(-1).any(-1)[0]
    assert bad[3:6, 2:5].all()
    assert bad.sum() == 9


def test_every_element_is_written(own):
    torch.use_deterministic_algorithms(True)
    try:
        given = {n: t.requires_grad_() for n, t in inputs(2, 35, 6, (3, 2), heads=8, dim=8).items()}
        out = on("native", window=(3, 2))(**given)
        assert torch.isfinite(out).all()
        assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), list(given.values())))
    finally:
        torch.use_deterministic_algorithms(False)


# ── Threads, strides, tracing ──


def test_results_do_not_depend_on_the_threads():
    given = {n: t.requires_grad_() for n, t in inputs(3, 40, 7, (3, 3)).items()}
    before, runs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            out = on("native", window=3)(**given)
            runs.append((out, *torch.autograd.grad(out.square().sum(), list(given.values()))))
    finally:
        torch.set_num_threads(before)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_callers_at_once_do_not_disturb_each_other():
    check_callers_at_once("native")


class Aggregated(torch.utils.data.Dataset):
    """What a data worker may do: run the loops in a process forked from one that ran them with two threads."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return on("native", window=3)(**inputs(1, 9, 7, (3, 3), seed=index))


def test_runs_in_data_workers():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        want = [Aggregated()[i] for i in range(2)]
        loader = torch.utils.data.DataLoader(
            Aggregated(), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60
        )
        assert all(torch.equal(a, b) for a, b in zip(loader, want, strict=True))
    finally:
        torch.set_num_threads(before)


def test_empty_batch_and_strided_inputs():
    given = {n: t.requires_grad_() for n, t in inputs(0, 5, 6, (3, 3)).items()}
    out = on("native", window=3, stride=2)(**given)
    assert out.shape == (0, 3, 3, 3, 4)
    grads = torch.autograd.grad(out.sum(), list(given.values()))
    assert [g.shape for g in grads] == [t.shape for t in given.values()]
    assert not any(g.any() for g in grads)
    full = inputs(2, 5, 6, (3, 3))
    views = {n: t.transpose(0, -1).contiguous().transpose(0, -1) for n, t in full.items()}
    assert not any(t.is_contiguous() for t in views.values())
    assert torch.equal(on("native", window=3)(**views), on("native", window=3)(**full))
    leaf = full["values"].clone().requires_grad_()
    out = on("native", window=3)(**{**full, "values": leaf})
    expanded, dense = (
        torch.autograd.grad(out, leaf, g, retain_graph=True)[0]
        for g in (torch.ones(()).expand_as(out), torch.ones_like(out))
    )
    assert torch.equal(expanded, dense)


def test_registered_operators_are_sound():
    given = [t.requires_grad_() for t in inputs(2, 4, 5, (3, 2)).values()]
    torch.library.opcheck(torch.ops.nearsight.qna_native.default, (*given, some_mask(2, 4, 5), [3, 2], [1, 2], True))
    torch.library.opcheck(
        torch.ops.nearsight.qna_native.default, (given[0], given[1], None, given[3], None, [3, 2], [1, 1], False)
    )


def test_compiles_in_one_graph():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    @torch.compile(backend=counter, fullgraph=True, dynamic=None)
    def step(scores, values, bias, scale):
        return on("native", window=3, stride=2)(scores, values, bias, scale).sum()

    for size in ((8, 11), (9, 12), (14, 7)):
        given = {n: t.requires_grad_() for n, t in inputs(2, *size, (3, 3)).items()}
        loss = step(*given.values())
        loss.backward()
        torch.testing.assert_close(loss, on("reference", window=3, stride=2)(**given).sum(), rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2


# ── Who runs a call, and the compiler ──


def test_refuses_what_it_cannot_run():
    given = inputs(1, 4, 5, (3, 3))
    for dtype, name in ((torch.float64, "float64"), (torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        assert reason({n: t.to(dtype) for n, t in given.items()}) == f"needs float32, got {name}"
    assert reason({**given, "scores": given["scores"].half()}) == "needs float32, got float16"
    assert reason({n: t.to("meta") for n, t in given.items()}) == "needs CPU tensors, got meta"
    many = inputs(1, 2, 2, (3, 3), queries=40, heads=64, dim=1)
    assert reason(many) == "needs windows of at most 16384 scores (or outputs), got 23040"
    with pytest.raises(
        BackendError, match=r"backend 'native' cannot run this call: needs float32, got float64. Usable"
    ):
        on("native", window=3)(**{n: t.double() for n, t in given.items()})


@pytest.mark.parametrize("value", ["0", "off"])
def test_can_be_switched_off(monkeypatch, value):
    monkeypatch.setenv("NEARSIGHT_NATIVE", value)
    assert reason() == f"needs NEARSIGHT_NATIVE to be 1 or not set, got {value}"


def test_without_a_compiler_torch_takes_the_call(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert reason() == "needs a C compiler (cc), got none; install one"
    given = inputs(1, 4, 5, (3, 3))
    assert torch.equal(on(None, window=3)(**given), on("torch", window=3)(**given))
    with pytest.raises(
        BackendError, match=r"needs a C compiler \(cc\), got none; install one. Usable here: torch, ref"
    ):
        on("native", window=3)(**given)


def test_a_compiler_that_fails_is_a_sentence(monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'no licence' >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("NEARSIGHT_CACHE", str(tmp_path / "cache"))
    assert reason() == "needs a C compiler that works, got no licence"


def test_a_folder_that_cannot_be_written_is_a_sentence(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEARSIGHT_CACHE", str(tmp_path / "file"))
    assert "needs a C compiler that works, got [Errno 20] Not a directory" in str(reason())


def test_a_compiler_without_openmp_or_native_will_do(monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *=native*|*-fopenmp*) exit 1;; esac\nexec {shutil.which(COMPILER[0])} "$@"\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("NEARSIGHT_CACHE", str(tmp_path / "cache"))
    assert_by_error_rule(on("native", window=3), on("reference", window=3), inputs(2, 5, 9, (3, 3)))


@pytest.mark.parametrize("harm", ["cut", "other"])
def test_a_damaged_library_is_built_again(monkeypatch, tmp_path, harm):
    monkeypatch.setenv("NEARSIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(native_support, "_loaded", {})
    tiny = tmp_path / "tiny.c"
    tiny.write_text("int number(void) { return 7; }\n")
    assert native_support.library(tiny).number() == 7
    (file,) = (tmp_path / "native").iterdir()
    good = file.read_bytes()
    bad = good[: len(good) // 2] if harm == "cut" else bytes(len(good))
    file.unlink()  # the one in memory keeps its pages
    file.write_bytes(bad)
    native_support._loaded.clear()
    assert native_support.library(tiny).number() == 7
    assert native_support._sound(file)
    assert [f.name for f in (tmp_path / "native").iterdir()] == [file.name]


def test_a_library_is_built_once(monkeypatch, tmp_path):
    monkeypatch.setenv("NEARSIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(native_support, "_loaded", {})
    source = tmp_path / "one.c"
    source.write_text("int number(void) { return SEVEN; }\n")
    built = []
    build = native_support._build
    monkeypatch.setattr(native_support, "_build", lambda *a: (built.append(a), build(*a)))
    libraries = [None] * 4

    def work(i):
        libraries[i] = native_support.library(source, SEVEN=7)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.number() for each in libraries] == [7] * 4
    assert len(built) == 1
    native_support._loaded.clear()
    assert native_support.library(source, SEVEN=7).number() == 7
    assert len(built) == 1
    assert native_support.library(source, SEVEN=8).number() == 8
    assert len(built) == 2
