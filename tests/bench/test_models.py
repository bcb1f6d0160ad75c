"""Networks are checked against their float64 selves, then trained a few steps."""

import pytest
import timm
import torch
from torch import nn

import nearsight  # noqa: F401
from nearsight.bench import models
from nearsight.bench.driver import clock
from nearsight.bench.models import find_network_fault, run_networks, wanted_networks
from nearsight.bench.timing import Effort, Timing
from nearsight.ops.local import functional as local_functional

CPU = torch.device("cpu")
ONCE = Effort(0, least=1, most=1)
NANO = {"resnet_nano": None, "sasa_resnet_nano": "resnet_nano", "qna_vit_nano": "resnet_nano"}


@pytest.fixture
def nano(monkeypatch):
    monkeypatch.setattr(models, "NETWORKS", NANO)


def train(names, **options):
    settings = {"batch": 2, "size": 16, "compiled": False, "deadline": clock(None)} | options
    return run_networks(names, CPU, torch.float32, ONCE, **settings)


def test_networks_are_timed_beside_their_peers(nano):
    results = train(list(NANO))
    assert [r.status for r in results] == ["ok"] * 3
    assert all(r.eager_images_s > 0 and r.eager_bytes > 0 and r.parameters > 1000 for r in results)
    assert results[0].eager_over_peer is None
    assert results[1].eager_over_peer == pytest.approx(results[1].eager_images_s / results[0].eager_images_s)
    assert results[1].bytes_over_peer == pytest.approx(results[1].eager_bytes / results[0].eager_bytes)


def test_a_network_with_a_wrong_kernel_gets_no_speed(nano, monkeypatch):
    entry = local_functional.ENTRY
    first = next(b for b in entry.backends if b.name == "torch")
    right = first.run

    def wrong(call):
        out = right(call)
        return out if out.dtype == torch.float64 else out * 1.05

    changed = entry._replace(backends=(first._replace(run=wrong), entry.backends[-1]))
    monkeypatch.setattr(local_functional, "ENTRY", changed)
    peer, ours = train(["resnet_nano", "sasa_resnet_nano"])
    assert peer.eager_images_s > 0
    assert ours.status == "wrong"
    assert ours.note.startswith("wrong, not timed: output: relative error")
    assert ours.eager_images_s is None
    assert ours.eager_over_peer is None


def test_a_wrong_gradient_is_found():
    class Off(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = timm.create_model("resnet_nano", num_classes=models.CLASSES)

        def forward(self, x):
            out = self.net(x)
            return out if x.dtype == torch.float64 else 1.05 * out - 0.05 * out.detach()

    images = torch.randn(2, 3, 16, 16)
    assert find_network_fault(timm.create_model("resnet_nano", num_classes=models.CLASSES), images) is None
    assert find_network_fault(Off(), images).startswith("gradients: relative error 5.0")


def test_a_branch_that_starts_at_zero_hides_nothing():
    class Off(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, models.CLASSES)
            self.gamma = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            x = x.mean((2, 3))
            wrong = 1.0 if x.dtype == torch.float64 else 1.5
            return self.head(x + self.gamma * x.square() * wrong)

    assert find_network_fault(Off(), torch.randn(2, 3, 4, 4)).startswith("output: relative error")


def test_an_unknown_network_and_a_spent_budget_are_said(nano, monkeypatch):
    monkeypatch.setattr(models, "NETWORKS", {**NANO, "no_such_net": "resnet_nano"})
    (unknown,) = train(["no_such_net"])
    assert unknown.status == "failed"
    assert "no_such_net" in unknown.note
    (late,) = train(["resnet_nano"], compiled=True, deadline=clock(0))
    assert late.compiled_images_s is None
    assert late.note == "not compiled: the budget of 0 s was spent; choose with --filter"


def test_filters_keep_the_peer():
    assert wanted_networks(["expatt"]) == [
        "resnet50",
        "expatt_resnet50",
        "mobilenetv2_100",
        "expatt_mobilenetv2_100",
    ]
    assert wanted_networks(["sasa convstem"]) == ["resnet50", "sasa_resnet50_convstem"]
    assert wanted_networks(["no such"]) == []
    assert wanted_networks([]) == list(models.NETWORKS)


def test_ratios_compare_runs_of_one_kind():
    peer = models.NetworkResult("resnet50", None, False, "bfloat16", 4, 64, eager_images_s=10.0, replayed_images_s=40.0)
    ours = models.NetworkResult("sasa_resnet50", "resnet50", True, "bfloat16", 4, 64)
    ours.eager_images_s, ours.compiled_images_s, ours.replayed_images_s = 5.0, 30.0, 36.0
    models._add_ratios([peer, ours])
    assert (ours.eager_over_peer, ours.compiled_over_peer, ours.replayed_over_peer) == (0.5, None, 0.9)
    assert ours.bytes_over_peer is None
    # Memory of compiled steps where both were, of plain ones otherwise.
    for held, ratio in ((None, 0.5), (30, 1.5)):
        peer.eager_bytes, ours.eager_bytes, peer.compiled_bytes, ours.compiled_bytes = 10, 5, 20, held
        models._add_ratios([peer, ours])
        assert ours.bytes_over_peer == ratio


def test_images_per_second_are_the_batch_over_the_steps_time(monkeypatch):
    """A step of 250 ms on five images; replayed in 100."""
    monkeypatch.setattr(models, "time_on_cpu", lambda steps, effort: {n: Timing(250.0, 0.1, 3) for n in steps})
    monkeypatch.setattr(models, "replayed_ms", lambda step, effort: (100.0, 0.1))
    result = models.NetworkResult("resnet26", None, False, "float32", 5, 32)
    model = timm.create_model("resnet_nano", num_classes=models.CLASSES)
    step = models._Step(model, model, result, CPU, torch.float32)
    rate, spread, held = step.measure(ONCE)
    assert (rate, spread) == (20.0, 0.1)
    assert held > 0
    step()
    assert step.replay(ONCE) == 50.0
