"""Global attention by rows against its definition, with every pair of pixels laid out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nearsight.errors import BackendError
from nearsight.layers import relative_attention
from nearsight.layers.relative_attention import RelativeAttention2d
from nearsight.ops.relative import rows as relative
from nearsight.ops.relative.rows import attend_by_rows
from tests.support.accuracy import assert_by_error_rule
from tests.support.largest import LargestTensor


def definition(q: Tensor, k: Tensor, v: Tensor, rel_row: Tensor, rel_col: Tensor, key_mask: Tensor | None = None):
    height, width = q.shape[1:3]
    y, x = (torch.arange(size, device=q.device) for size in (height, width))
    by_row = rel_row[:, y - y[:, None] + height - 1]  # [heads, y of the query, y of the key, D]
    by_column = rel_col[:, x - x[:, None] + width - 1]
    logits = torch.einsum("byxhd,bijhd->bhyxij", q, k)
    logits = logits + torch.einsum("byxhd,hyid->bhyxi", q, by_row.expand(q.shape[3], -1, -1, -1))[..., None]
    logits = logits + torch.einsum("byxhd,hxjd->bhyxj", q, by_column.expand(q.shape[3], -1, -1, -1))[..., None, :]
    if key_mask is not None:
        logits = logits.masked_fill(~key_mask[:, None, None, None], float("-inf"))
    weights = logits.flatten(4).softmax(-1).view_as(logits)
    return torch.einsum("bhyxij,bijhd->byxhd", weights, v)


def call(batch=2, height=5, width=7, heads=3, dim=4, values=2, shared=True, dtype=torch.float32, spread=1.0):
    tables = 1 if shared else heads
    shapes = [(batch, height, width, heads, n) for n in (dim, dim, values)]
    shapes += [(tables, 2 * size - 1, dim) for size in (height, width)]
    made = torch.Generator().manual_seed(height * 31 + width)
    tensors = [(torch.randn(shape, generator=made) * spread).to(dtype) for shape in shapes]
    return dict(zip(("q", "k", "v", "rel_row", "rel_col"), tensors, strict=True))


@pytest.fixture(params=[1, 3], ids=lambda rows: f"{rows}-rows-of-keys")
def few_rows(request, monkeypatch):
    """Blocks of a few rows of keys in maps 7 wide with 3 heads: the softmax is carried over several, the last is smaller."""
    monkeypatch.setattr(relative, "BLOCK", request.param * 3 * 7**2)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("size", [(5, 7), (11, 7), (1, 7), (8, 1), (1, 1)])
def test_error_rule(size: tuple[int, int], shared: bool, dtype: torch.dtype):
    inputs = call(height=size[0], width=size[1], shared=shared, dtype=dtype)
    assert_by_error_rule(attend_by_rows, definition, inputs)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("shared", [True, False])
def test_error_rule_with_a_mask(shared: bool):
    mask = torch.rand(2, 5, 7, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[0, :3] = False  # the first blocks hold nothing
    mask[1, 0, 0] = True

    def masked(form):
        return lambda **inputs: form(**inputs, key_mask=mask)

    assert_by_error_rule(masked(attend_by_rows), masked(definition), call(shared=shared))


@pytest.mark.usefixtures("few_rows")
def test_wide_ranges_of_logits():
    """Logits of several hundred: only differences from the largest may be exponentiated, and a later block may bring it."""
    inputs = call(spread=12.0)
    assert definition(**inputs).isfinite().all()
    assert_by_error_rule(attend_by_rows, definition, inputs)


def test_gradcheck():
    inputs = [t.requires_grad_() for t in call(1, 3, 4, 2, 3, 2, dtype=torch.float64).values()]
    mask = torch.rand(1, 3, 4, generator=torch.Generator().manual_seed(0)) > 0.3
    assert torch.autograd.gradcheck(lambda *t: attend_by_rows(*t, mask), inputs, fast_mode=True)


def test_is_a_proper_operator():
    inputs = [t.requires_grad_() for t in call().values()]
    torch.library.opcheck(torch.ops.nearsight.relative_rows.default, (*inputs, None))


def test_batch_of_none():
    inputs = [t.requires_grad_() for t in call(batch=0).values()]
    out = attend_by_rows(*inputs)
    assert out.shape == (0, 5, 7, 3, 2)
    out.sum().backward()
    assert all(t.grad is not None and not t.grad.any() for t in inputs)


def test_holds_a_block_of_logits_at_most(monkeypatch):
    """Neither n×n nor n·(H + W) numbers, in the forward or in the backward."""
    monkeypatch.setattr(relative, "BLOCK", 6 * 3 * 30**2)
    inputs = call(1, 40, 30)
    with LargestTensor() as largest:
        out, softmax = relative.forward_by_rows(*inputs.values(), None)
        relative.backward_by_rows(out, *inputs.values(), None, out, softmax)
    assert largest.elements == relative.BLOCK < 40 * 30 * 3 * 40
    with LargestTensor() as largest:
        definition(**inputs)
    assert largest.elements >= 3 * (40 * 30) ** 2


# The layer takes this way on large maps only.


def layer_and_map(**options) -> tuple[RelativeAttention2d, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = RelativeAttention2d(6, 8, key_channels=12, feature_size=(9, 40), num_heads=2, **options)
    return layer, torch.randn(1, 6, 56, 38), torch.rand(1, 56, 38) > 0.2


@pytest.mark.parametrize("options", [{}, {"stride": 2, "per_head_position": True}])
def test_layer_agrees_with_its_other_way(options, monkeypatch):
    layer, x, mask = layer_and_map(**options)
    results = []
    for large in (relative_attention.LARGE, 10**9):
        monkeypatch.setattr(relative_attention, "LARGE", large)
        layer.zero_grad()
        out = layer(x, mask)
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad for p in layer.parameters())])
    for rows, fused in zip(*results, strict=True):
        torch.testing.assert_close(rows, fused, rtol=1e-4, atol=1e-5 * float(fused.abs().max()))
    assert not torch.equal(results[0][0], results[1][0]), "both ran the same code"


def test_layer_with_nothing_to_attend_to_and_under_autocast():
    layer, x, mask = layer_and_map()
    assert not layer(x, mask & False).any()
    with torch.autocast("cpu", torch.bfloat16):
        got = layer(x, mask)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), layer(x, mask), atol=0.05, rtol=0.05)


def test_layer_compiles_once_for_all_large_maps():
    torch._dynamo.reset()
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    layer, x, _ = layer_and_map()
    compiled = torch.compile(layer, backend=count, fullgraph=True, dynamic=True)
    for image in (x, x[:, :, :55].contiguous(), x[:, :, :, :37].contiguous()):
        torch.testing.assert_close(compiled(image), layer(image))
    assert len(graphs) == 1
    assert any("relative_rows" in str(node.target) for node in graphs[0].graph.nodes)


def test_layer_goes_its_other_way_under_transforms():
    """The operator's gradient is that of autograd's backward: in forward mode torch took it for a constant, without a word."""
    layer, x, _ = layer_and_map()
    along = torch.randn_like(x)
    with sdpa_kernel(SDPBackend.MATH):  # torch's other ones know no forward mode
        slope = torch.func.jvp(layer, (x,), (along,))[1]
    torch.testing.assert_close(slope, (layer(x + 1e-2 * along) - layer(x - 1e-2 * along)) / 2e-2, atol=5e-3, rtol=5e-2)
    gradient = torch.func.grad(lambda x: layer(x).square().sum())(x)
    leaf = x.requires_grad_()
    (wanted,) = torch.autograd.grad(layer(leaf).square().sum(), leaf, create_graph=True)
    torch.testing.assert_close(gradient, wanted, atol=1e-3, rtol=1e-4)
    with pytest.raises(BackendError) as raised:
        wanted.sum().backward()
    assert str(raised.value) == (
        "RelativeAttention2d: got a gradient of a gradient, wanted first derivatives: the chosen backend has no others; "
        "use torch.func.grad twice, under sdpa_kernel(SDPBackend.MATH)."
    )
