"""Explicit attention's separable kinds in Triton: launches, registered torch ops with their gradients, refusals."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.ops.dispatch import full_precision
from nearsight.ops.explicit.call import SEPARABLE_KINDS, ExplicitCall
from nearsight.ops.explicit.reference import smallest_normaliser
from nearsight.ops.triton_support import common_refusal, next_power_of_two

__all__ = ["Tile", "refusal", "run", "tile"]

MAX_SIDE = 1024
# Programs that keep a large GPU busy; with more tiles each takes several.
WANTED_PROGRAMS = 1024
TABLE_ROWS = 16
# Partial sums a program adds up at a time.
SUMMED = 16


class Tile(NamedTuple):
    """What a program of an axis product takes: its rows and depth, pixels of the other axis, channels; and how it runs."""

    rows: int
    depth: int
    others: int
    channels: int
    warps: int
    stages: int


def tile(kernel: str, side: int, per_head: int, dtype: torch.dtype) -> Tile:
    """The tile of `kernel` for axes of up to `side` pixels (a power of two) and heads of `per_head` channels: a fixed table."""
    narrow = product_dtype(dtype, side) == torch.bfloat16
    rows = min(side, 128 if narrow else 64)
    depth = min(side, 128 if narrow else 32)
    # Of the tiles tried on an H200 (README, "GPU"): wider ones leave one program per multiprocessor, more warps wait longer.
    columns = 128 if side <= 16 else 64
    channels = min(max(next_power_of_two(per_head), 8), 64)
    others = max(1, min(columns // channels, side), 16 // channels)
    return Tile(rows, depth, others, channels, 4, 1 if side <= 32 else 2)


def product_dtype(dtype: torch.dtype, side: int) -> torch.dtype:
    """What the products' operands are rounded to: bfloat16 where its bytes count, else float32.

    float16 could not hold the sums; on small maps float32 costs little and leaves the radius' gradient more digits.
    """
    return torch.bfloat16 if dtype == torch.bfloat16 and side > 32 else torch.float32


def refusal(call: ExplicitCall) -> str | None:
    """Why Triton cannot run this call, or None."""
    reason = common_refusal(call.values)
    if reason is not None:
        return reason
    if call.kind not in SEPARABLE_KINDS:
        return f"needs one of the kinds {', '.join(SEPARABLE_KINDS)}, got {call.kind}"
    if max(call.values.shape[1:3]) > MAX_SIDE:
        return f"needs maps of at most {MAX_SIDE} pixels per axis, got {call.values.shape[1]}×{call.values.shape[2]}"
    return None


def run(call: ExplicitCall) -> Tensor:
    assert call.radius is not None
    return _forward(call.values, call.radius, call.key_mask, call.kind == "gaussian", call.offset)[0]


def _precision(dtype: torch.dtype) -> str:
    """Float32 operands of a half type's call: three TF32 products, twice their digits at tensor-core speed."""
    return "ieee" if dtype == torch.float32 or torch.version.hip is not None else "tf32x3"


class _Problem(NamedTuple):
    """One call as the kernels take it."""

    values: Tensor
    key_mask: Tensor | None
    heads: int
    side: int

    @property
    def size(self) -> tuple[int, int]:
        return self.values.shape[1], self.values.shape[2]

    @property
    def per_head(self) -> int:
        return self.values.shape[3] // self.heads

    def tile(self, kernel: str) -> Tile:
        return tile(kernel, self.side, self.per_head, self.values.dtype)

    @property
    def mask(self) -> tuple[Tensor, tuple[int, ...]]:
        """The mask and its strides; any tensor stands for an absent one."""
        if self.key_mask is None:
            return self.values, (0, 0, 0)
        return self.key_mask.view(torch.uint8), self.key_mask.stride()

    def blocks(self, kernel: str) -> int:
        """Tiles of `kernel` along the axis it does not multiply."""
        return -(-self.size[0 if kernel.endswith("_x") else 1] // self.tile(kernel).others)

    def tiles(self, kernel: str) -> int:
        """Tiles of `kernel` in all, in one image and head."""
        t, along = self.tile(kernel), self.size[1 if kernel.endswith("_x") else 0]
        return self.blocks(kernel) * -(-self.per_head // t.channels) * -(-along // t.rows)

    def steps(self, kernel: str) -> int:
        """Tiles a program takes one after the other, its matrix kept: as many as leave each multiprocessor a few programs."""
        all_tiles = self.tiles(kernel) * self.values.shape[0] * self.heads
        return max(1, min(self.blocks(kernel), all_tiles // WANTED_PROGRAMS))

    def grid(self, kernel: str) -> tuple[int, int, int]:
        t, along = self.tile(kernel), self.size[1 if kernel.endswith("_x") else 0]
        parts = self.heads * -(-self.per_head // t.channels)
        groups = -(-self.blocks(kernel) // self.steps(kernel))
        return self.values.shape[0] * parts * groups, -(-along // t.rows), 1

    def constants(self, kernel: str) -> dict[str, Any]:
        t = self.tile(kernel)
        return {
            "HEADS": self.heads,
            "DH": self.per_head,
            "SIDE": self.side,
            "OB": t.others,
            "CB": t.channels,
            "BM": t.rows,
            "BK": t.depth,
            "WHOLE": t.depth >= self.side,
            "MASKED": self.key_mask is not None,
            "PRECISION": _precision(self.values.dtype),
            "num_warps": t.warps,
            "num_stages": t.stages,
            "enable_fp_fusion": True,
        }


def _problem(values: Tensor, radius: Tensor, key_mask: Tensor | None) -> _Problem:
    values = values if values.stride(3) == 1 or values.shape[3] == 1 else values.contiguous()
    return _Problem(values, key_mask, radius.shape[0], _side(values))


def _side(values: Tensor) -> int:
    return max(16, next_power_of_two(max(values.shape[1], values.shape[2])))


def _masses(p: _Problem, matrices: Tensor, sums: Tensor, offset: float) -> tuple[Tensor, Tensor]:
    """1/N and (h − h₀)·N of a masked call, [B, heads, H, W]; without a mask the kernels find them from the row sums."""
    if p.key_mask is None:
        return matrices, matrices
    height, width = p.size
    with full_precision(p.values):
        g = matrices.float()
        rows, rows_slope = g[:, 0, :height, :height], g[:, 1, :height, :height]
        columns, columns_slope = g[:, 2, :width, :width], g[:, 3, :width, :width]
        valid = p.key_mask[:, None].float()
        along_y, count = rows @ valid, offset * valid.sum((2, 3), keepdim=True)
        mass = along_y @ columns + count
        slope = rows_slope @ valid @ columns + along_y @ columns_slope - sums[:, 4, :1, None] * count
        inverse = torch.where(mass > smallest_normaliser(torch.float32), 1 / mass, 0.0)
    return inverse, slope


@torch.library.custom_op("nearsight::explicit_triton", mutates_args=())
def _forward(
    values: Tensor, radius: Tensor, key_mask: Tensor | None, gaussian: bool, offset: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, and what the backward takes from the forward: see `_empty_outputs`."""
    from nearsight.ops.explicit import kernels

    out, product, matrices, sums, totals, centres = _empty_outputs(values, radius, key_mask, gaussian, offset)
    if out.numel() == 0:
        return out, product, matrices.zero_(), sums.zero_(), totals.zero_(), centres.zero_()
    p = _problem(values, radius, key_mask)
    height, width = p.size
    kernels.tables[(2 * p.heads * (p.side // TABLE_ROWS), 1, 1)](
        radius.contiguous(),
        matrices,
        sums,
        height,
        width,
        offset * height * width,
        SIDE=p.side,
        ROWS=TABLE_ROWS,
        GAUSSIAN=gaussian,
    )
    mask, mask_strides = p.mask
    kernels.forward_x[p.grid("forward_x")](
        p.values,
        mask,
        matrices,
        sums,
        product,
        totals,
        centres,
        height,
        width,
        p.steps("forward_x"),
        *p.values.stride()[:3],
        *mask_strides,
        **p.constants("forward_x"),
    )
    inverse, _ = _masses(p, matrices, sums, offset)
    kernels.forward_y[p.grid("forward_y")](
        product,
        matrices,
        sums,
        inverse,
        totals,
        centres,
        out,
        height,
        width,
        totals.shape[1],
        p.steps("forward_y"),
        offset,
        offset * height * width,
        SUMMED=SUMMED,
        **p.constants("forward_y"),
    )
    return out, product, matrices, sums, totals, centres


@_forward.register_fake
def _empty_outputs(
    values: Tensor, radius: Tensor, key_mask: Tensor | None, gaussian: bool, offset: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output; V g_x; the matrices g and dg/dσ of both axes; their row sums; partial sums of V; what V is centred by."""
    batch, height, _, channels = values.shape
    heads, side = radius.shape[0], _side(values)
    narrow = product_dtype(values.dtype, side)
    blocks = -(-height // tile("forward_x", side, channels // heads, values.dtype).others)
    return (
        values.new_empty(values.shape),
        values.new_empty(values.shape, dtype=narrow),
        values.new_empty([heads, 4, side, side], dtype=narrow),
        values.new_empty([heads, 5, side], dtype=torch.float32),
        values.new_empty([batch, blocks, channels], dtype=torch.float32),
        values.new_empty([batch, channels], dtype=torch.float32),
    )


@torch.library.custom_op("nearsight::explicit_triton_backward", mutates_args=())
def _backward(
    grad: Tensor,
    values: Tensor,
    radius: Tensor,
    key_mask: Tensor | None,
    product: Tensor,
    matrices: Tensor,
    sums: Tensor,
    totals: Tensor,
    centres: Tensor,
    offset: float,
    want_radius: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of values and radius; the latter is empty where it is not wanted."""
    from nearsight.ops.explicit import kernels

    dvalues, dradius = _empty_gradients(
        grad, values, radius, key_mask, product, matrices, sums, totals, centres, offset, want_radius
    )
    if values.numel() == 0:
        return dvalues, dradius.zero_()
    p = _problem(values, radius, key_mask)
    (height, width), (batch, _, _, channels) = p.size, values.shape
    if grad.stride(3) != 1:
        grad = grad.contiguous()
    inverse, slope = _masses(p, matrices, sums, offset)
    along_y, along_x = p.grid("backward_y"), p.grid("backward_x")
    second_totals = values.new_empty([batch, p.blocks("backward_y"), channels], dtype=torch.float32)
    second = torch.empty_like(product)
    first_shares = p.tiles("backward_y")
    share_count = first_shares + p.tiles("backward_x")
    shares = values.new_empty([batch, p.heads, share_count if want_radius else 0], dtype=torch.float32)
    kernels.backward_y[along_y](
        grad,
        product,
        matrices,
        sums,
        inverse,
        slope,
        totals,
        second,
        second_totals,
        shares,
        height,
        width,
        totals.shape[1],
        p.steps("backward_y"),
        share_count,
        offset,
        offset * height * width,
        *grad.stride()[:3],
        SUMMED=SUMMED,
        WANT_RADIUS=want_radius,
        **p.constants("backward_y"),
    )
    mask, mask_strides = p.mask
    kernels.backward_x[along_x](
        p.values,
        mask,
        second,
        matrices,
        second_totals,
        centres,
        dvalues,
        shares,
        height,
        width,
        second_totals.shape[1],
        p.steps("backward_x"),
        share_count,
        first_shares,
        offset,
        *p.values.stride()[:3],
        *mask_strides,
        SUMMED=SUMMED,
        WANT_RADIUS=want_radius,
        **p.constants("backward_x"),
    )
    if want_radius:
        dradius = shares.sum((0, 2), dtype=torch.float64).to(dradius.dtype)
    return dvalues, dradius


@_backward.register_fake
def _empty_gradients(
    grad: Tensor,
    values: Tensor,
    radius: Tensor,
    key_mask: Tensor | None,
    product: Tensor,
    matrices: Tensor,
    sums: Tensor,
    totals: Tensor,
    centres: Tensor,
    offset: float,
    want_radius: bool,
) -> tuple[Tensor, Tensor]:
    return values.new_empty(values.shape), radius.new_empty(radius.shape if want_radius else [0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    values, radius, key_mask, _, offset = inputs
    ctx.save_for_backward(values, radius, key_mask, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros for the outputs that only the backward reads
    ctx.offset = offset


def _differentiate(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    want_radius = ctx.needs_input_grad[1]
    dvalues, dradius = _backward(grad, *ctx.saved_tensors, ctx.offset, want_radius)
    return dvalues, dradius if want_radius else None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
