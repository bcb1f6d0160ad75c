"""Explicit attention's separable kinds on small maps in Triton: a program holds whole images of a few channels.

    out = g_y V g_x / N + a          dV = g_y G' g_x + offset·ΣG' ,   G' = G / N

The weights of a pixel sum to 1, so V is taken less its mean a (of the pixels that may be attended); that leaves ΣV = 0. The
radius' gradient is Σ V·((g_y G') dg_x + (dg_y G' − g_y (h·G')) g_x) with h = (dN/dσ) / N.

A map is [SIDE, SIDE·CB]: a row is a pixel of one axis, column n is pixel n // CB of the other and channel n % CB.
"""

import triton
import triton.language as tl

from nearsight.ops.explicit.kernels import axis_matrix, load_radius, product


@triton.jit
def _swap(x, SIDE: tl.constexpr, CB: tl.constexpr):
    """A map with its two axes exchanged."""
    return tl.reshape(tl.permute(tl.reshape(x, [SIDE, SIDE, CB]), [1, 0, 2]), [SIDE, SIDE * CB])


@triton.jit
def _per_pixel(x, SIDE: tl.constexpr, CB: tl.constexpr):
    """[SIDE, SIDE] for CB channels."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], [SIDE, SIDE, CB]), [SIDE, SIDE * CB])


@triton.jit
def _per_channel(x, SIDE: tl.constexpr, CB: tl.constexpr):
    """The sum over the pixels of a map, for each column: [SIDE·CB]."""
    x = tl.sum(tl.reshape(tl.sum(x, axis=0), [SIDE, CB]), axis=0)
    return tl.reshape(tl.broadcast_to(x[None, :], [SIDE, CB]), [SIDE * CB])


@triton.jit
def _place(HEADS: tl.constexpr, DH: tl.constexpr, SIDE: tl.constexpr, CB: tl.constexpr):
    """The block of channels, head and image of a program, and the channel within its head of each column."""
    c_blocks: tl.constexpr = (DH + CB - 1) // CB
    pid = tl.program_id(0)
    c_block = pid % c_blocks
    c = c_block * CB + tl.arange(0, SIDE * CB) % CB
    return c_block, (pid // c_blocks) % HEADS, (pid // (c_blocks * HEADS)).to(tl.int64), c


@triton.jit
def _attended(key_mask, H, W, ms_y, ms_x, SIDE: tl.constexpr, MASKED: tl.constexpr):
    """1 where a pixel (y, x) is there and may be attended: [SIDE, SIDE]."""
    y, x = tl.arange(0, SIDE), tl.arange(0, SIDE)
    inside = (y < H)[:, None] & (x < W)[None, :]
    if MASKED:
        inside = inside & (tl.load(key_mask + y[:, None] * ms_y + x[None, :] * ms_x, mask=inside, other=0) != 0)
    return inside.to(tl.float32)


@triton.jit
def _load_centred(at, attended, inside, count, SIDE: tl.constexpr, CB: tl.constexpr, MASKED: tl.constexpr):
    """A map of values less its mean, zero where it may not be attended; and the mean, for each column."""
    if MASKED:
        inside = inside & (_per_pixel(attended, SIDE, CB) != 0.0)
    v = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    mean = _per_channel(v, SIDE, CB) / tl.maximum(count, 1.0)
    return tl.where(inside, v - mean[None, :], 0.0), mean


@triton.jit
def _inverse(mass, tiny):
    return tl.where(mass > tiny, 1.0 / tl.where(mass > tiny, mass, 1.0), 0.0)


@triton.jit(do_not_specialize=["H", "W", "least"])
def whole_forward(
    values, key_mask, radius, out, H, W, offset, least, tiny, vs_b, vs_y, vs_x, ms_b, ms_y, ms_x,
    HEADS: tl.constexpr, DH: tl.constexpr, SIDE: tl.constexpr, CB: tl.constexpr,
    GAUSSIAN: tl.constexpr, MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    _, head, batch, c = _place(HEADS, DH, SIDE, CB)
    channel = head * DH + c
    i, o = tl.arange(0, SIDE), tl.arange(0, SIDE * CB) // CB
    sigma = load_radius(radius + head)
    if sigma >= least:
        return
    rows, _ = axis_matrix(i[:, None], i[None, :], H, sigma, GAUSSIAN)
    columns, _ = axis_matrix(i[:, None], i[None, :], W, sigma, GAUSSIAN)
    attended = _attended(key_mask + batch * ms_b, H, W, ms_y, ms_x, SIDE, MASKED)
    count = tl.sum(tl.sum(attended, axis=1), axis=0)
    inside = (i < H)[:, None] & ((o < W) & (c < DH))[None, :]
    at = values + batch * vs_b + i[:, None] * vs_y + (o * vs_x + channel)[None, :]
    v, mean = _load_centred(at, attended, inside, count, SIDE, CB, MASKED)
    mass = product(product(rows, attended, PARTS), columns, PARTS) + offset * count
    inverse = _inverse(mass, tiny)

    along_y = _swap(product(rows, v, PARTS), SIDE, CB)
    result = product(columns, along_y, PARTS)
    result = result * _per_pixel(tl.trans(inverse), SIDE, CB) + mean[None, :]
    if MASKED:
        result = tl.where(_per_pixel(tl.trans(inverse), SIDE, CB) == 0.0, 0.0, result)
    # Rows are now pixels along x.
    at = out + batch * H * W * (HEADS * DH) + i[:, None] * (HEADS * DH) + (o * (W * HEADS * DH) + channel)[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(i < W)[:, None] & ((o < H) & (c < DH))[None, :])


@triton.jit(do_not_specialize=["H", "W", "least"])
def whole_backward(
    grad, values, key_mask, radius, dvalues, shares, H, W, offset, least, tiny,
    gs_b, gs_y, gs_x, vs_b, vs_y, vs_x, ms_b, ms_y, ms_x,
    HEADS: tl.constexpr, DH: tl.constexpr, SIDE: tl.constexpr, CB: tl.constexpr,
    GAUSSIAN: tl.constexpr, MASKED: tl.constexpr, PARTS: tl.constexpr, WANT_RADIUS: tl.constexpr,
):  # fmt: skip
    """dV, and the program's share of the radius' gradient: shares [heads, B·blocks]."""
    c_blocks: tl.constexpr = (DH + CB - 1) // CB
    c_block, head, batch, c = _place(HEADS, DH, SIDE, CB)
    channel = head * DH + c
    i, o = tl.arange(0, SIDE), tl.arange(0, SIDE * CB) // CB
    sigma = load_radius(radius + head)
    if sigma >= least:
        return
    rows, rows_slope = axis_matrix(i[:, None], i[None, :], H, sigma, GAUSSIAN)
    columns, columns_slope = axis_matrix(i[:, None], i[None, :], W, sigma, GAUSSIAN)
    attended = _attended(key_mask + batch * ms_b, H, W, ms_y, ms_x, SIDE, MASKED)
    count = tl.sum(tl.sum(attended, axis=1), axis=0)
    along = product(rows, attended, PARTS)
    inverse = _inverse(product(along, columns, PARTS) + offset * count, tiny)

    inside = (i < H)[:, None] & ((o < W) & (c < DH))[None, :]
    at = grad + batch * gs_b + i[:, None] * gs_y + (o * gs_x + channel)[None, :]
    upstream = tl.load(at, mask=inside, other=0.0).to(tl.float32) * _per_pixel(inverse, SIDE, CB)
    total = offset * _per_channel(upstream, SIDE, CB)
    along_y = _swap(product(rows, upstream, PARTS), SIDE, CB)
    result = product(columns, along_y, PARTS) + total[None, :]
    if MASKED:
        result = tl.where(_per_pixel(tl.trans(attended), SIDE, CB) != 0.0, result, 0.0)
    inside_x = (i < W)[:, None] & ((o < H) & (c < DH))[None, :]
    at = dvalues + batch * H * W * (HEADS * DH) + i[:, None] * (HEADS * DH) + (o * (W * HEADS * DH) + channel)[None, :]
    tl.store(at, result.to(dvalues.dtype.element_ty), mask=inside_x)

    if WANT_RADIUS:
        slope = product(along, columns_slope, PARTS)
        slope += product(product(rows_slope, attended, PARTS), columns, PARTS)
        sloped = product(rows, upstream * _per_pixel(-slope * inverse, SIDE, CB), PARTS)
        sloped += product(rows_slope, upstream, PARTS)
        change = product(columns_slope, along_y, PARTS)
        change += product(columns, _swap(sloped, SIDE, CB), PARTS)
        at = values + batch * vs_b + i[:, None] * vs_x + (o * vs_y + channel)[None, :]
        v, _ = _load_centred(at, tl.trans(attended), inside_x, count, SIDE, CB, MASKED)
        share = tl.sum(tl.sum(v * change, axis=1), axis=0)
        tl.store(shares + head * (tl.num_programs(0) // HEADS) + batch * c_blocks + c_block, share)
