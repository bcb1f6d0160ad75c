"""Types of registers, and what emulation ends with."""

from __future__ import annotations

import numpy as np

WARP = 32
IN_FLIGHT = 2**30  # instead of a number of barriers: nobody knows when it arrives
NAN_BYTE = 0xFF

# Types as instructions name them, and as registers keep them, by bytes: a predicate is one.
DTYPES = {"pred": np.dtype("bool")} | {
    kind + bits: np.dtype(name + bits)
    for kind, name in (("b", "uint"), ("u", "uint"), ("s", "int"), ("f", "float"))
    for bits in ("16", "32", "64")
}
KEPT = {1: np.dtype("bool"), 2: np.dtype("uint16"), 4: np.dtype("uint32"), 8: np.dtype("uint64")}


class UnknownInstructionError(NotImplementedError):
    """An instruction that is not implemented here."""


class FaultError(AssertionError):
    """What a GPU would stop at: an address nobody may touch, threads of a warp that part, a register nobody wrote."""
