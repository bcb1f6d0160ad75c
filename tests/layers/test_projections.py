"""Projections that are more than their weight, in every layer: pruned, normalised, watched, adapted, quantised."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, weight_norm

from nearsight import (
    AttentionStem2d,
    ExplicitAttention2d,
    LocalAttention2d,
    QnA2d,
    QnAUpsample2d,
    WindowAttention2d,
)
from nearsight.errors import BackendError
from nearsight.layers.common import only_weight
from nearsight.layers.relative_attention import RelativeAttention2d

CASES = {
    "local": (lambda: LocalAttention2d(6, 8, (3, 5), num_heads=2, qkv_bias=True), ("qkv",)),
    "local-position-alone": (lambda: LocalAttention2d(6, 8, 3, num_heads=2, content=False, stride=2), ("qkv",)),
    "qna": (lambda: QnA2d(6, 8, 3, num_heads=2, tap_scale="ones", bias=True), ("value", "proj")),
    "qna-up": (lambda: QnAUpsample2d(6, 8, 3, num_heads=2), ("value",)),
    "stem": (lambda: AttentionStem2d(6, 8, 3, num_heads=2), ("qk", "v")),
    "stem-plain": (lambda: AttentionStem2d(6, 8, 4, num_heads=2, values="plain"), ("qk", "v")),
    "stem-conv": (lambda: AttentionStem2d(6, 8, 4, num_heads=2, values="conv"), ("qk", "v")),
    "window": (lambda: WindowAttention2d(6, 8, (3, 4), num_heads=2), ("qkv",)),
    "explicit": (lambda: ExplicitAttention2d(6, 8), ("value",)),
    "relative": (lambda: RelativeAttention2d(6, 8, key_channels=8, feature_size=(5, 7), num_heads=2), ("qkv",)),
}
PLACES = [(case, place) for case, (_, places) in CASES.items() for place in places]


@pytest.fixture(params=PLACES, ids="-".join)
def layer_and_place(request):
    case, place = request.param
    torch.manual_seed(0)
    return CASES[case][0](), place


def image():
    mask = torch.ones(2, 7, 9, dtype=torch.bool)
    mask[1, 4:] = False
    return torch.randn(2, 6, 7, 9), mask


class Adapted(nn.Module):
    """A projection with something added that trains, as LoRA does it: its weight is still that of the old one."""

    def __init__(self, base):
        super().__init__()
        self.base, self.change = base, nn.Parameter(torch.randn_like(base.weight))

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        state = {"weight": self.weight + self.change, **({} if self.bias is None else {"bias": self.bias})}
        return torch.func.functional_call(self.base, state, (x,))


def test_an_adapter_counts_and_trains(layer_and_place):
    layer, place = layer_and_place
    x, mask = image()
    adapter = Adapted(getattr(layer, place))
    merged = copy.deepcopy(layer)
    with torch.no_grad():
        getattr(merged, place).weight += adapter.change
    setattr(layer, place, adapter)
    out, wanted = layer(x, mask), merged(x, mask)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
    (got,) = torch.autograd.grad(out.square().sum(), adapter.change)
    (gradient,) = torch.autograd.grad(wanted.square().sum(), getattr(merged, place).weight)
    torch.testing.assert_close(got, gradient, atol=1e-4 * float(gradient.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("change", ["pruned", "normalised"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_made_by_a_hook_train(layer_and_place, change):
    layer, place = layer_and_place
    x, _ = image()
    projection = getattr(layer, place)
    if change == "pruned":
        prune.l1_unstructured(projection, "weight", 0.5)
    else:
        weight_norm(projection)
    name = {"pruned": "weight_orig", "normalised": "weight_v"}[change]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        before = getattr(projection, name).detach().clone()
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
        assert not torch.equal(getattr(projection, name), before)
    out = layer(x)
    if change == "pruned":
        assert (projection.weight == 0).float().mean() == 0.5
        prune.remove(projection, "weight")
    else:
        nn.utils.remove_weight_norm(projection)
    torch.testing.assert_close(layer(x), out, atol=1e-5, rtol=1e-4)


def test_a_hook_sees_the_projection_and_may_change_it(layer_and_place):
    layer, place = layer_and_place
    x, _ = image()
    plain = layer(x)
    seen = []
    handle = getattr(layer, place).register_forward_hook(lambda module, inputs, output: seen.append(output))
    torch.testing.assert_close(layer(x), plain, atol=1e-5, rtol=1e-4)
    assert len(seen) == 1
    handle.remove()
    getattr(layer, place).register_forward_hook(lambda module, inputs, output: output * 0)
    assert not torch.allclose(layer(x), plain, atol=1e-3)


@pytest.mark.parametrize("case", ["local", "qna", "window", "explicit", "relative"])
@pytest.mark.filterwarnings("ignore")
def test_quantised_projections_run(case):
    torch.manual_seed(0)
    layer = CASES[case][0]()
    x, mask = image()
    small = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, dtype=torch.qint8)
    wanted = layer(x, mask)
    assert (small(x, mask) - wanted).abs().max() < 0.1 * wanted.abs().max()


def test_the_stem_with_its_pooling_and_its_pictures_call_them_too():
    torch.manual_seed(0)
    stem, norm = AttentionStem2d(6, 8, 4, num_heads=2), nn.BatchNorm2d(8).eval()
    x, mask = image()
    merged, adapter = copy.deepcopy(stem), Adapted(stem.qk)
    with torch.no_grad():
        merged.qk.weight += adapter.change
    stem.qk = adapter
    torch.testing.assert_close(stem.pooled(x, norm), merged.pooled(x, norm), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(stem.attention_weights(x, mask), merged.attention_weights(x, mask), atol=1e-5, rtol=1e-4)
    stem.backend = "reference"
    with pytest.raises(BackendError) as raised:
        stem(x)
    assert str(raised.value) == (
        "AttentionStem2d: backend 'reference' cannot run this call: needs projections without hooks, which are called by "
        "their own forward, got others. Usable here: torch."
    )


def test_plain_and_parametrised_projections_are_only_their_weight():
    plain = nn.Linear(3, 4)
    assert only_weight(plain, nn.Linear)
    assert not only_weight(plain, nn.Conv2d)
    assert only_weight(nn.utils.parametrizations.weight_norm(plain), nn.Linear)
    assert not only_weight(nn.Identity(), nn.Linear)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", ["plain", "watched", "of another class", "with a forward of its own"])
def test_compiled_layers_take_the_way_that_others_take(kind):
    """What a compiler is told of the projection is what it is: compiled networks would lose their fused forms otherwise."""
    torch._dynamo.reset()
    projection = Doubled(3, 4) if kind == "of another class" else nn.Linear(3, 4)
    if kind == "watched":
        projection.register_forward_hook(lambda module, inputs, output: None)
    if kind == "with a forward of its own":
        projection.forward = lambda x: x

    def fused(x):
        return x + only_weight(projection, nn.Linear)

    compiled = torch.compile(fused, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(())) == fused(torch.zeros(())) == (kind == "plain")
