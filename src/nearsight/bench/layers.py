"""The layers suite: each layer beside the convolution it replaces, projections included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nearsight import (
    AttentionAugmentedConv2d,
    AttentionStem2d,
    ExplicitAugmentedConv2d,
    LocalAttention2d,
    QnA2d,
)
from nearsight.bench.accuracy import find_fault
from nearsight.bench.contest import Contender, Contest, Runner, random_source
from nearsight.bench.ops import LOCAL, LOCAL_CPU, QNA, QNA_CPU, OpShape
from nearsight.bench.peers.convolution import LAYOUTS
from nearsight.layers.common import to_nchw
from nearsight.layers.relative_attention import RelativeAttention2d

__all__ = ["layer_contest", "layer_contests"]

# A layer by the name of its backend; None is what a user gets.
MakeLayer = Callable[[OpShape, str | None], nn.Module]
MakePeer = Callable[[OpShape], nn.Module]


def _conv(shape: OpShape) -> nn.Module:
    return nn.Conv2d(shape.channels, shape.channels, 3, padding=1, bias=False)


def _separable(shape: OpShape) -> nn.Module:
    channels, window = shape.channels, shape.window
    depthwise = nn.Conv2d(channels, channels, window, padding=window // 2, groups=channels, bias=False)
    return nn.Sequential(depthwise, nn.Conv2d(channels, channels, 1, bias=False))


def _local(shape: OpShape, backend: str | None) -> nn.Module:
    return LocalAttention2d(shape.channels, shape.channels, shape.window, num_heads=shape.heads, backend=backend)


def _qna(shape: OpShape, backend: str | None) -> nn.Module:
    return QnA2d(shape.channels, shape.channels, shape.window, num_heads=shape.heads, tap_scale="ones", backend=backend)


def _explicit_augmented(shape: OpShape, backend: str | None) -> nn.Module:
    return ExplicitAugmentedConv2d(shape.channels, shape.channels, 3, bias=False, backend=backend)


def _attention_augmented(shape: OpShape, backend: str | None) -> nn.Module:
    size = (shape.height, shape.width)
    layer = AttentionAugmentedConv2d(shape.channels, shape.channels, 3, feature_size=size, bias=False)
    if backend == "reference":
        layer.attention.forward = partial(_by_weights, layer.attention)  # type: ignore[method-assign]
    return layer


def _by_weights(attention: RelativeAttention2d, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """AA-Net's attention as it reads: the n×n weights, applied to the values."""
    _, _, v = attention.project(x)
    y = torch.einsum("byxnij,bijnd->byxnd", attention.attention_weights(x), v)
    return to_nchw(attention.proj(y.flatten(3)))


def _stem(shape: OpShape, backend: str | None) -> nn.Module:
    return nn.Sequential(AttentionStem2d(3, shape.channels, backend=backend), nn.MaxPool2d(4, 4, ceil_mode=True))


def _first(module: nn.Module) -> nn.Module:
    return next(iter(module.children()))


def _conv_stem(shape: OpShape) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, shape.channels, 7, stride=2, padding=3, bias=False), nn.MaxPool2d(3, 2, padding=1)
    )


AUGMENTED = (OpShape(28, 28, 128), OpShape(14, 14, 256), OpShape(7, 7, 512))
AUGMENTED_CPU = (OpShape(14, 14, 256),)
STEM = (OpShape(224, 224, 64),)
STEM_CPU = (OpShape(64, 64, 64),)


class Entry(NamedTuple):
    """A layer, its peers, and the maps both are timed on; `in_channels` where they differ from the map's channels.

    `checked` is the part that is held against the reference: a max-pool would turn rounding into another choice of pixel.
    """

    subject: str
    make: MakeLayer
    peers: dict[str, MakePeer]
    on_cuda: Sequence[OpShape]
    on_cpu: Sequence[OpShape]
    in_channels: int | None = None
    checked: Callable[[nn.Module], nn.Module] = lambda module: module


LAYERS = (
    Entry("LocalAttention2d", _local, {"conv 3x3": _conv}, LOCAL, LOCAL_CPU),
    Entry("QnA2d", _qna, {"separable conv": _separable, "conv 3x3": _conv}, QNA, QNA_CPU),
    Entry("ExplicitAugmentedConv2d", _explicit_augmented, {"conv 3x3": _conv}, AUGMENTED, AUGMENTED_CPU),
    Entry("AttentionAugmentedConv2d", _attention_augmented, {"conv 3x3": _conv}, AUGMENTED, AUGMENTED_CPU),
    Entry("AttentionStem2d", _stem, {"conv 7x7 + pool": _conv_stem}, STEM, STEM_CPU, 3, _first),
)


def layer_contests(
    device: torch.device, dtype: torch.dtype, batch: int, *, quick: bool = False
) -> list[Callable[[], Contest]]:
    """The suite's contests, each built when it is called."""

    def later(entry: Entry, shape: OpShape) -> Callable[[], Contest]:
        return lambda: layer_contest(entry, shape, batch, device, dtype)

    found = []
    for entry in LAYERS:
        shapes = entry.on_cuda if device.type == "cuda" else entry.on_cpu
        found += [later(entry, shape) for shape in (shapes[:1] if quick else shapes)]
    return found


def layer_contest(entry: Entry, shape: OpShape, batch: int, device: torch.device, dtype: torch.dtype) -> Contest:
    """A layer against its peers on one map, channels-last; half types through autocast with float32 parameters."""
    torch.manual_seed(0)
    layer = entry.make(shape, None).to(device)
    channels = entry.in_channels or shape.channels
    x = random_source(device)(batch, channels, shape.height, shape.width, dtype=dtype)
    x = x.to(memory_format=torch.channels_last)

    def autocast() -> AbstractContextManager[object]:
        half = dtype in (torch.float16, torch.bfloat16)
        return torch.autocast(device.type, dtype) if half else nullcontext()

    def runner(module: nn.Module, image: Tensor, name: str = "") -> Runner:
        leaf = image.detach().requires_grad_()

        def forward() -> Tensor:
            with autocast():
                return module(leaf)

        return Runner(forward, [leaf, *module.parameters()], name)

    def as_function(module: nn.Module) -> Callable[..., Tensor]:
        def run(x: Tensor, **parameters: Tensor) -> Tensor:
            with autocast():
                return functional_call(module, parameters, (x,))

        return run

    def fault() -> str | None:
        tested, truth = entry.checked(layer), entry.checked(entry.make(shape, "reference").to(device))
        parameters = {name: p.detach() for name, p in tested.named_parameters()}
        samples = (0, batch - 1) if batch > 2 else None
        return find_fault(
            as_function(tested),
            as_function(truth),
            {"x": x, **parameters},
            samples=samples,
            shared=tuple(parameters),
        )

    def peer(build: MakePeer) -> Callable[[], Sequence[Runner]]:
        def forms() -> Sequence[Runner]:
            return [
                runner(build(shape).to(device).to(memory_format=layout), x.contiguous(memory_format=layout), name)
                for name, layout in LAYOUTS.items()
            ]

        return forms

    contenders = [
        Contender(f"nearsight {entry.subject}", lambda: [runner(layer, x)], fault, ours=True),
        *[Contender(name, peer(build)) for name, build in entry.peers.items()],
    ]
    sizes = {"batch": batch, **{name: n for name, n in shape._asdict().items() if n}}
    return Contest(entry.subject, shape.text, str(dtype).removeprefix("torch."), sizes, contenders)
