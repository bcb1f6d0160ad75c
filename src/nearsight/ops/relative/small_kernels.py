"""Triton kernels of attention with relative positions on small maps, in half types without a mask: README.md, "Small maps".

Pixels, strides and `unit` are as in `kernels.py`. Both tables of a head lie one below the other, [4·SIDE, D], offsets of columns
from 2·SIDE on; a query's logits by row and by column of the key lie side by side, [queries, PB], columns from SIDE on.
Queries and keys come in blocks of whole rows, of COLS columns each.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from nearsight.ops.arithmetic.kernels import dot, dot_add, exp2, reciprocal
from nearsight.ops.relative.kernels import OUTSIDE, _tile

__all__ = ["small_forward", "small_gradients", "small_key_gradients"]


@triton.jit
def _tables(row_ptr, col_ptr, d, H, W, D: tl.constexpr, SIDE: tl.constexpr):
    o = tl.arange(0, 4 * SIDE)
    of_rows = _tile(row_ptr, o, d, D, o < 2 * H - 1, D)
    of_cols = _tile(col_ptr, o - 2 * SIDE, d, D, (o >= 2 * SIDE) & (o < 2 * SIDE + 2 * W - 1), D)
    return of_rows + of_cols


@triton.jit
def _positions(q, tables, y, x, H, W, SIDE: tl.constexpr, PB: tl.constexpr, PRECISION: tl.constexpr):
    """The logits by row and by column of the key, [queries, PB], of queries at (y, x)."""
    c = tl.arange(0, PB)[None, :]
    offset = tl.where(c < SIDE, c + (H - 1) - y[:, None], c + (SIDE + W - 1) - x[:, None])
    logits = dot(q, tl.trans(tables), PRECISION).to(q.dtype)
    # Where there is no such row or column any of them stands, and no key asks for it.
    return tl.gather(logits, offset & (4 * SIDE - 1), 1)


@triton.jit
def _by_offset(found, y, x, H, W, SIDE: tl.constexpr):
    """The way back: what belongs to a query's logits by row and by column, by offset, [queries, 4·SIDE]."""
    o = tl.arange(0, 4 * SIDE)[None, :]
    row = o - (H - 1) + y[:, None]
    col = o - (2 * SIDE + W - 1) + x[:, None]
    of_row = (o < 2 * SIDE) & (row >= 0) & (row < H)
    of_col = (o >= 2 * SIDE) & (col >= 0) & (col < W)
    place = tl.where(of_row, row, tl.where(of_col, SIDE + col, 0))
    return tl.where(of_row | of_col, tl.gather(found, place, 1), 0.0)


@triton.jit
def _block(number, nothing, H, W, N: tl.constexpr, COLS: tl.constexpr, FULL: tl.constexpr):
    """A block of pixels: the first of its rows, the pixels from there, which of them are there, and their rows and columns.

    `nothing` is always 0, but not known before a loop: what is made from it takes no registers from one image to the next.
    """
    t = tl.arange(0, N) + nothing
    first = number * (N // COLS)
    row, col = t // COLS, t % COLS
    here = (t < N) if FULL else (row < H - first) & (col < W)
    return first * W, row * W + col, here, first + row, col


@triton.jit
def _one_hot(y, x, SIDE: tl.constexpr, PB: tl.constexpr, dtype: tl.constexpr):
    """[keys, PB]: 1 at a key's row and at its column."""
    c = tl.arange(0, PB)[None, :]
    return tl.where((c == y[:, None]) | (c == SIDE + x[:, None]), 1.0, 0.0).to(dtype)


@triton.jit(do_not_specialize=["batch", "span"])
def small_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    row_ptr,
    col_ptr,
    out_ptr,
    lse_ptr,
    units_b,
    units_n,
    row_h,
    col_h,
    batch,
    heads,
    H,
    W,
    n,
    tiles,
    span,
    unit,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLS: tl.constexpr,
    SIDE: tl.constexpr,
    PB: tl.constexpr,
    FULL: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """M queries of one head of `span` images: their outputs and log₂ Σ 2^logit."""
    tile = tl.program_id(0) % tiles
    h = tl.program_id(0) // tiles
    first = tl.program_id(1) * span
    dtype = q_ptr.dtype.element_ty
    d = tl.arange(0, DP)
    e = tl.arange(0, DVP)
    q_b = units_b * UNIT
    q_n = units_n * UNIT
    tables = _tables(row_ptr + h * row_h, col_ptr + h * col_h, d, H, W, D, SIDE).to(dtype)
    ones = tl.full((N, 8), 1.0, dtype)
    image = first.to(tl.int64)
    for _ in range(first, tl.minimum(first + span, batch)):
        nothing = (image < 0).to(tl.int32)
        start, i, use, y, x = _block(tile, nothing, H, W, M, COLS, FULL)
        q = _tile(q_ptr + (image * q_b + h * D + start * q_n), i, d, q_n, use, D)
        position = _positions(q, tables, y, x, H, W, SIDE, PB, PRECISION)
        largest = tl.full((M,), OUTSIDE, tl.float32)
        out = tl.zeros((M, DVP), tl.float32)
        total = tl.zeros((M, 8), tl.float32)
        for block in tl.static_range(BLOCKS):
            begin, j, here, row, col = _block(block, 0, H, W, N, COLS, FULL)
            j += nothing
            k = _tile(k_ptr + (image * q_b + h * D + begin * q_n), j, d, q_n, here, D)
            v = _tile(v_ptr + (image * q_b + h * DV + begin * q_n), j, e, q_n, here, DV)
            s = dot(position, tl.trans(_one_hot(row, col, SIDE, PB, dtype)), PRECISION)
            s = dot_add(q, tl.trans(k), s, PRECISION)
            if not FULL:
                s = tl.where(here[None, :], s, OUTSIDE)
            best = tl.maximum(largest, tl.max(s, 1) * unit)
            if block > 0:
                fade = exp2(largest - best)
                out *= fade[:, None]
                total *= fade[:, None]
            largest = best
            # In one step, which rounds once: what `best` was rounded by, all weights of a query share.
            p = exp2(s * unit - best[:, None]).to(dtype)
            out = dot_add(p, v, out, PRECISION)
            total = dot_add(p, ones, total, PRECISION)
        sums = tl.max(total, 1)
        to = out_ptr + ((image * n + start) * heads + h) * DV + i[:, None] * (heads * DV) + e[None, :]
        tl.store(to, (out * reciprocal(sums)[:, None]).to(dtype), mask=use[:, None] & (e < DV)[None, :])
        tl.store(lse_ptr + (image * heads + h) * n + start + i, largest + tl.log2(sums), mask=use)
        image += 1


@triton.jit(do_not_specialize=["batch", "span"])
def small_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    row_ptr,
    col_ptr,
    grad_ptr,
    out_ptr,
    lse_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    position_ptr,
    delta_ptr,
    share_ptr,
    units_b,
    units_n,
    row_h,
    col_h,
    batch,
    heads,
    H,
    W,
    n,
    tiles,
    span,
    unit,
    scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLS: tl.constexpr,
    SIDE: tl.constexpr,
    PB: tl.constexpr,
    FULL: tl.constexpr,
    UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """M queries of one head of `span` images: dq, and a share of the tables' gradients, [programs, heads, 2·H + 2·W − 2, D].

    Where the queries are the WHOLE map also dk and dv; else what `small_key_gradients` needs, the position logits,
    [B·heads, n, PB], and g·y.
    """
    tile = tl.program_id(0) % tiles
    h = tl.program_id(0) // tiles
    first = tl.program_id(1) * span
    dtype = q_ptr.dtype.element_ty
    d = tl.arange(0, DP)
    e = tl.arange(0, DVP)
    q_b = units_b * UNIT
    q_n = units_n * UNIT
    tables = _tables(row_ptr + h * row_h, col_ptr + h * col_h, d, H, W, D, SIDE).to(dtype)
    dtables = tl.zeros((4 * SIDE, DP), tl.float32)
    image = first.to(tl.int64)
    for _ in range(first, tl.minimum(first + span, batch)):
        nothing = (image < 0).to(tl.int32)
        start, i, use, y, x = _block(tile, nothing, H, W, M, COLS, FULL)
        at = (image * heads + h) * n + start
        q = _tile(q_ptr + (image * q_b + h * D + start * q_n), i, d, q_n, use, D)
        beside = ((image * n + start) * heads + h) * DV
        grad = _tile(grad_ptr + beside, i, e, heads * DV, use, DV)
        y_out = _tile(out_ptr + beside, i, e, heads * DV, use, DV)
        lse = tl.load(lse_ptr + at + i, mask=use, other=0.0)
        delta = tl.sum(grad.to(tl.float32) * y_out.to(tl.float32), 1)
        position = _positions(q, tables, y, x, H, W, SIDE, PB, PRECISION)
        if not WHOLE:
            c = tl.arange(0, PB)
            tl.store(position_ptr + at * PB + i[:, None] * PB + c[None, :], position, mask=use[:, None])
            tl.store(delta_ptr + at + i, delta, mask=use)
        dq = tl.zeros((M, DP), tl.float32)
        dposition = tl.zeros((M, PB), tl.float32)
        for block in tl.static_range(BLOCKS):
            begin, j, here, row, col = _block(block, 0, H, W, N, COLS, FULL)
            j += nothing
            k = _tile(k_ptr + (image * q_b + h * D + begin * q_n), j, d, q_n, here, D)
            v = _tile(v_ptr + (image * q_b + h * DV + begin * q_n), j, e, q_n, here, DV)
            one_hot = _one_hot(row, col, SIDE, PB, dtype)
            s = dot(position, tl.trans(one_hot), PRECISION)
            s = dot_add(q, tl.trans(k), s, PRECISION)
            p = exp2(s * unit - lse[:, None])
            if not FULL:
                p = tl.where(here[None, :], p, 0.0)
            ds = (p * (dot(grad, tl.trans(v), PRECISION) - delta[:, None])).to(dtype)
            dq = dot_add(ds, k, dq, PRECISION)
            dposition = dot_add(ds, one_hot, dposition, PRECISION)
            if WHOLE:
                dk = dot(tl.trans(ds), q, PRECISION)
                dv = dot(tl.trans(p.to(dtype)), grad, PRECISION)
                base = (image * n + begin) * CHANNELS
                to = dk_ptr + (base + h * D) + j[:, None] * CHANNELS + d[None, :]
                tl.store(to, (dk * scale).to(dtype), mask=here[:, None] & (d < D)[None, :])
                to = dv_ptr + (base + h * DV) + j[:, None] * CHANNELS + e[None, :]
                tl.store(to, dv.to(dtype), mask=here[:, None] & (e < DV)[None, :])
        dlogits = _by_offset(dposition.to(dtype), y, x, H, W, SIDE)
        dq = dot_add(dlogits, tables, dq, PRECISION)
        dtables = dot_add(tl.trans(dlogits), q, dtables, PRECISION)
        to = dq_ptr + ((image * n + start) * CHANNELS + h * D) + i[:, None] * CHANNELS + d[None, :]
        tl.store(to, (dq * scale).to(dtype), mask=use[:, None] & (d < D)[None, :])
        image += 1
    o = tl.arange(0, 4 * SIDE)
    offset = tl.where(o < 2 * SIDE, o, o - 2 * SIDE + 2 * H - 1)
    there = tl.where(o < 2 * SIDE, o < 2 * H - 1, o - 2 * SIDE < 2 * W - 1)
    share = ((tl.program_id(1) * tiles + tile) * heads + h) * (2 * H + 2 * W - 2)
    to = share_ptr + (share + offset)[:, None] * D + d[None, :]
    tl.store(to, dtables * scale, mask=there[:, None] & (d < D)[None, :])


@triton.jit
def small_key_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    dk_ptr,
    dv_ptr,
    position_ptr,
    delta_ptr,
    units_b,
    units_n,
    heads,
    H,
    W,
    n,
    tiles,
    unit,
    scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    COLS: tl.constexpr,
    SIDE: tl.constexpr,
    PB: tl.constexpr,
    UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A block of N keys of one head of one image: the gradients of k and v, M queries at a time.

    Keys lie along the first axis, so that the weights and dS are first operands as they are.
    """
    b = (tl.program_id(0) // tiles // heads).to(tl.int64)
    h = tl.program_id(0) // tiles % heads
    at = (b * heads + h) * n
    dtype = q_ptr.dtype.element_ty
    q_b = units_b * UNIT
    q_n = units_n * UNIT
    begin, j, here, y, x = _block(tl.program_id(0) % tiles, 0, H, W, N, COLS, False)
    j += begin
    d = tl.arange(0, DP)
    e = tl.arange(0, DVP)
    c = tl.arange(0, PB)
    k = _tile(k_ptr + b * q_b + h * D, j, d, q_n, here, D)
    v = _tile(v_ptr + b * q_b + h * DV, j, e, q_n, here, DV)
    one_hot = _one_hot(y, x, SIDE, PB, dtype)
    q_ptr += b * q_b + h * D
    grad_ptr += b * n * heads * DV + h * DV
    dk = tl.zeros((N, DP), tl.float32)
    dv = tl.zeros((N, DVP), tl.float32)
    for first in range(0, n, M):
        i = first + tl.arange(0, M)
        use = i < n
        q = _tile(q_ptr, i, d, q_n, use, D)
        grad = _tile(grad_ptr, i, e, heads * DV, use, DV)
        position = tl.load(position_ptr + (at + i)[:, None] * PB + c[None, :], mask=use[:, None], other=0.0)
        lse = tl.load(lse_ptr + at + i, mask=use, other=0.0)
        delta = tl.load(delta_ptr + at + i, mask=use, other=0.0)
        s = dot(one_hot, tl.trans(position), PRECISION)
        s = dot_add(k, tl.trans(q), s, PRECISION)
        p = exp2(s * unit - lse[None, :])
        dv = dot_add(p.to(dtype), grad, dv, PRECISION)
        ds = p * (dot(v, tl.trans(grad), PRECISION) - delta[None, :])
        dk = dot_add(ds.to(dtype), q, dk, PRECISION)
    to = (b * n + j)[:, None] * CHANNELS
    tl.store(dk_ptr + to + h * D + d[None, :], (dk * scale).to(dtype), mask=here[:, None] & (d < D)[None, :])
    tl.store(dv_ptr + to + h * DV + e[None, :], dv.to(dtype), mask=here[:, None] & (e < DV)[None, :])
