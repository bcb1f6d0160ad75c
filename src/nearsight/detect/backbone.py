"""A timm network as the source of feature maps, with its padding mask."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
from timm.layers.norm_act import freeze_batch_norm_2d
from timm.models import load_state_dict
from torch import Tensor, nn

from nearsight.errors import ArgumentValueError
from nearsight.models.common import shrink_mask, zero_masked
from nearsight.ops.checks import check_choice

__all__ = ["TimmFeatures", "accepts_mask", "load_backbone_weights"]


class TimmFeatures(nn.Module):
    """Maps of the given strides from a timm network: [B, 3, H, W] → a list of [B, C_i, ⌈H/s_i⌉, ⌈W/s_i⌉] and their masks.

    Networks of nearsight keep the padding out of every layer (`forward_intermediates(key_mask=…)`); any other sees zeros
    there, as in a plain padded batch.

    Args:
        name: a timm network.
        strides: which maps, by their distance between pixels.
        pretrained: timm's own weights, where it has some.
        weights: a file of weights of the classification network; its classifier is left out.
        norm: "train" lets BatchNorms learn; "frozen" fixes statistics and scales, for weights that were loaded and
            batches too small to measure them.
        options: keywords of the network.

    >>> import torch
    >>> features = TimmFeatures("sasa_resnet_nano", (2, 4))
    >>> maps, masks = features(torch.rand(1, 3, 10, 12))
    >>> [tuple(m.shape) for m in maps], masks
    ([(1, 128, 5, 6), (1, 192, 3, 3)], [None, None])
    """

    def __init__(
        self,
        name: str,
        strides: Sequence[int] = (8, 16, 32),
        *,
        pretrained: bool = False,
        weights: str | Path | None = None,
        norm: str = "train",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_choice("TimmFeatures", "norm", norm, ("train", "frozen"))
        model: Any = timm.create_model(name, pretrained=pretrained, **(options or {}))
        if weights is not None:
            load_backbone_weights(model, weights)
        infos: Any = getattr(model.feature_info, "info", model.feature_info)
        known = {info["reduction"]: i for i, info in enumerate(infos)}
        missing = [stride for stride in strides if stride not in known]
        if missing:
            raise ArgumentValueError(
                f"TimmFeatures: got strides={tuple(strides)}, wanted some of {tuple(known)}: {name} has no map of stride "
                f"{missing[0]}."
            )
        self.indices = [known[stride] for stride in strides]
        self.strides = tuple(strides)
        self.channels = [int(infos[i]["num_chs"]) for i in self.indices]
        self.mean, self.std = (tuple(model.pretrained_cfg[key]) for key in ("mean", "std"))
        self.masked = accepts_mask(model)
        model.prune_intermediate_layers(self.indices, prune_norm=True, prune_head=True)
        self.model: Any = freeze_batch_norm_2d(model) if norm == "frozen" else model

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> tuple[list[Tensor], list[Tensor | None]]:
        options: dict[str, Any] = {"key_mask": key_mask} if self.masked else {}
        maps = self.model.forward_intermediates(
            zero_masked(x, key_mask), self.indices, stop_early=True, intermediates_only=True, **options
        )
        return maps, [shrink_mask(key_mask, stride) for stride in self.strides]


def accepts_mask(model: Any) -> bool:
    """Whether a network keeps padding out of its layers, as those of nearsight do.

    >>> accepts_mask(timm.create_model("qna_vit_nano")), accepts_mask(timm.create_model("test_resnet"))
    (True, False)
    """
    return "key_mask" in inspect.signature(model.forward_intermediates).parameters


def load_backbone_weights(model: nn.Module, path: str | Path) -> None:
    """Fill a classification network from a file, all but its classifier, or say what is missing or left over."""
    cfg: Any = model.pretrained_cfg
    classifier = f"{cfg['classifier']}."
    state = {k: v for k, v in load_state_dict(str(path)).items() if not k.startswith(classifier)}
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [key for key in missing if not key.startswith(classifier)]
    for what, keys in (("lacks", missing), ("has an unknown", unexpected)):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ArgumentValueError(
                f"{path}: {what} {keys[0]}{more}, wanted the weights of {cfg['architecture']}; check the backbone and its "
                f"options."
            )
