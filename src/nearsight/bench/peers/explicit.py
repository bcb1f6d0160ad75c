"""Explicit attention with its HW×HW map in memory, as the equation reads."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dense_gaussian"]


def dense_gaussian(values: Tensor, radius: Tensor) -> Tensor:
    """Norm(G + 1) V: the map computed in float32, its product with the values in their dtype."""
    height, width = values.shape[1:3]
    index = torch.arange(height * width, device=values.device)
    y, x = (index // width) / height, (index % width) / width
    squared = (y[:, None] - y).square() + (x[:, None] - x).square()
    weights = torch.exp(-squared / (2 * radius.square())) + 1
    weights = (weights / weights.sum(1, keepdim=True)).to(values.dtype)
    # One product for the whole batch: torch.matmul would make one per image, and a gradient of the map for each.
    return torch.einsum("qp,bpc->bqc", weights, values.flatten(1, 2)).unflatten(1, (height, width))
