"""Read a Flax msgpack checkpoint: plain data and arrays, nothing that could run code.

Flax writes nested maps whose leaves are msgpack extensions: 1 an array (shape, dtype name, bytes), 2 a complex number, 3 a
NumPy scalar written as an array; arrays above a gigabyte are cut into a map of chunks.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Any

import torch
from torch import Tensor

from nearsight.errors import UserError

__all__ = ["unpack"]

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    )
}
MAX_DEPTH = 64
# First byte → the number that follows it, for scalars, and how a length is written, for the rest.
SCALARS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
SCALARS |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
LENGTHS = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}
LENGTHS |= {0xD9: ">B", 0xDA: ">H", 0xDB: ">I", 0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}
FIXED_EXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def unpack(data: bytes) -> Any:
    """The object a Flax msgpack file holds: dicts, lists, strings, numbers and tensors.

    >>> unpack(bytes([0x81, 0xA1]) + b"a" + bytes([0x92, 0x01, 0xC3]))
    {'a': [1, True]}
    """
    reader = _Reader(memoryview(data))
    value = reader.value(0)
    if reader.at != len(data):
        raise UserError(f"not a Flax msgpack file: {len(data) - reader.at} bytes after its end.")
    return _join_chunks(value)


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> memoryview:
        if self.at + count > len(self.data):
            raise UserError(
                f"not a whole Flax msgpack file: it ends at byte {len(self.data)}, in the middle of a value."
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise UserError(f"not a Flax msgpack file: nested deeper than {MAX_DEPTH}.")
        kind = self.number(">B")
        if kind <= 0x7F:
            return kind
        if kind >= 0xE0:
            return kind - 0x100
        if kind <= 0x8F:
            return self.map(kind & 0x0F, depth)
        if kind <= 0x9F:
            return self.list(kind & 0x0F, depth)
        if kind <= 0xBF:
            return self.text(kind & 0x1F)
        if kind in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[kind]
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind in FIXED_EXT:
            return self.extension(FIXED_EXT[kind], depth)
        if kind not in LENGTHS:
            raise UserError(f"not a Flax msgpack file: byte 0x{kind:02x} at {self.at - 1} starts no value.")
        length = self.number(LENGTHS[kind])
        if kind <= 0xC6:
            return bytes(self.take(length))
        if kind <= 0xC9:
            return self.extension(length, depth)
        if kind <= 0xDB:
            return self.text(length)
        return self.list(length, depth) if kind <= 0xDD else self.map(length, depth)

    def text(self, length: int) -> str:
        return bytes(self.take(length)).decode("utf-8", errors="replace")

    def list(self, length: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(length)]

    def map(self, length: int, depth: int) -> dict[Any, Any]:
        pairs = {}
        for _ in range(length):
            key = self.value(depth + 1)
            if not isinstance(key, str | int):
                raise UserError(f"not a Flax msgpack file: a map has a key of type {type(key).__name__}.")
            pairs[key] = self.value(depth + 1)
        return pairs

    def extension(self, length: int, depth: int) -> Any:
        code = self.number(">b")
        if code in (1, 2, 3):
            parts = _Reader(self.take(length)).value(depth + 1)
            return complex(*_two_numbers(parts)) if code == 2 else _array(parts)
        raise UserError(f"not a Flax msgpack file: extension {code} is none of Flax's (1, 2, 3).")


def _two_numbers(parts: Any) -> tuple[float, float]:
    if not (isinstance(parts, list) and len(parts) == 2 and all(isinstance(n, int | float) for n in parts)):
        raise UserError("not a Flax msgpack file: a complex number is not (real, imaginary).")
    return parts[0], parts[1]


def _array(parts: Any) -> Tensor:
    if not (isinstance(parts, list) and len(parts) == 3 and isinstance(parts[0], list) and isinstance(parts[2], bytes)):
        raise UserError("not a Flax msgpack file: an array is not (shape, dtype, bytes).")
    shape, name, data = parts
    dtype = DTYPES.get(name)
    if dtype is None:
        raise UserError(f"a Flax array of dtype {name!r}, wanted one of {', '.join(DTYPES)}.")
    if any(not isinstance(n, int) or n < 0 for n in shape) or prod(shape) * dtype.itemsize != len(data):
        raise UserError(f"not a Flax msgpack file: an array of shape {shape} and dtype {name} in {len(data)} bytes.")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def _join_chunks(value: Any) -> Any:
    if isinstance(value, list):
        return [_join_chunks(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__msgpack_chunked_array__" in value:
        try:
            shape, chunks = _in_order(value["shape"]), _in_order(value["chunks"])
            return torch.cat([chunk.flatten() for chunk in chunks]).view(shape)
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            raise UserError("not a Flax msgpack file: an array's chunks do not fit together.") from error
    return {key: _join_chunks(item) for key, item in value.items()}


def _in_order(numbered: Any) -> list[Any]:
    """Flax writes a tuple as a map {"0": …, "1": …}."""
    if isinstance(numbered, dict):
        return [numbered[str(i)] for i in range(len(numbered))]
    return list(numbered)
