"""Triton kernels of attention with relative positions on small maps, in half types without a mask: README.md, "Small maps".

Pixels, strides and `unit` are as in `kernels.py`. Both tables of a head lie one below the other, [4·SIDE, D], offsets of columns
from 2·SIDE on; a query's logits by row and by column of the key lie side by side, [queries, PB], columns from SIDE on.
A program takes whole maps, of N pixels: rows of COLS columns each.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from nearsight.ops.arithmetic.kernels import dot, dot_add, exp2, reciprocal
from nearsight.ops.relative.kernels import OUTSIDE, _tile

__all__ = ["small_forward", "small_gradients"]


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
def _pixels(nothing, H, W, N: tl.constexpr, COLS: tl.constexpr, FULL: tl.constexpr):
    """The map's pixels, which of them are there, and their rows and columns.

    `nothing` is always 0, but not known before a loop: what is made from it takes no registers from one image to the next.
    """
    t = tl.arange(0, N) + nothing
    y, x = t // COLS, t % COLS
    here = (t < N) if FULL else (y < H) & (x < W)
    return y * W + x, here, y, x


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
    span,
    unit,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    N: tl.constexpr,
    COLS: tl.constexpr,
    SIDE: tl.constexpr,
    PB: tl.constexpr,
    FULL: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One head of `span` images: outputs and log₂ Σ 2^logit."""
    h = tl.program_id(0)
    first = tl.program_id(1) * span
    dtype = q_ptr.dtype.element_ty
    d = tl.arange(0, DP)
    e = tl.arange(0, DVP)
    q_b = units_b * UNIT
    q_n = units_n * UNIT
    tables = _tables(row_ptr + h * row_h, col_ptr + h * col_h, d, H, W, D, SIDE).to(dtype)
    _, key, row, col = _pixels(0, H, W, N, COLS, FULL)
    one_hot = _one_hot(row, col, SIDE, PB, dtype)
    ones = tl.full((N, 8), 1.0, dtype)
    image = first.to(tl.int64)
    for _ in range(first, tl.minimum(first + span, batch)):
        i, here, y, x = _pixels((image < 0).to(tl.int32), H, W, N, COLS, FULL)
        q = _tile(q_ptr + (image * q_b + h * D), i, d, q_n, here, D)
        position = _positions(q, tables, y, x, H, W, SIDE, PB, PRECISION)
        k = _tile(k_ptr + (image * q_b + h * D), i, d, q_n, here, D)
        v = _tile(v_ptr + (image * q_b + h * DV), i, e, q_n, here, DV)
        s = dot(position, tl.trans(one_hot), PRECISION)
        s = dot_add(q, tl.trans(k), s, PRECISION)
        if not FULL:
            s = tl.where(key[None, :], s, OUTSIDE)
        largest = tl.max(s, 1) * unit
        # In one step, which rounds once: what `largest` was rounded by, all weights of a query share.
        p = exp2(s * unit - largest[:, None]).to(dtype)
        out = dot(p, v, PRECISION)
        total = tl.max(dot(p, ones, PRECISION), 1)
        to = out_ptr + (image * n * heads + h) * DV + i[:, None] * (heads * DV) + e[None, :]
        tl.store(to, (out * reciprocal(total)[:, None]).to(dtype), mask=here[:, None] & (e < DV)[None, :])
        tl.store(lse_ptr + (image * heads + h) * n + i, largest + tl.log2(total), mask=here)
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
    span,
    unit,
    scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    N: tl.constexpr,
    COLS: tl.constexpr,
    SIDE: tl.constexpr,
    PB: tl.constexpr,
    FULL: tl.constexpr,
    UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One head of `span` images: dq, dk, dv, and a share of the tables' gradients, [programs, heads, 2·H + 2·W − 2, D]."""
    h = tl.program_id(0)
    first = tl.program_id(1) * span
    dtype = q_ptr.dtype.element_ty
    d = tl.arange(0, DP)
    e = tl.arange(0, DVP)
    q_b = units_b * UNIT
    q_n = units_n * UNIT
    tables = _tables(row_ptr + h * row_h, col_ptr + h * col_h, d, H, W, D, SIDE).to(dtype)
    _, key, row, col = _pixels(0, H, W, N, COLS, FULL)
    one_hot = _one_hot(row, col, SIDE, PB, dtype)
    dtables = tl.zeros((4 * SIDE, DP), tl.float32)
    image = first.to(tl.int64)
    for _ in range(first, tl.minimum(first + span, batch)):
        i, here, y, x = _pixels((image < 0).to(tl.int32), H, W, N, COLS, FULL)
        q = _tile(q_ptr + (image * q_b + h * D), i, d, q_n, here, D)
        beside = (image * n * heads + h) * DV
        grad = _tile(grad_ptr + beside, i, e, heads * DV, here, DV)
        y_out = _tile(out_ptr + beside, i, e, heads * DV, here, DV)
        lse = tl.load(lse_ptr + (image * heads + h) * n + i, mask=here, other=0.0)
        delta = tl.sum(grad.to(tl.float32) * y_out.to(tl.float32), 1)
        position = _positions(q, tables, y, x, H, W, SIDE, PB, PRECISION)
        k = _tile(k_ptr + (image * q_b + h * D), i, d, q_n, here, D)
        v = _tile(v_ptr + (image * q_b + h * DV), i, e, q_n, here, DV)
        s = dot(position, tl.trans(one_hot), PRECISION)
        s = dot_add(q, tl.trans(k), s, PRECISION)
        p = exp2(s * unit - lse[:, None])
        if not FULL:
            p = tl.where(key[None, :], p, 0.0)
        ds = (p * (dot(grad, tl.trans(v), PRECISION) - delta[:, None])).to(dtype)
        dq = dot(ds, k, PRECISION)
        dposition = dot(ds, one_hot, PRECISION)
        dk = dot(tl.trans(ds), q, PRECISION)
        dv = dot(tl.trans(p.to(dtype)), grad, PRECISION)
        dlogits = _by_offset(dposition.to(dtype), y, x, H, W, SIDE)
        dq = dot_add(dlogits, tables, dq, PRECISION)
        dtables = dot_add(tl.trans(dlogits), q, dtables, PRECISION)
        to = image * n * CHANNELS + h * D + i[:, None] * CHANNELS + d[None, :]
        mask = here[:, None] & (d < D)[None, :]
        tl.store(dq_ptr + to, (dq * scale).to(dtype), mask=mask)
        tl.store(dk_ptr + to, (dk * scale).to(dtype), mask=mask)
        to = dv_ptr + (image * n * CHANNELS + h * DV) + i[:, None] * CHANNELS + e[None, :]
        tl.store(to, dv.to(dtype), mask=here[:, None] & (e < DV)[None, :])
        image += 1
    o = tl.arange(0, 4 * SIDE)
    offset = tl.where(o < 2 * SIDE, o, o - 2 * SIDE + 2 * H - 1)
    there = tl.where(o < 2 * SIDE, o < 2 * H - 1, o - 2 * SIDE < 2 * W - 1)
    share = (tl.program_id(1) * heads + h) * (2 * H + 2 * W - 2)
    to = share_ptr + (share + offset)[:, None] * D + d[None, :]
    tl.store(to, dtables * scale, mask=there[:, None] & (d < D)[None, :])
