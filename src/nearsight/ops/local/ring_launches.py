"""The launches of the kernels with a ring, and the gradients by it: `ring_kernels.py`, `ring_gradient_kernels.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nearsight.ops.first_calls import launch as launch_kernel
from nearsight.ops.launching import beside, join
from nearsight.ops.local.geometry import ceil_div
from nearsight.ops.local.sum_launches import add_shares, empty_share
from nearsight.ops.triton_support import multiprocessors

if TYPE_CHECKING:
    from nearsight.ops.local.launches import Gradients, Launch, Read

__all__ = ["launch_ring", "ring_walk"]

# Programs of the backward on a multiprocessor: of one warp each, with all the registers that a thread can have.
PLACES = 8


def launch_ring(kernel: Any, launch: Launch, tensors: tuple[Tensor | None, ...], **numbers: Any) -> None:
    """Such a kernel has all programs on one axis, and only the arguments it needs."""
    programs, groups = launch.grid
    given = {**launch.runtime, **launch.constants, **numbers, "groups": groups}
    named = {name: given[name] for name in kernel.arg_names[len(tensors) :]}
    options = {name: given[name] for name in ("num_warps", "maxnreg") if name in given}
    launch_kernel(kernel, (programs * groups,), *tensors, **named, **options)


class _Part(NamedTuple):
    """What the walk over some images reads and writes: `partial` and the shares, where there are any, by its programs."""

    read: Read
    launch: Launch
    into: Gradients
    partial: Tensor
    shares: tuple[Tensor, Tensor] | None

    def of(self, images: slice) -> _Part:
        walks = self.launch.grid[0] // len(self.read.q)
        own = slice(images.start * walks, images.stop * walks)
        q, k, v, out, grad, lse, *_ = self.read
        dq, dk, dv = self.into
        return _Part(
            self.read._replace(
                q=q[images], k=k[images], v=v[images], out=out[images], grad=grad[images], lse=lse[images]
            ),
            self.launch._replace(grid=(own.stop - own.start, self.launch.grid[1])),
            self.into._replace(q=dq[images], k=None if dk is None else dk[images], v=dv[images]),
            self.partial[own],
            None if self.shares is None else (self.shares[0][own], self.shares[1][own]),
        )


def ring_walk(
    kernel: Any,
    read: Read,
    launch: Launch,
    numbers: dict[str, Any],
    into: Gradients,
    partial: Tensor,
    many_tables: bool,
) -> Tensor:
    """All gradients in one walk, in turns or with shares of dk and dv, which are then added up.

    Large calls go in two parts beside each other: what the last programs of one leave empty, the other's walk and the sum of
    shares fill. Returns the shares of the relative tables that are left to add up: `partial`, or where those are many, fewer.
    """
    # At head dim 8 shares are as fast (README); splits share rows too, for which two turns are too few.
    in_turns = launch.runtime["splits"] == 1 and launch.constants["D"] == 16
    shares = None if in_turns else (empty_share(launch, into.q), empty_share(launch, into.q))
    whole = _Part(read, launch, into, partial, shares)
    batch = len(read.q)
    first = _images_first(launch, batch, in_turns, read.q.device)
    if first:
        with beside(read.q):
            begin = whole.of(slice(0, first))
            _walk(kernel, begin, numbers)
            if begin.shares is not None:
                add_shares(begin.shares, begin.launch, numbers["grad_pixel"], begin.into, partial, many_tables=False)
    rest = whole.of(slice(first, batch))
    _walk(kernel, rest, numbers)
    if first:
        join(read.q)
    if rest.shares is None:
        return partial
    return add_shares(rest.shares, rest.launch, numbers["grad_pixel"], rest.into, partial, many_tables)


def _images_first(launch: Launch, batch: int, in_turns: bool, device: torch.device) -> int:
    """How many images go beside the others; 0: all go together. The cuts were measured on an H200 (README).

    Whole fours, so that what belongs to the others begins on 16 bytes as well.
    """
    programs, places = launch.grid[0] * launch.grid[1], PLACES * multiprocessors(device)
    if programs < 2 * places:
        return 0
    last = ceil_div(9 * batch, 16) if in_turns else ceil_div(places * batch, 2 * programs)
    return (batch - last) // 4 * 4


def _walk(kernel: Any, part: _Part, numbers: dict[str, Any]) -> None:
    read, launch, into, partial, shares = part
    if shares is not None:
        tensors = (*read[:6], into.q, *shares, partial, read.row, read.col)
        launch_ring(kernel, launch, tensors, **numbers, TURN=-1)
        return
    # Every second strip, which write dk and dv, then those between, which add to them.
    strips, groups = launch.runtime["strips"], launch.grid[1]
    images, done = launch.grid[0] // strips, 0
    for turn in range(min(2, strips)):
        own = ceil_div(strips - turn, 2)
        turns = launch._replace(grid=(images * own, groups), runtime=launch.runtime | {"strips": own})
        tables = partial[done : done + images * own]
        launch_ring(kernel, turns, (*read[:6], *into, tables, read.row, read.col), **numbers, TURN=turn)
        done += images * own
