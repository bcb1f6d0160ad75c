"""What the layers share: input checks, the NCHW ↔ [B, H, W, heads, D] views, pooling that respects a key mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nearsight.errors import ArgumentTypeError, ArgumentValueError
from nearsight.ops.checks import check_key_mask, shape_text
from nearsight.ops.dispatch import exporting

__all__ = [
    "avg_pool_valid",
    "check_channels",
    "check_divisible",
    "check_map",
    "check_stride",
    "from_heads",
    "from_rows",
    "only_weight",
    "pool_mask",
    "settled",
    "short_pair",
    "split_heads",
    "to_channels_last",
    "to_nchw",
    "to_rows",
    "typed_arguments",
    "zero_masked",
]


def settled(x: Tensor) -> Tensor:
    """What comes out of `scaled_dot_product_attention`, its axes moved: in an exported graph a copy.

    Its strides are those of the kernel that this machine would take; a view of it may be none of what another program computes.
    """
    return x.clone(memory_format=torch.contiguous_format) if exporting() else x


def check_map(layer: str, x: Any, channels: int, key_mask: Tensor | None = None) -> None:
    """Refuse anything but a floating-point [B, channels, H, W] map (and a key mask that fits it)."""
    if not isinstance(x, Tensor):
        raise ArgumentTypeError(f"{layer}: got {type(x).__name__}, wanted a tensor [B, {channels}, H, W].")
    if x.dim() != 4 or x.shape[1] != channels:
        hint = "; add the batch axis with x[None]" if x.dim() == 3 else ""
        raise ArgumentValueError(f"{layer}: got shape {shape_text(x.shape)}, wanted [B, {channels}, H, W]{hint}.")
    if not x.dtype.is_floating_point:
        raise ArgumentTypeError(f"{layer}: got dtype {x.dtype}, wanted a floating-point map; convert it with .float().")
    check_key_mask(layer, key_mask, x.shape[0], x.shape[2], x.shape[3])


def check_channels(layer: str, **channels: object) -> None:
    """Refuse channel counts that are not ints of at least 1."""
    for name, count in channels.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ArgumentValueError(f"{layer}: got {name}={count!r}, wanted an int of at least 1.")


def check_divisible(layer: str, name: str, channels: int, num_heads: int) -> int:
    """The head dim channels / num_heads, or a sentence."""
    check_channels(layer, **{name: channels, "num_heads": num_heads})
    if channels % num_heads:
        raise ArgumentValueError(
            f"{layer}: got {name}={channels} and num_heads={num_heads}, wanted channels that divide by the heads; "
            f"change one of them."
        )
    return channels // num_heads


def check_stride(layer: str, stride: Any) -> int:
    """1 or 2, given as an int or an equal pair."""
    if isinstance(stride, tuple | list) and len(stride) == 2 and stride[0] == stride[1]:
        stride = stride[0]
    if isinstance(stride, bool) or stride not in (1, 2):
        raise ArgumentValueError(f"{layer}: got stride={stride!r}, wanted 1 or 2; pool separately for other strides.")
    return int(stride)


def to_channels_last(x: Tensor) -> Tensor:
    """[B, C, H, W] → [B, H, W, C]: a view; contiguous when x is channels-last."""
    return x.permute(0, 2, 3, 1)


def to_nchw(x: Tensor) -> Tensor:
    """[B, H, W, C] → [B, C, H, W]: a view; channels-last when x is contiguous."""
    return x.permute(0, 3, 1, 2)


def to_rows(x: Tensor) -> Tensor:
    """[B, C, H, W] → [B, H·W, C]: a view. For whatever works pixel by pixel.

    Unlike [B, H, W, C] it keeps its layout in compiled networks: between convolutions torch.compile stores tensors of rank 4 in
    the order of [N, C, H, W] channels-last, whatever their axes mean, and copies them there and back.
    """
    return to_channels_last(x).flatten(1, 2)


def from_rows(rows: Tensor, size: torch.Size | tuple[int, int]) -> Tensor:
    """[B, H·W, C] → [B, C, H, W]: a view; `size` is (H, W)."""
    return to_nchw(rows.unflatten(1, size))


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[…, C] → […, heads, C/heads]: a view."""
    return x.unflatten(-1, (num_heads, -1))


def from_heads(x: Tensor) -> Tensor:
    """[B, H, W, heads, D] → [B, heads·D, H, W]: a view."""
    return to_nchw(x.flatten(3))


def only_weight(projection: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a projection is no more than its weight and bias, so that a fused form may read those instead of calling it.

    Not where hooks watch it or make its weight (`torch.nn.utils.prune`, `weight_norm`), nor where another forward stands in
    (LoRA's, a quantized one's).
    """
    before = projection._forward_pre_hooks or projection._backward_pre_hooks
    after = projection._forward_hooks or projection._backward_hooks
    # Asked of the class and of the instance, for Dynamo says of a bound method that its function is none.
    own = type(projection).forward is kind.forward and "forward" not in projection.__dict__
    return own and not (before or after)


def zero_masked(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """The map [B, C, H, W] with zeros where key_mask [B, H, W] is False, as if the image ended there."""
    return x if key_mask is None else x.masked_fill(~key_mask[:, None], 0.0)


def pool_mask(
    key_mask: Tensor | None, kernel: int, stride: int, padding: int = 0, ceil_mode: bool = False
) -> Tensor | None:
    """The mask of a pooled map: a cell is valid when any pixel under it is."""
    if key_mask is None:
        return None
    pooled = F.max_pool2d(key_mask[:, None].to(torch.float32), kernel, stride, padding, ceil_mode=ceil_mode)
    return pooled[:, 0] > 0


def avg_pool_valid(
    x: Tensor, key_mask: Tensor | None, kernel: int, stride: int, padding: int = 0, ceil_mode: bool = False
) -> Tensor:
    """Average pooling over pixels that exist and are valid; a cell without any gives 0."""

    def pool(t: Tensor) -> Tensor:
        return F.avg_pool2d(t, kernel, stride, padding, ceil_mode=ceil_mode, count_include_pad=False)

    if key_mask is None:
        return pool(x)
    valid = key_mask[:, None].to(x.dtype)
    share = pool(valid)
    return pool(x * valid) / torch.where(share > 0, share, torch.ones_like(share))


def short_pair(pair: tuple[int, ...]) -> int | tuple[int, ...]:
    """A pair as it would be typed: one number where both are equal.

    >>> short_pair((3, 3)), short_pair((3, 5))
    (3, (3, 5))
    """
    return pair[0] if len(set(pair)) == 1 else pair


def typed_arguments(*positional: object, **options: tuple[object, object]) -> str:
    """Arguments as they would be typed, for `extra_repr`: options come as (value, default) and defaults are left out.

    >>> typed_arguments(8, 16, stride=(2, 1), kind=("gaussian", "gaussian"))
    '8, 16, stride=2'
    """
    typed = [f"{name}={value!r}" for name, (value, default) in options.items() if value != default]
    return ", ".join([*(repr(p) for p in positional), *typed])
