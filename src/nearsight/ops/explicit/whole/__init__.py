"""Launches for small maps: one kernel per direction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearsight.ops.explicit.problem import Problem
from nearsight.ops.explicit.reference import smallest_normaliser
from nearsight.ops.first_calls import launch
from nearsight.ops.triton_support import next_power_of_two

__all__ = ["LARGEST", "backward", "forward", "share_count"]

# A map of 64 pixels a side would not fit the registers.
LARGEST = 32


def forward(p: Problem, out: Tensor, least: float) -> None:
    """Write the output of the heads whose radius is below `least`."""
    from nearsight.ops.explicit.whole import kernels

    mask, mask_strides = p.mask
    launch(
        kernels.whole_forward,
        _grid(p),
        p.values,
        mask,
        p.radius,
        out,
        *p.size,
        p.offset,
        least,
        smallest_normaliser(torch.float32),
        *p.values.stride()[:3],
        *mask_strides,
        **_constants(p),
    )


def backward(p: Problem, grad: Tensor, dvalues: Tensor, shares: Tensor, least: float, want_radius: bool) -> None:
    """Write the gradients of the heads whose radius is below `least`; `shares` [heads, …] of the radius'."""
    from nearsight.ops.explicit.whole import kernels

    mask, mask_strides = p.mask
    launch(
        kernels.whole_backward,
        _grid(p),
        grad,
        p.values,
        mask,
        p.radius,
        dvalues,
        shares,
        *p.size,
        p.offset,
        least,
        smallest_normaliser(torch.float32),
        *grad.stride()[:3],
        *p.values.stride()[:3],
        *mask_strides,
        WANT_RADIUS=want_radius,
        **_constants(p),
    )


def share_count(p: Problem) -> int:
    """Shares of a head's radius' gradient that the backward leaves."""
    return p.batch * -(-p.per_head // _channels(p))


def _side(p: Problem) -> int:
    return 16 if max(p.size) <= 16 else 32


def _channels(p: Problem) -> int:
    return min(next_power_of_two(p.per_head), 8 if _side(p) == 16 else 4)


def _grid(p: Problem) -> tuple[int, int, int]:
    return p.heads * share_count(p), 1, 1


def _constants(p: Problem) -> dict[str, Any]:
    side = _side(p)
    return {
        "HEADS": p.heads,
        "DH": p.per_head,
        "SIDE": side,
        "CB": _channels(p),
        "GAUSSIAN": p.gaussian,
        "MASKED": p.key_mask is not None,
        "PARTS": p.parts,
        "num_warps": 4 if side == 16 else 8,
        "num_stages": 1,
    }
