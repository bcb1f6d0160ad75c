"""Attention by learned queries as layers (QnA): at the map's size or a stride, and up-sampling."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers.weight_init import lecun_normal_, trunc_normal_tf_
from torch import Tensor, nn
from torch.nn import functional as F

from nearsight.errors import ArgumentValueError
from nearsight.layers.common import (
    check_channels,
    check_divisible,
    check_map,
    only_weight,
    short_pair,
    split_heads,
    to_nchw,
    to_rows,
    typed_arguments,
)
from nearsight.ops import qna
from nearsight.ops.checks import check_choice, check_pair
from nearsight.ops.dispatch import autocast_dtype, full_precision

__all__ = ["QnA2d", "QnAUpsample2d"]

TAP_SCALES = ("tap", "head", "sign", "ones", "mean", "none")
POSITIONS = ("relative", "contextual", "absolute", "none")


class _LearnedQueries2d(nn.Module):
    """What both layers are made of: learned queries, W_K, W_V, W_O, the position bias B and the tap scale W_s."""

    position_bias: nn.Parameter | None
    position_weight: nn.Parameter | None
    tap_scale_weight: nn.Parameter | None
    key_bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        num_heads: int,
        num_queries: int,
        tap_scale: str,
        position: str,
        unit_queries: bool,
        bias: bool,
        backend: str | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        layer = type(self).__name__
        check_channels(layer, in_channels=in_channels, num_queries=num_queries)
        self.head_dim = check_divisible(layer, "out_channels", out_channels, num_heads)
        check_choice(layer, "tap_scale", tap_scale, TAP_SCALES)
        check_choice(layer, "position", position, POSITIONS)
        if tap_scale == "sign" and num_queries * num_heads % 2:
            raise ArgumentValueError(
                f"{layer}: got tap_scale='sign' with num_queries={num_queries} and num_heads={num_heads}, wanted an even "
                f"number of query heads: one half adds, the other subtracts; change one of them."
            )
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size = check_pair(layer, "kernel_size", kernel_size)
        self.num_heads, self.num_queries = num_heads, num_queries
        self.tap_scale, self.position = tap_scale, position
        self.unit_queries, self.backend = unit_queries, backend

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        kh, kw = self.kernel_size

        def table(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, **factory))

        self.query = table(num_queries, out_channels)
        self.key_weight = table(out_channels, in_channels)
        self.key_bias = table(out_channels) if bias else None
        self.value = nn.Linear(in_channels, out_channels, bias=bias, **factory)
        self.proj = nn.Linear(out_channels, out_channels, bias=bias, **factory)
        self.position_bias = self.position_weight = None
        if position == "relative":
            self.position_bias = table(kh, kw, num_queries, num_heads)
        elif position == "contextual":
            self.position_weight = table(kh, kw, num_heads, out_channels)
            self.position_bias = table(kh, kw, 1, num_heads)
        elif position == "absolute":
            self.position_weight = table(kh, kw, num_queries, out_channels)
        self.tap_scale_weight = None
        if tap_scale in ("tap", "ones"):
            self.tap_scale_weight = table(kh, kw, num_queries, num_heads)
        elif tap_scale == "head":
            self.tap_scale_weight = table(num_queries, num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The authors' start: projections that keep the variance, queries of about unit length, no position, W_s near 0."""
        with torch.no_grad():
            trunc_normal_tf_(self.query, std=self.head_dim**-0.5)
            for weight in (self.key_weight, self.value.weight, self.proj.weight):
                lecun_normal_(weight)
            for zero in (self.key_bias, self.value.bias, self.proj.bias, self.position_bias):
                if zero is not None:
                    nn.init.zeros_(zero)
            if self.position_weight is not None:
                if self.position == "contextual":
                    nn.init.normal_(self.position_weight, std=self.out_channels**-0.5)
                else:
                    nn.init.zeros_(self.position_weight)
            if self.tap_scale_weight is not None:
                if self.tap_scale == "ones":
                    nn.init.ones_(self.tap_scale_weight)
                else:
                    nn.init.normal_(self.tap_scale_weight, std=0.02)

    def unit_query(self, dtype: torch.dtype) -> Tensor:
        """The queries as they meet the keys: [L, heads, D], of length 1/√D when `unit_queries`, else scaled by 1/√D."""
        q = self.query.to(dtype).unflatten(-1, (self.num_heads, self.head_dim))
        if self.unit_queries:
            q = q / (torch.linalg.vector_norm(q, dim=-1, keepdim=True) + 1e-6)
        return q * self.head_dim**-0.5

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [B, H, W, L, heads] (float32 or float64) and values [B, H, W, heads, D] of a map, without ever making the keys.

        Scores and values are slices of one product where that is as exact as two: outside autocast and half types.
        """
        pixels = to_rows(x)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        with full_precision(x):
            q = self.unit_query(dtype)
            heads = self.key_weight.to(dtype).unflatten(0, (self.num_heads, self.head_dim))
            fold = torch.einsum("lnd,ndc->lnc", q, heads).flatten(0, 1)
            shift = None
            if self.key_bias is not None:
                shift = torch.einsum("lnd,nd->ln", q, self.key_bias.to(dtype).view(self.num_heads, -1)).flatten()
        plain = only_weight(self.value, nn.Linear) and x.dtype == dtype == self.value.weight.dtype
        if plain and autocast_dtype(x) is None:
            weight = torch.cat([self.value.weight, fold])
            both = None if shift is None else torch.cat([self.value.bias, shift])
            values, scores = F.linear(pixels, weight, both).split([self.out_channels, fold.shape[0]], dim=-1)
        else:
            values = self.value(pixels)
            with full_precision(x):
                scores = F.linear(pixels.to(dtype), fold, shift)
        scores, values = scores.unflatten(-1, (self.num_queries, self.num_heads)), split_heads(values, self.num_heads)
        return scores.unflatten(1, x.shape[2:]), values.unflatten(1, x.shape[2:])

    def tables(self) -> tuple[Tensor | None, Tensor | None]:
        """The position bias and the tap scale as the op takes them, each [kh, kw, L, heads] or None."""
        kh, kw = self.kernel_size
        shape = (kh, kw, self.num_queries, self.num_heads)
        bias: Tensor | None = self.position_bias
        if self.position_weight is not None:
            dtype = torch.promote_types(self.query.dtype, torch.float32)
            with full_precision(self.query):
                q, weight = self.unit_query(dtype), self.position_weight.to(dtype)
                if self.position == "contextual":
                    assert self.position_bias is not None
                    bias = torch.einsum("lc,yxnc->yxln", q.flatten(1), weight) + self.position_bias
                else:
                    bias = torch.einsum("lnd,yxlnd->yxln", q, weight.unflatten(-1, (self.num_heads, -1)))
        scale: Tensor | None = self.tap_scale_weight
        if self.tap_scale == "head":
            assert scale is not None
            scale = scale.expand(shape)
        elif self.tap_scale == "mean":
            scale = self.query.new_full(shape, 1 / self.num_queries)
        elif self.tap_scale == "sign":
            half = self.query.new_ones(self.num_queries * self.num_heads // 2)
            scale = torch.cat([half, -half]).view(self.num_queries, self.num_heads).expand(shape)
        return bias, scale

    def _gather(self, x: Tensor, key_mask: Tensor | None, stride: tuple[int, int], combine: str) -> Tensor:
        check_map(type(self).__name__, x, self.in_channels, key_mask)
        scores, values = self.project(x)
        bias, scale = self.tables()
        return qna(
            scores,
            values,
            window=self.kernel_size,
            stride=stride,
            position_bias=bias,
            tap_scale=scale,
            key_mask=key_mask,
            combine=combine,
            backend=self.backend,
        )

    def _typed(self, **own: tuple[object, object]) -> str:
        """The arguments as they would be typed, defaults left out."""
        return typed_arguments(
            self.in_channels,
            self.out_channels,
            short_pair(self.kernel_size),
            **own,
            position=(self.position, "relative"),
            unit_queries=(self.unit_queries, True),
            bias=(self.key_bias is not None, False),
            backend=(self.backend, None),
        )


class QnA2d(_LearnedQueries2d):
    """Attention from learned queries, shared by all windows, to the window around every pixel (QnA).

        y_ij = W_O Σ_l Σ_n softmax_n( q_l·W_K x_n + B_{l,n−ij} ) · W_s[l, n−ij] · W_V x_n

    [B, in_channels, H, W] → [B, out_channels, ⌈H/stride⌉, ⌈W/stride⌉], any H and W. The queries are the same everywhere, so
    q·W_K is folded into one matrix and the keys are never made. A channels-last input is not copied.

    Args:
        in_channels, out_channels: as in `nn.Conv2d`; the heads split out_channels.
        kernel_size: the window, an int or (rows, columns); taps outside the image are left out of the softmax.
        stride: distance between windows, an int or (rows, columns).
        num_heads: attention heads.
        num_queries: learned queries L, whose results are added.
        tap_scale: W_s. "tap" learns one number per tap, query and head, starting near 0; "ones" the same, starting at 1;
            "head" one per query and head; "sign" adds one half of the query heads and subtracts the other; "mean" averages
            the queries; "none" adds them.
        position: B. "relative" learns one bias per tap, query and head; "contextual" computes it from the whole query,
            "absolute" from the query's product with a learned vector per tap; "none" knows no positions.
        unit_queries: normalise each head's query to unit length.
        bias: biases on W_K, W_V and W_O (that of W_K shifts all scores of a query alike, so the softmax ignores it).
        backend: the backend of the op, or None for the fastest that can run the call.

    `forward(x, key_mask=None)`: key_mask is bool [B, H, W], True where a pixel may be attended.

    >>> import torch
    >>> from nearsight import QnA2d
    >>> layer = QnA2d(16, 32, kernel_size=3, stride=2, num_heads=4)
    >>> layer(torch.randn(2, 16, 9, 14)).shape
    torch.Size([2, 32, 5, 7])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int] = 3,
        *,
        stride: int | tuple[int, int] = 1,
        num_heads: int = 8,
        num_queries: int = 2,
        tap_scale: str = "tap",
        position: str = "relative",
        unit_queries: bool = True,
        bias: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            num_heads,
            num_queries,
            tap_scale,
            position,
            unit_queries,
            bias,
            backend,
            device,
            dtype,
        )
        self.stride = check_pair("QnA2d", "stride", stride)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        z = self._gather(x, key_mask, self.stride, "sum")
        return to_nchw(self.proj(z.flatten(3)))

    def extra_repr(self) -> str:
        return self._typed(
            stride=(short_pair(self.stride), 1),
            num_heads=(self.num_heads, None),
            num_queries=(self.num_queries, 2),
            tap_scale=(self.tap_scale, "tap"),
        )


class QnAUpsample2d(_LearnedQueries2d):
    """Up-sampling by learned queries: each of s² queries attends to the window and makes one of the s×s new pixels (QnA).

        y_{i·s+a, j·s+b} = W_O Σ_n softmax_n( q_l·W_K x_n + B_{l,n−ij} ) · W_s[l, n−ij] · W_V x_n ,   l = a·s + b

    [B, in_channels, H, W] → [B, out_channels, H·s, W·s].

    Args:
        in_channels, out_channels: as in `nn.Conv2d`; the heads split out_channels.
        kernel_size: the window, an int or (rows, columns); taps outside the image are left out of the softmax.
        scale_factor: s.
        num_heads: attention heads.
        tap_scale, position, unit_queries, bias, backend: as in `QnA2d`; tap_scale starts as "none", the paper's equation.

    `forward(x, key_mask=None)`: key_mask is bool [B, H, W], True where a pixel may be attended.

    >>> import torch
    >>> from nearsight import QnAUpsample2d
    >>> QnAUpsample2d(16, 8, kernel_size=3, scale_factor=2, num_heads=4)(torch.randn(2, 16, 5, 7)).shape
    torch.Size([2, 8, 10, 14])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int] = 3,
        *,
        scale_factor: int = 2,
        num_heads: int = 8,
        tap_scale: str = "none",
        position: str = "relative",
        unit_queries: bool = True,
        bias: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_channels("QnAUpsample2d", scale_factor=scale_factor)
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            num_heads,
            scale_factor**2,
            tap_scale,
            position,
            unit_queries,
            bias,
            backend,
            device,
            dtype,
        )
        self.scale_factor = scale_factor

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        s = self.scale_factor
        z = self._gather(x, key_mask, (1, 1), "stack").unflatten(3, (s, s))
        z = z.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return to_nchw(self.proj(z.flatten(3)))

    def extra_repr(self) -> str:
        return self._typed(
            scale_factor=(self.scale_factor, 2),
            num_heads=(self.num_heads, None),
            tap_scale=(self.tap_scale, "none"),
        )
