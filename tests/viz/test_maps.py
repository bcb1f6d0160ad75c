"""The maps are the layers' own: applied to the values they give the layer's output; received is their sum."""

import pytest
import timm
import torch
from torch import nn

import nearsight
from nearsight import (
    AttentionAugmentedConv2d,
    AttentionStem2d,
    ExplicitAttention2d,
    ExplicitAugmentedConv2d,
    LocalAttention2d,
    QnA2d,
    QnAUpsample2d,
    WindowAttention2d,
    attention_maps,
)
from nearsight.errors import ArgumentTypeError, ArgumentValueError
from nearsight.layers.common import avg_pool_valid, from_heads, split_heads, to_channels_last, to_nchw, zero_masked
from nearsight.layers.relative_attention import RelativeAttention2d
from nearsight.viz import extractors
from nearsight.viz.extractors import EXTRACTORS
from nearsight.viz.maps import attention_layers, cell_of, explicit_map, layer_maps

CASES = {
    "local": lambda: LocalAttention2d(8, 12, (3, 5), num_heads=3),
    "local_even_dilated": lambda: LocalAttention2d(8, 12, 4, num_heads=3, dilation=(1, 2), per_head_position=True),
    "local_strided_proj": lambda: LocalAttention2d(8, 12, 3, stride=2, num_heads=2, proj=True, qkv_bias=True),
    "local_zeros": lambda: LocalAttention2d(8, 12, 5, num_heads=2, border="zeros"),
    "local_absolute": lambda: LocalAttention2d(8, 12, 3, num_heads=4, position="absolute"),
    "local_none": lambda: LocalAttention2d(8, 12, 3, num_heads=4, position="none"),
    "local_no_content": lambda: LocalAttention2d(8, 12, 3, num_heads=2, content=False),
    "local_larger_than_map": lambda: LocalAttention2d(8, 12, (5, 15), num_heads=1),
    "stem": lambda: AttentionStem2d(8, 12, 4, num_heads=2),
    "stem_conv": lambda: AttentionStem2d(8, 12, 3, num_heads=3, values="conv"),
    "qna": lambda: QnA2d(8, 12, 3, num_heads=3, tap_scale="ones"),
    "qna_strided": lambda: QnA2d(8, 12, (5, 3), stride=2, num_heads=2, num_queries=3, bias=True),
    "qna_stride_3": lambda: QnA2d(8, 12, 2, stride=(3, 2), num_heads=2, tap_scale="none", position="contextual"),
    "qna_sign": lambda: QnA2d(8, 12, 3, num_heads=2, tap_scale="sign", position="absolute"),
    "qna_upsample": lambda: QnAUpsample2d(8, 12, 3, scale_factor=2, num_heads=3, tap_scale="tap"),
    "window": lambda: WindowAttention2d(8, 12, (3, 4), num_heads=2, bias=True),
    "window_none": lambda: WindowAttention2d(8, 12, 7, num_heads=3, position="none"),
    "explicit": lambda: ExplicitAttention2d(8, 12, kind="gaussian", radius=0.3, num_heads=2),
    "explicit_per_head": lambda: ExplicitAttention2d(8, 12, kind="exp_manhattan", num_heads=3, per_head=True, stride=2),
    "explicit_fixed": lambda: ExplicitAttention2d(8, 12, kind="cosine", offset=0.0),
    "global": lambda: RelativeAttention2d(8, 12, key_channels=6, feature_size=(5, 7), num_heads=3),
    "global_strided": lambda: RelativeAttention2d(
        8, 12, key_channels=8, feature_size=(4, 6), num_heads=2, stride=2, per_head_position=True
    ),
}
SIZE = (5, 7)


def made(case):
    """A layer whose every parameter is awake: zeros and equal radii would hide what is wrong."""
    layer = CASES[case]()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name != "log_radius":
                parameter.normal_(std=0.7)
            elif parameter.numel() > 1:
                parameter.add_(torch.linspace(-0.7, 0.7, parameter.numel()))
    return layer.double()


def some_mask():
    mask = torch.rand(2, *SIZE) > 0.3
    mask[1, :, 4:] = False
    return mask


def every_cell(grid):
    return [(y, x) for y in range(grid[0]) for x in range(grid[1])]


def values(layer, x, key_mask):
    """What the layer gathers, [B, h, w, heads, D], from its own projections."""
    if isinstance(layer, LocalAttention2d | RelativeAttention2d):
        return layer.project(x, key_mask)[2] if isinstance(layer, RelativeAttention2d) else layer.project(x)[2]
    if isinstance(layer, QnA2d | QnAUpsample2d):
        return layer.project(x)[1]
    if isinstance(layer, ExplicitAttention2d):
        return split_heads(layer.value(to_channels_last(x)), layer.num_heads)
    if isinstance(layer, WindowAttention2d):
        return layer.qkv(to_channels_last(x)).unflatten(-1, (layer.num_heads, 3, layer.head_dim)).select(-2, 2)
    x = zero_masked(x, key_mask)
    if layer.values == "conv":
        before = (layer.kernel_size - 1) // 2
        after = layer.kernel_size - 1 - before
        v = nn.functional.conv2d(nn.functional.pad(x, (before, after, before, after)), layer.v.weight)
        return split_heads(to_channels_last(v), layer.num_heads)
    side, height, width = layer.kernel_size, *x.shape[2:]
    place = (torch.arange(height) % side)[:, None] * side + torch.arange(width) % side
    v = torch.einsum("bchw,hwoc->bhwo", x, layer.value_weights()[place])
    return split_heads(v, layer.num_heads)


def finish(layer, mixed, key_mask):
    """From every query's [B, rows, columns, heads, D] to the layer's output: its pooling, its projection."""
    y = from_heads(mixed)
    if getattr(layer, "stride", 1) == 2:
        pooling = (
            {"kernel": 2, "ceil_mode": True} if isinstance(layer, LocalAttention2d) else {"kernel": 3, "padding": 1}
        )
        y = avg_pool_valid(y, key_mask, stride=2, **pooling)
    proj = getattr(layer, "proj", None)
    return y if proj is None else to_nchw(proj(to_channels_last(y)))


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("case", CASES)
def test_weights_applied_to_the_values_give_the_layers_output(case, masked):
    layer, x = made(case), torch.randn(2, 8, *SIZE, dtype=torch.float64)
    key_mask = some_mask() if masked else None
    grid = extractors.extractor_of(layer).query_grid(layer, SIZE)
    maps = layer_maps(layer, x, every_cell(grid), key_mask=key_mask)
    assert maps.weights.dtype == torch.float64
    assert maps.query_grid == grid
    mixed = torch.einsum("bnkhw,bhwkd->bnkd", maps.weights, values(layer, x, key_mask)).unflatten(1, grid)
    wanted = layer(x, key_mask)
    # The op computes the map of a kind without a radius in float32, whatever the values are.
    assert (finish(layer, mixed, key_mask) - wanted).abs().max() < (1e-5 if case == "explicit_fixed" else 1e-10)
    assert maps.cells == every_cell(grid)

    softmax = maps.softmax.sum((-1, -2)).sum(2) + maps.outside
    full = maps.softmax.shape[2] * torch.ones_like(softmax)
    assert torch.allclose(softmax[softmax > 1e-9], full[softmax > 1e-9], atol=1e-6)
    assert (maps.outside.sum() > 0) == (case == "local_zeros")
    if key_mask is not None:
        assert not maps.softmax[(~key_mask)[:, None, None, None].expand_as(maps.softmax)].any()
    elif "qna" not in case:
        assert torch.equal(maps.weights, maps.softmax[:, :, 0])


@pytest.mark.parametrize(
    ("case", "budget"),
    [*[(case, 1) for case in CASES], *[(case, 1 << 24) for case in ("local", "qna_strided", "global")]],
)
def test_received_is_the_sum_of_what_is_given(case, budget, monkeypatch):
    monkeypatch.setattr(extractors, "BUDGET", budget)
    layer, x, key_mask = made(case), torch.randn(2, 8, *SIZE, dtype=torch.float64), some_mask()
    cells = every_cell(extractors.extractor_of(layer).query_grid(layer, SIZE))
    maps = layer_maps(layer, x, cells, key_mask=key_mask)
    assert torch.allclose(maps.received, maps.softmax.sum((1, 2)))
    assert maps.received.shape == (2, layer.num_heads, *SIZE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["local", "stem", "qna_strided", "window", "explicit", "global"])
def test_dtypes_and_empty_batches(case, dtype):
    layer = made(case).to(dtype)
    x = torch.randn(2, 8, *SIZE, dtype=dtype)
    maps = layer_maps(layer, x, [(1, 2), (0, 0)], content=True)
    assert maps.weights.dtype == maps.received.dtype == torch.float32
    assert maps.weights.shape == (2, 2, layer.num_heads, *SIZE)
    truth = layer_maps(layer.double(), x.double(), [(1, 2), (0, 0)])
    assert (maps.weights - truth.weights).abs().max() < (2e-6 if dtype == torch.float32 else 0.15)
    empty = layer_maps(layer.to(dtype), x[:0], [(1, 2)])
    assert empty.weights.shape == (0, 1, layer.num_heads, *SIZE)
    assert empty.received.shape == (0, layer.num_heads, *SIZE)
    assert layer_maps(layer, x, []).weights.shape == (2, 0, layer.num_heads, *SIZE)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_as_on_a_cpu(case):
    layer, x, key_mask = made(case).float(), torch.randn(2, 8, *SIZE), some_mask()
    cells = [(1, 2), (0, 0)]
    here = layer_maps(layer, x, cells, content=True, kernels=True, key_mask=key_mask)
    there = layer_maps(layer.cuda(), x.cuda(), cells, content=True, kernels=True, key_mask=key_mask.cuda())
    for name in ("weights", "softmax", "outside", "content", "received", "kernels"):
        wanted, got = getattr(here, name), getattr(there, name)
        assert (wanted is None) == (got is None)
        if got is not None:
            assert got.is_cuda
            assert (got.cpu() - wanted).abs().max() < 1e-4, name
    half = layer_maps(layer.bfloat16(), x.cuda().bfloat16(), cells, key_mask=key_mask.cuda())
    assert (half.weights.cpu() - here.weights).abs().max() < 0.15


@pytest.mark.gpu
def test_autocast_on_a_gpu():
    model = timm.create_model("qna_vit_nano").cuda()
    images = torch.randn(1, 3, 32, 48, device="cuda")
    exact = attention_maps(model, images, pixels=[(3, 40)])
    with torch.autocast("cuda", torch.bfloat16):
        rough = attention_maps(model, images, pixels=[(3, 40)])
    for name, maps in exact.items():
        assert rough[name].weights.dtype == torch.float32
        assert (rough[name].weights - maps.weights).abs().max() < 0.1


def test_autocast_changes_nothing_much():
    layer, x = made("local").float(), torch.randn(1, 8, *SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        rough = attention_maps(layer, x, pixels=[(2, 3)])[""]
    exact = attention_maps(layer, x, pixels=[(2, 3)])[""]
    assert rough.weights.dtype == torch.float32
    assert 0 < (rough.weights - exact.weights).abs().max() < 0.1


@pytest.mark.parametrize("case", sorted(CASES))
def test_autocast_in_every_layer(case):
    """With padding and masks, by content alone too."""
    layer, x = made(case).float(), torch.randn(2, 8, *SIZE)
    mask = torch.rand(2, *SIZE) > 0.4
    exact = layer_maps(layer, x, [(1, 3)], content=True, key_mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        rough = layer_maps(layer, x, [(1, 3)], content=True, key_mask=mask)
    for name in ("softmax", "content"):
        if getattr(exact, name) is not None:
            assert getattr(rough, name).dtype == torch.float32
            assert (getattr(rough, name) - getattr(exact, name)).abs().max() < 0.1


@pytest.mark.parametrize("case", ["local", "stem", "qna", "window", "global"])
def test_content_is_the_layer_without_positions(case):
    layer, x = made(case), torch.randn(1, 8, *SIZE, dtype=torch.float64)
    maps = layer_maps(layer, x, [(2, 3)], content=True)
    assert not torch.allclose(maps.content, maps.softmax)
    bare = {"rel_row", "rel_col", "relative_bias", "position_bias"}
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name in bare:
                parameter.zero_()
    assert torch.allclose(maps.content, layer_maps(layer, x, [(2, 3)]).softmax)


def test_layers_without_two_terms_have_no_content_map():
    x = torch.randn(1, 8, *SIZE, dtype=torch.float64)
    for case in ("local_absolute", "local_no_content", "window_none", "explicit"):
        assert layer_maps(made(case), x, [(2, 3)], content=True).content is None


@pytest.mark.parametrize("case", ["local_even_dilated", "qna_strided", "qna_stride_3"])
def test_kernels_are_the_same_weights_tap_by_tap(case):
    layer, x, key_mask = made(case), torch.randn(2, 8, *SIZE, dtype=torch.float64), some_mask()
    rows, columns = extractors.extractor_of(layer).query_grid(layer, SIZE)
    maps = layer_maps(layer, x, every_cell((rows, columns)), kernels=True, key_mask=key_mask)
    (kh, kw), stride = layer.kernel_size, layer.stride if isinstance(layer, QnA2d) else (1, 1)
    dilation = getattr(layer, "dilation", (1, 1))
    assert maps.kernels.shape == (2, rows, columns, layer.num_heads, kh, kw)
    weights = maps.weights.unflatten(1, (rows, columns))
    for y, x, a, b in torch.cartesian_prod(*map(torch.arange, (rows, columns, kh, kw))).tolist():
        at = (y * stride[0] + (a - (kh - 1) // 2) * dilation[0], x * stride[1] + (b - (kw - 1) // 2) * dilation[1])
        inside = 0 <= at[0] < SIZE[0] and 0 <= at[1] < SIZE[1]
        wanted = weights[:, y, x, :, at[0], at[1]] if inside else torch.zeros(2, layer.num_heads, dtype=torch.float64)
        assert torch.allclose(maps.kernels[:, y, x, :, a, b], wanted)
    assert layer_maps(made("window"), torch.randn(1, 8, *SIZE, dtype=torch.float64), kernels=True).kernels is None


@pytest.mark.parametrize("name", ["sasa_resnet_nano", "qna_vit_nano", "expatt_resnet_nano"])
def test_every_layer_of_a_network_in_the_order_it_runs(name):
    model = timm.create_model(name).train()
    model.get_submodule("layer1" if "resnet" in name else "stages.0").eval()
    modes = {n: m.training for n, m in model.named_modules()}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    images = torch.randn(2, 3, 20, 28)
    found = attention_maps(model, images, pixels=[(19, 27), (4, 9)])
    assert sorted(found) == sorted(attention_layers(model))
    assert {n: m.training for n, m in model.named_modules()} == modes
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    for key, maps in found.items():
        assert maps.name == key
        assert maps.cells[0] == (maps.query_grid[0] - 1, maps.query_grid[1] - 1)
        assert maps.on_image().shape == (2, 2, maps.heads, 20, 28)
        assert maps.on_image(maps.received).shape == (2, maps.heads, 20, 28)
        assert not maps.weights.requires_grad
    # The maps are of the network's own evaluation: the last layer's are those of its input there.
    seen = []
    last = list(found)[-1]
    layer = model.eval().get_submodule(last)
    handle = layer.register_forward_hook(lambda module, args, output: seen.append(args[0].detach()))
    model(images)
    handle.remove()
    assert torch.allclose(layer_maps(layer, seen[0]).received, found[last].received, atol=1e-4)


def test_the_stem_of_a_network():
    model = timm.create_model("sasa_resnet_nano", stem="attention")
    found = attention_maps(model, torch.randn(1, 3, 18, 26), pixels=[(17, 25)])
    maps = found["conv1"]
    assert next(iter(found)) == "conv1"
    assert (maps.kind, maps.grid, maps.cells) == ("stem", (18, 26), [(17, 25)])
    # The last block is cut by the image: two by two pixels are left of its four by four.
    assert {tuple(at) for at in maps.weights[0, 0, 0].nonzero().tolist()} == {(16, 24), (16, 25), (17, 24), (17, 25)}


@pytest.mark.parametrize("kind", ["local", "qna", "explicit_augmented", "attention_augmented"])
def test_a_swapped_network(kind):
    model = timm.create_model("resnet10t", num_classes=3)
    options = {"feature_size": 8} if kind == "attention_augmented" else {}
    nearsight.replace_conv(model, kind, where=r"layer[34]\.0\.conv1", num_heads=4, **options)
    found = attention_maps(model, torch.randn(1, 3, 64, 96), pixels=[(40, 80)], received=False)
    assert len(found) == 2
    assert all(maps.received is None and maps.heads == 4 for maps in found.values())
    tail = ".attention" if "augmented" in kind else ""
    assert list(found) == [f"layer3.0.conv1{tail}", f"layer4.0.conv1{tail}"]
    if kind == "local":
        y, x = found["layer3.0.conv1"].cells[0]
        seen = found["layer3.0.conv1"].weights[0, 0, 0].nonzero()
        assert (y, x) == (5, 10)
        assert seen.amin(0).tolist() == [y - 1, x - 1]
        assert seen.amax(0).tolist() == [y + 1, x + 1]


def test_masks_reach_the_layers():
    model = timm.create_model("qna_vit_nano")
    mask = torch.zeros(1, 32, 48, dtype=torch.bool)
    mask[:, :20, :30] = True
    found = attention_maps(model, torch.randn(1, 3, 32, 48), pixels=[(10, 28)], key_mask=mask)
    for maps in found.values():
        inside = maps.on_image(maps.received)[:, :, :20, :30]
        assert (inside > 0).all()
        outside = maps.on_image(maps.received).clone()
        cell = maps.image_size[0] // maps.grid[0]
        outside[:, :, : -(-20 // cell) * cell, : -(-30 // cell) * cell] = 0
        assert not outside.any()


def test_a_detector_whose_heads_run_on_every_level():
    from nearsight.detect import create_detector

    model = create_detector("sasa_retinanet_nano", num_classes=3)
    found = attention_maps(model, [torch.rand(3, 128, 128)], pixels=[(100, 30)], received=False)
    again = [name for name in found if name.endswith("#2")]
    assert again
    first = found[again[0].removesuffix("#2")]
    assert found[again[0]].grid[0] < first.grid[0]


def test_patterns_choose_layers():
    model = timm.create_model("qna_vit_nano")
    images = torch.randn(1, 3, 16, 16)
    every = list(attention_maps(model, images))
    assert list(attention_maps(model, images, "stages.1.*")) == [n for n in every if n.startswith("stages.1.")]
    assert list(attention_maps(model, images, ["stages.1", "stages.0.*.mixer"])) == [
        n for n in every if n.startswith(("stages.0.", "stages.1."))
    ]
    assert list(attention_maps(model, images, every[2])) == [every[2]]


def test_a_layer_that_runs_twice_is_there_twice():
    layer = LocalAttention2d(4, 4, 3, num_heads=2)
    found = attention_maps(nn.Sequential(layer, nn.Tanh(), layer), torch.randn(1, 4, 5, 6))
    assert list(found) == ["0", "0#2"]
    assert not torch.allclose(found["0"].received, found["0#2"].received)


def test_compiled_networks_are_looked_into():
    layer = LocalAttention2d(4, 4, 3, num_heads=2)
    net = nn.Sequential(layer)
    x = torch.randn(1, 4, 5, 6)
    found = attention_maps(torch.compile(net, backend="eager"), x)
    assert torch.equal(found["0"].received, attention_maps(net, x)["0"].received)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradient_modes(context):
    with context():
        maps = attention_maps(LocalAttention2d(4, 4, 3, num_heads=2), torch.randn(1, 4, 5, 6), pixels=[(0, 0)])[""]
    assert not maps.weights.requires_grad


def test_only_the_windows_asked_for_are_computed(monkeypatch):
    sizes = []
    real = extractors.local_attention_weights

    def watched(q, k, **options):
        sizes.append(tuple(q.shape[1:3]))
        return real(q, k, **options)

    monkeypatch.setattr(extractors, "local_attention_weights", watched)
    layer = LocalAttention2d(4, 4, (3, 5), num_heads=2, dilation=(1, 2))
    layer_maps(layer, torch.randn(1, 4, 40, 50), [(20, 30), (0, 49)], received=False)
    assert sizes == [(3, 9), (2, 5)]
    sizes.clear()
    monkeypatch.setattr(extractors, "BUDGET", 40 * 50 * 15 * 4 // 4)
    layer_maps(layer, torch.randn(1, 4, 40, 50))
    assert len(sizes) > 4
    assert max(size[0] for size in sizes) <= 10


def test_cells_under_pixels():
    assert [cell_of((y, 0), (9, 9), (3, 3))[0] for y in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert cell_of((8, 13), (9, 14), (5, 7)) == (4, 6)
    assert cell_of((4, 13), (9, 14), (18, 28)) == (8, 26)
    assert cell_of((6, 2), (7, 3), (1, 1)) == (0, 0)


@pytest.mark.parametrize("case", ["qna", "qna_strided", "qna_stride_3", "qna_upsample"])
def test_queries_stand_in_the_middle_of_what_they_see(case):
    """Also where the stride does not divide the map."""
    layer, size = made(case), (17, 22)
    middle = [(n - 1) // 2 for n in layer.kernel_size]
    rows, columns = layer_maps(layer, torch.zeros(1, 8, *size, dtype=torch.float64)).query_grid
    cells = [(y, x) for y in range(rows) for x in range(columns)]
    maps = layer_maps(layer, torch.randn(1, 8, *size, dtype=torch.float64), cells)
    for number, (y, x) in enumerate(maps.centres):
        seen = maps.softmax[0, number].sum((0, 1)).nonzero()
        first = [max(at - before, 0) for at, before in zip((y, x), middle, strict=True)]
        assert seen.amin(0).tolist() == first


@pytest.mark.parametrize("size", [(33, 50), (34, 45), (32, 35)])
def test_cells_of_a_network_that_pads_on_both_sides(size):
    """A pixel's cell is the one whose patch it is part of."""
    model = timm.create_model("qna_vit_nano", patch_size=4).eval()
    image = torch.randn(1, 3, *size, requires_grad=True)
    patches = model.patch_embed(image)
    pixels = [(y, x) for y in (0, 3, 16, size[0] - 1) for x in (0, 3, 19, size[1] - 1)]
    maps = attention_maps(model, image.detach(), "stages.0", pixels, received=False)["stages.0.blocks.0.mixer"]
    whole = maps.on_image(torch.arange(patches[0, 0].numel()).view(patches.shape[2:]))
    smooth = maps.on_image(torch.arange(patches.shape[3]).float().expand(patches.shape[2:]), smooth=True)
    for (y, x), (row, column) in zip(pixels, maps.cells, strict=True):
        (seen,) = torch.autograd.grad(patches[0, :, row, column].sum(), image, retain_graph=True)
        assert seen[0, :, y, x].any()
        assert whole[y, x] == row * patches.shape[3] + column
        # An overlay is at a cell's number within half a cell of it.
        assert abs(smooth[y, x] - column) <= 0.5
        top, left, bottom, right = maps.image_part((row, column, row + 1, column + 1))
        assert [top, left] == seen[0].abs().sum(0).nonzero().amin(0).tolist()
        assert [bottom - 1, right - 1] == seen[0].abs().sum(0).nonzero().amax(0).tolist()


@pytest.mark.parametrize("size", [(44, 63), (40, 47), (47, 40), (51, 33)])
def test_cells_of_a_network_that_leaves_the_last_pixels_out(size):
    """VGG's pooling pads nothing: what is left over at the bottom and at the right belongs to the last cells."""
    pools = nn.Sequential(*[nn.AvgPool2d(2) for _ in range(3)])
    net = nn.Sequential(pools, LocalAttention2d(2, 2, 3, num_heads=1))
    image = torch.randn(1, 2, *size, requires_grad=True)
    pooled = pools(image)
    used = [8 * n for n in pooled.shape[2:]]
    pixels = [(y, x) for y in (0, 7, 24, used[0] - 1) for x in (0, 7, 24, used[1] - 1)]
    maps = attention_maps(net, image.detach(), pixels=[*pixels, (size[0] - 1, size[1] - 1)], received=False)["1"]
    for (y, x), (row, column) in zip(pixels, maps.cells, strict=False):
        (seen,) = torch.autograd.grad(pooled[0, :, row, column].sum(), image, retain_graph=True)
        assert seen[0, :, y, x].all()
    assert maps.cells[-1] == (pooled.shape[2] - 1, pooled.shape[3] - 1)
    rows = torch.arange(pooled.shape[2]).float()[:, None].expand(pooled.shape[2:])
    smooth = maps.on_image(rows, smooth=True)
    assert smooth.shape == maps.on_image(rows).shape == size
    assert (smooth[: used[0]] - maps.on_image(rows)[: used[0]]).abs().max() <= 0.5
    assert (smooth[used[0] :] == rows.max()).all()


def test_on_the_image_each_pixel_has_its_cells_weight():
    net = nn.Sequential(nn.AvgPool2d(2, ceil_mode=True), LocalAttention2d(4, 4, 3, num_heads=2))
    maps = attention_maps(net, torch.randn(1, 4, 5, 9), pixels=[(4, 8)])["1"]
    assert maps.grid == (3, 5)
    full = maps.on_image()
    for y in range(5):
        for x in range(9):
            assert torch.equal(full[..., y, x], maps.weights[..., y // 2, x // 2])
    smooth = maps.on_image(maps.received, smooth=True)
    assert smooth.shape == (1, 2, 5, 9)
    assert smooth.amax() <= maps.received.amax()
    # Pixel y lies (y + ½)/2 − ½ cells below the first cell's centre, though the last cell is half outside the image.
    row, column = (axis.flatten() for axis in torch.meshgrid(torch.arange(3.0), torch.arange(5.0), indexing="ij"))
    tilted = (row + 10 * column).view(3, 5)
    y, x = ((torch.arange(1.0, size) + 0.5) / 2 - 0.5 for size in (5, 9))
    torch.testing.assert_close(maps.on_image(tilted, smooth=True)[1:, 1:], y[:, None] + 10 * x)
    with pytest.raises(ArgumentValueError, match=r"on_image: got shape \[2, 4\], wanted maps \[…, 3, 5\] of layer '1'"):
        maps.on_image(torch.zeros(2, 4))


def test_explicit_maps_with_another_radius():
    layer = ExplicitAugmentedConv2d(8, 32, kind="gaussian", num_heads=2)
    own = explicit_map(layer, SIZE, (1, 5))
    assert own.shape == (2, *SIZE)
    wanted = attention_maps(layer, torch.randn(1, 8, *SIZE), pixels=[(1, 5)])["attention"].weights[0, 0]
    assert torch.allclose(own, wanted)
    assert torch.allclose(explicit_map(layer, SIZE, (1, 5), radius=0.75), own)
    assert explicit_map(layer, SIZE, (1, 5), radius=0.05).amax() > 1.2 * own.amax()
    fixed = ExplicitAttention2d(8, 8, kind="constant")
    assert torch.allclose(explicit_map(fixed, SIZE, (1, 5), radius=0.1), torch.full((1, *SIZE), 1 / 35))
    mask = torch.ones(1, *SIZE, dtype=torch.bool)
    mask[:, :, 6] = False
    assert not explicit_map(layer, SIZE, (1, 5), key_mask=mask)[..., 6].any()
    with pytest.raises(ArgumentTypeError, match="explicit_map: got QnA2d, wanted an ExplicitAttention2d"):
        explicit_map(QnA2d(8, 8), SIZE, (1, 5))


def test_every_public_layer_has_an_extractor():
    kinds = {LocalAttention2d, AttentionStem2d, QnA2d, QnAUpsample2d, WindowAttention2d, ExplicitAttention2d}
    assert kinds | {RelativeAttention2d} == set(EXTRACTORS)
    for layer in (ExplicitAugmentedConv2d(8, 32), AttentionAugmentedConv2d(8, 32, feature_size=4)):
        assert list(attention_layers(layer)) == ["attention"]
    both = ExplicitAugmentedConv2d(8, 64, with_aa=True, feature_size=SIZE)
    assert list(attention_maps(both, torch.randn(1, 8, *SIZE))) == ["attention", "aa"]


class TestMistakes:
    images = torch.randn(1, 3, 16, 16)

    def model(self):
        return timm.create_model("sasa_resnet_nano")

    def test_a_layer_that_is_not_there(self):
        with pytest.raises(ArgumentValueError) as caught:
            attention_maps(self.model(), self.images, "layer2.0.cnv2")
        assert str(caught.value) == (
            "attention_maps: no attention layer is named 'layer2.0.cnv2'. Did you mean 'layer2.0.conv2'? This network has: "
            "layer1.0.conv2, layer2.0.conv2, layer3.0.conv2, layer4.0.conv2."
        )

    def test_a_pixel_beside_the_image(self):
        with pytest.raises(ArgumentValueError, match=r"got the pixel \(3, 16\), wanted \(y, x\) inside 16×16"):
            attention_maps(self.model(), self.images, pixels=[(3, 16)])
        with pytest.raises(
            ArgumentTypeError, match=r"got the pixel 3, wanted \(y, x\); for one pixel pass \[\(y, x\)\]"
        ):
            attention_maps(self.model(), self.images, pixels=(3, 16))

    def test_images_and_models(self):
        with pytest.raises(
            ArgumentValueError, match=r"got shape \[3, 16, 16\], .* add the batch axis with images\[None\]"
        ):
            attention_maps(self.model(), self.images[0])
        with pytest.raises(ArgumentTypeError, match="got images of type str"):
            attention_maps(self.model(), "flower.jpg")
        for wrong in ([self.images], [], [self.images[0], torch.randn(3, 16, 15)]):
            with pytest.raises(
                ArgumentTypeError, match=r"got a list of images, wanted tensors \[C, H, W\] of one size"
            ):
                attention_maps(self.model(), wrong)
        with pytest.raises(ArgumentTypeError, match=r"got model of type str, wanted a torch\.nn\.Module"):
            attention_maps("sasa_resnet_nano", self.images)
        with pytest.raises(ArgumentValueError, match="Conv2d, which has no attention layer of nearsight; swap"):
            attention_maps(nn.Conv2d(3, 3, 1), self.images)

    def test_a_mask_nobody_takes(self):
        net = nn.Sequential(LocalAttention2d(3, 4, 3, num_heads=2))
        with pytest.raises(ArgumentTypeError, match="got a key_mask for Sequential, whose forward takes none"):
            attention_maps(net, self.images, key_mask=torch.ones(1, 16, 16, dtype=torch.bool))

    def test_modes_come_back_after_a_failure(self):
        model = self.model().train()
        with pytest.raises(ArgumentValueError, match=r"SasaResNet: got shape \[1, 5, 16, 16\]"):
            attention_maps(model, torch.randn(1, 5, 16, 16))
        assert model.training
        assert not any(module._forward_hooks for module in model.modules())
