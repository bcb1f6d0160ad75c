"""The backward of local attention in one walk down each strip. Layout and letters are those of `kernels.py`."""
# mypy: ignore-errors

import triton
import triton.language as tl

from nearsight.ops.arithmetic.kernels import dot, dot_add, exp2
from nearsight.ops.local.kernels import RUNTIME, _axis_bias, _half_table, _row_codes, _row_terms, _strip, _within

__all__ = ["backward"]


@triton.jit
def _relative(
    row_ptr,
    col_ptr,
    row_head,
    col_head,
    h0,
    heads,
    KH: tl.constexpr,
    KW: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    G: tl.constexpr,
    HS: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_COL: tl.constexpr,
    dtype: tl.constexpr,
):
    """The relative tables as one operand [G·DP, 2·HS]: column taps first, then row taps."""
    c = tl.arange(0, G * DP)[:, None]
    s = tl.arange(0, 2 * HS)[None, :]
    h = h0 + c // DP
    d = c % DP
    table = tl.zeros((G * DP, 2 * HS), tl.float32)
    if HAS_COL:
        use = (s < KW) & (d >= D // 2) & (d < D) & (h < heads)
        table += tl.load(col_ptr + h * col_head + s * (D // 2) + d - D // 2, mask=use, other=0.0)
    if HAS_ROW:
        use = (s >= HS) & (s < HS + KH) & (d < D // 2) & (h < heads)
        table += tl.load(row_ptr + h * row_head + (s - HS) * (D // 2) + d, mask=use, other=0.0)
    return table.to(dtype)


@triton.jit
def _codes(FIRST, NR: tl.constexpr, NC: tl.constexpr, HS: tl.constexpr, dtype: tl.constexpr):
    """One-hot codes [NK, 2·HS] of NR rows of the halo from row FIRST on: a pixel's column, then its row."""
    n = tl.arange(0, NR * NC)[:, None]
    s = tl.arange(0, 2 * HS)[None, :]
    return tl.where(s < HS, n % NC == s, n // NC + FIRST == s - HS).to(tl.float32).to(dtype)


@triton.jit
def _table(
    taps,
    qy,
    qx,
    first_row,
    first_col,
    rows,
    H,
    W,
    KH: tl.constexpr,
    KW: tl.constexpr,
    HS: tl.constexpr,
    CHECK_IMAGE: tl.constexpr,
    HAS_REL: tl.constexpr,
    LARGE: tl.constexpr,
    dtype: tl.constexpr,
):
    """Move each query's terms from taps to the halo's columns and rows, −LARGE where window or image ends.

    `rows` is the halo row that the chunk starts with; a halo row r is tap rows + r − qy, a halo column c is tap c − qx.
    """
    s = tl.arange(0, 2 * HS)[None, :]
    tap = tl.where(s < HS, s - qx[:, None], s - HS + rows - qy[:, None])
    fits = (tap >= 0) & (tap < tl.where(s < HS, KW, KH))
    if CHECK_IMAGE:
        at = tl.where(s < HS, first_col + s, first_row + rows + s - HS)
        fits = fits & _within(at, tl.where(s < HS, W, H))
    if HAS_REL:
        moved = tl.gather(taps, (tap & (HS - 1)) | (s & HS), 1)
        return tl.where(fits, moved, -LARGE).to(dtype)
    else:
        return tl.where(fits, 0.0, -LARGE).to(dtype)


@triton.jit
def _to_taps(sums, slot, at, TAPS: tl.constexpr, N: tl.constexpr):
    """From sums for the halo's columns or rows, [M, N], back to the taps in `slot`: tap t came from t + at."""
    came = slot + at[:, None]
    fits = (came >= 0) & (came < N) & (slot < TAPS)
    return tl.where(fits, tl.gather(sums, came & (N - 1), 1), 0.0)


@triton.jit
def _load_lse(lse_ptr, at, mask, LARGE: tl.constexpr, LSE_PARTS: tl.constexpr):
    """The log-sum-exp of queries, LARGE of one that is not there: in half types one number and a stand-in; in float32 the
    largest logit, unscaled, and the rest of it.

    As one float32 it would be rounded like a number of the largest logit's size, and with it every probability.
    """
    if LSE_PARTS == 1:
        lse = tl.load(lse_ptr + at, mask=mask, other=LARGE)
        return lse, lse
    else:
        top = tl.load(lse_ptr + 2 * at, mask=mask, other=0.0)
        return top, tl.load(lse_ptr + 2 * at + 1, mask=mask, other=LARGE)


@triton.jit
def _probabilities(logits, scale_log2, lse, rest, LSE_PARTS: tl.constexpr):
    if LSE_PARTS == 1:
        return exp2(logits * scale_log2 - lse)
    else:
        return exp2((logits - lse) * scale_log2 - rest)


@triton.jit(do_not_specialize=RUNTIME)
def backward(
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
    mask_ptr,
    H,
    W,
    heads,
    strips,
    splits,
    tiles,
    dil_y,
    dil_x,
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
    KH: tl.constexpr,
    KW: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    q_h: tl.constexpr,
    k_h: tl.constexpr,
    v_h: tl.constexpr,
    G: tl.constexpr,
    TY: tl.constexpr,
    TX: tl.constexpr,
    NR: tl.constexpr,
    NC: tl.constexpr,
    CHUNKS: tl.constexpr,
    HS: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_COL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ZEROS: tl.constexpr,
    WHOLE_Y: tl.constexpr,
    WHOLE_X: tl.constexpr,
    FAR: tl.constexpr,
    LARGE: tl.constexpr,
    LSE_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Every gradient of a strip in one walk: dq, and the strip's shares of dk, dv and the relative tables.

    A chunk of the halo is as tall as a tile, so that chunk i of one tile is chunk i − 1 of the next: dk and dv of a chunk stay
    in registers while the walk passes over it and are written once, when it has left the window. Neighbouring strips see up
    to KW − 1 common columns; `merge` adds their shares in a fixed order. A strip as wide as the map has no neighbour and writes
    dk and dv themselves.
    """
    MQ: tl.constexpr = TY * TX
    M: tl.constexpr = MQ * G
    NK: tl.constexpr = NR * NC
    PY: tl.constexpr = (KH - 1) // 2
    PX: tl.constexpr = (KW - 1) // 2
    UP: tl.constexpr = 0 if WHOLE_Y else PY
    LEFT: tl.constexpr = 0 if WHOLE_X else PX
    HAS_REL: tl.constexpr = HAS_ROW or HAS_COL
    # float32, where a product is three. Unrolled, they take three times as long to compile: one text serves all chunks.
    # Of position terms they would keep 22 bits and cut the sums: those are added, as in the forward.
    FULL: tl.constexpr = LSE_PARTS == 2
    tl.static_assert(NR == TY)
    # Column terms are where the products begin, row terms meet codes. Measured for strips of half types.
    APART: tl.constexpr = LSE_PARTS == 1 and not WHOLE_X
    # Tiles of two rows: row terms need no gather.
    PAIRS: tl.constexpr = APART and TY == 2
    dtype = q_ptr.dtype.element_ty
    image, phase_y, phase_x, LH, LW, x0, split = _strip(tl.program_id(0), strips, splits, H, W, dil_y, dil_x, TX)
    h0 = tl.program_id(1) * G
    m = tl.arange(0, M)
    g = m // MQ
    qy = m % MQ // TX
    qx = m % TX
    c = tl.arange(0, G * DP)
    hc = h0 + c // DP
    real = (c % DP < D) & (hc < heads)
    own = (g[:, None] == (c // DP)[None, :]) & real[None, :]
    n = tl.arange(0, NK)
    x = x0 + qx
    # To a query, a column or row of the halo is the tap that many behind.
    at_y = qy + UP - PY
    at_x = qx + LEFT - PX
    halo_x = x0 - LEFT + n % NC
    halo_in_x = _within(halo_x, LW) & (n % NC < TX + KW - 1)
    q_ptr += image * q_b + phase_y * q_y + phase_x * q_x
    k_ptr += image * k_b + phase_y * k_y + phase_x * k_x
    v_ptr += image * v_b + phase_y * v_y + phase_x * v_x
    q_cols = (x * dil_x * q_x)[:, None] + (hc * q_h + c % DP)[None, :]
    k_cols = (halo_x * dil_x * k_x)[:, None] + (hc * k_h + c % DP)[None, :]
    v_cols = (halo_x * dil_x * v_x)[:, None] + (hc * v_h + c % DP)[None, :]
    pixel0 = image * H * W
    if APART:
        half = tl.arange(0, HS)[None, :]
        row_tables = ()
        if HAS_COL:
            col_table = _half_table(col_ptr, col_head, h0, heads, KW, D // 2, D, DP, G, HS, dtype)
        if HAS_ROW and not PAIRS:
            row_table = _half_table(row_ptr, row_head, h0, heads, KH, 0, D, DP, G, HS, dtype)
        elif HAS_ROW:
            row_tables = (
                _half_table(row_ptr, row_head, h0, heads, KH, 0, D, DP, G, HS, dtype, UP - PY),
                _half_table(row_ptr, row_head, h0, heads, KH, 0, D, DP, G, HS, dtype, UP - PY + 1),
            )
        dcol_table = tl.zeros((HS, G * DP), tl.float32)
        drow_table = tl.zeros((HS, G * DP), tl.float32)
        drow_tables = (tl.zeros((HS, G * DP), tl.float32), tl.zeros((HS, G * DP), tl.float32))
    elif HAS_REL:
        slot = tl.arange(0, 2 * HS)[None, :]
        rel = _relative(row_ptr, col_ptr, row_head, col_head, h0, heads, KH, KW, D, DP, G, HS, HAS_ROW, HAS_COL, dtype)
    if not APART:
        drel = tl.zeros((2 * HS, G * DP), tl.float32)
    per_split = (tiles + splits - 1) // splits
    first = split * per_split
    if WHOLE_X:
        pitch = dil_y * W * grad_pixel
        origin = (pixel0 + phase_y * W + phase_x) * grad_pixel
        place = (halo_x * dil_x * grad_pixel)[:, None] + (hc * D + c % DP)[None, :]
    else:
        # Shares lie as [program, group of heads, row of the strip, NC, G·D]: a program writes whole lines.
        pitch = NC * G * D
        program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        origin = (program * (per_split + CHUNKS - 1) * TY - (first * TY - UP)) * pitch
        place = (n % NC * (G * D))[:, None] + (c // DP * D + c % DP)[None, :]
    # Of the chunks to come, the next one first; the last chunk of a tile is new.
    dk = (tl.zeros((NK, G * DP), tl.float32),)
    dv = (tl.zeros((NK, G * DP), tl.float32),)
    for _ in tl.static_range(CHUNKS - 2):
        dk = dk + (tl.zeros((NK, G * DP), tl.float32),)
        dv = dv + (tl.zeros((NK, G * DP), tl.float32),)
    for tile in range(first, tl.minimum(tiles, first + per_split)):
        y0 = tile * TY
        y = y0 + qy
        inside = (y < LH) & (x < LW)
        mine = own & inside[:, None]
        pixel = pixel0 + (phase_y + y * dil_y) * W + phase_x + x * dil_x
        flat_at = (pixel * heads * D)[:, None] + (hc * D + c % DP)[None, :]
        q = tl.load(q_ptr + (y * dil_y * q_y)[:, None] + q_cols, mask=mine, other=0.0)
        grad = tl.load(grad_ptr + flat_at, mask=mine, other=0.0)
        out = tl.load(out_ptr + flat_at, mask=mine, other=0.0)
        if PAIRS and D <= 16:
            # As the diagonal of a product: elementwise, dY would lie in shared memory as its rows come, with conflicts.
            delta = tl.sum(tl.where(m[:, None] == m[None, :], dot(grad, tl.trans(out), PRECISION), 0.0), 1)
        else:
            delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
        lse, rest = _load_lse(lse_ptr, pixel * heads + h0 + g, inside & (h0 + g < heads), LARGE, LSE_PARTS)
        if APART:
            col_taps = tl.zeros((M, HS), tl.float32)
            if HAS_COL:
                col_taps = dot(q, col_table, PRECISION)
            col = _axis_bias(col_taps, at_x, x0 - LEFT, LW, KW, NC, HS, not ZEROS, HAS_COL, LARGE, dtype)
            col = tl.reshape(tl.broadcast_to(col[:, None, :], (M, NR, NC)), (M, NK))
            if PAIRS:
                row = _row_terms(
                    *(q, row_tables, qy == 1, at_y, y0 - UP, LH, KH, HS, not ZEROS, HAS_ROW, LARGE, PRECISION, dtype)
                )
            else:
                row_taps = tl.zeros((M, HS), tl.float32)
                if HAS_ROW:
                    row_taps = dot(q, row_table, PRECISION)
                row = _axis_bias(row_taps, at_y, y0 - UP, LH, KH, HS, HS, not ZEROS, HAS_ROW, LARGE, dtype).to(dtype)
            dcol = tl.zeros((M, NC), tl.float32)
            drow = tl.zeros((M, HS), tl.float32)
        else:
            taps = tl.zeros((M, 2 * HS), tl.float32)
            if HAS_REL:
                taps = dot(q, rel, PRECISION)
            if FULL:
                col = _axis_bias(taps, at_x, x0 - LEFT, LW, KW, NC, HS, not ZEROS, HAS_COL, LARGE, dtype)
            else:
                table = _table(
                    *(taps, at_y, at_x, y0 - UP, x0 - LEFT, 0, LH, LW, KH, KW, HS, not ZEROS, HAS_REL, LARGE, dtype)
                )
            dtable = tl.zeros((M, 2 * HS), tl.float32)
        dq = tl.zeros((M, G * DP), tl.float32)
        for i in (tl.range if FULL else tl.static_range)(CHUNKS):
            halo_y = y0 - UP + i * NR + n // NC
            there = halo_in_x & (i * NR + n // NC < TY + KH - 1) & _within(halo_y, LH)
            load = there[:, None] & real[None, :]
            if APART:
                codes = _row_codes(i * NR, NK, NC, HS, dtype)
                s = dot_add(row, tl.trans(codes), col, PRECISION)
            else:
                codes = _codes(i * NR, NR, NC, HS, dtype)
                if FULL:
                    down = i * NR
                    row = _axis_bias(
                        *(taps, at_y - down, y0 - UP + down, LH, KH, NR, HS, not ZEROS, HAS_ROW, LARGE, dtype, HS)
                    )
                    s = tl.reshape(row[:, :, None] + col[:, None, :], (M, NK))
                else:
                    s = dot(table, tl.trans(codes), PRECISION)
            if HAS_K:
                k = tl.load(k_ptr + (halo_y * dil_y * k_y)[:, None] + k_cols, mask=load, other=0.0)
                s = dot_add(q, tl.trans(k), s, PRECISION)
            if HAS_MASK:
                pixels = pixel0 + (phase_y + halo_y * dil_y) * W + phase_x + halo_x * dil_x
                attended = tl.load(mask_ptr + pixels, mask=there, other=1) != 0
                s = tl.where(attended[None, :], s, -LARGE)
            p = _probabilities(s, scale_log2, lse[:, None], rest[:, None], LSE_PARTS)
            v = tl.load(v_ptr + (halo_y * dil_y * v_y)[:, None] + v_cols, mask=load, other=0.0)
            dp = dot(grad, tl.trans(v), PRECISION)
            ds = p * (dp - delta[:, None])
            if APART and HAS_COL:
                dcol += tl.sum(tl.reshape(ds, (M, NR, NC)), 1)
            ds = ds.to(dtype)
            dv_chunk = dot_add(tl.trans(p.to(dtype)), grad, dv[0], PRECISION)
            dk_chunk = dk[0]
            if HAS_K:
                dq = dot_add(ds, k, dq, PRECISION)
                dk_chunk = dot_add(tl.trans(ds), q, dk_chunk, PRECISION)
            if APART and HAS_ROW:
                drow = dot_add(ds, codes, drow, PRECISION)
            elif HAS_REL and not APART:
                dtable = dot_add(ds, codes, dtable, PRECISION)
            if i == 0:
                # Written at once: the tile's last chunk can have these registers.
                there = halo_in_x & _within(halo_y, LH)
                done = origin + (halo_y * pitch)[:, None] + place
                tl.store(dv_ptr + done, dv_chunk.to(dtype), mask=there[:, None] & real[None, :])
                if HAS_K:
                    tl.store(dk_ptr + done, (dk_chunk * scale).to(dtype), mask=there[:, None] & real[None, :])
            dk = dk[1:] + (tl.where(i == 0, 0.0, dk_chunk),)
            dv = dv[1:] + (tl.where(i == 0, 0.0, dv_chunk),)
        if APART:
            if HAS_COL:
                dtaps = _to_taps(dcol, half, at_x, KW, NC).to(dtype)
                dq = dot_add(dtaps, tl.trans(col_table), dq, PRECISION)
                dcol_table = dot_add(tl.trans(dtaps), q, dcol_table, PRECISION)
            if HAS_ROW and not PAIRS:
                dtaps = _to_taps(drow, half, at_y, KH, HS).to(dtype)
                dq = dot_add(dtaps, tl.trans(row_table), dq, PRECISION)
                drow_table = dot_add(tl.trans(dtaps), q, drow_table, PRECISION)
            elif HAS_ROW:
                lower = (qy == 1)[:, None]
                of_first = tl.where(lower, 0.0, drow).to(dtype)
                of_second = tl.where(lower, drow, 0.0).to(dtype)
                dq = dot_add(of_first, tl.trans(row_tables[0]), dq, PRECISION)
                dq = dot_add(of_second, tl.trans(row_tables[1]), dq, PRECISION)
                drow_tables = (
                    dot_add(tl.trans(of_first), q, drow_tables[0], PRECISION),
                    dot_add(tl.trans(of_second), q, drow_tables[1], PRECISION),
                )
        elif HAS_REL:
            # Back from halo columns and rows to taps: column tap t came from t + at_x, row tap t from t + at_y.
            came = tl.where(slot < HS, slot + at_x[:, None], slot - HS + at_y[:, None])
            fits = (came < HS) & tl.where(slot < HS, slot < KW, slot - HS < KH)
            dtaps = tl.gather(dtable, (came & (HS - 1)) | (slot & HS), 1)
            dtaps = tl.where(fits, dtaps, 0.0).to(dtype)
            dq = dot_add(dtaps, tl.trans(rel), dq, PRECISION)
            drel = dot_add(tl.trans(dtaps), q, drel, PRECISION)
        dq_at = (pixel * grad_pixel)[:, None] + (hc * D + c % DP)[None, :]
        tl.store(dq_ptr + dq_at, (dq * scale).to(dtype), mask=mine)
    for i in tl.static_range(CHUNKS - 1):
        halo_y = (tl.minimum(tiles, first + per_split) + i) * TY - UP + n // NC
        there = halo_in_x & _within(halo_y, LH)
        done = origin + (halo_y * pitch)[:, None] + place
        tl.store(dv_ptr + done, dv[i].to(dtype), mask=there[:, None] & real[None, :])
        if HAS_K:
            tl.store(dk_ptr + done, (dk[i] * scale).to(dtype), mask=there[:, None] & real[None, :])
    if HAS_REL:
        walk = tl.program_id(0)
        if FAR:
            walk = walk.to(tl.int64)
        at = (walk * tl.num_programs(1) + tl.program_id(1)) * (2 * HS * G * DP)
        if APART:
            place = tl.arange(0, HS)[:, None]
            inner = place * (G * DP) + c[None, :]
            tl.store(drel_ptr + at + inner, dcol_table * scale)
            total = drow_table
            if PAIRS:
                # The halo's row r is tap r − (UP − PY) of the tile's first row, one less of its second.
                for j in tl.static_range(2):
                    came = tl.broadcast_to(place + (UP - PY + j), (HS, G * DP))
                    there = (came >= 0) & (came < HS)
                    total += tl.where(there, tl.gather(drow_tables[j], came & (HS - 1), 0), 0.0)
            tl.store(drel_ptr + at + HS * G * DP + inner, total * scale)
        else:
            inner = tl.arange(0, 2 * HS)[:, None] * (G * DP) + c[None, :]
            tl.store(drel_ptr + at + inner, drel * scale)
