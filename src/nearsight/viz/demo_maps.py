"""What one pixel attends to in each attention layer of a small network, from the ops' own weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from nearsight.layers import ExplicitAttention2d, LocalAttention2d, QnA2d
from nearsight.ops import explicit_weights, local_attention_weights, qna_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PixelMap", "draw_maps", "pixel_maps"]

LAYERS = (LocalAttention2d, QnA2d, ExplicitAttention2d)


class PixelMap(NamedTuple):
    """A layer's weights [H, W] for the output pixel nearest to a pixel of the image, heads averaged."""

    layer: str
    query: tuple[int, int]
    weights: Tensor


@torch.no_grad()
def pixel_maps(model: nn.Module, image: Tensor, pixel: tuple[int, int]) -> list[PixelMap]:
    """The weights with which each attention layer of `model` gathers for one pixel of an image [C, H, W].

    >>> import timm, torch, nearsight
    >>> model = timm.create_model("sasa_resnet_nano", in_chans=1).eval()
    >>> maps = pixel_maps(model, torch.randn(1, 12, 16), (5, 9))
    >>> bool(abs(maps[0].weights.sum() - 1) < 1e-5)
    True
    """
    seen: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, LAYERS):

            def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, name: str = name) -> None:
                seen[name] = inputs[0].detach()

            handles.append(module.register_forward_hook(keep))
    try:
        model.eval()(image[None])
    finally:
        for handle in handles:
            handle.remove()
    modules = dict(model.named_modules())
    maps = []
    for name, x in seen.items():
        height, width = x.shape[-2:]
        query = (pixel[0] * height // image.shape[1], pixel[1] * width // image.shape[2])
        maps.append(PixelMap(name, query, _weights(modules[name], x, query)))
    return maps


def _weights(layer: nn.Module, x: Tensor, query: tuple[int, int]) -> Tensor:
    size = (x.shape[2], x.shape[3])
    if isinstance(layer, LocalAttention2d):
        q, k, _ = layer.project(x)
        taps = local_attention_weights(
            q,
            k,
            window=layer.kernel_size,
            rel_row=layer.rel_row,
            rel_col=layer.rel_col,
            dilation=layer.dilation,
            border=layer.border,
        )[0, query[0], query[1]].mean(0)
        return _spread(taps, layer.kernel_size, layer.dilation, query, size)
    if isinstance(layer, QnA2d):
        scores, _ = layer.project(x)
        bias, _ = layer.tables()
        weights = qna_weights(scores, window=layer.kernel_size, position_bias=bias)[0, query[0], query[1]]
        return _spread(weights.mean((0, 1)), layer.kernel_size, (1, 1), query, size)
    assert isinstance(layer, ExplicitAttention2d)
    return explicit_weights(size, kind=layer.kind, radius=layer.radius, offset=layer.offset, queries=[query])[
        0, 0
    ].mean(0)


def _spread(
    taps: Tensor, window: tuple[int, int], dilation: tuple[int, int], query: tuple[int, int], size: tuple[int, int]
) -> Tensor:
    """A window's taps [kh·kw] at their pixels of an empty map."""
    out = taps.new_zeros(size)
    for number, weight in enumerate(taps):
        row = query[0] + (number // window[1] - (window[0] - 1) // 2) * dilation[0]
        column = query[1] + (number % window[1] - (window[1] - 1) // 2) * dilation[1]
        if 0 <= row < size[0] and 0 <= column < size[1]:
            out[row, column] += weight
    return out


def draw_maps(models: Mapping[str, nn.Module], images: Tensor, pixels: list[tuple[int, int]], depth: int = 2) -> Figure:
    """A row per image [N, C, H, W]: the image, its pixel marked, then that pixel's weights in each network's first layers."""
    from matplotlib.figure import Figure

    rows = [
        {name: pixel_maps(m, image, p) for name, m in models.items()} for image, p in zip(images, pixels, strict=True)
    ]
    shown = [(name, i) for name, maps in rows[0].items() for i in range(min(depth, len(maps)))]
    figure = Figure(figsize=(1.9 * (1 + len(shown)), 1.9 * len(rows) + 0.5), layout="constrained")
    axes = figure.subplots(len(rows), 1 + len(shown), squeeze=False)
    for line, (image, pixel, maps) in enumerate(zip(images, pixels, rows, strict=True)):
        axes[line, 0].imshow(image[0].numpy(), cmap="gray_r")
        axes[line, 0].plot(pixel[1], pixel[0], "s", mfc="none", mec="tab:red", ms=9, mew=2)
        for column, (name, number) in enumerate(shown, 1):
            one, ax = maps[name][number], axes[line, column]
            # Grey: outside the window, not seen at all.
            ax.set_facecolor("0.85")
            ax.imshow(one.weights.where(one.weights != 0, torch.nan).numpy(), cmap="magma")
            ax.plot(one.query[1], one.query[0], "s", mfc="none", mec="tab:cyan", ms=6, mew=1.5)
            if line == 0:
                ax.set_title(f"{name}\nlayer {number + 1}, {one.weights.shape[0]}×{one.weights.shape[1]}", fontsize=8)
    axes[0, 0].set_title("test image,\none pixel marked", fontsize=8)
    for ax in axes.flat:
        ax.set_xticks([])
        ax.set_yticks([])
    return figure
