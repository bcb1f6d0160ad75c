"""Time the ops, layers and networks on this machine beside what others use, each checked before it is timed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from nearsight.bench.suites import Outcome, Settings, read_suite, run_suite
from nearsight.cli.app import examples, new_app
from nearsight.cli.output import console
from nearsight.errors import UserError

app = new_app()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PLOTS = (".png", ".svg", ".pdf")

EXAMPLES = examples(
    "nearsight bench ops  # every backend beside its peers",
    "nearsight bench ops --quick --filter local  # local attention alone, in seconds",
    "nearsight bench ops --csv results.csv --plot ops.png  # for the record",
    "nearsight bench ops --from results.csv --plot ops.png  # drawn again, nothing timed",
    "nearsight bench models --filter resnet50  # training images per second",
)


class Suite(StrEnum):
    ops = "ops"
    layers = "layers"
    models = "models"


@app.command(epilog=EXAMPLES)
def bench(
    suite: Annotated[Suite, typer.Argument(help="What to time.")],
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One shape of each, few repetitions, nothing compiled.")
    ] = False,
    filters: Annotated[
        list[str] | None,
        typer.Option("--filter", help='Only what has all these words in its name: "local 28x28"; repeatable.'),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images at a time.")] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Image side in pixels, for models.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default: bfloat16 on CUDA, else float32.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write the rows, with machine, versions, commit and date.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the same rows as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw a bar chart (.png, .svg or .pdf).")] = None,
    budget: Annotated[float | None, typer.Option(min=0, help="Seconds that what is compiled may take.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Show and draw the rows of such a CSV file; time nothing.")
    ] = None,
) -> None:
    """Time the ops, layers or networks beside what others use: convolutions, unfold, FlexAttention, timm's networks.

    What gives wrong results gets no time. "ours ÷ it" is the time of the backend a call takes by itself over that of the
    row: below 1, ours is faster. On CUDA, times are replays of a captured graph, with the plain launches beside them.
    """
    if size is not None and suite is not Suite.models:
        raise UserError(
            f"got --size {size} for {suite.value}, wanted it for models alone; choose shapes with --filter."
        )
    for path in (csv, json, plot):
        if path is None:
            continue
        if path.is_dir():
            raise UserError(f"got the folder {str(path)!r}, wanted the name of a file to write.")
        path.parent.mkdir(parents=True, exist_ok=True)  # where that is impossible is said before the timing, too
    if plot is not None:
        if plot.suffix not in PLOTS:
            raise UserError(
                f"got --plot {str(plot)!r}, wanted a name that ends in {', '.join(PLOTS[:-1])} or {PLOTS[-1]}."
            )
        import matplotlib  # noqa: F401, what is missing is said before minutes of timing
    if source is not None:
        if csv is not None or json is not None:
            raise UserError(
                "got --from with --csv or --json, wanted --plot alone: nothing is measured that could be written."
            )
        _show(read_suite(suite.value, source, tuple(filters or ())), plot=plot)
        return
    place = _device(device)
    settings = Settings(
        device=place,
        dtype=_dtype(dtype, place),
        batch=batch,
        size=size,
        quick=quick,
        filters=tuple(filters or ()),
        budget=budget,
    )

    def keep(outcome: Outcome) -> None:  # a run may be killed
        _write(outcome, csv, json)

    outcome = _run(suite.value, settings, keep)
    if outcome.stopped and not outcome.rows():
        raise typer.Exit(130)
    _show(outcome, csv, json, plot)
    if outcome.stopped:
        console(stderr=True).print("stopped early: these are the ones timed by then.")
        raise typer.Exit(130)


def _show(outcome: Outcome, csv: Path | None = None, json: Path | None = None, plot: Path | None = None) -> None:
    out = console()
    for table in outcome.tables():
        out.print(table)
    _write(outcome, csv, json)
    if plot is not None:
        outcome.plot(plot)
    for path in (csv, json, plot):
        if path is not None:
            out.print(f"wrote {path}")


def _write(outcome: Outcome, csv: Path | None, json: Path | None) -> None:
    if csv is not None:
        outcome.write_csv(csv)
    if json is not None:
        outcome.write_json(json)


def _run(suite: str, settings: Settings, keep: Callable[[Outcome], None]) -> Outcome:
    """Run with a line that says what is being timed; where nobody watches, a line each, so that a log shows how far it came.

    Ctrl-C and SIGTERM end it early, with what was timed by then.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    watched = console(stderr=True)
    start = time.monotonic()
    try:
        if watched.is_terminal:
            with watched.status("starting") as status:
                return run_suite(suite, settings, progress=status.update, keep=keep)
        return run_suite(
            suite,
            settings,
            progress=lambda text: watched.print(f"{time.monotonic() - start:4.0f} s  {text}", markup=False),
            keep=keep,
        )
    finally:
        signal.signal(signal.SIGTERM, before)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise UserError(f"got --device {name!r}, wanted cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("got --device cuda, but torch finds no CUDA device here; leave it out to time the CPU.")
    return torch.device(name)


def _dtype(name: str | None, device: torch.device) -> torch.dtype:
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise UserError(f"got --dtype {name!r}, wanted one of {', '.join(DTYPES)}.")
    return DTYPES[name]
