"""A RetinaNet from one tensor to one answer per anchor: what a counter can trace."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from nearsight.detect.retinanet import RETINANETS, RetinaNet, create_retinanet

__all__ = ["DenseRetinaNet", "dense_retinanet"]


class DenseRetinaNet(nn.Module):
    """A RetinaNet without padding, boxes and their suppression: [B, 3, H, W] → logits and offsets, a list of one per level each.

    H and W divide by the coarsest stride.
    """

    def __init__(self, detector: RetinaNet) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        outputs, _ = self.detector.dense(x)
        return outputs["cls_logits"], outputs["bbox_regression"]


def dense_retinanet(name: str, *, num_classes: int, **options: Any) -> DenseRetinaNet:
    """The dense form of a RetinaNet by name.

    >>> import torch
    >>> from nearsight.models.flops import count_flops, count_parameters
    >>> with torch.device("meta"):
    ...     network = dense_retinanet("sasa_retinanet50", num_classes=90)
    >>> count_parameters(network), round(count_flops(network, 640) / 1e9, 1)
    (19974668, 107.4)
    """
    return DenseRetinaNet(create_retinanet(**{**RETINANETS[name], **options}, num_classes=num_classes))
