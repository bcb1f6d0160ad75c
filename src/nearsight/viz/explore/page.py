"""The explorer's page: controls, and which of them redraws what. Needs the extra `explore`."""

from __future__ import annotations

import html
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gradio as gr
from PIL import Image

from nearsight.errors import UserError
from nearsight.viz.explore.draw import draw_input, draw_view, enlargement
from nearsight.viz.explore.images import LIMITS, MAX_BYTES, Shown, built_in, open_upload
from nearsight.viz.explore.subjects import Subject
from nearsight.viz.explore.views import GIVEN, RECEIVED, Place, View, look, peaks, place_of, predict, radius_of

__all__ = ["Visitor", "build_page", "serve"]

MODES = [("What the clicked pixel attends to", GIVEN), ("What each location receives", RECEIVED)]
RADII = (0.02, 2.0, 0.01)
CENTRE: Place = (0.5, 0.5)
TOP = 5
# Beyond this the upload itself is refused, by Gradio; what is smaller and too large is answered by `open_upload`.
TRANSPORT = 4 * MAX_BYTES
# Nothing on the page is fetched from elsewhere, and the browser is told to refuse it if something were.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data: blob:; worker-src 'self' blob:"
)
STYLE = """
.gradio-container .main.fillable {padding: 0 !important}
.gradio-container main {padding: 12px 24px !important; max-width: 1560px !important; margin: 0 auto}
.gradio-container .column {gap: 10px}
.html-container {padding: 0 !important}
#head h1 {font-size: 1.3rem; font-weight: 650; margin: 0; display: inline}
#head p {display: inline; margin: 0 0 0 .8rem; opacity: .75}
#status p {margin: 0; padding: .5rem .75rem; border-radius: 8px; border: 1px solid #c2410c; background: #fff7ed;
  color: #7c2d12; font-size: .92rem}
.dark #status p {background: #431407; color: #fed7aa}
#side {min-width: 230px !important; max-width: 250px; gap: 10px}
.hint {font-size: .8rem !important; line-height: 1.35 !important; opacity: .75; margin: 0 !important}
.note {font-size: .88rem !important; line-height: 1.35 !important; margin: 0 !important}
.random {color: #9a3412 !important; font-weight: 600}
.dark .random {color: #fdba74 !important}
.panel {gap: 10px}
.panel .wrap-inner input {text-overflow: ellipsis !important; padding-right: 1.6rem !important}
.input img {image-rendering: pixelated; cursor: crosshair; width: 100% !important; object-fit: contain !important}
.maps {background: #fff !important}
.maps img {object-fit: contain !important; max-height: 540px; margin: 0 auto}
#gallery .grid-container {grid-template-columns: repeat(4, 1fr) !important; gap: 4px !important}
#gallery .gallery-item, #gallery .thumbnail-lg, #gallery img {min-width: 0; width: 100% !important; height: auto !important;
  aspect-ratio: 1; border-radius: 4px}
#gallery .grid-wrap {padding: 6px}
#gallery .grid-container {grid-auto-rows: min-content !important; align-content: start; height: auto !important}
#mode .wrap {gap: 6px}
#mode label, #compare label {font-size: .88rem; padding: 6px 8px}
.peaks {display: flex; flex-wrap: wrap; gap: 3px 12px; font-size: .84rem; max-height: 5.6rem; overflow-y: auto}
.peaks b {font-weight: 600}
.peaks span {white-space: nowrap; font-variant-numeric: tabular-nums}
footer {display: none !important}
"""


class Visitor(NamedTuple):
    """All the page keeps of a visitor: an image, and the place last clicked."""

    shown: Shown
    place: Place = CENTRE


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
                    build_panel(explorer, first, names[0], "a", True),
                    build_panel(explorer, first, names[min(1, len(names) - 1)], "b", False),
                ]
        connect(page, explorer, panels, visitor, status, gallery, upload, mode, compare)
    return page


def build_panel(explorer: Explorer, visitor: Visitor, network: str, key: str, visible: bool) -> Panel:
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
            who = Visitor(open_upload(file))
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


def serve(subjects: Sequence[Subject], host: str, port: int, *, browser: bool = False, wait: bool = True) -> Any:
    """Show the page on a port until stopped; with `wait=False`, return the running page (its `close()` stops it)."""
    from starlette.middleware import Middleware

    # Of this user alone, and gone with the page; Gradio's own place is one for all users of a machine, and stays.
    folder = tempfile.TemporaryDirectory(prefix="nearsight-explore-", ignore_cleanup_errors=True)
    os.environ["GRADIO_TEMP_DIR"] = folder.name
    page = build_page(subjects)
    page.queue(default_concurrency_limit=4, max_size=64)
    page.uploads = folder  # type: ignore[attr-defined]
    if wait:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        page.launch(
            server_name=host,
            server_port=port,
            share=False,
            inbrowser=browser,
            quiet=True,
            prevent_thread_lock=not wait,
            max_file_size=TRANSPORT,
            state_session_capacity=200,
            ssr_mode=False,
            footer_links=[],
            theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
            css=STYLE,
            app_kwargs={"middleware": [Middleware(NoOutsiders)]},
        )
    finally:
        if wait:
            folder.cleanup()
    return page


class NoOutsiders:
    """Adds the policy to every answer."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
            await send(message)

        await self.app(scope, receive, with_policy if scope["type"] == "http" else send)
