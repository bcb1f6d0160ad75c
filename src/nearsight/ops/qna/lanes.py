"""What QnA's kernels are made of: lanes, tuples of tiles, and loads that compile quickly.

A row of the map is taken as one line of W·HEADS pixel-heads; a program takes N neighbours of it, its lanes, in ROWS rows. A tile
of values is [N, DP]; with 8 channels per head and half types one thread holds one pixel's head, so a softmax weight is one
register and never leaves its thread. No compilation depends on the number of heads.

Triton's coalescing pass walks nearly the whole program for every load and store whose pointer is computed, and not at all where a
loop carries the pointer. So loads and stores stand in loops over `one_turn`, which run once and which only LLVM knows to do so:
it removes them, and compiling takes a third of the time.

Code grows with the taps that are written out. Where a column of them is too many, a turn of the loop over the columns takes a
piece of one, BAND of its KH taps; those that are left over make a loop of their own, so that no tap is masked.

Letters: r a row of the program, l a query, (ty, tx) a tap, q a row of windows.
"""
# mypy: ignore-errors
# ruff: noqa: E741

import triton
import triton.language as tl

from nearsight.ops.arithmetic.kernels import NVIDIA

__all__ = [
    "LOG2E",
    "channels",
    "clamp",
    "column_pointers",
    "fetch",
    "fetch_pixels",
    "filled",
    "for_next_turn",
    "image",
    "inside",
    "lane_mask",
    "lanes",
    "load_channels",
    "load_neighbours",
    "load_table",
    "logits",
    "neighbours",
    "one_turn",
    "piece",
    "row_pointers",
    "score_pointers",
    "store_channels",
    "store_neighbours",
    "table_pointers",
    "widened",
]

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def fetch(pointers):
    """Have what is there brought into the second-level cache, on NVIDIA's GPUs."""
    if NVIDIA:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def clamp(i, size):
    return tl.minimum(tl.maximum(i, 0), size - 1)


@triton.jit
def fetch_pixels(
    scores, values, y, xc, h, H, HEADS, ss_y, ss_x, vs_y, vs_x, ROWS: tl.constexpr, L: tl.constexpr, D: tl.constexpr
):
    """Have ROWS rows of an image from y on brought into the cache; neighbouring lanes ask for different queries' scores."""
    score_column = xc * ss_x + (h + h % L * HEADS)
    value_column = xc * vs_x + h * D
    for r in tl.static_range(ROWS):
        row = clamp(y + r, H)
        fetch(values + (value_column + row * vs_y))
        fetch(scores + (score_column + row * ss_y))


@triton.jit
def one_turn(n):
    """1, whatever n: a number of turns that Triton's passes take for unknown."""
    return tl.minimum(tl.maximum(n, 1), 1)


@triton.jit
def for_next_turn(pointers, step):
    """A tuple of pointers for a loop's next turn, which never comes. Alignment must survive."""
    t = ()
    step *= 16
    for i in tl.static_range(len(pointers)):
        t = t + (pointers[i] + step,)
    return t


@triton.jit
def piece(i, FIRST: tl.constexpr, TAPS: tl.constexpr, PIECES: tl.constexpr):
    """The i-th of all columns' PIECES of TAPS taps each, the upper ones in row FIRST: its column and its first row."""
    return i // PIECES, FIRST + i % PIECES * TAPS


@triton.jit
def filled(n: tl.constexpr, x):
    """A tuple of n times x."""
    t = ()
    for _ in tl.static_range(n):
        t = t + (x,)
    return t


@triton.jit
def inside(y, x, H, W):
    """Whether the pixels (one y, a tensor of x) lie in the image."""
    limit = tl.where((y >= 0) & (y < H), W, 0)
    return x.to(tl.uint32) < limit.to(tl.uint32)


@triton.jit
def widened(tile):
    """float32; on NVIDIA a pair of bfloat16 takes two instructions, where the compiler takes three."""
    if NVIDIA and tile.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $2, 16; mov.b32 $0, t; and.b32 t, $2, 0xffff0000; mov.b32 $1, t; }",
            "=f,=f,r", [tile], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return tile.to(tl.float32)


@triton.jit
def lanes(block, columns, HEADS, N: tl.constexpr):
    """The lanes of a block of a row's pixel-heads: their columns and heads, the last one's beyond the row."""
    end = tl.maximum(columns * HEADS - 1, 0)
    lane = tl.minimum(block * N + tl.arange(0, N), end).to(tl.uint32)
    column = lane // HEADS.to(tl.uint32)
    return column.to(tl.int32), (lane - column * HEADS.to(tl.uint32)).to(tl.int32)


@triton.jit
def lane_mask(block, columns, HEADS, valid, N: tl.constexpr):
    """Which lanes lie in the row, none unless it is valid."""
    return block * N + tl.arange(0, N) < tl.where(valid, columns * HEADS, 0)


@triton.jit
def channels(h, D: tl.constexpr, DP: tl.constexpr):
    """The heads' channels [N, DP], beyond D the last one."""
    d = tl.arange(0, DP)
    if D != DP:
        d = tl.minimum(d, D - 1)
    return h[:, None] * D + d[None, :]


@triton.jit
def load_channels(pointers, D: tl.constexpr, DP: tl.constexpr):
    """A float32 tile [N, DP], zero beyond D."""
    if D == DP:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(tl.arange(0, DP) < D)[None, :], other=0.0)
    return widened(tile)


@triton.jit
def store_channels(pointers, tile, valid, D: tl.constexpr, DP: tl.constexpr):
    mask = valid[:, None]
    if D != DP:
        mask = mask & (tl.arange(0, DP) < D)[None, :]
    tl.store(pointers, tile.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def neighbours(at, n: tl.constexpr):
    """Pointers [N] to the first of n neighbours as `load_neighbours` takes them: a tile [N, n] for 2 or 4, else n of [N]."""
    t = ()
    if n == 2 or n == 4:
        t = (at[:, None] + tl.arange(0, n)[None, :],)
    else:
        for i in tl.static_range(n):
            t = t + (at + i,)
    return t


@triton.jit
def load_neighbours(pointers, i: tl.constexpr, n: tl.constexpr):
    """The n neighbours of place i of a tuple of `neighbours`, a tuple of [N]: one load for 2 or 4."""
    t = ()
    if n == 2:
        t = tl.split(tl.load(pointers[i]))
    elif n == 4:
        even, odd = tl.split(tl.reshape(tl.load(pointers[i]), [pointers[i].shape[0], 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        t = (a, b, c, d)
    else:
        for k in tl.static_range(n):
            t = t + (tl.load(pointers[i * n + k]),)
    return t


@triton.jit
def store_neighbours(pointers, i: tl.constexpr, values, valid):
    """Store a tuple of [N] as the neighbours of place i: one store for 2 or 4."""
    n: tl.constexpr = len(values)
    if n == 2:
        tl.store(pointers[i], tl.join(values[0], values[1]), mask=valid[:, None])
    elif n == 4:
        pairs = tl.join(tl.join(values[0], values[2]), tl.join(values[1], values[3]))
        tl.store(pointers[i], tl.reshape(pairs, [values[0].shape[0], 4]), mask=valid[:, None])
    else:
        for k in tl.static_range(n):
            tl.store(pointers[i * n + k], values[k], mask=valid)


@triton.jit
def table_pointers(
    tables, h, tx, COLS: tl.constexpr, HP: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, G: tl.constexpr
):
    """To the taps (ty, tx), (ty, tx + 1) … of the packed tables [KH, KW, HP, G]: a tuple over (j, ty) of `neighbours`."""
    t = ()
    if G > 0:
        at = tables + h * G
        for j in tl.static_range(COLS):
            for ty in tl.static_range(KH):
                t = t + neighbours(at + (ty * KW + tx + j) * (HP * G), G)
    return t


@triton.jit
def load_table(
    pointers, wanted: tl.constexpr, first: tl.constexpr, taps: tl.constexpr, L: tl.constexpr, G: tl.constexpr
):
    """Of each tap the L numbers from `first` on, a tuple over (tap, l)."""
    t = ()
    if wanted:
        for i in tl.static_range(taps):
            t = t + load_neighbours(pointers, i, G)[first : first + L]
    return t


@triton.jit
def score_pointers(scores, column, y0, H, ss_y, HEADS, COUNT: tl.constexpr, L: tl.constexpr):
    """To the columns (offsets at row 0, l = 0) in rows y0, y0 + 1, …: a tuple over (row, l) of [N]."""
    t = ()
    for c in tl.static_range(COUNT):
        for l in tl.static_range(L):
            t = t + (scores + (column + (clamp(y0 + c, H) * ss_y + l * HEADS)),)
    return t


@triton.jit
def row_pointers(base, column, y0, H, s_y, COUNT: tl.constexpr):
    """To the columns (offsets at row 0) in rows y0, y0 + 1, …"""
    t = ()
    for c in tl.static_range(COUNT):
        t = t + (base + (column + clamp(y0 + c, H) * s_y),)
    return t


@triton.jit
def column_pointers(
    scores, values, key_mask, tables, tx, x, y0, h, channel, H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
    COLS: tl.constexpr, HP: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, COUNT: tl.constexpr, L: tl.constexpr,
    G: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """To all that columns tx … tx + COLS − 1 of the windows' taps need, the first of them at x, in COUNT rows from y0 on.

    Tuples for tables, scores, values and mask.
    """
    at = ()
    value_at = ()
    mask_at = ()
    for j in tl.static_range(COLS):
        xc = clamp(x + j, W)
        at = at + score_pointers(scores, xc * ss_x + h, y0, H, ss_y, HEADS, COUNT, L)
        value_at = value_at + row_pointers(values, (xc * vs_x)[:, None] + channel, y0, H, vs_y, COUNT)
        mask_at = mask_at + row_pointers(key_mask, xc * ms_x, y0, H, ms_y, COUNT if MASKED else 0)
    return table_pointers(tables, h, tx, COLS, HP, KH, KW, G), at, value_at, mask_at


@triton.jit
def image(scores, values, key_mask, batch, ss_b, vs_b, ms_b, ALIGN: tl.constexpr):
    """Scores, values and mask of one image."""
    return scores + batch * ss_b, values + batch * vs_b * ALIGN, key_mask + batch * ms_b


@triton.jit
def logits(at, mask_at, c: tl.constexpr, y, x, H, W, MASKED: tl.constexpr, L: tl.constexpr):
    """Scores of the pixels (y, x), −inf where they may not be attended: a tuple over l of [N]."""
    valid = inside(y, x, H, W)
    if MASKED:
        valid = valid & (tl.load(mask_at[c]) != 0)
    t = ()
    for l in tl.static_range(L):
        t = t + (tl.where(valid, tl.load(at[c * L + l]).to(tl.float32), float("-inf")),)
    return t
