"""ResNets whose spatial convolutions are local self-attention (SASA).

Paper: "Stand-Alone Self-Attention in Vision Models", Ramachandran et al., NeurIPS 2019, https://arxiv.org/abs/1906.05909

Bottleneck ResNets of depth 26, 38 and 50: every 3×3 becomes an attention over a 7×7 window, a strided one attends first and
averages 2×2 afterwards; the 1×1 convolutions stay. Each row of the paper's ablations is one call:

    timm.create_model("sasa_resnet50_convstem", stages="ccaa")         # attention in the last two stages
    timm.create_model("sasa_resnet50_convstem", stages="cccc")         # the convolution baseline
    timm.create_model("sasa_resnet50_convstem", window=11)
    timm.create_model("sasa_resnet50_convstem", position="absolute")   # or "none"
    timm.create_model("sasa_resnet50_convstem", content=False)         # q·r only
    timm.create_model("sasa_resnet50", stem_values="plain")            # or "conv"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers.classifier import create_classifier
from timm.layers.drop import DropPath
from timm.models._builder import build_model_with_cfg
from timm.models._features import feature_take_indices
from timm.models._registry import generate_default_cfgs, register_model
from torch import Tensor, nn

from nearsight.layers import AttentionStem2d, LocalAttention2d
from nearsight.layers.common import check_map
from nearsight.models.common import (
    cifar10_cfg,
    default_cfg,
    nano_cfg,
    run_spatial,
    shrink_mask,
    wants_cifar10,
    zero_masked,
)
from nearsight.models.masked_resnet import STAGES, MaskedResNetMixin, check_letters, check_per_stage
from nearsight.ops.checks import check_choice

__all__ = ["SasaBottleneck", "SasaResNet"]

NAME = "SasaResNet"


class SasaBottleneck(nn.Module):
    """1×1 convolution, spatial layer, 1×1 convolution, each with batch norm, around a skip.

    The spatial layer is attention over a window, or a 3×3 convolution where `attention` is None.
    """

    expansion = 4

    def __init__(
        self,
        in_channels: int,
        width: int,
        *,
        stride: int = 1,
        attention: dict[str, Any] | None = None,
        drop_path: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        out_channels = width * self.expansion
        self.stride = stride
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False, **factory)
        self.bn1 = nn.BatchNorm2d(width, **factory)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2: nn.Module
        if attention is None:
            self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False, **factory)
        else:
            self.conv2 = LocalAttention2d(width, width, stride=stride, **attention, **factory)
        self.bn2 = nn.BatchNorm2d(width, **factory)
        self.act2 = nn.ReLU(inplace=True)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False, **factory)
        self.bn3 = nn.BatchNorm2d(out_channels, **factory)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False, **factory),
                nn.BatchNorm2d(out_channels, **factory),
            )
        self.act3 = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        x = zero_masked(x, key_mask)
        y = self.act1(self.bn1(self.conv1(x)))
        y = run_spatial(self.conv2, y, key_mask)
        y = zero_masked(self.act2(self.bn2(y)), shrink_mask(key_mask, self.stride))
        y = self.drop_path(self.bn3(self.conv3(y)))
        skip = x if self.downsample is None else self.downsample(x)
        return self.act3(y + skip)


class SasaResNet(MaskedResNetMixin):
    """A bottleneck ResNet with attention or convolution in each stage.

    [B, in_chans, H, W] → [B, num_classes], any image size; maps of stride 4, 8, 16, 32 after the stages (with the
    "cifar" stem 1, 2, 4, 8).

    Args:
        layers: blocks per stage.
        stages: a letter per stage, "a" for attention, "c" for 3×3 convolution.
        stem: "attention" (attention in 4×4 blocks, then a 4×4 max-pool), "conv" (7×7 with stride 2, then a 3×3 max-pool
            with stride 2) or "cifar" (3×3 with stride 1, no pooling).
        stem_values: the values of the attention stem: "mixture", "plain" or "conv".
        mixtures: how many value matrices the attention stem mixes.
        window: window of the attention layers.
        heads: heads of the attention layers, one number or one per stage.
        position: "relative", "absolute" or "none".
        content: False leaves out q·k, and with it W_K.
        border: "mask" or "zeros", see `nearsight.ops.local_attention`.
        per_head_position: one relative embedding per head instead of one for all.
        widths: bottleneck width of each stage; a stage puts out 4 times that.
        stem_width: channels of the stem.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth, rising linearly to this at the last block.
        zero_init_last: start each block as its skip.

    >>> import timm, torch, nearsight
    >>> model = timm.create_model("sasa_resnet_nano", in_chans=1)
    >>> model(torch.randn(2, 1, 8, 12)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        layers: Sequence[int] = (3, 4, 6, 3),
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "avg",
        *,
        stages: str = "aaaa",
        stem: str = "attention",
        stem_values: str = "mixture",
        mixtures: int = 6,
        window: int | tuple[int, int] = 7,
        heads: int | Sequence[int] = 8,
        position: str = "relative",
        content: bool = True,
        border: str = "mask",
        per_head_position: bool = False,
        widths: Sequence[int] = (64, 128, 256, 512),
        stem_width: int = 64,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        zero_init_last: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_letters(NAME, stages, "attention", "convolution", "ccaa")
        check_choice(NAME, "stem", stem, ("attention", "conv", "cifar"))
        stage_heads = (heads,) * 4 if isinstance(heads, int) else heads
        check_per_stage(NAME, layers=layers, widths=widths, heads=stage_heads)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_classes, self.in_chans, self.drop_rate = num_classes, in_chans, drop_rate
        self.grad_checkpointing = False

        self.conv1: nn.Module
        self.maxpool: nn.Module
        if stem == "attention":
            self.conv1 = AttentionStem2d(in_chans, stem_width, 4, values=stem_values, mixtures=mixtures, **factory)
            self.maxpool = nn.MaxPool2d(4, 4, ceil_mode=True)
            self.stem_stride, self.pool_stride = 1, 4
        elif stem == "conv":
            self.conv1 = nn.Conv2d(in_chans, stem_width, 7, stride=2, padding=3, bias=False, **factory)
            self.maxpool = nn.MaxPool2d(3, 2, padding=1)
            self.stem_stride, self.pool_stride = 2, 2
        else:
            self.conv1 = nn.Conv2d(in_chans, stem_width, 3, padding=1, bias=False, **factory)
            self.maxpool = nn.Identity()
            self.stem_stride, self.pool_stride = 1, 1
        self.bn1 = nn.BatchNorm2d(stem_width, **factory)
        self.act1 = nn.ReLU(inplace=True)
        self.feature_info: list[dict[str, Any]] = [
            {"num_chs": stem_width, "reduction": self.stem_stride, "module": "act1"}
        ]

        options = {
            "kernel_size": window,
            "position": position,
            "content": content,
            "border": border,
            "per_head_position": per_head_position,
        }
        channels, reduction = stem_width, self.stem_stride * self.pool_stride
        rates = torch.linspace(0, drop_path_rate, sum(layers), device="cpu").split(list(layers))
        for i, (name, depth, width, kind) in enumerate(zip(STAGES, layers, widths, stages, strict=True)):
            attention = {**options, "num_heads": stage_heads[i]} if kind == "a" else None
            blocks = []
            for j in range(depth):
                stride = 2 if i > 0 and j == 0 else 1
                blocks.append(
                    SasaBottleneck(
                        channels,
                        width,
                        stride=stride,
                        attention=attention,
                        drop_path=float(rates[i][j]),
                        **factory,
                    )
                )
                channels = width * SasaBottleneck.expansion
                reduction *= stride
            setattr(self, name, nn.Sequential(*blocks))
            self.feature_info.append({"num_chs": channels, "reduction": reduction, "module": name})

        self.num_features = self.head_hidden_size = channels
        self.global_pool, self.fc = create_classifier(channels, num_classes, pool_type=global_pool, **factory)
        self.init_weights(zero_init_last=zero_init_last)

    @torch.jit.ignore
    def init_weights(self, zero_init_last: bool = True) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, SasaBottleneck) and zero_init_last:
                nn.init.zeros_(module.bn3.weight)
        if isinstance(self.conv1, AttentionStem2d):
            self.conv1.reset_parameters()

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        positions = ("rel_row", "rel_col", "emb_row", "emb_col", "nu")
        return {name for name, _ in self.named_parameters() if name.rpartition(".")[2] in positions}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        return {"stem": r"^conv1|bn1|maxpool", "blocks": r"^layer(\d+)" if coarse else r"^layer(\d+)\.(\d+)"}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.fc

    def reset_classifier(self, num_classes: int, global_pool: str = "avg") -> None:
        self.num_classes = num_classes
        like = self.bn1.weight
        self.global_pool, self.fc = create_classifier(
            self.num_features, num_classes, pool_type=global_pool, device=like.device, dtype=like.dtype
        )
        self.global_pool.train(self.training)
        self.fc.train(self.training)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        take, last = feature_take_indices(5, indices)
        for name in STAGES[last:]:
            setattr(self, name, nn.Sequential())
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def _pooled_stem(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        after = (self.act1, self.maxpool)
        watched = any(module._forward_hooks or module._forward_pre_hooks for module in after)
        plain = isinstance(self.act1, nn.ReLU) and not watched
        if key_mask is None and plain and type(self.conv1) is AttentionStem2d and _pools(self.maxpool, self.conv1):
            check_map(NAME, x, self.in_chans)
            return self.conv1.pooled(x, self.bn1), None
        return super()._pooled_stem(x, key_mask)


def _pools(pool: nn.Module, stem: AttentionStem2d) -> bool:
    """Whether this is the max-pool over the stem's blocks, not one that was put in its place."""
    if not isinstance(pool, nn.MaxPool2d):
        return False
    geometry = (pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode)
    return geometry == (stem.kernel_size, stem.kernel_size, 0, 1, True)


PAPER = {"paper_name": "Stand-Alone Self-Attention in Vision Models", "paper_ids": "arXiv:1906.05909"}


def _cfg(**overrides: Any) -> dict[str, Any]:
    return default_cfg(**{"first_conv": "conv1", "classifier": "fc", **PAPER, **overrides})


def _attention_stem_cfg() -> dict[str, Any]:
    return _cfg(first_conv=("conv1.qk", "conv1.v"))


default_cfgs = generate_default_cfgs(
    {
        "sasa_resnet26": _attention_stem_cfg(),
        "sasa_resnet38": _attention_stem_cfg(),
        "sasa_resnet50": _attention_stem_cfg(),
        "sasa_resnet26_convstem": _cfg(),
        "sasa_resnet38_convstem": _cfg(),
        "sasa_resnet50_convstem": _cfg(),
        "sasa_resnet_nano": nano_cfg(first_conv="conv1", classifier="fc", **PAPER),
        "sasa_resnet_nano.cifar10": cifar10_cfg(
            "sasa_resnet_nano.cifar10", first_conv="conv1", classifier="fc", **PAPER
        ),
        "resnet_nano": nano_cfg(first_conv="conv1", classifier="fc", **PAPER),
        "resnet_nano.cifar10": cifar10_cfg("resnet_nano.cifar10", first_conv="conv1", classifier="fc", **PAPER),
    }
)


def _create_sasa_resnet(variant: str, pretrained: bool = False, **kwargs: Any) -> SasaResNet:
    return build_model_with_cfg(SasaResNet, variant, pretrained, feature_cfg={"feature_cls": "getter"}, **kwargs)


@register_model
def sasa_resnet26(pretrained: bool = False, **kwargs: Any) -> SasaResNet:
    """ResNet-26 with attention everywhere, the stem included."""
    return _create_sasa_resnet("sasa_resnet26", pretrained, **{"layers": (1, 2, 4, 1), **kwargs})


@register_model
def sasa_resnet38(pretrained: bool = False, **kwargs: Any) -> SasaResNet:
    """ResNet-38 with attention everywhere, the stem included."""
    return _create_sasa_resnet("sasa_resnet38", pretrained, **{"layers": (2, 3, 5, 2), **kwargs})


@register_model
def sasa_resnet50(pretrained: bool = False, **kwargs: Any) -> SasaResNet:
    """ResNet-50 with attention everywhere, the stem included."""
    return _create_sasa_resnet("sasa_resnet50", pretrained, **{"layers": (3, 4, 6, 3), **kwargs})


@register_model
def sasa_resnet26_convstem(pretrained: bool = False, **kwargs: Any) -> SasaResNet:
    """ResNet-26 with attention in the stages and a convolution stem."""
    return _create_sasa_resnet(
        "sasa_resnet26_convstem", pretrained, **{"layers": (1, 2, 4, 1), "stem": "conv", **kwargs}
    )


@register_model
def sasa_resnet38_convstem(pretrained: bool = False, **kwargs: Any) -> SasaResNet:
    """ResNet-38 with attention in the stages and a convolution stem."""
    return _create_sasa_resnet(
        "sasa_resnet38_convstem", pretrained, **{"layers": (2, 3, 5, 2), "stem": "conv", **kwargs}
    )


@register_model
def sasa_resnet50_convstem(pretrained: bool = False, **kwargs: Any) -> SasaResNet:
    """ResNet-50 with attention in the stages and a convolution stem."""
    return _create_sasa_resnet(
        "sasa_resnet50_convstem", pretrained, **{"layers": (3, 4, 6, 3), "stem": "conv", **kwargs}
    )


NANO: dict[str, Any] = {
    "layers": (1, 1, 1, 1),
    "widths": (16, 32, 48, 64),
    "stem_width": 32,
    "stem": "cifar",
    "heads": 4,
    "window": 5,
    "zero_init_last": False,  # a few hundred steps are all it gets
}
NANO_CIFAR10: dict[str, Any] = {
    **NANO,
    "layers": (2, 2, 2, 2),
    "widths": (24, 40, 64, 80),
    "zero_init_last": True,
}


@register_model
def sasa_resnet_nano(pretrained: bool = False, **kwargs: Any) -> SasaResNet:
    """A small network of attention for 8–64 px images and CPUs; wider and deeper with the tag cifar10."""
    options = NANO_CIFAR10 if wants_cifar10(pretrained, kwargs) else NANO
    return _create_sasa_resnet("sasa_resnet_nano", pretrained, **{**options, **kwargs})


@register_model
def resnet_nano(pretrained: bool = False, **kwargs: Any) -> SasaResNet:
    """The convolution baseline of the nano networks: `sasa_resnet_nano` with 3×3 convolutions."""
    options = NANO_CIFAR10 if wants_cifar10(pretrained, kwargs) else NANO
    return _create_sasa_resnet("resnet_nano", pretrained, **{**options, "stages": "cccc", **kwargs})
