"""What a program of QnA's Triton kernels takes: a fixed table, no tuning at run time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nearsight.ops.triton_support import next_power_of_two

__all__ = ["Geometry", "band_of", "chunk_of", "geometry", "heads_apart", "images_ahead", "lanes_of", "steps_of"]

# Of a multiprocessor, and a grid's second axis.
REGISTERS = 65536
MOST_PROGRAMS = 65535
# Programs of one warp each that a multiprocessor runs at a time.
MOST_AT_ONCE = 32
# Neighbouring tiles: measured for so many.
LARGEST_CHUNK = 16
# All taps at once while the tables' sums of a program fit its registers: 3×3 with two queries.
UNROLLED_SUMS = 18
# Weights of a column of taps, over the queries and the two windows of a thread, that are written out: more compile for long.
WRITTEN_OUT = 28


class Geometry(NamedTuple):
    """What a program takes: pixel-heads and rows, and how it runs."""

    lanes: int
    rows: int
    # Tiles of rows that a program of the backward takes; 0: as many as give all that run at a time the same.
    steps: int
    unroll: bool
    # The most registers a thread may take, where the compiler's own choice leaves too few warps to hide the loads.
    registers: int | None = None


def geometry(
    kernel: str,
    queries: int,
    dim: int,
    window: Sequence[int],
    stride: Sequence[int],
    height: int,
    half: bool,
    shared: bool,
    dealt: bool,
) -> Geometry:
    """The launch geometry of `kernel` ("forward", "delta" or "backward"): a fixed table, no tuning at run time.

    One warp per program; with half types a thread holds 8 channels of one pixel, so one pixel's head when D = 8. Only `steps`
    depends on the map, and no compilation on `steps`. Exponentials `shared` by a thread's windows and sums `dealt` out to the
    lanes leave registers for more rows.
    """
    lanes = lanes_of(dim, half)
    unroll = window[0] * window[1] * queries <= UNROLLED_SUMS
    rows = _windows_of_a_thread(queries)
    # More rows load fewer pixels twice but leave fewer warps to hide the loads: measured for both kinds of windows.
    tall = rows == 2 and max(stride) == 1 and max(window) <= 7
    if kernel == "forward":
        if tall and half and shared:
            return Geometry(lanes, 4, 1, unroll, 128 if unroll else 112)
        if unroll and tall and half:
            return Geometry(lanes, 4, 1, unroll, 128)
        return Geometry(lanes, rows, 1, unroll, 128 if tall and half else 80 if tall and unroll else None)
    if kernel == "delta":
        if unroll and tall and half and shared:
            return Geometry(lanes, 4, 1, unroll, 128)
        registers = 128 if unroll and tall and not half else None
        return Geometry(lanes, 4 if tall and not unroll else rows, 1, unroll, registers)
    unroll = unroll and stride[1] == 1
    if tall and half and dealt and not unroll:
        return Geometry(lanes, 4, 4, unroll, 168)
    rows = -(-rows // stride[0]) * stride[0]
    if unroll and queries <= 2:
        # In half types all programs at once: with fewer registers the compiler puts loads off until their numbers are needed.
        return Geometry(lanes, rows, 0, unroll, 160) if half else Geometry(lanes, rows, 4, unroll, 128)
    # Enough pixels per program that its sums for the tables weigh little beside the maps, enough programs to fill the GPU.
    return Geometry(lanes, rows, 4 if unroll and height > 14 else 7, unroll)


def _windows_of_a_thread(queries: int) -> int:
    return 1 if queries > 2 else 2


def band_of(taps: int, queries: int, stride: int) -> int:
    """How many of a column's `taps` the kernels write out at a time; those left over by such bands are written out, too.

    All, or where that is too much code as many as are not; in the gradients a band begins with the same row of windows' taps as
    the column does, so it is a multiple of the stride.

    >>> [band_of(taps, queries, 1) for taps, queries in ((7, 2), (3, 9), (11, 9), (7, 9), (11, 5))]
    [7, 3, 2, 2, 3]
    """
    most = WRITTEN_OUT // (queries * _windows_of_a_thread(queries))
    bands = range(stride, taps, stride)
    if taps <= most or not bands:
        return taps
    code = {band: band + taps % band for band in bands}
    return max((band for band in bands if code[band] <= most), default=min(bands, key=code.__getitem__))


def lanes_of(dim: int, half: bool) -> int:
    """Pixel-heads a warp takes."""
    padded = next_power_of_two(dim)
    return max(32 * min(padded, 8 if half else 4), padded) // padded


def heads_apart(heads: int, lanes: int) -> int:
    """How many lanes further the next one of the same head is, 0 where that differs."""
    return min(heads, lanes) if lanes % heads == 0 or heads % lanes == 0 else 0


def steps_of(g: Geometry, blocks: int, tiles: int, multiprocessors: int) -> int:
    """How many of each block's `tiles` a program of the backward takes.

    >>> steps_of(Geometry(32, 2, 0, True, 160), blocks=14, tiles=128 * 14, multiprocessors=132)
    16
    """
    least = -(-tiles // MOST_PROGRAMS)
    if g.steps > 0 or g.registers is None:
        return max(g.steps, least)
    at_once = _at_once(g, multiprocessors)
    best, found = 0.0, tiles
    # In few rounds of programs, unless more leave less of the GPU idle at the end.
    for rounds in range(1, 9):
        programs = at_once * rounds // blocks
        if programs > 0:
            steps = max(-(-tiles // programs), least)
            busy = tiles * blocks / (steps * at_once * rounds)
            if best == 0 or busy > best + 0.03:
                best, found = busy, steps
            if steps == least:
                break
    return found


def _at_once(g: Geometry, multiprocessors: int) -> int:
    """Programs that run at a time."""
    return multiprocessors * min(REGISTERS // (32 * (g.registers or 128)), MOST_AT_ONCE)


def images_ahead(g: Geometry, programs: int, multiprocessors: int) -> int:
    """How many images further the programs are that start when those that run now end, `programs` to an image.

    >>> images_ahead(Geometry(32, 4, 1, True, 128), programs=14 * 14, multiprocessors=132)
    11
    """
    return -(-_at_once(g, multiprocessors) // programs)


def chunk_of(steps: int) -> int:
    """How many neighbouring tiles a program of the backward takes at a time: a power of two that divides its steps.

    >>> [chunk_of(steps) for steps in (16, 12, 7)]
    [16, 4, 1]
    """
    return min(steps & -steps, LARGEST_CHUNK)
