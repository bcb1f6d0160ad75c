"""torch.compile for a run: the network as a whole, or its repeated blocks, each kind compiled once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import TorchDynamoPlugin
from torch import nn

from nearsight.errors import UserError, nearest
from nearsight.train.config import ModelConfig

__all__ = ["compile_blocks", "compiling", "dynamo_plugin", "repeated_blocks", "tell_unknown_options", "uncompiled"]

# Blocks that differ in sizes are graphs of one function, of which torch keeps 8 by itself.
MOST_KINDS = 64


def dynamo_plugin(model: ModelConfig) -> TorchDynamoPlugin:
    """What Accelerate compiles: the whole network, or nothing, where that is left to `compile_blocks`."""
    if model.compile is not True:
        return TorchDynamoPlugin(backend="no")
    plugin = TorchDynamoPlugin(backend="inductor", options=_options(model))
    plugin.mode = None  # torch takes a mode or options, and Accelerate always fills in a mode
    return plugin


def compile_blocks(network: nn.Module, model: ModelConfig) -> None:
    """In place, under the names they have. Those of one kind share a compilation, so all take a part of the network's time."""
    blocks = repeated_blocks(network)
    if not blocks:
        raise UserError(f"model.compile: got blocks, but {model.name} has no lists of them; wanted true or false.")
    for block in blocks:
        block.compile(options=_options(model), dynamic=False)


def repeated_blocks(network: nn.Module) -> list[nn.Module]:
    """The members of the network's innermost lists of modules of one kind that have parts of their own."""
    found = []
    for child in network.children():
        inner = repeated_blocks(child)
        if not inner and isinstance(child, nn.Sequential | nn.ModuleList) and _one_kind(child):
            inner = list(child)
        found += inner
    return found


def _one_kind(modules: nn.Sequential | nn.ModuleList) -> bool:
    kinds = {type(module) for module in modules}
    return len(kinds) == 1 and all(any(True for _ in module.children()) for module in modules)


def _options(model: ModelConfig) -> dict[str, Any]:
    """As `torch.compile` takes them; what this torch does not have is left out (`tell_unknown_options`)."""
    known = torch._inductor.list_options()
    given = {name: value for name, value in model.compile_options.items() if name in known}
    return {"triton.cudagraphs": model.cuda_graphs, **given}


def tell_unknown_options(model: ModelConfig, tell: Callable[[str], None]) -> None:
    """A sentence for each option of the compiler that this torch does not have."""
    if not model.compile or not model.compile_options:
        return
    known = torch._inductor.list_options()
    for name in model.compile_options:
        if name not in known:
            near = nearest(name, known)
            hint = f"; did you mean {near!r}?" if near else ""
            tell(f"model.compile_options: torch {torch.__version__} has no {name!r}, which is left out{hint}")


# Without a compilation neither these nor the above import the compiler, which takes seconds.


def compiling(model: ModelConfig) -> AbstractContextManager[Any]:
    """As many kinds of blocks as there are: from the ninth on torch would leave them uncompiled."""
    return torch._dynamo.config.patch(recompile_limit=MOST_KINDS) if model.compile == "blocks" else nullcontext()


def uncompiled(model: ModelConfig) -> AbstractContextManager[Any]:
    """Compiled modules run as they are written: a graph for another mode and batch costs more than an evaluation."""
    return torch.compiler.set_stance("force_eager") if model.compile else nullcontext()
