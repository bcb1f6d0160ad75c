"""What explicit attention's Triton kernels share: the two profiles, products of float32 operands, the radius' last sum."""

import triton
import triton.language as tl

from nearsight.ops.explicit.call import RADIUS_FLOOR

FLOOR = tl.constexpr(RADIUS_FLOOR)


@triton.jit
def load_radius(at):
    """A radius, no smaller than the floor, below which its gradient vanishes of itself; nan stays nan."""
    return tl.maximum(tl.load(at), FLOOR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def profile(distance, size, sigma, GAUSSIAN: tl.constexpr):
    """g and dg/dσ at a float32 distance in pixels along an axis of `size`."""
    # Divided by σ before squaring: σ² of a small radius would underflow.
    u = tl.abs(distance) / size.to(tl.float32) / sigma
    if GAUSSIAN:
        g = tl.exp(-0.5 * u * u)
        dg = g * (u * u / sigma)
    else:
        g = tl.exp(-u)
        dg = g * (u / sigma)
    return g, dg


@triton.jit
def split(x, dtype: tl.constexpr):
    """A float32 operand as two of a half type, whose sum it is to twice the digits."""
    if dtype == tl.bfloat16:
        # Cut off, not rounded: a conversion there and back would be made number by number, at a quarter of the speed.
        cut = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        return cut.to(dtype), (x - cut).to(dtype)
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def product(a, b, PARTS: tl.constexpr, total=None):
    """a b (+ total) of float32 operands on tensor cores: each as the sum of 2 or 3 in bfloat16, good for 16 or 24 digits."""
    a_first, a_second = split(a, tl.bfloat16)
    b_first, b_second = split(b, tl.bfloat16)
    if PARTS == 2:
        total = tl.dot(a_second, b_first, total)
    else:
        a_third = (a - a_first.to(tl.float32) - a_second.to(tl.float32)).to(tl.bfloat16)
        b_third = (b - b_first.to(tl.float32) - b_second.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(a_second, b_second, tl.dot(a_third, b_first, tl.dot(a_first, b_third, total)))
        total = tl.dot(a_second, b_first, total)
    return tl.dot(a_first, b_first, tl.dot(a_first, b_second, total))


@triton.jit
def axis_matrix(i, j, size, sigma, GAUSSIAN: tl.constexpr):
    """g and dg/dσ between the pixels i and j of an axis, zero beyond it."""
    g, dg = profile((i - j).to(tl.float32), size, sigma, GAUSSIAN)
    inside = (i < size) & (j < size)
    return tl.where(inside, g, 0.0), tl.where(inside, dg, 0.0)


@triton.jit(do_not_specialize=["wide_count", "narrow_count", "least"])
def add_shares(radius, wide, narrow, out, wide_count, narrow_count, least, BLOCK: tl.constexpr):
    """The radius' gradient of one head: its shares, [heads, count], from the kernels for its radius, in a fixed order."""
    head = tl.program_id(0).to(tl.int64)
    is_wide = tl.load(radius + head) >= least
    count = tl.where(is_wide, wide_count, narrow_count)
    at = tl.where(is_wide, wide + head * wide_count, narrow + head * narrow_count)
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, count, BLOCK):
        i = first + tl.arange(0, BLOCK)
        total += tl.load(at + i, mask=i < count, other=0.0).to(tl.float64)
    tl.store(out + head, tl.sum(total, axis=0).to(tl.float32))
