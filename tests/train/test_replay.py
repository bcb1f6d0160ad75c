"""The optimiser's step as a CUDA graph, as far as it can be seen without a GPU (with one: test_engine.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nearsight.train.replay import LAUNCHED, SMALLEST, ReplayedUpdate


class Watched(torch.optim.SGD):
    """SGD that notes the rates it is stepped with."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[float] = []

    def step(self, closure: Any = None) -> Any:
        self.seen.append(self.param_groups[0]["lr"])
        return super().step(closure)


def test_a_rate_of_zero_is_never_seen_and_stays_zero() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Watched([weight], lr=0.0)
    update = ReplayedUpdate(optimizer, None, lambda text: None)
    weight.grad = torch.ones(3)
    update()
    assert optimizer.seen == [SMALLEST]
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert torch.equal(weight, torch.ones(3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the step can be captured")
def test_what_cannot_be_captured_is_launched_and_said_once() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = Watched([weight], lr=0.5)
    told: list[str] = []
    update = ReplayedUpdate(optimizer, 1.0, told.append)
    for _ in range(LAUNCHED + 3):
        weight.grad = torch.tensor([3.0, 4.0])  # clipped to a length of 1
        update()
    assert optimizer.seen == [0.5] * (LAUNCHED + 3)
    torch.testing.assert_close(weight.detach(), -0.5 * (LAUNCHED + 3) * torch.tensor([0.6, 0.8]))
    (sentence,) = told
    assert sentence.startswith("the optimiser's step is launched, not replayed: ")


def test_which_optimisers_suit() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    assert ReplayedUpdate.suits(torch.optim.AdamW([weight]))
    assert not ReplayedUpdate.suits(torch.optim.SGD([weight]))
