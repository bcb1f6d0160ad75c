"""The layer a detector repeats, in both its forms: a 3×3 convolution, or attention over a window."""

from __future__ import annotations

from dataclasses import dataclass

from timm.layers.norm import LayerNorm2d
from torch import Tensor, nn

from nearsight.layers import LocalAttention2d
from nearsight.models.common import zero_masked
from nearsight.ops.checks import check_choice

__all__ = ["FORMS", "MaskedConv2d", "Normed2d", "Spatial"]

FORMS = ("attention", "conv")


class MaskedConv2d(nn.Conv2d):
    """A convolution for which the image ends where key_mask [B, H, W] does.

    >>> import torch
    >>> conv, x = MaskedConv2d(4, 8, 3, padding=1), torch.randn(1, 4, 5, 9)
    >>> mask = torch.ones(1, 5, 9, dtype=torch.bool)
    >>> mask[:, :, 6:] = False
    >>> torch.allclose(conv(x, mask)[..., :6], conv(x[..., :6]), atol=1e-6)
    True
    """

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return super().forward(zero_masked(x, key_mask))


class Normed2d(nn.Module):
    """A spatial layer and a norm over the channels of each pixel, which no padding reaches."""

    def __init__(self, layer: nn.Module, channels: int) -> None:
        super().__init__()
        self.layer, self.norm = layer, LayerNorm2d(channels)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return self.norm(self.layer(x, key_mask))


@dataclass(frozen=True)
class Spatial:
    """Builds the spatial layers of one form: `layer(in_channels, out_channels, stride)`, called as layer(x, key_mask).

    >>> import torch
    >>> Spatial("attention", window=5).layer(16, 32, stride=2)(torch.randn(1, 16, 7, 10)).shape
    torch.Size([1, 32, 4, 5])
    """

    form: str
    window: int = 7
    num_heads: int = 8
    norm: bool = False

    def __post_init__(self) -> None:
        check_choice("Spatial", "form", self.form, FORMS)

    def layer(self, in_channels: int, out_channels: int, stride: int = 1) -> nn.Module:
        layer: nn.Module
        if self.form == "conv":
            layer = MaskedConv2d(in_channels, out_channels, 3, stride=stride, padding=1)
        else:
            layer = LocalAttention2d(in_channels, out_channels, self.window, stride=stride, num_heads=self.num_heads)
        return Normed2d(layer, out_channels) if self.norm else layer
