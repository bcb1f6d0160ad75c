"""Put attention in place of a model's spatial convolutions."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from timm.layers.conv2d_same import Conv2dSame
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from nearsight.errors import ArgumentTypeError, ArgumentValueError, NearsightError
from nearsight.layers.augmented import AttentionAugmentedConv2d, ExplicitAugmentedConv2d
from nearsight.layers.common import short_pair
from nearsight.layers.explicit import ExplicitAttention2d
from nearsight.layers.local_attention import LocalAttention2d
from nearsight.layers.qna import QnA2d
from nearsight.layers.window_attention import WindowAttention2d
from nearsight.ops.checks import check_choice

__all__ = ["Replacement", "replace_conv"]

OP = "replace_conv"
LAYERS: dict[str, type[nn.Module]] = {
    "local": LocalAttention2d,
    "qna": QnA2d,
    "window": WindowAttention2d,
    "explicit": ExplicitAttention2d,
    "explicit_augmented": ExplicitAugmentedConv2d,
    "attention_augmented": AttentionAugmentedConv2d,
}


class Replacement(NamedTuple):
    """One swap: the convolution's name in the model (the first, where it has several), what it was, what it is now."""

    name: str
    old: nn.Conv2d
    new: nn.Module


def replace_conv(
    model: nn.Module,
    layer: str | Callable[..., nn.Module] = "local",
    *,
    where: str | Callable[[str, nn.Conv2d], bool] | None = None,
    **options: Any,
) -> list[Replacement]:
    """Swap the spatial convolutions of a model, in place, for attention of the same channels, stride and output size.

    A spatial convolution has a kernel larger than 1×1. Either all that `where` picks are swapped or, with an error that
    names the one that cannot be, none.

    Args:
        model: any model; its convolutions are found by walking its modules.
        layer: "local", "qna", "window", "explicit", "explicit_augmented" or "attention_augmented"; or a layer class (also
            a `functools.partial` of one), which gets those of the convolution's arguments that it has; or any other
            callable, which gets the convolution and returns its replacement.
        where: picks the convolutions: a regular expression searched in their names, or a function of name and
            convolution. None picks all.
        options: further arguments of the layer; they also overrule the convolution's own, as `kernel_size=7` does.

    Returns:
        What was replaced, in the model's order. The new layers start untrained, on the device and in the dtype of the old.

    >>> import torch, torchvision
    >>> from nearsight import replace_conv
    >>> model = torchvision.models.resnet18(num_classes=10)
    >>> done = replace_conv(model, "local", where=r"layer[34]\\.", kernel_size=7, num_heads=4)
    >>> len(done), done[0].name, model(torch.randn(2, 3, 64, 64)).shape
    (8, 'layer3.0.conv1', torch.Size([2, 10]))
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"{OP}: got model of type {type(model).__name__}, wanted a torch.nn.Module.")
    if isinstance(model, nn.Conv2d):
        raise ArgumentTypeError(f"{OP}: got a bare convolution, wanted a model around it; build the layer directly.")
    make = _maker(layer, options)
    picked = _picked(model, where)
    replacements = [Replacement(names[0], conv, _build(make, names[0], conv)) for names, conv in picked]
    for (names, _), replacement in zip(picked, replacements, strict=True):
        for name in names:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, replacement.new)
    return replacements


def _picked(model: nn.Module, where: Any) -> list[tuple[list[str], nn.Conv2d]]:
    """The convolutions to swap, each with all the names it goes by."""
    if where is not None and not callable(where) and not isinstance(where, str):
        raise ArgumentTypeError(
            f"{OP}: got where of type {type(where).__name__}, wanted a regular expression, a function of name and "
            f"convolution, or None."
        )
    if isinstance(where, str):
        try:
            re.compile(where)
        except re.error as error:
            raise ArgumentValueError(f"{OP}: got where={where!r}, wanted a regular expression ({error}).") from error
    names: dict[nn.Conv2d, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1:
            names.setdefault(module, []).append(name)
    picked = []
    for conv, aliases in names.items():
        if where is None or any(re.search(where, n) if isinstance(where, str) else where(n, conv) for n in aliases):
            picked.append((aliases, conv))
    if not picked:
        raise ArgumentValueError(
            f"{OP}: got a model with {len(names)} spatial convolutions of which where={where!r} picks none, wanted at least "
            f"one; model.named_modules() lists the names."
        )
    return picked


def _maker(layer: Any, options: dict[str, Any]) -> Callable[[nn.Conv2d], nn.Module]:
    """The function from a convolution to its replacement."""
    if isinstance(layer, str):
        check_choice(OP, "layer", layer, tuple(LAYERS))
        layer = LAYERS[layer]
    target = layer.func if isinstance(layer, functools.partial) else layer
    if isinstance(target, type) and issubclass(target, nn.Module):
        return functools.partial(_from_arguments, layer, target.__name__, options)
    if not callable(layer):
        raise ArgumentTypeError(
            f"{OP}: got layer of type {type(layer).__name__}, wanted a name, a layer class, or a function of the convolution."
        )
    return functools.partial(layer, **options)


def _build(make: Callable[[nn.Conv2d], nn.Module], name: str, conv: nn.Conv2d) -> nn.Module:
    """The replacement of one convolution; a refusal gains the convolution's name."""
    if isinstance(conv, LazyModuleMixin):
        raise ArgumentValueError(
            f"{OP}: got the lazy convolution '{name}', wanted known channels; run the model once before replacing."
        )
    try:
        new = make(conv)
    except NearsightError as error:
        raise ArgumentValueError(
            f"{OP}: cannot replace '{name}', {conv}: {str(error).rstrip('.')}; change that or leave it out with where=."
        ) from error
    if not isinstance(new, nn.Module):
        raise ArgumentTypeError(
            f"{OP}: got {type(new).__name__} as the replacement of '{name}', wanted a torch.nn.Module."
        )
    return new.train(conv.training)


def _from_arguments(layer: Callable[..., nn.Module], kind: str, options: dict[str, Any], conv: nn.Conv2d) -> nn.Module:
    """Build a layer with those of the convolution's arguments that it has; refuse when one it lacks matters."""
    known = inspect.signature(layer).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    has_bias = conv.bias is not None
    arguments: dict[str, Any] = {
        "in_channels": conv.in_channels,
        "out_channels": conv.out_channels,
        "kernel_size": short_pair(conv.kernel_size),
        "stride": short_pair(conv.stride),
        "dilation": short_pair(conv.dilation),
        "groups": conv.groups,
        "bias": has_bias,
        "qkv_bias": has_bias,
        "device": conv.weight.device,
        "dtype": conv.weight.dtype,
    }
    given = {**arguments, **_preset(layer), **options}
    has = {name for name in given if takes_all or name in known}
    # Where there is no window there is nothing to dilate.
    matters = ["stride", "groups", "dilation"] if "kernel_size" in has else ["stride", "groups"]
    for name in matters:
        if name not in has and arguments[name] != 1:
            raise ArgumentValueError(f"{kind}: got {name}={arguments[name]!r}, wanted 1: the layer has no {name}.")
    unknown = sorted(set(options) - has)
    if unknown:
        raise ArgumentTypeError(f"{kind}: got the unknown argument {unknown[0]!r}, wanted one of {', '.join(known)}.")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD and name not in has:
            raise ArgumentTypeError(f"{kind}: got no {name}, wanted it as an option, {name}=….")
    _check_padding(kind, conv)
    return layer(**{name: given[name] for name in given if name in has})


def _preset(layer: Any) -> dict[str, Any]:
    return layer.keywords if isinstance(layer, functools.partial) else {}


def _check_padding(kind: str, conv: nn.Conv2d) -> None:
    """Attention keeps the map, so the convolution must: ⌈size/stride⌉ on both axes for every size."""
    if conv.padding_mode != "zeros":
        raise ArgumentValueError(
            f"{kind}: got padding_mode={conv.padding_mode!r}, wanted 'zeros': attention pads nothing."
        )
    # timm's convolutions with TensorFlow's padding make it when they run, and hold 0.
    if conv.padding == "same" or isinstance(conv, Conv2dSame) or getattr(conv, "same_pad", False):
        return
    padding = (0, 0) if isinstance(conv.padding, str) else conv.padding
    for pad, size, dilation in zip(padding, conv.kernel_size, conv.dilation, strict=True):
        if 2 * pad != dilation * (size - 1):
            raise ArgumentValueError(
                f"{kind}: got padding={conv.padding!r} with kernel_size={conv.kernel_size} and dilation={conv.dilation}, "
                f"wanted the padding that keeps the map: attention puts out ⌈size/stride⌉."
            )
