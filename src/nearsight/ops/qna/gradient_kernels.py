"""QnA's gradients in Triton, over the pixels: each gathers from the windows that see it; partial sums for the tables.

Letters and lanes: `lanes.py`.
"""
# mypy: ignore-errors
# ruff: noqa: E741

import triton
import triton.language as tl

from nearsight.ops.early_kernels import begin
from nearsight.ops.qna.lanes import (
    LOG2E,
    channels,
    clamp,
    fetch,
    fetch_pixels,
    filled,
    for_next_turn,
    image,
    inside,
    lane_mask,
    lanes,
    load_channels,
    load_neighbours,
    load_table,
    logits,
    neighbours,
    one_turn,
    piece,
    row_pointers,
    score_pointers,
    store_channels,
    table_pointers,
)
from nearsight.ops.qna.shares import deal, dealt_place, store_sums

__all__ = ["backward"]


@triton.jit
def _scatter_taps(
    dv, ds, db, dw, v, s, table_at, grad_at, lse_at, delta_at, sum_at, again, q0, ox, OH, OW,
    KH: tl.constexpr, LEAD: tl.constexpr, SY: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, QLOW: tl.constexpr, QROWS: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, STACK: tl.constexpr,
    HB: tl.constexpr, N: tl.constexpr, SHARE: tl.constexpr, PARTS: tl.constexpr, LONE: tl.constexpr,
):  # fmt: skip
    """The body of `_scatter_column`'s loop. Row r of the program is tap r + LEAD − SY·q of row q of the windows."""
    per: tl.constexpr = L if STACK else 1
    group: tl.constexpr = (BIASED + SCALED) * L
    b = load_table(table_at, BIASED, 0, KH, L, group)
    w = load_table(table_at, SCALED, BIASED * L, KH, L, group)
    old = ()
    for i in tl.static_range(len(sum_at)):
        old = old + (tl.load(sum_at[i], mask=again, other=0.0),)
    for q in tl.static_range(QROWS):
        valid = inside(q0 + (QLOW + q), ox, OH, OW)
        g = ()
        for l in tl.static_range(per):
            g = g + (load_channels(grad_at[q * per + l], D, DP),)
        seen = load_neighbours(lse_at, q, PARTS * L)
        delta = load_neighbours(delta_at, q, L)
        lse = ()
        for l in tl.static_range(L):
            lse = lse + (tl.where(valid, seen[l], float("inf")),)
        for r in tl.static_range(ROWS):
            # Loops of one turn name numbers that are known: Triton visits every name and sign that it reads.
            for ty in tl.static_range(r + LEAD - SY * q, r + LEAD - SY * q + 1):
                if ty >= 0 and ty < KH:
                    weight = tl.zeros_like(s[0])
                    if not STACK:
                        gv = tl.sum(g[0] * v[r], axis=1)
                    for l in tl.static_range(L):
                        if STACK:
                            gv = tl.sum(g[l] * v[r], axis=1)
                        for i in tl.static_range(ty * L + l, ty * L + l + 1):
                            logit = s[r * L + l]
                            if BIASED:
                                logit += b[i]
                            if PARTS == 2:
                                p = tl.exp2((logit - lse[l]) * LOG2E) * seen[L + l]
                            else:
                                p = tl.exp2(logit * LOG2E - lse[l])
                            scaled = p
                            dlogit = gv
                            if SCALED:
                                scaled = p * w[i]
                                dlogit = w[i] * gv
                            # Of a window with one key p is 1 whatever its logit; the difference would leave a rounding error.
                            dlogit = tl.zeros_like(p) if LONE else p * (dlogit - delta[l])
                            ds = ds[: r * L + l] + (ds[r * L + l] + dlogit,) + ds[r * L + l + 1 :]
                            if BIASED:
                                db = db[:i] + (db[i] + dlogit,) + db[i + 1 :]
                            if SCALED:
                                dw = dw[:i] + (dw[i] + p * gv,) + dw[i + 1 :]
                            if STACK:
                                dv = dv[:r] + (dv[r] + scaled[:, None] * g[l],) + dv[r + 1 :]
                            else:
                                weight += scaled
                    if not STACK:
                        dv = dv[:r] + (dv[r] + weight[:, None] * g[0],) + dv[r + 1 :]
        if SHARE > 0:
            # Taps that no later row of windows meets in this tile: their sums need no registers any more.
            for ty in tl.static_range(KH):
                if ty < ROWS + LEAD - SY * q and (ty >= ROWS + LEAD - SY * (q + 1) or q == QROWS - 1):
                    mine = ()
                    if BIASED:
                        mine = mine + db[ty * L : (ty + 1) * L]
                    if SCALED:
                        mine = mine + dw[ty * L : (ty + 1) * L]
                    share = deal(mine, HB, N)
                    for i in tl.static_range(SHARE):
                        tl.store(sum_at[ty * SHARE + i], share[i] + old[ty * SHARE + i])
    return dv, ds, db, dw


@triton.jit
def _scatter_column(
    dv, ds, db, dw, v, s, tx, grad, lse_in, delta_in, tables, dealt, again, q0, ox, h, channel,
    OH, OW, HEADS,
    HP: tl.constexpr, TAPS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, L: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, STACK: tl.constexpr, HB: tl.constexpr, N: tl.constexpr, SHARE: tl.constexpr,
    PARTS: tl.constexpr, LONE: tl.constexpr,
):  # fmt: skip
    """What the windows that see the pixels in column tx of their taps give to the pixels' gradients and the tables'.

    TAPS of the column's KH; `tables`, `dealt` and the windows' row q0 are those of the first. db and dw are theirs, over
    (ty, l). With a SHARE of them each lane stores its own from `dealt` on; those of an earlier tile are there `again`.
    """
    per: tl.constexpr = L if STACK else 1
    # The rows of windows that see a tile begin this far below q0.
    QLOW: tl.constexpr = -((TAPS - 1 - (KH - 1) // 2) // SY)
    QROWS: tl.constexpr = (ROWS - 1 + (KH - 1) // 2) // SY - QLOW + 1
    group: tl.constexpr = (BIASED + SCALED) * L
    table_at = table_pointers(tables, h, tx, 1, HP, TAPS, KW, group)
    grad_at = ()
    lse_at = ()
    delta_at = ()
    sum_at = ()
    if SHARE > 0:
        for ty in tl.static_range(TAPS):
            for i in tl.static_range(SHARE):
                sum_at = sum_at + (dealt + ((i // L * KH + ty) * KW * L + tx * L + i % L) * HEADS,)
    oxc = clamp(ox, OW)
    grad_column = (oxc * (per * HEADS * D))[:, None] + channel
    state = (oxc * HEADS + h) * L
    for q in tl.static_range(QROWS):
        row = clamp(q0 + (QLOW + q), OH) * (OW * HEADS)
        for l in tl.static_range(per):
            grad_at = grad_at + (grad + (grad_column + (row * (per * D) + l * (HEADS * D))),)
        lse_at = lse_at + neighbours(lse_in + (state + row * L) * PARTS, PARTS * L)
        delta_at = delta_at + neighbours(delta_in + (state + row * L), L)
    for _ in range(one_turn(OH)):
        dv, ds, db, dw = _scatter_taps(
            dv, ds, db, dw, v, s, table_at, grad_at, lse_at, delta_at, sum_at, again, q0, ox, OH, OW,
            TAPS, (KH - 1) // 2 - SY * QLOW, SY, L, ROWS, D, DP, QLOW, QROWS, BIASED, SCALED, STACK, HB, N, SHARE, PARTS, LONE,
        )  # fmt: skip
        table_at = for_next_turn(table_at, OH)
        grad_at = for_next_turn(grad_at, OH)
        lse_at = for_next_turn(lse_at, OH)
        delta_at = for_next_turn(delta_at, OH)
        sum_at = for_next_turn(sum_at, OH)
    return dv, ds, db, dw


@triton.jit
def _scatter_pieces(
    dv, ds, v, s, grad, lse_in, delta_in, tables, dbias, dscale, dealt, owner, owners, later, q0, q_column, phase, h, channel,
    OH, OW, HEADS,
    FIRST: tl.constexpr, TAPS: tl.constexpr, PIECES: tl.constexpr, HP: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, STACK: tl.constexpr, HB: tl.constexpr, N: tl.constexpr, SHARE: tl.constexpr,
    PARTS: tl.constexpr, LONE: tl.constexpr,
):  # fmt: skip
    """What the windows give to the pixels' gradients, and to the tables' stored sums: of every column of taps that sees them the
    PIECES of TAPS taps from row FIRST on, all multiples of SY.
    """
    zero = tl.zeros([N], tl.float32)
    # With as many heads as lanes or more, a block beyond the columns of its phase must not store.
    every: tl.constexpr = HB > 0 and (SX == 1 or HB < N)
    first_tx = (phase + (KW - 1) // 2) % SX
    for n in range((KW - first_tx + SX - 1) // SX * PIECES):
        i, ty = piece(n, FIRST, TAPS, PIECES)
        tx = first_tx + i * SX
        before = ty * (KW * L) * HEADS
        db = filled(TAPS * L, zero)
        dw = filled(TAPS * L, zero)
        dv, ds, db, dw = _scatter_column(
            dv, ds, db, dw, v, s, tx, grad, lse_in, delta_in, tables + ty * (KW * HP * ((BIASED + SCALED) * L)), dealt + before,
            later, q0 - ty // SY, q_column + ((phase + (KW - 1) // 2) // SX - i), h, channel, OH, OW, HEADS,
            HP, TAPS, KH, KW, SY, L, ROWS, D, DP, BIASED, SCALED, STACK, HB, N, SHARE, PARTS, LONE,
        )  # fmt: skip
        again = tl.where(later, N if every else owners, 0)
        if SHARE > 0:
            pass
        elif BIASED and SCALED:
            store_sums(
                dbias + before, db + dw, tx, owner, owners, again, HEADS, HB, N, 2, 1, TAPS, KH, KW, L, True, every
            )
        elif BIASED:
            store_sums(dbias + before, db, tx, owner, owners, again, HEADS, HB, N, 1, 1, TAPS, KH, KW, L, True, every)
        elif SCALED:
            store_sums(dscale + before, dw, tx, owner, owners, again, HEADS, HB, N, 1, 1, TAPS, KH, KW, L, True, every)
    return dv, ds


@triton.jit
def _load_tile(
    scores, values, key_mask, score_column, value_column, mask_column, y0, x, H, W, HEADS, ss_y, vs_y, ms_y,
    N: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores and values of ROWS rows of an image from y0 on: tuples over (r, l) and r."""
    s = filled(ROWS * L, tl.zeros([N], tl.float32))
    v = filled(ROWS, tl.zeros([N, DP], tl.float32))
    s_at = score_pointers(scores, score_column, y0, H, ss_y, HEADS, ROWS, L)
    v_at = row_pointers(values, value_column, y0, H, vs_y, ROWS)
    m_at = row_pointers(key_mask, mask_column, y0, H, ms_y, ROWS if MASKED else 0)
    for _ in range(one_turn(H)):
        s = ()
        v = ()
        for r in tl.static_range(ROWS):
            s = s + logits(s_at, m_at, r, y0 + r, x, H, W, MASKED, L)
            v = v + (load_channels(v_at[r], D, DP),)
        s_at = for_next_turn(s_at, H)
        v_at = for_next_turn(v_at, H)
        m_at = for_next_turn(m_at, H)
    return s, v


@triton.jit
def _fetch_tile(
    scores, values, key_mask, grad, lse_in, delta_in, batch, y0, xc, h, H, W, HEADS,
    ss_b, ss_y, ss_x, vs_b, vs_y, vs_x,
    ALIGN: tl.constexpr, L: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Have what a tile needs brought into the cache (stride 1)."""
    scores, values, _ = image(scores, values, key_mask, batch, ss_b, vs_b, 0, ALIGN)
    fetch_pixels(scores, values, y0, xc, h, H, HEADS, ss_y, ss_x, vs_y, vs_x, ROWS, L, D)
    for r in tl.static_range(ROWS):
        window = batch * (H * W * HEADS) + ((clamp(y0 + r, H) * W + xc) * HEADS + h)
        fetch(grad + window * D)
        fetch(lse_in + window * (PARTS * L))
        fetch(delta_in + window * L)


@triton.jit
def _store_tile(
    dscores, dvalues, ds, dv, block, columns, y0, x, h, channel, H, W, HEADS,
    N: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    ds_at = ()
    dv_at = ()
    for r in tl.static_range(ROWS):
        pixel = ((y0 + r) * W + x) * HEADS
        for l in tl.static_range(L):
            ds_at = ds_at + (dscores + (pixel * L + (l * HEADS + h)),)
        dv_at = dv_at + (dvalues + ((pixel * D)[:, None] + channel),)
    for _ in range(one_turn(H)):
        for r in tl.static_range(ROWS):
            valid = lane_mask(block, columns, HEADS, y0 + r < H, N)
            for l in tl.static_range(L):
                tl.store(ds_at[r * L + l], ds[r * L + l].to(dscores.dtype.element_ty), mask=valid)
            store_channels(dv_at[r], dv[r], valid, D, DP)
        ds_at = for_next_turn(ds_at, H)
        dv_at = for_next_turn(dv_at, H)


@triton.jit(
    do_not_specialize=[
        "H", "W", "OH", "OW", "HEADS", "ss_b", "ss_y", "ss_x", "vs_b", "vs_y", "vs_x", "ms_b", "ms_y", "ms_x",
        "tiles", "chunk",
    ],
    do_not_specialize_on_alignment=["scores", "key_mask", "dscores"],
)  # fmt: skip
def backward(
    scores, values, tables, key_mask, grad, lse_in, delta_in, dscores, dvalues, sums,
    H, W, OH, OW, HEADS,
    ss_b, ss_y, ss_x, vs_b, vs_y, vs_x, ms_b, ms_y, ms_x, tiles, chunk,
    ALIGN: tl.constexpr, HP: tl.constexpr, L: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    N: tl.constexpr, HB: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, BAND: tl.constexpr,
    LONE: tl.constexpr, FETCH: tl.constexpr, EARLY: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, STACK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Gradients of scores and values, gathered over the windows that see each pixel, and partial sums of the tables'.

    The `tiles` of ROWS rows of all images are dealt out to the programs of the second axis. A program's pixels are SX columns
    apart, so that all of them are the same columns of taps of the windows that see them; likewise ROWS is a multiple of SY, and
    BAND unless it is all of a column's taps.
    Unrolled (SX = 1), the tables' sums stay in registers over the tiles; otherwise they are summed over the lanes and added to
    what is stored: a tap's when it is done, dealt out (SHARE > 0), or a column's of taps.
    """
    begin(EARLY)
    block = tl.program_id(0) // SX
    phase = tl.program_id(0) % SX
    here = tl.cdiv(W - phase, SX)
    q_column, h = lanes(block, here, HEADS, N)
    channel = channels(h, D, DP)
    vs_y *= ALIGN
    vs_x *= ALIGN
    # Who stores the tables' sums: with more heads than lanes each lane of the row, else the first lane of each head, also of
    # heads that a last, short block has no pixel of.
    owner = (block * N + tl.arange(0, N)) % HEADS
    owners = tl.where(HEADS > N, here * HEADS - block * N, HEADS)
    # A program's own row of sums, or with more heads than lanes one per column; both tables' one after the other.
    groups = tl.where(HEADS > N, tl.cdiv(W, SX), tl.num_programs(0) // SX)
    row = tl.program_id(1).to(tl.int64) * (groups * SX) + phase
    row += tl.where(HEADS > N, q_column, block) * SX
    dbias = sums + row * ((BIASED + SCALED) * KH * KW * L * HEADS)
    dscale = dbias + BIASED * (KH * KW * L * HEADS)
    # Lanes beyond the row count as outside the image: nothing of theirs may reach the tables' sums.
    x = tl.where(lane_mask(block, here, HEADS, True, N), q_column * SX + phase, W)
    xc = tl.minimum(x, W - 1)
    value_column = (xc * vs_x)[:, None] + channel

    zero = tl.zeros([N], tl.float32)
    # Where the tables' sums are dealt out each lane's share begins here: (t, l) of the tap (0, 0).
    dealt = dbias + owner
    if SHARE > 0:
        place = dealt_place(HB, N, (BIASED + SCALED) * L)
        dealt += (place // L * (KH * KW * L) + place % L) * HEADS
    db = filled(KH * L * KW if UNROLL else 0, zero)
    dw = filled(KH * L * KW if UNROLL else 0, zero)
    tile_rows = tl.cdiv(H, ROWS)
    # One program after the other takes a chunk of neighbouring tiles until there are none left, so that all are in neighbouring
    # images at a time. A chunk is a power of two.
    chunks = tl.cdiv(tiles, chunk)
    turns = tl.cdiv(chunks - tl.program_id(1), tl.num_programs(1)) * chunk
    turns -= tl.where((chunks - 1) % tl.num_programs(1) == tl.program_id(1), chunks * chunk - tiles, 0)
    tile = tl.program_id(1) * chunk
    batch = (tile // tile_rows).to(tl.int64)
    y0 = tile % tile_rows * ROWS
    turn = tl.zeros([N], tl.int32)
    for _ in range(turns):
        later = turn > 0
        turn += 1
        after = tile + 1
        after += tl.where(after & (chunk - 1) == 0, (tl.num_programs(1) - 1) * chunk, 0)
        after = tl.minimum(after, tiles - 1)
        next_batch = (after // tile_rows).to(tl.int64)
        next_y = after % tile_rows * ROWS
        scores_b, values_b, mask_b = image(scores, values, key_mask, batch, ss_b, vs_b, ms_b, ALIGN)
        windows = batch * (OH * OW * HEADS)
        grad_b = grad + windows * (D * L if STACK else D)
        lse_b = lse_in + windows * (PARTS * L)
        delta_b = delta_in + windows * L
        pixels = batch * (H * W * HEADS)
        dscores_b = dscores + pixels * L
        dvalues_b = dvalues + pixels * D
        s, v = _load_tile(
            scores_b, values_b, mask_b, xc * ss_x + h, value_column, xc * ms_x, y0, x, H, W, HEADS, ss_y, vs_y, ms_y,
            N, L, ROWS, D, DP, MASKED,
        )  # fmt: skip
        if FETCH:
            _fetch_tile(
                scores, values, key_mask, grad, lse_in, delta_in, next_batch, next_y, xc, h, H, W, HEADS,
                ss_b, ss_y, ss_x, vs_b, vs_y, vs_x, ALIGN, L, D, ROWS, PARTS,
            )  # fmt: skip
        dv = filled(ROWS, tl.zeros([N, DP], tl.float32))
        ds = filled(ROWS * L, zero)
        if UNROLL:
            for tx in tl.static_range(KW):
                # A column's own sums, and its number no constant, so that Triton compiles what it calls once for all columns.
                column = tx
                dv, ds, db_column, dw_column = _scatter_column(
                    dv, ds, db[tx * KH * L : (tx + 1) * KH * L], dw[tx * KH * L : (tx + 1) * KH * L], v, s, column,
                    grad_b, lse_b, delta_b, tables, dealt, True, y0 // SY, x + ((KW - 1) // 2 - column), h, channel,
                    OH, OW, HEADS, HP, KH, KH, KW, SY, L, ROWS, D, DP, BIASED, SCALED, STACK, HB, N, 0, PARTS, LONE,
                )  # fmt: skip
                db = db[: tx * KH * L] + db_column + db[(tx + 1) * KH * L :]
                dw = dw[: tx * KH * L] + dw_column + dw[(tx + 1) * KH * L :]
        else:
            dv, ds = _scatter_pieces(
                dv, ds, v, s, grad_b, lse_b, delta_b, tables, dbias, dscale, dealt, owner, owners, later, y0 // SY,
                q_column, phase, h, channel, OH, OW, HEADS, 0, BAND, KH // BAND,
                HP, KH, KW, SY, SX, L, ROWS, D, DP, BIASED, SCALED, STACK, HB, N, SHARE, PARTS, LONE,
            )  # fmt: skip
            if KH % BAND > 0:
                dv, ds = _scatter_pieces(
                    dv, ds, v, s, grad_b, lse_b, delta_b, tables, dbias, dscale, dealt, owner, owners, later, y0 // SY,
                    q_column, phase, h, channel, OH, OW, HEADS, KH - KH % BAND, KH % BAND, 1,
                    HP, KH, KW, SY, SX, L, ROWS, D, DP, BIASED, SCALED, STACK, HB, N, SHARE, PARTS, LONE,
                )  # fmt: skip
            # One lane stores what several load for the next tile; what is dealt out, each lane stores for itself.
            if SHARE == 0:
                tl.debug_barrier()
        _store_tile(dscores_b, dvalues_b, ds, dv, block, here, y0, x, h, channel, H, W, HEADS, N, L, ROWS, D, DP)
        tile = after
        batch = next_batch
        y0 = next_y
    if UNROLL:
        if BIASED:
            store_sums(dbias, db, 0, owner, owners, owners, HEADS, HB, N, 1, KW, KH, KH, KW, L, False, False)
        if SCALED:
            store_sums(dscale, dw, 0, owner, owners, owners, HEADS, HB, N, 1, KW, KH, KH, KW, L, False, False)
