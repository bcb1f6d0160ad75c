"""Train the rows of evidence.yaml, several at once on one device, and keep one small JSON-lines file per run.

    python benchmarks/evidence.py list
    python benchmarks/evidence.py speed sasa/conv sasa/attention --data DATA        # images/s, one at a time
    python benchmarks/evidence.py train "sasa/*" --data DATA --parallel 3           # what is done already is skipped
    python benchmarks/evidence_report.py                                            # docs/results.md from the files

A file's first line is the result (accuracy, parameters, MACs, time, memory, commit, machine, or why there is none), the
others are the run's log, thinned. With `--pack FILE` everything is also kept as one archive, renewed after each run.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence_rows import HERE, RESULTS, Row, chosen, headline, read_result, result_file, write_result

# How a run is watched, not what it learns.
WATCHING = ("log.every=97", "log.tensorboard=false", "checkpoint.every_epochs=100000")


def facts(row: Row, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Parameters and multiply-adds of a row's network, changed as a run of it is, and its config in short."""
    import torch

    from nearsight.models.flops import count_flops, count_parameters
    from nearsight.train.tasks import load_config, task_class
    from nearsight.train.tasks.classify import create_network

    config: Any = load_config(row.recipe, [*row.set, *changes])
    if config.task == "classify":
        with torch.device("meta"):
            model = create_network(config.model, num_classes=10, in_chans=config.data.channels)
    else:  # the recipe states its images and classes
        model = task_class(config.task).facts(config).model
    return {
        "model": config.model.name,
        "parameters": count_parameters(model),
        # A detector's work depends on its images' shapes.
        "macs": None if config.task == "detect" else count_flops(model, config.data.image_size, "mac"),
        "epochs": config.schedule.epochs,
        "batch": config.data.batch_size,
        "split": f"held out: {config.data.holdout:.0%} of train" if config.data.holdout else "test",
    }


def machine() -> dict[str, Any]:
    import torch

    from nearsight.bench.machine import stamp

    found = stamp(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return {key: found[key] for key in ("date", "commit", "machine", "torch", "triton", "timm", "cuda")}


def last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "no message"


@dataclass
class Job:
    """A process at work on a row."""

    row: Row
    seed: int
    folder: Path
    process: subprocess.Popen[bytes]
    began: float
    limit: float
    stopped: bool = False


def start(row: Row, seed: int, folder: Path, words: Sequence[str], limit: float, threads: int) -> Job:
    """Run `python WORDS` with its output in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    here = str(HERE.parent / "src")
    path = os.pathsep.join(p for p in (here, os.environ.get("PYTHONPATH", "")) if p)
    env = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
    with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
        process = subprocess.Popen([sys.executable, *words], stdout=out, stderr=err, env=env)
    return Job(row, seed, folder, process, time.monotonic(), limit)


def tend(
    queue: Iterator[Job], parallel: int, deadline: float, look: Callable[[], None] = lambda: None
) -> Iterator[Job]:
    """Keep `parallel` jobs running, stop those over their limit or the deadline, and hand each on when it ends.

    `look` is called now and then. Every job is stopped by its own process id: asked first, then killed.
    """
    running: list[Job] = []
    more = True
    while more or running:
        while more and len(running) < parallel and time.monotonic() < deadline:
            job = next(queue, None)
            if job is None:
                more = False
            else:
                running.append(job)
        if time.monotonic() >= deadline:
            more = False
        for job in list(running):
            now = time.monotonic()
            if job.process.poll() is not None:
                running.remove(job)
                yield job
            elif now > min(deadline, job.began + job.limit):
                grace = 15 if job.stopped else 0
                if not job.stopped:
                    job.process.send_signal(signal.SIGTERM)
                    job.stopped = True
                elif now > min(deadline, job.began + job.limit) + grace:
                    job.process.kill()
        look()
        time.sleep(0.2)


def outcome(job: Job, known: dict[str, Any], parallel: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result line and the log of a training job that has ended."""
    row, run = job.row, job.folder / "run"
    result = {
        "row": row.key,
        "seed": job.seed,
        "ok": job.process.returncode == 0,
        "command": row.command(job.seed),
        **known,
        "at_once": parallel,
    }
    log = []
    if (run / "log.jsonl").is_file():
        log = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    if not result["ok"]:
        took = time.monotonic() - job.began
        result["reason"] = f"stopped after {took:.0f} s" if job.stopped else last_line(job.folder / "stderr")
        return result, log
    told = json.loads((job.folder / "stdout").read_text(encoding="utf-8"))
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    wanted = (*row.metrics, "loss") if "accuracy" in row.metrics else row.metrics
    result |= {name: round(told.get(f"ema_{name}", told[name]), 5) for name in wanted}
    result |= {
        "images": int(told["images"]),
        "steps": told["step"],
        "seconds": told["seconds"],
        "images_per_s": told["images_per_s"],
        "peak_memory_bytes": summary.get("peak_memory_bytes"),
    }
    radii = radii_of(Path(told["checkpoint"]))
    if radii:
        result["radius"] = radii
    return result, log


def radii_of(checkpoint: Path) -> dict[str, list[float]]:
    """The learned radii of a checkpoint by layer, in the network's order."""
    from safetensors.torch import load_file

    weights = load_file(checkpoint / "model.safetensors")
    found = {name: tensor for name, tensor in weights.items() if name.endswith("log_radius")}
    return {
        name.removesuffix(".log_radius"): [round(v, 5) for v in tensor.exp().flatten().tolist()]
        for name, tensor in sorted(found.items())
    }


def pack(folder: Path, archive: Path | None) -> None:
    """Everything under `folder` as one archive, replaced in one step."""
    if archive is None:
        return
    part = archive.with_name(f".{archive.name}")
    with tarfile.open(part, "w:gz") as tar:
        tar.add(folder, arcname="evidence")
    part.replace(archive)


def decode_once(rows: Sequence[Row], data: str) -> None:
    """Fill the cache of decoded images before several processes want it."""
    from nearsight.train.data.decoded import materialise
    from nearsight.train.data.sources import open_source
    from nearsight.train.tasks import load_config

    for recipe, where in {(row.recipe, row.at(data)) for row in rows}:
        config: Any = load_config(recipe, [where])
        if config.task == "detect":  # its images have no common size
            continue
        source = open_source(config.data, labelled=config.task == "classify")
        for split in (source.train, source.evaluation):
            if split is not None:
                materialise(split, config.data)


def train(options: argparse.Namespace) -> int:
    """Train what is not done yet; 1 when a run failed."""
    began = time.monotonic()
    rows = chosen(options.rows)
    wanted = [(row, seed) for row in rows for seed in (options.seeds or row.seeds)]
    todo = []
    for row, seed in wanted:
        done = read_result(result_file(options.out, row, seed))
        if done is not None and done["ok"] and not options.again:
            print(f"{row.key} seed {seed}: done, {headline(row, done)}", flush=True)
        else:
            todo.append((row, seed))
    if not todo:
        return 0
    decode_once(rows, options.data)
    where, known = machine(), {row.key: facts(row, options.set) for row, _ in todo}
    failed = 0
    with tempfile.TemporaryDirectory(prefix="evidence-", dir=options.work) as work:

        def jobs() -> Iterator[Job]:
            threads = max(2, (os.cpu_count() or 1) // options.parallel)
            for number, (row, seed) in enumerate(todo):
                folder = Path(work) / str(number)
                words = ["-m", "nearsight", "train", row.recipe, *row.set, f"train.seed={seed}", *options.set]
                words += [row.at(options.data), *WATCHING, "--out", str(folder / "run"), "--json"]
                yield start(row, seed, folder, words, options.limit, threads)

        for job in tend(jobs(), options.parallel, began + options.budget):
            row = job.row
            result, log = outcome(job, {**known[row.key], **where, "changed": list(options.set)}, options.parallel)
            if result["ok"] and row.ship:
                facts_ = {key: result[key] for key in ("seconds", "machine", "commit", "date")}
                target = options.out / "weights" / row.ship
                try:
                    result["shipped"] = _ship(job.folder / "run", target, options.data, row, facts_)
                except Exception as error:  # the run itself is worth keeping
                    result["ship_failed"] = repr(error)[:300]
            write_result(result_file(options.out, row, job.seed), result, log)
            failed += not result["ok"]
            told = f"{headline(row, result)}, {result['seconds']:.0f} s" if result["ok"] else result["reason"]
            print(f"{row.key} seed {job.seed}: {told}", flush=True)
            pack(options.out, options.pack)
    return int(failed > 0)


def _ship(run: Path, target: Path, data: str, row: Row, told: dict[str, Any]) -> dict[str, Any]:
    from nearsight.train.ship import ship

    return ship(run, target, [row.at(data)], recipe=row.recipe, **told)


def speed(options: argparse.Namespace) -> int:
    """Time the rows: all start together, then each has the device for itself; 1 when one failed."""
    began = time.monotonic()
    rows = chosen(options.rows)
    decode_once(rows, options.data)
    where, failed = machine(), 0
    with tempfile.TemporaryDirectory(prefix="evidence-", dir=options.work) as work:

        def jobs() -> Iterator[Job]:
            threads = max(2, (os.cpu_count() or 1) // len(rows))
            for row in rows:
                folder = Path(work) / row.key.replace("/", "-")
                words = [str(HERE / "evidence.py"), "probe", row.key, "--data", options.data, "--work", work]
                words += ["--steps", str(options.steps), "--ready", str(len(rows)), "--limit", str(options.limit)]
                words += [word for change in options.set for word in ("--set", change)]
                yield start(row, 0, folder, words, options.limit, threads)

        told: set[str] = set()

        def look() -> None:
            for file in sorted(Path(work).glob("*.ready")):
                if file.name not in told:
                    told.add(file.name)
                    print(f"{file.stem}: ready after {time.monotonic() - began:.0f} s", flush=True)

        for job in tend(jobs(), len(rows), began + options.budget, look):
            row, ok = job.row, job.process.returncode == 0
            # A process that failed must not be waited for.
            (Path(work) / f"{row.key.replace('/', '-')}.ready").touch()
            result = {"row": row.key, "ok": ok, **facts(row, options.set), **where, "changed": list(options.set)}
            if ok:
                result |= json.loads((job.folder / "stdout").read_text(encoding="utf-8").splitlines()[-1])
                print(f"{row.key}: {result['images_per_s']:.0f} images/s", flush=True)
            else:
                result["reason"] = (
                    f"stopped after {options.limit:.0f} s" if job.stopped else last_line(job.folder / "stderr")
                )
                print(f"{row.key}: {result['reason']}", flush=True)
            failed += not ok
            tag = f"-{options.tag}" if options.tag else ""
            write_result(options.out / "speed" / f"{row.table}-{row.name}{tag}.jsonl", result)
            pack(options.out, options.pack)
    return int(failed > 0)


def probe(options: argparse.Namespace) -> int:
    """One row's speed: warm up, wait until all are warm, take the device, time steps with the data path and without."""
    import torch

    from nearsight.train.engine import Trainer
    from nearsight.train.tasks import load_config

    row, work, steps = chosen(options.rows)[0], Path(options.work), options.steps
    name = row.key.replace("/", "-")
    warm = max(5, steps // 2)
    changes = [*row.set, *options.set, row.at(options.data), *WATCHING, "data.holdout=0.02"]
    began = time.monotonic()
    config = load_config(row.recipe, [*changes, f"train.max_steps={warm + 2 * steps + 1}"])
    cuda = torch.cuda.is_available()
    marks: dict[int, float] = {}
    lock = open(work / "lock", "w")  # noqa: SIM115  (held until the process ends)

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.monotonic()

    def on_step(trainer: Trainer) -> None:
        step = trainer.place.step
        if step == warm:
            marks[-1] = now() - began
            (work / f"{name}.ready").touch()
            while len(list(work.glob("*.ready"))) < options.ready and time.monotonic() - began < 0.7 * options.limit:
                time.sleep(0.1)
            fcntl.flock(lock, fcntl.LOCK_EX)
            marks[step] = now()
        elif step == warm + steps:
            marks[step] = now()
            batches.frozen = True
        elif step == warm + 2 * steps:
            marks[step] = now()
            images = steps * trainer.images_per_step
            found = {
                "images_per_s": round(images / (marks[warm + steps] - marks[warm]), 1),
                "images_per_s_without_data": round(images / (marks[step] - marks[warm + steps]), 1),
                "seconds_to_warm": round(marks[-1], 1),
                "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else None,
            }
            print(json.dumps(found), flush=True)
            # At once, and the lock with it: an evaluation here would slow down whoever is timed next.
            os._exit(0)

    trainer = Trainer(config, work / name / "run", quiet=True, on_step=on_step)
    batches = trainer.task.train = Frozen(trainer.task.train)
    trainer.fit()
    return 1


class Frozen:
    """Batches that can be told to repeat the last one, so that a step costs the network's work alone."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.frozen = inner, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        last, given = None, start
        batches = self.inner.epoch(epoch, start)
        while given < len(self.inner):
            if last is None or not self.frozen:
                last = next(batches)
            yield last
            given += 1


def show(options: argparse.Namespace) -> int:
    for row in chosen(options.rows or ["*"]):
        done = [read_result(result_file(options.out, row, seed)) for seed in row.seeds]
        state = ", ".join("–" if d is None else headline(row, d) if d["ok"] else "failed" for d in done)
        print(f"{row.key:24} {state:24} {row.command(row.seeds[0])}")
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="evidence", description=__doc__.splitlines()[0] if __doc__ else None)
    verbs = made.add_subparsers(required=True)
    for name, run in (("train", train), ("speed", speed), ("probe", probe), ("list", show)):
        verb = verbs.add_parser(name, help=(run.__doc__ or "").splitlines()[0] if run.__doc__ else None)
        verb.set_defaults(run=run)
        verb.add_argument("rows", nargs="*" if name == "list" else "+", help="TABLE/ROW, with * for anything")
        verb.add_argument("--data", default="data", help="the folder of CIFAR-10")
        verb.add_argument("--out", type=Path, default=RESULTS, help="where the results are kept")
        verb.add_argument("--pack", type=Path, help="an archive of the results, renewed after each run")
        verb.add_argument("--parallel", type=int, default=1, help="runs at once")
        verb.add_argument("--seeds", type=int, nargs="*", help="instead of the rows' own")
        verb.add_argument("--limit", type=float, default=600, help="seconds for one run")
        verb.add_argument("--budget", type=float, default=86400, help="seconds for everything")
        verb.add_argument("--set", action="append", default=[], help="KEY=VALUE for every run; told in the result")
        verb.add_argument("--again", action="store_true", help="also what is done")
        verb.add_argument("--work", help="where the runs' own folders are made")
        verb.add_argument("--steps", type=int, default=60, help="timed steps")
        verb.add_argument("--ready", type=int, default=1, help=argparse.SUPPRESS)
        verb.add_argument("--tag", help="for the name of a speed result")
    return made


if __name__ == "__main__":
    chosen_options = parser().parse_args()
    raise SystemExit(chosen_options.run(chosen_options))
