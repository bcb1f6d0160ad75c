"""The first call of a class of AA-Net's attention: its kernels are compiled side by side, the gradient's with them, none later.

Compiled for an H200 by a driver without a GPU, which loads and launches nothing.
"""

import pytest
import torch

pytest.importorskip("triton")

# Of larger maps positions and their gradients come by rows and by columns.
FORWARD = {(9, 10): ["positions", "positions", "forward"], (4, 5): ["small_forward"]}
BACKWARD = {
    (9, 10): [
        *["positions", "positions", "query_gradients", "key_gradients", "position_gradients", "position_gradients"],
        "add_rows",
    ],
    (4, 5): ["small_gradients", "add_rows"],
}
SIZES = pytest.mark.parametrize("size", FORWARD, ids=str)


def forward(size, trains, batch=2, heads=2, dim=4, values=3):
    """What the registered op does, on tensors without memory; and what the backward takes."""
    from nearsight.ops.relative import triton_impl

    def draw(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta").requires_grad_(trains)

    height, width = size
    packed = draw(batch, height * width, heads * (2 * dim + values))
    tables = [draw(1, 2 * side - 1, dim) for side in size]
    options = (heads, dim, height, 0.5)
    out, lse = triton_impl._forward_op._init_fn(packed, *tables, None, *options)
    return torch.empty_like(out), packed, *tables, None, out, lse, *options


@SIZES
def test_everything_is_compiled_before_the_first_launch(driver, size):
    from nearsight.ops.relative import triton_impl

    saved = forward(size, trains=True)
    kernels = len(driver.compiled)
    assert set(driver.compiled) == {*FORWARD[size], *BACKWARD[size]}
    assert driver.launched == FORWARD[size]
    triton_impl._backward_op._init_fn(*saved)
    assert driver.launched == [*FORWARD[size], *BACKWARD[size]]
    forward(size, trains=True, batch=3)
    assert len(driver.compiled) == kernels, "something was left to the backward, or another batch compiled again"


@SIZES
def test_what_does_not_train_compiles_no_gradient(driver, size):
    """As a compiled graph calls it; its backward then compiles its own kernels side by side."""
    from nearsight.ops.relative import triton_impl

    saved = forward(size, trains=False)
    assert set(driver.compiled) == set(FORWARD[size])
    driver.launched.clear()
    triton_impl._backward_op._init_fn(*saved)
    assert set(driver.compiled) == {*FORWARD[size], *BACKWARD[size]}
    assert driver.launched == BACKWARD[size]


@SIZES
def test_what_was_traced_with_its_gradient_compiles_it(driver, size):
    """In a compiled graph nothing requires a gradient; tracing it, tensors without memory went through both ops."""
    from nearsight.ops.relative import triton_impl

    _, packed, *rest = forward(size, trains=False)
    tables, options = rest[:2], rest[5:]
    out, _ = triton_impl._forward_op(packed.requires_grad_(), *tables, None, *options)
    out.float().sum().backward()
    assert set(driver.compiled) == set(FORWARD[size])
    forward(size, trains=False)
    assert set(driver.compiled) == {*FORWARD[size], *BACKWARD[size]}
