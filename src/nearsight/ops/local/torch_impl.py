"""Local attention without Triton."""

from nearsight.ops.local.reference import run

__all__ = ["run"]
