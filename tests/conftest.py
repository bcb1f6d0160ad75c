"""What every test shares."""

import os
import tempfile
from pathlib import Path

import pytest
import torch

# What Inductor compiled for a processor with other vector instructions it takes for its own, and crashes.
CAPABILITY = torch.backends.cpu.get_cpu_capability()
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"nearsight-inductor-{CAPABILITY}")))


@pytest.fixture(autouse=True)
def _seed():
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    """Tests marked `gpu` need a CUDA device."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
