"""The convolution a layer would replace: same channels, same map, in the faster of its two layouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from nearsight.bench.contest import Runner, random_source

__all__ = ["LAYOUTS", "convolution_runners"]

LAYOUTS = {"NCHW": torch.contiguous_format, "channels-last": torch.channels_last}


def convolution_runners(values: Tensor, channels: int, kernel: int, *, depthwise: bool = False) -> Sequence[Runner]:
    """A k×k convolution of a map [B, H, W, …] with as many channels out as in: NCHW and channels-last."""
    batch, height, width = values.shape[:3]
    groups = channels if depthwise else 1
    draw = random_source(values.device)
    runners = []
    for name, layout in LAYOUTS.items():
        x = draw(batch, channels, height, width, dtype=values.dtype)
        fan_in = kernel * kernel * channels // groups
        weight = draw(channels, channels // groups, kernel, kernel, dtype=values.dtype, std=fan_in**-0.5)
        leaves = [t.to(memory_format=layout).detach().requires_grad_() for t in (x, weight)]

        def forward(x: Tensor = leaves[0], weight: Tensor = leaves[1]) -> Tensor:
            return F.conv2d(x, weight, padding=kernel // 2, groups=groups)

        runners.append(Runner(forward, leaves, name))
    return runners
