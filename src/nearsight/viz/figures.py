"""The papers' attention figures, from `attention_maps` and from the layers' own parameters. Needs the extra `viz`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nearsight.layers import AttentionStem2d, ExplicitAttention2d, LocalAttention2d
from nearsight.layers.relative_attention import RelativeAttention2d
from nearsight.viz.maps import LayerMaps
from nearsight.viz.panels import DIVERGING, SEQUENTIAL, Drawing, Sheet, chosen_heads, file_name, scale_of

__all__ = [
    "Picture",
    "draw_embeddings",
    "draw_given",
    "draw_kernels",
    "draw_mixture",
    "draw_parts",
    "draw_received",
    "first_radii",
    "grouped",
    "learned_radii",
]

Pair = tuple[int, int]
KINDS = {
    "local": "local attention",
    "stem": "attention stem",
    "qna": "QnA",
    "qna_upsample": "QnA up-sampling",
    "window": "window attention",
    "explicit": "explicit attention",
    "global": "global attention",
}


class Picture(NamedTuple):
    """An input image as it is drawn: its name, and [H, W] or [H, W, 3] in 0…1."""

    name: str
    shown: Any


def draw_received(picture: Picture, maps: LayerMaps, heads: Sequence[int] | None = None, index: int = 0) -> Drawing:
    """Per head, the attention each location receives from all queries, over the image (QnA's Figure 1).

    >>> import nearsight, torch
    >>> maps = nearsight.attention_maps(nearsight.LocalAttention2d(1, 16, num_heads=8), torch.rand(1, 1, 12, 16))
    >>> drawing = draw_received(Picture("noise", np.zeros((12, 16))), maps[""])
    >>> drawing.name, drawing.numbers["received"].shape
    ('noise_received', (8, 12, 16))
    """
    assert maps.received is not None
    received = _numpy(maps.received[index])
    over = _numpy(maps.on_image(maps.received[index], smooth=True))
    shown = chosen_heads(heads, len(received))
    sheet = Sheet(1 + len(shown), maps.image_size, f"{_who(maps)}: attention received from all queries")
    sheet.picture(sheet.axes[0], picture.shown)
    sheet.label(sheet.axes[0], "image")
    # A few locations may receive ten times what the others do: the bar's ends are pointed where colours stop.
    low, high = np.quantile(over[shown], (0.005, 0.995)).tolist() if shown else (0.0, 1.0)
    # The image shows through as light and shade: pale enough to leave the colours as the bar has them.
    light = picture.shown if picture.shown.ndim == 2 else picture.shown.mean(-1)
    image = None
    for axis, head in zip(sheet.axes[1:], shown, strict=True):
        axis.imshow(light, cmap="gray", vmin=-1.5, vmax=1, interpolation="nearest")
        image = axis.imshow(over[head], cmap=SEQUENTIAL, vmin=low, vmax=high, alpha=0.8, interpolation="nearest")
        sheet.label(axis, f"head {head}")
    if image is not None:
        sheet.colour_bar(image, "sum of weights", pointed=True)
    return Drawing(
        file_name(picture.name, maps.name, "received"),
        sheet.figure,
        {"received": received, "image": picture.shown, "heads": np.array(shown)},
    )


def draw_given(
    picture: Picture, maps: LayerMaps, pixel: Pair, number: int = 0, heads: Sequence[int] | None = None, index: int = 0
) -> Drawing:
    """Per head, the weights with which a layer gathers for one pixel: over its window, on the layer's own grid (SASA).

    `number` says which of the maps' queries `pixel` is.
    """
    assert maps.weights is not None
    assert maps.softmax is not None
    weights = _numpy(maps.weights[index, number])
    seen = _numpy(maps.softmax[index, number].sum(0) > 0)
    shown = chosen_heads(heads, len(weights))
    top, left, bottom, right = _view(seen, maps.grid)
    title = f"{_who(maps)}: what pixel ({pixel[0]}, {pixel[1]}) attends to"
    zoomed = (bottom - top, right - left) != maps.grid
    shape = maps.image_size if not zoomed else (bottom - top, right - left)
    sheet = Sheet(1 + len(shown), shape, title)
    sheet.picture(sheet.axes[0], picture.shown, pixel)
    sheet.axes[0].set_anchor("C")
    if zoomed:
        sheet.frame(sheet.axes[0], maps.image_part((top, left, bottom, right)))
    sheet.label(sheet.axes[0], "image, pixel marked" if not zoomed else "image, view framed")
    low, high, colours = scale_of(weights[shown])
    image = None
    for axis, head in zip(sheet.axes[1:], shown, strict=True):
        image = sheet.map(axis, weights[head], low, high, colours, seen=seen[head])
        axis.set(xlim=(left - 0.5, right - 0.5), ylim=(bottom - 0.5, top - 0.5), aspect="auto")
        sheet.mark(axis, maps.centres[number], (bottom - top, right - left))
        sheet.label(axis, f"head {head}")
    if image is not None:
        sheet.colour_bar(image, "weight (grey: not seen)" if not seen.all() else "weight")
    name = file_name(picture.name, maps.name, "given", f"{pixel[0]}-{pixel[1]}")
    softmax = _numpy(maps.softmax[index, number])
    numbers = {"weights": weights, "softmax": softmax, "pixel": np.array(pixel), "cell": np.array(maps.cells[number])}
    return Drawing(name, sheet.figure, {**numbers, "image": picture.shown, "heads": np.array(shown)})


def draw_kernels(picture: Picture, maps: LayerMaps, heads: Sequence[int] | None = None, index: int = 0) -> Drawing:
    """The kernel of every window, tiled where the window lies, per head (QnA's Figure 2)."""
    assert maps.kernels is not None
    kernels = _numpy(maps.kernels[index]).transpose(2, 0, 1, 3, 4)  # [heads, rows, columns, kh, kw]
    shown = chosen_heads(heads, len(kernels))
    _, rows, columns, kh, kw = kernels.shape
    tiled = kernels.transpose(0, 1, 3, 2, 4).reshape(len(kernels), rows * kh, columns * kw)
    title = f"{_who(maps)}: the {kh}×{kw} kernel of every window ({rows}×{columns} of them)"
    sheet = Sheet(1 + len(shown), tiled.shape[1:], title, width=2.1 if len(shown) <= 12 else 1.35)
    sheet.picture(sheet.axes[0], picture.shown)
    sheet.axes[0].set_aspect("auto")
    sheet.label(sheet.axes[0], "image")
    low, high, colours = scale_of(kernels[shown])
    image = None
    for axis, head in zip(sheet.axes[1:], shown, strict=True):
        image = sheet.map(axis, tiled[head], low, high, colours, seen=tiled[head] != 0)
        axis.set_aspect("auto")
        for lines, count, side in ((axis.axhline, rows, kh), (axis.axvline, columns, kw)):
            for edge in range(1, count):
                lines(edge * side - 0.5, color="white", linewidth=min(1.0, 12 / count))
        sheet.label(axis, f"head {head}")
    if image is not None:
        sheet.colour_bar(image, "weight on the value (grey: outside)")
    numbers = {"kernels": kernels, "image": picture.shown, "heads": np.array(shown)}
    return Drawing(file_name(picture.name, maps.name, "kernels"), sheet.figure, numbers)


def grouped(found: dict[str, LayerMaps]) -> list[list[LayerMaps]]:
    """Layers that are branches of one augmented convolution together, every other alone."""
    groups: dict[str, list[LayerMaps]] = {}
    for name, maps in found.items():
        parent, _, branch = name.rpartition(".")
        groups.setdefault(parent if branch in ("attention", "aa") else name, []).append(maps)
    return list(groups.values())


def draw_parts(picture: Picture, group: Sequence[LayerMaps], pixels: Sequence[Pair], index: int = 0) -> Drawing | None:
    """For chosen pixels key×query, key×query + position and the explicit map side by side, heads averaged (ExpAtt's Figure 1).

    `group` holds the branches of one layer (see `grouped`); columns a layer has no numbers for are left out. None when
    there is neither a content term beside a position term nor an explicit map. Softmax weights; for QnA queries averaged.
    """
    columns: list[tuple[str, str, Any]] = []
    for maps in sorted(group, key=lambda maps: maps.kind == "explicit"):
        assert maps.softmax is not None
        if maps.kind == "explicit":
            columns.append(("explicit map", "explicit", maps.softmax))
        elif maps.content is not None:
            columns.append(("key×query", "content", maps.content))
            columns.append(("key×query + position", "content_and_position", maps.softmax))
    if not columns or not pixels:
        return None
    first = group[0]
    name = first.name if len(group) == 1 else first.name.rpartition(".")[0]
    who = name or "layer"
    across = 1 + len(columns)
    sheet = Sheet(
        across * len(pixels),
        first.image_size,
        f"{who}: what the terms of the attention say (mean of {first.heads} heads)",
        columns=across,
        width=1.6,
        below=0.3,
        gap=0.3,
        bar=False,
    )
    numbers: dict[str, Any] = {"pixels": np.array(pixels), "image": picture.shown}
    shown = [(title, key, _numpy(maps_of[index].mean((1, 2)))) for title, key, maps_of in columns]
    views = [_view(np.stack([means[line] > 0 for _, _, means in shown]), first.grid) for line in range(len(pixels))]
    for line, (pixel, view) in enumerate(zip(pixels, views, strict=True)):
        axis = sheet.axes[line * across]
        sheet.picture(axis, picture.shown, pixel)
        if view != (0, 0, *first.grid):
            sheet.frame(axis, first.image_part(view))
        sheet.label(axis, f"pixel ({pixel[0]}, {pixel[1]})")
    for column, (title, key, means) in enumerate(shown, 1):
        numbers[key] = means
        low, high = float(means[means > 0].min(initial=np.inf)), float(means.max())
        for line, (number, (top, left, bottom, right)) in enumerate(zip(means, views, strict=True)):
            axis = sheet.axes[line * across + column]
            image = sheet.map(axis, number, min(low, high), high, SEQUENTIAL, seen=number > 0)
            axis.set(xlim=(left - 0.5, right - 0.5), ylim=(bottom - 0.5, top - 0.5), aspect="auto")
            sheet.mark(axis, first.centres[line], (bottom - top, right - left))
            sheet.label(axis, title)
            if line == len(means) - 1:
                sheet.bar_below(image, axis, "")
    return Drawing(file_name(picture.name, name, "parts"), sheet.figure, numbers)


def draw_embeddings(name: str, layer: nn.Module, chosen: Sequence[int] | None = None) -> Drawing | None:
    """The learned relative embeddings of rows and columns, offset against channel; None for a layer without any (SASA).

    Where heads have their own, those that are `chosen`, or all.
    """
    if not isinstance(layer, LocalAttention2d | AttentionStem2d | RelativeAttention2d) or layer.rel_row is None:
        return None
    assert layer.rel_col is not None
    tables = {"rows": _numpy(layer.rel_row), "columns": _numpy(layer.rel_col)}
    panels = []
    for axis_name, table in tables.items():
        if table.ndim == 3 and len(table) > 1:
            panels += [(f"{axis_name}, head {i}", table[i]) for i in chosen_heads(chosen, len(table))]
        else:
            panels.append((axis_name, table.reshape(table.shape[-2:])))
    if not panels:
        return None
    shape = max((t.shape for _, t in panels), key=lambda shape: shape[0])
    sheet = Sheet(
        len(panels),
        (max(shape[0], 3), max(shape[1], shape[0], 3)),
        f"{name}: learned relative embeddings, offset (down) against channel (across)",
        columns=2 if len(panels) == 2 else None,
        width=1.9 if len(panels) <= 16 else 1.2,
        gap=0.3,
    )
    limit = max(float(np.abs(t).max()) for _, t in panels) or 1.0
    steps = layer.dilation if isinstance(layer, LocalAttention2d) else (1, 1)
    image = None
    for axis, (title, table) in zip(sheet.axes, panels, strict=True):
        image = axis.imshow(table, cmap=DIVERGING, vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
        centre = (len(table) - 1) // 2
        ticks = sorted({0, centre, len(table) - 1})
        step = steps[title.startswith("columns")]
        axis.set_yticks(ticks, [f"{(row - centre) * step:+d}" if row != centre else "0" for row in ticks], fontsize=6)
        axis.tick_params(length=1.5, pad=1)
        sheet.label(axis, title)
    if image is not None:
        sheet.colour_bar(image, "embedding")
    return Drawing(file_name(name, "embeddings"), sheet.figure, tables)


def draw_mixture(name: str, layer: nn.Module) -> Drawing | None:
    """The stem's mixture weights p(a, b, m): each place's share of every value matrix; None for layers without (SASA)."""
    mixture = layer.mixture() if isinstance(layer, AttentionStem2d) else None
    if mixture is None:
        return None
    assert isinstance(layer, AttentionStem2d)
    side = layer.kernel_size
    shares = _numpy(mixture).T.reshape(-1, side, side)
    title = f"{name}: share p(a, b, m) of value matrix m at each place of a {side}×{side} block"
    sheet = Sheet(len(shares), (side, side), title)
    image = None
    for number, (axis, share) in enumerate(zip(sheet.axes, shares, strict=True)):
        image = sheet.map(axis, share, 0.0, 1.0, SEQUENTIAL)
        sheet.label(axis, f"m = {number}")
    if image is not None:
        sheet.colour_bar(image, "share")
    return Drawing(file_name(name, "mixture"), sheet.figure, {"mixture": shares})


def learned_radii(model: nn.Module) -> dict[str, list[float]]:
    """The learned radii of a network's explicit layers, in depth's order: {layer: [σ, or one per head]}.

    >>> import timm, nearsight
    >>> radii = learned_radii(timm.create_model("expatt_resnet_nano"))
    >>> {round(r, 2) for r in next(iter(radii.values()))}
    {0.75}
    """
    return {
        name: layer.radius.tolist()
        for name, layer in model.named_modules()
        if isinstance(layer, ExplicitAttention2d) and layer.radius is not None
    }


def first_radii(model: nn.Module) -> set[float]:
    """The radii that a network's explicit layers started from.

    >>> import timm, nearsight
    >>> first_radii(timm.create_model("expatt_resnet_nano", radius=0.5))
    {0.5}
    """
    layers = (layer for layer in model.modules() if isinstance(layer, ExplicitAttention2d))
    return {layer.radius_init for layer in layers if layer.radius is not None}


def _view(seen: Any, grid: Pair) -> tuple[int, int, int, int]:
    """The part of a map worth drawing (top, left, bottom, right): all of it, or what is seen and a cell around where that
    is less than half as high and wide.

    >>> seen = np.zeros((1, 20, 30), dtype=bool)
    >>> seen[0, 4:7, 10:13] = True
    >>> _view(seen, (20, 30))
    (3, 9, 8, 14)
    """
    rows, columns = (np.flatnonzero(seen.any(axis)) for axis in ((0, 2), (0, 1)))
    if not len(rows):
        return 0, 0, *grid
    top, bottom = max(rows[0] - 1, 0), min(rows[-1] + 2, grid[0])
    left, right = max(columns[0] - 1, 0), min(columns[-1] + 2, grid[1])
    if 2 * (bottom - top) >= grid[0] or 2 * (right - left) >= grid[1]:
        return 0, 0, *grid
    return int(top), int(left), int(bottom), int(right)


def _who(maps: LayerMaps) -> str:
    return f"{maps.name or 'layer'}, {KINDS[maps.kind]} on {maps.grid[0]}×{maps.grid[1]}"


def _numpy(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return tensor.float().numpy() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.numpy()
