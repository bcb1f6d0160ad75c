"""A padding mask's way through a ResNet: stem, pooling, four stages of blocks, head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.models._features import feature_take_indices
from timm.models._manipulate import checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from nearsight.errors import ArgumentValueError
from nearsight.layers.common import check_map
from nearsight.models.common import global_pool_valid, run_spatial, shrink_mask, zero_masked
from nearsight.ops.checks import check_choice

__all__ = ["STAGES", "MaskedResNetMixin", "check_letters", "check_per_stage"]

STAGES = ("layer1", "layer2", "layer3", "layer4")


def check_letters(network: str, stages: Any, attention: str, convolution: str, example: str) -> None:
    """Refuse anything but a letter per stage: 'a' (what `attention` says) or 'c' (what `convolution` says)."""
    if not isinstance(stages, str) or len(stages) != len(STAGES) or set(stages) - {"a", "c"}:
        raise ArgumentValueError(
            f"{network}: got stages={stages!r}, wanted four letters, one per stage, 'a' for {attention} or 'c' for "
            f"{convolution}, such as {example!r}."
        )


def check_per_stage(network: str, **numbers: Any) -> None:
    """Refuse anything but four ints of at least 1, one per stage."""
    for name, given in numbers.items():
        whole = isinstance(given, Sequence) and all(isinstance(n, int) and n >= 1 for n in given)
        if not whole or len(given) != len(STAGES):
            raise ArgumentValueError(f"{network}: got {name}={given!r}, wanted four ints of at least 1, one per stage.")


class MaskedResNetMixin(nn.Module):
    """The forward methods of a ResNet with timm's attribute names, with `key_mask` as a last argument.

    Blocks are called as block(x, key_mask) and have a `stride`. key_mask is bool [B, H, W], True where the image has a
    pixel: the padding of a batch of unequal images. No convolution, attention or pooling sees what lies outside.
    """

    conv1: Any
    bn1: Any
    act1: Any
    maxpool: Any
    global_pool: Any
    fc: Any
    in_chans: int
    drop_rate: float
    grad_checkpointing: bool
    feature_info: list[dict[str, Any]]
    # How much the first convolution and the pooling after it shrink the map.
    stem_stride: int
    pool_stride: int

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        key_mask: Tensor | None = None,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The stem's map (before its pooling) and those of the four stages, zero where key_mask is False.

        Args:
            indices: which of the five; the last n for an int; all for None.
            norm: as in timm; these maps have no final norm.
            stop_early: stop after the last map asked for.
            output_fmt: "NCHW".
            intermediates_only: leave out the final map, which otherwise comes first.
            key_mask: bool [B, H, W], True where the image has a pixel.
        """
        check_choice(type(self).__name__, "output_fmt", output_fmt, ("NCHW",))
        take, last = feature_take_indices(5, indices)
        intermediates = []
        if 0 in take:
            x, key_mask = self._stem(x, key_mask)
            intermediates.append(zero_masked(x, key_mask))
            x, key_mask = self._pool(x, key_mask)
        else:
            x, key_mask = self._pooled_stem(x, key_mask)
        for i, name in enumerate(STAGES[:last] if stop_early else STAGES, start=1):
            x, key_mask = self._stage(name, x, key_mask)
            if i in take:
                intermediates.append(zero_masked(x, key_mask))
        return intermediates if intermediates_only else (zero_masked(x, key_mask), intermediates)

    def forward_features(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        x, key_mask = self._pooled_stem(x, key_mask)
        for name in STAGES:
            x, key_mask = self._stage(name, x, key_mask)
        return zero_masked(x, key_mask)

    def forward_head(self, x: Tensor, pre_logits: bool = False, key_mask: Tensor | None = None) -> Tensor:
        """Pool the final map and classify; key_mask is the image's, [B, H, W]."""
        x = global_pool_valid(self.global_pool, x, shrink_mask(key_mask, self.feature_info[-1]["reduction"]))
        if self.drop_rate:
            x = F.dropout(x, p=float(self.drop_rate), training=self.training)
        return x if pre_logits else self.fc(x)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return self.forward_head(self.forward_features(x, key_mask), key_mask=key_mask)

    def _stem(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        check_map(type(self).__name__, x, self.in_chans, key_mask)
        x = self.act1(self.bn1(run_spatial(self.conv1, x, key_mask)))
        return x, shrink_mask(key_mask, self.stem_stride)

    def _pooled_stem(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Stem and pooling, for who does not need the map between them."""
        return self._pool(*self._stem(x, key_mask))

    def _pool(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        small = shrink_mask(key_mask, self.pool_stride)
        if key_mask is not None:
            # Not 0: after other activations than ReLU that would win over what the image has at its border.
            x = x.masked_fill(~key_mask[:, None], torch.finfo(x.dtype).min)
        return zero_masked(self.maxpool(x), small), small

    def _stage(self, name: str, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        for block in getattr(self, name).children():
            if self.grad_checkpointing:
                x = checkpoint(block, x, key_mask)
            else:
                x = block(x, key_mask)
            key_mask = shrink_mask(key_mask, block.stride)
        return x, key_mask
