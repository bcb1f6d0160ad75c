"""Block attention's Triton kernels, interpreted on the CPU: output and every gradient by the error rule, on tiny shapes."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nearsight import AttentionStem2d
from nearsight.ops import backends, block_attention
from nearsight.ops.block import triton_impl
from nearsight.ops.block.call import prepare
from nearsight.ops.block.pooled import attend_norm_pool
from tests.ops.triton.interpreter import interpreted
from tests.support.accuracy import assert_by_error_rule

FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16


def make(dtype=FLOAT, size=(4, 8), batch=1, heads=2, dim=8, inputs=3, tables="both", places=True, mask=None):
    """Inputs of one call; `tables` is both, row, column or none; `mask` the share of pixels that may be attended."""
    generator = torch.Generator().manual_seed(sum(size) + heads + dim + inputs)

    def draw(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator)).to(dtype)

    return {
        "x": draw(batch, *size, inputs),
        # As the layer starts: logits near 1.
        "w_q": draw(heads * dim, inputs, scale=(dim * inputs) ** -0.5),
        "w_k": draw(heads * dim, inputs, scale=inputs**-0.5),
        "w_v": draw(*((16,) if places else ()), heads * dim, inputs),
        "rel_row": draw(7, dim // 2) if tables in ("both", "row") else None,
        "rel_col": draw(7, dim // 2) if tables in ("both", "column") else None,
        "key_mask": torch.rand(batch, *size, generator=generator) < mask if mask is not None else None,
    }


def compare(inputs, heads=2):
    def run(backend):
        return lambda **tensors: block_attention(**tensors, heads=heads, backend=backend)

    assert_by_error_rule(run("triton"), run("reference"), inputs)


@interpreted
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, HALF])
def test_every_dtype(dtype):
    compare(make(dtype, size=(5, 8)))


@interpreted
@pytest.mark.parametrize("size", [(5, 11), (1, 3), (9, 4), (4, 7)])
def test_images_that_fill_no_block(size):
    compare(make(size=size))


@interpreted
@pytest.mark.parametrize("size", [(8, 4), (6, 9)])
def test_masks(size):
    compare(make(size=size, mask=0.5, batch=2))


@interpreted
@pytest.mark.parametrize("tables", ["row", "column", "none"])
def test_tables(tables):
    compare(make(tables=tables, size=(4, 8)))


@interpreted
@pytest.mark.parametrize(("heads", "dim"), [(1, 6), (3, 4), (5, 16), (1, 40)])
def test_heads_and_head_dims(heads, dim):
    """Heads that fill no program, head dims that fill no product."""
    compare(make(heads=heads, dim=dim, size=(4, 5)), heads)


@interpreted
@pytest.mark.parametrize("inputs", [1, 2, 4, 5, 8])
def test_input_channels(inputs):
    compare(make(inputs=inputs, size=(4, 5)))


@interpreted
def test_one_value_matrix_for_all_places():
    compare(make(places=False, size=(4, 8)))


@interpreted
def test_more_lines_than_programs():
    compare(make(size=(22, 4), batch=2, heads=1), 1)


@interpreted
def test_blocks_without_any_key():
    inputs = make(size=(5, 8), mask=0.5)
    inputs["key_mask"][:, :4, 4:] = False
    compare(inputs)
    inputs["key_mask"][:] = False
    leaves = {n: t.requires_grad_() for n, t in inputs.items() if n != "key_mask"}
    out = block_attention(**leaves, key_mask=inputs["key_mask"], heads=2, backend="triton")
    assert (out == 0).all()
    for gradient in torch.autograd.grad(out.sum(), list(leaves.values())):
        assert (gradient == 0).all()


@interpreted
def test_large_logits():
    inputs = make(size=(4, 8))
    inputs["w_q"] *= 30
    compare(inputs)


@interpreted
def test_strided_images():
    """A view of an NCHW image, every other column of a wider one."""
    inputs = make(size=(6, 8))
    wide = torch.randn(1, 3, 6, 16, generator=torch.Generator().manual_seed(0))
    view = wide.permute(0, 2, 3, 1)[:, :, ::2]
    out = block_attention(**{**inputs, "x": view}, heads=2, backend="triton")
    assert torch.equal(out, block_attention(**{**inputs, "x": view.contiguous()}, heads=2, backend="triton"))
    torch.testing.assert_close(out, block_attention(**{**inputs, "x": view}, heads=2, backend="reference"))


@interpreted
def test_empty_batch():
    compare(make(batch=0))


@interpreted
def test_twice_gives_the_same_bits():
    inputs = make(size=(5, 4), heads=3)
    leaves = [t.requires_grad_() for t in inputs.values() if t is not None]

    def gradients():
        out = block_attention(**inputs, heads=3, backend="triton")
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for one, other in zip(gradients(), gradients(), strict=True):
        assert torch.equal(one, other)


@interpreted
def test_weights_alone_learn_the_same():
    """Without a gradient of x the kernel leaves that part out; the others' do not change."""
    inputs = make(size=(5, 8))
    weights = [inputs[n].requires_grad_() for n in ("w_q", "w_k", "w_v", "rel_row", "rel_col")]
    alone = torch.autograd.grad(block_attention(**inputs, heads=2, backend="triton").square().sum(), weights)
    inputs["x"].requires_grad_()
    beside = torch.autograd.grad(block_attention(**inputs, heads=2, backend="triton").square().sum(), weights)
    for one, other in zip(alone, beside, strict=True):
        assert torch.equal(one, other)


@interpreted
def test_opcheck():
    inputs = make(size=(3, 5))
    call = prepare(**inputs, heads=2)
    score = triton_impl.score_table(call).detach().requires_grad_()
    arguments = (inputs["x"], score, inputs["w_v"].requires_grad_(), None)
    torch.library.opcheck(torch.ops.nearsight.block_attention_triton.default, arguments)


@interpreted
def test_compiles_whole():
    torch._dynamo.reset()
    inputs = make(size=(4, 5))
    compiled = torch.compile(
        lambda **t: block_attention(**t, heads=2, backend="triton"), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(**inputs), block_attention(**inputs, heads=2, backend="triton"))


@interpreted
def test_what_it_refuses():
    def reason(**change):
        inputs = {**make(size=(4, 4)), **change}
        options = {"heads": inputs.pop("heads", 2), "block": inputs.pop("block", 4)}
        return {r.name: r.reason for r in backends("block_attention", **inputs, **options)}["triton"]

    assert reason() is None
    double = {n: None if t is None else t.double() for n, t in make(size=(4, 4)).items()}
    assert reason(**double) == "needs float32, bfloat16 or float16, got float64"
    assert reason(**make(inputs=9, size=(4, 4))) == "needs 1 to 8 input channels, got 9"
    assert reason(**make(heads=1, dim=66, size=(4, 4)), heads=1) == "needs a head dim of at most 64, got 66"
    tables = {"rel_row": None, "rel_col": None, "w_v": make(places=False)["w_v"]}
    assert reason(**tables, block=2) == "needs blocks of 4×4 pixels, got block=2"


def test_without_a_gpu_it_says_so():
    reasons = {r.name: r.reason for r in backends("block_attention", **make(), heads=2)}
    assert reasons["triton"] == "needs CUDA tensors, got cpu"


# ── With the norm, ReLU and max-pool that follow ──


def normed(weight, bias, running, **tensors):
    y = block_attention(**tensors, heads=2, backend="reference").permute(0, 3, 1, 2)
    mean, var = (None, None) if running is None else running.to(y.dtype).unbind(0)
    return F.batch_norm(y, mean, var, weight, bias, training=running is None)


def composed(**tensors):
    return F.relu(F.max_pool2d(normed(**tensors), 4, 4, ceil_mode=True)).permute(0, 2, 3, 1)


def clear_winners(running, margin, **inputs):
    """Where a pool's largest value is `margin` above its second and away from 0: rounding cannot name another."""
    y = normed(
        running=running, **{n: t if t is None or t.dtype == torch.bool else t.double() for n, t in inputs.items()}
    )
    height, width = y.shape[2:]
    y = F.pad(y, (0, -width % 4, 0, -height % 4), value=-torch.inf)
    best, second = y.unfold(2, 4, 4).unfold(3, 4, 4).flatten(4).topk(2).values.unbind(-1)
    return ((best - second > margin) & (best.abs() > margin)).permute(0, 2, 3, 1)


def fused(weight, bias, running, **tensors):
    call = prepare(**tensors, heads=2)
    return attend_norm_pool(call, weight, bias, *((None, None) if running is None else running.unbind(0)), 1e-5)[0]


@interpreted
@pytest.mark.parametrize("size", [(4, 8), (5, 6)])
@pytest.mark.parametrize("of_batch", [True, False])
def test_pooled(size, of_batch):
    inputs = make(size=size, batch=2)
    generator = torch.Generator().manual_seed(1)
    inputs["weight"] = torch.randn(16, generator=generator)  # some negative: their smallest wins
    inputs["bias"] = torch.randn(16, generator=generator)
    running = None if of_batch else torch.rand(2, 16, generator=generator) + 0.5
    assert_by_error_rule(partial(fused, running=running), partial(composed, running=running), inputs)


@interpreted
def test_pooled_opcheck():
    inputs = make(size=(4, 6))
    score, value = (t.detach().requires_grad_() for t in triton_impl.tables(prepare(**inputs, heads=2)))
    arguments = (inputs["x"], score, value, torch.ones(16), torch.zeros(16), None, 1e-5)
    torch.library.opcheck(torch.ops.nearsight.block_attention_pooled_triton.default, arguments)


@interpreted
@pytest.mark.parametrize("momentum", [0.1, None])
def test_pooled_layer_keeps_running_statistics(momentum):
    torch.manual_seed(0)
    stem, norm = AttentionStem2d(3, 8, num_heads=2), nn.BatchNorm2d(8, momentum=momentum)
    other = copy.deepcopy(norm)
    x = torch.randn(2, 3, 4, 5)
    for _ in range(2):
        out = stem.pooled(x, norm)
        want = F.relu(F.max_pool2d(other(stem(x)), 4, ceil_mode=True))
    assert out.shape == (2, 8, 1, 2)
    torch.testing.assert_close(out, want)
    for name, buffer in other.named_buffers():
        torch.testing.assert_close(getattr(norm, name), buffer)
    torch.testing.assert_close(
        stem.pooled(x, norm.eval()), F.relu(F.max_pool2d(other.eval()(stem(x)), 4, ceil_mode=True))
    )


@interpreted
def test_pooled_layer_compiles_whole():
    torch._dynamo.reset()
    torch.manual_seed(0)
    stem, norm = AttentionStem2d(3, 8, num_heads=1), nn.BatchNorm2d(8)
    other = copy.deepcopy(norm)
    x = torch.randn(1, 3, 4, 8)
    compiled = torch.compile(lambda x: stem.pooled(x, norm), backend="aot_eager", fullgraph=True)
    out, want = compiled(x), stem.pooled(x, other)
    assert torch.equal(out, want)
    assert torch.equal(norm.running_var, other.running_var)
    parameters = [*stem.parameters(), norm.weight]
    alike = torch.autograd.grad(want.square().sum(), [*stem.parameters(), other.weight])
    for one, two in zip(torch.autograd.grad(out.square().sum(), parameters), alike, strict=True):
        torch.testing.assert_close(one, two)


@interpreted
def test_pooled_layer_shows_itself_to_who_watches():
    stem, norm, seen = AttentionStem2d(3, 8, num_heads=1), nn.BatchNorm2d(8), []
    want = stem.pooled(torch.ones(1, 3, 4, 4), norm.eval())
    norm.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    torch.testing.assert_close(stem.pooled(torch.ones(1, 3, 4, 4), norm), want)
    assert seen == [(1, 8, 4, 4)]
