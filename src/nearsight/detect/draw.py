"""Detections drawn into their image: a box, its label and its score."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

__all__ = ["class_colour", "draw_boxes"]

GOLDEN = 0.618033988749895


def class_colour(label: int) -> tuple[int, int, int]:
    """A colour of its own for every label; neighbours differ most.

    >>> class_colour(0)
    (230, 57, 57)
    """
    red, green, blue = colorsys.hsv_to_rgb(label * GOLDEN % 1.0, 0.75, 0.9)
    return round(255 * red), round(255 * green), round(255 * blue)


def draw_boxes(
    image: Image.Image, boxes: Sequence[Sequence[float]], labels: Sequence[int], texts: Sequence[str]
) -> Image.Image:
    """A copy of an image with boxes (x0, y0, x1, y1), in the colours of their labels, and a text at each.

    >>> grey = Image.new("RGB", (60, 40), (128, 128, 128))
    >>> draw_boxes(grey, [(10, 20, 50, 35)], [0], ["cat 0.93"]).getpixel((10, 30))
    (230, 57, 57)
    """
    out = image.convert("RGB")
    pen = ImageDraw.Draw(out)
    side = max(out.size)
    width, font = max(1, round(side / 320)), ImageFont.load_default(max(10, round(side / 48)))
    # Large boxes first, so that a small one inside stays readable.
    order = sorted(range(len(boxes)), key=lambda i: -(boxes[i][2] - boxes[i][0]) * (boxes[i][3] - boxes[i][1]))
    for i in order:
        x0, y0, x1, y1 = (float(v) for v in boxes[i])
        pen.rectangle((x0, y0, max(x0, x1 - 1), max(y0, y1 - 1)), outline=class_colour(labels[i]), width=width)
    for i in order:
        x0, y0 = float(boxes[i][0]), float(boxes[i][1])
        left, top, right, bottom = pen.textbbox((0, 0), texts[i], font=font)
        across, down = right - left + 2 * width, bottom - top + 2 * width
        # Above the box where there is room, and never outside the image.
        x = min(max(x0, 0), max(out.width - across, 0))
        y = y0 - down if y0 >= down else min(y0, max(out.height - down, 0))
        colour = class_colour(labels[i])
        pen.rectangle((x, y, x + across, y + down), fill=colour)
        dark = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 140
        pen.text((x + width - left, y + width - top), texts[i], fill="black" if dark else "white", font=font)
    return out
