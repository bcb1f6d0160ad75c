"""QnA's aggregation in Triton: one forward kernel, two backward kernels (the second with partial sums for the tables).

A program takes BX columns × ROWS rows of pixels and HB heads. A tile of values is [BX, HB, DP]; with 8 channels per head and
half types one thread holds one pixel's head, so a softmax weight is one register and never leaves its thread. The rows of a
program are unrolled by hand (tuples of tiles), so a loaded pixel serves every window of the column it lies in.
Coordinates outside the image are clamped and their logits set to −inf: loads need no masks. Exponentials are
powers of two; the saved log-sum-exp is in base 2 (LOG2E times the natural one).

Letters: r a row of the program, l a query, (ty, tx) a tap, q a row of windows.
"""
# ruff: noqa: E741

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _filled(n: tl.constexpr, x):
    """A tuple of n times x."""
    t = ()
    for _ in tl.static_range(n):
        t = t + (x,)
    return t


@triton.jit
def _put(t, i: tl.constexpr, x):
    """The tuple with entry i replaced."""
    return t[:i] + (x,) + t[i + 1 :]


@triton.jit
def _clamp(i, size):
    return tl.minimum(tl.maximum(i, 0), size - 1)


@triton.jit
def _inside(y, x, H, W):
    """Whether the pixels (one y, a tensor of x) lie in the image."""
    limit = tl.where((y >= 0) & (y < H), W, 0)
    return x.to(tl.uint32) < limit.to(tl.uint32)


@triton.jit
def _table_column(
    table, wanted: tl.constexpr, tx, h2, KH: tl.constexpr, KW: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr
):
    """Entries (ty, tx, l) of a table [KH, KW, L, HEADS] as a tuple over (ty, l) of [BX, HB]."""
    t = ()
    if wanted:
        for ty in tl.static_range(KH):
            for l in tl.static_range(L):
                t = t + (tl.load(table + ((ty * KW + tx) * L + l) * HEADS + h2).to(tl.float32),)
    return t


@triton.jit
def _biased(s, b, i: tl.constexpr, BIASED: tl.constexpr):
    if BIASED:
        return s + b[i]
    return s


@triton.jit
def _channels(head_block, HEADS: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """The channels of a block of heads as one axis [HB·DP], which loads coalesce on; beyond the last head clamped."""
    i = tl.arange(0, HB * DP)
    if D == DP and HEADS % HB == 0:
        return head_block * (HB * DP) + i
    return tl.minimum(head_block * HB + i // DP, HEADS - 1) * D + i % DP


@triton.jit
def _load_channels(pointers, BX: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """[BX, HB·DP] pointers to a float32 tile [BX, HB, DP], zero beyond D."""
    if D == DP:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(tl.arange(0, HB * DP) % DP < D)[None, :], other=0.0)
    return tl.reshape(tile, [BX, HB, DP]).to(tl.float32)


@triton.jit
def _store_channels(
    pointers, tile, valid, head_block,
    BX: tl.constexpr, HB: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, HB * DP)
    mask = valid[:, None] & (head_block * HB + i // DP < HEADS)[None, :] & (i % DP < D)[None, :]
    tl.store(pointers, tl.reshape(tile.to(pointers.dtype.element_ty), [BX, HB * DP]), mask=mask)


@triton.jit
def _logits(at, key_mask, y, x, H, W, ss_y, ms_y, MASKED: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr):
    """Scores of the pixels (y, x), −inf where they may not be attended: a tuple over l of [BX, HB].

    `at` points to row 0 of the columns, at l = 0; `key_mask` likewise.
    """
    yc = _clamp(y, H)
    valid = _inside(y, x, H, W)
    if MASKED:
        valid = valid & (tl.load(key_mask + yc * ms_y) != 0)
    at += yc * ss_y
    t = ()
    for l in tl.static_range(L):
        t = t + (tl.where(valid[:, None], tl.load(at + l * HEADS).to(tl.float32), float("-inf")),)
    return t


@triton.jit
def _max_column(
    m, tx, scores, key_mask, bias, y0, x, h2, H, W, ss_y, ss_x, ms_y, ms_x,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    BIASED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The windows' maxima so far, over column tx of their taps too."""
    b = _table_column(bias, BIASED, tx, h2, KH, KW, L, HEADS)
    xc = _clamp(x, W)
    at = scores + ((xc * ss_x)[:, None] + h2)
    mask_at = key_mask + xc * ms_x
    for c in tl.static_range((ROWS - 1) * SY + KH):
        s = _logits(at, mask_at, y0 + c, x, H, W, ss_y, ms_y, MASKED, L, HEADS)
        for r in tl.static_range(ROWS):
            if c >= r * SY and c < r * SY + KH:
                for l in tl.static_range(L):
                    m = _put(m, r * L + l, tl.maximum(m[r * L + l], _biased(s[l], b, (c - r * SY) * L + l, BIASED)))
    return m


@triton.jit
def _sum_column(
    z, m, tx, scores, key_mask, bias, y0, x, h2, H, W, ss_y, ss_x, ms_y, ms_x,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    BIASED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The windows' Σ exp2(LOG2E·logit − m) so far, over column tx of their taps too."""
    b = _table_column(bias, BIASED, tx, h2, KH, KW, L, HEADS)
    xc = _clamp(x, W)
    at = scores + ((xc * ss_x)[:, None] + h2)
    mask_at = key_mask + xc * ms_x
    for c in tl.static_range((ROWS - 1) * SY + KH):
        s = _logits(at, mask_at, y0 + c, x, H, W, ss_y, ms_y, MASKED, L, HEADS)
        for r in tl.static_range(ROWS):
            if c >= r * SY and c < r * SY + KH:
                for l in tl.static_range(L):
                    e = tl.exp2(_biased(s[l], b, (c - r * SY) * L + l, BIASED) * LOG2E - m[r * L + l])
                    z = _put(z, r * L + l, z[r * L + l] + e)
    return z


@triton.jit
def _gather_column(
    acc, lse, tx, scores, values, key_mask, bias, scale, y0, x, h2, channel,
    H, W, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    BX: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, STACK: tl.constexpr,
):  # fmt: skip
    """The windows' outputs so far, over column tx of their taps too."""
    b = _table_column(bias, BIASED, tx, h2, KH, KW, L, HEADS)
    w = _table_column(scale, SCALED, tx, h2, KH, KW, L, HEADS)
    xc = _clamp(x, W)
    at = scores + ((xc * ss_x)[:, None] + h2)
    value_at = values + ((xc * vs_x)[:, None] + channel)
    mask_at = key_mask + xc * ms_x
    for c in tl.static_range((ROWS - 1) * SY + KH):
        s = _logits(at, mask_at, y0 + c, x, H, W, ss_y, ms_y, MASKED, L, HEADS)
        v = _load_channels(value_at + _clamp(y0 + c, H) * vs_y, BX, HB, D, DP)
        for r in tl.static_range(ROWS):
            if c >= r * SY and c < r * SY + KH:
                weight = tl.zeros_like(s[0])
                for l in tl.static_range(L):
                    p = tl.exp2(_biased(s[l], b, (c - r * SY) * L + l, BIASED) * LOG2E - lse[r * L + l])
                    if SCALED:
                        p = p * w[(c - r * SY) * L + l]
                    if STACK:
                        acc = _put(acc, r * L + l, acc[r * L + l] + p[:, :, None] * v)
                    else:
                        weight += p
                if not STACK:
                    acc = _put(acc, r, acc[r] + weight[:, :, None] * v)
    return acc


@triton.jit(do_not_specialize=["H", "W", "OH", "OW"])
def forward(
    scores, values, bias, scale, key_mask, out, lse_out,
    H, W, OH, OW,
    ss_b, ss_y, ss_x, vs_b, vs_y, vs_x, ms_b, ms_y, ms_x,
    HEADS: tl.constexpr, L: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    BX: tl.constexpr, HB: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, STACK: tl.constexpr,
):  # fmt: skip
    """Softmax over each window and its values' weighted sum; writes the output and the windows' log-sum-exp (base 2)."""
    head_blocks: tl.constexpr = (HEADS + HB - 1) // HB
    columns = tl.cdiv(OW, BX)
    rows = tl.cdiv(OH, ROWS)
    pid = tl.program_id(0)
    head_block = pid % head_blocks
    pid = pid // head_blocks
    ox = (pid % columns) * BX + tl.arange(0, BX)
    pid = pid // columns
    oy = (pid % rows) * ROWS
    batch = (pid // rows).to(tl.int64)

    h = head_block * HB + tl.arange(0, HB)
    hc = h
    if HEADS % HB:
        hc = tl.minimum(h, HEADS - 1)
    h2 = tl.zeros([BX, HB], tl.int32) + hc[None, :]
    channel = _channels(head_block, HEADS, HB, D, DP)[None, :]
    scores += batch * ss_b
    values += batch * vs_b
    key_mask += batch * ms_b
    y0 = oy * SY - (KH - 1) // 2
    x0 = ox * SX - (KW - 1) // 2

    m = _filled(ROWS * L, tl.full([BX, HB], float("-inf"), tl.float32))
    if UNROLL:
        for tx in tl.static_range(KW):
            m = _max_column(
                m, tx, scores, key_mask, bias, y0, x0 + tx, h2, H, W, ss_y, ss_x, ms_y, ms_x,
                KH, KW, SY, L, HEADS, ROWS, BIASED, MASKED,
            )  # fmt: skip
    else:
        for tx in range(KW):
            m = _max_column(
                m, tx, scores, key_mask, bias, y0, x0 + tx, h2, H, W, ss_y, ss_x, ms_y, ms_x,
                KH, KW, SY, L, HEADS, ROWS, BIASED, MASKED,
            )  # fmt: skip
    # A window with nothing to attend to: any finite maximum makes its weights exp2(−inf) = 0.
    for i in tl.static_range(ROWS * L):
        m = _put(m, i, tl.where(m[i] == float("-inf"), 0.0, m[i] * LOG2E))

    z = _filled(ROWS * L, tl.zeros([BX, HB], tl.float32))
    if UNROLL:
        for tx in tl.static_range(KW):
            z = _sum_column(
                z, m, tx, scores, key_mask, bias, y0, x0 + tx, h2, H, W, ss_y, ss_x, ms_y, ms_x,
                KH, KW, SY, L, HEADS, ROWS, BIASED, MASKED,
            )  # fmt: skip
    else:
        for tx in range(KW):
            z = _sum_column(
                z, m, tx, scores, key_mask, bias, y0, x0 + tx, h2, H, W, ss_y, ss_x, ms_y, ms_x,
                KH, KW, SY, L, HEADS, ROWS, BIASED, MASKED,
            )  # fmt: skip
    lse = ()
    for i in tl.static_range(ROWS * L):
        lse = lse + (tl.where(z[i] == 0.0, float("inf"), m[i] + tl.log2(z[i])),)

    tiles: tl.constexpr = ROWS * L if STACK else ROWS
    acc = _filled(tiles, tl.zeros([BX, HB, DP], tl.float32))
    if UNROLL:
        for tx in tl.static_range(KW):
            acc = _gather_column(
                acc, lse, tx, scores, values, key_mask, bias, scale, y0, x0 + tx, h2, channel,
                H, W, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
                KH, KW, SY, L, HEADS, ROWS, BX, HB, D, DP, BIASED, SCALED, MASKED, STACK,
            )  # fmt: skip
    else:
        for tx in range(KW):
            acc = _gather_column(
                acc, lse, tx, scores, values, key_mask, bias, scale, y0, x0 + tx, h2, channel,
                H, W, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
                KH, KW, SY, L, HEADS, ROWS, BX, HB, D, DP, BIASED, SCALED, MASKED, STACK,
            )  # fmt: skip

    per: tl.constexpr = L if STACK else 1
    for r in tl.static_range(ROWS):
        pixel = (oy + r) * OW + ox
        inside = _inside(oy + r, ox, OH, OW)
        valid = inside[:, None] & (h < HEADS)[None, :]
        lse_at = lse_out + batch * OH * OW * (L * HEADS) + (pixel * (L * HEADS))[:, None] + h2
        for l in tl.static_range(L):
            tl.store(lse_at + l * HEADS, lse[r * L + l], mask=valid)
        at = out + batch * OH * OW * (per * HEADS * D) + (pixel * (per * HEADS * D))[:, None] + channel
        for l in tl.static_range(per):
            _store_channels(at + l * (HEADS * D), acc[r * per + l], inside, head_block, BX, HB, HEADS, D, DP)


@triton.jit
def _delta_column(
    delta, g, lse, tx, scores, values, key_mask, bias, scale, y0, x, h2, channel,
    H, W, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    BX: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, STACK: tl.constexpr,
):  # fmt: skip
    """The windows' Σ p·scale·(g·v) so far, over column tx of their taps too."""
    b = _table_column(bias, BIASED, tx, h2, KH, KW, L, HEADS)
    w = _table_column(scale, SCALED, tx, h2, KH, KW, L, HEADS)
    xc = _clamp(x, W)
    at = scores + ((xc * ss_x)[:, None] + h2)
    value_at = values + ((xc * vs_x)[:, None] + channel)
    mask_at = key_mask + xc * ms_x
    for c in tl.static_range((ROWS - 1) * SY + KH):
        s = _logits(at, mask_at, y0 + c, x, H, W, ss_y, ms_y, MASKED, L, HEADS)
        v = _load_channels(value_at + _clamp(y0 + c, H) * vs_y, BX, HB, D, DP)
        for r in tl.static_range(ROWS):
            if c >= r * SY and c < r * SY + KH:
                if not STACK:
                    gv = tl.sum(g[r] * v, axis=2)
                for l in tl.static_range(L):
                    if STACK:
                        gv = tl.sum(g[r * L + l] * v, axis=2)
                    p = tl.exp2(_biased(s[l], b, (c - r * SY) * L + l, BIASED) * LOG2E - lse[r * L + l])
                    if SCALED:
                        p = p * w[(c - r * SY) * L + l]
                    delta = _put(delta, r * L + l, delta[r * L + l] + p * gv)
    return delta


@triton.jit(do_not_specialize=["H", "W", "OH", "OW"])
def backward_delta(
    scores, values, bias, scale, key_mask, grad, lse_in, delta_out,
    H, W, OH, OW,
    ss_b, ss_y, ss_x, vs_b, vs_y, vs_x, ms_b, ms_y, ms_x, gs_b, gs_y, gs_x,
    HEADS: tl.constexpr, L: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    BX: tl.constexpr, HB: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, STACK: tl.constexpr,
):  # fmt: skip
    """Per window and query δ = Σ_n p_n·scale_n·(g·v_n), which each of the window's logit gradients subtracts."""
    head_blocks: tl.constexpr = (HEADS + HB - 1) // HB
    columns = tl.cdiv(OW, BX)
    rows = tl.cdiv(OH, ROWS)
    pid = tl.program_id(0)
    head_block = pid % head_blocks
    pid = pid // head_blocks
    ox = (pid % columns) * BX + tl.arange(0, BX)
    pid = pid // columns
    oy = (pid % rows) * ROWS
    batch = (pid // rows).to(tl.int64)

    h = head_block * HB + tl.arange(0, HB)
    hc = h
    if HEADS % HB:
        hc = tl.minimum(h, HEADS - 1)
    h2 = tl.zeros([BX, HB], tl.int32) + hc[None, :]
    channel = _channels(head_block, HEADS, HB, D, DP)[None, :]
    scores += batch * ss_b
    values += batch * vs_b
    key_mask += batch * ms_b
    grad += batch * gs_b
    y0 = oy * SY - (KH - 1) // 2
    x0 = ox * SX - (KW - 1) // 2
    oxc = tl.minimum(ox, OW - 1)

    per: tl.constexpr = L if STACK else 1
    g = ()
    lse = ()
    for r in tl.static_range(ROWS):
        oyc = tl.minimum(oy + r, OH - 1)
        at = grad + oyc * gs_y + (oxc * gs_x)[:, None] + channel
        for l in tl.static_range(per):
            g = g + (_load_channels(at + l * (HEADS * D), BX, HB, D, DP),)
        lse_at = lse_in + batch * OH * OW * (L * HEADS) + ((oyc * OW + oxc) * (L * HEADS))[:, None] + h2
        for l in tl.static_range(L):
            lse = lse + (tl.load(lse_at + l * HEADS),)

    delta = _filled(ROWS * L, tl.zeros([BX, HB], tl.float32))
    if UNROLL:
        for tx in tl.static_range(KW):
            delta = _delta_column(
                delta, g, lse, tx, scores, values, key_mask, bias, scale, y0, x0 + tx, h2, channel,
                H, W, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
                KH, KW, SY, L, HEADS, ROWS, BX, HB, D, DP, BIASED, SCALED, MASKED, STACK,
            )  # fmt: skip
    else:
        for tx in range(KW):
            delta = _delta_column(
                delta, g, lse, tx, scores, values, key_mask, bias, scale, y0, x0 + tx, h2, channel,
                H, W, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
                KH, KW, SY, L, HEADS, ROWS, BX, HB, D, DP, BIASED, SCALED, MASKED, STACK,
            )  # fmt: skip

    for r in tl.static_range(ROWS):
        inside = _inside(oy + r, ox, OH, OW)
        valid = inside[:, None] & (h < HEADS)[None, :]
        at = delta_out + batch * OH * OW * (L * HEADS) + (((oy + r) * OW + ox) * (L * HEADS))[:, None] + h2
        for l in tl.static_range(L):
            tl.store(at + l * HEADS, delta[r * L + l], mask=valid)


@triton.jit
def _scatter_pair(
    dv, ds, db, dw, v, s, g, lse, delta, b, w, ty: tl.constexpr, first: tl.constexpr, r: tl.constexpr,
    L: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr, STACK: tl.constexpr,
    WANT_BIAS: tl.constexpr, WANT_SCALE: tl.constexpr,
):  # fmt: skip
    """What one row of windows gives to the gradients of the pixels of row r, which it sees as its tap (ty, tx)."""
    weight = tl.zeros_like(s[0])
    if not STACK:
        gv = tl.sum(g[0] * v[r], axis=2)
    for l in tl.static_range(L):
        if STACK:
            gv = tl.sum(g[l] * v[r], axis=2)
        p = tl.exp2(_biased(s[r * L + l], b, ty * L + l, BIASED) * LOG2E - lse[l])
        if SCALED:
            dlogit = p * (w[ty * L + l] * gv - delta[l])
            weight_l = p * w[ty * L + l]
        else:
            dlogit = p * (gv - delta[l])
            weight_l = p
        ds = _put(ds, r * L + l, ds[r * L + l] + dlogit)
        if WANT_BIAS:
            db = _put(db, first + ty * L + l, db[first + ty * L + l] + dlogit)
        if WANT_SCALE:
            dw = _put(dw, first + ty * L + l, dw[first + ty * L + l] + p * gv)
        if STACK:
            dv = _put(dv, r, dv[r] + weight_l[:, :, None] * g[l])
        else:
            weight += weight_l
    if not STACK:
        dv = _put(dv, r, dv[r] + weight[:, :, None] * g[0])
    return dv, ds, db, dw


@triton.jit
def _scatter_column(
    dv, ds, db, dw, v, s, tx, first: tl.constexpr, grad, lse_in, delta_in, bias, scale, q0, ox, h2, channel,
    OH, OW, gs_y, gs_x,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    BX: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, QLOW: tl.constexpr, QROWS: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, STACK: tl.constexpr, WANT_BIAS: tl.constexpr, WANT_SCALE: tl.constexpr,
):  # fmt: skip
    """What the windows that see the pixels in column tx of their taps give to the pixels' gradients and the tables'.

    `first` is the entry of db and dw that belongs to (ty, l) = (0, 0).
    """
    b = _table_column(bias, BIASED, tx, h2, KH, KW, L, HEADS)
    w = _table_column(scale, SCALED, tx, h2, KH, KW, L, HEADS)
    per: tl.constexpr = L if STACK else 1
    oxc = _clamp(ox, OW)
    grad_at = grad + ((oxc * gs_x)[:, None] + channel)
    state = (oxc * (L * HEADS))[:, None] + h2
    lse_at = lse_in + state
    delta_at = delta_in + state
    for q in tl.static_range(QROWS):
        oy = q0 + (QLOW + q)
        oyc = _clamp(oy, OH)
        valid = _inside(oy, ox, OH, OW)[:, None]
        row = oyc * (OW * (L * HEADS))
        g = ()
        for l in tl.static_range(per):
            g = g + (_load_channels(grad_at + oyc * gs_y + l * (HEADS * D), BX, HB, D, DP),)
        lse = ()
        delta = ()
        for l in tl.static_range(L):
            lse = lse + (tl.where(valid, tl.load(lse_at + row + l * HEADS), float("inf")),)
            delta = delta + (tl.load(delta_at + row + l * HEADS),)
        for r in tl.static_range(ROWS):
            if r + (KH - 1) // 2 - SY * (QLOW + q) >= 0 and r + (KH - 1) // 2 - SY * (QLOW + q) < KH:
                dv, ds, db, dw = _scatter_pair(
                    dv, ds, db, dw, v, s, g, lse, delta, b, w, r + (KH - 1) // 2 - SY * (QLOW + q), first, r,
                    L, BIASED, SCALED, STACK, WANT_BIAS, WANT_SCALE,
                )  # fmt: skip
    return dv, ds, db, dw


@triton.jit
def _store_partial(
    partial, sums, first: tl.constexpr, tx, h, again,
    KH: tl.constexpr, KW: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Sum entries `first`… of `sums` over the program's pixels and store them as column tx of a table [KH, KW, L, HEADS].

    With ADD, `again` says that the program stored there before and adds to it. Without, no load: each costs compile time.
    """
    for ty in tl.static_range(KH):
        for l in tl.static_range(L):
            at = partial + ((ty * KW + tx) * L + l) * HEADS + h
            total = tl.sum(sums[first + ty * L + l], axis=0, keep_dims=True)
            if ADD:
                total += tl.load(at, mask=(h < HEADS) & again, other=0.0)
            tl.store(at, total, mask=h < HEADS)


@triton.jit(do_not_specialize=["H", "W", "OH", "OW", "tile_rows"])
def backward(
    scores, values, bias, scale, key_mask, grad, lse_in, delta_in, dscores, dvalues, dbias, dscale,
    H, W, OH, OW, tile_rows,
    ss_b, ss_y, ss_x, vs_b, vs_y, vs_x, ms_b, ms_y, ms_x, gs_b, gs_y, gs_x,
    HEADS: tl.constexpr, L: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    BX: tl.constexpr, HB: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr,
    QLOW: tl.constexpr, QROWS: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, STACK: tl.constexpr,
    WANT_BIAS: tl.constexpr, WANT_SCALE: tl.constexpr,
):  # fmt: skip
    """Gradients of scores and values, gathered over the windows that see each pixel, and partial sums of the tables'.

    A program takes STEPS tiles of ROWS rows, one below the other. Its pixels are SX columns apart, so that all of them are the
    same columns of taps of the windows that see them; likewise ROWS is a multiple of SY. Unrolled (SX = 1), the tables' sums
    stay in registers over the steps; otherwise each column of taps is summed when it is done and added to what is stored.
    """
    head_blocks: tl.constexpr = (HEADS + HB - 1) // HB
    columns = tl.cdiv(W, BX * SX)
    program = tl.program_id(0)
    head_block = program % head_blocks
    program = program // head_blocks
    phase = program % SX
    column = (program // SX) % columns
    rest = program // (SX * columns)
    tile_row = (rest % tile_rows) * STEPS
    batch = (rest // tile_rows).to(tl.int64)

    h = head_block * HB + tl.arange(0, HB)
    hc = h
    if HEADS % HB:
        hc = tl.minimum(h, HEADS - 1)
    h2 = tl.zeros([BX, HB], tl.int32) + hc[None, :]
    channel = _channels(head_block, HEADS, HB, D, DP)[None, :]
    scores += batch * ss_b
    values += batch * vs_b
    key_mask += batch * ms_b
    grad += batch * gs_b
    lse_in += batch * OH * OW * (L * HEADS)
    delta_in += batch * OH * OW * (L * HEADS)
    dscores += batch * H * W * (L * HEADS)
    dvalues += batch * H * W * (HEADS * D)
    dbias += program.to(tl.int64) * (KH * KW * L * HEADS)
    dscale += program.to(tl.int64) * (KH * KW * L * HEADS)
    q_column = column * BX + tl.arange(0, BX)
    x = q_column * SX + phase
    xc = tl.minimum(x, W - 1)
    score_at = scores + ((xc * ss_x)[:, None] + h2)
    value_at = values + ((xc * vs_x)[:, None] + channel)
    mask_at = key_mask + xc * ms_x

    zero = tl.zeros([BX, HB], tl.float32)
    sums: tl.constexpr = KH * L * (KW if UNROLL else 1)
    db = _filled(sums, zero)
    dw = _filled(sums, zero)
    for step in range(tl.minimum(STEPS, tl.cdiv(H, ROWS) - tile_row)):
        y0 = (tile_row + step) * ROWS
        v = ()
        s = ()
        for r in tl.static_range(ROWS):
            s = s + _logits(score_at, mask_at, y0 + r, x, H, W, ss_y, ms_y, MASKED, L, HEADS)
            v = v + (_load_channels(value_at + tl.minimum(y0 + r, H - 1) * vs_y, BX, HB, D, DP),)
        dv = _filled(ROWS, tl.zeros([BX, HB, DP], tl.float32))
        ds = _filled(ROWS * L, zero)
        if UNROLL:
            for tx in tl.static_range(KW):
                dv, ds, db, dw = _scatter_column(
                    dv, ds, db, dw, v, s, tx, tx * KH * L, grad, lse_in, delta_in, bias, scale, y0 // SY,
                    x + ((KW - 1) // 2 - tx), h2, channel, OH, OW, gs_y, gs_x,
                    KH, KW, SY, L, HEADS, ROWS, BX, HB, D, DP, QLOW, QROWS, BIASED, SCALED, STACK, WANT_BIAS, WANT_SCALE,
                )  # fmt: skip
        else:
            first_tx = (phase + (KW - 1) // 2) % SX
            for i in range((KW - first_tx + SX - 1) // SX):
                tx = first_tx + i * SX
                db = _filled(sums, zero)
                dw = _filled(sums, zero)
                dv, ds, db, dw = _scatter_column(
                    dv, ds, db, dw, v, s, tx, 0, grad, lse_in, delta_in, bias, scale, y0 // SY,
                    q_column + ((phase + (KW - 1) // 2) // SX - i), h2, channel, OH, OW, gs_y, gs_x,
                    KH, KW, SY, L, HEADS, ROWS, BX, HB, D, DP, QLOW, QROWS, BIASED, SCALED, STACK, WANT_BIAS, WANT_SCALE,
                )  # fmt: skip
                again = h[None, :] < step * HEADS
                if WANT_BIAS:
                    _store_partial(dbias, db, 0, tx, h[None, :], again, KH, KW, L, HEADS, True)
                if WANT_SCALE:
                    _store_partial(dscale, dw, 0, tx, h[None, :], again, KH, KW, L, HEADS, True)
            # One lane stores what several load in the next step.
            tl.debug_barrier()
        for r in tl.static_range(ROWS):
            pixel = (y0 + r) * W + x
            inside = _inside(y0 + r, x, H, W)
            valid = inside[:, None] & (h < HEADS)[None, :]
            at = dscores + (pixel * (L * HEADS))[:, None] + h2
            for l in tl.static_range(L):
                tl.store(at + l * HEADS, ds[r * L + l].to(dscores.dtype.element_ty), mask=valid)
            at = dvalues + (pixel * (HEADS * D))[:, None] + channel
            _store_channels(at, dv[r], inside, head_block, BX, HB, HEADS, D, DP)
    if UNROLL:
        for tx in tl.static_range(KW):
            if WANT_BIAS:
                _store_partial(dbias, db, tx * KH * L, tx, h[None, :], False, KH, KW, L, HEADS, False)
            if WANT_SCALE:
                _store_partial(dscale, dw, tx * KH * L, tx, h[None, :], False, KH, KW, L, HEADS, False)
