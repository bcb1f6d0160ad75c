"""Auto-encoders: images through a narrow map and back, by learned queries (QnA) or by convolutions, on either side.

Learned Queries for Efficient Local Attention, Arar, Shamir, Bermano, CVPR 2022, https://arxiv.org/abs/2112.11435
The supplement's section 7 lists three layers down and three up, five of each. It gives neither widths nor what joins them to
the colours, so ours are: 32, 64, 128, 256, 512 channels, a pointwise convolution at either end, alike for all nine pairings; a
3×3 transposed convolution, so that it has the weights of the bilinear one; heads of 8 channels, as in QnA-ViT. It names no
activation and there is none; `activation="gelu"` puts one behind every layer. The QnA layers keep W_s, the scale per tap.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._manipulate import checkpoint
from torch import Tensor, nn

from nearsight.errors import ArgumentValueError
from nearsight.layers.common import check_channels, check_map
from nearsight.layers.qna import QnA2d, QnAUpsample2d
from nearsight.models.common import RowNorm2d, default_cfg
from nearsight.ops.checks import check_choice

__all__ = ["DECODERS", "ENCODERS", "AutoEncoder"]

ACTIVATIONS: Mapping[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}

Level = Callable[..., dict[str, nn.Module]]


class InstanceNorm2d(nn.InstanceNorm2d):
    """Learned scale and shift; and a batch of no images, which torch's own refuses."""

    def __init__(self, channels: int, **factory: Any) -> None:
        super().__init__(channels, affine=True, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[0] else x


def _conv_down(inner: int, outer: int, heads: int, **factory: Any) -> dict[str, nn.Module]:
    """ConvS2-IN."""
    return {
        "conv": nn.Conv2d(inner, outer, 3, stride=2, padding=1, bias=False, **factory),
        "norm": InstanceNorm2d(outer, **factory),
    }


def _pool_down(inner: int, outer: int, heads: int, **factory: Any) -> dict[str, nn.Module]:
    """Conv-IN-Max."""
    conv = nn.Conv2d(inner, outer, 3, padding=1, bias=False, **factory)
    return {"conv": conv, "norm": InstanceNorm2d(outer, **factory), "pool": nn.MaxPool2d(2)}


def _qna_down(inner: int, outer: int, heads: int, **factory: Any) -> dict[str, nn.Module]:
    """LN-QnA, with one query."""
    return {
        "norm": RowNorm2d(inner, **factory),
        "qna": QnA2d(inner, outer, 3, stride=2, num_heads=heads, num_queries=1, **factory),
    }


def _bilinear_up(inner: int, outer: int, heads: int, **factory: Any) -> dict[str, nn.Module]:
    """Bilinear-Conv-IN."""
    conv = nn.Conv2d(inner, outer, 3, padding=1, bias=False, **factory)
    grow = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
    return {"grow": grow, "conv": conv, "norm": InstanceNorm2d(outer, **factory)}


def _transposed_up(inner: int, outer: int, heads: int, **factory: Any) -> dict[str, nn.Module]:
    """ConvTranspose-IN."""
    conv = nn.ConvTranspose2d(inner, outer, 3, stride=2, padding=1, output_padding=1, bias=False, **factory)
    return {"conv": conv, "norm": InstanceNorm2d(outer, **factory)}


def _qna_up(inner: int, outer: int, heads: int, **factory: Any) -> dict[str, nn.Module]:
    """LN-UQnA."""
    # Without W_s each new pixel is an average of the same values: a 1×1 map could only grow into one flat colour.
    attention = QnAUpsample2d(inner, outer, 3, scale_factor=2, num_heads=heads, tap_scale="tap", **factory)
    return {"norm": RowNorm2d(inner, **factory), "qna": attention}


ENCODERS: Mapping[str, Level] = {"qna": _qna_down, "conv": _conv_down, "pool": _pool_down}
DECODERS: Mapping[str, Level] = {"qna": _qna_up, "bilinear": _bilinear_up, "transposed": _transposed_up}


class AutoEncoder(nn.Module):
    """Halve the image once per width, then double it as often.

    [B, in_chans, H, W] → code [B, widths[-1], H/2ⁿ, W/2ⁿ] → [B, in_chans, H, W], n = len(widths); H and W divide by 2ⁿ.

    Args:
        encoder: "qna": LayerNorm, 3×3 QnA with one query and stride 2; "conv": 3×3 convolution with stride 2, instance norm;
            "pool": 3×3 convolution, instance norm, 2×2 maximum.
        decoder: "qna": LayerNorm, 3×3 up-sampling QnA; "bilinear": bilinear ×2, 3×3 convolution, instance norm;
            "transposed": 3×3 transposed convolution with stride 2, instance norm.
        widths: channels behind each encoder level; the decoder goes back through them.
        head_dim: channels of one attention head.
        activation: None, "relu", "gelu" or "silu" behind the mixing layer (and its norm) of every level.
        in_chans: channels of the image.

    >>> import timm, torch, nearsight
    >>> model = timm.create_model("qna_autoencoder", widths=(8, 8, 16, 16, 32), decoder="bilinear")
    >>> x = torch.rand(2, 3, 64, 96)
    >>> model.encode(x).shape, model(x).shape
    (torch.Size([2, 32, 2, 3]), torch.Size([2, 3, 64, 96]))
    """

    def __init__(
        self,
        encoder: str = "qna",
        decoder: str = "qna",
        widths: Sequence[int] = (32, 64, 128, 256, 512),
        head_dim: int = 8,
        activation: str | None = None,
        in_chans: int = 3,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        who = "qna_autoencoder"
        check_choice(who, "encoder", encoder, tuple(ENCODERS))
        check_choice(who, "decoder", decoder, tuple(DECODERS))
        if activation is not None:
            check_choice(who, "activation", activation, tuple(ACTIVATIONS))
        if not widths:
            raise ArgumentValueError(f"{who}: got no widths, wanted the channels of each level; the default has five.")
        check_channels(
            who, in_chans=in_chans, head_dim=head_dim, **{f"widths[{i}]": width for i, width in enumerate(widths)}
        )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_channels, self.reduction = in_chans, 2 ** len(widths)
        self.encoder_kind, self.decoder_kind = encoder, decoder
        self.num_features = widths[-1]
        self.grad_checkpointing = False

        def level(make: Level, kind: str, inner: int, outer: int) -> nn.Sequential:
            if kind == "qna" and outer % head_dim:
                raise ArgumentValueError(
                    f"{who}: got a width of {outer} and head_dim={head_dim}, wanted widths that divide by it; change one of "
                    f"them."
                )
            parts = make(inner, outer, outer // head_dim, **factory)
            act = {} if activation is None else {"act": ACTIVATIONS[activation]()}
            pool = {"pool": parts.pop("pool")} if "pool" in parts else {}
            return nn.Sequential(OrderedDict({**parts, **act, **pool}))

        steps = list(pairwise([widths[0], *widths]))
        self.stem = nn.Conv2d(in_chans, widths[0], 1, **factory)
        self.encoder = nn.Sequential(*[level(ENCODERS[encoder], encoder, a, b) for a, b in steps])
        self.decoder = nn.Sequential(*[level(DECODERS[decoder], decoder, b, a) for a, b in reversed(steps)])
        self.head = nn.Conv2d(widths[0], in_chans, 1, **factory)
        self.init_weights()

    @torch.jit.ignore
    def init_weights(self) -> None:
        """Positions and tap scales start as standard normal numbers, so that heads and queries differ from the first step.

        QnA-ViT's start (no position, W_s near 0) makes every layer the same blur; a transformer's skips carry the image past
        it, here nothing does.
        """
        for module in self.modules():
            if isinstance(module, QnA2d | QnAUpsample2d):
                for start in (module.position_bias, module.tap_scale_weight):
                    assert start is not None
                    nn.init.normal_(start)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Positions and tap scales, as in QnA-ViT."""
        spared = ("position_bias", "tap_scale_weight")
        return {name for name, _ in self.named_parameters() if name.rpartition(".")[2] in spared}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"stem": r"^stem", "encoder": r"^encoder\.(\d+)", "decoder": r"^decoder\.(\d+)", "head": r"^head"}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def _run(self, levels: nn.Sequential, x: Tensor) -> Tensor:
        for each in levels:
            x = checkpoint(each, x) if self.grad_checkpointing and self.training else each(x)
        return x

    def encode(self, x: Tensor) -> Tensor:
        """The code of images: [B, in_chans, H, W] → [B, widths[-1], H/2ⁿ, W/2ⁿ]."""
        who, factor = "qna_autoencoder", self.reduction
        check_map(who, x, self.in_channels)
        height, width = x.shape[2:]
        if height % factor or width % factor or not height or not width:
            raise ArgumentValueError(
                f"{who}: got images of {height}×{width}, wanted rows and columns that divide by {factor}; resize or crop them."
            )
        if self.encoder_kind == "conv" and height == width == factor:
            raise ArgumentValueError(
                f"{who}: got images of {height}×{width} with encoder='conv', whose last instance norm would see one pixel and "
                f"forget it; wanted a larger image or encoder='pool'."
            )
        return self._run(self.encoder, self.stem(x))

    def decode(self, code: Tensor) -> Tensor:
        """The images of a code: [B, widths[-1], h, w] → [B, in_chans, h·2ⁿ, w·2ⁿ]."""
        check_map("qna_autoencoder", code, self.num_features)
        return self.head(self._run(self.decoder, code))

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


default_cfgs = generate_default_cfgs(
    {
        # num_classes below 0: timm then hands none to the model, which has no classifier.
        "qna_autoencoder": default_cfg(
            num_classes=-1,
            input_size=(3, 256, 256),
            min_input_size=(3, 32, 32),
            pool_size=(8, 8),
            crop_pct=1.0,
            interpolation="bilinear",
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
            first_conv="stem",
            classifier=None,
        )
    }
)


@register_model
def qna_autoencoder(pretrained: bool = False, **kwargs: Any) -> AutoEncoder:
    """Five QnA layers down and five up; `encoder` and `decoder` choose the supplement's others. 1.15 M parameters."""
    if kwargs.pop("features_only", False):
        raise ArgumentValueError(
            "qna_autoencoder: got features_only=True, wanted a backbone such as qna_vit_tiny; an auto-encoder's features are "
            "model.encode(x)."
        )
    return build_model_with_cfg(AutoEncoder, "qna_autoencoder", pretrained, kwargs_filter=("global_pool",), **kwargs)
