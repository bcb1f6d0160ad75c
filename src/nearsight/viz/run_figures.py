"""Figures of whole runs: training curves, accuracy against cost, the learned radius against depth. Needs the extra `viz`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nearsight.layers.explicit import RADIUS_INIT
from nearsight.viz.panels import Drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["RunFacts", "draw_costs", "draw_curves", "draw_radii", "draw_run_curves"]

# Okabe and Ito's colours, distinct to every eye; the marker and the dashes tell lines apart without any.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vP*X"
DASHES = ("-", "--", ":", "-.")


class RunFacts(NamedTuple):
    """What the scatter shows of a run: its last evaluation, and what its network costs."""

    accuracy: float
    parameters: int
    flops: int


def draw_curves(logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Training loss and test accuracy of several runs over their steps; `logs` are the rows of each run's log.jsonl.

    Runs of other tasks show the first number of their evaluation.
    """
    figure, (left, right) = _pair()
    measures = set()
    for number, (name, rows) in enumerate(logs.items()):
        style = _style(number)
        train = [row for row in rows if row["kind"] == "train"]
        tested = [row for row in rows if row["kind"] == "eval"]
        left.plot([row["step"] for row in train], [row["loss"] for row in train], label=name, **style)
        measure = measured(tested)
        if measure is not None:
            measures.add(measure)
            scale = 100 if measure == "accuracy" else 1
            points = [(row["step"], scale * row[measure]) for row in tested if measure in row]
            right.plot(*zip(*points, strict=True), marker=MARKERS[number % len(MARKERS)], ms=4, **style)
    left.set(xlabel="step", ylabel="training loss")
    names = ["test accuracy, %" if m == "accuracy" else m.replace("_", " ") for m in sorted(measures)]
    right.set(xlabel="step", ylabel=", ".join(names) or "evaluation")
    _finish(figure, (left, right))
    return figure


def measured(tested: Sequence[Mapping[str, Any]]) -> str | None:
    """The number an evaluation is judged by: accuracy, or the first one a task reports.

    >>> measured([{"kind": "eval", "step": 3, "epoch": 1, "psnr": 30.0, "images": 9, "time": 0.0}])
    'psnr'
    """
    aside = {"kind", "step", "epoch", "time", "images", "loss"}
    names = [name for row in tested for name, value in row.items() if name not in aside and _is_number(value)]
    return "accuracy" if "accuracy" in names else next(iter(names), None)


def draw_run_curves(logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Drawing:
    """`draw_curves` with its numbers."""
    numbers: dict[str, Any] = {}
    for name, rows in logs.items():
        for kind in ("train", "eval"):
            of_kind = [row for row in rows if row["kind"] == kind]
            keys = {key for row in of_kind for key, value in row.items() if _is_number(value)}
            for key in sorted(keys):
                numbers[f"{name}/{kind}/{key}"] = np.array([row.get(key, np.nan) for row in of_kind], dtype=float)
    return Drawing("curves", draw_curves(logs), numbers)


def draw_costs(runs: Mapping[str, RunFacts]) -> Drawing:
    """Accuracy against parameters and against FLOPs, a point per run.

    >>> draw_costs({"a": RunFacts(0.97, 165_042, 13_100_000)}).numbers["parameters"]
    array([165042])
    """
    figure, axes = _pair()
    for number, (name, run) in enumerate(runs.items()):
        for axis, cost in zip(axes, (run.parameters / 1e6, run.flops / 1e6), strict=True):
            axis.plot(
                cost,
                100 * run.accuracy,
                MARKERS[number % len(MARKERS)],
                color=COLOURS[number % len(COLOURS)],
                ms=8,
                label=name if axis is axes[0] else None,
            )
    axes[0].set(xlabel="parameters, M", ylabel="test accuracy, %")
    axes[1].set(xlabel="MFLOPs (multiply and add as two)", ylabel="test accuracy, %")
    for axis in axes:
        axis.margins(0.15)
    _finish(figure, axes)
    numbers = {key: np.array([getattr(run, key) for run in runs.values()]) for key in RunFacts._fields}
    return Drawing("accuracy-against-cost", figure, {**numbers, "runs": np.array(list(runs))})


def draw_radii(
    runs: Mapping[str, Mapping[str, Sequence[float]]], starts: Collection[float] = (RADIUS_INIT,)
) -> Drawing:
    """The learned radius of every explicit layer against depth, a line per run (ExpAtt's Figure 3).

    `runs` are those of `figures.learned_radii`, `starts` where their radii began. Layers with one radius per head show
    their mean and their range.

    >>> drawing = draw_radii({"a": {"layer1.0": [0.7], "layer2.0": [0.4, 0.6]}})
    >>> drawing.numbers["a/mean"]
    array([0.7, 0.5])
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 3.6), dpi=110, layout="constrained")
    axis = figure.subplots()
    numbers: dict[str, Any] = {}
    deepest, highest = 0, max(starts)
    for number, (name, radii) in enumerate(runs.items()):
        means = np.array([float(np.mean(r)) for r in radii.values()])
        numbers |= {f"{name}/mean": means, f"{name}/layers": np.array(list(radii))}
        depth = np.arange(1, len(means) + 1)
        deepest, highest = max(deepest, len(means)), max(highest, *(max(r) for r in radii.values()))
        axis.plot(depth, means, marker=MARKERS[number % len(MARKERS)], ms=5, label=name, **_style(number))
        if any(len(r) > 1 for r in radii.values()):
            lows, highs = (np.array([f(r) for r in radii.values()]) for f in (min, max))
            numbers |= {f"{name}/lowest": lows, f"{name}/highest": highs}
            axis.fill_between(depth, lows, highs, color=COLOURS[number % len(COLOURS)], alpha=0.15, linewidth=0)
    for start in starts:
        axis.axhline(start, color="0.6", linewidth=1, zorder=0)
    axis.set(xlabel="explicit layer, by depth", ylabel="learned radius σ (grey: where it starts)")
    axis.set_ylim(0, 1.08 * highest)
    axis.set_xlim(0.5, max(deepest, 1) + 0.5)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
    _legend(figure, axis)
    return Drawing("radius-against-depth", figure, numbers)


def _pair() -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), dpi=110, layout="constrained")
    return figure, figure.subplots(1, 2)


def _style(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}


def _finish(figure: Figure, axes: Any) -> None:
    for axis in axes:
        axis.grid(alpha=0.3)
    _legend(figure, axes[0])


def _legend(figure: Figure, axis: Any) -> None:
    """Names beside the axes, never on the lines."""
    handles, labels = axis.get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
