"""A checked call of local attention: what every backend receives."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from nearsight.errors import ArgumentValueError
from nearsight.ops import checks
from nearsight.ops.dispatch import autocast_dtype

__all__ = ["LocalCall", "prepare"]

OP = "local_attention"
LAYOUT = "[B, H, W, heads, D]"


class LocalCall(NamedTuple):
    """Arguments in one form: pairs for window and dilation, tables [1 or heads, taps, D/2], one dtype."""

    q: Tensor
    k: Tensor | None
    v: Tensor
    rel_row: Tensor | None
    rel_col: Tensor | None
    key_mask: Tensor | None
    window: tuple[int, int]
    dilation: tuple[int, int]
    border: str
    scale: float


def prepare(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    *,
    window: int | tuple[int, int],
    rel_row: Tensor | None = None,
    rel_col: Tensor | None = None,
    key_mask: Tensor | None = None,
    dilation: int | tuple[int, int] = 1,
    border: str = "mask",
    scale: float = 1.0,
) -> LocalCall:
    """Check the arguments of `local_attention` and bring them into one form (under autocast: one dtype)."""
    checks.check_float_tensor(OP, "q", q, 5, LAYOUT)
    checks.check_float_tensor(OP, "v", v, 5, LAYOUT)
    checks.check_shape(OP, "v", v, q.shape, "the shape of q")
    if k is not None:
        checks.check_float_tensor(OP, "k", k, 5, LAYOUT)
        checks.check_shape(OP, "k", k, q.shape, "the shape of q")
    batch, height, width, heads, dim = q.shape
    pair = checks.check_pair(OP, "window", window)
    rel_row = _table("rel_row", rel_row, pair[0], heads, dim)
    rel_col = _table("rel_col", rel_col, pair[1], heads, dim)
    if k is None and rel_row is None and rel_col is None:
        raise ArgumentValueError(
            f"{OP}: got k=None without rel_row or rel_col, wanted something to attend by; pass k or a relative table."
        )
    checks.check_key_mask(OP, key_mask, batch, height, width)
    checks.check_choice(OP, "border", border, ("mask", "zeros"))
    scale = checks.check_number(OP, "scale", scale)
    checks.check_same_device(OP, q=q, k=k, v=v, rel_row=rel_row, rel_col=rel_col, key_mask=key_mask)
    cast = autocast_dtype(q)
    if cast is not None:
        q, v = q.to(cast), v.to(cast)
        k = k if k is None else k.to(cast)
        rel_row = rel_row if rel_row is None else rel_row.to(cast)
        rel_col = rel_col if rel_col is None else rel_col.to(cast)
    checks.check_same_dtype(OP, q=q, k=k, v=v, rel_row=rel_row, rel_col=rel_col)
    return LocalCall(
        q, k, v, rel_row, rel_col, key_mask, pair, checks.check_pair(OP, "dilation", dilation), border, scale
    )


def _table(name: str, table: Any, taps: int, heads: int, dim: int) -> Tensor | None:
    """A relative table as [1 or heads, taps, D/2]."""
    if table is None:
        return None
    if dim % 2:
        raise ArgumentValueError(
            f"{OP}: got {name} with head dim {dim}, wanted an even head dim: rows act on its first half, columns on its "
            f"second; choose a number of heads that leaves an even head dim."
        )
    rank = table.dim() if isinstance(table, Tensor) else 2
    layout = f"[taps, D/2] = [{taps}, {dim // 2}] or [heads, taps, D/2] = [{heads}, {taps}, {dim // 2}]"
    checks.check_float_tensor(OP, name, table, 3 if rank == 3 else 2, layout)
    wanted = (heads, taps, dim // 2) if rank == 3 else (taps, dim // 2)
    checks.check_shape(OP, name, table, wanted, layout)
    return table if rank == 3 else table[None]
