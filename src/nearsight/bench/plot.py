"""A bar chart of results, for a README: forward+backward of ours beside the peers, shape by shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nearsight.bench.driver import Result
from nearsight.bench.models import NetworkResult
from nearsight.bench.report import milliseconds
from nearsight.errors import UserError

__all__ = ["plot_contests", "plot_networks"]

# Shapes that fit beside each other; with more the subjects stand one above the other.
ONE_ROW = 6

OURS = "#1b7837"
PEERS = ("#9ecae1", "#fdae6b", "#bcbddc", "#bdbdbd", "#fdd0a2", "#c7e9c0")


def plot_contests(path: Path, results: Sequence[Result], title: str) -> None:
    """Draw one panel per subject: a group of bars per shape, times on a logarithmic axis, the floor as a line."""
    timed = [r for r in results if r.total_ms is not None]
    if not timed:
        raise UserError("bench: no time was measured, so there is nothing to plot.")
    plt = _pyplot()
    subjects = list(dict.fromkeys(r.subject for r in timed))
    counts = [len({r.shape for r in timed if r.subject == s}) for s in subjects]
    # A little room for a single shape: its labels need it.
    widths = [max(count, 1.5) for count in counts]
    if sum(widths) <= ONE_ROW:
        figure, axes = plt.subplots(
            1,
            len(subjects),
            figsize=(max(6.0, 2.4 + 1.9 * sum(widths)), 4.2),
            squeeze=False,
            layout="constrained",
            gridspec_kw={"width_ratios": widths},
        )
    else:
        size = max(6.0, 1.4 + 1.9 * max(widths)), 0.4 + 3.2 * len(subjects)
        figure, axes = plt.subplots(len(subjects), 1, figsize=size, squeeze=False, layout="constrained")
    for axis, subject in zip(axes.flat, subjects, strict=True):
        _panel(axis, [r for r in timed if r.subject == subject], subject)
    for axis in axes[:, 0]:
        axis.set_ylabel("forward + backward, ms")
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_networks(path: Path, results: Sequence[NetworkResult], title: str) -> None:
    """Draw training images per second, a bar per network: replayed or compiled where it was, eager otherwise or behind it."""
    timed = [r for r in results if r.eager_images_s is not None or r.compiled_images_s is not None]
    if not timed:
        raise UserError("bench: no time was measured, so there is nothing to plot.")
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7.5, 1.2 + 0.38 * len(timed)), layout="constrained")
    for place, result in enumerate(timed):
        colour = OURS if result.ours else PEERS[0]
        eager, compiled = result.eager_images_s or 0.0, result.fast_images_s or 0.0
        if compiled:
            axis.barh(place, compiled, 0.75, color=colour)
        # The plain run inside the compiled one's bar; alone, it is the bar.
        axis.barh(
            place,
            eager,
            0.3 if compiled else 0.75,
            color="black" if compiled else colour,
            alpha=0.35 if compiled else 1,
        )
        ratio = result.replayed_over_peer or result.compiled_over_peer or result.eager_over_peer
        best = max(eager, compiled)
        note = f" {best:.3g}" if best < 100 else f" {best:.0f}"
        axis.text(best, place, note + (f" ({ratio:.2f}× {result.peer})" if ratio else ""), va="center", fontsize=7)
    axis.set_yticks(range(len(timed)), [r.network for r in timed], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.4 * max(max(r.eager_images_s or 0, r.fast_images_s or 0) for r in timed))
    way = ", compiled" if any(r.compiled_images_s for r in timed) else ""
    way += " and replayed as a CUDA graph" if any(r.replayed_images_s for r in timed) else ""
    axis.set_xlabel("training images per second" + (f"{way} (dark bar inside: eager)" if way else ""))
    figure.suptitle(title, fontsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _panel(axis: Any, results: Sequence[Result], subject: str) -> None:
    shapes = list(dict.fromkeys(r.shape for r in results))
    names = list(dict.fromkeys(r.contender for r in results))
    width = 0.8 / len(names)
    peers = [name for name in names if not any(r.ours for r in results if r.contender == name)]
    for place, name in enumerate(names):
        found = [r for r in results if r.contender == name]
        x = [shapes.index(r.shape) + (place - (len(names) - 1) / 2) * width for r in found]
        height = [r.total_ms for r in found]
        ours = [n for n in names if n not in peers]
        colour = PEERS[peers.index(name) % len(PEERS)] if name in peers else OURS
        bars = axis.bar(
            x, height, width * 0.92, label=name, color=colour, alpha=1 if name in [*ours[:1], *peers] else 0.5
        )
        axis.bar_label(bars, fmt=milliseconds, fontsize=6, padding=1)
    for place, shape in enumerate(shapes):
        floor = next((r.floor_total_ms for r in results if r.shape == shape), None)
        if floor is not None:
            label = "floor (bytes ÷ bandwidth)" if place == 0 else None
            axis.hlines(
                floor, place - 0.42, place + 0.42, colors="black", linestyles="dashed", linewidth=1, label=label
            )
    axis.set_yscale("log")
    axis.set_xticks(range(len(shapes)), [shape.replace(" ", "\n", 1) for shape in shapes], fontsize=8)
    axis.set_xlim(-0.6, len(shapes) - 0.4)
    axis.margins(y=0.12)
    axis.set_title(subject, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(
        fontsize=6.5, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2 if len(shapes) < 3 else 4
    )
