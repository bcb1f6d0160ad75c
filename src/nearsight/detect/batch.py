"""Images of any size as one batch, and the mask that keeps its padding out of everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from nearsight.errors import ArgumentTypeError, ArgumentValueError
from nearsight.ops.checks import shape_text

__all__ = ["PadOnly", "check_images", "check_targets", "padding_mask"]


class PadOnly(GeneralizedRCNNTransform):
    """torchvision's transform without its resizing: normalise, then pad below and on the right to a multiple.

    >>> import torch
    >>> pad = PadOnly([0.5] * 3, [0.5] * 3, multiple=32)
    >>> batch, _ = pad([torch.rand(3, 20, 40), torch.rand(3, 33, 5)])
    >>> batch.tensors.shape, batch.image_sizes
    (torch.Size([2, 3, 64, 64]), [(20, 40), (33, 5)])
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], *, multiple: int) -> None:
        super().__init__(0, 0, list(mean), list(std), size_divisible=multiple)

    def resize(self, image: Tensor, target: Any = None) -> tuple[Tensor, Any]:
        return image, target

    def extra_repr(self) -> str:
        return f"multiple={self.size_divisible}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


def padding_mask(batch: ImageList) -> Tensor | None:
    """bool [B, H, W], True where an image of the batch has a pixel; None when nothing was padded.

    >>> import torch
    >>> padding_mask(ImageList(torch.zeros(2, 3, 4, 6), [(4, 5), (2, 6)]))[:, :, 5].long()
    tensor([[0, 0, 0, 0],
            [1, 1, 0, 0]])
    """
    height, width = batch.tensors.shape[-2:]
    if all(size == (height, width) for size in batch.image_sizes):
        return None
    sizes = torch.tensor(batch.image_sizes, device=batch.tensors.device)
    rows = torch.arange(height, device=sizes.device) < sizes[:, :1]
    columns = torch.arange(width, device=sizes.device) < sizes[:, 1:]
    return rows[:, :, None] & columns[:, None, :]


def check_images(name: str, images: Any) -> None:
    """Refuse anything but a list of floating-point [3, H, W] images."""
    if isinstance(images, Tensor):
        raise ArgumentTypeError(
            f"{name}: got a tensor {shape_text(images.shape)}, wanted a list of images [3, H, W]; use list(images)."
        )
    for i, image in enumerate(images):
        if not isinstance(image, Tensor) or not image.dtype.is_floating_point:
            got = f"dtype {image.dtype}" if isinstance(image, Tensor) else type(image).__name__
            raise ArgumentTypeError(
                f"{name}: got image {i} of {got}, wanted a floating-point tensor [3, H, W] from 0 to 1; "
                f"divide bytes by 255."
            )
        if image.dim() != 3 or image.shape[0] != 3 or 0 in image.shape:
            raise ArgumentValueError(f"{name}: got image {i} of shape {shape_text(image.shape)}, wanted [3, H, W].")


def check_targets(name: str, images: Sequence[Tensor], targets: Any) -> None:
    """Refuse anything but one {"boxes": [N, 4], "labels": [N]} per image with boxes of positive size."""
    if targets is None:
        raise ArgumentValueError(
            f"{name}: got no targets in training mode, wanted one dict of boxes and labels per image; "
            f"call .eval() to detect."
        )
    if len(images) == 0:
        raise ArgumentValueError(f"{name}: got no images in training mode, wanted at least one.")
    if len(targets) != len(images):
        raise ArgumentValueError(f"{name}: got {len(targets)} targets for {len(images)} images, wanted one for each.")
    for i, target in enumerate(targets):
        boxes, labels = target["boxes"], target["labels"]
        if boxes.dim() != 2 or boxes.shape[1] != 4 or labels.shape != boxes.shape[:1]:
            raise ArgumentValueError(
                f"{name}: got boxes {shape_text(boxes.shape)} and labels {shape_text(labels.shape)} for image {i}, wanted "
                f"[N, 4] and [N]."
            )
    flat = torch.cat([target["boxes"] for target in targets])
    # One question for the whole batch: on a GPU each one waits for the device.
    if bool((flat[:, 2:] <= flat[:, :2]).any()):
        for i, target in enumerate(targets):
            for box in target["boxes"].tolist():
                if box[2] <= box[0] or box[3] <= box[1]:
                    raise ArgumentValueError(
                        f"{name}: got the box {box} for image {i}, wanted x1 < x2 and y1 < y2; leave empty boxes out."
                    )
