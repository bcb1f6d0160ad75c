"""What a computation holds at most, seen operation by operation."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LargestTensor"]


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor any operation makes, backward included; a view counts what it views.

    Inside a registered operator it sees nothing: call the plain functions behind it.
    """

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return out
