"""The layer a detector repeats, in both its forms: a 3×3 convolution, or attention over a window."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from nearsight.layers import LocalAttention2d
from nearsight.models.common import zero_masked
from nearsight.ops.checks import check_choice

__all__ = ["FORMS", "MaskedConv2d", "Spatial"]

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


@dataclass(frozen=True)
class Spatial:
    """Builds the spatial layers of one form: `layer(in_channels, out_channels, stride)`, called as layer(x, key_mask)."""

    form: str
    window: int = 7
    num_heads: int = 8

    def __post_init__(self) -> None:
        check_choice("Spatial", "form", self.form, FORMS)

    def layer(self, in_channels: int, out_channels: int, stride: int = 1) -> nn.Module:
        if self.form == "conv":
            return MaskedConv2d(in_channels, out_channels, 3, stride=stride, padding=1)
        return LocalAttention2d(in_channels, out_channels, self.window, stride=stride, num_heads=self.num_heads)
