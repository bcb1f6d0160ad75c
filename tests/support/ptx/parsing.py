"""From the text of a PTX module to a kernel that can be run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tests.support.ptx.arithmetic import LANEWISE
from tests.support.ptx.instructions import MADE, Step, lanewise
from tests.support.ptx.types import DTYPES, UnknownInstructionError


class Parameter(NamedTuple):
    name: str
    is_pointer: bool
    dtype: np.dtype


class Program(NamedTuple):
    """A kernel: its parameters, the threads of a program, its instructions and where its labels stand among them."""

    name: str
    parameters: list[Parameter]
    threads: int
    instructions: list[Instruction]
    labels: dict[str, int]


class Instruction(NamedTuple):
    """`step` does it on a block, for the threads that `guard` (a predicate, and whether it is negated) lets through."""

    text: str
    step: Step
    guard: tuple[str, bool] | None
    jump: str | None = None  # "" leaves the kernel


def parse(text: str) -> Program:
    """The kernel of a PTX module; raises UnknownInstructionError for what is not implemented here."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"(?m)^\s*\.loc\b.*$", "", text)
    head = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{", text, re.DOTALL)
    assert head is not None, "no kernel"
    threads = re.search(r"\.(?:req|max)ntid\s+(\d+)", head[3])
    assert threads is not None, "a kernel that does not say how many threads a program has"
    parameters = [
        Parameter(name, ".ptr" in more, DTYPES[kind])
        for kind, more, name in re.findall(r"\.param\s+\.(\w+)\s([^,]*?)(\w+)\s*(?:,|$)", head[2].strip())
    ]
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for statement in _statements(_balanced(text[head.end() :])):
        if statement.endswith(":"):
            labels[statement[:-1]] = len(instructions)
        else:
            instructions.append(_decode(statement))
    return Program(head[1], parameters, int(threads[1]), instructions, labels)


def _balanced(text: str) -> str:
    """Up to the brace that closes the kernel."""
    depth = 1
    for found in re.finditer(r"[{}]", text):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return text[: found.start()]
    raise ValueError("a kernel without an end")


def _statements(body: str) -> Iterable[str]:
    for statement in re.sub(r"(?m)^\s*(\$\w+):", r"\1:;", body).split(";"):
        statement = " ".join(statement.split()).lstrip("{} ")
        if statement and not statement.startswith((".reg", ".pragma")):
            yield statement


def _decode(statement: str) -> Instruction:
    found = re.fullmatch(r"(?:@(!?)(%?\w+) )?([\w.:]+)(?: (.*))?", statement)
    assert found is not None, statement
    negated, guard, name, operands = found.groups()
    guarded = None if guard is None else (guard, negated == "!")
    operands = [o.strip() for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", operands or "") if o.strip()]
    if name in ("bra", "bra.uni"):
        return Instruction(statement, lambda *_: None, guarded, operands[0])
    if name == "ret":
        return Instruction(statement, lambda *_: None, guarded, "")
    for pattern, make in MADE:
        match = re.fullmatch(pattern, name)
        if match is not None:
            return Instruction(statement, make(match, operands, statement), guarded)
    if name in LANEWISE:
        return Instruction(statement, lanewise(*LANEWISE[name], operands), guarded)
    raise UnknownInstructionError(f"tests/support/ptx does not know {name} ({statement})")
