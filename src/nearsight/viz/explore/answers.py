"""What the page's events answer with: updates of its controls, from what a visitor chose. Needs the extra `explore`."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gradio as gr

from nearsight.viz.explore.draw import draw_input, draw_view, enlargement
from nearsight.viz.explore.images import Shown
from nearsight.viz.explore.subjects import Subject
from nearsight.viz.explore.views import Place, View, look, peaks, place_of, predict, radius_of

__all__ = ["RADII", "Explorer", "Visitor", "note_html", "radius_label", "slider_value", "status_html"]

# Lowest, highest and step of the radius.
RADII = (0.02, 2.0, 0.01)
CENTRE: Place = (0.5, 0.5)


class Visitor(NamedTuple):
    """All the page keeps of a visitor: an image, and the place last clicked."""

    shown: Shown
    place: Place = CENTRE


class Explorer:
    """What the page's events call; everything a visitor chose comes in as arguments, nothing is kept here."""

    def __init__(self, subjects: Sequence[Subject]) -> None:
        self.subjects: Mapping[str, Subject] = {subject.name: subject for subject in subjects}

    def pictures(self, visitor: Visitor, mode: str, network: str, layer: str, radius: float) -> list[Any]:
        """Of one panel: the input, the figure, where its heads are strongest, the file to download."""
        began = time.perf_counter()
        subject = self.subjects[network]
        view = look(subject, visitor.shown.image, layer, visitor.place, mode, self.moved(subject, layer, radius))
        name, png = draw_view(view, network, visitor.shown.name)
        file = gr.processing_utils.save_bytes_to_cache(png, name, gr.utils.get_upload_folder())
        return [draw_input(view), file, peaks_html(view, network, time.perf_counter() - began), file]

    def moved(self, subject: Subject, layer: str, radius: float) -> float | None:
        """The slider's radius, or None where it stands at what was learned: that is then shown unrounded."""
        learned = radius_of(subject, layer)
        return None if learned is None or radius == slider_value(learned) else radius

    def panel(self, visitor: Visitor, mode: str, network: str, layer: str | None = None) -> list[Any]:
        """All of one panel, for a network and one of its layers (the first)."""
        subject = self.subjects[network]
        layer = layer if layer in subject.layers else subject.layers[0]
        learned = radius_of(subject, layer)
        value = RADII[1] if learned is None else slider_value(learned)
        classes = predict(subject, visitor.shown.image)
        return [
            gr.update(choices=subject.layers, value=layer),
            note_html(subject),
            gr.update(visible=learned is not None, value=value, label=radius_label(learned)),
            gr.update(value=classes, visible=classes is not None),
            *self.pictures(visitor, mode, network, layer, value),
        ]

    def pixel(self, network: str, visitor: Visitor, x: int, y: int) -> Place:
        """The place in every network's input that a click on this one's enlarged input means."""
        height, width = self.subjects[network].prepare(visitor.shown.image).shape[2:]
        times = enlargement((height, width))
        return place_of((y // times, x // times), (height, width))


def slider_value(radius: float) -> float:
    """A radius as the slider can stand on it.

    >>> slider_value(0.7431), slider_value(5.0)
    (0.74, 2.0)
    """
    return min(max(round(radius, 2), RADII[0]), RADII[1])


def radius_label(learned: float | None) -> str:
    return "Radius σ" if learned is None else f"Radius σ of the map (learned: {learned:.3f})"


def note_html(subject: Subject) -> str:
    kind = "note" if subject.trained else "note random"
    return f'<p class="{kind}">{html.escape(subject.note)}</p>'


def peaks_html(view: View, network: str, seconds: float) -> str:
    """Where each head is strongest, for reading and (as attributes) for programs."""
    heads = "".join(
        f'<span data-head="{peak.head}" data-cell="{peak.cell[0]},{peak.cell[1]}" data-value="{peak.value:.6g}">'
        f"<b>head {peak.head}</b> ({peak.cell[0]}, {peak.cell[1]}): {peak.value:.3g}</span>"
        for peak in peaks(view)
    )
    maps = view.maps
    about = (
        f"Strongest cell (row, column) of the layer's {maps.grid[0]}×{maps.grid[1]} grid; "
        f"pixel ({view.pixel[0]}, {view.pixel[1]}); {1000 * seconds:.0f} ms."
    )
    return (
        f'<div class="peaks" data-network="{html.escape(network)}" data-layer="{html.escape(maps.name)}" '
        f'data-mode="{view.mode}" data-pixel="{view.pixel[0]},{view.pixel[1]}">{heads}</div><p class="hint">{about}</p>'
    )


def status_html(text: str) -> str:
    return f'<p role="alert">{html.escape(text)}</p>' if text else ""
