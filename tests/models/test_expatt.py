"""The ExpAtt networks: parameters beside the published ones, every row of the tables, masks through the network."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import nearsight  # noqa: F401  (registers the models)
from nearsight.layers.augmented import AugmentedConv2d, ExplicitAugmentedConv2d
from nearsight.models.common import shrink_mask
from nearsight.ops.explicit.call import FIXED_KINDS, KINDS


def build(name: str, **options) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **options)


def millions(model: nn.Module) -> float:
    return sum(p.numel() for p in model.parameters()) / 1e6


def augmented(model: nn.Module) -> dict[str, AugmentedConv2d]:
    return {n: m for n, m in model.named_modules() if isinstance(m, AugmentedConv2d)}


def nano(**options) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("expatt_resnet_nano", **{"zero_init_last": False, **options})


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("expatt_resnet34", {}, 17.317),
        ("expatt_resnet34", {"ratio": 0.1}, 20.05),
        ("expatt_resnet50", {}, 24.618),
        ("expatt_resnet101", {}, 42.785),
        ("expatt_resnet152", {}, 57.732),
        ("expatt_resnet50_cifar", {}, 22.762),
        ("expatt_mobilenetv2_100", {}, 3.516),
        ("expatt_resnet50", {"stages": "cccc"}, 25.557),
        ("expatt_resnet34", {"stages": "cccc"}, 21.798),
        ("expatt_resnet50_cifar", {"stages": "cccc"}, 23.713),
        ("expatt_mobilenetv2_100", {"from_channels": 9999}, 3.505),
        ("expatt_resnet50", {"dv": (None, None, None, 56)}, 24.522),
    ],
)
def test_parameters(name: str, options: dict, count: float):
    assert millions(build(name, **options)) == pytest.approx(count, abs=0.002)


def test_the_baselines_are_timms():
    """Same parameters as timm's own network, name by name."""
    for name, plain, options in (
        ("expatt_resnet50", "resnet50", {"stages": "cccc"}),
        ("expatt_mobilenetv2_100", "mobilenetv2_100", {"from_channels": 9999}),
    ):
        ours, theirs = build(name, **options).state_dict(), build(plain).state_dict()
        assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}


@pytest.mark.parametrize(
    ("ours", "theirs"), [("expatt_resnet34", "resnet34"), ("expatt_mobilenetv2_100", "mobilenetv2_100")]
)
def test_without_attention_it_computes_what_timms_does(ours: str, theirs: str):
    options = {"from_channels": 9999} if "mobilenet" in ours else {"stages": "cccc", "zero_init_last": False}
    model = timm.create_model(ours, num_classes=5, **options).eval()
    plain = timm.create_model(theirs, num_classes=5).eval()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 65, 47)
    torch.testing.assert_close(model(x), plain(x))
    for got, want in zip(
        model.forward_intermediates(x, intermediates_only=True),
        plain.forward_intermediates(x, intermediates_only=True),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


# Where the attention is.


def test_places_in_the_resnets():
    """ImageNet: every 3×3 of stages 2–4; both of a basic block; CIFAR: all four stages."""
    model = build("expatt_resnet50")
    assert set(augmented(model)) == {f"layer{s}.{b}.conv2" for s, n in ((2, 4), (3, 6), (4, 3)) for b in range(n)}
    assert {m.attention_channels for n, m in augmented(model).items() if n[5] == "2"} == {16}
    assert {m.attention_channels for n, m in augmented(model).items() if n[5] == "4"} == {48}
    basic = augmented(build("expatt_resnet34"))
    assert len(basic) == 2 * (4 + 6 + 3)
    assert {n[5] for n in augmented(build("expatt_resnet50_cifar"))} == {"1", "2", "3", "4"}
    assert [m.stride for m in augmented(model).values()] == [2, 1, 1, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1]


def test_places_in_mobilenet():
    model = build("expatt_mobilenetv2_100")
    widths = [m.out_channels for m in augmented(model).values()]
    assert min(widths) == 144
    assert len(widths) == 15
    assert all(n.endswith("conv_pw") and m.kernel_size == (1, 1) for n, m in augmented(model).items())


@pytest.mark.parametrize("kind", KINDS)
def test_last_stage_learns_one_radius(kind: str):
    """After the first augmented convolution of stage 4 the map is constant, unless told otherwise or fixed anyway."""
    for name in ("expatt_resnet50", "expatt_resnet34"):
        kinds = [m.attention.kind for n, m in augmented(build(name, kind=kind)).items() if n.startswith("layer4")]
        assert kinds == [kind] + [kind if kind in FIXED_KINDS else "constant"] * (len(kinds) - 1)
        told = [m.attention.kind for m in augmented(build(name, kind=kind, stage4_kind="linear")).values()]
        assert told[-1] == "linear"
        assert told[0] == kind


def test_rows_of_the_ablations():
    shared = augmented(build("expatt_resnet50_cifar"))["layer1.0.conv2"]
    assert shared.attention.log_radius.shape == (1,)
    per_head = augmented(build("expatt_resnet50_cifar", per_head=True))["layer1.0.conv2"]
    assert per_head.attention.log_radius.shape == (8,)
    assert augmented(build("expatt_resnet50_cifar", offset=0.0))["layer1.0.conv2"].attention.offset == 0
    both = augmented(build("expatt_resnet50_cifar", with_aa=True))
    assert both["layer1.0.conv2"].aa.feature_size == (32, 32)
    # Attention of a strided convolution runs on its input's map.
    assert both["layer2.0.conv2"].aa.feature_size == (32, 32)
    assert both["layer2.1.conv2"].aa.feature_size == (16, 16)
    assert isinstance(both["layer1.0.conv2"], ExplicitAugmentedConv2d)
    assert both["layer1.0.conv2"].conv.out_channels == 64 - 2 * 8


@pytest.mark.parametrize(
    "options",
    [{"kind": kind} for kind in KINDS]
    + [{"per_head": True}, {"offset": 0.0}, {"with_aa": True}, {"stages": "cacc"}, {"dv": 4}],
)
def test_every_row_runs_and_trains(options: dict):
    model = nano(num_classes=4, **options)
    x = torch.randn(2, 3, 12, 9)
    model(x).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all(), name
        assert p.grad.any(), name


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("expatt_resnet_nano", {"stages": "aab"}, "AugmentedResNet: got stages='aab', wanted four letters"),
        ("expatt_resnet_nano", {"layers": (1, 1, 1)}, r"AugmentedResNet: got layers=\(1, 1, 1\), wanted four ints"),
        ("expatt_resnet_nano", {"channels": (8,) * 5}, r"AugmentedResNet: got channels=\(8, 8, 8, 8, 8\), wanted four"),
        ("expatt_resnet_nano", {"stem": "big"}, "AugmentedResNet: got stem='big', wanted one of 'conv', 'cifar'"),
        (
            "expatt_resnet_nano",
            {"dv": (8, 8)},
            r"AugmentedResNet: got dv=\(8, 8\), wanted an int, or one int or None per stage",
        ),
        ("expatt_resnet_nano", {"kind": "round"}, "ExplicitAttention2d: got kind='round', wanted one of"),
        (
            "expatt_resnet_nano",
            {"stem_width": 31},
            "AugmentedResNet: got stem_width=31 and stem_kernel=3, wanted an even width",
        ),
        (
            "expatt_resnet_nano",
            {"mechanism": "se"},
            "AugmentedResNet: got mechanism='se', wanted one of 'expatt', 'aa'",
        ),
        ("expatt_resnet_nano", {"img_size": 0}, "AugmentedResNet: got img_size=0, wanted at least 1"),
        ("expatt_mobilenetv2_100", {"channel_multiplier": 0}, "AugmentedMobileNet: got channel_multiplier=0"),
        (
            "aa_resnet50",
            {"with_aa": True},
            "AugmentedResNet: got with_aa=True with mechanism='aa', wanted it with 'expatt' only",
        ),
    ],
)
def test_refuses(name: str, options: dict, text: str):
    with pytest.raises(ValueError, match=f"^{text}"):
        build(name, **options)


def test_another_norm():
    model = nano(norm_layer=lambda channels, **options: nn.BatchNorm2d(channels, eps=0.5, **options))
    assert {m.eps for m in model.modules() if isinstance(m, nn.BatchNorm2d)} == {0.5}
    assert model(torch.randn(2, 3, 12, 9)).shape == (2, 10)


def test_refuses_what_it_does_not_know():
    with pytest.raises(TypeError, match="raduis"):
        build("expatt_resnet_nano", raduis=1.0)


# The rest of the protocol that is ours.


@pytest.mark.parametrize("name", ["expatt_resnet50", "expatt_mobilenetv2_100"])
def test_radii_are_not_decayed(name: str):
    model = build(name, with_aa=True)
    kept = model.no_weight_decay()
    assert kept == {n for n, _ in model.named_parameters() if "radius" in n or "rel_" in n}
    assert any("log_radius" in n for n in kept)


def masks(shape: tuple[int, int, int], padded: tuple[int, int]) -> torch.Tensor:
    batch, height, width = shape
    return F.pad(torch.ones(batch, height, width), (0, padded[1] - width, 0, padded[0] - height)).bool()


@pytest.mark.parametrize("name", ["expatt_resnet_nano", "expatt_resnet34", "expatt_mobilenetv2_100"])
def test_a_padded_image_with_its_mask_gives_the_same(name: str):
    """Exactly so for the constant map; the others measure distance in sizes of the padded map."""
    options = {} if "mobilenet" in name else {"zero_init_last": False}
    torch.manual_seed(0)
    model = timm.create_model(name, kind="constant", num_classes=5, **options).eval()
    x = torch.randn(2, 3, 37, 50)
    padded = F.pad(x, (0, 14, 0, 27), value=7.0)
    mask = masks((2, 37, 50), (64, 64))
    want, want_maps = model.forward_intermediates(x)
    got, got_maps = model.forward_intermediates(padded, key_mask=mask)
    for a, b in zip([*want_maps, want], [*got_maps, got], strict=True):
        height, width = a.shape[2:]
        torch.testing.assert_close(b[..., :height, :width], a, atol=1e-4, rtol=1e-3)
        assert not b[..., height:, :].any()
        assert not b[..., width:].any()
    torch.testing.assert_close(model(padded, mask), model(x), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("act_layer", [nn.ReLU, nn.SiLU])
def test_the_first_pooling_does_not_see_the_padding(act_layer: type[nn.Module]):
    """A zero in its place would win over the negative values of other activations than ReLU."""
    model = nano(stem="conv", act_layer=act_layer).eval()
    x = torch.randn(2, 3, 29, 45)
    small, _ = model._pooled_stem(x, None)
    large, mask = model._pooled_stem(F.pad(x, (0, 19, 0, 3), value=7.0), masks((2, 29, 45), (32, 64)))
    torch.testing.assert_close(large[..., : small.shape[2], : small.shape[3]], small)
    assert not large.masked_fill(mask[:, None], 0.0).any()


@pytest.mark.parametrize("name", ["expatt_resnet_nano", "expatt_resnet34", "expatt_mobilenetv2_100", "aa_resnet34"])
def test_every_convolution_sees_zeros_where_masked(name: str):
    model = timm.create_model(name, num_classes=5, **({} if "mobilenet" in name else {"zero_init_last": False})).eval()
    mask = masks((1, 20, 33), (32, 64))
    seen = []

    def look(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        x = arguments[0]
        outside = ~shrink_mask(mask, 32 // x.shape[2])
        seen.append(module)
        assert not x[outside[:, None].expand_as(x)].any(), module

    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    for conv in convs:
        conv.register_forward_pre_hook(look)
    with torch.no_grad():
        model(torch.randn(1, 3, 32, 64), mask)
    assert set(seen) == set(convs)


@pytest.mark.parametrize("name", ["expatt_resnet_nano", "expatt_mobilenetv2_100"])
def test_what_is_masked_does_not_matter(name: str):
    model = timm.create_model(name, num_classes=5).eval()
    x, mask = torch.randn(2, 3, 33, 40), masks((2, 20, 33), (33, 40))
    dirty = x.masked_fill(~mask[:, None], math.nan)
    assert torch.equal(model(dirty, mask), model(x, mask))
    assert not torch.equal(model(x, mask), model(x))


@pytest.mark.parametrize("name", ["expatt_resnet_nano", "expatt_mobilenetv2_100"])
@pytest.mark.parametrize("mask", [False, True])
def test_checkpointing_changes_nothing(name: str, mask: bool):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3)
    x = torch.randn(2, 3, 33, 40)
    key_mask = masks((2, 20, 33), (33, 40)) if mask else None
    state = {n: t.clone() for n, t in model.state_dict().items()}

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.load_state_dict(state)
        out = model(x, key_mask)
        return out.detach(), list(torch.autograd.grad(out.square().sum(), list(model.parameters())))

    out, gradients = run()
    model.set_grad_checkpointing()
    again, again_gradients = run()
    torch.testing.assert_close(again, out)
    for a, b in zip(again_gradients, gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_dilated_backbone():
    """output_stride keeps the map; the augmented convolutions then dilate instead of striding."""
    model = build("expatt_resnet50", output_stride=16)
    assert model.feature_info[-1]["reduction"] == 16
    last = augmented(model)["layer4.1.conv2"]
    assert last.dilation == (2, 2)
    out = timm.create_model("expatt_resnet_nano", output_stride=16)(torch.randn(2, 3, 16, 24))
    assert out.shape == (2, 10)


def test_features_of_a_pruned_backbone():
    model = timm.create_model("expatt_resnet_nano", features_only=True, out_indices=(1, 2))
    maps = model(torch.randn(1, 3, 17, 30))
    assert [tuple(m.shape[1:]) for m in maps] == [(64, 17, 30), (128, 9, 15)]
    model = timm.create_model("expatt_mobilenetv2_100", features_only=True, out_indices=(2, 4))
    maps = model.eval()(torch.randn(1, 3, 33, 64))
    assert [tuple(m.shape[1:]) for m in maps] == [(32, 5, 8), (320, 2, 2)]
