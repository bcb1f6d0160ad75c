"""The first call of a class of QnA: Triton compiles its kernels side by side, the gradient's with them, and none later.

Compiled for an H200 by a driver without a GPU, which loads and launches nothing.
"""

import pytest
import torch

pytest.importorskip("triton")

FORWARD, BACKWARD = ["pack", "forward"], ["delta", "backward", "add_rows"]


def forward(size, trains, window=(1, 3), heads=4, mask=False, queries=2):
    """What the registered op does, on tensors without memory; and what the backward takes."""
    from nearsight.ops.qna import triton_impl

    def draw(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta").requires_grad_(trains)

    scores, values = draw(2, *size, queries, heads), draw(2, *size, heads, 8)
    tables = [draw(window[0] * window[1], queries, heads, dtype=torch.float32) for _ in range(2)]
    key_mask = torch.empty(2, *size, dtype=torch.bool, device="meta") if mask else None
    options = (list(window), [1, 1], False)
    out, *saved = triton_impl._forward._init_fn(scores, values, *tables, key_mask, *options)
    return out, scores, values, key_mask, *saved, True, True, *options


def test_everything_is_compiled_before_the_first_launch(driver):
    from nearsight.ops.qna import triton_impl

    saved = forward((5, 7), trains=True)
    assert sorted(driver.compiled) == ["add_rows", "backward", "delta", "forward", "pack"]
    assert driver.launched == FORWARD
    triton_impl._backward._init_fn(*saved)
    assert driver.launched == [*FORWARD, *BACKWARD]
    triton_impl._backward._init_fn(*forward((6, 3), trains=True, heads=3))
    assert len(driver.launched) == 10
    assert len(driver.compiled) == 5, "another size of the same class compiled again"


def test_what_does_not_train_compiles_no_gradient(driver):
    """As a compiled graph calls it; its backward then compiles its own kernels side by side."""
    from nearsight.ops.qna import triton_impl

    saved = forward((5, 7), trains=False, mask=True)
    assert sorted(driver.compiled) == ["forward", "pack"]
    driver.launched.clear()
    triton_impl._backward._init_fn(*saved)
    assert sorted(driver.compiled[2:]) == ["add_rows", "backward", "delta"]
    assert driver.launched == BACKWARD


def test_what_was_traced_with_its_gradient_compiles_it(driver):
    """In a compiled graph nothing requires a gradient; tracing it, tensors without memory went through both ops."""
    from nearsight.ops.qna import triton_impl

    def draw(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta").requires_grad_()

    tables = [draw(3, 2, 4, dtype=torch.float32) for _ in range(2)]
    out, *_ = triton_impl._forward(draw(2, 5, 9, 2, 4), draw(2, 5, 9, 4, 8), *tables, None, [1, 3], [1, 1], False)
    out.float().sum().backward()
    forward((5, 9), trains=False)
    assert sorted(driver.compiled) == ["add_rows", "backward", "delta", "forward", "pack"]


def test_tall_windows_of_many_queries_make_no_more_code(driver, tmp_path):
    """Written out, the 99 weights of a column of these windows took 15 seconds and more to compile."""
    forward((28, 28), trains=True, window=(11, 11), heads=8, queries=9)
    powers = {file.stem: file.read_text().count("ex2.approx") for file in tmp_path.rglob("*.ptx")}
    assert 0 < powers["backward"] <= 28, powers
    # Once by exponentials per pixel and once from the windows' own maxima; the forward's sums and values each.
    assert 0 < powers["delta"] < 4 * 28, powers
    assert 0 < powers["forward"] < 6 * 28, powers
