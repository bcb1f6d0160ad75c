"""Launches of the interpolation between nodes: the Gaussian of a radius that is wide beside the map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.ops.explicit.problem import Problem, Spec
from nearsight.ops.explicit.reference import smallest_normaliser
from nearsight.ops.first_calls import launch
from nearsight.ops.triton_support import next_power_of_two, register_cap

__all__ = ["Tables", "backward", "can_run", "forward", "least_radius", "prepare", "share_count", "slopes_shape"]

NODES = 16
# Numbers that a head, and an image's mask and a head, have between the nodes: as in `kernels.py`.
PER_HEAD, PER_MASK = 1120, 772
PREPARE_BLOCK, MASK_BLOCK = 128, 32


class Tile(NamedTuple):
    """What a program takes: channels; columns and rows at a time on the way in and on the way out; and how it runs."""

    channels: int
    in_columns: int
    in_rows: int
    out_columns: int
    out_rows: int
    warps: int
    stages: int
    registers: int | None


HALF = Tile(32, 16, 32, 32, 16, 8, 2, 128)
FULL = Tile(8, 16, 16, 16, 16, 4, 2, None)
SMALL = 32


def can_run(size: tuple[int, int], key_mask: Tensor | None, gaussian: bool, offset: float) -> bool:
    """Whether a head whose radius is wide can go this way.

    A mask leaves N as smooth as it was, but without an offset N may come near zero, and 1/N is not smooth there. Maps no
    larger than the nodes are left alone.
    """
    return gaussian and max(size) > NODES and (key_mask is None or offset >= 0.5)


def least_radius(p: Problem) -> float:
    """The radius from which 16 nodes an axis give the map and its slope to rounding: worst errors of g and dg/dσ, over
    their maxima, 1e-8 and 2e-7 at 0.3, 4e-6 and 7e-5 at 0.2. Infinite where no head can go this way.
    """
    if not can_run(p.size, p.key_mask, p.gaussian, p.offset):
        return float("inf")
    return 0.3 if p.values.dtype == torch.float32 else 0.2


def slopes_shape(values: Tensor) -> list[int]:
    """Of values [B, H, W, heads, D]: as many numbers as there are nodes for every program of the forward and its channels."""
    channels = _channels(values.shape[4], values.shape[1:3], values.dtype)
    return [values.shape[0] * values.shape[3] * -(-values.shape[4] // channels), NODES * NODES, channels]


class Tables(NamedTuple):
    """L of both axes in parts, as rows and as columns; what each head has between the nodes, and each mask."""

    rows: Tensor
    columns: Tensor
    between: Tensor
    masses: Tensor

    @staticmethod
    def specs(values: Tensor, heads: int, key_mask: Tensor | None) -> list[Spec]:
        side = next_power_of_two(max(values.shape[1:3]))
        full = values.dtype == torch.float32
        return [
            Spec([2, 2, NODES, side], values.dtype),
            Spec([2, 2, side, NODES], torch.float32 if full else torch.bfloat16),
            Spec([heads, PER_HEAD], torch.float32),
            Spec([1 if key_mask is None else values.shape[0], heads, PER_MASK], torch.float32),
        ]


def prepare(p: Problem, tables: Tables) -> None:
    """Write what depends on the size, the radii and the mask alone."""
    from nearsight.ops.explicit.nodes import kernels

    side = tables.rows.shape[3]
    launch(
        kernels.prepare,
        (2 * p.heads, 1, 1),
        p.radius,
        *tables[:3],
        *p.size,
        SIDE=side,
        BLOCK=min(side, PREPARE_BLOCK),
        PARTS=p.parts,
        num_warps=8,
    )
    if p.key_mask is not None:
        mask, mask_strides = p.mask
        launch(
            kernels.prepare_mask,
            (p.batch * p.heads, 1, 1),
            mask,
            tables.rows,
            tables.between,
            tables.masses,
            *p.size,
            p.offset,
            smallest_normaliser(torch.float32),
            *mask_strides,
            HEADS=p.heads,
            SIDE=side,
            BLOCK=min(side, MASK_BLOCK),
            PARTS=p.parts,
        )


def _tile(dtype: torch.dtype) -> Tile:
    return FULL if dtype == torch.float32 else HALF


def _channels(per_head: int, size: Sequence[int], dtype: torch.dtype) -> int:
    """Channels of a program: the tile's; 16 where that leaves fewer places empty, and on small maps, which need the programs."""
    most = _tile(dtype).channels
    if -(-per_head // 16) % 2 == 1 or max(size) <= SMALL:
        most = min(most, 16)
    return min(next_power_of_two(per_head), most)


def share_count(p: Problem) -> int:
    """Shares of a head's radius' gradient that the backward leaves: one a program."""
    return p.batch * -(-p.per_head // _channels(p.per_head, p.size, p.values.dtype))


def _constants(p: Problem, tables: Tables) -> dict[str, Any]:
    tile, channels = _tile(p.values.dtype), _channels(p.per_head, p.size, p.values.dtype)
    return {
        "HEADS": p.heads,
        "DH": p.per_head,
        "SIDE": tables.rows.shape[3],
        "CB": channels,
        "PX": tile.in_columns,
        "PY": tile.in_rows,
        "EX": tile.out_columns,
        "EY": tile.out_rows,
        "MASKED": p.key_mask is not None,
        "PARTS": p.parts,
        "num_warps": max(4, tile.warps * channels // tile.channels),
        "num_stages": tile.stages,
        **register_cap(tile.registers),
    }


def forward(p: Problem, tables: Tables, out: Tensor, slopes: Tensor, least: float) -> None:
    """Write the output of the heads whose radius is at least `least`, and, unless empty, their slopes (zero for other heads)."""
    from nearsight.ops.explicit.nodes import kernels

    mask, mask_strides = p.mask
    launch(
        kernels.forward,
        (p.heads * share_count(p), 1, 1),
        p.values,
        mask,
        p.radius,
        *tables,
        out,
        slopes,
        *p.size,
        p.offset,
        least,
        smallest_normaliser(torch.float32),
        *p.values.stride()[:3],
        *mask_strides,
        WANT_RADIUS=slopes.numel() > 0,
        **_constants(p, tables),
    )


def backward(
    p: Problem,
    tables: Tables,
    grad: Tensor,
    slopes: Tensor,
    dvalues: Tensor,
    shares: Tensor,
    least: float,
    want_radius: bool,
) -> None:
    """Write the gradients of the heads whose radius is at least `least`; `shares` [heads, …] of the radius'."""
    from nearsight.ops.explicit.nodes import kernels

    mask, mask_strides = p.mask
    launch(
        kernels.backward,
        (p.heads * share_count(p), 1, 1),
        grad,
        mask,
        p.radius,
        *tables,
        slopes,
        dvalues,
        shares,
        *p.size,
        p.offset,
        least,
        *grad.stride()[:3],
        *mask_strides,
        WANT_RADIUS=want_radius,
        **_constants(p, tables),
    )
