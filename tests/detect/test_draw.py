"""Boxes and their labels are drawn where they belong, and never outside the image."""

import numpy as np
import pytest
from PIL import Image

from nearsight.detect.draw import class_colour, draw_boxes

GREY = (128, 128, 128)


def drawn(box, label=0, size=(200, 120), text="cat 0.93"):
    """Which pixels [H, W] have the label's colour."""
    image = draw_boxes(Image.new("RGB", size, GREY), [box], [label], [text])
    assert image.size == size
    return (np.asarray(image) == class_colour(label)).all(-1)


def test_the_outline_is_the_box():
    inside = drawn((40, 60, 120, 100))[61:]
    rows, columns = np.nonzero(inside)
    assert (rows.max() + 61, columns.min(), columns.max()) == (99, 40, 119)
    assert not inside[10:30, 50:110].any()


@pytest.mark.parametrize("box", [(40, 60, 120, 100), (40, 20, 120, 100)])
def test_the_label_lies_above_the_box_where_there_is_room(box):
    above = drawn(box)[: box[1]]
    assert above[-3:, 42:60].any()
    assert above[-10:].sum() > 100


@pytest.mark.parametrize("box", [(40, 0, 120, 50), (40, 4, 120, 50)])
def test_the_label_lies_in_the_box_where_there_is_no_room_above(box):
    assert drawn(box)[box[1] + 2 : box[1] + 10, 42:60].sum() > 30


def test_a_label_at_the_right_border_stays_in_the_image():
    columns = np.nonzero(drawn((190, 60, 199, 100))[40:58])[1]
    assert columns.min() < 180
    assert columns.max() == 199


def test_a_small_box_is_drawn_over_a_large_one():
    """Their left edges are one; whichever comes first in the list."""
    for boxes, labels in (
        ([(10, 60, 40, 80), (10, 40, 190, 110)], [1, 0]),
        ([(10, 40, 190, 110), (10, 60, 40, 80)], [0, 1]),
    ):
        image = draw_boxes(Image.new("RGB", (200, 120), GREY), boxes, labels, ["", ""])
        assert image.getpixel((10, 70)) == class_colour(1)
        assert image.getpixel((10, 100)) == class_colour(0)
