"""Training on real digits, scikit-learn's 8×8 images: a few steps on the same ones, or until held-out ones are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["learn_digits", "train_on_digits"]


def _digits() -> tuple[Tensor, Tensor]:
    datasets = pytest.importorskip("sklearn.datasets", reason="the digits come with the extra train")
    pixels, labels = datasets.load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels)


def train_on_digits(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, images: int = 64) -> list[float]:
    """The loss before each step, all images in every step; `model` takes one channel and gives ten logits."""
    device = next(model.parameters()).device
    x, y = (t[:images].to(device) for t in _digits())
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def learn_digits(model: nn.Module, epochs: int, batch: int = 32) -> float:
    """The accuracy on 360 held-out digits after training on the others."""
    x, y = _digits()
    held, learnt = torch.randperm(len(y), generator=torch.Generator().manual_seed(0)).split([360, len(y) - 360])
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, epochs * (len(learnt) // batch), pct_start=0.2)
    model.train()
    for _ in range(epochs):
        shuffled = learnt[torch.randperm(len(learnt))]
        for rows in shuffled[: len(learnt) // batch * batch].split(batch):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        return (model.eval()(x[held]).argmax(1) == y[held]).float().mean().item()
