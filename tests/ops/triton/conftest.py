"""A Triton driver without a GPU, for what can be known of the kernels before they run."""

import contextlib
import itertools
import types

import pytest
import torch

from nearsight.ops import first_calls
from tests.support.compiled import watch_compilations

# Triton keeps what it compiled per device.
no_such_devices = itertools.count(99)


class Driver:
    """As much of a Triton driver as a launch asks for."""

    utils = types.SimpleNamespace(
        load_binary=lambda *_: (1, 1, 0, 0, 1024), get_device_properties=lambda _: {"max_shared_mem": 232448}
    )

    def __init__(self):
        self.device = next(no_such_devices)
        self.compiled: list[str] = []
        self.launched: list[str] = []

    def get_current_device(self):
        return self.device

    def get_current_stream(self, _):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source, _):
        return lambda *_: self.launched.append(source.fn.fn.__name__)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """The driver, with an empty cache and the names of the kernels compiled since."""
    import triton

    driver = Driver()
    driver.compiled = watch_compilations(monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", driver.get_current_device)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(first_calls, "_compiled", set())
    monkeypatch.setattr(first_calls, "_traced", set())
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return driver
