"""Runs contests: each contender is built, checked, and only then timed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from nearsight.bench import memory
from nearsight.bench.contest import Contender, Contest, RefusedError, Runner, asked_for, random_source
from nearsight.bench.timing import Effort, Timing, time_on_cpu, time_on_cuda

__all__ = ["FULL", "QUICK", "Clock", "Result", "add_ratios", "clock", "guard", "run_contests", "wanted"]

FULL = Effort(seconds=1.0, least=5, most=60)
QUICK = Effort(seconds=0.2, least=3, most=20)
FULL_CUDA = Effort(seconds=0.1, least=10, most=100)
QUICK_CUDA = Effort(seconds=0.03, least=5, most=30)

SIZES = ("batch", "height", "width", "channels", "heads", "window")
FORWARD, TOTAL = "forward", "forward+backward"


@dataclass
class Result:
    """A contender's row. Times in milliseconds, memory in bytes; None where there is nothing to say.

    `status` is "ok", or why there are no times: "refused" (it cannot run this), "wrong" (its results), "failed" (it raised),
    "left out" (the time budget was spent). `note` says more.
    """

    subject: str
    shape: str
    contender: str
    ours: bool
    dtype: str
    sizes: dict[str, int] = field(default_factory=dict)
    status: str = "ok"
    note: str | None = None
    forward_ms: float | None = None
    total_ms: float | None = None
    forward_eager_ms: float | None = None
    total_eager_ms: float | None = None
    spread: float | None = None
    forward_bytes: int | None = None
    total_bytes: int | None = None
    floor_forward_ms: float | None = None
    floor_total_ms: float | None = None
    total_over_floor: float | None = None
    ours_over_this_forward: float | None = None
    ours_over_this_total: float | None = None
    ours_over_this_bytes: float | None = None

    @property
    def contest(self) -> str:
        return f"{self.subject} {self.shape}"

    def columns(self) -> dict[str, object]:
        """The row flat, for a file: the sizes as columns of their own, empty where the subject has no such size."""
        row = asdict(self)
        sizes = row.pop("sizes")
        return {**{name: sizes.get(name) for name in SIZES}, **row}


class Clock:
    """Says when the time budget is spent: the seconds of everything done inside `running()`.

    `stopped` is set where Ctrl-C ended a suite early; what had been timed by then is kept.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.spent = 0.0
        self.stopped = False

    @property
    def over(self) -> bool:
        return self.spent >= self.seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.spent += time.monotonic() - start

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """What Ctrl-C ends without losing what came before."""
        try:
            yield
        except KeyboardInterrupt:
            self.stopped = True


def clock(seconds: float | None) -> Clock:
    return Clock(float("inf") if seconds is None else seconds)


def wanted(contest: Contest, filters: Sequence[str]) -> list[Contender]:
    """The contenders some filter asks for: all of its words occur in the contest's name and the contender's.

    Ours stay beside any peer that does: a ratio has two sides.
    """

    def asked(contender: Contender) -> bool:
        return asked_for(f"{contest.name} {contender.name}", filters)

    peers = any(asked(c) for c in contest.contenders if not c.ours)
    return [c for c in contest.contenders if asked(c) or (c.ours and peers)]


def run_contests(
    builders: Sequence[Callable[[], Contest]],
    device: torch.device,
    effort: Effort,
    *,
    bandwidth: float,
    filters: Sequence[str] = (),
    deadline: Clock | None = None,
    progress: Callable[[str], None] = lambda text: None,
    keep: Callable[[list[Result]], None] = lambda results: None,
) -> list[Result]:
    """Build, check and time every wanted contender. What must be compiled comes last, until that has spent the deadline.

    `keep` is given the results so far, every time there are new ones.
    """
    deadline = deadline or clock(None)
    results: dict[tuple[int, str], Result] = {}
    order: list[tuple[int, str]] = []

    def ordered() -> list[Result]:
        known = [results[key] for key in order if key in results]
        add_ratios(known)
        return known

    with deadline.stoppable():
        for compiled, (index, build) in product((False, True), enumerate(builders)):
            contest = build()
            contenders = wanted(contest, filters)
            if not compiled:
                order += [(index, c.name) for c in contenders]
            now = [c for c in contenders if c.compiled == compiled]
            if not now:
                continue
            progress(f"{contest.name}: {', '.join(c.name for c in now)}")
            with deadline.running() if compiled else nullcontext():
                found = _run(contest, now, device, effort, deadline)
            for result in found:
                _add_floor(result, contest, bandwidth)
                results[index, result.contender] = result
            del contest, contenders, now
            memory.free(device)
            keep(ordered())
    return ordered()


def _run(
    contest: Contest, contenders: Iterable[Contender], device: torch.device, effort: Effort, deadline: Clock
) -> list[Result]:
    results = []
    ready: list[tuple[Result, Sequence[Runner]]] = []
    for contender in contenders:
        result = Result(
            contest.subject, contest.shape, contender.name, contender.ours, contest.dtype, dict(contest.sizes)
        )
        results.append(result)
        if contender.compiled and deadline.over:
            result.status = "left out"
            result.note = f"left out: the budget of {deadline.seconds:.0f} s was spent"
            continue
        runners = _admit(result, contender)
        if not runners:
            continue
        if device.type == "cuda":
            # One after another: a contender may need most of the GPU's memory.
            guard(result, partial(_measure_cuda, result, runners, device, effort))
            del runners
            memory.free(device)
        else:
            ready.append((result, runners))
    if ready:
        _measure_cpu(ready, device, effort)
    return results


def _admit(result: Result, contender: Contender) -> Sequence[Runner]:
    """The contender's runners if it can run and is right; otherwise none, and the result says why."""
    runners: list[Runner] = []

    def admit() -> None:
        built = contender.build()
        if contender.fault is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fault = contender.fault()
            if fault is not None:
                result.status, result.note = "wrong", f"wrong, not timed: {fault}"
                return
        runners.extend(built)

    guard(result, admit)
    return runners


class Reportable(Protocol):
    """Any row with a status and a note."""

    status: str
    note: str | None


def guard(result: Reportable, action: Callable[[], None]) -> None:
    """Run `action`; a refusal or a failure becomes the row's status instead of ending the whole run."""
    try:
        action()
    except RefusedError as refusal:
        result.status, result.note = "refused", f"refuses: {refusal}"
    except Exception as error:
        result.status, result.note = _explain(error)


def _explain(error: Exception) -> tuple[str, str]:
    """A status and one line for what a contender raised; the compiler wraps the reason in its own, so look inside."""
    text = str(error)
    for line in text.splitlines():
        if "NYI" in line:  # how FlexAttention says that it cannot
            return "refused", f"refuses: {line.partition('NYI:')[2].strip() or line.strip()}"
    if isinstance(error, torch.OutOfMemoryError):
        return "failed", "out of memory"
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return "failed", f"failed: {type(error).__name__}: {first}"[:200]


def _steps(runner: Runner) -> dict[str, Callable[[], object]]:
    """The two things that are timed: the forward pass of training, and forward and backward together."""
    upstream: list[Tensor] = []

    def both() -> object:
        out = runner.forward()
        if not upstream:
            upstream.append(torch.empty_like(out).copy_(random_source(out.device)(*out.shape, dtype=out.dtype)))
        return torch.autograd.grad(out, runner.leaves, upstream[0])

    both()
    return {FORWARD: runner.forward, TOTAL: both}


def _measure_cpu(ready: Sequence[tuple[Result, Sequence[Runner]]], device: torch.device, effort: Effort) -> None:
    steps: dict[str, Callable[[], object]] = {}
    owners: list[tuple[Result, Sequence[Runner]]] = []
    for result, runners in ready:

        def add(result: Result = result, runners: Sequence[Runner] = runners) -> None:
            own = {(runner.name, what): step for runner in runners for what, step in _steps(runner).items()}
            for (name, what), step in own.items():
                steps[f"{result.contender}/{name}/{what}"] = step
            owners.append((result, runners))

        guard(result, add)
    timings = time_on_cpu(steps, effort)
    for result, runners in owners:
        forms = {
            runner.name: tuple(timings[f"{result.contender}/{runner.name}/{what}"] for what in (FORWARD, TOTAL))
            for runner in runners
        }
        best = _keep_fastest(result, forms)
        for attribute, what in (("forward_bytes", FORWARD), ("total_bytes", TOTAL)):
            setattr(result, attribute, memory.peak_extra_bytes(steps[f"{result.contender}/{best}/{what}"], device))


def _measure_cuda(result: Result, runners: Sequence[Runner], device: torch.device, effort: Effort) -> None:
    forms = {}
    held = {}
    for runner in runners:
        steps = _steps(runner)
        held[runner.name] = tuple(memory.peak_extra_bytes(steps[what], device) for what in (FORWARD, TOTAL))
        forms[runner.name] = tuple(time_on_cuda(steps[what], effort) for what in (FORWARD, TOTAL))
    best = _keep_fastest(result, forms)
    result.forward_bytes, result.total_bytes = held[best]


def _keep_fastest(result: Result, forms: dict[str, tuple[Timing, ...]]) -> str:
    """Put the form with the fastest forward+backward into the result; its name goes into the note where there were several."""
    name, (forward, total) = min(forms.items(), key=lambda form: form[1][1].ms)
    result.forward_ms, result.total_ms = forward.ms, total.ms
    result.forward_eager_ms, result.total_eager_ms = forward.eager_ms, total.eager_ms
    result.spread = total.spread
    notes = [name if len(forms) > 1 else None, total.note]
    result.note = "; ".join(note for note in notes if note) or None
    return name


def _add_floor(result: Result, contest: Contest, bandwidth: float) -> None:
    if contest.floor_bytes is None:
        return
    result.floor_forward_ms, result.floor_total_ms = (n / bandwidth * 1e3 for n in contest.floor_bytes)
    if result.total_ms is not None:
        result.total_over_floor = result.total_ms / result.floor_total_ms


def add_ratios(results: Sequence[Result]) -> None:
    """Fill the "ours ÷ this" columns: ours is the first of our backends, the one a call without `backend` takes."""
    for result in results:
        ours = next((r for r in results if r.contest == result.contest and r.ours and r.status != "refused"), None)
        if ours is None or ours is result:
            continue
        for ratio, value in (
            ("ours_over_this_forward", "forward_ms"),
            ("ours_over_this_total", "total_ms"),
            ("ours_over_this_bytes", "total_bytes"),
        ):
            top, bottom = getattr(ours, value), getattr(result, value)
            if top is not None and bottom:
                setattr(result, ratio, top / bottom)
