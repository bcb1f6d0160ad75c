"""QnA's aggregation in Triton: the forward kernel and δ, over the windows.

The rows of a program are unrolled by hand (tuples of tiles), so a loaded pixel serves every window of the column it lies in.
Coordinates outside the image are clamped and their logits set to −inf: loads need no masks. Exponentials are powers of two; the
saved log-sum-exp is in base 2 (LOG2E times the natural one). Letters and lanes: `lanes.py`.
"""
# ruff: noqa: E741

import triton
import triton.language as tl

from nearsight.ops.arithmetic.kernels import reciprocal
from nearsight.ops.qna.lanes import (
    LOG2E,
    channels,
    clamp,
    filled,
    for_next_turn,
    lane_mask,
    lanes,
    load_channels,
    load_neighbours,
    load_table,
    log2,
    logits,
    neighbours,
    one_turn,
    row_pointers,
    score_pointers,
    store_channels,
    table_pointers,
)

__all__ = ["delta", "forward", "pack"]


@triton.jit(do_not_specialize=["HEADS"], do_not_specialize_on_alignment=["bias", "scale"])
def pack(bias, scale, tables, HEADS, L: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr, HP: tl.constexpr):
    """The tables [taps, L, HEADS] as one [taps, HP, bias and scale, L] in float32.

    What a tap's weights take is then one load, and every tap lies at a constant distance from the first.
    """
    tap = tl.program_id(0)
    h = tl.arange(0, HP)
    group: tl.constexpr = (BIASED + SCALED) * L
    at = tables + (tap * HP + h) * group
    for l in tl.static_range(L):
        if BIASED:
            row = tl.load(bias + (tap * L + l) * HEADS + h, mask=h < HEADS, other=0.0)
            tl.store(at + l, row.to(tl.float32))
        if SCALED:
            row = tl.load(scale + (tap * L + l) * HEADS + h, mask=h < HEADS, other=0.0)
            tl.store(at + BIASED * L + l, row.to(tl.float32))


@triton.jit
def _attend_taps(
    m, z, acc, table_at, at, value_at, mask_at, y0, x, H, W,
    COLS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """The body of `_attend`'s loop."""
    count: tl.constexpr = (ROWS - 1) * SY + KH
    group: tl.constexpr = (BIASED + SCALED) * L
    b = load_table(table_at, BIASED, 0, COLS * KH, L, group)
    w = load_table(table_at, SCALED, BIASED * L, COLS * KH, L, group)
    s = ()
    for j in tl.static_range(COLS):
        for c in tl.static_range(count):
            s = s + logits(at, mask_at, j * count + c, y0 + c, x + j, H, W, MASKED, L)
    # exp(logit − m)·scale, a tuple over (r, l, j, ty)
    e = ()
    tops = ()
    sums = ()
    old = ()
    for r in tl.static_range(ROWS):
        for l in tl.static_range(L):
            top = m[r * L + l]
            for i in tl.static_range(COLS * KH):
                x_i = s[(i // KH * count + r * SY + i % KH) * L + l]
                if BIASED:
                    x_i += b[i * L + l]
                top = tl.maximum(top, x_i)
            # A window with nothing to attend to: any finite maximum makes its weights exp2(−inf) = 0.
            low = tl.where(top == float("-inf"), 0.0, top * LOG2E)
            fade = tl.exp2(m[r * L + l] * LOG2E - low)
            total = z[r * L + l] * fade
            for i in tl.static_range(COLS * KH):
                x_i = s[(i // KH * count + r * SY + i % KH) * L + l]
                if BIASED:
                    x_i += b[i * L + l]
                weight = tl.exp2(x_i * LOG2E - low)
                total += weight
                if SCALED:
                    weight = weight * w[i * L + l]
                e = e + (weight,)
            tops = tops + (top,)
            sums = sums + (total,)
            old = old + (fade,)
    m = tops
    z = sums
    if SPLIT:
        faded = ()
        for i in tl.static_range(ROWS * L):
            if COLS == KW:
                faded = faded + (tl.zeros_like(acc[i]),)
            else:
                faded = faded + (acc[i] * old[i][:, None],)
        acc = faded
    else:
        over = ()
        for i in tl.static_range(ROWS * L):
            over = over + (tl.where(sums[i] == 0.0, 0.0, reciprocal(sums[i])),)
    for j in tl.static_range(COLS):
        for c in tl.static_range(count):
            v = load_channels(value_at[j * count + c], D, DP)
            for r in tl.static_range(ROWS):
                if c >= r * SY and c < r * SY + KH:
                    weight = tl.zeros_like(s[0])
                    for l in tl.static_range(L):
                        p = e[((r * L + l) * COLS + j) * KH + c - r * SY]
                        if SPLIT:
                            acc = acc[: r * L + l] + (acc[r * L + l] + p[:, None] * v,) + acc[r * L + l + 1 :]
                        else:
                            weight += p * over[r * L + l]
                    if not SPLIT:
                        acc = acc[:r] + (acc[r] + weight[:, None] * v,) + acc[r + 1 :]
    return m, z, acc


@triton.jit
def _attend(
    m, z, acc, tx, scores, values, key_mask, tables, y0, x, h, channel,
    H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
    COLS: tl.constexpr, HP: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, L: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Columns tx … tx + COLS − 1 of the windows' taps, the first of which lies at x.

    Maxima m, Σ exp(logit − m) and Σ exp(logit − m)·scale·value so far, SPLIT by query. All columns at once
    (COLS = KW) need nothing from before; not SPLIT, the values' sums are then divided already and summed over the queries.
    """
    count: tl.constexpr = (ROWS - 1) * SY + KH
    group: tl.constexpr = (BIASED + SCALED) * L
    table_at = table_pointers(tables, h, tx, COLS, HP, KH, KW, group)
    at = ()
    value_at = ()
    mask_at = ()
    for j in tl.static_range(COLS):
        xc = clamp(x + j, W)
        at = at + score_pointers(scores, xc * ss_x + h, y0, H, ss_y, HEADS, count, L)
        value_at = value_at + row_pointers(values, (xc * vs_x)[:, None] + channel, y0, H, vs_y, count)
        mask_at = mask_at + row_pointers(key_mask, xc * ms_x, y0, H, ms_y, count if MASKED else 0)
    for _ in range(one_turn(H)):
        m, z, acc = _attend_taps(
            m, z, acc, table_at, at, value_at, mask_at, y0, x, H, W,
            COLS, KH, KW, SY, L, ROWS, D, DP, BIASED, SCALED, MASKED, SPLIT,
        )  # fmt: skip
        at = for_next_turn(at, H)
        table_at = for_next_turn(table_at, H)
        value_at = for_next_turn(value_at, H)
        mask_at = for_next_turn(mask_at, H)
    return m, z, acc


@triton.jit(
    do_not_specialize=[
        "H", "W", "OH", "OW", "HEADS", "ss_b", "ss_y", "ss_x", "vs_b", "vs_y", "vs_x", "ms_b", "ms_y", "ms_x",
    ],
    do_not_specialize_on_alignment=["scores", "key_mask"],
)  # fmt: skip
def forward(
    scores, values, tables, key_mask, out, lse_out,
    H, W, OH, OW, HEADS,
    ss_b, ss_y, ss_x, vs_b, vs_y, vs_x, ms_b, ms_y, ms_x,
    ALIGN: tl.constexpr, HP: tl.constexpr, L: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, STACK: tl.constexpr,
):  # fmt: skip
    """Softmax over each window and its values' weighted sum; writes the output and the windows' log-sum-exp (base 2)."""
    block = tl.program_id(0)
    oy = tl.program_id(1) * ROWS
    batch = tl.program_id(2).to(tl.int64)
    ox, h = lanes(block, OW, HEADS, N)
    channel = channels(h, D, DP)
    vs_y *= ALIGN
    vs_x *= ALIGN
    scores += batch * ss_b
    values += batch * vs_b * ALIGN
    key_mask += batch * ms_b
    y0 = oy * SY - (KH - 1) // 2
    x0 = ox * SX - (KW - 1) // 2

    split: tl.constexpr = STACK or not UNROLL
    m = filled(ROWS * L, tl.full([N], float("-inf"), tl.float32))
    z = filled(ROWS * L, tl.zeros([N], tl.float32))
    acc = filled(ROWS * L if split else ROWS, tl.zeros([N, DP], tl.float32))
    if UNROLL:
        m, z, acc = _attend(
            m, z, acc, 0, scores, values, key_mask, tables, y0, x0, h, channel,
            H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
            KW, HP, KH, KW, SY, L, ROWS, D, DP, BIASED, SCALED, MASKED, split,
        )  # fmt: skip
    else:
        for tx in range(KW):
            m, z, acc = _attend(
                m, z, acc, tx, scores, values, key_mask, tables, y0, x0 + tx, h, channel,
                H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
                1, HP, KH, KW, SY, L, ROWS, D, DP, BIASED, SCALED, MASKED, split,
            )  # fmt: skip

    per: tl.constexpr = L if STACK else 1
    lse_at = ()
    out_at = ()
    for r in tl.static_range(ROWS):
        pixel = batch * (OH * OW * HEADS) + (oy + r) * (OW * HEADS)
        for l in tl.static_range(L):
            lse_at = lse_at + (lse_out + (pixel * L + l) + (ox * HEADS + h) * L,)
        for l in tl.static_range(per):
            out_at = out_at + (out + (pixel * per + l * HEADS) * D + ((ox * (per * HEADS * D))[:, None] + channel),)
    for _ in range(one_turn(H)):
        for r in tl.static_range(ROWS):
            valid = lane_mask(block, OW, HEADS, oy + r < OH, N)
            if split:
                total = tl.zeros_like(acc[0])
            for l in tl.static_range(L):
                sum_l = z[r * L + l]
                # As above, of a window with nothing to attend to.
                low = tl.where(m[r * L + l] == float("-inf"), 0.0, m[r * L + l] * LOG2E)
                lse = tl.where(sum_l == 0.0, float("inf"), low + log2(sum_l))
                tl.store(lse_at[r * L + l], lse, mask=valid)
                if split:
                    part = acc[r * L + l] * tl.where(sum_l == 0.0, 0.0, reciprocal(sum_l))[:, None]
                    if STACK:
                        store_channels(out_at[r * L + l], part, valid, D, DP)
                    else:
                        total += part
            if not STACK:
                if not split:
                    total = acc[r]
                store_channels(out_at[r], total, valid, D, DP)
        lse_at = for_next_turn(lse_at, H)
        out_at = for_next_turn(out_at, H)


@triton.jit
def _delta_taps(
    sums, g, lse, table_at, at, value_at, mask_at, y0, x, H, W,
    KH: tl.constexpr, SY: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, STACK: tl.constexpr,
):  # fmt: skip
    """The body of `_delta_columns`' loop."""
    count: tl.constexpr = (ROWS - 1) * SY + KH
    group: tl.constexpr = (BIASED + SCALED) * L
    b = load_table(table_at, BIASED, 0, KH, L, group)
    w = load_table(table_at, SCALED, BIASED * L, KH, L, group)
    for c in tl.static_range(count):
        s = logits(at, mask_at, c, y0 + c, x, H, W, MASKED, L)
        v = load_channels(value_at[c], D, DP)
        for r in tl.static_range(ROWS):
            if c >= r * SY and c < r * SY + KH:
                if not STACK:
                    gv = tl.sum(g[r] * v, axis=1)
                for l in tl.static_range(L):
                    if STACK:
                        gv = tl.sum(g[r * L + l] * v, axis=1)
                    logit = s[l]
                    if BIASED:
                        logit += b[(c - r * SY) * L + l]
                    p = tl.exp2(logit * LOG2E - lse[r * L + l])
                    if SCALED:
                        p = p * w[(c - r * SY) * L + l]
                    sums = sums[: r * L + l] + (sums[r * L + l] + p * gv,) + sums[r * L + l + 1 :]
    return sums


@triton.jit
def _delta_columns(
    sums, g, lse, tx, scores, values, key_mask, tables, y0, x, h, channel,
    H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
    COLS: tl.constexpr, HP: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, L: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr,
    MASKED: tl.constexpr, STACK: tl.constexpr,
):  # fmt: skip
    """The windows' Σ p·scale·(g·v) so far, over columns tx … tx + COLS − 1 of their taps too, the first of which lies at x."""
    count: tl.constexpr = (ROWS - 1) * SY + KH
    group: tl.constexpr = (BIASED + SCALED) * L
    for j in tl.static_range(COLS):
        xc = clamp(x + j, W)
        table_at = table_pointers(tables, h, tx + j, 1, HP, KH, KW, group)
        at = score_pointers(scores, xc * ss_x + h, y0, H, ss_y, HEADS, count, L)
        value_at = row_pointers(values, (xc * vs_x)[:, None] + channel, y0, H, vs_y, count)
        mask_at = row_pointers(key_mask, xc * ms_x, y0, H, ms_y, count if MASKED else 0)
        for _ in range(one_turn(H)):
            sums = _delta_taps(
                sums, g, lse, table_at, at, value_at, mask_at, y0, x + j, H, W,
                KH, SY, L, ROWS, D, DP, BIASED, SCALED, MASKED, STACK,
            )  # fmt: skip
            at = for_next_turn(at, H)
            table_at = for_next_turn(table_at, H)
            value_at = for_next_turn(value_at, H)
            mask_at = for_next_turn(mask_at, H)
    return sums


@triton.jit(
    do_not_specialize=[
        "H", "W", "OH", "OW", "HEADS", "ss_b", "ss_y", "ss_x", "vs_b", "vs_y", "vs_x", "ms_b", "ms_y", "ms_x",
    ],
    do_not_specialize_on_alignment=["scores", "key_mask"],
)  # fmt: skip
def delta(
    scores, values, tables, key_mask, grad, lse_in, delta_out,
    H, W, OH, OW, HEADS,
    ss_b, ss_y, ss_x, vs_b, vs_y, vs_x, ms_b, ms_y, ms_x,
    ALIGN: tl.constexpr, HP: tl.constexpr, L: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, STACK: tl.constexpr,
):  # fmt: skip
    """Per window and query δ = Σ_n p_n·scale_n·(g·v_n), which each of the window's logit gradients subtracts."""
    block = tl.program_id(0)
    oy = tl.program_id(1) * ROWS
    batch = tl.program_id(2).to(tl.int64)
    ox, h = lanes(block, OW, HEADS, N)
    channel = channels(h, D, DP)
    vs_y *= ALIGN
    vs_x *= ALIGN
    scores += batch * ss_b
    values += batch * vs_b * ALIGN
    key_mask += batch * ms_b
    y0 = oy * SY - (KH - 1) // 2
    x0 = ox * SX - (KW - 1) // 2

    per: tl.constexpr = L if STACK else 1
    windows = batch * (OH * OW * HEADS)
    grad += windows * (per * D)
    lse_in += windows * L
    delta_out += windows * L
    state = (ox * HEADS + h) * L
    g_at = ()
    lse_at = ()
    delta_at = ()
    for r in tl.static_range(ROWS):
        row = tl.minimum(oy + r, OH - 1) * (OW * HEADS)
        for l in tl.static_range(per):
            g_at = g_at + (grad + ((ox * (per * HEADS * D) + (row * per + l * HEADS) * D)[:, None] + channel),)
        lse_at = lse_at + neighbours(lse_in + (state + row * L), L)
        for l in tl.static_range(L):
            delta_at = delta_at + (delta_out + (state + row * L) + l,)
    g = filled(ROWS * per, tl.zeros([N, DP], tl.float32))
    lse = filled(ROWS * L, tl.zeros([N], tl.float32))
    for _ in range(one_turn(H)):
        g = ()
        for i in tl.static_range(ROWS * per):
            g = g + (load_channels(g_at[i], D, DP),)
        lse = ()
        for r in tl.static_range(ROWS):
            lse = lse + load_neighbours(lse_at, r, L)
        g_at = for_next_turn(g_at, H)
        lse_at = for_next_turn(lse_at, H)

    sums = filled(ROWS * L, tl.zeros([N], tl.float32))
    if UNROLL:
        sums = _delta_columns(
            sums, g, lse, 0, scores, values, key_mask, tables, y0, x0, h, channel,
            H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
            KW, HP, KH, KW, SY, L, ROWS, D, DP, BIASED, SCALED, MASKED, STACK,
        )  # fmt: skip
    else:
        for tx in range(KW):
            sums = _delta_columns(
                sums, g, lse, tx, scores, values, key_mask, tables, y0, x0 + tx, h, channel,
                H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
                1, HP, KH, KW, SY, L, ROWS, D, DP, BIASED, SCALED, MASKED, STACK,
            )  # fmt: skip
    for _ in range(one_turn(H)):
        for r in tl.static_range(ROWS):
            valid = lane_mask(block, OW, HEADS, oy + r < OH, N)
            for l in tl.static_range(L):
                tl.store(delta_at[r * L + l], sums[r * L + l], mask=valid)
        delta_at = for_next_turn(delta_at, H)
