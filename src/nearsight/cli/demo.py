"""Train the small network of every mechanism on handwritten digits, compare them, show what they attend to."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from nearsight.cli.app import examples, new_app
from nearsight.cli.output import console, print_json, table
from nearsight.errors import UserError

app = new_app()

EXAMPLES = examples(
    "nearsight demo  # a minute or two on two cores, no data, no network",
    "nearsight demo --out /tmp/demo --epochs 3  # shorter, less accurate",
)


class Member(NamedTuple):
    """A network of the demo: its recipe, and what it is made of."""

    recipe: str
    model: str
    mechanism: str


# The slowest first, so that two workers end at about the same time.
MEMBERS = (
    Member("digits/sasa_nano", "sasa_resnet_nano", "local attention (SASA)"),
    Member("digits/qna_nano", "qna_vit_nano", "learned queries (QnA)"),
    Member("digits/expatt_nano", "expatt_resnet_nano", "explicit maps (ExpAtt)"),
    Member("digits/conv_nano", "resnet_nano", "3×3 convolution"),
)
COLUMNS = ("network", "made of", "test accuracy", "parameters", "MFLOPs", "s per epoch")
NUMBERS = COLUMNS[2:]
DIGITS = 4


@app.command(epilog=EXAMPLES)
def demo(
    out: Annotated[Path, typer.Option(help="Where runs, pictures and report go.")] = Path("runs/demo"),
    epochs: Annotated[int | None, typer.Option(min=1, help="Fewer or more epochs than the recipes say.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Networks trained at a time.", show_default="one per core")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as one JSON document.")] = False,
) -> None:
    """Train four small networks (three mechanisms and convolution) on scikit-learn's digits and compare them.

    Writes checkpoints, curves, attention pictures of a few test digits and a self-contained report.html.
    """
    from nearsight.viz import demo_report

    began = time.perf_counter()
    cores = os.cpu_count() or 1
    at_once = min(workers or cores, len(MEMBERS))
    rows = _train_all(out, epochs, at_once, max(1, cores // at_once), quiet=as_json)
    pictures = _pictures(out)
    shown = [_cells(row) for row in rows]
    seconds = time.perf_counter() - began
    text = [
        f"Each network was trained on 1,347 of scikit-learn's 8×8 digits, scaled to 16×16, and tested on the 450 others, in "
        f"{seconds:.0f} s in all on this machine's CPU ({at_once} at a time, {max(1, cores // at_once)} threads each).",
        "FLOPs count a multiply and an add as two, matrix products and convolutions only, for one image.",
    ]
    report = out / "report.html"
    report.write_text(demo_report.page("nearsight demo", text, COLUMNS, shown, NUMBERS, pictures), encoding="utf-8")
    (out / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json({"networks": rows, "report": str(report), "seconds": round(seconds, 1)})
        return
    screen = console()
    screen.print(table("Digits, test split of 450", COLUMNS, shown, NUMBERS))
    screen.print(f"{seconds:.0f} s in all; report: {report}", markup=False, soft_wrap=True)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["network"],
        row["mechanism"],
        f"{100 * row['accuracy']:.1f} %",
        f"{row['parameters']:,}",
        f"{row['flops'] / 1e6:.1f}",
        f"{row['seconds_per_epoch']:.1f}",
    ]


def _train_all(out: Path, epochs: int | None, at_once: int, threads: int, quiet: bool) -> list[dict[str, Any]]:
    """Each network by its own `nearsight train`, some at a time: small maps gain more from processes than from threads."""
    waiting, running, done = list(MEMBERS), dict[Member, Any](), dict[Member, dict[str, Any]]()
    with _bars(quiet) as bars, _ending_on_sigterm():
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    member = waiting.pop(0)
                    running[member] = _start(member, out, epochs, threads)
                for member in list(running):
                    bars.follow(member, out / member.model)
                    if running[member].poll() is not None:
                        done[member] = _outcome(member, running.pop(member), out)
                        bars.follow(member, out / member.model, ended=True)
                time.sleep(0.2)
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():
                _wait(process)
    return [done[member] for member in MEMBERS]


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does: not without the networks it has in training."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(process: Any, seconds: float = 20) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()


def _start(member: Member, out: Path, epochs: int | None, threads: int) -> Any:
    run = out / member.model
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    command = [sys.executable, "-m", "nearsight", "train", member.recipe, "--out", str(run), "--json"]
    command += ["train.device=cpu", "log.every=5"] + ([f"schedule.epochs={epochs}"] if epochs else [])
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with open(run / "stdout.json", "wb") as stdout, open(run / "stderr.txt", "wb") as stderr:
        return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env)


def _outcome(member: Member, process: Any, out: Path) -> dict[str, Any]:
    run = out / member.model
    if process.returncode:
        said = (run / "stderr.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise UserError(
            f"training {member.model} ended with code {process.returncode}: {said[-1] if said else 'no word'}"
        )
    from nearsight.models.flops import count_flops
    from nearsight.train.inference import load_network

    result = json.loads((run / "stdout.json").read_text(encoding="utf-8"))
    (run / "stdout.json").unlink()
    network = load_network(result["checkpoint"])
    return {
        "network": member.model,
        "mechanism": member.mechanism,
        "accuracy": result["accuracy"],
        "parameters": result["parameters"],
        "flops": count_flops(network.model, network.data.image_size),
        "seconds_per_epoch": result["seconds_per_epoch"],
        "run": str(run),
        "checkpoint": result["checkpoint"],
    }


class _Bars:
    """A line per network, read from the logs they write."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress, self.lines = progress, dict[Member, Any]()

    def follow(self, member: Member, run: Path, ended: bool = False) -> None:
        if self.progress is None:
            return
        from nearsight.train.log import read_log

        if member not in self.lines:
            self.lines[member] = self.progress.add_task(member.model, total=None, shown="starting")
        rows = read_log(run)
        train = [row for row in rows if row["kind"] == "train"]
        tested = [row for row in rows if row["kind"] == "eval"]
        if train:
            shown = f"loss {train[-1]['loss']:.3f}  {train[-1]['images_per_s']:.0f} images/s"
            if tested:
                shown += f"  test {100 * tested[-1]['accuracy']:.1f} %"
            self.progress.update(self.lines[member], completed=train[-1]["step"], total=rows[0]["total"], shown=shown)
        if ended:
            self.progress.stop_task(self.lines[member])


@contextmanager
def _bars(quiet: bool) -> Iterator[_Bars]:
    if quiet:
        yield _Bars(None)
        return
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console(stderr=True)) as progress:
        yield _Bars(progress)


def _pictures(out: Path) -> list[tuple[str, bytes]]:
    """Curves and attention maps, as files and for the page."""
    import torch

    from nearsight.train.data.sources import open_source
    from nearsight.train.inference import load_network, pixels_of
    from nearsight.train.log import read_log
    from nearsight.viz import demo_maps, demo_report
    from nearsight.viz.run_figures import draw_curves

    networks = {member.model: load_network(out / member.model) for member in MEMBERS[:3]}
    first = next(iter(networks.values()))
    test: Any = open_source(first.data).evaluation
    by_class = {test.read(i)[1]: i for i in reversed(range(len(test)))}
    chosen = [by_class[digit] for digit in (0, 3, 5, 8)[:DIGITS]]
    images = pixels_of(first, [test.read(i)[0] for i in chosen])
    # The darkest pixel of the inner half: a place on the stroke with something on all sides.
    edge = images.shape[-1] // 4
    inner = images[:, 0, edge:-edge, edge:-edge]
    places = [(edge + int(i) // inner.shape[2], edge + int(i) % inner.shape[2]) for i in inner.flatten(1).argmax(1)]
    with torch.no_grad():
        maps = demo_maps.draw_maps({name: n.model for name, n in networks.items()}, images, places)
    logs = {member.model: read_log(out / member.model) for member in MEMBERS}
    pictures = {
        "curves.png": ("Training loss and test accuracy.", draw_curves(logs)),
        "attention.png": (
            "What one pixel of each test digit (red) attends to in the first two attention layers of each network, heads "
            "averaged; orange marks the pixel on the layer's own, coarser map.",
            maps,
        ),
    }
    made = []
    for name, (caption, figure) in pictures.items():
        data = demo_report.png(figure)
        (out / name).write_bytes(data)
        made.append((caption, data))
    return made
