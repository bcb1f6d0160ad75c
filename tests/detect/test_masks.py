"""Padding: no detector sees it, and every mask that keeps it out is needed."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models.detection.image_list import ImageList

from nearsight.detect import create_detector
from nearsight.detect.batch import PadOnly, padding_mask
from nearsight.detect.pyramid import FeaturePyramid
from nearsight.detect.spatial import Spatial
from nearsight.models.common import shrink_mask
from tests.detect.shapes import draw

# In float32, by which a sum over other tiles may differ: a thousandth of a pixel, and a hundred-thousandth in the scores.
PIXELS, SCORES = 1e-3, 1e-5

DETECTORS = {
    "attention": ("sasa_retinanet_nano", {"backbone_options": {"stem": "attention"}, "norm": False, "init_std": 0.1}),
    "attention and norms": ("sasa_retinanet_nano", {}),
    "convolution": ("retinanet_nano", {}),
    "convolution heads": ("sasa_retinanet_nano", {"pyramid": "conv", "heads": "conv"}),
    "qna": (
        "sasa_retinanet_nano",
        {"backbone": "qna_vit_nano", "backbone_options": {"patch_size": 4}, "strides": (4, 8, 16)},
    ),
    "detr": ("detr_qna_vit_nano", {}),
}


def detector(kind):
    """A detector whose every weight matters: untrained ones start with zeros, tiny heads and BatchNorms that do nothing."""
    name, options = DETECTORS[kind]
    model = create_detector(name, num_classes=3, **options)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.5)
            nn.init.normal_(module.running_mean, std=0.1)
        elif isinstance(module, nn.Conv2d) and module.bias is not None:
            nn.init.normal_(module.bias, std=0.5)
    if kind != "detr":
        for head in (model.head.classes, model.head.boxes):
            nn.init.normal_(head.predict.weight, std=0.1)
        model.score_thresh, model.topk_candidates = 0.0, 40
    return model.eval()


def images():
    """One image, and a larger one that makes it padded.

    The maps of the first have an odd side at every stride from 2 (17×33) to 32 (2×3): a stride of 2 reaches over it.
    """
    return draw(0, 33, 66)[0], draw(1, 70, 140)[0]


def apart(first, second):
    """How far the least alike detection of either list is from its likeness in the other, in units of the tolerance.

    Order is of no account: scores may tie.
    """
    if len(first["scores"]) != len(second["scores"]):
        return float("inf")
    boxes = (first["boxes"][:, None] - second["boxes"]).abs().amax(-1) / PIXELS
    scores = (first["scores"][:, None] - second["scores"]).abs() / SCORES
    same = first["labels"][:, None] == second["labels"]
    distance = torch.maximum(boxes, scores).masked_fill(~same, torch.inf)
    return max(distance.amin(0).max().item(), distance.amin(1).max().item())


@pytest.mark.parametrize("kind", DETECTORS)
@torch.no_grad()
def test_padding_changes_no_detection(kind):
    model = detector(kind)
    small, large = images()
    alone, together = model([small])[0], model([large, small])[1]
    assert len(alone["scores"]) > 10
    assert apart(alone, together) < 1


@torch.no_grad()
def test_an_image_that_needs_no_padding_is_the_same_beside_one_that_makes_some():
    model = detector("attention")
    whole, large = draw(0, 64, 64)[0], draw(1, 70, 128)[0]
    assert apart(model([whole])[0], model([large, whole])[1]) < 1


@torch.no_grad()
def test_the_order_of_a_batch_is_of_no_account():
    model = detector("attention")
    small, large = images()
    first, second = model([small, large]), model([large, small])
    assert apart(first[0], second[1]) == apart(first[1], second[0]) == 0


def every_answer(model, small, *others):
    """What the heads say of every anchor inside the first image, one row each; padded as the others ask for."""
    batch, _ = model.transform([small, *others])
    outputs, masks = model.dense(batch.tensors, padding_mask(batch))
    kept = []
    for logits, offsets, mask in zip(outputs["cls_logits"], outputs["bbox_regression"], masks, strict=True):
        answers = torch.cat([logits, offsets], -1)[0]
        kept.append(answers if mask is None else answers[model._valid_anchors(mask)[0]])
    return torch.cat(kept)


@pytest.mark.parametrize("kind", ["attention", "convolution", "convolution heads"])
@torch.no_grad()
def test_a_padded_image_is_answered_as_one_without_any_padding(kind):
    """What no detector is asked, but every layer of it could be: the image as it is, no mask."""
    model = detector(kind).double()
    small, large = (image.double() for image in images())
    bare, _ = model.dense(model.transform.normalize(small)[None])
    wanted = torch.cat(
        [torch.cat(level, -1)[0] for level in zip(bare["cls_logits"], bare["bbox_regression"], strict=True)]
    )
    assert (every_answer(model, small, large) - wanted).abs().max() < 2e-6


def masked_layers(model):
    """Every module that mixes places and takes a mask, by name; not those that only hand it on."""
    holders = ("backbone", "backbone.features", "backbone.features.model", "head.classes", "head.boxes")
    return {
        name: module
        for name, module in model.named_modules()
        if "key_mask" in inspect.signature(module.forward).parameters
        and name not in holders
        and getattr(module, "kernel_size", None) != (1, 1)
    }


@pytest.mark.parametrize("kind", ["attention", "convolution"])
@torch.no_grad()
def test_no_mask_may_be_dropped(kind):
    """Deafen any one layer to its mask and the padding shows, so that the tests above would fail."""
    model = detector(kind).double()
    small, large = (image.double() for image in images())
    wanted = every_answer(model, small)
    assert (every_answer(model, small, large) - wanted).abs().max() < 2e-6
    layers = masked_layers(model)
    for part in (
        "backbone.features.model.layer4",
        "backbone.pyramid.output.2",
        "backbone.pyramid.down.0",
        "head.boxes.layers.1",
    ):
        assert any(name.startswith(part) for name in layers), part
    unnoticed = []
    for name, layer in layers.items():
        heard = layer.forward
        layer.forward = lambda x, key_mask=None, heard=heard: heard(x)
        if (every_answer(model, small) - wanted).abs().max() < 2e-5:
            unnoticed.append(name)
        del layer.forward
    assert unnoticed == []


@pytest.mark.parametrize("form", ["attention", "conv"])
@pytest.mark.parametrize("size", [(13, 22), (9, 5), (1, 3)])
def test_the_pyramid_ends_where_the_mask_does(form, size):
    """Odd maps, alone and inside larger ones full of other numbers: up-sampling, outputs and coarser levels agree."""
    pyramid = FeaturePyramid([8, 12, 16], 16, Spatial(form, window=5, num_heads=2), extra=2).double()
    for module in pyramid.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.bias)
    mask = F.pad(torch.ones(2, *size, dtype=torch.bool), (0, 32 - size[1], 0, 24 - size[0]))
    masks = [mask, shrink_mask(mask, 2), shrink_mask(shrink_mask(mask, 2), 2)]
    padded, alone = [], []
    for channels, one in zip((8, 12, 16), masks, strict=True):
        rows, columns = int(one[0, :, 0].sum()), int(one[0, 0].sum())
        padded.append(10 * torch.randn(2, channels, *one.shape[1:], dtype=torch.float64))
        alone.append(padded[-1][..., :rows, :columns])
    wanted, none = pyramid(alone, [None] * 3)
    got, got_masks = pyramid(padded, masks)
    assert none == [None] * 5
    for want, have, one in zip(wanted, got, got_masks, strict=True):
        rows, columns = want.shape[-2:]
        assert torch.equal(
            one,
            F.pad(torch.ones_like(want[:, 0], dtype=torch.bool), (0, one.shape[2] - columns, 0, one.shape[1] - rows)),
        )
        torch.testing.assert_close(have[..., :rows, :columns], want, rtol=1e-9, atol=1e-9)


def test_losses_of_a_batch_are_the_mean_of_its_images():
    """Anchors in the padding are neither matched nor counted as empty. BatchNorms are frozen: they alone would see it."""
    model = create_detector("sasa_retinanet_nano", num_classes=3, backbone_norm="frozen", window=3)
    pairs = [draw(3, 35, 67), draw(4, 70, 60)]
    together = model([image for image, _ in pairs], [target for _, target in pairs])
    apart = [model([image], [target]) for image, target in pairs]
    for name, loss in together.items():
        torch.testing.assert_close(loss, sum(one[name] for one in apart) / 2, rtol=1e-5, atol=1e-6)


def test_the_mask_of_a_batch():
    batch = ImageList(torch.zeros(3, 3, 4, 8), [(4, 8), (3, 8), (4, 1)])
    mask = padding_mask(batch)
    assert mask.sum((1, 2)).tolist() == [32, 24, 4]
    assert not mask[1, 3].any()
    assert mask[2, :, 0].all()
    assert padding_mask(ImageList(torch.zeros(2, 3, 4, 8), [(4, 8)] * 2)) is None


def test_padding_is_below_and_on_the_right_and_zero_after_normalising():
    pad = PadOnly([0.5, 0.4, 0.3], [0.2, 0.2, 0.2], multiple=16)
    batch, _ = pad([torch.full((3, 5, 20), 0.5), torch.full((3, 17, 3), 0.5)])
    assert batch.tensors.shape == (2, 3, 32, 32)
    assert not batch.tensors[0, :, 5:].any()
    assert not batch.tensors[1, :, :, 3:].any()
    torch.testing.assert_close(batch.tensors[0, :, 4, 19], torch.tensor([0.0, 0.5, 1.0]))
