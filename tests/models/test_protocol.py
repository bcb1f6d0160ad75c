"""timm's protocol, held by every registered network.

What shapes alone can show runs on the meta device, for all of them; what needs numbers runs on small images, for all but the
largest. A network is tested by being registered.
"""

import copy
import inspect

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import group_parameters
from timm.models._manipulate import group_with_matcher

from nearsight import LocalAttention2d, replace_conv
from nearsight.models.flops import count_parameters
from tests.models.zoo import AUTOENCODERS, NAMES, NANO, NUMBERS, SIZE_OF, awake, images, meta
from tests.support.digits import learn_digits, train_on_digits

SIZES = [(32, 32), (33, 33), (47, 91), (224, 224), (225, 225), (256, 192)]


def shrink(size, reduction):
    return tuple(-(-n // reduction) for n in size)


@pytest.fixture(scope="module", params=NAMES)
def skeleton(request):
    """One network without weights, built once for all tests that use it. Do not change it."""
    return meta(request.param)


@pytest.fixture(scope="module", params=NUMBERS)
def network(request):
    """One network with weights, ten classes, in evaluation mode; built once for all tests that use it. Do not change it."""
    torch.manual_seed(0)
    return awake(timm.create_model(request.param, num_classes=10)).eval()


# ── Shapes: every network, on the meta device ──


def test_every_size_forward_and_backward(skeleton):
    # The other sizes of SIZES pass by below; a deep network takes a second each.
    for size in ((33, 33), (47, 91), (225, 225)) if count_parameters(skeleton) < 30e6 else ((47, 91),):
        skeleton.zero_grad()
        logits = skeleton(images(*size, device="meta"))
        assert logits.shape == (2, skeleton.num_classes)
        logits.sum().backward()
        missing = [key for key, parameter in skeleton.named_parameters() if parameter.grad is None]
        assert not missing, f"{size}: no gradient for {missing[:4]}"
    skeleton.zero_grad()


def test_default_cfg(skeleton):
    model = skeleton
    cfg = model.pretrained_cfg
    state = model.state_dict()
    firsts = cfg["first_conv"] if isinstance(cfg["first_conv"], tuple | list) else (cfg["first_conv"],)
    for key in (*firsts, cfg["classifier"]):
        assert f"{key}.weight" in state, key
    assert not cfg["url"]
    assert len(cfg["mean"]) == len(cfg["std"]) == cfg["input_size"][0] == 3
    x = images(*cfg["input_size"][1:], device="meta")
    features = model.forward_features(x)
    assert features.shape == (2, model.num_features, *cfg["pool_size"])
    assert model.forward_head(features).shape == (2, cfg["num_classes"]) == (2, model.num_classes)
    assert model.get_classifier() is model.get_submodule(cfg["classifier"])


@pytest.mark.parametrize("name", NAMES)
def test_classifier_can_go_and_change(name):
    x = images(32, 40, device="meta")
    model = meta(name, num_classes=0)
    features = model.forward_features(x)
    assert model.forward_head(features).shape == (2, model.head_hidden_size)
    assert model.forward_head(features, pre_logits=True).shape == (2, model.head_hidden_size)
    for classes, pool, wanted in ((5, "avg", (2, 5)), (0, "", features.shape), (4, "max", (2, 4))):
        with torch.device("meta"):
            model.reset_classifier(classes, pool)
        assert model.num_classes == classes
        assert model.forward_head(features).shape == wanted
    if SIZE_OF[name] < 18e6:
        assert meta(name, num_classes=0, global_pool="")(x).shape == features.shape
        assert meta(name, num_classes=3, global_pool="catavgmax")(x).shape == (2, 3)


@pytest.mark.parametrize("name", NAMES)
def test_other_input_channels(name):
    channels = 1 if SIZE_OF[name] > 1e6 else 4
    model = meta(name, in_chans=channels)
    assert model(images(32, 40, channels=channels, device="meta")).shape == (2, model.num_classes)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in [*NAMES, *AUTOENCODERS]),
        *(("qna_vit_nano", {"mixer": mixer}) for mixer in ("sasa", "conv", "dwconv")),
        ("qna_autoencoder", {"encoder": "conv", "decoder": "transposed"}),
        ("qna_autoencoder", {"encoder": "pool", "decoder": "bilinear"}),
    ],
    ids=str,
)
def test_device_and_dtype_reach_every_tensor(name, options):
    model = timm.create_model(name, device="meta", dtype=torch.bfloat16, **options)
    for key, tensor in model.state_dict().items():
        assert tensor.device.type == "meta", key
        assert tensor.dtype == torch.bfloat16 or not tensor.is_floating_point(), key


@pytest.mark.parametrize("name", NAMES)
def test_features_only(name):
    size = (93, 66)
    model = meta(name, features_only=True)
    x = images(*size, device="meta")
    maps = model(x)
    info = model.feature_info
    assert len(maps) == len(info.channels()) == len(info.reduction())
    for each, channels, reduction in zip(maps, info.channels(), info.reduction(), strict=True):
        assert each.shape == (2, channels, *shrink(size, reduction))
    if not name.endswith(("_nano", "_cifar")):
        stages = [4, 8, 16, 32]
        assert info.reduction()[-4:] == stages
        assert len(maps) == (4 if name.startswith("qna") else 5)


def test_forward_intermediates(skeleton):
    size = (66, 93)
    model = skeleton
    x = images(*size, device="meta")
    final, maps = model.forward_intermediates(x)
    assert final.shape == model.forward_features(x).shape
    for each, info in zip(maps, model.feature_info, strict=True):
        assert each.shape == (2, info["num_chs"], *shrink(size, info["reduction"]))
    only = model.forward_intermediates(x, indices=2, intermediates_only=True)
    assert [m.shape for m in only] == [m.shape for m in maps[-2:]]
    early = model.forward_intermediates(x, indices=[0, 1], stop_early=True, intermediates_only=True)
    assert [m.shape for m in early] == [m.shape for m in maps[:2]]
    options = inspect.signature(model.forward_intermediates).parameters
    assert options["key_mask"].default is None
    pruned = copy.deepcopy(model)
    pruned.prune_intermediate_layers(indices=[0, 1], prune_head=True)
    assert count_parameters(pruned) < count_parameters(model)
    again = pruned.forward_intermediates(x, indices=[0, 1], stop_early=True, intermediates_only=True)
    assert [m.shape for m in again] == [m.shape for m in maps[:2]]


POSITIONS = ("rel_row", "rel_col", "emb_row", "emb_col", "nu", "position_bias", "tap_scale_weight", "relative_bias")


def test_no_weight_decay_names_what_exists_and_all_positions(skeleton):
    model = skeleton
    spared = model.no_weight_decay()
    parameters = dict(model.named_parameters())
    assert spared <= set(parameters)
    positions = {key for key in parameters if key.rpartition(".")[2] in (*POSITIONS, "log_radius")}
    assert positions <= spared


def test_layer_groups_cover_every_parameter_in_order(skeleton):
    model = skeleton
    for coarse in (False, True):
        matcher = model.group_matcher(coarse=coarse)
        layer_of = group_with_matcher(model.named_parameters(), matcher, reverse=True)
        assert set(layer_of) == {key for key, _ in model.named_parameters()}
        ids = sorted(set(layer_of.values()))
        assert ids == list(range(len(ids)))
        along = [layer_of[key] for key, _ in model.named_parameters()]
        assert along == sorted(along)
        head = model.pretrained_cfg["classifier"]
        firsts = model.pretrained_cfg["first_conv"]
        first = firsts[0] if isinstance(firsts, tuple | list) else firsts
        assert layer_of[f"{head}.weight"] == ids[-1]
        assert layer_of[f"{first}.weight"] == 0
        assert len(ids) >= 5
    assert sum(map(len, group_parameters(model, matcher).values())) == len(list(model.parameters()))


@pytest.mark.parametrize("name", NAMES)
def test_drop_path_and_dropout_are_options(name):
    model = meta(name, drop_path_rate=0.3, drop_rate=0.2)
    rates = [module.drop_prob for module in model.modules() if type(module).__name__ == "DropPath"]
    assert rates
    assert rates == sorted(rates)
    assert 0.25 < rates[-1] < 0.301
    assert model.drop_rate == 0.2
    assert model(images(32, 32, device="meta")).shape == (2, model.num_classes)


SMALL = {**{name: {} for name in NANO}, "expatt_mobilenetv2_100": {"channel_multiplier": 0.35}}
SMALL |= {"aa_resnet34": {"layers": (1, 1, 1, 1), "channels": (32, 32, 48, 48), "stem_width": 16, "img_size": 32}}


RATES = [(name, rate) for name in SMALL for rate in ("drop_path_rate", "drop_rate")]
RATES += [("expatt_resnet_nano", "drop_block_rate"), ("aa_resnet34", "drop_block_rate")]


@pytest.mark.parametrize(("name", "rate"), RATES)
def test_what_is_dropped_changes_from_pass_to_pass(name, rate):
    """In training; with a rate of 0, and in evaluation, two passes are one."""
    # Blocks of 7×7 and 5×5 pixels are dropped, where the map is that large.
    x = images(64, 85) if rate == "drop_block_rate" else images(16, 21, batch=4)
    for value in (0.0, 0.5):
        model = awake(timm.create_model(name, **SMALL[name], **{rate: value})).train()
        with torch.no_grad():
            one, other = model(x), model(x)
            assert torch.equal(one, other) == (value == 0)
            assert torch.equal(model.eval()(x), model(x))


# ── Numbers: every network once, the largest in the slow run ──


def test_forward_is_finite_and_made_of_its_parts(network):
    x = images(32, 45)
    with torch.no_grad():
        logits = network(x)
        features = network.forward_features(x)
        final, maps = network.forward_intermediates(x)
        assert torch.isfinite(logits).all()
        assert not torch.equal(logits[0], logits[1])
        assert torch.equal(network.forward_head(features), logits)
        assert torch.equal(final, features)
        (last,) = network.forward_intermediates(x, indices=1, intermediates_only=True, norm=True)
        if last.shape == features.shape:  # MobileNet's last convolution comes after its last stage
            assert torch.equal(last, features)
        early = network.forward_intermediates(x, indices=[1], stop_early=True, intermediates_only=True)
        assert torch.equal(early[0], maps[1])


def test_channels_last_agrees(network):
    x = images(40, 48)
    other = copy.deepcopy(network).to(memory_format=torch.channels_last)
    with torch.no_grad():
        wanted = network(x)
        got = other(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_state_survives_a_save_and_load(network, tmp_path):
    name = network.pretrained_cfg["architecture"]
    path = tmp_path / "weights.safetensors"
    save_file({key: value.contiguous() for key, value in network.state_dict().items()}, path)
    again = timm.create_model(name, num_classes=10, checkpoint_path=str(path)).eval()
    x = images(32, 32)
    with torch.no_grad():
        assert torch.equal(again(x), network(x))


def test_features_only_are_the_intermediates(network):
    name = network.pretrained_cfg["architecture"]
    getter = timm.create_model(name, features_only=True)
    getter.load_state_dict({f"model.{key}": value for key, value in network.state_dict().items()}, strict=False)
    missing = set(getter.state_dict()) - {f"model.{key}" for key in network.state_dict()}
    assert not missing
    x = images(36, 64)
    with torch.no_grad():
        for got, wanted in zip(getter.eval()(x), network.forward_intermediates(x)[1], strict=True):
            assert torch.equal(got, wanted)


def test_key_mask_all_true_is_no_mask(network):
    x = images(40, 56)
    everything = torch.ones(2, 40, 56, dtype=torch.bool)
    with torch.no_grad():
        plain, _ = network.forward_intermediates(x)
        masked, _ = network.forward_intermediates(x, key_mask=everything)
    torch.testing.assert_close(masked, plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max()))


def test_masked_pixels_do_not_matter(network):
    x = images(64, 96)
    mask = torch.zeros(2, 64, 96, dtype=torch.bool)
    mask[0, :64, :64] = True
    mask[1, :32, :96] = True
    noise = torch.where(mask[:, None], x, 100 * images(64, 96, seed=1))
    with torch.no_grad():
        wanted = network.forward_intermediates(x, key_mask=mask)
        got = network.forward_intermediates(noise, key_mask=mask)
        loud = network.forward_intermediates(noise)
    for clean, dirty in zip([wanted[0], *wanted[1]], [got[0], *got[1]], strict=True):
        assert torch.equal(clean, dirty)
    assert not torch.allclose(loud[0], wanted[0], atol=1e-3)


def assert_padding_is_left_out(model, x, side):
    """In the corner of a masked square, every stage's map is that of the images alone."""
    batch, channels, rows, columns = x.shape
    canvas, mask = torch.zeros(batch, channels, side, side), torch.zeros(batch, side, side, dtype=torch.bool)
    canvas[:, :, :rows, :columns], mask[:, :rows, :columns] = x, True
    with torch.no_grad():
        alone = model.forward_intermediates(x, intermediates_only=True)
        padded = model.forward_intermediates(canvas, key_mask=mask, intermediates_only=True)
    for small, large in zip(alone, padded, strict=True):
        cut = large[:, :, : small.shape[2], : small.shape[3]]
        torch.testing.assert_close(cut, small, rtol=1e-3, atol=1e-4 * float(small.abs().max()))


def test_padding_under_a_mask_is_as_if_it_were_not_there(network):
    name = network.pretrained_cfg["architecture"]
    if name.startswith(("expatt", "aa")):
        pytest.skip("distances and tables are relative to the size of the map, which padding changes")
    assert_padding_is_left_out(network, images(64, 96), 128)


def attend_locally(conv):
    return LocalAttention2d(
        conv.in_channels, conv.out_channels, 7, stride=conv.stride, num_heads=conv.out_channels // 4
    )


PLAIN_MOBILENET = {"from_channels": 10**6, "channel_multiplier": 0.35}
CONVOLUTIONS = [
    ("resnet_nano", {}, r"conv1$|conv2$"),
    ("sasa_resnet26", {"stem_values": "plain", "stages": "cccc"}, r"layer1"),
    ("expatt_resnet_nano", {"stages": "cccc"}, r"conv1$|conv2$"),
    ("qna_vit_nano", {"mixer": "conv"}, r"stages"),
    ("expatt_mobilenetv2_100", PLAIN_MOBILENET, r"conv_stem"),
]
PLACES = [(*convolutions, layer) for convolutions in CONVOLUTIONS for layer in ("local", "qna", attend_locally)]
PLACES.append(("expatt_mobilenetv2_100", PLAIN_MOBILENET, r"conv_stem|conv_dw", attend_locally))


@pytest.mark.parametrize(("name", "options", "where", "layer"), PLACES)
def test_attention_in_place_of_convolutions_leaves_padding_out(name, options, where, layer):
    torch.manual_seed(0)
    model = awake(timm.create_model(name, **options)).eval()
    options = {"local": {"num_heads": 4}, "qna": {"num_heads": 4, "tap_scale": "ones"}}
    replace_conv(model, layer, where=where, **options.get(layer, {}))
    assert_padding_is_left_out(model, images(32, 64), 96)


@pytest.mark.parametrize("name", NUMBERS)
def test_grad_checkpointing_changes_nothing(name):
    torch.manual_seed(0)
    plain = awake(timm.create_model(name, num_classes=4)).train()
    saving = copy.deepcopy(plain)
    saving.set_grad_checkpointing()
    x = images(32, 48)
    results = []
    for model in (plain, saving):
        torch.manual_seed(1)
        out = model(x)
        out.square().sum().backward()
        results.append((out.detach(), {key: p.grad for key, p in model.named_parameters()}))
    (out, grads), (saved_out, saved_grads) = results
    assert torch.equal(out, saved_out)
    assert [key for key in grads if not torch.equal(grads[key], saved_grads[key])] == []
    # Checkpointing must also be on: fewer tensors are kept.
    assert kept_bytes(saving, x) < 0.8 * kept_bytes(plain, x)


def kept_bytes(model, x):
    total = 0

    def pack(tensor):
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return total


@pytest.mark.parametrize("name", NANO)
@pytest.mark.filterwarnings("ignore")
def test_gradients_of_each_image_by_torch_func(name):
    torch.manual_seed(0)
    model = awake(timm.create_model(name)).eval()
    x = images(16, 20, batch=3)

    def loss(parameters, image):
        return torch.func.functional_call(model, parameters, (image[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), x)
    model(x).square().sum().backward()
    for key, parameter in model.named_parameters():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(each[key].sum(0), parameter.grad, rtol=1e-3, atol=1e-4 * scale, msg=key)


@pytest.mark.parametrize("name", NANO)
@pytest.mark.parametrize("size", [(8, 8), (9, 13), *SIZES[:3]])
def test_nano_networks_take_small_images(name, size):
    model = timm.create_model(name, num_classes=3, in_chans=1)
    logits = model(images(*size, channels=1))
    logits.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


# Here every pixel of the image attends to every pixel: 224 px are 2.5 billion pairs per head and layer, half an hour on a CPU.
QUADRATIC = "aa_resnet50_cifar"
SWEEP = [(name, size) for size in SIZES for name in NAMES if name != QUADRATIC or max(size) < 100]
SWEEP.append((QUADRATIC, (96, 72)))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), SWEEP, ids=[f"{name}-{size[0]}x{size[1]}" for name, size in SWEEP])
def test_every_size_with_numbers(name, size):
    model = timm.create_model(name, num_classes=3)
    model(images(*size)).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


# ── Initialisation that trains ──


@pytest.mark.parametrize("name", NANO)
def test_thirty_steps_bring_the_loss_below_a_third(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, in_chans=1)
    losses = train_on_digits(model, torch.optim.AdamW(model.parameters(), lr=3e-3), 31)
    assert losses[-1] < losses[0] / 3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "epochs"), [(name, 20 if name.startswith("qna") else 10) for name in NANO])
def test_learns_the_digits(name, epochs):
    assert learn_digits(timm.create_model(name, num_classes=10, in_chans=1), epochs) >= 0.97


# ── The protocol itself ──


def test_every_family_is_here():
    assert {name.partition("_")[0] for name in NAMES} == {"sasa", "qna", "expatt", "aa", "resnet"}
    assert len(NANO) == 4
