"""QnA's aggregation in Triton: launches, registered torch ops with their gradients, and when this backend refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.ops.dispatch import refuse_second_derivatives
from nearsight.ops.first_calls import class_of, compile_together, gradient_traced, launch, meta_like, stand_in, trains
from nearsight.ops.launching import replayed
from nearsight.ops.qna.call import OP, QnACall
from nearsight.ops.qna.geometry import (
    Geometry,
    band_of,
    chunk_of,
    geometry,
    heads_apart,
    images_ahead,
    lanes_of,
    steps_of,
)
from nearsight.ops.sums import sum_rows
from nearsight.ops.triton_support import (
    INT32_LIMIT,
    common_refusal,
    early_launch,
    multiprocessors,
    next_power_of_two,
    register_cap,
)

__all__ = ["Problem", "launch_backward", "launch_delta", "launch_forward", "refusal", "run"]

MAX_WINDOW = 15
MAX_QUERIES = 16
MAX_HEAD_DIM = 256
MAX_IMAGES = 65535  # the second and third axis of a grid
# The tables' heads lie this far apart or the next power of two: one compilation for all head counts up to it.
HEAD_STRIDE = 64


def refusal(call: QnACall) -> str | None:
    """Why Triton cannot run this call, or None."""
    reason = common_refusal(call.values, call.scores)
    if reason is not None:
        return reason
    if call.scores.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"needs scores of float32, bfloat16 or float16, got {str(call.scores.dtype).removeprefix('torch.')}"
    if max(call.window) > MAX_WINDOW:
        return f"needs a window of at most {MAX_WINDOW} taps per axis, got {call.window[0]}×{call.window[1]}"
    if call.scores.shape[3] > MAX_QUERIES:
        return f"needs at most {MAX_QUERIES} queries, got {call.scores.shape[3]}"
    if call.values.shape[4] > MAX_HEAD_DIM or call.values.shape[4] == 0:
        return f"needs a head dim of 1 to {MAX_HEAD_DIM}, got {call.values.shape[4]}"
    if max(call.values.shape[:2]) > MAX_IMAGES:
        return f"needs at most {MAX_IMAGES} images and rows, got {call.values.shape[0]} and {call.values.shape[1]}"
    if call.combine == "stack" and call.values[:1].numel() * call.scores.shape[3] >= INT32_LIMIT:
        return "needs outputs of fewer than 2³¹ elements per image, got more"
    if call.scores[:1].numel() * _parts(call.values) >= INT32_LIMIT:
        return "needs fewer than 2³⁰ scores per image in float32, got more"
    return None


def run(call: QnACall) -> Tensor:
    # The tables as [kh·kw, L, heads]: a compiler takes whatever has four axes for a map and may lay it out anew.
    tables = [None if table is None else table.flatten(0, 1) for table in (call.position_bias, call.tap_scale)]
    options = (list(call.window), list(call.stride), call.combine == "stack")
    return _forward(call.scores, call.values, *tables, call.key_mask, *options)[0]


class Problem(NamedTuple):
    """The tensors of a call as the kernels take them: channels dense, any stride of batch and pixel; the tables packed."""

    scores: Tensor
    values: Tensor
    tables: Tensor
    biased: bool
    scaled: bool
    key_mask: Tensor | None
    window: Sequence[int]
    stride: Sequence[int]
    stack: bool

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """H, W of the map and of the output, and the heads."""
        return *_sizes(self.values, self.stride), self.values.shape[3]

    def geometry(self, kernel: str) -> Geometry:
        half = self.values.dtype != torch.float32
        height, dim = self.values.shape[1], self.values.shape[4]
        dealt = self.share(lanes_of(dim, half)) > 0
        return geometry(kernel, self.scores.shape[3], dim, self.window, self.stride, height, half, self.shared, dealt)

    def share(self, lanes: int) -> int:
        """How many of a tap's sums each lane of a head is left with where they are dealt out, 0 where they cannot be.

        They can where lanes of a head are a fixed number apart and every lane may store; not in equal shares to any number.
        """
        apart = heads_apart(self.values.shape[3], lanes)
        sums = (self.biased + self.scaled) * self.scores.shape[3]
        if apart == 0 or sums == 0 or sums & (sums - 1) or (self.stride[1] > 1 and apart == lanes):
            return 0
        return max(sums * apart // lanes, 1)

    @property
    def lone(self) -> bool:
        """Whether every window has one key, whose weight is 1 whatever its score."""
        return all(window == 1 or size == 1 for window, size in zip(self.window, self.values.shape[1:3], strict=True))

    @property
    def shared(self) -> bool:
        """Whether forward and δ take exponentials once per pixel.

        Not where every window has one key; nor with a scale alone, where nothing would tell that it is too large for that. Nor
        in float32: a tap with all the weight then has a gradient of rounding errors, where the others' may be smaller.
        """
        needs_own = self.lone or self.stack or self.key_mask is not None or _parts(self.values) == 2
        return not (needs_own or (self.scaled and not self.biased))

    def fetches(self, g: Geometry) -> bool:
        """Whether a program has what comes after it brought into the cache: where that was measured to be faster."""
        return (
            g.unroll and g.registers is not None and self.stride[0] == 1 and _parts(self.values) == 1 and not self.stack
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """Scores, values, tables and mask; any tensor stands for an absent one."""
        mask = self.values if self.key_mask is None else self.key_mask.view(torch.uint8)
        return self.scores, self.values, self.tables, mask

    @property
    def alignment(self) -> int:
        """Elements that all strides of the values are multiples of, up to a 16-byte load."""
        align = 16 // self.values.element_size()
        while any(stride % align for stride in self.values.stride()[:3]):
            align //= 2
        return align

    def strides(self) -> tuple[int, ...]:
        """Batch, row and column; the values' in units of `alignment`, so that no compilation depends on them."""
        mask = (0, 0, 0) if self.key_mask is None else self.key_mask.stride()
        align = self.alignment
        return (*self.scores.stride()[:3], *[stride // align for stride in self.values.stride()[:3]], *mask)

    def constants(self, g: Geometry) -> dict[str, Any]:
        dim = self.values.shape[4]
        return {
            "ALIGN": self.alignment,
            "HP": self.tables.shape[2],
            "L": self.scores.shape[3],
            "D": dim,
            "DP": next_power_of_two(dim),
            "KH": self.window[0],
            "KW": self.window[1],
            "SY": self.stride[0],
            "SX": self.stride[1],
            "N": g.lanes,
            "ROWS": g.rows,
            "UNROLL": g.unroll,
            "BAND": band_of(self.window[0], self.scores.shape[3], self.stride[0]),
            "BIASED": self.biased,
            "SCALED": self.scaled,
            "MASKED": self.key_mask is not None,
            "STACK": self.stack,
            "PARTS": _parts(self.values),
            "num_warps": 1,
            **early_launch(self.values.device),
            **register_cap(g.registers),
        }


def _dense(tensor: Tensor, inner: int) -> Tensor:
    """The tensor itself where its last `inner` axes are dense, else a copy."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[-inner:]), reversed(tensor.stride()[-inner:]), strict=True):
        if size != 1 and stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


def _parts(values: Tensor) -> int:
    """Numbers that a window's log-sum-exp is kept as: `kernels.py` says why."""
    return 2 if values.dtype == torch.float32 else 1


def _sizes(values: Tensor, stride: Sequence[int]) -> tuple[int, int, int, int]:
    height, width = values.shape[1:3]
    return height, width, -(-height // stride[0]), -(-width // stride[1])


def _launch_pack(bias: Tensor | None, scale: Tensor | None, tables: Tensor, scores: Tensor) -> None:
    """Fill `tables` with the given ones."""
    from nearsight.ops.qna import kernels

    given = [table for table in (bias, scale) if table is not None]
    if given and tables.numel():
        launch(
            kernels.pack,
            (tables.shape[1],),
            given[0],
            given[-1],
            tables,
            scores.shape[4],
            L=scores.shape[3],
            BIASED=bias is not None,
            SCALED=scale is not None,
            HP=tables.shape[2],
            num_warps=1,
            **early_launch(tables.device),
        )


def _empty_pack(bias: Tensor | None, scale: Tensor | None, scores: Tensor) -> Tensor:
    given = [table for table in (bias, scale) if table is not None]
    taps = given[0].shape[0] if given else 0
    stride = next_power_of_two(max(scores.shape[4], HEAD_STRIDE))
    return scores.new_empty([2, taps, stride, len(given) * scores.shape[3]], dtype=torch.float32)


def _window_grid(p: Problem, g: Geometry) -> tuple[int, int, int]:
    _, _, out_height, out_width, heads = p.sizes
    return -(-out_width * heads // g.lanes), -(-out_height // g.rows), p.values.shape[0]


def launch_forward(p: Problem, out: Tensor, lse: Tensor) -> None:
    from nearsight.ops.qna import kernels

    g = p.geometry("forward")
    grid = _window_grid(p, g)
    ahead = images_ahead(g, grid[0] * grid[1], multiprocessors(p.values.device))
    constants = {"SHARED": p.shared, "FETCH": p.fetches(g), **p.constants(g)}
    launch(kernels.forward, grid, *p.tensors(), out, lse, *p.sizes, *p.strides(), ahead, **constants)


def launch_delta(p: Problem, grad: Tensor, lse: Tensor, delta: Tensor) -> None:
    from nearsight.ops.qna import delta_kernels

    g = p.geometry("delta")
    constants = {"SHARED": p.shared, **p.constants(g)}
    launch(delta_kernels.delta, _window_grid(p, g), *p.tensors(), grad, lse, delta, *p.sizes, *p.strides(), **constants)


def launch_backward(
    p: Problem, grad: Tensor, lse: Tensor, delta: Tensor, dscores: Tensor, dvalues: Tensor
) -> Tensor | None:
    """Fill dscores and dvalues; return the programs' sums for the given tables, [rows, tables, kh·kw·L, heads]."""
    from nearsight.ops.qna import gradient_kernels

    g = p.geometry("backward")
    (batch, height, width, heads), (kh, kw), sx = p.values.shape[:4], p.window, p.stride[1]
    tiles = batch * -(-height // g.rows)
    columns = -(-width // sx)
    blocks = -(-columns * heads // g.lanes)
    # With a stride along x a program meets only the taps of its phase; the others must read as zero.
    new = p.values.new_empty if sx == 1 else p.values.new_zeros
    tables = p.biased + p.scaled
    steps = steps_of(g, blocks * sx, tiles, multiprocessors(p.values.device))
    programs = -(-tiles // steps)
    rows = programs * sx * (columns if heads > g.lanes else blocks)
    sums = new([rows, tables, kh * kw * p.scores.shape[3], heads], dtype=torch.float32) if tables else None
    # Where lanes of one head are a fixed number apart their sums need no loop, which large windows would run through often.
    # Small windows sum once per program and are compiled once for all head counts.
    apart, share = (0, 0) if g.unroll else (heads_apart(heads, g.lanes), p.share(g.lanes))
    launch(
        gradient_kernels.backward,
        (blocks * sx, programs),
        *p.tensors(),
        grad,
        lse,
        delta,
        dscores,
        dvalues,
        delta if sums is None else sums,
        *p.sizes,
        *p.strides(),
        tiles,
        chunk_of(steps) if p.fetches(g) else 1,
        HB=apart,
        SHARE=share,
        LONE=p.lone,
        FETCH=p.fetches(g),
        **p.constants(g),
    )
    return sums


@torch.library.custom_op("nearsight::qna_triton", mutates_args=())
@replayed
def _forward(
    scores: Tensor,
    values: Tensor,
    position_bias: Tensor | None,
    tap_scale: Tensor | None,
    key_mask: Tensor | None,
    window: list[int],
    stride: list[int],
    stack: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the log-sum-exp of every window, head and query, and the tables as the kernels read them."""
    out, lse, tables = _empty_outputs(scores, values, position_bias, tap_scale, key_mask, window, stride, stack)
    if out.numel():
        bias, scale = (None if table is None else table.contiguous() for table in (position_bias, tap_scale))
        given = (bias is not None, scale is not None)
        p = _problem(scores, values, tables, *given, key_mask, window, stride, stack)
        wanted = trains(OP, (scores, values), position_bias, tap_scale)
        compile_together(class_of(OP, *p, bias, scale, wanted), lambda: _compile(p, bias, scale, wanted))
        _launch_pack(bias, scale, tables, scores)
        launch_forward(p, out, lse)
    return out, lse, tables


def _compile(p: Problem, bias: Tensor | None, scale: Tensor | None, gradients: bool) -> None:
    """Launch on tensors without memory what a call launches, and what its gradient will."""
    bias, scale = (None if table is None else meta_like(table) for table in (bias, scale))
    p = stand_in(p)
    out, lse, _ = _empty_outputs(p.scores, p.values, bias, scale, p.key_mask, p.window, p.stride, p.stack)
    _launch_pack(bias, scale, p.tables, p.scores)
    launch_forward(p, out, lse)
    if gradients:
        _launch_gradients(p, out, lse)


@_forward.register_fake
def _empty_outputs(
    scores: Tensor,
    values: Tensor,
    position_bias: Tensor | None,
    tap_scale: Tensor | None,
    key_mask: Tensor | None,
    window: Sequence[int],
    stride: Sequence[int],
    stack: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    (batch, _, _, queries, heads), dim = scores.shape, values.shape[4]
    _, _, out_height, out_width = _sizes(values, stride)
    per_query = [queries] if stack else []
    out = values.new_empty([batch, out_height, out_width, *per_query, heads, dim])
    return (
        out,
        values.new_empty([batch, out_height, out_width, heads, _parts(values) * queries], dtype=torch.float32),
        _empty_pack(position_bias, tap_scale, scores),
    )


def _problem(
    scores: Tensor,
    values: Tensor,
    tables: Tensor,
    biased: bool,
    scaled: bool,
    key_mask: Tensor | None,
    window: Sequence[int],
    stride: Sequence[int],
    stack: bool,
) -> Problem:
    return Problem(_dense(scores, 2), _dense(values, 2), tables, biased, scaled, key_mask, window, stride, stack)


@torch.library.custom_op("nearsight::qna_triton_backward", mutates_args=())
@replayed
def _backward(
    grad: Tensor,
    scores: Tensor,
    values: Tensor,
    key_mask: Tensor | None,
    lse: Tensor,
    tables: Tensor,
    biased: bool,
    scaled: bool,
    window: list[int],
    stride: list[int],
    stack: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of scores and values, and of the tables that are there: [tables, kh·kw·L, heads], float32."""
    if values.numel() == 0:
        empty = _empty_gradients(grad, scores, values, key_mask, lse, tables, biased, scaled, window, stride, stack)
        return *empty[:2], empty[2].zero_()
    p = _problem(scores, values, tables, biased, scaled, key_mask, window, stride, stack)
    grad = grad.contiguous()
    # A compiled graph's forward may not know that a backward follows.
    compile_together(class_of(OP, *p, grad), lambda: _compile_gradients(p, grad, lse))
    return _launch_gradients(p, grad, lse)


def _compile_gradients(p: Problem, grad: Tensor, lse: Tensor) -> None:
    _launch_gradients(stand_in(p), meta_like(grad), meta_like(lse))


def _launch_gradients(p: Problem, grad: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `_backward` returns."""
    options = (p.biased, p.scaled, p.window, p.stride, p.stack)
    dscores, dvalues, dtables = _empty_gradients(grad, p.scores, p.values, p.key_mask, lse, p.tables, *options)
    delta = lse.new_empty([*lse.shape[:4], p.scores.shape[3]])
    launch_delta(p, grad, lse, delta)
    sums = launch_backward(p, grad, lse, delta, dscores, dvalues)
    return dscores, dvalues, dtables if sums is None else sum_rows(sums)


def _empty_gradients(
    grad: Tensor,
    scores: Tensor,
    values: Tensor,
    key_mask: Tensor | None,
    lse: Tensor,
    tables: Tensor,
    biased: bool,
    scaled: bool,
    window: Sequence[int],
    stride: Sequence[int],
    stack: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        scores.new_empty(scores.shape),
        values.new_empty(values.shape),
        values.new_empty(
            [biased + scaled, window[0] * window[1] * scores.shape[3], scores.shape[4]], dtype=torch.float32
        ),
    )


@_backward.register_fake
def _(grad: Tensor, scores: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    gradient_traced(OP, scores, values)
    return _empty_gradients(grad, scores, values, *rest)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    scores, values, bias, scale, key_mask, window, stride, stack = inputs
    ctx.save_for_backward(scores, values, key_mask, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros for the log-sum-exp
    ctx.tables = tuple(None if table is None else (table.shape, table.dtype) for table in (bias, scale))
    ctx.options = (window, stride, stack)


def _differentiate(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    given = [table is not None for table in ctx.tables]
    dscores, dvalues, dtables = _backward(grad, *ctx.saved_tensors, *given, *ctx.options)
    shares = iter(dtables)
    dbias, dscale = [None if each is None else next(shares).view(each[0]).to(each[1]) for each in ctx.tables]
    return dscores, dvalues, dbias, dscale, *(None,) * 4


_forward.register_autograd(_differentiate, setup_context=_save)
refuse_second_derivatives(OP, _backward)
