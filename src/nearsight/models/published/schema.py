"""What a published table is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PAPERS", "Paper", "Row", "Table", "paper_of"]


@dataclass(frozen=True)
class Paper:
    """Where numbers come from."""

    short: str
    title: str
    authors: str
    year: int
    url: str


PAPERS = {
    "sasa": Paper(
        "SASA",
        "Stand-Alone Self-Attention in Vision Models",
        "Ramachandran, Parmar, Vaswani, Bello, Levskaya, Shlens",
        2019,
        "https://arxiv.org/abs/1906.05909",
    ),
    "qna": Paper(
        "QnA",
        "Learned Queries for Efficient Local Attention",
        "Arar, Shamir, Bermano",
        2022,
        "https://arxiv.org/abs/2112.11435",
    ),
    "expatt": Paper(
        "ExpAtt",
        "Explicitly Modeled Attention Maps for Image Classification",
        "Tan, Nguyen, Zhang, et al.",
        2021,
        "https://arxiv.org/abs/2006.07872",
    ),
    "aa": Paper(
        "AA-Net",
        "Attention Augmented Convolutional Networks",
        "Bello, Zoph, Vaswani, Shlens, Le",
        2019,
        "https://arxiv.org/abs/1904.09925",
    ),
}


def paper_of(model: str) -> Paper | None:
    """The paper a network of ours is from, by the first word of its name; None for a plain baseline.

    >>> paper_of("sasa_resnet50").short, paper_of("resnet_nano")
    ('SASA', None)
    """
    return PAPERS.get(model.partition("_")[0])


@dataclass(frozen=True)
class Row:
    """One published line: the call that builds the network, the numbers as printed, and why a cell cannot be reached.

    `params` is in 10⁶, `flops` in 10⁹; both are strings, because "4.70" claims more than "4.7".
    """

    label: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    params: str | None = None
    flops: str | None = None
    results: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A published table. `convention` is how its FLOPs are counted (a name in `flops.CONVENTIONS`); `notes` are its footnotes."""

    title: str
    source: str
    convention: str
    rows: tuple[Row, ...]
    notes: Mapping[str, str] = field(default_factory=dict)
    size: tuple[int, int] | None = None
    remark: str | None = None
