"""The runner of the interpreted tests, and what Triton backends refuse on any op."""

import pytest
import torch

from nearsight.ops.triton_support import common_refusal, dot_precision
from tests.ops.triton.interpreter import interpreted


@interpreted
def test_the_child_interprets_and_fills_with_nan():
    from nearsight.ops import triton_support

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
    from nearsight.ops import triton_support

    assert triton_support._image_reach(huge) == 2**31
    assert triton_support._image_reach(torch.empty(5, 0, 3)) < 2**31


def test_float32_products_are_float32():
    assert dot_precision(torch.float32) == ("tf32x3" if torch.version.hip is None else "ieee")
