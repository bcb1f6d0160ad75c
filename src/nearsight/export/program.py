"""A network as a program of its own: one graph of plain operators, for ONNX or `torch.export`.

It is held against the network before it is kept. Nothing of nearsight is needed to run it, and for ONNX no torch. The batch
and, where asked, rows and columns stay free.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nearsight.errors import UserError

__all__ = ["FACTS", "FORMATS", "Exported", "Graph", "export"]

FORMATS = (".onnx", ".pt2")
# Under this key an ONNX file keeps what it is (metadata_props), and a .pt2 beside its weights (extra_files).
FACTS = "nearsight.json"
# Largest difference to the network, as a share of its largest output. Other programs add in other orders: 1e-7 to 1e-6 is usual.
TOLERANCE = 1e-4
BATCH, IMAGES = "batch", "images"
# Weights of so many bytes go into one ONNX file; some 100 MB more, and torch puts them into a second one beside it, unasked.
ONNX_BYTES = 1_500_000_000
# What a network's strides may ask rows and columns to divide by.
STEPS = (1, 2, 4, 8, 16, 32, 64)

Size = tuple[int, int]
Run = Callable[[Tensor], Tensor]


class Exported(NamedTuple):
    """What was written: the shape it takes, how many operators it has, where it was compared and how far off it was at most."""

    file: Path
    shape: list[int | str]
    operators: int
    checked: list[tuple[int, ...]]
    error: float


class Graph(nn.Module):
    """A network as others see it: one input, one output; with `statistics` (mean, std) it takes pixels in 0…1 and, where it
    `rebuilds` images, gives them."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        statistics: tuple[Sequence[float], Sequence[float]] | None = None,
        rebuilds: bool = False,
    ) -> None:
        super().__init__()
        self.network, self.pixels, self.rebuilds = network, statistics is not None, rebuilds
        for name, values in zip(("mean", "std"), statistics or ((0.0,), (1.0,)), strict=True):
            self.register_buffer(name, torch.tensor(values).view(1, -1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        y: Tensor = self.network((images - self.mean) / self.std if self.pixels else images)
        return (y * self.std + self.mean).clamp(0, 1) if self.pixels and self.rebuilds else y


@torch.no_grad()
def export(
    graph: Graph,
    file: Path,
    *,
    channels: int,
    size: Size,
    batch: int | None = None,
    any_size: bool = False,
    output: str = "logits",
    facts: dict[str, Any] | None = None,
) -> Exported:
    """Write `graph`, in evaluation mode and on a CPU, as FILE.onnx or FILE.pt2, after it gave what the network gives.

    `batch` None leaves the batch free; `any_size` rows and columns too. A file that is there is replaced at the very end.
    """
    if file.suffix not in FORMATS:
        raise UserError(f"got the file {str(file)!r}, wanted a name that ends in {' or '.join(FORMATS)}.")
    if file.suffix == ".onnx":
        import onnxruntime  # noqa: F401, what is missing is said before minutes of work
        import onnxscript  # noqa: F401

        held = sum(tensor.nbytes for tensor in graph.state_dict().values())
        if held > ONNX_BYTES:
            raise UserError(
                f"the network has {held / 1e9:.1f} GB of weights, wanted at most {ONNX_BYTES / 1e9:g} for one .onnx file; "
                f"write a .pt2 instead."
            )
    if file.is_dir():
        raise UserError(f"got the file {str(file)!r}, which is a folder; wanted the name of a file.")
    file.parent.mkdir(parents=True, exist_ok=True)
    graph = graph.eval()
    step = _step(graph, channels, size) if any_size else None
    program = _traced(graph, channels, size, batch, any_size)
    shape = _shape(program, batch, step)
    sizes = [size] * (1 if batch else 2) + (_rectangles(size, step) if step else [])
    shapes: list[tuple[int, ...]] = [
        (batch or n, channels, *pair) for n, pair in zip((1, 3, 2, 1), sizes, strict=False)
    ]
    part = file.with_name(f".{file.stem}.partial{file.suffix}")
    text = json.dumps({**(facts or {}), "shape": shape, "output": output}, ensure_ascii=False)
    try:
        write, load = (_write_onnx, _load_onnx) if file.suffix == ".onnx" else (_write_pt2, _load_pt2)
        operators = write(program, part, output, shape, text)
        error = _compare(graph, load(part), shapes, file)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return Exported(file, shape, operators, shapes, error)


def _traced(graph: Graph, channels: int, size: Size, batch: int | None, any_size: bool) -> Any:
    free: dict[int, Any] = {} if batch else {0: torch.export.Dim.AUTO}
    rows, columns = size
    if any_size:
        free |= dict.fromkeys((2, 3), torch.export.Dim.AUTO)
        # Far from sizes of which little is to be seen: a single window, rows like columns.
        rows, columns = 2 * rows, 3 * columns if 3 * columns != 2 * rows else 4 * columns
    example = torch.zeros(batch or 2, channels, rows, columns)
    try:
        with _quiet():
            return torch.export.export(graph, (example,), dynamic_shapes={IMAGES: free} if free else None)
    except Exception as error:
        advice = "; leave out --any-size" if any_size else ""
        raise UserError(f"the network cannot be exported at {rows}×{columns} ({_first(error)}){advice}.") from error


def _shape(program: Any, batch: int | None, step: int | None) -> list[int | str]:
    """[batch, channels, rows, columns]: numbers, or names of what is free ("32·rows": multiples of 32)."""
    (found,) = (
        node.meta["val"].shape for node in program.graph.nodes if node.op == "placeholder" and node.name == IMAGES
    )
    shape: list[int | str] = []
    for axis, (name, length) in enumerate(zip((BATCH, "channels", "rows", "columns"), found, strict=True)):
        # A length that tracing settled is a number in either of two forms.
        if isinstance(length, int) or length.node.maybe_as_int() is not None:
            if axis == 0 and batch is None:
                raise UserError(f"the network holds for a batch of {length} alone; name it with --batch.")
            if axis > 1 and step:
                raise UserError(f"the network holds for {length} {name} alone; leave out --any-size.")
            shape.append(int(length))
        else:
            shape.append(f"{step}·{name}" if axis > 1 and step != 1 else name)
    return shape


def _rectangles(size: Size, step: int) -> list[Size]:
    """Two other sizes to compare at, odd multiples of `step`: a wide one and a tall one."""

    def odd(steps: float) -> int:
        return round(steps) // 2 * 2 + 1

    rows, columns = (n / step for n in size)
    wide, tall = (odd(0.75 * rows), odd(1.25 * columns) + 2), (odd(1.5 * rows) + 2, odd(0.75 * columns))
    return [(step * pair[0], step * pair[1]) for pair in (wide, tall)]


def _step(graph: Graph, channels: int, size: Size) -> int:
    """What rows and columns must divide by, as the network itself says of images."""
    refusal: Exception | None = None
    for step in STEPS:
        try:
            for rectangle in _rectangles(size, step):
                graph(torch.zeros(1, channels, *rectangle))
        except Exception as error:
            refusal = refusal or error
        else:
            return step
    assert refusal is not None
    raise UserError(
        f"the network takes no other sizes than {size[0]}×{size[1]} ({_first(refusal)}); leave out --any-size."
    )


def _compare(graph: Graph, run: Run, shapes: Sequence[tuple[int, ...]], file: Path) -> float:
    """The largest difference between program and graph, as a share of the largest output; one too large is refused."""
    worst, generator = 0.0, torch.Generator().manual_seed(0)
    for shape in shapes:
        images = torch.rand(shape, generator=generator)
        wanted = graph(images)
        where = "×".join(map(str, shape))
        try:
            found = run(images)
        except Exception as refusal:
            raise UserError(
                f"{file}: the program does not run on {where} ({_first(refusal)}), so it is not kept; "
                f"try the other format, a size of its own with --size, or leave out --any-size."
            ) from refusal
        if found.shape != wanted.shape:
            raise UserError(
                f"{file}: gives {tuple(found.shape)} for {where}, the network {tuple(wanted.shape)}; not kept."
            )
        error = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
        if not error <= TOLERANCE:
            raise UserError(
                f"{file}: gives other numbers than the network for {where} (off by {error:.1e} of the largest); not kept."
            )
        worst = max(worst, error)
    return worst


# ---- ONNX ----


def _write_onnx(program: Any, file: Path, output: str, shape: list[int | str], facts: str) -> int:
    try:
        with _quiet():
            made: Any = torch.onnx.export(
                program, (), dynamo=True, input_names=[IMAGES], output_names=[output], verbose=False
            )
    except Exception as error:
        if isinstance(_innermost(error), ImportError):
            raise UserError(
                f"this torch does not work with the onnxscript that is installed ({_first(error)}); "
                f"pip install -U onnxscript, or write a .pt2 instead."
            ) from error
        raise UserError(f"ONNX lacks what the network does ({_first(error)}); write a .pt2 instead.") from error
    if hasattr(made, "rename_axes"):
        symbols = zip(made.model.graph.inputs[0].shape, shape, strict=True)
        made.rename_axes({symbol: str(name).rpartition("·")[2] for symbol, name in symbols if isinstance(name, str)})
    made.model.metadata_props[FACTS] = facts
    made.save(file, external_data=False)
    return sum(1 for _ in made.model.graph)


def _load_onnx(file: Path) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {IMAGES: images.numpy()})[0])


# ---- torch.export ----


def _write_pt2(program: Any, file: Path, output: str, shape: list[int | str], facts: str) -> int:
    # Through memory: where torch's own writer finds no room it ends the process.
    written = io.BytesIO()
    with _quiet():
        torch.export.save(program, written, extra_files={FACTS: facts})
    file.write_bytes(written.getbuffer())
    return sum(node.op == "call_function" for node in program.graph.nodes)


def _load_pt2(file: Path) -> Run:
    with _quiet():
        return torch.export.load(file).module()


# ---- what exporters say ----


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Their advice to those who write exporters; older ones of onnxscript print it."""
    loggers = [logging.getLogger(name) for name in ("torch", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _innermost(error: BaseException) -> BaseException:
    """What all the others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _first(error: BaseException) -> str:
    """An exporter's error in one line: the innermost one's first words."""
    error = _innermost(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
