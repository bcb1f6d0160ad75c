"""What Triton compiles while a test runs."""

import pytest


def watch_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels compiled from now on, in their order."""
    import triton

    names: list[str] = []

    def remember(*, fn, **_):
        names.append(fn.name.rsplit(".", 1)[-1])

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", remember)
    return names
