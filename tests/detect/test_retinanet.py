"""RetinaNet's interface, its counts, and that it learns."""

import pytest
import torch

from nearsight.detect import create_detector, list_detectors
from nearsight.errors import ArgumentTypeError, ArgumentValueError
from tests.detect.shapes import shapes_set

NANO = ("sasa_retinanet_nano", "retinanet_nano")


@pytest.mark.parametrize("name", NANO)
def test_losses_in_training_and_detections_in_evaluation(name):
    images, targets = shapes_set(3)
    model = create_detector(name, num_classes=3)
    losses = model(images, targets)
    assert set(losses) == {"classification", "bbox_regression"}
    sum(losses.values()).backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert missing == []
    found = model.eval()(images)
    assert len(found) == 3
    for image, one in zip(images, found, strict=True):
        assert one["boxes"].shape == (len(one["scores"]), 4)
        assert one["labels"].dtype == torch.int64
        assert bool((one["boxes"][:, 2] <= image.shape[2]).all())
        assert bool((one["boxes"][:, 3] <= image.shape[1]).all())


def test_an_unknown_name():
    with pytest.raises(
        ArgumentValueError, match=r"got 'sasa_retinanet5O', wanted one of .*Did you mean 'sasa_retinanet50'\?"
    ):
        create_detector("sasa_retinanet5O", num_classes=3)
    assert "sasa_retinanet50" in list_detectors()


def test_a_batch_as_a_tensor_is_refused():
    model = create_detector("retinanet_nano", num_classes=3).eval()
    with pytest.raises(ArgumentTypeError, match=r"got a tensor \[2, 3, 64, 64\], wanted a list of images"):
        model(torch.rand(2, 3, 64, 64))
