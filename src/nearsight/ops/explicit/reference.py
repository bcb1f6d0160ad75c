"""Explicit attention by its definition: the dense HW×HW map, its rows divided by their sums. Slow, large, exact."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nearsight.ops.dispatch import full_precision
from nearsight.ops.explicit.call import RADIUS_FLOOR, ExplicitCall

__all__ = ["map_at", "pixels", "run", "smallest_normaliser", "weights"]


def map_at(kind: str, dy: Tensor, dx: Tensor, height: int, width: int, radius: Tensor | None) -> Tensor:
    """G at the pixel distances dy and dx (broadcast against each other) of an H×W map: [1 or heads, …]."""
    dy, dx = (distance[None] for distance in torch.broadcast_tensors(dy, dx))
    if kind == "constant":
        return torch.ones_like(dy * dx)
    if radius is None:
        distance = ((dy.square() + dx.square()) / (height * height + width * width)).sqrt()
        return 1 - distance if kind == "linear" else 0.5 * (1 + (math.pi * distance).cos())
    radius = radius.clamp(min=RADIUS_FLOOR).reshape(-1, *[1] * (dy.dim() - 1))
    y, x = dy / height, dx / width
    if kind == "gaussian":
        # Divided by σ before squaring: σ² of a small radius would underflow.
        return (-0.5 * ((y / radius).square() + (x / radius).square())).exp()
    distance = y.abs() + x.abs() if kind == "exp_manhattan" else (y.square() + x.square()).sqrt()
    return (-distance / radius).exp()


def smallest_normaliser(dtype: torch.dtype) -> float:
    """A row whose weights sum to less has nothing to attend to: below it 1/sum is not finite in every gradient."""
    return math.sqrt(torch.finfo(dtype).tiny)


def weights(
    kind: str,
    size: tuple[int, int],
    queries: Tensor,
    radius: Tensor | None,
    offset: float,
    key_mask: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The rows of Norm(G + offset) of the query pixels [N, 2] (y, x): [B or 1, heads or 1, N, H, W]."""
    height, width = size
    device = queries.device
    rows = torch.arange(height, device=device, dtype=dtype)[None, :, None]
    columns = torch.arange(width, device=device, dtype=dtype)[None, None, :]
    dy = queries[:, 0, None, None] - rows
    dx = queries[:, 1, None, None] - columns
    raw = (map_at(kind, dy, dx, height, width, radius) + offset)[None]
    if key_mask is not None:
        raw = raw.masked_fill(~key_mask[:, None, None], 0.0)
    total = raw.sum((-2, -1), keepdim=True)
    something = total > smallest_normaliser(dtype)
    return raw.masked_fill(~something, 0.0) / total.masked_fill(~something, 1.0)


def pixels(size: tuple[int, int], device: torch.device) -> Tensor:
    """Every pixel (y, x) of a map, row by row: [H·W, 2]."""
    index = torch.arange(size[0] * size[1], device=device)
    return torch.stack((index // size[1], index % size[1]), dim=1)


def run(call: ExplicitCall) -> Tensor:
    values = call.values
    batch, height, width, channels = values.shape
    with full_precision(values):
        every = pixels((height, width), values.device)
        rows = weights(call.kind, (height, width), every, call.radius, call.offset, call.key_mask, call.map_dtype)
        v = values.to(call.map_dtype).reshape(batch, height * width, call.heads, channels // call.heads)
        if call.key_mask is not None:
            v = v.masked_fill(~call.key_mask.reshape(batch, height * width, 1, 1), 0.0)
        out = torch.einsum("bnqp,bpnd->bqnd", rows.flatten(3).expand(batch, call.heads, -1, -1), v)
    return out.reshape(values.shape).to(values.dtype)
