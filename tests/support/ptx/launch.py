"""A launch: all programs from the first instruction to the last, and what was seen on the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.support.ptx.machine import Block, Heap
from tests.support.ptx.operands import constant
from tests.support.ptx.parsing import Program
from tests.support.ptx.types import KEPT, FaultError


class Report(NamedTuple):
    """The instructions that missed a barrier, those whose threads met in a bank, and how many all programs together took."""

    missing_barriers: list[str]
    bank_conflicts: list[str]
    steps: int


def run(
    program: Program, grid: Sequence[int], arguments: Sequence[Any], memory: Iterable[tuple[int, int]], shared: int = 0
) -> Report:
    """Launch `program` on `arguments`: numbers, and addresses in this process.

    `memory` says what the kernel may touch: addresses and numbers of bytes. `shared` is the shared memory of a program in bytes.
    """
    heap = Heap(memory)
    values = {}
    for i, parameter in enumerate(program.parameters):
        # The last ones are Triton's own, unused here.
        value = arguments[i] if i < len(arguments) else 0
        if parameter.is_pointer:
            values[parameter.name] = np.uint64(heap.place(value))
        elif parameter.dtype.kind == "f":
            values[parameter.name] = np.asarray(value, parameter.dtype).view(KEPT[parameter.dtype.itemsize])[()]
        else:
            values[parameter.name] = constant(str(int(value)), f"b{8 * parameter.dtype.itemsize}")
    block = Block(program.threads, grid, values, heap, shared)
    with np.errstate(all="ignore"):
        waiting = [(block, 0)]
        while waiting:
            waiting.extend(_until_parted(program, *waiting.pop()))
    heap.give_back()
    return Report(sorted(block.late), sorted(block.conflicts), sum(block.steps))


def _until_parted(program: Program, block: Block, at: int) -> list[tuple[Block, int]]:
    """Run until the end, or until programs go different ways: then those, and where they go on."""
    while at < len(program.instructions):
        text, step, guard, jump = program.instructions[at]
        at += 1
        block.steps.append(block.programs)
        on = None
        if guard is not None:
            on = block.registers[guard[0]]
            on = ~on if guard[1] else on
        if jump is None:
            try:
                step(block, on)
            except FaultError as fault:
                raise FaultError(f"{program.name}: {text}: {fault}") from None
            except KeyError as name:
                raise FaultError(f"{program.name}: {text}: nobody wrote {name}") from None
            continue
        goal = len(program.instructions) if jump == "" else program.labels[jump]
        if on is None:
            at = goal
            continue
        on = block.whole(on)
        taken = on.any(1)
        if (taken != on.all(1)).any():
            raise FaultError(f"{program.name}: {text}: threads of one program part")
        if taken.all():
            at = goal
        elif taken.any():
            return [(block.part(taken), goal), (block.part(~taken), at)]
    return []
