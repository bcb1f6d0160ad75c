"""Networks of the papers, registered in timm."""

from nearsight.models import aa, autoencoder, expatt, qna_vit, sasa_resnet

__all__ = ["aa", "autoencoder", "expatt", "qna_vit", "sasa_resnet"]
