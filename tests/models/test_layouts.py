"""What torch.compile makes of the networks' layouts: maps stay channels-last, nothing is transposed on its way to a kernel."""

import re

import pytest
import timm
import torch

import nearsight  # noqa: F401
from tests.ops.triton.interpreter import interpreted

HEIGHT, WIDTH = 24, 40
ALLOCATION = re.compile(r"empty_strided_\w+\(\(([\d, ]+)\), \(([\d, ]+)\)")


def numbers(text):
    return [int(word) for word in text.replace(",", " ").split()]


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pools"),
    # torch.compile writes the gradient of an average pool as [N, C, H, W]; explicit attention has one per strided layer.
    [("sasa_resnet_nano", 0), ("qna_vit_nano", 0), ("expatt_resnet_nano", 3)],
)
def test_no_map_is_stored_with_another_axis_than_the_channels_innermost(name, pools):
    from torch._inductor.utils import fresh_cache, run_fw_bw_and_get_code

    model = timm.create_model(name, num_classes=10).to(memory_format=torch.channels_last).train()
    compiled = torch.compile(model, dynamic=False)
    images = torch.randn(2, 3, HEIGHT, WIDTH).to(memory_format=torch.channels_last)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return compiled(images)

    with fresh_cache():
        _, codes = run_fw_bw_and_get_code(run)
    assert len(codes) == 2
    assert all("torch.ops.nearsight" in code for code in codes)
    sizes = {(-(-HEIGHT // s), -(-WIDTH // s)) for s in (1, 2, 4, 8, 16)}
    channels_last, other = 0, []
    for shape, strides in (map(numbers, found.groups()) for code in codes for found in ALLOCATION.finditer(code)):
        if len(shape) != 4 or shape[0] != 2:
            continue
        if tuple(shape[2:]) in sizes and shape[1] > 1:
            if strides[1] == 1:
                channels_last += 1
            else:
                other.append((shape, strides))
        elif tuple(shape[1:3]) in sizes and shape[3] > 1:
            assert strides[3] == 1, f"pixels {shape} with strides {strides}"
    assert channels_last > 10
    assert len(other) == pools, other
