"""One step of a deterministic sum over rows."""

import triton
import triton.language as tl

from nearsight.ops.early_kernels import begin

__all__ = ["add_rows"]


@triton.jit(do_not_specialize=["rows", "size"])
def add_rows(share_ptr, sum_ptr, rows, size, BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr):
    """Program (i, j) adds every num_programs(1)-th row from row j on, in order, at the i-th block of columns."""
    begin(EARLY)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    step = tl.num_programs(1)
    for first in range(0, rows, step * ROWS):
        row = first + tl.program_id(1) + step * tl.arange(0, ROWS)
        use = (row < rows)[:, None] & (at < size)[None, :]
        total += tl.load(share_ptr + row.to(tl.int64)[:, None] * size + at[None, :], mask=use, other=0.0)
    tl.store(sum_ptr + tl.program_id(1) * size + at, tl.sum(total, 0), mask=at < size)
