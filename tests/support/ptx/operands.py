"""Operands as PTX writes them: registers, lists of them, places in memory, numbers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.support.ptx.types import DTYPES, KEPT


def register_names(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{} ").split(",")]


def place_of(operand: str) -> tuple[str, int]:
    found = re.fullmatch(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
    assert found is not None, operand
    return found[1], int(found[2] or "0", 0)


def constant(text: str, kind: str) -> Any:
    dtype = DTYPES[kind]
    if kind == "pred":
        return np.bool_(int(text, 0))
    if text[:2] in ("0f", "0F"):
        return np.uint32(int(text[2:], 16)).view(dtype)
    bits = 8 * dtype.itemsize
    return KEPT[bits // 8].type(int(text, 0) % (1 << bits)).view(dtype)


def source_of(text: str, kind: str) -> Any:
    """A register's name, or the constant."""
    return constant(text, kind) if re.match(r"-?\d", text) else text
