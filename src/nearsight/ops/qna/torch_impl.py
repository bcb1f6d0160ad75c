"""QnA's aggregation without Triton."""

from nearsight.ops.qna.reference import run

__all__ = ["run"]
