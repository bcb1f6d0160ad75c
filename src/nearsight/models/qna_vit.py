"""QnA-ViT: a hierarchical vision transformer of learned-query blocks and windowed self-attention.

Learned Queries for Efficient Local Attention, Arar, Shamir, Bermano, CVPR 2022, https://arxiv.org/abs/2112.11435
The networks are those of the authors' code, which made the published weights; keywords reach every row of the supplement's
Tables 2–4: `qna_depths`, `sa_depths`, `qna_heads`, `sa_heads`, `sa_window`, `num_queries`, and `mixer="sasa"` for its baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from timm.layers.activations import GELUTanh
from timm.layers.classifier import ClassifierHead
from timm.layers.drop import DropPath
from timm.layers.mlp import Mlp
from timm.layers.weight_init import lecun_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models._manipulate import checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from nearsight.errors import ArgumentValueError
from nearsight.layers.common import check_map, from_rows, to_channels_last, to_nchw, to_rows
from nearsight.layers.local_attention import LocalAttention2d
from nearsight.layers.qna import QnA2d
from nearsight.layers.window_attention import WindowAttention2d
from nearsight.models.common import (
    RowNorm2d,
    cifar10_cfg,
    default_cfg,
    global_pool_valid,
    nano_cfg,
    run_spatial,
    shrink_mask,
    wants_cifar10,
    zero_masked,
)
from nearsight.ops.checks import check_choice

__all__ = ["QnAViT"]

NAME = "qna_vit"
MIXERS = ("qna", "sasa", "conv", "dwconv")
# What the authors keep from weight decay: W_s, B and the windows' bias tables; the baseline's positions alike.
NO_DECAY = ("tap_scale_weight", "position_bias", "position_weight", "relative_bias", "rel_row", "rel_col")


class PatchEmbed2d(nn.Module):
    """Non-overlapping patches to channels, any image size: [B, in, H, W] → [B, out, ⌈H/p⌉, ⌈W/p⌉], padded on both sides."""

    def __init__(self, in_channels: int, out_channels: int, patch_size: int, **factory: Any) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_channels, out_channels, patch_size, patch_size, bias=False, **factory)

    def pad(self, x: Tensor) -> Tensor:
        """Zeros (False) around the last two axes up to whole patches: ⌊total/2⌋ before, the rest after."""
        rows, columns = -x.shape[-2] % self.patch_size, -x.shape[-1] % self.patch_size
        top, left = self.before(x.shape[-2], x.shape[-1])
        return F.pad(x, [left, columns - left, top, rows - top])

    def before(self, height: int, width: int) -> tuple[int, int]:
        """Rows above and columns left of an image that `pad` adds."""
        return -height % self.patch_size // 2, -width % self.patch_size // 2

    def mask(self, key_mask: Tensor | None) -> Tensor | None:
        return None if key_mask is None else shrink_mask(self.pad(key_mask), self.patch_size)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        check_map(NAME, x, self.proj.in_channels, key_mask)
        y = self.proj(self.pad(zero_masked(x, key_mask)))
        # Channels-last; not by memory_format, which torch.func.vmap does not know.
        return to_nchw(to_channels_last(y).contiguous())


class ConvMixer2d(nn.Module):
    """A convolution where the network has QnA: k×k, or depthwise k×k and 1×1, zeros outside the image and the mask."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: int, depthwise: bool, **factory: Any
    ) -> None:
        super().__init__()
        if kernel_size % 2 == 0:
            raise ArgumentValueError(
                f"{NAME}: got qna_window={kernel_size} for a convolution, wanted an odd window; use 3, 5 or 7."
            )
        self.conv = nn.Conv2d(
            in_channels,
            in_channels if depthwise else out_channels,
            kernel_size,
            stride,
            padding=kernel_size // 2,
            groups=in_channels if depthwise else 1,
            bias=False,
            **factory,
        )
        self.proj = nn.Conv2d(in_channels, out_channels, 1, bias=False, **factory) if depthwise else nn.Identity()

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return self.proj(run_spatial(self.conv, x, key_mask))


class QnABlock(nn.Module):
    """Pre-norm residual block: z' = mix(LN(z)) + z, then MLP(LN(z')) + z'; with stride 2 the first skip is a 1×1 convolution.

    A block with stride 2 drops only its MLP branch, never the mixer.
    """

    def __init__(
        self,
        dim: int,
        out_dim: int,
        mixer: nn.Module,
        *,
        stride: int = 1,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.norm1 = RowNorm2d(dim, **factory)
        self.mixer = mixer
        self.skip = nn.Conv2d(dim, out_dim, 1, stride, bias=False, **factory) if stride > 1 else None
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 and stride == 1 else nn.Identity()
        self.norm2 = RowNorm2d(out_dim, **factory)
        self.mlp = Mlp(out_dim, int(out_dim * mlp_ratio), act_layer=GELUTanh, **factory)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        skip = x if self.skip is None else self.skip(x)
        x = skip + self.drop_path1(self.mixer(self.norm1(x), key_mask))
        return x + self.drop_path2(from_rows(self.mlp(to_rows(self.norm2(x))), x.shape[2:]))


class QnAStage(nn.Module):
    """A down-sampling block (except in the first stage), window-attention blocks, then QnA blocks; all at one resolution."""

    def __init__(self, downsample: QnABlock | None, blocks: list[QnABlock]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)
        self.grad_checkpointing = False

    def mask(self, key_mask: Tensor | None) -> Tensor | None:
        """The mask of this stage's resolution, from that of the stage before."""
        return key_mask if self.downsample is None else shrink_mask(key_mask, 2)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        if self.downsample is not None:
            x = self._run(self.downsample, x, key_mask)
        key_mask = self.mask(key_mask)
        for block in self.blocks:
            x = self._run(block, x, key_mask)
        return zero_masked(x, key_mask)

    def _run(self, block: nn.Module, x: Tensor, key_mask: Tensor | None) -> Tensor:
        if self.grad_checkpointing and self.training:
            return checkpoint(block, x, key_mask)
        return block(x, key_mask)


class QnAViT(nn.Module):
    """QnA-ViT, for images of any size.

    Args:
        in_chans, num_classes, global_pool, drop_rate, drop_path_rate: as in timm's networks. Drop path grows linearly over all
            blocks, the down-sampling ones included.
        embed_dim: channels of the first stage; each later stage has twice as many.
        patch_size: side of the patches the stem turns into pixels.
        qna_depths, sa_depths: QnA and window-attention blocks per stage (window attention comes first).
        qna_heads, sa_heads: their heads per stage; a down-sampling block has twice the QnA heads of the stage it ends.
        qna_window, sa_window: their windows, one number or one per stage.
        num_queries, tap_scale, qna_position, unit_queries: options of `QnA2d`.
        mixer: what the QnA blocks mix with: "qna", "sasa" (local attention), "conv" (k×k) or "dwconv" (depthwise, then 1×1).
        sasa_options: with mixer="sasa", more options of `LocalAttention2d`, as {"proj": True, "per_head_position": True}.
        mlp_ratio: width of the MLPs.

    >>> import timm, torch, nearsight
    >>> timm.create_model("qna_vit_nano")(torch.randn(2, 3, 24, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 64,
        patch_size: int = 4,
        qna_depths: Sequence[int] = (2, 3, 2, 0),
        qna_heads: Sequence[int] = (8, 16, 32, 64),
        qna_window: int | Sequence[int] = 3,
        sa_depths: Sequence[int] = (0, 0, 4, 2),
        sa_heads: Sequence[int] = (2, 4, 8, 16),
        sa_window: int | Sequence[int] = (7, 7, 14, 7),
        num_queries: int = 2,
        tap_scale: str = "tap",
        qna_position: str = "relative",
        unit_queries: bool = True,
        mixer: str = "qna",
        sasa_options: Mapping[str, Any] | None = None,
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice(NAME, "mixer", mixer, MIXERS)
        if sasa_options and mixer != "sasa":
            raise ArgumentValueError(
                f"{NAME}: got sasa_options={dict(sasa_options)!r} with mixer={mixer!r}, wanted mixer='sasa'; leave them out."
            )
        stages = len(qna_depths)
        per_stage = {
            "qna_depths": list(qna_depths),
            "qna_heads": list(qna_heads),
            "qna_window": [qna_window] * stages if isinstance(qna_window, int) else list(qna_window),
            "sa_depths": list(sa_depths),
            "sa_heads": list(sa_heads),
            "sa_window": [sa_window] * stages if isinstance(sa_window, int) else list(sa_window),
        }
        for name, numbers in per_stage.items():
            if len(numbers) != stages:
                raise ArgumentValueError(
                    f"{NAME}: got {name} of {len(numbers)} stages, wanted {stages}, as many as qna_depths."
                )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_classes, self.drop_rate = num_classes, drop_rate
        self.num_features = self.head_hidden_size = embed_dim * 2 ** (stages - 1)
        self.feature_info: list[dict[str, Any]] = []

        def mix(dim: int, out_dim: int, heads: int, window: int, stride: int = 1) -> nn.Module:
            if mixer == "qna":
                return QnA2d(
                    dim,
                    out_dim,
                    window,
                    stride=stride,
                    num_heads=heads,
                    num_queries=num_queries,
                    tap_scale=tap_scale,
                    position=qna_position,
                    unit_queries=unit_queries,
                    **factory,
                )
            if mixer == "sasa":
                options = {"stride": stride, "num_heads": heads, **factory, **(sasa_options or {})}
                return LocalAttention2d(dim, out_dim, window, **options)
            return ConvMixer2d(dim, out_dim, window, stride, depthwise=mixer == "dwconv", **factory)

        total = sum(qna_depths) + sum(sa_depths) + stages - 1
        rates = iter(torch.linspace(0, drop_path_rate, total, device="cpu").tolist() if total else [])
        self.patch_embed = PatchEmbed2d(in_chans, embed_dim, patch_size, **factory)
        self.stages = nn.Sequential()
        dim = embed_dim
        for i in range(stages):
            down = None
            if i > 0:
                # The authors count the down-sampling block as the last of the stage before: its heads and window are that one's.
                heads, window = 2 * per_stage["qna_heads"][i - 1], per_stage["qna_window"][i - 1]
                layer = mix(dim, 2 * dim, heads, window, stride=2)
                down = QnABlock(dim, 2 * dim, layer, stride=2, mlp_ratio=mlp_ratio, drop_path=next(rates), **factory)
                dim *= 2
            blocks: list[QnABlock] = []
            for _ in range(per_stage["sa_depths"][i]):
                window, heads = per_stage["sa_window"][i], per_stage["sa_heads"][i]
                attention = WindowAttention2d(dim, dim, window, num_heads=heads, **factory)
                blocks.append(QnABlock(dim, dim, attention, mlp_ratio=mlp_ratio, drop_path=next(rates), **factory))
            for _ in range(per_stage["qna_depths"][i]):
                layer = mix(dim, dim, per_stage["qna_heads"][i], per_stage["qna_window"][i])
                blocks.append(QnABlock(dim, dim, layer, mlp_ratio=mlp_ratio, drop_path=next(rates), **factory))
            self.stages.append(QnAStage(down, blocks))
            self.feature_info.append({"num_chs": dim, "reduction": patch_size * 2**i, "module": f"stages.{i}"})
        self.norm: nn.Module = RowNorm2d(self.num_features, **factory)
        self.head = ClassifierHead(
            self.num_features, num_classes, pool_type=global_pool, drop_rate=drop_rate, **factory
        )
        self.init_weights()

    def _stages(self) -> list[QnAStage]:
        return cast("list[QnAStage]", list(self.stages))

    @torch.jit.ignore
    def init_weights(self) -> None:
        """Flax's start for what the layers do not initialise themselves: weights that keep the variance, zero biases."""
        own = (QnA2d, WindowAttention2d, LocalAttention2d)
        inside = {id(part) for layer in self.modules() if isinstance(layer, own) for part in layer.modules()}
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d) and id(module) not in inside:
                lecun_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """What the authors exclude. They decay all else, LayerNorm and biases too: switch timm's 1-D rule off for that."""
        return {name for name, _ in self.named_parameters() if name.rpartition(".")[2] in NO_DECAY}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {
            "stem": r"^patch_embed",
            "blocks": r"^stages\.(\d+)"
            if coarse
            else [
                (r"^stages\.(\d+)\.downsample", (0,)),
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
                (r"^norm", (99999,)),
            ],
        }

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self._stages():
            stage.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        # Said outright, because a head without a classifier does not know where it lives.
        weight = self.patch_embed.proj.weight
        self.head.reset(num_classes, global_pool, device=weight.device, dtype=weight.dtype)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        key_mask: Tensor | None = None,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Features of the stages, each before the next one's down-sampling.

        Args:
            x: images [B, in_chans, H, W].
            indices: the stages: a number takes the last n, None all.
            norm: apply the final norm to the last stage's features.
            stop_early: stop at the last stage asked for.
            output_fmt: "NCHW" or "NHWC".
            intermediates_only: return only the list, without the final features.
            key_mask: bool [B, H, W], False where an image is padding; features there are 0.
        """
        check_choice(NAME, "output_fmt", output_fmt, ("NCHW", "NHWC"))
        take, last = feature_take_indices(len(self.stages), _as_list(indices))
        features = []
        x = self.patch_embed(x, key_mask)
        key_mask = self.patch_embed.mask(key_mask)
        stages = self._stages()
        run = stages[: last + 1] if stop_early else stages
        for i, stage in enumerate(run):
            x = stage(x, key_mask)
            key_mask = stage.mask(key_mask)
            if i in take:
                kept = zero_masked(self.norm(x), key_mask) if norm and i == len(stages) - 1 else x
                features.append(kept if output_fmt == "NCHW" else to_channels_last(kept))
        if intermediates_only:
            return features
        # The norm is the last stage's, as wide as that.
        return zero_masked(self.norm(x), key_mask) if len(run) == len(stages) else x, features

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the given stages do not need."""
        take, last = feature_take_indices(len(self.stages), _as_list(indices))
        self.stages = self.stages[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def forward_features(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        x = self.patch_embed(x, key_mask)
        key_mask = self.patch_embed.mask(key_mask)
        for stage in self._stages():
            x = stage(x, key_mask)
            key_mask = stage.mask(key_mask)
        return zero_masked(self.norm(x), key_mask)

    def forward_head(self, x: Tensor, pre_logits: bool = False, key_mask: Tensor | None = None) -> Tensor:
        """Pool and classify. key_mask is that of the images; pooling averages valid pixels only."""
        key_mask = self.patch_embed.mask(key_mask)
        for stage in self._stages():
            key_mask = stage.mask(key_mask)
        x = self.head.drop(global_pool_valid(self.head.global_pool, x, key_mask))
        return x if pre_logits else self.head.fc(x)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return self.forward_head(self.forward_features(x, key_mask), key_mask=key_mask)


def _as_list(indices: int | Sequence[int] | None) -> int | list[int] | None:
    return indices if indices is None or isinstance(indices, int) else list(indices)


PAPER = {"paper_name": "Learned Queries for Efficient Local Attention", "paper_ids": "arXiv:2112.11435"}
NAMES = {"first_conv": "patch_embed.proj", "classifier": "head.fc", **PAPER}

default_cfgs = generate_default_cfgs(
    {
        "qna_vit_tiny": default_cfg(**NAMES),
        "qna_vit_tiny_7x7": default_cfg(**NAMES),
        "qna_vit_small": default_cfg(**NAMES),
        "qna_vit_base": default_cfg(**NAMES),
        "qna_vit_nano": nano_cfg(**NAMES),
        "qna_vit_nano.cifar10": cifar10_cfg("qna_vit_nano.cifar10", pool_size=(8, 8), **NAMES),
    }
)


def _create_qna_vit(variant: str, pretrained: bool = False, **kwargs: Any) -> QnAViT:
    stages = len(kwargs.get("qna_depths", (0,) * 4))
    out_indices = kwargs.pop("out_indices", tuple(range(stages)))
    return build_model_with_cfg(
        QnAViT,
        variant,
        pretrained,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **kwargs,
    )


@register_model
def qna_vit_tiny(pretrained: bool = False, **kwargs: Any) -> QnAViT:
    """QnA-ViT-Tiny, 15.7 M parameters."""
    return _create_qna_vit("qna_vit_tiny", pretrained, **{"drop_path_rate": 0.05, **kwargs})


@register_model
def qna_vit_tiny_7x7(pretrained: bool = False, **kwargs: Any) -> QnAViT:
    """QnA-ViT-Tiny with 7×7 QnA windows, 15.8 M parameters."""
    options = {"qna_window": 7, "drop_path_rate": 0.05}
    return _create_qna_vit("qna_vit_tiny_7x7", pretrained, **{**options, **kwargs})


@register_model
def qna_vit_small(pretrained: bool = False, **kwargs: Any) -> QnAViT:
    """QnA-ViT-Small, 25.0 M parameters."""
    options = {"qna_depths": (2, 3, 6, 0), "sa_depths": (0, 0, 12, 2), "drop_path_rate": 0.2}
    return _create_qna_vit("qna_vit_small", pretrained, **{**options, **kwargs})


@register_model
def qna_vit_base(pretrained: bool = False, **kwargs: Any) -> QnAViT:
    """QnA-ViT-Base, 55.7 M parameters."""
    options = {
        "embed_dim": 96,
        "qna_depths": (2, 3, 6, 0),
        "qna_heads": (6, 12, 24, 48),
        "sa_depths": (0, 0, 12, 2),
        "sa_heads": (3, 6, 12, 24),
        "drop_path_rate": 0.5,
    }
    return _create_qna_vit("qna_vit_base", pretrained, **{**options, **kwargs})


@register_model
def qna_vit_nano(pretrained: bool = False, **kwargs: Any) -> QnAViT:
    """A small member of three stages for 8–64 px images and CPUs, 2×2 patches, 0.40 M parameters.

    With the tag cifar10: no patches (32×32, 16×16, 8×8), wider and deeper, 0.90 M parameters.
    """
    options: dict[str, Any] = {
        "num_classes": 10,
        "embed_dim": 24,
        "patch_size": 2,
        "qna_depths": (1, 2, 1),
        "qna_heads": (3, 6, 12),
        "tap_scale": "ones",  # blocks that mix from the first step: a small network has no 300 epochs to start slowly
        "sa_depths": (0, 0, 1),
        "sa_heads": (1, 2, 3),
        "sa_window": 4,
    }
    if wants_cifar10(pretrained, kwargs):
        options |= {
            "embed_dim": 32,
            "patch_size": 1,
            "qna_depths": (2, 2, 2),
            "qna_heads": (4, 8, 16),
            "sa_heads": (1, 2, 4),
            "sa_window": 8,
        }
    else:
        # timm takes the cfg that has weights for the plain name's too.
        kwargs["pretrained_cfg_overlay"] = {"pool_size": (4, 4), **(kwargs.get("pretrained_cfg_overlay") or {})}
    return _create_qna_vit("qna_vit_nano", pretrained, **{**options, **kwargs})
