"""Explicit attention without its HW×HW matrix, in plain torch operations."""

from nearsight.ops.explicit.reference import run

__all__ = ["run"]
