"""Convolutions that give some of their output channels to attention over the whole map (ExpAtt, AA-Net)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nearsight.errors import ArgumentValueError
from nearsight.layers.common import check_channels, check_map, check_stride, short_pair, typed_arguments, zero_masked
from nearsight.layers.explicit import RADIUS_INIT, ExplicitAttention2d
from nearsight.layers.relative_attention import RelativeAttention2d
from nearsight.ops.checks import check_number, check_pair

__all__ = ["AttentionAugmentedConv2d", "AugmentedConv2d", "ExplicitAugmentedConv2d", "attention_width", "key_width"]

Size = int | tuple[int, int]


def attention_width(out_channels: int, ratio: float, num_heads: int) -> int:
    """d_v, the channels attention makes: ratio·out_channels, rounded to the closest multiple of the heads, at least one each.

    >>> [attention_width(c, 0.1, 8) for c in (64, 128, 256, 512)]
    [8, 16, 24, 48]
    """
    return max(1, int(ratio * out_channels / num_heads + 0.5)) * num_heads


def key_width(out_channels: int, ratio: float, num_heads: int) -> int:
    """d_k of AA-Net: twice the ratio of d_v, but at least 20 per head.

    >>> [key_width(c, 0.1, 8) for c in (128, 512, 2048)]
    [160, 160, 408]
    """
    return max(20 * num_heads, attention_width(out_channels, 2 * ratio, num_heads))


class AugmentedConv2d(nn.Module):
    """[convolution ‖ attention branches], concatenated along the channels; a subclass makes the branches it names."""

    branches: tuple[str, ...] = ("attention",)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        *,
        stride: int,
        dilation: Size,
        groups: int,
        bias: bool,
        ratio: float,
        attention_channels: int | None,
        num_heads: int,
        parts: int,
        factory: dict[str, Any],
    ) -> None:
        super().__init__()
        layer = type(self).__name__
        check_channels(layer, in_channels=in_channels, out_channels=out_channels, num_heads=num_heads, groups=groups)
        self.in_channels, self.out_channels, self.num_heads = in_channels, out_channels, num_heads
        self.kernel_size = check_pair(layer, "kernel_size", kernel_size)
        self.dilation = check_pair(layer, "dilation", dilation)
        self.stride = check_stride(layer, stride)
        self.groups, self.bias = groups, bias
        self.ratio = check_number(layer, "ratio", ratio, positive=True)
        if any(k % 2 == 0 for k in self.kernel_size):
            raise ArgumentValueError(
                f"{layer}: got kernel_size={kernel_size!r}, wanted odd sizes: an even one has no padding that keeps the map."
            )
        if attention_channels is None:
            attention_channels = attention_width(out_channels, self.ratio, num_heads)
        check_channels(layer, attention_channels=attention_channels)
        if attention_channels % num_heads:
            raise ArgumentValueError(
                f"{layer}: got attention_channels={attention_channels} and num_heads={num_heads}, wanted channels that "
                f"divide by the heads; change one of them."
            )
        self.attention_channels = attention_channels
        rest = out_channels - parts * attention_channels
        if rest < 1:
            raise ArgumentValueError(
                f"{layer}: got out_channels={out_channels} of which attention takes {parts * attention_channels}, wanted "
                f"at least one left for the convolution; lower ratio, num_heads or attention_channels."
            )
        if in_channels % groups or rest % groups:
            raise ArgumentValueError(
                f"{layer}: got groups={groups} with {in_channels} input and {rest} convolution channels, wanted groups that "
                f"divide both; change groups or attention_channels."
            )
        (rows, columns), (down, right) = self.kernel_size, self.dilation
        self.conv = nn.Conv2d(
            in_channels,
            rest,
            self.kernel_size,
            stride=self.stride,
            padding=(down * (rows - 1) // 2, right * (columns - 1) // 2),
            dilation=self.dilation,
            groups=groups,
            bias=bias,
            **factory,
        )

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        check_map(type(self).__name__, x, self.in_channels, key_mask)
        parts = [self.conv(zero_masked(x, key_mask))]
        for name in self.branches:
            branch = getattr(self, name)
            if branch is not None:
                parts.append(branch(x, key_mask))
        return torch.cat(parts, dim=1)

    def _typed(self, **own: tuple[object, object]) -> str:
        by_rule = attention_width(self.out_channels, self.ratio, self.num_heads)
        return typed_arguments(
            self.in_channels,
            self.out_channels,
            short_pair(self.kernel_size),
            stride=(self.stride, 1),
            dilation=(self.dilation, (1, 1)),
            groups=(self.groups, 1),
            bias=(self.bias, True),
            ratio=(self.ratio, 0.1),
            attention_channels=(self.attention_channels, by_rule),
            num_heads=(self.num_heads, 8),
            **own,
        )


class ExplicitAugmentedConv2d(AugmentedConv2d):
    """A convolution of which some output channels are explicit attention (ExpAtt's augmented convolution).

        y = [ conv_k×k(x) ‖ Norm(G(σ) + offset) x W_v W_o ]   with out_channels − d_v and d_v channels

    [B, in_channels, H, W] → [B, out_channels, ⌈H/stride⌉, ⌈W/stride⌉], any H and W; padding keeps the map. With stride 2 the
    attention's output is averaged 3×3 around every second pixel.

    Args:
        in_channels, out_channels, kernel_size: as in `nn.Conv2d`; the kernel must be odd.
        stride: 1 or 2.
        dilation, groups, bias: of the convolution.
        ratio: d_v / out_channels, rounded to a multiple of the heads.
        attention_channels: d_v itself, instead of the ratio.
        num_heads, kind, per_head, offset, radius, backend: as in `ExplicitAttention2d`.
        with_aa: a third branch of d_v channels with AA-Net's attention (the paper's ablation); needs feature_size.
        feature_size: map size that branch's relative tables are built for.

    `forward(x, key_mask=None)`: key_mask is bool [B, H, W]; the convolution sees zeros where it is False.

    >>> import torch
    >>> from nearsight import ExplicitAugmentedConv2d
    >>> layer = ExplicitAugmentedConv2d(16, 64, 3, stride=2, kind="gaussian")
    >>> layer(torch.randn(2, 16, 9, 14)).shape, layer.attention_channels
    (torch.Size([2, 64, 5, 7]), 8)
    """

    branches = ("attention", "aa")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size = 3,
        *,
        stride: int = 1,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        ratio: float = 0.1,
        attention_channels: int | None = None,
        num_heads: int = 8,
        kind: str = "gaussian",
        per_head: bool = False,
        offset: float = 1.0,
        radius: float = RADIUS_INIT,
        with_aa: bool = False,
        feature_size: Size | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            dilation=dilation,
            groups=groups,
            bias=bias,
            ratio=ratio,
            attention_channels=attention_channels,
            num_heads=num_heads,
            parts=2 if with_aa else 1,
            factory=factory,
        )
        self.attention = ExplicitAttention2d(
            in_channels,
            self.attention_channels,
            kind=kind,
            stride=self.stride,
            num_heads=num_heads,
            per_head=per_head,
            offset=offset,
            radius=radius,
            backend=backend,
            **factory,
        )
        self.aa: RelativeAttention2d | None = None
        if with_aa:
            if feature_size is None:
                raise ArgumentValueError(
                    "ExplicitAugmentedConv2d: got with_aa=True without feature_size, wanted the map size its relative "
                    "tables are built for; pass feature_size=(rows, columns)."
                )
            self.aa = RelativeAttention2d(
                in_channels,
                self.attention_channels,
                key_channels=key_width(out_channels, self.ratio, num_heads),
                feature_size=feature_size,
                stride=self.stride,
                num_heads=num_heads,
                **factory,
            )

    def extra_repr(self) -> str:
        """The arguments as they would be typed, defaults of the options left out."""
        return self._typed(
            kind=(self.attention.kind, None),
            per_head=(self.attention.per_head, False),
            offset=(self.attention.offset, 1.0),
            radius=(self.attention.radius_init, RADIUS_INIT),
            with_aa=(self.aa is not None, False),
            feature_size=(None if self.aa is None else self.aa.feature_size, None),
            backend=(self.attention.backend, None),
        )


class AttentionAugmentedConv2d(AugmentedConv2d):
    """A convolution of which some output channels are global self-attention with relative positions (AA-Net).

        y = [ conv_k×k(x) ‖ W_o Σ_j softmax_j( (q_i·k_j + q_i·r_ij) / √d ) v_j ]   with out_channels − d_v and d_v channels

    [B, in_channels, H, W] → [B, out_channels, ⌈H/stride⌉, ⌈W/stride⌉], any H and W; padding keeps the map. With stride 2 the
    attention's output is averaged 3×3 around every second pixel. See `RelativeAttention2d` for the attention itself.

    Args:
        in_channels, out_channels, kernel_size: as in `nn.Conv2d`; the kernel must be odd.
        feature_size: input map size that the relative tables are built for, an int or (rows, columns); on other sizes they
            are stretched linearly.
        stride: 1 or 2.
        dilation, groups, bias: of the convolution.
        ratio: d_v / out_channels, rounded to a multiple of the heads.
        attention_channels: d_v itself, instead of the ratio.
        key_channels: d_k; None is twice the ratio, at least 20 per head.
        num_heads: attention heads.
        per_head_position: one relative embedding per head instead of one for all.

    `forward(x, key_mask=None)`: key_mask is bool [B, H, W]; the convolution sees zeros where it is False.

    >>> import torch
    >>> from nearsight import AttentionAugmentedConv2d
    >>> layer = AttentionAugmentedConv2d(16, 64, 3, feature_size=14, stride=2)
    >>> layer(torch.randn(2, 16, 9, 14)).shape
    torch.Size([2, 64, 5, 7])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size = 3,
        *,
        feature_size: Size,
        stride: int = 1,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        ratio: float = 0.1,
        attention_channels: int | None = None,
        key_channels: int | None = None,
        num_heads: int = 8,
        per_head_position: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            dilation=dilation,
            groups=groups,
            bias=bias,
            ratio=ratio,
            attention_channels=attention_channels,
            num_heads=num_heads,
            parts=1,
            factory=factory,
        )
        self.attention = RelativeAttention2d(
            in_channels,
            self.attention_channels,
            key_channels=key_width(out_channels, self.ratio, num_heads) if key_channels is None else key_channels,
            feature_size=feature_size,
            stride=self.stride,
            num_heads=num_heads,
            per_head_position=per_head_position,
            **factory,
        )

    def extra_repr(self) -> str:
        """The arguments as they would be typed, defaults of the options left out."""
        attention = self.attention
        return self._typed(
            feature_size=(attention.feature_size, None),
            key_channels=(attention.key_channels, key_width(self.out_channels, self.ratio, self.num_heads)),
            per_head_position=(attention.per_head_position, False),
        )
