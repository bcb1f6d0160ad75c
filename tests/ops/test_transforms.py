"""torch.func, forward mode, gradients of gradients: operators with a registered gradient know none of them, and say so."""

import pytest
import torch
from torch.autograd import forward_ad

from nearsight.errors import BackendError
from nearsight.ops import explicit_attention, local_attention, local_attention_projected, qna
from tests.ops.triton.interpreter import interpreted

WEIGHT = torch.linspace(-1, 1, 3 * 16 * 16).view(48, 16)


def local(x, backend):
    return local_attention(x, x, x, window=3, backend=backend)


def projected(x, backend):
    return local_attention_projected(x.flatten(3), WEIGHT, num_heads=2, window=3, backend=backend)


def gather(x, backend):
    return qna(x[..., :2].transpose(3, 4), x, window=3, backend=backend)


def explicit(x, backend):
    return explicit_attention(x.flatten(3), kind="gaussian", radius=0.5, backend=backend)


OPS = {"local_attention": local, "projected": projected, "qna": gather, "explicit_attention": explicit}


def pixels():
    return torch.randn(1, 3, 4, 2, 8, generator=torch.Generator().manual_seed(0))


def slope(op, backend, x):
    """Along x, in forward mode."""
    return torch.func.jvp(lambda x: op(x, backend), (x,), (x,))[1]


def check(name):
    """The call finds a backend of its own; forward mode, torch.func's backward and autograd's agree."""
    op, x = OPS[name], pixels()
    torch.testing.assert_close(slope(op, None, x), slope(op, "reference", x))
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(op(forward_ad.make_dual(x, x), None)).tangent
    torch.testing.assert_close(tangent, slope(op, "reference", x))
    gradient = torch.func.grad(lambda x: op(x, None).square().sum())(x)
    leaf = x.clone().requires_grad_()
    op(leaf, None).square().sum().backward()
    torch.testing.assert_close(gradient, leaf.grad, atol=1e-4, rtol=1e-4)
    images = torch.stack([x, 2 * x])
    torch.testing.assert_close(
        torch.func.vmap(lambda x: op(x, None))(images), torch.stack([op(x, None) for x in images])
    )


def refuses(name, backend):
    op = name if name != "projected" else "local_attention"
    usable = "torch, reference" if name == "explicit_attention" else "reference"
    sentence = (
        f"{op}: backend '{backend}' cannot run this call: needs gradients by autograd's backward, got a call within "
        f"torch.func's or in forward mode. Usable here: {usable}."
    )
    for attempt in (
        lambda x: slope(OPS[name], backend, x),
        torch.func.grad(lambda x: OPS[name](x, backend).sum()),
        torch.func.grad(lambda x: torch.func.vmap(lambda x: OPS[name](x, backend))(x[None]).sum()),
    ):
        with pytest.raises(BackendError) as raised:
            attempt(pixels())
        assert str(raised.value) == sentence


@pytest.mark.parametrize("name", OPS)
def test_another_backend_runs_them(name):
    check(name)


@interpreted
@pytest.mark.parametrize("name", OPS)
def test_another_backend_than_triton_runs_them(name):
    check(name)


@pytest.mark.parametrize(
    ("name", "backend"), [("local_attention", "torch"), ("projected", "torch"), ("qna", "torch"), ("qna", "native")]
)
def test_a_named_backend_refuses_them(name, backend):
    refuses(name, backend)


@interpreted
@pytest.mark.parametrize("name", OPS)
def test_triton_refuses_them(name):
    refuses(name, "triton")


def refuses_twice(name, backend):
    x = pixels().requires_grad_()
    (gradient,) = torch.autograd.grad(OPS[name](x, backend).square().sum(), x, create_graph=True)
    op = name if name != "projected" else "local_attention"
    with pytest.raises(BackendError) as raised:
        gradient.sum().backward()
    assert str(raised.value) == (
        f"{op}: got a gradient of a gradient, wanted first derivatives: the chosen backend has no others; "
        f"use backend='reference'."
    )


@pytest.mark.parametrize("name", ["local_attention", "projected", "qna"])
def test_gradients_of_gradients(name):
    refuses_twice(name, "torch")
    x = pixels().requires_grad_()
    (gradient,) = torch.autograd.grad(OPS[name](x, "reference").square().sum(), x, create_graph=True)
    gradient.sum().backward()
    assert x.grad.isfinite().all()


@interpreted
@pytest.mark.parametrize("name", OPS)
def test_gradients_of_tritons_gradients(name):
    refuses_twice(name, "triton")
