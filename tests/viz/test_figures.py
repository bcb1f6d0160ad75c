"""The figures: the numbers they show, and text that can be read whatever the number of heads."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from torch import nn

import nearsight
from nearsight import AttentionStem2d, ExplicitAugmentedConv2d, LocalAttention2d, QnA2d, attention_maps
from nearsight.viz import demo_maps, figures
from nearsight.viz.figures import Picture
from nearsight.viz.panels import Sheet, save_drawing, scale_of
from nearsight.viz.run_figures import RunFacts, draw_costs, draw_curves, draw_radii, draw_run_curves

pytest.importorskip("matplotlib", reason="pictures need the extra viz")

SIZE = (20, 28)
PICTURE = Picture("picture", np.linspace(0, 1, SIZE[0] * SIZE[1] * 3).reshape(*SIZE, 3))


def texts(figure):
    """Every text of a figure that shows: what it says, and its box in pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    ticks = {}
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            # Ticks made once and no longer needed stay in the lists, undrawn.
            ticks |= {label: False for tick in axis.majorTicks for label in (tick.label1, tick.label2)}
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                shown = low <= tick.get_loc() <= high
                ticks |= {
                    tick.label1: shown and tick.label1.get_visible(),
                    tick.label2: shown and tick.label2.get_visible(),
                }
    found = [
        (text.get_text(), text.get_window_extent(renderer))
        for text in figure.findobj(Text)
        if text.get_text().strip() and ticks.get(text, text.get_visible())
    ]
    return found, figure.bbox


def assert_readable(figure):
    """No text on another, none cut by the figure's edge."""
    found, whole = texts(figure)
    for words, box in found:
        assert box.x0 >= whole.x0 - 1, (words, box)
        assert box.y0 >= whole.y0 - 1, (words, box)
        assert box.x1 <= whole.x1 + 1, (words, box)
        assert box.y1 <= whole.y1 + 1, (words, box)
    for (one, a), (other, b) in itertools.combinations(found, 2):
        apart = a.x1 <= b.x0 + 0.5 or b.x1 <= a.x0 + 0.5 or a.y1 <= b.y0 + 0.5 or b.y1 <= a.y0 + 0.5
        assert apart, f"{one!r} lies on {other!r}"
    return {words for words, _ in found}


def test_the_judge_sees_overlap():
    sheet = Sheet(2, (4, 4), "a title")
    sheet.axes[0].set_title("a label that is far too wide for its own small panel", fontsize=12)
    sheet.axes[1].set_title("another one that is too wide", fontsize=12)
    with pytest.raises(AssertionError):
        assert_readable(sheet.figure)


def maps_of(layer, **options):
    return attention_maps(nn.Sequential(layer), torch.randn(1, 3, *SIZE), pixels=[(6, 20), (0, 1)], **options)["0"]


@pytest.mark.parametrize("heads", [1, 8, 64])
def test_text_never_overlaps(heads):
    name = "a.layer.with.quite.a.long.name.in.its.network.mixer"
    local = replace(maps_of(LocalAttention2d(3, 2 * heads, 5, num_heads=heads)), name=name)
    learned = replace(maps_of(QnA2d(3, heads, 3, num_heads=heads, stride=2), kernels=True), name=name)
    for drawing in (
        figures.draw_received(PICTURE, local),
        figures.draw_given(PICTURE, local, (6, 20)),
        figures.draw_given(PICTURE, learned, (6, 20)),
        figures.draw_kernels(PICTURE, learned),
        figures.draw_embeddings(name, LocalAttention2d(3, 2 * heads, 5, num_heads=heads, per_head_position=True)),
        figures.draw_mixture(name, AttentionStem2d(3, 64, mixtures=heads)),
    ):
        labels = assert_readable(drawing.figure)
        assert any(name in label.replace("\n", "") for label in labels)
        if {"received", "weights", "kernels"} & set(drawing.numbers):
            assert {f"head {head}" for head in range(heads)} <= labels


@pytest.mark.parametrize("shape", [(16, 16), (40, 10), (10, 60)])
def test_shapes_of_images(shape):
    layer = LocalAttention2d(3, 16, 3, num_heads=8)
    maps = attention_maps(layer, torch.randn(1, 3, *shape), pixels=[(shape[0] - 1, 0)])[""]
    picture = Picture("p", np.zeros(shape))
    assert_readable(figures.draw_received(picture, maps).figure)
    assert_readable(figures.draw_given(picture, maps, (shape[0] - 1, 0)).figure)


def images_of(axis):
    return [np.ma.filled(image.get_array().astype(float), np.nan) for image in axis.get_images()]


def outlined(axis):
    """The rectangles drawn on an axis: (top, left, bottom, right)."""
    boxes = [(patch.get_xy(), patch.get_width(), patch.get_height()) for patch in axis.patches]
    return [(y, x, y + height, x + width) for (x, y), width, height in boxes]


def test_every_query_and_every_image_has_its_own_numbers():
    """The second pixel of the second image, not the first of the first."""
    pixels = [(6, 20), (11, 1)]
    images = torch.randn(2, 3, *SIZE)
    layer = QnA2d(3, 8, 3, num_heads=2, tap_scale="ones")
    torch.nn.init.normal_(layer.position_bias)
    maps = attention_maps(layer, images, pixels=pixels, content=True, kernels=True)[""]
    given = figures.draw_given(PICTURE, maps, pixels[1], 1, index=1)
    assert np.array_equal(given.numbers["weights"], maps.weights[1, 1])
    assert np.array_equal(given.numbers["softmax"], maps.softmax[1, 1])
    assert given.numbers["cell"].tolist() == list(pixels[1])
    shown = images_of(given.figure.axes[1])[0]
    seen = maps.weights[1, 1, 0] > 0
    assert np.allclose(shown[seen], maps.weights[1, 1, 0][seen])
    assert np.isnan(shown[~seen]).all()
    received = figures.draw_received(PICTURE, maps, index=1)
    assert np.array_equal(received.numbers["received"], maps.received[1])
    kernels = figures.draw_kernels(PICTURE, maps, index=1).numbers["kernels"]
    assert np.array_equal(kernels, maps.kernels[1].permute(2, 0, 1, 3, 4))
    parts = figures.draw_parts(PICTURE, [maps], pixels, index=1)
    assert np.allclose(parts.numbers["content"], maps.content[1].mean((1, 2)))
    assert np.allclose(parts.numbers["content_and_position"], maps.softmax[1].mean((1, 2)))
    for line, pixel in enumerate(pixels):
        for axis in parts.figure.axes[3 * line : 3 * line + 3]:
            top, left, bottom, right = outlined(axis)[0]
            assert ((top + bottom) / 2, (left + right) / 2) == pytest.approx(pixel)


def test_offsets_of_even_windows_beside_their_embeddings():
    """Taps −1…2 of a window of four."""
    drawing = figures.draw_embeddings("layer", LocalAttention2d(3, 16, (4, 6), num_heads=2, dilation=(3, 1)))
    for axis, rows, labels in zip(drawing.figure.axes, ([0, 1, 3], [0, 2, 5]), ("-3 0 +6", "-2 0 +3"), strict=False):
        assert axis.get_yticks().tolist() == rows
        assert " ".join(label.get_text() for label in axis.get_yticklabels()) == labels


def test_marks_lie_on_the_pixel_and_frames_around_the_view():
    pooled = nn.Sequential(nn.AvgPool2d(2), LocalAttention2d(3, 8, 3, num_heads=2))
    maps = attention_maps(pooled, torch.randn(1, 3, 40, 56), pixels=[(12, 41)])["1"]
    drawing = figures.draw_given(Picture("p", np.zeros((40, 56))), maps, (12, 41))
    image, first = drawing.figure.axes[:2]
    *marks, frame = outlined(image)
    assert len(marks) == 2
    for top, left, bottom, right in marks:
        assert ((top + bottom) / 2, (left + right) / 2) == pytest.approx((12, 41))
    # Cells 5…7 by 19…21 are seen, and one more is shown on each side: pixels 8 to 17 and 36 to 45.
    assert frame == pytest.approx((7.5, 35.5, 17.5, 45.5))
    for top, left, bottom, right in outlined(first):
        assert ((top + bottom) / 2, (left + right) / 2) == pytest.approx((6, 20))


def test_frames_where_cells_do_not_divide_the_image():
    """Cells are as large as the network made them, the last ones cut off by the image's border."""
    pooled = nn.Sequential(nn.AvgPool2d(8, ceil_mode=True), LocalAttention2d(3, 8, 3, num_heads=2))
    maps = attention_maps(pooled, torch.randn(1, 3, 97, 137), pixels=[(96, 100)], content=True)["1"]
    picture = Picture("p", np.zeros((97, 137)))
    given = figures.draw_given(picture, maps, (96, 100)).figure.axes[0]
    parts = figures.draw_parts(picture, [maps], [(96, 100)]).figure.axes[0]
    for axis in (given, parts):
        # Cells 10…12 by 10…14, a cell more than is seen on each side.
        assert outlined(axis)[-1] == pytest.approx((79.5, 79.5, 96.5, 119.5))


def test_marks_of_strided_queries_lie_where_their_windows_do():
    layer = QnA2d(3, 8, 3, num_heads=2, stride=2)
    maps = attention_maps(layer, torch.randn(1, 3, 17, 21), pixels=[(13, 18)], content=True)[""]
    picture = Picture("p", np.zeros((17, 21)))
    given = figures.draw_given(picture, maps, (13, 18)).figure.axes[1]
    parts = figures.draw_parts(picture, [maps], [(13, 18)]).figure.axes[1]
    for axis in (given, parts):
        for top, left, bottom, right in outlined(axis):
            assert ((top + bottom) / 2, (left + right) / 2) == pytest.approx((12, 18))


def test_given_shows_the_weights_and_greys_what_is_not_seen():
    maps = maps_of(LocalAttention2d(3, 8, 5, num_heads=4))
    drawing = figures.draw_given(PICTURE, maps, (6, 20), 0, heads=[1, 3])
    panels = drawing.figure.axes[1:3]
    scales = set()
    for axis, head in zip(panels, (1, 3), strict=True):
        (shown,) = images_of(axis)
        wanted = maps.weights[0, 0, head].numpy()
        assert np.array_equal(np.nan_to_num(shown), wanted)
        assert np.isfinite(shown).sum() == 25
        assert axis.get_title() == f"head {head}"
        scales.add(axis.get_images()[0].get_clim())
        # The view is the window and a cell around it.
        assert axis.get_xlim() == (16.5, 23.5)
        assert axis.get_ylim() == (9.5, 2.5)
    assert scales == {(0.0, maps.weights[0, 0, [1, 3]].max().item())}
    assert np.array_equal(drawing.numbers["weights"], maps.weights[0, 0].numpy())
    assert drawing.numbers["cell"].tolist() == [6, 20]


def test_received_is_drawn_over_the_image_on_one_scale():
    maps = maps_of(QnA2d(3, 8, 3, num_heads=4))
    drawing = figures.draw_received(PICTURE, maps)
    over = [axis.get_images()[1] for axis in drawing.figure.axes[1:5]]
    assert len({image.get_clim() for image in over}) == 1
    wanted = maps.on_image(maps.received[0], smooth=True)
    assert np.allclose(over[2].get_array(), wanted[2])
    assert over[2].get_clim() == pytest.approx(np.quantile(wanted.numpy(), (0.005, 0.995)))
    assert np.array_equal(drawing.numbers["received"], maps.received[0].numpy())


def test_kernels_are_tiled_where_their_windows_lie():
    layer = QnA2d(3, 8, (3, 5), num_heads=2, stride=2)
    maps = maps_of(layer, kernels=True)
    drawing = figures.draw_kernels(PICTURE, maps)
    (tiled,) = images_of(drawing.figure.axes[2])
    assert tiled.shape == (10 * 3, 14 * 5)
    assert np.allclose(np.nan_to_num(tiled[4 * 3 : 5 * 3, 6 * 5 : 7 * 5]), maps.kernels[0, 4, 6, 1].numpy())
    image = drawing.figure.axes[2].get_images()[0]
    assert image.get_cmap().name == "RdBu_r"
    low, high = image.get_clim()
    assert low == -high
    # The corner's window hangs over the border: grey, not zero.
    assert np.isnan(tiled[0, 0])


def test_parts_side_by_side():
    layer = ExplicitAugmentedConv2d(3, 64, with_aa=True, feature_size=SIZE, num_heads=4)
    pixels = [(6, 20), (0, 1)]
    found = attention_maps(layer, torch.randn(1, 3, *SIZE), pixels=pixels, content=True)
    (group,) = figures.grouped(found)
    drawing = figures.draw_parts(PICTURE, group, pixels)
    titles = [axis.get_title().replace("\n", " ") for axis in drawing.figure.axes[:8]]
    assert titles == [
        *["pixel (6, 20)", "key×query", "key×query + position", "explicit map"],
        *["pixel (0, 1)", "key×query", "key×query + position", "explicit map"],
    ]
    assert_readable(drawing.figure)
    attention = layer.aa
    plain = attention.attention_weights(torch.zeros(1, 3, *SIZE), position=False)
    assert plain.shape[1:3] == SIZE
    assert np.allclose(drawing.numbers["explicit"], found["attention"].weights[0].mean(1))
    assert np.allclose(drawing.numbers["content"], found["aa"].content[0, :, 0].mean(1))
    assert np.allclose(drawing.numbers["content_and_position"], found["aa"].weights[0].mean(1))
    assert not np.allclose(drawing.numbers["content"], drawing.numbers["content_and_position"])


def test_what_has_no_parts_has_no_picture_of_them():
    maps = maps_of(LocalAttention2d(3, 8, 5, num_heads=4, position="none"), content=True)
    assert figures.draw_parts(PICTURE, [maps], [(6, 20), (0, 1)]) is None
    assert figures.draw_embeddings("q", QnA2d(3, 8)) is None
    assert figures.draw_mixture("s", AttentionStem2d(3, 8, values="plain")) is None
    assert figures.draw_mixture("q", QnA2d(3, 8)) is None


def test_embeddings_and_mixture_are_the_layers():
    layer = LocalAttention2d(3, 16, (3, 5), num_heads=2, dilation=(1, 2))
    drawing = figures.draw_embeddings("layer1", layer)
    assert np.array_equal(drawing.numbers["rows"], layer.rel_row.detach().numpy())
    assert np.array_equal(images_of(drawing.figure.axes[1])[0], layer.rel_col.detach().numpy())
    ticks = [[label.get_text() for label in axis.get_yticklabels()] for axis in drawing.figure.axes[:2]]
    assert ticks == [["-1", "0", "+1"], ["-4", "0", "+4"]]
    several = LocalAttention2d(3, 16, (3, 5), num_heads=4, per_head_position=True)
    axes = figures.draw_embeddings("layer1", several, [3, 1]).figure.axes[:4]
    assert [axis.get_title() for axis in axes] == ["rows, head 3", "rows, head 1", "columns, head 3", "columns, head 1"]
    assert np.array_equal(images_of(axes[2])[0], several.rel_col[3].detach().numpy())
    stem = AttentionStem2d(3, 16, 4, mixtures=3)
    mixture = figures.draw_mixture("stem", stem).numbers["mixture"]
    assert mixture.shape == (3, 4, 4)
    assert np.allclose(mixture.sum(0), 1)
    places = (stem.emb_row[1] + stem.emb_col[2]) @ stem.nu.T
    assert np.allclose(mixture[:, 1, 2], places.softmax(-1).detach().numpy())


def test_scales():
    assert scale_of(np.zeros((2, 2))) == (0.0, 1.0, "viridis")
    assert scale_of(np.array([-2.0, 1.0])) == (-2.0, 2.0, "RdBu_r")


def test_files_hold_the_picture_and_its_numbers(tmp_path):
    maps = maps_of(LocalAttention2d(3, 8, 5, num_heads=4))
    drawing = figures.draw_received(PICTURE, maps)
    files = save_drawing(drawing, tmp_path / "new" / "folder")
    assert [file.name for file in files] == [f"picture_0_received.{end}" for end in ("png", "svg", "npz")]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    svg = files[1].read_text()
    assert "head 3</text>" in svg
    with np.load(files[2], allow_pickle=False) as numbers:
        assert np.array_equal(numbers["received"], maps.received[0].numpy())
    save_drawing(drawing, tmp_path)
    assert (tmp_path / files[1].name).read_text() == svg


def log_of(steps, **last):
    train = [{"kind": "train", "step": i, "epoch": 0, "loss": 2 / (i + 1), "time": 0.0} for i in range(1, steps)]
    return [{"kind": "plan", "step": 0}, *train, {"kind": "eval", "step": steps, "epoch": 1, "images": 9, **last}]


def test_curves_of_several_runs():
    logs = {f"a_run_with_a_long_name_{i}": log_of(10 + i, accuracy=0.9 + i / 100) for i in range(9)}
    logs["reconstruct"] = log_of(6, psnr=20.0)
    logs["empty"] = [{"kind": "plan", "step": 0}]
    drawing = draw_run_curves(logs)
    assert_readable(drawing.figure)
    left, right = drawing.figure.axes[:2]
    assert len(left.lines) == 11
    assert right.lines[3].get_ydata()[0] == pytest.approx(93)
    assert right.get_ylabel() == "test accuracy, %, psnr"
    assert drawing.numbers["reconstruct/eval/psnr"].tolist() == [20.0]
    looks = {(line.get_color(), line.get_linestyle()) for line in left.lines}
    assert len(looks) == 11
    assert draw_curves({}).axes


def test_costs_and_radii():
    runs = {f"run_{i}": RunFacts(0.9 + i / 100, 10**5 * (i + 1), 10**7 * (5 - i)) for i in range(5)}
    drawing = draw_costs(runs)
    assert_readable(drawing.figure)
    assert drawing.figure.axes[1].lines[2].get_xdata()[0] == pytest.approx(30)
    assert drawing.numbers["runs"].tolist() == list(runs)

    model = timm.create_model("expatt_resnet_nano")
    radii = figures.learned_radii(model)
    assert len(radii) == 4
    drawing = draw_radii({"one": radii, "two": {name: [0.2, 0.4] for name in radii}})
    assert_readable(drawing.figure)
    assert np.allclose(drawing.numbers["one/mean"], 0.75)
    assert np.allclose(drawing.numbers["two/highest"], 0.4)
    assert drawing.figure.axes[0].lines[1].get_ydata() == pytest.approx([0.3] * 4)
    assert drawing.figure.axes[0].lines[2].get_ydata() == [0.75, 0.75]
    model = timm.create_model("expatt_resnet_nano", radius=0.4)
    drawing = draw_radii({"one": figures.learned_radii(model)}, figures.first_radii(model))
    assert drawing.figure.axes[0].lines[1].get_ydata() == [0.4, 0.4]


def test_the_demos_picture():
    models = {name: timm.create_model(name, in_chans=1) for name in ("qna_vit_nano", "expatt_resnet_nano")}
    pixels = [(5, 9), (0, 15)]
    images = torch.randn(2, 1, 12, 16)
    figure = demo_maps.draw_maps(models, images, pixels, depth=2)
    assert len(figure.axes) == 2 * 5
    name = next(iter(nearsight.viz.maps.attention_layers(models["expatt_resnet_nano"])))
    wanted = attention_maps(models["expatt_resnet_nano"], images[1:], name, [(0, 15)])[name].weights[0, 0].mean(0)
    assert np.allclose(images_of(figure.axes[5 + 3])[0], wanted)
    name, *_ = nearsight.viz.maps.attention_layers(models["qna_vit_nano"])
    softmax = attention_maps(models["qna_vit_nano"], images[1:], name, [(0, 15)])[name].softmax[0, 0]
    assert np.allclose(np.nan_to_num(images_of(figure.axes[5 + 1])[0]), softmax.mean((0, 1)))
    assert figure.axes[3].get_title() == "expatt_resnet_nano\nlayer 1, 12×16"
    for line, (y, x) in enumerate(pixels):
        for axis in (figure.axes[5 * line], figure.axes[5 * line + 3]):
            assert [point.get_xydata().tolist() for point in axis.lines] == [[[x, y]]]
