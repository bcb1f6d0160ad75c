"""RetinaNet: its interface, its parts against torchvision's, its options, and that it learns."""

import math

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelP6P7
from torchvision.ops.misc import FrozenBatchNorm2d

from nearsight.detect import create_detector, list_detectors
from nearsight.detect.backbone import TimmFeatures
from nearsight.detect.heads import BoxHead, ClassHead
from nearsight.detect.pyramid import FeaturePyramid
from nearsight.detect.spatial import Spatial
from nearsight.errors import ArgumentTypeError, ArgumentValueError
from nearsight.layers import LocalAttention2d
from tests.detect.shapes import draw, learn, mean_average_precision, shapes_set

NANO = ("sasa_retinanet_nano", "retinanet_nano")


@pytest.mark.parametrize("name", NANO)
def test_losses_in_training_and_detections_in_evaluation(name):
    images, targets = shapes_set(3)
    targets[1] = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    model = create_detector(name, num_classes=3)
    losses = model(images, targets)
    assert set(losses) == {"classification", "bbox_regression"}
    sum(losses.values()).backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert missing == []
    model.score_thresh = 0.0
    found = model.eval()(images)
    assert len(found) == 3
    for image, one in zip(images, found, strict=True):
        assert 0 < len(one["scores"]) <= model.detections_per_img
        assert one["boxes"].shape == (len(one["scores"]), 4)
        assert one["labels"].dtype == torch.int64
        assert set(one["labels"].tolist()) <= {0, 1, 2}
        x1, y1, x2, y2 = one["boxes"].unbind(1)
        assert bool(
            (x1 >= 0).all() and (y1 >= 0).all() and (x2 <= image.shape[2]).all() and (y2 <= image.shape[1]).all()
        )


def test_only_images_without_objects():
    images, targets = shapes_set(2, shapes=0)
    targets = [{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)} for _ in targets]
    losses = create_detector("retinanet_nano", num_classes=3)(images, targets)
    assert losses["bbox_regression"] == 0
    assert losses["classification"] > 0
    sum(losses.values()).backward()


def test_no_images_no_detections():
    assert create_detector("retinanet_nano", num_classes=3).eval()([]) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype):
    """Maps in half, answers, anchors and boxes in float32: a bfloat16 knows no pixel beyond 256 exactly."""
    images, targets = shapes_set(2)
    model = create_detector("sasa_retinanet_nano", num_classes=3)
    with torch.autocast("cpu", dtype):
        losses = model(images, targets)
    assert all(loss.dtype == torch.float32 and loss.isfinite() for loss in losses.values())
    model = model.to(dtype).eval()
    model.score_thresh = 0.0
    (one,) = model([images[0].to(dtype)])
    assert one["boxes"].dtype == one["scores"].dtype == torch.float32


def test_anchors_lie_where_their_cells_do():
    """A level of stride s: 6 anchors around (x·s, y·s), rows before columns, sizes 4s and 4√2·s, ratios ½, 1, 2."""
    model = create_detector("sasa_retinanet_nano", num_classes=3)
    levels = model.level_anchors(torch.zeros(1, 3, 64, 128, dtype=torch.bfloat16))
    assert all(level.dtype == torch.float32 for level in levels)
    assert [len(level) for level in levels] == [6 * 8 * 16, 6 * 4 * 8, 6 * 2 * 4, 6 * 1 * 2]
    for stride, level in zip((8, 16, 32, 64), levels, strict=True):
        grid = level.reshape(64 // stride, 128 // stride, 6, 4)
        centre = (grid[..., :2] + grid[..., 2:]) / 2
        rows, columns = torch.meshgrid(torch.arange(64 // stride), torch.arange(128 // stride), indexing="ij")
        assert torch.equal(centre[:, :, 0, 0], columns * stride + centre[0, 0, 0, 0])
        assert torch.equal(centre[:, :, 0, 1], rows * stride + centre[0, 0, 0, 1])
        assert centre[0, 0].abs().max() <= 0.5
        width, height = (grid[0, 0, :, 2:] - grid[0, 0, :, :2]).unbind(1)
        sizes = torch.tensor([4.0 * stride, 4.0 * stride * 2**0.5] * 3)
        torch.testing.assert_close((width * height).sqrt(), sizes, rtol=0, atol=1.5)
        torch.testing.assert_close(height / width, torch.tensor([0.5, 0.5, 1, 1, 2, 2.0]), rtol=0.05, atol=0)


def test_other_anchors():
    model = create_detector(
        "retinanet_nano", num_classes=2, anchor_scale=3.0, anchor_octaves=3, anchor_ratios=(1.0, 4.0), width=16
    ).eval()
    first = model.level_anchors(torch.zeros(1, 3, 64, 128))[0][:6]
    sides = first[:, 2:] - first[:, :2]
    # Sizes 24, 24·2^⅓ and 24·2^⅔ as squares, then four times as high as wide; torchvision rounds half sides.
    wanted = [(side / ratio**0.5, side * ratio**0.5) for ratio in (1, 4) for side in (24, 30.24, 38.1)]
    torch.testing.assert_close(sides, torch.tensor(wanted), atol=1.0, rtol=0)
    outputs, _ = model.dense(torch.zeros(1, 3, 64, 128))
    assert outputs["cls_logits"][0].shape == (1, 8 * 16 * 6, 2)
    assert outputs["bbox_regression"][0].shape == (1, 8 * 16 * 6, 4)


def test_a_convolution_pyramid_is_torchvisions():
    theirs = FeaturePyramidNetwork([8, 12, 16], 32, LastLevelP6P7(32, 32))
    ours = FeaturePyramid([8, 12, 16], 32, Spatial("conv"))
    for i in range(3):
        ours.lateral[i].load_state_dict(theirs.inner_blocks[i][0].state_dict())
        ours.output[i].load_state_dict(theirs.layer_blocks[i][0].state_dict())
    ours.down[0].load_state_dict(theirs.extra_blocks.p6.state_dict())
    ours.down[1].load_state_dict(theirs.extra_blocks.p7.state_dict())
    maps = [torch.randn(2, c, *size) for c, size in ((8, (13, 22)), (12, (7, 11)), (16, (4, 6)))]
    want = theirs({str(i): x for i, x in enumerate(maps)})
    got, _ = ours(maps, [None] * 3)
    assert len(want) == len(got) == 5
    for one, other in zip(want.values(), got, strict=True):
        torch.testing.assert_close(one, other)


def test_convolution_heads_are_torchvisions():
    theirs = RetinaNetHead(32, 6, 5)
    classes, boxes = ClassHead(32, 6, 5, Spatial("conv")), BoxHead(32, 6, Spatial("conv"))
    pairs = ((classes, theirs.classification_head, "cls_logits"), (boxes, theirs.regression_head, "bbox_reg"))
    for mine, other, last in pairs:
        for i in range(4):
            mine.layers[i].load_state_dict(other.conv[i][0].state_dict())
        mine.predict.load_state_dict(getattr(other, last).state_dict())
    maps = [torch.randn(2, 32, 5, 9), torch.randn(2, 32, 3, 5)]
    want = theirs(maps)
    for name, head in (("cls_logits", classes), ("bbox_regression", boxes)):
        torch.testing.assert_close(torch.cat(head.run(maps, [None, None]), 1), want[name])


def test_attention_heads_start_as_the_appendix_says():
    model = create_detector("sasa_retinanet50", num_classes=90)
    for head in (model.head.classes, model.head.boxes):
        attentions = [m for m in head.modules() if isinstance(m, LocalAttention2d)]
        assert len(attentions) == 5
        for layer in attentions:
            assert layer.value_weight.std().item() == pytest.approx(0.01, rel=0.05)
            assert layer.qkv.weight[:256].std().item() == pytest.approx(1 / math.sqrt(256 * 32), rel=0.05)
            assert (layer.kernel_size, layer.num_heads) == ((7, 7), 8)
        assert head.predict.kernel_size == (1, 1)
        assert head.predict.weight.std().item() == pytest.approx(0.01, rel=0.1)
    torch.testing.assert_close(model.head.classes.predict.bias.sigmoid(), torch.full((540,), 0.01))
    assert not model.head.boxes.predict.bias.any()
    assert model.strides == (8, 16, 32, 64, 128)


@pytest.mark.parametrize("backbone", ["expatt_resnet_nano", "resnet_nano"])
def test_other_backbones(backbone):
    model = create_detector(
        "sasa_retinanet_nano", num_classes=2, backbone=backbone, backbone_options={}, strides=(2, 4, 8)
    )
    losses = model(*map(list, zip(draw(0, 40, 33), strict=True)))
    assert all(loss.isfinite() for loss in losses.values())
    assert model.strides == (2, 4, 8, 16)


def test_frozen_batch_norms_keep_their_statistics():
    images, targets = shapes_set(2)
    frozen = create_detector("retinanet_nano", num_classes=3, backbone_norm="frozen")
    norms = [m for m in frozen.modules() if isinstance(m, nn.BatchNorm2d | FrozenBatchNorm2d)]
    assert norms
    assert all(isinstance(m, FrozenBatchNorm2d) for m in norms)
    before = {k: v.clone() for k, v in frozen.named_buffers()}
    frozen(images, targets)
    assert all(torch.equal(v, before[k]) for k, v in frozen.named_buffers())
    assert not [n for n, _ in frozen.named_parameters() if "bn1" in n]


def test_weights_of_a_classifier_start_the_backbone(tmp_path):
    source = timm.create_model("sasa_resnet_nano", stem="conv", num_classes=7)
    nn.init.uniform_(source.layer4[0].bn3.running_mean)
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    model = create_detector("sasa_retinanet_nano", num_classes=3, backbone_weights=tmp_path / "weights.safetensors")
    ours = model.backbone.features.model.state_dict()
    theirs = source.state_dict()
    assert set(theirs) - set(ours) == {"fc.weight", "fc.bias"}
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


def test_weights_of_another_network_are_refused(tmp_path):
    save_file(timm.create_model("resnet_nano", stem="conv").state_dict(), tmp_path / "conv.safetensors")
    with pytest.raises(
        ArgumentValueError,
        match=r"conv.safetensors: lacks layer1.0.conv2.rel_row and \d+ more, wanted the weights of sasa_resnet_nano; check",
    ):
        create_detector("sasa_retinanet_nano", num_classes=3, backbone_weights=tmp_path / "conv.safetensors")
    more = {**timm.create_model("resnet_nano", stem="conv").state_dict(), "extra.weight": torch.zeros(1)}
    save_file(more, tmp_path / "more.safetensors")
    with pytest.raises(
        ArgumentValueError, match=r"more.safetensors: has an unknown extra.weight, wanted the weights of"
    ):
        create_detector("retinanet_nano", num_classes=3, backbone_weights=tmp_path / "more.safetensors")


@pytest.mark.parametrize("name", ["retinanet_nano", "detr_qna_vit_nano"])
def test_images_are_normalised_as_the_backbone_wants(name):
    transform = create_detector(name, num_classes=3).transform
    assert tuple(transform.image_mean) == (0.4914, 0.4822, 0.4465)  # CIFAR's, as all of the nano networks
    assert tuple(transform.image_std) == (0.247, 0.2435, 0.2616)


def test_errors():
    with pytest.raises(
        ArgumentValueError, match=r"got 'sasa_retinanet5O', wanted one of .* Did you mean 'sasa_retinanet50'\?"
    ):
        create_detector("sasa_retinanet5O", num_classes=3)
    with pytest.raises(ArgumentValueError, match=r"got form='convolution', wanted"):
        create_detector("retinanet_nano", num_classes=3, heads="convolution")
    with pytest.raises(
        ArgumentValueError,
        match=r"TimmFeatures: got strides=\(8, 64\), wanted some of \(2, 4, 8, 16, 32\): resnet_nano has no map of stride 64",
    ):
        create_detector("retinanet_nano", num_classes=3, strides=(8, 64))
    with pytest.raises(ArgumentValueError, match="got norm='batch', wanted"):
        TimmFeatures("resnet_nano", (8,), norm="batch")


def test_wrong_calls():
    model = create_detector("retinanet_nano", num_classes=3)
    image, target = draw(0, 64, 80)
    with pytest.raises(
        ArgumentTypeError, match=r"got a tensor \[2, 3, 64, 64\], wanted a list of images .*list\(images\)"
    ):
        model(torch.rand(2, 3, 64, 64))
    with pytest.raises(ArgumentTypeError, match=r"got image 1 of dtype torch.uint8, wanted a floating-point .* by 255"):
        model([image, (image * 255).byte()])
    with pytest.raises(ArgumentValueError, match=r"got image 0 of shape \[1, 64, 80\], wanted \[3, H, W\]"):
        model([image[:1]])
    with pytest.raises(
        ArgumentValueError, match="got no targets in training mode, wanted one dict of boxes and labels"
    ):
        model([image])
    with pytest.raises(ArgumentValueError, match="got no images in training mode"):
        model([], [])
    with pytest.raises(ArgumentValueError, match="got 1 targets for 2 images, wanted one for each"):
        model([image, image], [target])
    with pytest.raises(ArgumentValueError, match=r"got boxes \[2, 4\] and labels \[1\] for image 0, wanted"):
        model([image], [{"boxes": target["boxes"], "labels": target["labels"][:1]}])
    empty = {"boxes": torch.tensor([[3.0, 4.0, 3.0, 9.0]]), "labels": torch.tensor([0])}
    with pytest.raises(ArgumentValueError, match=r"got the box \[3.0, 4.0, 3.0, 9.0\] for image 1, wanted x1 < x2"):
        model([image, image], [target, empty])


def test_every_name_builds_with_its_options():
    for name in list_detectors():
        if "retinanet" in name:
            with torch.device("meta"):
                model = create_detector(name, num_classes=4)
            assert model.head.classes.outputs == 4


@pytest.mark.parametrize(
    ("name", "options", "steps", "lr"),
    [
        ("retinanet_nano", {}, 60, 2e-3),
        pytest.param("sasa_retinanet_nano", {"window": 3}, 120, 3e-3, marks=pytest.mark.slow),
    ],
)
def test_it_learns_eight_images_by_heart(name, options, steps, lr):
    images, targets = shapes_set(8)
    model = create_detector(name, num_classes=3, anchor_scale=2.5, **options)
    losses = learn(model, images, targets, steps=steps, lr=lr)
    assert losses[-1] < losses[0] / 3
    result = mean_average_precision(model, images, targets)
    assert result["map_50"] >= 0.9, result
