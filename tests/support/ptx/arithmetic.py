"""Instructions that look at no other thread: what they read, what they write, and the function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.support.ptx.types import DTYPES


def _fused(x: Any, y: Any, z: Any) -> Any:
    """x·y + z, rounded once: a sum in float64 whose last bit says whether there was more, then float32."""
    product, z = x.astype(np.float64) * y, z.astype(np.float64)  # exact
    total = product + z
    back = total - product
    rest = (product - (total - back)) + (z - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (rest != 0) & (bits & 1 == 0)
    # Towards the rest: away from zero where it has the total's sign.
    return np.where(inexact, (bits + np.where((rest > 0) == (total > 0), 1, -1)).view(np.float64), total)


def _flushed(x: Any) -> Any:
    """Float32 without subnormals."""
    x = x.astype(np.float32)
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _approximate(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: _flushed(function(_flushed(x).astype(np.float64)))


def _to_bfloat16(x: Any) -> Any:
    bits = np.ascontiguousarray(x).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), nearest).astype(np.uint16)


def _from_bfloat16(bits: Any) -> Any:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_float16(x: Any) -> Any:
    return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))


def _from_float16(bits: Any) -> Any:
    return bits.view(np.float16).astype(np.float32)


HALVES = {"bf16": (_to_bfloat16, _from_bfloat16), "f16": (_to_float16, _from_float16)}


def _pack(high: Any, low: Any) -> Any:
    return high.astype(np.uint32) << np.uint32(16) | low


def _shift_left(x: Any, n: Any) -> Any:
    bits = 8 * x.dtype.itemsize
    return np.where(n < bits, x << np.minimum(n, bits - 1).astype(x.dtype), 0)


def _shift_right(x: Any, n: Any) -> Any:
    bits = 8 * x.dtype.itemsize
    if x.dtype.kind == "i":
        return x >> np.minimum(n, bits - 1).astype(x.dtype)
    return np.where(n < bits, x >> np.minimum(n, bits - 1).astype(x.dtype), 0)


def _quotient(x: Any, y: Any) -> Any:
    """Towards zero."""
    return np.where(y == 0, -1, np.trunc(x / np.where(y == 0, 1, y)))


def _remainder(x: Any, y: Any) -> Any:
    return np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y)))


def _bit_field(x: Any, start: Any, length: Any) -> Any:
    wide = x.astype(np.int64) >> np.minimum(start, 63).astype(np.int64)
    length = length.astype(np.int64)
    field = wide & ((np.int64(1) << length) - 1)
    if x.dtype.kind == "i":
        sign = field >> np.maximum(length - 1, 0) & 1
        field = field - (sign << length)
    return field


def _widely(function: Callable[..., Any], wide: str) -> Callable[..., Any]:
    return lambda x, y, *z: function(x.astype(wide), y.astype(wide), *z)


def _both_halves(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    to, back = HALVES[kind]

    def apply(*packed: Any) -> Any:
        low = function(*[back(p.astype(np.uint16)) for p in packed])
        high = function(*[back((p >> np.uint32(16)).astype(np.uint16)) for p in packed])
        return _pack(to(high), to(low))

    return apply


LANEWISE: dict[str, tuple[Sequence[str], str, Callable[..., Any]]] = {
    "fma.rn.f32": (("f32",) * 3, "f32", _fused),
    "ex2.approx.ftz.f32": (("f32",), "f32", _approximate(np.exp2)),
    "lg2.approx.ftz.f32": (("f32",), "f32", _approximate(np.log2)),
    "rcp.approx.ftz.f32": (("f32",), "f32", _approximate(np.reciprocal)),
    # Of two numbers the one that is one.
    "max.f32": (("f32", "f32"), "f32", np.fmax),
    "min.f32": (("f32", "f32"), "f32", np.fmin),
    "neg.f32": (("f32",), "f32", np.negative),
    "mov.pred": (("pred",), "pred", np.asarray),
    "add.bf16x2": (("b32", "b32"), "b32", _both_halves("bf16", np.add)),
    "add.f16x2": (("b32", "b32"), "b32", _both_halves("f16", np.add)),
    "add.rn.bf16x2": (("b32", "b32"), "b32", _both_halves("bf16", np.add)),
    "add.rn.f16x2": (("b32", "b32"), "b32", _both_halves("f16", np.add)),
    "cvt.rn.bf16x2.f32": (("f32", "f32"), "b32", lambda high, low: _pack(_to_bfloat16(high), _to_bfloat16(low))),
    "cvt.rn.f16x2.f32": (("f32", "f32"), "b32", lambda high, low: _pack(_to_float16(high), _to_float16(low))),
    "cvt.rn.bf16.f32": (("f32",), "b16", _to_bfloat16),
    "cvt.rn.f16.f32": (("f32",), "b16", _to_float16),
    "cvt.f32.bf16": (("b16",), "f32", _from_bfloat16),
    "cvt.f32.f16": (("b16",), "f32", _from_float16),
}
COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
for _name, _function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
    LANEWISE[f"{_name}.f32"] = LANEWISE[f"{_name}.rn.f32"] = (("f32", "f32"), "f32", _function)
for _kind in ("s16", "u16", "s32", "u32", "s64", "u64"):
    for _name, _function in (("add", np.add), ("sub", np.subtract), ("mul.lo", np.multiply)):
        LANEWISE[f"{_name}.{_kind}"] = ((_kind, _kind), _kind, _function)
    LANEWISE[f"mad.lo.{_kind}"] = ((_kind,) * 3, _kind, lambda x, y, z: x * y + z)
    LANEWISE[f"min.{_kind}"] = ((_kind, _kind), _kind, np.minimum)
    LANEWISE[f"max.{_kind}"] = ((_kind, _kind), _kind, np.maximum)
    LANEWISE[f"neg.{_kind}"] = ((_kind,), _kind, np.negative)
    LANEWISE[f"shr.{_kind}"] = ((_kind, "b32"), _kind, _shift_right)
for _kind in ("s32", "u32"):
    _wide = f"{_kind[0]}64"
    _dtype = str(DTYPES[_wide])
    LANEWISE[f"div.{_kind}"] = ((_kind, _kind), _kind, _quotient)
    LANEWISE[f"rem.{_kind}"] = ((_kind, _kind), _kind, _remainder)
    LANEWISE[f"bfe.{_kind}"] = ((_kind, "b32", "b32"), _kind, _bit_field)
    LANEWISE[f"mul.wide.{_kind}"] = ((_kind, _kind), _wide, _widely(np.multiply, _dtype))
    LANEWISE[f"mad.wide.{_kind}"] = ((_kind, _kind, _wide), _wide, _widely(lambda x, y, z: x * y + z, _dtype))
for _kind in ("pred", "b16", "b32", "b64"):
    for _name, _function in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        LANEWISE[f"{_name}.{_kind}"] = ((_kind, _kind), _kind, _function)
    LANEWISE[f"not.{_kind}"] = ((_kind,), _kind, np.invert)
for _kind in ("b16", "b32", "b64"):
    LANEWISE[f"shl.{_kind}"] = ((_kind, "b32"), _kind, _shift_left)
for _kind in ("b16", "b32", "b64", "f32"):
    LANEWISE[f"selp.{_kind}"] = ((_kind, _kind, "pred"), _kind, lambda x, y, p: np.where(p, x, y))
for _kind in ("s16", "u16", "b16", "s32", "u32", "b32", "s64", "u64", "b64", "f32"):
    for _name, _function in COMPARISONS.items():
        LANEWISE[f"setp.{_name}.{_kind}"] = ((_kind, _kind), "pred", _function)
for _from in ("s16", "u16", "s32", "u32", "s64", "u64"):
    for _to in ("s16", "u16", "s32", "u32", "s64", "u64"):
        LANEWISE[f"cvt.{_to}.{_from}"] = ((_from,), _to, np.asarray)
