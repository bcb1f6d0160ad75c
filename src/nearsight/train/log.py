"""What a run tells while it runs: a live line, `log.jsonl`, TensorBoard. Only the first process writes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Reporter", "finite", "read_log", "replace_file"]

LOG = "log.jsonl"


def replace_file(path: Path, text: str) -> None:
    """Write a small file so that readers see the old or the new one, never half of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def finite(value: Any) -> Any:
    """Plain values as JSON can hold them: its numbers know no NaN and no infinity, which become null.

    >>> finite({"loss": float("nan"), "rates": [0.5, float("inf")]})
    {'loss': None, 'rates': [0.5, None]}
    """
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_log(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's log; a last line cut short by a crash is left out, null is a number that was not finite."""
    rows = []
    path = run / LOG
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append({key: math.nan if value is None else value for key, value in json.loads(line).items()})
        except ValueError:
            continue
    return rows


class Reporter:
    """Rows to the log and TensorBoard, the live line to the terminal (plain lines where there is none)."""

    def __init__(self, run: Path, *, leader: bool, total: int, start: int, tensorboard: bool, quiet: bool) -> None:
        self.leader, self.run, self.total = leader, run, total
        self.console = Console(stderr=True, quiet=quiet or not leader, highlight=False)
        self.writer: Any = None
        self.progress: Progress | None = None
        if not leader:
            return
        # A resumed run writes again what came after its checkpoint.
        rows = [row for row in read_log(run) if row["step"] <= start]
        replace_file(run / LOG, "".join(json.dumps(finite(row)) + "\n" for row in rows))
        self.file = open(run / LOG, "a", encoding="utf-8")  # noqa: SIM115  (closed by close)
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self.note("TensorBoard is not installed: no curves for it (pip install 'nearsight[train]')")
            else:
                self.writer = SummaryWriter(str(run / "tensorboard"), purge_step=start + 1)
                # It writes in a thread of its own, whose failures come out here a second time, in the run's words.
                self.excepthook = threading.excepthook
                threading.excepthook = self._thread_failed
        if not quiet and sys.stderr.isatty():
            self.progress = Progress(
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[shown]}"),
                TimeRemainingColumn(compact=True),
                console=self.console,
            )
            self.bar = self.progress.add_task("train", total=total, completed=start, epoch="", shown="")
            self.progress.start()

    def _thread_failed(self, failure: threading.ExceptHookArgs) -> None:
        if not isinstance(failure.exc_value, OSError):
            self.excepthook(failure)

    def note(self, text: str) -> None:
        """A line for the user."""
        self.console.print(text, markup=False)

    def row(self, kind: str, step: int, epoch: int, values: dict[str, float]) -> None:
        """One line of the log, and one point per number in TensorBoard."""
        if not self.leader:
            return
        plain = {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}
        row = {"kind": kind, "step": step, "epoch": epoch, **plain, "time": round(time.time(), 3)}
        self.file.write(json.dumps(finite(row)) + "\n")
        self.file.flush()
        if self.writer is not None and kind != "plan":
            for name, value in values.items():
                self.writer.add_scalar(f"{kind}/{name}", value, step)

    def advance(self, step: int, epoch: int, epochs: int, values: dict[str, float] | None) -> None:
        """Move the bar; `values` (when they were read from the device) are shown beside it."""
        if self.progress is not None:
            self.progress.update(self.bar, completed=step, epoch=f"{epoch + 1}/{epochs}")
            if values:
                shown = f"loss {values['loss']:.3f}  " + "".join(
                    f"{name} {100 * value:.1f} %  " for name, value in values.items() if name == "accuracy"
                )
                self.progress.update(self.bar, shown=f"{shown}{values['images_per_s']:.0f} images/s")

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
        # Rows are flushed as they come: what fails here has failed, and was told, before.
        if self.leader:
            with contextlib.suppress(OSError):
                self.file.close()
        if self.writer is not None:
            with contextlib.suppress(OSError):
                self.writer.close()
            threading.excepthook = self.excepthook
