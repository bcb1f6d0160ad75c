"""A network as the explorer uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image
from torch import Tensor, nn

from nearsight.errors import UserError
from nearsight.viz.maps import attention_layers

__all__ = ["Subject"]


@dataclass(frozen=True, eq=False)
class Subject:
    """A network to look into.

    Attributes:
        name: what the page calls it; no two on a page are called the same.
        model: the network, in evaluation mode.
        prepare: an RGB image as the network wants it, float32 [1, C, H, W].
        shown: prepared pixels [C, H, W] as they are drawn, [H, W] or [H, W, 3] in 0…1.
        classes: names of its outputs; None when it does not classify.
        note: where its weights come from, a sentence.
        trained: False for weights nobody trained.
        lock: held while the model runs. Maps are read by hooks on the model, which all visitors of a page share.

    >>> import nearsight, torch
    >>> def prepare(image):
    ...     return torch.zeros(1, 3, image.height, image.width)
    >>> model = torch.nn.Sequential(nearsight.LocalAttention2d(3, 4, 3, num_heads=2))
    >>> Subject("one layer", model, prepare, lambda pixels: pixels.permute(1, 2, 0).numpy(), None, "Random.").layers
    ['0']
    """

    name: str
    model: nn.Module
    prepare: Callable[[Image.Image], Tensor]
    shown: Callable[[Tensor], Any]
    classes: Sequence[str] | None
    note: str
    trained: bool = False
    lock: Any = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        if not attention_layers(self.model):
            raise UserError(
                f"{self.name} has no attention layer to look into; wanted a network with some: nearsight models."
            )

    @property
    def layers(self) -> list[str]:
        return list(attention_layers(self.model))
