"""block_attention: the definition, the torch form against it, PyTorch's tools, and the sentences it refuses with."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from nearsight.errors import ArgumentTypeError, ArgumentValueError, BackendError
from nearsight.ops import backends, block_attention, local_attention
from tests.ops.triton.test_block import make
from tests.support.accuracy import assert_by_error_rule


def double(**options):
    return make(torch.float64, **options)


@pytest.mark.parametrize("block", [2, 3])
def test_the_reference_is_local_attention_of_each_block_alone(block):
    """A window of 2·block − 1 reaches from every place of a block to every other and, cut out, to nothing else."""
    inputs = double(size=(4, 7), batch=2, places=False)
    for name in ("rel_row", "rel_col"):
        inputs[name] = inputs[name][: 2 * block - 1]
    got = block_attention(**inputs, heads=2, block=block, backend="reference")
    for top in range(0, 4, block):
        for left in range(0, 7, block):
            x = inputs["x"][:, top : top + block, left : left + block]
            q, k, v = ((x @ inputs[n].t()).unflatten(-1, (2, 8)) for n in ("w_q", "w_k", "w_v"))
            tables = {n: inputs[n] for n in ("rel_row", "rel_col")}
            alone = local_attention(q, k, v, window=2 * block - 1, **tables, backend="reference").flatten(3)
            torch.testing.assert_close(got[:, top : top + block, left : left + block], alone)


def test_each_place_has_its_own_values():
    inputs = double(size=(8, 8))
    inputs["w_q"].zero_()  # every weight 1/16
    out = block_attention(**inputs, heads=2, backend="reference")
    x = inputs["x"][0, 4:, :4].reshape(16, 3)
    mean = torch.einsum("pc,poc->o", x, inputs["w_v"]) / 16
    torch.testing.assert_close(out[0, 4:, :4], mean.expand(4, 4, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "block"),
    [
        ({"size": (8, 12)}, 4),
        ({"size": (5, 11), "batch": 2, "mask": 0.6}, 4),
        ({"size": (1, 3), "places": False, "tables": "row"}, 4),
        ({"size": (6, 4), "tables": "column", "inputs": 9}, 4),
        ({"size": (5, 7), "tables": "none", "places": False}, 3),
        ({"batch": 0}, 4),
    ],
)
def test_torch_by_the_error_rule(dtype, options, block):
    def run(backend):
        return lambda **tensors: block_attention(**tensors, heads=2, block=block, backend=backend)

    assert_by_error_rule(run("torch"), run("reference"), make(dtype, **options))


@pytest.mark.parametrize("seed", [0, 2])
def test_position_gradients_of_many_blocks_by_the_error_rule(seed):
    def run(backend):
        return lambda **tensors: block_attention(**tensors, heads=4, backend=backend)

    inputs = make(torch.float32, size=(96, 64), batch=4, heads=4, dim=16)
    assert_by_error_rule(run("torch"), run("reference"), inputs, seed=seed)


def test_gradcheck():
    inputs = double(size=(3, 5), heads=1, dim=2, inputs=2, mask=0.7)
    mask = inputs.pop("key_mask")
    mask[:, :, :4] = False
    names = list(inputs)
    leaves = [t.requires_grad_() for t in inputs.values()]
    for backend in ("reference", "torch"):
        assert torch.autograd.gradcheck(
            lambda *t, b=backend: block_attention(
                **dict(zip(names, t, strict=True)), key_mask=mask, heads=1, backend=b
            ),
            leaves,
        )


def test_a_masked_pixel_is_not_attended():
    inputs = make(size=(4, 8))
    mask = torch.ones(1, 4, 8, dtype=torch.bool)
    mask[0, 1, 2] = False
    inputs["key_mask"] = mask
    out = block_attention(**inputs, heads=2)
    inputs["x"][0, 1, 2] = 100.0
    other = block_attention(**inputs, heads=2)
    assert torch.equal(out[mask], other[mask])


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inputs = make()
        self.names = [n for n in inputs if n not in ("x", "key_mask")]
        for name in self.names:
            setattr(self, name, nn.Parameter(inputs[name]))

    def forward(self, x, key_mask=None):
        weights = {name: getattr(self, name) for name in self.names}
        return block_attention(x, **weights, key_mask=key_mask, heads=2)


def test_compiles_whole_and_once_for_all_sizes_that_need_padding():
    torch._dynamo.reset()
    model, counter = Attend(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for size in ((5, 9), (7, 33), (17, 6)):
        x = torch.randn(2, *size, 3)
        torch.testing.assert_close(compiled(x), model(x))
    assert counter.frame_count == 1


def test_exports_for_every_size_with_a_mask():
    sizes = {1: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC}
    model = Attend()
    mask = torch.rand(2, 12, 13, generator=torch.Generator().manual_seed(3)) > 0.6
    sample = (torch.randn(2, 7, 9, 3), mask[:, :7, :9].clone())
    module = torch.export.export(model, sample, dynamic_shapes=(sizes, sizes)).module()
    x = torch.randn(2, 12, 13, 3)
    torch.testing.assert_close(module(x, mask), model(x, mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    inputs = make(size=(5, 8))
    want = block_attention(**inputs, heads=2)
    with torch.autocast("cpu", dtype):
        got = block_attention(**inputs, heads=2)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, atol=0.15, rtol=0.05)
    with torch.autocast("cpu", dtype):
        assert block_attention(**double(), heads=2).dtype == torch.float64


def test_meta_tensors():
    inputs = {n: None if t is None else t.to("meta") for n, t in make(size=(5, 9)).items()}
    assert block_attention(**inputs, heads=2).shape == (1, 5, 9, 16)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"x": torch.zeros(4, 8, 3)},
            ArgumentValueError,
            "got x of shape [4, 8, 3] (rank 3), wanted rank 4: [B, H, W, Cin].",
        ),
        ({"x": torch.zeros(1, 4, 8, 4)}, ArgumentValueError, "got w_q of shape [16, 3], wanted [16, 4]: [C, Cin]."),
        ({"w_k": torch.zeros(8, 3)}, ArgumentValueError, "got w_k of shape [8, 3], wanted [16, 3]: the shape of w_q."),
        (
            {"w_v": torch.zeros(9, 16, 3)},
            ArgumentValueError,
            "got w_v of shape [9, 16, 3], wanted [16, 16, 3]: [C, Cin] = [16, 3] or one per place, [16, 16, 3].",
        ),
        (
            {"w_v": torch.zeros(16)},
            ArgumentValueError,
            "got w_v of shape [16] (rank 1), wanted rank 2: [C, Cin] = [16, 3]",
        ),
        ({"rel_row": torch.zeros(4, 4)}, ArgumentValueError, "got rel_row of shape [4, 4], wanted [7, 4]"),
        (
            {"heads": 3},
            ArgumentValueError,
            "got w_q of shape [16, 3] and heads=3, wanted channels that divide by the heads.",
        ),
        ({"heads": 16}, ArgumentValueError, "got rel_row with head dim 1, wanted an even head dim"),
        ({"heads": 2.0}, ArgumentTypeError, "got heads of type float, wanted an int."),
        ({"block": 0}, ArgumentValueError, "got block=0, wanted an int of at least 1."),
        ({"w_q": torch.zeros(16, 3).double()}, ArgumentTypeError, "wanted the same dtype"),
        (
            {"x": torch.zeros(1, 4, 8, 3).long()},
            ArgumentTypeError,
            "got x of dtype torch.int64, wanted a floating-point",
        ),
        ({"key_mask": torch.ones(1, 4, 7, dtype=torch.bool)}, ArgumentValueError, "got key_mask of shape [1, 4, 7]"),
        ({"backend": "triton"}, BackendError, "backend 'triton' cannot run this call: needs CUDA tensors, got cpu."),
    ],
)
def test_refusals(change, error, text):
    with pytest.raises(error, match="^block_attention: .*" + re.escape(text)):
        block_attention(**{**make(), "heads": 2, **change})


def test_backends_are_listed():
    assert [r.name for r in backends("block_attention", **make(), heads=2) if r.usable] == ["torch", "reference"]
