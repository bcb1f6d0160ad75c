"""COCO's metrics: the numbers of pycocotools on the same detections, crowds and empty images included."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest
import torch

from nearsight.detect.evaluate import NAMES, mean_average_precision

STATS = ["mAP", "mAP50", "mAP75", "mAP_small", "mAP_medium", "mAP_large"]


def pycocotools(found: list[Any], truth: list[Any]) -> dict[str, float]:
    """The same numbers by the original, through COCO's own files."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def rows(records: list[Any]) -> Any:
        for image, one in enumerate(records):
            for n, (x0, y0, x1, y1) in enumerate(one["boxes"].double().tolist()):
                yield image, n, one, [x0, y0, x1 - x0, y1 - y0]

    labels = sorted({int(v) for one in [*found, *truth] for v in one["labels"]})
    annotations = [
        {
            "id": number,
            "image_id": image,
            "category_id": int(one["labels"][n]),
            "bbox": box,
            "area": float(one["area"][n]) if "area" in one else box[2] * box[3],
            "iscrowd": int(one["iscrowd"][n]) if "iscrowd" in one else 0,
        }
        for number, (image, n, one, box) in enumerate(rows(truth), 1)
    ]
    results = [
        {"image_id": image, "category_id": int(one["labels"][n]), "bbox": box, "score": float(one["scores"][n])}
        for image, n, one, box in rows(found)
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "info": {},
            "images": [{"id": i} for i in range(len(truth))],
            "annotations": annotations,
            "categories": [{"id": label} for label in labels],
        }
        coco.createIndex()
        run = COCOeval(coco, coco.loadRes(results), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    wanted = dict(zip(STATS, run.stats[:6].tolist(), strict=True)) | {"AR100": float(run.stats[8])}
    return {name: value for name, value in wanted.items() if value >= 0}


def case(seed: int, images: int, *, crowds: bool = True, areas: bool = True) -> tuple[list[Any], list[Any]]:
    """Boxes of all sizes on rectangles, and detections: right ones, shifted ones, doubles, inventions, misses."""
    random = np.random.default_rng(seed)
    found, truth = [], []
    for image in range(images):
        count = 0 if image % 4 == 1 else int(random.integers(1, 7))
        corner, sides = random.uniform(0, [500, 300], (count, 2)), np.exp(random.uniform(1.5, 5.5, (count, 2)))
        boxes, labels = np.concatenate([corner, corner + sides], 1), random.integers(0, 3, count)
        one = {"boxes": torch.tensor(boxes).float(), "labels": torch.tensor(labels)}
        if crowds:
            one["iscrowd"] = torch.tensor(random.random(count) < 0.25).long()
        if areas:  # of an outline, smaller than its box
            one["area"] = torch.tensor(sides.prod(1) * random.uniform(0.4, 1.0, count)).float()
        truth.append(one)
        kept = boxes[random.random(count) < 0.85]
        names = labels[: len(kept)]
        guesses = [kept + random.normal(0, 3, kept.shape), kept + random.normal(0, 12, kept.shape)]
        invented = random.uniform(0, 250, (0 if image % 4 == 2 else 3, 4))
        invented[:, 2:] += invented[:, :2] + 1
        every = np.concatenate([*guesses, invented])
        every[:, 2:] = np.maximum(every[:, 2:], every[:, :2] + 1)
        classes = np.concatenate([names, names, random.integers(0, 3, len(invented))]).astype(np.int64)
        if image == 0:
            every, classes = every[:0], classes[:0]
        scores = torch.tensor(random.random(len(every))).float()
        found.append({"boxes": torch.tensor(every).float(), "scores": scores, "labels": torch.tensor(classes)})
    return found, truth


@pytest.mark.parametrize(("crowds", "areas"), [(True, True), (False, True), (True, False), (False, False)])
def test_the_numbers_of_pycocotools(crowds: bool, areas: bool) -> None:
    for seed in range(4):
        found, truth = case(seed, 17, crowds=crowds, areas=areas)
        wanted = pycocotools(found, truth)
        assert set(wanted) == set(NAMES)
        assert 0.05 < wanted["mAP"] < 0.9  # neither nothing nor everything: a change would show
        assert mean_average_precision(found, truth) == pytest.approx(wanted, abs=1e-6)


def test_crowds_areas_and_the_limit_of_100_change_the_number() -> None:
    """What the comparison above could not see if both sides left it out."""
    found, truth = case(1, 17)
    whole = mean_average_precision(found, truth)
    for key in ("iscrowd", "area"):
        bare = [{k: v for k, v in one.items() if k != key} for one in truth]
        assert mean_average_precision(found, bare) != pytest.approx(whole, abs=1e-3)
    box, label = torch.tensor([[5.0, 5.0, 90.0, 60.0]]), torch.tensor([0])
    many = {
        "boxes": torch.cat([box + 200, box]).repeat_interleave(torch.tensor([100, 1]), 0),
        "scores": torch.linspace(0.9, 0.1, 101),
        "labels": label.expand(101),
    }
    assert mean_average_precision([many], [{"boxes": box, "labels": label}])["mAP"] == 0


def test_nothing_found_and_kinds_that_do_not_occur() -> None:
    empty = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64)}
    small = {"boxes": torch.tensor([[5.0, 5.0, 25.0, 20.0]]), "labels": torch.tensor([2])}
    assert mean_average_precision([empty, empty], [small, small]) == {
        **dict.fromkeys(("mAP", "mAP50", "mAP75", "mAP_small", "AR100"), 0.0)
    }
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    sure = {**small, "scores": torch.tensor([0.5])}
    assert mean_average_precision([sure, empty], [small, nothing])["mAP"] == pytest.approx(1.0)
