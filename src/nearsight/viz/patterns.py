"""Which pixels one query sees, per mechanism, as the ops themselves compute it.

`python -m nearsight.viz.patterns patterns.png` writes the picture, with `--blocks` that of the layers that cut the map.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nearsight import ops
from nearsight.layers import AttentionAugmentedConv2d, AttentionStem2d, QnAUpsample2d, WindowAttention2d
from nearsight.viz.maps import layer_maps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Pattern", "block_patterns", "draw_patterns", "footprint", "patterns"]

SIZE = (15, 21)
CENTRE, BESIDE, CORNER, EDGE = (7, 8), (4, 7), (1, 18), (6, 7)


CAPTION = "outlined: the query · grey: not seen · the darker, the larger the weight · line: a disk before a background"


class Pattern(NamedTuple):
    """One panel: the pixels' weights [H, W] for one query, and the call that gave them."""

    title: str
    call: str
    note: str
    query: tuple[int, int]
    weights: Tensor


def footprint(attend: Callable[[Tensor], Tensor], values: Tensor, query: tuple[int, int]) -> Tensor:
    """The weight of every pixel in the output at `query`, averaged over the heads, [H, W].

    An attention's output is linear in its values, y_i = Σ_j w_ij v_j, so w_ij = ∂y_i/∂v_j: exact, and the same question
    for every op. `attend` maps [1, H, W, …] values to an output of the same shape.

    >>> import torch
    >>> from nearsight.ops import explicit_attention
    >>> seen = footprint(lambda v: explicit_attention(v, kind="constant"), torch.zeros(1, 2, 4, 3), (0, 1))
    >>> seen.shape, float(seen.sum())
    (torch.Size([2, 4]), 1.0)
    """
    leaf = values.detach().clone().requires_grad_()
    out = attend(leaf)[0, query[0], query[1]]
    (gradient,) = torch.autograd.grad(out.sum(), leaf)
    # Each output channel passes on its own weights: the sum over channels divided by their number is the mean over heads.
    return gradient[0].flatten(2).mean(-1)


def patterns() -> list[Pattern]:
    """The panels of the picture: local attention, dilated, at the border, QnA, explicit and global attention."""
    return [
        _local("Local attention", "content and position, near the query", CENTRE, window=7),
        _local("… dilated", "the same taps, further apart", CENTRE, window=5, dilation=2),
        _local("… at the border", "taps outside the image are left out", CORNER, window=7),
        _qna(),
        _explicit(),
        _augmented(),
    ]


def block_patterns() -> list[Pattern]:
    """The panels of the second picture: layers whose windows do not move with the query, and up-sampling."""
    alike = scene().float() * 2 - 1
    x = torch.stack([torch.ones_like(alike), alike])[None]
    # As in the local panels: the first channel carries the position, the second the content.
    q, k = torch.eye(2), torch.tensor([[0.0, 0.0], [0.0, 0.9]])

    window = WindowAttention2d(2, 2, 7, num_heads=1)
    stem = AttentionStem2d(2, 2, 4, num_heads=1, values="plain")
    up = QnAUpsample2d(2, 2, 3, num_heads=1)
    assert up.position_bias is not None
    with torch.no_grad():
        window.qkv.weight.copy_(torch.cat([q, k, q]))
        stem.qk.weight.copy_(torch.cat([q, k])[..., None, None])
        stem.rel_row.zero_()
        stem.rel_col.zero_()
        up.query.copy_(torch.tensor([[0.0, 1.0]]).expand(4, 2))
        up.key_weight.copy_(2.5 * q)
        # Each of the four new pixels leans to its own corner.
        towards = torch.tensor([-1.0, 0.0, 1.0])
        for new, (down, right) in enumerate([(-1, -1), (-1, 1), (1, -1), (1, 1)]):
            up.position_bias[:, :, new, 0] = 0.5 * (down * towards[:, None] + right * towards)

    def panel(title: str, call: str, note: str, layer: Any, cell: tuple[int, int]) -> Pattern:
        maps = layer_maps(layer, x, [cell], received=False)
        assert maps.weights is not None
        return Pattern(title, call, note, maps.centres[0], maps.weights[0, 0].mean(0))

    return [
        panel("Window attention", "WindowAttention2d(C, C, 7)", "fixed windows, cut at the border", window, CENTRE),
        panel("Attention stem", "AttentionStem2d(3, C)", "4×4 blocks of the image", stem, EDGE),
        panel("QnA up-sampling", "QnAUpsample2d(C, C, 3)", "one of the four new pixels, the upper right", up, (14, 17)),
    ]


def scene(size: tuple[int, int] = SIZE) -> Tensor:
    """A disk before a background, True on the disk, [H, W]: the content that content-based attention can follow."""
    rows, columns = (torch.arange(n, dtype=torch.float32) for n in size)
    return ((rows[:, None] - 7) ** 2 + (columns[None] - 11) ** 2) < 4.6**2


def _local(title: str, note: str, query: tuple[int, int], **options: Any) -> Pattern:
    alike = scene().float() * 2 - 1
    one, none = torch.ones_like(alike), torch.zeros_like(alike)
    # In each half of the head dim one channel carries the position, one the content: +1 on the disk, −1 beside it.
    q = torch.stack([one, alike, one, alike], -1)[None, :, :, None]
    k = torch.stack([none, alike, none, alike], -1)[None, :, :, None] / 2
    nearness = -1.2 * torch.linspace(-1, 1, options["window"]) ** 2
    rel = torch.stack([nearness, torch.zeros_like(nearness)], -1)

    def attend(v: Tensor) -> Tensor:
        return ops.local_attention(q, k, v, rel_row=rel, rel_col=rel, **options)

    seen = footprint(attend, torch.zeros_like(q), query)
    return Pattern(title, _call("local_attention", "q, k, v", options), note, query, seen)


def _call(name: str, tensors: str, options: dict[str, Any]) -> str:
    return f"{name}({', '.join([tensors, *[f'{key}={value!r}' for key, value in options.items()]])})"


def _qna() -> Pattern:
    options: dict[str, Any] = {"window": 7}
    # A learned query that looks for the disk: it does not depend on the pixel that asks, which here lies beside the disk.
    scores = 1.8 * scene().float()[None, :, :, None, None]
    nearness = -0.6 * torch.linspace(-1, 1, 7) ** 2
    bias = (nearness[:, None] + nearness[None])[..., None, None]

    def attend(v: Tensor) -> Tensor:
        return ops.qna(scores, v, position_bias=bias, **options)

    seen = footprint(attend, torch.zeros(1, *SIZE, 1, 1), BESIDE)
    call = _call("qna", "scores, values", options)
    return Pattern("QnA", call, "learned queries, the same for every window", BESIDE, seen)


def _explicit() -> Pattern:
    options: dict[str, Any] = {"kind": "gaussian", "radius": 0.2}
    seen = footprint(lambda v: ops.explicit_attention(v, **options), torch.zeros(1, *SIZE, 1), CENTRE)
    return Pattern(
        "Explicit attention",
        _call("explicit_attention", "values", options),
        "distance alone, one learned radius",
        CENTRE,
        seen,
    )


def _augmented() -> Pattern:
    layer = AttentionAugmentedConv2d(2, 2, 3, feature_size=SIZE, num_heads=1, attention_channels=1, key_channels=2)
    attention = layer.attention
    rows, columns = SIZE
    alike = scene().float() * 2 - 1
    x = torch.stack([torch.ones_like(alike), alike])[None]
    with torch.no_grad():
        # As in the local panels: the first channel carries the position, the second the content.
        attention.qkv.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 1.4], [0.0, 0.0]]))
        for rel, size in ((attention.rel_row, rows), (attention.rel_col, columns)):
            rel.zero_()
            rel[0, :, 0] = -8.0 * torch.linspace(-1, 1, 2 * size - 1) ** 2
        seen = attention.attention_weights(x)[0, CENTRE[0], CENTRE[1]].mean(0)
    call = _call("AttentionAugmentedConv2d", "C, C, 3", {"feature_size": SIZE})
    return Pattern("Global attention", call, "content and position, every pixel (AA-Net)", CENTRE, seen)


def draw_patterns(shown: list[Pattern] | None = None) -> Figure:
    """The patterns side by side: grey pixels are not seen, the query is outlined, the scene's disk is a thin line."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Rectangle

    shown = patterns() if shown is None else shown
    columns = 3
    rows = -(-len(shown) // columns)
    figure = Figure(
        figsize=(4.1 * columns, 4.0 * rows), dpi=160, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    )
    # From a pale to a deep tone: read by its lightness alone, so the eye's colour sense does not matter.
    tones = ListedColormap(colormaps["YlGnBu"](torch.linspace(0.12, 1, 256).numpy())).with_extremes(bad="#ececec")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    for axis, pattern in zip(axes.flat, shown, strict=False):
        height, width = pattern.weights.shape
        seen = pattern.weights.numpy()
        axis.pcolormesh(_masked(seen), cmap=tones, vmin=0, vmax=seen.max(), edgecolors="white", linewidth=0.6)
        if tuple(pattern.weights.shape) == SIZE:
            _outline(axis, scene())
        y, x = pattern.query
        axis.add_patch(Rectangle((x, y), 1, 1, fill=False, edgecolor="#d55e00", linewidth=2.4, zorder=4))
        axis.set(xlim=(0, width), ylim=(height, 0), aspect="equal", xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
        axis.set_title(pattern.title, fontsize=14, fontweight="bold", loc="left", pad=20, color="#1a1a1a")
        axis.text(0, 1.02, pattern.note, transform=axis.transAxes, fontsize=10, color="#555555", va="bottom")
        axis.set_xlabel(
            # Too wide for its panel: break before the last keyword.
            re.sub(r", (?=\w+=[^=]*$)", ",\n    ", pattern.call) if len(pattern.call) > 55 else pattern.call,
            fontsize=8.6,
            family="monospace",
            color="#1a1a1a",
            loc="left",
            labelpad=6,
        )
    figure.supxlabel(CAPTION, fontsize=10, color="#555555", x=0.01, ha="left")
    return figure


def _masked(seen: Any) -> Any:
    import numpy as np

    return np.ma.masked_equal(seen, 0.0)


def _outline(axis: Any, region: Tensor) -> None:
    """The border between True and False pixels, along the pixels' edges."""
    height, width = region.shape
    for y in range(height):
        for x in range(width):
            if x + 1 < width and region[y, x] != region[y, x + 1]:
                axis.plot([x + 1, x + 1], [y, y + 1], color="#333333", linewidth=1.1, zorder=3)
            if y + 1 < height and region[y, x] != region[y + 1, x]:
                axis.plot([x, x + 1], [y + 1, y + 1], color="#333333", linewidth=1.1, zorder=3)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--blocks"]
    target = Path(words[0] if words else "patterns.png")
    draw_patterns(block_patterns() if "--blocks" in sys.argv else None).savefig(target)
    print(target)
