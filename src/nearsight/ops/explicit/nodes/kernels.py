"""The Gaussian of a wide radius in Triton: by interpolation between 16×16 nodes, every map read once and written once.

A Gaussian that is wide beside the map is smooth along each axis, so it is, to rounding, the polynomial through its values at
r = 16 Chebyshev nodes t of the axis: g(y, y') = Σ_ab L_a(y) g(t_a, t_b) L_b(y'), with L_a the Lagrange polynomials. L knows
nothing of the radius. In the nodes' space, with K_ab = g(t_a, t_b),

    A = L_y' V L_x                               [r, r] per image and channel: `_project`
    X = (K_y A K_x + offset·ΣA) / N ,            N the same of ones, at the nodes
    out = L_y X L_x'                             for S/N is as smooth as S: `_expand`

and the gradient goes the same way: D = L_y' G L_x, then K_y (D / N) K_x + offset·Σ(D / N) at the nodes, then L_y … L_x'. The
radius' gradient is a sum over the nodes, Σ (D / N)·(K'_y A K_x + K_y A K'_x − N'·X), the bracket made by the forward, which
has its parts at hand. One program does all of it for an image and a few channels.

The weights of a pixel sum to 1, so A may be centred, which leaves ΣA = 0: A − a·M with M the coefficients of ones (or of the
mask) and a = ΣA / ΣM, added again to X.

A tile is [rows, columns·CB], its column n being pixel or node n // CB and channel n % CB. Heads whose radius is below `least`
are left to the axis products.
"""

import triton
import triton.language as tl

from nearsight.ops.explicit.kernels import load_radius, product, profile, split

# What `prepare` leaves of a head: K_y, K'_y, K_x, K'_x [4, r, r], their products with the sums of L [4, r], those sums [2, r].
K_Y, SLOPE_Y, K_X, SLOPE_X = (tl.constexpr(256 * i) for i in range(4))
MASS_Y, MASS_SLOPE_Y, MASS_X, MASS_SLOPE_X, SUM_Y, SUM_X = (tl.constexpr(1024 + 16 * i) for i in range(6))
PER_HEAD = tl.constexpr(1120)
# What `prepare_mask` leaves of an image and head: M, 1/N and N' at the nodes, [3, r along y, r along x], and ΣM.
INVERSE, MASS_SLOPE, COUNT, PER_MASK = (tl.constexpr(i) for i in (256, 512, 768, 772))
PI = tl.constexpr(3.141592653589793)


@triton.jit
def _sine(x):
    """sin x for |x| ≤ π/2 in float64: its series, to the last digit."""
    square = x * x
    total = x * 0.0 + 1.0
    for i in tl.static_range(11):
        total = 1.0 - square * (1.0 / ((22 - 2 * i) * (23 - 2 * i))) * total
    return x * total


@triton.jit(do_not_specialize=["H", "W"])
def prepare(radius, rows, columns, between, H, W, SIDE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """L of one axis, zero beyond it, in rows [2, 2, r, SIDE] and columns [2, 2, SIDE, r], in two parts of a half type (one of
    float32); and what one head has between its nodes.

    In float64 inside: near the ends L changes by r² over the length of the axis.
    """
    head = tl.program_id(0) // 2
    axis = tl.program_id(0) % 2
    size = tl.where(axis == 0, H, W)
    a = tl.arange(0, 16)
    weight = tl.where(a % 2 == 0, 1.0, -1.0) * _sine(tl.minimum(2 * a + 1, 31 - 2 * a).to(tl.float64) * (PI / 32))
    at = (_sine((15 - 2 * a).to(tl.float64) * (PI / 32)) + 1.0) * 0.5 * tl.maximum(size - 1, 1).to(tl.float64)
    total = tl.zeros([16], tl.float64)
    for first in range(0, SIDE, BLOCK):
        pixel = first + tl.arange(0, BLOCK)
        distance = pixel.to(tl.float64)[:, None] - at[None, :]
        # A pixel on a node: its quotient outweighs the others by so much that the sum below is it alone.
        quotient = weight[None, :] / tl.where(tl.abs(distance) < 1e-9, 1e-30, distance)
        lagrange = quotient * (1.0 / tl.sum(quotient, axis=1))[:, None]
        lagrange = tl.where((pixel < size)[:, None], lagrange, 0.0).to(tl.float32)
        total += tl.sum(lagrange.to(tl.float64), axis=0)
        if head == 0:
            at_row = rows + (axis * 32 + a)[None, :] * SIDE + pixel[:, None]
            at_column = columns + axis * 32 * SIDE + pixel[:, None] * 16 + a[None, :]
            if PARTS == 2:
                high, low = split(lagrange, rows.dtype.element_ty)
                tl.store(at_row, high)
                tl.store(at_row + 16 * SIDE, low)
                high, low = split(lagrange, columns.dtype.element_ty)
                tl.store(at_column, high)
                tl.store(at_column + 16 * SIDE, low)
            else:
                tl.store(at_row, lagrange)
                tl.store(at_column, lagrange)
    total, place = total.to(tl.float32), at.to(tl.float32)
    g, slope = profile(place[:, None] - place[None, :], size, load_radius(radius + head), True)
    between += head * PER_HEAD
    square = between + axis * 512 + a[:, None] * 16 + a[None, :]
    tl.store(square, g)
    tl.store(square + 256, slope)
    line = between + 1024 + axis * 32 + a
    tl.store(line, tl.sum(g * total[None, :], axis=1))
    tl.store(line + 16, tl.sum(slope * total[None, :], axis=1))
    tl.store(between + 1088 + axis * 16 + a, total)


@triton.jit
def _swap(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CB: tl.constexpr):
    """[ROWS, COLUMNS·CB] as [COLUMNS, ROWS·CB]."""
    return tl.reshape(tl.permute(tl.reshape(x, [ROWS, COLUMNS, CB]), [1, 0, 2]), [COLUMNS, ROWS * CB])


@triton.jit
def _per_channels(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CB: tl.constexpr):
    """[ROWS, COLUMNS] as [ROWS, COLUMNS·CB], each column for CB channels."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], [ROWS, COLUMNS, CB]), [ROWS, COLUMNS * CB])


@triton.jit
def _attended(key_mask, i, j, size_i, size_j, ms_i, ms_j):
    """Whether the pixels (i, j), in either order of the axes, are there and may be attended."""
    inside = (i < size_i)[:, None] & (j < size_j)[None, :]
    return tl.load(key_mask + i[:, None] * ms_i + j[None, :] * ms_j, mask=inside, other=0) != 0


@triton.jit
def _per_channel(x, CB: tl.constexpr):
    """The sum over the nodes of [r, r·CB]: [CB]."""
    return tl.sum(tl.sum(tl.reshape(x, [16, 16, CB]), axis=1), axis=0)


@triton.jit
def _repeat(x, TIMES: tl.constexpr, CB: tl.constexpr):
    """[CB], one after the other: [TIMES·CB]."""
    return tl.reshape(tl.broadcast_to(x[None, :], [TIMES, CB]), [TIMES * CB])


@triton.jit
def _place(HEADS: tl.constexpr, DH: tl.constexpr, CB: tl.constexpr):
    """The block of channels, head and image of a program."""
    c_blocks: tl.constexpr = (DH + CB - 1) // CB
    pid = tl.program_id(0)
    return pid % c_blocks, (pid // c_blocks) % HEADS, (pid // (c_blocks * HEADS)).to(tl.int64)


@triton.jit
def _inverse(mass, tiny):
    return tl.where(mass > tiny, 1.0 / tl.where(mass > tiny, mass, 1.0), 0.0)


@triton.jit
def _reciprocal(x, PARTS: tl.constexpr):
    """1/x of a positive x, to 22 digits where PARTS is 2: a third of a division's instructions."""
    return 1.0 / x if PARTS == 3 else tl.rsqrt(x) * tl.rsqrt(x)


@triton.jit
def _load_parts(at, second, PARTS: tl.constexpr):
    """A part of L in float32, the sum of its two parts of a half type."""
    high = tl.load(at).to(tl.float32)
    return high if PARTS == 3 else high + tl.load(at + second).to(tl.float32)


@triton.jit
def _matrix(at):
    """An r×r matrix."""
    r = tl.arange(0, 16)
    return tl.load(at + r[:, None] * 16 + r[None, :])


@triton.jit(do_not_specialize=["H", "W"])
def prepare_mask(
    key_mask, rows, between, masses, H, W, offset, tiny, ms_b, ms_y, ms_x,
    HEADS: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The coefficients M of one image's mask, L_y' M L_x, and what one head makes of them."""
    head = tl.program_id(0) % HEADS
    batch = (tl.program_id(0) // HEADS).to(tl.int64)
    key_mask += batch * ms_b
    r = tl.arange(0, 16)
    ones = tl.zeros([16, 16], tl.float32)
    for first_x in range(0, W, BLOCK):
        x = first_x + tl.arange(0, BLOCK)
        along_x = _load_parts(rows + 32 * SIDE + r[None, :] * SIDE + x[:, None], 16 * SIDE, PARTS)
        u = tl.zeros([16, BLOCK], tl.float32)
        for first_y in range(0, H, BLOCK):
            y = first_y + tl.arange(0, BLOCK)
            along_y = _load_parts(rows + r[:, None] * SIDE + y[None, :], 16 * SIDE, PARTS)
            u += product(along_y, _attended(key_mask, y, x, H, W, ms_y, ms_x).to(tl.float32), PARTS)
        ones += product(u, along_x, PARTS)
    between += head * PER_HEAD
    along_y, along_x = _matrix(between + K_Y), _matrix(between + K_X)
    ones_y = product(along_y, ones, PARTS)
    count = tl.sum(tl.sum(ones, axis=1), axis=0)
    slope = product(ones_y, _matrix(between + SLOPE_X), PARTS)
    slope += product(product(_matrix(between + SLOPE_Y), ones, PARTS), along_x, PARTS)
    at = masses + (batch * HEADS + head) * PER_MASK
    place = r[:, None] * 16 + r[None, :]
    tl.store(at + place, ones)
    tl.store(at + INVERSE + place, _inverse(product(ones_y, along_x, PARTS) + offset * count, tiny))
    tl.store(at + MASS_SLOPE + place, slope)
    tl.store(at + COUNT, count)


@triton.jit
def _project(
    values, key_mask, rows, c_block, H, W, vs_y, vs_x, ms_y, ms_x,
    DH: tl.constexpr, SIDE: tl.constexpr, CB: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
    MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """L_x' V' L_y of one image, [r along x, r along y·CB]; where MASKED of what may be attended."""
    r, k, n = tl.arange(0, 16), tl.arange(0, BX), tl.arange(0, BX * CB)
    c = c_block * CB + n % CB
    steps = tl.cdiv(H, BY)
    u = tl.zeros([16, BX * CB], tl.float32)
    result = tl.zeros([16, 16 * CB], tl.float32)
    # One loop over both axes, so that loads stay ahead across columns.
    first_x, first_y = 0, 0
    for _ in range(steps * tl.cdiv(W, BX)):
        last = first_y + BY >= H
        y = first_y + tl.arange(0, BY)
        x = first_x + n // CB
        inside = (y < H)[:, None] & ((x < W) & (c < DH))[None, :]
        if MASKED:
            inside = inside & _per_channels(_attended(key_mask, y, first_x + k, H, W, ms_y, ms_x), BY, BX, CB)
        v = tl.load(values + y[:, None] * vs_y + (x * vs_x + c)[None, :], mask=inside, other=0.0)
        at_y = rows + r[:, None] * SIDE + y[None, :]
        high = tl.load(at_y)
        if PARTS == 3:
            u += product(high, v, 3)
        else:
            u = tl.dot(tl.load(at_y + 16 * SIDE), v, tl.dot(high, v, u))
        if last:
            at_x = rows + (32 + r)[:, None] * SIDE + (first_x + k)[None, :]
            across = _swap(u, 16, BX, CB)
            if rows.dtype.element_ty == tl.bfloat16:
                x_high, x_low = tl.load(at_x), tl.load(at_x + 16 * SIDE)
                first, second = split(across, tl.bfloat16)
                result = tl.dot(x_high, first, tl.dot(x_high, second, tl.dot(x_low, first, result)))
            else:
                result = product(_load_parts(at_x, 16 * SIDE, PARTS), across, PARTS, result)
            u = tl.zeros([16, BX * CB], tl.float32)
        first_x = tl.where(last, first_x + BX, first_x)
        first_y = tl.where(last, 0, first_y + BY)
    return result


@triton.jit
def _expand(
    nodes, level, key_mask, columns, out, c_block, H, W, ms_y, ms_x,
    C: tl.constexpr, DH: tl.constexpr, SIDE: tl.constexpr, CB: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
    MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write L_y X L_x' + level of nodes X [r along y, r along x·CB] and a level per channel as one image; zero where MASKED
    and not attended.

    A bfloat16 image is as exact with everything rounded to bfloat16, for X is small beside the level.
    """
    ROUNDED: tl.constexpr = out.dtype.element_ty == tl.bfloat16
    r, n = tl.arange(0, 16), tl.arange(0, BY * CB)
    c = c_block * CB + n % CB
    level = _repeat(level, BY, CB)
    if ROUNDED:
        nodes = nodes.to(tl.bfloat16)
    for first_y in range(0, H, BY):
        at_y = columns + (first_y + tl.arange(0, BY))[:, None] * 16 + r[None, :]
        if ROUNDED:
            u = _swap(tl.dot(tl.load(at_y), nodes), BY, 16, CB).to(tl.bfloat16)
        else:
            u = _swap(product(_load_parts(at_y, 16 * SIDE, PARTS), nodes, PARTS), BY, 16, CB)
            u_high, u_low = split(u, tl.bfloat16)
        y = first_y + n // CB
        for first_x in range(0, W, BX):
            x = first_x + tl.arange(0, BX)
            at_x = columns + (32 * SIDE) + x[:, None] * 16 + r[None, :]
            high = tl.load(at_x)
            if ROUNDED:
                result = tl.dot(high, u)
            elif PARTS == 3:
                result = product(high, u, 3)
            else:
                low = tl.load(at_x + 16 * SIDE)
                result = tl.dot(high, u_high, tl.dot(high, u_low, tl.dot(low, u_high)))
            result += level[None, :]
            inside = (x < W)[:, None] & ((y < H) & (c < DH))[None, :]
            if MASKED:
                attended = _attended(key_mask, x, first_y + tl.arange(0, BY), W, H, ms_x, ms_y)
                result = tl.where(_per_channels(attended, BX, BY, CB), result, 0.0)
            place = out + x[:, None] * C + (y * (W * C) + c)[None, :]
            tl.store(place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _outer(at_rows, at_columns):
    """The product of two lines of r numbers: [r, r]."""
    r = tl.arange(0, 16)
    return tl.load(at_rows + r)[:, None] * tl.load(at_columns + r)[None, :]


@triton.jit(do_not_specialize=["H", "W", "least"])
def forward(
    values, key_mask, radius, rows, columns, between, masses, out, slopes, H, W, offset, least, tiny,
    vs_b, vs_y, vs_x, ms_b, ms_y, ms_x,
    HEADS: tl.constexpr, DH: tl.constexpr, SIDE: tl.constexpr, CB: tl.constexpr,
    PX: tl.constexpr, PY: tl.constexpr, EX: tl.constexpr, EY: tl.constexpr,
    MASKED: tl.constexpr, PARTS: tl.constexpr, WANT_RADIUS: tl.constexpr,
):  # fmt: skip
    """out, and slopes [programs, r along y, r along x, CB] = N·dX/dσ, what the backward makes the radius' gradient of."""
    C: tl.constexpr = HEADS * DH
    c_block, head, batch = _place(HEADS, DH, CB)
    r, n = tl.arange(0, 16), tl.arange(0, 16 * CB)
    at_slopes = slopes + tl.program_id(0).to(tl.int64) * (256 * CB) + r[:, None] * (16 * CB) + n[None, :]
    if tl.load(radius + head) < least:
        if WANT_RADIUS:
            # The backward's argument all the same, so no element may stay unwritten.
            tl.store(at_slopes, tl.zeros([16, 16 * CB], tl.float32))
        return
    key_mask += batch * ms_b
    a = _project(
        values + batch * vs_b + head * DH, key_mask, rows, c_block, H, W, vs_y, vs_x, ms_y, ms_x,
        DH, SIDE, CB, PX, PY, MASKED, PARTS,
    )  # fmt: skip
    between += head * PER_HEAD
    if MASKED:
        masses += (batch * HEADS + head) * PER_MASK
        count = tl.load(masses + COUNT)
        # Here, as in a, the nodes along x are the rows.
        ones = tl.load(masses + r[:, None] + (r * 16)[None, :])
        inverse = _matrix(masses + INVERSE)
    else:
        count = (H * W).to(tl.float32)
        ones = _outer(between + SUM_X, between + SUM_Y)
        inverse = _reciprocal(_outer(between + MASS_Y, between + MASS_X) + offset * count, PARTS)
    along_y, along_x = _matrix(between + K_Y), _matrix(between + K_X)
    centre = _per_channel(a, CB) * _inverse(count, tiny)
    a -= _repeat(centre, 16, CB)[None, :] * _per_channels(ones, 16, 16, CB)
    a_x = _swap(product(along_x, a, PARTS), 16, 16, CB)
    nodes = product(along_y, a_x, PARTS) * _per_channels(inverse, 16, 16, CB)
    if WANT_RADIUS:
        if MASKED:
            slope = _matrix(masses + MASS_SLOPE)
        else:
            slope = _outer(between + MASS_SLOPE_Y, between + MASS_X) + _outer(between + MASS_Y, between + MASS_SLOPE_X)
        change = product(_matrix(between + SLOPE_Y), a_x, PARTS)
        across = _swap(product(_matrix(between + SLOPE_X), a, PARTS), 16, 16, CB)
        change = product(along_y, across, PARTS, change)
        tl.store(at_slopes, change - _per_channels(slope, 16, 16, CB) * nodes)
    _expand(
        nodes, centre, key_mask, columns, out + batch * H * W * C + head * DH, c_block, H, W, ms_y, ms_x,
        C, DH, SIDE, CB, EX, EY, False, PARTS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["H", "W", "least"])
def backward(
    grad, key_mask, radius, rows, columns, between, masses, slopes, dvalues, shares, H, W, offset, least,
    gs_b, gs_y, gs_x, ms_b, ms_y, ms_x,
    HEADS: tl.constexpr, DH: tl.constexpr, SIDE: tl.constexpr, CB: tl.constexpr,
    PX: tl.constexpr, PY: tl.constexpr, EX: tl.constexpr, EY: tl.constexpr,
    MASKED: tl.constexpr, PARTS: tl.constexpr, WANT_RADIUS: tl.constexpr,
):  # fmt: skip
    """dV, and the program's share of the radius' gradient, shares [heads, B·blocks]."""
    C: tl.constexpr = HEADS * DH
    c_blocks: tl.constexpr = (DH + CB - 1) // CB
    c_block, head, batch = _place(HEADS, DH, CB)
    if tl.load(radius + head) < least:
        return
    r, n = tl.arange(0, 16), tl.arange(0, 16 * CB)
    key_mask += batch * ms_b
    d = _project(
        grad + batch * gs_b + head * DH, key_mask, rows, c_block, H, W, gs_y, gs_x, ms_y, ms_x,
        DH, SIDE, CB, PX, PY, False, PARTS,
    )  # fmt: skip
    if WANT_RADIUS:
        place = r[:, None] * CB + (n // CB * (16 * CB) + n % CB)[None, :]
        slope = tl.load(slopes + tl.program_id(0).to(tl.int64) * (256 * CB) + place)
    between += head * PER_HEAD
    # Here the nodes along x are the rows.
    if MASKED:
        inverse = tl.load(masses + (batch * HEADS + head) * PER_MASK + INVERSE + r[:, None] + (r * 16)[None, :])
    else:
        mass = _outer(between + MASS_X, between + MASS_Y) + offset * (H * W).to(tl.float32)
        inverse = _reciprocal(mass, PARTS)
    along_y, along_x = _matrix(between + K_Y), _matrix(between + K_X)
    d *= _per_channels(inverse, 16, 16, CB)
    total = offset * _per_channel(d, CB)
    if WANT_RADIUS:
        share = tl.sum(tl.sum(d * slope, axis=1), axis=0)
        tl.store(shares + head * (tl.num_programs(0) // HEADS) + batch * c_blocks + c_block, share)
    nodes = product(along_y, _swap(product(along_x, d, PARTS), 16, 16, CB), PARTS)
    _expand(
        nodes, total, key_mask, columns, dvalues + batch * H * W * C + head * DH, c_block, H, W, ms_y, ms_x,
        C, DH, SIDE, CB, EX, EY, MASKED, PARTS,
    )  # fmt: skip
