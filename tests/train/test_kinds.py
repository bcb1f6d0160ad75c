"""The first of each kind of a network's parts, and that they are called as in a training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from nearsight.train import kinds as parts
from nearsight.train.compilation import repeated_blocks
from nearsight.train.engine import Trainer
from nearsight.train.process import make_accelerator
from nearsight.train.tasks import task_class
from tests.train.test_ahead import NETWORK, config_of


@pytest.mark.parametrize(("precision", "channels_last"), [("fp32", False), ("bf16", True)])
@pytest.mark.parametrize("augment", [{}, {"cutout": 0, "erase": 0.0}], ids=["holes", "whole"])
@pytest.mark.parametrize(
    ("name", "kinds", "blocks", "channels", "options"),
    [
        ("aa_resnet50_cifar", 8, 16, 3, {"stages": "caaa"}),
        ("sasa_resnet_nano", 4, 4, 1, {}),
        ("test_resnet", 4, 4, 1, {}),
        ("test_vit2", 2, 2, 1, NETWORK["options"]),
    ],
)
def test_the_calls_are_those_of_a_step(
    name: str,
    kinds: int,
    blocks: int,
    channels: int,
    options: dict[str, Any],
    augment: dict[str, Any],
    precision: str,
    channels_last: bool,
    tmp_path: Path,
) -> None:
    """Fake tensors meet each block with the sizes, strides and dtypes of a batch of the run's own."""
    drop_path = 0.1 if name == "test_vit2" else 0.0
    model = {"name": name, "options": options, "channels_last": channels_last, "drop_path": drop_path}
    config = config_of({"precision": precision}, {"channels": channels, "augment": augment}, **model)
    accelerator = make_accelerator(config)
    task = task_class("classify")
    network = parts._filled(task.facts(config).model, accelerator.device, config.model).train()
    calls = parts.first_of_each_kind(
        network, repeated_blocks(network), lambda: task.example(config, accelerator.device), accelerator
    )
    assert len(calls) == kinds
    assert len(repeated_blocks(network)) == blocks
    real = parts._filled(task.facts(config).model, accelerator.device, config.model).train()
    plain = config.model_copy(update={"model": config.model.model_copy(update={"compile": False})})
    run = Trainer(plain, tmp_path, quiet=True)
    seen: dict[int, Any] = {}
    for number, block in enumerate(repeated_blocks(real)):
        block.register_forward_pre_hook(lambda _, args, number=number: seen.__setitem__(number, list(map(facts, args))))
    with accelerator.autocast():
        real(next(run.task.train.epoch(0)).images)
    for call in calls:
        number = repeated_blocks(network).index(call.part)
        assert list(map(facts, call.args)) == seen[number]
        half = precision == "bf16" and name != "test_vit2"
        assert call.args[0].dtype == (torch.bfloat16 if half else torch.float32)
    assert layout(network) == layout(run.bare)
    assert all(not block._forward_pre_hooks for block in repeated_blocks(network)), "they would be compiled too"


def facts(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # A step along an axis of one element leads nowhere, and a layer that is not compiled may choose any.
    strides = [step for step, size in zip(value.stride(), value.shape, strict=True) if size > 1]
    return (tuple(value.shape), strides, value.dtype, value.requires_grad, value.is_leaf)


def layout(network: nn.Module) -> dict[str, Any]:
    """What a compilation sees of the weights."""
    return {
        name: (t.shape, t.stride(), t.dtype, t.requires_grad) for name, t in network.state_dict(keep_vars=True).items()
    }


def test_every_kind_is_in_one_share(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(parts, "_step", lambda call, accelerator: done.append(repr(call.part)))
    config = config_of(name="test_resnet", options={}, drop_path=0.0)
    assert [parts.compile_share(config, share, 3) for share in range(3)] == [2, 1, 1]
    assert len(set(done)) == len(done) == 4


def test_inputs_are_made_again_as_inside_a_network() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(2, 3, 5, 7, dtype=torch.bfloat16, requires_grad=True).permute(0, 2, 3, 1)
    real = parts._real(fake)
    assert facts(real) == facts(fake)
    assert not real.is_leaf
    assert parts._real(None) is None


def test_cudnns_search_meets_every_kind_of_convolution_once(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[Any, ...]] = []
    plain = torch.nn.functional.conv2d

    def noted(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
        result = plain(x, weight, *others)
        if not isinstance(x, FakeTensor):
            assert x.is_contiguous(memory_format=torch.channels_last) or 1 in x.shape[1:]
            called.append((*x.shape, *weight.shape, *others[1:], x.requires_grad))
            result.register_hook(lambda g: called.append(("backward", *g.shape)))
        return result

    monkeypatch.setattr(torch.nn.functional, "conv2d", noted)
    config = config_of({}, {"batch_size": 2}, name="sasa_resnet_nano", options={}, drop_path=0.0, channels_last=True)
    network = task_class("classify").facts(config).model
    count = parts.search_algorithms(config, make_accelerator(config))
    forward = [call for call in called if call[0] != "backward"]
    assert len(forward) == len(set(forward)) == count == len(called) - count
    weights = {tuple(part.weight.shape) for part in network.modules() if isinstance(part, nn.Conv2d)}
    assert {call[4:8] for call in forward} == weights
    assert [call[-1] for call in forward].count(False) == 1, "images have no gradient"
