"""Our networks beside the published numbers: built on the meta device, counted, compared to the printed digit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import timm
import torch
from torch import nn

from nearsight.models.flops import CONVENTIONS, Work, count_parameters, measure_work
from nearsight.models.published.schema import Row, Table

__all__ = ["Cell", "Comparison", "compare"]

Build = Callable[..., nn.Module]


@dataclass(frozen=True)
class Cell:
    """One number as printed and as ours; `note` is the footnote that says why it differs."""

    published: str
    ours: float
    note: str | None

    @property
    def difference(self) -> float:
        return self.ours - float(self.published)

    @property
    def agrees(self) -> bool:
        """Whether ours would be printed the same: it is within half a unit of the last published digit."""
        half_unit = Decimal(1).scaleb(int(Decimal(self.published).as_tuple().exponent)) / 2
        return abs(Decimal(repr(self.ours)) - Decimal(self.published)) <= half_unit


@dataclass(frozen=True)
class Comparison:
    """A published row and our network's counts. FLOPs are given under every convention the table uses."""

    row: Row
    parameters: int
    flops: dict[str, int]
    cells: dict[str, Cell]


def compare(table: Table, build: Build = timm.create_model) -> list[Comparison]:
    """Build every network of a table by `build(name, **options)` and count it.

    >>> from nearsight.models.published import TABLES
    >>> first = compare(TABLES["sasa"][0])[0]
    >>> first.row.label, first.parameters, first.cells["flops"].agrees
    ('ResNet-26 baseline', 13696552, True)
    """
    return [_compare(table, row, build) for row in table.rows]


def _compare(table: Table, row: Row, build: Build) -> Comparison:
    parameters, work = _count(build, row.model, row.options, table.size)
    flops = {name: CONVENTIONS[name].total(work) for name in dict.fromkeys((table.convention, "matmul"))}
    ours = {"params": parameters / 1e6, "flops": flops[table.convention] / 1e9}
    published = {"params": row.params, "flops": row.flops}
    cells = {n: Cell(printed, ours[n], row.notes.get(n)) for n, printed in published.items() if printed is not None}
    return Comparison(row, parameters, flops, cells)


_COUNTED: dict[tuple[Build, str], tuple[int, Work]] = {}


def _count(build: Build, model: str, options: Mapping[str, Any], size: tuple[int, int] | None) -> tuple[int, Work]:
    """Parameters and work of a network; several rows share one."""
    key = build, repr((model, sorted(options.items()), size))
    if key not in _COUNTED:
        with torch.device("meta"):
            network = build(model, **options)
        _COUNTED[key] = count_parameters(network), measure_work(network, size)
    return _COUNTED[key]
