"""Runs compiled kernels on the CPU: the PTX that Triton and Gluon make for NVIDIA's GPUs, all programs of a launch in lockstep.

Gluon has no interpreter. Here its kernels run after compilation, so that layouts, swizzles, barriers and inline assembly are
tested too. Every register is an array [programs, threads]; programs that take different branches part and go on separately.

What it looks at beside the numbers:

- Every address: outside the given memory, or misaligned, is an error.
- Barriers: whoever reads shared memory must be a barrier behind the last write there, and the other way round, whichever
  threads they were. A copy (`cp.async`) is in flight until it is waited for; until then nobody may touch its bytes. It
  arrives at its wait, as late as it may, so that what reads too early reads what was there before: NaN, at first.
- Banks: threads that move 128 bytes of shared memory together must find them in different banks.

Rounding: sums, products, `fma` and conversions are the hardware's, bit for bit (but for the bits of a NaN). `ex2`, `lg2` and
`rcp` are rounded once, where the hardware's are off by up to 2⁻²². `mma` is rounded once, too; how the hardware rounds its sums
is not documented. What ptxas makes of the PTX is not seen.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["FaultError", "Program", "Report", "UnknownInstructionError", "parse", "run"]

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


class Report(NamedTuple):
    """The instructions that missed a barrier, those whose threads met in a bank, and how many all programs together took."""

    missing_barriers: list[str]
    bank_conflicts: list[str]
    steps: int


class Parameter(NamedTuple):
    name: str
    is_pointer: bool
    dtype: np.dtype


class Program(NamedTuple):
    """A kernel: its parameters, the threads of a program, its instructions and where its labels stand among them."""

    name: str
    parameters: list[Parameter]
    threads: int
    instructions: list[_Instruction]
    labels: dict[str, int]


class _Instruction(NamedTuple):
    """`step` does it on a block, for the threads that `guard` (a predicate, and whether it is negated) lets through."""

    text: str
    step: Callable[[_Block, Any], None]
    guard: tuple[str, bool] | None
    jump: str | None = None  # "" leaves the kernel


def run(
    program: Program, grid: Sequence[int], arguments: Sequence[Any], memory: Iterable[tuple[int, int]], shared: int = 0
) -> Report:
    """Launch `program` on `arguments`: numbers, and addresses in this process.

    `memory` says what the kernel may touch: addresses and numbers of bytes. `shared` is the shared memory of a program in bytes.
    """
    heap = _Heap(memory)
    values = {}
    for i, parameter in enumerate(program.parameters):
        # The last ones are Triton's own, unused here.
        value = arguments[i] if i < len(arguments) else 0
        if parameter.is_pointer:
            values[parameter.name] = np.uint64(heap.place(value))
        elif parameter.dtype.kind == "f":
            values[parameter.name] = np.asarray(value, parameter.dtype).view(KEPT[parameter.dtype.itemsize])[()]
        else:
            values[parameter.name] = _constant(str(int(value)), f"b{8 * parameter.dtype.itemsize}")
    block = _Block(program, grid, values, heap, shared)
    with np.errstate(all="ignore"):
        waiting = [(block, 0)]
        while waiting:
            waiting.extend(_until_parted(program, *waiting.pop()))
    heap.give_back()
    return Report(sorted(block.late), sorted(block.conflicts), sum(block.steps))


def _until_parted(program: Program, block: _Block, at: int) -> list[tuple[_Block, int]]:
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


class _Heap:
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


class _Block:
    """Programs that run in lockstep: their registers [programs, threads] (or one number for all), and their shared memory."""

    def __init__(self, program: Program, grid: Sequence[int], values: dict[str, Any], heap: _Heap, shared: int) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        self.programs, self.threads = x * y * z, program.threads
        number = np.arange(self.programs, dtype=np.uint32)[:, None]
        self.registers: dict[str, Any] = {
            "%tid.x": np.arange(program.threads, dtype=np.uint32)[None],
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

    def part(self, chosen: np.ndarray) -> _Block:
        """Some of the programs, on their own."""
        part = object.__new__(_Block)
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


# Parsing.


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
    instructions: list[_Instruction] = []
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


def _decode(statement: str) -> _Instruction:
    found = re.fullmatch(r"(?:@(!?)(%?\w+) )?([\w.:]+)(?: (.*))?", statement)
    assert found is not None, statement
    negated, guard, name, operands = found.groups()
    guarded = None if guard is None else (guard, negated == "!")
    operands = [o.strip() for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", operands or "") if o.strip()]
    if name in ("bra", "bra.uni"):
        return _Instruction(statement, lambda *_: None, guarded, operands[0])
    if name == "ret":
        return _Instruction(statement, lambda *_: None, guarded, "")
    for pattern, make in MADE:
        match = re.fullmatch(pattern, name)
        if match is not None:
            return _Instruction(statement, make(match, operands, statement), guarded)
    if name in LANEWISE:
        return _Instruction(statement, _lanewise(*LANEWISE[name], operands), guarded)
    raise UnknownInstructionError(f"tests/support/ptx.py does not know {name} ({statement})")


def _list(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{} ").split(",")]


def _place(operand: str) -> tuple[str, int]:
    found = re.fullmatch(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
    assert found is not None, operand
    return found[1], int(found[2] or "0", 0)


def _constant(text: str, kind: str) -> Any:
    dtype = DTYPES[kind]
    if kind == "pred":
        return np.bool_(int(text, 0))
    if text[:2] in ("0f", "0F"):
        return np.uint32(int(text[2:], 16)).view(dtype)
    bits = 8 * dtype.itemsize
    return KEPT[bits // 8].type(int(text, 0) % (1 << bits)).view(dtype)


def _source(text: str, kind: str) -> Any:
    """A register's name, or the constant."""
    return _constant(text, kind) if re.match(r"-?\d", text) else text


# Instructions that look at no other thread: what they read, what they write, and the function.

Step = Callable[[_Block, Any], None]


def _lanewise(reads: Sequence[str], writes: str, function: Callable[..., Any], operands: list[str]) -> Step:
    target, *sources = operands
    wanted = [(_source(text, kind), DTYPES[kind]) for text, kind in zip(sources, reads, strict=True)]
    dtype = DTYPES[writes]
    bits = KEPT[dtype.itemsize]

    def step(block: _Block, on: Any) -> None:
        value = function(*[block.get(source, kind) for source, kind in wanted])
        block.put(target, value.astype(dtype, copy=False).view(bits), on)

    return step


def _fused(x: Any, y: Any, z: Any) -> Any:
    """x·y + z, rounded once: a sum in float64 whose last bit says whether there was more, then float32."""
    product, z = x.astype(np.float64) * y, z.astype(np.float64)  # exact
    total = product + z
    back = total - product
    rest = (product - (total - back)) + (z - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (rest != 0) & (bits & 1 == 0)
    # Towards the rest: away from zero where it has the total's sign.
    return np.where(inexact, (bits + np.where((rest > 0) == (total > 0), 1, -1)).view(np.float64), total)


def _flushed(x: Any) -> Any:
    """Float32 without subnormals."""
    x = x.astype(np.float32)
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _approximate(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: _flushed(function(_flushed(x).astype(np.float64)))


def _to_bfloat16(x: Any) -> Any:
    bits = np.ascontiguousarray(x).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), nearest).astype(np.uint16)


def _from_bfloat16(bits: Any) -> Any:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_float16(x: Any) -> Any:
    return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))


def _from_float16(bits: Any) -> Any:
    return bits.view(np.float16).astype(np.float32)


HALVES = {"bf16": (_to_bfloat16, _from_bfloat16), "f16": (_to_float16, _from_float16)}


def _pack(high: Any, low: Any) -> Any:
    return high.astype(np.uint32) << np.uint32(16) | low


def _shift_left(x: Any, n: Any) -> Any:
    bits = 8 * x.dtype.itemsize
    return np.where(n < bits, x << np.minimum(n, bits - 1).astype(x.dtype), 0)


def _shift_right(x: Any, n: Any) -> Any:
    bits = 8 * x.dtype.itemsize
    if x.dtype.kind == "i":
        return x >> np.minimum(n, bits - 1).astype(x.dtype)
    return np.where(n < bits, x >> np.minimum(n, bits - 1).astype(x.dtype), 0)


def _quotient(x: Any, y: Any) -> Any:
    """Towards zero."""
    return np.where(y == 0, -1, np.trunc(x / np.where(y == 0, 1, y)))


def _remainder(x: Any, y: Any) -> Any:
    return np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y)))


def _bit_field(x: Any, start: Any, length: Any) -> Any:
    wide = x.astype(np.int64) >> np.minimum(start, 63).astype(np.int64)
    length = length.astype(np.int64)
    field = wide & ((np.int64(1) << length) - 1)
    if x.dtype.kind == "i":
        sign = field >> np.maximum(length - 1, 0) & 1
        field = field - (sign << length)
    return field


def _widely(function: Callable[..., Any], wide: str) -> Callable[..., Any]:
    return lambda x, y, *z: function(x.astype(wide), y.astype(wide), *z)


def _both_halves(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    to, back = HALVES[kind]

    def apply(*packed: Any) -> Any:
        low = function(*[back(p.astype(np.uint16)) for p in packed])
        high = function(*[back((p >> np.uint32(16)).astype(np.uint16)) for p in packed])
        return _pack(to(high), to(low))

    return apply


LANEWISE: dict[str, tuple[Sequence[str], str, Callable[..., Any]]] = {
    "fma.rn.f32": (("f32",) * 3, "f32", _fused),
    "ex2.approx.ftz.f32": (("f32",), "f32", _approximate(np.exp2)),
    "lg2.approx.ftz.f32": (("f32",), "f32", _approximate(np.log2)),
    "rcp.approx.ftz.f32": (("f32",), "f32", _approximate(np.reciprocal)),
    # Of two numbers the one that is one.
    "max.f32": (("f32", "f32"), "f32", np.fmax),
    "min.f32": (("f32", "f32"), "f32", np.fmin),
    "neg.f32": (("f32",), "f32", np.negative),
    "mov.pred": (("pred",), "pred", np.asarray),
    "add.bf16x2": (("b32", "b32"), "b32", _both_halves("bf16", np.add)),
    "add.f16x2": (("b32", "b32"), "b32", _both_halves("f16", np.add)),
    "add.rn.bf16x2": (("b32", "b32"), "b32", _both_halves("bf16", np.add)),
    "add.rn.f16x2": (("b32", "b32"), "b32", _both_halves("f16", np.add)),
    "cvt.rn.bf16x2.f32": (("f32", "f32"), "b32", lambda high, low: _pack(_to_bfloat16(high), _to_bfloat16(low))),
    "cvt.rn.f16x2.f32": (("f32", "f32"), "b32", lambda high, low: _pack(_to_float16(high), _to_float16(low))),
    "cvt.rn.bf16.f32": (("f32",), "b16", _to_bfloat16),
    "cvt.rn.f16.f32": (("f32",), "b16", _to_float16),
    "cvt.f32.bf16": (("b16",), "f32", _from_bfloat16),
    "cvt.f32.f16": (("b16",), "f32", _from_float16),
}
COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
for _name, _function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
    LANEWISE[f"{_name}.f32"] = LANEWISE[f"{_name}.rn.f32"] = (("f32", "f32"), "f32", _function)
for _kind in ("s16", "u16", "s32", "u32", "s64", "u64"):
    for _name, _function in (("add", np.add), ("sub", np.subtract), ("mul.lo", np.multiply)):
        LANEWISE[f"{_name}.{_kind}"] = ((_kind, _kind), _kind, _function)
    LANEWISE[f"mad.lo.{_kind}"] = ((_kind,) * 3, _kind, lambda x, y, z: x * y + z)
    LANEWISE[f"min.{_kind}"] = ((_kind, _kind), _kind, np.minimum)
    LANEWISE[f"max.{_kind}"] = ((_kind, _kind), _kind, np.maximum)
    LANEWISE[f"neg.{_kind}"] = ((_kind,), _kind, np.negative)
    LANEWISE[f"shr.{_kind}"] = ((_kind, "b32"), _kind, _shift_right)
for _kind in ("s32", "u32"):
    _wide = f"{_kind[0]}64"
    _dtype = str(DTYPES[_wide])
    LANEWISE[f"div.{_kind}"] = ((_kind, _kind), _kind, _quotient)
    LANEWISE[f"rem.{_kind}"] = ((_kind, _kind), _kind, _remainder)
    LANEWISE[f"bfe.{_kind}"] = ((_kind, "b32", "b32"), _kind, _bit_field)
    LANEWISE[f"mul.wide.{_kind}"] = ((_kind, _kind), _wide, _widely(np.multiply, _dtype))
    LANEWISE[f"mad.wide.{_kind}"] = ((_kind, _kind, _wide), _wide, _widely(lambda x, y, z: x * y + z, _dtype))
for _kind in ("pred", "b16", "b32", "b64"):
    for _name, _function in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        LANEWISE[f"{_name}.{_kind}"] = ((_kind, _kind), _kind, _function)
    LANEWISE[f"not.{_kind}"] = ((_kind,), _kind, np.invert)
for _kind in ("b16", "b32", "b64"):
    LANEWISE[f"shl.{_kind}"] = ((_kind, "b32"), _kind, _shift_left)
for _kind in ("b16", "b32", "b64", "f32"):
    LANEWISE[f"selp.{_kind}"] = ((_kind, _kind, "pred"), _kind, lambda x, y, p: np.where(p, x, y))
for _kind in ("s16", "u16", "b16", "s32", "u32", "b32", "s64", "u64", "b64", "f32"):
    for _name, _function in COMPARISONS.items():
        LANEWISE[f"setp.{_name}.{_kind}"] = ((_kind, _kind), "pred", _function)
for _from in ("s16", "u16", "s32", "u32", "s64", "u64"):
    for _to in ("s16", "u16", "s32", "u32", "s64", "u64"):
        LANEWISE[f"cvt.{_to}.{_from}"] = ((_from,), _to, np.asarray)


# Instructions of another form: patterns of their names, and what makes a step from the match, the operands and the text.


def _make_parameter(match: re.Match[str], operands: list[str], text: str) -> Step:
    target, name = operands[0], _place(operands[1])[0]
    wide = KEPT[8 if target.startswith("%rd") else int(match[2]) // 8]

    def load(block: _Block, on: Any) -> None:
        # By its own sign into a wider register.
        block.put(target, block.values[name].view(DTYPES[match[1] + match[2]]).astype(wide), on)

    return load


def _make_move(match: re.Match[str], operands: list[str], text: str) -> Step:
    """Of a register, a number, or between one register and the list of its parts, the lowest first."""
    kind = f"b{match[1]}"
    dtype = DTYPES[kind]
    target, source = operands
    if source.startswith("{"):
        parts = _list(source)
        smaller = f"b{int(match[1]) // len(parts)}"

        def pack(block: _Block, on: Any) -> None:
            pieces = [block.get(_source(p, smaller), DTYPES[smaller]) for p in parts]
            pieces = np.stack(np.broadcast_arrays(*pieces), -1)
            block.put(target, np.atleast_2d(pieces.view(dtype)[..., 0]), on)

        return pack
    if target.startswith("{"):
        parts = _list(target)

        def unpack(block: _Block, on: Any) -> None:
            pieces = np.ascontiguousarray(block.whole(block.get(source, dtype)))[..., None]
            pieces = pieces.view(DTYPES[f"b{int(match[1]) // len(parts)}"])
            for i, part in enumerate(parts):
                block.put(part, pieces[..., i], on)

        return unpack
    given = _source(source, kind)

    def move(block: _Block, on: Any) -> None:
        # Where shared memory begins is 32 bits in some versions and 64 in others.
        value = block.registers[given].astype(dtype, copy=False) if type(given) is str else given
        block.put(target, value, on)

    return move


def _make_load(match: re.Match[str], operands: list[str], text: str) -> Step:
    space, dtype = match[1], DTYPES[f"b{match[2]}"]
    targets, place = _list(operands[0]), _place(operands[1])
    size = dtype.itemsize * len(targets)

    def load(block: _Block, on: Any) -> None:
        chosen = block.chosen(on)
        found = np.zeros((*chosen.shape, size), np.uint8)
        memory, index = block.memory(space, text, block.address(place), size, chosen, writes=False)
        found[chosen] = memory[index]
        for i, target in enumerate(targets):
            block.put(target, found.view(dtype)[..., i], on)

    return load


def _make_store(match: re.Match[str], operands: list[str], text: str) -> Step:
    space, kind = match[1], f"b{match[2]}"
    place, sources = _place(operands[0]), [_source(s, kind) for s in _list(operands[1])]
    size = DTYPES[kind].itemsize * len(sources)

    def store(block: _Block, on: Any) -> None:
        chosen = block.chosen(on)
        data = np.stack([block.whole(block.get(s, DTYPES[kind])) for s in sources], -1)
        memory, index = block.memory(space, text, block.address(place), size, chosen, writes=True)
        memory[index] = data.view(np.uint8)[chosen]

    return store


def _make_copy(match: re.Match[str], operands: list[str], text: str) -> Step:
    """16 bytes from global to shared memory, or zeros."""
    to, source, size = _place(operands[0]), _place(operands[1]), int(operands[2], 0)
    assert size == 16, text
    given = _source(operands[3], "b32") if len(operands) > 3 else np.uint32(16)

    def copy(block: _Block, on: Any) -> None:
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
    def commit(block: _Block, on: Any) -> None:
        block.groups.append(block.copies)
        block.copies = []

    return commit


def _make_wait(match: re.Match[str], operands: list[str], text: str) -> Step:
    left = int(operands[0], 0)

    def wait(block: _Block, on: Any) -> None:
        while len(block.groups) > left:
            block.arrive(block.groups.pop(0))

    return wait


def _make_barrier(match: re.Match[str], operands: list[str], text: str) -> Step:
    def barrier(block: _Block, on: Any) -> None:
        if match[0] == "bar.warp.sync" and block.threads > WARP:
            return
        block.barriers += 1

    return barrier


def _of_rows(rows: np.ndarray) -> np.ndarray:
    """Matrices of 8×8 [..., 8, 8] as a warp holds them: two neighbours in a row to a thread, [..., 32]."""
    return np.ascontiguousarray(rows).view(np.uint32).reshape(*rows.shape[:-2], WARP)


def _to_rows(registers: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(registers).view(np.uint16).reshape(*registers.shape[:-1], 8, 8)


def _matrix_rows(block: _Block, place: tuple[str, int], count: int) -> np.ndarray:
    """Where the rows of `count` matrices lie: the first threads of a warp say it."""
    return block.warps(block.address(place))[..., : 8 * count].reshape(block.programs, -1)


def _make_load_matrix(match: re.Match[str], operands: list[str], text: str) -> Step:
    count, turned = int(match[1]), match[2] is not None
    targets, place = _list(operands[0]), _place(operands[1])

    def load(block: _Block, on: Any) -> None:
        at = _matrix_rows(block, place, count)
        block.touch(text, at, 16, np.ones(at.shape, np.bool_), writes=False)
        rows = block.rows(at).reshape(block.programs, -1, count, 8, 8)
        found = _of_rows(rows.swapaxes(-1, -2) if turned else rows)
        for i, target in enumerate(targets):
            block.put(target, found[:, :, i].reshape(block.programs, -1), on)

    return load


def _make_store_matrix(match: re.Match[str], operands: list[str], text: str) -> Step:
    count, turned = int(match[1]), match[2] is not None
    place, sources = _place(operands[0]), _list(operands[1])

    def store(block: _Block, on: Any) -> None:
        at = _matrix_rows(block, place, count)
        block.touch(text, at, 16, np.ones(at.shape, np.bool_), writes=True)
        rows = _to_rows(np.stack([block.warps(block.registers[s]) for s in sources], 2))
        rows = rows.swapaxes(-1, -2) if turned else rows
        block.set_rows(at, rows.reshape(block.programs, -1, 8))

    return store


def _make_turn(match: re.Match[str], operands: list[str], text: str) -> Step:
    target, source = operands

    def turn(block: _Block, on: Any) -> None:
        rows = _to_rows(block.warps(block.registers[source])).swapaxes(-1, -2)
        block.put(target, _of_rows(rows).reshape(block.programs, -1), on)

    return turn


def _make_product(match: re.Match[str], operands: list[str], text: str) -> Step:
    """D = A·B + C of 16×depth, depth×8 and 16×8, spread over a warp as PTX says."""
    depth, widen = int(match[1]), HALVES[match[2]][1]
    out, left, right, start = (_list(o) for o in operands)

    def warps(block: _Block, names: list[str]) -> np.ndarray:
        """[registers, warps, 8, 4]"""
        found = [block.warps(block.get(_source(n, "b32"), np.uint32)) for n in names]
        return np.ascontiguousarray(np.stack(found)).reshape(len(names), -1, 8, 4)

    def product(block: _Block, on: Any) -> None:
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
    other, clamp = _source(other, "b32"), int(clamp, 0)
    lanes = np.arange(WARP)
    segment, limit = clamp >> 8 & 31, clamp & 31
    last = lanes & segment | limit & ~segment

    def shuffle(block: _Block, on: Any) -> None:
        value = block.warps(block.registers[source])
        wanted = block.warps(block.get(other, np.uint32)).astype(np.int64) & 31
        wanted = lanes & segment | wanted & ~segment if match[1] == "idx" else lanes ^ wanted
        found = np.take_along_axis(value, np.where(wanted <= last, wanted, lanes), -1)
        block.put(target, found.reshape(block.programs, -1), on)

    return shuffle


def _make_largest(match: re.Match[str], operands: list[str], text: str) -> Step:
    target, source, _ = operands

    def largest(block: _Block, on: Any) -> None:
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
