"""The machine: memory that a kernel may touch, and programs in lockstep with their registers and shared memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tests.support.ptx.types import IN_FLIGHT, NAN_BYTE, WARP, FaultError


class Heap:
    """Copies of the memory a kernel may touch, with room between them, at addresses of its own. Nothing lies at 0."""

    ROOM = 4096

    def __init__(self, memory: Iterable[tuple[int, int]]) -> None:
        self.pieces: list[tuple[int, int, int]] = []  # address, bytes, place
        size = self.ROOM
        for start, length in _merged(memory):
            place = size + start % 256  # what was aligned stays so
            self.pieces.append((start, length, place))
            size = -(-(place + length) // 256) * 256 + self.ROOM
        self.bytes = np.zeros(size // 8, np.uint64).view(np.uint8)
        self.usable = np.zeros(size, np.bool_)
        for start, length, place in self.pieces:
            self.bytes[place : place + length] = _at(start, length)
            self.usable[place : place + length] = True

    def place(self, address: int) -> int:
        for start, length, place in self.pieces:
            if start <= address < start + length:
                return place + address - start
        return 0

    def give_back(self) -> None:
        for start, length, place in self.pieces:
            _at(start, length)[:] = self.bytes[place : place + length]

    def index(self, at: np.ndarray, size: int) -> np.ndarray:
        """Of `size` bytes each, [any, size]."""
        if (at % size).any():
            raise FaultError("misaligned")
        inside = (at >= 0) & (at < len(self.bytes) - self.ROOM)
        if not inside.all() or not (self.usable[at] & self.usable[at + size - 1]).all():
            raise FaultError("outside the given memory")
        return at[:, None] + np.arange(size)


def _at(address: int, length: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * length).from_address(address), np.uint8)


def _merged(memory: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without overlaps: several arguments may lie in one tensor."""
    pieces: list[tuple[int, int]] = []
    for start, length in sorted(piece for piece in memory if piece[1] > 0):
        if pieces and start <= sum(pieces[-1]):
            first, before = pieces.pop()
            pieces.append((first, max(first + before, start + length) - first))
        else:
            pieces.append((start, length))
    return pieces


class Block:
    """Programs that run in lockstep: their registers [programs, threads] (or one number for all), and their shared memory."""

    def __init__(self, threads: int, grid: Sequence[int], values: dict[str, Any], heap: Heap, shared: int) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        self.programs, self.threads = x * y * z, threads
        number = np.arange(self.programs, dtype=np.uint32)[:, None]
        self.registers: dict[str, Any] = {
            "%tid.x": np.arange(threads, dtype=np.uint32)[None],
            "%ctaid.x": number % x,
            "%ctaid.y": number // x % y,
            "%ctaid.z": number // (x * y),
            **{f"%nctaid.{axis}": np.uint32(size) for axis, size in zip("xyz", (x, y, z), strict=True)},
            "global_smem": np.uint32(0),
        }
        self.values, self.heap = values, heap
        words = -(-shared // 16) * 4
        self.shared = np.full((self.programs, 4 * words), NAN_BYTE, np.uint8)
        # Barriers passed when a word was last written (a copy: arrived) and read.
        self.barriers = 0
        self.written, self.read = (np.full((self.programs, words), -1, np.int32) for _ in range(2))
        self.copies: list[tuple[Any, Any]] = []
        self.groups: list[list[tuple[Any, Any]]] = []
        self.late: set[str] = set()
        self.conflicts: set[str] = set()
        self.steps: list[int] = []

    def part(self, chosen: np.ndarray) -> Block:
        """Some of the programs, on their own."""
        part = object.__new__(Block)
        part.__dict__.update(self.__dict__)

        def own(value: Any) -> Any:
            return value[chosen] if getattr(value, "ndim", 0) == 2 and len(value) == self.programs else value

        part.programs = int(chosen.sum())
        part.registers = {name: own(value) for name, value in self.registers.items()}
        part.shared, part.written, part.read = (self.shared[chosen], self.written[chosen], self.read[chosen])
        part.copies = [(at[chosen], data[chosen]) for at, data in self.copies]
        part.groups = [[(at[chosen], data[chosen]) for at, data in group] for group in self.groups]
        return part

    def get(self, operand: Any, dtype: np.dtype) -> Any:
        return self.registers[operand].view(dtype) if type(operand) is str else operand

    def whole(self, value: Any) -> np.ndarray:
        return np.broadcast_to(value, (self.programs, self.threads))

    def warps(self, value: Any) -> np.ndarray:
        """[programs, warps, 32]"""
        return self.whole(value).reshape(self.programs, -1, WARP)

    def put(self, register: str, value: Any, on: Any) -> None:
        if on is not None:
            before = self.registers.get(register)
            value = np.where(on, value, value.dtype.type(0) if before is None else before)
        self.registers[register] = value

    def address(self, operand: tuple[str, int]) -> np.ndarray:
        register, offset = operand
        return self.whole(self.registers[register].astype(np.int64) + offset)

    def chosen(self, on: Any) -> np.ndarray:
        return np.ones((self.programs, self.threads), np.bool_) if on is None else self.whole(on)

    def memory(
        self, space: str, text: str, at: np.ndarray, size: int, chosen: np.ndarray, writes: bool
    ) -> tuple[np.ndarray, Any]:
        """An array of bytes, and where in it `size` bytes of each chosen thread lie."""
        if space == "global":
            return self.heap.bytes, self.heap.index(at[chosen], size)
        self.touch(text, at, size, chosen, writes)
        owners = np.broadcast_to(np.arange(self.programs)[:, None], at.shape)[chosen]
        return self.shared, (owners[:, None], at[chosen][:, None] + np.arange(size))

    def touch(self, text: str, at: np.ndarray, size: int, chosen: np.ndarray, writes: bool) -> None:
        """Look at the history of bytes of shared memory before they are read or written together, and at their banks.

        `at` and `chosen` are [programs, any].
        """
        owners = np.broadcast_to(np.arange(self.programs)[:, None], at.shape)[chosen]
        places = at[chosen]
        if (places % size).any():
            raise FaultError("misaligned")
        if (places < 0).any() or (places + size > self.shared.shape[1]).any():
            raise FaultError("outside shared memory")
        words = owners[:, None], places[:, None] // 4 + np.arange(max(size // 4, 1))
        mine, other = (self.written, self.read) if writes else (self.read, self.written)
        # Of two writes without a barrier between them, one may be a copy that arrives later.
        if (other[words] >= self.barriers).any() or (writes and (mine[words] == IN_FLIGHT).any()):
            self.late.add(text)
        mine[words] = self.barriers
        if _conflict(at, size, chosen):
            self.conflicts.add(text)

    # 16 bytes each as eight halves, [programs, any, 8].

    def rows(self, at: np.ndarray) -> np.ndarray:
        return self.shared.view(np.uint16).reshape(self.programs, -1, 8)[np.arange(self.programs)[:, None], at // 16]

    def set_rows(self, at: np.ndarray, rows: np.ndarray) -> None:
        mine = self.shared.view(np.uint16).reshape(self.programs, -1, 8)
        mine[np.arange(self.programs)[:, None], at // 16] = rows

    def set_written(self, at: np.ndarray, when: int) -> None:
        self.written[np.arange(self.programs)[:, None, None], at[..., None] // 4 + np.arange(4)] = when

    def arrive(self, group: list[tuple[Any, Any]]) -> None:
        for at, data in group:
            self.set_rows(at, data)
            self.set_written(at, self.barriers)


def _conflict(at: np.ndarray, size: int, chosen: np.ndarray) -> bool:
    """Whether threads that move 128 bytes together want different bytes of one bank."""
    size = max(size, 4)
    banks = 128 // size
    # Who does nothing asks for what another asks for.
    piece = np.where(chosen, at // size, -1)
    piece = np.where(chosen, piece, piece.max(1, keepdims=True))
    piece = np.sort(piece.reshape(-1, min(banks, at.shape[1])), 1)
    first = np.diff(piece, axis=1, prepend=-2) != 0  # of those who ask for the same
    wanted = np.zeros((len(piece), banks), np.int32)
    np.add.at(wanted, (np.arange(len(piece))[:, None], piece % banks), first)
    return bool((wanted > 1).any())
