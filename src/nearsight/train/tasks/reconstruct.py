"""Reconstruction: an auto-encoder gives images back; L1, PSNR, pictures of both. Labels are not needed.

Errors are in units of the pixels' range, 0 to 1: an L1 of 0.01 is 2.55 of 255 grey levels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from nearsight.errors import UserError
from nearsight.models.autoencoder import AutoEncoder
from nearsight.train.config import ModelConfig, RunConfig, validate
from nearsight.train.data.batches import Batch, Where, build_batches, example_images
from nearsight.train.data.config import DataConfig
from nearsight.train.data.images import LeftOut
from nearsight.train.data.sources import (
    Source,
    input_facts,
    open_source,
    sizes_without_data,
    split_source,
    training_images,
)
from nearsight.train.tasks import Facts, Note
from nearsight.train.tasks.classify import create_network

if TYPE_CHECKING:
    from nearsight.train.inference import Network

__all__ = ["CONFIG", "TASK", "Comparison", "Reconstruct", "ReconstructConfig", "compare", "per_image", "side_by_side"]

PICTURE = "reconstructions.png"
SHOWN = 8


class ReconstructConfig(RunConfig):
    task: str = "reconstruct"
    data: DataConfig

    def faults(self) -> list[str]:
        return super().faults() + self.data.faults()


def _open(data: DataConfig) -> Source:
    """The images alone, scaled to −1…1 unless the config says otherwise: the network gives them back in the same units."""
    half = [0.5] * data.channels
    return open_source(data.model_copy(update={"mean": data.mean or half, "std": data.std or half}), labelled=False)


def _network(config: ModelConfig, channels: int) -> AutoEncoder:
    model = create_network(config, in_chans=channels)
    if not isinstance(model, AutoEncoder):
        raise UserError(f"model.name: {config.name} gives no images back, wanted qna_autoencoder.")
    return model


def _check_size(size: int, model: AutoEncoder) -> None:
    if size % model.reduction:
        near = max(1, round(size / model.reduction)) * model.reduction
        raise UserError(
            f"data.image_size: got {size}, wanted a multiple of {model.reduction}, which the network halves away; "
            f"the nearest is {near}."
        )


def per_image(rebuilt: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """L1 and PSNR in dB (at most 100) of each image, [B] and [B], of pixels in 0…1 [B, C, H, W].

    >>> l1, psnr = per_image(torch.full((2, 3, 4, 5), 0.6), torch.full((2, 3, 4, 5), 0.5))
    >>> [round(float(v[0]), 3) for v in (l1, psnr)]
    [0.1, 20.0]
    """
    from torchmetrics.functional.image import peak_signal_noise_ratio

    psnr = peak_signal_noise_ratio(rebuilt, images, data_range=1.0, dim=(1, 2, 3), reduction="none")
    return (rebuilt - images).abs().mean((1, 2, 3)), psnr.clamp(max=100.0)


class Comparison(NamedTuple):
    """Images, and what each named network made of them: pixels in 0…1, each [N, C, H, W]."""

    names: list[str]
    images: Tensor
    rebuilt: dict[str, Tensor]

    def rows(self) -> list[dict[str, Any]]:
        """Per image, L1 and PSNR of every network."""
        measured = {name: per_image(rebuilt, self.images) for name, rebuilt in self.rebuilt.items()}
        return [
            {
                "file": file,
                "reconstructions": [
                    {"network": name, "l1": round(float(l1[i]), 6), "psnr": round(float(psnr[i]), 4)}
                    for name, (l1, psnr) in measured.items()
                ],
            }
            for i, file in enumerate(self.names)
        ]

    def picture(self) -> Image.Image:
        return side_by_side([("input", self.images), *self.rebuilt.items()])


class Reconstruct:
    """The reconstruction task of a config."""

    metric = "psnr"
    larger_is_better = True

    def __init__(self, config: ReconstructConfig, where: Where, note: Note, *, evaluation_only: bool = False) -> None:
        self.config, self.where = config, where
        data, source = config.data, _open(config.data)
        self.source = source
        self.model: nn.Module = _network(config.model, data.channels)
        _check_size(data.image_size, self.model)
        train, evaluation = split_source(source, data, config.train.seed, note if evaluation_only else None)
        shared: dict[str, Any] = {
            "seed": config.train.seed,
            "channels_last": config.model.channels_last,
            "note": note,
        }
        if not evaluation_only:
            self.train = build_batches(train, source, data, where, training=True, **shared)
        self.evaluation = build_batches(evaluation, source, data, where, training=False, **shared)
        self.mean, self.std = (
            torch.tensor(values, device=where.device).view(1, -1, 1, 1) for values in (source.mean, source.std)
        )
        self.left_out = LeftOut(note)
        self.shown: list[tuple[Tensor, Tensor]] = []

    @staticmethod
    def facts(config: ReconstructConfig) -> Facts:
        data, notes = config.data, list[str]()
        try:
            source = _open(data)
        except UserError as error:
            images, _ = sizes_without_data(data, error)
            if not images:
                raise
            notes.append(f"data not opened, sizes taken from the recipe: {error}")
        else:
            images = training_images(source, data)
        with torch.device("meta"):
            model = _network(config.model.model_copy(update={"pretrained": False}), data.channels)
            pixels = torch.zeros(2, data.channels, data.image_size, data.image_size)
        _check_size(data.image_size, model)
        return Facts(images, None, model, lambda: model.train()(pixels), notes)

    @staticmethod
    def example(config: ReconstructConfig, device: torch.device) -> Tensor:
        """What the network is given in a training step, but for its values."""
        return example_images(config.data, config.model.channels_last, device)

    @staticmethod
    def network(card: dict[str, Any]) -> nn.Module:
        settings = ModelConfig.model_validate({**card["model"], "pretrained": False})
        return _network(settings, card["input"]["channels"])

    def card(self) -> dict[str, Any]:
        return {
            "model": self.config.model.model_dump(mode="json"),
            "input": input_facts(self.config.data, self.source),
        }

    def loss(self, model: nn.Module, batch: Batch, epoch: int) -> tuple[Tensor, dict[str, Tensor]]:
        self.left_out.tell(batch.bad)
        error = (model(batch.images).float() - batch.images) * self.std
        return error.abs().mean(), {"psnr": -10 * error.detach().square().mean().log10()}

    def pixels(self, images: Tensor) -> Tensor:
        """Normalised images as pixels in 0…1."""
        return (images.float() * self.std + self.mean).clamp(0, 1)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        from torchmetrics import MeanMetric, SumMetric

        device = self.where.device
        l1, psnr, count = MeanMetric().to(device), MeanMetric().to(device), SumMetric().to(device)
        was_training, self.shown = model.training, []
        model.eval()
        for batch in self.evaluation.epoch(0):
            self.left_out.tell(batch.bad)
            images, rebuilt = self.pixels(batch.images), self.pixels(model(batch.images))
            if batch.valid is not None:
                images, rebuilt = images[batch.valid], rebuilt[batch.valid]
            count.update(len(images))
            if len(images):
                for metric, values in zip((l1, psnr), per_image(rebuilt, images), strict=True):
                    metric.update(values)
                missing = SHOWN - len(self.shown)
                self.shown += zip(images[:missing].cpu(), rebuilt[:missing].cpu(), strict=True)
        model.train(was_training)
        return {name: float(m.compute()) for name, m in (("l1", l1), ("psnr", psnr), ("images", count))}

    def finish(self, run: Path) -> None:
        """The first held-out images above what the network made of them."""
        if self.shown:
            images, rebuilt = (torch.stack(part) for part in zip(*self.shown, strict=True))
            side_by_side([("input", images), ("rebuilt", rebuilt)]).save(run / PICTURE)


# ---- pictures ----


def side_by_side(rows: Sequence[tuple[str, Tensor]], columns: int = SHOWN) -> Image.Image:
    """A sheet with one line per (name, images): images below each other are the same one. Pixels in 0…1, each [N, C, H, W].

    >>> side_by_side([("input", torch.rand(3, 3, 64, 96)), ("rebuilt", torch.rand(3, 3, 64, 96))]).size
    (370, 134)
    """
    count, _, height, width = rows[0][1].shape
    factor = max(1, 128 // max(height, width))  # small images enlarged, so that one sees something
    high, wide, gap, margin = height * factor, width * factor, 2, 76
    blocks = [range(start, min(start + columns, count)) for start in range(0, count, columns)]
    across = min(count, columns)
    sheet = Image.new("RGB", (margin + across * (wide + gap), len(blocks) * len(rows) * (high + gap) + gap), "white")
    draw = ImageDraw.Draw(sheet)
    y = gap
    for block in blocks:
        for name, images in rows:
            draw.multiline_text((4, y + 4), name.replace(" ", "\n"), fill="black")
            for x, index in enumerate(block):
                pixels = images[index].mul(255).round().to(torch.uint8).expand(3, -1, -1).permute(1, 2, 0).numpy()
                tile = Image.fromarray(pixels).resize((wide, high), Image.Resampling.NEAREST)
                sheet.paste(tile, (margin + x * (wide + gap), y))
            y += high + gap
    return sheet


@torch.inference_mode()
def compare(networks: Sequence[Network], files: Sequence[str | Path]) -> Comparison:
    """What trained auto-encoders make of image files, or without any of the first held-out images of the first one's run."""
    from nearsight.train.inference import read_images

    first = networks[0].card["input"]
    shape = (first["channels"], first["image_size"])
    for network in networks:
        facts = network.card["input"]
        if (facts["channels"], facts["image_size"]) != shape:
            raise UserError(
                f"{network.checkpoint.path}: got {facts['image_size']} px × {facts['channels']} channels beside "
                f"{shape[1]} px × {shape[0]}, wanted the same images for all."
            )
    mean, std = _statistics(networks[0])
    if files:
        names, images = [str(file) for file in files], read_images(networks[0], files) * std + mean
    else:
        images = _held_out(networks[0])
        names = [f"held-out image {number}" for number in range(len(images))]
    rebuilt = {}
    for name, network in zip(_names(networks), networks, strict=True):
        mean, std = _statistics(network)
        parts = [network.model((part - mean) / std) * std + mean for part in images.split(64)]
        rebuilt[name] = torch.cat(parts).clamp(0, 1)
    return Comparison(names, images.clamp(0, 1), rebuilt)


def _statistics(network: Network) -> tuple[Tensor, Tensor]:
    facts = network.card["input"]
    mean, std = (torch.tensor(facts[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    return mean, std


def _held_out(network: Network) -> Tensor:
    config = validate(ReconstructConfig, network.checkpoint.state["config"], str(network.checkpoint.path))
    task = Reconstruct(config, Where(torch.device("cpu")), lambda text: None, evaluation_only=True)
    images: list[Tensor] = []
    for batch in task.evaluation.epoch(0):
        images += task.pixels(batch.images if batch.valid is None else batch.images[batch.valid])
        if len(images) >= SHOWN:
            break
    return torch.stack(images[:SHOWN])


def _names(networks: Sequence[Network]) -> list[str]:
    """The pairing of each; where one comes twice, its run too, and where that does not tell them apart, its path."""
    pairs = [f"{network.model.encoder_kind} {network.model.decoder_kind}" for network in networks]
    paths = [network.checkpoint.path for network in networks]
    runs = [f"{pair} {path.parent.parent.name}" for pair, path in zip(pairs, paths, strict=True)]
    alike = Counter(run for run, _ in set(zip(runs, paths, strict=True)))
    return [
        pair if pairs.count(pair) == 1 else run if alike[run] == 1 else f"{pair} {path}"
        for pair, run, path in zip(pairs, runs, paths, strict=True)
    ]


CONFIG = ReconstructConfig
TASK = Reconstruct
