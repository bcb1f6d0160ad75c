"""QnA's aggregation in Triton: the forward kernel, and the one that packs the tables.

The rows of a program are unrolled by hand (tuples of tiles), so a loaded pixel serves every window of the column it lies in.
Coordinates outside the image are clamped and their logits set to −inf: loads need no masks. Exponentials are powers of two; the
saved log-sum-exp is in base 2 (LOG2E times the natural one). In float32 it is two numbers (PARTS = 2), the largest logit and the
reciprocal of the sum relative to it: one would be rounded like a number of its size, and every probability with it. Differences
from the largest are then taken before they are multiplied, as exact as the logits. Letters and lanes: `lanes.py`.
"""
# mypy: ignore-errors
# ruff: noqa: E741

import triton
import triton.language as tl

from nearsight.ops.arithmetic.kernels import log2, reciprocal
from nearsight.ops.early_kernels import begin
from nearsight.ops.qna.lanes import (
    LOG2E,
    channels,
    column_pointers,
    fetch_pixels,
    filled,
    for_next_turn,
    image,
    lane_mask,
    lanes,
    load_channels,
    load_table,
    logits,
    neighbours,
    one_turn,
    piece,
    store_channels,
    store_neighbours,
)
from nearsight.ops.qna.powers import LARGEST_BIAS, LARGEST_SCALE, RANGE, powers, reference

__all__ = ["forward", "pack"]


@triton.jit(do_not_specialize=["HEADS"], do_not_specialize_on_alignment=["bias", "scale"])
def pack(
    bias, scale, tables, HEADS,
    L: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr, HP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The tables [taps, L, HEADS] as one [taps, HP, bias and scale, L] in float32, then again as factors of `powers`.

    What a tap's weights take is then one load, and every tap lies at a constant distance from the first. The factors are
    exp(bias) and exp(bias)·scale, NaN where a bias or scale is too large for them.
    """
    begin(EARLY)
    tap = tl.program_id(0)
    h = tl.arange(0, HP)
    group: tl.constexpr = (BIASED + SCALED) * L
    at = tables + (tap * HP + h) * group
    factor_at = at + tl.num_programs(0) * (HP * group)
    for l in tl.static_range(L):
        factor = tl.full([HP], 1.0, tl.float32)
        if BIASED:
            b = tl.load(bias + (tap * L + l) * HEADS + h, mask=h < HEADS, other=0.0).to(tl.float32)
            factor = tl.where(tl.abs(b) < LARGEST_BIAS, tl.exp2(b * LOG2E), float("nan"))
            tl.store(at + l, b)
        if SCALED:
            w = tl.load(scale + (tap * L + l) * HEADS + h, mask=h < HEADS, other=0.0).to(tl.float32)
            factor = tl.where(tl.abs(w) < LARGEST_SCALE, factor, float("nan"))
            tl.store(at + BIASED * L + l, w)
            tl.store(factor_at + BIASED * L + l, factor * w)
        if BIASED:
            tl.store(factor_at + l, factor)


@triton.jit
def _attend_taps(
    m, z, acc, table_at, at, value_at, mask_at, y0, x, H, W,
    COLS: tl.constexpr, KH: tl.constexpr, ALL: tl.constexpr, SY: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr,
    SPLIT: tl.constexpr, PARTS: tl.constexpr,
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
            if PARTS == 2:
                low = tl.where(top == float("-inf"), 0.0, top)
                fade = tl.exp2((m[r * L + l] - low) * LOG2E)
            else:
                low = tl.where(top == float("-inf"), 0.0, top * LOG2E)
                fade = tl.exp2(m[r * L + l] * LOG2E - low)
            total = z[r * L + l] * fade
            for i in tl.static_range(COLS * KH):
                x_i = s[(i // KH * count + r * SY + i % KH) * L + l]
                if BIASED:
                    x_i += b[i * L + l]
                weight = tl.exp2((x_i - low) * LOG2E if PARTS == 2 else x_i * LOG2E - low)
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
            if ALL:
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
    SPLIT: tl.constexpr, PARTS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """KH taps of columns tx … tx + COLS − 1 of the windows', the first of which lies at (y0, x) and first in `tables`.

    Maxima m, Σ exp(logit − m) and Σ exp(logit − m)·scale·value so far, SPLIT by query. ALL taps at once need nothing from
    before; not SPLIT, the values' sums are then divided already and summed over the queries.
    """
    count: tl.constexpr = (ROWS - 1) * SY + KH
    group: tl.constexpr = (BIASED + SCALED) * L
    table_at, at, value_at, mask_at = column_pointers(
        scores, values, key_mask, tables, tx, x, y0, h, channel, H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
        COLS, HP, KH, KW, count, L, group, MASKED,
    )  # fmt: skip
    for _ in range(one_turn(H)):
        m, z, acc = _attend_taps(
            m, z, acc, table_at, at, value_at, mask_at, y0, x, H, W,
            COLS, KH, ALL, SY, L, ROWS, D, DP, BIASED, SCALED, MASKED, SPLIT, PARTS,
        )  # fmt: skip
        at = for_next_turn(at, H)
        table_at = for_next_turn(table_at, H)
        value_at = for_next_turn(value_at, H)
        mask_at = for_next_turn(mask_at, H)
    return m, z, acc


@triton.jit
def _attend_pieces(
    m, z, acc, scores, values, key_mask, tables, y0, x0, h, channel,
    H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
    FIRST: tl.constexpr, TAPS: tl.constexpr, PIECES: tl.constexpr, HP: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr,
    L: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr,
    MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """As `_attend`, of every column the PIECES of TAPS taps from row FIRST on."""
    for i in range(KW * PIECES):
        tx, ty = piece(i, FIRST, TAPS, PIECES)
        m, z, acc = _attend(
            m, z, acc, tx, scores, values, key_mask, tables + ty * (KW * HP * ((BIASED + SCALED) * L)), y0 + ty, x0 + tx,
            h, channel, H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
            1, HP, TAPS, KW, SY, L, ROWS, D, DP, BIASED, SCALED, MASKED, True, PARTS, False,
        )  # fmt: skip
    return m, z, acc


@triton.jit
def _forward_exact(
    scores, values, tables, key_mask, out, lse_out, block, oy, batch, ox, h, channel, y0, x0,
    H, W, OH, OW, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
    HP: tl.constexpr, L: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, BAND: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, STACK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of windows, each reduced by its own maximum."""
    split: tl.constexpr = STACK or not UNROLL
    m = filled(ROWS * L, tl.full([N], float("-inf"), tl.float32))
    z = filled(ROWS * L, tl.zeros([N], tl.float32))
    acc = filled(ROWS * L if split else ROWS, tl.zeros([N, DP], tl.float32))
    if UNROLL:
        m, z, acc = _attend(
            m, z, acc, 0, scores, values, key_mask, tables, y0, x0, h, channel,
            H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
            KW, HP, KH, KW, SY, L, ROWS, D, DP, BIASED, SCALED, MASKED, split, PARTS, True,
        )  # fmt: skip
    else:
        m, z, acc = _attend_pieces(
            m, z, acc, scores, values, key_mask, tables, y0, x0, h, channel,
            H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
            0, BAND, KH // BAND, HP, KW, SY, L, ROWS, D, DP, BIASED, SCALED, MASKED, PARTS,
        )  # fmt: skip
        if KH % BAND > 0:
            m, z, acc = _attend_pieces(
                m, z, acc, scores, values, key_mask, tables, y0, x0, h, channel,
                H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
                KH - KH % BAND, KH % BAND, 1, HP, KW, SY, L, ROWS, D, DP, BIASED, SCALED, MASKED, PARTS,
            )  # fmt: skip

    per: tl.constexpr = L if STACK else 1
    wide: tl.constexpr = PARTS * L
    lse_at = ()
    out_at = ()
    for r in tl.static_range(ROWS):
        pixel = batch * (OH * OW * HEADS) + (oy + r) * (OW * HEADS)
        lse_at = lse_at + neighbours(lse_out + pixel * wide + (ox * HEADS + h) * wide, wide)
        for l in tl.static_range(per):
            out_at = out_at + (out + (pixel * per + l * HEADS) * D + ((ox * (per * HEADS * D))[:, None] + channel),)
    for _ in range(one_turn(H)):
        for r in tl.static_range(ROWS):
            valid = lane_mask(block, OW, HEADS, oy + r < OH, N)
            if split:
                total = tl.zeros_like(acc[0])
            lse = ()
            over = ()
            for l in tl.static_range(L):
                sum_l = z[r * L + l]
                if PARTS == 2:
                    lse = lse + (tl.where(sum_l == 0.0, float("inf"), m[r * L + l]),)
                    over = over + (tl.where(sum_l == 0.0, 0.0, reciprocal(sum_l)),)
                else:
                    # As above, of a window with nothing to attend to.
                    low = tl.where(m[r * L + l] == float("-inf"), 0.0, m[r * L + l] * LOG2E)
                    lse = lse + (tl.where(sum_l == 0.0, float("inf"), low + log2(sum_l)),)
                if split:
                    part = acc[r * L + l] * tl.where(sum_l == 0.0, 0.0, reciprocal(sum_l))[:, None]
                    if STACK:
                        store_channels(out_at[r * L + l], part, valid, D, DP)
                    else:
                        total += part
            store_neighbours(lse_at, r, lse + over, valid)
            if not STACK:
                if not split:
                    total = acc[r]
                store_channels(out_at[r], total, valid, D, DP)
        lse_at = for_next_turn(lse_at, H)
        out_at = for_next_turn(out_at, H)


@triton.jit
def _add_totals(z, e, b, KH: tl.constexpr, SY: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr, BIASED: tl.constexpr):
    """The windows' Σ power·exp(bias) so far, over one column of taps more."""
    sums = ()
    for r in tl.static_range(ROWS):
        for l in tl.static_range(L):
            total = z[r * L + l]
            for ty in tl.static_range(KH):
                power = e[(r * SY + ty) * L + l]
                if BIASED:
                    power = power * b[ty * L + l]
                total += power
            sums = sums + (total,)
    return sums


@triton.jit
def _add_values(
    acc, e, w, over, value_at, KH: tl.constexpr, SY: tl.constexpr, L: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """The windows' Σ_l Σ power·exp(bias)·scale·value / z so far, over one column of taps more."""
    for c in tl.static_range((ROWS - 1) * SY + KH):
        v = load_channels(value_at[c], D, DP)
        for r in tl.static_range(ROWS):
            if c >= r * SY and c < r * SY + KH:
                weight = tl.zeros_like(e[0])
                for l in tl.static_range(L):
                    power = e[c * L + l]
                    if GIVEN:
                        power = power * w[(c - r * SY) * L + l]
                    weight += power * over[r * L + l]
                acc = acc[:r] + (acc[r] + weight[:, None] * v,) + acc[r + 1 :]
    return acc


@triton.jit
def _reciprocals(z):
    over = ()
    for i in tl.static_range(len(z)):
        over = over + (reciprocal(z[i]),)
    return over


@triton.jit
def _all_taps(
    z, acc, ref, table_at, at, value_at, y0, x0, H, W,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The windows' sums z and their values' over all taps, a column at a time, so that Triton compiles what it calls once."""
    count: tl.constexpr = (ROWS - 1) * SY + KH
    group: tl.constexpr = (BIASED + SCALED) * L
    given: tl.constexpr = BIASED or SCALED
    b = load_table(table_at, BIASED, 0, KW * KH, L, group)
    w = load_table(table_at, given, group - L, KW * KH, L, group)
    e = ()
    for j in tl.static_range(KW):
        e = e + powers(at[j * count * L : (j + 1) * count * L], y0, x0 + j, H, W, ref, count, L)
    for j in tl.static_range(KW):
        powers_j = e[j * count * L : (j + 1) * count * L]
        z = _add_totals(z, powers_j, b[j * KH * L : (j + 1) * KH * L], KH, SY, L, ROWS, BIASED)
    over = _reciprocals(z)
    for j in tl.static_range(KW):
        powers_j = e[j * count * L : (j + 1) * count * L]
        w_j, at_j = w[j * KH * L : (j + 1) * KH * L], value_at[j * count : (j + 1) * count]
        acc = _add_values(acc, powers_j, w_j, over, at_j, KH, SY, L, ROWS, D, DP, given)
    return z, acc


@triton.jit
def _store_rows(
    far, lse_at, out_at, z, acc, ref, block, oy, OH, OW, HEADS,
    N: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Store the windows' log-sum-exp and output; `far` where a window is too far from its reference."""
    for r in tl.static_range(ROWS):
        valid = lane_mask(block, OW, HEADS, oy + r < OH, N)
        lse = ()
        for l in tl.static_range(L):
            total = z[r * L + l]
            # Neither where it is NaN.
            near = (total > 1.0 / RANGE) & (total < RANGE)
            far = tl.where(valid & (near == 0), 1, far)
            lse = lse + (ref[l] + log2(total),)
        store_neighbours(lse_at, r, lse, valid)
        store_channels(out_at[r], acc[r], valid, D, DP)
    return far


@triton.jit
def _total_pieces(
    z, ref, scores, values, key_mask, tables, y0, x0, h, channel, H, W, HEADS, ss_y, ss_x, vs_y, vs_x,
    FIRST: tl.constexpr, TAPS: tl.constexpr, PIECES: tl.constexpr, HP: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr,
    L: tl.constexpr, ROWS: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The windows' Σ power·exp(bias) so far, over every column's PIECES of TAPS taps from row FIRST on too."""
    count: tl.constexpr = (ROWS - 1) * SY + TAPS
    group: tl.constexpr = (BIASED + SCALED) * L
    for i in range(KW * PIECES):
        tx, ty = piece(i, FIRST, TAPS, PIECES)
        table_at, at, _, _ = column_pointers(
            scores, values, key_mask, tables + ty * (KW * HP * group), tx, x0 + tx, y0 + ty, h, channel,
            H, W, HEADS, ss_y, ss_x, vs_y, vs_x, 0, 0, 1, HP, TAPS, KW, count, L, group, False,
        )  # fmt: skip
        for _ in range(one_turn(H)):
            b = load_table(table_at, BIASED, 0, TAPS, L, group)
            e = powers(at, y0 + ty, x0 + tx, H, W, ref, count, L)
            z = _add_totals(z, e, b, TAPS, SY, L, ROWS, BIASED)
            table_at = for_next_turn(table_at, H)
            at = for_next_turn(at, H)
    return z


@triton.jit
def _value_pieces(
    acc, over, ref, scores, values, key_mask, tables, y0, x0, h, channel, H, W, HEADS, ss_y, ss_x, vs_y, vs_x,
    FIRST: tl.constexpr, TAPS: tl.constexpr, PIECES: tl.constexpr, HP: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr,
    L: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The windows' Σ_l Σ power·exp(bias)·scale·value / z so far, over the same."""
    count: tl.constexpr = (ROWS - 1) * SY + TAPS
    group: tl.constexpr = (BIASED + SCALED) * L
    given: tl.constexpr = BIASED or SCALED
    for i in range(KW * PIECES):
        tx, ty = piece(i, FIRST, TAPS, PIECES)
        table_at, at, value_at, _ = column_pointers(
            scores, values, key_mask, tables + ty * (KW * HP * group), tx, x0 + tx, y0 + ty, h, channel,
            H, W, HEADS, ss_y, ss_x, vs_y, vs_x, 0, 0, 1, HP, TAPS, KW, count, L, group, False,
        )  # fmt: skip
        for _ in range(one_turn(H)):
            w = load_table(table_at, given, group - L, TAPS, L, group)
            e = powers(at, y0 + ty, x0 + tx, H, W, ref, count, L)
            acc = _add_values(acc, e, w, over, value_at, TAPS, SY, L, ROWS, D, DP, given)
            table_at = for_next_turn(table_at, H)
            at = for_next_turn(at, H)
            value_at = for_next_turn(value_at, H)
    return acc


@triton.jit
def _forward_shared(
    scores, values, tables, key_mask, out, lse_out, block, oy, batch, ox, h, channel, y0, x0,
    H, W, OH, OW, HEADS, ss_y, ss_x, vs_y, vs_x,
    HP: tl.constexpr, L: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, BAND: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """ROWS rows of windows by exponentials once per pixel; whether a window is too far from its thread's reference."""
    count: tl.constexpr = (ROWS - 1) * SY + KH
    group: tl.constexpr = (BIASED + SCALED) * L
    tables += KH * KW * HP * group
    ref = reference(scores, ox * SX, oy * SY, h, H, W, HEADS, ss_y, ss_x, (ROWS - 1) * SY + 1, L, N)
    z = filled(ROWS * L, tl.zeros([N], tl.float32))
    acc = filled(ROWS, tl.zeros([N, DP], tl.float32))
    if UNROLL:
        table_at, at, value_at, _ = column_pointers(
            scores, values, key_mask, tables, 0, x0, y0, h, channel, H, W, HEADS, ss_y, ss_x, vs_y, vs_x, 0, 0,
            KW, HP, KH, KW, count, L, group, False,
        )  # fmt: skip
        for _ in range(one_turn(H)):
            z, acc = _all_taps(
                z, acc, ref, table_at, at, value_at, y0, x0, H, W, KH, KW, SY, L, ROWS, D, DP, BIASED, SCALED
            )
            table_at = for_next_turn(table_at, H)
            at = for_next_turn(at, H)
            value_at = for_next_turn(value_at, H)
    else:
        # Twice over the scores: with the sums known, the queries' weights are added before they meet the values.
        z = _total_pieces(
            z, ref, scores, values, key_mask, tables, y0, x0, h, channel, H, W, HEADS, ss_y, ss_x, vs_y, vs_x,
            0, BAND, KH // BAND, HP, KW, SY, L, ROWS, BIASED, SCALED,
        )  # fmt: skip
        if KH % BAND > 0:
            z = _total_pieces(
                z, ref, scores, values, key_mask, tables, y0, x0, h, channel, H, W, HEADS, ss_y, ss_x, vs_y, vs_x,
                KH - KH % BAND, KH % BAND, 1, HP, KW, SY, L, ROWS, BIASED, SCALED,
            )  # fmt: skip
        over = _reciprocals(z)
        acc = _value_pieces(
            acc, over, ref, scores, values, key_mask, tables, y0, x0, h, channel, H, W, HEADS, ss_y, ss_x, vs_y, vs_x,
            0, BAND, KH // BAND, HP, KW, SY, L, ROWS, D, DP, BIASED, SCALED,
        )  # fmt: skip
        if KH % BAND > 0:
            acc = _value_pieces(
                acc, over, ref, scores, values, key_mask, tables, y0, x0, h, channel, H, W, HEADS, ss_y, ss_x, vs_y, vs_x,
                KH - KH % BAND, KH % BAND, 1, HP, KW, SY, L, ROWS, D, DP, BIASED, SCALED,
            )  # fmt: skip
    far = tl.zeros([N], tl.int32)
    lse_at = ()
    out_at = ()
    for r in tl.static_range(ROWS):
        pixel = batch * (OH * OW * HEADS) + (oy + r) * (OW * HEADS)
        lse_at = lse_at + neighbours(lse_out + pixel * L + (ox * HEADS + h) * L, L)
        out_at = out_at + (out + pixel * D + ((ox * (HEADS * D))[:, None] + channel),)
    for _ in range(one_turn(H)):
        far = _store_rows(far, lse_at, out_at, z, acc, ref, block, oy, OH, OW, HEADS, N, L, ROWS, D, DP)
        lse_at = for_next_turn(lse_at, H)
        out_at = for_next_turn(out_at, H)
    return tl.max(far, axis=0) > 0


@triton.jit(
    do_not_specialize=[
        "H", "W", "OH", "OW", "HEADS", "ss_b", "ss_y", "ss_x", "vs_b", "vs_y", "vs_x", "ms_b", "ms_y", "ms_x",
        "ahead",
    ],
    do_not_specialize_on_alignment=["scores", "key_mask"],
)  # fmt: skip
def forward(
    scores, values, tables, key_mask, out, lse_out,
    H, W, OH, OW, HEADS,
    ss_b, ss_y, ss_x, vs_b, vs_y, vs_x, ms_b, ms_y, ms_x, ahead,
    ALIGN: tl.constexpr, HP: tl.constexpr, L: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, BAND: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, STACK: tl.constexpr, SHARED: tl.constexpr,
    PARTS: tl.constexpr, FETCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Softmax over each window and its values' weighted sum; writes the output and the windows' log-sum-exp."""
    tl.static_assert(not SHARED or PARTS == 1)
    begin(EARLY)
    block = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    ox, h = lanes(block, OW, HEADS, N)
    channel = channels(h, D, DP)
    scores, values, key_mask = image(scores, values, key_mask, batch, ss_b, vs_b, ms_b, ALIGN)
    vs_y *= ALIGN
    vs_x *= ALIGN
    oy = tl.program_id(1) * ROWS
    y0 = oy * SY - (KH - 1) // 2
    x0 = ox * SX - (KW - 1) // 2
    if FETCH and tl.program_id(2) + ahead < tl.num_programs(2):
        # For the program that comes after this one, about.
        away = ahead.to(tl.int64)
        fetch_pixels(
            scores + away * ss_b, values + away * vs_b * ALIGN, oy * SY, ox * SX, h, H, HEADS, ss_y, ss_x, vs_y, vs_x,
            ROWS * SY, L, D,
        )  # fmt: skip
    if SHARED:
        far = _forward_shared(
            scores, values, tables, key_mask, out, lse_out, block, oy, batch, ox, h, channel, y0, x0,
            H, W, OH, OW, HEADS, ss_y, ss_x, vs_y, vs_x,
            HP, L, D, DP, KH, KW, SY, SX, N, ROWS, UNROLL, BAND, BIASED, SCALED,
        )  # fmt: skip
        # Then once more, a row at a time.
        for r in range(tl.where(far, ROWS, 0)):
            _forward_exact(
                scores, values, tables, key_mask, out, lse_out, block, oy + r, batch, ox, h, channel, y0 + r * SY, x0,
                H, W, OH, OW, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
                HP, L, D, DP, KH, KW, SY, N, 1, False, BAND, BIASED, SCALED, MASKED, STACK, PARTS,
            )  # fmt: skip
    else:
        _forward_exact(
            scores, values, tables, key_mask, out, lse_out, block, oy, batch, ox, h, channel, y0, x0,
            H, W, OH, OW, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
            HP, L, D, DP, KH, KW, SY, N, ROWS, UNROLL, BAND, BIASED, SCALED, MASKED, STACK, PARTS,
        )  # fmt: skip
