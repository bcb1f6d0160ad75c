"""The first call of a class of local attention: its kernels are compiled side by side, the gradient's with them, and none later.

Compiled for an H200 by a driver without a GPU, which loads and launches nothing.
"""

import pytest
import torch

pytest.importorskip("triton")

STRIPS = ["backward", "merge", "finish_relative"]


@pytest.fixture(autouse=True)
def copy_engine(monkeypatch):
    """The driver's GPU has one."""
    from nearsight.ops.local import launches

    monkeypatch.setattr(launches, "_has_copy_engine", lambda index: True)


def draw(*shape, trains=True):
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta").requires_grad_(trains)


def options(window=3, trains=True):
    rel = [draw(1, window, 8, trains=trains) for _ in range(2)]
    return (*rel, None, [window, window], [1, 1], False, 1.0)


def test_everything_is_compiled_before_the_first_launch(driver):
    from nearsight.ops.local import triton_impl

    qkv = [draw(2, 9, 21, 2, 16) for _ in range(3)]
    rest = options()
    out, lse = triton_impl._forward_op._init_fn(*qkv, *rest)
    assert sorted(driver.compiled) == sorted(["forward", *STRIPS])
    assert driver.launched == ["forward"]
    triton_impl._backward_op._init_fn(out, *qkv, *rest[:3], out, lse, *rest[3:])
    assert driver.launched == ["forward", *STRIPS]
    assert len(driver.compiled) == 4, "something was left to the backward"


def test_the_layers_form_too(driver):
    """q, k and v as slices of one product; a small map, whose strips share nothing."""
    from nearsight.ops.local import triton_impl

    packed, pixels, weight = draw(2, 7, 5, 3, 2, 16), draw(2, 35, 32), draw(96, 32)
    rest = options()
    out, lse = triton_impl._projected_forward_op._init_fn(packed.detach(), pixels, weight, None, *rest)
    compiled = ["backward", "finish_relative", "forward"]
    assert sorted(driver.compiled) == compiled
    triton_impl._packed_gradients(out, packed.flatten(3).flatten(1, 2).detach(), out, lse, *rest)
    assert sorted(driver.launched) == compiled
    assert len(driver.compiled) == 3, "something was left to the backward"


def test_what_does_not_train_compiles_no_gradient(driver):
    """As a compiled graph calls it; its backward then compiles its own kernels side by side."""
    from nearsight.ops.local import triton_impl

    qkv = [draw(2, 9, 21, 2, 16, trains=False) for _ in range(3)]
    rest = options(trains=False)
    out, lse = triton_impl._forward_op._init_fn(*qkv, *rest)
    assert driver.compiled == ["forward"]
    triton_impl._backward_op._init_fn(out, *qkv, *rest[:3], out, lse, *rest[3:])
    assert sorted(driver.compiled[1:]) == sorted(STRIPS)
    assert driver.launched == ["forward", *STRIPS]


def test_tall_windows_make_no_more_code(driver, tmp_path):
    """Unrolled, the 16 to 32 chunks of this window's halo took five minutes to compile."""
    from nearsight.ops.local import triton_impl

    triton_impl._forward_op._init_fn(*[draw(2, 40, 40, 2, 16) for _ in range(3)], *options(window=31))
    products = {file.stem: file.read_text().count("mma.sync") for file in tmp_path.rglob("*.ptx")}
    tall = {"forward", "backward_queries", "backward_keys"}
    assert tall <= set(products)
    assert all(0 < products[name] < 400 for name in tall), products
