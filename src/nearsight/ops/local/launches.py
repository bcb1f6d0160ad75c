"""The launches of local attention's kernels: the forward, and the two ways to the gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from nearsight.ops.first_calls import class_of, compile_together, meta_like, stand_in
from nearsight.ops.first_calls import launch as launch_kernel
from nearsight.ops.local.call import OP, LocalCall
from nearsight.ops.local.fitting import fitted
from nearsight.ops.local.geometry import Geometry, in_one_walk, plan
from nearsight.ops.local.ring_launches import launch_ring, ring_walk
from nearsight.ops.local.sum_launches import add_shares, empty_share, sum_relative, too_many
from nearsight.ops.triton_support import INT32_LIMIT, INTERPRETED, dot_precision, next_power_of_two, register_cap

__all__ = ["Gradients", "Launch", "Read", "attend", "empty_outputs", "gradients", "prepare_launch"]

Result = TypeVar("Result")

# Added to a logit that may not be attended: beyond any real logit, and finite in the dtype the tensor cores add it in.
LARGE = {torch.float16: 60000.0, torch.bfloat16: 1e30, torch.float32: 1e30}

# Strips keep their halo in shared memory where that is possible (`_may_ring`); without, they load it for every tile.
RING = True


class Launch(NamedTuple):
    """A grid, the arguments that all kernels take by name, and the geometry, which says which kernel of several is meant."""

    grid: tuple[int, int]
    runtime: dict[str, Any]
    constants: dict[str, Any]
    shape: Geometry


def prepare_launch(call: LocalCall, kernel: str, lean: int = 0, ring: bool = False) -> Launch:
    """Of "forward", "walk", "queries" or "keys"; `lean` and `ring` as in `geometry.plan`."""
    q, k, v, rel_row, rel_col, key_mask, (kh, kw), (dil_y, dil_x), border, scale = call
    _, height, width, heads, dim = q.shape
    shape, strips, tiles, groups, splits, walks, paired = plan(call, kernel, lean, ring)
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
        # As `_positions_and_mask` leaves them, whatever their own strides.
        "row_head": 0 if rel_row is None or rel_row.shape[0] == 1 else kh * dim // 2,
        "col_head": 0 if rel_col is None or rel_col.shape[0] == 1 else kw * dim // 2,
        "scale_log2": scale * math.log2(math.e),
    }
    constants: dict[str, Any] = {
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
    taps = next_power_of_two(max(kh, kw))
    if kernel == "keys":
        constants["HT"] = max(8, taps)
    else:
        # Of row terms there are as many as a product is deep.
        places = 16 if kernel == "queries" or (kernel == "walk" and shape.ty == 2) else 8
        columns = 0 if kernel == "queries" else shape.nc
        constants["HS"] = max(places, columns, next_power_of_two(shape.nr * shape.chunks), taps)
        constants["ZEROS"] = border == "zeros"
    if kernel in ("forward", "walk"):
        constants |= {"WHOLE_Y": shape.whole_y, "WHOLE_X": shape.whole_x}
    if kernel == "forward":
        constants["FOLD"] = shape.whole_x and max(16, 2 * kw) <= shape.nc
        constants["BOXES"] = shape.boxes and dil_y == dil_x == 1 and _boxable(key) and _boxable(v)
    constants.update(register_cap(shape.registers))
    grid = (walks * splits, groups)
    if kernel in ("walk", "queries"):
        # Shares of the relative tables' gradients that no 32-bit offset reaches.
        constants["FAR"] = grid[0] * groups * 2 * constants["HS"] * shape.g * constants["DP"] >= INT32_LIMIT
    if shape.ahead:
        constants |= {"AHEAD": shape.ahead, "PAIRED": paired}
    return Launch(grid, runtime, constants, shape)


def _may_ring(call: LocalCall, *others: Tensor | None) -> bool:
    """Whether a call's strips may keep their halo in shared memory: what those kernels were written for and timed on.

    `others`: what they read and write beside the call's own tensors, dense.
    """
    q, k, v, rel_row, rel_col, key_mask, _, dilation, border, _ = call
    if not RING or k is None or rel_row is None or rel_col is None or key_mask is not None:
        return False
    if border != "mask" or dilation != (1, 1) or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    if INTERPRETED or q.device.type == "cpu" or not _has_copy_engine(q.device.index):
        return False
    # Programs are one axis of a grid, rows of a share are reached by 32-bit offsets.
    if q.numel() >= 16 * INT32_LIMIT or q.shape[1] >= 2**22:
        return False
    aligned = all(t is None or t.data_ptr() % 16 == 0 for t in others)
    return aligned and all(map(_sliceable, (q, k, v))) and _ring_kernels() is not None


def _sliceable(t: Tensor) -> bool:
    """Whether 16 bytes a lane can be copied out of [B, H, W, heads, D], 16 channels of a pixel at once.

    Triton is told of steps of 16 elements, not of 8.
    """
    dim, steps = t.shape[-1], t.stride()
    heads = steps[3] == dim or (dim == 16 and steps[3] % 16 == 0)
    return t.data_ptr() % 16 == 0 and heads and all(step % 16 == 0 for step in steps[:3])


@functools.cache
def _ring_kernels() -> tuple[Any, Any] | None:
    """The forward and the backward with a ring; None where Triton has no Gluon (experimental) as they know it."""
    try:
        from nearsight.ops.local import ring_gradient_kernels, ring_kernels
    except Exception:  # of what kind depends on what has changed
        return None
    return ring_kernels.ring_forward, ring_gradient_kernels.ring_backward


def _or_without_ring(launches: Callable[[], Result]) -> Result:
    """`launches()`; where this Triton cannot compile what it calls Gluon in our words, from then on without a ring."""
    from triton.compiler.errors import CompilationError

    global RING
    try:
        return launches()
    except CompilationError:
        if not RING:
            raise
        RING = False
        return launches()


@functools.cache
def _has_copy_engine(index: int | None) -> bool:
    """Hopper and later, which the ring was timed on, too."""
    return torch.version.hip is None and torch.cuda.get_device_capability(index)[0] >= 9


def _boxable(t: Tensor) -> bool:
    """Whether the copy engine can cut boxes of pixels and heads out of [B, H, W, heads, D]."""
    dim, size = t.shape[-1], t.element_size()
    # Steps of 16 bytes; none of 0, as of an expanded tensor.
    steps = all(stride > 0 and stride * size % 16 == 0 for stride in t.stride()[:3])
    fits = size == 2 and dim >= 8 and dim == next_power_of_two(dim) and t.stride(3) == dim
    able = INTERPRETED or (t.device.type != "cpu" and _has_copy_engine(t.device.index))
    return able and fits and steps and t.data_ptr() % 16 == 0


def _source(t: Tensor, constants: dict[str, Any]) -> Any:
    """Keys or values as the kernels take them: a descriptor of boxes where those serve, else the tensor."""
    if not constants["BOXES"]:
        return t
    from triton.tools.tensor_descriptor import TensorDescriptor

    batch, height, width, heads, dim = t.shape
    box = [1, constants["NR"], constants["NC"], constants["G"] * constants["DP"]]
    return TensorDescriptor(t, [batch, height, width, heads * dim], [*t.stride()[:3], 1], box)


def _positions_and_mask(call: LocalCall) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The relative tables and the mask's bytes, dense."""
    row, col, mask = (None if t is None else t.contiguous() for t in (call.rel_row, call.rel_col, call.key_mask))
    return row, col, None if mask is None else mask.view(torch.uint8)


def _lse_parts(q: Tensor) -> int:
    """In float32 the largest logit and the logarithm of the sum relative to it are kept apart: see the kernels' `_load_lse`."""
    return 2 if q.dtype == torch.float32 else 1


def _lse_shape(q: Tensor) -> tuple[int, int, int]:
    """[B, H·W, heads·parts]. No registered operator here takes, gives or keeps a tensor of rank 4: between convolutions
    torch.compile stores those in the order of [N, C, H, W] channels-last, and would copy [B, H, W, …] there and back."""
    batch, height, width, heads, _ = q.shape
    return batch, height * width, heads * _lse_parts(q)


def attend(call: LocalCall, into: Callable[[LocalCall], Gradients] | None) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of every query (base 2, of the scaled logits), [B, H·W, heads·parts].

    `into` says where the gradients of a call go, or is None where there will be none: on its first call a class compiles its
    kernels side by side, those of the backward with them.
    """
    out, lse = empty_outputs(call.q)
    if out.numel() > 0:
        compile_together(class_of(OP, *call, into is not None), lambda: _compile(call, into))
        key = class_of(OP, *call, "forward")
        fitted(key, call, lambda lean: _or_without_ring(lambda: _launch_forward(call, out, lse, lean)))
    return out, lse


def empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    """For the output and the log-sum-exp."""
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(_lse_shape(q), dtype=torch.float32)


def _compile(call: LocalCall, into: Callable[[LocalCall], Gradients] | None) -> None:
    """Launch on tensors without memory what a call launches, and what its gradient will."""
    call = stand_in(call)
    out, lse = empty_outputs(call.q)
    _launch_forward(call, out, lse)
    if into is not None:
        _launch_gradients(call, out, out, lse, into(call))


def _launch_forward(call: LocalCall, out: Tensor, lse: Tensor, lean: int = 0) -> None:
    from nearsight.ops.local import kernels, strip_kernels

    q, k, v = call.q, call.k, call.v
    launch = prepare_launch(call, "forward", lean, _may_ring(call, out))
    rings = _ring_kernels() if launch.shape.ahead else None
    with torch.cuda.device_of(q):
        if rings is not None:
            row, col, _ = _positions_and_mask(call)
            launch_ring(rings[0], launch, (q, k, v, out, lse, row, col), images=len(q))
            return
        key, value = (_source(t, launch.constants) for t in (q if k is None else k, v))
        launch_kernel(
            (strip_kernels if launch.shape.by_row else kernels).forward,
            launch.grid,
            *(q, key, value, out, lse, *_positions_and_mask(call)),
            **launch.runtime,
            **launch.constants,
        )


class Gradients(NamedTuple):
    """Where dq, dk and dv go: dense but for one common stride per pixel."""

    q: Tensor
    k: Tensor | None
    v: Tensor


def gradients(call: LocalCall, grad: Tensor, out: Tensor, lse: Tensor, into: Gradients) -> list[Tensor]:
    """Fill `into`; return the gradients of the relative tables there are."""
    grad = grad.contiguous()
    if grad.numel() == 0:
        tables = [torch.zeros_like(t) for t in (call.rel_row, call.rel_col) if t is not None]
        for t in into:
            if t is not None:
                t.zero_()
        return tables

    def compile_own() -> None:  # a compiled graph's forward may not know that a backward follows
        _launch_gradients(stand_in(call), meta_like(grad), meta_like(out), meta_like(lse), stand_in(into))

    key = class_of(OP, *call, "gradients")
    compile_together(key, compile_own)
    return fitted(key, call, lambda lean: _or_without_ring(lambda: _launch_gradients(call, grad, out, lse, into, lean)))


def _launch_gradients(
    call: LocalCall, grad: Tensor, out: Tensor, lse: Tensor, into: Gradients, lean: int = 0
) -> list[Tensor]:
    q, k, v, rel_row, rel_col, *_ = call
    tables = [None if t is None else torch.empty(t.shape, dtype=t.dtype, device=q.device) for t in (rel_row, rel_col)]
    found = [t for t in tables if t is not None]
    walk = in_one_walk(q.element_size(), q.shape[-1], call.window[0])
    if walk and lean >= 2:
        # Leaner than any walk: two passes, from the measured ones on.
        walk, lean = False, lean - 2
    launch = prepare_launch(call, "walk" if walk else "queries", lean, _may_ring(call, out, grad, *into))
    shape = (*launch.grid, 2 * launch.constants["HS"], launch.constants["G"], launch.constants["DP"])
    partial = torch.empty(shape if found else (0,), dtype=torch.float32, device=q.device)
    read = Read(q, q if k is None else k, v, out, grad, lse, *_positions_and_mask(call))
    numbers = {"grad_pixel": into.q.stride(2), "scale": call.scale}
    with torch.cuda.device_of(q):
        if walk:
            partial = _walk(read, launch, numbers, into, partial, too_many(partial, launch, *tables))
        else:
            _two_passes(read, launch, prepare_launch(call, "keys", lean), numbers, into, partial)
        if found:
            sum_relative(partial, launch, *tables)
    for t in _constant(call, into, *tables):
        t.zero_()
    return found


def _constant(call: LocalCall, into: Gradients, drow: Tensor | None, dcol: Tensor | None) -> list[Tensor]:
    """Gradients of which only rounding would be left.

    Where a query meets one tap of an axis, that axis adds the same to all of its logits. Where it meets one of both, its only
    key has all the weight whatever the logit.
    """
    rows, columns = (
        taps == 1 or (call.border == "mask" and size <= dilation)
        for taps, size, dilation in zip(call.window, call.q.shape[1:3], call.dilation, strict=True)
    )
    both = rows and columns
    terms = both or (call.k is None and (drow is None or rows) and (dcol is None or columns))
    said = ((drow, rows), (dcol, columns), (into.q, terms), (into.k, both))
    return [t for t, constant in said if constant and t is not None]


class Read(NamedTuple):
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
    t: Read, launch: Launch, numbers: dict[str, Any], into: Gradients, partial: Tensor, many_tables: bool
) -> Tensor:
    """All gradients in one walk, then the sum of the strips' shares of dk and dv, where there are several.

    Returns the shares of the relative tables that are left to add up: `partial`, or where those are many, fewer.
    """
    from nearsight.ops.local import gradient_kernels

    rings = _ring_kernels() if launch.shape.ahead else None
    if rings is not None:
        return ring_walk(rings[1], t, launch, numbers, into, partial, many_tables)
    dq, dk, dv = into
    fixed = launch.constants
    # A strip as wide as the map shares nothing.
    dv_share = dv if fixed["WHOLE_X"] else empty_share(launch, dq)
    dk_share = dv_share if dk is None else dk if fixed["WHOLE_X"] else torch.empty_like(dv_share)
    tensors = (t.q, t.k, t.v, t.out, t.grad, t.lse, dq, dk_share, dv_share, partial, t.row, t.col, t.mask)
    launch_kernel(gradient_kernels.backward, launch.grid, *tensors, **launch.runtime, **numbers, **fixed)
    if fixed["WHOLE_X"]:
        return partial
    return add_shares((dk_share, dv_share), launch, numbers["grad_pixel"], into, partial, many_tables)


def _two_passes(
    t: Read, queries: Launch, keys: Launch, numbers: dict[str, Any], into: Gradients, partial: Tensor
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
        **queries.constants,
    )
    launch_kernel(
        tall_kernels.backward_keys,
        keys.grid,
        *(t.q, t.k, t.v, t.grad, t.lse, delta, dv if dk is None else dk, dv, t.row, t.col, t.mask),
        **keys.runtime,
        **numbers,
        **keys.constants,
    )
