"""Local attention without Triton: tiles of queries against the band of keys they can see, as small matrix products.

A tile of ty×tx queries sees (ty+kh−1)×(tx+kw−1) keys. Its logits are one product plus one bias per key row and one per key
column, whose entries outside the band are −large, so no logit is compared or gathered. Only one tile's logits exist at a time;
the backward computes them again. Dilation splits the map into interleaved maps without dilation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nearsight.ops.local.call import LocalCall
from nearsight.ops.local.export_form import run as run_export_form
from nearsight.ops.windows import window_padding

__all__ = ["run"]

# Finite, so that a query with nothing to attend to gives numbers (replaced by 0) and not NaN; two of them still fit float32.
MASKED = -1e30
# Logits held at once: on a CPU about what its cache holds, elsewhere enough to fill the machine.
BUDGET = {"cpu": 1 << 18}
BUDGET_ELSEWHERE = 1 << 24
# Cost of starting one tile's operations, in logits.
TILE_COST = 12_000


def run(call: LocalCall) -> Tensor:
    if torch.compiler.is_exporting():
        return run_export_form(call)
    return _attend(
        call.q,
        call.k,
        call.v,
        call.rel_row,
        call.rel_col,
        call.key_mask,
        list(call.window),
        list(call.dilation),
        call.border == "zeros",
        call.scale,
    )


@torch.library.custom_op("nearsight::local_attention", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    rel_row: Tensor | None,
    rel_col: Tensor | None,
    key_mask: Tensor | None,
    window: list[int],
    dilation: list[int],
    zeros: bool,
    scale: float,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        for at in _pieces(q, window, dilation, zeros):
            piece = _Piece(at, q, k, v, rel_row, rel_col, key_mask, zeros, scale)
            out[at.index] = piece.forward()
    return out


@_attend.register_fake
def _(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    rel_row: Tensor | None,
    rel_col: Tensor | None,
    key_mask: Tensor | None,
    window: list[int],
    dilation: list[int],
    zeros: bool,
    scale: float,
) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@torch.library.custom_op("nearsight::local_attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    rel_row: Tensor | None,
    rel_col: Tensor | None,
    key_mask: Tensor | None,
    window: list[int],
    dilation: list[int],
    zeros: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, rel_row, rel_col; empty for those that are None."""
    grad_q, grad_k, grad_v, grad_row, grad_col = _empty_gradients(q, k, rel_row, rel_col)
    wide = _compute_dtype(q.dtype)
    row, col = grad_row.to(wide).zero_(), grad_col.to(wide).zero_()
    with torch.autocast(q.device.type, enabled=False):
        for at in _pieces(q, window, dilation, zeros):
            piece = _Piece(at, q, k, v, rel_row, rel_col, key_mask, zeros, scale)
            piece_q, piece_k, piece_v, piece_row, piece_col = piece.backward(grad)
            grad_q[at.index], grad_v[at.index] = piece_q, piece_v
            if piece_k is not None:
                grad_k[at.index] = piece_k
            if piece_row is not None:
                row += piece_row
            if piece_col is not None:
                col += piece_col
    return grad_q, grad_k, grad_v, row.to(q.dtype), col.to(q.dtype)
