"""local_attention as a citizen of PyTorch: compile, export, autocast, meta tensors, threads, memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from nearsight.bench.memory import peak_extra_bytes
from nearsight.ops import backends, local_attention
from nearsight.ops.local import torch_impl


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Attend(nn.Module):
    """q, k and v from one tensor, with learned positions."""

    def __init__(self, window: tuple[int, int] = (3, 5), **options) -> None:
        super().__init__()
        self.options = {"window": window, **options}
        self.rel_row = nn.Parameter(randn(window[0], 2, seed=1))
        self.rel_col = nn.Parameter(randn(window[1], 2, seed=2))

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        q, k, v = x.unbind(3)
        tables = {"rel_row": self.rel_row, "rel_col": self.rel_col}
        return local_attention(q, k, v, **tables, key_mask=key_mask, **self.options)


def pixels(batch: int, height: int, width: int) -> Tensor:
    return randn(batch, height, width, 3, 2, 4)


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_compiles_whole_and_once_for_all_sizes(name):
    torch._dynamo.reset()
    model = Attend()
    counter = CompileCounterWithBackend(name)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    counts = set()
    for size in ((5, 9), (8, 33), (17, 4)):
        x, y = (pixels(2, *size).requires_grad_() for _ in range(2))
        got, want = compiled(x), model(y)
        assert torch.equal(got, want)
        got.square().sum().backward()
        want.square().sum().backward()
        assert torch.equal(x.grad, y.grad)
        counts.add(counter.frame_count)
    assert len(counts) == 1


def test_default_compile_settles_after_the_second_size():
    torch._dynamo.reset()
    model = Attend()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for size in ((5, 9), (8, 33), (17, 4), (6, 7), (20, 21)):
        torch.testing.assert_close(compiled(pixels(2, *size)), model(pixels(2, *size)))
    assert counter.frame_count <= 3


def test_inductor_agrees():
    torch._dynamo.reset()
    model = Attend()
    x = pixels(1, 6, 9)
    mask = torch.rand(1, 6, 9, generator=torch.Generator().manual_seed(3)) > 0.3
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x, mask), model(x, mask))


def test_the_registered_op_keeps_torchs_contract():
    q, k, v = (t.clone().requires_grad_() for t in pixels(1, 4, 6).unbind(3))
    tables = [randn(3, 2)[None].requires_grad_(), randn(5, 2)[None].requires_grad_()]
    options = ([3, 5], [1, 1], False, 1.0)
    mask = torch.ones(1, 4, 6, dtype=torch.bool)
    torch.library.opcheck(torch_impl.local_attention_tiles, (q, k, v, *tables, mask, *options))
    torch.library.opcheck(torch_impl.local_attention_tiles, (q, None, v, tables[0], None, None, *options))


@pytest.mark.parametrize("options", [{}, {"border": "zeros", "dilation": 2}])
def test_exports_plain_operators_for_every_size(options):
    model = Attend(**options)
    sizes = {1: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC}
    program = torch.export.export(model, (pixels(2, 7, 9),), dynamic_shapes=(sizes,))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any("nearsight" in name for name in names)
    module = program.module()
    for size in ((7, 9), (12, 5), (2, 33)):
        torch.testing.assert_close(module(pixels(2, *size)), model(pixels(2, *size)))


def test_an_exported_mask_acts():
    model = Attend()
    sizes = {1: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC}
    mask = torch.rand(2, 12, 13, generator=torch.Generator().manual_seed(3)) > 0.6
    program = torch.export.export(model, (pixels(2, 7, 9), mask[:, :7, :9].clone()), dynamic_shapes=(sizes, sizes))
    torch.testing.assert_close(program.module()(pixels(2, 12, 13), mask), model(pixels(2, 12, 13), mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_its_dtype_and_accumulates_in_float32(dtype):
    q, k, v = (t.clone().requires_grad_() for t in pixels(2, 6, 9).unbind(3))
    row, col = randn(3, 2).requires_grad_(), randn(5, 2).requires_grad_()
    with torch.autocast("cpu", dtype):
        got = local_attention(q, k, v, window=(3, 5), rel_row=row, rel_col=col)
    assert got.dtype == dtype
    half = [t.to(dtype).float() for t in (q, k, v, row, col)]
    want = local_attention(*half[:3], window=(3, 5), rel_row=half[3], rel_col=half[4], backend="reference")
    # Rounded once, at the end: an inner product in half precision would be off by several times that.
    assert (got.float() - want).abs().max() <= torch.finfo(dtype).eps * want.abs().max()
    with torch.autocast("cpu", dtype):
        got.float().square().sum().backward()
    assert all(t.grad.dtype == torch.float32 and t.grad.abs().sum() > 0 for t in (q, k, v, row, col))
    double = q.detach().double()
    with torch.autocast("cpu", dtype):
        assert local_attention(double, double, double, window=3).dtype == torch.float64


def test_meta_tensors():
    q = torch.empty(2, 5, 7, 2, 4, device="meta", requires_grad=True)
    out = local_attention(q, q, q, window=3)
    assert out.shape == q.shape
    out.sum().backward()
    assert q.grad.shape == q.shape


def test_threads_do_not_disturb_each_other():
    calls = [
        (Attend(window), pixels(1, *size)) for window, size in (((3, 5), (9, 20)), ((5, 3), (20, 9)), ((7, 7), (8, 8)))
    ]

    def work(call: tuple[Attend, Tensor]) -> tuple[Tensor, Tensor]:
        x = call[1].clone().requires_grad_()
        out = call[0](x)
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
        return out.detach(), gradient

    alone = [work(call) for call in calls]
    with ThreadPoolExecutor(6) as pool:
        for i, got in enumerate(pool.map(work, calls * 8)):
            assert torch.equal(got[0], alone[i % 3][0])
            assert torch.equal(got[1], alone[i % 3][1])


def unfolded(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """What most implementations do: every window copied out."""
    batch, height, width, heads, dim = q.shape

    def unfold(x: Tensor) -> Tensor:
        windows = F.unfold(x.permute(0, 3, 4, 1, 2).flatten(1, 2), window, padding=window // 2)
        return windows.view(batch, heads, dim, window**2, height, width)

    logits = torch.einsum("bhwnd,bndthw->bnthw", q, unfold(k))
    return torch.einsum("bnthw,bndthw->bhwnd", logits.softmax(2), unfold(v))


def test_memory_is_a_tenth_of_unfolding():
    q, k, v = (randn(8, 28, 28, 8, 16, seed=i).requires_grad_() for i in range(3))
    row, col = randn(7, 8).requires_grad_(), randn(7, 8).requires_grad_()
    cpu = torch.device("cpu")

    def train(run) -> int:
        return peak_extra_bytes(lambda: run().backward(torch.ones_like(q)), cpu)

    ours = train(lambda: local_attention(q, k, v, window=7, rel_row=row, rel_col=col, backend="torch"))
    theirs = train(lambda: unfolded(q, k, v, 7))
    for leaf in (q, k, v, row, col):
        leaf.grad = None
    assert ours <= theirs / 10
    with torch.no_grad():
        forward = peak_extra_bytes(
            lambda: local_attention(q, k, v, window=7, rel_row=row, rel_col=col, backend="torch"), cpu
        )
    # The output, one tile's logits twice, and the laid-out maps of a few images.
    assert forward <= 8 * q.nbytes


def test_nothing_but_the_inputs_is_saved():
    q, k, v = (t.clone().requires_grad_() for t in pixels(2, 9, 14).unbind(3))
    row, col = randn(7, 2).requires_grad_(), randn(7, 2).requires_grad_()
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        local_attention(q, k, v, window=7, rel_row=row, rel_col=col, backend="torch")
    owners = {t.untyped_storage().data_ptr() for t in (q, k, v, row, col)}
    assert saved
    assert {t.untyped_storage().data_ptr() for t in saved} <= owners


def test_backends_are_listed_with_reasons():
    q = randn(1, 6, 5, 2, 8)
    reports = backends("local_attention", q, q, q, window=3)
    assert [r.name for r in reports] == ["triton", "torch", "reference"]
    usable = {r.name: r.usable for r in reports}
    assert usable["torch"]
    assert usable["reference"]
    for report in reports:
        assert (report.reason is None) == report.usable
