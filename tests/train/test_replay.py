"""The optimiser's step as a CUDA graph, as far as it can be seen without a GPU (with one: test_engine.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import timm.optim
import torch

from nearsight.train import checkpoints, replay
from nearsight.train.engine import Trainer
from nearsight.train.replay import LAUNCHED, SMALLEST, ReplayedUpdate
from tests.train.support import small


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


def test_a_capture_that_fails_gives_the_gradients_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    weight = torch.nn.Parameter(torch.zeros(2))
    told: list[str] = []
    update = ReplayedUpdate(Watched([weight], lr=0.5), None, told.append)
    for _ in range(LAUNCHED + 1):
        weight.grad = torch.tensor([3.0, 4.0])
        update()
    torch.testing.assert_close(weight.detach(), -0.5 * (LAUNCHED + 1) * torch.tensor([3.0, 4.0]))
    assert told == ["the optimiser's step is launched, not replayed: not today"]


def stand_in_for_graphs(update: ReplayedUpdate, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Graphs without a GPU: nothing runs while one is captured; a replay steps with what lies in the fixed places.

    Gives the list of what was launched and replayed.
    """
    ran: list[str] = []
    step = update._update

    class Graph:
        def replay(self) -> None:
            ran.append("replayed")
            given = [p.grad for p in update.trained]
            for parameter, gradient in zip(update.trained, update.gradients, strict=True):
                parameter.grad = gradient
            with update._stepping_at([float(rate) for rate in update.rates]):
                step()
            for parameter, before in zip(update.trained, given, strict=True):
                parameter.grad = before

    @contextmanager
    def capture(graph: Graph, **options: Any) -> Iterator[None]:
        monkeypatch.setattr(update, "_update", lambda: None)
        yield
        monkeypatch.setattr(update, "_update", launch)

    def launch() -> None:
        ran.append("launched")
        step()

    monkeypatch.setattr(update, "_update", launch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return ran


def test_a_replay_steps_with_the_gradients_and_rates_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups with rates of their own; at one step another parameter has no gradient, which no graph has seen."""

    def build() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
        groups = [{"params": weights[:1], "lr": 1.0}, {"params": weights[1:], "lr": 1.0}]
        return weights, torch.optim.SGD(groups, momentum=0.5)

    (ours, optimizer), (theirs, plain) = build(), build()
    update = ReplayedUpdate(optimizer, 1.0, pytest.fail)
    ran = stand_in_for_graphs(update, monkeypatch)
    steps = LAUNCHED + 4
    for number in range(steps):
        for weights, one in ((ours, optimizer), (theirs, plain)):
            for scale, (weight, group) in enumerate(zip(weights, one.param_groups, strict=True), 1):
                weight.grad = torch.arange(1.0, 1 + len(weight)) * (number - 2) * scale
                group["lr"] = 0.1 * scale / (1 + number)
            if number == steps - 2:
                weights[1].grad = None
        update()
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        plain.step()
        for weight, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(weight, wanted)
    assert ran == ["launched"] * LAUNCHED + ["replayed", "replayed", "launched", "replayed"]


def test_which_optimisers_suit() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    assert ReplayedUpdate.suits(torch.optim.AdamW([weight]))
    assert not ReplayedUpdate.suits(torch.optim.SGD([weight]))


def test_a_resumed_run_goes_on_as_one_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading makes a step of size 0; in the form for capturing that would be 0/0 and end in NaN."""
    monkeypatch.setattr(timm.optim.nadamw, "_check_capturable_devices", lambda *args: None)
    monkeypatch.setattr(timm.optim.Muon, "_cuda_graph_capture_health_check", lambda self: None, raising=False)
    monkeypatch.setattr(timm.optim.Muon, "_accelerator_graph_capture_health_check", lambda self: None, raising=False)
    monkeypatch.setattr(replay, "LAUNCHED", 1000)
    monkeypatch.setattr(
        Trainer, "_replayed_update", lambda self: ReplayedUpdate(self.inner, self.config.train.clip, pytest.fail)
    )

    def losses(run: str, steps: int, resume: bool = False) -> list[float]:
        keys = {"train": {"max_steps": steps}, "log": {"every": 1}, "schedule": {"warmup_epochs": 0.5}}
        config = small(**keys, optimizer={"name": "nmuon", "lr": 0.01, "weight_decay": 0.1})
        found = checkpoints.listed(tmp_path / run)[-1] if resume else None
        return Trainer(config, tmp_path / run, quiet=True, resume=found).fit().losses

    whole = losses("whole", 6)
    assert losses("parts", 3) + losses("parts", 6, resume=True) == whole


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adamw", "nmuon"])
def test_replayed_steps_move_weights_as_launched_ones_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same gradients, so that both runs may be held to the last bits of an update; a rate of 0, clipping, decay."""
    rates = (0.0, 0.01, 0.02, 0.05, 0.04, 0.03, 0.02, 0.01, 0.001)

    def run(launched: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        monkeypatch.setattr(replay, "LAUNCHED", launched)
        draw = torch.Generator("cuda").manual_seed(3)
        shapes = ((24, 16), (8, 4, 3, 3), (12,), (5, 7))
        weights = [torch.nn.Parameter(torch.randn(s, generator=draw, device="cuda")) for s in shapes]
        before = [weight.detach().clone() for weight in weights]
        optimizer = timm.optim.create_optimizer_v2(weights, opt=name, lr=0.01, weight_decay=0.1)
        update = ReplayedUpdate(optimizer, 0.5, pytest.fail)
        for rate in rates:
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=draw, device="cuda")
            weights[-1].grad = torch.zeros_like(weights[-1])
            for group in optimizer.param_groups:
                group["lr"] = rate
            update()
        assert (update.graph is not None) == (launched < len(rates))
        return before, [weight.detach() for weight in weights]

    before, launched = run(len(rates))
    _, replayed = run(LAUNCHED)
    for start, theirs, ours in zip(before, launched, replayed, strict=True):
        moved = (theirs - start).abs().max().item()
        assert moved > 1e-3
        # In a graph timm's Muon multiplies its bfloat16 update by a tensor: rounded once more.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=moved * 2**-8)


def test_branches_of_a_step_are_the_step() -> None:
    """Every parameter in one of them, with its group's options; stepped one after the other they are the whole."""

    def build() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        torch.manual_seed(0)
        shapes = [(16, 8, 3, 3), (8, 8), (24, 12), (7,), (5, 4, 1, 1), (3,), (6, 30)]
        weights = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        groups = [{"params": weights[:3], "weight_decay": 0.1}, {"params": weights[3:], "lr": 0.3}]
        return weights, timm.optim.create_optimizer_v2(groups, opt="nmuon", lr=0.1)

    (ours, optimizer), (theirs, whole) = build(), build()
    for step in range(3):
        torch.manual_seed(step)
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        ours[1].grad = theirs[1].grad = None  # takes no part
        whole.step()
        groups = optimizer.param_groups
        dealt = replay.branches(optimizer, 3)
        assert len(dealt) == 3
        for own in dealt:
            optimizer.param_groups = own
            optimizer.step()
        optimizer.param_groups = groups
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def test_branches_cost_about_the_same() -> None:
    weights = [torch.nn.Parameter(torch.zeros(64, n)) for n in (64, 64, 64, 64, 4096, 4096)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    dealt = replay.branches(torch.optim.SGD(weights, lr=0.1), 2)
    assert [sorted(p.shape[1] for group in own for p in group["params"]) for own in dealt] == [[64, 64, 4096]] * 2
    assert len(replay.branches(torch.optim.SGD(weights[:2], lr=0.1), 8)) == 2
