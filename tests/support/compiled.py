"""What Triton compiles while a test runs."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest


def watch_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels compiled from now on, in their order."""
    import triton

    names: list[str] = []

    def remember(*, fn, **_):
        names.append(fn.name.rsplit(".", 1)[-1])

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", remember)
    return names


def assert_all_wait(cache: Path, names: Iterable[str]) -> None:
    """Started early, a kernel may touch no memory before all that came before it has ended, and the next may come.

    `cache` is where Triton kept the kernels of these names, and no others, compiled for an NVIDIA GPU.
    """
    programs = {path.stem: path.read_text() for path in cache.rglob("*.ptx")}
    assert sorted(programs) == sorted(names)
    for name, program in programs.items():
        first = re.search(r"\b(ld|st|red|atom|prefetch\w*)\.(global|v\d|relaxed)|\bcp\.async|\btensormap", program)
        assert first is not None
        signal, wait = (program.find(f"griddepcontrol.{each}") for each in ("launch_dependents", "wait"))
        assert -1 < signal < wait < first.start(), f"{name} does not wait"
        # Not in a branch that only some programs take.
        branch = re.search(r"\bbra\b", program)
        assert branch is None or wait < branch.start(), f"{name} may not wait"
