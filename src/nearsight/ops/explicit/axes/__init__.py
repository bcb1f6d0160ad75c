"""Launches of the axis products: any separable kind, any radius, maps of any size."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.ops.dispatch import full_precision
from nearsight.ops.explicit.problem import Problem, Spec
from nearsight.ops.explicit.reference import smallest_normaliser
from nearsight.ops.first_calls import launch
from nearsight.ops.triton_support import next_power_of_two

__all__ = ["Tables", "Tile", "backward", "forward", "prepare", "product_dtype", "share_count", "tile"]

# Programs that keep a large GPU busy; with more tiles each takes several.
WANTED_PROGRAMS = 1024
TABLE_ROWS = 16
# Partial sums a program adds up at a time.
SUMMED = 16


class Tile(NamedTuple):
    """What a program of an axis product takes: its rows and depth, pixels of the other axis, channels; and how it runs."""

    rows: int
    depth: int
    others: int
    channels: int
    warps: int
    stages: int


def tile(side: int, per_head: int, dtype: torch.dtype) -> Tile:
    """The tile for axes of up to `side` pixels (a power of two) and heads of `per_head` channels: a fixed table."""
    narrow = product_dtype(dtype) == torch.bfloat16
    rows = min(side, 128 if narrow else 64)
    depth = min(side, 128 if narrow else 32)
    # Of the tiles tried on an H200 (README, "GPU"): wider ones leave one program per multiprocessor, more warps wait longer.
    channels = min(max(next_power_of_two(per_head), 8), 64)
    others = max(1, min(64 // channels, side), 16 // channels)
    return Tile(rows, depth, others, channels, 4, 2)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the products' operands are rounded to: bfloat16 for bfloat16, else float32 (float16 could not hold the sums)."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _precision(dtype: torch.dtype) -> str:
    """Float32 operands of a half type's call: three TF32 products, twice their digits at tensor-core speed."""
    return "ieee" if dtype == torch.float32 or torch.version.hip is not None else "tf32x3"


class _Axis(NamedTuple):
    """The products along one axis: tiles along the other axis, tiles in all of one image and head, tiles a program takes one
    after the other, and the grid."""

    blocks: int
    tiles: int
    steps: int
    grid: tuple[int, int, int]


class _Plan(NamedTuple):
    """A call's geometry: its products along y and along x."""

    along_y: _Axis
    along_x: _Axis
    constants: dict[str, Any]


@functools.lru_cache(maxsize=1024)
def _plan(batch: int, height: int, width: int, heads: int, per_head: int, dtype: torch.dtype, masked: bool) -> _Plan:
    side = next_power_of_two(max(height, width))
    t = tile(side, per_head, dtype)
    parts = -(-per_head // t.channels)

    def axis(along: int, other: int) -> _Axis:
        blocks, rows = -(-other // t.others), -(-along // t.rows)
        tiles = blocks * parts * rows
        # As many as leave each multiprocessor a few programs: the matrix is kept.
        steps = max(1, min(blocks, tiles * batch * heads // WANTED_PROGRAMS))
        return _Axis(blocks, tiles, steps, (batch * heads * parts * -(-blocks // steps), rows, 1))

    constants = {
        "HEADS": heads,
        "DH": per_head,
        "SIDE": side,
        "OB": t.others,
        "CB": t.channels,
        "BM": t.rows,
        "BK": t.depth,
        "WHOLE": t.depth >= side,
        "MASKED": masked,
        "PRECISION": _precision(dtype),
        "num_warps": t.warps,
        "num_stages": t.stages,
    }
    return _Plan(axis(height, width), axis(width, height), constants)


def _plan_of(p: Problem) -> _Plan:
    return _plan(p.batch, *p.size, p.heads, p.per_head, p.values.dtype, p.key_mask is not None)


def share_count(p: Problem) -> int:
    """Shares of a head's radius' gradient that the backward leaves."""
    plan = _plan_of(p)
    return p.batch * (plan.along_y.tiles + plan.along_x.tiles)


class Tables(NamedTuple):
    """g and dg/dσ of both axes of each head, and their row sums."""

    matrices: Tensor
    sums: Tensor

    @staticmethod
    def specs(values: Tensor, heads: int) -> list[Spec]:
        side = next_power_of_two(max(values.shape[1:3]))
        return [
            Spec([heads, 4, side, side], product_dtype(values.dtype)),
            Spec([heads, 5, side], torch.float32),
        ]


def prepare(p: Problem, tables: Tables, least: float) -> None:
    """Write the tables of the heads whose radius is below `least`."""
    from nearsight.ops.explicit.axes import kernels

    (height, width), side = p.size, tables.sums.shape[2]
    launch(
        kernels.tables,
        (2 * p.heads * -(-side // TABLE_ROWS), 1, 1),
        p.radius,
        *tables,
        height,
        width,
        p.offset * height * width,
        least,
        SIDE=side,
        ROWS=TABLE_ROWS,
        GAUSSIAN=p.gaussian,
    )


class _Saved(NamedTuple):
    """What both directions need: V g_x; partial sums of V; what V is centred by."""

    product: Tensor
    totals: Tensor
    centres: Tensor


def _along_x(p: Problem, tables: Tables, least: float) -> _Saved:
    """The first product."""
    from nearsight.ops.explicit.axes import kernels

    plan = _plan_of(p)
    (height, width), narrow = p.size, product_dtype(p.values.dtype)
    new = p.values.new_empty
    product = new(p.values.shape, dtype=narrow)
    totals = new([p.batch, plan.along_x.blocks, p.channels], dtype=torch.float32)
    centres = new([p.batch, p.channels], dtype=torch.float32)
    mask, mask_strides = p.mask
    launch(
        kernels.forward_x,
        plan.along_x.grid,
        p.values,
        mask,
        p.radius,
        *tables,
        product,
        totals,
        centres,
        height,
        width,
        plan.along_x.steps,
        least,
        *p.values.stride()[:3],
        *mask_strides,
        **plan.constants,
    )
    return _Saved(product, totals, centres)


def forward(p: Problem, tables: Tables, out: Tensor, least: float) -> None:
    """Write the output of the heads whose radius is below `least`."""
    from nearsight.ops.explicit.axes import kernels

    plan = _plan_of(p)
    saved = _along_x(p, tables, least)
    (height, width), offset = p.size, p.offset
    inverse, _ = _masses(p, tables)
    launch(
        kernels.forward_y,
        plan.along_y.grid,
        saved.product,
        p.radius,
        *tables,
        inverse,
        saved.totals,
        saved.centres,
        out,
        height,
        width,
        saved.totals.shape[1],
        plan.along_y.steps,
        least,
        offset,
        offset * height * width,
        SUMMED=SUMMED,
        **plan.constants,
    )


def backward(
    p: Problem, tables: Tables, grad: Tensor, dvalues: Tensor, shares: Tensor, least: float, want_radius: bool
) -> None:
    """Write the gradients of the heads whose radius is below `least`; `shares` [heads, B, …] of the radius'.

    V g_x is made again rather than saved: nobody knows before the kernels run whether a head needs it.
    """
    from nearsight.ops.explicit.axes import kernels

    plan = _plan_of(p)
    saved = _along_x(p, tables, least)
    (height, width), offset = p.size, p.offset
    inverse, slope = _masses(p, tables)
    second_totals = p.values.new_empty([p.batch, plan.along_y.blocks, p.channels], dtype=torch.float32)
    second = torch.empty_like(saved.product)
    first_shares = plan.along_y.tiles
    shares_per_image = first_shares + plan.along_x.tiles
    launch(
        kernels.backward_y,
        plan.along_y.grid,
        grad,
        saved.product,
        p.radius,
        *tables,
        inverse,
        slope,
        saved.totals,
        second,
        second_totals,
        shares,
        height,
        width,
        saved.totals.shape[1],
        plan.along_y.steps,
        least,
        p.batch,
        shares_per_image,
        offset,
        offset * height * width,
        *grad.stride()[:3],
        SUMMED=SUMMED,
        WANT_RADIUS=want_radius,
        **plan.constants,
    )
    mask, mask_strides = p.mask
    launch(
        kernels.backward_x,
        plan.along_x.grid,
        p.values,
        mask,
        second,
        p.radius,
        tables.matrices,
        second_totals,
        saved.centres,
        dvalues,
        shares,
        height,
        width,
        second_totals.shape[1],
        plan.along_x.steps,
        least,
        p.batch,
        shares_per_image,
        first_shares,
        offset,
        *p.values.stride()[:3],
        *mask_strides,
        SUMMED=SUMMED,
        WANT_RADIUS=want_radius,
        **plan.constants,
    )


def _masses(p: Problem, tables: Tables) -> tuple[Tensor, Tensor]:
    """1/N and (h − h₀)·N of a masked call, [B, heads, H, W]; without a mask the kernels find them from the row sums."""
    if p.key_mask is None:
        return tables.matrices, tables.matrices
    height, width = p.size
    with full_precision(p.values):
        g = tables.matrices.float()
        rows, rows_slope = g[:, 0, :height, :height], g[:, 1, :height, :height]
        columns, columns_slope = g[:, 2, :width, :width], g[:, 3, :width, :width]
        valid = p.key_mask[:, None].float()
        along_y, count = rows @ valid, p.offset * valid.sum((2, 3), keepdim=True)
        mass = along_y @ columns + count
        slope = rows_slope @ valid @ columns + along_y @ columns_slope - tables.sums[:, 4, :1, None] * count
        inverse = torch.where(mass > smallest_normaliser(torch.float32), 1 / mass, 0.0)
    return inverse, slope
