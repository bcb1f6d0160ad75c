"""Self-attention inside non-overlapping windows, on maps of any size."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers.weight_init import lecun_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from nearsight.layers.common import (
    check_channels,
    check_divisible,
    check_map,
    settled,
    short_pair,
    to_channels_last,
    to_nchw,
    typed_arguments,
)
from nearsight.ops.block.partition import count_blocks
from nearsight.ops.checks import check_choice, check_pair
from nearsight.ops.dispatch import always, exporting, full_precision

__all__ = ["WindowAttention2d"]

LAYER = "WindowAttention2d"


class WindowAttention2d(nn.Module):
    """Self-attention among the pixels of each non-overlapping window, with a learned bias per relative position.

        y_i = W_O Σ_j softmax_j( q_i·k_j / √D + B_{i−j} ) v_j ,   j in the window of i

    [B, in_channels, H, W] → [B, out_channels, H, W], any H and W: the map is padded at the bottom and right to whole
    windows, the padding is masked, the window never changes. Scores are as large as the windows: O(H·W·kh·kw·heads).

    Args:
        in_channels, out_channels: as in `nn.Conv2d`; the heads split out_channels.
        kernel_size: the window, an int or (rows, columns).
        num_heads: attention heads; the channels of the fused projection are packed per head: q, k, v of head 0, of head 1, …
        position: "relative" learns B, one number per offset and head; "none" leaves it out.
        bias: biases on the projections.

    `forward(x, key_mask=None)`: key_mask is bool [B, H, W], True where a pixel may be attended. A window without any gives 0
    (before the output projection).

    >>> import torch
    >>> from nearsight import WindowAttention2d
    >>> WindowAttention2d(16, 32, kernel_size=7, num_heads=4)(torch.randn(2, 16, 9, 14)).shape
    torch.Size([2, 32, 9, 14])
    """

    relative_bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int] = 7,
        *,
        num_heads: int = 8,
        position: str = "relative",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_channels(LAYER, in_channels=in_channels)
        self.head_dim = check_divisible(LAYER, "out_channels", out_channels, num_heads)
        check_choice(LAYER, "position", position, ("relative", "none"))
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size = check_pair(LAYER, "kernel_size", kernel_size)
        self.num_heads, self.position = num_heads, position
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        kh, kw = self.kernel_size
        self.qkv = nn.Linear(in_channels, 3 * out_channels, bias=bias, **factory)
        self.proj = nn.Linear(out_channels, out_channels, bias=bias, **factory)
        self.relative_bias = None
        if position == "relative":
            self.relative_bias = nn.Parameter(torch.empty(2 * kh - 1, 2 * kw - 1, num_heads, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Projections that keep the variance; no bias, no position."""
        lecun_normal_(self.qkv.weight)
        lecun_normal_(self.proj.weight)
        for zero in (self.qkv.bias, self.proj.bias, self.relative_bias):
            if zero is not None:
                nn.init.zeros_(zero)

    def position_table(self) -> Tensor | None:
        """B for every pair of pixels of a window: [heads, kh·kw (from), kh·kw (to)], or None."""
        if self.relative_bias is None:
            return None
        kh, kw = self.kernel_size
        # Row iy of the table, read backwards from offset iy, is what pixel iy sees: sliding windows instead of an N×N index.
        windows = self.relative_bias.flip(0, 1).unfold(0, kh, 1).unfold(1, kw, 1).flip(0, 1)
        return windows.permute(2, 0, 1, 3, 4).reshape(self.num_heads, kh * kw, kh * kw)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        check_map(LAYER, x, self.in_channels, key_mask)
        height, width = x.shape[2:]
        kh, kw = self.kernel_size
        rows, columns = self._windows(x)
        q, k, v, valid = self._project(x, key_mask)
        bias = self.position_table()
        bias = None if bias is None else bias.to(q.dtype)
        if valid is None:
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None if bias is None else bias[None])
            y = y.unflatten(0, (x.shape[0], rows * columns))
        else:
            y = self._masked(q, k, v, bias, valid)
        y = self.proj(settled(y.transpose(2, 3)).flatten(3))
        y = y.unflatten(2, (kh, kw)).unflatten(1, (rows, columns)).transpose(2, 3)
        y = y.flatten(3, 4).flatten(1, 2)
        if exporting():  # a fresh tensor: strides of a slice would tie the graph to this size
            y = F.pad(y, [0, 0, 0, width - columns * kw, 0, height - rows * kh])
        return to_nchw(y[:, :height, :width])

    def attention_weights(self, x: Tensor, key_mask: Tensor | None = None, *, position: bool = True) -> Tensor:
        """The softmax weights [B, rows of windows, windows per row, heads, kh·kw (from), kh·kw (to)], for pictures.

        In float32 at least; 0 at pixels that may not be attended. `position=False` leaves B out.
        """
        check_map(LAYER, x, self.in_channels, key_mask)
        q, k, _, valid = self._project(x, key_mask)
        wide = torch.promote_types(q.dtype, torch.float32)
        with full_precision(x):
            logits = (q.to(wide) * self.head_dim**-0.5) @ k.to(wide).transpose(-1, -2)
        bias = self.position_table() if position else None
        if bias is not None:
            logits = logits + bias.to(wide)
        if valid is None:
            weights = logits.softmax(-1)
        else:
            unseen = ~valid[:, :, None, None]
            weights = logits.masked_fill(unseen, torch.finfo(wide).min).softmax(-1).masked_fill(unseen, 0.0)
        return weights.unflatten(1, self._windows(x))

    def _windows(self, x: Tensor) -> tuple[int, int]:
        """Rows of windows that cover a map [B, C, H, W], and windows per row."""
        rows, columns = (count_blocks(*pair) for pair in zip(x.shape[2:], self.kernel_size, strict=True))
        return rows, columns

    def _project(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v [B, windows, heads, N, D] of the padded map, and which pixels may be attended, [B or 1, windows, N]."""
        height, width = x.shape[2:]
        rows, columns = self._windows(x)
        bottom, right = rows * self.kernel_size[0] - height, columns * self.kernel_size[1] - width
        pixels = to_channels_last(x)
        if not (always(bottom == 0) and always(right == 0)):
            if key_mask is None:
                key_mask = torch.ones(1, height, width, dtype=torch.bool, device=x.device)
            key_mask = F.pad(key_mask, [0, right, 0, bottom])
            pixels = F.pad(pixels, [0, 0, 0, right, 0, bottom])
        windows = _partition(pixels, self.kernel_size)
        q, k, v = self.qkv(windows).unflatten(-1, (self.num_heads, -1)).transpose(2, 3).chunk(3, dim=-1)
        return q, k, v, None if key_mask is None else _partition(key_mask[..., None], self.kernel_size)[..., 0]

    @staticmethod
    def _masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, valid: Tensor) -> Tensor:
        """Attention over valid keys. q, k, v [B, windows, heads, N, D]; valid [B or 1, windows, N]."""
        keys = valid[:, :, None, None]
        some = valid.any(-1)[:, :, None, None, None]
        logits = q.new_zeros(1, 1, 1) if bias is None else bias
        # Where a window has no valid key, a softmax over all of them, zeroed afterwards, keeps NaN out of the gradients.
        mask = logits.masked_fill(~(keys | ~some), float("-inf"))
        mask = mask.expand(-1, -1, q.shape[2], q.shape[3], -1)
        # Windows beside the heads, not the images: a mask made of padding alone is the same for every image.
        windows, heads = q.shape[1:3]
        q, k, v = (t.flatten(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.flatten(1, 2))
        return y.unflatten(1, (windows, heads)).masked_fill(~some, 0.0)

    def extra_repr(self) -> str:
        """The arguments as they would be typed, defaults of the options left out."""
        return typed_arguments(
            self.in_channels,
            self.out_channels,
            short_pair(self.kernel_size),
            num_heads=(self.num_heads, None),
            position=(self.position, "relative"),
            bias=(self.qkv.bias is not None, False),
        )


def _partition(pixels: Tensor, window: tuple[int, int]) -> Tensor:
    """[B, rows·kh, columns·kw, C] → [B, rows·columns, kh·kw, C]."""
    cut = pixels.unflatten(2, (-1, window[1])).unflatten(1, (-1, window[0]))
    return cut.transpose(2, 3).flatten(3, 4).flatten(1, 2)
