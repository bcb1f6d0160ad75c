"""ResNets and MobileNetV2 with attention-augmented convolutions (AA-Net).

Paper: "Attention Augmented Convolutional Networks", Bello et al., ICCV 2019, https://arxiv.org/abs/1904.09925

A tenth of the channels of each 3×3 convolution becomes global self-attention with two-dimensional relative positions: the
content-based counterpart that ExpAtt's tables compare with, in the same places and under the same keywords.
"""

from __future__ import annotations

from typing import Any

from timm.models._builder import build_model_with_cfg
from timm.models._registry import generate_default_cfgs, register_model

from nearsight.models.augmented_mobilenet import AugmentedMobileNet
from nearsight.models.augmented_resnet import AugmentedBasicBlock, AugmentedBottleneck, AugmentedResNet
from nearsight.models.common import cifar_cfg, default_cfg

__all__: list[str] = []

PAPER = {"paper_name": "Attention Augmented Convolutional Networks", "paper_ids": "arXiv:1904.09925"}
RESNET = {"first_conv": "conv1", "classifier": "fc", **PAPER}

default_cfgs = generate_default_cfgs(
    {
        "aa_resnet34": default_cfg(**RESNET),
        "aa_resnet50": default_cfg(**RESNET),
        "aa_resnet101": default_cfg(**RESNET),
        "aa_resnet152": default_cfg(**RESNET),
        "aa_resnet50_cifar": cifar_cfg(**RESNET),
        "aa_mobilenetv2_100": default_cfg(first_conv="conv_stem", classifier="classifier", **PAPER),
    }
)


def _create_resnet(variant: str, pretrained: bool = False, **kwargs: Any) -> AugmentedResNet:
    options = {"mechanism": "aa", **kwargs}
    return build_model_with_cfg(AugmentedResNet, variant, pretrained, feature_cfg={"feature_cls": "getter"}, **options)


@register_model
def aa_resnet34(pretrained: bool = False, **kwargs: Any) -> AugmentedResNet:
    """ResNet-34, both 3×3 convolutions of each block augmented in stages 2–4.

    The ratio is not published; 0.2 makes 20.70 M parameters, the published count.
    """
    options = {"block": AugmentedBasicBlock, "layers": (3, 4, 6, 3), "ratio": 0.2}
    return _create_resnet("aa_resnet34", pretrained, **{**options, **kwargs})


@register_model
def aa_resnet50(pretrained: bool = False, **kwargs: Any) -> AugmentedResNet:
    """ResNet-50, augmented in stages 2–4."""
    options = {"block": AugmentedBottleneck, "layers": (3, 4, 6, 3)}
    return _create_resnet("aa_resnet50", pretrained, **{**options, **kwargs})


@register_model
def aa_resnet101(pretrained: bool = False, **kwargs: Any) -> AugmentedResNet:
    """ResNet-101, augmented in stages 2–4."""
    options = {"block": AugmentedBottleneck, "layers": (3, 4, 23, 3)}
    return _create_resnet("aa_resnet101", pretrained, **{**options, **kwargs})


@register_model
def aa_resnet152(pretrained: bool = False, **kwargs: Any) -> AugmentedResNet:
    """ResNet-152, augmented in stages 2–4."""
    options = {"block": AugmentedBottleneck, "layers": (3, 8, 36, 3)}
    return _create_resnet("aa_resnet152", pretrained, **{**options, **kwargs})


@register_model
def aa_resnet50_cifar(pretrained: bool = False, **kwargs: Any) -> AugmentedResNet:
    """ResNet-50 for 32 px images: a first convolution of stride 1, no first pooling, augmented in all four stages."""
    options = {"block": AugmentedBottleneck, "layers": (3, 4, 6, 3), "stages": "aaaa", "stem": "cifar", "img_size": 32}
    return _create_resnet("aa_resnet50_cifar", pretrained, **{**options, **kwargs})


@register_model
def aa_mobilenetv2_100(pretrained: bool = False, **kwargs: Any) -> AugmentedMobileNet:
    """MobileNetV2, augmented beside the expanding 1×1 convolutions from 144 channels on."""
    options = {"mechanism": "aa", **kwargs}
    return build_model_with_cfg(
        AugmentedMobileNet, "aa_mobilenetv2_100", pretrained, feature_cfg={"feature_cls": "getter"}, **options
    )
