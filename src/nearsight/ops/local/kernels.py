"""Local attention on a GPU: the forward kernel, and how this folder's kernels cut the map, all on the tensor cores.

A program walks down a strip of 16-pixel tiles (TY rows, TX columns) with G heads at once. Its rows are m = (head, pixel), so
that M = 16·G; the heads' operands are block-diagonal ([M, G·DP], zero outside the row's own head), which lets heads of 8
channels share one matrix product and one coalesced read. The other side is the tile's halo, RN rows of CN pixels, in chunks
of NR rows padded to NC pixels: NK = NR·NC columns. On a map no wider than a tile (WHOLE_X) the halo is the map's own columns and
nothing is shared with a neighbour; on one no taller either (WHOLE_Y), its own rows too.

Positions, window and image borders are not compared or fetched per logit: a query has a term for each row and each column of
the halo, a large negative number where a tap is out of range. The forward adds the two by broadcasting. The backward's products
start from the column terms and add the row terms by a product with one-hot codes of the halo's rows, which gather their gradient
too; on small maps one table [M, 2·HS] and codes of columns and rows serve for both, in float32 for the gradient only. Dilation
is a view: each phase of the lattice is an image of its own with longer strides.

Logits are kept unscaled; `scale_log2` (scale·log₂e) enters with the exponential, and the saved log-sum-exp is in those units.
"""

import triton
import triton.language as tl

from nearsight.ops.arithmetic.kernels import dot, dot_add, exp2, log2

__all__ = ["forward"]


# Sizes of one image: compiling again for each would cost a second per new size.
RUNTIME = ["H", "W", "heads", "strips", "splits", "tiles", "dil_y", "dil_x", "row_head", "col_head"]


@triton.jit
def _strip(pid, strips, splits, H, W, dil_y, dil_x, TX: tl.constexpr):
    """Which strip a program walks: image, lattice phase (y, x), the lattice's size, first column, number of the split."""
    split = pid % splits
    pid = pid // splits
    x0 = (pid % strips) * TX
    pid = pid // strips
    phase_x = pid % dil_x
    pid = pid // dil_x
    phase_y = pid % dil_y
    image = (pid // dil_y).to(tl.int64)
    return image, phase_y, phase_x, (H - phase_y + dil_y - 1) // dil_y, (W - phase_x + dil_x - 1) // dil_x, x0, split


@triton.jit
def _within(i, size):
    # One comparison instead of two: a negative number is a large unsigned one.
    return i.to(tl.uint32, bitcast=True) < size.to(tl.uint32)


@triton.jit
def _halo(source, at, use, image, y, x, channel, NK: tl.constexpr, CHANNELS: tl.constexpr, BOXES: tl.constexpr):
    """A chunk of the halo, [NK, CHANNELS], 0 outside the image: by the copy engine from a descriptor, or by pointers.

    A few heads are a few bytes of a pixel's line; loads of many lines fill the path to shared memory, boxes do not.
    """
    if BOXES:
        return tl.reshape(source.load([image.to(tl.int32), y, x, channel]), (NK, CHANNELS))
    else:
        return tl.load(source + at, mask=use, other=0.0)


@triton.jit
def _half_table(
    ptr,
    head_stride,
    h0,
    heads,
    TAPS: tl.constexpr,
    FIRST: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    G: tl.constexpr,
    HS: tl.constexpr,
    dtype: tl.constexpr,
    SHIFT: tl.constexpr = 0,
):
    """One relative table as an operand [G·DP, HS], from place SHIFT on; it meets D/2 channels of a head, from FIRST on."""
    c = tl.arange(0, G * DP)[:, None]
    s = tl.arange(0, HS)[None, :] - SHIFT
    h = h0 + c // DP
    d = c % DP - FIRST
    use = (s >= 0) & (s < TAPS) & (d >= 0) & (d < D // 2) & (h < heads)
    return tl.load(ptr + h * head_stride + s * (D // 2) + d, mask=use, other=0.0).to(dtype)


@triton.jit
def _taps_of(position, first, size, TAPS: tl.constexpr, N: tl.constexpr, CHECK_IMAGE: tl.constexpr):
    """Which tap N places of one axis of the halo are to each query, and whether window and image hold it."""
    s = tl.arange(0, N)[None, :]
    tap = s - position[:, None]
    fits = (tap >= 0) & (tap < TAPS)
    if CHECK_IMAGE:
        fits = fits & _within(first + s, size)
    return tap, fits


@triton.jit
def _row_terms(
    q,
    tables,
    second,
    at_y,
    first,
    size,
    TAPS: tl.constexpr,
    HS: tl.constexpr,
    CHECK_IMAGE: tl.constexpr,
    HAS: tl.constexpr,
    LARGE: tl.constexpr,
    PRECISION: tl.constexpr,
    dtype: tl.constexpr,
):
    """Each query's terms for the halo's rows, as an operand [M, HS], −LARGE where window or image ends.

    A tile has two rows of queries, and `tables` a table for each, so that nothing is moved between lanes.
    """
    _, fits = _taps_of(at_y, first, size, TAPS, HS, CHECK_IMAGE)
    if HAS:
        terms = tl.where(second[:, None], dot(q, tables[1], PRECISION), dot(q, tables[0], PRECISION))
        return tl.where(fits, terms, -LARGE).to(dtype)
    else:
        return tl.where(fits, 0.0, -LARGE).to(dtype)


@triton.jit
def _row_codes(FIRST, NK: tl.constexpr, NC: tl.constexpr, HS: tl.constexpr, dtype: tl.constexpr):
    """One-hot codes [NK, HS] of the halo's rows, for a chunk from row FIRST on."""
    row = tl.arange(0, NK)[:, None] // NC + FIRST
    return tl.where(row == tl.arange(0, HS)[None, :], 1.0, 0.0).to(dtype)


@triton.jit
def _axis_bias(
    taps,
    position,
    first,
    size,
    TAPS: tl.constexpr,
    N: tl.constexpr,
    HS: tl.constexpr,
    CHECK_IMAGE: tl.constexpr,
    HAS: tl.constexpr,
    LARGE: tl.constexpr,
    dtype: tl.constexpr,
    FIRST: tl.constexpr = 0,
):
    """Move each query's terms of one axis from `taps`, FIRST on, to N places of the halo, −LARGE where window or image ends.

    Rounded to `dtype` as the backward's table is: its probabilities must sum to 1 with the log-sum-exp saved here.
    """
    tap, fits = _taps_of(position, first, size, TAPS, N, CHECK_IMAGE)
    if HAS:
        return tl.where(fits, tl.gather(taps, (tap & (HS - 1)) + FIRST, 1).to(dtype).to(tl.float32), -LARGE)
    else:
        return tl.where(fits, 0.0, -LARGE)


@triton.jit(do_not_specialize=RUNTIME)
def forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    row_ptr,
    col_ptr,
    mask_ptr,
    H,
    W,
    heads,
    strips,
    splits,
    tiles,
    dil_y,
    dil_x,
    q_b,
    q_y,
    q_x,
    k_b,
    k_y,
    k_x,
    v_b,
    v_y,
    v_x,
    row_head,
    col_head,
    scale_log2,
    KH: tl.constexpr,
    KW: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    q_h: tl.constexpr,
    k_h: tl.constexpr,
    v_h: tl.constexpr,
    G: tl.constexpr,
    TY: tl.constexpr,
    TX: tl.constexpr,
    NR: tl.constexpr,
    NC: tl.constexpr,
    CHUNKS: tl.constexpr,
    HS: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_COL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ZEROS: tl.constexpr,
    WHOLE_Y: tl.constexpr,
    WHOLE_X: tl.constexpr,
    FOLD: tl.constexpr,
    BOXES: tl.constexpr,
    LARGE: tl.constexpr,
    LSE_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out and the log-sum-exp of every query in a strip."""
    MQ: tl.constexpr = TY * TX
    M: tl.constexpr = MQ * G
    NK: tl.constexpr = NR * NC
    PY: tl.constexpr = (KH - 1) // 2
    PX: tl.constexpr = (KW - 1) // 2
    UP: tl.constexpr = 0 if WHOLE_Y else PY
    LEFT: tl.constexpr = 0 if WHOLE_X else PX
    # Tiles of two rows whose halo is one chunk: row terms need no gather. Half types: the exponentials' sums are products.
    PAIRS: tl.constexpr = LSE_PARTS == 1 and TY == 2 and CHUNKS == 1 and NR >= 8
    dtype = q_ptr.dtype.element_ty
    image, phase_y, phase_x, LH, LW, x0, split = _strip(tl.program_id(0), strips, splits, H, W, dil_y, dil_x, TX)
    h0 = tl.program_id(1) * G
    m = tl.arange(0, M)
    g = m // MQ
    qy = m % MQ // TX
    qx = m % TX
    c = tl.arange(0, G * DP)
    hc = h0 + c // DP
    real = (c % DP < D) & (hc < heads)
    own = (g[:, None] == (c // DP)[None, :]) & real[None, :]
    n = tl.arange(0, NK)
    x = x0 + qx
    # To a query, a column or row of the halo is the tap that many behind.
    at_y = qy + UP - PY
    at_x = qx + LEFT - PX
    halo_x = x0 - LEFT + n % NC
    halo_in_x = _within(halo_x, LW) & (n % NC < TX + KW - 1)
    q_ptr += image * q_b + phase_y * q_y + phase_x * q_x
    if not BOXES:
        k_ptr += image * k_b + phase_y * k_y + phase_x * k_x
        v_ptr += image * v_b + phase_y * v_y + phase_x * v_x
    q_cols = (x * dil_x * q_x)[:, None] + (hc * q_h + c % DP)[None, :]
    k_cols = (halo_x * dil_x * k_x)[:, None] + (hc * k_h + c % DP)[None, :]
    v_cols = (halo_x * dil_x * v_x)[:, None] + (hc * v_h + c % DP)[None, :]
    pixel0 = image * H * W
    if HAS_COL:
        rel_col = _half_table(col_ptr, col_head, h0, heads, KW, D // 2, D, DP, G, HS, dtype)
    row_tables = ()
    if HAS_ROW:
        if PAIRS:
            row_tables = (
                _half_table(row_ptr, row_head, h0, heads, KH, 0, D, DP, G, NR, dtype, UP - PY),
                _half_table(row_ptr, row_head, h0, heads, KH, 0, D, DP, G, NR, dtype, UP - PY + 1),
            )
        else:
            rel_row = _half_table(row_ptr, row_head, h0, heads, KH, 0, D, DP, G, HS, dtype)
    if FOLD:
        # Of two columns half a halo apart a query attends to one at most: one exponential serves both.
        tl.static_assert(KW <= NC // 2)
        column = tl.arange(0, 2)[:, None] * (NC // 2) + tl.arange(0, NC // 2)[None, :]
        tap = column[None, None, :, :] - at_x[:, None, None, None]
        mine_of_two = (tap >= 0) & (tap < KW)
    per_split = (tiles + splits - 1) // splits
    for tile in range(split * per_split, tl.minimum(tiles, (split + 1) * per_split)):
        y0 = tile * TY
        y = y0 + qy
        inside = (y < LH) & (x < LW)
        q = tl.load(q_ptr + (y * dil_y * q_y)[:, None] + q_cols, mask=own & inside[:, None], other=0.0)
        col_taps = tl.zeros((M, HS), tl.float32)
        row_taps = tl.zeros((M, HS), tl.float32)
        if HAS_COL:
            col_taps = dot(q, rel_col, PRECISION)
        col = _axis_bias(col_taps, at_x, x0 - LEFT, LW, KW, NC, HS, not ZEROS, HAS_COL, LARGE, dtype)
        if HAS_ROW and not PAIRS:
            row_taps = dot(q, rel_row, PRECISION)
        top = tl.full((M,), -float("inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, G * DP), tl.float32)
        for chunk in range(CHUNKS):
            halo_y = y0 - UP + chunk * NR + n // NC
            there = halo_in_x & (chunk * NR + n // NC < TY + KH - 1) & _within(halo_y, LH)
            load = there[:, None] & real[None, :]
            down = chunk * NR
            if PAIRS:
                row = _row_terms(
                    *(q, row_tables, qy == 1, at_y, y0 - UP, LH, KH, NR, not ZEROS, HAS_ROW, LARGE, PRECISION, dtype)
                ).to(tl.float32)
            else:
                row = _axis_bias(
                    row_taps, at_y - down, y0 - UP + down, LH, KH, NR, HS, not ZEROS, HAS_ROW, LARGE, dtype
                )
            s = tl.reshape(row[:, :, None] + col[:, None, :], (M, NK))
            if HAS_K:
                at = (halo_y * dil_y * k_y)[:, None] + k_cols
                k = _halo(k_ptr, at, load, image, y0 - UP + chunk * NR, x0 - LEFT, h0 * D, NK, G * DP, BOXES)
                s = dot_add(q, tl.trans(k), s, PRECISION)
            if HAS_MASK:
                pixels = pixel0 + (phase_y + halo_y * dil_y) * W + phase_x + halo_x * dil_x
                attended = tl.load(mask_ptr + pixels, mask=there, other=1) != 0
                s = tl.where(attended[None, :], s, -LARGE)
            at = (halo_y * dil_y * v_y)[:, None] + v_cols
            v = _halo(v_ptr, at, load, image, y0 - UP + chunk * NR, x0 - LEFT, h0 * D, NK, G * DP, BOXES)
            if FOLD:
                s = tl.max(tl.reshape(s, (M, NR, 2, NC // 2)), 2)
                new_top = tl.max(tl.max(s, 1), 1)
            else:
                new_top = tl.max(s, 1)
            if CHUNKS > 1:
                new_top = tl.maximum(new_top, top)
            # A query with nothing to attend to: every exponential below becomes 0.
            base = tl.where(new_top > -0.5 * LARGE, new_top, 0.0)
            if LSE_PARTS == 1:
                base *= scale_log2
            if FOLD:
                p = exp2(s * scale_log2 - base[:, None, None])
                p = tl.reshape(tl.where(mine_of_two, p[:, :, None, :], 0.0), (M, NK))
            elif LSE_PARTS == 1:
                p = exp2(s * scale_log2 - base[:, None])
            else:
                p = exp2((s - base[:, None]) * scale_log2)
            if PAIRS:
                # Eight times the same sum, of the numbers that meet the values.
                sums = tl.max(dot(p.to(dtype), tl.full((NK, 8), 1.0, dtype), PRECISION), 1)
            else:
                sums = tl.sum(p, 1)
            if CHUNKS > 1:
                # The difference first: a chunk that brings no larger logit must not change what was added up before. A product
                # that is rounded in one place and fused into a subtraction in another differs from itself by a rounding error.
                shrink = exp2(tl.where(top > -0.5 * LARGE, (top - new_top) * scale_log2, -LARGE))
                total = total * shrink + sums
                acc = acc * shrink[:, None]
                acc = dot_add(p.to(dtype), v, acc, PRECISION)
                top = new_top
            else:
                total = sums
                acc = dot(p.to(dtype), v, PRECISION)
                top = new_top
        some = total > 0
        acc = acc * tl.where(some, 1.0 / total, 0.0)[:, None]
        top = tl.where(top > -0.5 * LARGE, top, 0.0)
        pixel = pixel0 + (phase_y + y * dil_y) * W + phase_x + x * dil_x
        out_at = (pixel * heads * D)[:, None] + (hc * D + c % DP)[None, :]
        tl.store(out_ptr + out_at, acc.to(dtype), mask=own & inside[:, None])
        stat_in = inside & (h0 + g < heads)
        stats = lse_ptr + LSE_PARTS * (pixel * heads + h0 + g)
        if LSE_PARTS == 1:
            tl.store(stats, tl.where(some, top * scale_log2 + log2(total), LARGE), mask=stat_in)
        else:
            tl.store(stats, top, mask=stat_in)
            tl.store(stats + 1, tl.where(some, tl.log2(total), LARGE), mask=stat_in)
