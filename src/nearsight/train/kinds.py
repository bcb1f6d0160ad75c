"""The first of each kind of a network's parts and what it is called with: blocks to compile, convolutions to call alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from nearsight.train.compilation import compile_blocks, compiling, repeated_blocks
from nearsight.train.config import ModelConfig, RunConfig
from nearsight.train.process import exactness, make_accelerator
from nearsight.train.tasks import task_class

__all__ = ["Call", "compile_share", "first_of_each_kind", "search_algorithms"]


class Call(NamedTuple):
    """A part of a network, and what it is called with in a training step (fake tensors: sizes and strides without memory)."""

    part: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def first_of_each_kind(
    network: nn.Module, parts: Iterable[nn.Module], images: Callable[[], Tensor], accelerator: Accelerator
) -> list[Call]:
    """The first of each kind of these parts: those that look alike and are called alike are compiled, or searched for, once.

    The network runs on fake tensors, as the compiler itself lets it: in a second, without memory.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    calls: dict[str, Call] = {}

    def note(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(repr((part, tree_map(_facts, (args, kwargs)))), Call(part, args, kwargs))

    hooks = [part.register_forward_pre_hook(note, with_kwargs=True) for part in parts]
    mode = FakeTensorMode()
    named = (*network.named_parameters(), *network.named_buffers())
    weights: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in named}
    try:
        with mode:
            inputs = images()
            with accelerator.autocast():
                torch.func.functional_call(network, weights, (inputs,))
    finally:
        for hook in hooks:
            hook.remove()
    return list(calls.values())


def _facts(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (tuple(value.shape), value.stride(), value.dtype, value.requires_grad)


def compile_share(config: RunConfig, share: int, of: int) -> int:
    """Compile every `of`-th kind of blocks from `share` on, forward and backward, as a training step would; how many."""
    accelerator = make_accelerator(config)
    network, images = _stand_in(config, accelerator)
    with exactness(config.train.deterministic), compiling(config.model):
        torch.backends.cudnn.benchmark = False  # it would search for algorithms that the run searches again
        calls = first_of_each_kind(network, repeated_blocks(network), images, accelerator)[share::of]
        compile_blocks(network, config.model)
        for call in calls:
            if config.model.cuda_graphs:
                torch.compiler.cudagraph_mark_step_begin()
            _step(call, accelerator)
    return len(calls)


def search_algorithms(config: RunConfig, accelerator: Accelerator) -> int:
    """Call the first convolution of each kind, forward and backward, by itself: cuDNN searches for the fastest algorithms of
    a kind at its first calls in a process, whether those come from compiled code or not. How many kinds."""
    network, images = _stand_in(config, accelerator)
    with exactness(config.train.deterministic):
        convolutions = [part for part in network.modules() if isinstance(part, nn.Conv2d)]
        calls = first_of_each_kind(network, convolutions, images, accelerator)
        for call in calls:
            _step(call, accelerator)
    return len(calls)


def _stand_in(config: RunConfig, accelerator: Accelerator) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A run's network with weights of zero, as good as any here, and what makes a batch of images."""
    task = task_class(config.task)
    network = _filled(task.facts(config).model, accelerator.device, config.model).train()
    return network, lambda: task.example(config, accelerator.device)


def _filled(network: nn.Module, device: torch.device, model: ModelConfig) -> nn.Module:
    """A network from the meta device on a real one, all zeros."""
    network = network.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.zero_()
    return network.to(memory_format=torch.channels_last) if model.channels_last else network


def _step(call: Call, accelerator: Accelerator) -> None:
    args, kwargs = tree_map(_real, (call.args, call.kwargs))
    with accelerator.autocast():
        result = call.part(*args, **kwargs)
    outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    torch.autograd.backward(outputs, [torch.zeros_like(t) for t in outputs])


def _real(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).zero_()
    # Inside a network it is what a layer made, no leaf.
    return tensor.requires_grad_().clone() if value.requires_grad else tensor
