"""Pascal VOC's folders and XML files, every entry checked: the first bad one is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from nearsight.errors import UserError
from nearsight.train.data.boxes import AnnotatedImages, Collector, nothing_to_learn, numbers

__all__ = ["class_names", "find_list", "read_voc"]

SUFFIXES = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG")
CORNERS = ("xmin", "ymin", "xmax", "ymax")


def find_list(root: Path, split: str) -> Path | None:
    """The file that lists a split's images."""
    path = root / "ImageSets" / "Main" / f"{split}.txt"
    return path if path.is_file() else None


def class_names(root: Path) -> list[str]:
    """Every class of the folder, of all splits, by alphabet."""
    names = set()
    for file in sorted((root / "Annotations").glob("*.xml")):
        names |= {_text(file, number, entry, "name") for number, entry in enumerate(_parse(file).findall("object"))}
    if not names:
        raise UserError(f"data.source: {root / 'Annotations'} names no object; wanted Pascal VOC's XML files.")
    return sorted(names)


def read_voc(
    root: Path, listed: Path, classes: list[str], max_pixels: int, note: Callable[[str], None]
) -> AnnotatedImages:
    """The images of one list. VOC counts pixels from 1 and its corners belong to the box: (1, 1, 1, 1) is one pixel.

    Objects marked difficult are treated as crowds: not trained on, not counted.
    """
    kept = Collector()
    for line, text in enumerate(_lines(listed), 1):
        words = text.split()
        if not words:
            continue
        file = root / "Annotations" / f"{words[0]}.xml"
        if not file.is_file():
            raise UserError(f"{listed}: line {line}: no annotation {file}.")
        tree = _parse(file)
        sides = numbers([_number(tree.findtext(f"size/{key}")) for key in ("height", "width")], 2)
        if sides is None or any(side <= 0 or side != int(side) for side in sides):
            raise UserError(f"{file}: no size, wanted <size> with <width> and <height> in whole pixels.")
        rows, columns = (int(side) for side in sides)
        image = kept.image(_image_of(root, words[0]), rows=rows, columns=columns)
        for number, entry in enumerate(tree.findall("object")):
            name = _text(file, number, entry, "name")
            if name not in classes:
                raise UserError(f"{file}: object[{number}]: class {name!r} is none of {', '.join(classes)}.")
            box = entry.find("bndbox")
            if box is None:
                kept.empty()
                continue
            corners = numbers([_number(box.findtext(key)) for key in CORNERS], 4)
            if corners is None:
                raise UserError(f"{file}: object[{number}]: wanted four numbers in <bndbox>: {', '.join(CORNERS)}.")
            x0, y0, x1, y1 = corners
            crowd = (entry.findtext("difficult") or "0").strip() == "1"
            kept.box(image, (x0 - 1, y0 - 1, x1, y1), label=classes.index(name), crowd=crowd)
    images = kept.done(max_pixels)
    nothing_to_learn(listed, images)
    note(kept.report(listed.stem))
    return images


def _lines(listed: Path) -> list[str]:
    try:
        return listed.read_text(encoding="utf-8-sig").splitlines()  # Windows' editors put a mark first
    except UnicodeDecodeError as error:
        raise UserError(f"{listed}: not UTF-8 ({error}).") from error


def _image_of(root: Path, name: str) -> Path:
    """The image's file; a missing one keeps its usual name, and is met like any other that cannot be read."""
    places = [root / "JPEGImages" / f"{name}{suffix}" for suffix in SUFFIXES]
    return next((place for place in places if place.is_file()), places[0])


def _parse(file: Path) -> ElementTree.Element:
    try:
        return ElementTree.parse(file).getroot()
    except ElementTree.ParseError as error:
        line, column = error.position
        raise UserError(f"{file}: not valid XML in line {line}, column {column}.") from error
    except (LookupError, ValueError) as error:  # an encoding that Python or its parser does not know
        raise UserError(f"{file}: not valid XML ({error}).") from error


def _text(file: Path, number: int, entry: ElementTree.Element, key: str) -> str:
    text = (entry.findtext(key) or "").strip()
    if not text:
        raise UserError(f"{file}: object[{number}]: no <{key}>.")
    return text


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None
