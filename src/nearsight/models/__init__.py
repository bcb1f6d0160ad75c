"""Networks of the papers, registered in timm."""

from nearsight.models import qna_vit

__all__ = ["qna_vit"]
