"""The backward of local attention for windows too tall to walk: queries first, then keys by the transposed window.

The walk of `gradient_kernels.py` keeps a strip's dk and dv in registers, as many chunks of them as the window is tall. These
two kernels keep one tile and compute the logits twice instead. Layout and letters are those of `kernels.py`.
Their loops over the halo are not unrolled: with a window of 31 rows that took minutes to compile.
"""

import triton
import triton.language as tl

from nearsight.ops.arithmetic.kernels import dot, dot_add
from nearsight.ops.local.gradient_kernels import _load_lse, _probabilities, _relative, _to_taps
from nearsight.ops.local.kernels import RUNTIME, _axis_bias, _half_table, _row_codes, _strip, _within

__all__ = ["backward_keys", "backward_queries"]


@triton.jit(do_not_specialize=RUNTIME)
def backward_queries(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
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
    FAR: tl.constexpr,
    LARGE: tl.constexpr,
    LSE_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq, the strip's share of the relative tables' gradient, and delta = Σ_d grad·out for the other kernel."""
    MQ: tl.constexpr = TY * TX
    M: tl.constexpr = MQ * G
    NK: tl.constexpr = NR * NC
    PY: tl.constexpr = (KH - 1) // 2
    PX: tl.constexpr = (KW - 1) // 2
    HAS_REL: tl.constexpr = HAS_ROW or HAS_COL
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
    halo_x = x0 - PX + n % NC
    halo_in_x = _within(halo_x, LW) & (n % NC < TX + KW - 1)
    q_ptr += image * q_b + phase_y * q_y + phase_x * q_x
    k_ptr += image * k_b + phase_y * k_y + phase_x * k_x
    v_ptr += image * v_b + phase_y * v_y + phase_x * v_x
    q_cols = (x * dil_x * q_x)[:, None] + (hc * q_h + c % DP)[None, :]
    k_cols = (halo_x * dil_x * k_x)[:, None] + (hc * k_h + c % DP)[None, :]
    v_cols = (halo_x * dil_x * v_x)[:, None] + (hc * v_h + c % DP)[None, :]
    pixel0 = image * H * W
    slot = tl.arange(0, HS)[None, :]
    if HAS_COL:
        col_table = _half_table(col_ptr, col_head, h0, heads, KW, D // 2, D, DP, G, HS, dtype)
    if HAS_ROW:
        row_table = _half_table(row_ptr, row_head, h0, heads, KH, 0, D, DP, G, HS, dtype)
    dcol_table = tl.zeros((HS, G * DP), tl.float32)
    drow_table = tl.zeros((HS, G * DP), tl.float32)
    per_split = (tiles + splits - 1) // splits
    for tile in range(split * per_split, tl.minimum(tiles, (split + 1) * per_split)):
        y0 = tile * TY
        y = y0 + qy
        inside = (y < LH) & (x < LW)
        mine = own & inside[:, None]
        pixel = pixel0 + (phase_y + y * dil_y) * W + phase_x + x * dil_x
        flat_at = (pixel * heads * D)[:, None] + (hc * D + c % DP)[None, :]
        q = tl.load(q_ptr + (y * dil_y * q_y)[:, None] + q_cols, mask=mine, other=0.0)
        grad = tl.load(grad_ptr + flat_at, mask=mine, other=0.0)
        out = tl.load(out_ptr + flat_at, mask=mine, other=0.0)
        delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
        stat_at = pixel * heads + h0 + g
        stat_in = inside & (h0 + g < heads)
        tl.store(delta_ptr + stat_at, delta, mask=stat_in)
        lse, rest = _load_lse(lse_ptr, stat_at, stat_in, LARGE, LSE_PARTS)
        col_taps = tl.zeros((M, HS), tl.float32)
        row_taps = tl.zeros((M, HS), tl.float32)
        if HAS_COL:
            col_taps = dot(q, col_table, PRECISION)
        if HAS_ROW:
            row_taps = dot(q, row_table, PRECISION)
        col = _axis_bias(col_taps, qx, x0 - PX, LW, KW, NC, HS, not ZEROS, HAS_COL, LARGE, dtype)
        dq = tl.zeros((M, G * DP), tl.float32)
        dcol = tl.zeros((M, NC), tl.float32)
        drow = tl.zeros((M, HS), tl.float32)
        for chunk in range(CHUNKS):
            halo_y = y0 - PY + chunk * NR + n // NC
            there = halo_in_x & (chunk * NR + n // NC < TY + KH - 1) & _within(halo_y, LH)
            load = there[:, None] & real[None, :]
            down = chunk * NR
            row = _axis_bias(row_taps, qy - down, y0 - PY + down, LH, KH, NR, HS, not ZEROS, HAS_ROW, LARGE, dtype)
            s = tl.reshape(row[:, :, None] + col[:, None, :], (M, NK))
            if HAS_K:
                k = tl.load(k_ptr + (halo_y * dil_y * k_y)[:, None] + k_cols, mask=load, other=0.0)
                s = dot_add(q, tl.trans(k), s, PRECISION)
            if HAS_MASK:
                at = pixel0 + (phase_y + halo_y * dil_y) * W + phase_x + halo_x * dil_x
                attended = tl.load(mask_ptr + at, mask=there, other=1) != 0
                s = tl.where(attended[None, :], s, -LARGE)
            p = _probabilities(s, scale_log2, lse[:, None], rest[:, None], LSE_PARTS)
            v = tl.load(v_ptr + (halo_y * dil_y * v_y)[:, None] + v_cols, mask=load, other=0.0)
            dp = dot(grad, tl.trans(v), PRECISION)
            ds = p * (dp - delta[:, None])
            if HAS_K:
                dq = dot_add(ds.to(dtype), k, dq, PRECISION)
            if HAS_COL:
                dcol += tl.sum(tl.reshape(ds, (M, NR, NC)), 1)
            if HAS_ROW and LSE_PARTS == 1:
                drow = dot_add(ds.to(dtype), _row_codes(down, NK, NC, HS, dtype), drow, PRECISION)
            elif HAS_ROW:
                # Each row's sum at its place: here the product is three.
                sums = tl.sum(tl.reshape(ds, (M, NR, NC)), 2)[:, :, None]
                place = tl.arange(0, NR)[None, :, None] + down == slot[:, None, :]
                drow += tl.sum(tl.where(place, sums, 0.0), 1)
        if HAS_COL:
            dtaps = _to_taps(dcol, slot, qx, KW, NC).to(dtype)
            dq = dot_add(dtaps, tl.trans(col_table), dq, PRECISION)
            dcol_table = dot_add(tl.trans(dtaps), q, dcol_table, PRECISION)
        if HAS_ROW:
            dtaps = _to_taps(drow, slot, qy, KH, HS).to(dtype)
            dq = dot_add(dtaps, tl.trans(row_table), dq, PRECISION)
            drow_table = dot_add(tl.trans(dtaps), q, drow_table, PRECISION)
        dq_at = (pixel * grad_pixel)[:, None] + (hc * D + c % DP)[None, :]
        tl.store(dq_ptr + dq_at, (dq * scale).to(dtype), mask=mine)
    if HAS_REL:
        walk = tl.program_id(0)
        if FAR:
            walk = walk.to(tl.int64)
        at = (walk * tl.num_programs(1) + tl.program_id(1)) * (2 * HS * G * DP)
        inner = tl.arange(0, HS)[:, None] * (G * DP) + c[None, :]
        tl.store(drel_ptr + at + inner, dcol_table * scale)
        tl.store(drel_ptr + at + HS * G * DP + inner, drow_table * scale)


@triton.jit(do_not_specialize=RUNTIME)
def backward_keys(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
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
    HT: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_COL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    LARGE: tl.constexpr,
    LSE_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk and dv of every key in a strip, gathered from the queries whose windows see it (the transposed window).

    Rows are keys, columns the halo's queries. The table's slots are the tile's key columns, then its key rows, per head.
    """
    MQ: tl.constexpr = TY * TX
    M: tl.constexpr = MQ * G
    NK: tl.constexpr = NR * NC
    SL: tl.constexpr = 16  # as deep as a product
    tl.static_assert(TX + TY <= SL)
    HAS_REL: tl.constexpr = HAS_ROW or HAS_COL
    # Three TF32 products keep 22 bits of a term and cut their sums.
    TERMS: tl.constexpr = "ieee" if PRECISION == "tf32x3" else PRECISION
    # The last tap looks back furthest.
    BY: tl.constexpr = KH - 1 - (KH - 1) // 2
    BX: tl.constexpr = KW - 1 - (KW - 1) // 2
    dtype = k_ptr.dtype.element_ty
    image, phase_y, phase_x, LH, LW, x0, split = _strip(tl.program_id(0), strips, splits, H, W, dil_y, dil_x, TX)
    h0 = tl.program_id(1) * G
    m = tl.arange(0, M)
    g = m // MQ
    ky = m % MQ // TX
    kx = m % TX
    c = tl.arange(0, G * DP)
    hc = h0 + c // DP
    real = (c % DP < D) & (hc < heads)
    own = (g[:, None] == (c // DP)[None, :]) & real[None, :]
    n = tl.arange(0, NK)
    x = x0 + kx
    halo_x = x0 - BX + n % NC
    halo_in_x = _within(halo_x, LW) & (n % NC < TX + KW - 1)
    q_ptr += image * q_b + phase_y * q_y + phase_x * q_x
    k_ptr += image * k_b + phase_y * k_y + phase_x * k_x
    v_ptr += image * v_b + phase_y * v_y + phase_x * v_x
    k_cols = (x * dil_x * k_x)[:, None] + (hc * k_h + c % DP)[None, :]
    v_cols = (x * dil_x * v_x)[:, None] + (hc * v_h + c % DP)[None, :]
    q_cols = (halo_x * dil_x * q_x)[:, None] + (hc * q_h + c % DP)[None, :]
    pixel0 = image * H * W
    hg = tl.arange(0, G)
    # Which slots a key reads: its column and its row, of its own head.
    e = tl.arange(0, G * SL)[None, :]
    slot = e % SL
    codes = ((e // SL == g[:, None]) & tl.where(slot < TX, slot == kx[:, None], slot - TX == ky[:, None])).to(
        tl.float32
    )
    codes = codes.to(dtype)
    er = tl.arange(0, G * SL)[:, None]
    slot_r = er % SL
    if HAS_REL:
        rel = _relative(row_ptr, col_ptr, row_head, col_head, h0, heads, KH, KW, D, DP, G, HT, HAS_ROW, HAS_COL, dtype)
        # [G·2·HT, G·DP], block-diagonal over the heads: one product gives every head's terms of every query.
        t = tl.arange(0, G * 2 * HT)[:, None]
        spread = tl.trans(rel)
        spread = tl.reshape(tl.broadcast_to(spread[None, :, :], (G, 2 * HT, G * DP)), (G * 2 * HT, G * DP))
        spread = tl.where(t // (2 * HT) == (c // DP)[None, :], spread.to(tl.float32), 0.0).to(dtype)
    per_split = (tiles + splits - 1) // splits
    for tile in range(split * per_split, tl.minimum(tiles, (split + 1) * per_split)):
        y0 = tile * TY
        y = y0 + ky
        inside = (y < LH) & (x < LW)
        mine = own & inside[:, None]
        pixel = pixel0 + (phase_y + y * dil_y) * W + phase_x + x * dil_x
        v = tl.load(v_ptr + (y * dil_y * v_y)[:, None] + v_cols, mask=mine, other=0.0)
        if HAS_K:
            k = tl.load(k_ptr + (y * dil_y * k_y)[:, None] + k_cols, mask=mine, other=0.0)
        dk = tl.zeros((M, G * DP), tl.float32)
        dv = tl.zeros((M, G * DP), tl.float32)
        for chunk in range(CHUNKS):
            halo_row = chunk * NR + n // NC
            halo_y = y0 - BY + halo_row
            there = halo_in_x & (halo_row < TY + KH - 1) & _within(halo_y, LH)
            load = there[:, None] & real[None, :]
            at = pixel0 + (phase_y + halo_y * dil_y) * W + phase_x + halo_x * dil_x
            q = tl.load(q_ptr + (halo_y * dil_y * q_y)[:, None] + q_cols, mask=load, other=0.0)
            grad = tl.load(grad_ptr + (at * heads * D)[:, None] + (hc * D + c % DP)[None, :], mask=load, other=0.0)
            stat_at = (at * heads)[None, :] + (h0 + hg)[:, None]
            stat_in = there[None, :] & (h0 + hg < heads)[:, None]
            lse, rest = _load_lse(lse_ptr, stat_at, stat_in, LARGE, LSE_PARTS)
            delta = tl.load(delta_ptr + stat_at, mask=stat_in, other=0.0)
            # Key column kx is tap kx − (halo column) + KW − 1 of the query there; rows alike.
            tap = tl.where(slot_r < TX, slot_r - (n % NC)[None, :] + KW - 1, slot_r - TX - halo_row[None, :] + KH - 1)
            fits = (tap >= 0) & (tap < tl.where(slot_r < TX, KW, KH))
            if HAS_REL:
                taps = dot(spread, tl.trans(q), PRECISION)
                place = (er // SL) * (2 * HT) + tl.where(slot_r < TX, 0, HT) + (tap & (HT - 1))
                table = tl.where(fits, tl.gather(taps, place, 0), -LARGE).to(dtype)
            else:
                table = tl.where(fits, 0.0, -LARGE).to(dtype)
            s = dot(codes, table, TERMS)
            if HAS_K:
                s = dot_add(k, tl.trans(q), s, PRECISION)
            lse_rows = tl.reshape(tl.broadcast_to(lse[:, None, :], (G, MQ, NK)), (M, NK))
            rest_rows = tl.reshape(tl.broadcast_to(rest[:, None, :], (G, MQ, NK)), (M, NK))
            delta_rows = tl.reshape(tl.broadcast_to(delta[:, None, :], (G, MQ, NK)), (M, NK))
            p = _probabilities(s, scale_log2, lse_rows, rest_rows, LSE_PARTS)
            dv = dot_add(p.to(dtype), grad, dv, PRECISION)
            if HAS_K:
                dp = dot(v, tl.trans(grad), PRECISION)
                ds = (p * (dp - delta_rows)).to(dtype)
                dk = dot_add(ds, q, dk, PRECISION)
        if HAS_MASK:
            attended = tl.load(mask_ptr + pixel, mask=inside, other=0) != 0
            dk = tl.where(attended[:, None], dk, 0.0)
            dv = tl.where(attended[:, None], dv, 0.0)
        grad_at = (pixel * grad_pixel)[:, None] + (hc * D + c % DP)[None, :]
        tl.store(dv_ptr + grad_at, dv.to(dtype), mask=mine)
        if HAS_K:
            tl.store(dk_ptr + grad_at, (dk * scale).to(dtype), mask=mine)
