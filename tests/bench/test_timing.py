"""Times are medians of the wanted number of repetitions."""

import time

import pytest
import torch

from nearsight.bench import timing
from nearsight.bench.timing import Effort, _median, copy_bandwidth, time_on_cpu


def test_a_sleep_takes_as_long_as_it_takes():
    timings = time_on_cpu(
        {"long": lambda: time.sleep(0.05), "short": lambda: time.sleep(0.005)}, Effort(0.06, least=3, most=5)
    )
    assert 49 < timings["long"].ms < 1000
    assert 4.9 < timings["short"].ms < timings["long"].ms
    assert timings["long"].repeats == 3
    assert timings["short"].repeats == 5


def test_a_slow_start_does_not_count():
    calls = []

    def step():
        calls.append(None)
        time.sleep(0.1 if len(calls) == 1 else 0.001)

    timing = time_on_cpu({"step": step}, Effort(0.01, least=5, most=5))["step"]
    assert timing.ms < 50
    assert len(calls) == 7  # one to warm up, one to learn the duration, five that count


def test_one_slow_sample_moves_neither_median_nor_spread_far():
    middle, spread = _median([1.0, 1.1, 1.2, 1.0, 1.1, 50.0, 1.2])
    assert middle == 1.1
    assert spread == pytest.approx(0.2 / 1.1)
    assert _median([2.0, 4.0]) == (3.0, pytest.approx(2 / 3))


def test_the_contenders_take_turns():
    order = []
    time_on_cpu({name: lambda name=name: order.append(name) for name in "ab"}, Effort(0, least=3, most=3))
    assert "".join(order[4:]) == "ababab"


def test_bandwidth_counts_what_is_read_and_what_is_written(monkeypatch):
    ran = []

    def in_milliseconds(steps, effort):
        ran.extend(step() for step in steps.values())
        return {"copy": timing.Timing(50.0, 0.0, 1), "kernel": timing.Timing(40.0, 0.0, 1)}

    monkeypatch.setattr(timing, "time_on_cpu", in_milliseconds)
    found = copy_bandwidth(torch.device("cpu"), Effort(0, least=1, most=1))
    assert len(ran) == 2
    assert found == pytest.approx(2 * ran[0].numel() * ran[0].element_size() / 0.040)


@pytest.mark.gpu
def test_a_graph_replay_is_no_slower_than_launches():
    from nearsight.bench.timing import time_on_cuda

    x = torch.randn(64, 64, device="cuda")
    timing = time_on_cuda(lambda: (x @ x).relu().sin(), Effort(0.02, least=10, most=50))
    assert 0 < timing.ms <= 1.1 * timing.eager_ms
    assert timing.note is None


@pytest.mark.gpu
def test_a_replayed_step_hides_the_host():
    from nearsight.bench.timing import launched_ms, replayed_ms

    x, effort = torch.randn(64, 64, device="cuda"), Effort(0.02, least=10, most=50)

    def step():
        y = x
        for _ in range(50):
            y = y.sin()

    assert replayed_ms(step, effort)[0] < launched_ms(step, effort)[0]
    with pytest.raises(Exception, match="captur"):
        replayed_ms(lambda: float(x.sum()), effort)


@pytest.mark.gpu
def test_what_cannot_be_captured_is_timed_as_it_is():
    from nearsight.bench.timing import time_on_cuda

    x = torch.randn(64, 64, device="cuda")
    timing = time_on_cuda(lambda: float(x.sum()), Effort(0.02, least=10, most=50))
    assert timing.ms == timing.eager_ms
    assert timing.note.startswith("launched eagerly: cannot be captured (")
    # Neither the current stream nor the random generator remembers the failed capture.
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.isfinite(torch.randn(64, 64, device="cuda").matmul(x).sum())
    assert time_on_cuda(lambda: x @ x, Effort(0.02, least=10, most=50)).note is None
