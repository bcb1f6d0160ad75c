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

DETRS: dict[str, dict[str, Any]] = {
    **{
        f"detr_{name}": {"backbone": name}
        for name in ("qna_vit_tiny", "qna_vit_tiny_7x7", "qna_vit_small", "qna_vit_base")
    },
    "detr_qna_vit_nano": {
        "backbone": "qna_vit_nano",
        "width": 64,
        "num_heads": 4,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "hidden": 128,
        "num_queries": 20,
        "dropout": 0.0,
    },
}


def list_detectors() -> list[str]:
    """The names `create_detector` knows, sorted.

    >>> "sasa_retinanet50" in list_detectors(), "detr_qna_vit_tiny" in list_detectors()
    (True, True)
    """
    return sorted([*RETINANETS, *DETRS])


def create_detector(name: str, *, num_classes: int, pretrained: bool = False, **options: Any) -> nn.Module:
    """Build a detector by name.

    Args:
        name: one of `list_detectors()`.
        num_classes: labels run from 0 to num_classes − 1.
        pretrained: the backbone's weights from timm, where it has some; a file of your own is `backbone_weights=PATH`.
        options: keywords of `retinanet.create_retinanet` or `detr.create_detr`; they replace the name's own.

    >>> import torch
    >>> detector = create_detector("sasa_retinanet_nano", num_classes=3)
    >>> images = [torch.rand(3, 40, 64), torch.rand(3, 33, 21)]
    >>> targets = [{"boxes": torch.tensor([[4.0, 5.0, 30.0, 28.0]]), "labels": torch.tensor([2])}] * 2
    >>> sorted(detector(images, targets))
    ['bbox_regression', 'classification']
    >>> [sorted(found) for found in detector.eval()(images)]
    [['boxes', 'labels', 'scores'], ['boxes', 'labels', 'scores']]
    """
    if name in RETINANETS:
        return create_retinanet(**{**RETINANETS[name], **options}, num_classes=num_classes, pretrained=pretrained)
    if name in DETRS:
        # Here, because it needs transformers, which RetinaNet does without.
        from nearsight.detect.detr import create_detr

        return create_detr(**{**DETRS[name], **options}, num_classes=num_classes, pretrained=pretrained)
    known = list_detectors()
    raise ArgumentValueError(
        f"create_detector: got {name!r}, wanted one of {', '.join(known)}.{did_you_mean(name, known)}"
    )
