"""The memory meter counts what a call holds at its highest, also inside operators."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from nearsight.bench.memory import peak_extra_bytes

CPU = torch.device("cpu")
MB = 1_000_000


@torch.library.custom_op("nearsight_test::scratch", mutates_args=())
def scratch(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(MB, dtype=torch.uint8)
    buffer.fill_(1)
    return x + buffer[0]


def test_only_what_lives_at_one_time_counts():
    def call():
        first = torch.zeros(MB, dtype=torch.uint8)
        second = first + 1
        del first
        return second + 1

    assert peak_extra_bytes(call, CPU) == pytest.approx(2 * MB, rel=0.01)


def test_arguments_do_not_count_and_views_cost_nothing():
    x = torch.zeros(4 * MB, dtype=torch.uint8)
    assert peak_extra_bytes(lambda: x.view(4, MB).transpose(0, 1), CPU) < 1000


def test_scratch_inside_a_registered_operator_counts():
    assert peak_extra_bytes(lambda: scratch(torch.zeros(1)), CPU) == pytest.approx(MB, rel=0.01)


def test_what_the_backward_holds_counts():
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    window = F.unfold(x, 7, padding=3)
    unfolded = window.numel() * 4

    def both():
        return torch.autograd.grad(F.unfold(x, 7, padding=3).square().sum(), x)

    # The unfolded map, its square's gradient, and what leads there.
    assert 2 * unfolded < peak_extra_bytes(both, CPU) < 5 * unfolded
    assert peak_extra_bytes(lambda: F.unfold(x, 7, padding=3), CPU) < 1.1 * unfolded


def test_nothing_is_written_to_the_terminal():
    """In a process of its own: the profiler reads how much to say when it first starts."""
    program = (
        "import torch; from nearsight.bench.memory import peak_extra_bytes; "
        "peak_extra_bytes(lambda: torch.zeros(3), torch.device('cpu'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
