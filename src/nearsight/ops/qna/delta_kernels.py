"""QnA's gradients in Triton, first kernel: δ of every window and query. Letters and lanes: `lanes.py`."""
# mypy: ignore-errors
# ruff: noqa: E741

import triton
import triton.language as tl

from nearsight.ops.early_kernels import begin
from nearsight.ops.qna.lanes import (
    LOG2E,
    channels,
    column_pointers,
    filled,
    for_next_turn,
    image,
    lane_mask,
    lanes,
    load_channels,
    load_neighbours,
    load_table,
    logits,
    neighbours,
    one_turn,
    piece,
    store_neighbours,
)
from nearsight.ops.qna.powers import RANGE, powers, reference

__all__ = ["delta"]


@triton.jit
def _taps(
    sums, g, lse, table_at, at, value_at, mask_at, y0, x, H, W,
    KH: tl.constexpr, SY: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, STACK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The body of `_columns`' loop."""
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
                    p = tl.exp2((logit - lse[r * L + l]) * LOG2E if PARTS == 2 else logit * LOG2E - lse[r * L + l])
                    if SCALED:
                        p = p * w[(c - r * SY) * L + l]
                    sums = sums[: r * L + l] + (sums[r * L + l] + p * gv,) + sums[r * L + l + 1 :]
    return sums


@triton.jit
def _shared_taps(
    sums, g, ref, table_at, at, value_at, y0, x, H, W,
    KH: tl.constexpr, SY: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """The body of `_columns`' loop, by exponentials once per pixel: Σ power·exp(bias)·scale·(g·v)."""
    count: tl.constexpr = (ROWS - 1) * SY + KH
    w = load_table(table_at, G > 0, G - L, KH, L, G)
    for c in tl.static_range(count):
        e = powers(at[c * L : (c + 1) * L], y0 + c, x, H, W, ref, 1, L)
        v = load_channels(value_at[c], D, DP)
        for r in tl.static_range(ROWS):
            if c >= r * SY and c < r * SY + KH:
                gv = tl.sum(g[r] * v, axis=1)
                for l in tl.static_range(L):
                    power = e[l]
                    if G > 0:
                        power = power * w[(c - r * SY) * L + l]
                    sums = sums[: r * L + l] + (sums[r * L + l] + power * gv,) + sums[r * L + l + 1 :]
    return sums


@triton.jit
def _columns(
    sums, g, level, tx, scores, values, key_mask, tables, y0, x, h, channel,
    H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
    COLS: tl.constexpr, HP: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, L: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr,
    MASKED: tl.constexpr, STACK: tl.constexpr, SHARED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The windows' Σ p·scale·(g·v) so far, over KH taps of columns tx … tx + COLS − 1 of theirs too.

    The first of these lies at (y0, x) and first in `tables`.

    `level` is the windows' log-sum-exp; with PARTS = 2 their largest logit, if SHARED the thread's reference, and p is then not
    yet divided by the windows' sums.
    """
    for j in tl.static_range(COLS):
        # No constant, so that Triton compiles what it calls once for all columns.
        column = tx + j
        table_at, at, value_at, mask_at = column_pointers(
            scores, values, key_mask, tables, column, x + j, y0, h, channel, H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
            1, HP, KH, KW, (ROWS - 1) * SY + KH, L, (BIASED + SCALED) * L, MASKED,
        )  # fmt: skip
        for _ in range(one_turn(H)):
            if SHARED:
                sums = _shared_taps(
                    sums, g, level, table_at, at, value_at, y0, x + j, H, W,
                    KH, SY, L, ROWS, D, DP, (BIASED + SCALED) * L,
                )  # fmt: skip
            else:
                sums = _taps(
                    sums, g, level, table_at, at, value_at, mask_at, y0, x + j, H, W,
                    KH, SY, L, ROWS, D, DP, BIASED, SCALED, MASKED, STACK, PARTS,
                )  # fmt: skip
            at = for_next_turn(at, H)
            table_at = for_next_turn(table_at, H)
            value_at = for_next_turn(value_at, H)
            mask_at = for_next_turn(mask_at, H)
    return sums


@triton.jit
def _pieces(
    sums, g, level, scores, values, key_mask, tables, y0, x0, h, channel,
    H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
    FIRST: tl.constexpr, TAPS: tl.constexpr, PIECES: tl.constexpr, HP: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr,
    L: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr,
    MASKED: tl.constexpr, STACK: tl.constexpr, SHARED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """As `_columns`, of every column the PIECES of TAPS taps from row FIRST on."""
    for i in range(KW * PIECES):
        tx, ty = piece(i, FIRST, TAPS, PIECES)
        sums = _columns(
            sums, g, level, tx, scores, values, key_mask, tables + ty * (KW * HP * ((BIASED + SCALED) * L)), y0 + ty, x0 + tx,
            h, channel, H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
            1, HP, TAPS, KW, SY, L, ROWS, D, DP, BIASED, SCALED, MASKED, STACK, SHARED, PARTS,
        )  # fmt: skip
    return sums


@triton.jit
def _store_rows(
    far, delta_at, sums, level, lse, rest, block, oy, OH, OW, HEADS,
    L: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, SHARED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Divide the sums by the windows' and store them; `far` where a window is too far from its reference."""
    for r in tl.static_range(ROWS):
        valid = lane_mask(block, OW, HEADS, oy + r < OH, N)
        results = ()
        for l in tl.static_range(L):
            result = sums[r * L + l]
            if SHARED:
                over = tl.exp2(level[l] - lse[r * L + l])
                result = result * over
                # Neither where it is NaN.
                near = (over > 1.0 / RANGE) & (over < RANGE) & (tl.abs(result) < float("inf"))
                far = tl.where(valid & (near == 0), 1, far)
            elif PARTS == 2:
                result = result * rest[r * L + l]
            results = results + (result,)
        store_neighbours(delta_at, r, results, valid)
    return far


@triton.jit
def _rows(
    scores, values, tables, key_mask, grad, lse_in, delta_out, block, oy, ox, h, channel, y0, x0,
    H, W, OH, OW, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
    HP: tl.constexpr, L: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, BAND: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, STACK: tl.constexpr, SHARED: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """δ of ROWS rows of windows; whether one is too far from its thread's reference for SHARED exponentials."""
    per: tl.constexpr = L if STACK else 1
    wide: tl.constexpr = PARTS * L
    state = (ox * HEADS + h) * L
    g_at = ()
    lse_at = ()
    delta_at = ()
    for r in tl.static_range(ROWS):
        row = tl.minimum(oy + r, OH - 1) * (OW * HEADS)
        for l in tl.static_range(per):
            g_at = g_at + (grad + ((ox * (per * HEADS * D) + (row * per + l * HEADS) * D)[:, None] + channel),)
        lse_at = lse_at + neighbours(lse_in + (state + row * L) * PARTS, wide)
        delta_at = delta_at + neighbours(delta_out + (state + row * L), L)
    g = filled(ROWS * per, tl.zeros([N, DP], tl.float32))
    lse = filled(ROWS * L, tl.zeros([N], tl.float32))
    rest = lse
    for _ in range(one_turn(H)):
        g = ()
        for i in tl.static_range(ROWS * per):
            g = g + (load_channels(g_at[i], D, DP),)
        lse = ()
        rest = ()
        for r in tl.static_range(ROWS):
            seen = load_neighbours(lse_at, r, wide)
            lse = lse + seen[:L]
            rest = rest + seen[wide - L :]
        g_at = for_next_turn(g_at, H)
        lse_at = for_next_turn(lse_at, H)
    level = lse
    if SHARED:
        tables += KH * KW * HP * ((BIASED + SCALED) * L)
        level = reference(scores, ox * SX, oy * SY, h, H, W, HEADS, ss_y, ss_x, (ROWS - 1) * SY + 1, L, N)
    sums = filled(ROWS * L, tl.zeros([N], tl.float32))
    if UNROLL:
        sums = _columns(
            sums, g, level, 0, scores, values, key_mask, tables, y0, x0, h, channel,
            H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
            KW, HP, KH, KW, SY, L, ROWS, D, DP, BIASED, SCALED, MASKED, STACK, SHARED, PARTS,
        )  # fmt: skip
    else:
        sums = _pieces(
            sums, g, level, scores, values, key_mask, tables, y0, x0, h, channel,
            H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
            0, BAND, KH // BAND, HP, KW, SY, L, ROWS, D, DP, BIASED, SCALED, MASKED, STACK, SHARED, PARTS,
        )  # fmt: skip
        if KH % BAND > 0:
            sums = _pieces(
                sums, g, level, scores, values, key_mask, tables, y0, x0, h, channel,
                H, W, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
                KH - KH % BAND, KH % BAND, 1, HP, KW, SY, L, ROWS, D, DP, BIASED, SCALED, MASKED, STACK, SHARED, PARTS,
            )  # fmt: skip
    far = tl.zeros([N], tl.int32)
    for _ in range(one_turn(H)):
        far = _store_rows(far, delta_at, sums, level, lse, rest, block, oy, OH, OW, HEADS, L, N, ROWS, SHARED, PARTS)
        delta_at = for_next_turn(delta_at, H)
    return tl.max(far, axis=0) > 0


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
    N: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, BAND: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, STACK: tl.constexpr, SHARED: tl.constexpr,
    PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Per window and query δ = Σ_n p_n·scale_n·(g·v_n), which each of the window's logit gradients subtracts."""
    tl.static_assert(not SHARED or PARTS == 1)
    begin(EARLY)
    block = tl.program_id(0)
    oy = tl.program_id(1) * ROWS
    # From the last image on: the gradients' kernel, which comes next, then finds the first ones' tensors in the cache.
    batch = (tl.num_programs(2) - 1 - tl.program_id(2)).to(tl.int64)
    ox, h = lanes(block, OW, HEADS, N)
    channel = channels(h, D, DP)
    scores, values, key_mask = image(scores, values, key_mask, batch, ss_b, vs_b, ms_b, ALIGN)
    vs_y *= ALIGN
    vs_x *= ALIGN
    windows = batch * (OH * OW * HEADS)
    grad += windows * (D * L if STACK else D)
    lse_in += windows * (PARTS * L)
    delta_out += windows * L
    y0 = oy * SY - (KH - 1) // 2
    x0 = ox * SX - (KW - 1) // 2
    far = _rows(
        scores, values, tables, key_mask, grad, lse_in, delta_out, block, oy, ox, h, channel, y0, x0,
        H, W, OH, OW, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
        HP, L, D, DP, KH, KW, SY, SX, N, ROWS, UNROLL, BAND, BIASED, SCALED, MASKED, STACK, SHARED, PARTS,
    )  # fmt: skip
    if SHARED:
        # Then once more, a row at a time.
        for r in range(tl.where(far, ROWS, 0)):
            _rows(
                scores, values, tables, key_mask, grad, lse_in, delta_out, block, oy + r, ox, h, channel, y0 + r * SY, x0,
                H, W, OH, OW, HEADS, ss_y, ss_x, vs_y, vs_x, ms_y, ms_x,
                HP, L, D, DP, KH, KW, SY, SX, N, 1, False, BAND, BIASED, SCALED, MASKED, STACK, False, PARTS,
            )  # fmt: skip
