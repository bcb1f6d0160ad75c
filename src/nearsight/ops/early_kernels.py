"""How a kernel begins that is launched before the one before it has ended (`triton_support.early_launch`)."""
# mypy: ignore-errors

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    # A Triton built for other GPUs alone, on which nothing is launched early.
    gdc_launch_dependents = gdc_wait = None

__all__ = ["begin"]


@triton.jit
def begin(EARLY: tl.constexpr):
    """Launched EARLY, while the kernel before still runs: let the next one come, and wait until all before has ended.

    The first thing that a program does; all of them must, or the kernel after the next could not rely on it.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
