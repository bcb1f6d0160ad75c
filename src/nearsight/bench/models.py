"""The models suite: training images per second of our networks beside timm's: eager, compiled, and compiled and replayed as
a CUDA graph, where the host's launches cost nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nearsight.bench import memory
from nearsight.bench.contest import asked_for
from nearsight.bench.driver import Clock, guard
from nearsight.bench.timing import Effort, launched_ms, not_captured, replayed_ms, time_on_cpu

__all__ = ["NETWORKS", "NetworkResult", "find_network_fault", "run_networks", "wanted_networks"]

# A network and the one it is held against (None: it is itself a yardstick), the ones the goals name first.
NETWORKS: dict[str, str | None] = {
    "resnet50": None,
    "sasa_resnet50_convstem": "resnet50",
    "sasa_resnet50": "resnet50",
    "expatt_resnet50": "resnet50",
    "swin_tiny_patch4_window7_224": None,
    "qna_vit_tiny": "swin_tiny_patch4_window7_224",
    "mobilenetv2_100": None,
    "expatt_mobilenetv2_100": "mobilenetv2_100",
    "convnext_tiny": None,
    "resnet26": None,
}
CLASSES = 1000


@dataclass
class NetworkResult:
    """A network's row: images per second, bytes; `…_over_peer` is this network ÷ its peer (speed above 1: faster)."""

    network: str
    peer: str | None
    ours: bool
    dtype: str
    batch: int
    size: int
    parameters: int | None = None
    status: str = "ok"
    note: str | None = None
    eager_images_s: float | None = None
    compiled_images_s: float | None = None
    replayed_images_s: float | None = None
    spread: float | None = None
    eager_bytes: int | None = None
    compiled_bytes: int | None = None
    eager_over_peer: float | None = None
    compiled_over_peer: float | None = None
    replayed_over_peer: float | None = None
    bytes_over_peer: float | None = None

    @property
    def fast_images_s(self) -> float | None:
        """Images per second compiled, as replays where those were timed."""
        return self.replayed_images_s or self.compiled_images_s

    def columns(self) -> dict[str, object]:
        """The row flat, for a file."""
        return asdict(self)


def wanted_networks(filters: Sequence[str]) -> list[str]:
    """The networks a filter asks for (all of its words occur in the name), with the peers they are held against.

    >>> wanted_networks(["qna"])
    ['swin_tiny_patch4_window7_224', 'qna_vit_tiny']
    """
    asked = {name for name in NETWORKS if asked_for(name, filters)}
    peers = {NETWORKS[name] for name in asked}
    return [name for name in NETWORKS if name in asked or name in peers]


def run_networks(
    names: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    effort: Effort,
    *,
    batch: int,
    size: int,
    compiled: bool,
    deadline: Clock,
    progress: Callable[[str], None] = lambda text: None,
    keep: Callable[[list[NetworkResult]], None] = lambda results: None,
) -> list[NetworkResult]:
    """Check and time each network, first as it is, then (CUDA) compiled; what the deadline leaves out is said in its note.

    `keep` is given the results so far, after each network.
    """
    ours = {name for name in names if NETWORKS[name] is not None}
    text = str(dtype).removeprefix("torch.")
    results = [NetworkResult(name, NETWORKS[name], name in ours, text, batch, size) for name in names]

    def keep_timed() -> None:
        _add_ratios(results)
        keep([r for r in results if r.status != "ok" or r.eager_images_s is not None])

    with deadline.stoppable():
        for result in results:
            progress(f"{result.network}: check and eager" if result.ours else f"{result.network}: eager")
            guard(result, partial(_eager, result, device, dtype, effort))
            memory.free(device)
            keep_timed()
        for result in results if compiled else []:
            if result.status != "ok":
                continue
            if deadline.over:
                result.note = f"not compiled: the budget of {deadline.seconds:.0f} s was spent; choose with --filter"
                continue
            progress(f"{result.network}: compiling")
            with deadline.running():
                guard(result, partial(_compiled, result, device, dtype, effort))
            torch.compiler.reset()
            memory.free(device)
            keep_timed()
    for result in results if deadline.stopped else []:
        if result.status == "ok" and result.eager_images_s is None:
            result.note = "not timed: stopped early"
    _add_ratios(results)
    return results


def _create(result: NetworkResult, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    # Only networks whose layers know one image size ask for it.
    fixed: dict[str, Any] = (
        {"img_size": result.size} if result.network.startswith("swin") and result.size != 224 else {}
    )
    model = timm.create_model(result.network, num_classes=CLASSES, **fixed)
    result.parameters = sum(p.numel() for p in model.parameters())
    return model.to(device).to(memory_format=torch.channels_last)


def _eager(result: NetworkResult, device: torch.device, dtype: torch.dtype, effort: Effort) -> None:
    model = _create(result, device)
    if result.ours:
        images = torch.randn(2, 3, result.size, result.size, device=device)
        fault = find_network_fault(model, images)
        if fault is not None:
            result.status, result.note = "wrong", f"wrong, not timed: {fault}"
            return
        memory.free(device)
    step = _Step(model, model, result, device, dtype)
    result.eager_images_s, result.spread, result.eager_bytes = step.measure(effort)


def _compiled(result: NetworkResult, device: torch.device, dtype: torch.dtype, effort: Effort) -> None:
    model = _create(result, device)
    step = _Step(model, torch.compile(model, dynamic=False), result, device, dtype)
    result.compiled_images_s, result.spread, result.compiled_bytes = step.measure(effort)
    if device.type == "cuda":
        try:
            result.replayed_images_s = step.replay(effort)
        except Exception as error:
            result.note = not_captured(error)


class _Step:
    """A whole training step of a network: forward, loss, backward, SGD."""

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[Tensor], Tensor],
        result: NetworkResult,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        model.train()
        self.run, self.device, self.dtype = run, device, dtype
        images = torch.randn(result.batch, 3, result.size, result.size, device=device)
        self.images = images.to(memory_format=torch.channels_last)
        self.labels = torch.randint(CLASSES, (result.batch,), device=device)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.loss: Tensor | None = None

    def __call__(self) -> None:
        half = self.dtype in (torch.float16, torch.bfloat16)
        with torch.autocast(self.device.type, self.dtype) if half else nullcontext():
            loss = F.cross_entropy(self.run(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()

    def measure(self, effort: Effort) -> tuple[float, float, int]:
        """Images per second, their spread, and peak memory."""
        self()
        if self.device.type == "cuda":
            self()
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            ms, spread = launched_ms(self, effort)
            # Parameters and optimiser state included: that is what must fit.
            held = torch.cuda.max_memory_allocated(self.device)
        else:
            timing = time_on_cpu({"step": self}, effort)["step"]
            ms, spread = timing.ms, timing.spread
            self.loss = None  # held since before, so its release inside the step could not be counted
            held = memory.peak_extra_bytes(self, self.device)
        self._check()
        return len(self.images) / ms * 1e3, spread, held

    def replay(self, effort: Effort) -> float:
        """Images per second of the step captured as a CUDA graph; raises what the capture raises."""
        ms, _ = replayed_ms(self, effort)
        self._check()
        return len(self.images) / ms * 1e3

    def _check(self) -> None:
        if self.loss is None or not torch.isfinite(self.loss):
            raise ArithmeticError("the loss is not finite")


def find_network_fault(model: nn.Module, images: Tensor) -> str | None:
    """Compare a network with its float64 self, which takes other backends: ‖got − truth‖ / ‖truth‖, output and gradients.

    In evaluation mode, without drop path. None when the output is within 0.1 % and all gradients together within 1 %.
    """
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in twin.parameters():
            # A residual branch that starts at zero would hide whatever is in it.
            if parameter.dim() == 1 and not parameter.any():
                parameter.fill_(0.2)
    truth = copy.deepcopy(twin).double()
    upstream = torch.randn(len(images), CLASSES, device=images.device)

    def run(network: nn.Module, images: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
        out = network(images)
        out.backward(upstream)
        gradients = [p.grad.double().flatten() for p in network.parameters() if p.grad is not None]
        return out.detach().double(), torch.cat(gradients)

    with _exact_float32():
        have = run(twin, images, upstream)
        want = run(truth, images.double(), upstream.double())
    for name, limit, got, wanted in zip(("output", "gradients"), (1e-3, 1e-2), have, want, strict=True):
        if got.shape != wanted.shape:
            return f"{name}: got {got.numel()} numbers, wanted {wanted.numel()}"
        error = (got - wanted).norm() / wanted.norm()
        if not error <= limit:
            return f"{name}: relative error {error:.2e} exceeds {limit:g}"
    return None


@contextmanager
def _exact_float32() -> Iterator[None]:
    """Float32 without the matrix units' shorter mantissa, whose rounding would look like a fault, and without trying
    convolution algorithms for a single pass."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark
    cudnn.allow_tf32 = matmul.allow_tf32 = cudnn.benchmark = False
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark = before


def _add_ratios(results: Sequence[NetworkResult]) -> None:
    by_name = {result.network: result for result in results}
    for result in results:
        peer = by_name.get(result.peer or "")
        if peer is None:
            continue
        for way in ("eager", "compiled", "replayed"):
            top, bottom = getattr(result, f"{way}_images_s"), getattr(peer, f"{way}_images_s")
            if top is not None and bottom:
                setattr(result, f"{way}_over_peer", top / bottom)
        compiled = result.compiled_bytes is not None and peer.compiled_bytes is not None
        top, bottom = (getattr(r, "compiled_bytes" if compiled else "eager_bytes") for r in (result, peer))
        if top is not None and bottom:
            result.bytes_over_peer = top / bottom
