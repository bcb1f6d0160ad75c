"""TrivialAugment: every operation's pixels, how it is drawn, and batches that depend on seed, epoch and position alone."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import TrivialAugmentWide
from torchvision.transforms import functional as TF

from nearsight.errors import UserError
from nearsight.train.data.batches import OnDeviceBatches, Where, build_batches
from nearsight.train.data.config import DataConfig
from nearsight.train.data.decoded import train_transform
from nearsight.train.data.policy import OPERATIONS, Policy, apply_policy, draw_policy, fill_of, image_policy, space
from nearsight.train.data.sources import open_source
from nearsight.train.tasks import load_config

CPU = Where(torch.device("cpu"))
FILL = torch.tensor([3, 70, 200], dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARSIGHT_CACHE", str(tmp_path / "cache"))


def pictures(size: tuple[int, int], channels: int = 3, count: int = 3) -> torch.Tensor:
    """Noise over all levels; a narrow range with a flat part; one colour."""
    images = torch.randint(256, (count, *size, channels), dtype=torch.uint8)
    images[1::3] = images[1::3] // 5 + 60
    images[1::3, : size[0] // 2] = 77
    images[2::3] = 131
    return images


def by_pil(image: torch.Tensor, name: str, amount: float) -> torch.Tensor:
    """The same operation by torchvision's functions on a PIL image [H, W, C]."""
    channels = image.shape[2]
    pil = Image.fromarray(image.numpy() if channels == 3 else image[..., 0].numpy())
    fill = [float(level) for level in FILL[:channels]]

    def moved(shear: tuple[float, float] = (0.0, 0.0), by: tuple[int, int] = (0, 0)) -> Any:
        tilt = [float(np.degrees(np.arctan(part))) for part in shear]
        centre = [0, 0] if any(shear) else None
        return TF.affine(pil, 0.0, list(by), 1.0, tilt, fill=fill, center=centre)

    done = {
        "Identity": lambda: pil,
        "ShearX": lambda: moved(shear=(amount, 0.0)),
        "ShearY": lambda: moved(shear=(0.0, amount)),
        "TranslateX": lambda: moved(by=(int(amount), 0)),
        "TranslateY": lambda: moved(by=(0, int(amount))),
        "Rotate": lambda: TF.rotate(pil, amount, fill=fill),
        "Brightness": lambda: TF.adjust_brightness(pil, 1 + amount),
        "Color": lambda: TF.adjust_saturation(pil, 1 + amount),
        "Contrast": lambda: TF.adjust_contrast(pil, 1 + amount),
        "Sharpness": lambda: TF.adjust_sharpness(pil, 1 + amount),
        "Posterize": lambda: TF.posterize(pil, int(amount)),
        "Solarize": lambda: TF.solarize(pil, amount),
        "AutoContrast": lambda: TF.autocontrast(pil),
        "Equalize": lambda: TF.equalize(pil),
    }[name]()
    return torch.from_numpy(np.array(done)).view(image.shape)


# ---- pixels ----


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("size", "channels"), [((19, 33), 3), ((40, 23), 1), ((32, 32), 3), ((2, 5), 3), ((1, 1), 1)])
def test_pixels_are_pils(name: str, size: tuple[int, int], channels: int) -> None:
    """The first and every fifth magnitude, the last with them, both signs, in one batch; not a level off."""
    values, signed = space(size)[name]
    amounts = values.reshape(-1)[::5].tolist()
    amounts += [-amount for amount in amounts] if signed else []
    images = pictures(size, channels)
    batch = images.repeat(len(amounts), 1, 1, 1)
    magnitude = torch.tensor(amounts).repeat_interleave(len(images))
    policy = Policy(torch.full((len(batch),), OPERATIONS.index(name)), magnitude)
    got = apply_policy(batch, policy, FILL[:channels])
    assert got.dtype == torch.uint8
    want = torch.stack([by_pil(i, name, amount) for i, amount in zip(batch, magnitude.tolist(), strict=True)])
    off = got.int() - want.int()
    if name == "AutoContrast":  # PIL multiplies by a rounded quotient, which can land below a whole level
        assert ((off == 0) | (off == 1)).all()
        assert (off != 0).float().mean() < 0.05
    else:
        assert not off.any()


@pytest.mark.parametrize("count", [0, 1, 7, 101])
def test_images_keep_their_places(count: int) -> None:
    """A mixed batch of any size is its images one by one, and the images given stay as they were."""
    size = (12, 17)
    images = pictures(size, count=count)
    before = images.clone()
    policy = draw_policy(count, size, torch.Generator().manual_seed(count))
    got = apply_policy(images, policy, FILL)
    assert got.shape == images.shape
    assert torch.equal(images, before)
    for i in range(count):
        alone = apply_policy(images[i : i + 1], Policy(*(t[i : i + 1] for t in policy)), FILL)
        assert torch.equal(got[i : i + 1], alone), i


def test_colour_is_the_identity_on_grey() -> None:
    images = pictures((9, 14), channels=1)
    policy = Policy(torch.full((3,), OPERATIONS.index("Color")), torch.tensor([-0.99, 0.5, 0.99]))
    assert torch.equal(apply_policy(images, policy, FILL[:1]), images)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "channels", "count"), [((32, 32), 3, 512), ((19, 33), 3, 77), ((40, 23), 1, 51)])
def test_a_gpu_makes_the_same_pixels_without_waiting(size: tuple[int, int], channels: int, count: int) -> None:
    images = pictures(size, channels, count)
    policy = draw_policy(count, size, torch.Generator().manual_seed(1))
    there, fill = images.cuda(), FILL[:channels].cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = apply_policy(there, policy, fill)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got.cpu(), apply_policy(images, policy, FILL[:channels]))


# ---- choices ----


def test_the_space_is_torchvisions_but_for_the_translations() -> None:
    theirs = TrivialAugmentWide()._augmentation_space(31)
    for size, reach in (((224, 224), (32, 32)), ((30, 96), (10, 32))):
        ours = space(size)
        assert list(ours) == list(theirs) == list(OPERATIONS)
        for name, (values, signed) in ours.items():
            assert signed == theirs[name][1]
            if name.startswith("Translate"):
                end = reach[1] if name.endswith("X") else reach[0]
                torch.testing.assert_close(values, torch.linspace(0, end, 31))
            else:
                assert torch.equal(values, theirs[name][0].float()), name


def test_everything_is_drawn_equally_often() -> None:
    count, size = 140_000, (32, 48)
    policy = draw_policy(count, size, torch.Generator().manual_seed(4))
    share = torch.bincount(policy.operation, minlength=14) / count
    torch.testing.assert_close(share, torch.full((14,), 1 / 14), rtol=0.05, atol=0)
    for number, (name, (values, signed)) in enumerate(space(size).items()):
        drawn = policy.magnitude[policy.operation == number]
        levels, times = drawn.abs().unique(return_counts=True)
        assert torch.equal(levels, values.reshape(-1).unique())
        if name != "Posterize" and values.ndim:  # its 31 magnitudes are 7 numbers of bits
            torch.testing.assert_close(times / len(drawn), torch.full((31,), 1 / 31), rtol=0.25, atol=0)
        negative = (drawn < 0).float().mean()
        assert negative == pytest.approx(0.5 * 30 / 31 if signed else 0, abs=0.02)


# ---- batches ----


def settings(**keys: Any) -> DataConfig:
    known = {"source": "digits", "channels": 1, "image_size": 8, "batch_size": 64, "workers": 0}
    return DataConfig.model_validate({**known, "augment": {"auto": "trivial"}, **keys})


def batches(data: DataConfig, training: bool = True, where: Where = CPU) -> Any:
    source = open_source(data)
    split = source.train if training else source.evaluation
    return build_batches(split, source, data, where, training=training, seed=5, channels_last=False, note=print)


def test_it_keeps_images_on_the_device_and_evaluation_as_it_is() -> None:
    assert isinstance(batches(settings()), OnDeviceBatches)
    plain = settings(augment={})
    held = zip(batches(settings(), False).epoch(0), batches(plain, False).epoch(0), strict=True)
    assert all(torch.equal(a.images, b.images) for a, b in held)
    a, b = (next(batches(data).epoch(0)) for data in (settings(), plain))
    same = (a.images == b.images).flatten(1).all(1).float().mean()
    assert torch.equal(a.targets, b.targets)
    assert 0.07 < same < 0.6  # the identity, colour on grey, and magnitudes that do nothing to 8×8 pixels


def test_every_batch_has_its_own_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def spy(images: torch.Tensor, policy: Policy, fill: torch.Tensor) -> torch.Tensor:
        assert len(images) == len(policy.operation)
        seen.extend(policy.operation.split(67))
        return images

    monkeypatch.setattr("nearsight.train.data.batches.apply_policy", spy)
    data = batches(settings(batch_size=67))
    for epoch in (0, 1):
        assert len(list(data.epoch(epoch))) == 20
    assert len({tuple(operation.tolist()) for operation in seen}) == 40


@pytest.mark.parametrize("together", [1, 3])
def test_batches_changed_together_are_the_same(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Erasing, drawn after it from each batch's generator, included."""
    data = settings(augment={"crop": "pad", "flip": 0.5, "auto": "trivial", "cutout": 3, "erase": 0.5})
    many = [batch.images for batch in batches(data).epoch(0)]
    monkeypatch.setattr("nearsight.train.data.batches.POLICY_BATCHES", together)
    few = [batch.images for batch in batches(data).epoch(0)]
    assert all(torch.equal(a, b) for a, b in zip(many, few, strict=True))
    monkeypatch.setattr("nearsight.train.data.batches.POLICY_BYTES", 0)  # batches above it go one by one
    assert batches(data).together == 1


@pytest.mark.parametrize("on_device", [True, False])
def test_pixels_follow_from_seed_epoch_and_position(on_device: bool) -> None:
    augment = {"crop": "pad", "pad": 2, "flip": 0.5, "auto": "trivial"}
    data = settings(on_device=on_device, augment=augment, batch_size=63)
    whole = [batch.images for batch in batches(data).epoch(3)]
    torch.manual_seed(99)  # the run's own generator must not matter
    part = [batch.images for batch in batches(data).epoch(3, start=17)]
    assert len(part) == 4
    assert all(torch.equal(a, b) for a, b in zip(whole[17:], part, strict=True))
    assert not torch.equal(next(batches(data).epoch(4)).images, whole[0])
    # Three processes share the batch of one.
    third = settings(on_device=on_device, augment=augment, batch_size=21)
    shares = [next(batches(third, where=Where(CPU.device, rank, 3)).epoch(3, start=17)).images for rank in range(3)]
    assert torch.equal(torch.cat(shares), part[0])


@pytest.mark.parametrize("crop", ["pad", "resized"])
@pytest.mark.parametrize("channels", [1, 3])
def test_workers_run_torchvisions_over_the_same_space(crop: str, channels: int) -> None:
    """What changes a flat image is geometry alone: the mean colour comes in from a side, a third of it at most."""
    data = settings(channels=channels, image_size=30, augment={"crop": crop, "auto": "trivial"})
    mean = (0.5, 0.25, 0.75)[:channels]
    transform = train_transform(data, mean)
    (policy,) = [step for step in transform.transforms if isinstance(step, TrivialAugmentWide)]  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(policy))._augmentation_space(31).keys() == dict.fromkeys(OPERATIONS).keys()
    assert policy._augmentation_space(31)["TranslateY"][0].max() == 10
    flat = Image.fromarray(np.full((30, 30, 3) if channels == 3 else (30, 30), 255, np.uint8))
    seen = []
    for _ in range(300):
        image = torch.as_tensor(transform(flat))
        assert image.shape == (channels, 30, 30)
        filled = (image == torch.tensor(fill_of(mean)).view(-1, 1, 1)).all(0)
        if filled.any() and filled.all(0).any():  # whole columns: a translation across
            seen.append(int(filled.all(0).sum()))
    assert max(seen) <= 10
    assert len(set(seen)) > 3


def test_an_image_policy_is_for_one_size() -> None:
    transform = image_policy(96, (0.5,))
    assert transform._augmentation_space(31)["TranslateX"][0].max() == 32  # type: ignore[attr-defined]


# ---- mistakes ----


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "data.augment.auto=trivail",
            "data.augment.auto: got 'trivail', wanted trivial, null or timm's policy string such as rand-m9-mstd0.5 "
            "(with data.augment.crop=pad: rand)",
        ),
        (
            "data.augment.auto=v1 data.augment.crop=resized",
            "(with data.augment.crop=resized: rand, augmix, original, originalr, v0, v0r, 3a)",
        ),
        (
            "data.augment.auto=trivial data.augment.color_jitter=0.4",
            "data.augment.color_jitter: got 0.4 with data.augment.auto=trivial, which changes colours itself; wanted 0",
        ),
        (
            "data.augment.auto=rand-m9 data.augment.color_jitter=0.4",
            "data.augment.color_jitter: got 0.4 with data.augment.auto=rand-m9, beside which timm leaves it out; wanted 0",
        ),
        (
            "data.augment.auto=trivial data.augment.crop=resized data.on_device=true",
            "data.on_device: got true with data.augment.crop=resized, which runs in workers",
        ),
    ],
)
def test_a_fault_is_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)) as caught:
        load_config("digits/conv_nano", override.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "override", ["auto=trivial", "auto=rand-m9-mstd0.5", "auto=null", "auto=augmix-m5-w4-d2 crop=resized"]
)
def test_known_policies_pass(override: str) -> None:
    keys = [f"data.augment.{key}" for key in (*override.split(), "flip=0.5")]
    assert load_config("digits/conv_nano", keys).data.augment.flip == 0.5  # type: ignore[attr-defined]
