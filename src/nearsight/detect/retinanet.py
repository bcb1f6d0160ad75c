"""RetinaNet over any timm backbone, its pyramid and heads made of convolutions or of attention.

"Focal Loss for Dense Object Detection", Lin et al. 2017, https://arxiv.org/abs/1708.02002
In attention form as in the appendix of "Stand-Alone Self-Attention in Vision Models", Ramachandran et al. 2019,
https://arxiv.org/abs/1906.05909: every 3×3 convolution of the pyramid and the heads becomes an attention of the same width, a
strided one is averaged 2×2 afterwards, W_V of the heads starts at N(0, 0.01), and a pointwise convolution ends each head.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import retinanet as torchvision_retinanet
from torchvision.models.detection.anchor_utils import AnchorGenerator

from nearsight.detect.backbone import TimmFeatures
from nearsight.detect.batch import PadOnly, check_images, check_targets, padding_mask
from nearsight.detect.heads import BoxHead, ClassHead
from nearsight.detect.pyramid import FeaturePyramid
from nearsight.detect.spatial import Spatial
from nearsight.errors import ArgumentTypeError, did_you_mean

__all__ = ["RETINANETS", "PyramidBackbone", "RetinaHeads", "RetinaNet", "create_retinanet"]

NAME = "RetinaNet"
Targets = Sequence[Mapping[str, Tensor]]
# torchvision's RetinaNet takes any keyword and says nothing about one it does not know.
KNOBS = ("score_thresh", "nms_thresh", "detections_per_img", "topk_candidates", "fg_iou_thresh", "bg_iou_thresh")


class PyramidBackbone(nn.Module):
    """Images to the maps of a feature pyramid, and their masks."""

    def __init__(self, features: TimmFeatures, pyramid: FeaturePyramid, out_channels: int) -> None:
        super().__init__()
        self.features, self.pyramid, self.out_channels = features, pyramid, out_channels

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> tuple[list[Tensor], list[Tensor | None]]:
        return self.pyramid(*self.features(x, key_mask))


class RetinaHeads(nn.Module):
    """The class head and the box head on every level: lists of [B, H·W·anchors, num_classes] and of [B, H·W·anchors, 4]."""

    def __init__(self, classes: ClassHead, boxes: BoxHead) -> None:
        super().__init__()
        self.classes, self.boxes = classes, boxes

    def forward(self, maps: Sequence[Tensor], masks: Sequence[Tensor | None]) -> dict[str, list[Tensor]]:
        return {"cls_logits": self.classes.run(maps, masks), "bbox_regression": self.boxes.run(maps, masks)}

    def compute_loss(self, targets: Any, head_outputs: Any, anchors: Any, matched_idxs: Any) -> dict[str, Tensor]:
        return {
            "classification": self.classes.compute_loss(targets, head_outputs, matched_idxs),
            "bbox_regression": self.boxes.compute_loss(targets, head_outputs, anchors, matched_idxs),
        }


class RetinaNet(torchvision_retinanet.RetinaNet):
    """torchvision's RetinaNet for images of any size in one batch, none of which sees the padding.

    `model(images, targets)`: a list of [3, H, W] from 0 to 1 and, in training, a list of {"boxes": [N, 4] as x1, y1, x2, y2,
    "labels": [N] from 0}; the losses come back as a dict. In evaluation a list of {"boxes", "scores", "labels"}.

    Padding takes no part: layers leave it out, anchors in it are neither matched nor detected. Only a BatchNorm that is
    training counts it in its statistics.

    Args:
        backbone, heads: they make the maps and the predictions.
        anchors: of every level.
        strides: of every level; images are padded to a multiple of the last.
        mean, std: of the images.
        options: torchvision's score_thresh, nms_thresh, detections_per_img, topk_candidates, fg_iou_thresh, bg_iou_thresh.
    """

    def __init__(
        self,
        backbone: PyramidBackbone,
        heads: RetinaHeads,
        anchors: AnchorGenerator,
        *,
        strides: Sequence[int],
        mean: Sequence[float],
        std: Sequence[float],
        **options: Any,
    ) -> None:
        for key in options:
            if key not in KNOBS:
                raise ArgumentTypeError(f"{NAME}: got an unknown option {key!r}.{did_you_mean(key, OPTIONS)}")
        super().__init__(backbone, heads.classes.outputs, anchor_generator=anchors, head=heads, **options)
        self.strides = tuple(strides)
        self.transform = PadOnly(mean, std, multiple=self.strides[-1])

    def forward(self, images: Sequence[Tensor], targets: Targets | None = None) -> Any:
        check_images(NAME, images)
        if self.training:
            check_targets(NAME, images, targets)
        elif len(images) == 0:
            return []
        batch, _ = self.transform(images)
        outputs, masks = self.dense(batch.tensors, padding_mask(batch))
        anchors = self.level_anchors(batch.tensors)
        valid = [self._valid_anchors(mask) for mask in masks]
        if self.training:
            return self._losses(targets, outputs, anchors, valid)
        logits = [
            x if ok is None else x.masked_fill(~ok[..., None], -torch.inf)
            for x, ok in zip(outputs["cls_logits"], valid, strict=True)
        ]
        return self.postprocess_detections(
            {**outputs, "cls_logits": logits}, [anchors] * len(images), batch.image_sizes
        )

    def dense(self, x: Tensor, key_mask: Tensor | None = None) -> tuple[dict[str, list[Tensor]], list[Tensor | None]]:
        """What the heads say of every anchor of a normalised, padded batch, level by level, and the levels' masks."""
        # Attention reads a channels-last map as it lies; any other would be copied in every layer.
        maps, masks = self.backbone(x.contiguous(memory_format=torch.channels_last), key_mask)
        return self.head(maps, masks), masks

    def level_anchors(self, x: Tensor) -> list[Tensor]:
        """The anchors of each level for a padded batch, [H/stride · W/stride · anchors, 4], in float32."""
        grids = [[side // stride for side in x.shape[-2:]] for stride in self.strides]
        self.anchor_generator.set_cell_anchors(torch.float32, x.device)
        return self.anchor_generator.grid_anchors(grids, [[stride, stride] for stride in self.strides])

    def _valid_anchors(self, mask: Tensor | None) -> Tensor | None:
        """[B, H, W] → [B, H·W·anchors]: an anchor belongs to the image when its cell does."""
        per_cell = self.anchor_generator.num_anchors_per_location()[0]
        return None if mask is None else mask.flatten(1).repeat_interleave(per_cell, 1)

    def _losses(
        self, targets: Any, outputs: dict[str, list[Tensor]], anchors: list[Tensor], valid: list[Tensor | None]
    ) -> dict[str, Tensor]:
        """torchvision's losses over the anchors inside each image."""
        joined = {name: list(torch.cat(levels, 1)) for name, levels in outputs.items()}
        per_image = [torch.cat(anchors)] * len(targets)
        inside = [ok for ok in valid if ok is not None]
        if inside:
            keep = list(torch.cat(inside, 1))
            joined = {name: [x[ok] for x, ok in zip(rows, keep, strict=True)] for name, rows in joined.items()}
            per_image = [x[ok] for x, ok in zip(per_image, keep, strict=True)]
        losses: dict[str, Tensor] = self.compute_loss(targets, joined, per_image)
        return losses


def create_retinanet(
    *,
    num_classes: int,
    pretrained: bool = False,
    backbone: str = "sasa_resnet50",
    backbone_options: Mapping[str, Any] | None = None,
    backbone_weights: str | Path | None = None,
    backbone_norm: str = "train",
    pyramid: str = "attention",
    heads: str = "attention",
    width: int = 256,
    depth: int = 4,
    window: int = 7,
    num_heads: int = 8,
    norm: bool = False,
    strides: Sequence[int] = (8, 16, 32),
    extra_levels: int = 2,
    anchor_scale: float = 4.0,
    anchor_octaves: int = 2,
    anchor_ratios: Sequence[float] = (0.5, 1.0, 2.0),
    init_std: float = 0.01,
    **options: Any,
) -> RetinaNet:
    """A RetinaNet over a timm backbone.

    Args:
        num_classes: labels run from 0 to num_classes − 1; there is no background class.
        pretrained: the backbone's weights from timm, where it has some.
        backbone, backbone_options, backbone_weights, backbone_norm: see `TimmFeatures`.
        pyramid, heads: "attention" or "conv".
        width: channels of pyramid and heads.
        depth: layers of each head before its last.
        window, num_heads: of their attention.
        norm: normalise the channels of every pixel after each of their layers; the published networks do not.
        strides: maps the pyramid takes from the backbone.
        extra_levels: coarser levels it adds, each half the last.
        anchor_scale: side of a level's smallest anchor in strides.
        anchor_octaves: sizes per level, evenly spaced between a level's and the next one's.
        anchor_ratios: height / width.
        init_std: of W_V and the convolutions in the heads.
        options: see `RetinaNet`.
    """
    features = TimmFeatures(
        backbone,
        strides,
        pretrained=pretrained,
        weights=backbone_weights,
        norm=backbone_norm,
        options=backbone_options,
    )
    levels = [*strides, *(strides[-1] * 2 ** (i + 1) for i in range(extra_levels))]
    sizes = tuple(
        tuple(anchor_scale * stride * 2 ** (i / anchor_octaves) for i in range(anchor_octaves)) for stride in levels
    )
    anchors = AnchorGenerator(sizes, (tuple(anchor_ratios),) * len(levels))
    per_cell = anchor_octaves * len(anchor_ratios)
    in_pyramid, in_heads = (Spatial(form, window, num_heads, norm) for form in (pyramid, heads))
    return RetinaNet(
        PyramidBackbone(features, FeaturePyramid(features.channels, width, in_pyramid, extra_levels), width),
        RetinaHeads(
            ClassHead(width, per_cell, num_classes, in_heads, depth, init_std),
            BoxHead(width, per_cell, in_heads, depth, init_std),
        ),
        anchors,
        strides=levels,
        mean=features.mean,
        std=features.std,
        **options,
    )


OPTIONS = (*inspect.signature(create_retinanet).parameters, *KNOBS)
CONV: dict[str, Any] = {"pyramid": "conv", "heads": "conv"}
CONV_BACKBONE: dict[str, Any] = {"backbone": "sasa_resnet50_convstem", "backbone_options": {"stages": "cccc"}}
# For CPUs and tests: 4 × 64 channels, four levels of strides 8 to 64.
NANO: dict[str, Any] = {
    "backbone_options": {"stem": "conv"},
    "width": 64,
    "depth": 2,
    "window": 5,
    "num_heads": 4,
    "extra_levels": 1,
}

RETINANETS: dict[str, dict[str, Any]] = {
    "retinanet50": {**CONV, **CONV_BACKBONE},
    "sasa_retinanet50": {},
    "sasa_retinanet50_convstem": {"backbone": "sasa_resnet50_convstem"},
    "sasa_retinanet50_convheads": {**CONV},
    "sasa_retinanet50_convstem_convheads": {**CONV, "backbone": "sasa_resnet50_convstem"},
    "retinanet_nano": {**NANO, **CONV, "backbone": "resnet_nano"},
    # With the norm its losses fall four times as fast; without, attention on attention passes on little but averages.
    "sasa_retinanet_nano": {**NANO, "backbone": "sasa_resnet_nano", "norm": True},
}
