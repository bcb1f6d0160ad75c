"""COCO's average precision of detections, by torchmetrics on faster-coco-eval; the numbers pycocotools gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import faster_coco_eval  # noqa: F401  (what torchmetrics computes with: if it is missing, say so before a run, not after it)
import numpy as np
from torch import Tensor
from torchmetrics.detection import MeanAveragePrecision

__all__ = ["mean_average_precision"]

Record = Mapping[str, Tensor]
NAMES = {
    "mAP": "map",
    "mAP50": "map_50",
    "mAP75": "map_75",
    "mAP_small": "map_small",
    "mAP_medium": "map_medium",
    "mAP_large": "map_large",
    "AR100": "mar_100",
}


def mean_average_precision(found: Sequence[Record], truth: Sequence[Record]) -> dict[str, float]:
    """COCO's metrics over images: precision at IoU 0.50:0.95, at 0.50, at 0.75, of small, medium and large objects; recall.

    Args:
        found: per image {"boxes" [N, 4] as x0, y0, x1, y1, "scores" [N], "labels" [N]}; the 100 best count.
        truth: per image {"boxes", "labels"} and, if known, "area" (COCO's, of the object's outline; it decides what is small)
            and "iscrowd": detections inside a crowd are neither right nor wrong.

    A number over no object at all (no small ones, say) is left out.

    >>> import torch
    >>> box, label = torch.tensor([[10.0, 10.0, 50.0, 50.0]]), torch.tensor([0])
    >>> nothing = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64)}
    >>> sure = {"boxes": box, "scores": torch.tensor([0.9]), "labels": label}
    >>> mean_average_precision([sure, nothing], [{"boxes": box, "labels": label}] * 2)["mAP50"]
    0.5049...
    """
    metric: Any = MeanAveragePrecision(
        backend="faster_coco_eval",
        # pycocotools' own, in double precision: the default's 0.55 is 0.550000012.
        iou_thresholds=np.linspace(0.5, 0.95, 10).tolist(),
        rec_thresholds=np.linspace(0.0, 1.0, 101).tolist(),
        # Whoever calls has gathered the processes' images already.
        sync_on_compute=False,
    )
    metric.warn_on_many_detections = False
    metric.update([dict(one) for one in found], [dict(one) for one in truth])
    values = metric.compute()
    return {name: float(values[key]) for name, key in NAMES.items() if float(values[key]) >= 0}
