"""The error rule of nearsight.bench.accuracy as an assertion."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nearsight.bench.accuracy import Tensors, find_fault, output_and_gradients

__all__ = ["assert_by_error_rule", "output_and_gradients"]


def assert_by_error_rule(
    backend: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: Tensors, seed: int = 0
) -> None:
    """Compare `backend` with `reference` on `inputs` (whose dtype is the one tested); fail naming what is off and where."""
    fault = find_fault(backend, reference, inputs, seed=seed)
    if fault is not None:
        raise AssertionError(fault)
