"""Local attention by Triton: launch geometry, the registered ops, their gradients, and what they refuse."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.ops.local.call import LocalCall
from nearsight.ops.triton_support import common_refusal, dot_precision, next_power_of_two

__all__ = ["refusal", "run"]

# Added to a logit that may not be attended: beyond any real logit, and finite in the dtype the tensor cores add it in.
LARGE = {torch.float16: 60000.0, torch.bfloat16: 1e30, torch.float32: 1e30}
LONGEST_WINDOW = 64


def refusal(call: LocalCall) -> str | None:
    """Why Triton cannot run this call, or None."""
    reason = common_refusal(call.q, call.k, call.v)
    if reason is not None:
        return reason
    dim = call.q.shape[-1]
    if not 1 <= dim <= 128:
        return f"needs a head dim from 1 to 128, got {dim}"
    if max(call.window) > LONGEST_WINDOW:
        return f"needs at most {LONGEST_WINDOW} taps per axis, got window {call.window}"
    smallest = 0.01 if call.q.dtype == torch.float16 else 1e-6
    if call.scale < smallest:
        return f"needs a scale of at least {smallest}, got {call.scale}"
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v)):
        if tensor is not None and tensor.stride(-1) != 1 and dim > 1:
            return f"needs {name} with its channels next to each other, got stride {tensor.stride(-1)} on the last axis"
    return None


def run(call: LocalCall) -> Tensor:
    return _forward_op(
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
    )[0]


class Geometry(NamedTuple):
    """How the kernels cut a call: tiles of TY×TX pixels, G heads at once, the halo in CHUNKS of NR rows of NC pixels."""

    ty: int
    tx: int
    g: int
    nr: int
    nc: int
    chunks: int
    warps: int
    stages: int


@functools.lru_cache(maxsize=256)
def geometry(dim: int, heads: int, kh: int, kw: int, size: int, kind: str) -> Geometry:
    """A fixed choice per head-dim class and window, never per image size. `size` is bytes per element."""
    ty, tx = 2, 8
    padded = next_power_of_two(dim)
    g = 4 if padded <= 32 else 2 if padded == 64 else 1
    if size == 4:
        g = max(1, g // 2)
    g = max(min(g, next_power_of_two(heads)), 16 // padded if padded < 16 else 1)
    nc = next_power_of_two(tx + kw - 1)
    rows = ty + kh - 1
    keys = 128 if size == 2 and padded <= 64 else 64
    nr = min(max(keys // nc, 1), next_power_of_two(rows))
    return Geometry(ty, tx, g, nr, nc, -(-rows // nr), max(1, g), 2)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


class _Launch(NamedTuple):
    grid: tuple[int, int]
    runtime: dict[str, Any]
    constants: dict[str, Any]


def _launch(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    rel_row: Tensor | None,
    rel_col: Tensor | None,
    key_mask: Tensor | None,
    window: list[int],
    dilation: list[int],
    kind: str,
) -> _Launch:
    """Grid and arguments that the three kernels share."""
    batch, height, width, heads, dim = q.shape
    (kh, kw), (dil_y, dil_x) = window, dilation
    shape = geometry(dim, heads, kh, kw, q.element_size(), kind)
    strips = _ceil(_ceil(width, dil_x), shape.tx)
    tiles = _ceil(_ceil(height, dil_y), shape.ty)
    groups = _ceil(heads, shape.g)
    programs = batch * dil_y * dil_x * strips * groups
    # Enough programs for several waves over the chip, else whole strips, which reuse their neighbours' rows.
    wanted = 4 if q.device.type != "cuda" else 12 * _multiprocessors(q.device.index or 0)
    splits = max(1, min(tiles, -(-wanted // max(programs, 1))))
    key = q if k is None else k
    runtime = {
        "H": height,
        "W": width,
        "heads": heads,
        "strips": strips,
        "splits": splits,
        "tiles": tiles,
        "dil_y": dil_y,
        "dil_x": dil_x,
        "q_b": q.stride(0),
        "q_y": q.stride(1),
        "q_x": q.stride(2),
        "k_b": key.stride(0),
        "k_y": key.stride(1),
        "k_x": key.stride(2),
        "v_b": v.stride(0),
        "v_y": v.stride(1),
        "v_x": v.stride(2),
        "row_head": 0 if rel_row is None or rel_row.shape[0] == 1 else rel_row.stride(0),
        "col_head": 0 if rel_col is None or rel_col.shape[0] == 1 else rel_col.stride(0),
    }
    constants = {
        "KH": kh,
        "KW": kw,
        "D": dim,
        "DP": next_power_of_two(dim),
        "q_h": q.stride(3),
        "k_h": key.stride(3),
        "v_h": v.stride(3),
        "G": shape.g,
        "TY": shape.ty,
        "TX": shape.tx,
        "NR": shape.nr,
        "NC": shape.nc,
        "CHUNKS": shape.chunks,
        "HAS_K": k is not None,
        "HAS_ROW": rel_row is not None,
        "HAS_COL": rel_col is not None,
        "HAS_MASK": key_mask is not None,
        "LARGE": LARGE[q.dtype],
        "PRECISION": dot_precision(q.dtype),
        "num_warps": shape.warps,
        "num_stages": shape.stages,
    }
    return _Launch((batch * dil_y * dil_x * strips * splits, groups), runtime, constants)


def _half_slots(constants: dict[str, Any]) -> int:
    return max(8, constants["NC"], constants["NR"], next_power_of_two(constants["KH"]))


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


@torch.library.custom_op("nearsight::local_attention_triton", mutates_args=())
def _forward_op(
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
) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of every query (base 2, of the scaled logits)."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    from nearsight.ops.local import kernels

    launch = _launch(q, k, v, rel_row, rel_col, key_mask, window, dilation, "forward")
    with torch.cuda.device_of(q):
        kernels.forward[launch.grid](
            q,
            q if k is None else k,
            v,
            out,
            lse,
            _dense(rel_row),
            _dense(rel_col),
            _bytes(key_mask),
            **launch.runtime,
            scale_log2=scale * math.log2(math.e),
            HS=_half_slots(launch.constants),
            ZEROS=zeros,
            **launch.constants,
        )
    return out, lse


@_forward_op.register_fake
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
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("nearsight::local_attention_triton_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    rel_row: Tensor | None,
    rel_col: Tensor | None,
    key_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    window: list[int],
    dilation: list[int],
    zeros: bool,
    scale: float,
) -> list[Tensor]:
    """dq, dv, then dk, d rel_row and d rel_col where those inputs exist."""
    dq, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2))
    dk = None if k is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    drow = None if rel_row is None else torch.zeros(rel_row.shape, dtype=rel_row.dtype, device=q.device)
    dcol = None if rel_col is None else torch.zeros(rel_col.shape, dtype=rel_col.dtype, device=q.device)
    if dq.numel() == 0:
        return [t for t in (dq, dv, dk, drow, dcol) if t is not None]
    from nearsight.ops.local import kernels

    grad = grad.contiguous()
    row, col, mask = _dense(rel_row), _dense(rel_col), _bytes(key_mask)
    numbers = {"scale": scale, "scale_log2": scale * math.log2(math.e)}
    launch = _launch(q, k, v, rel_row, rel_col, key_mask, window, dilation, "queries")
    half = _half_slots(launch.constants)
    shape = (*launch.grid, 2 * half, launch.constants["G"], launch.constants["DP"])
    relative = rel_row is not None or rel_col is not None
    partial = torch.empty(shape if relative else (0,), dtype=torch.float32, device=q.device)
    delta = torch.empty_like(lse)
    with torch.cuda.device_of(q):
        kernels.backward_queries[launch.grid](
            q,
            q if k is None else k,
            v,
            out,
            grad,
            lse,
            delta,
            dq,
            partial,
            row,
            col,
            mask,
            **launch.runtime,
            **numbers,
            HS=half,
            ZEROS=zeros,
            **launch.constants,
        )
        launch = _launch(q, k, v, rel_row, rel_col, key_mask, window, dilation, "keys")
        kernels.backward_keys[launch.grid](
            q,
            q if k is None else k,
            v,
            grad,
            lse,
            delta,
            q if dk is None else dk,
            dv,
            row,
            col,
            mask,
            **launch.runtime,
            **numbers,
            HT=max(8, next_power_of_two(max(window))),
            **launch.constants,
        )
    if relative:
        heads, dim = q.shape[-2:]
        total = partial.sum(0).movedim(1, 2).flatten(0, 1)[:heads]  # [heads, 2·half, DP]
        if rel_row is not None:
            drow = _to_table(total[:, half : half + window[0], : dim // 2], rel_row)
        if rel_col is not None:
            dcol = _to_table(total[:, : window[1], dim // 2 : dim], rel_col)
    return [t for t in (dq, dv, dk, drow, dcol) if t is not None]


def _to_table(per_head: Tensor, table: Tensor) -> Tensor:
    summed = per_head.sum(0, keepdim=True) if table.shape[0] == 1 else per_head
    return summed.to(table.dtype).contiguous()


@_backward_op.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    rel_row: Tensor | None,
    rel_col: Tensor | None,
    key_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    window: list[int],
    dilation: list[int],
    zeros: bool,
    scale: float,
) -> list[Tensor]:
    like = [q.new_empty(q.shape), q.new_empty(q.shape)]
    if k is not None:
        like.append(q.new_empty(q.shape))
    return like + [t.new_empty(t.shape) for t in (rel_row, rel_col) if t is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, rel_row, rel_col, key_mask, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, rel_row, rel_col, key_mask, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, rel_row, rel_col, key_mask, out, lse = ctx.saved_tensors
    found = iter(_backward_op(grad, q, k, v, rel_row, rel_col, key_mask, out, lse, *ctx.options))
    dq, dv = next(found), next(found)
    dk, drow, dcol = (None if t is None else next(found) for t in (k, rel_row, rel_col))
    return dq, dk, dv, drow, dcol, None, None, None, None, None


_forward_op.register_autograd(_backward, setup_context=_setup)
