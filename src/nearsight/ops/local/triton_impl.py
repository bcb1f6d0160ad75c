"""Local attention by Triton: launch geometry, the registered ops, their gradients, and what they refuse."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nearsight.ops.dispatch import full_precision
from nearsight.ops.launching import replayed
from nearsight.ops.local.call import LocalCall
from nearsight.ops.sums import add_rows
from nearsight.ops.triton_support import INTERPRETED, common_refusal, dot_precision, next_power_of_two
from nearsight.ops.triton_support import launch as launch_kernel

__all__ = ["Geometry", "geometry", "refusal", "run", "run_projected"]

# Added to a logit that may not be attended: beyond any real logit, and finite in the dtype the tensor cores add it in.
LARGE = {torch.float16: 60000.0, torch.bfloat16: 1e30, torch.float32: 1e30}
LONGEST_WINDOW = 64
# Taller windows keep more chunks of dk and dv in flight than registers hold.
TALLEST_WALK = 11


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


def run_projected(packed: Tensor, pixels: Tensor, weight: Tensor, bias: Tensor | None, call: LocalCall) -> Tensor:
    """`run` for a call whose q, k and v are the slices of `packed`, which is `pixels` [B, H·W, Cin] projected."""
    return _projected_forward_op(
        packed,
        pixels,
        weight,
        bias,
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
    registers: int | None = None
    boxes: bool = False
    whole_y: bool = False
    whole_x: bool = False


class _Choice(NamedTuple):
    """Heads at once, warps, stages, registers per thread; forward: halo pixels per chunk, copy engine or pointers; the tile."""

    g: int
    warps: int
    stages: int
    keys: int = 128
    registers: int | None = None
    boxes: bool = False
    tile: tuple[int, int] = (2, 8)


# Measured on an H200 at 56×56×64, 28×28×128, 14×14×256 and 7×7×512, window 7 (README, "What was tried"); by padded head dim.
# 128 was not timed, nor was float32.
CHOICES = {
    ("forward", 8): _Choice(2, 2, 3, boxes=True),
    ("forward", 16): _Choice(1, 1, 2, registers=168, boxes=True),
    ("forward", 32): _Choice(1, 1, 2, boxes=True),
    ("forward", 64): _Choice(1, 2, 2, registers=168, boxes=True),
    ("forward", 128): _Choice(1, 4, 1, 64),
    ("walk", 8): _Choice(2, 2, 3),
    ("walk", 16): _Choice(1, 1, 2),
    ("walk", 32): _Choice(1, 2, 2),
    ("walk", 64): _Choice(1, 4, 2),
    ("walk", 128): _Choice(1, 8, 1),
    # Maps whose rows, or which as a whole, fit one tile (`_fit`); measured at 14×14 and at 7×7.
    ("forward row", 8): _Choice(2, 4, 2, boxes=True, tile=(2, 16)),
    ("forward row", 16): _Choice(1, 2, 2, boxes=True, tile=(2, 16)),
    ("forward row", 32): _Choice(1, 2, 2, boxes=True, tile=(2, 16)),
    ("walk row", 8): _Choice(2, 4, 2, tile=(2, 16)),
    ("walk row", 16): _Choice(1, 2, 2, tile=(2, 16)),
    ("walk row", 32): _Choice(1, 2, 2, tile=(2, 16)),
    ("forward map", 8): _Choice(2, 4, 1, boxes=True, tile=(8, 8)),
    ("forward map", 16): _Choice(1, 4, 1, boxes=True, tile=(8, 8)),
    ("forward map", 32): _Choice(1, 4, 1, boxes=True, tile=(8, 8)),
    ("forward map", 64): _Choice(1, 4, 2, boxes=True, tile=(8, 8)),
    ("walk map", 8): _Choice(2, 4, 1, tile=(8, 8)),
    ("walk map", 16): _Choice(1, 4, 1, tile=(8, 8)),
    ("walk map", 32): _Choice(1, 4, 1, tile=(8, 8)),
    ("walk map", 64): _Choice(1, 4, 1, tile=(8, 8)),
}


def _fit(dim: int, size: int, kernel: str, height: int, width: int, zeros: bool) -> str:
    """Whether the halo is a map's own rows (" row") or all of it (" map"), as it can be of small maps.

    Not with the border that gives mass to pixels outside the map; not in float32, which was not timed.
    """
    fit = " row" if width > 8 else " map" if height <= 8 else ""
    choice = CHOICES.get((kernel + fit, next_power_of_two(dim)))
    if zeros or size == 4 or fit == "" or choice is None or width > choice.tile[1]:
        return ""
    return fit


@functools.lru_cache(maxsize=256)
def geometry(dim: int, heads: int, kh: int, kw: int, size: int, kernel: str, fit: str = "") -> Geometry:
    """A fixed choice per kernel, head-dim class, window and `_fit`, never per image size. `size` is bytes per element."""
    padded = next_power_of_two(dim)
    choice = CHOICES["walk" + fit if kernel == "walk" else "forward" + fit, max(8, padded)]
    ty, tx = choice.tile
    whole_y, whole_x = fit == " map", fit != ""
    if size == 4 or kernel in ("queries", "keys"):
        # Left to itself, ptxas gives some float32 walks 32 registers, and spills twice as much.
        registers = 255 if kernel == "walk" else None
        choice = choice._replace(g=min(choice.g, 2), warps=max(choice.warps, 2), stages=1, keys=64, registers=registers)
    # Products need a depth of 16: heads of fewer channels share one.
    g = max(min(choice.g, next_power_of_two(heads)), 16 // padded)
    nc = tx if whole_x else next_power_of_two(tx + kw - 1)
    rows = ty if whole_y else ty + kh - 1
    # In the walk a chunk is as tall as a tile.
    nr = ty if kernel == "walk" else min(max(choice.keys // nc, 1), next_power_of_two(rows))
    launch = (choice.warps, choice.stages, choice.registers, choice.boxes)
    return Geometry(ty, tx, g, nr, nc, _ceil(rows, nr), *launch, whole_y, whole_x)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


class _Cut(NamedTuple):
    """Into how many strips a map is cut, a strip into tiles, the heads into groups, and how many programs walk one strip."""

    strips: int
    tiles: int
    groups: int
    splits: int


def _cut(shape: Geometry, maps: int, heads: int, height: int, width: int, wanted: int) -> _Cut:
    strips, tiles, groups = _ceil(width, shape.tx), _ceil(height, shape.ty), _ceil(heads, shape.g)
    splits = max(1, min(tiles // shape.chunks, _ceil(wanted, max(maps * strips * groups, 1))))
    return _Cut(strips, tiles, groups, _ceil(tiles, _ceil(tiles, splits)))  # no splits without tiles


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
    zeros: bool,
    kernel: str,
) -> _Launch:
    """Grid and arguments that the kernels share."""
    batch, height, width, heads, dim = q.shape
    (kh, kw), (dil_y, dil_x) = window, dilation
    lattice = _ceil(height, dil_y), _ceil(width, dil_x)
    fit = _fit(dim, q.element_size(), kernel, *lattice, zeros)
    shape = geometry(dim, heads, kh, kw, q.element_size(), kernel, fit)
    # Enough programs for several waves over the chip, else whole strips, which reuse their neighbours' rows.
    wanted = 4 if q.device.type != "cuda" else 12 * _multiprocessors(q.device.index or 0)
    cut = _cut(shape, batch * dil_y * dil_x, heads, *lattice, wanted)
    if kernel == "walk" and shape.whole_x and cut.splits > 1:
        # A tall map of few images: strips in splits, whose shares overlap and are merged.
        shape = geometry(dim, heads, kh, kw, q.element_size(), kernel)
        cut = _cut(shape, batch * dil_y * dil_x, heads, *lattice, wanted)
    strips, tiles, groups, splits = cut
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
        "LSE_PARTS": _lse_parts(q),
        "PRECISION": dot_precision(q.dtype),
        "num_warps": shape.warps,
        "num_stages": shape.stages,
    }
    if kernel in ("forward", "walk"):
        constants |= {"WHOLE_Y": shape.whole_y, "WHOLE_X": shape.whole_x}
    if kernel == "forward":
        constants["FOLD"] = shape.whole_x and max(16, 2 * kw) <= shape.nc
        constants["BOXES"] = shape.boxes and dil_y == dil_x == 1 and _boxable(key) and _boxable(v)
    if shape.registers is not None and q.device.type == "cuda":
        constants["maxnreg"] = shape.registers
    return _Launch((batch * dil_y * dil_x * strips * splits, groups), runtime, constants)


@functools.cache
def _has_copy_engine(index: int | None) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index)[0] >= 9


def _boxable(t: Tensor) -> bool:
    """Whether the copy engine can cut boxes of pixels and heads out of [B, H, W, heads, D]."""
    dim, size = t.shape[-1], t.element_size()
    steps = [stride * size % 16 for stride in t.stride()[:3]]
    fits = size == 2 and dim >= 8 and dim == next_power_of_two(dim) and t.stride(3) == dim
    able = INTERPRETED or (t.device.type == "cuda" and _has_copy_engine(t.device.index))
    return able and fits and not any(steps) and t.data_ptr() % 16 == 0


def _source(t: Tensor, constants: dict[str, Any]) -> Any:
    """Keys or values as the kernels take them: a descriptor of boxes where those serve, else the tensor."""
    if not constants["BOXES"]:
        return t
    from triton.tools.tensor_descriptor import TensorDescriptor

    batch, height, width, heads, dim = t.shape
    box = [1, constants["NR"], constants["NC"], constants["G"] * constants["DP"]]
    return TensorDescriptor(t, [batch, height, width, heads * dim], [*t.stride()[:3], 1], box)


def _half_slots(constants: dict[str, Any]) -> int:
    rows, taps = constants["NR"] * constants["CHUNKS"], max(constants["KH"], constants["KW"])
    return max(8, constants["NC"], next_power_of_two(rows), next_power_of_two(taps))


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def _lse_parts(q: Tensor) -> int:
    """In float32 the largest logit and the logarithm of the sum relative to it are kept apart: see the kernels' `_load_lse`."""
    return 2 if q.dtype == torch.float32 else 1


def _lse_shape(q: Tensor) -> tuple[int, int, int]:
    """[B, H·W, heads·parts]. No registered operator here takes, gives or keeps a tensor of rank 4: between convolutions
    torch.compile stores those in the order of [N, C, H, W] channels-last, and would copy [B, H, W, …] there and back."""
    batch, height, width, heads, _ = q.shape
    return batch, height * width, heads * _lse_parts(q)


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
) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of every query (base 2, of the scaled logits), [B, H·W, heads·parts]."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(_lse_shape(q), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    from nearsight.ops.local import kernels

    launch = _launch(q, k, v, rel_row, rel_col, key_mask, window, dilation, zeros, "forward")
    with torch.cuda.device_of(q):
        key, value = (_source(t, launch.constants) for t in (q if k is None else k, v))
        launch_kernel(
            kernels.forward,
            launch.grid,
            *(q, key, value, out, lse, _dense(rel_row), _dense(rel_col), _bytes(key_mask)),
            **launch.runtime,
            scale_log2=scale * math.log2(math.e),
            HS=_half_slots(launch.constants),
            ZEROS=zeros,
            **launch.constants,
        )
    return out, lse


def _gradients(
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
    into: tuple[Tensor, Tensor | None, Tensor],
) -> list[Tensor]:
    """Fill dq, dk and dv (`into`: dense but for one common stride per pixel); return those of the relative tables."""
    tables = [None if t is None else torch.empty(t.shape, dtype=t.dtype, device=q.device) for t in (rel_row, rel_col)]
    if q.numel() == 0:
        for t in into:
            if t is not None:
                t.zero_()
        return [t.zero_() for t in tables if t is not None]
    walk = window[0] <= TALLEST_WALK
    launch = _launch(q, k, v, rel_row, rel_col, key_mask, window, dilation, zeros, "walk" if walk else "queries")
    half = _half_slots(launch.constants)
    relative = rel_row is not None or rel_col is not None
    shape = (*launch.grid, 2 * half, launch.constants["G"], launch.constants["DP"])
    partial = torch.empty(shape if relative else (0,), dtype=torch.float32, device=q.device)
    dense = grad.contiguous()
    tensors = _Tensors(q, q if k is None else k, v, out, dense, lse, _dense(rel_row), _dense(rel_col), _bytes(key_mask))
    numbers = {"grad_pixel": into[0].stride(2), "scale": scale, "scale_log2": scale * math.log2(math.e)}
    with torch.cuda.device_of(q):
        if walk:
            _walk(tensors, launch, numbers, half, zeros, into, partial)
        else:
            keys = _launch(q, k, v, rel_row, rel_col, key_mask, window, dilation, zeros, "keys")
            _two_passes(tensors, launch, keys, numbers, half, zeros, into, partial)
        if relative:
            _sum_relative(partial, launch, half, *tables)
    return [t for t in tables if t is not None]


class _Tensors(NamedTuple):
    """What both ways to the gradients read."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    grad: Tensor
    lse: Tensor
    row: Tensor | None
    col: Tensor | None
    mask: Tensor | None


def _walk(
    t: _Tensors,
    launch: _Launch,
    numbers: dict[str, Any],
    half: int,
    zeros: bool,
    into: tuple[Tensor, Tensor | None, Tensor],
    partial: Tensor,
) -> None:
    """All gradients in one walk, then the sum of the strips' shares of dk and dv, where there are several."""
    from nearsight.ops.local import gradient_kernels, sum_kernels

    dq, dk, dv = into
    use, fixed = launch.runtime, launch.constants
    batch, height, width, heads, dim = dq.shape
    per_split = _ceil(use["tiles"], use["splits"])
    rows = (per_split + fixed["CHUNKS"] - 1) * fixed["TY"]
    shape = (launch.grid[0], rows, fixed["NC"], heads, dim)
    # A strip as wide as the map shares nothing.
    dv_share = dv if fixed["WHOLE_X"] else torch.empty(shape, dtype=dq.dtype, device=dq.device)
    dk_share = dv_share if dk is None else dk if fixed["WHOLE_X"] else torch.empty_like(dv_share)
    launch_kernel(
        gradient_kernels.backward,
        launch.grid,
        *(t.q, t.k, t.v, t.out, t.grad, t.lse, dq, dk_share, dv_share, partial, t.row, t.col, t.mask),
        **use,
        **numbers,
        HS=half,
        ZEROS=zeros,
        **fixed,
    )
    if fixed["WHOLE_X"]:
        return
    channels = heads * dim
    padded = next_power_of_two(channels)
    pixels = max(1, 4096 // padded)
    launch_kernel(
        sum_kernels.merge,
        (_ceil(height * width, pixels), batch),
        dk_share,
        dv_share,
        dv if dk is None else dk,
        dv,
        **{name: use[name] for name in ("H", "W", "strips", "splits", "tiles", "dil_y", "dil_x")},
        per_split=per_split,
        grad_pixel=numbers["grad_pixel"],
        CHANNELS=channels,
        CP=padded,
        **{name: fixed[name] for name in ("KH", "KW", "TY", "TX", "NC", "CHUNKS", "HAS_K")},
        OVER_Y=1 if use["splits"] == 1 else 2,
        OVER_X=_ceil(fixed["TX"] + fixed["KW"] - 1, fixed["TX"]),
        PIXELS=pixels,
        num_warps=4,
    )


def _two_passes(
    t: _Tensors,
    queries: _Launch,
    keys: _Launch,
    numbers: dict[str, Any],
    half: int,
    zeros: bool,
    into: tuple[Tensor, Tensor | None, Tensor],
    partial: Tensor,
) -> None:
    """For windows too tall to keep a strip's dk and dv in registers: queries first, then keys by the transposed window."""
    from nearsight.ops.local import tall_kernels

    dq, dk, dv = into
    delta = torch.empty(dq.shape[:-1], dtype=torch.float32, device=dq.device)
    launch_kernel(
        tall_kernels.backward_queries,
        queries.grid,
        *(t.q, t.k, t.v, t.out, t.grad, t.lse, delta, dq, partial, t.row, t.col, t.mask),
        **queries.runtime,
        **numbers,
        HS=half,
        ZEROS=zeros,
        **queries.constants,
    )
    launch_kernel(
        tall_kernels.backward_keys,
        keys.grid,
        *(t.q, t.k, t.v, t.grad, t.lse, delta, dv if dk is None else dk, dv, t.row, t.col, t.mask),
        **keys.runtime,
        **numbers,
        HT=max(8, next_power_of_two(max(keys.constants["KH"], keys.constants["KW"]))),
        **keys.constants,
    )


def _sum_relative(partial: Tensor, launch: _Launch, half: int, drow: Tensor | None, dcol: Tensor | None) -> None:
    """The relative tables' gradients from every program's share, added in a fixed order."""
    from nearsight.ops.local import sum_kernels

    fixed, heads = launch.constants, launch.runtime["heads"]
    summed = add_rows(partial, 16)
    either = drow if drow is not None else dcol
    per_head = any(t is not None and t.shape[0] > 1 for t in (drow, dcol))
    launch_kernel(
        sum_kernels.finish_relative,
        (fixed["KW"] + fixed["KH"], heads if per_head else 1),
        summed,
        either if drow is None else drow,
        either if dcol is None else dcol,
        summed.shape[0],
        heads,
        launch.grid[1],
        **{name: fixed[name] for name in ("KH", "KW", "D", "DP", "G", "HAS_ROW", "HAS_COL")},
        HS=half,
        ROW_SHARED=drow is None or drow.shape[0] == 1,
        COL_SHARED=dcol is None or dcol.shape[0] == 1,
        PARTS=16,
        HEADS=8,
        num_warps=4,
    )


@torch.library.custom_op("nearsight::local_attention_triton", mutates_args=())
@replayed
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
    return _attend(q, k, v, rel_row, rel_col, key_mask, window, dilation, zeros, scale)


@_forward_op.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(_lse_shape(q), dtype=torch.float32)


@torch.library.custom_op("nearsight::local_attention_triton_backward", mutates_args=())
@replayed
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
    tables = _gradients(
        grad, q, k, v, rel_row, rel_col, key_mask, out, lse, window, dilation, zeros, scale, (dq, dk, dv)
    )
    return [dq, dv, *([] if dk is None else [dk]), *tables]


@_backward_op.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor | None, v: Tensor, rel_row: Tensor | None, rel_col: Tensor | None, *_: Any
) -> list[Tensor]:
    like = [q.new_empty(q.shape) for t in (q, v, k) if t is not None]
    return [*like, *(t.new_empty(t.shape) for t in (rel_row, rel_col) if t is not None)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, rel_row, rel_col, key_mask, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, rel_row, rel_col, key_mask, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for the log-sum-exp


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, rel_row, rel_col, key_mask, out, lse = ctx.saved_tensors
    found = iter(_backward_op(grad, q, k, v, rel_row, rel_col, key_mask, out, lse, *ctx.options))
    dq, dv = next(found), next(found)
    dk, drow, dcol = (None if t is None else next(found) for t in (k, rel_row, rel_col))
    return dq, dk, dv, drow, dcol, None, None, None, None, None


_forward_op.register_autograd(_backward, setup_context=_setup)


# The same with q, k and v (or q and v) packed as one product of `pixels` leaves them, [B, H, W, 3 or 2, heads, D]. The product
# is not kept: the backward makes it again, inside the op, where no compiler can merge it with the first and keep it after all.


def _unpack(packed: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    return packed.select(3, 0), packed.select(3, 1) if packed.shape[3] == 3 else None, packed.select(3, -1)


@torch.library.custom_op("nearsight::local_attention_projected_triton", mutates_args=())
@replayed
def _projected_forward_op(
    packed: Tensor,
    pixels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rel_row: Tensor | None,
    rel_col: Tensor | None,
    key_mask: Tensor | None,
    window: list[int],
    dilation: list[int],
    zeros: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return _attend(*_unpack(packed), rel_row, rel_col, key_mask, window, dilation, zeros, scale)


@_projected_forward_op.register_fake
def _(packed: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    q = packed.select(3, 0)
    return q.new_empty(q.shape), q.new_empty(_lse_shape(q), dtype=torch.float32)


@torch.library.custom_op("nearsight::local_attention_projected_triton_backward", mutates_args=())
def _projected_backward_op(
    grad: Tensor,
    pixels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
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
    """d packed, then d rel_row and d rel_col where those inputs exist."""
    with full_precision(grad):
        packed = F.linear(pixels, weight, bias)
    return _packed_gradients(grad, packed, rel_row, rel_col, key_mask, out, lse, window, dilation, zeros, scale)


@replayed
def _packed_gradients(
    grad: Tensor,
    packed: Tensor,
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
    """The same, of q, k and v as their product leaves them, [B, H·W, 3 or 2·heads·D]."""
    packed = packed.unflatten(-1, (-1, *out.shape[3:])).unflatten(1, out.shape[1:3])
    dpacked = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
    q, k, v = _unpack(packed)
    into = _unpack(dpacked)
    tables = _gradients(grad, q, k, v, rel_row, rel_col, key_mask, out, lse, window, dilation, zeros, scale, into)
    return [dpacked, *tables]


@_projected_backward_op.register_fake
def _(
    grad: Tensor,
    pixels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rel_row: Tensor | None,
    rel_col: Tensor | None,
    key_mask: Tensor | None,
    out: Tensor,
    *_: Any,
) -> list[Tensor]:
    parts = weight.shape[0] // (out.shape[3] * out.shape[4])
    packed = pixels.new_empty((*out.shape[:3], parts, *out.shape[3:]))
    return [packed, *(t.new_empty(t.shape) for t in (rel_row, rel_col) if t is not None)]


def _projected_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, pixels, weight, bias, rel_row, rel_col, key_mask, *ctx.options = inputs
    ctx.save_for_backward(pixels, weight, bias, rel_row, rel_col, key_mask, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _projected_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    pixels, weight, bias, rel_row, rel_col, key_mask, out, lse = ctx.saved_tensors
    found = iter(_projected_backward_op(grad, pixels, weight, bias, rel_row, rel_col, key_mask, out, lse, *ctx.options))
    rows = next(found).flatten(3).flatten(0, 2)
    drow, dcol = (None if t is None else next(found) for t in (rel_row, rel_col))
    _, wants_pixels, wants_weight, *_ = ctx.needs_input_grad
    dpixels = (rows @ weight).view(pixels.shape) if wants_pixels else None
    dweight = rows.t() @ pixels.reshape(-1, pixels.shape[-1]) if wants_weight else None
    dbias = None if bias is None else rows.sum(0)
    return None, dpixels, dweight, dbias, drow, dcol, None, None, None, None, None


_projected_forward_op.register_autograd(_projected_backward, setup_context=_projected_setup)
