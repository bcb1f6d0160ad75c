"""The explorer's page: its controls, and which of them redraws what. Needs the extra `explore`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import gradio as gr
from PIL import Image

from nearsight.errors import UserError
from nearsight.viz.explore.answers import RADII, Explorer, Visitor, note_html, radius_label, slider_value, status_html
from nearsight.viz.explore.images import LIMITS, built_in, open_upload
from nearsight.viz.explore.subjects import Subject
from nearsight.viz.explore.views import GIVEN, RECEIVED, radius_of

__all__ = ["build_page"]

MODES = [("What the clicked pixel attends to", GIVEN), ("What each location receives", RECEIVED)]
TOP = 5


class Panel(NamedTuple):
    """The controls and pictures of one network."""

    column: Any
    network: Any
    layer: Any
    note: Any
    input: Any
    classes: Any
    maps: Any
    radius: Any
    peaks: Any
    download: Any

    @property
    def choices(self) -> list[Any]:
        return [self.network, self.layer, self.radius]

    @property
    def pictures(self) -> list[Any]:
        return [self.input, self.maps, self.peaks, self.download]

    @property
    def all(self) -> list[Any]:
        return [self.layer, self.note, self.radius, self.classes, *self.pictures]


def build_page(subjects: Sequence[Subject]) -> gr.Blocks:
    """The page for some networks; `serve` puts it on a port."""
    # Gradio counts its users and looks for updates unless told not to, and keeps a history in the browser.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["GRADIO_RUN_HISTORY"] = "False"
    explorer = Explorer(subjects)
    names = list(explorer.subjects)
    images = built_in()
    first = Visitor(images[0])
    with gr.Blocks(
        title="nearsight explorer", analytics_enabled=False, fill_width=True, delete_cache=(600, 3600)
    ) as page:
        visitor = gr.State(first)
        gr.HTML(
            "<h1>nearsight explorer</h1><p>Click a pixel of the image to see what each head of a layer attends to there.</p>",
            elem_id="head",
        )
        status = gr.HTML("", elem_id="status", visible=False)
        with gr.Row(equal_height=False):
            with gr.Column(scale=0, elem_id="side"):
                gallery = gr.Gallery(
                    [thumbnail(shown.image) for shown in images],
                    show_label=False,
                    columns=4,
                    height=186,
                    allow_preview=False,
                    object_fit="cover",
                    interactive=False,
                    buttons=[],
                    elem_id="gallery",
                )
                upload = gr.UploadButton("Upload an image", size="sm", variant="primary", elem_id="upload")
                gr.HTML(
                    f'<p class="hint">{LIMITS} The middle square is used, shrunk to what the network reads.</p>',
                )
                mode = gr.Radio(MODES, value=GIVEN, label="Show", elem_id="mode")
                compare = gr.Checkbox(False, label="Compare two networks", elem_id="compare", interactive=True)
            with gr.Row(equal_height=False):
                panels = [
                    build_panel(explorer, names[0], "a", True),
                    build_panel(explorer, names[min(1, len(names) - 1)], "b", False),
                ]
        connect(page, explorer, panels, visitor, status, gallery, upload, mode, compare)
    return page


def build_panel(explorer: Explorer, network: str, key: str, visible: bool) -> Panel:
    subject = explorer.subjects[network]
    with gr.Column(visible=visible, elem_classes="panel", elem_id=f"panel-{key}", min_width=420) as column:
        with gr.Row():
            chosen = gr.Dropdown(
                list(explorer.subjects), value=network, label="Network", elem_id=f"network-{key}", min_width=180
            )
            layer = gr.Dropdown(
                subject.layers, value=subject.layers[0], label="Layer", elem_id=f"layer-{key}", min_width=180
            )
        note = gr.HTML(note_html(subject))
        with gr.Row(equal_height=False):
            with gr.Column(scale=3, min_width=300), gr.Row(equal_height=False):
                shown = gr.Image(
                    label="Input: click a pixel",
                    show_label=False,
                    format="png",
                    interactive=False,
                    buttons=[],
                    elem_id=f"input-{key}",
                    elem_classes="input",
                    min_width=215,
                )
                classes = gr.Label(
                    label="Prediction",
                    num_top_classes=TOP,
                    show_heading=False,
                    elem_id=f"classes-{key}",
                    min_width=190,
                )
            with gr.Column(scale=5, min_width=400):
                maps = gr.Image(
                    label="Attention of all heads",
                    show_label=False,
                    format="png",
                    type="filepath",
                    interactive=False,
                    buttons=["fullscreen"],
                    elem_id=f"maps-{key}",
                    elem_classes="maps",
                )
                low, high, step = RADII
                learned = radius_of(subject, subject.layers[0])
                radius = gr.Slider(
                    low,
                    high,
                    value=high if learned is None else slider_value(learned),
                    step=step,
                    label=radius_label(learned),
                    visible=learned is not None,
                    interactive=True,
                    elem_id=f"radius-{key}",
                )
                with gr.Row(equal_height=False):
                    with gr.Column(scale=1, min_width=240):
                        peaks_text = gr.HTML("", elem_id=f"peaks-{key}")
                    download = gr.DownloadButton(
                        "Download PNG", size="sm", elem_id=f"download-{key}", scale=0, min_width=130
                    )
    return Panel(column, chosen, layer, note, shown, classes, maps, radius, peaks_text, download)


def connect(
    page: Any,
    explorer: Explorer,
    panels: list[Panel],
    visitor: Any,
    status: Any,
    gallery: Any,
    upload: Any,
    mode: Any,
    compare: Any,
) -> None:
    """Each control's event. A panel that is not shown is not computed."""
    both = [control for panel in panels for control in panel.choices]
    # Not offered as an API: each call is one of this page's.
    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}

    def whole(who: Visitor, mode: str, compare: bool, *choices: Any) -> list[Any]:
        """Everything, after a new image; layers stay chosen."""
        (name_a, layer_a, _), (name_b, layer_b, _) = choices[:3], choices[3:]
        second = explorer.panel(who, mode, name_b, layer_b) if compare else [gr.skip()] * len(panels[1].all)
        return [*explorer.panel(who, mode, name_a, layer_a), *second]

    def pictures(who: Visitor, mode: str, compare: bool, *choices: Any) -> list[Any]:
        second = explorer.pictures(who, mode, *choices[3:]) if compare else [gr.skip()] * len(panels[1].pictures)
        return [*explorer.pictures(who, mode, *choices[:3]), *second]

    def choose(event: gr.SelectData, who: Visitor, mode: str, compare: bool, *choices: Any) -> list[Any]:
        who = Visitor(built_in()[int(event.index)], who.place)
        return [who, gr.update(value="", visible=False), *whole(who, mode, compare, *choices)]

    def receive(who: Visitor, file: str | None, mode: str, compare: bool, *choices: Any) -> list[Any]:
        kept = [gr.skip()] * sum(len(panel.all) for panel in panels)
        if file is None:
            return [who, gr.skip(), *kept]
        try:
            who = Visitor(open_upload(file), who.place)
        except UserError as error:
            return [who, gr.update(value=status_html(str(error)), visible=True), *kept]
        return [who, gr.update(value="", visible=False), *whole(who, mode, compare, *choices)]

    everything = [control for panel in panels for control in panel.all]
    drawn = [control for panel in panels for control in panel.pictures]
    page.load(whole, [visitor, mode, compare, *both], everything, **quiet)
    gallery.select(choose, [visitor, mode, compare, *both], [visitor, status, *everything], **quiet)
    upload.upload(receive, [visitor, upload, mode, compare, *both], [visitor, status, *everything], **quiet)
    mode.input(pictures, [visitor, mode, compare, *both], drawn, **quiet)

    def reveal(who: Visitor, mode: str, compare: bool, network: str, layer: str) -> list[Any]:
        second = explorer.panel(who, mode, network, layer) if compare else [gr.skip()] * len(panels[1].all)
        return [gr.update(visible=compare), *second]

    second = panels[1]
    compare.input(
        reveal,
        [visitor, mode, compare, second.network, second.layer],
        [second.column, *second.all],
        **quiet,
    )
    for panel in panels:

        def click(
            event: gr.SelectData, network: str, who: Visitor, mode: str, compare: bool, *choices: Any
        ) -> list[Any]:
            x, y = event.index
            who = Visitor(who.shown, explorer.pixel(network, who, int(x), int(y)))
            return [who, *pictures(who, mode, compare, *choices)]

        panel.input.select(
            click,
            [panel.network, visitor, mode, compare, *both],
            [visitor, *drawn],
            trigger_mode="always_last",
            **quiet,
        )
        panel.network.input(explorer.panel, [visitor, mode, panel.network], panel.all, **quiet)
        panel.layer.input(explorer.panel, [visitor, mode, panel.network, panel.layer], panel.all, **quiet)
        # A drag sends many: the last one counts.
        panel.radius.input(
            explorer.pictures, [visitor, mode, *panel.choices], panel.pictures, trigger_mode="always_last", **quiet
        )


def thumbnail(image: Image.Image, side: int = 96) -> Image.Image:
    """The middle square, small; a tiny image enlarged in whole pixels."""
    cut = min(image.size)
    left, top = (image.width - cut) // 2, (image.height - cut) // 2
    how = Image.Resampling.NEAREST if cut < side else Image.Resampling.LANCZOS
    return image.crop((left, top, left + cut, top + cut)).resize((side, side), how)
