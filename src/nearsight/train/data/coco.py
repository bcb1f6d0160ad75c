"""COCO's folders and JSON files, every entry checked: the first bad one is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nearsight.errors import UserError
from nearsight.train.data.boxes import AnnotatedImages, Collector, nothing_to_learn, numbers

__all__ = ["find_split", "read_coco", "splits"]

WANTED = "wanted annotations/instances_SPLIT.json beside images/SPLIT/ or SPLIT/, or SPLIT/_annotations.coco.json"


def splits(root: Path) -> dict[str, Path]:
    """The annotation files under a folder by the name of their split.

    Known layouts: annotations/instances_NAME.json (COCO's own, `train2017` included) and NAME/_annotations.coco.json.
    """
    found = {
        path.name.removeprefix("instances_").removesuffix(".json"): path
        for path in sorted((root / "annotations").glob("instances_*.json"))
    }
    for path in sorted(root.glob("*/_annotations.coco.json")):
        found.setdefault(path.parent.name, path)
    return found


def find_split(root: Path, wanted: str) -> tuple[str, Path] | None:
    """(name, annotation file) of a split: that name, or the only one of that name and a year (`train2017` for train)."""
    found = splits(root)
    if wanted in found:
        return wanted, found[wanted]
    dated = [name for name in found if name.removeprefix(wanted).isdecimal() and name.startswith(wanted)]
    return (dated[0], found[dated[0]]) if len(dated) == 1 else None


def _folder(root: Path, name: str, file: Path) -> Path:
    if file.name == "_annotations.coco.json":
        return file.parent
    places = [root / "images" / name, root / name, root / "images"]
    place = next((place for place in places if place.is_dir()), None)
    if place is None:
        raise UserError(f"data.source: {file} has no folder of images; {WANTED}.")
    return place


def read_coco(
    root: Path, name: str, file: Path, max_pixels: int, note: Callable[[str], None]
) -> tuple[AnnotatedImages, list[str]]:
    """The images of one annotation file, and its class names in the order of their ids; `note` gets the counts."""
    folder = _folder(root, name, file)
    data = _parse(file)
    labels, classes = _categories(file, data["categories"])
    kept, places = Collector(), dict[Any, int]()
    for number, entry in enumerate(data["images"]):
        at = f"{file}: images[{number}]"
        _need(at, entry, ("id", "file_name", "width", "height"))
        rows, columns = entry["height"], entry["width"]
        if not all(isinstance(side, int) and side > 0 for side in (rows, columns)):
            raise UserError(f"{at}: got {columns!r}×{rows!r}, wanted width and height in whole pixels.")
        if entry["id"] in places:
            raise UserError(f"{at}: id {entry['id']!r} is given twice, wanted an id of its own.")
        if not isinstance(entry["file_name"], str):
            raise UserError(f"{at}: file_name is {entry['file_name']!r}, wanted text.")
        places[entry["id"]] = kept.image(folder / entry["file_name"], rows=rows, columns=columns)
    for number, entry in enumerate(data["annotations"]):
        at = f"{file}: annotations[{number}]"
        _need(at, entry, ("image_id", "category_id", "bbox"))
        image, category, box = entry["image_id"], entry["category_id"], entry["bbox"]
        if image not in places:
            raise UserError(f"{at}: image_id {image!r} is none of its images.")
        if category not in labels:
            raise UserError(f"{at}: category_id {category!r} is none of its categories.")
        if box is None or box == []:
            kept.empty()
            continue
        sides = numbers(box, 4)
        if sides is None:
            raise UserError(f"{at}: bbox is {box!r}, wanted four finite numbers: x, y, width, height.")
        x, y, width, height = sides
        crowd = entry.get("iscrowd") or 0
        if crowd not in (0, 1):
            raise UserError(f"{at}: iscrowd is {crowd!r}, wanted 0 or 1.")
        area = numbers([entry["area"]], 1) if "area" in entry else None
        kept.box(
            places[image],
            (x, y, x + width, y + height),
            label=labels[category],
            area=area[0] if area and area[0] > 0 else None,
            crowd=bool(crowd),
        )
    images = kept.done(max_pixels)
    nothing_to_learn(file, images)
    note(kept.report(name))
    return images, classes


def _parse(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_bytes())
    except json.JSONDecodeError as error:
        raise UserError(f"{file}: not valid JSON in line {error.lineno}, column {error.colno}: {error.msg}.") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{file}: not valid JSON ({error}).") from error
    keys = ("images", "annotations", "categories")
    missing = [key for key in keys if not isinstance(data, dict) or not isinstance(data.get(key), list)]
    if missing:
        raise UserError(f"{file}: no list {missing[0]!r}, wanted COCO's images, annotations and categories.")
    found: dict[str, Any] = data
    return found


def _categories(file: Path, entries: list[Any]) -> tuple[dict[Any, int], list[str]]:
    names: dict[int, str] = {}
    for number, entry in enumerate(entries):
        at = f"{file}: categories[{number}]"
        _need(at, entry, ("id", "name"))
        if not isinstance(entry["id"], int) or entry["id"] in names:
            raise UserError(f"{at}: id is {entry['id']!r}, wanted a whole number of its own.")
        names[entry["id"]] = str(entry["name"])
    if not names:
        raise UserError(f"{file}: no categories, wanted at least one.")
    ids = sorted(names)
    return {identity: label for label, identity in enumerate(ids)}, [names[identity] for identity in ids]


def _need(at: str, entry: Any, keys: tuple[str, ...]) -> None:
    if not isinstance(entry, dict):
        raise UserError(f"{at}: got {type(entry).__name__}, wanted an object with {', '.join(keys)}.")
    missing = [key for key in keys if key not in entry]
    if missing:
        raise UserError(f"{at}: no {missing[0]}, wanted {', '.join(keys)}.")
    for key in ("id", "image_id", "category_id"):
        if isinstance(entry.get(key), (list, dict)):
            raise UserError(f"{at}: {key} is {entry[key]!r}, wanted a number.")
