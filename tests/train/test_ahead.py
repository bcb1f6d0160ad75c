"""Blocks compiled ahead by processes: the run finds all of it, whatever happens to them it goes on, and none stays behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn
from torch._dynamo.utils import counters

from nearsight.train import ahead, engine
from nearsight.train.config import RunConfig
from nearsight.train.engine import Trainer
from nearsight.train.process import make_accelerator
from nearsight.train.tasks import task_class
from tests.train.support import small

# Two kinds of blocks, since drop path differs.
NETWORK = {
    "name": "test_vit2",
    "drop_path": 0.1,
    "options": {"depth": 2, "embed_dim": 16, "num_heads": 2, "img_size": 8, "patch_size": 4},
}


def config_of(train: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **model: Any) -> RunConfig:
    return small(
        model={**NETWORK, "compile": "blocks", "compile_processes": 2, **model},
        train={"max_steps": 2, "precision": "bf16", **(train or {})},
        data={"batch_size": 16, **(data or {})},
        log={"every": 1},
        checkpoint={"every_steps": None},
        ema={"decay": None},
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The compiler's caches in a folder of their own, empty."""
    move_caches(tmp_path / "caches", monkeypatch)
    return tmp_path


def move_caches(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(root / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(root / "triton"))


def trained(config: RunConfig, run: Path) -> tuple[list[float], dict[str, int], list[str]]:
    """A run's losses, what the caches were asked, and what it told."""
    torch._dynamo.reset()
    counters.clear()
    told: list[str] = []
    trainer = Trainer(config, run, quiet=True)
    trainer.report.note = told.append  # type: ignore[method-assign]
    trainer.ahead.tell = told.append
    losses = trainer.fit().losses
    asked = {
        name: n for group in ("aot_autograd", "inductor") for name, n in counters[group].items() if "cache" in name
    }
    return losses, asked, told


def found_all(asked: dict[str, int], kinds: int) -> bool:
    """Nothing but hits: a graph for each kind, and of each its forward and backward."""
    return asked == {"autograd_cache_hit": kinds, "fxgraph_cache_hit": 2 * kinds}


def started(config: RunConfig, told: list[str], accelerator: Any = None) -> ahead.Ahead:
    """As a run starts its children."""
    children = ahead.Ahead(config, told.append)
    children.start(accelerator or make_accelerator(config))
    return children


@pytest.fixture
def _set_otherwise(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads and precision of products that a process does not have by itself: code depends on both."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
@pytest.mark.usefixtures("_set_otherwise")
def test_a_run_finds_what_a_child_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One child does its share, the other nothing: of the two kinds the run finds one, and compiles one."""
    commands = iter([ahead._command(), child("pass")()])
    monkeypatch.setattr(ahead, "_command", lambda: next(commands))
    losses, asked, told = trained(config_of(), folder / "a")
    assert asked.pop("autograd_cache_saved") == 1
    assert asked == {
        "autograd_cache_hit": 1,
        "autograd_cache_miss": 1,
        "fxgraph_cache_hit": 2,
        "fxgraph_cache_miss": 2,
    }
    assert len(losses) == 2
    assert len(told) == 2
    assert told[0].startswith("model.compile_processes: waited ")
    assert told[0].endswith(" s for 2 processes that compiled ahead")
    # The mark: nothing is started for this network again, but for another one.
    accelerator = make_accelerator(config_of())
    marks = [ahead._mark(config_of(**keys), accelerator.device).exists() for keys in ({}, {"cuda_graphs": True})]
    assert marks == [True, False]
    monkeypatch.setattr(ahead, "_command", refuse)
    assert started(config_of(), told).children == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
@pytest.mark.parametrize(
    ("kinds", "model"),
    [
        (2, {"channels_last": True}),
        (4, {"name": "expatt_resnet_nano", "drop_path": None, "options": {}, "channels_last": True}),
    ],
)
def test_a_run_is_the_same_with_children_and_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kinds: int, model: dict[str, Any]
) -> None:
    with_children, asked, _ = trained(config_of(**model), folder / "a")
    assert found_all(asked, kinds), asked
    move_caches(folder / "others", monkeypatch)
    without, asked, told = trained(config_of(compile_processes=0, **model), folder / "b")
    assert asked["fxgraph_cache_miss"] == 2 * kinds
    assert len(told) == 1
    assert with_children == without


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_a_run_on_a_gpu_finds_what_its_children_compiled(folder: Path, graphs: bool) -> None:
    aa = {"name": "aa_resnet50_cifar", "drop_path": None, "options": {"stages": "caaa", "img_size": 32}}
    config = config_of(
        {"device": "auto", "max_steps": 6, "deterministic": False},
        {"image_size": 32, "batch_size": 64},
        **{**aa, "channels_last": True, "cuda_graphs": graphs, "compile_processes": 4},
    )
    _, asked, told = trained(config, folder / "a")
    assert asked["fxgraph_cache_hit"] == 16, (asked, told)
    assert "fxgraph_cache_miss" not in asked


def refuse(*arguments: Any) -> Any:
    raise AssertionError("nothing was to be started")


def child(code: str) -> Callable[[], list[str]]:
    return lambda: [sys.executable, "-c", f"import sys, time; sys.stdin.readline(); {code}"]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's own compilation left out: these tests look at its children."""
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: None)


@pytest.mark.usefixtures("eager")
def test_a_child_that_fails_is_told_and_the_run_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_command", child("raise ValueError('no room')"))
    losses, _, told = trained(config_of(), folder / "a")
    assert len(losses) == 2
    assert told[0] == (
        "model.compile_processes: 2 of 2 processes failed to compile ahead (ValueError: no room); "
        "the run compiles for itself what they leave out"
    )
    plain, _, _ = trained(config_of(compile_processes=0), folder / "b")
    assert losses == plain, "nor does it draw other numbers"


@pytest.mark.usefixtures("eager")
def test_a_python_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_command", lambda: ["/no/such/python"])
    told: list[str] = []
    started(config_of(), told).wait()
    assert len(told) == 1
    assert told[0].startswith("model.compile_processes: cannot start processes ([Errno 2] ")


def test_children_belong_to_no_group_of_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher's variables would have them wait for each other at its address."""
    config = config_of(compile_processes=1)
    alone = make_accelerator(config)
    for name in ahead.LAUNCHER:
        monkeypatch.setenv(name, "0")
    told: list[str] = []
    code = "import os; raise ValueError(sorted({'RANK', 'WORLD_SIZE', 'MASTER_PORT'} & os.environ.keys()))"
    monkeypatch.setattr(ahead, "_command", child(code))
    started(config, told, alone).wait()
    assert told[0].startswith("model.compile_processes: 1 of 1 process failed to compile ahead (ValueError: []); ")


def test_tritons_folder_is_the_one_inductor_takes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    ahead._settle_triton(torch.device("cuda"))
    assert os.environ["TRITON_CACHE_DIR"] == str(folder / "caches" / "triton"), "the user's own"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    ahead._settle_triton(torch.device("cpu"))
    assert "TRITON_CACHE_DIR" not in os.environ
    ahead._settle_triton(torch.device("cuda"))
    assert os.environ["TRITON_CACHE_DIR"] == str(folder / "caches" / "inductor" / "triton" / "1")


@pytest.mark.usefixtures("eager")
def test_a_child_that_hangs_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "PATIENCE", 0.2)
    monkeypatch.setattr(ahead, "_command", child("time.sleep(100)"))
    told: list[str] = []
    run = started(config_of(), told)
    run.wait()
    assert "2 of 2 processes failed to compile ahead (not done after 0 s)" in told[0]
    assert all(each.returncode == -signal.SIGKILL for each in run.children)


@pytest.mark.parametrize("moment", ["built", "waited for"])
@pytest.mark.usefixtures("eager")
def test_ctrl_c_leaves_no_child_behind(folder: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    made: list[ahead.Ahead] = []

    class Noted(ahead.Ahead):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    def interrupt(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(ahead, "_command", child("time.sleep(100)"))
    monkeypatch.setattr(engine, "Ahead", Noted)
    if moment == "built":
        monkeypatch.setattr(engine, "build_task", interrupt)
    else:
        monkeypatch.setattr(ahead.Ahead, "_fault", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Trainer(config_of(), folder / "a", quiet=True).fit()
    assert len(made[0].children) == 2
    assert all(each.returncode == -signal.SIGKILL for each in made[0].children)
    assert not ahead._mark(config_of(), torch.device("cpu")).exists()


@pytest.mark.parametrize("copies", [0, 2])
def test_children_end_with_a_run_that_is_killed(folder: Path, copies: int) -> None:
    at_work = (
        "import sys, time, threading, os; from nearsight.train import ahead; sys.stdin.readline(); "
        "threading.Thread(target=ahead._end_with_the_run, daemon=True).start(); "
        f"open(f'{folder}/{{os.getpid()}}.pid', 'w').close(); time.sleep(100)"
    )
    run = (
        "import sys, time; from tests.train.test_ahead import ahead, config_of, started; "
        f"ahead._copies = lambda config: {copies}; ahead.main = lambda: exec({at_work!r}); "
        f"ahead._command = lambda: [sys.executable, '-c', {at_work!r}]; "
        "kept = started(config_of(), []); time.sleep(100)"
    )
    parent = subprocess.Popen([sys.executable, "-c", run])
    try:
        wait_for(lambda: len(list(folder.glob("*.pid"))) == 2)
    finally:
        parent.kill()
        parent.wait()
    for file in folder.glob("*.pid"):
        wait_for(lambda pid=int(file.stem): not alive(pid))


# In a process of its own: this one has threads.
COPIES = """
import json, sys
from pathlib import Path
from tests.train.test_ahead import ahead, config_of, refuse, torch, trained
ahead._copies = lambda config: 3
ahead._spawn = refuse
torch.set_num_threads(1)
losses, asked, told = trained(config_of(), Path(sys.argv[1]))
print(json.dumps([asked, told]))
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_a_run_finds_what_its_copies_compiled(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", COPIES, str(folder / "a")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    asked, told = json.loads(done.stdout.splitlines()[-1])
    assert found_all(asked, 2), (asked, told)
    assert told[0].endswith(" s for 2 processes that compiled ahead")


def copies_of(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(ahead, "_copies", lambda config: count)
    monkeypatch.setattr(ahead, "_spawn", refuse)
    # Other tests have asked for a GPU here; on a CPU a copy can do without.
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)


def test_copies_that_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        sys.stdin.readline()
        raise ValueError("no room")

    copies_of(monkeypatch, 2)
    monkeypatch.setattr(ahead, "main", fail)
    told: list[str] = []
    started(config_of(), told).wait()
    assert "2 of 2 processes failed to compile ahead (ValueError: no room); " in told[0]


def test_copies_that_hang(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies_of(monkeypatch, 2)
    monkeypatch.setattr(ahead, "PATIENCE", 0.2)
    monkeypatch.setattr(ahead, "main", lambda: time.sleep(100))
    told: list[str] = []
    run = started(config_of(), told)
    run.wait()
    assert "2 of 2 processes failed to compile ahead (not done after 0 s)" in told[0]
    assert all(each.returncode == -signal.SIGKILL for each in run.children)


def test_copies_that_are_not_needed_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies_of(monkeypatch, 3)
    run = ahead.Ahead(config_of(compile_processes=1), [].append)
    copies = list(run.children)
    run.start(make_accelerator(config_of()))
    assert run.children == copies[:1]
    assert [each.returncode for each in copies[1:]] == [-signal.SIGKILL] * 2
    run.stop()
    assert copies[0].returncode == -signal.SIGKILL


def test_a_copy_that_cannot_use_the_gpu_starts_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What asked for it before the fork leaves the copies without; a Python of its own reads the same request."""
    copies_of(monkeypatch, 2)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    code = f"import json, sys; open(f'{folder}/' + str(json.loads(sys.stdin.readline())['share']), 'w').close()"
    monkeypatch.setattr(ahead, "_command", lambda: [sys.executable, "-c", code])
    told: list[str] = []
    started(config_of(), told).wait()
    assert told[0].endswith(" s for 2 processes that compiled ahead")
    assert all((folder / str(share)).exists() for share in range(2))


def test_who_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_cores", lambda: 16)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(ahead.threading, "active_count", lambda: 1)
    on_gpu = config_of({"device": "auto"}, compile_processes=None)
    assert ahead._copies(on_gpu) == 8
    assert ahead._copies(config_of({"device": "auto"}, compile_processes=3)) == 3
    for config in (config_of(), config_of({"device": "auto"}, compile=True, compile_processes=None)):
        assert ahead._copies(config) == 0
    for owner, name, value in (
        (torch.cuda, "device_count", 0),
        (torch.cuda, "is_initialized", True),
        (ahead.threading, "active_count", 2),
        (ahead, "_cores", 4),
    ):
        with monkeypatch.context() as change:
            change.setattr(owner, name, lambda value=value: value)
            assert ahead._copies(on_gpu) == 0, name
    monkeypatch.setenv("RANK", "0")
    assert ahead._copies(on_gpu) == 0


def test_who_searches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[RunConfig] = []
    monkeypatch.setattr(ahead, "search_algorithms", lambda config, accelerator: searched.append(config))
    monkeypatch.setattr(ahead, "_command", child("pass"))
    gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    told: list[str] = []
    fast = config_of({"deterministic": False})
    run = started(fast, told)
    run.search(make_accelerator(fast))
    assert searched == [], "a CPU has no cuDNN"
    run.search(gpu)
    assert searched == [fast]
    exact = config_of({"deterministic": True})
    started(exact, told).search(gpu)
    started(config_of({"deterministic": False}, compile_processes=0), told).search(gpu)
    assert len(searched) == 1
    monkeypatch.setattr(ahead, "search_algorithms", refuse)
    assert told == []
    run.search(gpu)
    assert told == ["cuDNN's algorithms are searched for in the first step (AssertionError before it)"]


def wait_for(true: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # Nobody may have asked how it ended.
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def test_where_it_would_gain_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_command", refuse)
    told: list[str] = []
    alone = make_accelerator(config_of())
    for config in (
        config_of(compile=False, compile_processes=None),
        config_of(compile=True, compile_processes=None),
        config_of(compile_processes=0),
        config_of(compile_processes=None),  # on a CPU, which compiles with all its cores
    ):
        assert started(config, told, alone).children == []
    assert told == []
    several = SimpleNamespace(device=alone.device, state=alone.state, distributed_type=DistributedType.MULTI_CPU)
    started(config_of(), told, several)
    started(config_of(compile_processes=None), told, several)
    sharded = SimpleNamespace(fsdp_plugin=object())
    started(config_of(), told, SimpleNamespace(device=alone.device, state=sharded, distributed_type=DistributedType.NO))
    assert told == ["model.compile_processes: nothing is compiled ahead, which is for one training process"] * 2
    told.clear()
    started(config_of(compile_options={"fx_graph_cache": False}), told)
    started(config_of(compile_options={"force_disable_caches": True}), told)
    assert (
        told == ["model.compile_processes: nothing is compiled ahead, since the compiler's caches are switched off"] * 2
    )
    told.clear()
    monkeypatch.delattr(task_class("classify"), "example")
    started(config_of(), told)
    assert told == [
        "model.compile_processes: nothing is compiled ahead, since task classify has no batches of one shape"
    ]


@pytest.mark.parametrize(("cores", "free", "count"), [(16, 139, 8), (8, 139, 4), (7, 139, 0), (64, 20, 2), (16, 7, 0)])
def test_as_many_as_there_is_room_for(cores: int, free: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_cores", lambda: cores)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 30, 140 << 30))
    assert ahead._fitting(torch.device("cuda")) == count
    assert ahead._fitting(torch.device("cpu")) == 0
