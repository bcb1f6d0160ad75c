"""The training loop, for any task: Accelerate for devices and processes, timm for optimisers, schedules and averages.

A step is one update of the weights. Everything a step depends on (order of images, augmentation, random generators, moments) is a
function of the seed and of what a checkpoint holds, so a resumed run goes on exactly where it was.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from accelerate.utils import gather_object
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from nearsight.errors import UserError, disk_full
from nearsight.train import checkpoints, state
from nearsight.train.ahead import Ahead
from nearsight.train.compilation import compile_blocks, compiling, tell_unknown_options, uncompiled
from nearsight.train.config import RunConfig, to_yaml
from nearsight.train.data.batches import Where, seed_of
from nearsight.train.log import Reporter, finite, replace_file
from nearsight.train.process import exactness, make_accelerator, seed_everything
from nearsight.train.replay import ReplayedUpdate
from nearsight.train.schedule import build_optimizer, build_schedule, scaled_lr
from nearsight.train.tasks import Task, build_task

__all__ = ["Result", "Stopped", "Trainer", "fit"]

CONFIG = "config.yaml"
SUMMARY = "summary.json"
NEVER = 2**62
# What a checkpoint says of its place, as numbers.
NUMBERS = ("step", "epoch", "in_epoch", "images_per_step", "world", "skipped")
ADVICE = "lower optimizer.lr or set train.clip"


class Stopped(Exception):  # noqa: N818  (not an error)
    """A signal ended the run after its checkpoint was written."""

    def __init__(self, number: int, step: int, run: Path, checkpoint: Path | None) -> None:
        self.number, self.step, self.run, self.checkpoint = number, step, run, checkpoint
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}; resume with --resume {run}")


@dataclass
class Result:
    """How a run ended."""

    run: Path
    step: int
    metrics: dict[str, float]
    best: float | None
    seconds: float
    seconds_per_epoch: float
    images_per_s: float
    parameters: int
    checkpoint: Path | None = None
    losses: list[float] = field(default_factory=list)


@dataclass
class _Place:
    """Where the run is: updates done, current epoch, updates done in it."""

    step: int = 0
    epoch: int = 0
    in_epoch: int = 0


class Trainer:
    """One run: built from a config, resumed from a checkpoint if one is given, driven by `fit`."""

    def __init__(
        self,
        config: RunConfig,
        run: Path,
        *,
        resume: Path | None = None,
        quiet: bool = False,
        on_step: Callable[[Trainer], None] | None = None,
    ) -> None:
        self.config, self.run, self.on_step = config, run, on_step
        self.signal: int | None = None
        self.place = _Place()
        self.losses: list[float] = []
        self.early: list[str] = []
        self.resumed: checkpoints.Checkpoint | None = None
        self.claim: IO[str] | None = None
        self.ahead = Ahead(config, self._note)
        with self.ahead.stopped_by_failures():
            self.accelerator = make_accelerator(config)
            self.where = Where(self.accelerator.device, self.accelerator.process_index, self.accelerator.num_processes)
            self.leader = self.accelerator.is_main_process
            self.ahead.start(self.accelerator)
            self.ahead.search(self.accelerator)
            seed_everything(config.train.seed)
            self.task: Task = build_task(config, self.where, self._note)
            self._build()
            self._begin(resume, quiet)
        for text in self.early:
            self.report.note(text)

    def _note(self, text: str) -> None:
        """A line for the user, kept until there is somebody to tell it."""
        if hasattr(self, "report"):
            self.report.note(text)
        else:
            self.early.append(text)

    # ---- building ----

    def _build(self) -> None:
        config, accelerator = self.config, self.accelerator
        model = self.task.model
        if config.model.sync_bn and self.where.world > 1:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = model.to(self.where.device)
        sharded = getattr(accelerator.state, "fsdp_plugin", None) is not None
        # FSDP shards contiguous parameters only; the images are channels-last all the same.
        if config.model.channels_last and not sharded:
            model = model.to(memory_format=torch.channels_last)
        self.bare = model
        self.parameters = sum(p.numel() for p in model.parameters())
        self.ema: ModelEmaV3 | None = None
        average = config.ema
        if average.decay is not None:
            if sharded:
                raise UserError("ema.decay: not available when the model is sharded (FSDP); use DDP or ema.decay=null.")
            self.ema = ModelEmaV3(
                model, decay=average.decay, use_warmup=average.warmup, exclude_buffers=not average.buffers
            )
        self.images_per_step = self.task.train.batch_size * self.where.world * config.train.accumulate
        self.steps_per_epoch = len(self.task.train) // config.train.accumulate
        if self.steps_per_epoch == 0:
            raise UserError(
                f"train.accumulate: got {config.train.accumulate}, wanted at most the {len(self.task.train)} batches of an epoch."
            )
        self.total = self.steps_per_epoch * config.schedule.epochs
        optimizer = build_optimizer(model, config.optimizer, self.images_per_step)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        if config.model.compile == "blocks":
            compile_blocks(model, config.model)
        tell_unknown_options(config.model, self._note)
        inner: Any = self.optimizer
        self.inner: torch.optim.Optimizer = inner.optimizer
        self.replayed = self._replayed_update()
        self.schedule = build_schedule(self.inner, config.schedule, self.steps_per_epoch)
        self.first_bad = torch.full((), NEVER, dtype=torch.int64, device=self.where.device)
        self.skipped = 0

    def _replayed_update(self) -> ReplayedUpdate | None:
        if not self.config.model.cuda_graphs:
            return None
        if self.where.device.type != "cuda":
            self._note(f"model.cuda_graphs: got true on {self.where.device}, which has none; the network is launched")
            return None
        alone = self.where.world == 1 and self.accelerator.scaler is None
        if not (alone and ReplayedUpdate.suits(self.inner)):
            return None
        return ReplayedUpdate(self.inner, self.config.train.clip, self._note)

    def _begin(self, resume: Path | None, quiet: bool) -> None:
        # Each process draws its own dropout and mixing.
        seed_everything(seed_of(self.config.train.seed, self.where.rank))
        if self.leader:
            (self.run / checkpoints.FOLDER).mkdir(parents=True, exist_ok=True)
            self.claim = checkpoints.claim(self.run)
            checkpoints.clean(self.run)
        if resume is not None:
            self.resumed = checkpoints.load_checkpoint(resume)
            self._load(self.resumed)
            self._leave_later_ones(self.resumed)
        if self.leader:
            replace_file(self.run / CONFIG, to_yaml(self.config))
        self.report = Reporter(
            self.run,
            leader=self.leader,
            total=self.end(),
            start=self.place.step,
            tensorboard=self.config.log.tensorboard,
            quiet=quiet,
        )
        self.report.row(
            "plan", self.place.step, self.place.epoch, {"total": self.end(), "epoch_steps": self.steps_per_epoch}
        )

    def end(self) -> int:
        """The step the run ends after."""
        limit = self.config.train.max_steps
        return self.total if limit is None else min(limit, self.total)

    # ---- checkpoints ----

    def save(self, metrics: dict[str, float] | None = None) -> Path | None:
        """Write a checkpoint of this moment; all processes take part, the first one writes."""
        self._check_finite()
        groups = {"model": state.model_state(self.model)}
        groups["optimizer"], values = state.optimizer_state(self.model, self.inner)
        if self.ema is not None:
            groups["ema"] = self.ema.module.state_dict()
        generators = gather_object([state.random_state(self.where.device)])
        path = None
        failure = self._broken_weights(groups["model"])
        if self.leader and failure is None:
            groups["random"] = {f"{rank}.{k}": v for rank, one in enumerate(generators) for k, v in one.items()}
            scaler = self.accelerator.scaler
            saved = {
                "step": self.place.step,
                "epoch": self.place.epoch,
                "in_epoch": self.place.in_epoch,
                "images_per_step": self.images_per_step,
                "world": self.where.world,
                "skipped": self.skipped,
                "metrics": finite(metrics),
                "score": None if metrics is None else finite(self._score(metrics)),
                "optimizer": values,
                "scaler": None if scaler is None else scaler.state_dict(),
                "task": self.config.task,
                "card": self.task.card(),
                "config": self.config.model_dump(mode="json"),
            }
            try:
                path = checkpoints.write(self.run, saved, groups)
                checkpoints.prune(self.run, self.config.checkpoint.keep)
            except UserError as error:
                failure = str(error)
        # The others must not wait for ever for a leader that has failed.
        failure = gather_object([failure])[0]
        if failure is not None:
            raise UserError(failure)
        return path

    def _broken_weights(self, tensors: dict[str, Tensor]) -> str | None:
        """The sentence for weights that an update with finite loss made inf or NaN: such a checkpoint is none to go on from."""
        learnt = [tensors[name] for name, _ in self.bare.named_parameters() if name in tensors]
        if all(bool(torch.isfinite(tensor).all()) for tensor in learnt):
            return None
        return self._bad_sentence("the weights are", self.place.step, ADVICE)

    def _score(self, metrics: dict[str, float]) -> float:
        name = f"ema_{self.task.metric}" if self.ema is not None else self.task.metric
        return metrics[name] if self.task.larger_is_better else -metrics[name]

    def _load(self, checkpoint: checkpoints.Checkpoint) -> None:
        saved, source = checkpoint.state, f"checkpoint {checkpoint.path}"
        checkpoint.want("task", "config", "optimizer", "scaler", *NUMBERS)
        if saved["task"] != self.config.task:
            raise UserError(f"{source} is of task {saved['task']!r}, wanted {self.config.task!r}.")
        weights, moments = checkpoint.tensors("model"), checkpoint.tensors("optimizer")
        state.load_model(self.model, weights, source)
        try:
            state.load_optimizer(self.model, self.inner, moments, saved["optimizer"], self.config.optimizer.options)
        except (KeyError, ValueError, RuntimeError) as error:
            before = saved["config"]["optimizer"]["name"]
            raise UserError(
                f"{source} holds what optimizer.name={before} had gathered, which {self.config.optimizer.name} with these "
                f"options has no place for ({error}); resume with the options it was trained with."
            ) from error
        # Once more: torch makes an optimiser's state by a step of size 0, which need not leave every weight as it is.
        state.load_model(self.model, weights, source)
        if self.ema is not None:
            if not checkpoint.has("ema"):
                raise UserError(f"{source} has no moving average; resume with ema.decay=null.")
            state.load_model(self.ema.module, checkpoint.tensors("ema"), source)
        if saved["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(saved["scaler"])
        self.skipped = saved["skipped"]
        # With another number of processes, another batch or other images: as many images into the same epoch.
        in_epoch = min(saved["in_epoch"] * saved["images_per_step"] // self.images_per_step, self.steps_per_epoch)
        self.place = _Place(saved["epoch"] * self.steps_per_epoch + in_epoch, saved["epoch"], in_epoch)
        generators = checkpoint.tensors("random")
        prefix = f"{self.where.rank}."
        own = {key.removeprefix(prefix): value for key, value in generators.items() if key.startswith(prefix)}
        if saved["world"] == self.where.world and own:
            state.load_random(own, self.where.device)
        self.schedule.step_update(self.place.step)

    def _leave_later_ones(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Going on from an earlier step, or counting steps of another size, the run's later checkpoints are not its own."""
        if not checkpoints.belongs(checkpoint.path, self.run):
            return
        self.accelerator.wait_for_everyone()  # the others may still be reading
        last = min(checkpoint.step, self.place.step)
        moved = checkpoints.set_aside_later(self.run, last) if self.leader else []
        if moved:
            self._note(f"set aside what came after step {last}: {', '.join(map(str, moved))}")
        if self.place.step < checkpoint.step:
            self.save()

    # ---- the loop ----

    def fit(self) -> Result:
        """Train to the end, evaluating and saving on the way."""
        began, metrics = time.perf_counter(), dict[str, float]()
        epochs = self.config.schedule.epochs
        spent = images = 0.0
        path: Path | None = None
        if self.resumed is not None and self.place.step >= self.end():
            metrics, path = self.resumed.state.get("metrics") or {}, self.resumed.path
            self._note(
                f"{self.run} has done its {self.end()} steps already; for more set schedule.epochs or train.max_steps"
            )
        try:
            if self.place.step < self.end():
                self.ahead.wait()
            with exactness(self.config.train.deterministic), self._signals(), compiling(self.config.model):
                while self.place.step < self.end():
                    start, first = time.perf_counter(), self.place.step
                    self.model.train()
                    self._train_epoch()
                    self._check_finite()
                    spent += time.perf_counter() - start
                    images += (self.place.step - first) * self.images_per_step
                    last = self.place.step >= self.end()
                    finished = self.place.in_epoch == self.steps_per_epoch
                    evaluated = None
                    if last or (finished and (self.place.epoch + 1) % self.config.train.eval_every == 0):
                        metrics = evaluated = self._evaluate(epochs)
                    due = finished and (self.place.epoch + 1) % self.config.checkpoint.every_epochs == 0
                    if finished:
                        self.place = _Place(self.place.step, self.place.epoch + 1, 0)
                    if last or due:
                        path = self.save(evaluated)
                    if not last:
                        self._stop_if_asked(saved=path if due else None)
            return self._finish(metrics, time.perf_counter() - began, spent, images, path)
        except OSError as error:
            if not disk_full(error):
                raise
            raise checkpoints.cannot_write(self.run, f"into {self.run}", error) from error
        finally:
            self.ahead.stop()
            self.report.close()
            if self.claim is not None:
                self.claim.close()

    def _train_epoch(self) -> None:
        config, place = self.config, self.place
        accumulate = config.train.accumulate
        batches = self.task.train.epoch(place.epoch, place.in_epoch * accumulate)
        shown: list[dict[str, Tensor]] = []
        clock = time.perf_counter()
        while place.in_epoch < self.steps_per_epoch and place.step < self.end():
            shown.append(self._step(batches))
            place.step += 1
            place.in_epoch += 1
            if self.on_step is not None:
                self.on_step(self)
            due = place.step % config.log.every == 0 or place.in_epoch == self.steps_per_epoch
            values = None
            if due:
                self._check_finite()
                values = self._means(shown)
                now = time.perf_counter()
                values["images_per_s"] = len(shown) * self.images_per_step / (now - clock)
                values["lr"] = self.inner.param_groups[0]["lr"]
                clock = now
                shown.clear()
                self.losses.append(values["loss"])
                self.report.row("train", place.step, place.epoch, values)
            self.report.advance(place.step, place.epoch, config.schedule.epochs, values)
            every = config.checkpoint.every_steps
            saved = None
            if every is not None and place.step % every == 0 and place.in_epoch < self.steps_per_epoch:
                saved = self.save()
            if place.in_epoch < self.steps_per_epoch and place.step < self.end():
                self._stop_if_asked(saved)

    def _step(self, batches: Iterator[Any]) -> dict[str, Tensor]:
        """One update from `accumulate` micro-batches; the means over them of what the task shows."""
        config, accelerator = self.config.train, self.accelerator
        guarded = config.bad_steps > 0
        buffers = [buffer.clone() for buffer in self.bare.buffers()] if guarded else []
        losses, extras = [], []
        if self.config.model.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        for micro in range(config.accumulate):
            batch = next(batches)
            last = micro == config.accumulate - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(self.model):
                with accelerator.autocast():
                    loss, extra = self.task.loss(self.model, batch, self.place.epoch)
                accelerator.backward(loss / config.accumulate)
            losses.append(loss.detach().float())
            extras.append(extra)
        loss = torch.stack(losses).mean()
        if guarded and self._agreed_bad(loss):
            self._skip(buffers)
        else:
            step = torch.full_like(self.first_bad, self.place.step + 1)
            self.first_bad = torch.where(torch.isfinite(loss), self.first_bad, torch.minimum(self.first_bad, step))
            if self.where.device.type == "cpu" and self.where.world == 1:
                self._check_finite()
            if self.replayed is not None:
                self.replayed()
            else:
                if config.clip is not None:
                    accelerator.clip_grad_norm_(self.model.parameters(), config.clip)
                self.optimizer.step()
            if self.ema is not None:
                self.ema.update(self.bare, self.place.step + 1)
        self.optimizer.zero_grad()
        self.schedule.step_update(self.place.step + 1)
        return {"loss": loss, **{k: torch.stack([e[k] for e in extras]).mean() for k in extras[0]}}

    def _means(self, shown: list[dict[str, Tensor]]) -> dict[str, float]:
        """Means over steps and processes, in one transfer from the device; what is not finite (skipped steps) is left out."""
        means = torch.stack([_finite_mean(torch.stack([step[name] for step in shown])) for name in shown[0]])
        if self.where.world > 1:
            torch.distributed.all_reduce(means)
            means /= self.where.world
        return dict(zip(shown[0], means.tolist(), strict=True))

    # ---- what can go wrong ----

    def _agreed_bad(self, loss: Tensor) -> bool:
        fine = torch.isfinite(loss).to(torch.int32)
        return bool(self._smallest(fine) == 0)

    def _smallest(self, value: Tensor) -> int:
        if self.where.world > 1:
            value = value.clone()
            torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MIN)
        return int(value)

    def _skip(self, buffers: list[Tensor]) -> None:
        """Undo a step with a non-finite loss; its statistics must not stay either."""
        self.skipped += 1
        step, allowed = self.place.step + 1, self.config.train.bad_steps
        if self.skipped > allowed:
            raise UserError(self._bad_sentence("the loss is", step, f"after {allowed} skipped ones"))
        for buffer, before in zip(self.bare.buffers(), buffers, strict=True):
            buffer.copy_(before)
        self.report.note(f"step {step}: the loss is not finite; skipped ({self.skipped} of at most {allowed})")

    def _check_finite(self) -> None:
        """Refuse to go on, or to save, after a step whose loss was not finite. All processes call it at the same steps."""
        bad = self._smallest(self.first_bad)
        if bad != NEVER:
            raise UserError(
                self._bad_sentence("the loss is", bad, f"{ADVICE}, or skip such steps with train.bad_steps")
            )

    def _bad_sentence(self, what: str, step: int, more: str) -> str:
        saved = checkpoints.listed(self.run)
        last = f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
        return f"{what} not finite at step {step}; {last}; {more}."

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM ask for an orderly end; a second one ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, frame: Any) -> None:
            if self.signal is not None:
                raise KeyboardInterrupt
            self.signal = number

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop_if_asked(self, saved: Path | None) -> None:
        number = self.signal or 0
        if self.where.world > 1:
            # One process may hear of it a step before another: agree, but not at every step.
            if self.place.step % 10:
                return
            number = max(gather_object([number]))
        if number:
            path = saved or self.save()
            raise Stopped(number, self.place.step, self.run, path)

    # ---- the end ----

    def _evaluate(self, epochs: int) -> dict[str, float]:
        with self.accelerator.autocast(), uncompiled(self.config.model):
            metrics = self.task.evaluate(self.model)
            if self.ema is not None:
                averaged = self.task.evaluate(self.ema.module)
                metrics.update({f"ema_{name}": value for name, value in averaged.items() if name != "images"})
        self.report.row("eval", self.place.step, self.place.epoch, metrics)
        parts = [f"{name} {100 * v:.2f} %" if "accuracy" in name else f"{name} {v:.4g}" for name, v in metrics.items()]
        loss = f"train loss {self.losses[-1]:.4f}, " if self.losses else ""
        self.report.note(f"epoch {self.place.epoch + 1}/{epochs}: {loss}{', '.join(parts)}")
        return metrics

    def _finish(
        self, metrics: dict[str, float], seconds: float, spent: float, images: float, path: Path | None
    ) -> Result:
        rate = images / spent if spent else 0.0
        per_epoch = self.steps_per_epoch * self.images_per_step / rate if rate else 0.0
        best = checkpoints.best(self.run) if self.leader else None
        score = checkpoints.open_checkpoint(best).score if best is not None else None
        result = Result(
            self.run, self.place.step, metrics, score, seconds, per_epoch, rate, self.parameters, path, self.losses
        )
        finish = getattr(self.task, "finish", None)
        if self.leader and finish is not None:
            finish(self.run)
        if self.leader and spent:
            summary = {
                "model": self.config.model.name,
                "step": result.step,
                "epochs": self.place.epoch,
                "metrics": metrics,
                "best": score,
                "parameters": self.parameters,
                "lr": scaled_lr(self.config.optimizer, self.images_per_step),
                "images_per_step": self.images_per_step,
                "images_per_s": round(rate, 1),
                "seconds": round(seconds, 2),
                "seconds_per_epoch": round(per_epoch, 3),
                "device": str(self.where.device),
                "world": self.where.world,
            }
            if self.where.device.type == "cuda":
                summary["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.where.device)
            replace_file(self.run / SUMMARY, json.dumps(finite(summary), indent=1) + "\n")
        return result


def _finite_mean(values: Tensor) -> Tensor:
    counted = torch.isfinite(values)
    return values.where(counted, 0).sum() / counted.sum()


def fit(
    config: RunConfig,
    run: str | Path,
    *,
    resume: str | Path | None = None,
    quiet: bool = False,
    on_step: Callable[[Trainer], None] | None = None,
) -> Result:
    """Train a config into a run folder; `resume` names a checkpoint folder or the run's own."""
    folder = Path(run)
    checkpoint = None
    if resume is not None:
        checkpoint = checkpoints.find(resume, which="last").path
    # Of a run that is not its own it could keep none of the new ones: those with the highest steps stay.
    if checkpoints.listed(folder) and (checkpoint is None or not checkpoints.belongs(checkpoint, folder)):
        raise UserError(f"run {folder} has checkpoints already; go on with --resume {folder} or name another --out.")
    return Trainer(config, folder, resume=checkpoint, quiet=quiet, on_step=on_step).fit()
