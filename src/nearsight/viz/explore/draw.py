"""The page's pictures: the input to click on, and the figure of all heads."""

from __future__ import annotations

import io
import threading

import numpy as np
from PIL import Image, ImageDraw

from nearsight.viz.explore.views import RECEIVED, View
from nearsight.viz.figures import Picture, draw_given, draw_received

__all__ = ["draw_input", "draw_view", "enlargement"]

# Matplotlib's text drawing keeps caches that threads must not share at the same time.
_LOCK = threading.Lock()
SIDE = 448
DPI = 144
MARK = ("#ffffff", "#d55e00")


def enlargement(size: tuple[int, int], side: int = SIDE) -> int:
    """How many times larger an image of `size` is drawn: whole pixels, the longer side about `side`.

    >>> enlargement((32, 32)), enlargement((224, 224)), enlargement((1000, 600))
    (14, 2, 1)
    """
    return max(1, side // max(size))


def draw_input(view: View) -> Image.Image:
    """The network's input, each of its pixels a square, the one asked about outlined."""
    times = enlargement(view.shown.shape[:2])
    pixels = np.rint(view.shown * 255).astype(np.uint8)
    small = Image.fromarray(pixels).convert("RGB")
    large = small.resize((small.width * times, small.height * times), Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(large)
    y, x = view.pixel
    # A fine pixel's outline is drawn around it, so that the pixel stays visible and the mark can be found.
    grow = max(0, 5 - times // 2)
    box = (x * times - grow, y * times - grow, (x + 1) * times - 1 + grow, (y + 1) * times - 1 + grow)
    for width, colour in zip((2, 0), MARK, strict=True):
        pen.rectangle((box[0] - width, box[1] - width, box[2] + width, box[3] + width), outline=colour, width=2)
    return large


def draw_view(view: View, network: str, image: str) -> tuple[str, bytes]:
    """A file name and the figure as PNG: the maps of all heads on one scale."""
    picture = Picture(f"{network[:60]}_{image[:40]}", view.shown)
    with _LOCK:
        if view.mode == RECEIVED:
            drawing = draw_received(picture, view.maps)
        else:
            drawing = draw_given(picture, view.maps, view.pixel)
        buffer = io.BytesIO()
        drawing.figure.savefig(buffer, format="png", dpi=DPI)
    return f"{drawing.name}.png", buffer.getvalue()
