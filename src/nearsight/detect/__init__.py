"""Detectors: RetinaNet and DETR over the networks of the papers.

`create_detector(name, num_classes=…)` builds one; all of them are called alike (torchvision's convention): a list of images
[3, H, W] from 0 to 1, of any sizes, and in training a list of {"boxes": [N, 4] as x1, y1, x2, y2, "labels": [N]}. In training
they return a dict of losses, in evaluation a list of {"boxes", "scores", "labels"}. They normalise, pad and mask by themselves.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from nearsight.detect.retinanet import RETINANETS, create_retinanet
from nearsight.errors import ArgumentValueError, did_you_mean

__all__ = ["create_detector", "list_detectors"]


def list_detectors() -> list[str]:
    """The names `create_detector` knows, sorted.

    >>> "sasa_retinanet50" in list_detectors()
    True
    """
    return sorted(RETINANETS)


def create_detector(name: str, *, num_classes: int, pretrained: bool = False, **options: Any) -> nn.Module:
    """Build a detector by name.

    Args:
        name: one of `list_detectors()`.
        num_classes: labels run from 0 to num_classes − 1.
        pretrained: the backbone's weights from timm, where it has some; a file of your own is `backbone_weights=PATH`.
        options: keywords of `retinanet.create_retinanet`; they replace the name's own.

    >>> import torch
    >>> detector = create_detector("sasa_retinanet_nano", num_classes=3)
    >>> images = [torch.rand(3, 40, 64), torch.rand(3, 33, 21)]
    >>> targets = [{"boxes": torch.tensor([[4.0, 5.0, 30.0, 28.0]]), "labels": torch.tensor([2])}] * 2
    >>> sorted(detector(images, targets))
    ['bbox_regression', 'classification']
    >>> [sorted(found) for found in detector.eval()(images)]
    [['boxes', 'labels', 'scores'], ['boxes', 'labels', 'scores']]
    """
    if name not in RETINANETS:
        raise ArgumentValueError(
            f"create_detector: got {name!r}, wanted one of {', '.join(list_detectors())}.{did_you_mean(name, list_detectors())}"
        )
    return create_retinanet(**{**RETINANETS[name], **options}, num_classes=num_classes, pretrained=pretrained)
