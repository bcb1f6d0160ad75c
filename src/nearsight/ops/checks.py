"""Argument checks the ops share. They read shapes, dtypes, devices and Python numbers, never the values of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nearsight.errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "check_choice",
    "check_count",
    "check_float_tensor",
    "check_key_mask",
    "check_number",
    "check_pair",
    "check_same_device",
    "check_same_dtype",
    "check_shape",
    "shape_text",
]


def shape_text(shape: Sequence[object]) -> str:
    """`[2, 5, 7]`: sizes as the error messages print them."""
    return "[" + ", ".join(str(n) for n in shape) + "]"


def check_float_tensor(op: str, name: str, tensor: Any, rank: int, layout: str) -> None:
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(f"{op}: got {name} of type {type(tensor).__name__}, wanted a tensor {layout}.")
    if tensor.dim() != rank:
        raise ArgumentValueError(
            f"{op}: got {name} of shape {shape_text(tensor.shape)} (rank {tensor.dim()}), wanted rank {rank}: {layout}."
        )
    if not tensor.dtype.is_floating_point:
        raise ArgumentTypeError(
            f"{op}: got {name} of dtype {tensor.dtype}, wanted a floating-point dtype; convert it with .float()."
        )


def check_shape(op: str, name: str, tensor: Tensor, wanted: Sequence[int], layout: str) -> None:
    if tensor.dim() != len(wanted) or any(got != want for got, want in zip(tensor.shape, wanted, strict=True)):
        raise ArgumentValueError(
            f"{op}: got {name} of shape {shape_text(tensor.shape)}, wanted {shape_text(wanted)}: {layout}."
        )


def check_same_dtype(op: str, **tensors: Tensor | None) -> None:
    _check_same(op, "dtype", "convert them to one dtype or use autocast", tensors)


def check_same_device(op: str, **tensors: Tensor | None) -> None:
    _check_same(op, "device", "move them to one device", tensors)


def _check_same(op: str, what: str, remedy: str, tensors: dict[str, Tensor | None]) -> None:
    first_name, first = next((n, t) for n, t in tensors.items() if t is not None)
    for name, tensor in tensors.items():
        if tensor is not None and getattr(tensor, what) != getattr(first, what):
            raise ArgumentTypeError(
                f"{op}: got {first_name} of {what} {getattr(first, what)} and {name} of {what} {getattr(tensor, what)}, "
                f"wanted the same {what}; {remedy}."
            )


def check_key_mask(op: str, key_mask: Any, batch: int, height: int, width: int) -> None:
    if key_mask is None:
        return
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        got = f"dtype {key_mask.dtype}" if isinstance(key_mask, Tensor) else f"type {type(key_mask).__name__}"
        raise ArgumentTypeError(
            f"{op}: got key_mask of {got}, wanted a bool tensor [B, H, W], True where a pixel may be attended."
        )
    check_shape(op, "key_mask", key_mask, (batch, height, width), "[B, H, W], True where a pixel may be attended")


def check_pair(op: str, name: str, value: Any, minimum: int = 1) -> tuple[int, int]:
    """An int or a (rows, columns) pair of ints, each at least `minimum`, as a pair."""
    if isinstance(value, bool) or not isinstance(value, int | tuple | list):
        raise ArgumentTypeError(f"{op}: got {name}={value!r}, wanted an int or a (rows, columns) pair of ints.")
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, int) for n in pair):
        raise ArgumentTypeError(f"{op}: got {name}={value!r}, wanted an int or a (rows, columns) pair of ints.")
    if min(pair) < minimum:
        raise ArgumentValueError(f"{op}: got {name}={value!r}, wanted at least {minimum} on each axis.")
    return pair[0], pair[1]


def check_count(op: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{op}: got {name} of type {type(value).__name__}, wanted an int.")
    if value < 1:
        raise ArgumentValueError(f"{op}: got {name}={value}, wanted an int of at least 1.")


def check_choice(op: str, name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ArgumentValueError(f"{op}: got {name}={value!r}, wanted one of {', '.join(repr(c) for c in choices)}.")


def check_number(op: str, name: str, value: Any, *, positive: bool = False) -> float:
    """A finite Python number, as a float; `positive` also refuses zero and below."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"{op}: got {name} of type {type(value).__name__}, wanted a number.")
    # Compared, not math.isfinite(value): torch.compile may hand in a symbolic float, which that breaks the graph on.
    if not -math.inf < value < math.inf or (positive and value <= 0):
        raise ArgumentValueError(
            f"{op}: got {name}={value!r}, wanted a finite {'positive ' if positive else ''}number."
        )
    return float(value)
