"""Each count against a sum done by hand."""

import threading

import pytest
import timm
import torch
from torch import nn

from nearsight import ops
from nearsight.errors import ArgumentValueError
from nearsight.layers import AttentionStem2d
from nearsight.layers.relative_attention import RelativeAttention2d
from nearsight.models.flops import CONVENTIONS, Work, count_flops, count_parameters, measure_work
from nearsight.ops import dispatch


class Run(nn.Module):
    """A function of a [1, 3, H, W] map as a network."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def meta(*shape):
    return torch.zeros(shape, device="meta")


H, W, HEADS, D = 5, 7, 2, 6


@pytest.mark.parametrize(
    ("content", "rows", "columns", "wanted"),
    [
        (True, True, True, {"product": 2, "position": 1}),
        (True, False, False, {"product": 2}),
        (True, True, False, {"product": 2, "position": 0.5}),
        (False, True, True, {"product": 2}),
    ],
)
def test_local_attention(content, rows, columns, wanted):
    q = meta(1, H, W, HEADS, D)
    options = {
        "window": (3, 5),
        "rel_row": meta(3, D // 2) if rows else None,
        "rel_col": meta(5, D // 2) if columns else None,
    }
    work = measure_work(Run(lambda x: ops.local_attention(q, q if content else None, q, **options)), (H, W))
    products = H * W * 15 * HEADS * D
    assert work == Work(softmax=H * W * 15 * HEADS, **{name: int(n * products) for name, n in wanted.items()})


@pytest.mark.parametrize("combine", ["sum", "stack"])
def test_qna(combine):
    def run(x):
        out = ops.qna(meta(1, H, W, 3, HEADS), meta(1, H, W, HEADS, D), window=3, stride=2, combine=combine)
        assert out.shape == ((1, 3, 4, HEADS, D) if combine == "sum" else (1, 3, 4, 3, HEADS, D))
        return out

    assert measure_work(Run(run), (H, W)) == Work(product=3 * 4 * 9 * 3 * HEADS * D, softmax=3 * 4 * 9 * 3 * HEADS)


@pytest.mark.parametrize(
    ("kind", "per_channel"),
    [("constant", H * W), ("gaussian", H * W * (H + W)), ("exp_manhattan", H * W * (H + W)), ("linear", (H * W) ** 2)],
)
def test_explicit_attention(kind, per_channel):
    radius = 0.75 if kind in ("gaussian", "exp_manhattan") else None
    work = measure_work(Run(lambda x: ops.explicit_attention(meta(1, H, W, 4), kind=kind, radius=radius)), (H, W))
    assert work == Work(explicit_map=4 * per_channel)


def test_block_attention():
    w = meta(8, 3)
    tables = {"rel_row": meta(7, 2), "rel_col": meta(7, 2)}
    work = measure_work(Run(lambda x: ops.block_attention(meta(1, 5, 11, 3), w, w, w, heads=2, **tables)), (5, 11))
    pixels = 8 * 12
    assert work == Work(product=pixels * 8 * (3 * 3 + 2 * 16), position=pixels * 8 * 16, softmax=pixels * 16 * 2)


@pytest.mark.parametrize(
    ("values", "projections", "mixture"), [("mixture", 3, 5 * 3 + 6), ("plain", 3, 0), ("conv", 2 + 16, 0)]
)
def test_attention_stem(values, projections, mixture):
    stem = AttentionStem2d(3, 8, values=values, num_heads=2)
    pixels = 8 * 12  # 5×11 in whole 4×4 blocks
    wanted = Work(
        product=pixels * 8 * (3 * projections + 2 * 16),
        position=pixels * 8 * 16,
        mixture=pixels * 8 * mixture,
        softmax=pixels * 16 * 2,
    )
    assert measure_work(stem, (5, 11)) == wanted
    assert stem(torch.randn(1, 3, 5, 11)).shape == (1, 8, 5, 11)


@pytest.mark.parametrize("stride", [1, 2])
def test_relative_attention(stride):
    layer = RelativeAttention2d(10, 8, key_channels=12, feature_size=4, stride=stride, num_heads=2)
    n, out = H * W, H * W if stride == 1 else 3 * 4
    wanted = Work(
        product=n * 10 * (12 + 12 + 8) + out * 8 * 8,
        pairs=n * n * (12 + 8),
        position=n * (H + W) * 12,
        softmax=n * n * 2,
        pooling=n * 8 * (stride - 1),
    )
    assert measure_work(layer, (H, W)) == wanted
    assert layer(torch.randn(1, 10, H, W)).shape[2:] == ((H, W) if stride == 1 else (3, 4))


def test_plain_layers():
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Softmax(1))
    pixels = 6 * 10
    wanted = Work(
        product=pixels * 8 * 27,
        batch_norm=pixels * 8,
        activation=pixels * 8,
        pooling=pixels * 8,
        softmax=pixels // 4 * 8,
    )
    assert measure_work(net, (6, 10)) == wanted


def test_conventions_weigh_the_work():
    work = Work(
        product=1,
        position=10,
        explicit_map=100,
        softmax=1000,
        batch_norm=10**4,
        activation=10**5,
        pooling=10**6,
        mixture=10**7,
        pairs=10**8,
    )
    totals = {name: convention.total(work) for name, convention in CONVENTIONS.items()}
    assert totals == {
        "matmul": 200_000_222,
        "sasa": 220_055_212,
        "mac": 100_000_111,
        "qna": 100_001_111,
        "expatt": 1_120_001,
    }


def test_resnet_50_as_everyone_counts_it():
    with torch.device("meta"):
        model = timm.create_model("resnet50")
    assert count_parameters(model) == 25_557_032
    assert count_flops(model, convention="mac") == 4_089_184_256
    assert count_flops(model) == 2 * count_flops(model, convention="mac")
    assert count_flops(model, (128, 256)) < count_flops(model, (256, 256))


def test_the_model_is_left_as_it_is():
    model = nn.Sequential(nn.Conv2d(4, 2, 1), nn.Dropout()).train()
    assert count_flops(model, (3, 5)) == 2 * 15 * 8
    assert model.training
    assert model[0].weight.device.type == "cpu"


def test_frozen_parts_stay_frozen():
    model = nn.Sequential(nn.Conv2d(4, 2, 1, device="meta"), nn.BatchNorm2d(2, device="meta")).train()
    model[1].eval()
    count_flops(model, (3, 5))
    assert [module.training for module in model] == [True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["sasa_resnet_nano", "qna_vit_nano", "aa_resnet50_cifar", "resnet_nano"])
def test_networks_of_another_dtype(name, dtype):
    assert count_flops(timm.create_model(name, dtype=dtype, device="meta"), 32) == count_flops(
        timm.create_model(name), 32
    )


def test_real_calls_in_other_threads_run_as_ever():
    q = torch.randn(1, 4, 5, 1, 2)
    wanted = ops.local_attention(q, q, q, window=3)
    got = []

    def elsewhere(x):
        thread = threading.Thread(target=lambda: got.append(ops.local_attention(q, q, q, window=3)))
        thread.start()
        thread.join()
        return x

    measure_work(Run(elsewhere), (4, 5))
    assert torch.equal(got[0], wanted)


def test_counting_ends_even_when_a_network_fails():
    original = dispatch.run
    with pytest.raises(ZeroDivisionError):
        measure_work(Run(lambda x: 1 / 0), (4, 5))
    assert dispatch.run is original


def test_errors():
    with pytest.raises(
        ArgumentValueError, match="got convention='flop', wanted one of 'matmul', 'sasa', 'mac', 'qna', 'expatt'"
    ):
        count_flops(nn.Conv2d(3, 4, 1), 8, convention="flop")
    with pytest.raises(ArgumentValueError, match=r"got a model without a default size, wanted size=\(rows, columns\)"):
        count_flops(nn.Conv2d(3, 4, 1))
