"""A feature pyramid of convolutions or of attention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from nearsight.detect.spatial import Spatial
from nearsight.models.common import shrink_mask

__all__ = ["FeaturePyramid"]


class FeaturePyramid(nn.Module):
    """Maps of a backbone, fine to coarse, as maps of one width, each told what the coarser ones saw, and coarser ones after them.

        M_i = lateral_i(C_i) + up(M_{i+1}) ,   P_i = output_i(M_i) ,   P_next = down(P_last), then down(relu(P_last)) …

    lateral is 1×1, output and down are spatial layers (down with stride 2), up repeats pixels. As torchvision's
    `FeaturePyramidNetwork` with `LastLevelP6P7` on P5, but in either form and with masks: what lies outside a mask has no
    effect on what lies inside.

    Args:
        channels: of the backbone's maps.
        width: of the pyramid's maps.
        spatial: the form of its layers.
        extra: coarser levels added.

    >>> import torch
    >>> pyramid = FeaturePyramid([8, 16], 32, Spatial("attention", num_heads=4), extra=1)
    >>> maps, _ = pyramid([torch.randn(1, 8, 9, 14), torch.randn(1, 16, 5, 7)], [None, None])
    >>> [tuple(m.shape) for m in maps]
    [(1, 32, 9, 14), (1, 32, 5, 7), (1, 32, 3, 4)]
    """

    def __init__(self, channels: Sequence[int], width: int, spatial: Spatial, extra: int = 2) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(c, width, 1) for c in channels)
        self.output = nn.ModuleList(spatial.layer(width, width) for _ in channels)
        self.down = nn.ModuleList(spatial.layer(width, width, stride=2) for _ in range(extra))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_uniform_(module.weight, a=1)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self, maps: Sequence[Tensor], masks: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        merged = [lateral(x) for lateral, x in zip(self.lateral, maps, strict=True)]
        for i in range(len(merged) - 2, -1, -1):
            merged[i] = merged[i] + F.interpolate(merged[i + 1], size=merged[i].shape[-2:], mode="nearest")
        levels = [output(x, mask) for output, x, mask in zip(self.output, merged, masks, strict=True)]
        level_masks = list(masks)
        for i, down in enumerate(self.down):
            x = levels[-1] if i == 0 else F.relu(levels[-1])
            levels.append(down(x, level_masks[-1]))
            level_masks.append(shrink_mask(level_masks[-1], 2))
        return levels, level_masks
