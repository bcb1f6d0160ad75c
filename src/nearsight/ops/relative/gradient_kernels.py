"""The backward of global attention with two-dimensional relative positions. Layout and letters are those of `kernels.py`."""
# mypy: ignore-errors

import triton
import triton.language as tl

from nearsight.ops.arithmetic.kernels import dot, dot_add, exp2
from nearsight.ops.relative.kernels import MASKED, OUTSIDE, _line, _logits_of_row, _of_rows, _tile

__all__ = ["key_gradients", "position_gradients", "query_gradients"]


@triton.jit
def _load_lse(lse_ptr, at, use, PRECISION: tl.constexpr):
    """log₂ Σ 2^logit of queries, and a stand-in; in float32 the largest logit, unscaled, and 1 / the sum relative to it.

    One number of some hundreds would be rounded by as much as shows in every weight, and a logarithm makes a weight of 1 one
    of nearly 1.
    """
    if PRECISION != "tf32":
        return tl.load(lse_ptr + 2 * at, mask=use, other=0.0), tl.load(lse_ptr + 2 * at + 1, mask=use, other=0.0)
    else:
        lse = tl.load(lse_ptr + at, mask=use, other=0.0)
        return lse, lse


@triton.jit
def _keys_of_row(
    q, grad, column, row, lse, rest, x, y, d, e, k_ptr, v_ptr, mask_ptr, q_n, W, n, unit,
    D: tl.constexpr, DV: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys x of row y: themselves, the queries' weights of them, to whose logits `row` belongs, and g·v."""
    a = row.to(tl.float32)
    j = y * W + x
    v = _tile(v_ptr, j, e, q_n, (x < W) & (j < n), DV)
    k, s = _logits_of_row(q, column, x, y, d, k_ptr, mask_ptr, q_n, W, n, D, HAS_MASK, PRECISION)
    if PRECISION == "tf32":
        p = exp2(s * unit + (a * unit - lse)[:, None])
    else:
        p = exp2((s + (a - lse)[:, None]) * unit) * rest[:, None]
    return k, p, dot(grad, tl.trans(v), PRECISION)


@triton.jit
def query_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    by_row_ptr,
    by_col_ptr,
    mask_ptr,
    grad_ptr,
    out_ptr,
    lse_ptr,
    dq_ptr,
    of_row_ptr,
    of_col_ptr,
    delta_ptr,
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
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """M queries of one head of one image: Σ dS·k, the gradients of their position logits, and Σ P∘dP (in half types as g·y).

    dq lies like q, but dense: [B, n, channels of q, k and v]. The logits by row get one gradient per block of WB columns,
    [B·heads, PARTS, H, n].
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
    use = i < n
    q = _tile(q_ptr + b * q_b + h * D, i, d, q_n, use, D)
    grad = _tile(grad_ptr + b * n * heads * DV + h * DV, i, e, heads * DV, use, DV)
    lse, rest = _load_lse(lse_ptr, at + i, use, PRECISION)
    k_ptr += b * q_b + h * D
    v_ptr += b * q_b + h * DV
    by_row_ptr += at * H
    of_row_ptr += at * H * PARTS
    by_col_ptr += at * pitch
    of_col_ptr += at * pitch
    if HAS_MASK:
        mask_ptr += b * n
    if PRECISION == "tf32":
        y_out = _tile(out_ptr + b * n * heads * DV + h * DV, i, e, heads * DV, use, DV)
        delta = tl.sum(grad.to(tl.float32) * y_out.to(tl.float32), 1)
    else:
        # Where a key has nearly all the weight, g·y leaves a rounding error of g·v in place of nothing.
        delta = tl.zeros((M,), tl.float32)
        for x0 in range(0, W, WB):
            x = x0 + tl.arange(0, WB)
            there = use[:, None] & (x < W)[None, :]
            column = tl.load(by_col_ptr + i[:, None] * pitch + x[None, :], mask=there, other=OUTSIDE)
            for y in range(H):
                rows = _of_rows(by_row_ptr, i, y, H, n, 1)
                _, p, dp = _keys_of_row(
                    q, grad, column, rows[0], lse, rest, x, y, d, e, k_ptr, v_ptr, mask_ptr, q_n, W, n, unit,
                    D, DV, HAS_MASK, PRECISION,
                )  # fmt: skip
                delta += tl.sum(p * dp, 1)
    tl.store(delta_ptr + at + i, delta, mask=use)
    dq = tl.zeros((M, DP), tl.float32)
    to_row = tl.arange(0, 8)[None, :] + tl.zeros((WB, 8), tl.int32)
    for x0 in range(0, W, WB):
        x = x0 + tl.arange(0, WB)
        there = use[:, None] & (x < W)[None, :]
        column = tl.load(by_col_ptr + i[:, None] * pitch + x[None, :], mask=there, other=OUTSIDE).to(tl.float32)
        of_column = tl.zeros((M, WB), tl.float32)
        ahead = _of_rows(by_row_ptr, i, 0, H, n, ROWS)
        for y0 in range(0, H, ROWS):
            of_rows = tl.zeros((M, 8), tl.float32)
            rows = ahead
            ahead = _of_rows(by_row_ptr, i, y0 + ROWS, H, n, ROWS)
            for r in tl.static_range(ROWS):
                k, p, dp = _keys_of_row(
                    q, grad, column, rows[r], lse, rest, x, y0 + r, d, e, k_ptr, v_ptr, mask_ptr, q_n, W, n, unit,
                    D, DV, HAS_MASK, PRECISION,
                )  # fmt: skip
                ds = p * (dp - delta[:, None])
                of_column += ds
                ds = ds.to(dtype)
                # Σ over the row's columns goes to column r.
                of_rows = dot_add(ds, tl.where(to_row == r, 1.0, 0.0).to(dtype), of_rows, PRECISION)
                dq = dot_add(ds, k, dq, PRECISION)
            y = y0 + tl.arange(0, 8)[None, :]
            to = of_row_ptr + y * n + i[:, None]
            mine = use[:, None] & (y < tl.minimum(H, y0 + ROWS))
            tl.store(to, of_rows.to(of_row_ptr.dtype.element_ty), mask=mine)
        tl.store(of_col_ptr + i[:, None] * pitch + x[None, :], of_column.to(of_col_ptr.dtype.element_ty), mask=there)
        of_row_ptr += n * H
    to = dq_ptr + (b * n + i)[:, None] * CHANNELS + h * D + d[None, :]
    tl.store(to, dq.to(dtype), mask=use[:, None] & (d < D)[None, :])


@triton.jit
def key_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    by_row_ptr,
    by_col_ptr,
    mask_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    units_b,
    units_n,
    heads,
    H,
    W,
    n,
    pitch,
    tiles,
    across,
    unit,
    scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    WB: tl.constexpr,
    KR: tl.constexpr,
    N: tl.constexpr,
    CB: tl.constexpr,
    CHANNELS: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """KR rows of WB keys of one head of one image: the gradients of k and v.

    Keys lie along the first axis, so that the weights and dS are first operands as they are. A query's position logits come by
    a product with the one-hot row and column of a key.
    """
    tile = tl.program_id(0) % tiles
    b = (tl.program_id(0) // tiles // heads).to(tl.int64)
    h = tl.program_id(0) // tiles % heads
    at = (b * heads + h) * n
    dtype = q_ptr.dtype.element_ty
    q_b = units_b * UNIT
    q_n = units_n * UNIT
    LOGITS: tl.constexpr = "ieee" if PRECISION == "tf32x3" else PRECISION
    key = tl.arange(0, KR * WB)
    y0 = tile // across * KR
    x0 = tile % across * WB
    y = y0 + key // WB
    x = x0 + key % WB
    here = (y < H) & (x < W)
    j = y * W + x
    d = tl.arange(0, DP)
    e = tl.arange(0, DVP)
    k = _tile(k_ptr + b * q_b + h * D, j, d, q_n, here, D)
    v = _tile(v_ptr + b * q_b + h * DV, j, e, q_n, here, DV)
    c = tl.arange(0, CB)
    r = tl.arange(0, 16)
    own_column = tl.where(key[:, None] % WB == c[None, :], 1.0, 0.0).to(dtype)
    if KR > 1:
        own_row = tl.where(key[:, None] // WB == r[None, :], 1.0, 0.0).to(dtype)
    if HAS_MASK:
        allowed = tl.load(mask_ptr + b * n + j, mask=here, other=1)
        masked = tl.where(allowed != 0, 0.0, MASKED * unit)
    q_ptr += b * q_b + h * D
    grad_ptr += b * n * heads * DV + h * DV
    by_row_ptr += (at * H + y0 * n).to(tl.int64)
    by_col_ptr += at * pitch + x0
    dk = tl.zeros((KR * WB, DP), tl.float32)
    dv = tl.zeros((KR * WB, DVP), tl.float32)
    for first in range(0, n, N):
        i = first + tl.arange(0, N)
        use = i < n
        q = _tile(q_ptr, i, d, q_n, use, D)
        grad = _tile(grad_ptr, i, e, heads * DV, use, DV)
        column = tl.load(
            by_col_ptr + i[:, None] * pitch + c[None, :], mask=use[:, None] & (x0 + c < pitch)[None, :], other=0.0
        )
        lse, rest = _load_lse(lse_ptr, at + i, use, PRECISION)
        delta = tl.load(delta_ptr + at + i, mask=use, other=0.0)
        # Added up in the order of `_keys_of_row`: in float32 weights whose rounding errors differ from those of the sum that
        # divides them err almost twice as much.
        s = dot(own_column, tl.trans(column), LOGITS)
        s = dot_add(k, tl.trans(q), s, LOGITS)
        if KR > 1:
            there = (r < KR)[:, None] & (y0 + r < H)[:, None] & use[None, :]
            row = tl.load(by_row_ptr + r[:, None] * n + i[None, :], mask=there, other=0.0)
            if PRECISION == "tf32":
                exponent = dot_add(own_row, row, s, LOGITS) * unit - lse[None, :]
            else:
                exponent = (s + (dot(own_row, row, LOGITS) - lse[None, :])) * unit
        else:
            row = tl.load(by_row_ptr + i, mask=use, other=0.0).to(tl.float32)
            if PRECISION == "tf32":
                exponent = s * unit - (lse - row * unit)[None, :]
            else:
                exponent = (s + (row - lse)[None, :]) * unit
        if HAS_MASK:
            exponent += masked[:, None]
        p = exp2(exponent)
        if PRECISION != "tf32":
            p *= rest[None, :]
        dv = dot_add(p.to(dtype), grad, dv, PRECISION)
        ds = p * (dot(v, tl.trans(grad), PRECISION) - delta[None, :])
        dk = dot_add(ds.to(dtype), q, dk, PRECISION)
    to = (b * n + j)[:, None] * CHANNELS
    tl.store(dk_ptr + to + h * D + d[None, :], (dk * scale).to(dtype), mask=here[:, None] & (d < D)[None, :])
    tl.store(dv_ptr + to + h * DV + e[None, :], dv.to(dtype), mask=here[:, None] & (e < DV)[None, :])


@triton.jit(do_not_specialize=["batch", "span"])
def position_gradients(
    q_ptr,
    table_ptr,
    of_logit_ptr,
    dq_ptr,
    share_ptr,
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
    scale,
    D: tl.constexpr,
    DP: tl.constexpr,
    CHANNELS: tl.constexpr,
    LB: tl.constexpr,
    KB: tl.constexpr,
    PARTS: tl.constexpr,
    OF_ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The same lines of queries: dq but for what it was, times `scale`, and a share of the table's gradient.

    Shares are [programs, heads, H·H + W·W, D], by line of the query and of the key; those OF_ROWS come first.
    """
    lines = tl.num_programs(0) // heads
    line = tl.program_id(0) % lines
    h = tl.program_id(0) // lines
    first = tl.program_id(1) * span
    dtype = q_ptr.dtype.element_ty
    q_b = units_b * UNIT
    q_n = units_n * UNIT
    d = tl.arange(0, DP)
    key = tl.arange(0, KB)
    pixel, use, keys = _line(line, H, W, LB, OF_ROWS)
    window = _tile(table_ptr + h * table_h + (keys - 1 - line) * D, key, d, D, key < keys, D).to(dtype)
    dtable = tl.zeros((KB, DP), tl.float32)
    image = first.to(tl.int64)
    for _ in range(first, tl.minimum(first + span, batch)):
        q = _tile(q_ptr + image * q_b + h * D, pixel, d, q_n, use, D)
        to = dq_ptr + (image * n + pixel)[:, None] * CHANNELS + h * D + d[None, :]
        mask = use[:, None] & (d < D)[None, :]
        dq = tl.load(to, mask=mask, other=0.0).to(tl.float32)
        at = (image * heads + h) * n
        if OF_ROWS:
            found = tl.zeros((KB, LB), tl.float32)
            for part in tl.static_range(PARTS):
                found += tl.load(
                    of_logit_ptr + (at * PARTS + n * part) * H + key[:, None] * n + pixel[None, :],
                    mask=(key < H)[:, None] & use[None, :],
                    other=0.0,
                ).to(tl.float32)
            found = found.to(dtype)
            dtable = dot_add(found, q, dtable, PRECISION)
            dq = dot_add(tl.trans(found), window, dq, PRECISION)
        else:
            found = tl.load(
                of_logit_ptr + at * pitch + pixel[:, None] * pitch + key[None, :],
                mask=use[:, None] & (key < W)[None, :],
                other=0.0,
            )
            dtable = dot_add(tl.trans(found), q, dtable, PRECISION)
            dq = dot_add(found, window, dq, PRECISION) * scale
        tl.store(to, dq.to(dtype), mask=mask)
        image += 1
    share = (tl.program_id(1) * heads + h).to(tl.int64) * (H * H + W * W) + line * keys
    if not OF_ROWS:
        share += H * H
    to = share_ptr + (share + key)[:, None] * D + d[None, :]
    tl.store(to, dtable * scale, mask=(key < keys)[:, None] & (d < D)[None, :])
