"""A few steps of training on real digits: the first of scikit-learn's 8×8 images, all of them in every step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

__all__ = ["train_on_digits"]


def train_on_digits(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, images: int = 64) -> list[float]:
    """The loss before each step; `model` takes one channel and gives ten logits."""
    datasets = pytest.importorskip("sklearn.datasets", reason="the digits come with the extra train")
    pixels, labels = datasets.load_digits(return_X_y=True)
    device = next(model.parameters()).device
    x = torch.tensor(pixels[:images], dtype=torch.float32, device=device).view(images, 1, 8, 8) / 8 - 1
    y = torch.tensor(labels[:images], device=device)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses
