"""What the programs of a backward left, added up in a fixed order: the launches of `sum_kernels.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nearsight.ops.first_calls import launch as launch_kernel
from nearsight.ops.local.geometry import ceil_div
from nearsight.ops.sums import add_rows
from nearsight.ops.triton_support import next_power_of_two

if TYPE_CHECKING:
    from nearsight.ops.local.launches import Gradients, Launch

__all__ = ["add_shares", "empty_share", "sum_relative", "too_many"]

# Of one launch whose second axis they are (at most 65,535); so many that the next ones' tensors begin aligned too.
MOST_IMAGES = 32_768

# How `merge` adds up shares of the relative tables: into so many parts, so many at a time, so many of their numbers a program:
# as many as its threads load at once, so that each adds up its own.
TABLE_SUM = {"PARTS": 32, "ROWS": 8, "BLOCK": 512}

# Up to so many rows a program adds them up itself: 1024 were faster so, 4096 slower.
MOST_ROWS = 2560


def empty_share(launch: Launch, like: Tensor) -> Tensor:
    """For what the strips of all programs have of dk, or of dv."""
    use, fixed = launch.runtime, launch.constants
    rows = (ceil_div(use["tiles"], use["splits"]) + fixed["CHUNKS"] - 1) * fixed["TY"]
    shape = (*launch.grid, rows, fixed["NC"], fixed["G"] * fixed["D"])
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def add_shares(
    shares: tuple[Tensor, Tensor], launch: Launch, grad_pixel: int, into: Gradients, partial: Tensor, many_tables: bool
) -> Tensor:
    """The sum of the strips' shares of dk and dv.

    Returns the shares of the relative tables that are left to add up: `partial`, or where those are many, fewer.
    """
    from nearsight.ops.local import sum_kernels

    dk_share, dv_share = shares
    dq, dk, dv = into
    use, fixed = launch.runtime, launch.constants
    batch, height, width, heads, dim = dq.shape
    channels = heads * dim
    padded = next_power_of_two(channels)
    pixels = max(1, 4096 // padded)
    programs = ceil_div(height * width, pixels)
    walks = launch.grid[0] // batch
    parts, tables, table_rows = partial, 0, 0
    if many_tables and partial.shape[0] > TABLE_SUM["PARTS"]:
        tables = partial.shape[0]
        parts = partial.new_empty((TABLE_SUM["PARTS"], *partial.shape[1:]))
        table_rows = ceil_div(TABLE_SUM["PARTS"] * ceil_div(partial[0].numel(), TABLE_SUM["BLOCK"]), programs)
    for first in range(0, batch, MOST_IMAGES):
        images = slice(first, min(first + MOST_IMAGES, batch))
        own = slice(images.start * walks, images.stop * walks)
        launch_kernel(
            sum_kernels.merge,
            (programs, table_rows + images.stop - images.start),
            dk_share[own],
            dv_share[own],
            (dv if dk is None else dk)[images],
            dv[images],
            partial,
            parts,
            **{name: use[name] for name in ("H", "W", "strips", "splits", "tiles", "dil_y", "dil_x")},
            per_split=ceil_div(use["tiles"], use["splits"]),
            tables=tables,
            table_rows=table_rows,
            grad_pixel=grad_pixel,
            CHANNELS=channels,
            CP=padded,
            GROUP=fixed["G"] * dim,
            **{name: fixed[name] for name in ("KH", "KW", "TY", "TX", "NC", "CHUNKS", "HAS_K", "G", "DP", "HS")},
            **TABLE_SUM,
            OVER_Y=1 if use["splits"] == 1 else 2,
            OVER_X=ceil_div(fixed["TX"] + fixed["KW"] - 1, fixed["TX"]),
            PIXELS=pixels,
            num_warps=4,
        )
        table_rows = 0  # the first launch has added them all
    return parts


def too_many(partial: Tensor, launch: Launch, drow: Tensor | None, dcol: Tensor | None) -> bool:
    """Whether every program's share of the relative tables' gradients is more than one step adds up."""
    shared = any(t is not None and t.shape[0] == 1 for t in (drow, dcol))
    return partial.shape[0] * (launch.grid[1] * launch.constants["G"] if shared else 1) > MOST_ROWS


def sum_relative(partial: Tensor, launch: Launch, drow: Tensor | None, dcol: Tensor | None) -> None:
    """The relative tables' gradients from every program's share, added in a fixed order."""
    from nearsight.ops.local import sum_kernels

    fixed, heads, groups = launch.constants, launch.runtime["heads"], launch.grid[1]
    shared = [t.shape[0] == 1 for t in (drow, dcol) if t is not None]
    if too_many(partial, launch, drow, dcol):
        partial = add_rows(partial, 16)
    either = drow if drow is not None else dcol
    half = fixed["D"] // 2
    channels = min(8, next_power_of_two(half))
    launch_kernel(
        sum_kernels.finish_relative,
        (fixed["KW"] + fixed["KH"], 1 if all(shared) else heads, ceil_div(half, channels)),
        partial,
        either if drow is None else drow,
        either if dcol is None else dcol,
        partial.shape[0],
        groups,
        **{name: fixed[name] for name in ("KH", "KW", "D", "DP", "G", "HS", "HAS_ROW", "HAS_COL")},
        ROW_SHARED=drow is None or drow.shape[0] == 1,
        COL_SHARED=dcol is None or dcol.shape[0] == 1,
        ROWS=1024,
        CHANNELS=channels,
        num_warps=8,
    )
