"""Child processes, copies of this one or of another program: how they begin, are waited for and end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import IO, NoReturn, Protocol

__all__ = ["Child", "Copy", "end_at_once", "stop"]


class Child(Protocol):
    """What is asked of a child; a Popen has it."""

    stdin: IO[str] | None
    returncode: int | None

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def stop(children: Sequence[Child], messages: Sequence[IO[str]]) -> None:
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


class Copy:
    """This process once more (a fork), at `work`, whose result is its exit code; it reads what is written to `stdin`, and writes
    into `messages`. `elder`: its siblings so far. Asked as a Popen is.
    """

    def __init__(self, work: Callable[[], int], messages: IO[str], elder: Sequence[Child]):
        read, write = os.pipe()
        others = [write, *(child.stdin.fileno() for child in elder if child.stdin is not None)]
        with warnings.catch_warnings():
            # Of threads, which a copy does not have: there are none of Python's, and numpy's hold nothing while they wait.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _live(work, read, others, messages)
        os.close(read)
        self.stdin: IO[str] | None = open(write, "w", encoding="utf-8")  # noqa: SIM115
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it
                pid, status = self.pid, 1 << 8
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired("a copy of this process", timeout or 0.0)
            else:
                time.sleep(0.02)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _live(work: Callable[[], int], read: int, others: Sequence[int], messages: IO[str]) -> NoReturn:
    code = 1
    try:
        for pipe in others:  # which would not close with this process's parent otherwise
            os.close(pipe)
        for target, source in enumerate((read, messages.fileno(), messages.fileno())):
            os.dup2(source, target)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        sys.stdin, sys.stdout, sys.stderr = (open(n, mode, closefd=False) for n, mode in enumerate("rww"))  # noqa: SIM115
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        end_at_once(code)


def end_at_once(code: int) -> NoReturn:
    """At once: what a GPU's libraries and the compiler tidy up takes seconds, and everything is on disk."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
