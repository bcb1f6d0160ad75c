"""QnA's aggregation as quotients of window sums, the authors' form, for calls in which it is exact enough.

    z = Σ_l Sum_k(e_l·V ; exp(B)·W_s) / Sum_k(e_l ; exp(B)) ,   e_l = exp(score − its maximum over the image)

Each Sum_k is a depthwise convolution, for which a CPU has its best code. One maximum per image is not safe: in a window whose
scores all lie far below it, e_l loses its digits or vanishes. So the windows' denominators are looked at, which is allowed
where it costs nothing (inside the registered operator, on a CPU), and the form is given up when one of them is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from nearsight.ops.qna.planes import Gradients

__all__ = ["Sums"]

# exp(−16): a score within 16 of the maximum loses no more of its digits in the difference than one step of float32 at 16.
SMALLEST = 1e-7
# Numbers of a group of images per thread, all queries and channels counted.
GROUP = 1 << 19
# Rows of D numbers in a group up to which its index is kept for the next call: half a megabyte.
KEPT = 1 << 17
# Taps per axis for which oneDNN's gradient of a depthwise kernel is fast.
TAPS = 3
# Pixels that a kernel's gradient is added up over at a time. oneDNN adds one to the next, and the gradient of the position biases
# is the small difference of two such sums: over whole batches it misses the error rule up to fivefold. Blocks of taps, of which
# each strip has several, err less.
STRIP = 512
STRIP_OF_BLOCKS = 2048


class Sums:
    """A call in this form; `of` makes it, or says with None that the call needs the other one."""

    def __init__(
        self,
        scores: Tensor,
        values: Tensor,
        position_bias: Tensor | None,
        tap_scale: Tensor | None,
        window: tuple[int, int],
        stride: tuple[int, int],
        stack: bool,
    ) -> None:
        batch, height, width, queries, heads = scores.shape
        self.size, self.queries, self.heads, self.dim = (batch, height, width), queries, heads, values.shape[-1]
        self.stack, self.stride, self.padding = stack, list(stride), [(taps - 1) // 2 for taps in window]
        scores = scores.float()
        # Rows first: long loops.
        largest = scores.amax(1, keepdim=True).amax(2, keepdim=True)
        self.raised = (scores - largest).contiguous().exp_().flatten(3)
        # [L·heads, 1, kh, kw]
        if position_bias is None:
            self.bias = scores.new_ones(queries * heads, 1, *window)
        else:
            kernel = self._kernel(position_bias)
            self.bias = (kernel - kernel.amax((1, 2, 3), keepdim=True)).exp_()
        self.scale = None if tap_scale is None else self._kernel(tap_scale)
        self.total = self._sum(self.raised, self.bias)
        self.values = values.float().reshape(batch, -1, heads, self.dim)
        self.one_head = scores.new_ones(self.dim)

    @classmethod
    def of(
        cls,
        scores: Tensor,
        values: Tensor,
        position_bias: Tensor | None,
        tap_scale: Tensor | None,
        key_mask: Tensor | None,
        window: tuple[int, int],
        stride: tuple[int, int],
        stack: bool,
    ) -> Sums | None:
        one_tap = all(min(taps, size) == 1 for taps, size in zip(window, scores.shape[1:3], strict=True))
        even = any(taps % 2 == 0 for taps in window)
        double = torch.float64 in (scores.dtype, values.dtype)
        # With one tap the gradient of the scores is exactly 0, which differences of quotients are not.
        if values.device.type != "cpu" or key_mask is not None or one_tap or even or double:
            return None
        sums = cls(scores, values, position_bias, tap_scale, window, stride, stack)
        return sums if min(float(sums.total.min()), float(sums.bias.min())) >= SMALLEST else None

    @staticmethod
    def _kernel(table: Tensor) -> Tensor:
        return table.float().flatten(2).permute(2, 0, 1)[:, None].contiguous()

    def _sum(self, pixels: Tensor, kernel: Tensor) -> Tensor:
        """[B, H, W, channels] summed over the windows, weighted by kernel [channels, 1, kh, kw]."""
        planes = pixels.permute(0, 3, 1, 2)
        return _pixels(torch.conv2d(planes, kernel, None, self.stride, self.padding, groups=kernel.shape[0]))

    def _sum_backward(self, grad: Tensor, pixels: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of what was summed and of the kernel."""
        of_pixels, _ = _convolution_backward(grad, pixels, kernel, self.stride, self.padding, [True, False])
        if self.stride == [1, 1] and max(kernel.shape[2:]) > TAPS:
            of_kernel = _kernel_by_blocks(grad, pixels, kernel)
        else:
            of_kernel = _kernel_by_strips(grad, pixels, kernel, self.stride, self.padding)
        return _pixels(of_pixels), of_kernel

    def _groups(self) -> Iterator[slice]:
        """A few images at a time: what is made of them stays in the cache, in memory that is used again."""
        batch, height, width = self.size
        images = max(1, GROUP * torch.get_num_threads() // (height * width * self.queries * self.heads * self.dim))
        for first in range(0, batch, images):
            yield slice(first, min(first + images, batch))

    def _kernels(self) -> Tensor:
        """exp(B)·W_s for every channel: [L·C, 1, kh, kw]."""
        kernel = self.bias if self.scale is None else self.bias * self.scale
        return kernel.repeat_interleave(self.dim, dim=0)

    def _bags(self) -> _Bags:
        images = max((group.stop - group.start for group in self._groups()), default=0)
        rows = (images * self.size[1] * self.size[2], self.queries, self.heads)
        return _kept_bags(*rows) if prod(rows) <= KEPT else _Bags(*rows)

    def _maps(self, rows: Tensor, size: torch.Size) -> Tensor:
        """[pixels, L, heads, D] → [B, H, W, L·C]."""
        return rows.view(-1, *size[1:3], self.queries * self.heads * self.dim)

    def _rows(self, maps: Tensor) -> Tensor:
        """[B, H, W, L·C] → [pixels, L, heads, D]."""
        return maps.view(-1, self.queries, self.heads, self.dim)

    def _add_up(self, x: Tensor, out: Tensor) -> None:
        """[…, L, heads, D] → […, L·heads], summed over D."""
        torch.mv(x.view(-1, self.dim), self.one_head, out=out.view(-1))

    def forward(self, out: Tensor) -> Tensor:
        """Fill out [B, H', W', (L,) heads, D]."""
        kernel, inverse, bags = self._kernels(), self.total.reciprocal(), self._bags()
        if not self.stack:
            inverse = self._queries_last(inverse)
        for group in self._groups():
            product = self._maps(bags.copied(self.values[group], self.raised[group]), self.raised.shape)
            summed = self._rows(self._sum(product, kernel))
            del product
            found = bags.each(summed, inverse[group]) if self.stack else bags.mixed(summed, inverse[group])
            out[group] = found.view(out[group].shape)
            del summed, found  # before the next are made, so that they take this memory
        return out

    def _queries_last(self, x: Tensor) -> Tensor:
        """[B, H, W, L·heads] → [B, H, W, heads, L]."""
        return torch.stack(x.unflatten(-1, (self.queries, self.heads)).unbind(-2), dim=-1)

    def backward(self, grad: Tensor, scores: Tensor, values: Tensor) -> Gradients:
        """Gradients of everything; `scores` and `values` say shapes and dtypes."""
        batch = self.size[0]
        grad = grad.float().reshape(batch, -1, *grad.shape[3:])
        kernel, inverse, bags = self._kernels(), self.total.reciprocal(), self._bags()
        raised_last = self._queries_last(self.raised)
        of_raised, of_total = torch.empty_like(self.raised), torch.empty_like(self.total)
        of_kernel, of_values = torch.zeros_like(kernel), kernel.new_empty(values.shape)
        for group in self._groups():
            product = self._maps(bags.copied(self.values[group], self.raised[group]), self.raised.shape)
            summed = self._rows(self._sum(product, kernel))
            here = grad[group].flatten(0, 1)
            self._add_up(summed.mul_(here if self.stack else here[:, None]), of_total[group])
            del summed
            share = bags.each(here, inverse[group]) if self.stack else bags.copied(here, inverse[group])
            of_product, of_this = self._sum_backward(self._maps(share, self.total.shape), product, kernel)
            del product, share
            of_kernel += of_this
            of_product = self._rows(of_product)
            of_values[group] = bags.mixed(of_product, raised_last[group]).view(of_values[group].shape)
            self._add_up(of_product.mul_(self.values[group].flatten(0, 1)[:, None]), of_raised[group])
            del of_product
        of_total.mul_(inverse).mul_(inverse).neg_()
        through_total, of_bias = self._sum_backward(of_total, self.raised, self.bias)
        of_kernel = of_kernel.unflatten(0, (-1, self.dim)).sum(1)
        of_scale = None if self.scale is None else of_kernel * self.bias
        of_bias = (of_bias + (of_kernel if self.scale is None else of_kernel * self.scale)) * self.bias

        def table(kernels: Tensor) -> Tensor:
            return kernels.view(self.queries, self.heads, *self.bias.shape[2:]).permute(2, 3, 0, 1)

        return Gradients(
            of_raised.add_(through_total).mul_(self.raised).view(scores.shape).to(scores.dtype),
            of_values.to(values.dtype),
            table(of_bias),
            None if of_scale is None else table(of_scale),
        )


class _Bags:
    """Products of each head's D channels with a number, by `embedding_bag`: torch's one fused loop over short rows on a CPU.

    A bag is a few rows of D numbers, added up with a weight each.
    """

    def __init__(self, pixels: int, queries: int, heads: int) -> None:
        self.queries, self.heads = queries, heads
        row = torch.arange(pixels * queries * heads + 1, dtype=torch.int32, device="cpu")
        self.ends, self.ends_mixed = row, row[: pixels * heads + 1] * queries
        by_query = row[:-1].view(pixels, queries, heads)
        self.own = row[:-1]
        self.of_head = row[: pixels * heads].view(pixels, 1, heads).expand(by_query.shape).reshape(-1)
        self.of_queries = by_query.transpose(1, 2).reshape(-1)

    def copied(self, rows: Tensor, weights: Tensor) -> Tensor:
        """[…, heads, D] times […, L·heads]: [pixels·L·heads, D]."""
        return self._sum(rows, weights, self.of_head, self.ends)

    def each(self, rows: Tensor, weights: Tensor) -> Tensor:
        """[…, L, heads, D] times […, L·heads]: [pixels·L·heads, D]."""
        return self._sum(rows, weights, self.own, self.ends)

    def mixed(self, rows: Tensor, weights: Tensor) -> Tensor:
        """[…, L, heads, D] times […, heads, L], added up over L: [pixels·heads, D]."""
        return self._sum(rows, weights, self.of_queries, self.ends_mixed)

    def _sum(self, rows: Tensor, weights: Tensor, index: Tensor, ends: Tensor) -> Tensor:
        count = weights.numel()
        bags = count if ends is self.ends else count // self.queries
        # Detached: for a leaf that requires gradients torch would prepare a backward that is never asked for.
        table = rows.detach().reshape(-1, rows.shape[-1])
        found = torch.embedding_bag(table, index[:count], ends[: bags + 1], False, 0, False, weights.reshape(-1), True)
        return found[0]


_kept_bags = lru_cache(maxsize=8)(_Bags)


def _convolution_backward(
    grad: Tensor, pixels: Tensor, kernel: Tensor, stride: list[int], padding: list[int], wanted: list[bool]
) -> tuple[Tensor, Tensor]:
    """Of a depthwise convolution of pixels [B, H, W, C]; the first gradient is [B, C, H, W]."""
    of_planes, of_kernel, _ = torch.ops.aten.convolution_backward(
        grad.permute(0, 3, 1, 2),
        pixels.permute(0, 3, 1, 2),
        kernel,
        None,
        stride,
        padding,
        [1, 1],
        False,
        [0, 0],
        kernel.shape[0],
        [*wanted, False],
    )
    return of_planes, of_kernel


def _kernel_by_strips(grad: Tensor, pixels: Tensor, kernel: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """The kernel's gradient, a few rows of an image at a time."""
    found = torch.zeros_like(kernel)
    lines = max(1, STRIP // grad.shape[2])
    for image in range(grad.shape[0]):
        for first in range(0, grad.shape[1], lines):
            strip = grad[image : image + 1, first : first + lines]
            top = first * stride[0] - padding[0]
            bottom = top + (strip.shape[1] - 1) * stride[0] + kernel.shape[2]
            seen = pixels[image : image + 1, max(top, 0) : bottom]
            missing = (max(-top, 0), bottom - max(top, 0) - seen.shape[1])
            if any(missing):
                seen = F.pad(seen, (0, 0, 0, 0, *missing))
            found += _convolution_backward(strip, seen, kernel, stride, [0, padding[1]], [False, True])[1]
    return found


def _kernel_by_blocks(grad: Tensor, pixels: Tensor, kernel: Tensor) -> Tensor:
    """The kernel's gradient at stride 1, TAPS × TAPS entries at a time: all of 7×7 at once takes oneDNN three times as long.

    The images stand one below the other, with room around them for every tap, so that a block of taps sees one slice of memory.
    Where a slice wraps into the next row or image, the gradient beside it is zero.
    """
    (batch, height, width, channels), (rows, columns) = pixels.shape, kernel.shape[2:]
    blocks = [-(-taps // TAPS) for taps in (rows, columns)]
    pitch, lines = width + columns - 1 + TAPS, height + rows - 1
    room = pixels.new_zeros(batch * lines + (blocks[0] + 1) * TAPS, pitch, channels)
    top, left = (rows - 1) // 2, (columns - 1) // 2
    images = room[: batch * lines].view(batch, lines, pitch, channels)
    images[:, top : top + height, left : left + width] = pixels
    upstream = grad.new_zeros(batch, lines, pitch - TAPS + 1, channels)
    upstream[:, :height, :width] = grad
    upstream = upstream.view(1, batch * lines, pitch - TAPS + 1, channels)
    part = kernel.new_empty(channels, 1, TAPS, TAPS)
    found = kernel.new_zeros(channels, 1, blocks[0] * TAPS, blocks[1] * TAPS)
    flat, line = room.view(-1), pitch * channels
    for strip in upstream.split(max(1, STRIP_OF_BLOCKS // width), dim=1):
        seen = (1, strip.shape[1] + TAPS - 1, pitch, channels)
        first = strip.storage_offset() // strip.stride(1)
        for y in range(0, rows, TAPS):
            for x in range(0, columns, TAPS):
                start = (first + y) * line + x * channels
                there = flat[start : start + seen[1] * line].view(seen)
                found[:, :, y : y + TAPS, x : x + TAPS] += _convolution_backward(
                    strip, there, part, [1, 1], [0, 0], [False, True]
                )[1]
    return found[:, :, :rows, :columns].contiguous()


def _pixels(planes: Tensor) -> Tensor:
    """[B, C, H, W] → [B, H, W, C], dense; no copy where the convolution kept its input's layout, which is nowhere promised."""
    return planes.permute(0, 2, 3, 1).contiguous()
