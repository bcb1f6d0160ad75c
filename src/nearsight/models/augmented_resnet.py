"""timm's ResNet with augmented convolutions in place of its 3×3: what the ExpAtt and the AA networks share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn

from nearsight.errors import ArgumentValueError
from nearsight.layers.augmented import AttentionAugmentedConv2d, AugmentedConv2d, ExplicitAugmentedConv2d
from nearsight.layers.explicit import RADIUS_INIT
from nearsight.models.common import run_spatial, shrink_mask, zero_masked
from nearsight.models.masked_resnet import STAGES, MaskedResNetMixin, check_letters, check_per_stage
from nearsight.ops.checks import check_choice, check_pair
from nearsight.ops.explicit.call import FIXED_KINDS

__all__ = [
    "AugmentedBasicBlock",
    "AugmentedBottleneck",
    "AugmentedResNet",
    "Augmenter",
    "no_decay_names",
    "shrink_size",
]


def no_decay_names(model: nn.Module) -> set[str]:
    """Parameters without weight decay: the radii and the relative embeddings."""
    return {n for n, _ in model.named_parameters() if n.rpartition(".")[2] in ("log_radius", "rel_row", "rel_col")}


class Augmenter:
    """Makes the augmented convolution that takes a plain one's place, from a network's keywords."""

    def __init__(
        self,
        name: str,
        mechanism: str,
        *,
        kind: str,
        per_head: bool,
        offset: float,
        radius: float,
        with_aa: bool,
        ratio: float,
        num_heads: int,
        per_head_position: bool,
        key_channels: int | None,
    ) -> None:
        check_choice(name, "mechanism", mechanism, ("expatt", "aa"))
        if mechanism == "aa" and with_aa:
            raise ArgumentValueError(
                f"{name}: got with_aa=True with mechanism='aa', wanted it with 'expatt' only; leave it out."
            )
        self.mechanism, self.kind, self.with_aa = mechanism, kind, with_aa
        self.shared: dict[str, Any] = {"ratio": ratio, "num_heads": num_heads}
        self.explicit: dict[str, Any] = {"per_head": per_head, "offset": offset, "radius": radius, "with_aa": with_aa}
        self.relative: dict[str, Any] = {"per_head_position": per_head_position, "key_channels": key_channels}

    def __call__(
        self, conv: nn.Conv2d, size: tuple[int, int], dv: int | None = None, kind: str | None = None
    ) -> AugmentedConv2d:
        """The augmented form of `conv` on an input map of `size`, initialised like timm's convolutions."""
        arguments: dict[str, Any] = {
            "in_channels": conv.in_channels,
            "out_channels": conv.out_channels,
            "kernel_size": conv.kernel_size,
            "stride": conv.stride[0],
            "dilation": conv.dilation,
            "groups": conv.groups,
            "bias": conv.bias is not None,
            "attention_channels": dv,
            "device": conv.weight.device,
            "dtype": conv.weight.dtype,
            **self.shared,
        }
        layer: AugmentedConv2d
        if self.mechanism == "aa":
            layer = AttentionAugmentedConv2d(**arguments, **self.relative, feature_size=size)
        else:
            feature_size = size if self.with_aa else None
            layer = ExplicitAugmentedConv2d(
                **arguments, **self.explicit, kind=kind or self.kind, feature_size=feature_size
            )
        nn.init.kaiming_normal_(layer.conv.weight, mode="fan_out", nonlinearity="relu")
        return layer


class AugmentedBasicBlock(BasicBlock):
    """timm's basic block with a key mask; both its 3×3 convolutions may be augmented."""

    spatial = ("conv1", "conv2")

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        x = zero_masked(x, key_mask)
        small = shrink_mask(key_mask, self.stride)
        y = self.act1(self.drop_block(self.bn1(run_spatial(self.conv1, x, key_mask))))
        y = self.bn2(run_spatial(self.conv2, y, small))
        return self.act2(_add_skip(self, y, x))


class AugmentedBottleneck(Bottleneck):
    """timm's bottleneck with a key mask; its 3×3 convolution may be augmented."""

    spatial = ("conv2",)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        x = zero_masked(x, key_mask)
        small = shrink_mask(key_mask, self.stride)
        y = self.act1(self.bn1(self.conv1(x)))
        y = self.act2(self.drop_block(self.bn2(run_spatial(self.conv2, y, key_mask))))
        y = self.bn3(self.conv3(zero_masked(y, small)))
        return self.act3(_add_skip(self, y, x))


def _add_skip(block: Any, y: Tensor, x: Tensor) -> Tensor:
    if block.drop_path is not None:
        y = block.drop_path(y)
    return y + (x if block.downsample is None else block.downsample(x))


class AugmentedResNet(MaskedResNetMixin, ResNet):
    """timm's ResNet whose 3×3 convolutions give some channels to attention over the whole map (ExpAtt, AA-Net).

    [B, in_chans, H, W] → [B, num_classes], any image size; maps of stride 4, 8, 16, 32 after the stages (with the "cifar"
    stem 1, 2, 4, 8).

    Args:
        block: `AugmentedBasicBlock` or `AugmentedBottleneck`.
        layers: blocks per stage.
        mechanism: "expatt" or "aa".
        stages: a letter per stage, "a" for augmented, "c" for plain convolutions; "cccc" is the baseline.
        kind: the form of ExpAtt's map, see `nearsight.ops.explicit_attention`.
        stage4_kind: the form in the last stage after its first augmented convolution; None is "constant" where `kind`
            learns a radius and `kind` itself elsewhere.
        per_head: one radius per head instead of one per layer.
        offset: the "+1" on ExpAtt's map.
        radius: where the radii start.
        with_aa: ExpAtt and AA-Net's attention side by side.
        ratio: share of a convolution's channels that attention makes, rounded to a multiple of the heads.
        dv: those channels themselves, an int or one per stage (None keeps the ratio there).
        num_heads: attention heads.
        key_channels, per_head_position: of AA-Net's attention, see `nearsight.AttentionAugmentedConv2d`.
        img_size: image size that AA-Net's relative tables are built for; other sizes stretch them.
        channels: width of each stage.
        stem: "conv" (stride 2, then a max-pool with stride 2) or "cifar" (stride 1, no pooling).
        stem_kernel, stem_width: kernel and channels of the first convolution.
        output_stride, drop_rate, drop_path_rate, drop_block_rate, zero_init_last, act_layer, norm_layer: as in timm's ResNet.

    >>> import timm, torch, nearsight
    >>> model = timm.create_model("expatt_resnet_nano", in_chans=1)
    >>> model(torch.randn(2, 1, 8, 12)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        block: type[AugmentedBasicBlock] | type[AugmentedBottleneck] = AugmentedBottleneck,
        layers: Sequence[int] = (3, 4, 6, 3),
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "avg",
        *,
        mechanism: str = "expatt",
        stages: str = "caaa",
        kind: str = "gaussian",
        stage4_kind: str | None = None,
        per_head: bool = False,
        offset: float = 1.0,
        radius: float = RADIUS_INIT,
        with_aa: bool = False,
        ratio: float = 0.1,
        dv: int | Sequence[int | None] | None = None,
        num_heads: int = 8,
        key_channels: int | None = None,
        per_head_position: bool = False,
        img_size: int | tuple[int, int] = 224,
        channels: Sequence[int] = (64, 128, 256, 512),
        stem: str = "conv",
        stem_kernel: int = 7,
        stem_width: int = 64,
        output_stride: int = 32,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        drop_block_rate: float = 0.0,
        zero_init_last: bool = True,
        act_layer: Any = nn.ReLU,
        norm_layer: Any = nn.BatchNorm2d,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        check_letters(name, stages, "augmented", "plain convolutions", "caaa")
        check_per_stage(name, layers=layers, channels=channels)
        check_choice(name, "stem", stem, ("conv", "cifar"))
        if stem_width % 2 or stem_kernel % 2 == 0:
            raise ArgumentValueError(
                f"{name}: got stem_width={stem_width} and stem_kernel={stem_kernel}, wanted an even width and an odd kernel."
            )
        super().__init__(
            block,  # type: ignore[arg-type]
            tuple(layers),
            num_classes=num_classes,
            in_chans=in_chans,
            output_stride=output_stride,
            global_pool=global_pool,
            # The deep stem is the one whose width timm lets choose; its convolutions are replaced below.
            stem_type="deep",
            stem_width=stem_width // 2,
            channels=tuple(channels),
            act_layer=act_layer,
            norm_layer=norm_layer,
            drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
            drop_block_rate=drop_block_rate,
            zero_init_last=zero_init_last,
            device=device,
            dtype=dtype,
        )
        self.stem_stride = self.pool_stride = 2 if stem == "conv" else 1
        self.conv1 = nn.Conv2d(
            in_chans,
            stem_width,
            stem_kernel,
            stride=self.stem_stride,
            padding=stem_kernel // 2,
            bias=False,
            device=device,
            dtype=dtype,
        )
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        if stem == "cifar":
            self.maxpool = nn.Identity()
            for info in self.feature_info:
                info["reduction"] //= 2 if info["module"] == "act1" else 4

        learns = kind not in FIXED_KINDS
        self._augment(
            Augmenter(
                name,
                mechanism,
                kind=kind,
                per_head=per_head,
                offset=offset,
                radius=radius,
                with_aa=with_aa,
                ratio=ratio,
                num_heads=num_heads,
                per_head_position=per_head_position,
                key_channels=key_channels,
            ),
            stages,
            _per_stage(name, dv),
            stage4_kind or ("constant" if learns else kind),
            check_pair(name, "img_size", img_size),
        )

    def _augment(
        self,
        augmenter: Augmenter,
        stages: str,
        dv: Sequence[int | None],
        stage4_kind: str,
        size: tuple[int, int],
    ) -> None:
        """Put an augmented convolution in place of each 3×3 of the chosen stages."""
        size = shrink_size(size, self.stem_stride * self.pool_stride)
        for i, stage in enumerate(STAGES):
            for j, (owner, attribute) in enumerate(self.spatial_convs(stage)):
                conv = getattr(owner, attribute)
                if stages[i] == "a":
                    kind = stage4_kind if i == 3 and j > 0 else None
                    setattr(owner, attribute, augmenter(conv, size, dv[i], kind))
                size = shrink_size(size, conv.stride[0])

    def spatial_convs(self, stage: str) -> Iterator[tuple[nn.Module, str]]:
        """The 3×3 convolutions of a stage, plain or augmented, in the order they run: (block, attribute)."""
        for block in getattr(self, stage):
            for attribute in block.spatial:
                yield block, attribute

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return no_decay_names(self)


def shrink_size(size: tuple[int, int], stride: int) -> tuple[int, int]:
    """The size of a map after a layer of that stride whose padding keeps the map."""
    return -(-size[0] // stride), -(-size[1] // stride)


def _per_stage(name: str, dv: int | Sequence[int | None] | None) -> Sequence[int | None]:
    if dv is None or isinstance(dv, int):
        return (dv,) * 4
    if isinstance(dv, str) or len(dv) != 4:
        raise ArgumentValueError(f"{name}: got dv={dv!r}, wanted an int, or one int or None per stage (4).")
    return dv
