"""The Gaussian of a wide radius in Triton: by interpolation between 16×16 nodes, every map read once and written once.

A Gaussian that is wide beside the map is smooth along each axis, so it is, to rounding, the polynomial through its values at
r = 16 Chebyshev nodes t of the axis: g(y, y') = Σ_ab L_a(y) g(t_a, t_b) L_b(y'), with L_a the Lagrange polynomials. L knows
nothing of the radius. In the nodes' space, with K_ab = g(t_a, t_b),

    A = L_y' V L_x          [r, r] per image and channel: `project`
    X = (K_y A K_x + offset·ΣA) / N ,   N the same of ones, at the nodes: `nodes_forward`
    out = L_y X L_x'        for S/N is as smooth as S: `expand`

and the gradient goes the same way: D = L_y' G L_x, then K_y (D / N) K_x + offset·Σ(D / N) at the nodes, then `expand`. The
radius' gradient is a sum over the nodes, Σ (D / N)·(K'_y A K_x + K_y A K'_x − N'·X).

The weights of a pixel sum to 1, so A may be centred, which leaves ΣA = 0: A − a·M with M the coefficients of ones (or of the
mask) and a = ΣA / ΣM, added again to X.

Coefficients lie as [B, r along x, r along y, C], float32. Heads whose radius is below `least` are left
to the axis products.
"""

import triton
import triton.language as tl

from nearsight.ops.explicit.kernels import product, profile, split


@triton.jit(do_not_specialize=["H", "W"])
def basis(table, sums, H, W, SIDE: tl.constexpr, ROWS: tl.constexpr):
    """L of one axis, [r, SIDE], zero beyond the axis; its sums over the pixels and the nodes' places in pixels, [2, r].

    In float64 inside: near the ends L changes by r² over the length of the axis.
    """
    axis = tl.program_id(0)
    size = tl.where(axis == 0, H, W)
    a = tl.arange(0, 16)
    angle = (2 * a + 1).to(tl.float64) * (3.141592653589793 / 32)
    weight = tl.where(a % 2 == 0, 1.0, -1.0) * tl.cos(angle - 1.5707963267948966)
    at = (tl.cos(angle) + 1.0) * 0.5 * tl.maximum(size - 1, 1).to(tl.float64)
    total = tl.zeros([16], tl.float64)
    for first in range(0, SIDE, ROWS):
        pixel = first + tl.arange(0, ROWS)
        distance = pixel.to(tl.float64)[:, None] - at[None, :]
        # A pixel on a node: its quotient outweighs the others by so much that the sum below is it alone.
        quotient = weight[None, :] / tl.where(tl.abs(distance) < 1e-9, 1e-30, distance)
        lagrange = quotient / tl.sum(quotient, axis=1)[:, None]
        lagrange = tl.where((pixel < size)[:, None], lagrange, 0.0).to(tl.float32)
        tl.store(table + (axis * 16 + a)[None, :] * SIDE + pixel[:, None], lagrange)
        total += tl.sum(lagrange.to(tl.float64), axis=0)
    tl.store(sums + axis * 32 + a, total.to(tl.float32))
    tl.store(sums + axis * 32 + 16 + a, at.to(tl.float32))


@triton.jit
def _smooth(radius, channel, valid, least, DH: tl.constexpr, ALIKE: tl.constexpr):
    """Whether each channel is there and its radius wide enough; ALIKE neighbours always agree, so that accesses stay wide."""
    wide = valid & (tl.load(radius + channel // DH, mask=valid, other=0.0) >= least)
    return tl.max_constancy(wide, ALIKE)


@triton.jit
def _swap(x, CB: tl.constexpr):
    """[r, r·CB] with its two node axes exchanged."""
    return tl.reshape(tl.permute(tl.reshape(x, [16, 16, CB]), [1, 0, 2]), [16, 16 * CB])


@triton.jit(do_not_specialize=["H", "W", "blocks", "least"])
def project(
    values, key_mask, radius, table, coefficients, H, W, blocks, least,
    vs_b, vs_y, vs_x, ms_b, ms_y, ms_x,
    C: tl.constexpr, DH: tl.constexpr, ALIKE: tl.constexpr, SIDE: tl.constexpr, CB: tl.constexpr, BK: tl.constexpr,
    MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """coefficients [B, strips, r, r, C] = L_y' V L_x over a strip of `blocks` times 16 columns of the map."""
    c_blocks = tl.cdiv(C, CB)
    strips = tl.cdiv(tl.cdiv(W, 16), blocks)
    pid = tl.program_id(0)
    c_block = pid % c_blocks
    strip = (pid // c_blocks) % strips
    batch = (pid // (c_blocks * strips)).to(tl.int64)

    n = tl.arange(0, 16 * CB)
    channel = c_block * CB + n % CB
    # Every head of this block narrow: nothing here is wanted.
    if tl.sum(_smooth(radius, channel, channel < C, least, DH, ALIKE).to(tl.int32), axis=0) == 0:
        return
    r = tl.arange(0, 16)
    values += batch * vs_b
    key_mask += batch * ms_b
    steps = tl.cdiv(H, BK)
    first = strip * blocks
    last = tl.minimum(tl.cdiv(W, 16), first + blocks)
    u = tl.zeros([16, 16 * CB], tl.float32)
    result = tl.zeros([16, 16 * CB], tl.float32)
    # One loop over both axes, so that loads stay ahead across columns.
    for i in range(first * steps, last * steps):
        block = i // steps
        y = (i % steps) * BK + tl.arange(0, BK)
        x = block * 16 + n // CB
        inside = (y < H)[:, None] & ((x < W) & (channel < C))[None, :]
        if MASKED:
            attended = tl.load(key_mask + y[:, None] * ms_y + (x * ms_x)[None, :], mask=inside, other=0)
            inside = inside & (attended != 0)
        v = tl.load(values + y[:, None] * vs_y + (x * vs_x + channel)[None, :], mask=inside, other=0.0)
        along_y = tl.load(table + r[:, None] * SIDE + y[None, :])
        if PARTS == 3:
            u += product(along_y, v, PARTS)
        else:
            high, low = split(along_y, values.dtype.element_ty)
            u = tl.dot(high, v, u)
            u = tl.dot(low, v, u)
        if i % steps == steps - 1:
            along_x = tl.load(table + (16 + r)[:, None] * SIDE + (block * 16 + r)[None, :])
            result += product(along_x, _swap(u, CB), PARTS)
            u = tl.zeros([16, 16 * CB], tl.float32)
    at = (batch * strips + strip) * 256 + r[:, None] * 16 + (n // CB)[None, :]
    tl.store(coefficients + at * C + channel[None, :], result, mask=(channel < C)[None, :])


@triton.jit(do_not_specialize=["H", "W", "blocks", "least"])
def expand(
    nodes, key_mask, radius, table, out, H, W, blocks, least, ms_b, ms_y, ms_x,
    C: tl.constexpr, DH: tl.constexpr, ALIKE: tl.constexpr, SIDE: tl.constexpr, CB: tl.constexpr, BM: tl.constexpr,
    MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out [B, H, W, C] = L_y X L_x' of nodes X [B, r, r, C] over a strip; zero where MASKED and not attended."""
    c_blocks = tl.cdiv(C, CB)
    strips = tl.cdiv(tl.cdiv(W, 16), blocks)
    pid = tl.program_id(0)
    c_block = pid % c_blocks
    strip = (pid // c_blocks) % strips
    batch = (pid // (c_blocks * strips)).to(tl.int64)

    n = tl.arange(0, 16 * CB)
    channel = c_block * CB + n % CB
    smooth = _smooth(radius, channel, channel < C, least, DH, ALIKE)
    if tl.sum(smooth.to(tl.int32), axis=0) == 0:
        return
    r = tl.arange(0, 16)
    at = batch * 256 + r[:, None] * 16 + (n // CB)[None, :]
    coefficients = tl.load(nodes + at * C + channel[None, :], mask=smooth[None, :], other=0.0)
    out += batch * H * W * C
    key_mask += batch * ms_b
    for block in range(strip * blocks, tl.minimum(tl.cdiv(W, 16), (strip + 1) * blocks)):
        along_x = tl.load(table + (16 + r)[None, :] * SIDE + (block * 16 + r)[:, None])
        u = _swap(product(along_x, coefficients, PARTS), CB)
        x = block * 16 + n // CB
        column = smooth & (x < W)
        for first in range(0, H, BM):
            y = first + tl.arange(0, BM)
            along_y = tl.load(table + r[None, :] * SIDE + y[:, None])
            result = product(along_y, u, PARTS)
            inside = (y < H)[:, None] & column[None, :]
            if MASKED:
                attended = tl.load(key_mask + y[:, None] * ms_y + (x * ms_x)[None, :], mask=inside, other=0)
                result = tl.where(attended != 0, result, 0.0)
            tl.store(
                out + (y * W)[:, None] * C + (x * C + channel)[None, :], result.to(out.dtype.element_ty), mask=inside
            )


@triton.jit
def _load_coefficients(at, strips, C, c, valid, CB: tl.constexpr):
    """The coefficients of one image and CB channels, summed over its strips: [r, r·CB]."""
    r, n = tl.arange(0, 16), tl.arange(0, 16 * CB)
    total = tl.zeros([16, 16 * CB], tl.float32)
    for strip in range(strips):
        place = strip * 256 + r[:, None] * 16 + (n // CB)[None, :]
        total += tl.load(at + place * C + c[None, :], mask=valid[None, :], other=0.0)
    return total


@triton.jit
def _between_nodes(places, size, sigma):
    """K and dK/dσ of an axis: [r, r]."""
    at = tl.load(places + tl.arange(0, 16))
    return profile(at[:, None] - at[None, :], size, sigma, True)


@triton.jit
def _ones(mask_coefficients, sums, batch, mask_strips, MASKED: tl.constexpr):
    """The coefficients of ones, or of an image's mask: [r along y, r along x]."""
    r = tl.arange(0, 16)
    if MASKED:
        ones = tl.zeros([16, 16], tl.float32)
        for strip in range(mask_strips):
            ones += tl.load(mask_coefficients + (batch * mask_strips + strip) * 256 + r[None, :] * 16 + r[:, None])
    else:
        ones = tl.load(sums + r)[:, None] * tl.load(sums + 32 + r)[None, :]
    return ones


@triton.jit
def _per_node(x, CB: tl.constexpr):
    """[r, r] as [r, r·CB], each column for CB channels."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], [16, 16, CB]), [16, 16 * CB])


@triton.jit
def _per_channel(x, CB: tl.constexpr):
    """The sum over the nodes of [r, r·CB], for each column: [r·CB]."""
    x = tl.sum(tl.reshape(tl.sum(x, axis=0), [16, CB]), axis=0)
    return tl.reshape(tl.broadcast_to(x[None, :], [16, CB]), [16 * CB])


@triton.jit
def _node_place(HEADS: tl.constexpr, DH: tl.constexpr, CB: tl.constexpr):
    """The block of channels, head and image of a program; each column's channel, and whether there is one."""
    c_blocks: tl.constexpr = (DH + CB - 1) // CB
    pid = tl.program_id(0)
    c_block = pid % c_blocks
    head = (pid // c_blocks) % HEADS
    c = c_block * CB + tl.arange(0, 16 * CB) % CB
    return c_block, head, (pid // (c_blocks * HEADS)).to(tl.int64), head * DH + c, c < DH


@triton.jit
def _inverse(mass, tiny):
    return tl.where(mass > tiny, 1.0 / tl.where(mass > tiny, mass, 1.0), 0.0)


@triton.jit(do_not_specialize=["H", "W", "strips", "mask_strips", "least"])
def nodes_forward(
    coefficients, mask_coefficients, radius, sums, centred, nodes, H, W, strips, mask_strips, offset, least, tiny,
    HEADS: tl.constexpr, DH: tl.constexpr, CB: tl.constexpr, MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """centred = A − a·M, nodes = K_y centred K_x / N + a."""
    C: tl.constexpr = HEADS * DH
    _, head, batch, channel, valid = _node_place(HEADS, DH, CB)
    r, n = tl.arange(0, 16), tl.arange(0, 16 * CB)
    rows_x = batch * (256 * C) + (r[:, None] * 16 + (n // CB)[None, :]) * C + channel[None, :]
    rows_y = batch * (256 * C) + (r[:, None] + (n // CB * 16)[None, :]) * C + channel[None, :]
    sigma = tl.load(radius + head)
    if sigma < least:
        # The backward's argument all the same, so no element may stay unwritten.
        tl.store(centred + rows_x, tl.zeros([16, 16 * CB], tl.float32), mask=valid[None, :])
        return
    a = _load_coefficients(coefficients + batch * strips * 256 * C, strips, C, channel, valid, CB)
    ones = _ones(mask_coefficients, sums, batch, mask_strips, MASKED)
    count = tl.sum(tl.sum(ones, axis=1), axis=0)
    centre = _per_channel(a, CB) * _inverse(count, tiny)
    a -= centre[None, :] * _per_node(tl.trans(ones), CB)
    tl.store(centred + rows_x, a, mask=valid[None, :])
    along_y, _ = _between_nodes(sums + 16, H, sigma)
    along_x, _ = _between_nodes(sums + 48, W, sigma)
    mass = product(product(along_y, ones, PARTS), along_x, PARTS) + offset * count
    result = product(along_y, _swap(product(along_x, a, PARTS), CB), PARTS)
    result = result * _per_node(_inverse(mass, tiny), CB) + centre[None, :]
    tl.store(nodes + rows_y, result, mask=valid[None, :])


@triton.jit(do_not_specialize=["H", "W", "strips", "mask_strips", "least"])
def nodes_backward(
    coefficients, mask_coefficients, radius, sums, centred, nodes, shares,
    H, W, strips, mask_strips, offset, least, tiny,
    HEADS: tl.constexpr, DH: tl.constexpr, CB: tl.constexpr, MASKED: tl.constexpr, PARTS: tl.constexpr,
    WANT_RADIUS: tl.constexpr,
):  # fmt: skip
    """nodes = K_y (D / N) K_x + offset·Σ(D / N), and the program's share of the radius' gradient, shares [heads, B·blocks].

    The sum of (D / N)·(K'_y A K_x + K_y A K'_x − h K_y A K_x), h = N' / N, turned round: A times that of D / N and h·D / N.
    """
    C: tl.constexpr = HEADS * DH
    c_blocks: tl.constexpr = (DH + CB - 1) // CB
    c_block, head, batch, channel, valid = _node_place(HEADS, DH, CB)
    sigma = tl.load(radius + head)
    if sigma < least:
        return
    r, n = tl.arange(0, 16), tl.arange(0, 16 * CB)
    rows_y = batch * (256 * C) + (r[:, None] + (n // CB * 16)[None, :]) * C + channel[None, :]
    ones = _ones(mask_coefficients, sums, batch, mask_strips, MASKED)
    count = tl.sum(tl.sum(ones, axis=1), axis=0)
    along_y, slope_y = _between_nodes(sums + 16, H, sigma)
    along_x, slope_x = _between_nodes(sums + 48, W, sigma)
    ones_y = product(along_y, ones, PARTS)
    inverse = _inverse(product(ones_y, along_x, PARTS) + offset * count, tiny)
    d = _load_coefficients(coefficients + batch * strips * 256 * C, strips, C, channel, valid, CB)
    d = d * _per_node(tl.trans(inverse), CB)
    total = offset * _per_channel(d, CB)
    d_x = _swap(product(along_x, d, PARTS), CB)
    tl.store(nodes + rows_y, product(along_y, d_x, PARTS) + total[None, :], mask=valid[None, :])
    if WANT_RADIUS:
        slope = product(ones_y, slope_x, PARTS) + product(product(slope_y, ones, PARTS), along_x, PARTS)
        sloped = d * _per_node(tl.trans(-slope * inverse), CB)
        change_x = product(slope_x, d, PARTS) + product(along_x, sloped, PARTS)
        change = product(slope_y, d_x, PARTS) + product(along_y, _swap(change_x, CB), PARTS)
        a = tl.load(centred + rows_y, mask=valid[None, :], other=0.0)
        share = tl.sum(tl.sum(a * change, axis=1), axis=0)
        tl.store(shares + head * (tl.num_programs(0) // HEADS) + batch * c_blocks + c_block, share)
