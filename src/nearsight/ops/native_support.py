"""C compiled where it runs: find the machine's compiler, build a source once, keep the library, load it.

A library lies in the cache folder under a name made of source, options, compiler and processor. It is written under another name
and renamed, so that processes that build it at once do not disturb each other, and ends with a digest of itself, so that a
damaged one is built again instead of being run.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

from nearsight.folders import cache_folder

__all__ = ["SWITCH", "BuildError", "common_refusal", "library"]

SWITCH = "NEARSIGHT_NATIVE"
# The source asks for products and sums in one step, and for nothing else that changes a result.
OPTIONS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
# Not every compiler has both; the first that works is taken.
TARGETS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-fopenmp",), ())
VARIABLES = ("CC", "PATH", "NEARSIGHT_CACHE", "XDG_CACHE_HOME", "HOME")  # which compiler, which folder
SECONDS = 120  # for one compilation
DIGEST = 32

_lock = threading.RLock()
_loaded: dict[tuple[object, ...], ctypes.CDLL] = {}
_broken: dict[tuple[object, ...], str] = {}


class BuildError(Exception):
    """The compiler is there but gave no library; the text says what came instead."""


def common_refusal(source: Path) -> str | None:
    """Why `source` cannot run on this machine ("needs …, got …"), or None. The first question builds it without constants."""
    if os.environ.get(SWITCH, "1").lower() in ("0", "false", "off", "no"):
        return f"needs {SWITCH} to be 1 or not set, got {os.environ[SWITCH]}"
    try:
        library(source)
    except BuildError as error:
        if _compiler() is None:
            return "needs a C compiler (cc), got none; install one"
        return f"needs a C compiler that works, got {error}"
    return None


def library(source: Path, **constants: int) -> ctypes.CDLL:
    """The library of `source` compiled with these constants: in memory, else from the cache folder, else built."""
    # Asked at every call, so nothing here touches a disk: what the answer may depend on is a part of the key.
    key = (source, *constants.items(), *map(os.environ.get, VARIABLES))
    found = _loaded.get(key)
    if found is not None:
        return found
    with _lock:
        if key in _broken:
            raise BuildError(_broken[key])
        if key not in _loaded:
            try:
                _loaded[key] = _find_or_build(source, tuple(f"-D{name}={value}" for name, value in constants.items()))
            except BuildError as error:
                _broken[key] = str(error)
                raise
        return _loaded[key]


def _compiler() -> tuple[str, ...] | None:
    """$CC with its options, or cc; None where there is no such program."""
    words = shlex.split(os.environ.get("CC", "")) or ["cc"]
    return tuple(words) if shutil.which(words[0]) else None


def _find_or_build(source: Path, constants: tuple[str, ...]) -> ctypes.CDLL:
    command = _compiler()
    if command is None:
        raise BuildError("none")
    fault = "no reason"
    folder = cache_folder() / "native"
    for target in TARGETS:
        options = (*OPTIONS, *target, *constants)
        parts = (source.read_bytes(), *map(str.encode, (*options, *command)), _version(command), _processor())
        name = hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]
        file = folder / f"{source.stem}-{name}.so"
        try:
            if not _sound(file):
                _build(source, (*command, *options), file)
            return ctypes.CDLL(str(file))
        except (OSError, BuildError, subprocess.SubprocessError) as error:
            fault = str(error).strip().partition("\n")[0] or type(error).__name__
    raise BuildError(fault)


def _sound(file: Path) -> bool:
    try:
        content = file.read_bytes()
    except OSError:
        return False
    return len(content) > DIGEST and hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]


def _build(source: Path, command: tuple[str, ...], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        made = Path(scratch) / file.name
        done = subprocess.run(
            [*command, str(source), "-o", str(made), "-lm"],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if done.returncode != 0 or not made.exists():
            raise BuildError(done.stderr.strip() or f"exit status {done.returncode}")
        content = made.read_bytes()
        made.write_bytes(content + hashlib.sha256(content).digest())
        os.replace(made, file)


@cache
def _version(command: tuple[str, ...]) -> bytes:
    try:
        return subprocess.run([*command, "--version"], capture_output=True, timeout=SECONDS, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


@cache
def _processor() -> bytes:
    """What -march=native may depend on."""
    known = {"model name", "flags", "Features", "CPU implementer", "CPU part"}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    described = sorted({line for line in lines if line.partition(":")[0].strip() in known})
    return "\n".join((platform.system(), platform.machine(), platform.processor(), *described)).encode()
