"""The demo's picture: what one pixel of each image attends to in the first attention layers of several networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nearsight.viz.maps import LayerMaps, attention_layers, attention_maps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_maps"]


def draw_maps(models: Mapping[str, nn.Module], images: Tensor, pixels: list[tuple[int, int]], depth: int = 2) -> Figure:
    """A row per image [N, C, H, W]: the image, its pixel marked, then that pixel's weights in each network's first layers.

    Heads are averaged, and QnA's learned queries too; each map has its own scale.
    """
    from matplotlib.figure import Figure

    first = {name: list(attention_layers(model))[:depth] for name, model in models.items()}
    rows: list[list[LayerMaps]] = []
    for image, pixel in zip(images, pixels, strict=True):
        found = [attention_maps(m, image[None], first[name], [pixel], received=False) for name, m in models.items()]
        rows.append([maps for of_model in found for maps in of_model.values()])
    titles = [
        f"{name}\nlayer {number}, {maps.grid[0]}×{maps.grid[1]}"
        for (name, number), maps in zip(
            [(name, i + 1) for name, layers in first.items() for i in range(len(layers))], rows[0], strict=True
        )
    ]
    figure = Figure(figsize=(1.9 * (1 + len(titles)), 1.9 * len(rows) + 0.5), layout="constrained")
    axes = figure.subplots(len(rows), 1 + len(titles), squeeze=False)
    for line, (image, pixel, shown) in enumerate(zip(images, pixels, rows, strict=True)):
        axes[line, 0].imshow(image[0].numpy(), cmap="gray_r")
        axes[line, 0].plot(pixel[1], pixel[0], "s", mfc="none", mec="tab:red", ms=9, mew=2)
        for ax, maps in zip(axes[line, 1:], shown, strict=True):
            assert maps.softmax is not None
            weights = maps.softmax[0, 0].mean((0, 1))
            # Grey: outside the window, not seen at all.
            ax.set_facecolor("0.85")
            ax.imshow(weights.where(weights != 0, torch.nan).numpy(), cmap="viridis")
            y, x = maps.centres[0]
            ax.plot(x, y, "s", mfc="none", mec="#d55e00", ms=6, mew=1.5)
    for ax, title in zip(axes[0], ["test image,\none pixel marked", *titles], strict=True):
        ax.set_title(title, fontsize=8)
    for ax in axes.flat:
        ax.set_xticks([])
        ax.set_yticks([])
    return figure
