"""Padding masks on their way through a network."""

from __future__ import annotations

import pytest
import torch
from timm.layers import SelectAdaptivePool2d

from nearsight.models.common import default_cfg, global_pool_valid, shrink_mask, zero_masked


def corner_mask(size: tuple[int, int], inner: tuple[int, int]) -> torch.Tensor:
    mask = torch.zeros(1, *size, dtype=torch.bool)
    mask[:, : inner[0], : inner[1]] = True
    return mask


@pytest.mark.parametrize(
    "kind", ["avg", "max", "avgmax", "catavgmax", "fast", "fastmax", "fastavgmax", "fastcatavgmax"]
)
@pytest.mark.parametrize("flatten", [True, False])
def test_pooling_over_valid_pixels_is_pooling_the_crop(kind, flatten):
    pool = SelectAdaptivePool2d(pool_type=kind, flatten=flatten)
    x = torch.randn(2, 3, 5, 7) - 3
    mask = corner_mask((5, 7), (2, 4)).expand(2, -1, -1)
    torch.testing.assert_close(global_pool_valid(pool, x, mask), pool(x[:, :, :2, :4]))
    torch.testing.assert_close(global_pool_valid(pool, x, None), pool(x))
    assert global_pool_valid(pool, x, torch.zeros_like(mask)).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_beyond_half_types_do_not_matter(dtype):
    pool = SelectAdaptivePool2d(pool_type="avg", flatten=True)
    x = torch.full((1, 2, 32, 40), 100.0, dtype=dtype)
    pooled = global_pool_valid(pool, x, corner_mask((32, 40), (31, 37)))
    assert pooled.dtype == dtype
    assert pooled.eq(100).all()


def test_no_pooling_keeps_the_map_and_zeroes_what_is_masked():
    x = torch.randn(1, 3, 5, 7)
    mask = corner_mask((5, 7), (2, 4))
    out = global_pool_valid(SelectAdaptivePool2d(pool_type=""), x, mask)
    torch.testing.assert_close(out, zero_masked(x, mask))
    assert out[:, :, 2:].eq(0).all()
    assert zero_masked(x, None) is x


@pytest.mark.parametrize("stride", [1, 2, 4, 32])
def test_a_shrunk_mask_is_that_of_the_crop(stride):
    mask = shrink_mask(corner_mask((37, 50), (19, 33)), stride)
    assert mask is not None
    assert mask.dtype == torch.bool
    assert mask.shape == (1, -(-37 // stride), -(-50 // stride))
    assert mask.any(2).sum() == -(-19 // stride)
    assert mask.any(1).sum() == -(-33 // stride)
    assert shrink_mask(None, stride) is None


def test_default_cfg_takes_overrides():
    cfg = default_cfg(first_conv="conv1", input_size=(3, 32, 32))
    assert cfg["input_size"] == (3, 32, 32)
    assert cfg["first_conv"] == "conv1"
    assert cfg["num_classes"] == 1000
