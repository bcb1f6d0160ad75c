"""Runs compiled kernels on the CPU: the PTX that Triton and Gluon make for NVIDIA's GPUs, all programs of a launch in lockstep.

Gluon has no interpreter. Here its kernels run after compilation, so that layouts, swizzles, barriers and inline assembly are
tested too. Every register is an array [programs, threads]; programs that take different branches part and go on separately.

What it looks at beside the numbers:

- Every address: outside the given memory, or misaligned, is an error.
- Barriers: whoever reads shared memory must be a barrier behind the last write there, and the other way round, whichever
  threads they were. A copy (`cp.async`) is in flight until it is waited for; until then nobody may touch its bytes. It
  arrives at its wait, as late as it may, so that what reads too early reads what was there before: NaN, at first.
- Banks: threads that move 128 bytes of shared memory together must find them in different banks.

Rounding: sums, products, `fma` and conversions are the hardware's, bit for bit (but for the bits of a NaN). `ex2`, `lg2` and
`rcp` are rounded once, where the hardware's are off by up to 2⁻²². `mma` is rounded once, too; how the hardware rounds its sums
is not documented. What ptxas makes of the PTX is not seen.
"""

from tests.support.ptx.launch import Report, run
from tests.support.ptx.parsing import Program, parse
from tests.support.ptx.types import FaultError, UnknownInstructionError

__all__ = ["FaultError", "Program", "Report", "UnknownInstructionError", "parse", "run"]
