"""The three suites behind one door: settings in, an outcome out that can be shown, written and drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from nearsight.bench import driver, machine, models, plot, report
from nearsight.bench.contest import Contest, asked_for
from nearsight.bench.driver import Clock, Result
from nearsight.bench.layers import layer_contests
from nearsight.bench.models import NetworkResult
from nearsight.bench.ops import op_contests
from nearsight.bench.stored import read_csv
from nearsight.bench.timing import Effort, copy_bandwidth
from nearsight.errors import UserError

__all__ = ["SUITES", "Outcome", "Settings", "read_suite", "run_suite"]

# A suite's images at a time on CUDA and on a CPU, and the seconds that all it compiles may take, checks and timing
# included: whatever a machine's compiler does, a run ends.
SUITES = {"ops": (128, 8, 130.0), "layers": (128, 8, 130.0), "models": (256, 4, 220.0)}
IMAGE, QUICK_IMAGE_CPU = 224, 64

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
    """A suite's rows and the machine they were measured on; `stopped`: it was ended before all was timed."""

    suite: str
    title: str
    contests: Sequence[Result]
    networks: Sequence[NetworkResult]
    stamp: Mapping[str, str | float | None]
    stopped: bool = False

    def tables(self) -> list[Table]:
        if self.suite == "models":
            return [report.network_table(self.networks, self.title)]
        return report.contest_tables(self.contests, self.title)

    def rows(self) -> list[dict[str, object]]:
        return report.rows_of(self.suite, [*self.contests, *self.networks], self.stamp)

    def write_csv(self, path: Path) -> None:
        report.write_csv(path, self.rows())

    def write_json(self, path: Path) -> None:
        report.write_json(path, self.rows())

    def plot(self, path: Path) -> None:
        if self.suite == "models":
            plot.plot_networks(path, self.networks, self.title)
        else:
            plot.plot_contests(path, self.contests, self.title)


def run_suite(
    suite: str,
    settings: Settings,
    progress: Progress = lambda text: None,
    keep: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Run "ops", "layers" or "models". `keep` is given what there is so far, every time something was timed."""
    device = settings.device
    cuda = device.type == "cuda"
    cuda_batch, cpu_batch, budget = SUITES[suite]
    batch = settings.batch or (cuda_batch if cuda else cpu_batch)
    deadline = driver.clock(budget if settings.budget is None else settings.budget)
    effort = {
        (False, False): driver.FULL,
        (False, True): driver.QUICK,
        (True, False): driver.FULL_CUDA,
        (True, True): driver.QUICK_CUDA,
    }[cuda, settings.quick]
    stamp = machine.stamp(device)
    title = _title(suite, stamp, str(settings.dtype).removeprefix("torch."), batch)
    with _fastest_convolutions():
        if suite == "models":

            def keep_networks(known: Sequence[NetworkResult]) -> None:
                keep(Outcome(suite, title, (), known, stamp))

            networks = _networks(settings, batch, effort, deadline, progress, keep_networks)
            return Outcome(suite, title, (), networks, stamp, deadline.stopped)

        def keep_contests(known: Sequence[Result]) -> None:
            keep(Outcome(suite, title, known, (), stamp))

        contests, bandwidth = _contests(suite, settings, batch, effort, deadline, progress, keep_contests)
        title = f"{title}, copy {bandwidth / 1e9:.0f} GB/s"
        return Outcome(suite, title, contests, (), stamp, deadline.stopped)


def read_suite(suite: str, path: Path, filters: Sequence[str] = ()) -> Outcome:
    """The outcome of a run whose rows were written to a CSV file, those that a filter asks for."""
    contests, networks, stamp = read_csv(path, suite)
    kept = [r for r in contests if asked_for(f"{r.contest} {r.contender}", filters)]
    kept_networks = [r for r in networks if asked_for(r.network, filters)]
    if not kept and not kept_networks:
        raise _no_match(filters, [f"{r.contest} {r.contender}" for r in contests] or [r.network for r in networks])
    return Outcome(suite, _title(suite, stamp, stamp["dtype"], stamp["batch"]), kept, kept_networks, stamp)


def _title(suite: str, stamp: Mapping[str, str | float | None], dtype: str, batch: int | str) -> str:
    return (
        f"{suite} on {stamp['machine']}, {dtype}, batch {batch}, torch {stamp['torch']}, "
        f"nearsight {stamp['commit']}, {stamp['date']}"
    )


def _contests(
    suite: str,
    settings: Settings,
    batch: int,
    effort: Effort,
    deadline: Clock,
    progress: Progress,
    keep: Callable[[list[Result]], None],
) -> tuple[list[Result], float]:
    build = op_contests if suite == "ops" else layer_contests
    builders = build(settings.device, settings.dtype, batch, quick=settings.quick)
    _check_filters(builders, settings.filters)
    progress("copying, to learn the bandwidth")
    bandwidth = copy_bandwidth(settings.device, effort)
    results = driver.run_contests(
        builders,
        settings.device,
        effort,
        bandwidth=bandwidth,
        filters=settings.filters,
        deadline=deadline,
        progress=progress,
        keep=keep,
    )
    return results, bandwidth


def _networks(
    settings: Settings,
    batch: int,
    effort: Effort,
    deadline: Clock,
    progress: Progress,
    keep: Callable[[list[NetworkResult]], None],
) -> list[NetworkResult]:
    cuda = settings.device.type == "cuda"
    names = models.wanted_networks(settings.filters)
    if not names:
        raise _no_match(settings.filters, list(models.NETWORKS))
    return models.run_networks(
        names,
        settings.device,
        settings.dtype,
        effort,
        batch=batch,
        size=settings.size or (QUICK_IMAGE_CPU if settings.quick and not cuda else IMAGE),
        compiled=cuda and not settings.quick,
        deadline=deadline,
        progress=progress,
        keep=keep,
    )


def _check_filters(builders: Sequence[Callable[[], Contest]], filters: Sequence[str]) -> None:
    """Refuse a filter that nothing matches before anything is measured."""
    if not filters:
        return
    names = []
    for build in builders:
        contest = build()
        if driver.wanted(contest, filters):
            return
        names += [f"{contest.name} {contender.name}" for contender in contest.contenders]
    raise _no_match(filters, names)


def _no_match(filters: Sequence[str], names: Sequence[str]) -> UserError:
    asked = " ".join(f"--filter {text!r}" for text in filters)
    return UserError(
        f"nothing matches {asked}; all words of a filter must occur in a name such as {names[0]!r} or {names[-1]!r}."
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
