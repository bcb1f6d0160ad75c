"""Write docs/results.md and its figures from the files that evidence.py left, and from nothing else.

python benchmarks/evidence_report.py            # docs/results.md, docs/images/results-*.png
python benchmarks/evidence_report.py --check    # 1 when the page is not what the files say
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence_rows import (
    HERE,
    RESULTS,
    Claim,
    Row,
    Table,
    headline,
    read_lines,
    read_result,
    read_tables,
    result_file,
    shown,
)

PAGE = HERE.parent / "docs" / "results.md"
IMAGES = "images"
UNKNOWN = "not run yet"
CLAIM_HEAD = ["published", "ours", "verdict"]
PARTS = {"claims": "The papers' claims", "settings": "How the settings were chosen"}

HEAD = """# Results on real images

What the papers claim, tried with our own recipes on CIFAR-10. This page is written by `python
benchmarks/evidence_report.py` from the JSON lines in [`benchmarks/results/evidence`](../benchmarks/results/evidence):
every number is a run of the command beside it; what has not been run yet is named below its table.

Accuracy is top-1 in percent on the 10,000 test images, looked at once, at the end of a run (where a table says so: on
images held out of the training set). With several seeds: mean ± standard deviation; else one seed. Multiply-adds are
of one image (matrix products and convolutions). Images/s and memory are of training, alone on the GPU (images/s
with “of N”: the median of a run that shared it with N − 1 others); seconds are a
run's whole time, compilation included, with as many runs at once as its file says. CIFAR-10 is the copy the numbers
were measured on: WebP at quality 84 (33.9 dB), which costs some accuracy against the original pixels.

**Verdicts.** Ours agree with an order when each step of it is larger than twice its standard error (from the spread
of seeds, that of the table where a row has one seed, chance over the evaluated images where nothing has been
repeated), disagree when one step is as much the other way, and are too close to call in between.
"""


@dataclass(frozen=True)
class Score:
    """Accuracy of a row in percent: its mean, how many runs, their spread (None: one run) and how many images."""

    mean: float
    runs: int
    spread: float | None
    images: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.spread is None else f" ± {self.spread:.2f} ({self.runs} seeds)")


def results_of(row: Row, out: Path) -> list[dict[str, Any]]:
    found = [read_result(result_file(out, row, seed)) for seed in row.seeds]
    return [result for result in found if result is not None]


def score_of(results: Sequence[dict[str, Any]]) -> Score | None:
    """
    >>> score_of([{"ok": True, "accuracy": 0.94, "images": 100}, {"ok": True, "accuracy": 0.96, "images": 100}]).mean
    95.0
    """
    good = [100 * result["accuracy"] for result in results if result["ok"]]
    if not good:
        return None
    spread = statistics.stdev(good) if len(good) > 1 else None
    images = next(result["images"] for result in results if result["ok"])
    return Score(statistics.mean(good), len(good), spread, images)


def pooled(scores: Sequence[Score | None]) -> float | None:
    """The spread of a run in a table, from its rows with several seeds."""
    repeated = [score for score in scores if score is not None and score.spread is not None]
    if not repeated:
        return None
    free = sum(score.runs - 1 for score in repeated)
    return math.sqrt(sum((score.runs - 1) * (score.spread or 0.0) ** 2 for score in repeated) / free)


def error_of(score: Score, spread: float | None) -> float:
    """The standard error of a row's mean in points."""
    if spread is None:
        share = min(max(score.mean / 100, 1e-6), 1 - 1e-6)
        return 100 * math.sqrt(share * (1 - share) / score.images / score.runs)
    return spread / math.sqrt(score.runs)


def verdict(claim: Claim, scores: dict[str, Score | None]) -> tuple[str, str]:
    """(ours, verdict) of a claim about an order of rows."""
    spread = pooled(list(scores.values()))
    listed = [scores[name] for name in claim.order]
    shown = " → ".join("–" if score is None else f"{score.mean:.2f}" for score in listed)
    known = [score for score in listed if score is not None]
    if len(known) < len(listed):
        return shown, UNKNOWN
    steps = []
    for low, high in itertools.pairwise(known):
        doubt = 2 * math.hypot(error_of(low, spread), error_of(high, spread))
        gain = high.mean - low.mean + claim.slack
        steps.append(0 if abs(gain) <= doubt else math.copysign(1, gain))
    if min(steps) < 0:
        return shown, "**does not agree**"
    return shown, "agrees" if min(steps) > 0 else "too close to call"


def shared_rate(row: Row, out: Path) -> str:
    """Images/s of a row's first good run in the middle of its training, and how many runs there were at once."""
    for seed in row.seeds:
        first, *log = read_lines(result_file(out, row, seed))
        rates = [line["images_per_s"] for line in log if line["kind"] == "train" and "images_per_s" in line]
        if first.get("ok") and rates:
            return f"{statistics.median(rates):,.0f} of {first['at_once']}"
    return "–"


def cells(row: Row, out: Path, score: Score | None) -> list[str]:
    results = [result for result in results_of(row, out) if result["ok"]]
    speed = read_result(out / "speed" / f"{row.table}-{row.name}.jsonl")
    known = results[0] if results else speed or {}
    fast = speed if speed is not None and speed["ok"] else None
    memory = (fast or known).get("peak_memory_bytes")

    def number(key: str, scale: float, digits: int) -> str:
        return f"{known[key] / scale:.{digits}f}" if known.get(key) is not None else "–"

    missing = "no result, see below" if results_of(row, out) else "not run yet"
    return [
        row.says,
        missing if score is None else str(score),
        number("parameters", 1e6, 2),
        number("macs", 1e9, 3),
        number("epochs", 1, 0),
        f"{fast['images_per_s']:,.0f}" if fast else shared_rate(row, out),
        f"{memory / 2**30:.1f}" if memory else "–",
        f"{statistics.mean(result['seconds'] for result in results):.0f}" if results else "–",
        row.published or "",
    ]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows])


# Numbers other than accuracy, as a column's head says them.
HEADS = {"mAP50": "mAP₅₀", "l1": "L1", "psnr": "PSNR, dB"}


def measured(table: Table, out: Path) -> str:
    """The table of a task that is not judged by accuracy: a run per row, its metrics and its cost."""
    metrics = next(iter(table.rows.values())).metrics
    head = ["", *(HEADS.get(name, name) for name in metrics), "params, M", "mult-adds, G", "epochs", "s"]
    rows = []
    for row in table.rows.values():
        found = next((result for result in results_of(row, out) if result["ok"]), None)
        if found is None:
            continue
        macs = f"{found['macs'] / 1e9:.3f}" if found["macs"] is not None else "–"
        numbers = [shown(name, found[name]) for name in metrics]
        cost = [f"{found['parameters'] / 1e6:.2f}", macs, str(found["epochs"]), f"{found['seconds']:.0f}"]
        rows.append([row.says, *numbers, *cost])
    return "\n".join([*([markdown(head, rows) + "\n"] if rows else []), *waiting(table, out)])


def known(row: Row, out: Path) -> bool:
    """Whether anything was measured of a row: a run, good or bad, or its speed."""
    return bool(results_of(row, out)) or read_result(out / "speed" / f"{row.table}-{row.name}.jsonl") is not None


def waiting(table: Table, out: Path) -> list[str]:
    """A line with the rows nobody has run yet, if there are any."""
    names = [f"{row.name} ({row.says})" for row in table.rows.values() if not known(row, out)]
    return [f"Not run yet: {'; '.join(names)}.\n"] if names else []


def scores_of(table: Table, out: Path) -> dict[str, Score | None]:
    return {name: score_of(results_of(row, out)) for name, row in table.rows.items()}


def judged(table: Table, scores: dict[str, Score | None]) -> list[list[str]]:
    """The claims whose rows have all been run: what they say, as published, ours, and the verdict."""
    rows = [[claim.says, claim.published, *verdict(claim, scores)] for claim in table.claims]
    return [row for row in rows if row[-1] != UNKNOWN]


def in_short(tables: dict[str, Table], out: Path) -> str:
    """Every claim of the papers that was tried, with its verdict; a table is named in the first of its lines."""
    rows = []
    for table in tables.values():
        if table.part == "claims" and table.claims:
            link = f"[{table.title}](#{anchor(table.title)})"
            found = judged(table, scores_of(table, out))
            rows += [[link if number == 0 else "", *row] for number, row in enumerate(found)]
    return f"## In short\n\n{markdown(['', 'claim', *CLAIM_HEAD], rows)}\n" if rows else ""


def anchor(title: str) -> str:
    """A heading's address, as GitHub makes it.

    >>> anchor("Learned queries (QnA)")
    'learned-queries-qna'
    """
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def section(table: Table, out: Path) -> str:
    if "accuracy" not in next(iter(table.rows.values())).metrics:
        return f"### {table.title}\n\n{table.about.strip()}\n\n{measured(table, out)}\n{runs(table, out)}"
    scores = scores_of(table, out)
    head = ["", "accuracy", "params, M", "mult-adds, G", "epochs", "images/s", "GiB", "s", "published"]
    parts = [f"### {table.title}\n\n{table.about.strip()}\n"]
    rows = [cells(row, out, scores[name]) for name, row in table.rows.items() if known(row, out)]
    if rows:
        parts.append(markdown(head, rows) + "\n")
    rows = judged(table, scores)
    if rows:
        parts.append(markdown(["claim", *CLAIM_HEAD], rows) + "\n")
    parts += waiting(table, out)
    parts.append(runs(table, out))
    return "\n".join(part for part in parts if part)


def runs(table: Table, out: Path) -> str:
    """Every run's command and where it ran, folded away; and what went wrong, not folded away."""
    lines, wrong = [], []
    for row in table.rows.values():
        for result in results_of(row, out):
            where = f"{result['machine']}, torch {result['torch']}, commit {result['commit']}, {result['date']}"
            beside = f", {result['at_once']} runs at once" if result.get("at_once", 1) > 1 else ""
            changed = "".join(f" {change}" for change in result.get("changed", []))
            if result["ok"]:
                said = f"{headline(row, result)} in {result['seconds']:.0f} s{beside}"
                if result.get("replanned"):
                    said += f", {result['epochs']} epochs instead of {result['replanned'][0]['from']} for want of time"
                lines.append(f"- `{result['command']}{changed}` → {said} ({where})")
            else:
                wrong.append(f"- `{result['command']}{changed}`: {result['reason']} ({where})")
    text = ""
    if lines:
        text += "<details><summary>commands, machines, commits</summary>\n\n" + "\n".join(lines) + "\n\n</details>\n"
    if wrong:
        text += "\nRuns that did not end well:\n\n" + "\n".join(wrong) + "\n"
    return text


def radius_figure(tables: dict[str, Table], out: Path, folder: Path) -> str | None:
    """The learned radius of every augmented layer against depth; None where there is no run to draw."""
    from nearsight.viz.run_figures import draw_radii

    shown: dict[str, dict[str, list[float]]] = {}
    for row in (row for name in RADII for row in tables[name].rows.values()):
        found = [result["radius"] for result in results_of(row, out) if "radius" in result]
        if found and row.name not in APART:  # seeds averaged; the file has the layers in the network's order
            shown[f"{row.table}: {row.says}"] = {
                layer: [statistics.mean(values) for values in zip(*(radii[layer] for radii in found), strict=True)]
                for layer in found[0]
            }
    return _save(draw_radii(shown).figure, folder, "results-radius.png") if shown else None


# Tables with networks that learn a radius, and rows that would hide the others in the figure.
RADII = ("expatt", "nano")
APART = ("per_head", "no_offset", "with_aa")
# Tables whose rows are worth their cost; the others are steps on the way.
COMPARED = ("sasa", "sasa_ablations", "expatt_long", "expatt", "qna", "nano")
COSTS = ("parameters, M", "multiply-adds, G", "seconds of training, alone on the GPU")


def cost_points(table: Table, out: Path) -> list[tuple[str, Score, list[float | None]]]:
    """(row, accuracy on the test set, its COSTS; None where not measured). A row that was not trained as planned says so."""
    points = []
    for row in table.rows.values():
        results = [r for r in results_of(row, out) if r["ok"] and r["split"] == "test" and "accuracy" in r]
        score = score_of(results)
        if score is None:
            continue
        speed = read_result(out / "speed" / f"{row.table}-{row.name}.jsonl")
        rate = speed["images_per_s"] if speed is not None and speed["ok"] else None
        seconds = results[0]["steps"] * results[0]["batch"] / rate if rate else None
        costs = [results[0]["parameters"] / 1e6, results[0]["macs"] / 1e9, seconds]
        short = f", {results[0]['epochs']} epochs" if results[0].get("replanned") else ""
        points.append((row.says + short, score, costs))
    return points


def cost_figure(tables: dict[str, Table], out: Path, folder: Path) -> str | None:
    """Accuracy against parameters, multiply-adds and seconds of training, a line of panels per table; None without runs.

    Bars are two standard errors either way; costs that nobody measured have no panel.
    """
    from matplotlib.figure import Figure

    from nearsight.viz.run_figures import COLOURS, MARKERS

    drawn = {name: found for name in COMPARED if len(found := cost_points(tables[name], out)) > 1}
    if not drawn:
        return None
    known = [i for i in range(len(COSTS)) if any(costs[i] is not None for p in drawn.values() for *_, costs in p)]
    figure = Figure(figsize=(3.2 * len(known) + 2.6, 2.9 * len(drawn)), dpi=110, layout="constrained")
    grid = figure.subplots(len(drawn), len(known), squeeze=False, sharey="row")
    for axes, (name, points) in zip(grid, drawn.items(), strict=True):
        spread = pooled([score for _, score, _ in points])
        for number, (says, score, costs) in enumerate(points):
            style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
            for axis, cost in zip(axes, (costs[i] for i in known), strict=True):
                if cost is not None:
                    bar = 2 * error_of(score, spread)
                    axis.errorbar(cost, score.mean, bar, ls="", ms=7, capsize=3, elinewidth=1, label=says, **style)
        for axis, i in zip(axes, known, strict=True):
            axis.margins(0.15)
            axis.set_xlabel(COSTS[i])
            axis.grid(alpha=0.3)
            if all(costs[i] is None for *_, costs in points):
                axis.set_axis_off()  # not invisible: the legend hangs there
        axes[0].set_ylabel(f"{name}: test accuracy, %")
        axes[-1].legend(*axes[0].get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8)
    return _save(figure, folder, "results-cost.png")


def _save(figure: Any, folder: Path, name: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / name, dpi=130, metadata={"Software": None})
    return name


def drawn_apart(folder: Path) -> dict[str, str | None]:
    """Pictures that need data or checkpoints, by table; None where nobody has drawn them."""
    pictures = {name: table.picture[0] for name, table in read_tables().items() if table.picture is not None}
    return {name: file if (folder / file).is_file() else None for name, file in pictures.items()}


def page(out: Path, figures: dict[str, str | None]) -> str:
    """The whole page from the results under `out`."""
    tables = read_tables()
    parts = [HEAD, in_short(tables, out)]
    if figures.get("cost"):
        parts.append(f"![Accuracy against parameters, multiply-adds and training time]({IMAGES}/{figures['cost']})\n")
    part = ""
    for name, table in tables.items():
        if table.part != part:
            part = table.part
            parts.append(f"## {PARTS[part]}\n")
        parts.append(section(table, out))
        if figures.get(name) and table.picture is not None:
            parts.append(f"![{table.title}]({IMAGES}/{figures[name]})\n\n{table.picture[1]}.\n")
        if name == RADII[-1] and figures.get("radius"):
            parts.append(f"![Learned radius of every augmented layer against depth]({IMAGES}/{figures['radius']})\n")
    return "\n".join(text for text in parts if text).rstrip() + "\n"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="evidence_report", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results are kept")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when the page is not what the files say")
    options = parser.parse_args(words)
    folder = options.page.parent / IMAGES
    if options.check:
        kept = {name: f"results-{name}.png" for name in ("cost", "radius")}
        figures: dict[str, str | None] = {k: v if (folder / v).is_file() else None for k, v in kept.items()}
        figures |= drawn_apart(folder)
        return int(not options.page.is_file() or options.page.read_text(encoding="utf-8") != page(options.out, figures))
    tables = read_tables()
    figures = {
        "cost": cost_figure(tables, options.out, folder),
        "radius": radius_figure(tables, options.out, folder),
        **drawn_apart(folder),
    }
    options.page.write_text(page(options.out, figures), encoding="utf-8")
    print(f"wrote {options.page}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
