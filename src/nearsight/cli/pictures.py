"""A network and pictures for it, as the verbs that show attention take them from the command line."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nearsight.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

__all__ = ["BUILT_IN", "Opened", "free_name", "open_network", "open_picture", "shown"]

# scikit-learn's photographs.
BUILT_IN = ("flower", "china")
TEST = "test:"
PREPARATION = ("crop_pct", "interpolation")
HUBS = ("local-dir:", "hf-hub:", "hf_hub:")


class Opened(NamedTuple):
    """A network in evaluation mode, and how an image gets into it: `size` (rows, columns), `preparation` (crop, interpolation).

    `prepare` makes [C, H, W] of an image; mean and std undo its last step for drawing; `test` reads an image of the
    network's own evaluation split; `classes` are its labels, `trained` is False for weights nobody trained.
    """

    name: str
    model: nn.Module
    prepare: Callable[[Image], Tensor]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: list[str]
    trained: bool
    test: Callable[[int], Image] | None
    channels: int
    size: tuple[int, int]
    preparation: dict[str, Any]
    task: str


def open_network(text: str) -> Opened:
    """A run, a checkpoint, weights that come with the package, or a network of timm by name (local-dir: and hf-hub: too)."""
    from nearsight import weights

    if Path(text).exists() or weights.find(text):
        return _trained(text)
    if "/" in text and not text.startswith(HUBS):
        raise UserError(f"no run or checkpoint {text!r}.")
    return _by_name(text)


def _trained(text: str) -> Opened:
    from nearsight.train.inference import load_network, pixels_of

    network = load_network(text)
    facts = network.card["input"]
    if "image_size" not in facts or "mean" not in facts:
        raise UserError(
            f"{text}: got a checkpoint of task {network.task!r}, wanted one whose network takes single images of one size: "
            f"task classify or reconstruct."
        )

    def test(number: int) -> Image:
        """Of the split that the run was evaluated on, which may be held out of its training images."""
        from nearsight.train.data.sources import open_source, split_source
        from nearsight.train.tasks import config_from

        config: Any = config_from(network.checkpoint.state["config"], str(network.checkpoint.path), known=None)
        root = config.data.root
        data = config.data.model_copy(update={"root": root if root and Path(root).exists() else None})
        try:
            source = open_source(data, labelled=network.task == "classify")
            split: Any = split_source(source, data, config.train.seed)[1]
        except UserError as error:
            raise UserError(
                f"{TEST}{number}: {str(error).rstrip('.')}; or give an image file, or {' or '.join(BUILT_IN)}."
            ) from error
        if source.streamed:
            raise UserError(
                f"{TEST}{number}: {data.source!r} is read from its beginning to its end alone; give an image file."
            )
        if number >= len(split):
            raise UserError(
                f"{TEST}{number}: the evaluation split of {data.source!r} has {len(split)} images, from 0 on."
            )
        image: Image = split.read(number)[0]
        return image

    return Opened(
        Path(text).name,
        network.model,
        lambda image: pixels_of(network, [image])[0],
        tuple(facts["mean"]),
        tuple(facts["std"]),
        list(network.card.get("classes", [])),
        True,
        test,
        facts["channels"],
        (facts["image_size"], facts["image_size"]),
        {key: facts[key] for key in PREPARATION},
        network.task,
    )


def _has_name(name: str) -> bool:
    """Whether timm knows the architecture, and its tag where the name has one."""
    import timm

    if not timm.is_model(name):
        return False
    try:
        timm.models.get_pretrained_cfg(name)
    except RuntimeError:
        return False
    return True


def _by_name(name: str) -> Opened:
    import timm
    import torch
    from timm.data.config import resolve_model_data_config
    from timm.data.transforms_factory import create_transform

    from nearsight import weights
    from nearsight.models.autoencoder import AutoEncoder

    known = name.startswith(HUBS)
    if not known and not _has_name(name):
        names = [*weights.names(), *timm.list_models()]
        raise UserError(f"no run, checkpoint or network {name!r}.{did_you_mean(name, names)} Ours: nearsight models.")
    torch.manual_seed(0)
    try:
        model = timm.create_model(name, pretrained=known).eval()
    except Exception as error:
        if not known:
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(f"cannot load {name!r} ({reason}); wanted what nearsight push writes.") from error
    config = resolve_model_data_config(model)
    transform: Any = create_transform(**config, is_training=False)
    labels = getattr(model, "pretrained_cfg", {}).get("label_names")
    return Opened(
        name.removeprefix("local-dir:").rstrip("/").rpartition("/")[2],
        model,
        transform,
        tuple(config["mean"]),
        tuple(config["std"]),
        list(labels or [str(n) for n in range(getattr(model, "num_classes", 0))]),
        known,
        None,
        config["input_size"][0],
        config["input_size"][1:],
        {key: config[key] for key in PREPARATION},
        "reconstruct" if isinstance(model, AutoEncoder) else "classify",
    )


def open_picture(opened: Opened, text: str) -> Image:
    """An image file, `test:N` (the N-th image of the network's evaluation split) or one of `BUILT_IN`."""
    from PIL import Image as PILImage

    from nearsight.train.data.config import DataConfig
    from nearsight.train.data.images import BadImageError, decode, image_mode

    mode = image_mode(opened.channels)
    if text.startswith(TEST):
        number = text.removeprefix(TEST)
        if not number.isdecimal():
            raise UserError(f"got the image {text!r}, wanted {TEST}N with N from 0 on.")
        if opened.test is None:
            raise UserError(
                f"got the image {text!r} for {opened.name}, which was not trained here; give an image file."
            )
        try:
            return opened.test(int(number)).convert(mode)
        except BadImageError as error:
            raise UserError(f"{text}: {error}.") from error
    if text in BUILT_IN and not Path(text).exists():
        from sklearn.datasets import load_sample_image

        return PILImage.fromarray(load_sample_image(f"{text}.jpg")).convert(mode)
    if not Path(text).is_file():
        raise UserError(f"no image {text!r}; wanted a file, {TEST}N, or one of {', '.join(BUILT_IN)}.")
    try:
        return decode(Path(text), mode, DataConfig.model_fields["max_pixels"].default)
    except BadImageError as error:
        raise UserError(f"{text}: {error}.") from error


def free_name(name: str, taken: set[str]) -> str:
    """`name`, with a number where it is taken, and taken from now on: files of one name from different folders.

    >>> taken = {"b-1"}
    >>> [free_name(name, taken) for name in "abbb"]
    ['a', 'b', 'b-2', 'b-3']
    """
    numbered = (f"{name}-{number}" for number in itertools.count(1))
    free = next(each for each in itertools.chain([name], numbered) if each not in taken)
    taken.add(free)
    return free


def shown(opened: Opened, pixels: Tensor) -> Any:
    """Prepared pixels [C, H, W] as they are drawn: [H, W] or [H, W, 3] in 0…1."""
    import torch

    mean, std = (torch.tensor(t, dtype=pixels.dtype)[:, None, None] for t in (opened.mean, opened.std))
    plain = (pixels * std + mean).clamp(0, 1)
    return plain[0].numpy() if len(plain) == 1 else plain.permute(1, 2, 0).numpy()
