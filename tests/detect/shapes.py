"""Images of coloured shapes with their boxes: a detection set small enough to learn by heart."""

import torch
from torch import Tensor, nn
from torchmetrics.detection import MeanAveragePrecision

CLASSES = ("square", "disc", "cross")
COLOURS = torch.tensor([[0.9, 0.2, 0.1], [0.1, 0.7, 0.2], [0.2, 0.3, 0.9]])


def draw(seed: int, height: int, width: int, *, shapes: int = 2, smallest: int = 18, largest: int = 34):
    """An image [3, height, width] from 0 to 1, and its target: boxes (x1, y1, x2, y2) and labels of shapes that do not touch."""
    random = torch.Generator().manual_seed(seed)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=random))

    image = 0.5 + 0.03 * torch.randn(3, height, width, generator=random)
    boxes: list[list[int]] = []
    labels: list[int] = []
    for _ in range(50):
        if len(boxes) == shapes:
            break
        h, w = (min(between(smallest, largest), side - 4) for side in (height, width))
        y, x = between(1, height - h - 1), between(1, width - w - 1)
        if any(x < b[2] + 2 and b[0] < x + w + 2 and y < b[3] + 2 and b[1] < y + h + 2 for b in boxes):
            continue
        label = between(0, len(CLASSES) - 1)
        rows, columns = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
        inside = {
            "square": torch.ones(h, w, dtype=torch.bool),
            "disc": rows**2 + columns**2 <= 1,
            "cross": (rows.abs() < 0.34) | (columns.abs() < 0.34),
        }[CLASSES[label]]
        image[:, y : y + h, x : x + w][:, inside] = COLOURS[label][:, None]
        boxes.append([x, y, x + w, y + h])
        labels.append(label)
    return image.clamp(0, 1), {"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": torch.tensor(labels)}


def shapes_set(count: int = 8, sizes=((64, 96), (96, 64), (72, 80)), **options):
    """`count` images of several sizes, and their targets."""
    pairs = [draw(i, *sizes[i % len(sizes)], **options) for i in range(count)]
    return [image for image, _ in pairs], [target for _, target in pairs]


def learn(
    model: nn.Module, images: list[Tensor], targets: list[dict[str, Tensor]], *, steps: int, lr: float
) -> list[float]:
    """Full-batch steps of AdamW on the set, warm-up and cosine; the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.2)
    model.train()
    losses = []
    for _ in range(steps):
        loss = sum(model(images, targets).values())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def mean_average_precision(
    model: nn.Module, images: list[Tensor], targets: list[dict[str, Tensor]]
) -> dict[str, float]:
    """mAP, mAP50 and mAP75 of the model's detections."""
    metric = MeanAveragePrecision(backend="faster_coco_eval")
    metric.warn_on_many_detections = False
    with torch.no_grad():
        metric.update(model.eval()(images), targets)
    result = metric.compute()
    return {name: float(result[name]) for name in ("map", "map_50", "map_75")}
