"""DETR: its interface and losses, its backbone, saving and loading, and that it learns."""

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.ops import box_convert
from transformers import DetrForObjectDetection
from transformers.models.detr.modeling_detr import DetrFrozenBatchNorm2d

from nearsight.detect import create_detector, list_detectors
from nearsight.detect.detr import Detr
from nearsight.errors import ArgumentValueError
from tests.detect.shapes import draw, learn, mean_average_precision, shapes_set

NAME = "detr_qna_vit_nano"
SIZES = ((32, 40), (40, 32), (40, 40))


def small_set(count=3):
    return shapes_set(count, SIZES, smallest=12, largest=18)


@pytest.fixture
def model():
    return create_detector(NAME, num_classes=3)


def test_losses_add_up_to_transformers_own(model):
    images, targets = small_set()
    losses = model(images, targets)
    assert set(losses) == {"loss_ce", "loss_bbox", "loss_giou"}
    # The same batch by hand: padded to the stride, boxes as shares of each image.
    batch, _ = model.transform(images)
    assert batch.tensors.shape[-2:] == (40, 40)
    mask = torch.zeros(3, 40, 40, dtype=torch.bool)
    for i, image in enumerate(images):
        mask[i, : image.shape[1], : image.shape[2]] = True
    labels = [
        {
            "class_labels": t["labels"],
            "boxes": box_convert(t["boxes"] / torch.tensor([i.shape[2], i.shape[1]] * 2), "xyxy", "cxcywh"),
        }
        for i, t in zip(images, targets, strict=True)
    ]
    want = model.network(batch.tensors, mask, labels=labels)
    torch.testing.assert_close(sum(losses.values()), want.loss)
    assert len([k for k in want.loss_dict if k.startswith("loss_ce")]) == 2
    sum(losses.values()).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


def test_detections(model):
    images, _ = small_set()
    found = model.eval()(images)
    for image, one in zip(images, found, strict=True):
        assert one["boxes"].shape == (20, 4)
        assert one["scores"].shape == one["labels"].shape == (20,)
        assert bool((one["scores"].diff() <= 0).all())
        assert set(one["labels"].tolist()) <= {0, 1, 2}
        x1, y1, x2, y2 = one["boxes"].unbind(1)
        assert bool(
            (x1 >= 0).all() and (y1 >= 0).all() and (x2 <= image.shape[2]).all() and (y2 <= image.shape[1]).all()
        )
    model.score_thresh = found[0]["scores"][7].item()
    assert len(model(images)[0]["scores"]) == 8
    assert model([]) == []


def test_boxes_are_in_the_pixels_of_each_image(model):
    """A query that says (½, ¼, ½, ¼) of the image means x from ¼ to ¾ of its width, y from ⅛ to ⅜ of its height."""
    head = model.network.bbox_predictor.layers[-1]
    nn.init.zeros_(head.weight)
    head.bias.data = torch.logit(torch.tensor([0.5, 0.25, 0.5, 0.25]))
    for one, image in zip(model.eval()(small_set(2)[0]), small_set(2)[0], strict=True):
        height, width = image.shape[1:]
        want = torch.tensor([0.25 * width, 0.125 * height, 0.75 * width, 0.375 * height])
        torch.testing.assert_close(one["boxes"], want.expand(20, 4))
    head.bias.data = torch.logit(torch.tensor([0.75, 0.25, 0.75, 0.75]))  # from 3/8 to 9/8, from −1/8 to 5/8
    (one,) = model(small_set(1)[0])
    height, width = small_set(1)[0][0].shape[1:]
    torch.testing.assert_close(one["boxes"], torch.tensor([0.375 * width, 0, width, 0.625 * height]).expand(20, 4))


def test_images_without_objects(model):
    images, _ = small_set(2)
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    losses = model(images, [empty, empty])
    assert losses["loss_bbox"] == losses["loss_giou"] == 0
    sum(losses.values()).backward()


def test_the_backbone_keeps_its_own_start():
    """transformers initialises what it builds anew; the backbone's scheme must survive that."""
    torch.manual_seed(5)
    plain = timm.create_model("qna_vit_nano", features_only=True).model
    ours = create_detector(NAME, num_classes=3).network.model.backbone.model.model
    theirs = dict(plain.named_parameters())
    for name, weight in ours.named_parameters():
        if weight.numel() > 1000:
            assert weight.std().item() == pytest.approx(theirs[name].std().item(), rel=0.2), name


def test_the_transformer_starts_as_detrs_own_code(model):
    network = model.network
    assert network.model.query_position_embeddings.weight.std().item() == pytest.approx(1, rel=0.1)
    linear = network.model.encoder.layers[0].mlp.fc1.weight
    assert linear.std().item() == pytest.approx((2 / sum(linear.shape)) ** 0.5, rel=0.1)


def test_save_load_predict(model, tmp_path):
    images, targets = small_set()
    learn(model, images, targets, steps=2, lr=1e-3)
    model.eval()
    want = model(images)
    model.save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    for one, other in zip(want, Detr.from_pretrained(tmp_path).eval()(images), strict=True):
        for key in one:
            assert torch.equal(one[key], other[key])
    plain = DetrForObjectDetection.from_pretrained(tmp_path, local_files_only=True).eval()
    batch, _ = model.transform([images[2]])
    torch.testing.assert_close(plain(batch.tensors).logits, model.network(batch.tensors).logits)


def test_a_state_dict_fills_another(model):
    other = create_detector(NAME, num_classes=3)
    other.load_state_dict(model.state_dict())
    images, _ = small_set()
    assert torch.equal(model.eval()(images)[1]["boxes"], other.eval()(images)[1]["boxes"])


def test_weights_of_a_classifier_start_the_backbone(tmp_path):
    source = timm.create_model("qna_vit_nano", num_classes=7)
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    model = create_detector(NAME, num_classes=3, backbone_weights=tmp_path / "weights.safetensors")
    theirs = source.state_dict()
    ours = model.network.model.backbone.model.model.state_dict()
    assert ours
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


def test_batch_norms_are_frozen_with_the_loaded_statistics(tmp_path):
    source = timm.create_model("sasa_resnet_nano")
    for module in source.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    model = create_detector(
        NAME, num_classes=3, backbone="sasa_resnet_nano", backbone_weights=tmp_path / "weights.safetensors"
    )
    backbone = model.network.model.backbone.model.model
    norms = [m for m in backbone.modules() if isinstance(m, nn.BatchNorm2d | DetrFrozenBatchNorm2d)]
    assert norms
    assert all(isinstance(m, DetrFrozenBatchNorm2d) for m in norms)
    image = torch.rand(1, 3, 24, 32)
    want = source.eval().forward_features(image)
    (got,) = backbone.forward_intermediates(image, [4], intermediates_only=True)
    torch.testing.assert_close(got, want)
    model.save_pretrained(tmp_path / "saved")
    loaded = Detr.from_pretrained(tmp_path / "saved").network.model.backbone.model.model
    (again,) = loaded.forward_intermediates(image, [4], intermediates_only=True)
    torch.testing.assert_close(again, want)


@pytest.mark.parametrize("backbone", ["test_resnet", "aa_resnet34"])
def test_any_resnet_can_be_the_backbone(backbone, tmp_path):
    """timm takes some apart for their maps, and wraps others; either way the last map is the classifier's."""
    source = timm.create_model(backbone).eval()
    save_file(source.state_dict(), tmp_path / "start.safetensors")
    model = create_detector(NAME, num_classes=3, backbone=backbone, backbone_weights=tmp_path / "start.safetensors")
    images = torch.randn(1, 3, 64, 96)
    ((features, mask),) = model.eval().network.model.backbone(images, torch.ones(1, 64, 96, dtype=torch.bool))
    torch.testing.assert_close(features, source.forward_features(images))
    assert mask.shape == (1, *features.shape[-2:])
    losses = model.train()(*small_set())
    assert all(torch.isfinite(loss) for loss in losses.values())


def test_norms_that_hold_activations_are_refused():
    """transformers' frozen ones would leave the activations out."""
    with pytest.raises(ArgumentValueError, match=r"backbone='aa_mobilenetv2_100', whose BatchNorms hold activations"):
        create_detector(NAME, num_classes=3, backbone="aa_mobilenetv2_100")


def test_the_papers_members():
    """The four of the supplement, whose transformer has DETR's 6 + 6 layers of width 256 and 100 queries."""
    names = [name for name in list_detectors() if name.startswith("detr_qna_vit") and "nano" not in name]
    assert len(names) == 4
    network = create_detector("detr_qna_vit_tiny", num_classes=91).network
    config = network.config
    assert (config.d_model, config.encoder_layers, config.decoder_layers, config.num_queries) == (256, 6, 6, 100)
    assert config.backbone_config.backbone == "qna_vit_tiny"
    assert network.model.input_projection.in_channels == 512
    assert network.model.backbone.stride == 32


def test_autocast_keeps_scores_and_boxes_in_float32(model):
    images, targets = small_set(2)
    model.eval()
    want = model(images)
    with torch.autocast("cpu", torch.bfloat16):
        got = model(images)
        outputs = model.network(model.transform(images)[0].tensors)
    assert outputs.logits.dtype == outputs.pred_boxes.dtype == torch.float32
    # More than 8 bits: numbers that a bfloat16 does not hold.
    assert not torch.equal(outputs.pred_boxes, outputs.pred_boxes.bfloat16().float())
    torch.testing.assert_close(got[0]["scores"], want[0]["scores"], rtol=0, atol=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        losses = model.train()(images, targets)
    sum(losses.values()).backward()
    assert all(loss.dtype == torch.float32 and loss.isfinite() for loss in losses.values())


def test_errors(model):
    with pytest.raises(ArgumentValueError, match="DETR: got no targets in training mode"):
        model([draw(0, 40, 40)[0]])


@pytest.mark.slow
def test_it_learns_eight_images_by_heart(model):
    images, targets = small_set(8)
    losses = learn(model, images, targets, steps=200, lr=1e-3)
    assert losses[-1] < losses[0] / 5
    result = mean_average_precision(model, images, targets)
    assert result["map_50"] >= 0.9, result
