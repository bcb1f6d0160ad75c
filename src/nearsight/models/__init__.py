"""Networks of the papers, registered in timm."""

from nearsight.models import aa, expatt, qna_vit, sasa_resnet

__all__ = ["aa", "expatt", "qna_vit", "sasa_resnet"]
