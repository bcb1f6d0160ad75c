"""What an instruction does to programs: a step is made from its name, its operands and its text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.support.ptx.arithmetic import HALVES
from tests.support.ptx.machine import Block
from tests.support.ptx.operands import place_of, register_names, source_of
from tests.support.ptx.types import DTYPES, IN_FLIGHT, KEPT, WARP, UnknownInstructionError

Step = Callable[[Block, Any], None]


def lanewise(reads: Sequence[str], writes: str, function: Callable[..., Any], operands: list[str]) -> Step:
    target, *sources = operands
    wanted = [(source_of(text, kind), DTYPES[kind]) for text, kind in zip(sources, reads, strict=True)]
    dtype = DTYPES[writes]
    bits = KEPT[dtype.itemsize]

    def step(block: Block, on: Any) -> None:
        value = function(*[block.get(source, kind) for source, kind in wanted])
        block.put(target, value.astype(dtype, copy=False).view(bits), on)

    return step


def _make_parameter(match: re.Match[str], operands: list[str], text: str) -> Step:
    target, name = operands[0], place_of(operands[1])[0]
    wide = KEPT[8 if target.startswith("%rd") else int(match[2]) // 8]

    def load(block: Block, on: Any) -> None:
        # By its own sign into a wider register.
        block.put(target, block.values[name].view(DTYPES[match[1] + match[2]]).astype(wide), on)

    return load


def _make_move(match: re.Match[str], operands: list[str], text: str) -> Step:
    """Of a register, a number, or between one register and the list of its parts, the lowest first."""
    kind = f"b{match[1]}"
    dtype = DTYPES[kind]
    target, source = operands
    if source.startswith("{"):
        parts = register_names(source)
        smaller = f"b{int(match[1]) // len(parts)}"

        def pack(block: Block, on: Any) -> None:
            pieces = [block.get(source_of(p, smaller), DTYPES[smaller]) for p in parts]
            pieces = np.stack(np.broadcast_arrays(*pieces), -1)
            block.put(target, np.atleast_2d(pieces.view(dtype)[..., 0]), on)

        return pack
    if target.startswith("{"):
        parts = register_names(target)

        def unpack(block: Block, on: Any) -> None:
            pieces = np.ascontiguousarray(block.whole(block.get(source, dtype)))[..., None]
            pieces = pieces.view(DTYPES[f"b{int(match[1]) // len(parts)}"])
            for i, part in enumerate(parts):
                block.put(part, pieces[..., i], on)

        return unpack
    given = source_of(source, kind)

    def move(block: Block, on: Any) -> None:
        # Where shared memory begins is 32 bits in some versions and 64 in others.
        value = block.registers[given].astype(dtype, copy=False) if type(given) is str else given
        block.put(target, value, on)

    return move


def _make_load(match: re.Match[str], operands: list[str], text: str) -> Step:
    space, dtype = match[1], DTYPES[f"b{match[2]}"]
    targets, place = register_names(operands[0]), place_of(operands[1])
    size = dtype.itemsize * len(targets)

    def load(block: Block, on: Any) -> None:
        chosen = block.chosen(on)
        found = np.zeros((*chosen.shape, size), np.uint8)
        memory, index = block.memory(space, text, block.address(place), size, chosen, writes=False)
        found[chosen] = memory[index]
        for i, target in enumerate(targets):
            block.put(target, found.view(dtype)[..., i], on)

    return load


def _make_store(match: re.Match[str], operands: list[str], text: str) -> Step:
    space, kind = match[1], f"b{match[2]}"
    place, sources = place_of(operands[0]), [source_of(s, kind) for s in register_names(operands[1])]
    size = DTYPES[kind].itemsize * len(sources)

    def store(block: Block, on: Any) -> None:
        chosen = block.chosen(on)
        data = np.stack([block.whole(block.get(s, DTYPES[kind])) for s in sources], -1)
        memory, index = block.memory(space, text, block.address(place), size, chosen, writes=True)
        memory[index] = data.view(np.uint8)[chosen]

    return store


def _make_copy(match: re.Match[str], operands: list[str], text: str) -> Step:
    """16 bytes from global to shared memory, or zeros."""
    to, source, size = place_of(operands[0]), place_of(operands[1]), int(operands[2], 0)
    assert size == 16, text
    given = source_of(operands[3], "b32") if len(operands) > 3 else np.uint32(16)

    def copy(block: Block, on: Any) -> None:
        at, length = block.address(to), block.whole(block.get(given, np.uint32))
        if not block.chosen(on).all() or not np.isin(length, (0, 16)).all():
            raise UnknownInstructionError(f"copies by some threads, or of neither 0 nor 16 bytes ({text})")
        block.touch(text, at, 16, block.chosen(None), writes=True)
        block.set_written(at, IN_FLIGHT)
        full = length == 16
        data = np.zeros((*at.shape, 16), np.uint8)
        data[full] = block.heap.bytes[block.heap.index(block.address(source)[full], 16)]
        block.copies.append((at, data.view(np.uint16)))

    return copy


def _make_commit(match: re.Match[str], operands: list[str], text: str) -> Step:
    def commit(block: Block, on: Any) -> None:
        block.groups.append(block.copies)
        block.copies = []

    return commit


def _make_wait(match: re.Match[str], operands: list[str], text: str) -> Step:
    left = int(operands[0], 0)

    def wait(block: Block, on: Any) -> None:
        while len(block.groups) > left:
            block.arrive(block.groups.pop(0))

    return wait


def _make_barrier(match: re.Match[str], operands: list[str], text: str) -> Step:
    def barrier(block: Block, on: Any) -> None:
        if match[0] == "bar.warp.sync" and block.threads > WARP:
            return
        block.barriers += 1

    return barrier


def _of_rows(rows: np.ndarray) -> np.ndarray:
    """Matrices of 8×8 [..., 8, 8] as a warp holds them: two neighbours in a row to a thread, [..., 32]."""
    return np.ascontiguousarray(rows).view(np.uint32).reshape(*rows.shape[:-2], WARP)


def _to_rows(registers: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(registers).view(np.uint16).reshape(*registers.shape[:-1], 8, 8)


def _matrix_rows(block: Block, place: tuple[str, int], count: int) -> np.ndarray:
    """Where the rows of `count` matrices lie: the first threads of a warp say it."""
    return block.warps(block.address(place))[..., : 8 * count].reshape(block.programs, -1)


def _make_load_matrix(match: re.Match[str], operands: list[str], text: str) -> Step:
    count, turned = int(match[1]), match[2] is not None
    targets, place = register_names(operands[0]), place_of(operands[1])

    def load(block: Block, on: Any) -> None:
        at = _matrix_rows(block, place, count)
        block.touch(text, at, 16, np.ones(at.shape, np.bool_), writes=False)
        rows = block.rows(at).reshape(block.programs, -1, count, 8, 8)
        found = _of_rows(rows.swapaxes(-1, -2) if turned else rows)
        for i, target in enumerate(targets):
            block.put(target, found[:, :, i].reshape(block.programs, -1), on)

    return load


def _make_store_matrix(match: re.Match[str], operands: list[str], text: str) -> Step:
    count, turned = int(match[1]), match[2] is not None
    place, sources = place_of(operands[0]), register_names(operands[1])

    def store(block: Block, on: Any) -> None:
        at = _matrix_rows(block, place, count)
        block.touch(text, at, 16, np.ones(at.shape, np.bool_), writes=True)
        rows = _to_rows(np.stack([block.warps(block.registers[s]) for s in sources], 2))
        rows = rows.swapaxes(-1, -2) if turned else rows
        block.set_rows(at, rows.reshape(block.programs, -1, 8))

    return store


def _make_turn(match: re.Match[str], operands: list[str], text: str) -> Step:
    target, source = operands

    def turn(block: Block, on: Any) -> None:
        rows = _to_rows(block.warps(block.registers[source])).swapaxes(-1, -2)
        block.put(target, _of_rows(rows).reshape(block.programs, -1), on)

    return turn


def _make_product(match: re.Match[str], operands: list[str], text: str) -> Step:
    """D = A·B + C of 16×depth, depth×8 and 16×8, spread over a warp as PTX says."""
    depth, widen = int(match[1]), HALVES[match[2]][1]
    out, left, right, start = (register_names(o) for o in operands)

    def warps(block: Block, names: list[str]) -> np.ndarray:
        """[registers, warps, 8, 4]"""
        found = [block.warps(block.get(source_of(n, "b32"), np.uint32)) for n in names]
        return np.ascontiguousarray(np.stack(found)).reshape(len(names), -1, 8, 4)

    def product(block: Block, on: Any) -> None:
        a = widen(warps(block, left).view(np.uint16)).reshape(depth // 8, 2, -1, 8, 4, 2)
        b = widen(warps(block, right).view(np.uint16)).reshape(depth // 8, -1, 8, 4, 2)
        c = warps(block, start).view(np.float32).reshape(2, 2, -1, 8, 4)
        many = a.shape[2]
        a = a.transpose(2, 1, 3, 0, 4, 5).reshape(many, 16, depth).astype(np.float64)
        b = b.transpose(1, 0, 3, 4, 2).reshape(many, depth, 8).astype(np.float64)
        c = c.transpose(2, 0, 3, 4, 1).reshape(many, 16, 8)
        d = (a @ b + c).astype(np.float32).view(np.uint32)
        d = np.ascontiguousarray(d.reshape(many, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3))
        for name, value in zip(out, d.reshape(4, block.programs, -1), strict=True):
            block.put(name, value, on)

    return product


def _make_shuffle(match: re.Match[str], operands: list[str], text: str) -> Step:
    target, source, other, clamp, _ = operands
    other, clamp = source_of(other, "b32"), int(clamp, 0)
    lanes = np.arange(WARP)
    segment, limit = clamp >> 8 & 31, clamp & 31
    last = lanes & segment | limit & ~segment

    def shuffle(block: Block, on: Any) -> None:
        value = block.warps(block.registers[source])
        wanted = block.warps(block.get(other, np.uint32)).astype(np.int64) & 31
        wanted = lanes & segment | wanted & ~segment if match[1] == "idx" else lanes ^ wanted
        found = np.take_along_axis(value, np.where(wanted <= last, wanted, lanes), -1)
        block.put(target, found.reshape(block.programs, -1), on)

    return shuffle


def _make_largest(match: re.Match[str], operands: list[str], text: str) -> Step:
    target, source, _ = operands

    def largest(block: Block, on: Any) -> None:
        value = block.warps(block.registers[source])
        found = np.broadcast_to(value.max(-1, keepdims=True), value.shape)
        block.put(target, found.reshape(block.programs, -1), on)

    return largest


MADE: list[tuple[str, Callable[[re.Match[str], list[str], str], Step]]] = [
    (r"ld\.param\.([bus])(32|64)", _make_parameter),
    (r"mov\.[bufs](16|32|64)", _make_move),
    (r"ld\.(global|shared)(?:\.v[24])?\.[bfu](16|32|64)", _make_load),
    (r"st\.(global|shared)(?:\.v[24])?\.[bfu](16|32|64)", _make_store),
    (r"cp\.async\.cg\.shared\.global", _make_copy),
    (r"cp\.async\.commit_group", _make_commit),
    (r"cp\.async\.wait_group", _make_wait),
    (r"bar\.sync|bar\.warp\.sync", _make_barrier),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16", _make_load_matrix),
    (r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16", _make_store_matrix),
    (r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16", _make_turn),
    (r"mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.f32\.(bf16|f16)\.(?:bf16|f16)\.f32", _make_product),
    (r"shfl\.sync\.(idx|bfly)\.b32", _make_shuffle),
    (r"redux\.sync\.max\.u32", _make_largest),
]
