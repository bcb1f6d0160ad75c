"""Classification's loss and metrics by hand: what is mixed, what the labels then are, what is averaged over what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from nearsight.train.data.batches import Batch, Where
from nearsight.train.data.images import LeftOut
from nearsight.train.tasks import build_task
from nearsight.train.tasks.classify import Classify
from tests.train.support import small

CPU = Where(torch.device("cpu"))
CLASSES = 10
LOGITS = torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _numpys_seed() -> None:
    """timm's mixing draws from it."""
    np.random.seed(0)


@pytest.fixture(scope="module")
def tasks() -> Any:
    """The task of a loss section; data and network are made once."""
    task: Any = build_task(small(data={"batch_size": 4}), CPU, print)

    def of(**loss: Any) -> Any:
        task.config = small(data={"batch_size": 4}, loss={"mixup": 0.0, "label_smoothing": 0.0, **loss})
        task.mixup = task._mixup()
        return task

    return of


def mixed(task: Any, epoch: int = 0) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """What the network is shown of four images, each of a level and a class of its own, and the loss of fixed answers."""
    seen = []

    def network(images: torch.Tensor) -> torch.Tensor:
        seen.append(images.clone())
        return LOGITS

    levels = torch.arange(1.0, 5).view(4, 1, 1, 1).repeat(1, 1, 8, 8)
    loss, shown = task.loss(network, Batch(levels, torch.arange(4)), epoch)
    return seen[0], loss, shown


def by_hand(name: str, share: float, smoothing: float) -> torch.Tensor:
    """The loss where `share` of an image is its own and the rest of its mirror image in the batch."""
    hot = F.one_hot(torch.arange(4), CLASSES).float()
    soft = share * hot + (1 - share) * hot.flip(0)
    soft = (1 - smoothing) * soft + smoothing / CLASSES
    if name == "bce":
        return F.binary_cross_entropy_with_logits(LOGITS, soft)
    return -(soft * LOGITS.log_softmax(1)).sum(1).mean()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("name", ["cross_entropy", "bce"])
@pytest.mark.parametrize("how", [{}, {"mixup": 0.8}, {"cutmix": 1.0}], ids=["plain", "mixup", "cutmix"])
def test_labels_are_mixed_as_the_images_are(tasks: Any, how: dict[str, float], name: str, smoothing: float) -> None:
    shares = set()
    for _ in range(3):
        images, loss, shown = mixed(tasks(name=name, label_smoothing=smoothing, **how))
        # Image 0 has level 1, what is mixed into it level 4: the levels say how much of it is left.
        share = (4 - float(images[0].mean())) / 3
        torch.testing.assert_close(loss, by_hand(name, share, smoothing))
        assert (set(images.unique().tolist()) <= {1, 2, 3, 4}) == ("mixup" not in how)
        own = torch.arange(4) if share >= 0.5 else torch.arange(3, -1, -1)
        assert shown["accuracy"] == (LOGITS.argmax(1) == own).float().mean()
        shares.add(round(share, 4))
    assert shares == {1.0} if not how else len(shares) == 3


def test_mixing_ends_at_its_epoch_and_comes_as_often_as_asked(tasks: Any) -> None:
    def changed(epoch: int = 0, **loss: Any) -> list[str]:
        """Of forty batches: which were blended, which got a rectangle, which stayed as they were."""
        kinds = []
        for _ in range(40):
            images, _, _ = mixed(tasks(**loss), epoch)
            flat = all(len(image.unique()) == 1 for image in images)
            kinds.append("none" if set(images.unique().tolist()) == {1, 2, 3, 4} and flat else "mix" if flat else "cut")
        return kinds

    assert set(changed(1, mixup=1.0, mix_off_epoch=2)) == {"mix"}
    assert set(changed(2, mixup=1.0, mix_off_epoch=2)) == {"none"}
    assert set(changed(mixup=1.0, cutmix=1.0, switch_prob=0.0)) == {"mix"}
    assert "mix" not in changed(mixup=1.0, cutmix=1.0, switch_prob=1.0)
    assert set(changed(mixup=1.0, mix_prob=0.0)) == {"none"}
    assert 4 <= changed(mixup=1.0, mix_prob=0.5).count("none") <= 36


@pytest.mark.parametrize("classes", [10, 12])
def test_metrics_are_means_over_images_not_batches(classes: int) -> None:
    """Batches of unequal size, some of whose images only fill them up; the fifth best counts from eleven classes on."""
    sizes, logits = (4, 4, 1), torch.randn(9, classes)
    targets = logits.argsort(1, descending=True)[torch.arange(9), torch.tensor([0, 4, 5, 0, 1, 9, 0, 4, 6])]
    counted = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1, 1]).bool()
    parts = [t.split(sizes) for t in (logits.view(9, classes, 1, 1), targets, counted)]

    class Network(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            assert not self.training
            return images.flatten(1)

    def epoch(number: int) -> Any:
        return (Batch(*part) for part in zip(*parts, strict=True))

    notes: list[str] = []
    names = [str(n) for n in range(classes)]
    task: Any = SimpleNamespace(
        where=CPU,
        classes=names,
        evaluation=SimpleNamespace(epoch=epoch),
        left_out=LeftOut(notes.append),
        config=small(),
    )
    network = Network()
    got = Classify.evaluate(task, network)
    assert network.training
    assert got.pop("images") == 8
    assert got.pop("loss") == pytest.approx(float(F.cross_entropy(logits[counted], targets[counted])), rel=1e-5)
    assert got == pytest.approx({"accuracy": 2 / 8, **({"top5": 5 / 8} if classes > 10 else {})})
