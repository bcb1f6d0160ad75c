"""The QnA authors' Flax weights, as the state dict of our networks."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from nearsight.errors import UserError
from nearsight.export.flax_msgpack import unpack
from nearsight.layers.qna import QnA2d
from nearsight.layers.window_attention import WindowAttention2d
from nearsight.models.qna_vit import QnABlock, QnAStage, QnAViT

__all__ = ["convert_flax", "flax_sources", "read_flax"]


class Source(NamedTuple):
    """Where a parameter of ours comes from: the Flax name, the shape it must have there, and the way here."""

    name: str
    shape: tuple[int, ...]
    bring: Callable[[Tensor], Tensor]


def read_flax(path: str | Path) -> dict[str, Tensor]:
    """Read Flax parameters by their '/'-joined names from an `.npz` or from a Flax msgpack checkpoint; nothing is unpickled."""
    path = Path(path)
    if zipfile.is_zipfile(path):
        return _strip(dict(_read_npz(path)))
    tree = unpack(path.read_bytes())
    if not isinstance(tree, dict):
        raise UserError(f"{path}: got a {type(tree).__name__}, wanted a map of parameters or a Flax train state.")
    return _strip(dict(_flatten(tree["params"] if isinstance(tree.get("params"), dict) else tree)))


def _read_npz(path: Path) -> Iterator[tuple[str, Tensor]]:
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files:
            try:
                array = arrays[name]
            except ValueError as error:
                raise UserError(f"{path}: cannot read {name!r} as an array of numbers ({error}).") from error
            if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub":
                raise UserError(
                    f"{path}: got {name!r}, which is no array of numbers; wanted an .npz of Flax parameters."
                )
            yield name, torch.from_numpy(array)


def _flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flatten(value, name + "/")
        elif isinstance(value, Tensor):
            yield name, value
        else:
            raise UserError(f"the checkpoint's {name!r} is a {type(value).__name__}, wanted an array.")


def _strip(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the collection's name, which some files carry in front of every parameter."""
    if params and all(name.startswith("params/") for name in params):
        return {name.removeprefix("params/"): value for name, value in params.items()}
    return params


def convert_flax(params: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The state dict of `model` from Flax parameters; every source is used exactly once and every target filled.

    Raises `UserError` with everything that is missing, unused or of the wrong shape.
    """
    sources = flax_sources(model)
    missing = [source.name for source in sources.values() if source.name not in params]
    unused = sorted(params.keys() - {source.name for source in sources.values()})
    wrong = [
        f"{s.name} {list(params[s.name].shape)} (wanted {list(s.shape)})"
        for s in sources.values()
        if s.name in params and tuple(params[s.name].shape) != s.shape
    ]
    problems = [
        f"{what}: {', '.join(names)}"
        for what, names in (("missing", missing), ("unused", unused), ("wrong shape", wrong))
        if names
    ]
    if problems:
        raise UserError(f"these weights do not fit the model; {'; '.join(problems)}.")
    state = model.state_dict()
    return {
        target: source.bring(params[source.name]).to(state[target].dtype).contiguous()
        for target, source in sources.items()
    }


def flax_sources(model: nn.Module) -> dict[str, Source]:
    """For every entry of the model's state dict, where the authors' code keeps it.

    >>> import timm, nearsight
    >>> flax_sources(timm.create_model("qna_vit_nano"))["stages.1.downsample.mixer.query"].name
    'QnAStage_0/QnA_Block_2_stride_2/FusedKQnA_0/query'
    """
    if not isinstance(model, QnAViT):
        raise UserError(f"got a {type(model).__name__}, wanted a QnA-ViT: only its authors published Flax weights.")
    found: dict[str, Source] = {}

    def add(module: nn.Module, ours: str, name: str, theirs: str, bring: str = "same") -> None:
        parameter = dict(module.named_parameters()).get(name)
        if parameter is not None:
            shape = tuple(parameter.shape)
            found[f"{ours}.{name}"] = Source(theirs, *_WAYS[bring](shape))

    add(model.patch_embed, "patch_embed", "proj.weight", "StemBlock_0/conv_1x1/kernel", "conv")
    stages = cast("list[QnAStage]", list(model.stages))
    for i, stage in enumerate(stages):
        if stage.downsample is not None:
            before = sum(isinstance(block.mixer, QnA2d) for block in stages[i - 1].blocks)
            _block(add, stage.downsample, f"stages.{i}.downsample", f"QnAStage_{i - 1}/QnA_Block_{before + 1}_stride_2")
        counts = {"LSAStage": 0, "QnAStage": 0}
        for j, block in enumerate(stage.blocks):
            kind = "LSAStage" if isinstance(block.mixer, WindowAttention2d) else "QnAStage"
            counts[kind] += 1
            theirs = f"{kind}_{i}/{'MSA' if kind == 'LSAStage' else 'QnA'}_Block_{counts[kind]}"
            _block(add, cast(QnABlock, block), f"stages.{i}.blocks.{j}", theirs)
    _norm(add, model.norm, "norm", "ClassificationHead_0/LayerNorm_0")
    _dense(add, model.head.fc, "head.fc", "ClassificationHead_0/head_logits")

    without = sorted(model.state_dict().keys() - found.keys())
    if without:
        raise UserError(f"this form of the model has parameters that the authors' code has not: {', '.join(without)}.")
    return found


Add = Callable[..., None]


def _norm(add: Add, norm: nn.Module, ours: str, theirs: str) -> None:
    add(norm, ours, "weight", f"{theirs}/scale")
    add(norm, ours, "bias", f"{theirs}/bias")


def _dense(add: Add, linear: nn.Module, ours: str, theirs: str) -> None:
    add(linear, ours, "weight", f"{theirs}/kernel", "dense")
    add(linear, ours, "bias", f"{theirs}/bias")


def _block(add: Add, block: QnABlock, ours: str, theirs: str) -> None:
    _norm(add, block.norm1, f"{ours}.norm1", f"{theirs}/LayerNorm_0")
    _norm(add, block.norm2, f"{ours}.norm2", f"{theirs}/LayerNorm_1")
    _dense(add, block.mlp.fc1, f"{ours}.mlp.fc1", f"{theirs}/MlpBlock_0/Dense_0")
    _dense(add, block.mlp.fc2, f"{ours}.mlp.fc2", f"{theirs}/MlpBlock_0/Dense_1")
    if block.skip is not None:
        add(block.skip, f"{ours}.skip", "weight", f"{theirs}/Conv_0/kernel", "conv")
    mixer, ours = block.mixer, f"{ours}.mixer"
    if isinstance(mixer, WindowAttention2d):
        theirs = f"{theirs}/MultiHeadSelfAttention_0"
        _dense(add, mixer.qkv, f"{ours}.qkv", f"{theirs}/to_qkv")
        _dense(add, mixer.proj, f"{ours}.proj", f"{theirs}/to_out")
        add(mixer, ours, "relative_bias", f"{theirs}/RelativePositionalEmbedding_0/rpe_bias", "offsets")
    elif isinstance(mixer, QnA2d):
        theirs = f"{theirs}/FusedKQnA_0"
        add(mixer, ours, "query", f"{theirs}/query")
        add(mixer, ours, "key_weight", f"{theirs}/Wk", "dense")
        _dense(add, mixer.value, f"{ours}.value", f"{theirs}/to_v")
        _dense(add, mixer.proj, f"{ours}.proj", f"{theirs}/to_out")
        if mixer.position == "relative":
            add(mixer, ours, "position_bias", f"{theirs}/rpe_bias", "taps")
        if mixer.tap_scale == "tap":
            add(mixer, ours, "tap_scale_weight", f"{theirs}/attn_scale_weights", "weighted taps")
        elif mixer.tap_scale == "ones":
            add(mixer, ours, "tap_scale_weight", f"{theirs}/attn_scale_pos", "taps from one")


def _reshaped(theirs: tuple[int, ...], ours: tuple[int, ...]) -> tuple[tuple[int, ...], Callable[[Tensor], Tensor]]:
    return theirs, lambda t: t.reshape(ours)


# From the shape of our parameter: the shape of theirs, and how to bring one into the other.
_WAYS: dict[str, Callable[[tuple[int, ...]], tuple[tuple[int, ...], Callable[[Tensor], Tensor]]]] = {
    "same": lambda s: (s, lambda t: t),
    "dense": lambda s: (s[::-1], lambda t: t.T),
    "conv": lambda s: ((s[2], s[3], s[1], s[0]), lambda t: t.permute(3, 2, 0, 1)),
    "offsets": lambda s: _reshaped((s[0] * s[1], s[2]), s),
    "taps": lambda s: _reshaped((s[0] * s[1], s[2] * s[3]), s),
    "weighted taps": lambda s: _reshaped((1, 1, s[0] * s[1], s[2] * s[3]), s),
    "taps from one": lambda s: _reshaped((1, 1, s[0] * s[1], s[2], s[3]), s),
}
