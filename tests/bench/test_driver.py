"""Nothing wrong gets a time, one failure does not end a run, and the ratios are what they say."""

import time

import pytest
import torch

from nearsight.bench import driver, layers, ops
from nearsight.bench.contest import Contender, Contest, RefusedError, Runner
from nearsight.bench.driver import Clock, Result, add_ratios, run_contests, wanted
from nearsight.bench.ops import OpShape, explicit_contest, local_contest, qna_contest
from nearsight.bench.timing import Effort
from nearsight.layers.relative_attention import RelativeAttention2d
from nearsight.ops import dispatch, native_support
from nearsight.ops.local import functional as local_functional
from nearsight.ops.qna import native_impl

CPU = torch.device("cpu")
ONCE = Effort(0, least=1, most=1)
LOCAL, QNA, EXPLICIT = OpShape(6, 5, 16, 2, 3), OpShape(5, 6, 16, 4, 3), OpShape(6, 5, 8)


def run(*builders, **options):
    return run_contests(builders, CPU, ONCE, bandwidth=1e9, **options)


def local(**options):
    return local_contest(LOCAL, 3, CPU, torch.float32, **options)


def add_backend(monkeypatch, run_call, refusal=lambda call: None, name="fresh"):
    """Put another backend before the others, as the op's own list would have it."""
    entry = local_functional.ENTRY
    changed = entry._replace(backends=(dispatch.Backend(name, run_call, refusal), *entry.backends))
    monkeypatch.setattr(local_functional, "ENTRY", changed)
    monkeypatch.setitem(dispatch._OPS, "local_attention", changed)
    return entry.backends[-1].run  # the reference


def times(result):
    return [getattr(result, n) for n in ("forward_ms", "total_ms", "forward_bytes", "total_bytes")]


@pytest.mark.parametrize(
    ("build", "shape", "names"),
    [
        (local_contest, LOCAL, {"nearsight torch", "conv 3x3, NCHW", "conv 3x3, channels-last", "unfold"}),
        (
            qna_contest,
            QNA,
            {"nearsight torch", "depthwise conv, NCHW", "depthwise conv, channels-last", "eager, unsafe"},
        ),
        (explicit_contest, EXPLICIT, {"nearsight torch", "dense map"}),
    ],
)
def test_every_op_is_timed_beside_its_peers(build, shape, names):
    results = run(lambda: build(shape, 3, CPU, torch.float32))
    timed = [r for r in results if r.status == "ok"]
    # On a machine without a C compiler it refuses.
    loops = build is qna_contest and native_support.common_refusal(native_impl.SOURCE) is None
    assert {r.contender for r in timed} == names | ({"nearsight native"} if loops else set())
    assert all(value > 0 for r in timed for value in times(r))
    assert all(r.status == "refused" and "CUDA" in r.note for r in results if r.contender == "nearsight triton")
    assert all(r.sizes["batch"] == 3 and r.sizes["height"] == shape.height for r in results)


def test_a_new_backend_appears_by_itself(monkeypatch):
    reference = local_functional.ENTRY.backends[-1].run
    add_backend(monkeypatch, reference)
    results = run(local)
    assert results[0].contender == "nearsight fresh"
    assert results[0].ours
    assert results[0].total_ms > 0


@pytest.mark.parametrize("fault", ["output", "gradient", "unwritten"])
def test_a_wrong_backend_gets_no_time(monkeypatch, fault):
    reference = local_functional.ENTRY.backends[-1].run

    def wrong(call):
        if fault == "output":
            return reference(call) * 1.01
        if fault == "gradient":
            return reference(call._replace(v=1.03 * call.v - 0.03 * call.v.detach()))
        right = reference(call)
        out = torch.empty_like(right)
        out[:, 1:] = right[:, 1:]  # the first row is what the memory held before
        return out

    add_backend(monkeypatch, wrong)
    first, *others = run(local)
    assert first.status == "wrong"
    expected = {"output": "output: error", "gradient": "gradient of v: error", "unwritten": "output: not finite"}
    assert first.note.startswith(f"wrong, not timed: {expected[fault]}")
    assert times(first) == [None] * 4
    assert all(r.ours_over_this_total is None for r in others), "no ratio is formed with a wrong kernel"
    assert any(r.total_ms for r in others)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_refusal_and_a_failure_are_cells_of_their_own(monkeypatch):
    def broken(call):
        raise RuntimeError("the kernel fell over\nwith more below")

    add_backend(monkeypatch, broken)
    failed, *others = run(local)
    assert failed.status == "failed"
    assert failed.note == "failed: RuntimeError: the kernel fell over"
    assert times(failed) == [None] * 4
    add_backend(monkeypatch, broken, refusal=lambda call: "needs a sunny day, got rain", name="picky")
    refused, *_ = run(local)
    assert refused.status == "refused"
    assert refused.note == "refuses: needs a sunny day, got rain"
    assert others[-1].total_ms > 0


@pytest.mark.parametrize(
    ("error", "status", "note"),
    [
        (
            RuntimeError("wrapped\n  NotImplementedError: NYI: E must be at least 16 but got E=8"),
            "refused",
            "at least 16",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to …"), "failed", "out of memory"),
        (RefusedError("not here"), "refused", "refuses: not here"),
        (ValueError(""), "failed", "failed: ValueError: "),
    ],
)
def test_what_a_contender_raises_becomes_one_line(error, status, note):
    result = Result("s", "1x1", "c", False, "float32")

    def action():
        raise error

    driver.guard(result, action)
    assert result.status == status
    assert note in result.note
    assert "\n" not in result.note


def test_the_floor_is_every_operand_once():
    local_floor = local().floor_bytes
    operand = 3 * 6 * 5 * 16 * 4
    assert local_floor == (4 * operand, 12 * operand)
    qna = qna_contest(QNA, 3, CPU, torch.float32)
    scores, values = 3 * 5 * 6 * 2 * 4 * 4, 3 * 5 * 6 * 16 * 4
    assert qna.floor_bytes == (scores + 2 * values, 3 * scores + 5 * values)
    explicit = explicit_contest(OpShape(6, 5, 12), 2, CPU, torch.bfloat16)
    values = 2 * 6 * 5 * 12 * 2
    assert explicit.floor_bytes == (2 * values, 4 * values)
    (result,) = run(lambda: local(), filters=["conv"])[-1:]
    assert result.floor_total_ms == pytest.approx(12 * operand / 1e9 * 1e3)
    assert result.total_over_floor == pytest.approx(result.total_ms / result.floor_total_ms)


def test_ratios_are_ours_over_the_row():
    rows = [Result("s", "1x1", name, name.startswith("n"), "float32") for name in ("n triton", "n torch", "peer")]
    other = Result("s", "2x2", "peer", False, "float32", total_ms=1.0)
    rows[0].status = "refused"
    rows[1].forward_ms, rows[1].total_ms, rows[1].total_bytes = 1.0, 6.0, 300
    rows[2].forward_ms, rows[2].total_ms, rows[2].total_bytes = 2.0, 3.0, 100
    add_ratios([*rows, other])
    assert (rows[2].ours_over_this_forward, rows[2].ours_over_this_total, rows[2].ours_over_this_bytes) == (0.5, 2, 3)
    assert rows[0].ours_over_this_total is None
    assert rows[1].ours_over_this_total is None
    assert other.ours_over_this_total is None


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ([], ["ours", "second", "conv 3x3", "unfold"]),
        (["unfold"], ["ours", "second", "unfold"]),
        (["second"], ["second"]),
        (["LOCAL 6x5"], ["ours", "second", "conv 3x3", "unfold"]),
        (["local conv", "second"], ["ours", "second", "conv 3x3"]),
        (["7x7"], []),
    ],
)
def test_filters(filters, names):
    contenders = [Contender(n, list, ours=n in ("ours", "second")) for n in ("ours", "second", "conv 3x3", "unfold")]
    contest = Contest("local_attention", "6x5x16", "float32", {}, contenders)
    assert [c.name for c in wanted(contest, filters)] == names


def test_what_must_be_compiled_comes_last_and_only_within_the_budget():
    order = []

    def contest(shape):
        x = torch.ones(3, requires_grad=True)

        def contender(name, compiled):
            def build():
                order.append((shape, name))
                return [Runner(lambda: x * 2, [x])]

            return Contender(name, build, compiled=compiled)

        return Contest("s", shape, "float32", {}, [contender("slow", True), contender("fast", False)])

    builders = [lambda: contest("1x1"), lambda: contest("2x2")]
    results = run(*builders)
    assert order == [("1x1", "fast"), ("2x2", "fast"), ("1x1", "slow"), ("2x2", "slow")]
    assert [(r.shape, r.contender) for r in results] == [
        ("1x1", "slow"),
        ("1x1", "fast"),
        ("2x2", "slow"),
        ("2x2", "fast"),
    ]
    late = run(*builders, deadline=Clock(-1.0))
    assert [r.status for r in late] == ["left out", "ok", "left out", "ok"]
    assert "the budget of" in late[0].note


def test_the_budget_counts_only_what_is_compiled():
    budget = Clock(1e-9)
    with budget.running():
        pass
    assert budget.over

    def contest(compiled):
        x = torch.ones(3, requires_grad=True)

        def build():
            time.sleep(0.05)
            return [Runner(lambda: x * 2, [x])]

        return Contest("s", "1x1", "float32", {}, [Contender("any", build, compiled=compiled)])

    budget = Clock(10.0)
    run(lambda: contest(False), deadline=budget)
    assert budget.spent == 0.0
    run(lambda: contest(True), deadline=budget)
    assert budget.spent >= 0.05


def test_the_faster_form_counts_and_is_named():
    x = torch.ones(3, requires_grad=True)

    def slow():
        import time

        time.sleep(0.02)
        return x * 2

    forms = [Runner(slow, [x], "slow one"), Runner(lambda: x * 2, [x], "fast one")]
    contest = Contest("s", "1x1", "float32", {}, [Contender("two", lambda: forms)])
    (result,) = run(lambda: contest)
    assert result.note == "fast one"
    assert result.total_ms < 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_around_a_wrong_kernel_gets_no_time(monkeypatch, dtype):
    entry = next(e for e in layers.LAYERS if e.subject == "LocalAttention2d")

    def build():
        return layers.layer_contest(entry, LOCAL, 3, CPU, dtype)

    assert [r.status for r in run(build)] == ["ok", "ok"]
    reference = local_functional.ENTRY.backends[-1].run
    add_backend(monkeypatch, lambda call: reference(call) * 1.2)
    ours, peer = run(build)
    assert ours.status == "wrong"
    assert times(ours) == [None] * 4
    assert peer.total_ms > 0


@pytest.mark.parametrize("entry", layers.LAYERS, ids=lambda entry: entry.subject)
def test_every_layer_is_held_to_another_way_of_computing_it(monkeypatch, entry):
    """A fault in what the layer runs must not be in what it is compared with."""
    shape = {"LocalAttention2d": LOCAL, "QnA2d": OpShape(5, 7, 16, 4, 3)}.get(entry.subject, OpShape(9, 6, 96))
    ours = layers.layer_contest(entry, shape, 3, CPU, torch.float32).contenders[0]
    assert ours.fault() is None
    run_op, attend = dispatch.run, RelativeAttention2d._attend

    # In the last image alone.
    factor = torch.tensor([1.0, 1.0, 1.03]).view(3, 1, 1, 1, 1)

    def wrong(y):
        return y * factor.view(3, *[1] * (y.dim() - 1)).to(y.dtype)

    def wrong_op(op, table, name, call):
        y = run_op(op, table, name, call)
        return y if name == "reference" else wrong(y)

    monkeypatch.setattr(dispatch, "run", wrong_op)
    monkeypatch.setattr(RelativeAttention2d, "_attend", lambda *arguments: wrong(attend(*arguments)))
    assert "output: error" in ours.fault()


@pytest.mark.parametrize("quick", [True, False])
def test_the_suites_shapes_are_the_papers(quick, monkeypatch):
    cpu = ops.op_contests(CPU, torch.float32, 1, quick=quick)
    assert [c().name for c in cpu] == [
        "local_attention 28x28x128 h8 d16 k7",
        "qna 56x56x64 h8 d8 k3",
        "explicit_attention 56x56x64",
    ]
    on_cuda = [shape.text for shape in (*ops.LOCAL, *ops.QNA, *ops.EXPLICIT)]
    assert len(on_cuda) == 13
    assert on_cuda[0] == "56x56x64 h8 d8 k7"


@pytest.mark.gpu
def test_the_gpu_suite_runs_with_graphs():
    cuda = torch.device("cuda")
    effort = Effort(0.005, least=3, most=5)
    results = run_contests(
        [lambda: local_contest(OpShape(14, 10, 64, 4, 3), 4, cuda, torch.bfloat16, compiled=True)],
        cuda,
        effort,
        bandwidth=1e12,
    )
    ok = {r.contender for r in results if r.status == "ok"}
    assert {"nearsight triton", "unfold", "conv 3x3"} <= ok, [(r.contender, r.note) for r in results]
    assert all(r.total_ms <= 1.2 * r.total_eager_ms for r in results if r.total_ms)
