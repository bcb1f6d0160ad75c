"""A peer that computed something else would be a straw man: each is held against the reference."""

import pytest
import torch

from nearsight import ops
from nearsight.bench.accuracy import find_fault
from nearsight.bench.peers.convolution import convolution_runners
from nearsight.bench.peers.explicit import dense_gaussian
from nearsight.bench.peers.local import flex_local, unfold_local
from nearsight.bench.peers.qna import eager_qna

BATCH, HEIGHT, WIDTH, HEADS, DIM = 3, 6, 5, 2, 8


def local_inputs(window):
    maps = {name: torch.randn(BATCH, HEIGHT, WIDTH, HEADS, DIM) * DIM**-0.5 for name in "qkv"}
    return maps | {name: torch.randn(window, DIM // 2) for name in ("rel_row", "rel_col")}


def local_reference(window):
    def run(q, k, v, rel_row=None, rel_col=None):
        return ops.local_attention(q, k, v, window=window, rel_row=rel_row, rel_col=rel_col, backend="reference")

    return run


@pytest.mark.parametrize("window", [3, 7])
def test_unfold_is_local_attention(window):
    assert find_fault(unfold_local(window), local_reference(window), local_inputs(window)) is None


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("window", [3, 7])
@pytest.mark.parametrize("positions", [True, False])
def test_flex_attention_is_local_attention(window, positions):
    """The forward: on a CPU FlexAttention has no backward."""
    inputs = local_inputs(window)
    if not positions:
        inputs = {name: inputs[name] for name in "qkv"}
    run = flex_local(HEIGHT, WIDTH, window, torch.device("cpu"), positions=positions, compiled=False)
    torch.testing.assert_close(run(**inputs), local_reference(window)(**inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [3, 5])
def test_the_released_code_s_form_is_qna(window):
    inputs = {
        "scores": torch.randn(BATCH, HEIGHT, WIDTH, 2, HEADS),
        "values": torch.randn(BATCH, HEIGHT, WIDTH, HEADS, DIM),
        "position_bias": 0.2 * torch.randn(window, window, 2, HEADS),
        "tap_scale": torch.randn(window, window, 2, HEADS),
    }

    def reference(scores, values, position_bias, tap_scale):
        tables = {"position_bias": position_bias, "tap_scale": tap_scale}
        return ops.qna(scores, values, window=window, backend="reference", **tables)

    assert find_fault(eager_qna, reference, inputs) is None
    inputs["scores"][0, 0, 0] = 100.0
    assert not torch.isfinite(eager_qna(**inputs)).all(), "it is called unsafe"


def test_the_dense_map_is_explicit_attention():
    inputs = {"values": torch.randn(BATCH, HEIGHT, WIDTH, 4), "radius": torch.tensor(0.4)}

    def reference(values, radius):
        return ops.explicit_attention(values, kind="gaussian", radius=radius, backend="reference")

    assert find_fault(dense_gaussian, reference, inputs) is None


@pytest.mark.parametrize("depthwise", [False, True])
def test_a_convolution_keeps_the_map_and_comes_in_both_layouts(depthwise):
    values = torch.zeros(BATCH, HEIGHT, WIDTH, HEADS, DIM)
    runners = convolution_runners(values, HEADS * DIM, 3, depthwise=depthwise)
    assert [runner.name for runner in runners] == ["NCHW", "channels-last"]
    for runner, last in zip(runners, (False, True), strict=True):
        out = runner.forward()
        assert out.shape == (BATCH, HEADS * DIM, HEIGHT, WIDTH)
        assert out.is_contiguous(memory_format=torch.channels_last) is last
        assert runner.leaves[1].numel() == HEADS * DIM * 9 * (1 if depthwise else HEADS * DIM)
        gradients = torch.autograd.grad(out.sum(), runner.leaves)
        assert [g.shape for g in gradients] == [leaf.shape for leaf in runner.leaves]
