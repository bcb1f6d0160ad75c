"""The forward of local attention in strips whose halo stays in shared memory from tile to tile.

A program is one warp, which waits for no other. It walks down a strip of tiles of 2×8 queries with 16 channels of a pixel: one
head of 16, or two of 8, one after the other. The halo's rows (16 pixels, k and v) lie in a ring of chunks of two rows: those of
the tile, and those of the AHEAD tiles to come, which are on their way; a tile adds one chunk. Half types, windows of up to 7×7,
border "mask", both relative tables. Letters are those of `kernels.py`, lanes those of `ring_parts.py`.

A row of the halo is a product of its own, which starts from the column terms; the row term enters with the exponential. Of two
columns eight apart a query attends to one at most, and both lie in one lane: one exponential serves both.

Relative to a query's largest logit, exponentials must wait for all of its logits. In bfloat16, which reaches as far as float32,
they are taken of the logits as they are, and each row passes once; a tile with a query whose sum leaves the range where that is
safe is done again, relative to the largest, after the walk.
"""
# mypy: ignore-errors

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nearsight.ops.local.ring_parts import (
    COPY,
    LANES,
    LEFT,
    MMA,
    RIGHT,
    RUNTIME,
    SHARED,
    beside,
    bits_of,
    bound_columns,
    channels,
    commit,
    copied_by_lane,
    copy,
    exp2,
    left_of,
    log2,
    mma_v2,
    only,
    own_channels,
    pair_of,
    parities,
    pixels_of,
    product_by_halves,
    reciprocal,
    right_of,
    row_of,
    row_terms,
    second_image,
    strip_of,
    table_operand,
    turned,
    twice,
    wait,
    within,
)

__all__ = ["ring_forward"]


# How far from 1 a sum of exponentials may be: its products with values of 1e-20 to 2.9e20 stay in float32. As bits.
LEAST, MOST = (gl.constexpr(int.from_bytes(struct.pack(">f", x), "big")) for x in (2.0**-60, 2.0**60))


@gluon.jit
def _terms(q, table, bounds, near, y0, H, KH: gl.constexpr, D: gl.constexpr, LARGE: gl.constexpr):
    """Of a head's queries: the column terms, from which products with keys start, by halves, and the row terms."""
    nothing = gl.full([16, 8], 0.0, gl.float32, MMA)
    col_taps, row_taps = product_by_halves(q, table, nothing, nothing, D)
    col = turned(col_taps, -1, q.dtype, near)
    bits = row_terms(row_taps, y0, H, KH, LARGE, q.dtype)
    rows = ()
    for r in gl.static_range(8):
        rows = rows + (bits[r].to(gl.float32, bitcast=True),)
    return (gl.minimum(col, bounds[0]), gl.minimum(col, bounds[1])), rows


@gluon.jit
def _keys(keys, slot, r, h, D: gl.constexpr, CHUNKS: gl.constexpr):
    return right_of(row_of(keys, slot, r, CHUNKS), h, D)


@gluon.jit
def _values(values, slot, r, h, D: gl.constexpr, CHUNKS: gl.constexpr):
    return channels(row_of(values, slot, r, CHUNKS), h, D).load(RIGHT)


@gluon.jit
def _logits(q, k, col, D: gl.constexpr):
    """[16, 8], without row terms: of two columns eight apart the one that a query attends to."""
    s0, s1 = product_by_halves(q, k, col[0], col[1], D)
    return gl.maximum(s0, s1)


@gluon.jit
def _largest(s, row):
    """Of a lane's logits."""
    even, odd = parities(s)
    return row + gl.maximum(even, odd)


@gluon.jit
def _add_row(s, less, v, keeps, scale_log2, acc, sums):
    """Exponentials of a row's logits, less a number for each query, added up and times the values."""
    p = exp2(s * scale_log2 - twice(less)).to(v.dtype)
    p = beside(only(p, keeps[0]), only(p, keeps[1]), LEFT)
    # Eight times the same sum, of the numbers that meet the values.
    sums = mma_v2(p, gl.full([16, 8], 1.0, v.dtype, RIGHT), sums)
    return mma_v2(p, v, acc), sums


@gluon.jit
def _divided(acc, total, D: gl.constexpr):
    inverse = twice(reciprocal(total))
    if D == 16:
        inverse = beside(inverse, inverse, MMA)
    return acc * inverse


@gluon.jit
def _attend(
    q,
    col,
    rows,
    keys,
    values,
    slot,
    h,
    keeps,
    scale_log2,
    KH: gl.constexpr,
    D: gl.constexpr,
    CHUNKS: gl.constexpr,
    LARGE: gl.constexpr,
    QUICK: gl.constexpr,
):
    """Output of a head's queries, their log-sum-exp, and the sums of their exponentials: if QUICK relative to nothing, else to
    the largest logit, after all of them."""
    logits = ()
    if not QUICK:
        top = gl.full([16, 4], -LARGE, gl.float32, LANES)
        for r in gl.static_range(KH + 1):
            s = _logits(q, _keys(keys, slot, r, h, D, CHUNKS), col, D)
            top = gl.maximum(top, _largest(s, rows[r]))
            logits = logits + (s,)
        base = gl.max(top, 1)[:, None] * scale_log2
    acc = gl.full([16, D], 0.0, gl.float32, MMA)
    sums = gl.full([16, 8], 0.0, gl.float32, MMA)
    for r in gl.static_range(KH + 1):
        if QUICK:
            s = _logits(q, _keys(keys, slot, r, h, D, CHUNKS), col, D)
            less = rows[r] * -scale_log2
        else:
            s = logits[r]
            less = base - rows[r] * scale_log2
        acc, sums = _add_row(s, less, _values(values, slot, r, h, D, CHUNKS), keeps, scale_log2, acc, sums)
    total, _same = parities(sums)
    out = _divided(acc, total, D)
    lse = log2(total)
    if not QUICK:
        lse = base + lse
    return out, lse, total


@gluon.jit
def _row_term(rows, j, i, HALO: gl.constexpr):
    """The term of row i of chunk j, which the compiler does not know."""
    row = rows[i]
    for known in gl.static_range(1, HALO):
        row = gl.where(j == known, rows[2 * known + i], row)
    return row


@gluon.jit
def _attend_again(
    queries,
    keys,
    values,
    stat_at,
    stat_there,
    table,
    bounds,
    keeps,
    near,
    y0,
    H,
    W,
    scale_log2,
    KH: gl.constexpr,
    D: gl.constexpr,
    CHUNKS: gl.constexpr,
    LARGE: gl.constexpr,
):
    """`_attend` for all heads of a tile whose halo begins with the first chunk: output, and log-sum-exp to `stat_at`.

    Rare, so it is little code and takes no more registers than the walk: loops over heads and chunks, logits computed twice, and
    every head has the values of all, of which it keeps its own.
    """
    HALO: gl.constexpr = (KH + 2) // 2
    chunks = HALO + (W >> 31)  # HALO, but a compiler that knew would write out the loops and keep all logits
    q_both = queries.load(LEFT)
    head = gl.arange(0, 16, gl.SliceLayout(0, MMA))[None, :] // D
    out = gl.full([16, 16], 0.0, gl.float32, MMA)
    for h in range(16 // D):
        q = only(q_both, own_channels(h, W, D))
        col, rows = _terms(q, table, bounds, near, y0, H, KH, 16, LARGE)
        top = gl.full([16, 4], -LARGE, gl.float32, LANES)
        for j in range(chunks):
            for i in gl.static_range(2):
                s = _logits(q, _keys(keys, j, i, 0, 16, CHUNKS), col, 16)
                top = gl.maximum(top, _largest(s, _row_term(rows, j, i, HALO)))
        base = gl.max(top, 1)[:, None] * scale_log2
        acc = gl.full([16, 16], 0.0, gl.float32, MMA)
        sums = gl.full([16, 8], 0.0, gl.float32, MMA)
        for j in range(chunks):
            for i in gl.static_range(2):
                s = _logits(q, _keys(keys, j, i, 0, 16, CHUNKS), col, 16)
                v = _values(values, j, i, 0, 16, CHUNKS)
                less = base - _row_term(rows, j, i, HALO) * scale_log2
                acc, sums = _add_row(s, less, v, keeps, scale_log2, acc, sums)
        total, _same = parities(sums)
        one = _divided(acc, total, 16)
        out = gl.where(head == h, one, out)
        gl.store(stat_at + h, base + log2(total), mask=stat_there)
    return out.to(q_both.dtype)


@gluon.jit(do_not_specialize=RUNTIME)
def ring_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    row_ptr,
    col_ptr,
    H,
    W,
    images,
    heads,
    groups,
    strips,
    splits,
    tiles,
    q_b,
    q_y,
    q_x,
    k_b,
    k_y,
    k_x,
    v_b,
    v_y,
    v_x,
    row_head,
    col_head,
    scale_log2,
    KH: gl.constexpr,
    KW: gl.constexpr,
    D: gl.constexpr,
    q_h: gl.constexpr,
    k_h: gl.constexpr,
    v_h: gl.constexpr,
    LARGE: gl.constexpr,
    AHEAD: gl.constexpr,
    PAIRED: gl.constexpr,
):
    """out and the log-sum-exp of every query in a strip, as `kernels.forward` gives them.

    PAIRED: half a strip or less is left of each image, and two images' are one (`pair_of`).
    """
    G: gl.constexpr = 16 // D
    HALO: gl.constexpr = (KH + 2) // 2
    CHUNKS: gl.constexpr = HALO + AHEAD
    PY: gl.constexpr = (KH - 1) // 2
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    QUICK: gl.constexpr = dtype == gl.bfloat16
    gl.static_assert(KH <= 7 and KW <= 7 and G * D == 16)
    group, x0, image, _per_split, first, last = strip_of(gl.program_id(0), groups, splits, strips, tiles)
    near = 7
    left = 2
    if PAIRED:
        x0, image, near, left = pair_of(gl.program_id(0), groups, splits, strips, images, x0, image)
    h0 = group * G

    keys = gl.allocate_shared_memory(dtype, [CHUNKS, 32, 16], SHARED)
    values = gl.allocate_shared_memory(dtype, [CHUNKS, 32, 16], SHARED)
    queries = gl.allocate_shared_memory(dtype, [AHEAD + 1, 16, 16], SHARED)

    halo_x, halo_y, halo_in, qx, qy, query_in, channel, halo_side, side = copied_by_lane(x0, W, KW, near, left)
    k_at = pixels_of(k_ptr, image, k_b, group * (G * k_h), halo_y, halo_x, k_y, k_x, channel, halo_side)
    v_at = pixels_of(v_ptr, image, v_b, group * (G * v_h), halo_y, halo_x, v_y, v_x, channel, halo_side)
    q_at = pixels_of(q_ptr, image, q_b, group * (G * q_h), qy, qx, q_y, q_x, channel, side)
    o_x = heads * D
    o_at = out_ptr + image * H * W * o_x + group * 16 + ((((side * H + qy) * W + qx) * o_x)[:, None] + channel)

    tables = ()
    for h in gl.static_range(G):
        tables = tables + (table_operand(row_ptr, col_ptr, row_head, col_head, h0 + h, KH, KW, D, D, dtype),)
    bound0, bound1, mine0, mine1 = bound_columns(x0, W, KW, LARGE, near)
    bounds = (bound0, bound1)
    keeps = (bits_of(mine0), bits_of(mine1))

    sm = gl.arange(0, 16, gl.SliceLayout(1, LANES))[:, None]
    st = gl.arange(0, 4, gl.SliceLayout(0, LANES))[None, :]
    stat_side = second_image(sm, near)
    stat_x = x0 + (sm & near)
    stat_in = (stat_x < W) & (stat_side < left) & (st == 0)
    stat_at = lse_ptr + image * H * W * heads + h0 + ((stat_side * H + sm // 8) * W + stat_x) * heads + st * 0

    # The first tile's rows but for its last chunk, which comes with its queries, as every later one.
    for j in gl.static_range(HALO - 1):
        y = 2 * (first + j) - PY
        use = halo_in & within(y + halo_y, H)[:, None]
        copy(keys.index(j), k_at + y * k_y, mask=use)
        copy(values.index(j), v_at + y * v_y, mask=use)
    for a in gl.static_range(AHEAD):
        y = 2 * (first + a + HALO - 1) - PY
        use = halo_in & within(y + halo_y, H)[:, None]
        copy(keys.index(HALO - 1 + a), k_at + y * k_y, mask=use)
        copy(values.index(HALO - 1 + a), v_at + y * v_y, mask=use)
        y = 2 * (first + a)
        copy(queries.index(a), q_at + y * q_y, mask=query_in & ((y + qy) < H)[:, None])
        commit()

    missed = 0  # a bit for every tile that must be done again (tiles 32 apart share one)
    slot = 0  # of the tile's first chunk
    q_slot = 0
    q_free = AHEAD
    for tile in range(first, last):
        wait(AHEAD - 1)
        # The chunk behind the tile is free: into it comes what a later tile adds, never above the image. Nothing after the last.
        later = tile + AHEAD
        free = slot - 1
        free = gl.where(free < 0, CHUNKS - 1, free)
        end = gl.where(later < last, H, 0)
        y = 2 * (later + HALO - 1) - PY
        use = halo_in & ((y + halo_y) < end)[:, None]
        copy(keys.index(free), k_at + y * k_y, mask=use)
        copy(values.index(free), v_at + y * v_y, mask=use)
        copy(queries.index(q_free), q_at + (2 * later) * q_y, mask=query_in & ((2 * later + qy) < end)[:, None])
        commit()

        mine = queries.index(q_slot)
        stat_there = stat_in & ((2 * tile + sm // 8) < H)
        far = gl.full([16, 4], 0, gl.uint32, LANES)
        for h in gl.static_range(G):
            q = left_of(mine, h, D)
            col, rows = _terms(q, tables[h], bounds, near, 2 * tile, H, KH, D, LARGE)
            out, lse, total = _attend(
                q, col, rows, keys, values, slot, h, keeps, scale_log2, KH, D, CHUNKS, LARGE, QUICK
            )
            if QUICK:
                # Too small wraps round to a large number, and what is not finite is one.
                far = gl.maximum(far, gl.where(stat_there, total.to(gl.uint32, bitcast=True) - LEAST, 0))
            # The tile's queries are no longer needed: in their place the output lies as it is written, 16 bytes a lane.
            channels(mine, h, D).store(out.to(dtype))
            gl.store(stat_at + (2 * tile) * W * heads + h, lse, mask=stat_there)
        there = query_in & ((2 * tile + qy) < H)[:, None]
        if QUICK:
            missed |= gl.where(gl.max(far) > MOST - LEAST, 1, 0) << (tile & 31)
        gl.store(o_at + (2 * tile) * W * o_x, mine.load(COPY), mask=there)
        slot = gl.where(slot == CHUNKS - 1, 0, slot + 1)
        q_slot = gl.where(q_slot == AHEAD, 0, q_slot + 1)
        q_free = gl.where(q_free == AHEAD, 0, q_free + 1)

    if QUICK and missed != 0:
        wait(0)  # for the walk's last copies, of nothing
        # Anew: over the walk it would take registers.
        table = table_operand(row_ptr, col_ptr, row_head, col_head, h0, KH, KW, D, 16, dtype)
        for tile in range(first, last):
            if (missed >> (tile & 31)) & 1 != 0:
                for j in gl.static_range(HALO):
                    y = 2 * (tile + j) - PY
                    use = halo_in & within(y + halo_y, H)[:, None]
                    copy(keys.index(j), k_at + y * k_y, mask=use)
                    copy(values.index(j), v_at + y * v_y, mask=use)
                there = query_in & ((2 * tile + qy) < H)[:, None]
                copy(queries.index(0), q_at + (2 * tile) * q_y, mask=there)
                commit()
                wait(0)
                again = _attend_again(
                    queries.index(0),
                    keys,
                    values,
                    stat_at + (2 * tile) * W * heads,
                    stat_in & ((2 * tile + sm // 8) < H),
                    table,
                    bounds,
                    keeps,
                    near,
                    2 * tile,
                    H,
                    W,
                    scale_log2,
                    KH,
                    D,
                    CHUNKS,
                    LARGE,
                )
                queries.index(1).store(again)
                gl.store(o_at + (2 * tile) * W * o_x, queries.index(1).load(COPY), mask=there)
