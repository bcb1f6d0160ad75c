"""What a resumed run needs besides the weights, as tensors and plain values: optimiser, random generators, loss scale."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from nearsight.errors import UserError

__all__ = ["load_model", "load_optimizer", "load_random", "model_state", "optimizer_state", "random_state"]

SEPARATOR = "|"
# Settings of an optimiser's group that come from the config; what else a group has may be gathered on the way.
SETTINGS = ("weight_decay", "momentum", "betas", "eps", "lr_scale")
# How it works on a device, not what it learns; where its counts of steps lie follows from that.
FORMS = ("capturable", "foreach", "fused")
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """The whole state dict under the names of the bare model, however it is wrapped or sharded. All processes call it."""
    state = get_model_state_dict(model, options=FULL)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def load_model(model: nn.Module, tensors: dict[str, Tensor], source: str) -> None:
    """Load a state dict into a model, wrapped or not, or say which tensors do not fit."""
    own = {name: tuple(tensor.shape) for name, tensor in model_names(model).items()}
    got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if own != got:
        odd = sorted(name for name in own.keys() | got.keys() if own.get(name) != got.get(name))
        first = odd[0]
        raise UserError(
            f"{source} does not fit the model: {len(odd)} tensors differ, first {first}: got {got.get(first, 'none')}, "
            f"wanted {own.get(first, 'none')}."
        )
    # In the model's order: a sharded one scatters tensor by tensor, and a file's order differs between processes.
    ordered: Any = {name: tensors[name] for name in own}
    set_model_state_dict(model, ordered, options=StateDictOptions(full_state_dict=True))


def model_names(model: nn.Module) -> dict[str, Tensor]:
    """The state dict's tensors by the bare model's names, without gathering shards."""
    state = get_model_state_dict(model, options=StateDictOptions())
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors named parameter|slot, plain values): moments and counts in one, groups and plain slots in the other.

    All processes call it; only the first gets something.
    """
    with _without_dtypes(optimizer):
        whole: Any = get_optimizer_state_dict(model, optimizer, options=FULL)
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for parameter, slots in whole.get("state", {}).items():
        for slot, value in slots.items():
            key = f"{parameter}{SEPARATOR}{slot}"
            if isinstance(value, Tensor):
                tensors[key] = value
            else:
                plain[key] = value
    groups = [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in whole.get("param_groups", [])
    ]
    return tensors, {"plain": plain, "groups": groups}


@contextmanager
def _without_dtypes(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Settings that are dtypes set aside: torch's gathering refuses them."""
    before = [dict(group) for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            for key in [key for key, value in group.items() if isinstance(value, torch.dtype)]:
                del group[key]
        yield
    finally:
        for group, whole in zip(optimizer.param_groups, before, strict=True):
            group.update(whole)


def load_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    values: dict[str, Any],
    options: Iterable[str] = (),
) -> None:
    """The inverse of `optimizer_state`; what the config sets (and the `options` it names) stays as it is in the optimiser."""
    kept = {*SETTINGS, *options}
    own = [
        {key: value for key, value in group.items() if key in kept or isinstance(value, torch.dtype)}
        for group in optimizer.param_groups
    ]
    state: dict[str, dict[str, Any]] = {}
    for key, value in sorted([*tensors.items(), *values["plain"].items()], key=lambda item: item[0]):
        parameter, _, slot = key.rpartition(SEPARATOR)
        state.setdefault(parameter, {})[slot] = value
    forms = {key: value for key, value in optimizer.defaults.items() if key in FORMS}
    # By their parameters: other factors than before make other groups.
    before = {name: group for group in values["groups"] for name in group["params"]}
    named: Any = get_optimizer_state_dict(model, optimizer, options=StateDictOptions())
    groups = [
        {**{k: forms.get(k, v) for k, v in before[names[0]].items() if k not in kept}, "params": names}
        for names in (group["params"] for group in named["param_groups"])
    ]
    whole: Any = {"state": state, "param_groups": groups}
    set_optimizer_state_dict(model, optimizer, whole, options=StateDictOptions(full_state_dict=True))
    for group, mine in zip(optimizer.param_groups, own, strict=True):
        group.update(mine)
    for parameter_, slots in optimizer.state.items():
        for slot, value in slots.items():
            same = isinstance(value, Tensor) and value.shape == parameter_.shape
            # Moments in their parameter's memory format: a fused step needs equal strides.
            if same and value.stride() != parameter_.stride():
                slots[slot] = torch.empty_like(parameter_, dtype=value.dtype).copy_(value)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Python's, NumPy's and torch's generators as integer tensors."""
    version, words, gauss = random.getstate()
    numpy: Any = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor(numpy[1].astype(np.int64)),
        "numpy_place": torch.tensor([numpy[2], numpy[3]], dtype=torch.int64),
        "numpy_gauss": torch.tensor([numpy[4]], dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def load_random(state: dict[str, Tensor], device: torch.device) -> None:
    """The inverse of `random_state`."""
    torch.set_rng_state(state["torch"])
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    place, has_gauss = state["numpy_place"].tolist()
    numbers = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", numbers, place, has_gauss, state["numpy_gauss"].item()))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
