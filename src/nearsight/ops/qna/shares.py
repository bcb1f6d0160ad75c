"""The tables' sums of a program of QnA's gradients: over the lanes of a head, and to where the program keeps them."""
# mypy: ignore-errors
# ruff: noqa: E741

import triton
import triton.language as tl

from nearsight.ops.qna.lanes import for_next_turn, one_turn

__all__ = ["deal", "dealt_place", "store_sums"]


@triton.jit
def _add_further(totals, t, other, N: tl.constexpr):
    """The tiles' totals so far and what the `other` lanes have, those that are there."""
    sums = ()
    for i in tl.static_range(len(t)):
        part = tl.gather(t[i], tl.minimum(other, N - 1), 0)
        sums = sums + (totals[i] + tl.where(other < N, part, 0.0),)
    return sums


@triton.jit
def _add_heads(t, HEADS, HB: tl.constexpr, N: tl.constexpr):
    """The first HEADS lanes of each tile receive the sum over all lanes of their head, in a fixed order.

    Lanes HB apart have the same head; if HB is 0, HEADS apart, and the compiler cannot know how far that is.
    """
    lane = tl.arange(0, N)
    totals = t
    if HB == 0:
        for k in range(1, tl.cdiv(N, HEADS)):
            totals = _add_further(totals, t, lane + k * HEADS, N)
    else:
        for k in tl.static_range(8):
            if HB << k < N:
                sums = ()
                for i in tl.static_range(len(t)):
                    sums = sums + (totals[i] + tl.gather(totals[i], (lane + (HB << k)) % N, 0),)
                totals = sums
    return totals


@triton.jit
def deal(t, HB: tl.constexpr, N: tl.constexpr):
    """Sum each tile over the lanes of a head, HB apart, and deal the sums out: each lane is left with its share of them.

    A round halves what a lane has: it sends one half to the lane HB, 2·HB, … away and adds what comes to the other. Half the
    exchanges of sums that every lane has, and each number is stored once. `dealt_place` says whose are whose.
    """
    lane = tl.arange(0, N)
    for k in tl.static_range(8):
        if HB << k < N:
            other = lane ^ (HB << k)
            sums = ()
            if len(t) > 1:
                upper = (lane & (HB << k)) != 0
                for i in tl.static_range(len(t) // 2):
                    kept = tl.where(upper, t[len(t) // 2 + i], t[i])
                    sums = sums + (kept + tl.gather(tl.where(upper, t[i], t[len(t) // 2 + i]), other, 0),)
            else:
                sums = (t[0] + tl.gather(t[0], other, 0),)
            t = sums
    return t


@triton.jit
def dealt_place(HB: tl.constexpr, N: tl.constexpr, G: tl.constexpr):
    """Of G tiles the first that each lane has the sum of, as `deal` leaves them."""
    lane = tl.arange(0, N)
    place = lane * 0
    for k in tl.static_range(8):
        if HB << k < N and G >> (k + 1) > 0:
            place += tl.where((lane & (HB << k)) != 0, G >> (k + 1), 0)
    return place


@triton.jit
def store_sums(
    partial, sums, tx, owner, owners, again, HEADS, HB: tl.constexpr, N: tl.constexpr, TABLES: tl.constexpr,
    COLS: tl.constexpr, TAPS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, L: tl.constexpr, ADD: tl.constexpr,
    EVERY: tl.constexpr,
):  # fmt: skip
    """Sum the entries (table, j, ty, l) of `sums` over the lanes of a head and store them as columns tx … of the tables.

    These are TAPS of a column's KH; `partial` begins with the first row of them.

    The first `owners` lanes store, each for its head `owner`. With ADD, the first `again` stored there before and add to it; all
    loads come before any store, since the compiler cannot know that an entry's store leaves the next one's load alone. EVERY lane
    may store where all lanes of a head have its sum: the same number to the same place, and no branch.
    """
    lane = tl.arange(0, N)
    at = ()
    for t in tl.static_range(TABLES):
        for j in tl.static_range(COLS):
            for ty in tl.static_range(TAPS):
                for l in tl.static_range(L):
                    at = at + (partial + owner + (((t * KH + ty) * KW + tx + j) * L + l) * HEADS,)
    old = sums
    load_at = at
    if ADD:
        for _ in range(one_turn(HEADS)):
            old = ()
            for i in tl.static_range(len(at)):
                old = old + (tl.load(load_at[i], mask=lane < again, other=0.0),)
            load_at = for_next_turn(load_at, HEADS)
    totals = _add_heads(sums, HEADS, HB, N)
    for _ in range(one_turn(HEADS)):
        for i in tl.static_range(len(at)):
            total = totals[i]
            if ADD:
                total += old[i]
            if EVERY:
                tl.store(at[i], total)
            else:
                tl.store(at[i], total, mask=lane < owners)
        at = for_next_turn(at, HEADS)
