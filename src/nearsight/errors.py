"""The exceptions nearsight raises on purpose.

Each subclasses the built-in a caller would expect, so `except ValueError` keeps working, and each message is one sentence:
who refuses, what came, what was wanted, what to do.
"""

__all__ = ["ArgumentTypeError", "ArgumentValueError", "BackendError", "NearsightError", "UserError"]


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
