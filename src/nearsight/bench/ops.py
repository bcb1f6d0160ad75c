"""The ops suite: every backend of every op that can run a shape, beside what others use for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nearsight import ops
from nearsight.bench.accuracy import find_fault, find_gross_fault
from nearsight.bench.contest import Contender, Contest, RefusedError, Runner, random_source
from nearsight.bench.peers.convolution import LAYOUTS, convolution_runners
from nearsight.bench.peers.explicit import dense_gaussian
from nearsight.bench.peers.local import flex_local, unfold_local
from nearsight.bench.peers.qna import eager_qna

__all__ = ["OpShape", "explicit_contest", "local_contest", "op_contests", "qna_contest"]

QUERIES = 2
RADIUS = 0.75


class OpShape(NamedTuple):
    """A map and how an op looks at it; `heads` and `window` are 0 where the op has none."""

    height: int
    width: int
    channels: int
    heads: int = 0
    window: int = 0

    @property
    def text(self) -> str:
        parts = [f"{self.height}x{self.width}x{self.channels}"]
        if self.heads:
            parts.append(f"h{self.heads} d{self.channels // self.heads} k{self.window}")
        return " ".join(parts)


# The shapes of ResNet-50, QnA-ViT and the augmented ResNets at 224 pixels.
LOCAL = (OpShape(56, 56, 64, 8, 7), OpShape(28, 28, 128, 8, 7), OpShape(14, 14, 256, 8, 7), OpShape(7, 7, 512, 8, 7))
QNA = (OpShape(56, 56, 64, 8, 3), OpShape(28, 28, 128, 16, 3), OpShape(14, 14, 256, 32, 3), OpShape(56, 56, 64, 8, 7))
EXPLICIT = (OpShape(112, 112, 64), OpShape(56, 56, 64), OpShape(32, 32, 32), OpShape(28, 28, 16), OpShape(14, 14, 24))
LOCAL_CPU = (OpShape(28, 28, 128, 8, 7),)
QNA_CPU = (OpShape(56, 56, 64, 8, 3),)
EXPLICIT_CPU = (OpShape(56, 56, 64),)


def op_contests(
    device: torch.device, dtype: torch.dtype, batch: int, *, quick: bool = False
) -> list[Callable[[], Contest]]:
    """The suite's contests, each built when it is called: not all of their inputs at once."""
    cuda = device.type == "cuda"
    table: list[tuple[Callable[..., Contest], Sequence[OpShape]]] = [
        (local_contest, LOCAL if cuda else LOCAL_CPU),
        (qna_contest, QNA if cuda else QNA_CPU),
        (explicit_contest, EXPLICIT if cuda else EXPLICIT_CPU),
    ]

    def later(build: Callable[..., Contest], shape: OpShape) -> Callable[[], Contest]:
        return lambda: build(shape, batch, device, dtype, compiled=cuda and not quick)

    return [later(build, shape) for build, shapes in table for shape in (shapes[1:2] or shapes if quick else shapes)]


class _Problem(NamedTuple):
    """One op on one shape. `call(backend)` is the op as a function of the inputs; `shared` names those without a batch axis."""

    op: str
    shape: OpShape
    inputs: dict[str, Tensor]
    shared: tuple[str, ...]
    call: Callable[[str | None], Callable[..., Tensor]]
    reports: Sequence[ops.BackendReport]

    @property
    def samples(self) -> tuple[int, ...] | None:
        """The first and the last sample: what the float64 reference is computed for."""
        batch = next(len(t) for n, t in self.inputs.items() if n not in self.shared)
        return (0, batch - 1) if batch > 2 else None

    def runner(self, run: Callable[..., Tensor], inputs: dict[str, Tensor] | None = None) -> Runner:
        leaves = {n: t.detach().requires_grad_() for n, t in (inputs or self.inputs).items()}
        return Runner(lambda: run(**leaves), list(leaves.values()))

    def ours(self) -> list[Contender]:
        """One contender per backend; the reference is the measure, not a runner."""
        return [self._backend(report) for report in self.reports if report.name != "reference"]

    def _backend(self, report: ops.BackendReport) -> Contender:
        run = self.call(report.name)

        def build() -> Sequence[Runner]:
            if not report.usable:
                raise RefusedError(report.reason)
            return [self.runner(run)]

        def fault() -> str | None:
            return find_fault(run, self.call("reference"), self.inputs, samples=self.samples, shared=self.shared)

        return Contender(f"nearsight {report.name}", build, fault, ours=True)

    def peer(
        self,
        name: str,
        make: Callable[[], Callable[..., Tensor]],
        *,
        without: Sequence[str] = (),
        compiled: bool = False,
    ) -> Contender:
        """A peer that computes the op itself (or, `without` some inputs, the op without them)."""
        inputs = {n: t for n, t in self.inputs.items() if n not in without}
        made: list[Callable[..., Tensor]] = []

        def run() -> Callable[..., Tensor]:
            if not made:
                if compiled:
                    torch.compiler.reset()
                made.append(make())
            return made[0]

        def fault() -> str | None:
            return find_gross_fault(run(), self.call("reference"), inputs, samples=self.samples, shared=self.shared)

        return Contender(name, lambda: [self.runner(run(), inputs)], fault, compiled=compiled)

    @property
    def values(self) -> Tensor:
        return self.inputs["v" if "v" in self.inputs else "values"]

    def convolution(self, name: str, kernel: int, *, depthwise: bool = False) -> list[Contender]:
        """A convolution of the same channels: on CUDA in its faster layout, on a CPU, where they differ by far, in both."""

        def runners() -> Sequence[Runner]:
            return convolution_runners(self.values, self.shape.channels, kernel, depthwise=depthwise)

        def only(layout: str) -> Callable[[], Sequence[Runner]]:
            return lambda: [runner for runner in runners() if runner.name == layout]

        if self.values.device.type == "cuda":
            return [Contender(name, runners)]
        return [Contender(f"{name}, {layout}", only(layout)) for layout in LAYOUTS]

    def contest(self, contenders: Sequence[Contender], floor: tuple[int, int], batch: int) -> Contest:
        sizes = {"batch": batch, **{k: v for k, v in self.shape._asdict().items() if v}}
        dtype = str(self.values.dtype).removeprefix("torch.")
        return Contest(self.op, self.shape.text, dtype, sizes, contenders, floor)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def local_contest(
    shape: OpShape, batch: int, device: torch.device, dtype: torch.dtype, *, compiled: bool = False
) -> Contest:
    """Local attention with relative positions against unfolded windows, FlexAttention and the 3×3 convolution."""
    height, width, channels, heads, window = shape
    dim = channels // heads
    draw = random_source(device)
    inputs = {
        "q": draw(batch, height, width, heads, dim, dtype=dtype, std=dim**-0.5),
        "k": draw(batch, height, width, heads, dim, dtype=dtype),
        "v": draw(batch, height, width, heads, dim, dtype=dtype),
        "rel_row": draw(window, dim // 2, dtype=dtype),
        "rel_col": draw(window, dim // 2, dtype=dtype),
    }

    def call(backend: str | None) -> Callable[..., Tensor]:
        def run(
            q: Tensor, k: Tensor, v: Tensor, rel_row: Tensor | None = None, rel_col: Tensor | None = None
        ) -> Tensor:
            return ops.local_attention(q, k, v, window=window, rel_row=rel_row, rel_col=rel_col, backend=backend)

        return run

    tables = ("rel_row", "rel_col")
    reports = ops.backends(
        "local_attention",
        inputs["q"],
        inputs["k"],
        inputs["v"],
        window=window,
        rel_row=inputs["rel_row"],
        rel_col=inputs["rel_col"],
    )
    problem = _Problem("local_attention", shape, inputs, tables, call, reports)

    def flex(positions: bool) -> Callable[[], Callable[..., Tensor]]:
        return lambda: flex_local(height, width, window, device, positions=positions, compiled=True)

    contenders = [
        *problem.ours(),
        *problem.convolution("conv 3x3", 3),
        problem.peer("unfold", lambda: unfold_local(window)),
    ]
    if compiled:
        contenders += [
            problem.peer("FlexAttention + positions", flex(True), compiled=True),
            problem.peer("FlexAttention, no positions", flex(False), without=tables, compiled=True),
        ]
    # Forward: q, k, v in, the output out. Backward: these, the output and its gradient in, three gradients out.
    operand = _bytes(inputs["q"])
    return problem.contest(contenders, (4 * operand, 12 * operand), batch)


def qna_contest(
    shape: OpShape, batch: int, device: torch.device, dtype: torch.dtype, *, compiled: bool = False
) -> Contest:
    """QnA's aggregation, two queries, against a depthwise convolution and the released code's unsafe form."""
    height, width, channels, heads, window = shape
    draw = random_source(device)
    inputs = {
        "scores": draw(batch, height, width, QUERIES, heads, dtype=dtype),
        "values": draw(batch, height, width, heads, channels // heads, dtype=dtype),
        "position_bias": draw(window, window, QUERIES, heads, dtype=torch.float32, std=0.2),
        "tap_scale": draw(window, window, QUERIES, heads, dtype=torch.float32),
    }

    def call(backend: str | None) -> Callable[..., Tensor]:
        def run(scores: Tensor, values: Tensor, position_bias: Tensor, tap_scale: Tensor) -> Tensor:
            return ops.qna(
                scores, values, window=window, position_bias=position_bias, tap_scale=tap_scale, backend=backend
            )

        return run

    tables = ("position_bias", "tap_scale")
    options = {name: inputs[name] for name in tables}
    reports = ops.backends("qna", inputs["scores"], inputs["values"], window=window, **options)
    problem = _Problem("qna", shape, inputs, tables, call, reports)
    contenders = [
        *problem.ours(),
        *problem.convolution("depthwise conv", window, depthwise=True),
        problem.peer("eager, unsafe", lambda: eager_qna),
    ]
    if compiled:
        contenders.append(
            problem.peer("compiled, unsafe", lambda: torch.compile(eager_qna, dynamic=False), compiled=True)
        )
    # Forward: scores and values in, output out. Backward: these and the output's gradient in, two gradients out.
    scores, values = _bytes(inputs["scores"]), _bytes(inputs["values"])
    return problem.contest(contenders, (scores + 2 * values, 3 * scores + 5 * values), batch)


def explicit_contest(
    shape: OpShape, batch: int, device: torch.device, dtype: torch.dtype, *, compiled: bool = False
) -> Contest:
    """Gaussian explicit attention, with the gradient to its radius, against the dense HW×HW map."""
    height, width, channels = shape[:3]
    draw = random_source(device)
    inputs = {
        "values": draw(batch, height, width, channels, dtype=dtype),
        "radius": torch.tensor(RADIUS, device=device),
    }

    def call(backend: str | None) -> Callable[..., Tensor]:
        def run(values: Tensor, radius: Tensor) -> Tensor:
            return ops.explicit_attention(values, kind="gaussian", radius=radius, backend=backend)

        return run

    reports = ops.backends("explicit_attention", inputs["values"], kind="gaussian", radius=inputs["radius"])
    problem = _Problem("explicit_attention", shape, inputs, ("radius",), call, reports)
    contenders = [*problem.ours(), problem.peer("dense map", lambda: dense_gaussian)]
    if compiled:
        contenders.append(
            problem.peer("dense map, compiled", lambda: torch.compile(dense_gaussian, dynamic=False), compiled=True)
        )
    operand = _bytes(inputs["values"])
    return problem.contest(contenders, (2 * operand, 4 * operand), batch)
