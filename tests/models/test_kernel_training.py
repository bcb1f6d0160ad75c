"""Training with the Triton kernels and without: the same losses."""

import pytest
import timm
import torch

import nearsight  # noqa: F401
from tests.support.digits import train_on_digits

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def exact_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def losses(name, backend):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, in_chans=1).cuda()
    layers = [layer for layer in model.modules() if hasattr(layer, "backend")]
    assert layers
    for layer in layers:
        layer.backend = backend
    # Many images and small steps: one ReLU that rounding turns the other way moves the gradient of 64 images by a percent,
    # and a larger rate makes ten percent of it in ten steps (seen between the torch and reference backends too).
    return train_on_digits(model, torch.optim.SGD(model.parameters(), lr=5e-4, momentum=0.9), 10, images=512)


@pytest.mark.parametrize("name", ["sasa_resnet_nano", "qna_vit_nano", "expatt_resnet_nano"])
def test_ten_steps_lose_the_same_with_and_without_the_kernels(name):
    with_kernels, without = losses(name, "triton"), losses(name, "torch")
    assert with_kernels == pytest.approx(without, rel=1e-3)
    assert with_kernels[-1] < with_kernels[0]
