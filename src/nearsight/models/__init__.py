"""Networks of the papers, registered in timm."""

from nearsight.models import qna_vit, sasa_resnet

__all__ = ["qna_vit", "sasa_resnet"]
