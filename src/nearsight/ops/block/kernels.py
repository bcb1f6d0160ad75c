"""Attention inside 4×4 blocks on a GPU, projections included: the image is read, the result written, nothing between.

One warp takes one block at a time, its 16 places are the rows of every product. The image has few channels, so the weights are
folded first (`triton_impl.score_table`): with the query's features x_c·[its row, its column, one-hot] and the key's features
[its row, its column, one-hot, x], all logits of a head, positions included, are features · table · featuresᵀ.

Logits are in units of log₂e (the tables hold that factor), so that the exponential is one instruction.
"""

import triton
import triton.language as tl

from nearsight.ops.arithmetic.kernels import dot, dot_add, exp2, reciprocal

__all__ = ["backward", "forward", "gradient_sums", "normalise"]

LARGE = tl.constexpr(1e30)
NOWHERE = tl.constexpr(255)
LN2 = tl.constexpr(0.6931471805599453)
# Sizes of one image: compiling again for each would cost a second per new size.
RUNTIME = ["H", "W", "lines", "across", "heads", "x_b", "x_y", "x_x", "x_c"]


@triton.jit
def _owns(place, f):
    """1.0 where `place` owns feature f: by its row for f % 8 < 4, by its column otherwise."""
    return (tl.where(f % 8 < 4, place // 4, 4 + place % 4) == f % 8).to(tl.float32)


@triton.jit
def _load_block(x_ptr, at, inside, x_c, CIN: tl.constexpr, dtype: tl.constexpr):
    """[16 places, 16]: x_c in columns c·16/CP, zero elsewhere: a depth that the tensor cores take."""
    CP: tl.constexpr = 2 if CIN < 2 else (4 if CIN <= 4 else 8)
    c = tl.arange(0, CP)
    x = tl.load(x_ptr + at[:, None] + (c * x_c)[None, :], mask=inside[:, None] & (c < CIN)[None, :], other=0.0)
    x = x.to(dtype)
    if CP <= 2:
        x = tl.reshape(tl.join(x, tl.zeros_like(x)), (16, 4))
    if CP <= 4:
        x = tl.reshape(tl.join(x, tl.zeros_like(x)), (16, 8))
    return tl.reshape(tl.join(x, tl.zeros_like(x)), (16, 16))


@triton.jit
def _column(c, CIN: tl.constexpr):
    """Where `_load_block` puts channel c."""
    return c * (8 if CIN < 2 else (4 if CIN <= 4 else 2))


@triton.jit
def _query_spread(a, f, CIN: tl.constexpr, dtype: tl.constexpr):
    """One where column a of a block holds the channel of the query's feature f."""
    return ((_column(f // 8, CIN) == a) & (f < 8 * CIN)).to(tl.float32).to(dtype)


@triton.jit
def _key_spread(a, k, CIN: tl.constexpr, dtype: tl.constexpr):
    """One where column a of a block holds the channel of the key's feature k."""
    return ((_column(k - 8, CIN) == a) & (k >= 8) & (k < 8 + CIN)).to(tl.float32).to(dtype)


@triton.jit
def _diagonal(block, c: tl.constexpr, CIN: tl.constexpr, PRECISION: tl.constexpr):
    """[16, 16]: channel c of each place on the diagonal."""
    a = tl.arange(0, 16)[:, None]
    b = tl.arange(0, 16)[None, :]
    spread = (a == _column(c, CIN)).to(tl.float32).to(block.dtype) + tl.zeros((16, 16), block.dtype)
    # Multiplied, not chosen: one instruction per element, before two of them are packed.
    return (dot(block, spread, PRECISION) * (a == b).to(tl.float32)).to(block.dtype)


@triton.jit
def _turn(t, PRECISION: tl.constexpr):
    """t as a product's second operand. The tensor cores turn it: tᵀ as a result lies as t is read, lane by lane."""
    n: tl.constexpr = t.shape[1]
    one = (tl.arange(0, n)[:, None] == tl.arange(0, n)[None, :]).to(tl.float32).to(t.dtype)
    return tl.trans(dot(one, tl.trans(t), PRECISION).to(t.dtype))


@triton.jit
def _softmax(s, valid, MASKED: tl.constexpr):
    """Exponentials of logits in base 2 and one over their sum; zeros where nothing may be attended."""
    if MASKED:
        s = tl.where(valid[None, :], s, -LARGE)
    p = exp2(s - tl.max(s, 1)[:, None])
    if MASKED:
        p = tl.where(valid[None, :], p, 0.0)
        total = tl.sum(p, 1)
        return p, tl.where(total > 0, reciprocal(total), 0.0)
    else:
        return p, reciprocal(tl.sum(p, 1))


@triton.jit(do_not_specialize=RUNTIME)
def forward(
    x_ptr,
    score_ptr,
    value_ptr,
    mask_ptr,
    out_ptr,
    place_ptr,
    sign_ptr,
    sum_ptr,
    H,
    W,
    lines,
    across,
    heads,
    x_b,
    x_y,
    x_x,
    x_c,
    CIN: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    FP: tl.constexpr,
    G: tl.constexpr,
    EDGE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    POOL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The output of G heads, for every num_programs(0)-th line of blocks.

    With POOL each block's largest sign·output instead, where in the block it is, and the sums of the output and its square.
    """
    dtype = out_ptr.dtype.element_ty
    MASKED: tl.constexpr = EDGE or HAS_MASK
    h0 = tl.program_id(1) * G
    h1 = h0 + tl.zeros((1, 1), tl.int32)  # the interpreter takes no mask made of one number
    place = tl.arange(0, 16)
    a = place[:, None]
    d = tl.arange(0, DP)
    f = tl.arange(0, FP)[None, :]
    k = tl.arange(0, 16)[None, :]
    query_spread = _query_spread(a, f, CIN, dtype)
    key_spread = _key_spread(a, k, CIN, dtype)
    codes = tl.where(k < 8, _owns(a, k), 0.0)
    score = ()
    value = ()
    for g in tl.static_range(G):
        use = (tl.arange(0, FP)[:, None] < 8 * CIN) & (k < 8 + CIN) & (h1 + g < heads)
        at = score_ptr + ((h0 + g) * 8 * CIN + tl.arange(0, FP)[:, None]) * (8 + CIN) + k
        score = score + (tl.load(at, mask=use, other=0.0).to(dtype),)
        for c in tl.static_range(CIN):
            at = ((place * heads + h0 + g) * D)[None, :] + d[:, None]
            use = (d < D)[:, None] & (h1 + g < heads)
            value = value + (tl.load(value_ptr + at * CIN + c, mask=use, other=0.0).to(dtype),)
    if POOL:
        sign = ()
        sums = ()
        squares = ()
        for g in tl.static_range(G):
            use = (d < D)[:, None] & (h1 + g < heads)
            sign = sign + (tl.load(sign_ptr + ((h0 + g) * D + d)[:, None], mask=use, other=1.0),)
            sums = sums + (tl.zeros((DP, 16), tl.float32),)
            squares = squares + (tl.zeros((DP, 16), tl.float32),)
    high = (H + 3) // 4
    for line in range(tl.program_id(0), lines, tl.num_programs(0)):
        image = (line // high).to(tl.int64)
        y = line % high * 4 + place // 4
        from_x = x_ptr + image * x_b
        pooled = (image * high + line % high) * across * heads * D
        to_out = out_ptr + (pooled if POOL else image * H * W * heads * D)
        for step in range(across):
            x = step * 4 + place % 4
            inside = (y < H) & (x < W)
            valid = inside
            if HAS_MASK:
                valid = tl.load(mask_ptr + image * H * W + y * W + x, mask=inside, other=0) != 0
            block = _load_block(from_x, y * x_y + x * x_x, inside, x_c, CIN, dtype)
            queries = (dot(block, query_spread, PRECISION) * _owns(a, f)).to(dtype)
            keys = tl.trans((dot(block, key_spread, PRECISION) + codes).to(dtype))
            if POOL:
                next_sums = ()
                next_squares = ()
            for g in tl.static_range(G):
                q = dot(queries, score[g], PRECISION).to(dtype)
                p, scale = _softmax(dot(q, keys, PRECISION), valid, MASKED)
                v = tl.zeros((DP, 16), tl.float32)
                for c in tl.static_range(CIN):
                    # Transposed, though symmetric: so it lies as the product reads it, without moving between lanes.
                    v = dot_add(value[g * CIN + c], tl.trans(_diagonal(block, c, CIN, PRECISION)), v, PRECISION)
                if POOL:
                    # Channels in the rows: a maximum over places then stays within four lanes.
                    out = dot(v.to(dtype), tl.trans((p * scale[:, None]).to(dtype)), PRECISION)
                    if EDGE:
                        out = tl.where(inside[None, :], out, 0.0)
                    next_sums = next_sums + (sums[g] + out,)
                    next_squares = next_squares + (squares[g] + out * out,)
                    out = out * sign[g]
                    if EDGE:
                        out = tl.where(inside[None, :], out, -LARGE)
                    best = tl.max(out, 1)[:, None]
                    first = tl.min(tl.where(out == best, k, 15), 1)[:, None]
                    to = (step * heads + h0 + g) * D + d[:, None]
                    there = (d < D)[:, None] & (h1 + g < heads)
                    tl.store(to_out + to, (best * sign[g]).to(dtype), mask=there)
                    tl.store(place_ptr + pooled + to, first.to(tl.uint8), mask=there)
                else:
                    out = dot(p.to(dtype), tl.trans(v.to(dtype)), PRECISION) * scale[:, None]
                    to = ((y * W + x) * heads * D)[:, None] + ((h0 + g) * D + d)[None, :]
                    there = inside[:, None] & (d < D)[None, :] & (h1 + g < heads)
                    tl.store(to_out + to, out.to(dtype), mask=there)
            if POOL:
                sums = next_sums
                squares = next_squares
    if POOL:
        sum_ptr += tl.program_id(0) * 2 * heads * D
        for g in tl.static_range(G):
            to = ((h0 + g) * D + d)[:, None]
            use = (d < D)[:, None] & (h1 + g < heads)
            tl.store(sum_ptr + to, tl.sum(sums[g], 1)[:, None], mask=use)
            tl.store(sum_ptr + heads * D + to, tl.sum(squares[g], 1)[:, None], mask=use)


@triton.jit(do_not_specialize=RUNTIME)
def backward(
    x_ptr,
    score_ptr,
    value_ptr,
    mask_ptr,
    grad_ptr,
    place_ptr,
    norm_ptr,
    share_ptr,
    dx_ptr,
    H,
    W,
    lines,
    across,
    heads,
    x_b,
    x_y,
    x_x,
    x_c,
    CIN: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    FP: tl.constexpr,
    G: tl.constexpr,
    EDGE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    NEED_DX: tl.constexpr,
    POOL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of the tables, one share per program ([score, value]), and of x, one share per G heads.

    With POOL the gradient is that of ReLU(scale·best + shift): an output y gets scale·gradient at its block's best place and
    nothing elsewhere, less offset + slope·y, what batch statistics take back; `norm` holds scale, offset and slope.
    """
    dtype = grad_ptr.dtype.element_ty
    MASKED: tl.constexpr = EDGE or HAS_MASK
    h0 = tl.program_id(1) * G
    h1 = h0 + tl.zeros((1, 1), tl.int32)  # the interpreter takes no mask made of one number
    place = tl.arange(0, 16)
    a = place[:, None]
    b = place[None, :]
    d = tl.arange(0, DP)
    f = tl.arange(0, FP)[None, :]
    ft = tl.arange(0, FP)[:, None]
    query_spread = _query_spread(a, f, CIN, dtype)
    query_spread_t = _query_spread(b, ft, CIN, dtype)
    key_spread = _key_spread(a, b, CIN, dtype)
    key_spread_t = _key_spread(b, a, CIN, dtype)
    codes = tl.where(b < 8, _owns(a, b), 0.0)
    codes_t = tl.where(a < 8, _owns(b, a), 0.0)
    c8 = tl.arange(0, 8)[None, :]
    score = ()
    value = ()
    dscore = ()
    dvalue = ()
    for g in tl.static_range(G):
        use = (ft < 8 * CIN) & (b < 8 + CIN) & (h1 + g < heads)
        at = score_ptr + ((h0 + g) * 8 * CIN + ft) * (8 + CIN) + b
        score = score + (tl.load(at, mask=use, other=0.0).to(dtype),)
        dscore = dscore + (tl.zeros((FP, 16), tl.float32),)
        for c in tl.static_range(CIN):
            at = ((place * heads + h0 + g) * D)[:, None] + d[None, :]
            use = (d < D)[None, :] & (h1 + g < heads)
            value = value + (tl.load(value_ptr + at * CIN + c, mask=use, other=0.0).to(dtype),)
            dvalue = dvalue + (tl.zeros((16, DP), tl.float32),)
    if POOL:
        norm = ()
        for g in tl.static_range(G):
            use = (d < D)[None, :] & (h1 + g < heads)
            for i in tl.static_range(3):
                norm = norm + (tl.load(norm_ptr + (i * heads + h0 + g) * D + d[None, :], mask=use, other=0.0),)
    high = (H + 3) // 4
    for line in range(tl.program_id(0), lines, tl.num_programs(0)):
        image = (line // high).to(tl.int64)
        y = line % high * 4 + place // 4
        from_x = x_ptr + image * x_b
        pooled = (image * high + line % high) * across * heads * D
        from_grad = grad_ptr + (pooled if POOL else image * H * W * heads * D)
        for step in range(across):
            x = step * 4 + place % 4
            inside = (y < H) & (x < W)
            valid = inside
            if HAS_MASK:
                valid = tl.load(mask_ptr + image * H * W + y * W + x, mask=inside, other=0) != 0
            block = _load_block(from_x, y * x_y + x * x_x, inside, x_c, CIN, dtype)
            block_t = tl.trans(block)
            queries = (dot(block, query_spread, PRECISION) * _owns(a, f)).to(dtype)
            queries_t = (dot(query_spread_t, block_t, PRECISION) * _owns(b, ft)).to(dtype)
            keys = (dot(block, key_spread, PRECISION) + codes).to(dtype)
            keys_t = (dot(key_spread_t, block_t, PRECISION) + codes_t).to(dtype)
            next_dscore = ()
            next_dvalue = ()
            if NEED_DX:
                dqueries = tl.zeros((16, FP), tl.float32)
                dkeys = tl.zeros((16, 16), tl.float32)
                direct = tl.zeros((16, 8), tl.float32)
            for g in tl.static_range(G):
                there = (d < D)[None, :] & (h1 + g < heads)
                if POOL:
                    to = (step * heads + h0 + g) * D + d[None, :]
                    up = tl.load(from_grad + to, mask=there, other=0.0).to(tl.float32)
                    first = tl.load(place_ptr + pooled + to, mask=there, other=NOWHERE).to(tl.int32)
                else:
                    there = inside[:, None] & there
                    to = ((y * W + x) * heads * D)[:, None] + ((h0 + g) * D + d)[None, :]
                    grad = tl.load(from_grad + to, mask=there, other=0.0)
                q = dot(queries, score[g], PRECISION).to(dtype)
                p, scale = _softmax(dot(q, tl.trans(keys), PRECISION), valid, MASKED)
                p = p * scale[:, None]
                v = tl.zeros((16, DP), tl.float32)
                for c in tl.static_range(CIN):
                    v = dot_add(_diagonal(block, c, CIN, PRECISION), value[g * CIN + c], v, PRECISION)
                if POOL:
                    out = dot(p.to(dtype), _turn(v.to(dtype), PRECISION), PRECISION)
                    grad = tl.where(first == a, up * norm[3 * g], 0.0) - norm[3 * g + 1] - norm[3 * g + 2] * out
                    if EDGE:
                        grad = tl.where(inside[:, None], grad, 0.0)
                    grad = grad.to(dtype)
                    grad_right = _turn(grad, PRECISION)
                else:
                    grad_right = grad
                dp = dot(grad, tl.trans(v.to(dtype)), PRECISION)
                ds = (p * (dp - tl.sum(p * dp, 1)[:, None])).to(dtype)
                p_t = tl.trans(p.to(dtype))
                for c in tl.static_range(CIN):
                    z = dot(_diagonal(block, c, CIN, PRECISION), p_t, PRECISION).to(dtype)
                    next_dvalue = next_dvalue + (dot_add(z, grad_right, dvalue[g * CIN + c], PRECISION),)
                dq_t = dot(keys_t, tl.trans(ds), PRECISION).to(dtype)
                next_dscore = next_dscore + (dot_add(queries_t, tl.trans(dq_t), dscore[g], PRECISION),)
                if NEED_DX:
                    dqueries = dot_add(tl.trans(dq_t), tl.trans(score[g]), dqueries, PRECISION)
                    dkeys = dot_add(tl.trans(ds), q, dkeys, PRECISION)
                    dv = dot(p_t, grad_right, PRECISION)
                    for c in tl.static_range(CIN):
                        mine = tl.sum(dv * value[g * CIN + c].to(tl.float32), 1)
                        direct += tl.where(c8 == c, mine[:, None], 0.0)
            dscore = next_dscore
            dvalue = next_dvalue
            if NEED_DX:
                for c in tl.static_range(CIN):
                    mine = tl.sum(tl.where(f // 8 == c, dqueries * _owns(a, f), 0.0), 1)
                    mine += tl.sum(tl.where(b == 8 + c, dkeys, 0.0), 1)
                    direct += tl.where(c8 == c, mine[:, None] * LN2, 0.0)
                pixel = ((tl.program_id(1) * (lines // high) + image) * H + y) * W + x
                tl.store(dx_ptr + pixel[:, None] * CIN + c8, direct, mask=inside[:, None] & (c8 < CIN))
    score_size = heads * 8 * CIN * (8 + CIN)
    share_ptr += tl.program_id(0).to(tl.int64) * (score_size + 16 * heads * D * CIN)
    for g in tl.static_range(G):
        use = (ft < 8 * CIN) & (b < 8 + CIN) & (h1 + g < heads)
        tl.store(share_ptr + ((h0 + g) * 8 * CIN + ft) * (8 + CIN) + b, dscore[g] * LN2, mask=use)
        for c in tl.static_range(CIN):
            use = (d < D)[None, :] & (h1 + g < heads)
            to = (a * heads + h0 + g) * D + d[None, :]
            tl.store(share_ptr + score_size + to * CIN + c, dvalue[g * CIN + c], mask=use)


@triton.jit(do_not_specialize=["rows"])
def normalise(best_ptr, norm_ptr, place_ptr, out_ptr, rows, C: tl.constexpr, CP: tl.constexpr, ROWS: tl.constexpr):
    """ReLU(scale·best + shift) of [rows, C]; where it is 0, no place in the block gets a gradient."""
    c = tl.arange(0, CP)[None, :]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    use = (row < rows) & (c < C)
    scale = tl.load(norm_ptr + c, mask=c < C, other=0.0)
    shift = tl.load(norm_ptr + C + c, mask=c < C, other=0.0)
    out = scale * tl.load(best_ptr + row * C + c, mask=use, other=0.0).to(tl.float32) + shift
    place = tl.load(place_ptr + row * C + c, mask=use, other=0)
    tl.store(place_ptr + row * C + c, tl.where(out > 0, place, NOWHERE), mask=use)
    # Written so that NaN stays.
    tl.store(out_ptr + row * C + c, tl.where(out < 0, 0.0, out).to(out_ptr.dtype.element_ty), mask=use)


@triton.jit(do_not_specialize=["rows"])
def gradient_sums(
    grad_ptr, best_ptr, place_ptr, mean_ptr, sum_ptr, rows, C: tl.constexpr, CP: tl.constexpr, ROWS: tl.constexpr
):
    """One program's share of Σ g and Σ g·(best − mean) over [rows, C], g the gradient where the ReLU let it pass."""
    c = tl.arange(0, CP)[None, :]
    mean = tl.load(mean_ptr + c, mask=c < C, other=0.0)
    plain = tl.zeros((ROWS, CP), tl.float32)
    centred = tl.zeros((ROWS, CP), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS))[:, None].to(tl.int64)
        use = (row < rows) & (c < C)
        best = tl.load(best_ptr + row * C + c, mask=use, other=0.0).to(tl.float32)
        place = tl.load(place_ptr + row * C + c, mask=use, other=NOWHERE)
        grad = tl.load(grad_ptr + row * C + c, mask=use, other=0.0).to(tl.float32)
        grad = tl.where(place == NOWHERE, 0.0, grad)
        plain += grad
        centred += grad * (best - mean)
    to = sum_ptr + tl.program_id(0) * 2 * C + c
    tl.store(to, tl.sum(plain, 0)[None, :], mask=c < C)
    tl.store(to + C, tl.sum(centred, 0)[None, :], mask=c < C)
