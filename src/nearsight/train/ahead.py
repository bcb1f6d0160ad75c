"""Blocks compiled ahead: child processes compile the kinds of blocks side by side and leave what they made in the caches on disk.

A compilation is one thread of Python. A run starts its children before it reads its images and builds its network, and waits for
them before its first step, whose own compilation then finds everything there. Nothing else passes between them: where a
child fails, the run compiles for itself.

A child is a copy of the run (a fork), which need not import anything again, or else a Python of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

import nearsight
from nearsight.train.children import Child, Copy, end_at_once, stop
from nearsight.train.config import RunConfig
from nearsight.train.kinds import compile_share, search_algorithms
from nearsight.train.tasks import config_from, task_class

__all__ = ["Ahead"]

# A network has a handful of kinds, and a child without one is a waste.
MOST_CHILDREN = 8
# With fewer cores, children only take turns with each other and with the run.
FEWEST_CORES = 8
# GPU memory for a child: its context, one block's activations at a time, forward and backward.
ROOM = 8 << 30
# Seconds, far more than any compilation takes.
PATIENCE = 300.0


# ---- the run's part ----


class Ahead:
    """The children of a run, perhaps none. Made before the run uses its GPU, which a copy of it could not from then on."""

    def __init__(self, config: RunConfig, tell: Callable[[str], None]):
        self.config, self.tell = config, tell
        self.mark: Path | None = None
        self.children: list[Child] = []
        self.messages: list[IO[str]] = []
        # Whatever becomes of the run, they end with it: at the latest when the pipes they read from close.
        self.stop = weakref.finalize(self, stop, self.children, self.messages)
        self._add(_copies(config), lambda messages: Copy(_work, messages, self.children))

    def start(self, accelerator: Accelerator) -> None:
        """Have them compile, where the config asks for it or it would gain something."""
        count, self.mark = _plan(self.config, accelerator, self.tell)
        stop(self.children[count:], self.messages[count:])
        del self.children[count:], self.messages[count:]
        if not self.children:
            self._add(count, _spawn)
        request = {
            "config": self.config.model_dump(mode="json"),
            "threads": torch.get_num_threads(),
            "precision": torch.get_float32_matmul_precision(),
            "gpu": torch.cuda.current_device() if accelerator.device.type == "cuda" else None,
            "triton": os.environ.get("TRITON_CACHE_DIR"),
            "of": len(self.children),
        }
        for share, child in enumerate(self.children):
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has failed already, and says why
                child.stdin.write(json.dumps({**request, "share": share}) + "\n")
                child.stdin.flush()

    def _add(self, count: int, make: Callable[[IO[str]], Child]) -> None:
        try:
            for _ in range(count):
                messages = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  (closed by stop)
                self.messages.append(messages)
                self.children.append(make(messages))
        except OSError as error:
            stop(self.children, self.messages)
            self.children.clear()
            self.messages.clear()
            self.tell(f"model.compile_processes: cannot start processes ({error}); the run compiles for itself")
        except BaseException:
            self.stop()
            raise

    def search(self, accelerator: Accelerator) -> None:
        """While they compile and leave the GPU alone: cuDNN's search for its algorithms, which the first step would wait for."""
        if not self.children or accelerator.device.type != "cuda" or self.config.train.deterministic:
            return
        try:
            search_algorithms(self.config, accelerator)
        except Exception as error:  # the run does not depend on it
            self.tell(f"cuDNN's algorithms are searched for in the first step ({type(error).__name__} before it)")
        torch.cuda.empty_cache()

    @contextlib.contextmanager
    def stopped_by_failures(self) -> Iterator[None]:
        """What fails within ends the children too."""
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def wait(self) -> None:
        """Until all have ended, with a sentence on how that went; from then on the caches hold this network."""
        if not self.stop.alive or not self.children:
            return
        began, count = time.monotonic(), len(self.children)
        try:
            # The run needs the compiler as well, and at its end this, whose imports take seconds.
            import torch._inductor.compile_fx  # noqa: F401
            import torchmetrics  # noqa: F401

            faults = [fault for i in range(count) if (fault := self._fault(i, began + PATIENCE)) is not None]
            waited = time.monotonic() - began
        finally:
            self.stop()
        many = f"{count} process" + ("es" if count > 1 else "")
        if faults:
            these = f"{len(faults)} of {many} failed to compile ahead ({faults[0]})"
            self.tell(f"model.compile_processes: {these}; the run compiles for itself what they leave out")
        else:
            self.tell(f"model.compile_processes: waited {waited:.1f} s for {many} that compiled ahead")
        # What a child did not compile the run does now: the next one finds it all the same.
        if self.mark is not None:
            with contextlib.suppress(OSError):
                self.mark.touch()

    def _fault(self, number: int, until: float) -> str | None:
        child = self.children[number]
        try:
            code = child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"not done after {PATIENCE:.0f} s"
        if code == 0:
            return None
        messages = self.messages[number]
        messages.seek(0)
        lines = [line.strip() for line in messages.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"exit code {code}"


def _copies(config: RunConfig) -> int:
    """How many copies of this process to keep ready: as many children as there may be. None of a process with threads or a
    GPU in use, which a copy would not have."""
    model = config.model
    if model.compile != "blocks" or model.compile_processes == 0 or config.train.device == "cpu":
        return 0
    alone = hasattr(os, "fork") and threading.active_count() == 1 and not torch.cuda.is_initialized()
    if not alone or LAUNCHER & os.environ.keys() or torch.cuda.device_count() == 0:
        return 0
    return model.compile_processes or _most()


# What a launcher tells a process of its group, to which the children do not belong.
LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def _command() -> list[str]:
    # -P: the folder that the user is in is searched as far as it is in sys.path, no further.
    return [sys.executable, "-P", "-m", "nearsight.train.ahead"]


def _environment() -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    return {**env, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def _spawn(messages: IO[str]) -> Child:
    return subprocess.Popen(
        _command(), stdin=subprocess.PIPE, stdout=messages, stderr=messages, env=_environment(), text=True
    )


def _plan(config: RunConfig, accelerator: Accelerator, tell: Callable[[str], None]) -> tuple[int, Path | None]:
    """How many children are to compile for a run, and the mark that says that they have."""
    asked = config.model.compile_processes
    if config.model.compile != "blocks" or asked == 0:
        return 0, None
    obstacle = _obstacle(config, accelerator)
    if obstacle is not None:
        if asked is not None:
            tell(f"model.compile_processes: nothing is compiled ahead, {obstacle}")
        return 0, None
    _settle_triton(accelerator.device)
    mark = _mark(config, accelerator.device)
    if mark.exists():
        return 0, mark
    return (_fitting(accelerator.device) if asked is None else asked), mark


def _obstacle(config: RunConfig, accelerator: Accelerator) -> str | None:
    """Why children would be of no use to a run."""
    if accelerator.distributed_type != DistributedType.NO or getattr(accelerator.state, "fsdp_plugin", None):
        return "which is for one training process"
    if not hasattr(task_class(config.task), "example"):
        return f"since task {config.task} has no batches of one shape"
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor

    options = config.model.compile_options
    kept = options.get("fx_graph_cache", inductor.fx_graph_cache) and autograd.enable_autograd_cache
    if not kept or options.get("force_disable_caches", inductor.force_disable_caches):
        return "since the compiler's caches are switched off"
    return None


def _fitting(device: torch.device) -> int:
    """As many children as this machine has room for, by cores and by GPU memory."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return min(_most(), free // ROOM)


def _most() -> int:
    """As many children as there are cores for."""
    return min(MOST_CHILDREN, _cores() // 2) if _cores() >= FEWEST_CORES else 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _settle_triton(device: torch.device) -> None:
    """Name the folder where Inductor has Triton keep kernels: it does so itself at the first kernel it compiles, which a run
    that finds everything compiled never does, and which would look for the kernels of our ops elsewhere."""
    if device.type == "cuda" and "TRITON_CACHE_DIR" not in os.environ:
        from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

        os.environ["TRITON_CACHE_DIR"] = triton_cache_dir(torch.cuda.current_device())


def _mark(config: RunConfig, device: torch.device) -> Path:
    """A file in Inductor's cache, and gone with it, that says that this network has been compiled before."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    on_cpu = device.type == "cpu"
    data = getattr(config, "data", None)
    facts = {
        "task": config.task,
        "model": config.model.model_dump(mode="json", exclude={"compile_processes", "pretrained"}),
        "data": [getattr(data, name, None) for name in ("batch_size", "image_size", "channels")],
        "train": [config.train.precision, config.train.deterministic],
        "versions": [torch.__version__, nearsight.__version__],
        "device": ["cpu", torch.get_num_threads()] if on_cpu else [device.type, torch.cuda.get_device_name()],
    }
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()
    return Path(cache_dir()) / f"nearsight-{digest}"


# ---- a child's part ----


def _end_with_the_run() -> None:
    """Its pipe closes when it ends, whatever ends it."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def _work() -> int:
    """A copy's."""
    if torch.cuda._is_in_bad_fork():  # something had asked for the GPU after all
        os.execve(sys.executable, _command(), _environment())
    return main()


def main() -> int:
    """Read a request, compile this process's share; an exit code."""
    request = json.loads(sys.stdin.readline() or "null")
    if request is None:  # the run has ended
        return 0
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    if request["triton"] is not None:
        os.environ["TRITON_CACHE_DIR"] = request["triton"]
    if request["gpu"] is not None:
        torch.cuda.set_device(request["gpu"])
    # Code for a CPU is made for so many threads, and code for products depends on their precision.
    torch.set_num_threads(request["threads"])
    if torch.get_float32_matmul_precision() != request["precision"]:
        torch.set_float32_matmul_precision(request["precision"])
    share, of = request["share"], request["of"]
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config as inductor

        inductor.compile_threads = max(1, _cores() // of)
    try:
        compile_share(config_from(request["config"], "the run's config"), share, of)
    except Exception as error:
        traceback.print_exc()
        # The last line is what the run tells.
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    end_at_once(main())
