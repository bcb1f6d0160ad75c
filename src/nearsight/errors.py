"""The exceptions nearsight raises on purpose.

Each subclasses the built-in a caller would expect, so `except ValueError` keeps working, and each message is one sentence:
who refuses, what came, what was wanted, what to do.
"""

import difflib
import errno
from collections.abc import Iterable

__all__ = [
    "ArgumentTypeError",
    "ArgumentValueError",
    "BackendError",
    "NearsightError",
    "UserError",
    "did_you_mean",
    "disk_full",
    "nearest",
]


class NearsightError(Exception):
    """Base of everything raised on purpose."""


class ArgumentValueError(NearsightError, ValueError):
    """An argument has the right type and a wrong value (rank, size, range, name)."""


class ArgumentTypeError(NearsightError, TypeError):
    """An argument has a wrong type, dtype or device."""


class BackendError(NearsightError, RuntimeError):
    """A backend was asked for by name and cannot run this call."""


class UserError(NearsightError):
    """A mistake on the command line or in a file: shown as one line, exit code 2."""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.4) -> str | None:
    """The known word most like `word`, or None when none is (`cutoff` from 0, anything, to 1, the same).

    >>> nearest("optimiser.lr", ["optimizer.lr", "data.root"])
    'optimizer.lr'
    """
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """ " Did you mean 'x'?" for the nearest of the known words, or nothing.

    >>> did_you_mean("sasa_resnet5O", ["sasa_resnet26", "sasa_resnet50"])
    " Did you mean 'sasa_resnet50'?"
    """
    near = nearest(word, known, cutoff)
    return f" Did you mean {near!r}?" if near else ""


def disk_full(error: OSError) -> bool:
    """Whether a disk, or its owner's share of it, has no room left.

    >>> disk_full(OSError(errno.ENOSPC, "No space left on device")), disk_full(FileNotFoundError(errno.ENOENT, "no"))
    (True, False)
    """
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
