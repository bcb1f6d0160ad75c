"""Explicit attention as a layer (ExpAtt)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from nearsight.layers.common import (
    avg_pool_valid,
    check_channels,
    check_divisible,
    check_map,
    check_stride,
    to_channels_last,
    to_nchw,
    typed_arguments,
)
from nearsight.ops import explicit_attention
from nearsight.ops.checks import check_number
from nearsight.ops.explicit.call import FIXED_KINDS, check_options

__all__ = ["ExplicitAttention2d"]

LAYER = "ExplicitAttention2d"
RADIUS_INIT = 0.75


class ExplicitAttention2d(nn.Module):
    """Attention over the whole map whose weights depend on the distance alone: no keys, no queries, one learned radius.

        y = Norm(G(σ) + offset) · X W_v · W_o ,   Norm divides each row by its sum

    [B, in_channels, H, W] → [B, out_channels, ⌈H/stride⌉, ⌈W/stride⌉], any H and W; the HW×HW map G is never made. The forms
    of G are those of `nearsight.ops.explicit_attention`. σ is stored as its logarithm, so it stays positive.

    Args:
        in_channels, out_channels: as in `nn.Conv2d`.
        kind: "gaussian", "exp_euclidean", "exp_manhattan" (these learn σ), "constant", "linear" or "cosine".
        stride: 1, or 2 to average 3×3 outputs around every second pixel.
        num_heads: groups of output channels; they differ only with `per_head`.
        per_head: one σ per head instead of one for all.
        offset: added to every weight before the division (the paper's "+1").
        radius: where σ starts.
        backend: the backend of the op, or None for the fastest that can run the call.

    `forward(x, key_mask=None)`: key_mask is bool [B, H, W], True where a pixel may be attended.

    >>> import torch
    >>> from nearsight import ExplicitAttention2d
    >>> layer = ExplicitAttention2d(16, 8, kind="gaussian", stride=2)
    >>> layer(torch.randn(2, 16, 9, 14)).shape, round(layer.radius.item(), 2)
    (torch.Size([2, 8, 5, 7]), 0.75)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kind: str = "gaussian",
        stride: int = 1,
        num_heads: int = 1,
        per_head: bool = False,
        offset: float = 1.0,
        radius: float = RADIUS_INIT,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_channels(LAYER, in_channels=in_channels, out_channels=out_channels)
        check_divisible(LAYER, "out_channels", out_channels, num_heads)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.radius_init = check_number(LAYER, "radius", radius, positive=True)
        self.offset = check_options(LAYER, kind, None if kind in FIXED_KINDS else radius, offset)
        self.kind, self.num_heads, self.per_head, self.backend = kind, num_heads, per_head, backend
        self.stride = check_stride(LAYER, stride)

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.value = nn.Linear(in_channels, out_channels, bias=False, **factory)
        self.proj = nn.Linear(out_channels, out_channels, bias=False, **factory)
        self.log_radius: nn.Parameter | None = None
        if kind not in FIXED_KINDS:
            # Never 0-d: FSDP cannot shard a scalar.
            self.log_radius = nn.Parameter(torch.empty(num_heads if per_head else 1, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W_v and W_o keep the variance; the radius starts where it was told to."""
        nn.init.normal_(self.value.weight, std=self.in_channels**-0.5)
        nn.init.normal_(self.proj.weight, std=self.out_channels**-0.5)
        if self.log_radius is not None:
            nn.init.constant_(self.log_radius, math.log(self.radius_init))

    @property
    def radius(self) -> Tensor | None:
        """σ, [1] or [heads]; None for the kinds without."""
        return None if self.log_radius is None else self.log_radius.exp()

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        check_map(LAYER, x, self.in_channels, key_mask)
        y = explicit_attention(
            self.value(to_channels_last(x)),
            kind=self.kind,
            radius=self.radius,
            offset=self.offset,
            key_mask=key_mask,
            backend=self.backend,
        )
        if self.stride == 2:
            # Before W_o, which commutes with an average and is then four times cheaper.
            y = to_channels_last(avg_pool_valid(to_nchw(y), key_mask, 3, 2, padding=1))
        return to_nchw(self.proj(y))

    def extra_repr(self) -> str:
        """The arguments as they would be typed, defaults of the options left out."""
        return typed_arguments(
            self.in_channels,
            self.out_channels,
            kind=(self.kind, None),
            stride=(self.stride, 1),
            num_heads=(self.num_heads, 1),
            per_head=(self.per_head, False),
            offset=(self.offset, 1.0),
            radius=(self.radius_init, RADIUS_INIT),
            backend=(self.backend, None),
        )
