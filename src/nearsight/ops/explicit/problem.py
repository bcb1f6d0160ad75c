"""One call of explicit attention as the Triton launches take it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Problem", "Spec", "carve", "dense", "make"]


class Problem(NamedTuple):
    """Values [B, H, W, C] whose channels lie next to each other, a contiguous radius [heads], the mask and the options."""

    values: Tensor
    radius: Tensor
    key_mask: Tensor | None
    gaussian: bool
    offset: float

    @property
    def batch(self) -> int:
        return self.values.shape[0]

    @property
    def size(self) -> tuple[int, int]:
        return self.values.shape[1], self.values.shape[2]

    @property
    def channels(self) -> int:
        return self.values.shape[3]

    @property
    def heads(self) -> int:
        return self.radius.shape[0]

    @property
    def per_head(self) -> int:
        return self.channels // self.heads

    @property
    def mask(self) -> tuple[Tensor, tuple[int, ...]]:
        """The mask and its strides; any tensor stands for an absent one."""
        if self.key_mask is None:
            return self.values, (0, 0, 0)
        return self.key_mask.view(torch.uint8), self.key_mask.stride()

    @property
    def parts(self) -> int:
        """bfloat16 parts a float32 operand is multiplied in: 3 have all its digits, 2 twice those of a half type."""
        return 3 if self.values.dtype == torch.float32 else 2


def make(values: Tensor, radius: Tensor, key_mask: Tensor | None, gaussian: bool, offset: float) -> Problem:
    return Problem(dense(values), radius.contiguous(), key_mask, gaussian, offset)


def dense(tensor: Tensor) -> Tensor:
    """The tensor, copied only where its last axis is not dense."""
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


class Spec(NamedTuple):
    """The shape and dtype of a table."""

    shape: list[int]
    dtype: torch.dtype

    @property
    def words(self) -> int:
        """Its size in float32 numbers, so many that the next table starts at a multiple of 16 bytes."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // 16) * 4


def carve(buffer: Tensor, specs: Sequence[Spec]) -> list[Tensor]:
    """The tables that a float32 buffer holds one after the other."""
    whole = {dtype: buffer.view(dtype) for dtype in {spec.dtype for spec in specs}}
    tables, first = [], 0
    for spec in specs:
        strides = [math.prod(spec.shape[axis + 1 :]) for axis in range(len(spec.shape))]
        tables.append(whole[spec.dtype].as_strided(spec.shape, strides, first * 4 // spec.dtype.itemsize))
        first += spec.words
    return tables
