"""The sheet all attention figures are drawn on: panels in a grid, one colour scale, text that never overlaps."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Drawing", "Sheet", "file_name", "save_drawing"]

# Inches. Letters are about 0.6 of their size wide.
MARGIN, GAP, BAR = 0.15, 0.12, 0.85
TITLE_SIZE, LABEL_SIZE = 9.5, 7.5
LETTER = 0.6 / 72
LINE = 1.45 / 72
NARROWEST = 4.2
UNSEEN = "0.85"
SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"


class Drawing(NamedTuple):
    """A figure, the name of its files and the numbers it shows."""

    name: str
    figure: Figure
    numbers: dict[str, Any]


class Sheet:
    """`count` panels of an image's shape in a grid below a title, room for a colour bar at the right.

    Every place is computed, none is left to a layout engine: 64 panels are as quick and as clean as one.

    >>> sheet = Sheet(9, (5, 7), "a title")
    >>> len(sheet.axes), sheet.rows, sheet.columns
    (9, 3, 3)
    """

    def __init__(
        self,
        count: int,
        shape: tuple[int, int],
        title: str,
        *,
        columns: int | None = None,
        width: float | None = None,
        label_lines: int = 1,
        below: float = 0.0,
        gap: float = GAP,
        bar: bool = True,
    ) -> None:
        from matplotlib.figure import Figure

        self.columns = columns or _columns(count)
        self.rows = -(-count // self.columns)
        self.panel = width or (1.35 if count <= 20 else 1.0)
        height = min(max(self.panel * shape[0] / shape[1], 0.3), 3 * self.panel)
        label = label_lines * LABEL_SIZE * LINE + 0.03
        bar_width = BAR if bar else 0.0
        inner = self.columns * (self.panel + gap) - gap
        self.wide = max(2 * MARGIN + (gap - GAP) + inner + bar_width, NARROWEST)
        lines = textwrap.wrap(title, int((self.wide - 2 * MARGIN) / (TITLE_SIZE * LETTER)))
        top = MARGIN + len(lines) * TITLE_SIZE * LINE + 0.06
        step = label + height + GAP + below
        self.tall = top + self.rows * step + MARGIN
        self.figure = Figure(figsize=(self.wide, self.tall), dpi=110)
        self.figure.text(
            MARGIN / self.wide, 1 - MARGIN / self.tall, "\n".join(lines), fontsize=TITLE_SIZE, va="top", weight="bold"
        )
        left = MARGIN + (gap - GAP) + (self.wide - 2 * MARGIN - (gap - GAP) - bar_width - inner) / 2
        self.axes = []
        for number in range(count):
            x = left + number % self.columns * (self.panel + gap)
            y = self.tall - top - number // self.columns * step - label - height
            axis = self.figure.add_axes(
                (x / self.wide, y / self.tall, self.panel / self.wide, height / self.tall), xticks=[], yticks=[]
            )
            axis.spines[:].set_linewidth(0.5)
            self.axes.append(axis)
        self.bar_box = (left + inner + GAP, MARGIN + below, self.tall - top - label - MARGIN - below)

    def label(self, axis: Any, text: str) -> None:
        """A panel's title, broken to its width."""
        axis.set_title(
            "\n".join(textwrap.wrap(text, int(self.panel / (LABEL_SIZE * LETTER)))), fontsize=LABEL_SIZE, pad=2.5
        )

    def colour_bar(self, image: Any, label: str, pointed: bool = False) -> None:
        """The one scale of all panels; `pointed` says that some numbers lie beyond its ends."""
        x, y, height = self.bar_box
        tall = min(height, 3.0)
        axis = self.figure.add_axes((x / self.wide, (y + height - tall) / self.tall, 0.1 / self.wide, tall / self.tall))
        self._bar(image, axis, label, "vertical", tall, "both" if pointed else "neither")

    def bar_below(self, image: Any, axis: Any, label: str) -> None:
        """A scale of its own below one panel, where columns cannot share one."""
        box = axis.get_position()
        below = self.figure.add_axes((box.x0, box.y0 - 0.12 / self.tall, box.width, 0.07 / self.tall))
        self._bar(image, below, label, "horizontal", self.panel)

    def _bar(self, image: Any, axis: Any, label: str, orientation: Any, length: float, extend: Any = "neither") -> None:
        from matplotlib.ticker import MaxNLocator

        bar = self.figure.colorbar(image, cax=axis, orientation=orientation, extend=extend)
        bar.ax.tick_params(labelsize=6.5, length=2, pad=1.5)
        bar.locator = MaxNLocator(max(1, min(5, int(length / 0.35))))
        bar.formatter.set_powerlimits((-2, 3))  # type: ignore[attr-defined]
        bar.update_ticks()
        bar.ax.yaxis.get_offset_text().set_fontsize(6.5)
        bar.ax.xaxis.get_offset_text().set_fontsize(6.5)
        bar.set_label(label, fontsize=7)
        bar.outline.set_linewidth(0.5)

    def picture(self, axis: Any, image: Any, pixel: tuple[int, int] | None = None) -> None:
        """The input image [H, W] or [H, W, 3], a query pixel marked."""
        axis.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        if pixel is not None:
            self.mark(axis, pixel, image.shape[:2])

    def mark(self, axis: Any, cell: tuple[int, int], grid: tuple[int, int]) -> None:
        """Outline a cell; on fine grids the outline grows so that it can be seen."""
        from matplotlib.patches import Rectangle

        side = max(1.0, 0.04 * max(grid))
        corner = (cell[1] - side / 2, cell[0] - side / 2)
        for colour, width in (("white", 2.2), ("#d55e00", 1.2)):
            axis.add_patch(Rectangle(corner, side, side, fill=False, edgecolor=colour, linewidth=width, zorder=4))

    def frame(self, axis: Any, part: tuple[int, int, int, int]) -> None:
        """Outline a part of the image (top, left, bottom, right)."""
        from matplotlib.patches import Rectangle

        top, left, bottom, right = part
        corner = (left - 0.5, top - 0.5)
        axis.add_patch(Rectangle(corner, right - left, bottom - top, fill=False, edgecolor="white", linewidth=1))

    def map(self, axis: Any, numbers: Any, low: float, high: float, colours: str, *, seen: Any = None) -> Any:
        """A map of numbers on the shared scale; grey where `seen` is False."""
        axis.set_facecolor(UNSEEN)
        shown = numbers if seen is None else np.ma.masked_where(~seen, numbers)
        return axis.imshow(shown, cmap=colours, vmin=low, vmax=high, interpolation="nearest")


def _columns(count: int) -> int:
    """Columns for a sheet somewhat wider than high, with few empty places.

    >>> [_columns(n) for n in (1, 2, 5, 9, 13, 65)]
    [1, 2, 3, 3, 5, 11]
    """
    ideal = (1.5 * count) ** 0.5
    near = range(max(1, round(0.8 * ideal)), max(1, round(1.25 * ideal)) + 1)
    return min(near, key=lambda columns: (-count % columns, abs(columns - ideal)))


def scale_of(numbers: Any) -> tuple[float, float, str]:
    """One scale for all of some numbers: from 0 in an even sequence of tones, or both ways from 0 when some are negative.

    >>> scale_of(np.array([0.1, 0.4])), scale_of(np.array([-0.5, 0.1]))
    ((0.0, 0.4, 'viridis'), (-0.5, 0.5, 'RdBu_r'))
    """
    highest = float(np.abs(numbers).max()) if numbers.size else 0.0
    highest = highest or 1.0
    return (-highest, highest, DIVERGING) if (numbers < 0).any() else (0.0, highest, SEQUENTIAL)


def file_name(*parts: object) -> str:
    """Words as one file name.

    >>> file_name("photo 1", "layer1.0.conv2", "given", 3)
    'photo-1_layer1.0.conv2_given_3'
    """
    return "_".join(re.sub(r"[^\w.#-]+", "-", str(part)).strip("-") for part in parts if str(part))


def save_drawing(drawing: Drawing, folder: Path) -> list[Path]:
    """Write NAME.png, NAME.svg and the numbers as NAME.npz."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{drawing.name}.{end}" for end in ("png", "svg", "npz")]
    drawing.figure.savefig(files[0], dpi=150)
    # Text stays text, and the file is the same whenever it is made.
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nearsight"}):
        drawing.figure.savefig(files[1], metadata={"Date": None})
    np.savez_compressed(files[2], **drawing.numbers)
    return files


def chosen_heads(heads: Sequence[int] | None, count: int) -> list[int]:
    """The heads to show, or all; a head the layer does not have is left out."""
    return [head for head in (range(count) if heads is None else heads) if head < count]
