"""Triton kernels of global attention with two-dimensional relative positions. Equations and choices are in README.md.

Pixels are numbered row by row, i = y·W + x. q, k, v and their gradients are [B, n, …] with strides `_b` and `_n`, head h at h·D
(h·DV for values). Strides come as so many UNITs, so that the compiler knows what divides them. The position logits q·r lie as
[B·heads, H, n], by row of the key, and as [B·heads, n, pitch], by its column.
Logits are kept unscaled in the products; `unit` = scale·log₂e makes them exponents of 2.
In float32 LOGITS are plain products: what three TF32 ones leave out of a logit of some hundreds shows in every weight.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from nearsight.ops.arithmetic.kernels import dot, dot_add, exp2, reciprocal

__all__ = ["forward", "positions"]

OUTSIDE = tl.constexpr(-1e30)  # the logit of a column or row that is not there
# Half of what the exponents of float32 hold, in powers of 2, with room for small weights beside the largest.
CLOSE = tl.constexpr(40.0)
MASKED = tl.constexpr(
    -1e5
)  # added where key_mask is False: its exponential is 0, and an image of nothing else stays finite


@triton.jit
def _tile(base, at, channel, stride, use, CHANNELS: tl.constexpr):
    """Pixels `at` with their channels, [pixels, padded channels], 0 where there is none."""
    return tl.load(
        base + at[:, None] * stride + channel[None, :], mask=use[:, None] & (channel < CHANNELS)[None, :], other=0.0
    )


@triton.jit
def _line(line, H, W, LB: tl.constexpr, OF_ROWS: tl.constexpr):
    """The pixels of a line of the map, a row where logits are OF_ROWS and else a column, which of them are there, and how many
    lines there are, which is how many keys a table tells apart."""
    t = tl.arange(0, LB)
    if OF_ROWS:
        pixel, use, lines = line * W + t, t < W, H
    else:
        pixel, use, lines = t * W + line, t < H, W
    return pixel, use, lines


@triton.jit(do_not_specialize=["batch", "span"])
def positions(
    q_ptr,
    k_ptr,
    table_ptr,
    logit_ptr,
    norm_ptr,
    units_b,
    units_n,
    table_h,
    batch,
    heads,
    H,
    W,
    n,
    pitch,
    span,
    D: tl.constexpr,
    DP: tl.constexpr,
    LB: tl.constexpr,
    KB: tl.constexpr,
    OF_ROWS: tl.constexpr,
    BOUND: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """q·r of one line of queries of `span` images: of a row with every row of the map, or of a column with every column.

    All queries of a line see the keys through the same window of the table: no product is thrown away, no store is skewed.
    For a BOUND of the logits also the largest k·k of the row, [B·heads, H].
    """
    lines = tl.num_programs(0) // heads
    line = tl.program_id(0) % lines
    h = tl.program_id(0) // lines
    first = tl.program_id(1) * span
    dtype = q_ptr.dtype.element_ty
    LOGITS: tl.constexpr = "ieee" if PRECISION == "tf32x3" else PRECISION
    q_b = units_b * UNIT
    q_n = units_n * UNIT
    d = tl.arange(0, DP)
    key = tl.arange(0, KB)
    pixel, use, keys = _line(line, H, W, LB, OF_ROWS)
    # Line l sees line m of the map through embedding m − l, which the table holds at m − l + lines − 1.
    window = _tile(table_ptr + h * table_h + (keys - 1 - line) * D, key, d, D, key < keys, D).to(dtype)
    image = first.to(tl.int64)
    for _ in range(first, tl.minimum(first + span, batch)):
        q = _tile(q_ptr + image * q_b + h * D, pixel, d, q_n, use, D)
        at = (image * heads + h) * n
        if OF_ROWS:
            to = logit_ptr + at * H + key[:, None] * n + pixel[None, :]
            tl.store(to, dot(window, tl.trans(q), LOGITS).to(dtype), mask=(key < H)[:, None] & use[None, :])
        else:
            to = logit_ptr + at * pitch + pixel[:, None] * pitch + key[None, :]
            # Beyond the last column zeros, up to the pitch: whoever multiplies them by 0 may read them.
            logits = dot(q, tl.trans(window), LOGITS).to(dtype)
            tl.store(to, logits, mask=use[:, None] & (key < pitch)[None, :])
        if BOUND:
            k = _tile(k_ptr + image * q_b + h * D, pixel, d, q_n, use, D).to(tl.float32)
            tl.store(norm_ptr + (image * heads + h) * H + line, tl.max(tl.sum(k * k, 1), 0))
        image += 1


@triton.jit
def _of_rows(by_row_ptr, i, y, H, n, ROWS: tl.constexpr):
    """The queries' logits by row of the key, of rows y on."""
    rows = ()
    for r in tl.static_range(ROWS):
        at = (y + r) * n + i
        rows = rows + (tl.load(by_row_ptr + at, mask=(i < n) & (at < H * n), other=OUTSIDE),)
    return rows


@triton.jit
def _logits_of_row(
    q, column, x, y, d, k_ptr, mask_ptr, q_n, W, n, D: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr
):
    """Keys x of row y: themselves, and the queries' logits of them but for the row's terms."""
    LOGITS: tl.constexpr = "ieee" if PRECISION == "tf32x3" else PRECISION
    j = y * W + x
    k = _tile(k_ptr, j, d, q_n, (x < W) & (j < n), D)
    s = dot_add(q, tl.trans(k), column, LOGITS)
    if HAS_MASK:
        allowed = tl.load(mask_ptr + j, mask=(x < W) & (j < n), other=1)
        s += tl.where(allowed != 0, 0.0, MASKED)[None, :]
    return k, s


@triton.jit
def _walk(
    q,
    i,
    k_ptr,
    v_ptr,
    by_row_ptr,
    by_col_ptr,
    mask_ptr,
    largest,
    q_n,
    H,
    W,
    n,
    pitch,
    unit,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    M: tl.constexpr,
    WB: tl.constexpr,
    ROWS: tl.constexpr,
    EXACT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Σ p·v, Σ p and the logit where p is 1: `largest`, unless EXACT, which takes it along from −∞."""
    dtype = q.dtype
    d = tl.arange(0, DP)
    e = tl.arange(0, DVP)
    ones = tl.full((WB, 8), 1.0, dtype)
    out = tl.zeros((M, DVP), tl.float32)
    total = tl.zeros((M, 8), tl.float32)
    for x0 in range(0, W, WB):
        x = x0 + tl.arange(0, WB)
        there = (i < n)[:, None] & (x < W)[None, :]
        column = tl.load(by_col_ptr + i[:, None] * pitch + x[None, :], mask=there, other=OUTSIDE).to(tl.float32)
        rows = _of_rows(by_row_ptr, i, 0, H, n, ROWS)
        for y0 in range(0, H, ROWS):
            logits = ()
            addend = ()
            best = largest
            for r in tl.static_range(ROWS):
                _, s = _logits_of_row(q, column, x, y0 + r, d, k_ptr, mask_ptr, q_n, W, n, D, HAS_MASK, PRECISION)
                a = rows[r].to(tl.float32)
                if EXACT:
                    best = tl.maximum(best, tl.max(s, 1) + a)
                logits = logits + (s,)
                addend = addend + (a,)
            # Too narrow for the compiler to fetch them a step before they are needed.
            rows = _of_rows(by_row_ptr, i, y0 + ROWS, H, n, ROWS)
            if EXACT:
                fade = exp2((largest - best) * unit)
                largest = best
                out *= fade[:, None]
                total *= fade[:, None]
            for r in tl.static_range(ROWS):
                j = (y0 + r) * W + x
                v = _tile(v_ptr, j, e, q_n, (x < W) & (j < n), DV)
                if EXACT:
                    # The difference first: logits may be large.
                    p = exp2((logits[r] + (addend[r] - best)[:, None]) * unit).to(dtype)
                else:
                    p = exp2(logits[r] * unit + ((addend[r] - best) * unit)[:, None]).to(dtype)
                out = dot_add(p, v, out, PRECISION)
                # The tensor cores add up as they go: no lane waits for another.
                total = dot_add(p, ones, total, PRECISION)
    return out, tl.max(total, 1), largest


@triton.jit
def _top(i, by_row_ptr, by_col_ptr, H, W, n, pitch, WB: tl.constexpr, HB: tl.constexpr):
    """The largest q·r^row + q·r^col of each query."""
    y = tl.arange(0, HB)
    use = (y < H)[:, None] & (i < n)[None, :]
    top = tl.max(tl.load(by_row_ptr + y[:, None] * n + i[None, :], mask=use, other=OUTSIDE).to(tl.float32), 0)
    of_cols = tl.full(i.shape, OUTSIDE, tl.float32)
    for x0 in range(0, W, WB):
        x = x0 + tl.arange(0, WB)
        there = (i < n)[:, None] & (x < W)[None, :]
        column = tl.load(by_col_ptr + i[:, None] * pitch + x[None, :], mask=there, other=OUTSIDE)
        of_cols = tl.maximum(of_cols, tl.max(column.to(tl.float32), 1))
    return top + of_cols


@triton.jit
def forward(
    q_ptr,
    k_ptr,
    v_ptr,
    by_row_ptr,
    by_col_ptr,
    norm_ptr,
    mask_ptr,
    out_ptr,
    lse_ptr,
    units_b,
    units_n,
    heads,
    H,
    W,
    n,
    pitch,
    tiles,
    unit,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    M: tl.constexpr,
    WB: tl.constexpr,
    ROWS: tl.constexpr,
    HB: tl.constexpr,
    BOUND: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """M queries of one head of one image: their outputs, and log₂ Σ 2^logit (float32: see `_load_lse` of the backward).

    With a BOUND, |q·k| ≤ ‖q‖·max‖k‖: a logit is at most largest = top + ‖q‖·max‖k‖, and the largest one at least
    top − ‖q‖·max‖k‖. Where both are close enough for float32's exponents, nothing is compared or rescaled on the way.
    """
    i = tl.program_id(0) % tiles * M + tl.arange(0, M)
    b = (tl.program_id(0) // tiles // heads).to(tl.int64)
    h = tl.program_id(0) // tiles % heads
    at = (b * heads + h) * n
    dtype = q_ptr.dtype.element_ty
    q_b = units_b * UNIT
    q_n = units_n * UNIT
    d = tl.arange(0, DP)
    e = tl.arange(0, DVP)
    q = _tile(q_ptr + b * q_b + h * D, i, d, q_n, i < n, D)
    k_ptr += b * q_b + h * D
    v_ptr += b * q_b + h * DV
    by_row_ptr += at * H
    by_col_ptr += at * pitch
    if HAS_MASK:
        mask_ptr += b * n
    largest = tl.full((M,), float("-inf"), tl.float32)
    if BOUND:
        row = tl.arange(0, HB)
        of_keys = tl.max(tl.load(norm_ptr + (b * heads + h) * H + row, mask=row < H, other=0.0), 0)
        wide = q.to(tl.float32)
        reach = tl.sqrt(tl.sum(wide * wide, 1) * of_keys)
        close = tl.max(reach, 0) * unit < CLOSE
        # fmt: off
        if close:
            bound = _top(i, by_row_ptr, by_col_ptr, H, W, n, pitch, WB, HB) + reach
            out, total, largest = _walk(
                q, i, k_ptr, v_ptr, by_row_ptr, by_col_ptr, mask_ptr, bound, q_n, H, W, n, pitch, unit,
                D, DV, DP, DVP, M, WB, ROWS, False, HAS_MASK, PRECISION,
            )
        else:
            out, total, largest = _walk(
                q, i, k_ptr, v_ptr, by_row_ptr, by_col_ptr, mask_ptr, largest, q_n, H, W, n, pitch, unit,
                D, DV, DP, DVP, M, WB, ROWS, True, HAS_MASK, PRECISION,
            )
    else:
        out, total, largest = _walk(
            q,
            i,
            k_ptr,
            v_ptr,
            by_row_ptr,
            by_col_ptr,
            mask_ptr,
            largest,
            q_n,
            H,
            W,
            n,
            pitch,
            unit,
            D,
            DV,
            DP,
            DVP,
            M,
            WB,
            ROWS,
            True,
            HAS_MASK,
            PRECISION,
        )
        # fmt: on
    to = out_ptr + ((b * n + i) * heads + h)[:, None] * DV + e[None, :]
    tl.store(to, (out * reciprocal(total)[:, None]).to(dtype), mask=(i < n)[:, None] & (e < DV)[None, :])
    if PRECISION != "tf32":
        tl.store(lse_ptr + 2 * (at + i), largest, mask=i < n)
        tl.store(lse_ptr + 2 * (at + i) + 1, 1.0 / total, mask=i < n)
    else:
        tl.store(lse_ptr + at + i, largest * unit + tl.log2(total), mask=i < n)
