"""The shapes of `tests.detect.shapes` on disk: COCO's and Pascal VOC's folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from torchvision.transforms.functional import to_pil_image

from tests.detect.shapes import CLASSES, draw

IDS = (3, 7, 8)


class Scene(NamedTuple):
    """An image and its objects: boxes (x0, y0, x1, y1) and labels."""

    image: Image.Image
    boxes: list[list[int]]
    labels: list[int]


def scene(seed: int, rows: int = 64, columns: int = 80, objects: int = 2) -> Scene:
    """Two shapes on a noisy grey, the same for the same seed."""
    image, target = draw(seed, rows, columns, shapes=objects, smallest=14, largest=28)
    boxes = target["boxes"].int().tolist()
    assert len(boxes) == objects
    return Scene(to_pil_image(image.clamp(0, 1)), boxes, target["labels"].tolist())


def coco_keys(scenes: list[Scene], ids: tuple[int, ...] = IDS) -> dict[str, Any]:
    """COCO's annotation file of scenes; `ids` are those of the categories."""
    images = [
        {"id": 10 + i, "file_name": f"{i}.png", "width": one.image.width, "height": one.image.height}
        for i, one in enumerate(scenes)
    ]
    annotations = [
        {
            "id": 100 * i + n,
            "image_id": 10 + i,
            "category_id": ids[label],
            "bbox": [x0, y0, x1 - x0, y1 - y0],
            "area": (x1 - x0) * (y1 - y0),
            "iscrowd": 0,
        }
        for i, one in enumerate(scenes)
        for n, ((x0, y0, x1, y1), label) in enumerate(zip(one.boxes, one.labels, strict=True))
    ]
    categories = [{"id": identity, "name": name} for identity, name in zip(ids, CLASSES, strict=True)]
    return {"images": images, "annotations": annotations, "categories": categories}


def write_coco(root: Path, train: list[Scene], val: list[Scene]) -> Path:
    """A folder in COCO's layout."""
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    for name, scenes in (("train", train), ("val", val)):
        folder = root / "images" / name
        folder.mkdir(parents=True, exist_ok=True)
        for i, one in enumerate(scenes):
            one.image.save(folder / f"{i}.png")
        (root / "annotations" / f"instances_{name}.json").write_text(json.dumps(coco_keys(scenes)))
    return root


def write_voc(root: Path, train: list[Scene], val: list[Scene]) -> Path:
    """A folder in Pascal VOC's layout; VOC counts pixels from 1 and its corners belong to the box."""
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name, scenes in (("train", train), ("val", val)):
        (root / "ImageSets" / "Main" / f"{name}.txt").write_text("".join(f"{name}{i}\n" for i in range(len(scenes))))
        for i, one in enumerate(scenes):
            one.image.save(root / "JPEGImages" / f"{name}{i}.png")
            objects = "".join(
                f"<object><name>{CLASSES[label]}</name><difficult>0</difficult><bndbox><xmin>{x0 + 1}</xmin>"
                f"<ymin>{y0 + 1}</ymin><xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox></object>"
                for (x0, y0, x1, y1), label in zip(one.boxes, one.labels, strict=True)
            )
            size = f"<size><width>{one.image.width}</width><height>{one.image.height}</height></size>"
            (root / "Annotations" / f"{name}{i}.xml").write_text(f"<annotation>{size}{objects}</annotation>")
    return root
