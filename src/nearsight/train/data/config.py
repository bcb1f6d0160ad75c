"""The `data:` section of a recipe."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from nearsight.train.config import Section

__all__ = ["AugmentConfig", "DataConfig", "Place"]


def _at_home(text: str) -> str:
    """A path, or `kind:path`, that begins in the home folder, written out: no shell does it inside KEY=VALUE.

    >>> _at_home("folder:~/x") == "folder:" + os.path.expanduser("~/x"), _at_home("hfds/a~b")
    (True, 'hfds/a~b')
    """
    kind, mark, path = text.rpartition(":")
    return f"{kind}{mark}{os.path.expanduser(path)}"


# Where something lies.
Place = Annotated[str, AfterValidator(_at_home)]

# The first words of timm's policy strings; after a crop that is not resized, only the first is read.
TIMMS = ("rand", "augmix", "original", "originalr", "v0", "v0r", "3a")


class AugmentConfig(Section):
    crop: Literal["none", "pad", "resized"] = Field(
        default="none", description="pad: shift by up to `pad`; resized: random area"
    )
    pad: int = Field(default=4, ge=0)
    pad_mode: Literal["reflect", "zeros"] = "reflect"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = Field(default=0.0, ge=0, le=1, description="chance of a horizontal flip")
    cutout: int = Field(default=0, ge=0, description="side of a blanked square, in pixels")
    color_jitter: float = Field(default=0.0, ge=0)
    auto: str | None = Field(
        default=None,
        description="trivial: TrivialAugment, on the device too; or timm's policy string, e.g. rand-m9-mstd0.5",
    )
    erase: float = Field(default=0.0, ge=0, le=1, description="chance of random erasing")

    @property
    def trivial(self) -> bool:
        return self.auto == "trivial"

    @property
    def needs_workers(self) -> str | None:
        """The first key that only the loader path can do, or None."""
        policy = None if self.trivial else self.auto
        wanted = {"crop=resized": self.crop == "resized", "color_jitter": self.color_jitter, "auto": policy}
        return next((f"data.augment.{key}" for key, value in wanted.items() if value), None)


class DataConfig(Section):
    source: Place = Field(
        description="digits, cifar10, cifar100, folder:PATH, parquet:PATH, hfds/NAME, hfids/NAME, wds/NAME, tfds/NAME"
    )
    root: Place | None = Field(default=None, description="where cifar10, cifar100, hfds/, wds/ and tfds/ lie")
    download: bool = False
    train_split: str = "train"
    eval_split: str = Field(
        default="validation", description="validation: of files the first there is of val, validation, valid, test"
    )
    train_images: int | None = Field(
        default=None, ge=1, description="images in a streamed split, where its index does not say"
    )
    eval_images: int | None = Field(default=None, ge=1)
    num_classes: int | None = Field(
        default=None, ge=2, description="of a streamed set, whose labels are not known beforehand"
    )
    image_size: int = Field(default=224, ge=1)
    channels: Literal[1, 3] = 3
    batch_size: int = Field(default=64, ge=1, description="per process and micro-batch")
    eval_batch_size: int | None = Field(default=None, ge=1)
    workers: int = Field(default=4, ge=0)
    holdout: float = Field(
        default=0.0, ge=0, lt=1, description="share of train held out; evaluated instead of the eval split"
    )
    on_device: bool | Literal["auto"] = Field(default="auto", description="keep decoded images on the device")
    cache: bool = Field(default=True, description="keep decoded images on disk for the next run")
    on_bad: Literal["stop", "skip"] = Field(default="stop", description="what to do about a file that is no image")
    max_pixels: int = Field(
        default=89_478_485, ge=1, le=2 * 89_478_485, description="refuse larger images (decompression bombs)"
    )
    crop_pct: float = Field(default=1.0, gt=0, le=1, description="share of the resized image's side kept at evaluation")
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    mean: list[float] | None = Field(default=None, description="null: the source's")
    std: list[Annotated[float, Field(gt=0)]] | None = None
    augment: AugmentConfig = AugmentConfig()

    def faults(self) -> list[str]:
        found = []
        if self.holdout and self.eval_split != DataConfig.model_fields["eval_split"].default:
            found.append(
                f"data.eval_split: got {self.eval_split} with data.holdout={self.holdout:g}, whose images are evaluated; wanted "
                "data.holdout=0 with it"
            )
        for key in ("mean", "std"):
            value = getattr(self, key)
            if value is not None and len(value) != self.channels:
                found.append(f"data.{key}: got {len(value)} numbers, wanted {self.channels} (data.channels)")
        for key in ("scale", "ratio"):
            low, high = getattr(self.augment, key)
            if not 0 < low <= high:
                found.append(f"data.augment.{key}: got {low:g} to {high:g}, wanted the smaller first, above 0")
            if self.augment.crop != "resized" and (low, high) != AugmentConfig.model_fields[key].default:
                found.append(
                    f"data.augment.{key}: got it with data.augment.crop={self.augment.crop}, wanted data.augment.crop=resized"
                )
        needs = self.augment.needs_workers
        if self.on_device is True and needs:
            found.append(f"data.on_device: got true with {needs}, which runs in workers; wanted auto or false")
        known = TIMMS if self.augment.crop == "resized" else TIMMS[:1]
        policy = self.augment.auto
        if policy and not self.augment.trivial and policy.split("-")[0] not in known:
            found.append(
                f"data.augment.auto: got {policy!r}, wanted trivial, null or timm's policy string such as rand-m9-mstd0.5"
                f" (with data.augment.crop={self.augment.crop}: {', '.join(known)})"
            )
        elif policy and not self.augment.trivial and (fault := _policy_fault(policy)):
            found.append(f"data.augment.auto: got {policy!r}, which timm does not read ({fault})")
        if self.augment.trivial and self.augment.color_jitter:
            found.append(
                f"data.augment.color_jitter: got {self.augment.color_jitter:g} with data.augment.auto=trivial, which changes"
                " colours itself; wanted 0"
            )
        elif policy and "3a" not in policy and self.augment.color_jitter:
            found.append(
                f"data.augment.color_jitter: got {self.augment.color_jitter:g} with data.augment.auto={policy}, beside which timm"
                " leaves it out; wanted 0"
            )
        return found


def _policy_fault(policy: str) -> str | None:
    """What timm says against a policy string that begins with one of its words; None when it takes it."""
    from timm.data import auto_augment

    kind = policy.split("-")[0]
    makers = {"rand": auto_augment.rand_augment_transform, "augmix": auto_augment.augment_and_mix_transform}
    try:
        makers.get(kind, auto_augment.auto_augment_transform)(policy, {"img_mean": (0, 0, 0)})
    except (AssertionError, ValueError, KeyError, TypeError) as error:
        return str(error) or type(error).__name__
    return None
