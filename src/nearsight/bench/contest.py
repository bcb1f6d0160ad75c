"""What is timed against what: contenders on one shape. The suites build these, the driver runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Contender", "Contest", "RefusedError", "Runner", "asked_for", "random_source"]


class RefusedError(Exception):
    """A contender cannot run this shape; the text says why."""


def asked_for(name: str, filters: Sequence[str]) -> bool:
    """Whether some filter's words all occur in the name; every name is asked for where there is no filter.

    >>> asked_for("local_attention 28x28 unfold", ["QnA", "local 28x28"])
    True
    """
    return not filters or any(all(word in name.lower() for word in f.lower().split()) for f in filters)


def random_source(device: torch.device) -> Callable[..., Tensor]:
    """`draw(*sizes, dtype=…, std=1)`: normal numbers from a generator of its own.

    The default generator of a GPU refuses to work once the capture of a graph has failed.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(*sizes: int, dtype: torch.dtype, std: float = 1.0) -> Tensor:
        return (torch.randn(*sizes, generator=generator, device=device) * std).to(dtype)

    return draw


@dataclass(frozen=True)
class Runner:
    """One form of a contender: its forward, and the tensors the backward takes gradients of."""

    forward: Callable[[], Tensor]
    leaves: Sequence[Tensor]
    name: str = ""


@dataclass(frozen=True)
class Contender:
    """Someone to time. `build` gives its forms (the fastest counts); `fault` says what is wrong with its results, or None.

    `fault` is None for another function, a convolution say, whose price is all that is asked.
    """

    name: str
    build: Callable[[], Sequence[Runner]]
    fault: Callable[[], str | None] | None = None
    ours: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class Contest:
    """Contenders on one shape. `floor_bytes`: what the forward, and forward+backward, must at least move through memory."""

    subject: str
    shape: str
    dtype: str
    sizes: dict[str, int]
    contenders: Sequence[Contender]
    floor_bytes: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return f"{self.subject} {self.shape}"
