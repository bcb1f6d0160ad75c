"""Draw what the networks that ship attend to on test images: docs/images/results-attention.png.

python benchmarks/evidence_maps.py DATA        # the folder of CIFAR-10
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from evidence_rows import HERE, chosen

from nearsight.viz.maps import LayerMaps, attention_layers, attention_maps

PICTURE = HERE.parent / "docs" / "images" / "results-attention.png"
# One pixel (y, x) of each image, on something with an edge beside it.
SHOWN = {0: (11, 20), 1: (16, 9), 10: (20, 15), 13: (9, 13)}


def _weights(axis: Any, maps: LayerMaps, pixel: tuple[int, int]) -> None:
    """One pixel's weights, heads averaged; grey: outside the window, not seen at all."""
    assert maps.softmax is not None
    weights = maps.on_image(maps.softmax[0, 0].mean((0, 1)))
    axis.set_facecolor("0.85")
    axis.imshow(weights.where(weights != 0, torch.nan).numpy(), cmap="viridis", vmin=0)
    axis.plot(pixel[1], pixel[0], "s", mfc="none", mec="tab:red", ms=6, mew=1.5)


def draw(data: str) -> Any:
    """A row per image: the image, then per network one pixel's weights in its first layer and what its last one looks at."""
    from matplotlib.figure import Figure

    from nearsight import weights
    from nearsight.train.data.sources import open_source
    from nearsight.train.inference import load_network, pixels_of

    rows = [row for row in chosen(["nano/*"]) if row.ship in weights.names()]
    networks = {row.says: load_network(weights.find(str(row.ship)) or "") for row in rows}
    networks = {says: network for says, network in networks.items() if attention_layers(network.model)}
    first = next(iter(networks.values()))
    classes = first.card["classes"]
    test: Any = open_source(first.data.model_copy(update={"root": data})).evaluation
    figure = Figure(figsize=(1.75 * (1 + 2 * len(networks)), 1.95 * len(SHOWN) + 0.4), dpi=110, layout="constrained")
    grid = figure.subplots(len(SHOWN), 1 + 2 * len(networks), squeeze=False)
    for axes, (index, pixel) in zip(grid, SHOWN.items(), strict=True):
        image, label = test.read(index)
        axes[0].imshow(image)
        axes[0].plot(pixel[1], pixel[0], "s", mfc="none", mec="tab:red", ms=6, mew=2)
        axes[0].set_ylabel(classes[label])
        for number, (says, network) in enumerate(networks.items()):
            pixels = pixels_of(network, [image])
            layers = list(attention_layers(network.model))
            found = attention_maps(network.model, pixels, [layers[0], layers[-1]], [pixel])
            near, far = found[layers[0]], found[layers[-1]]
            left, right = axes[1 + 2 * number : 3 + 2 * number]
            _weights(left, near, pixel)
            if far.kind == "explicit":  # its map knows nothing of the image
                _weights(right, far, pixel)
            else:
                assert far.received is not None
                right.imshow(image.convert("L"), cmap="gray")
                right.imshow(far.on_image(far.received[0].sum(0), smooth=True).numpy(), cmap="inferno", alpha=0.6)
            with torch.no_grad():
                said = classes[int(network.model(pixels).argmax())]
            right.set_xlabel(f"says {said}", fontsize=8)
            if index == next(iter(SHOWN)):
                left.set_title(f"{says}\nfirst layer, one pixel", fontsize=8)
                what = "the same pixel" if far.kind == "explicit" else "received"
                right.set_title(f"last layer, {far.grid[0]}×{far.grid[1]},\n{what}", fontsize=8)
    for axis in grid.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    return figure


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="evidence_maps", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", help="the folder of CIFAR-10")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args(words)
    draw(options.data).savefig(options.picture, metadata={"Software": None})
    print(f"wrote {options.picture}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
