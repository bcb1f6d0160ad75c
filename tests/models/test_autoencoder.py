"""The auto-encoders: layers in the supplement's order, counts by hand, sizes, and what each pairing computes."""

import itertools

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from nearsight.errors import ArgumentValueError
from nearsight.models.autoencoder import DECODERS, ENCODERS, AutoEncoder
from nearsight.models.flops import count_flops, count_parameters
from nearsight.models.listing import model_names
from nearsight.models.published import TABLES, compare
from tests.models.zoo import AUTOENCODERS, NAMES, images, meta

PAIRINGS = list(itertools.product(ENCODERS, DECODERS))
NARROW = (8, 8, 16, 16, 24)


def small(encoder="qna", decoder="qna", **options):
    torch.manual_seed(0)
    return timm.create_model("qna_autoencoder", encoder=encoder, decoder=decoder, **{"widths": NARROW, **options})


def test_a_registered_network_is_a_classifier_or_an_autoencoder():
    assert AUTOENCODERS == ["qna_autoencoder"]
    assert {*NAMES, *AUTOENCODERS} == set(model_names())


# ── What it is made of ──

ORDER = {
    "conv": ["conv", "norm"],
    "pool": ["conv", "norm", "pool"],
    "qna": ["norm", "qna"],
    "bilinear": ["grow", "conv", "norm"],
    "transposed": ["conv", "norm"],
}


@pytest.mark.parametrize(("encoder", "decoder"), PAIRINGS)
def test_five_layers_down_and_five_up_in_the_supplements_order(encoder, decoder):
    model = meta("qna_autoencoder", encoder=encoder, decoder=decoder)
    for levels, kind in ((model.encoder, encoder), (model.decoder, decoder)):
        assert [[name for name, _ in level.named_children()] for level in levels] == 5 * [ORDER[kind]]
    widths = [32, 32, 64, 128, 256, 512]
    x = torch.empty(2, 3, 64, 96, device="meta")
    sizes = []
    for level in (model.stem, *model.encoder, *model.decoder, model.head):
        x = level(x)
        sizes.append(tuple(x.shape[1:]))
    down = [(width, 64 >> n, 96 >> n) for n, width in enumerate(widths)]
    assert sizes == [*down, *down[-2::-1], (3, 64, 96)]


def test_what_the_layers_are():
    model = meta("qna_autoencoder")
    for level in model.encoder:
        assert (level.qna.num_queries, level.qna.stride, level.qna.kernel_size) == (1, (2, 2), (3, 3))
    for level in model.decoder:
        assert (level.qna.scale_factor, level.qna.kernel_size) == (2, (3, 3))
    assert {level.qna.head_dim for level in (*model.encoder, *model.decoder)} == {8}
    pool = meta("qna_autoencoder", encoder="pool", decoder="bilinear", activation="gelu")
    names = [name for name, _ in pool.encoder[0].named_children()]
    assert names == ["conv", "norm", "act", "pool"]
    assert [name for name, _ in pool.decoder[0].named_children()] == ["grow", "conv", "norm", "act"]
    assert pool.encoder[0].conv.stride == (1, 1)
    assert meta("qna_autoencoder", encoder="conv").encoder[0].conv.stride == (2, 2)
    assert pool.encoder[0].norm.affine


def by_hand(encoder, decoder):
    """Parameters from the widths alone."""
    steps = [(32, 32), (32, 64), (64, 128), (128, 256), (256, 512)]
    total = (3 * 32 + 32) + (32 * 3 + 3)
    for a, b in steps:
        if encoder == "qna":  # LayerNorm; one query, W_K, W_V, W_O; 9 taps × heads of 8, bias and scale
            total += 2 * a + b + 2 * a * b + b * b + 2 * 9 * b // 8
        else:
            total += 9 * a * b + 2 * b
        if decoder == "qna":  # from b to a; four queries
            total += 2 * b + 4 * a + 2 * a * b + a * a + 2 * 9 * 4 * a // 8
        else:
            total += 9 * a * b + 2 * a
    return total


@pytest.mark.parametrize(("encoder", "decoder"), PAIRINGS)
def test_parameters_by_hand(encoder, decoder):
    assert count_parameters(meta("qna_autoencoder", encoder=encoder, decoder=decoder)) == by_hand(encoder, decoder)


def test_the_table_has_the_nine_pairings():
    (table,) = [table for table in TABLES["qna"] if "Auto-encoders" in table.title]
    counted = {(c.row.options["encoder"], c.row.options["decoder"]): c.parameters for c in compare(table)}
    assert counted == {pair: by_hand(*pair) for pair in PAIRINGS}
    assert by_hand("qna", "qna") == 1_150_779


def test_flops_of_a_baseline_by_hand():
    """Multiply-adds of conv and transposed at 64×96: a 3×3 window per pixel of the smaller map, both ways."""
    steps = [(32, 32), (32, 64), (64, 128), (128, 256), (256, 512)]
    level = sum(9 * a * b * (64 >> n) * (96 >> n) for n, (a, b) in enumerate(steps, 1))
    ends = 2 * 3 * 32 * 64 * 96
    model = meta("qna_autoencoder", encoder="conv", decoder="transposed")
    assert count_flops(model, (64, 96), "mac") == 2 * level + ends


# ── What it computes ──


@pytest.mark.parametrize(("encoder", "decoder"), PAIRINGS)
@pytest.mark.parametrize("size", [(32, 64), (96, 32), (64, 96)])
def test_rectangles(encoder, decoder, size):
    model = small(encoder, decoder)
    x = images(*size)
    code = model.encode(x)
    assert code.shape == (2, NARROW[-1], size[0] // 32, size[1] // 32)
    out = model(x)
    assert torch.equal(out, model.decode(code))
    assert out.shape == x.shape
    F.l1_loss(out, x).backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]


@pytest.mark.parametrize(("encoder", "decoder"), PAIRINGS)
def test_transposed_images_through_transposed_weights(encoder, decoder):
    """Swap rows and columns of the image and of every table and kernel: the result is swapped, so nothing mixes the two up."""
    model, other = small(encoder, decoder), small(encoder, decoder)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            last = name.rpartition(".")[2]
            if last in ("position_bias", "tap_scale_weight"):
                parameter.copy_(parameter.transpose(0, 1).clone())
            elif parameter.dim() == 4:
                parameter.copy_(parameter.transpose(2, 3).clone())
        if decoder == "qna":  # query l = 2a + b makes the new pixel in row a, column b
            swap = [0, 2, 1, 3]
            for level in other.decoder:
                level.qna.query.copy_(level.qna.query[swap].clone())
                for table in (level.qna.position_bias, level.qna.tap_scale_weight):
                    table.copy_(table[:, :, swap].clone())
        x = images(64, 96)
        torch.testing.assert_close(other(x.mT), model(x).mT, rtol=1e-3, atol=1e-4)


def test_upsampling_puts_each_query_where_it_belongs():
    """A decoder level whose queries differ only in their scale: query 2a + b lights the new pixels (2i + a, 2j + b)."""
    level = small().decoder[0].qna
    with torch.no_grad():
        for bright in range(4):
            level.position_bias.zero_()
            level.tap_scale_weight.zero_()
            level.tap_scale_weight[:, :, bright] = 1
            out = level(images(3, 5, channels=NARROW[-1])).abs().sum(1)
            lit = torch.zeros(6, 10, dtype=torch.bool)
            lit[bright // 2 :: 2, bright % 2 :: 2] = True
            assert (out[:, lit] > 0).all()
            assert (out[:, ~lit] == 0).all()


def test_pool_and_bilinear_are_what_they_say():
    model = small("pool", "bilinear", activation="relu").eval()
    x = torch.rand(2, 8, 32, 64)
    down, up = model.encoder[0], model.decoder[-1]
    with torch.no_grad():
        y = F.conv2d(x, down.conv.weight, padding=1)
        y = F.max_pool2d(F.relu(F.instance_norm(y, weight=down.norm.weight, bias=down.norm.bias)), 2)
        torch.testing.assert_close(down(x), y)
        z = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        z = F.instance_norm(F.conv2d(z, up.conv.weight, padding=1), weight=up.norm.weight, bias=up.norm.bias)
        torch.testing.assert_close(up(x), F.relu(z))


@pytest.mark.parametrize(("encoder", "decoder"), PAIRINGS)
def test_bf16_autocast_is_close(encoder, decoder):
    model = small(encoder, decoder)
    x = images(64, 96)
    plain = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        half = model(x)
        loss = F.l1_loss(half.float(), x)
    loss.backward()
    assert half.dtype == torch.bfloat16
    # Instance norm of the few pixels of a small map divides by small deviations: errors grow, but not past the signal.
    assert (half.float() - plain).norm() < 0.2 * plain.norm()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize(("encoder", "decoder"), [("qna", "qna"), ("pool", "bilinear")])
def test_no_images_and_one(encoder, decoder):
    model = small(encoder, decoder)
    assert model(torch.empty(0, 3, 64, 32)).shape == (0, 3, 64, 32)
    x = images(64, 32)
    torch.testing.assert_close(model(x[:1]), model(x)[:1])


def test_checkpointing_and_channels_last_change_nothing():
    model = small(activation="gelu").train()
    x = images(64, 32)
    model(x).square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    out = model(x)
    model.zero_grad()
    model.set_grad_checkpointing()
    kept = model(x)
    assert torch.equal(kept, out)
    kept.square().sum().backward()
    assert [name for name, p in model.named_parameters() if not torch.equal(p.grad, grads[name])] == []
    model.set_grad_checkpointing(False)
    last = model.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(last, out, rtol=1e-4, atol=1e-4)


def test_heads_and_queries_start_apart():
    """From a 1×1 code the four new pixels differ at once: the start is no blur."""
    out = small().decode(images(1, 1, channels=NARROW[-1]))
    assert out.std((2, 3)).min() > 0.02


def test_other_depths_and_channels():
    model = AutoEncoder(widths=(8, 16), in_chans=1)
    assert model.encode(torch.rand(1, 1, 12, 20)).shape == (1, 16, 3, 5)
    assert model(torch.rand(1, 1, 12, 20)).shape == (1, 1, 12, 20)


def test_weight_decay_spares_positions_and_layers_have_an_order():
    from timm.models._manipulate import group_with_matcher

    model = meta("qna_autoencoder")
    assert len(model.no_weight_decay()) == 20
    layers = group_with_matcher(model.named_parameters(), model.group_matcher(), reverse=True)
    assert layers["stem.weight"] == 0
    assert layers["encoder.1.qna.query"] < layers["encoder.4.qna.query"] < layers["decoder.0.qna.query"]
    assert layers["head.weight"] == max(layers.values())


# ── What it refuses ──


@pytest.mark.parametrize("size", [(48, 64), (64, 48), (33, 32), (0, 32)])
def test_other_sizes_are_refused(size):
    wanted = (
        rf"^qna_autoencoder: got images of {size[0]}×{size[1]}, wanted rows and columns that divide by 32; resize or"
    )
    with pytest.raises(ArgumentValueError, match=wanted):
        small()(torch.empty(1, 3, *size))


def test_a_single_normalised_pixel_is_refused():
    x = images(32, 32)
    with pytest.raises(ArgumentValueError, match=r"got images of 32×32 with encoder='conv', whose last instance norm"):
        small("conv")(x)
    for encoder, decoder in PAIRINGS:
        if encoder != "conv":
            assert small(encoder, decoder)(x).shape == x.shape


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"encoder": "bilinear"}, "got encoder='bilinear', wanted one of 'qna', 'conv', 'pool'"),
        ({"decoder": "conv"}, "got decoder='conv', wanted one of 'qna', 'bilinear', 'transposed'"),
        ({"activation": "tanh"}, "got activation='tanh', wanted one of 'relu', 'gelu', 'silu'"),
        ({"widths": (8, 12)}, "got a width of 12 and head_dim=8, wanted widths that divide by it; change one"),
        ({"head_dim": 0}, "got head_dim=0, wanted an int of at least 1"),
        ({"widths": ()}, "got no widths, wanted the channels of each level"),
        ({"widths": (8, 0)}, r"got widths\[1\]=0, wanted an int of at least 1"),
        ({"features_only": True}, "got features_only=True, wanted a backbone"),
    ],
)
def test_wrong_options_are_refused(options, text):
    with pytest.raises(ArgumentValueError, match=f"^qna_autoencoder: {text}"):
        timm.create_model("qna_autoencoder", **options)


def test_a_map_of_other_channels_is_refused():
    with pytest.raises(ArgumentValueError, match=r"wanted \[B, 24, H, W\]"):
        small().decode(torch.rand(1, 3, 2, 2))


def test_compiles_to_one_graph():
    model = small(activation="gelu", widths=(8, 16)).eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for size in ((64, 96), (96, 64)):
            torch.testing.assert_close(compiled(images(*size)), model(images(*size)))
    torch.compiler.reset()


@pytest.mark.slow
def test_exports_with_free_rows_and_columns():
    model = small().eval()
    free = {2: 32 * torch.export.Dim("rows", min=2, max=8), 3: 32 * torch.export.Dim("columns", min=2, max=8)}
    with torch.no_grad():
        program = torch.export.export(model, (images(64, 96),), dynamic_shapes={"x": free}).module()
        torch.testing.assert_close(program(images(96, 64)), model(images(96, 64)), rtol=1e-4, atol=1e-4)


def test_a_state_dict_goes_round():
    model = small("pool", "qna")
    again = small("pool", "qna")
    with torch.no_grad():
        for p in again.parameters():
            nn.init.normal_(p)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(images(32, 64)), model(images(32, 64)))
