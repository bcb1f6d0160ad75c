"""Stand-alone local self-attention as a layer (SASA)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nearsight.errors import ArgumentValueError
from nearsight.layers.common import (
    avg_pool_valid,
    check_channels,
    check_divisible,
    check_map,
    check_stride,
    from_heads,
    only_weight,
    short_pair,
    to_channels_last,
    to_nchw,
    typed_arguments,
)
from nearsight.layers.positions import sincos_2d
from nearsight.ops import local_attention, local_attention_projected
from nearsight.ops.checks import check_choice, check_pair

__all__ = ["LocalAttention2d"]

LAYER = "LocalAttention2d"


class LocalAttention2d(nn.Module):
    """Self-attention from every pixel to the window around it, in place of a spatial convolution.

        y_ij = Σ_ab softmax_ab( q_ij·k_ab + q_ij·r_{a−i,b−j} ) v_ab ,   q, k, v = W_Q x, W_K x, W_V x

    [B, in_channels, H, W] → [B, out_channels, ⌈H/stride⌉, ⌈W/stride⌉], any H and W. With stride 2 it attends at the
    input's size and averages 2×2 outputs. A channels-last input is not copied: q, k and v are slices of one product.

    Args:
        in_channels, out_channels: as in `nn.Conv2d`; the heads split out_channels.
        kernel_size: the window, an int or (rows, columns); taps outside the image are treated by `border`.
        stride: 1 or 2.
        dilation: distance between taps.
        num_heads: attention heads.
        position: "relative" learns a row and a column embedding per offset; "absolute" adds sines and cosines to the
            input; "none" knows no positions.
        content: False leaves out q·k, and with it W_K (needs position="relative").
        border: "mask" leaves taps outside the image out; "zeros" lets them take softmax mass, as zero padding does.
        qkv_bias: a bias on the projections.
        proj: an output projection, applied last.
        per_head_position: one relative embedding per head instead of one for all.
        backend: the backend of the op, or None for the fastest that can run the call.

    `forward(x, key_mask=None)`: key_mask is bool [B, H, W], True where a pixel may be attended.

    >>> import torch
    >>> from nearsight import LocalAttention2d
    >>> layer = LocalAttention2d(16, 32, kernel_size=7, stride=2, num_heads=4)
    >>> layer(torch.randn(2, 16, 9, 14)).shape
    torch.Size([2, 32, 5, 7])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int] = 7,
        *,
        stride: int = 1,
        dilation: int | tuple[int, int] = 1,
        num_heads: int = 8,
        position: str = "relative",
        content: bool = True,
        border: str = "mask",
        qkv_bias: bool = False,
        proj: bool = False,
        per_head_position: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_channels(LAYER, in_channels=in_channels)
        head_dim = check_divisible(LAYER, "out_channels", out_channels, num_heads)
        check_choice(LAYER, "position", position, ("relative", "absolute", "none"))
        check_choice(LAYER, "border", border, ("mask", "zeros"))
        if position == "relative" and head_dim % 2:
            raise ArgumentValueError(
                f"{LAYER}: got out_channels={out_channels} and num_heads={num_heads} (head dim {head_dim}), wanted an even "
                f"head dim for position='relative'; change one of them or the position."
            )
        if position == "absolute" and in_channels % 4:
            raise ArgumentValueError(
                f"{LAYER}: got in_channels={in_channels} with position='absolute', wanted a multiple of 4: sine and cosine "
                f"of row and column; use position='relative' or 'none'."
            )
        if not content and position != "relative":
            raise ArgumentValueError(
                f"{LAYER}: got content=False with position={position!r}, wanted something to attend by; "
                f"use position='relative'."
            )
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size = check_pair(LAYER, "kernel_size", kernel_size)
        self.stride = check_stride(LAYER, stride)
        self.dilation = check_pair(LAYER, "dilation", dilation)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.position, self.content, self.border = position, content, border
        self.per_head_position, self.backend = per_head_position, backend

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.qkv = nn.Linear(in_channels, (3 if content else 2) * out_channels, bias=qkv_bias, **factory)
        self.rel_row: nn.Parameter | None = None
        self.rel_col: nn.Parameter | None = None
        if position == "relative":
            lead = (num_heads,) if per_head_position else ()
            self.rel_row = nn.Parameter(torch.empty(*lead, self.kernel_size[0], head_dim // 2, **factory))
            self.rel_col = nn.Parameter(torch.empty(*lead, self.kernel_size[1], head_dim // 2, **factory))
        self.proj = nn.Linear(out_channels, out_channels, **factory) if proj else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Projections that keep the variance, except W_Q: smaller by √head_dim, so that the unscaled logits start near 1."""
        std = self.in_channels**-0.5
        with torch.no_grad():
            for i, weight in enumerate(self.qkv.weight.split(self.out_channels)):
                nn.init.normal_(weight, std=std if i else std * self.head_dim**-0.5)
            if self.qkv.bias is not None:
                nn.init.zeros_(self.qkv.bias)
            for table in (self.rel_row, self.rel_col):
                if table is not None:
                    nn.init.normal_(table)
            if self.proj is not None:
                nn.init.normal_(self.proj.weight, std=self.out_channels**-0.5)
                nn.init.zeros_(self.proj.bias)

    @property
    def value_weight(self) -> Tensor:
        """W_V, [out_channels, in_channels]: a view of the fused projection, for initialisation."""
        return self.qkv.weight[-self.out_channels :]

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        check_map(LAYER, x, self.in_channels, key_mask)
        options: dict[str, Any] = {
            "window": self.kernel_size,
            "rel_row": self.rel_row,
            "rel_col": self.rel_col,
            "key_mask": key_mask,
            "dilation": self.dilation,
            "border": self.border,
            "backend": self.backend,
        }
        if only_weight(self.qkv, nn.Linear):
            weights = (self.qkv.weight, self.qkv.bias)
            y = local_attention_projected(
                self._pixels(x), *weights, num_heads=self.num_heads, content=self.content, **options
            )
        else:
            y = local_attention(*self.project(x), **options)
        y = from_heads(y)
        if self.stride == 2:
            y = avg_pool_valid(y, key_mask, 2, 2, ceil_mode=True)
        if self.proj is not None:
            y = to_nchw(self.proj(to_channels_last(y)))
        return y

    def _pixels(self, x: Tensor) -> Tensor:
        """The map as the projection reads it, [B, H, W, in_channels]."""
        pixels = to_channels_last(x)
        if self.position == "absolute":
            pixels = pixels + sincos_2d(x.shape[2], x.shape[3], self.in_channels, device=x.device, dtype=x.dtype)
        return pixels

    def project(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """q, k (None without content) and v of a map, each [B, H, W, heads, D]: strided views of one product."""
        packed = self.qkv(self._pixels(x)).unflatten(-1, (3 if self.content else 2, self.num_heads, self.head_dim))
        return packed.select(3, 0), packed.select(3, 1) if self.content else None, packed.select(3, -1)

    def extra_repr(self) -> str:
        return typed_arguments(
            self.in_channels,
            self.out_channels,
            short_pair(self.kernel_size),
            stride=(self.stride, 1),
            dilation=(self.dilation, (1, 1)),
            num_heads=(self.num_heads, None),
            position=(self.position, "relative"),
            content=(self.content, True),
            border=(self.border, "mask"),
            qkv_bias=(self.qkv.bias is not None, False),
            proj=(self.proj is not None, False),
            per_head_position=(self.per_head_position, False),
            backend=(self.backend, None),
        )
