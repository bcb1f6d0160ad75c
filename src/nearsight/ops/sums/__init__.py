"""Sums over what the programs of a kernel left, in a fixed order: the same bits every time, and few launches.

`torch.sum` over a long first axis with a short rest leaves most of a GPU idle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearsight.ops.first_calls import launch
from nearsight.ops.triton_support import early_launch

__all__ = ["add_rows", "sum_rows"]


def add_rows(shares: Tensor, parts: int) -> Tensor:
    """[n, …] float32 → [at most `parts`, …]: row j of the result is the sum of rows j, j + parts, j + 2·parts, …"""
    from nearsight.ops.sums import kernels

    rows = shares.shape[0]
    parts = min(parts, rows)
    out = torch.empty((parts, *shares.shape[1:]), dtype=torch.float32, device=shares.device)
    size = out[0].numel()
    grid = (-(-size // 128), parts)
    constants = {"BLOCK": 128, "ROWS": 32, "num_warps": 4, **early_launch(shares.device)}
    launch(kernels.add_rows, grid, shares, out, rows, size, **constants)
    return out


# Up to so many rows one launch is faster than two: few columns a program, so that there are programs enough.
MOST_AT_ONCE = 2560
COLUMNS = 16


def sum_rows(shares: Tensor) -> Tensor:
    """[n, …] float32 → […]: the sum over the first axis."""
    from nearsight.ops.sums import kernels

    if shares.shape[0] > MOST_AT_ONCE:
        return add_rows(add_rows(shares, 64), 1)[0]
    out = torch.empty(shares.shape[1:], dtype=torch.float32, device=shares.device)
    grid = (-(-out.numel() // COLUMNS), 1)
    constants = {"BLOCK": COLUMNS, "ROWS": 512, "num_warps": 16, **early_launch(shares.device)}
    launch(kernels.add_rows, grid, shares, out, shares.shape[0], out.numel(), **constants)
    return out
