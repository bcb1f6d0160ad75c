"""The first call of a class: Triton compiles its kernels side by side, the gradient's with them, and none later.

Compiled for an H200 by a driver without a GPU, which loads and launches nothing.
"""

import pytest
import torch

from nearsight.ops import first_calls

pytest.importorskip("triton")


def forward(size, trains):
    """What the registered op does, on tensors without memory; and what the backward takes."""
    from nearsight.ops.explicit import triton_impl

    values = torch.empty(2, *size, 2, 8, dtype=torch.bfloat16, device="meta").requires_grad_(trains)
    radius = torch.empty(2, device="meta")
    out, *saved = triton_impl._forward._init_fn(values, radius, None, True, 1.0, trains)
    return out, values, radius, None, *saved, True, 1.0, trains


def test_everything_is_compiled_before_the_first_launch(driver):
    from nearsight.ops.explicit import triton_impl

    saved = forward((7, 14), trains=True)
    assert sorted(driver.compiled) == ["add_shares", "whole_backward", "whole_forward"]
    assert driver.launched == ["whole_forward"]
    triton_impl._backward._init_fn(*saved)
    assert driver.launched == ["whole_forward", "whole_backward", "add_shares"]
    triton_impl._backward._init_fn(*forward((9, 13), trains=True))
    assert len(driver.launched) == 6
    assert len(driver.compiled) == 3, "another size of the same class compiled again"


def test_what_does_not_train_compiles_no_gradient(driver):
    forward((16, 3), trains=False)
    assert driver.compiled == ["whole_forward"]


def test_what_was_traced_with_its_gradient_compiles_it(driver):
    """In a compiled graph nothing requires a gradient; tracing it, tensors without memory went through both ops."""
    from nearsight.ops.explicit import triton_impl

    values = torch.empty(2, 16, 5, 2, 8, dtype=torch.bfloat16, device="meta").requires_grad_()
    out, *_ = triton_impl._forward(values, torch.empty(2, device="meta"), None, True, 1.0, False)
    out.float().sum().backward()
    forward((16, 5), trains=False)
    assert sorted(driver.compiled) == ["whole_backward", "whole_forward"]


def test_an_error_shows_where_the_kernel_is_launched(driver):
    from nearsight.ops.explicit import kernels

    def launches():
        first_calls.launch(kernels.add_shares, (1,), *[torch.empty(4, device="meta")] * 4, 1, 1, 0.5, BLOCK=3)

    first_calls.compile_together("wrong", launches)
    with pytest.raises(Exception, match=r"tl\.zeros"):
        launches()


def test_what_only_a_thread_got_wrong_is_mended_before_the_first_launch(driver, monkeypatch):
    kept, done = first_calls._Loader.submit, []

    def fails_once(self, compile_kernel):
        def compile_or_fail():
            if not done:
                done.append(True)
                raise MemoryError
            return compile_kernel()

        return kept(self, compile_or_fail)

    monkeypatch.setattr(first_calls._Loader, "submit", fails_once)
    forward((7, 14), trains=True)
    assert sorted(driver.compiled) == ["add_shares", "whole_backward", "whole_forward"]
    assert driver.launched == ["whole_forward"]


def test_an_interrupt_leaves_nothing_switched_on(driver):
    def launches():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first_calls.compile_together("interrupted", launches)
    forward((5, 5), trains=False)
    assert driver.launched == ["whole_forward"]


@pytest.mark.parametrize("shift", [0, 3])
def test_a_stand_in_has_the_strides_and_the_alignment(shift):
    tensor = torch.zeros(200, dtype=torch.bfloat16)[shift:].as_strided((3, 5, 4), (40, 7, 1))
    stand_in = first_calls.meta_like(tensor)
    assert stand_in.is_meta
    assert stand_in.stride() == tensor.stride()
    assert stand_in.dtype == tensor.dtype
    assert (stand_in.data_ptr() - tensor.data_ptr()) % 16 == 0
