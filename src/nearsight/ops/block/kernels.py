"""Attention inside 4×4 blocks on a GPU, projections included: the image is read, the result written, nothing between.

One warp takes one block at a time, its 16 places are the rows of every product. The image has few channels, so the weights are
folded first (`triton_impl.score_table`): with the query's features x_c·[its row, its column, one-hot] and the key's features
[its row, its column, one-hot, x], all logits of a head, positions included, are features · table · featuresᵀ.

Logits are in units of log₂e (the tables hold that factor), so that the exponential is one instruction.
"""

import torch
import triton
import triton.language as tl

from nearsight.ops.triton_support import INTERPRETED as RUN_BY_INTERPRETER

__all__ = ["backward", "forward"]

INTERPRETED = tl.constexpr(RUN_BY_INTERPRETER)
NVIDIA = tl.constexpr(not RUN_BY_INTERPRETER and torch.version.hip is None)
LARGE = tl.constexpr(1e30)
LN2 = tl.constexpr(0.6931471805599453)
# Sizes of one image: compiling again for each would cost a second per new size.
RUNTIME = ["H", "W", "lines", "across", "heads", "x_b", "x_y", "x_x", "x_c"]


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    # The interpreter multiplies bfloat16 as if its bits were integers.
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _exp2(x):
    # Triton's exp2 keeps subnormal results at three more instructions per logit; here they are zero.
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def _dot_add(a, b, acc, PRECISION: tl.constexpr):
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _owns(place, f):
    """Whether `place` owns feature f: by its row for f % 8 < 4, by its column otherwise."""
    return tl.where(f % 8 < 4, place // 4, 4 + place % 4) == f % 8


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
    return tl.where(a == b, _dot(block, spread, PRECISION), 0.0).to(block.dtype)


@triton.jit
def _softmax(s, valid, MASKED: tl.constexpr):
    """Exponentials of logits in base 2 and one over their sum; zeros where nothing may be attended."""
    if MASKED:
        s = tl.where(valid[None, :], s, -LARGE)
    p = _exp2(s - tl.max(s, 1)[:, None])
    if MASKED:
        p = tl.where(valid[None, :], p, 0.0)
        total = tl.sum(p, 1)
        return p, tl.where(total > 0, 1.0 / total, 0.0)
    else:
        return p, 1.0 / tl.sum(p, 1)


@triton.jit(do_not_specialize=RUNTIME)
def forward(
    x_ptr,
    score_ptr,
    value_ptr,
    mask_ptr,
    out_ptr,
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
    PRECISION: tl.constexpr,
):
    """The output of G heads, for every num_programs(0)-th line of blocks."""
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
    codes = ((k < 8) & _owns(a, k)).to(tl.float32)
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
    high = (H + 3) // 4
    for line in range(tl.program_id(0), lines, tl.num_programs(0)):
        image = (line // high).to(tl.int64)
        y = line % high * 4 + place // 4
        from_x = x_ptr + image * x_b
        to_out = out_ptr + image * H * W * heads * D
        for step in range(across):
            x = step * 4 + place % 4
            inside = (y < H) & (x < W)
            valid = inside
            if HAS_MASK:
                valid = tl.load(mask_ptr + image * H * W + y * W + x, mask=inside, other=0) != 0
            block = _load_block(from_x, y * x_y + x * x_x, inside, x_c, CIN, dtype)
            queries = tl.where(_owns(a, f), _dot(block, query_spread, PRECISION), 0.0).to(dtype)
            keys = tl.trans((_dot(block, key_spread, PRECISION) + codes).to(dtype))
            for g in tl.static_range(G):
                q = _dot(queries, score[g], PRECISION).to(dtype)
                p, scale = _softmax(_dot(q, keys, PRECISION), valid, MASKED)
                v = tl.zeros((DP, 16), tl.float32)
                for c in tl.static_range(CIN):
                    v = _dot_add(value[g * CIN + c], _diagonal(block, c, CIN, PRECISION), v, PRECISION)
                out = _dot(p.to(dtype), tl.trans(v.to(dtype)), PRECISION) * scale[:, None]
                to = ((y * W + x) * heads * D)[:, None] + ((h0 + g) * D + d)[None, :]
                there = inside[:, None] & (d < D)[None, :] & (h1 + g < heads)
                tl.store(to_out + to, out.to(dtype), mask=there)


@triton.jit(do_not_specialize=RUNTIME)
def backward(
    x_ptr,
    score_ptr,
    value_ptr,
    mask_ptr,
    grad_ptr,
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
    PRECISION: tl.constexpr,
):
    """Gradients of the tables, one share per program ([score, value]), and of x, one share per G heads."""
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
    codes = ((b < 8) & _owns(a, b)).to(tl.float32)
    codes_t = ((a < 8) & _owns(b, a)).to(tl.float32)
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
    high = (H + 3) // 4
    for line in range(tl.program_id(0), lines, tl.num_programs(0)):
        image = (line // high).to(tl.int64)
        y = line % high * 4 + place // 4
        from_x = x_ptr + image * x_b
        from_grad = grad_ptr + image * H * W * heads * D
        for step in range(across):
            x = step * 4 + place % 4
            inside = (y < H) & (x < W)
            valid = inside
            if HAS_MASK:
                valid = tl.load(mask_ptr + image * H * W + y * W + x, mask=inside, other=0) != 0
            block = _load_block(from_x, y * x_y + x * x_x, inside, x_c, CIN, dtype)
            block_t = tl.trans(block)
            queries = tl.where(_owns(a, f), _dot(block, query_spread, PRECISION), 0.0).to(dtype)
            queries_t = tl.where(_owns(b, ft), _dot(query_spread_t, block_t, PRECISION), 0.0).to(dtype)
            keys = (_dot(block, key_spread, PRECISION) + codes).to(dtype)
            keys_t = (_dot(key_spread_t, block_t, PRECISION) + codes_t).to(dtype)
            next_dscore = ()
            next_dvalue = ()
            if NEED_DX:
                dqueries = tl.zeros((16, FP), tl.float32)
                dkeys = tl.zeros((16, 16), tl.float32)
                direct = tl.zeros((16, 8), tl.float32)
            for g in tl.static_range(G):
                there = inside[:, None] & (d < D)[None, :] & (h1 + g < heads)
                to = ((y * W + x) * heads * D)[:, None] + ((h0 + g) * D + d)[None, :]
                grad = tl.load(from_grad + to, mask=there, other=0.0)
                q = _dot(queries, score[g], PRECISION).to(dtype)
                p, scale = _softmax(_dot(q, tl.trans(keys), PRECISION), valid, MASKED)
                p = p * scale[:, None]
                v = tl.zeros((16, DP), tl.float32)
                for c in tl.static_range(CIN):
                    v = _dot_add(_diagonal(block, c, CIN, PRECISION), value[g * CIN + c], v, PRECISION)
                dp = _dot(grad, tl.trans(v.to(dtype)), PRECISION)
                ds = (p * (dp - tl.sum(p * dp, 1)[:, None])).to(dtype)
                p_t = tl.trans(p.to(dtype))
                for c in tl.static_range(CIN):
                    z = _dot(_diagonal(block, c, CIN, PRECISION), p_t, PRECISION).to(dtype)
                    next_dvalue = next_dvalue + (_dot_add(z, grad, dvalue[g * CIN + c], PRECISION),)
                dq_t = _dot(keys_t, tl.trans(ds), PRECISION).to(dtype)
                next_dscore = next_dscore + (_dot_add(queries_t, tl.trans(dq_t), dscore[g], PRECISION),)
                if NEED_DX:
                    dqueries = _dot_add(tl.trans(dq_t), tl.trans(score[g]), dqueries, PRECISION)
                    dkeys = _dot_add(tl.trans(ds), q, dkeys, PRECISION)
                    dv = _dot(p_t, grad, PRECISION)
                    for c in tl.static_range(CIN):
                        mine = tl.sum(dv * value[g * CIN + c].to(tl.float32), 1)
                        direct += tl.where(c8 == c, mine[:, None], 0.0)
            dscore = next_dscore
            dvalue = next_dvalue
            if NEED_DX:
                for c in tl.static_range(CIN):
                    mine = tl.sum(tl.where(_owns(a, f) & (f // 8 == c), dqueries, 0.0), 1)
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
