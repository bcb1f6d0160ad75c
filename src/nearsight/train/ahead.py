"""Blocks compiled ahead: child processes compile the kinds of blocks side by side and leave what they made in the caches on disk.

A compilation is one thread of Python. A run starts its children before it reads its images and builds its network, and waits for
them before its first step, whose own compilation then finds everything there. Nothing else passes between them: where a
child fails, the run compiles for itself.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import nearsight
from nearsight.train.compilation import compile_blocks, compiling, repeated_blocks
from nearsight.train.config import ModelConfig, RunConfig
from nearsight.train.process import exactness, make_accelerator
from nearsight.train.tasks import config_from, task_class

__all__ = ["Ahead", "Call", "compile_share", "first_of_each_kind", "start"]

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
    """The children of a run, perhaps none."""

    def __init__(self, commands: Sequence[Sequence[str]], request: str, mark: Path | None, tell: Callable[[str], None]):
        self.mark, self.tell = mark, tell
        self.children: list[subprocess.Popen[str]] = []
        self.messages: list[IO[str]] = []
        # Whatever becomes of the run, they end with it: at the latest when the pipes they read from close.
        self.stop = weakref.finalize(self, _stop, self.children, self.messages)
        if not commands:
            return
        share = max(1, _cores() // len(commands))
        env = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
        env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(share))
        env["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        try:
            for command in commands:
                messages = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  (closed by stop)
                self.messages.append(messages)
                child = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=messages, stderr=messages, env=env, text=True
                )
                self.children.append(child)
                assert child.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # it has failed already, and says why
                    child.stdin.write(request + "\n")
                    child.stdin.flush()
        except OSError as error:
            self.stop()
            tell(f"model.compile_processes: cannot start processes ({error}); the run compiles for itself")
        except BaseException:
            self.stop()
            raise

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
            # The run needs the compiler as well, whose import takes seconds.
            import torch._inductor.compile_fx  # noqa: F401

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


def _stop(children: Sequence[subprocess.Popen[str]], messages: Sequence[IO[str]]) -> None:
    for child in children:
        child.kill()
    for child in children:
        assert child.stdin is not None
        with contextlib.suppress(OSError):
            child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # nothing is waited for without end
            child.wait(10)
    for file in messages:
        file.close()


# What a launcher tells a process of its group, to which the children do not belong.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def start(config: RunConfig, accelerator: Accelerator, tell: Callable[[str], None]) -> Ahead:
    """The children of a run, started; none where its config does not ask for them or they would gain nothing."""
    count, mark = 0, None
    if config.model.compile == "blocks" and config.model.compile_processes != 0:
        obstacle = _obstacle(config, accelerator)
        if obstacle is not None:
            if config.model.compile_processes is not None:
                tell(f"model.compile_processes: nothing is compiled ahead, {obstacle}")
        else:
            _settle_triton(accelerator.device)
            mark = _mark(config, accelerator.device)
            if not mark.exists():
                asked = config.model.compile_processes
                count = _fitting(accelerator.device) if asked is None else asked
    request = {
        "config": config.model_dump(mode="json"),
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "gpu": torch.cuda.current_device() if accelerator.device.type == "cuda" else None,
    }
    return Ahead([_command(share, count) for share in range(count)], json.dumps(request), mark, tell)


def _command(share: int, of: int) -> list[str]:
    # -P: the folder that the user is in is searched as far as it is in sys.path, no further.
    return [sys.executable, "-P", "-m", "nearsight.train.ahead", str(share), str(of)]


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
    if device.type != "cuda" or _cores() < FEWEST_CORES:
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return min(MOST_CHILDREN, _cores() // 2, free // ROOM)


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


class Call(NamedTuple):
    """A block, and what it is called with in a training step (fake tensors: sizes and strides without memory)."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def first_of_each_kind(network: nn.Module, images: Callable[[], Tensor], accelerator: Accelerator) -> list[Call]:
    """The first block of each kind: those that look alike and are called alike share a compilation.

    The network runs on fake tensors, as the compiler itself lets it: in a second, without memory.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    calls: dict[str, Call] = {}

    def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(repr((block, tree_map(_facts, (args, kwargs)))), Call(block, args, kwargs))

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in repeated_blocks(network)]
    mode = FakeTensorMode()
    named = (*network.named_parameters(), *network.named_buffers())
    weights: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in named}
    try:
        with mode:
            inputs = images()
            with accelerator.autocast():
                torch.func.functional_call(network, weights, (inputs,))
    finally:
        for hook in hooks:
            hook.remove()
    return list(calls.values())


def _facts(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (tuple(value.shape), value.stride(), value.dtype, value.requires_grad)


def compile_share(config: RunConfig, share: int, of: int) -> int:
    """Compile every `of`-th kind from `share` on, forward and backward, as a training step would; how many."""
    accelerator = make_accelerator(config)
    task = task_class(config.task)
    network = _filled(task.facts(config).model, accelerator.device, config.model).train()
    with exactness(config.train.deterministic), compiling(config.model):
        torch.backends.cudnn.benchmark = False  # it would search for algorithms that the run searches again
        calls = first_of_each_kind(network, lambda: task.example(config, accelerator.device), accelerator)[share::of]
        compile_blocks(network, config.model)
        for call in calls:
            _step(call, config.model, accelerator)
    return len(calls)


def _filled(network: nn.Module, device: torch.device, model: ModelConfig) -> nn.Module:
    """A network from the meta device on a real one; weights of zero are as good as any."""
    network = network.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.zero_()
    return network.to(memory_format=torch.channels_last) if model.channels_last else network


def _step(call: Call, model: ModelConfig, accelerator: Accelerator) -> None:
    if model.cuda_graphs:
        torch.compiler.cudagraph_mark_step_begin()
    args, kwargs = tree_map(_real, (call.args, call.kwargs))
    with accelerator.autocast():
        result = call.block(*args, **kwargs)
    outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    torch.autograd.backward(outputs, [torch.zeros_like(t) for t in outputs])


def _real(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).zero_()
    # Inside a network it is what a layer made, no leaf.
    return tensor.requires_grad_().clone() if value.requires_grad else tensor


def _end_with_the_run() -> None:
    """Its pipe closes when it ends, whatever ends it."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def main() -> None:
    """Read a request, compile this process's share."""
    share, of = map(int, sys.argv[1:])
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    if request["gpu"] is not None:
        torch.cuda.set_device(request["gpu"])
    # Code for a CPU is made for so many threads, and code for products depends on their precision.
    torch.set_num_threads(request["threads"])
    if torch.get_float32_matmul_precision() != request["precision"]:
        torch.set_float32_matmul_precision(request["precision"])
    try:
        compile_share(config_from(request["config"], "the run's config"), share, of)
    except Exception as error:
        traceback.print_exc()
        # The last line is what the run tells.
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
