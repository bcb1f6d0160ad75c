"""Where and with what a number was measured: every row of a result carries it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

import nearsight

__all__ = ["COMMIT_VARIABLE", "stamp"]

# For a copy of the sources without their git folder.
COMMIT_VARIABLE = "NEARSIGHT_COMMIT"


def stamp(device: torch.device) -> dict[str, str | float | None]:
    """Date, commit, machine and versions, as the columns of a row.

    >>> import torch
    >>> sorted(stamp(torch.device("cpu")))[:5]
    ['commit', 'cuda', 'cudnn', 'date', 'device']
    """
    cuda = device.type == "cuda"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "device": device.type,
        "machine": torch.cuda.get_device_name(device) if cuda else _cpu_name(),
        "threads": torch.get_num_threads(),
        # Others at work on the same cores: read times measured under a high load as ratios at most.
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "nearsight": nearsight.__version__,
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "timm": _version("timm"),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "python": platform.python_version(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit of the sources in use, "+" where they were changed since, "unknown" outside a checkout."""
    given = os.environ.get(COMMIT_VARIABLE)
    if given:
        return given
    here = Path(nearsight.__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        tracked = git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "--short", "HEAD") + (
            "+" if tracked and git("status", "--porcelain", "-uno", ".") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
