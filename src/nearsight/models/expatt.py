"""ResNets and MobileNetV2 with explicitly modelled attention maps (ExpAtt).

Paper: "Explicitly Modeled Attention Maps for Image Classification", Tan et al., AAAI 2021, https://arxiv.org/abs/2006.07872

A tenth of the channels of each 3×3 convolution becomes attention over the whole map, whose weights depend on the distance
alone and learn one radius per layer. Each row of the paper's tables is one call:

    timm.create_model("expatt_resnet50_cifar", kind="exp_manhattan")   # the six kinds
    timm.create_model("expatt_resnet50_cifar", stages="cccc")          # the convolution baseline
    timm.create_model("expatt_resnet50_cifar", per_head=True)          # a map per head
    timm.create_model("expatt_resnet50_cifar", offset=0.0)             # without the "+1"
    timm.create_model("expatt_resnet50_cifar", with_aa=True)           # ExpAtt and AA-Net side by side
    timm.create_model("expatt_resnet50", dv=(None, None, None, 56))    # the width the published count suggests
"""

from __future__ import annotations

from typing import Any

from timm.models._builder import build_model_with_cfg
from timm.models._registry import generate_default_cfgs, register_model

from nearsight.models.augmented_mobilenet import AugmentedMobileNet
from nearsight.models.augmented_resnet import AugmentedBasicBlock, AugmentedBottleneck, AugmentedResNet
from nearsight.models.common import cifar10_cfg, cifar_cfg, default_cfg, nano_cfg, wants_cifar10

__all__: list[str] = []

PAPER = {"paper_name": "Explicitly Modeled Attention Maps for Image Classification", "paper_ids": "arXiv:2006.07872"}
RESNET = {"first_conv": "conv1", "classifier": "fc", **PAPER}

default_cfgs = generate_default_cfgs(
    {
        "expatt_resnet34": default_cfg(**RESNET),
        "expatt_resnet50": default_cfg(**RESNET),
        "expatt_resnet101": default_cfg(**RESNET),
        "expatt_resnet152": default_cfg(**RESNET),
        "expatt_resnet50_cifar": cifar_cfg(**RESNET),
        "expatt_mobilenetv2_100": default_cfg(first_conv="conv_stem", classifier="classifier", **PAPER),
        "expatt_resnet_nano": nano_cfg(**RESNET),
        "expatt_resnet_nano.cifar10": cifar10_cfg("expatt_resnet_nano.cifar10", **RESNET),
    }
)


def _create_resnet(variant: str, pretrained: bool = False, **kwargs: Any) -> AugmentedResNet:
    return build_model_with_cfg(AugmentedResNet, variant, pretrained, feature_cfg={"feature_cls": "getter"}, **kwargs)


@register_model
def expatt_resnet34(pretrained: bool = False, **kwargs: Any) -> AugmentedResNet:
    """ResNet-34 with a quarter of both 3×3 convolutions of a block as attention, which the published count requires."""
    options = {"block": AugmentedBasicBlock, "layers": (3, 4, 6, 3), "ratio": 0.25}
    return _create_resnet("expatt_resnet34", pretrained, **{**options, **kwargs})


@register_model
def expatt_resnet50(pretrained: bool = False, **kwargs: Any) -> AugmentedResNet:
    """ResNet-50, augmented in stages 2–4."""
    options = {"block": AugmentedBottleneck, "layers": (3, 4, 6, 3)}
    return _create_resnet("expatt_resnet50", pretrained, **{**options, **kwargs})


@register_model
def expatt_resnet101(pretrained: bool = False, **kwargs: Any) -> AugmentedResNet:
    """ResNet-101, augmented in stages 2–4."""
    options = {"block": AugmentedBottleneck, "layers": (3, 4, 23, 3)}
    return _create_resnet("expatt_resnet101", pretrained, **{**options, **kwargs})


@register_model
def expatt_resnet152(pretrained: bool = False, **kwargs: Any) -> AugmentedResNet:
    """ResNet-152, augmented in stages 2–4."""
    options = {"block": AugmentedBottleneck, "layers": (3, 8, 36, 3)}
    return _create_resnet("expatt_resnet152", pretrained, **{**options, **kwargs})


@register_model
def expatt_resnet50_cifar(pretrained: bool = False, **kwargs: Any) -> AugmentedResNet:
    """ResNet-50 for 32 px images: a first convolution of stride 1, no first pooling, augmented in all four stages."""
    options = {"block": AugmentedBottleneck, "layers": (3, 4, 6, 3), "stages": "aaaa", "stem": "cifar", "img_size": 32}
    return _create_resnet("expatt_resnet50_cifar", pretrained, **{**options, **kwargs})


@register_model
def expatt_resnet_nano(pretrained: bool = False, **kwargs: Any) -> AugmentedResNet:
    """A small ExpAtt network for 8–64 px images and CPUs; `resnet_nano` is its convolution baseline, with either tag."""
    options: dict[str, Any] = {
        "block": AugmentedBottleneck,
        "layers": (1, 1, 1, 1),
        "channels": (16, 32, 48, 64),
        "stages": "aaaa",
        "stem": "cifar",
        "stem_kernel": 3,
        "stem_width": 32,
        "ratio": 0.25,
        "num_heads": 4,
        "img_size": 32,
    }
    if wants_cifar10(pretrained, kwargs):
        options |= {"layers": (2, 2, 2, 2), "channels": (24, 40, 64, 80)}
    return _create_resnet("expatt_resnet_nano", pretrained, **{**options, **kwargs})


@register_model
def expatt_mobilenetv2_100(pretrained: bool = False, **kwargs: Any) -> AugmentedMobileNet:
    """MobileNetV2, augmented beside the expanding 1×1 convolutions from 144 channels on."""
    return build_model_with_cfg(
        AugmentedMobileNet, "expatt_mobilenetv2_100", pretrained, feature_cfg={"feature_cls": "getter"}, **kwargs
    )
