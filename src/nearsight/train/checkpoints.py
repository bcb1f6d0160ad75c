"""Checkpoints: folders of safetensors and one JSON file, complete or absent, never pickled.

    RUN/checkpoints/step-00001200/  model.safetensors  optimizer.safetensors  ema.safetensors  random.safetensors  state.json

A checkpoint is written under a temporary name, flushed, and renamed; `state.json` holds the size and digest of every other
file, so damage is seen before a byte is used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from nearsight import weights
from nearsight.errors import UserError, did_you_mean, disk_full

__all__ = [
    "Checkpoint",
    "belongs",
    "best",
    "cannot_write",
    "claim",
    "clean",
    "find",
    "listed",
    "load_checkpoint",
    "open_checkpoint",
    "prune",
    "set_aside_later",
    "write",
    "write_folder",
]

FORMAT = "nearsight checkpoint"
VERSION = 1
STATE = "state.json"
FOLDER = "checkpoints"
PREFIX = "step-"
PARTIAL = ".partial-"
LOCK = ".lock"
ASIDE = "aside-"
PICKLED = {".pt", ".pth", ".pkl", ".bin", ".ckpt"}

Tensors = Mapping[str, Tensor]


class Checkpoint(NamedTuple):
    """A checkpoint whose state has been read; tensors are read, and checked, on demand."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def score(self) -> float | None:
        """The evaluation's number, larger is better; None when it was not evaluated."""
        return self.state.get("score")

    def has(self, name: str) -> bool:
        return f"{name}.safetensors" in self.state["files"]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one file, or a sentence when it is not what was written."""
        file = f"{name}.safetensors"
        if not self.has(name):
            raise UserError(_damaged(self.path, f"{STATE} names no {file}"))
        try:
            return load(_intact(self.path, file, self.state["files"][file]))
        except SafetensorError as error:
            raise UserError(_damaged(self.path, f"{file} holds no tensors")) from error

    def want(self, *keys: str) -> None:
        """A sentence when the state lacks one of the keys."""
        for key in keys:
            if key not in self.state:
                raise UserError(_damaged(self.path, f"{STATE} lacks {key!r}"))


def write(run: Path, state: Mapping[str, Any], groups: Mapping[str, Tensors]) -> Path:
    """Write a checkpoint of `run` and return its folder. `state` needs "step"; each group becomes a safetensors file."""
    target = run / FOLDER / f"{PREFIX}{state['step']:08d}"
    try:
        write_folder(target, state, groups)
    except OSError as error:
        raise cannot_write(run, f"checkpoint {target}", error) from error
    return target


def cannot_write(run: Path, what: str, error: OSError) -> UserError:
    """The sentence for something of a run that could not be written."""
    last = next(iter(reversed(_folders(run))), None)
    kept = f"the last good checkpoint is {last}" if last else "there is no earlier checkpoint"
    why = "the disk is full" if disk_full(error) else str(error.strerror or error)
    return UserError(f"cannot write {what}: {why}; {kept}. Make room and resume.")


def write_folder(target: Path, state: Mapping[str, Any], groups: Mapping[str, Tensors]) -> None:
    """Write a checkpoint as the folder `target`, complete or not at all."""
    part = target.with_name(f"{PARTIAL}{target.name}")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        files = {}
        for name, tensors in groups.items():
            data = save({key: _plain(tensor) for key, tensor in tensors.items()})
            _write_bytes(part / f"{name}.safetensors", data)
            files[f"{name}.safetensors"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        whole = {"format": FORMAT, "version": VERSION, **state, "files": files}
        _write_bytes(part / STATE, json.dumps(whole, indent=1).encode())
        _flush_folder(part)
        if target.exists():
            _remove(target)
        part.rename(target)
        _flush_folder(target.parent)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _plain(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, and sharing no memory with another."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _write_bytes(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _intact(folder: Path, file: str, wanted: Mapping[str, Any]) -> bytes:
    path = folder / file
    try:
        data = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UserError(_damaged(folder, f"{file} is missing")) from error
    if len(data) != wanted["bytes"]:
        raise UserError(_damaged(folder, f"{file} has {len(data)} bytes, wanted {wanted['bytes']}"))
    if hashlib.sha256(data).hexdigest() != wanted["sha256"]:
        raise UserError(_damaged(folder, f"{file} does not match its digest"))
    return data


def _damaged(folder: Path, fault: str) -> str:
    """The sentence, with the newest older checkpoint that is whole."""
    offer = "there is no earlier one"
    if folder.parent.name == FOLDER:
        for earlier in reversed(_folders(folder.parent.parent)):
            if earlier.name < folder.name and _is_whole(earlier):
                offer = f"the previous one is whole: {earlier}"
                break
    return f"checkpoint {folder} is damaged: {fault}; {offer}."


def _is_whole(folder: Path) -> bool:
    try:
        state = _read_state(folder)
        for file, wanted in state["files"].items():
            _intact(folder, file, wanted)
    except UserError:
        return False
    return True


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state = json.loads((folder / STATE).read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{folder} is no checkpoint: it has no {STATE}.") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(_damaged(folder, f"{STATE} is not readable")) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(f"{folder} is not a checkpoint that nearsight wrote.")
    if state.get("version") != VERSION:
        raise UserError(
            f"{folder} is a checkpoint of version {state.get('version')}, wanted {VERSION}; use the nearsight that wrote it."
        )
    if not isinstance(state.get("step"), int) or not _lists_files(state.get("files")):
        raise UserError(_damaged(folder, f"{STATE} lacks its step or files"))
    return state


def _lists_files(files: Any) -> bool:
    """Whether each is a plain name with its size and digest."""
    return isinstance(files, dict) and all(
        Path(name).name == name and isinstance(facts, dict) and {"bytes", "sha256"} <= facts.keys()
        for name, facts in files.items()
    )


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A checkpoint folder, its state read; refuses what nearsight did not write, and never unpickles."""
    folder = Path(path)
    if folder.suffix in PICKLED:
        raise UserError(
            f"{folder} is a pickled file, which nearsight never opens; wanted a run or a checkpoint folder."
        )
    if folder.is_file():
        raise UserError(f"{folder} is a file, wanted a run or a checkpoint folder.")
    if not folder.is_dir():
        shipped = weights.names()
        offer = f" Networks that come with nearsight: {', '.join(shipped)}." if shipped else ""
        near = did_you_mean(str(path), shipped, cutoff=0.8)
        raise UserError(f"no run or checkpoint at {str(folder)!r}.{near or offer}")
    return Checkpoint(folder, _read_state(folder))


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Like `open_checkpoint`, with every file checked."""
    checkpoint = open_checkpoint(path)
    for file, wanted in checkpoint.state["files"].items():
        _intact(checkpoint.path, file, wanted)
    return checkpoint


def _folders(run: Path) -> list[Path]:
    return sorted(
        path
        for path in (run / FOLDER).glob(f"{PREFIX}*")
        if path.is_dir() and path.name.removeprefix(PREFIX).isdecimal()
    )


def listed(run: str | Path) -> list[Path]:
    """A run's checkpoints, oldest first."""
    return _folders(Path(run))


def belongs(checkpoint: Path, run: Path) -> bool:
    """Whether a checkpoint's folder is one of a run's own."""
    return checkpoint.resolve().parent == (run / FOLDER).resolve()


def best(run: str | Path) -> Path | None:
    """The evaluated checkpoint with the highest score; of equals the latest."""
    scored = []
    for folder in listed(run):
        try:
            score = _read_state(folder).get("score")
        except UserError:
            continue
        if score is not None:
            scored.append((score, folder))
    return max(scored, key=lambda item: (item[0], item[1].name))[1] if scored else None


def find(path: str | Path, which: str = "best") -> Checkpoint:
    """A checkpoint from its folder or its run's: the best evaluated one (else the last), or the last.

    Also by the name of a network that comes with the package.
    """
    folder = Path(path)
    if not folder.exists():
        folder = weights.find(str(path)) or folder
    if (folder / FOLDER).is_dir():
        folders = listed(folder)
        if not folders:
            raise UserError(f"run {folder} has no checkpoint yet.")
        folder = (best(folder) if which == "best" else None) or folders[-1]
    return open_checkpoint(folder)


def prune(run: Path, keep: int) -> None:
    """Keep the latest `keep` and the best."""
    folders = listed(run)
    spared = {*folders[-keep:], best(run)}
    for folder in folders:
        if folder not in spared:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Delete a checkpoint; renamed first, so that a half-deleted one is never taken for one."""
    doomed = folder.with_name(f"{PARTIAL}old-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def set_aside_later(run: Path, step: int) -> list[Path]:
    """Rename a run's checkpoints after `step`: going on from there, they are neither its latest nor its best any more."""
    moved = []
    for folder in _folders(run):
        if int(folder.name.removeprefix(PREFIX)) > step:
            target = folder.with_name(f"{ASIDE}{folder.name}")
            shutil.rmtree(target, ignore_errors=True)
            moved.append(folder.rename(target))
    return moved


def claim(run: Path) -> IO[str] | None:
    """Take a run for this process, until the file is closed or the process ends; a sentence when another one has it.

    None where nothing can be locked.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    file = open(run / FOLDER / LOCK, "a", encoding="utf-8")  # noqa: SIM115  (open for as long as the run is held)
    try:
        # Of a process, not of its children: workers that outlive a killed run must not keep it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise UserError(
                f"run {run} is in training in another process; wait for its end or stop it, or name another --out."
            ) from error
        return None
    return file


def clean(run: Path) -> None:
    """Remove what a killed process left half-written."""
    for path in (run / FOLDER).glob(f"{PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)
