"""The explorer's page without a browser: what it answers, what it escapes, what it keeps to itself."""

import re
from pathlib import Path

import pytest
from PIL import Image

from nearsight.viz.explore.draw import enlargement
from nearsight.viz.explore.images import Shown, built_in
from nearsight.viz.explore.views import GIVEN, look, pixel_at
from tests.support.subjects import SIZE, rectangle

gradio = pytest.importorskip("gradio", reason="the explorer's page needs the extra `explore`")

from nearsight.viz.explore import answers, page, serve  # noqa: E402  (they import gradio)

EXPLICIT = "expatt_resnet_nano"


@pytest.fixture(scope="module")
def explorer():
    return answers.Explorer([rectangle(EXPLICIT)])


def test_the_slider_at_its_learned_place_shows_the_learned_map(explorer):
    subject = explorer.subjects[EXPLICIT]
    layer = subject.layers[0]
    assert explorer.moved(subject, layer, 0.75) is None
    assert explorer.moved(subject, layer, 0.76) == 0.76
    assert answers.radius_label(0.7431) == "Radius σ of the map (learned: 0.743)"


def test_a_click_means_the_pixel_under_it(explorer):
    """Clicks come as (x, y) of the enlarged input, here 24×32 pixels of 14×14."""
    who = answers.Visitor(built_in()[0])
    times = enlargement(SIZE)
    for pixel in ((0, 0), (5, 29), (23, 31)):
        for inside in (0, times - 1):
            place = explorer.pixel(EXPLICIT, who, pixel[1] * times + inside, pixel[0] * times + inside)
            assert pixel_at(place, SIZE) == pixel


def test_a_network_that_lacks_the_layer_shows_its_first(explorer):
    who = answers.Visitor(built_in()[0])
    layer, note, radius, classes, shown, maps, peaks, download = explorer.panel(who, GIVEN, EXPLICIT, "no.such.layer")
    assert layer["value"] == explorer.subjects[EXPLICIT].layers[0]
    assert note == '<p class="note random">Random weights, for a test.</p>'
    assert (radius["visible"], radius["value"]) == (True, 0.75)
    assert sum(classes["value"].values()) == pytest.approx(1)
    assert isinstance(shown, Image.Image)
    assert maps == download
    assert maps.endswith(".png")
    assert 'data-pixel="12,16"' in peaks


def test_names_are_text_never_markup(explorer):
    subject = explorer.subjects[EXPLICIT]
    view = look(subject, built_in()[0].image, subject.layers[0], (0.5, 0.5))
    shown = answers.peaks_html(view, '"><script>', 0.1) + answers.status_html(
        "<img src=x onerror=alert(1)>.png is no image"
    )
    assert "<script>" not in shown
    assert "<img" not in shown
    evil = answers.Visitor(Shown("<b>../../x</b>.png", built_in()[0].image))
    file = explorer.pictures(evil, GIVEN, EXPLICIT, subject.layers[0], 0.75)[1]
    assert re.fullmatch(r"[\w.#-]+", file.rpartition("/")[2])


def test_the_page_tells_nobody_and_offers_no_api(explorer):
    built = page.build_page(list(explorer.subjects.values()))
    config = built.get_config_file()
    assert config["analytics_enabled"] is False
    assert {one["api_visibility"] for one in config["dependencies"]} == {"private"}
    style = Path(serve.__file__).with_name("style.css").read_text(encoding="utf-8")
    for outside in ("http:", "https:", "//", "@import"):
        assert outside not in style + serve.POLICY
