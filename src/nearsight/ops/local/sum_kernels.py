"""What the programs of a backward left, added up in a fixed order: shares of dk and dv, the relative tables' gradients.

Layout and letters are those of `kernels.py`.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["finish_relative", "merge"]


@triton.jit
def _add_tables(
    share_ptr,
    sum_ptr,
    unit,
    tables,
    groups,
    KH: tl.constexpr,
    KW: tl.constexpr,
    G: tl.constexpr,
    DP: tl.constexpr,
    HS: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every PARTS-th of the programs' tables, in order, at one block of its numbers; only places of taps are read and written."""
    part = unit % PARTS
    at = unit // PARTS * BLOCK + tl.arange(0, BLOCK)
    size = groups * (2 * HS * G * DP)
    place = at // (G * DP) % (2 * HS)
    use = (at < size) & ((place < KW) | ((place >= HS) & (place < HS + KH)))
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(part, tables, PARTS * ROWS):
        row = first + PARTS * tl.arange(0, ROWS)
        there = (row < tables)[:, None] & use[None, :]
        total += tl.load(share_ptr + row.to(tl.int64)[:, None] * size + at[None, :], mask=there, other=0.0)
    tl.store(sum_ptr + part * size + at, tl.sum(total, 0), mask=use)


@triton.jit(do_not_specialize=["H", "W", "strips", "splits", "tiles", "per_split", "tables", "table_rows"])
def merge(
    dk_share_ptr,
    dv_share_ptr,
    dk_ptr,
    dv_ptr,
    table_share_ptr,
    table_ptr,
    H,
    W,
    strips,
    splits,
    tiles,
    dil_y,
    dil_x,
    per_split,
    tables,
    table_rows,
    grad_pixel,
    CHANNELS: tl.constexpr,
    CP: tl.constexpr,
    GROUP: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    TY: tl.constexpr,
    TX: tl.constexpr,
    NC: tl.constexpr,
    CHUNKS: tl.constexpr,
    OVER_Y: tl.constexpr,
    OVER_X: tl.constexpr,
    PIXELS: tl.constexpr,
    HAS_K: tl.constexpr,
    G: tl.constexpr,
    DP: tl.constexpr,
    HS: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up what the strips (and the splits of a strip) hold of dk and dv, in a fixed order.

    The first `table_rows` rows of the grid, before those of the images, add up `tables` shares of the relative tables instead.
    """
    groups: tl.constexpr = (CHANNELS + GROUP - 1) // GROUP
    if tl.program_id(1) < table_rows:
        unit = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        _add_tables(table_share_ptr, table_ptr, unit, tables, groups, KH, KW, G, DP, HS, PARTS, ROWS, BLOCK)
        return
    PY: tl.constexpr = (KH - 1) // 2
    PX: tl.constexpr = (KW - 1) // 2
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    x = pixel % W
    y = pixel // W
    image = (tl.program_id(1) - table_rows).to(tl.int64)
    c = tl.arange(0, CP)
    walk = ((image * dil_y + y % dil_y) * dil_x + x % dil_x) * strips
    y = y // dil_y
    x = x // dil_x
    last_split = tl.zeros((PIXELS,), tl.int32)
    if OVER_Y > 1:
        last_split = tl.minimum((y + PY) // (per_split * TY), splits - 1)
    last_strip = tl.minimum((x + PX) // TX, strips - 1)
    rows = (per_split + CHUNKS - 1) * TY
    dk = tl.zeros((PIXELS, CP), tl.float32)
    dv = tl.zeros((PIXELS, CP), tl.float32)
    for i in tl.static_range(OVER_Y):
        split = last_split - i
        row = y + PY - split * per_split * TY
        # The last split may walk fewer tiles, so fewer rows of its share were written.
        written = (tl.minimum(per_split, tiles - split * per_split) + CHUNKS - 1) * TY
        for j in tl.static_range(OVER_X):
            strip = last_strip - j
            column = x + PX - strip * TX
            use = (split >= 0) & (row < written) & (strip >= 0) & (column < TX + KW - 1) & (pixel < H * W)
            program = ((walk + strip) * splits + split) * groups
            at = (program[:, None] + c[None, :] // GROUP) * rows + row[:, None]
            at = (at * NC + column[:, None]) * GROUP + c[None, :] % GROUP
            use = use[:, None] & (c < CHANNELS)[None, :]
            dv += tl.load(dv_share_ptr + at, mask=use, other=0.0).to(tl.float32)
            if HAS_K:
                dk += tl.load(dk_share_ptr + at, mask=use, other=0.0).to(tl.float32)
    at = ((image * H * W + pixel) * grad_pixel)[:, None] + c[None, :]
    use = (pixel < H * W)[:, None] & (c < CHANNELS)[None, :]
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=use)
    if HAS_K:
        tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=use)


@triton.jit(do_not_specialize=["parts", "groups"])
def finish_relative(
    share_ptr,
    row_ptr,
    col_ptr,
    parts,
    groups,
    KH: tl.constexpr,
    KW: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    G: tl.constexpr,
    HS: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_COL: tl.constexpr,
    ROW_SHARED: tl.constexpr,
    COL_SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """A few channels of one tap's gradient, KW column taps then KH row taps: of one head, or of all where the table is shared.

    The sum over `parts` programs, in order, of [group of heads, 2·HS, G·DP]: only what belongs to the tap is read. Heads that a
    group has beyond the last one hold zeros.
    """
    tap = tl.program_id(0)
    own = tl.program_id(1)
    is_row = tap >= KW
    shared = tl.where(is_row, 1 if ROW_SHARED else 0, 1 if COL_SHARED else 0) != 0
    rows = parts * tl.where(shared, groups * G, 1)
    d = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    place = tl.where(is_row, (HS + tap - KW) * G * DP, tap * G * DP + D // 2) + d
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    for first in range(0, rows, ROWS):
        i = first + tl.arange(0, ROWS)
        group = tl.where(shared, i // G, i * groups + own // G)
        at = group.to(tl.int64) * (2 * HS * G * DP) + tl.where(shared, i % G, own % G) * DP
        use = (i < rows)[:, None] & (d < D // 2)[None, :]
        total += tl.load(share_ptr + at[:, None] + place[None, :], mask=use, other=0.0)
    total = tl.sum(total, 0)
    row_taps = d + tap * DP >= KW * DP
    if HAS_ROW and (own == 0 or not ROW_SHARED):
        at = row_ptr + (own * KH + tap - KW) * (D // 2) + d
        tl.store(at, total.to(row_ptr.dtype.element_ty), mask=row_taps & (d < D // 2))
    if HAS_COL and (own == 0 or not COL_SHARED):
        at = col_ptr + (own * KW + tap) * (D // 2) + d
        tl.store(at, total.to(col_ptr.dtype.element_ty), mask=~row_taps & (d < D // 2))
