"""The backward of local attention in one walk down each strip, with the ring of `ring_kernels.py`.

It leaves dq, and shares of dk, dv and the relative tables, as the walk of `gradient_kernels.py` does; or, in two turns, dk and dv
themselves: two strips side by side share kw − 1 columns of these, two with one between them none. So every second strip goes
first and writes them where they belong, and those between read what is there and add their own.
"""
# mypy: ignore-errors

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
    attends,
    beside,
    bits_of,
    both_tables,
    bound_columns,
    channels,
    commit,
    copied_by_lane,
    copy,
    exp2,
    interleave,
    left_of,
    mma_v2,
    only,
    parities,
    pixels_of,
    product_by_halves,
    right_of,
    row_of,
    row_terms,
    strip_of,
    table_operand,
    turned,
    twice,
    wait,
    within,
)

__all__ = ["ring_backward"]


@gluon.jit
def _rows_to_taps(x):
    """[16, 8] from the halo's rows to taps: of the tile's second row of queries tap t is row t + 1."""
    even, odd = parities(x)
    t = gl.arange(0, 4, gl.SliceLayout(0, LANES))[None, :]
    m = gl.arange(0, 16, gl.SliceLayout(1, LANES))[:, None]
    after = (t + 1 + m * 0) & 3
    a, b = gl.inline_asm_elementwise(
        """
        {
        mov.b32 $0, $4;
        mov.b32 $1, $7;
        mov.b32 $2, $6;
        shfl.sync.idx.b32 $3, $5, $8, 0x1c1f, 0xffffffff;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r",
        [even.to(gl.int32, bitcast=True), odd.to(gl.int32, bitcast=True), after],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=2,
    )
    return interleave(a.to(gl.float32, bitcast=True), b.to(gl.float32, bitcast=True))


@gluon.jit
def _minus_diagonal(x0, x1):
    """The diagonal of [16, 16], given by its halves, negated, as all columns of [16, 8].

    A product that starts from numbers known to be equal gets a copy of each, every time: so each is fetched on its own
    (with another bound of the four lanes, of the same meaning, lest the compiler sees that they are equal).
    """
    e0, o0 = parities(x0)
    e1, o1 = parities(x1)
    m = gl.arange(0, 16, gl.SliceLayout(1, LANES))[:, None]
    t = gl.arange(0, 4, gl.SliceLayout(0, LANES))[None, :]
    lane = ((m & 7) >> 1) + t * 0
    swap = (m + t * 0) & 1
    a, b = gl.inline_asm_elementwise(
        """
        {
        .reg .f32 a, b;
        .reg .pred p;
        setp.ne.s32 p, $14, 0;
        selp.f32 a, $6, $4, p;
        selp.f32 b, $11, $9, p;
        neg.f32 a, a;
        neg.f32 b, b;
        shfl.sync.idx.b32 $0, a, $12, 0x1c1f, 0xffffffff;
        shfl.sync.idx.b32 $1, b, $12, 0x1c1f, 0xffffffff;
        shfl.sync.idx.b32 $2, a, $12, 0x1c03, 0xffffffff;
        shfl.sync.idx.b32 $3, b, $12, 0x1c03, 0xffffffff;
        }
        """,
        "=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f,r,r,r,r",
        [e0, o0, e1, o1, lane, swap],
        dtype=(gl.float32, gl.float32),
        is_pure=False,
        pack=2,
    )
    return interleave(a, b)


@gluon.jit
def _blocks_transposed(x):
    """Blocks of 8×8 halves, turned in registers, each in its place."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
    )


@gluon.jit
def _transposed(x):
    """[16, 16] of halves as a left operand, turned in registers: blocks of 8×8, then their places."""
    x = _blocks_transposed(x)
    return gl.convert_layout(gl.reshape(gl.permute(gl.reshape(x, [2, 8, 2, 8]), [2, 1, 0, 3]), [16, 16]), LEFT)


@gluon.jit
def _unfolded_and_turned(x, turned0, turned1):
    """[16 queries, 8], columns modulo 8, transposed in registers to [16 columns, 16 queries], a left operand."""
    x = _blocks_transposed(x)
    x = gl.join(only(x, turned0), only(x, turned1))
    return gl.convert_layout(gl.reshape(gl.permute(gl.reshape(x, [2, 8, 8, 2]), [3, 1, 0, 2]), [16, 16]), LEFT)


@gluon.jit
def _plus(a, b):
    """Halves, two at a time."""
    if a.dtype == gl.bfloat16:
        instruction: gl.constexpr = "add.rn.bf16x2 $0, $1, $2;"
    else:
        instruction: gl.constexpr = "add.rn.f16x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(instruction, "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2)


@gluon.jit(do_not_specialize=RUNTIME)
def ring_backward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    grad_ptr,
    lse_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    drel_ptr,
    row_ptr,
    col_ptr,
    H,
    W,
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
    grad_pixel,
    scale,
    scale_log2,
    KH: gl.constexpr,
    KW: gl.constexpr,
    D: gl.constexpr,
    q_h: gl.constexpr,
    k_h: gl.constexpr,
    v_h: gl.constexpr,
    LARGE: gl.constexpr,
    AHEAD: gl.constexpr,
    TURN: gl.constexpr,
):
    """Every gradient of a strip in one walk: dq, dk and dv, and the strip's share of the relative tables.

    dk and dv of a row of the halo stay in registers while the walk passes over it. P and dS are transposed in registers.
    TURN 0: strips 0, 2, …; 1: strips 1, 3, …, after those; −1: all strips, whose dk and dv are left as shares.
    """
    G: gl.constexpr = 16 // D
    HALO: gl.constexpr = (KH + 2) // 2
    CHUNKS: gl.constexpr = HALO + AHEAD
    # Rows of the halo that the next tile has in common with this one.
    KEPT: gl.constexpr = 2 * HALO - 2
    PY: gl.constexpr = (KH - 1) // 2
    PX: gl.constexpr = (KW - 1) // 2
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    # After which row of the halo the two rows that the walk leaves behind are written, as it compiled best.
    OUT_AFTER: gl.constexpr = min(2 * HALO, 5 if TURN < 0 else 4)
    # Whether P and dS are transposed before the next row's first products, as was faster, or after them.
    EARLY: gl.constexpr = D == 16
    gl.static_assert(KH <= 7 and KW <= 7 and G * D == 16)
    program = gl.program_id(0)
    group, x0, image, per_split, first, last = strip_of(program, groups, splits, strips, tiles)
    h0 = group * G
    if TURN >= 0:
        x0 = 2 * x0 + 8 * TURN

    keys = gl.allocate_shared_memory(dtype, [CHUNKS, 32, 16], SHARED)
    values = gl.allocate_shared_memory(dtype, [CHUNKS, 32, 16], SHARED)
    queries = gl.allocate_shared_memory(dtype, [AHEAD + 1, 16, 16], SHARED)
    grads = gl.allocate_shared_memory(dtype, [AHEAD + 1, 16, 16], SHARED)
    outs = gl.allocate_shared_memory(dtype, [AHEAD + 1, 16, 16], SHARED)
    # Two rows of dk and dv on their way out; allocations of their own, because the compiler puts a barrier between uses of one.
    stages = ()
    for _ in gl.static_range(4):
        stages = stages + (gl.allocate_shared_memory(dtype, [16, 16], SHARED),)
    if TURN == 1:
        # What the strips at both sides left of two rows of dk, then of dv.
        before = gl.allocate_shared_memory(dtype, [4 * (AHEAD + 1), 16, 16], SHARED)

    halo_x, halo_y, halo_in, qx, qy, query_in, channel, _halo_side, _side = copied_by_lane(x0, W, KW)
    k_at = pixels_of(k_ptr, image, k_b, group * (G * k_h), halo_y, halo_x, k_y, k_x, channel)
    v_at = pixels_of(v_ptr, image, v_b, group * (G * v_h), halo_y, halo_x, v_y, v_x, channel)
    q_at = pixels_of(q_ptr, image, q_b, group * (G * q_h), qy, qx, q_y, q_x, channel)
    o_x = heads * D
    flat = ((qy * W + qx) * o_x)[:, None] + channel
    o_at = out_ptr + image * H * W * o_x + group * 16 + flat
    g_at = grad_ptr + image * H * W * o_x + group * 16 + flat
    dq_at = dq_ptr + image * H * W * grad_pixel + group * 16 + (((qy * W + qx) * grad_pixel)[:, None] + channel)
    pixel = gl.arange(0, 16, gl.SliceLayout(1, COPY))
    share_in = (within(x0 - PX + pixel, W) & (pixel < 7 + KW))[:, None] & (channel >= 0)
    if TURN < 0:
        # Shares: [program, row of the strip, 16 pixels, 16 channels], from the strip's first row on.
        row_step = 256
        top = program.to(gl.int64) * (per_split + HALO - 1) * 512 - (2 * first - PY) * row_step
        at = pixel[:, None] * 16 + channel
    else:
        row_step = W * grad_pixel
        top = image * H * W * grad_pixel + group * 16
        at = ((x0 - PX + pixel) * grad_pixel)[:, None] + channel
    dk_top = dk_ptr + top
    dv_top = dv_ptr + top
    if TURN == 1:
        # Columns to the right that no strip after this one has, hold nothing yet.
        shared_in = share_in & ((pixel < KW - 1) | ((pixel >= 8) & (x0 + 8 < W)))[:, None]

    rc = gl.arange(0, 16, gl.SliceLayout(1, RIGHT))[:, None]
    rd = gl.arange(0, D, gl.SliceLayout(0, RIGHT))[None, :]
    tables = ()
    back = ()
    for h in gl.static_range(G):
        tables = tables + (table_operand(row_ptr, col_ptr, row_head, col_head, h0 + h, KH, KW, D, D, dtype),)
        back = back + (both_tables(row_ptr, col_ptr, row_head, col_head, h0 + h, rd, rc, KH, KW, D, dtype),)
    code = gl.arange(0, 8, gl.SliceLayout(0, RIGHT))[None, :] + rc * 0
    nothing = gl.full([16, 8], 0.0, gl.float32, MMA)
    empty = gl.full([16, D], 0.0, gl.float32, MMA)
    bound0, bound1, mine0, mine1 = bound_columns(x0, W, KW, LARGE)
    keep0 = bits_of(mine0)
    keep1 = bits_of(mine1)
    column = gl.arange(0, 16, gl.SliceLayout(1, MMA))[:, None] % 8
    mine0_turned, mine1_turned = attends(gl.arange(0, 8, gl.SliceLayout(0, MMA))[None, :], column, KW)
    turned0 = bits_of(mine0_turned)
    turned1 = bits_of(mine1_turned)

    sm = gl.arange(0, 16, gl.SliceLayout(1, LANES))[:, None]
    st = gl.arange(0, 4, gl.SliceLayout(0, LANES))[None, :]
    stat_x = x0 + sm % 8 + st * 0
    stat_at = lse_ptr + image * H * W * heads + h0 + ((sm // 8) * W + stat_x) * heads
    stats = ()
    for h in gl.static_range(G):
        seen = (stat_x < W) & ((2 * first + sm // 8) < H)
        stats = stats + (gl.load(stat_at + (2 * first) * W * heads + h, mask=seen, other=LARGE),)

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
        use = query_in & ((y + qy) < H)[:, None]
        copy(queries.index(a), q_at + y * q_y, mask=use)
        copy(grads.index(a), g_at + y * W * o_x, mask=use)
        copy(outs.index(a), o_at + y * W * o_x, mask=use)
        if TURN == 1:
            for j in gl.static_range(2):
                y = 2 * (first + a) - PY + j
                use = shared_in & within(y, H)
                copy(before.index(4 * a + j), dk_top + y * row_step + at, mask=use)
                copy(before.index(4 * a + 2 + j), dv_top + y * row_step + at, mask=use)
        commit()

    # Heads first, then rows.
    dk = ()
    dv = ()
    dtables = ()
    for _ in gl.static_range(G):
        dtables = dtables + (empty,)
        for _r in gl.static_range(KEPT):
            dk = dk + (empty,)
            dv = dv + (empty,)
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
        use = query_in & ((2 * later + qy) < end)[:, None]
        copy(queries.index(q_free), q_at + (2 * later) * q_y, mask=use)
        copy(grads.index(q_free), g_at + (2 * later) * W * o_x, mask=use)
        copy(outs.index(q_free), o_at + (2 * later) * W * o_x, mask=use)
        if TURN == 1:
            for j in gl.static_range(2):
                y = 2 * later - PY + j
                use = shared_in & within(y, end)
                copy(before.index(4 * q_free + j), dk_top + y * row_step + at, mask=use)
                copy(before.index(4 * q_free + 2 + j), dv_top + y * row_step + at, mask=use)
        commit()
        stats_next = ()
        for h in gl.static_range(G):
            seen = (stat_x < W) & ((2 * tile + 2 + sm // 8) < H)
            stats_next = stats_next + (gl.load(stat_at + (2 * tile + 2) * W * heads + h, mask=seen, other=LARGE),)

        dk_next = ()
        dv_next = ()
        dtables_next = ()
        for h in gl.static_range(G):
            q = left_of(queries.index(q_slot), h, D)
            grad = left_of(grads.index(q_slot), h, D)
            q_right = channels(queries.index(q_slot), h, D).load(RIGHT)
            grad_right = channels(grads.index(q_slot), h, D).load(RIGHT)
            col_taps, row_taps = product_by_halves(q, tables[h], nothing, nothing, D)
            col = turned(col_taps, -1, dtype)
            col0 = gl.minimum(col, bound0)
            col1 = gl.minimum(col, bound1)
            terms = row_terms(row_taps, 2 * tile, H, KH, LARGE, dtype)
            # Products of dY and v start from −Σ P∘dP.
            own0, own1 = product_by_halves(grad, right_of(outs.index(q_slot), h, D), nothing, nothing, D)
            minus = _minus_diagonal(own0, own1)
            dq = empty
            dcol = nothing
            drow = nothing
            p = nothing
            ds = nothing
            p_turned = nothing
            ds_turned = nothing
            for r in gl.static_range(2 * HALO + 1):
                # The last row of an even window's halo is no query's.
                if r < 2 * HALO and r <= KH:
                    k_row = row_of(keys, slot, r, CHUNKS)
                    v_row = row_of(values, slot, r, CHUNKS)
                    s0, s1 = product_by_halves(q, right_of(k_row, h, D), col0, col1, D)
                    d0, d1 = product_by_halves(grad, right_of(v_row, h, D), minus, minus, D)
                # While these are on their way: what is left of the row before.
                if r > 0:
                    dk_row = empty
                    dv_row = empty
                    if r - 1 < KEPT:
                        dk_row = dk[h * KEPT + r - 1]
                        dv_row = dv[h * KEPT + r - 1]
                    if r - 1 <= KH:
                        whole = beside(only(ds, keep0), only(ds, keep1), LEFT)
                        dq = mma_v2(whole, channels(row_of(keys, slot, r - 1, CHUNKS), h, D).load(RIGHT), dq)
                        drow = mma_v2(whole, gl.where(code == r - 1, 1.0, 0.0).to(dtype), drow)
                        if not EARLY:
                            p_turned = _unfolded_and_turned(p, turned0, turned1)
                        dv_row = mma_v2(p_turned, grad_right, dv_row)
                        if not EARLY:
                            ds_turned = _unfolded_and_turned(ds, turned0, turned1)
                        dk_row = mma_v2(ds_turned, q_right, dk_row)
                    if r - 1 >= 2:
                        dk_next = dk_next + (dk_row,)
                        dv_next = dv_next + (dv_row,)
                    else:
                        # The walk leaves these rows behind.
                        channels(stages[2 * r - 2], h, D).store((dk_row * scale).to(dtype))
                        channels(stages[2 * r - 1], h, D).store(dv_row.to(dtype))
                    if r == OUT_AFTER and h == G - 1:
                        for j in gl.static_range(2):
                            y = 2 * tile - PY + j
                            there = share_in & within(y, H)
                            dk_out = stages[2 * j].load(COPY)
                            dv_out = stages[2 * j + 1].load(COPY)
                            if TURN == 1:
                                dk_out = _plus(dk_out, before.index(4 * q_slot + j).load(COPY))
                                dv_out = _plus(dv_out, before.index(4 * q_slot + 2 + j).load(COPY))
                            gl.store(dk_top + y * row_step + at, dk_out, mask=there)
                            gl.store(dv_top + y * row_step + at, dv_out, mask=there)
                if r < 2 * HALO and r <= KH:
                    row = terms[r].to(gl.float32, bitcast=True)
                    p = exp2(gl.maximum(s0, s1) * scale_log2 - twice(stats[h] - row * scale_log2))
                    ds = p * gl.where(mine0, d0, d1)
                    dcol += ds
                    p = p.to(dtype)
                    ds = ds.to(dtype)
                    if EARLY:
                        p_turned = _unfolded_and_turned(p, turned0, turned1)
                        ds_turned = _unfolded_and_turned(ds, turned0, turned1)
            dtaps = beside(turned(dcol, 1, dtype).to(dtype), _rows_to_taps(drow).to(dtype), LEFT)
            dq = mma_v2(dtaps, back[h], dq)
            dtables_next = dtables_next + (mma_v2(_transposed(dtaps), q_right, dtables[h]),)
            # The tile's outputs are no longer needed: in their place dq lies as it is written, 16 bytes a lane.
            channels(outs.index(q_slot), h, D).store((dq * scale).to(dtype))
        there = query_in & ((2 * tile + qy) < H)[:, None]
        gl.store(dq_at + (2 * tile) * W * grad_pixel, outs.index(q_slot).load(COPY), mask=there)
        dk = dk_next
        dv = dv_next
        dtables = dtables_next
        stats = stats_next
        slot = gl.where(slot == CHUNKS - 1, 0, slot + 1)
        q_slot = gl.where(q_slot == AHEAD, 0, q_slot + 1)
        q_free = gl.where(q_free == AHEAD, 0, q_free + 1)

    wait(0)
    if TURN == 1:
        # In the ring's place, all at once.
        for r in gl.static_range(KEPT):
            y = 2 * last - PY + r
            use = shared_in & within(y, H)
            copy(keys.index(r // 2).slice(r % 2 * 16, 16, 0), dk_top + y * row_step + at, mask=use)
            copy(values.index(r // 2).slice(r % 2 * 16, 16, 0), dv_top + y * row_step + at, mask=use)
        commit()
        wait(0)
    for r in gl.static_range(KEPT):
        for h in gl.static_range(G):
            channels(stages[r % 2 * 2], h, D).store((dk[h * KEPT + r] * scale).to(dtype))
            channels(stages[r % 2 * 2 + 1], h, D).store(dv[h * KEPT + r].to(dtype))
        y = 2 * last - PY + r
        there = share_in & within(y, H)
        dk_out = stages[r % 2 * 2].load(COPY)
        dv_out = stages[r % 2 * 2 + 1].load(COPY)
        if TURN == 1:
            dk_out = _plus(dk_out, keys.index(r // 2).slice(r % 2 * 16, 16, 0).load(COPY))
            dv_out = _plus(dv_out, values.index(r // 2).slice(r % 2 * 16, 16, 0).load(COPY))
        gl.store(dk_top + y * row_step + at, dk_out, mask=there)
        gl.store(dv_top + y * row_step + at, dv_out, mask=there)
    # [program, 2·16 places, 16 channels]: column taps from place 0 on, row taps from 16 on.
    tm = gl.arange(0, 16, gl.SliceLayout(1, MMA))[:, None]
    tc = gl.arange(0, D, gl.SliceLayout(0, MMA))[None, :]
    spot = program.to(gl.int64) * 512
    for h in gl.static_range(G):
        gl.store(drel_ptr + spot + ((tm + tm // 8 * 8) * 16 + h * D + tc), dtables[h] * scale)
