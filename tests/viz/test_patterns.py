import subprocess
import sys

import pytest
import torch

from nearsight import ops
from nearsight.viz import patterns as page
from nearsight.viz.patterns import SIZE, block_patterns, draw_patterns, footprint, patterns, scene

pytest.importorskip("matplotlib", reason="pictures need the extra viz")


@pytest.fixture(scope="module")
def shown():
    return {pattern.title: pattern for pattern in patterns()}


def seen(pattern):
    """The pixels with weight, as a set of (y, x)."""
    return {tuple(index) for index in pattern.weights.nonzero().tolist()}


def test_footprint_is_the_weights_of_the_op():
    q, k = torch.randn(2, 1, 5, 7, 2, 4).unbind(0)
    got = footprint(lambda v: ops.local_attention(q, k, v, window=(3, 5)), torch.zeros_like(q), (1, 3))
    weights = ops.local_attention_weights(q, k, window=(3, 5))[0, 1, 3].mean(0).view(3, 5)
    assert torch.allclose(got[0:3, 1:6], weights, atol=1e-6)
    assert got.sum() == pytest.approx(1, abs=1e-6)
    outside = got.clone()
    outside[0:3, 1:6] = 0
    assert not outside.any()


def test_weights_sum_to_one(shown):
    assert len(shown) == 6
    for pattern in shown.values():
        assert pattern.weights.shape == SIZE
        assert pattern.weights.min() >= 0
        assert float(pattern.weights.sum()) == pytest.approx(1, abs=1e-5)


def test_windows_are_where_they_should_be(shown):
    y, x = page.CENTRE
    assert seen(shown["Local attention"]) == {(y + i, x + j) for i in range(-3, 4) for j in range(-3, 4)}
    assert seen(shown["… dilated"]) == {(y + i, x + j) for i in (-4, -2, 0, 2, 4) for j in (-4, -2, 0, 2, 4)}
    y, x = page.CORNER
    inside = {(y + i, x + j) for i in range(-3, 4) for j in range(-3, 4)}
    assert seen(shown["… at the border"]) == {(i, j) for i, j in inside if 0 <= i < SIZE[0] and 0 <= j < SIZE[1]}
    y, x = page.BESIDE
    assert seen(shown["QnA"]) == {(y + i, x + j) for i in range(-3, 4) for j in range(-3, 4)}
    for title in ("Explicit attention", "Global attention"):
        assert len(seen(shown[title])) == SIZE[0] * SIZE[1]


def test_blocks_stay_where_they_are():
    blocks = {pattern.title: pattern for pattern in block_patterns()}
    (y, x), disk = page.CENTRE, scene()
    whole = {(i, j) for i in range(7, 14) for j in range(7, 14)}
    assert seen(blocks["Window attention"]) == whole
    assert seen(blocks["Attention stem"]) == {(i, j) for i in range(4, 8) for j in range(4, 8)}
    assert seen(blocks["QnA up-sampling"]) == {(y + i, x + j) for i in (-1, 0, 1) for j in (-1, 0, 1)}
    # Fourteen is even and seventeen odd: the upper right of the four.
    assert blocks["QnA up-sampling"].weights.argmax() == (y - 1) * SIZE[1] + x + 1
    weights = blocks["Window attention"].weights
    assert weights[disk].max() > 3 * weights[~disk].max()
    for pattern in blocks.values():
        assert pattern.query == (page.EDGE if pattern.title == "Attention stem" else page.CENTRE)
        assert float(pattern.weights.sum()) == pytest.approx(1, abs=1e-5)


def test_content_is_followed_by_those_who_look_at_it(shown):
    disk = scene()

    def contrast(title):
        weights = shown[title].weights
        return float(weights[disk & (weights > 0)].mean() / weights[~disk & (weights > 0)].mean())

    assert contrast("Local attention") > 3
    assert contrast("Global attention") > 3
    # The query lies beside the disk, and still its window's disk is what is gathered.
    assert not disk[page.BESIDE]
    assert contrast("QnA") > 3
    # Distance alone: the same weight on the disk and off it, at the same distance.
    weights, (y, x) = shown["Explicit attention"].weights, page.CENTRE
    assert disk[y, x + 5] != disk[y, x - 5]
    assert weights[y, x + 5] == pytest.approx(float(weights[y, x - 5]))


def test_the_calls_shown_are_the_calls_made(shown):
    assert shown["… dilated"].call == "local_attention(q, k, v, window=5, dilation=2)"
    assert shown["Explicit attention"].call == "explicit_attention(values, kind='gaussian', radius=0.2)"


def test_drawing_has_a_panel_for_each(shown):
    figure = draw_patterns(list(shown.values())[:4])
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert titles == [*list(shown)[:4], "", ""]
    for axis, pattern in zip(figure.axes, shown.values(), strict=False):
        marks = [patch.get_xy() for patch in axis.patches]
        assert marks in ([pattern.query[::-1]], [])
        assert bool(marks) == (axis in figure.axes[:4])


def test_the_command_writes_a_picture(tmp_path):
    target = tmp_path / "patterns.png"
    subprocess.run([sys.executable, "-m", "nearsight.viz.patterns", str(target)], check=True, capture_output=True)
    assert target.read_bytes()[:4] == b"\x89PNG"
    assert target.stat().st_size > 30_000
