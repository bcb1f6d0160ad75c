"""The explorer's page in a real browser: what a visitor does, and what the page then shows."""

import io
import re
import shutil
import socket
import time

import numpy as np
import pytest
import torch
from PIL import Image

from nearsight.viz.explore.images import built_in
from nearsight.viz.explore.views import place_of
from nearsight.viz.figures import Picture, draw_given
from nearsight.viz.maps import attention_maps, explicit_map
from tests.support.subjects import SIZE, rectangle

gradio = pytest.importorskip("gradio", reason="the explorer's page needs the extra `explore`")
sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright (extra `dev`)")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed on this machine"),
    # Gradio's own use of pandas.
    pytest.mark.filterwarnings("ignore:.*(no_silent_downcasting|copy keyword).*"),
]
SASA, EXPLICIT, QNA = "sasa_resnet_nano", "expatt_resnet_nano", "qna_vit_nano"
PATIENCE = 30_000


@pytest.fixture(scope="module")
def subjects():
    return {name: rectangle(name) for name in (SASA, EXPLICIT, QNA)}


@pytest.fixture(scope="module")
def looked_up():
    """Hosts the server's process asked for by name."""
    hosts, real = [], socket.getaddrinfo

    def remember(host, *args, **options):
        hosts.append(host)
        return real(host, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", remember)
        yield hosts


@pytest.fixture(scope="module")
def address(subjects, looked_up):
    from nearsight.viz.explore.serve import serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", "")  # put back what was there before
        page = serve(list(subjects.values()), "127.0.0.1", port, wait=False)
        yield f"http://127.0.0.1:{port}/"
        page.close(verbose=False)
        page.uploads.cleanup()


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, headless=True, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """One visitor: a fresh browser context on the page."""

    def __init__(self, browser, address):
        self.context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.asked, self.faults = [], []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.goto(address)
        self.page.wait_for_selector("#peaks-a .peaks")

    def facts(self, panel="a"):
        """What the page says of a panel's maps."""
        peaks = self.page.locator(f"#peaks-{panel} .peaks")
        found = {key: peaks.get_attribute(f"data-{key}") for key in ("network", "layer", "mode", "pixel")}
        heads = peaks.locator("span")
        found["cells"] = [heads.nth(i).get_attribute("data-cell") for i in range(heads.count())]
        found["values"] = [float(heads.nth(i).get_attribute("data-value")) for i in range(heads.count())]
        return found

    def figure(self, panel="a"):
        """The figure's own bytes, as the page fetched them."""
        source = self.page.locator(f"#maps-{panel} img").get_attribute("src")
        return self.context.request.get(source).body()

    def after(self, action, panel="a"):
        """Do something and wait until the panel's figure is another one."""
        picture = f"#maps-{panel} img"
        before = self.page.locator(picture).get_attribute("src")
        action()
        self.page.wait_for_function(
            "([where, old]) => { const now = document.querySelector(where); return now && now.src !== old }",
            arg=[picture, before],
        )

    def says(self, panel, **facts):
        """Wait until the panel's numbers are of this pixel, mode or network: they may come a moment after the picture."""
        wanted = "".join(f'[data-{key}="{value}"]' for key, value in facts.items())
        self.page.locator(f"#peaks-{panel} .peaks{wanted}").wait_for(timeout=PATIENCE)

    def click(self, pixel, panel="a"):
        """Click the middle of a pixel of the input."""
        image = self.page.locator(f"#input-{panel} img")
        box = image.bounding_box()
        down, across = place_of(pixel, SIZE)
        self.after(lambda: image.click(position={"x": across * box["width"], "y": down * box["height"]}), panel)
        self.says(panel, pixel=f"{pixel[0]},{pixel[1]}")

    def choose(self, control, value):
        self.page.locator(f"#{control} input").click()
        self.page.get_by_role("option", name=value, exact=True).click()

    def upload(self, path):
        with self.page.expect_file_chooser() as chooser:
            self.page.locator("#upload").click()
        chooser.value.set_files(path)


@pytest.fixture
def visitor(chromium, address):
    tabs = []

    def arrive():
        tabs.append(Tab(chromium, address))
        return tabs[-1]

    yield arrive
    for tab in tabs:
        tab.context.close()


def reference(subject, image, layer, pixel):
    return attention_maps(subject.model, subject.prepare(image), layers=layer, pixels=[pixel])[layer]


def strongest(heads):
    """Each head's largest weight: "y,x" and the number."""
    values, where = heads.flatten(1).max(1)
    width = heads.shape[-1]
    return [f"{i // width},{i % width}" for i in where.tolist()], values.tolist()


def brightest(png, maps, subject, image, pixel):
    """Where each head's panel of a figure is brightest, read from the picture's own colours."""
    from matplotlib import colormaps

    drawing = draw_given(Picture("", subject.shown(subject.prepare(image)[0])), maps, pixel)
    figure = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    scale = figure.shape[1] / drawing.figure.bbox.width
    tones = (np.array(colormaps["viridis"].colors) * 255).round().astype(int)
    found = []
    for axis in drawing.figure.axes[1 : 1 + maps.heads]:
        level = np.full(maps.grid, -1)
        for y, x in np.argwhere(maps.weights[0, 0, 0].numpy() > 0):
            across, up = axis.transData.transform((x, y)) * scale
            colour = figure[round(figure.shape[0] - up), round(across)]
            level[y, x] = np.abs(tones - colour).sum(1).argmin()
        found.append(level)
    return found


def photo(path, seed=0):
    """An image file nobody has seen, a rectangle."""
    generator = np.random.default_rng(seed)
    small = Image.fromarray(generator.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    small.resize((160, 120), Image.Resampling.BICUBIC).save(path)
    return path


def test_upload_and_click_show_the_maps_of_that_pixel(visitor, subjects, tmp_path, looked_up):
    tab = visitor()
    file = photo(tmp_path / "mine.png")
    image = Image.open(file).convert("RGB")
    layer = subjects[SASA].layers[0]
    first = tab.figure()
    tab.after(lambda: tab.upload(file))
    assert tab.figure() != first
    for pixel in ((5, 27), (20, 3)):
        before = tab.figure()
        tab.click(pixel)
        facts, maps = tab.facts(), reference(subjects[SASA], image, layer, pixel)
        cells, values = strongest(maps.weights[0, 0])
        assert (facts["network"], facts["layer"], facts["pixel"]) == (SASA, layer, f"{pixel[0]},{pixel[1]}")
        assert facts["cells"] == cells
        assert facts["values"] == pytest.approx(values, rel=1e-4)
        png = tab.figure()
        assert png != before
        # The picture itself: every head's largest weight has its panel's brightest tone.
        for level, cell in zip(brightest(png, maps, subjects[SASA], image, pixel), cells, strict=True):
            y, x = map(int, cell.split(","))
            assert level[y, x] == level.max()
            assert (level == level.max()).sum() < 5
    with torch.no_grad():
        chances = subjects[SASA].model(subjects[SASA].prepare(image))[0].softmax(0)
    bars = tab.page.locator("#classes-a").inner_text()
    assert re.findall(r"class \d", bars)[0] == f"class {int(chances.argmax())}"
    assert f"{100 * float(chances.max()):.0f}%" in bars
    with tab.page.expect_download() as download:
        tab.page.locator("#download-a").click()
    assert download.value.suggested_filename == f"{SASA}_mine.png_{layer}_given_20-3.png"
    with open(download.value.path(), "rb") as saved:
        assert saved.read() == png
    # Nothing was asked of anyone else, by the page or by the server.
    assert set(looked_up) <= {"127.0.0.1", b"127.0.0.1", "localhost", b"localhost"}
    outside = [url for url in tab.asked if not url.startswith((tab.page.url, "data:", "blob:"))]
    assert outside == []
    assert tab.faults == []


def test_bad_files_are_answered_on_the_page(visitor, tmp_path):
    tab = visitor()
    first = tab.figure()
    words = tmp_path / "words.png"
    words.write_text("not an image")
    tab.upload(words)
    alert = tab.page.locator("#status [role=alert]")
    alert.wait_for()
    kinds = "PNG, JPEG, WEBP, GIF, BMP or TIFF, up to 10 MB and 25 megapixels."
    assert alert.inner_text() == f"words.png is not an image that can be read; wanted {kinds}"
    assert tab.figure() == first
    many = tmp_path / "many.png"
    Image.new("1", (6000, 5000)).save(many)
    tab.upload(many)
    tab.page.get_by_text(f"many.png has 6000×5000 pixels; wanted {kinds}").wait_for()
    heavy = tmp_path / "heavy.png"
    heavy.write_bytes(bytes(10_200_000))
    tab.upload(heavy)
    tab.page.get_by_text(f"heavy.png has 10.2 MB; wanted {kinds}").wait_for()
    heavy.write_bytes(bytes(41_000_000))
    tab.upload(heavy)
    toast = tab.page.locator(".toast-body")
    toast.wait_for()
    assert "heavy.png" in toast.inner_text()
    assert "maximum allowed size" in toast.inner_text()
    assert tab.figure() == first
    # A good one afterwards clears the sentence.
    tab.after(lambda: tab.upload(photo(tmp_path / "good.png")))
    tab.page.locator("#status").wait_for(state="hidden")


def test_radius_follows_the_slider_and_received_the_switch(visitor, subjects):
    tab = visitor()
    slider = tab.page.locator("#radius-a input[type=range]")
    slider.wait_for(state="hidden")
    tab.choose("network-a", EXPLICIT)
    tab.says("a", network=EXPLICIT)
    slider.wait_for(state="visible")
    layer = subjects[EXPLICIT].layers[0]
    tab.click((3, 30))
    learned = tab.facts()
    cells, values = strongest(explicit_map(subjects[EXPLICIT].model.get_submodule(layer), SIZE, (3, 30)))
    assert (learned["cells"], learned["values"]) == (cells, pytest.approx(values, rel=1e-4))
    tab.after(lambda: slider.fill("0.1"))
    wanted = explicit_map(subjects[EXPLICIT].model.get_submodule(layer), SIZE, (3, 30), radius=0.1)
    deadline = time.monotonic() + 20
    while tab.facts()["values"] != pytest.approx(wanted.amax((1, 2)).tolist(), rel=1e-4):
        assert time.monotonic() < deadline, tab.facts()
        tab.page.wait_for_timeout(100)
    assert tab.facts()["values"] > learned["values"]
    image = built_in()[0].image
    tab.choose("network-a", QNA)
    tab.says("a", network=QNA)
    slider.wait_for(state="hidden")
    tab.after(lambda: tab.page.locator("#mode label").nth(1).click())
    tab.says("a", mode="received")
    facts = tab.facts()
    received = reference(subjects[QNA], image, subjects[QNA].layers[0], (0, 0)).received[0]
    assert facts["mode"] == "received"
    assert (facts["cells"], facts["values"]) == (
        strongest(received)[0],
        pytest.approx(strongest(received)[1], rel=1e-4),
    )


def test_visitors_do_not_see_each_other(visitor, subjects):
    one, other = visitor(), visitor()
    images = built_in()
    one.after(lambda: one.page.locator("#gallery button.thumbnail-item").nth(1).click())
    other.after(lambda: other.page.locator("#gallery button.thumbnail-item").nth(4).click())
    other.after(lambda: other.choose("layer-a", subjects[SASA].layers[2]))
    one.click((4, 9))
    other.click((15, 22))
    one.click((11, 30))
    for tab, image, layer, pixel in (
        (one, images[1].image, subjects[SASA].layers[0], (11, 30)),
        (other, images[4].image, subjects[SASA].layers[2], (15, 22)),
    ):
        facts = tab.facts()
        cells, values = strongest(reference(subjects[SASA], image, layer, pixel).weights[0, 0])
        assert (facts["layer"], facts["pixel"]) == (layer, f"{pixel[0]},{pixel[1]}")
        assert facts["cells"] == cells
        assert facts["values"] == pytest.approx(values, rel=1e-4)


def test_two_networks_side_by_side(visitor, subjects):
    tab = visitor()
    assert not tab.page.locator("#panel-b").is_visible()
    tab.page.locator("#compare input").check()
    tab.page.wait_for_selector("#peaks-b .peaks")
    boxes = [tab.page.locator(f"#panel-{key}").bounding_box() for key in "ab"]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    # A click in either moves both.
    tab.click((6, 2), "b")
    tab.says("a", pixel="6,2")
    assert [tab.facts(key)["pixel"] for key in "ab"] == ["6,2", "6,2"]
    assert [tab.facts(key)["network"] for key in "ab"] == [SASA, EXPLICIT]
    image = built_in()[0].image
    for key, name in zip("ab", (SASA, EXPLICIT), strict=True):
        maps = reference(subjects[name], image, subjects[name].layers[0], (6, 2))
        assert tab.facts(key)["cells"] == strongest(maps.weights[0, 0])[0]
