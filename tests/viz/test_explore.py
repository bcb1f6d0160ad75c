"""The explorer without its page: images in, numbers and pictures out."""

import struct
import threading
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from nearsight.errors import UserError
from nearsight.viz.explore import images
from nearsight.viz.explore.draw import draw_input, draw_view, enlargement
from nearsight.viz.explore.images import built_in, open_upload
from nearsight.viz.explore.subjects import Subject
from nearsight.viz.explore.views import GIVEN, RECEIVED, look, peaks, pixel_at, place_of, predict, radius_of
from nearsight.viz.maps import attention_maps, explicit_map
from tests.support.subjects import SIZE, rectangle

NAMES = ("qna_vit_nano", "sasa_resnet_nano", "expatt_resnet_nano")


@pytest.fixture(scope="module")
def subjects():
    return {name: rectangle(name) for name in NAMES}


@pytest.fixture(scope="module")
def photo():
    return built_in()[1].image


@pytest.mark.parametrize("mode", [GIVEN, RECEIVED])
@pytest.mark.parametrize("name", NAMES)
def test_views_are_the_maps_of_the_network(subjects, photo, name, mode):
    subject = subjects[name]
    for layer in (subject.layers[0], subject.layers[-1]):
        view = look(subject, photo, layer, (0.3, 0.8), mode)
        maps = attention_maps(subject.model, subject.prepare(photo), layers=layer, pixels=[(7, 25)])[layer]
        wanted = maps.weights[0, 0] if mode == GIVEN else maps.received[0]
        assert view.pixel == (7, 25)
        torch.testing.assert_close(view.heads, wanted, rtol=0, atol=0)
        for peak, heads in zip(peaks(view), wanted, strict=True):
            assert peak.value == heads.max()
            assert heads[peak.cell] == heads.max()


def test_the_shown_image_is_the_input(subjects, photo):
    view = look(subjects["sasa_resnet_nano"], photo, "layer1.0.conv2", (0.3, 0.8))
    wanted = np.asarray(photo.resize(SIZE[::-1]), dtype=float) / 255
    assert view.shown.shape == (*SIZE, 3)
    assert np.abs(view.shown - wanted).max() < 1e-5


def test_a_place_is_the_same_pixel_again():
    for size in ((1, 1), (24, 32), (7, 3)):
        for pixel in ((0, 0), (size[0] - 1, size[1] - 1), (size[0] // 2, size[1] // 3)):
            assert pixel_at(place_of(pixel, size), size) == pixel


@pytest.mark.parametrize("layer", ["layer1.0.conv2.attention", "layer4.0.conv2.attention"])
def test_radius_stands_in_for_the_learned_one(subjects, photo, layer):
    subject = subjects["expatt_resnet_nano"]
    module = subject.model.get_submodule(layer)
    learned = module.log_radius.detach().clone()
    given = look(subject, photo, layer, (0.3, 0.8), GIVEN, radius=0.15)
    wanted = explicit_map(module, given.maps.grid, given.maps.cells[0], radius=0.15)
    torch.testing.assert_close(given.heads, wanted)
    assert given.maps.name == layer
    assert given.maps.image_size == SIZE
    # All queries give 1 in all, wherever it goes.
    received = look(subject, photo, layer, (0.3, 0.8), RECEIVED, radius=0.15)
    assert received.heads.sum((1, 2)).tolist() == pytest.approx(
        [np.prod(received.maps.grid)] * received.maps.heads, rel=1e-4
    )
    assert (received.heads - look(subject, photo, layer, (0.3, 0.8), RECEIVED).heads).abs().max() > 1e-4
    assert torch.equal(module.log_radius, learned)


def test_other_layers_have_no_radius(subjects, photo):
    subject = subjects["sasa_resnet_nano"]
    assert radius_of(subject, "layer1.0.conv2") is None
    plain, moved = (look(subject, photo, "layer1.0.conv2", (0.3, 0.8), radius=r).heads for r in (None, 0.1))
    assert torch.equal(plain, moved)


def test_prediction_is_the_softmax(subjects, photo):
    subject = subjects["qna_vit_nano"]
    found = predict(subject, photo)
    with torch.no_grad():
        wanted = subject.model(subject.prepare(photo))[0].softmax(0)
    assert list(found) == [f"class {n}" for n in range(10)]
    assert list(found.values()) == pytest.approx(wanted.tolist())
    other = Subject("no classes", subject.model, subject.prepare, subject.shown, None, "")
    assert predict(other, photo) is None


def test_visitors_at_once_do_not_mix(subjects):
    """Maps are read by hooks on one shared network: without its lock, one visitor's run fills another's maps."""
    subject, layer = subjects["sasa_resnet_nano"], "layer2.0.conv2"
    pictures = [shown.image for shown in built_in()[:4]]
    wanted = [look(subject, image, layer, (0.2 * i + 0.1, 0.5)).heads for i, image in enumerate(pictures)]
    wrong = []

    def visit(number):
        for _ in range(6):
            found = look(subject, pictures[number], layer, (0.2 * number + 0.1, 0.5)).heads
            if not torch.equal(found, wanted[number]):
                wrong.append(number)

    visitors = [threading.Thread(target=visit, args=(number,)) for number in range(4)]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()
    assert wrong == []


def test_a_network_without_attention_is_refused():
    with pytest.raises(
        UserError, match=r"^resnet_nano has no attention layer to look into; wanted a network with some"
    ):
        rectangle("resnet_nano")


def test_input_is_drawn_in_whole_pixels_with_its_mark(subjects, photo):
    view = look(subjects["sasa_resnet_nano"], photo, "layer1.0.conv2", place_of((5, 29), SIZE))
    drawn = np.asarray(draw_input(view))
    times = enlargement(SIZE)
    assert drawn.shape == (SIZE[0] * times, SIZE[1] * times, 3)
    middles = drawn[times // 2 :: times, times // 2 :: times]
    assert np.abs(middles / 255 - view.shown).max() < 1 / 255
    colours = np.argwhere((drawn == (0xD5, 0x5E, 0x00)).all(-1))
    assert (colours.min(0) // times).tolist() == [5, 29]
    assert (colours.max(0) // times).tolist() == [5, 29]


def test_figure_has_the_heads_and_a_name(subjects, photo):
    view = look(subjects["sasa_resnet_nano"], photo, "layer1.0.conv2", (0.3, 0.8))
    name, png = draw_view(view, "sasa_resnet_nano", f"../my photo {'x' * 300}.jpg")
    assert name.startswith("sasa_resnet_nano_..-my-photo-xxx")
    assert name.endswith("_layer1.0.conv2_given_7-25.png")
    assert len(name) < 160
    assert "/" not in name
    assert png.startswith(b"\x89PNG")


def save(image, path, **options):
    image.save(path, **options)
    return path


def promise(width, height, path):
    """A small PNG that says it is of that size: what it would unpack to is refused before it does."""
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", size), (b"IDAT", b""))
    ]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    return path


def test_uploads_become_upright_rgb(tmp_path):
    numbers = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(4, 6, 3)
    plain = open_upload(save(Image.fromarray(numbers), tmp_path / "plain.png"))
    assert plain.name == "plain.png"
    assert np.array_equal(np.asarray(plain.image), numbers)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rows are columns
    turned = open_upload(save(Image.new("RGB", (40, 20), "red"), tmp_path / "turned.jpg", exif=exif))
    assert turned.image.size == (20, 40)
    clear = open_upload(save(Image.new("RGBA", (3, 2), (255, 0, 0, 0)), tmp_path / "clear.png"))
    assert clear.image.getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (3, 2), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    keyed = open_upload(save(palette, tmp_path / "keyed.png", transparency=1))
    assert keyed.image.getpixel((0, 0)) == (255, 255, 255)
    deep = Image.fromarray(np.linspace(0, 60000, 8, dtype=np.uint16).reshape(2, 4))
    grey = np.asarray(open_upload(save(deep, tmp_path / "deep.png")).image)[..., 0]
    assert (grey[0, 0], grey[1, 3]) == (0, 60000 >> 8)  # as networks are given them
    assert (np.diff(grey.ravel().astype(int)) > 0).all()
    large = open_upload(save(Image.new("L", (3000, 10)), tmp_path / "wide.png"))
    assert large.image.size == (images.MAX_SIDE, 3)


def test_bad_uploads_are_answered_with_a_sentence(tmp_path, monkeypatch):
    text = tmp_path / "words.png"
    text.write_bytes(b"not an image at all")
    cut = save(Image.effect_noise((200, 150), 90), tmp_path / "cut.png")
    cut.write_bytes(cut.read_bytes()[:9000])
    empty = tmp_path / "empty.jpg"
    empty.touch()
    drawing = tmp_path / "drawing.svg"
    drawing.write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>")
    kinds = "wanted PNG, JPEG, WEBP, GIF, BMP or TIFF, up to 10 MB and 25 megapixels."
    for path in (text, empty, drawing):
        with pytest.raises(UserError) as caught:
            open_upload(path)
        assert str(caught.value) == f"{path.name} is not an image that can be read; {kinds}"
    with pytest.raises(UserError, match=r"^cut\.png is damaged \(.+\); wanted PNG"):
        open_upload(cut)
    wide = promise(25_001, 1000, tmp_path / "wide.png")
    with pytest.raises(UserError) as caught:
        open_upload(wide)
    assert str(caught.value) == f"wide.png has 25001×1000 pixels; {kinds}"
    bomb = promise(60_000, 60_000, tmp_path / "bomb.png")
    with pytest.raises(UserError, match=r"^bomb\.png has far too many pixels; wanted"):
        open_upload(bomb)
    depth = save(Image.fromarray(np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)), tmp_path / "depth.tiff")
    with pytest.raises(
        UserError, match=r"^depth\.tiff holds 32 bits a pixel \(PIL's mode F\), .+ is white; wanted PNG"
    ):
        open_upload(depth)
    monkeypatch.setattr(images, "MAX_BYTES", 10)
    with pytest.raises(UserError, match=r"^words\.png has 0\.0 MB; wanted"):
        open_upload(text)


def test_built_in_images():
    found = built_in()
    assert [shown.name for shown in found] == ["flower", "china", *[f"digit {n}" for n in range(10)]]
    assert found[0].image.size == (640, 427)
    assert {shown.image.mode for shown in found} == {"RGB"}
    digit = np.asarray(found[2].image)
    assert digit.shape == (8, 8, 3)
    assert (digit.min(), digit.max()) == (0, 255)
