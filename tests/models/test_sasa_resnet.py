"""SASA ResNets: the published counts, masks that behave like a crop, options, and that they learn."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.models import group_parameters
from torch import nn
from torch.nn import functional as F

import nearsight  # noqa: F401, registers the models
from nearsight.errors import ArgumentValueError
from nearsight.layers import AttentionStem2d, LocalAttention2d
from nearsight.models.sasa_resnet import SasaBottleneck
from tests.support.torch_versions import POOLS_ASK_PARITY

NAMES = timm.list_models(module="sasa_resnet")


def build(name: str = "sasa_resnet_nano", **options) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **options)


def small(**options) -> torch.nn.Module:
    """One block per stage, narrow, any stem: fast enough to run whole."""
    options = {
        "layers": (1, 1, 1, 1),
        "widths": (8, 8, 16, 16),
        "stem_width": 16,
        "heads": 2,
        "num_classes": 5,
        **options,
    }
    model = build("sasa_resnet26", **options).eval()
    # Zero-initialised norms and fresh statistics would hide what the blocks do.
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.bias, std=0.3)
            module.running_mean.normal_(std=0.2)
    return model


def millions(name: str, **options) -> float:
    with torch.device("meta"):
        return sum(p.numel() for p in timm.create_model(name, **options).parameters()) / 1e6


@pytest.mark.parametrize(
    ("depth", "baseline", "attention", "full"),
    [(26, 13.697, 10.331, 10.324), (38, 19.627, 14.173, 14.166), (50, 25.557, 18.016, 18.008)],
)
def test_parameters_of_the_imagenet_table(depth, baseline, attention, full):
    assert millions(f"sasa_resnet{depth}_convstem", stages="cccc") == pytest.approx(baseline, abs=0.002)
    assert millions(f"sasa_resnet{depth}_convstem") == pytest.approx(attention, abs=0.002)
    assert millions(f"sasa_resnet{depth}") == pytest.approx(full, abs=0.002)


@pytest.mark.parametrize(
    ("stages", "published"),
    [
        ("aaaa", 18.0),
        ("caaa", 18.1),
        ("ccaa", 18.5),
        ("ccca", 20.8),
        ("cccc", 25.6),
        ("accc", 25.5),
        ("aacc", 25.1),
        ("aaac", 22.7),
    ],
)
def test_parameters_of_the_stage_ablation(stages, published):
    assert millions("sasa_resnet50_convstem", stages=stages) == pytest.approx(published, abs=0.1)


def test_parameters_without_the_content_term():
    assert millions("sasa_resnet50_convstem", content=False) == pytest.approx(16.7, abs=0.1)


def test_nano_is_small():
    for name in ("sasa_resnet_nano", "resnet_nano"):
        assert 0.1 < millions(name) < 0.5


def test_the_baseline_is_timms_resnet():
    theirs = timm.models.resnet.ResNet(timm.models.resnet.Bottleneck, (1, 2, 4, 1), num_classes=7).eval()
    ours = build("sasa_resnet26_convstem", stages="cccc", num_classes=7).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 33, 47)
    torch.testing.assert_close(ours(x), theirs(x))


def test_where_the_letters_say_attention_there_is_attention():
    model = build("sasa_resnet26_convstem", stages="caca", window=(3, 5), heads=(1, 2, 4, 8))
    kinds = [type(getattr(model, f"layer{i}")[0].conv2) for i in (1, 2, 3, 4)]
    assert kinds == [torch.nn.Conv2d, LocalAttention2d, torch.nn.Conv2d, LocalAttention2d]
    assert model.layer2[0].conv2.num_heads == 2
    assert model.layer4[0].conv2.kernel_size == (3, 5)


def test_options_reach_every_layer():
    options = {"position": "absolute", "border": "zeros"}
    attention = build("sasa_resnet26_convstem", **options, per_head_position=True).layer2[0].conv2
    assert {name: getattr(attention, name) for name in options} == options
    assert attention.per_head_position
    assert build("sasa_resnet26", content=False).layer3[1].conv2.content is False
    for values in ("plain", "conv"):
        assert build("sasa_resnet26", stem_values=values).conv1.values == values
    assert build("sasa_resnet26", mixtures=3).conv1.mixtures == 3
    assert build("sasa_resnet26_convstem").layer1[0].conv2.extra_repr() == "64, 64, 7, num_heads=8"


@pytest.mark.parametrize("options", [{"stem": "conv", "stages": "caca"}, {}, {"stem": "cifar"}])
def test_masked_pixels_anywhere_change_nothing(options):
    model = small(**options)
    x = torch.randn(1, 3, 45, 70)
    mask = torch.rand(1, 45, 70, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[:, :, 20:60] = False
    y = model(x, mask)
    torch.testing.assert_close(model(torch.where(mask[:, None], x, 1e3), mask), y)
    assert not torch.allclose(model(x), y)


@pytest.mark.parametrize("attention", [None, {"num_heads": 2}])
def test_a_block_does_not_look_at_masked_pixels(attention):
    block = SasaBottleneck(8, 4, stride=2, attention=attention).eval()
    x = torch.randn(1, 8, 9, 14)
    mask = torch.rand(1, 9, 14, generator=torch.Generator().manual_seed(0)) > 0.5
    torch.testing.assert_close(block(torch.where(mask[:, None], x, 1e3), mask), block(x, mask))


def test_dropout_acts_in_training_only():
    model = small(drop_rate=0.9)
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(model(x), model(x))
    model.train()
    features = torch.rand(1, 64, 2, 2)
    assert not torch.equal(model.forward_head(features), model.forward_head(features))
    paths = small(drop_path_rate=0.9).layer4[0].train()
    maps = torch.rand(64, 64, 2, 2)
    branch = (paths(maps) - F.relu(paths.downsample(maps))).flatten(1).abs().sum(1)
    assert branch.eq(0).sum() > 32


@pytest.mark.parametrize(
    ("options", "strides"),
    [({"stem": "conv"}, (2, 4, 8, 16, 32)), ({}, (1, 4, 8, 16, 32)), ({"stem": "cifar"}, (1, 1, 2, 4, 8))],
)
def test_features_have_the_strides_they_claim(options, strides):
    model = small(features_only=True, **options)
    assert tuple(model.feature_info.reduction()) == strides
    features = model(torch.randn(1, 3, 45, 70))
    assert [f.shape[1] for f in features] == model.feature_info.channels() == [16, 32, 32, 64, 64]
    assert [tuple(f.shape[2:]) for f in features] == [(-(-45 // s), -(-70 // s)) for s in strides]


def test_intermediates_are_the_features_of_the_plain_forward():
    model = small()
    x = torch.randn(2, 3, 37, 50)
    final, maps = model.forward_intermediates(x)
    torch.testing.assert_close(final, model.forward_features(x))
    torch.testing.assert_close(maps[-1], final)
    torch.testing.assert_close(model.forward_head(final), model(x))
    some = model.forward_intermediates(x, indices=[1, 3], stop_early=True, intermediates_only=True)
    torch.testing.assert_close(some, [maps[1], maps[3]])
    with pytest.raises(ArgumentValueError, match=r"SasaResNet: got output_fmt='NLC', wanted one of 'NCHW'"):
        model.forward_intermediates(x, output_fmt="NLC")
    assert model.prune_intermediate_layers([0, 2]) == [0, 2]
    torch.testing.assert_close(model.forward_intermediates(x, indices=[2], intermediates_only=True), [maps[2]])
    assert not list(model.layer3.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"stem": "conv"},
        {"stem": "conv", "stages": "cccc"},
        {"stem": "cifar", "stages": "caca", "global_pool": "max"},
        {"global_pool": "avgmax"},
        {"stem_values": "conv", "content": False},
        {"position": "absolute", "global_pool": "catavgmax"},
    ],
)
def test_a_masked_image_gives_what_the_crop_gives(options):
    model = small(**options)
    inner = (37, 50)
    x = torch.randn(2, 3, 64, 71)
    mask = torch.zeros(2, 64, 71, dtype=torch.bool)
    mask[:, : inner[0], : inner[1]] = True
    crop = x[:, :, : inner[0], : inner[1]]
    x[:, :, inner[0] :] = 1e4  # whatever lies outside must not matter
    want_final, want = model.forward_intermediates(crop)
    final, maps = model.forward_intermediates(x, key_mask=mask)
    for got, expected in zip([final, *maps], [want_final, *want], strict=True):
        rows, columns = expected.shape[2:]
        torch.testing.assert_close(got[:, :, :rows, :columns], expected, rtol=1e-4, atol=1e-4)
        assert got[:, :, rows:].eq(0).all()
        assert got[:, :, :, columns:].eq(0).all()
    torch.testing.assert_close(model.forward_head(final, key_mask=mask), model(crop), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(x, mask), model(crop), rtol=1e-4, atol=1e-4)
    full = torch.ones_like(mask)
    torch.testing.assert_close(model(x, full), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(8, 8), (9, 31), (1, 5), (32, 32), (33, 33), (47, 91)])
def test_nano_takes_any_size(size):
    model = build(in_chans=1).train()
    model(torch.randn(2, 1, *size)).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name", ["sasa_resnet26", "sasa_resnet26_convstem"])
@pytest.mark.parametrize("size", [(32, 32), (33, 33), (47, 91)])
def test_any_size_from_32(name, size):
    model = build(name, num_classes=3).train()
    model(torch.randn(2, 3, *size)).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in NAMES if "nano" not in n])
@pytest.mark.parametrize("size", [(224, 224), (225, 225), (256, 192)])
def test_large_sizes(name, size):
    model = build(name, num_classes=3).train()
    model(torch.randn(2, 3, *size)).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_checkpointing_changes_nothing():
    x = torch.randn(2, 3, 33, 40)
    mask = torch.rand(2, 33, 40) > 0.2

    def run(checkpointed: bool):
        model = small(drop_rate=0.0)
        model.set_grad_checkpointing(checkpointed)
        y = model(x, mask)
        y.square().sum().backward()
        return y, {n: p.grad for n, p in model.named_parameters()}

    plain, checkpointed = run(False), run(True)
    assert torch.equal(plain[0], checkpointed[0])
    for name, gradient in plain[1].items():
        assert torch.equal(gradient, checkpointed[1][name]), name


def test_positions_do_not_decay_and_groups_cover_everything():
    model = small()
    skipped = model.no_weight_decay()
    assert {"conv1.rel_row", "conv1.rel_col", "conv1.emb_row", "conv1.emb_col", "conv1.nu"} <= skipped
    assert {f"layer{i}.0.conv2.rel_{axis}" for i in (1, 2, 3, 4) for axis in ("row", "col")} <= skipped
    assert len(skipped) == 13
    groups = group_parameters(model, model.group_matcher(coarse=True))
    assert sum(len(g) for g in groups.values()) == len(list(model.parameters()))
    assert "conv1.qk.weight" in groups[0]


def test_classifier_and_pooling_protocol():
    model = small(drop_rate=0.3, drop_path_rate=0.2)
    assert model.get_classifier().out_features == 5
    assert [round(getattr(model, f"layer{i}")[0].drop_path.drop_prob, 4) for i in (2, 3, 4)] == [0.0667, 0.1333, 0.2]
    x = torch.randn(1, 3, 32, 40)
    assert model.forward_head(model.forward_features(x), pre_logits=True).shape == (1, 64)
    model.reset_classifier(3, "catavgmax")
    assert model(x).shape == (1, 3)
    model.reset_classifier(0)
    assert model(x).shape == (1, 64)
    model.reset_classifier(0, "")
    assert model(x).shape == (1, 64, 1, 2)


@pytest.mark.parametrize("name", ["sasa_resnet26", "sasa_resnet26_convstem"])
def test_a_checkpoint_adapts_to_other_input_channels(name, tmp_path):
    options = {"widths": (8, 8, 8, 8), "stem_width": 8, "heads": 2, "num_classes": 1000}
    source = build(name, **options)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    overlay = {"file": str(tmp_path / "weights.pth")}
    grey = timm.create_model(
        name,
        pretrained=True,
        pretrained_cfg_overlay=overlay,
        in_chans=1,
        num_classes=4,
        **{k: v for k, v in options.items() if k != "num_classes"},
    )
    x = torch.randn(1, 1, 32, 32)
    torch.testing.assert_close(
        grey.eval().forward_features(x), source.eval().forward_features(x.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("masked", [False, True])
def test_the_pooled_stem_is_the_stem_then_the_pooling(masked):
    model = build("sasa_resnet26", layers=(1, 1, 1, 1)).train()
    x = torch.randn(2, 3, 21, 30, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 21, 30, dtype=torch.bool) if masked else None
    if mask is not None:
        mask[0, :, 17:] = False
    seen = []
    apart, shrunk = model._pool(*model._stem(x, mask))
    together, again = model._pooled_stem(x, mask)
    assert torch.equal(apart, together)
    assert (shrunk is None and again is None) or torch.equal(shrunk, again)
    hook = model.act1.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    assert torch.equal(model._pooled_stem(x, mask)[0], apart)
    assert seen == [(2, 64, 21, 30)]
    hook.remove()


@pytest.mark.parametrize(
    ("pool", "size"), [(nn.Identity(), (21, 30)), (nn.MaxPool2d(2), (10, 15)), (nn.MaxPool2d(4), (5, 7))], ids=str
)
def test_another_pooling_after_the_stem_counts(pool, size):
    """As one puts there for small images."""
    model = build("sasa_resnet26", layers=(1, 1, 1, 1)).eval()
    model.maxpool = pool
    x = torch.randn(1, 3, 21, 30)
    assert model._pooled_stem(x, None)[0].shape[2:] == size
    assert torch.equal(model._pooled_stem(x, None)[0], model._pool(*model._stem(x, None))[0])


def test_initialisation_keeps_the_layers_own():
    model = build("sasa_resnet26")
    assert isinstance(model.conv1, AttentionStem2d)
    assert model.conv1.v.weight.std().item() == pytest.approx(3**-0.5, rel=0.15)
    assert model.layer1[0].bn3.weight.eq(0).all()
    assert build().layer1[0].bn3.weight.eq(1).all()


def test_exports_for_every_size():
    model = small(stages="acca", window=3)
    sizes = {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    program = torch.export.export(model, (torch.randn(1, 3, 49, 70),), dynamic_shapes=(sizes,)).module()
    for size in ((49, 70), (113, 134)) if POOLS_ASK_PARITY else ((49, 70), (64, 96), (83, 37)):
        x = torch.randn(1, 3, *size)
        torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stages": "aba"}, "got stages='aba', wanted four letters, one per stage, 'a' for attention or 'c'"),
        ({"stages": "abca"}, "got stages='abca', wanted four letters"),
        ({"stem": "patch"}, "got stem='patch', wanted one of 'attention', 'conv', 'cifar'"),
        ({"heads": (2, 4)}, r"got heads=\(2, 4\), wanted four ints of at least 1, one per stage"),
        ({"heads": (2, 4, 8, 0)}, r"got heads=\(2, 4, 8, 0\), wanted four ints of at least 1"),
        ({"layers": (1, 1, 1)}, r"got layers=\(1, 1, 1\), wanted four ints of at least 1, one per stage"),
        ({"widths": (8, 8, 8, 8, 8)}, r"got widths=\(8, 8, 8, 8, 8\), wanted four ints"),
        ({"widths": 64}, "got widths=64, wanted four ints"),
    ],
)
def test_refusals(options, text):
    with pytest.raises(ArgumentValueError, match=f"^SasaResNet: {text}"):
        build("sasa_resnet26", **options)


def test_refused_images():
    with pytest.raises(ArgumentValueError, match=r"SasaResNet: got shape \[1, 3, 8, 8\], wanted \[B, 1, H, W\]"):
        build(in_chans=1)(torch.zeros(1, 3, 8, 8))
