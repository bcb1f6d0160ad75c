"""Exponentials once per pixel, instead of once per window and tap: exp(score − reference)·exp(bias).

The reference is a score near a thread's windows. float32 keeps its relative accuracy over 250 powers of two, so any will do while
no window's sum lies farther from it than RANGE; what is lost below 2⁻¹²⁶ then weighs less than 2⁻³⁶. Whoever finds a window
farther off computes it again from its own maximum.
"""
# mypy: ignore-errors
# ruff: noqa: E741

import triton
import triton.language as tl

from nearsight.ops.qna.lanes import LOG2E, clamp, filled, for_next_turn, inside, logits, one_turn, score_pointers

__all__ = ["LARGEST_BIAS", "LARGEST_SCALE", "RANGE", "powers", "reference"]

RANGE = tl.constexpr(2.0**60)
LARGEST_BIAS = tl.constexpr(20.0)
LARGEST_SCALE = tl.constexpr(1e15)


@triton.jit
def reference(scores, x, y0, h, H, W, HEADS, ss_y, ss_x, COUNT: tl.constexpr, L: tl.constexpr, N: tl.constexpr):
    """The largest score of COUNT pixels, one below the other, in base 2: a tuple over l."""
    at = score_pointers(scores, clamp(x, W) * ss_x + h, y0, H, ss_y, HEADS, COUNT, L)
    tops = filled(L, tl.zeros([N], tl.float32))
    for _ in range(one_turn(H)):
        tops = logits(at, (), 0, y0, x, H, W, False, L)
        for c in tl.static_range(1, COUNT):
            s = logits(at, (), c, y0 + c, x, H, W, False, L)
            larger = ()
            for l in tl.static_range(L):
                larger = larger + (tl.maximum(tops[l], s[l]),)
            tops = larger
        at = for_next_turn(at, H)
    scaled = ()
    for l in tl.static_range(L):
        scaled = scaled + (tops[l] * LOG2E,)
    return scaled


@triton.jit
def powers(at, y0, x, H, W, ref, COUNT: tl.constexpr, L: tl.constexpr):
    """exp(score − reference) of the pixels in column x and COUNT rows from y0 on, 0 outside: a tuple over (c, l)."""
    e = ()
    for c in tl.static_range(COUNT):
        valid = inside(y0 + c, x, H, W)
        for l in tl.static_range(L):
            s = tl.load(at[c * L + l]).to(tl.float32)
            e = e + (tl.where(valid, tl.exp2(s * LOG2E - ref[l]), 0.0),)
    return e
