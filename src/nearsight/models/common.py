"""What the networks share: a norm, padding masks on their way through a network, and the pretrained_cfg they start from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers.adaptive_avgmax_pool import SelectAdaptivePool2d
from timm.layers.norm import LayerNorm2d
from torch import Tensor, nn
from torch.nn import functional as F

from nearsight import weights
from nearsight.layers import AttentionStem2d, ExplicitAttention2d, LocalAttention2d, QnA2d, WindowAttention2d
from nearsight.layers.augmented import AugmentedConv2d
from nearsight.layers.common import from_rows, pool_mask, to_rows, zero_masked
from nearsight.layers.relative_attention import RelativeAttention2d

__all__ = [
    "RowNorm2d",
    "cifar10_cfg",
    "cifar_cfg",
    "default_cfg",
    "global_pool_valid",
    "nano_cfg",
    "run_spatial",
    "shrink_mask",
    "wants_cifar10",
    "zero_masked",
]


class RowNorm2d(LayerNorm2d):
    """timm's LayerNorm2d over rows of pixels, whose layout torch.compile leaves alone (see `to_rows`)."""

    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(to_rows(x), self.normalized_shape, self.weight, self.bias, self.eps)
        return from_rows(normed, x.shape[2:])


CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def shrink_mask(key_mask: Tensor | None, stride: int) -> Tensor | None:
    """The mask of a map `stride` times smaller, [B, ⌈H/stride⌉, ⌈W/stride⌉]: valid where any pixel under a cell is.

    A padded image then keeps exactly the cells that the image alone would have had.

    >>> import torch
    >>> mask = torch.zeros(1, 8, 8, dtype=torch.bool)
    >>> mask[:, :5, :3] = True
    >>> shrink_mask(mask, 2)[0].sum(0)
    tensor([3, 3, 0, 0])
    """
    return key_mask if stride == 1 else pool_mask(key_mask, stride, stride, ceil_mode=True)


# Also in place of a network's convolutions: `replace_conv` may have put them there.
TAKE_MASKS = (
    AttentionStem2d,
    AugmentedConv2d,
    ExplicitAttention2d,
    LocalAttention2d,
    QnA2d,
    RelativeAttention2d,
    WindowAttention2d,
)


def run_spatial(layer: nn.Module, x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Attention, which takes the mask, or a convolution, which sees zeros where key_mask is False."""
    return layer(x, key_mask) if isinstance(layer, TAKE_MASKS) else layer(zero_masked(x, key_mask))


def global_pool_valid(pool: SelectAdaptivePool2d, x: Tensor, key_mask: Tensor | None) -> Tensor:
    """timm's global pooling, over valid pixels only; an image without any pools to 0."""
    if key_mask is None or pool.is_identity():
        return pool(zero_masked(x, key_mask))
    kind = pool.pool_type.removeprefix("fast").lower() or "avg"
    valid = key_mask[:, None]
    parts = []
    if "avg" in kind:
        # A sum over a map soon lies beyond float16.
        wide = torch.promote_types(x.dtype, torch.float32)
        count = valid.sum((2, 3), dtype=wide).clamp(min=1)
        parts.append((zero_masked(x, key_mask).sum((2, 3), dtype=wide) / count).to(x.dtype))
    if "max" in kind:
        lowest = x.masked_fill(~valid, torch.finfo(x.dtype).min).amax((2, 3))
        parts.append(torch.where(valid.any(3).any(2), lowest, torch.zeros_like(lowest)))
    pooled = torch.cat(parts, 1) if kind == "catavgmax" else sum(parts[1:], parts[0]) / len(parts)
    flat = isinstance(pool.flatten, nn.Flatten) or getattr(pool.pool, "flatten", False)
    return pooled if flat else pooled[..., None, None]


def default_cfg(**overrides: Any) -> dict[str, Any]:
    """A pretrained_cfg for a 224 px ImageNet classifier without weights; keywords replace entries."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        **overrides,
    }


def cifar_cfg(**overrides: Any) -> dict[str, Any]:
    """A pretrained_cfg for a 32 px CIFAR-100 classifier without weights."""
    return default_cfg(
        **{"input_size": (3, 32, 32), "pool_size": (4, 4), "num_classes": 100, "crop_pct": 1.0, **overrides}
    )


def nano_cfg(**overrides: Any) -> dict[str, Any]:
    """A pretrained_cfg for the small networks: ten classes, images from 8 px on."""
    small: dict[str, Any] = {
        "num_classes": 10,
        "min_input_size": (3, 8, 8),
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
    }
    return cifar_cfg(**{**small, **overrides})


def cifar10_cfg(name: str, **overrides: Any) -> dict[str, Any]:
    """A pretrained_cfg for the small network trained on CIFAR-10 whose weights come with the package."""
    known = {
        "file": weights.file(name),
        "mean": (0.4914, 0.4822, 0.4465),
        "std": (0.2470, 0.2435, 0.2616),
        "interpolation": "bilinear",
        "label_names": CIFAR10,
        "license": "apache-2.0",
    }
    return nano_cfg(**{**known, **overrides})


def wants_cifar10(pretrained: bool, keywords: Mapping[str, Any]) -> bool:
    """Whether a call of a nano network means the wider one that was trained on CIFAR-10: by its tag, or by asking for weights.

    A cfg that comes with weights of its own (from the hub, or a folder in its format) carries the tag of the network they fit.

    >>> wants_cifar10(False, {"pretrained_cfg": "cifar10"}), wants_cifar10(False, {}), wants_cifar10(True, {})
    (True, False, True)
    >>> wants_cifar10(True, {"pretrained_cfg": {"tag": "cifar10"}}), wants_cifar10(True, {"pretrained_cfg": {"mean": 0.5}})
    (True, False)
    """
    cfg = keywords.get("pretrained_cfg")
    if cfg is None:
        return pretrained
    tag = cfg.get("tag") if isinstance(cfg, Mapping) else getattr(cfg, "tag", cfg)
    return bool(tag == "cifar10")
