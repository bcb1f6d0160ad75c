"""The forward of local attention in strips, a row of the halo at a time. Layout and letters are those of `kernels.py`.

For one head of 16 channels in half types and windows of up to 7 rows and 9 columns. A row is a product of its own, so that a
query has one row term for all of a product's columns: it enters with the exponential, at no instruction a logit, and the product
starts from the column terms.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from nearsight.ops.arithmetic.kernels import dot, dot_add, exp2, log2
from nearsight.ops.local.kernels import RUNTIME, _axis_bias, _half_table, _strip, _within

__all__ = ["forward"]


@triton.jit(do_not_specialize=RUNTIME)
def forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
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
    FOLD: tl.constexpr,
    BOXES: tl.constexpr,
    LARGE: tl.constexpr,
    LSE_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out and the log-sum-exp of every query in a strip: the arguments and results of `kernels.forward`."""
    M: tl.constexpr = TY * TX
    PY: tl.constexpr = (KH - 1) // 2
    PX: tl.constexpr = (KW - 1) // 2
    # Of the halo. To the tile's first row of queries, row r is tap r; to its second, tap r − 1.
    ROWS: tl.constexpr = KH + 1
    tl.static_assert(TY == 2 and G == 1 and LSE_PARTS == 1 and not WHOLE_X and not BOXES)
    dtype = q_ptr.dtype.element_ty
    image, phase_y, phase_x, LH, LW, x0, split = _strip(tl.program_id(0), strips, splits, H, W, dil_y, dil_x, TX)
    head = tl.program_id(1)
    m = tl.arange(0, M)
    qy = m // TX
    qx = m % TX
    c = tl.arange(0, DP)
    n = tl.arange(0, NC)
    x = x0 + qx
    halo_x = x0 - PX + n
    in_x = _within(halo_x, LW) & (n < TX + KW - 1)
    q_ptr += image * q_b + phase_y * q_y + phase_x * q_x + head * q_h
    k_ptr += image * k_b + phase_y * k_y + phase_x * k_x + head * k_h
    v_ptr += image * v_b + phase_y * v_y + phase_x * v_x + head * v_h
    q_cols = (x * dil_x * q_x)[:, None] + c[None, :]
    k_cols = (halo_x * dil_x * k_x)[:, None] + c[None, :]
    v_cols = (halo_x * dil_x * v_x)[:, None] + c[None, :]
    pixel0 = image * H * W
    if HAS_COL:
        rel_col = _half_table(col_ptr, col_head, head, heads, KW, D // 2, D, DP, 1, HS, dtype)
    taps = ()
    if HAS_ROW:
        # A tap eight times: its product's columns are the lanes that need it.
        lanes = (c < D // 2)[:, None] & (tl.arange(0, 8) >= 0)[None, :]
        for t in tl.static_range(KH):
            tap = tl.load(row_ptr + head * row_head + t * (D // 2) + c[:, None], mask=lanes, other=0.0)
            taps = taps + (tap.to(dtype),)
    per_split = (tiles + splits - 1) // splits
    for tile in range(split * per_split, tl.minimum(tiles, (split + 1) * per_split)):
        y0 = tile * TY
        y = y0 + qy
        inside = (y < LH) & (x < LW)
        mine = inside[:, None] & (c < D)[None, :]
        q = tl.load(q_ptr + (y * dil_y * q_y)[:, None] + q_cols, mask=mine, other=0.0)
        col_taps = tl.zeros((M, HS), tl.float32)
        if HAS_COL:
            col_taps = dot(q, rel_col, PRECISION)
        col = _axis_bias(col_taps, qx, x0 - PX, LW, KW, NC, HS, not ZEROS, HAS_COL, LARGE, dtype)
        # Each query's terms, in the four lanes of its logits; before the first tap and after the last there is none.
        none = tl.full((M, 4), -LARGE, tl.float32)
        terms = (none,)
        for t in tl.static_range(KH):
            if HAS_ROW:
                term = dot(q, taps[t], PRECISION).to(dtype).to(tl.float32)
                term, _same = tl.split(tl.reshape(term, (M, 4, 2)))
                terms = terms + (term,)
            else:
                terms = terms + (tl.zeros((M, 4), tl.float32),)
        terms = terms + (none,)
        logits = ()
        rows = ()
        values = ()
        top = none
        for r in tl.static_range(ROWS):
            halo_y = y0 - PY + r
            there = in_x & _within(halo_y + n * 0, LH)
            use = there[:, None] & (c < D)[None, :]
            values = values + (tl.load(v_ptr + halo_y * dil_y * v_y + v_cols, mask=use, other=0.0),)
            s = col
            if HAS_K:
                k = tl.load(k_ptr + halo_y * dil_y * k_y + k_cols, mask=use, other=0.0)
                s = dot_add(q, tl.trans(k), s, PRECISION)
            if HAS_MASK:
                pixels = pixel0 + (phase_y + halo_y * dil_y) * W + phase_x + halo_x * dil_x
                attended = tl.load(mask_ptr + pixels, mask=there, other=1) != 0
                s = tl.where(attended[None, :], s, -LARGE)
            row = tl.where((qy == 1)[:, None], terms[r], terms[r + 1])
            if not ZEROS:
                row = tl.where(_within(halo_y, LH), row, -LARGE)
            s = tl.reshape(s, (M, NC // 8, 4, 2))
            top = tl.maximum(top, row + tl.max(tl.max(s, 3), 1))
            logits = logits + (s,)
            rows = rows + (row,)
        best = tl.max(top, 1)
        # A query with nothing to attend to: every exponential below becomes 0.
        base = tl.where(best > -0.5 * LARGE, best, 0.0) * scale_log2
        acc = tl.zeros((M, DP), tl.float32)
        sums = tl.zeros((M, 8), tl.float32)
        for r in tl.static_range(ROWS):
            below = base[:, None] - rows[r] * scale_log2
            p = exp2(logits[r] * scale_log2 - below[:, None, :, None])
            p = tl.reshape(p, (M, NC)).to(dtype)
            # Eight times the same sum, of the numbers that meet the values.
            sums = dot_add(p, tl.full((NC, 8), 1.0, dtype), sums, PRECISION)
            acc = dot_add(p, values[r], acc, PRECISION)
        total = tl.max(sums, 1)
        some = total > 0
        acc = acc * tl.where(some, 1.0 / total, 0.0)[:, None]
        pixel = pixel0 + (phase_y + y * dil_y) * W + phase_x + x * dil_x
        out_at = (pixel * heads * D)[:, None] + (head * D + c)[None, :]
        tl.store(out_ptr + out_at, acc.to(dtype), mask=mine)
        tl.store(lse_ptr + pixel * heads + head, tl.where(some, base + log2(total), LARGE), mask=inside)
