"""Calls that no 32-bit offset or grid axis covers, and windows beyond a GPU's shared memory: what the last images get."""

import pytest
import torch

from nearsight.ops import explicit_attention, local_attention, qna
from tests.ops.gpu.test_local import compare as compare_local
from tests.ops.triton.test_local import BFLOAT, FLOAT, make

pytestmark = pytest.mark.gpu


def free_gigabytes():
    return torch.cuda.mem_get_info()[0] / 1e9 if torch.cuda.is_available() else 0.0


def draw(*shape):
    return torch.empty(*shape, dtype=BFLOAT, device="cuda").normal_()


def gradients(op, tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = op(*leaves)
    found = torch.autograd.grad(out, leaves, torch.ones((), dtype=out.dtype, device="cuda").expand(out.shape))
    return [out.detach(), *found]


def assert_near(one, other):
    """But for what cutting the work otherwise rounds otherwise, in bfloat16."""
    assert (one - other).abs().max() <= 0.02 * other.abs().max()


def check(op, maps, tables):
    """The last two images of a call are those of a call of their own; the tables' gradients those of many calls."""
    whole = gradients(op, [*maps, *tables])
    last = gradients(op, [*(t[-2:] for t in maps), *tables])
    for one, other in zip(whole[: 1 + len(maps)], last, strict=False):
        assert_near(one[-2:], other)
    if tables:
        sums = [torch.zeros(t.shape, device="cuda") for t in tables]
        step = -(-maps[0].shape[0] // 4)
        for first in range(0, maps[0].shape[0], step):
            part = gradients(op, [*(t[first : first + step] for t in maps), *tables])
            for total, share in zip(sums, part[1 + len(maps) :], strict=True):
                total += share
        for one, total in zip(whole[1 + len(maps) :], sums, strict=True):
            assert_near(one, total)


def local(border):
    def op(q, k, v, rows, columns=None):
        return local_attention(q, k, v, window=3, rel_row=rows, rel_col=columns, border=border, backend="triton")

    return op


def test_more_images_than_a_grid_axis_holds():
    """Strips, whose shares are merged image by image."""
    check(local("zeros"), [draw(70_000, 2, 3, 1, 8) for _ in range(3)], [draw(3, 4)])


@pytest.mark.skipif(free_gigabytes() < 100, reason="needs 100 GB of free GPU memory")
@pytest.mark.parametrize(
    ("shape", "border"), [((2**18 + 2, 3, 3, 8, 64), "mask"), ((24_000, 28, 28, 8, 16), "mask")], ids=["tables", "maps"]
)
def test_local_attention(shape, border):
    """Shares of the relative tables' gradients, and maps, of more than 2³¹ numbers."""
    check(local(border), [draw(*shape) for _ in range(3)], [draw(3, shape[-1] // 2)])


@pytest.mark.skipif(free_gigabytes() < 100, reason="needs 100 GB of free GPU memory")
@pytest.mark.parametrize("shape", [(2**18 + 2, 2, 17, 16, 8), (24_000, 28, 28, 8, 16)], ids=["tables", "maps"])
def test_local_attention_in_a_ring(shape):
    """The same in strips of what has both tables, which Hopper's shared memory keeps the halo of."""
    check(local("mask"), [draw(*shape) for _ in range(3)], [draw(3, shape[-1] // 2) for _ in range(2)])


@pytest.mark.skipif(free_gigabytes() < 100, reason="needs 100 GB of free GPU memory")
def test_qna():
    def op(scores, values, bias):
        return qna(scores, values, window=3, position_bias=bias, backend="triton")

    check(op, [draw(44_000, 28, 28, 2, 8), draw(44_000, 28, 28, 8, 8)], [draw(3, 3, 2, 8)])


@pytest.mark.skipif(free_gigabytes() < 100, reason="needs 100 GB of free GPU memory")
@pytest.mark.parametrize(("size", "radius"), [((28, 28), 0.1), ((28, 28), 0.75), ((40, 40), 0.1)])
def test_explicit_attention(size, radius):
    """On a small map, between nodes, by axes."""

    def op(values):
        return explicit_attention(values, kind="gaussian", radius=radius, backend="triton")

    check(op, [draw(2**31 // (size[0] * size[1] * 32) + 2, *size, 32)], [])


@pytest.mark.parametrize(
    ("dtype", "dim", "window"), [(FLOAT, 128, (11, 25)), (BFLOAT, 128, (11, 40)), (BFLOAT, 64, (11, 11))]
)
def test_windows_beyond_the_shared_memory(dtype, dim, window):
    """On an H200 the first (its walk needs 288 KB of 227), on smaller GPUs the others."""
    compare_local(make(dtype, (12, 27), 1, 1, dim, window), window)


def test_tensors_of_another_device_than_the_current():
    """Kernels are launched where the tensors lie."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q = draw(2, 9, 11, 2, 16)
    there = q.to("cuda:1")
    for _ in range(4):  # by Triton, recorded, replayed
        got = local_attention(there, there, there, window=3, backend="triton")
        assert torch.equal(got.to("cuda:0"), local_attention(q, q, q, window=3, backend="triton"))
