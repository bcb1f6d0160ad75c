"""Whole numbers nobody chose."""

from collections.abc import Callable

import torch


def picker(seed: int) -> Callable[[int, int], int]:
    """`pick(low, high)`: the next random number from `low` to `high`, both among them."""
    draw = torch.Generator().manual_seed(seed)
    return lambda low, high: int(torch.randint(low, high + 1, (), generator=draw))
