"""Which tiles for which map: how the Triton kernels of local attention cut a call."""

from __future__ import annotations

import functools
from typing import NamedTuple

from nearsight.ops.local.call import LocalCall
from nearsight.ops.triton_support import INT32_LIMIT, multiprocessors, next_power_of_two

__all__ = ["TALLEST_WALK", "Geometry", "Plan", "ceil_div", "geometry", "in_one_walk", "plan"]

# Taller windows keep more chunks of dk and dv in flight than registers hold, and so do wider heads; by bytes of a number.
TALLEST_WALK = {2: 13, 4: 7}
WIDEST_WALK = {2: 128, 4: 16}


def in_one_walk(size: int, dim: int, kh: int) -> bool:
    """Whether the gradients come of one walk down each strip, or of two passes: numbers of `size` bytes."""
    return kh <= TALLEST_WALK[size] and dim <= WIDEST_WALK[size]


class Plan(NamedTuple):
    """Tiles, into how many strips a map is cut, a strip into tiles, the heads into groups, how many programs walk one strip.

    `paired`: beside these strips the last columns of two images at a time are one. `walks`: strips of all images.
    """

    shape: Geometry
    strips: int
    tiles: int
    groups: int
    splits: int
    walks: int
    paired: bool = False


def plan(call: LocalCall, kernel: str, lean: int = 0, ring: bool = False) -> Plan:
    """How `kernel` ("forward", "walk", "queries" or "keys") cuts a call.

    Maps that fit a tile, as a whole or by their rows, have tiles of their own (`_fit`); all others are cut into strips. The more
    `lean`, the less shared memory a program takes. `ring`: whether the call may keep the halo of a strip in shared memory.
    """
    batch, height, width, heads, dim = call.q.shape
    (kh, kw), (dil_y, dil_x) = call.window, call.dilation
    lattice = ceil_div(height, dil_y), ceil_div(width, dil_x)
    size = call.q.element_size()
    # Enough programs for several waves over the chip, else whole strips, which reuse their neighbours' rows.
    device = call.q.device
    wanted = 4 if device.type == "cpu" else 12 * multiprocessors(device)

    def cut(fit: str) -> Plan:
        shape = geometry(dim, heads, kh, kw, size, kernel, fit, lean, ring)
        may_pair = kernel == "forward" and shape.ahead > 0 and _may_pair(call)
        return _cut(shape, batch * dil_y * dil_x, heads, *lattice, wanted, may_pair)

    fit = _fit(dim, size, kernel, *lattice, call.border == "zeros")
    found = cut(fit)
    # A tall map of few images: strips in splits, whose shares overlap and are merged.
    return cut("") if kernel == "walk" and fit and found.splits > 1 else found


class Geometry(NamedTuple):
    """How the kernels cut a call: tiles of TY×TX pixels, G heads at once, the halo in CHUNKS of NR rows of NC pixels.

    `by_row`: by the forward of `strip_kernels.py`, which takes a row at a time. `ahead`: by the kernels with a ring
    (`ring_kernels.py`), which fetch so many tiles ahead; 0: by others.
    """

    ty: int
    tx: int
    g: int
    nr: int
    nc: int
    chunks: int
    warps: int
    stages: int
    registers: int | None = None
    boxes: bool = False
    whole_y: bool = False
    whole_x: bool = False
    by_row: bool = False
    ahead: int = 0


class _Choice(NamedTuple):
    """Heads at once, warps, stages, registers per thread; forward: halo pixels per chunk, copy engine or pointers; the tile.

    `by_row`: whether the forward in half types takes the halo a row at a time, by pointers, where the window allows it.
    """

    g: int
    warps: int
    stages: int
    keys: int = 128
    registers: int | None = None
    boxes: bool = False
    tile: tuple[int, int] = (2, 8)
    by_row: bool = False


# Measured on an H200 at 56×56×64, 28×28×128, 14×14×256 and 7×7×512, window 7 (README, "What was tried"); by padded head dim.
# 128 was not timed, nor was float32.
CHOICES = {
    ("forward", 8): _Choice(2, 2, 3, registers=128, boxes=True),
    ("forward", 16): _Choice(1, 1, 2, registers=128, boxes=True, by_row=True),
    ("forward", 32): _Choice(1, 1, 2, boxes=True),
    ("forward", 64): _Choice(1, 2, 2, registers=168, boxes=True),
    ("forward", 128): _Choice(1, 4, 1, 64),
    ("walk", 8): _Choice(2, 2, 3),
    ("walk", 16): _Choice(1, 1, 2),
    ("walk", 32): _Choice(1, 2, 2),
    ("walk", 64): _Choice(1, 4, 2),
    ("walk", 128): _Choice(1, 8, 1),
    # Maps whose rows, or which as a whole, fit one tile (`_fit`); measured at 14×14 and at 7×7.
    ("forward row", 8): _Choice(2, 4, 2, boxes=True, tile=(2, 16)),
    ("forward row", 16): _Choice(1, 2, 2, boxes=True, tile=(2, 16)),
    ("forward row", 32): _Choice(1, 2, 2, registers=168, boxes=True, tile=(2, 16)),
    ("walk row", 8): _Choice(2, 4, 2, tile=(2, 16)),
    ("walk row", 16): _Choice(1, 2, 2, tile=(2, 16)),
    ("walk row", 32): _Choice(1, 2, 2, tile=(2, 16)),
    ("forward map", 8): _Choice(2, 4, 1, boxes=True, tile=(8, 8)),
    ("forward map", 16): _Choice(1, 4, 1, boxes=True, tile=(8, 8)),
    ("forward map", 32): _Choice(1, 4, 1, boxes=True, tile=(8, 8)),
    ("forward map", 64): _Choice(1, 4, 2, boxes=True, tile=(8, 8)),
    ("walk map", 8): _Choice(2, 4, 1, tile=(8, 8)),
    ("walk map", 16): _Choice(1, 4, 1, tile=(8, 8)),
    ("walk map", 32): _Choice(1, 4, 1, tile=(8, 8)),
    ("walk map", 64): _Choice(1, 4, 1, tile=(8, 8)),
}


class _Ring(NamedTuple):
    """Tiles fetched ahead, registers per thread."""

    ahead: int
    registers: int | None


# Strips whose halo stays in shared memory, by head dim; measured at 56×56 and 28×28. A program has 16 channels of a pixel.
RINGS = {
    ("forward", 8): _Ring(1, 120),
    ("forward", 16): _Ring(1, 112),
    ("walk", 8): _Ring(2, None),
    ("walk", 16): _Ring(1, None),
}
# Both columns eight apart of a halo in one lane, eight rows of terms in four.
LONGEST_RING = 7


def _fit(dim: int, size: int, kernel: str, height: int, width: int, zeros: bool) -> str:
    """Whether the halo is a map's own rows (" row") or all of it (" map"), as it can be of small maps.

    Not with the border that gives mass to pixels outside the map; not in float32, which was not timed.
    """
    fit = " row" if width > 8 else " map"
    choice = CHOICES.get((kernel + fit, next_power_of_two(dim)))
    if zeros or size == 4 or choice is None:
        return ""
    rows, columns = choice.tile
    return fit if width <= columns and (fit == " row" or height <= rows) else ""


@functools.lru_cache(maxsize=256)
def geometry(
    dim: int, heads: int, kh: int, kw: int, size: int, kernel: str, fit: str = "", lean: int = 0, ring: bool = False
) -> Geometry:
    """A fixed choice per kernel, head-dim class, window and `_fit`, never per image size. `size` is bytes per element."""
    if ring and lean == 0 and not fit and size == 2 and max(kh, kw) <= LONGEST_RING and heads * dim % 16 == 0:
        own = RINGS.get((kernel, dim))
        if own is not None:
            chunks = ceil_div(kh + 1, 2)
            return Geometry(2, 8, 16 // dim, 2, 16, chunks, 1, 1, own.registers, ahead=own.ahead)
    padded = next_power_of_two(dim)
    choice = CHOICES["walk" + fit if kernel == "walk" else "forward" + fit, max(8, padded)]
    ty, tx = choice.tile
    whole_y, whole_x = fit == " map", fit != ""
    if not fit and tx + kw - 1 > 16 >= 4 + kw - 1:
        # A halo of 16 columns instead of 32: at 11×11 two thirds of the logits.
        ty, tx = 4, 4
    tall = kernel in ("queries", "keys")
    if size == 4 or tall:
        # Left to itself, ptxas gives some of these backward kernels 32 registers, and spills twice as much.
        registers = None if kernel == "forward" else 255
        # Of wide heads in float32 two warps spill half of what they hold.
        warps = max(choice.warps, 2) * (2 if size == 4 and tall and padded >= 32 else 1)
        choice = choice._replace(g=min(choice.g, 2), warps=warps, stages=1, keys=64, registers=registers)
    if lean > 0:
        choice = choice._replace(stages=1, keys=choice.keys >> lean)
    # Products need a depth of 16: heads of fewer channels share one.
    g = max(min(choice.g, next_power_of_two(heads)), 16 // padded)
    nc = tx if whole_x else next_power_of_two(tx + kw - 1)
    rows = ty if whole_y else ty + kh - 1
    # The logits of eight rows of sixteen columns are what registers hold.
    by_row = choice.by_row and kernel == "forward" and size == 2 and ty == 2 and rows <= 8 and nc <= 16
    if by_row:
        nc = 16
    # In the walk a chunk is as tall as a tile.
    nr = ty if kernel == "walk" else min(max(choice.keys // nc, 1), next_power_of_two(rows))
    if lean > 0:
        nr = max(nr, 16 // nc)
    launch = (choice.warps, choice.stages, choice.registers, choice.boxes and not by_row)
    return Geometry(ty, tx, g, nr, nc, ceil_div(rows, nr), *launch, whole_y, whole_x, by_row)


def _cut(shape: Geometry, maps: int, heads: int, height: int, width: int, wanted: int, may_pair: bool) -> Plan:
    strips, tiles, groups = ceil_div(width, shape.tx), ceil_div(height, shape.ty), ceil_div(heads, shape.g)
    # Half a strip at most is left, and nothing to its right: two images' are one.
    paired = may_pair and strips > 1 and 0 < 2 * (width % shape.tx) <= shape.tx
    walks = maps * (strips - 1) + ceil_div(maps, 2) if paired else maps * strips
    splits = max(1, min(tiles // shape.chunks, ceil_div(wanted, max(walks * groups, 1))))
    splits = ceil_div(tiles, ceil_div(tiles, splits))  # no splits without tiles
    return Plan(shape, strips - paired, tiles, groups, splits, walks, paired)


def _may_pair(call: LocalCall) -> bool:
    """Whether there are two images that 32-bit offsets reach."""
    steps = [t.stride(0) for t in (call.q, call.k, call.v) if t is not None]
    return len(call.q) > 1 and 2 * max(*steps, call.q[0].numel()) < INT32_LIMIT


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
