"""Launches of the interpolation between nodes: the Gaussian of a radius that is wide beside the map."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.ops.explicit.problem import Problem
from nearsight.ops.explicit.reference import smallest_normaliser
from nearsight.ops.triton_support import next_power_of_two

__all__ = ["backward", "can_run", "coefficients_shape", "forward", "least_radius", "share_count"]

NODES = 16
BASIS_ROWS = 32
WANTED_PROGRAMS = 512


class Tile(NamedTuple):
    """What a program of `project` or `expand` takes: channels, rows at a time; and how it runs."""

    channels: int
    rows: int
    warps: int
    stages: int


PROJECT = Tile(16, 64, 4, 2)
EXPAND = Tile(16, 32, 4, 1)
NODE_CHANNELS = 8


def can_run(key_mask: Tensor | None, gaussian: bool, offset: float) -> bool:
    """Whether a head whose radius is wide can go this way.

    A mask leaves N as smooth as it was, but without an offset N may come near zero, and 1/N is not smooth there.
    """
    return gaussian and (key_mask is None or offset >= 0.5)


def least_radius(p: Problem) -> float:
    """The radius from which 16 nodes an axis give the map and its slope to rounding: worst errors of g and dg/dσ, over
    their maxima, 1e-8 and 2e-7 at 0.3, 4e-6 and 7e-5 at 0.2. Infinite where no head can go this way.
    """
    if not can_run(p.key_mask, p.gaussian, p.offset):
        return float("inf")
    return 0.3 if p.values.dtype == torch.float32 else 0.2


def coefficients_shape(batch: int, channels: int) -> list[int]:
    return [batch, NODES, NODES, channels]


def share_count(p: Problem) -> int:
    """Shares of a head's radius' gradient that the backward leaves."""
    return p.batch * -(-p.per_head // _node_channels(p))


class _Basis(NamedTuple):
    table: Tensor
    sums: Tensor


def _basis(p: Problem) -> _Basis:
    from nearsight.ops.explicit.nodes import kernels

    side = next_power_of_two(max(p.size))
    table = p.values.new_empty([2, NODES, side], dtype=torch.float32)
    sums = p.values.new_empty([2, 2, NODES], dtype=torch.float32)
    kernels.basis[(2, 1, 1)](table, sums, *p.size, SIDE=side, ROWS=BASIS_ROWS)
    return _Basis(table, sums)


def _project(p: Problem, values: Tensor, basis: _Basis, least: float, masked: bool) -> Tensor:
    """Coefficients of `values`, [B, strips, 16, 16, C]."""
    from nearsight.ops.explicit.nodes import kernels

    batch, height, width, channels = values.shape
    c = min(max(next_power_of_two(channels), 8), PROJECT.channels)
    blocks, strips, grid = _strips(batch * -(-channels // c), width)
    coefficients = values.new_empty([batch, strips, NODES, NODES, channels], dtype=torch.float32)
    mask, mask_strides = p.mask
    kernels.project[grid](
        values,
        mask,
        p.radius,
        basis.table,
        coefficients,
        height,
        width,
        blocks,
        least,
        *values.stride()[:3],
        *mask_strides,
        C=channels,
        DH=-(-channels // p.heads),
        ALIKE=1 if channels == 1 else _alike(p),
        SIDE=basis.table.shape[2],
        CB=c,
        BK=PROJECT.rows,
        MASKED=masked and p.key_mask is not None,
        PARTS=p.parts,
        num_warps=PROJECT.warps,
        num_stages=PROJECT.stages,
    )
    return coefficients


def _project_mask(p: Problem, basis: _Basis, least: float) -> Tensor:
    """Coefficients of the mask, one channel for every head; any tensor stands for an absent one."""
    if p.key_mask is None:
        return basis.table
    valid = p.key_mask[..., None].to(torch.bfloat16 if p.values.dtype != torch.float32 else torch.float32)
    return _project(p, valid, basis, -1.0, masked=False)


def _expand(p: Problem, nodes: Tensor, basis: _Basis, out: Tensor, least: float, masked: bool) -> None:
    from nearsight.ops.explicit.nodes import kernels

    c = min(max(next_power_of_two(p.channels), 8), EXPAND.channels)
    blocks, _, grid = _strips(p.batch * -(-p.channels // c), p.size[1])
    mask, mask_strides = p.mask
    kernels.expand[grid](
        nodes,
        mask,
        p.radius,
        basis.table,
        out,
        *p.size,
        blocks,
        least,
        *mask_strides,
        C=p.channels,
        DH=p.per_head,
        ALIKE=_alike(p),
        SIDE=basis.table.shape[2],
        CB=c,
        BM=EXPAND.rows,
        MASKED=masked and p.key_mask is not None,
        PARTS=p.parts,
        num_warps=EXPAND.warps,
        num_stages=EXPAND.stages,
    )


def _strips(programs: int, width: int) -> tuple[int, int, tuple[int, int, int]]:
    """Blocks of 16 columns in a strip, strips, and the grid: as few strips as keep a large GPU busy."""
    blocks = -(-width // NODES)
    per_strip = -(-blocks // max(1, min(blocks, -(-WANTED_PROGRAMS // programs))))
    strips = -(-blocks // per_strip)
    return per_strip, strips, (programs * strips, 1, 1)


def _alike(p: Problem) -> int:
    """Neighbouring channels, a power of two, that surely belong to one head."""
    return min(p.per_head & -p.per_head, 8)


def _node_channels(p: Problem) -> int:
    return min(next_power_of_two(p.per_head), NODE_CHANNELS)


def _node_constants(p: Problem) -> dict[str, Any]:
    return {
        "HEADS": p.heads,
        "DH": p.per_head,
        "CB": _node_channels(p),
        "MASKED": p.key_mask is not None,
        "PARTS": p.parts,
        "num_warps": 4,
        "num_stages": 1,
    }


def forward(p: Problem, out: Tensor, centred: Tensor, least: float) -> None:
    """Write the output of the heads whose radius is at least `least`, and their centred coefficients (zero for other heads)."""
    from nearsight.ops.explicit.nodes import kernels

    basis = _basis(p)
    coefficients = _project(p, p.values, basis, least, masked=True)
    of_mask = _project_mask(p, basis, least)
    nodes = torch.empty_like(centred)
    kernels.nodes_forward[(p.heads * share_count(p), 1, 1)](
        coefficients,
        of_mask,
        p.radius,
        basis.sums,
        centred,
        nodes,
        *p.size,
        coefficients.shape[1],
        of_mask.shape[1],
        p.offset,
        least,
        smallest_normaliser(torch.float32),
        **_node_constants(p),
    )
    _expand(p, nodes, basis, out, least, masked=False)


def backward(
    p: Problem, grad: Tensor, centred: Tensor, dvalues: Tensor, shares: Tensor, least: float, want_radius: bool
) -> None:
    """Write the gradients of the heads whose radius is at least `least`; `shares` [heads, …] of the radius'."""
    from nearsight.ops.explicit.nodes import kernels

    basis = _basis(p)
    coefficients = _project(p, grad, basis, least, masked=False)
    of_mask = _project_mask(p, basis, least)
    nodes = torch.empty_like(centred)
    kernels.nodes_backward[(p.heads * share_count(p), 1, 1)](
        coefficients,
        of_mask,
        p.radius,
        basis.sums,
        centred,
        nodes,
        shares,
        *p.size,
        coefficients.shape[1],
        of_mask.shape[1],
        p.offset,
        least,
        smallest_normaliser(torch.float32),
        WANT_RADIUS=want_radius,
        **_node_constants(p),
    )
    _expand(p, nodes, basis, dvalues, least, masked=True)
