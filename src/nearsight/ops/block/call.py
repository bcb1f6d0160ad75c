"""A checked call of block attention: what every backend receives."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nearsight.errors import ArgumentValueError
from nearsight.ops import checks
from nearsight.ops.dispatch import autocast_dtype

__all__ = ["BlockCall", "prepare"]

OP = "block_attention"


class BlockCall(NamedTuple):
    """Arguments in one form. The weights keep their own dtype under autocast; backends work in that of x."""

    x: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    rel_row: Tensor | None
    rel_col: Tensor | None
    key_mask: Tensor | None
    heads: int
    block: int

    @property
    def head_dim(self) -> int:
        return self.w_q.shape[0] // self.heads

    def in_one_dtype(self) -> BlockCall:
        """The same call with the weights in the dtype of x."""
        dtype = self.x.dtype
        row, col = (None if t is None else t.to(dtype) for t in (self.rel_row, self.rel_col))
        weights = {name: getattr(self, name).to(dtype) for name in ("w_q", "w_k", "w_v")}
        return self._replace(rel_row=row, rel_col=col, **weights)


def prepare(
    x: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    *,
    heads: int,
    block: int = 4,
    rel_row: Tensor | None = None,
    rel_col: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> BlockCall:
    """Check the arguments of `block_attention` and bring x into autocast's dtype."""
    checks.check_count(OP, "heads", heads)
    checks.check_count(OP, "block", block)
    checks.check_float_tensor(OP, "x", x, 4, "[B, H, W, Cin]")
    checks.check_float_tensor(OP, "w_q", w_q, 2, "[C, Cin]")
    channels, inputs = w_q.shape[0], x.shape[3]
    if channels < 1 or channels % heads:
        raise ArgumentValueError(
            f"{OP}: got w_q of shape {checks.shape_text(w_q.shape)} and heads={heads}, wanted channels that divide by the heads."
        )
    checks.check_shape(OP, "w_q", w_q, (channels, inputs), "[C, Cin]")
    checks.check_float_tensor(OP, "w_k", w_k, 2, "[C, Cin]")
    checks.check_shape(OP, "w_k", w_k, (channels, inputs), "the shape of w_q")
    rank = w_v.dim() if isinstance(w_v, Tensor) else 2
    places = (block * block,) if rank == 3 else ()
    layout = f"[C, Cin] = [{channels}, {inputs}] or one per place, [{block * block}, {channels}, {inputs}]"
    checks.check_float_tensor(OP, "w_v", w_v, len(places) + 2, layout)
    checks.check_shape(OP, "w_v", w_v, (*places, channels, inputs), layout)
    dim = channels // heads
    for name, table in (("rel_row", rel_row), ("rel_col", rel_col)):
        if table is None:
            continue
        if dim % 2:
            raise ArgumentValueError(
                f"{OP}: got {name} with head dim {dim}, wanted an even head dim: rows act on its first half, columns on its "
                f"second; choose a number of heads that leaves an even head dim."
            )
        layout = f"[2·block − 1, D/2] = [{2 * block - 1}, {dim // 2}]"
        checks.check_float_tensor(OP, name, table, 2, layout)
        checks.check_shape(OP, name, table, (2 * block - 1, dim // 2), layout)
    checks.check_key_mask(OP, key_mask, x.shape[0], x.shape[1], x.shape[2])
    checks.check_same_device(OP, x=x, w_q=w_q, w_k=w_k, w_v=w_v, rel_row=rel_row, rel_col=rel_col, key_mask=key_mask)
    cast = autocast_dtype(x)
    if cast is None:
        checks.check_same_dtype(OP, x=x, w_q=w_q, w_k=w_k, w_v=w_v, rel_row=rel_row, rel_col=rel_col)
    else:
        x = x.to(cast)
    return BlockCall(x, w_q, w_k, w_v, rel_row, rel_col, key_mask, heads, block)
