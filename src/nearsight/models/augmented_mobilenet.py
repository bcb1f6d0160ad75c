"""timm's MobileNetV2 with augmented convolutions in place of its expanding 1×1: what ExpAtt and AA-Net share."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from timm.models._efficientnet_blocks import DepthwiseSeparableConv, InvertedResidual
from timm.models._efficientnet_builder import decode_arch_def, round_channels
from timm.models._features import feature_take_indices
from timm.models._manipulate import checkpoint
from timm.models.efficientnet import EfficientNet
from torch import Tensor, nn
from torch.nn import functional as F

from nearsight.layers.common import check_map
from nearsight.layers.explicit import RADIUS_INIT
from nearsight.models.augmented_resnet import Augmenter, no_decay_names, shrink_size
from nearsight.models.common import global_pool_valid, run_spatial, shrink_mask, zero_masked
from nearsight.ops.checks import check_choice, check_number, check_pair

__all__ = ["AugmentedMobileNet"]

NAME = "AugmentedMobileNet"

ARCHITECTURE = [
    ["ds_r1_k3_s1_c16"],
    ["ir_r2_k3_s2_e6_c24"],
    ["ir_r3_k3_s2_e6_c32"],
    ["ir_r4_k3_s2_e6_c64"],
    ["ir_r3_k3_s1_e6_c96"],
    ["ir_r3_k3_s2_e6_c160"],
    ["ir_r1_k3_s1_e6_c320"],
]


class AugmentedMobileNet(EfficientNet):
    """timm's MobileNetV2 whose wider expanding 1×1 convolutions give some channels to attention over the whole map.

    [B, in_chans, H, W] → [B, num_classes], any image size; maps of stride 2, 4, 8, 16, 32.

    Args:
        mechanism: "expatt" or "aa".
        from_channels: the expanded width from which on blocks are augmented; the paper starts at 24 × 6 = 144.
        kind, per_head, offset, radius, with_aa, ratio, num_heads, key_channels, per_head_position, img_size: as in
            `AugmentedResNet`.
        dv: channels that attention makes, instead of the ratio.
        channel_multiplier: width of the network.
        act_layer, norm_layer, drop_rate, drop_path_rate: as in timm's EfficientNet.

    >>> import timm, torch, nearsight
    >>> model = timm.create_model("expatt_mobilenetv2_100", num_classes=10).eval()
    >>> model(torch.randn(1, 3, 33, 47)).shape
    torch.Size([1, 10])
    """

    def __init__(
        self,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "avg",
        *,
        mechanism: str = "expatt",
        from_channels: int = 144,
        kind: str = "gaussian",
        per_head: bool = False,
        offset: float = 1.0,
        radius: float = RADIUS_INIT,
        with_aa: bool = False,
        ratio: float = 0.05,
        dv: int | None = None,
        num_heads: int = 4,
        key_channels: int | None = None,
        per_head_position: bool = False,
        img_size: int | tuple[int, int] = 224,
        channel_multiplier: float = 1.0,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        act_layer: Any = nn.ReLU6,
        norm_layer: Any = nn.BatchNorm2d,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        channel_multiplier = check_number(NAME, "channel_multiplier", channel_multiplier, positive=True)
        round_chs = partial(round_channels, multiplier=channel_multiplier)
        super().__init__(
            decode_arch_def(ARCHITECTURE),
            num_classes=num_classes,
            num_features=max(1280, round_chs(1280)),
            in_chans=in_chans,
            stem_size=32,
            round_chs_fn=round_chs,
            act_layer=act_layer,
            norm_layer=norm_layer,
            drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
            global_pool=global_pool,
            device=device,
            dtype=dtype,
        )
        augmenter = Augmenter(
            NAME,
            mechanism,
            kind=kind,
            per_head=per_head,
            offset=offset,
            radius=radius,
            with_aa=with_aa,
            ratio=ratio,
            num_heads=num_heads,
            per_head_position=per_head_position,
            key_channels=key_channels,
        )
        size = shrink_size(check_pair(NAME, "img_size", img_size), 2)
        for block in self.blocks.modules():
            if isinstance(block, InvertedResidual) and block.conv_pw.out_channels >= from_channels:
                block.conv_pw = augmenter(block.conv_pw, size, dv)
            if isinstance(block, InvertedResidual | DepthwiseSeparableConv):
                size = shrink_size(size, _stride(block))

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return no_decay_names(self)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        extra_blocks: bool = False,
        key_mask: Tensor | None = None,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The maps of stride 2 to 32, zero where key_mask is False.

        Args:
            indices: which of the five; the last n for an int; all for None.
            norm: as in timm; these maps have no final norm.
            stop_early: stop after the last map asked for.
            output_fmt: "NCHW".
            intermediates_only: leave out the final map, which otherwise comes first.
            extra_blocks: count the stem and every stage of blocks, not only the last of each stride.
            key_mask: bool [B, H, W], True where the image has a pixel.
        """
        check_choice(NAME, "output_fmt", output_fmt, ("NCHW",))
        if extra_blocks:
            take, last = feature_take_indices(len(self.blocks) + 1, indices)
        else:
            take, last = feature_take_indices(len(self.stage_ends), indices)
            take, last = [self.stage_ends[i] for i in take], self.stage_ends[last]
        intermediates = []
        x, key_mask = self._stem(x, key_mask)
        if 0 in take:
            intermediates.append(zero_masked(x, key_mask))
        depth = last if stop_early else len(self.blocks)
        for i in range(depth):
            x, key_mask = self._stage(i, x, key_mask)
            if i + 1 in take:
                intermediates.append(zero_masked(x, key_mask))
        if intermediates_only:
            return intermediates
        if depth == self.stage_ends[-1]:
            x = self.bn2(run_spatial(self.conv_head, x, key_mask))
        return zero_masked(x, key_mask), intermediates

    def forward_features(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        x, key_mask = self._stem(x, key_mask)
        for i in range(len(self.blocks)):
            x, key_mask = self._stage(i, x, key_mask)
        return zero_masked(self.bn2(run_spatial(self.conv_head, x, key_mask)), key_mask)

    def forward_head(self, x: Tensor, pre_logits: bool = False, key_mask: Tensor | None = None) -> Tensor:
        """Pool the final map and classify; key_mask is the image's, [B, H, W]."""
        x = global_pool_valid(self.global_pool, x, shrink_mask(key_mask, self.feature_info[-1]["reduction"]))
        if self.drop_rate:
            x = F.dropout(x, p=self.drop_rate, training=self.training)
        return x if pre_logits else self.classifier(x)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return self.forward_head(self.forward_features(x, key_mask), key_mask=key_mask)

    def _stem(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        check_map(NAME, x, self.in_chans, key_mask)
        return self.bn1(run_spatial(self.conv_stem, x, key_mask)), shrink_mask(key_mask, 2)

    def _stage(self, index: int, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        for block in cast(nn.Sequential, self.blocks[index]):
            if self.grad_checkpointing:
                x = checkpoint(_run_block, block, x, key_mask)
            else:
                x = _run_block(block, x, key_mask)
            key_mask = shrink_mask(key_mask, _stride(block))
        return x, key_mask


def _stride(block: Any) -> int:
    stride = block.conv_dw.stride
    return stride if isinstance(stride, int) else stride[0]


def _run_block(block: Any, x: Tensor, key_mask: Tensor | None) -> Tensor:
    """One of timm's blocks, its convolutions seeing zeros where key_mask is False."""
    small = shrink_mask(key_mask, _stride(block))
    if isinstance(block, InvertedResidual):
        y = block.bn1(run_spatial(block.conv_pw, x, key_mask))
        y = block.bn2(run_spatial(block.conv_dw, y, key_mask))
        y = block.bn3(run_spatial(block.conv_pwl, y, small))
    else:
        y = block.bn1(run_spatial(block.conv_dw, x, key_mask))
        y = block.bn2(run_spatial(block.conv_pw, y, small))
    return block.drop_path(y) + x if block.has_skip else y
