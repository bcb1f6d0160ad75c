"""Count what a network computes, on the meta device: no weights, no arithmetic, any size in well under a second.

One pass records the `Work`; a convention is a weighted sum of its parts, because the papers count differently and a number
without its convention says nothing.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from nearsight.errors import ArgumentValueError
from nearsight.layers.attention_stem import AttentionStem2d
from nearsight.layers.relative_attention import RelativeAttention2d
from nearsight.ops import dispatch
from nearsight.ops.block.partition import count_blocks
from nearsight.ops.checks import check_choice, check_pair

__all__ = ["CONVENTIONS", "Convention", "Work", "count_flops", "count_parameters", "measure_work"]

aten = torch.ops.aten


class Work(NamedTuple):
    """What one forward pass does. Products are in multiply-adds, the rest in elements."""

    product: int = 0  # convolutions, matrix products, attention's logits and weighted sums
    position: int = 0  # q·r beside q·k; as q·(k + r) it costs an addition each instead
    mixture: int = (
        0  # the attention stem's values mixed pixel by pixel, as its paper writes them; ours mixes the weights
    )
    pairs: int = 0  # global attention: every query with every key, and with every value
    explicit_map: int = 0  # the explicit maps applied to their values, in the cheapest exact form
    softmax: int = 0
    batch_norm: int = 0
    activation: int = 0
    pooling: int = 0

    def plus(self, **parts: int) -> Work:
        return self._replace(**{name: getattr(self, name) + value for name, value in parts.items()})


class Convention(NamedTuple):
    """A way to add the work up, and the sentence that names it under a table."""

    text: str
    weights: Mapping[str, int]

    def total(self, work: Work) -> int:
        return sum(weight * getattr(work, name) for name, weight in self.weights.items())


CONVENTIONS: dict[str, Convention] = {
    "matmul": Convention(
        "matrix products and convolutions, a multiply and an add as two; positions as a product of their own",
        {"product": 2, "position": 2, "pairs": 2, "explicit_map": 2},
    ),
    "sasa": Convention(
        "a multiply and an add as two, positions as q·(k + r), 5 per softmax logit and per BatchNorm output",
        {"product": 2, "position": 1, "mixture": 2, "pairs": 2, "explicit_map": 2, "softmax": 5, "batch_norm": 5},
    ),
    "mac": Convention(
        "multiply-adds of matrix products and convolutions, each as one",
        {"product": 1, "position": 1, "pairs": 1, "explicit_map": 1},
    ),
    "qna": Convention(
        "multiply-adds as one, and one per softmax logit, whose sum the authors' code takes by a convolution",
        {"product": 1, "position": 1, "pairs": 1, "explicit_map": 1, "softmax": 1},
    ),
    "expatt": Convention(
        "a multiply-add of a layer's weights as one, 2 per BatchNorm output, 1 per activation and per pooled input; without "
        "what attention does between pixels",
        {"product": 1, "batch_norm": 2, "activation": 1, "pooling": 1},
    ),
}


def count_parameters(model: nn.Module) -> int:
    """The number of parameters, shared ones once.

    >>> count_parameters(torch.nn.Conv2d(3, 4, 3))
    112
    """
    return sum(parameter.numel() for parameter in model.parameters())


def count_flops(model: nn.Module, size: int | tuple[int, int] | None = None, convention: str = "matmul") -> int:
    """FLOPs of one image of `size` (default: the network's own) under a named convention.

    >>> count_flops(torch.nn.Conv2d(3, 4, 1), size=(5, 7)), count_flops(torch.nn.Conv2d(3, 4, 1), (5, 7), "mac")
    (840, 420)
    """
    check_choice("count_flops", "convention", convention, tuple(CONVENTIONS))
    return CONVENTIONS[convention].total(measure_work(model, size))


def measure_work(model: nn.Module, size: int | tuple[int, int] | None = None) -> Work:
    """The work of a forward pass over one image, in evaluation mode; the model itself is left as it is."""
    channels, height, width = _input_size(model, size)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    model = copy.deepcopy(model).to("meta").eval()
    tally = _Tally()
    counter = FlopCounterMode(display=False, custom_mapping=dict(_ELEMENTS))
    with torch.no_grad(), tally.watching(model), counter:
        model(torch.empty(1, channels, height, width, dtype=dtype, device="meta"))
    work = tally.work
    for op, count in counter.get_flop_counts().get("Global", {}).items():
        part = _PART_OF.get(op, "product")
        work = work.plus(**{part: count if part != "product" else count // 2})
    return work


def _input_size(model: nn.Module, size: int | tuple[int, int] | None) -> tuple[int, int, int]:
    configured = getattr(model, "pretrained_cfg", {}).get("input_size")
    # in_chans may differ from the configuration's: a layer says so itself, a network by its first convolution.
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    channels = getattr(model, "in_channels", None) or (first.in_channels if first else 3)
    if size is None:
        if configured is None:
            raise ArgumentValueError("measure_work: got a model without a default size, wanted size=(rows, columns).")
        return channels, configured[1], configured[2]
    return channels, *check_pair("measure_work", "size", size)


# ── Elements of the operations FlopCounterMode does not count ──


def _of_input(shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return prod(shape)


def _of_output(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    first = out_shape[0] if isinstance(out_shape[0], tuple | list | torch.Size) else out_shape
    return prod(first)


_PARTS: dict[str, tuple[Callable[..., int], tuple[Any, ...]]] = {
    "softmax": (_of_output, (aten._softmax, aten._safe_softmax)),
    "batch_norm": (
        _of_output,
        (
            aten.native_batch_norm,
            aten._native_batch_norm_legit,
            aten._native_batch_norm_legit_no_training,
            aten._batch_norm_no_update,
            aten.cudnn_batch_norm,
        ),
    ),
    "activation": (_of_output, (aten.relu, aten.relu_, aten.hardtanh, aten.hardtanh_)),
    "pooling": (_of_input, (aten.max_pool2d_with_indices, aten.avg_pool2d, aten._adaptive_avg_pool2d)),
}
_ELEMENTS = {op: formula for formula, ops in _PARTS.values() for op in ops}
_PART_OF = {op: part for part, (_, ops) in _PARTS.items() for op in ops}


# ── Work of nearsight's own ops and layers by their equations, whatever code would run them ──


def _local_attention(call: Any) -> tuple[dict[str, int], Tensor]:
    pairs = prod(call.q.shape[:4]) * prod(call.window)  # (query, tap, head)
    products = pairs * call.q.shape[-1]
    tables = [table for table in (call.rel_row, call.rel_col) if table is not None]
    position = products * len(tables) // 2
    work = {"product": 2 * products, "position": position, "softmax": pairs}
    if call.k is None:
        work = {"product": products + position, "softmax": pairs}
    return work, torch.empty_like(call.q)


def _block_attention(call: Any) -> tuple[dict[str, int], Tensor]:
    batch, height, width, inputs = call.x.shape
    channels, taps = call.w_q.shape[0], call.block**2
    tables = sum(table is not None for table in (call.rel_row, call.rel_col))
    pixels = batch * count_blocks(height, call.block) * count_blocks(width, call.block) * taps
    work = {
        "product": pixels * channels * (3 * inputs + 2 * taps),
        "position": pixels * taps * channels * tables // 2,
        "softmax": pixels * taps * call.heads,
    }
    return work, call.x.new_empty(batch, height, width, channels)


def _qna(call: Any) -> tuple[dict[str, int], Tensor]:
    batch, height, width, queries, heads = call.scores.shape
    dim = call.values.shape[-1]
    size = (batch, -(-height // call.stride[0]), -(-width // call.stride[1]))
    pairs = prod(size) * prod(call.window) * queries * heads
    between = (queries,) if call.combine == "stack" else ()
    return {"product": pairs * dim, "softmax": pairs}, call.values.new_empty(*size, *between, heads, dim)


def _explicit_attention(call: Any) -> tuple[dict[str, int], Tensor]:
    batch, height, width, channels = call.values.shape
    pixels = height * width
    if call.kind == "constant":
        per_channel = pixels
    elif call.kind in ("gaussian", "exp_manhattan"):
        per_channel = pixels * (height + width)
    else:
        per_channel = pixels * pixels
    return {"explicit_map": batch * channels * per_channel}, torch.empty_like(call.values)


_OPS: dict[str, Callable[[Any], tuple[dict[str, int], Tensor]]] = {
    "local_attention": _local_attention,
    "block_attention": _block_attention,
    "qna": _qna,
    "explicit_attention": _explicit_attention,
}


def _attention_stem(stem: AttentionStem2d, x: Tensor) -> tuple[dict[str, int], Tensor]:
    side, channels = stem.kernel_size, stem.out_channels
    batch, _, height, width = x.shape
    taps = side**2
    pixels = batch * count_blocks(height, side) * count_blocks(width, side) * taps
    projections = (2 + (taps if stem.values == "conv" else 1)) * stem.in_channels * channels
    work = {
        "product": pixels * (projections + 2 * taps * channels),
        "position": pixels * taps * channels,
        "softmax": pixels * taps * stem.num_heads,
    }
    if stem.values == "mixture":
        work["mixture"] = pixels * channels * ((stem.mixtures - 1) * stem.in_channels + stem.mixtures)
    return work, x.new_empty(batch, channels, height, width)


def _relative_attention(layer: RelativeAttention2d, x: Tensor) -> tuple[dict[str, int], Tensor]:
    batch, channels, height, width = x.shape
    pixels, keys, values = height * width, layer.key_channels, layer.out_channels
    size = (-(-height // layer.stride), -(-width // layer.stride))
    work = {
        "product": pixels * channels * (2 * keys + values) + prod(size) * values**2,
        "pairs": pixels**2 * (keys + values),
        "position": pixels * (height + width) * keys,
        "softmax": pixels**2 * layer.num_heads,
        "pooling": pixels * values if layer.stride == 2 else 0,
    }
    return {name: batch * count for name, count in work.items()}, x.new_empty(batch, values, *size)


# Layers whose code takes another way than their equation: folded weights, positions inside one wider product.
_LAYERS: dict[type[nn.Module], Callable[[Any, Tensor], tuple[dict[str, int], Tensor]]] = {
    AttentionStem2d: _attention_stem,
    RelativeAttention2d: _relative_attention,
}


class _Tally:
    """Adds up the work of nearsight's ops and of `_LAYERS` on meta tensors while `watching`."""

    _lock = threading.Lock()

    def __init__(self) -> None:
        self.work = Work()

    def add(self, parts: dict[str, int], result: Tensor) -> Tensor:
        self.work = self.work.plus(**parts)
        return result

    def layer(self, layer: nn.Module, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return self.add(*_LAYERS[type(layer)](layer, x))

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Answer calls on meta tensors with an empty result of the right shape; calls on real tensors run as ever."""
        with self._lock:
            original = dispatch.run

            def run(op: str, table: Any, name: str | None, call: Any) -> Tensor:
                if not any(isinstance(part, Tensor) and part.is_meta for part in call):
                    return original(op, table, name, call)
                return self.add(*_OPS[op](call))

            layers = [module for module in model.modules() if type(module) in _LAYERS]
            dispatch.run = run
            for layer in layers:
                layer.forward = partial(self.layer, layer)
            try:
                yield
            finally:
                dispatch.run = original
                for layer in layers:
                    del layer.forward
