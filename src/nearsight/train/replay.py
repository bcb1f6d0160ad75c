"""An optimiser's step as a CUDA graph: hundreds of small kernels (Muon's products, say) without the host's launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from timm.optim.muon import Muon
from torch import Tensor

__all__ = ["ReplayedUpdate"]

# Steps that are launched first: the optimiser makes its state in the first one.
LAUNCHED = 3
# A rate of 0, where a warm-up begins: what can be captured divides by the rate, and 0/0 where a gradient is 0 too.
SMALLEST = 1e-12


# Muon steps matrix by matrix, a few thousand small kernels that wait for each other without need: so many branches of the
# graph run side by side.
BRANCHES = 8


def branches(optimizer: torch.optim.Optimizer, count: int) -> list[list[dict[str, Any]]]:
    """An optimiser's groups of parameters, dealt out to `count` lists of groups that cost about the same; empty ones left out."""
    groups = optimizer.param_groups
    dealt: list[dict[int, list[Tensor]]] = [{} for _ in range(count)]  # by number of the group
    costs = [0.0] * count
    trained = [(i, p) for i, group in enumerate(groups) for p in group["params"] if p.grad is not None]
    for i, parameter in sorted(trained, key=lambda each: -_microseconds(each[1])):
        chosen = costs.index(min(costs))
        costs[chosen] += _microseconds(parameter)
        dealt[chosen].setdefault(i, []).append(parameter)
    return [[{**groups[i], "params": own} for i, own in each.items()] for each in dealt if each]


def _microseconds(parameter: Tensor) -> float:
    """About how long Muon takes for a parameter: what is no matrix few kernels, a matrix some forty, and its products."""
    if parameter.ndim < 2:
        return 10.0
    rows = parameter.shape[0]
    columns = parameter.numel() // rows
    return 60.0 + 2e-8 * parameter.numel() * min(rows, columns)


class ReplayedUpdate:
    """Clip the gradients and step, launched a few times and replayed from then on.

    Gradients are copied to fixed places first; learning rates, the one thing a schedule changes, are tensors that are filled
    before every replay. Where the step cannot be captured, `tell` is given a sentence and it is launched as before.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, clip: float | None, tell: Callable[[str], None]) -> None:
        self.optimizer, self.clip, self.tell = optimizer, clip, tell
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.launched = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.failed = False
        self.trained: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.rates: list[Tensor] = []

    @staticmethod
    def suits(optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimiser says that it can be captured."""
        return "capturable" in optimizer.defaults

    def __call__(self) -> None:
        trained = [p for p in self.parameters if p.grad is not None]
        if self.graph is None and not self.failed and self.launched >= LAUNCHED:
            self._capture(trained)
        if self.graph is None or [*map(id, trained)] != [*map(id, self.trained)]:
            self._launch()  # not captured, or other parameters take part than when it was
            return
        torch._foreach_copy_(self.gradients, [p.grad for p in trained if p.grad is not None])
        for place, rate in zip(self.rates, self._rates(), strict=True):
            place.fill_(rate)
        self.graph.replay()

    def _rates(self) -> list[float]:
        return [max(group["lr"], SMALLEST) for group in self.optimizer.param_groups]

    @contextmanager
    def _stepping_at(self, rates: Sequence[float | Tensor]) -> Iterator[None]:
        """The groups' learning rates, and afterwards those that the schedule set."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        kept = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            yield
        finally:
            for group, rate in zip(groups, kept, strict=True):
                group["lr"] = rate

    def _prepare(self) -> None:
        """Have the optimiser work in a form that can be captured, its counts of steps on the device.

        Not before the first step: a checkpoint is loaded into an optimiser that has made a step of size 0.
        """
        for group in (self.optimizer.defaults, *self.optimizer.param_groups):
            group["capturable"] = True
        for parameter, slots in self.optimizer.state.items():
            if isinstance(slots.get("step"), Tensor):
                slots["step"] = slots["step"].to(parameter.device)

    def _launch(self) -> None:
        if self.launched == 0:
            self._prepare()
        self.launched += 1
        with self._stepping_at(self._rates()):
            self._update()

    def _update(self) -> None:
        self._clip()
        self.optimizer.step()

    def _clip(self) -> None:
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)

    def _update_side_by_side(self) -> None:
        """The same for an optimiser to which one parameter is nothing to another, on several streams."""
        self._clip()
        here, groups = torch.cuda.current_stream(), self.optimizer.param_groups
        streams = []
        try:
            for own in branches(self.optimizer, BRANCHES):
                self.optimizer.param_groups = own
                streams.append(torch.cuda.Stream())
                streams[-1].wait_stream(here)
                with torch.cuda.stream(streams[-1]):
                    self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
        for stream in streams:
            here.wait_stream(stream)

    def _capture(self, trained: list[Tensor]) -> None:
        given = [p.grad for p in trained]
        self.trained, self.gradients = trained, [torch.empty_like(grad) for grad in given if grad is not None]
        self.rates = [torch.full((), rate, device=trained[0].device) for rate in self._rates()]
        try:
            graph = torch.cuda.CUDAGraph()
            for parameter, gradient in zip(trained, self.gradients, strict=True):
                parameter.grad = gradient
            torch.cuda.synchronize()
            # Other threads may go on with the data.
            with self._stepping_at(self.rates), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                if isinstance(self.optimizer, Muon):
                    self._update_side_by_side()
                else:
                    self._update()
            self.graph = graph
        except Exception as error:  # whatever an optimiser does that a graph cannot hold
            self.failed = True
            self.tell(f"the optimiser's step is launched, not replayed: {str(error).splitlines()[0][:200]}")
        finally:
            for parameter, before in zip(trained, given, strict=True):
                parameter.grad = before
