"""The three suites behind one door: settings in, an outcome out that can be shown, written and drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from nearsight.bench import driver, machine, plot, report
from nearsight.bench.contest import Contest
from nearsight.bench.driver import Result
from nearsight.bench.layers import layer_contests
from nearsight.bench.ops import op_contests
from nearsight.bench.timing import copy_bandwidth
from nearsight.errors import UserError

__all__ = ["Outcome", "Settings", "run_suite"]

# Seconds after which nothing more is compiled: whatever a machine's compiler does, a run ends.
BUDGETS = {"ops": 170.0, "layers": 170.0, "models": 270.0}
CUDA_BATCH, CPU_BATCH = 128, 8

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What to run, where and how long; None takes the suite's own default."""

    device: torch.device
    dtype: torch.dtype
    batch: int | None = None
    size: int | None = None
    quick: bool = False
    filters: tuple[str, ...] = ()
    budget: float | None = None


@dataclass(frozen=True)
class Outcome:
    """A finished suite."""

    suite: str
    title: str
    results: Sequence[Result]
    stamp: dict[str, str | int | None]

    def tables(self) -> list[Table]:
        return report.op_tables(self.results, self.title)

    def rows(self) -> list[dict[str, object]]:
        return report.rows_of(self.suite, self.results, self.stamp)

    def write_csv(self, path: Path) -> None:
        report.write_csv(path, self.rows())

    def write_json(self, path: Path) -> None:
        report.write_json(path, self.rows())

    def plot(self, path: Path) -> None:
        plot.plot_ops(path, self.results, self.title)


def run_suite(suite: str, settings: Settings, progress: Progress = lambda text: None) -> Outcome:
    """Run "ops", "layers" or "models"."""
    device = settings.device
    cuda = device.type == "cuda"
    deadline = driver.clock(BUDGETS[suite] if settings.budget is None else settings.budget)
    batch = settings.batch or (CUDA_BATCH if cuda else CPU_BATCH)
    effort = {
        (False, False): driver.FULL,
        (False, True): driver.QUICK,
        (True, False): driver.FULL_CUDA,
        (True, True): driver.QUICK_CUDA,
    }[cuda, settings.quick]
    build = op_contests if suite == "ops" else layer_contests
    builders = build(device, settings.dtype, batch, quick=settings.quick)
    _check_filters(builders, settings.filters)
    stamp = machine.stamp(device)
    with _fastest_convolutions():
        progress("copying, to learn the bandwidth")
        bandwidth = copy_bandwidth(device, effort)
        results = driver.run_contests(
            builders,
            device,
            effort,
            bandwidth=bandwidth,
            filters=settings.filters,
            deadline=deadline,
            progress=progress,
        )
    dtype = str(settings.dtype).removeprefix("torch.")
    title = (
        f"{suite} on {stamp['machine']}, {dtype}, batch {batch}, copy {bandwidth / 1e9:.0f} GB/s, "
        f"torch {stamp['torch']}, {stamp['commit']}, {stamp['date']}"
    )
    return Outcome(suite, title, results, stamp)


def _check_filters(builders: Sequence[Callable[[], Contest]], filters: Sequence[str]) -> None:
    if not filters:
        return
    names = []
    for build in builders:
        contest = build()
        if driver.wanted(contest, filters):
            return
        names += [f"{contest.name} {c.name}" for c in contest.contenders]
    raise UserError(
        f"nothing matches --filter {' --filter '.join(map(repr, filters))}; all its words must occur in a name such as "
        f"{names[0]!r} or {names[-1]!r}."
    )


@contextmanager
def _fastest_convolutions() -> Iterator[None]:
    """Let cuDNN try its algorithms, as a user who trains would."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
