"""Which parts of a network are compiled, with which options."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from nearsight.errors import UserError
from nearsight.train.compilation import compile_blocks, dynamo_plugin, repeated_blocks, tell_unknown_options
from nearsight.train.config import ModelConfig


@pytest.mark.parametrize(
    ("name", "kinds", "count"),
    [
        ("aa_resnet50_cifar", {"AugmentedBottleneck"}, 16),
        ("sasa_resnet26_convstem", {"SasaBottleneck"}, 8),
        ("qna_vit_nano", {"QnABlock"}, 5),
        ("resnet18", {"BasicBlock"}, 8),
        ("swin_tiny_patch4_window7_224", {"SwinTransformerBlock"}, 12),
        ("mobilenetv2_100", {"InvertedResidual", "DepthwiseSeparableConv"}, 17),
    ],
)
def test_the_blocks_of_a_network(name: str, kinds: set[str], count: int) -> None:
    blocks = repeated_blocks(timm.create_model(name))
    assert {type(block).__name__ for block in blocks} == kinds
    assert len(blocks) == count
    assert len(set(map(id, blocks))) == count


def test_lists_of_single_layers_are_no_blocks() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert repeated_blocks(plain) == []
    with pytest.raises(
        UserError, match=r"model\.compile: got blocks, but mine has no lists of them; wanted true or false"
    ):
        compile_blocks(plain, ModelConfig(name="mine", compile="blocks"))


def test_blocks_are_compiled_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself, for the sizes it meets, with the options given; names and weights stay."""
    given = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: given.append((self, options)))
    network = timm.create_model("resnet18")
    compile_blocks(network, ModelConfig(name="resnet18", compile="blocks", cuda_graphs=True))
    assert [module for module, _ in given] == repeated_blocks(network)
    assert all(options == {"options": {"triton.cudagraphs": True}, "dynamic": False} for _, options in given)


def test_what_accelerate_is_told() -> None:
    options = {"loop_ordering_after_fusion": False, "no_such_option": 1}
    whole = dynamo_plugin(ModelConfig(name="resnet18", compile=True, compile_options=options)).to_kwargs()
    assert whole.pop("backend") == "inductor"
    assert whole.pop("mode") is None
    assert whole == {"options": {"triton.cudagraphs": False, "loop_ordering_after_fusion": False}}
    torch.compile(nn.Linear(1, 1), backend="inductor", **whole)  # takes a mode or options
    for other in (False, "blocks"):
        assert dynamo_plugin(ModelConfig(name="resnet18", compile=other)).backend.value == "NO"


def test_options_that_this_torch_lacks_are_told() -> None:
    told: list[str] = []
    options = {"loop_ordering_after_fusion": False, "loop_ordering_after_fussion": False}
    tell_unknown_options(ModelConfig(name="resnet18", compile=True, compile_options=options), told.append)
    assert len(told) == 1
    assert (
        "has no 'loop_ordering_after_fussion', which is left out; did you mean 'loop_ordering_after_fusion'?" in told[0]
    )
    tell_unknown_options(ModelConfig(name="resnet18", compile=False, compile_options=options), told.append)
    assert len(told) == 1, "nothing is compiled"
