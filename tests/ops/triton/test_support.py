"""The runner of the interpreted tests, and what Triton backends refuse on any op."""

import types

import pytest
import torch

from nearsight.ops import triton_support
from nearsight.ops.triton_support import common_refusal, dot_precision
from tests.ops.triton.interpreter import interpreted


@interpreted
def test_the_child_interprets_and_fills_with_nan():
    assert triton_support.INTERPRETED
    assert torch.empty(3).isnan().all()
    assert common_refusal(torch.zeros(1, 2)) is None


@interpreted
def fails(text):
    raise ValueError(text)


def test_a_failure_in_the_child_is_a_failure_here():
    with pytest.raises(AssertionError, match="told so"):
        fails(text="told so")


@interpreted
def test_refuses_double():
    assert common_refusal(torch.zeros(1, dtype=torch.float64)) == "needs float32, bfloat16 or float16, got float64"


def test_refuses_the_cpu_when_not_interpreting():
    assert common_refusal(torch.zeros(1)) == "needs CUDA tensors, got cpu"


def test_refuses_images_out_of_reach_of_32_bit_offsets():
    huge = torch.empty(1, device="meta").as_strided((2, 3), (1, 2**30))
    assert triton_support._image_reach(huge) == 2**31
    assert triton_support._image_reach(torch.empty(5, 0, 3)) < 2**31


def test_refuses_images_whose_results_are_out_of_reach():
    """Of an expanded tensor the gradient is dense."""
    one = torch.empty(1, device="meta").expand(3, 2**16, 2**15, 1)
    assert triton_support._image_reach(one) == 0
    assert triton_support._image_size(one) == 2**31
    wide = torch.zeros(1).expand(3, 2**16, 2**15 + 1, 1)
    assert common_refusal_interpreted(wide) == f"needs images of fewer than 2³¹ elements, got shape {list(wide.shape)}"


def common_refusal_interpreted(tensor):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_support, "INTERPRETED", True)
        return common_refusal(tensor)


def stand_in(stride, device="cpu"):
    """What a refusal asks of a tensor [1, 2], without its memory."""
    return types.SimpleNamespace(
        device=torch.device(device), dtype=torch.float32, shape=torch.Size([1, 2]), stride=lambda: (1, stride)
    )


def test_every_tensor_must_be_in_reach(monkeypatch):
    monkeypatch.setattr(triton_support, "INTERPRETED", True)
    near, far = stand_in(2**31 - 1), stand_in(2**31)
    assert common_refusal(near, None, near) is None
    for given in ((far,), (near, far), (near, None, far)):
        assert common_refusal(*given) == "needs images of fewer than 2³¹ elements, got shape [1, 2]"


@pytest.mark.parametrize(("capability", "refuses"), [((7, 5), True), ((8, 0), False), ((9, 0), False)])
def test_refuses_gpus_that_are_too_old(monkeypatch, capability, refuses):
    monkeypatch.setattr(triton_support, "_capability", lambda index: capability)
    wanted = f"needs a GPU of compute capability 8.0 or later, got {capability}" if refuses else None
    assert common_refusal(stand_in(1, "cuda")) == wanted


def test_refuses_to_be_exported_and_to_run_without_triton(monkeypatch):
    monkeypatch.setattr(triton_support, "INTERPRETED", True)
    with monkeypatch.context() as patch:
        patch.setattr(triton_support, "exporting", lambda: True)
        assert common_refusal(stand_in(1)) == "needs a call that runs, got one that is being exported"
    monkeypatch.setattr(triton_support, "HAS_TRITON", False)
    assert common_refusal(stand_in(1)) == "needs the triton package, got a Python without it; install triton"


def test_tensors_without_memory_may_stand_for_a_gpus(monkeypatch):
    """To count what a network keeps there: with Triton, whether it is here or not."""
    monkeypatch.setattr(triton_support, "HAS_TRITON", False)
    with triton_support.planned_for_gpus():
        assert common_refusal(stand_in(1, "meta")) is None
        assert common_refusal(stand_in(1)).startswith("needs the triton package")
        assert common_refusal(torch.zeros(1, dtype=torch.float64, device="meta")).startswith("needs float32, bfloat16")
    monkeypatch.setattr(triton_support, "HAS_TRITON", True)
    assert common_refusal(stand_in(1, "meta")) == "needs CUDA tensors, got meta"
    with triton_support.planned_for_gpus():
        assert common_refusal(stand_in(1)) == "needs CUDA tensors, got cpu"


def test_float32_products_are_float32():
    assert dot_precision(torch.float32) == ("tf32x3" if torch.version.hip is None else "ieee")


@pytest.mark.parametrize(
    ("device", "capability", "early"), [("cpu", (9, 0), 0), ("cuda", (8, 9), 0), ("cuda", (9, 0), 1)]
)
def test_kernels_start_early_where_the_gpu_can(monkeypatch, device, capability, early):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_support, "_capability", lambda index: capability)
    wanted = {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
    assert triton_support.early_launch(torch.device(device)) == wanted
