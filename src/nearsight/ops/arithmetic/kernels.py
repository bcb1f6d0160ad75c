"""Products that the interpreter can do too; exponentials, logarithms and reciprocals in one instruction."""

import torch
import triton
import triton.language as tl

from nearsight.ops.triton_support import INTERPRETED as RUN_BY_INTERPRETER

__all__ = ["dot", "dot_add", "exp2", "log2", "reciprocal"]

INTERPRETED = tl.constexpr(RUN_BY_INTERPRETER)
NVIDIA = tl.constexpr(not RUN_BY_INTERPRETER and torch.version.hip is None)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    # The interpreter multiplies bfloat16 as if its bits were integers.
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def dot_add(a, b, acc, PRECISION: tl.constexpr):
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def exp2(x):
    # Triton's exp2 keeps subnormal results at three more instructions per logit; here they are zero.
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def log2(x):
    # With an error of 2⁻²² for sums of exponentials, where the library's takes twenty instructions and cares for subnormals.
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def reciprocal(x):
    # For sums of exponentials, at least 1: without the care for subnormal numbers.
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x
