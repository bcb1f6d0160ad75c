"""RetinaNet's two heads, of convolutions or of attention, the same weights for every level."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.models.detection import _utils as detection_utils
from torchvision.models.detection.retinanet import RetinaNetClassificationHead, RetinaNetRegressionHead

from nearsight.detect.spatial import MaskedConv2d, Spatial
from nearsight.layers import LocalAttention2d

__all__ = ["BoxHead", "ClassHead", "Tower"]

PRIOR = 0.01


class Tower(nn.Module):
    """`depth` spatial layers, each with a ReLU, and the last one, which predicts `outputs` numbers per anchor.

    In convolutions the last one is a 3×3; in attention it is one more attention of the same width and a pointwise
    convolution that mixes its heads. [B, width, H, W] → [B, H·W·anchors, outputs].
    """

    def __init__(self, width: int, anchors: int, outputs: int, spatial: Spatial, depth: int, std: float) -> None:
        super().__init__()
        self.outputs = outputs
        self.layers = nn.ModuleList(spatial.layer(width, width) for _ in range(depth))
        self.last: nn.Module | None = None
        if spatial.form == "attention":
            self.last = spatial.layer(width, width)
            self.predict = MaskedConv2d(width, anchors * outputs, 1)
        else:
            self.predict = MaskedConv2d(width, anchors * outputs, 3, padding=1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, LocalAttention2d):
                with torch.no_grad():
                    nn.init.normal_(module.value_weight, std=std)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, key_mask).relu()
        if self.last is not None:
            x = self.last(x, key_mask)
        x = self.predict(x, key_mask)
        # [B, A·K, H, W] → [B, H·W·A, K]; losses and boxes are computed in float32, whatever made the maps.
        return x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, self.outputs).float()

    def run(self, maps: Sequence[Tensor], masks: Sequence[Tensor | None]) -> list[Tensor]:
        return [self(x, mask) for x, mask in zip(maps, masks, strict=True)]


class ClassHead(Tower):
    """One logit per anchor and class, with torchvision's focal loss."""

    BETWEEN_THRESHOLDS = detection_utils.Matcher.BETWEEN_THRESHOLDS
    compute_loss = RetinaNetClassificationHead.compute_loss

    def __init__(
        self, width: int, anchors: int, num_classes: int, spatial: Spatial, depth: int = 4, std: float = 0.01
    ) -> None:
        super().__init__(width, anchors, num_classes, spatial, depth, std)
        # Every anchor starts as an object of each class with probability 0.01, so that the many empty ones do not drown the rest.
        assert self.predict.bias is not None
        nn.init.constant_(self.predict.bias, -math.log((1 - PRIOR) / PRIOR))


class BoxHead(Tower):
    """Four offsets per anchor; torchvision's L1 loss on the anchors that found a box."""

    _loss_type = "l1"
    compute_loss = RetinaNetRegressionHead.compute_loss

    def __init__(self, width: int, anchors: int, spatial: Spatial, depth: int = 4, std: float = 0.01) -> None:
        super().__init__(width, anchors, 4, spatial, depth, std)
        self.box_coder = detection_utils.BoxCoder(weights=(1.0, 1.0, 1.0, 1.0))
