"""Explicit attention's separable kinds in Triton for any radius: one small matrix per axis, one product per axis and direction.

    out = (g_y V g_x + offset·ΣV) / N          dV = g_y G' g_x + offset·ΣG' ,  G' = G / N ,  N the same product of ones

`tables` writes the matrices g and dg/dσ of both axes and their row sums; the matrices are rounded to the dtype of the products
and the sums are those of the rounded ones. Every other kernel multiplies one axis: its tile is [pixels along the axis,
others·channels], a column n being pixel n // CB of the other axis and channel n % CB. The forward goes along x, then y, the
backward along y, then x.

The weights of a pixel sum to 1, so out(V) = a + out(V − a) for any a per image and channel. The kernels take a ≈ the mean
(of 256 pixels): without it a large mean would drown the radius' gradient in rounding. From here on V is V − a. For the same
reason dg is stored less ½·h₀·g, with h₀ = (dN/dσ) / N at the central pixel: what is left of h = (dN/dσ) / N, h − h₀, is small.
With P = V g_x the gradient of the radius is

    Σ P·(dg_y G' − g_y ((h − h₀)·G')) − offset·Σ h·G' · ΣV   along y      +      Σ V·((g_y G') dg_x)   along x.

`matrices` holds g_y, dg_y, g_x, dg_x of a head, [4, SIDE, SIDE], `sums` their row sums and h₀, [5, SIDE]. Heads whose
radius is at least `least` are left to nodes.
"""

import triton
import triton.language as tl

from nearsight.ops.explicit.kernels import axis_matrix, load_radius


@triton.jit(do_not_specialize=["H", "W", "least"])
def tables(
    radius, out, sums, H, W, mass, least,
    SIDE: tl.constexpr, ROWS: tl.constexpr, GAUSSIAN: tl.constexpr,
):  # fmt: skip
    """ROWS rows of g and dg of one axis and head, and their sums."""
    row_blocks: tl.constexpr = SIDE // ROWS
    pid = tl.program_id(0)
    i = (pid % row_blocks) * ROWS + tl.arange(0, ROWS)
    axis = (pid // row_blocks) % 2
    head = pid // (row_blocks * 2)
    j = tl.arange(0, SIDE)
    sigma = load_radius(radius + head)
    if sigma >= least:
        return
    gy, dgy = axis_matrix(H // 2, j, H, sigma, GAUSSIAN)
    gx, dgx = axis_matrix(W // 2, j, W, sigma, GAUSSIAN)
    gy, dgy, gx, dgx = tl.sum(gy, axis=0), tl.sum(dgy, axis=0), tl.sum(gx, axis=0), tl.sum(dgx, axis=0)
    h0 = (dgy * gx + gy * dgx) / (gy * gx + mass)

    g, dg = axis_matrix(i[:, None], j[None, :], tl.where(axis == 0, H, W), sigma, GAUSSIAN)
    dg = (dg - 0.5 * h0 * g).to(out.dtype.element_ty)
    g = g.to(out.dtype.element_ty)
    at = out + (head * 4 + axis * 2) * (SIDE * SIDE) + (i[:, None] * SIDE + j[None, :])
    tl.store(at, g)
    tl.store(at + SIDE * SIDE, dg)
    sums += head * 5 * SIDE
    tl.store(sums + axis * 2 * SIDE + i, tl.sum(g.to(tl.float32), axis=1))
    tl.store(sums + (axis * 2 + 1) * SIDE + i, tl.sum(dg.to(tl.float32), axis=1))
    tl.store(sums + 4 * SIDE + i, tl.zeros([ROWS], tl.float32) + h0)


@triton.jit
def _place(others, steps, HEADS: tl.constexpr, DH: tl.constexpr, OB: tl.constexpr, CB: tl.constexpr):
    """What a program takes: `steps` blocks of the other axis from the first to before the last, channels, head, image."""
    c_blocks: tl.constexpr = (DH + CB - 1) // CB
    o_blocks = tl.cdiv(others, OB)
    groups = tl.cdiv(o_blocks, steps)
    pid = tl.program_id(0)
    first = (pid % groups) * steps
    pid = pid // groups
    c_block = pid % c_blocks
    pid = pid // c_blocks
    return first, tl.minimum(o_blocks, first + steps), c_block, pid % HEADS, (pid // HEADS).to(tl.int64)


@triton.jit
def _columns(o_block, c_block, head, others, DH: tl.constexpr, OB: tl.constexpr, CB: tl.constexpr):
    """For each column of a tile: its pixel along the other axis, its channel, and whether there is one."""
    n = tl.arange(0, OB * CB)
    o = o_block * OB + n // CB
    c = c_block * CB + n % CB
    return o, head * DH + c, (o < others) & (c < DH)


@triton.jit
def _inverse_mass(sums, inverse, y, x, H, W, mass, SIDE: tl.constexpr, MASKED: tl.constexpr):
    """1/N at the pixels (y, x), broadcast against each other, beyond the map clamped. Without a mask N = r_y r_x + mass."""
    y, x = tl.minimum(y, H - 1), tl.minimum(x, W - 1)
    if MASKED:
        return tl.load(inverse + y * W + x)
    return 1.0 / (tl.load(sums + y) * tl.load(sums + 2 * SIDE + x) + mass)


@triton.jit
def _slope(sums, slope, y, x, H, W, mass, SIDE: tl.constexpr, MASKED: tl.constexpr):
    """(h − h₀)·N at the pixels (y, x)."""
    y, x = tl.minimum(y, H - 1), tl.minimum(x, W - 1)
    if MASKED:
        return tl.load(slope + y * W + x)
    along_y = tl.load(sums + SIDE + y) * tl.load(sums + 2 * SIDE + x)
    return along_y + tl.load(sums + y) * tl.load(sums + 3 * SIDE + x) - tl.load(sums + 4 * SIDE) * mass


@triton.jit
def _store_total(
    totals, total, o_block, c_block, head, batch, others,
    HEADS: tl.constexpr, DH: tl.constexpr, OB: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """Store a tile's column sums [OB·CB], summed over its pixels, as one row of totals [B, blocks, C]."""
    c = c_block * CB + tl.arange(0, CB)
    at = totals + (batch * tl.cdiv(others, OB) + o_block) * (HEADS * DH) + head * DH + c
    tl.store(at, tl.sum(tl.reshape(total, [OB, CB]), axis=0), mask=c < DH)


@triton.jit
def _load_total(
    totals, c_block, head, batch, blocks,
    HEADS: tl.constexpr, DH: tl.constexpr, CB: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """ΣV (or ΣG') of an image at the tile's channels: [CB]."""
    c = c_block * CB + tl.arange(0, CB)
    total = tl.zeros([CB], tl.float32)
    for first in range(0, blocks, SUMMED):
        block = first + tl.arange(0, SUMMED)
        at = totals + (batch * blocks + block[:, None]) * (HEADS * DH) + (head * DH + c)[None, :]
        total += tl.sum(tl.load(at, mask=(block < blocks)[:, None] & (c < DH)[None, :], other=0.0), axis=0)
    return total


@triton.jit
def _load_centred(at, centre, key_mask, k, o, valid, ms_k, ms_o, MASKED: tl.constexpr):
    """A tile of values less their centre in float32, zero where there is none or where it may not be attended."""
    if MASKED:
        attended = tl.load(key_mask + k[:, None] * ms_k + (o * ms_o)[None, :], mask=valid, other=0)
        valid = valid & (attended != 0)
    return tl.where(valid, tl.load(at, mask=valid, other=0.0).to(tl.float32) - centre[None, :], 0.0)


@triton.jit
def _centre(values, key_mask, channel, valid, H, W, vs_y, vs_x, ms_y, ms_x, MASKED: tl.constexpr):
    """The mean of 256 pixels spread over the image, of those that may be attended: [columns].

    Of fewer it would itself be large beside the mean of an image without one, and what is added and taken away again with it
    would be rounded at its size.
    """
    i = tl.arange(0, 16)
    total = tl.zeros([channel.shape[0]], tl.float32)
    count = tl.zeros([channel.shape[0]], tl.float32)
    for row in range(16):
        y = row * H // 16
        x = i * W // 16
        inside = (i >= 0)[:, None] & valid[None, :]
        if MASKED:
            attended = tl.load(key_mask + y * ms_y + x * ms_x) != 0
            inside = attended[:, None] & valid[None, :]
        v = tl.load(values + (y * vs_y + x * vs_x)[:, None] + channel[None, :], mask=inside, other=0.0)
        total += tl.sum(v.to(tl.float32), axis=0)
        count += tl.sum(inside.to(tl.float32), axis=0)
    return total / tl.maximum(count, 1.0)


@triton.jit(do_not_specialize=["H", "W", "steps", "least"])
def forward_x(
    values, key_mask, radius, matrices, sums, product, totals, centres, H, W, steps, least,
    vs_b, vs_y, vs_x, ms_b, ms_y, ms_x,
    HEADS: tl.constexpr, DH: tl.constexpr, SIDE: tl.constexpr,
    OB: tl.constexpr, CB: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    WHOLE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """product = V g_x, ΣV over the tile, and the image's centre."""
    first_block, last_block, c_block, head, batch = _place(H, steps, HEADS, DH, OB, CB)
    if tl.load(radius + head) >= least:
        return
    _, channel, valid = _columns(0, c_block, head, H, DH, OB, CB)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    matrix = matrices + (head * 4 + 2) * (SIDE * SIDE) + m[:, None] * SIDE
    values += batch * vs_b
    key_mask += batch * ms_b
    product += batch * H * W * (HEADS * DH)
    centre = _centre(values, key_mask, channel, valid, H, W, vs_y, vs_x, ms_y, ms_x, MASKED)
    if WHOLE:
        g = tl.load(matrix + tl.arange(0, BK)[None, :])
    for o_block in range(first_block, last_block):
        y, channel, valid = _columns(o_block, c_block, head, H, DH, OB, CB)
        acc = tl.zeros([BM, OB * CB], tl.float32)
        total = tl.zeros([OB * CB], tl.float32)
        for first in range(0, W, BK):
            x = first + tl.arange(0, BK)
            at = values + x[:, None] * vs_x + (y * vs_y + channel)[None, :]
            inside = (x < W)[:, None] & valid[None, :]
            if not WHOLE:
                g = tl.load(matrix + x[None, :])
            if MASKED:
                v = _load_centred(at, centre, key_mask, x, y, inside, ms_x, ms_y, MASKED)
            else:
                v = tl.load(at, mask=inside, other=0.0)
            acc = tl.dot(g, v.to(g.dtype), acc, input_precision=PRECISION)
            total += tl.sum(v.to(tl.float32), axis=0)
        if not MASKED:
            # Centred after the exact product: the values themselves need no rounding.
            acc -= tl.load(sums + (head * 5 + 2) * SIDE + m)[:, None] * centre[None, :]
            total = tl.where(valid, total - W * centre, 0.0)
        at = product + m[:, None] * (HEADS * DH) + (y * (W * HEADS * DH) + channel)[None, :]
        tl.store(at, acc.to(product.dtype.element_ty), mask=(m < W)[:, None] & valid[None, :])
        if tl.program_id(1) == 0:
            _store_total(totals, total, o_block, c_block, head, batch, H, HEADS, DH, OB, CB)
            tl.store(centres + batch * (HEADS * DH) + channel, centre, mask=valid & (y == 0))


@triton.jit(do_not_specialize=["H", "W", "blocks", "steps", "least"])
def forward_y(
    product, radius, matrices, sums, inverse, totals, centres, out, H, W, blocks, steps, least, offset, mass,
    HEADS: tl.constexpr, DH: tl.constexpr, SIDE: tl.constexpr,
    OB: tl.constexpr, CB: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SUMMED: tl.constexpr,
    WHOLE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = (g_y product + offset·ΣV) / N + centre."""
    first_block, last_block, c_block, head, batch = _place(W, steps, HEADS, DH, OB, CB)
    if tl.load(radius + head) >= least:
        return
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    matrix = matrices + head * 4 * (SIDE * SIDE) + m[:, None] * SIDE
    product += batch * H * W * (HEADS * DH)
    total = _load_total(totals, c_block, head, batch, blocks, HEADS, DH, CB, SUMMED)
    c = c_block * CB + tl.arange(0, CB)
    centre = tl.load(centres + batch * (HEADS * DH) + head * DH + c, mask=c < DH, other=0.0)
    if WHOLE:
        g = tl.load(matrix + tl.arange(0, BK)[None, :])
    for o_block in range(first_block, last_block):
        x, channel, valid = _columns(o_block, c_block, head, W, DH, OB, CB)
        column = x * (HEADS * DH) + channel
        acc = tl.zeros([BM, OB * CB], tl.float32)
        for first in range(0, H, BK):
            y = first + tl.arange(0, BK)
            at = product + y[:, None] * (W * HEADS * DH) + column[None, :]
            p = tl.load(at, mask=(y < H)[:, None] & valid[None, :], other=0.0)
            if not WHOLE:
                g = tl.load(matrix + y[None, :])
            acc = tl.dot(g, p, acc, input_precision=PRECISION)
        o = o_block * OB + tl.arange(0, OB)
        scale = _inverse_mass(
            sums + head * 5 * SIDE,
            inverse + (batch * HEADS + head) * H * W,
            m[:, None],
            o[None, :],
            H,
            W,
            mass,
            SIDE,
            MASKED,
        )
        result = (tl.reshape(acc, [BM, OB, CB]) + offset * total[None, None, :]) * scale[:, :, None] + centre[
            None, None, :
        ]
        if MASKED:
            result = tl.where(scale[:, :, None] == 0.0, 0.0, result)
        at = out + batch * H * W * (HEADS * DH) + m[:, None] * (W * HEADS * DH) + column[None, :]
        result = tl.reshape(result, [BM, OB * CB]).to(out.dtype.element_ty)
        tl.store(at, result, mask=(m < H)[:, None] & valid[None, :])


@triton.jit
def _store_share(
    shares, share, o_block, c_block, head, batch, others, images, share_stride, first,
    HEADS: tl.constexpr, DH: tl.constexpr, OB: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """Store a tile's share of the radius' gradient in shares [heads, B, share_stride] from `first` on."""
    c_blocks: tl.constexpr = (DH + CB - 1) // CB
    at = first + (tl.program_id(1) * c_blocks + c_block) * tl.cdiv(others, OB) + o_block
    tl.store(shares + (head * images + batch) * share_stride + at, share)


@triton.jit(do_not_specialize=["H", "W", "blocks", "steps", "least", "images", "share_stride"])
def backward_y(
    grad, product, radius, matrices, sums, inverse, slope, totals, second, second_totals, shares,
    H, W, blocks, steps, least, images, share_stride, offset, mass, gs_b, gs_y, gs_x,
    HEADS: tl.constexpr, DH: tl.constexpr, SIDE: tl.constexpr,
    OB: tl.constexpr, CB: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SUMMED: tl.constexpr,
    WHOLE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, WANT_RADIUS: tl.constexpr,
):  # fmt: skip
    """second = g_y G', ΣG' over the tile, and the tile's share of the radius' gradient."""
    first_block, last_block, c_block, head, batch = _place(W, steps, HEADS, DH, OB, CB)
    if tl.load(radius + head) >= least:
        return
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    matrix = matrices + head * 4 * (SIDE * SIDE) + m[:, None] * SIDE
    sums += head * 5 * SIDE
    h0 = tl.load(sums + 4 * SIDE)
    inverse += (batch * HEADS + head) * H * W
    slope += (batch * HEADS + head) * H * W
    grad += batch * gs_b
    if WHOLE:
        g = tl.load(matrix + tl.arange(0, BK)[None, :])
        if WANT_RADIUS:
            dg = tl.load(matrix + SIDE * SIDE + tl.arange(0, BK)[None, :])
    for o_block in range(first_block, last_block):
        x, channel, valid = _columns(o_block, c_block, head, W, DH, OB, CB)
        o = o_block * OB + tl.arange(0, OB)
        column = x * (HEADS * DH) + channel
        grad_column = x * gs_x + channel
        acc = tl.zeros([BM, OB * CB], tl.float32)
        acc_slope = tl.zeros([BM, OB * CB], tl.float32)
        total = tl.zeros([OB * CB], tl.float32)
        total_slope = tl.zeros([OB * CB], tl.float32)
        for first in range(0, H, BK):
            y = first + tl.arange(0, BK)
            if not WHOLE:
                g = tl.load(matrix + y[None, :])
            at = grad + y[:, None] * gs_y + grad_column[None, :]
            upstream = tl.load(at, mask=(y < H)[:, None] & valid[None, :], other=0.0).to(tl.float32)
            scale = _inverse_mass(sums, inverse, y[:, None], o[None, :], H, W, mass, SIDE, MASKED)
            upstream = tl.reshape(tl.reshape(upstream, [BK, OB, CB]) * scale[:, :, None], [BK, OB * CB]).to(g.dtype)
            acc = tl.dot(g, upstream, acc, input_precision=PRECISION)
            total += tl.sum(upstream.to(tl.float32), axis=0)
            if WANT_RADIUS:
                # From the rounded G', so that its rounding cancels between the two products.
                h = _slope(sums, slope, y[:, None], o[None, :], H, W, mass, SIDE, MASKED) * scale
                sloped = tl.reshape(tl.reshape(upstream.to(tl.float32), [BK, OB, CB]) * h[:, :, None], [BK, OB * CB])
                if not WHOLE:
                    dg = tl.load(matrix + SIDE * SIDE + y[None, :])
                acc_slope = tl.dot(dg, upstream, acc_slope, input_precision=PRECISION)
                acc_slope = tl.dot(g, (-sloped).to(g.dtype), acc_slope, input_precision=PRECISION)
                total_slope += tl.sum(sloped, axis=0)
        inside = (m < H)[:, None] & valid[None, :]
        at = batch * H * W * (HEADS * DH) + m[:, None] * (W * HEADS * DH) + column[None, :]
        tl.store(second + at, acc.to(second.dtype.element_ty), mask=inside)
        if tl.program_id(1) == 0:
            _store_total(second_totals, total, o_block, c_block, head, batch, W, HEADS, DH, OB, CB)
        if WANT_RADIUS:
            p = tl.load(product + at, mask=inside, other=0.0).to(tl.float32)
            share = tl.sum(tl.sum(p * acc_slope, axis=1), axis=0)
            if tl.program_id(1) == 0:
                per_channel = tl.sum(tl.reshape(total_slope + h0 * total, [OB, CB]), axis=0)
                value_total = _load_total(totals, c_block, head, batch, blocks, HEADS, DH, CB, SUMMED)
                share -= offset * tl.sum(per_channel * value_total, axis=0)
            _store_share(shares, share, o_block, c_block, head, batch, W, images, share_stride, 0, HEADS, DH, OB, CB)


@triton.jit(do_not_specialize=["H", "W", "blocks", "steps", "least", "images", "share_stride", "first_share"])
def backward_x(
    values, key_mask, second, radius, matrices, second_totals, centres, dvalues, shares, H, W, blocks, steps,
    least, images, share_stride, first_share, offset,
    vs_b, vs_y, vs_x, ms_b, ms_y, ms_x,
    HEADS: tl.constexpr, DH: tl.constexpr, SIDE: tl.constexpr,
    OB: tl.constexpr, CB: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SUMMED: tl.constexpr,
    WHOLE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, WANT_RADIUS: tl.constexpr,
):  # fmt: skip
    """dV = second g_x + offset·ΣG', and the tile's share of the radius' gradient."""
    first_block, last_block, c_block, head, batch = _place(H, steps, HEADS, DH, OB, CB)
    if tl.load(radius + head) >= least:
        return
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    matrix = matrices + (head * 4 + 2) * (SIDE * SIDE) + m[:, None] * SIDE
    values += batch * vs_b
    key_mask += batch * ms_b
    image = batch * H * W * (HEADS * DH)
    total = _load_total(second_totals, c_block, head, batch, blocks, HEADS, DH, CB, SUMMED)
    if WHOLE:
        g = tl.load(matrix + tl.arange(0, BK)[None, :])
        if WANT_RADIUS:
            dg = tl.load(matrix + SIDE * SIDE + tl.arange(0, BK)[None, :])
    for o_block in range(first_block, last_block):
        y, channel, valid = _columns(o_block, c_block, head, H, DH, OB, CB)
        column = y * (W * HEADS * DH) + channel
        acc = tl.zeros([BM, OB * CB], tl.float32)
        acc_slope = tl.zeros([BM, OB * CB], tl.float32)
        for first in range(0, W, BK):
            x = first + tl.arange(0, BK)
            inside = (x < W)[:, None] & valid[None, :]
            p = tl.load(second + image + x[:, None] * (HEADS * DH) + column[None, :], mask=inside, other=0.0)
            if not WHOLE:
                g = tl.load(matrix + x[None, :])
            acc = tl.dot(g, p, acc, input_precision=PRECISION)
            if WANT_RADIUS:
                if not WHOLE:
                    dg = tl.load(matrix + SIDE * SIDE + x[None, :])
                acc_slope = tl.dot(dg, p, acc_slope, input_precision=PRECISION)
        inside = (m < W)[:, None] & valid[None, :]
        at = image + m[:, None] * (HEADS * DH) + column[None, :]
        result = tl.reshape(tl.reshape(acc, [BM, OB, CB]) + offset * total[None, None, :], [BM, OB * CB])
        if MASKED:
            attended = tl.load(key_mask + m[:, None] * ms_x + (y * ms_y)[None, :], mask=inside, other=0)
            result = tl.where(attended != 0, result, 0.0)
        tl.store(dvalues + at, result.to(dvalues.dtype.element_ty), mask=inside)
        if WANT_RADIUS:
            centre = tl.load(centres + batch * (HEADS * DH) + channel, mask=valid, other=0.0)
            at = values + m[:, None] * vs_x + (y * vs_y + channel)[None, :]
            v = _load_centred(at, centre, key_mask, m, y, inside, ms_x, ms_y, MASKED)
            share = tl.sum(tl.sum(v * acc_slope, axis=1), axis=0)
            _store_share(
                shares, share, o_block, c_block, head, batch, H, images, share_stride, first_share, HEADS, DH, OB, CB
            )
