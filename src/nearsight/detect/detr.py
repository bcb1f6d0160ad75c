"""DETR with one of our networks as its backbone, by transformers.

"End-to-End Object Detection with Transformers", Carion et al. 2020, https://arxiv.org/abs/2005.12872, over QnA-ViT as in the
supplement of "Learned Queries for Efficient Local Attention", Arar et al. 2022, https://arxiv.org/abs/2112.11435.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers.norm_act import BatchNormAct2d
from timm.models import get_pretrained_cfg
from torch import Tensor, nn
from torchvision.ops import box_convert, clip_boxes_to_image
from transformers import DetrConfig, DetrForObjectDetection, TimmBackboneConfig
from transformers.models.detr.modeling_detr import DetrConvEncoder

from nearsight.detect.backbone import accepts_mask, load_backbone_weights
from nearsight.detect.batch import PadOnly, check_images, check_targets, padding_mask
from nearsight.errors import ArgumentValueError
from nearsight.models.common import shrink_mask

__all__ = ["Detr", "create_detr"]

NAME = "DETR"


class MaskedEncoder(nn.Module):
    """transformers' `DetrConvEncoder`, whose backbone is told where the images end.

    (images [B, 3, H, W], mask [B, H, W]) → the last map and its mask. The weights keep their names.
    """

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.model = encoder.model
        self.intermediate_channel_sizes = encoder.intermediate_channel_sizes
        self.stride = int(self.model.feature_info.reduction()[-1])
        # timm wraps a network, which it then gives as `model`, or takes it apart, as it does with ResNets.
        self.whole = hasattr(self.model, "model")
        self.masked = self.whole and accepts_mask(self.model.model)

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        key_mask = pixel_mask.bool()
        options: dict[str, Any] = {"key_mask": key_mask} if self.masked else {}
        if self.whole:
            (features,) = self.model.model.forward_intermediates(
                pixel_values, list(self.model.out_indices), intermediates_only=True, **options
            )
        else:
            (features,) = self.model(pixel_values)
        return [(features, shrink_mask(key_mask, self.stride))]


class Float32Linear(nn.Linear):
    """A linear layer computed in float32 under autocast too."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())


class Detr(nn.Module):
    """DETR called as every detector here: a list of images [3, H, W] from 0 to 1, of any sizes, and their targets.

    In training the losses (each summed over the decoder's layers and weighted as in the paper), in evaluation one detection
    per query: its best class, the probability of it, and the box. Padding takes no part: the backbone, the
    positions and the transformer leave it out (a timm backbone that is not ours sees zeros there).

    Args:
        network: transformers' model, over a timm backbone's last map.
        score_thresh: detections below this are left out.

    >>> import torch
    >>> from nearsight.detect import create_detector
    >>> detector = create_detector("detr_qna_vit_nano", num_classes=3).eval()
    >>> [found["boxes"].shape for found in detector([torch.rand(3, 40, 64), torch.rand(3, 33, 21)])]
    [torch.Size([20, 4]), torch.Size([20, 4])]
    """

    def __init__(self, network: Any, *, score_thresh: float = 0.0) -> None:
        super().__init__()
        # Swapped in after building: a subclass would save, and choose its loss, under its own name.
        where = next(name for name, part in network.named_modules() if isinstance(part, DetrConvEncoder))
        encoder = MaskedEncoder(network.get_submodule(where))
        network.set_submodule(where, encoder)
        # A box in bfloat16 is off by up to 1/512 of the image. In place, so that the weights keep their names.
        for head in (network.class_labels_classifier, *network.bbox_predictor.layers):
            head.__class__ = Float32Linear
        self.network, self.score_thresh = network, score_thresh
        cfg: Any = get_pretrained_cfg(network.config.backbone_config.backbone)
        self.transform = PadOnly(cfg.mean, cfg.std, multiple=encoder.stride)

    def forward(self, images: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]] | None = None) -> Any:
        check_images(NAME, images)
        if self.training:
            check_targets(NAME, images, targets)
        elif len(images) == 0:
            return []
        batch, _ = self.transform(images)
        mask = padding_mask(batch)
        if mask is None:
            mask = torch.ones_like(batch.tensors[:, 0], dtype=torch.bool)
        pixels = batch.tensors.contiguous(memory_format=torch.channels_last)
        sizes = torch.tensor([[w, h, w, h] for h, w in batch.image_sizes], device=pixels.device)
        if self.training:
            assert targets is not None
            labels = [
                {"class_labels": target["labels"], "boxes": box_convert(target["boxes"], "xyxy", "cxcywh") / size}
                for target, size in zip(targets, sizes, strict=True)
            ]
            return self._losses(self.network(pixels, mask, labels=labels).loss_dict)
        outputs = self.network(pixels, mask)
        return self._detections(outputs.logits.float(), outputs.pred_boxes.float(), sizes, batch.image_sizes)

    def _losses(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """transformers' losses by kind, as they add up to its total: those of earlier layers end in _0, _1, …"""
        config = self.network.config
        weights = {"ce": 1.0, "bbox": config.bbox_loss_coefficient, "giou": config.giou_loss_coefficient}
        return {
            f"loss_{kind}": weight * torch.stack([v for k, v in parts.items() if k.startswith(f"loss_{kind}")]).sum()
            for kind, weight in weights.items()
        }

    def _detections(
        self, logits: Tensor, boxes: Tensor, sizes: Tensor, image_sizes: Sequence[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        scores, labels = logits.softmax(-1)[..., :-1].max(-1)
        boxes = box_convert(boxes, "cxcywh", "xyxy") * sizes[:, None]
        found = []
        for i, size in enumerate(image_sizes):
            order = scores[i].argsort(descending=True, stable=True)
            order = order[scores[i][order] >= self.score_thresh]
            found.append(
                {
                    "boxes": clip_boxes_to_image(boxes[i][order], size),
                    "scores": scores[i][order],
                    "labels": labels[i][order],
                }
            )
        return found

    def save_pretrained(self, folder: str | Path) -> None:
        """Write transformers' folder: config.json and model.safetensors."""
        self.network.save_pretrained(folder)

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, score_thresh: float = 0.0) -> Detr:
        """Read a folder written by `save_pretrained`, or by transformers for one of our backbones."""
        return cls(
            DetrForObjectDetection.from_pretrained(str(folder), local_files_only=True), score_thresh=score_thresh
        )


def create_detr(
    *,
    num_classes: int,
    pretrained: bool = False,
    backbone: str = "qna_vit_tiny",
    backbone_weights: str | Path | None = None,
    width: int = 256,
    num_heads: int = 8,
    encoder_layers: int = 6,
    decoder_layers: int = 6,
    hidden: int = 2048,
    num_queries: int = 100,
    dropout: float = 0.1,
    score_thresh: float = 0.0,
) -> Detr:
    """A DETR over a timm backbone's last map.

    Args:
        num_classes: labels run from 0 to num_classes − 1.
        pretrained: the backbone's weights from timm, where it has some.
        backbone: a timm network. Its BatchNorms are frozen as they are: one that has any is of use only with weights.
        backbone_weights: a file of weights of the classification network; its classifier is left out.
        width, num_heads, encoder_layers, decoder_layers, hidden, dropout: of the transformer.
        num_queries: as many objects can be found in an image.
        score_thresh: see `Detr`.
    """
    with torch.device("meta"):
        features: Any = timm.create_model(backbone, features_only=True)
    if any(isinstance(part, BatchNormAct2d) for part in features.modules()):
        # transformers would put frozen norms in their place, without the activations.
        raise ArgumentValueError(
            f"{NAME}: got backbone={backbone!r}, whose BatchNorms hold activations, wanted one where they do not, e.g. "
            f"qna_vit_tiny or resnet50."
        )
    maps: dict[str, Any] = {"backbone": backbone, "out_indices": [len(features.feature_info) - 1]}
    options: dict[str, Any] = {
        "backbone_config": TimmBackboneConfig(**maps),
        "num_labels": num_classes,
        "num_queries": num_queries,
        "d_model": width,
        "encoder_layers": encoder_layers,
        "decoder_layers": decoder_layers,
        "encoder_ffn_dim": hidden,
        "decoder_ffn_dim": hidden,
        "encoder_attention_heads": num_heads,
        "decoder_attention_heads": num_heads,
        "dropout": dropout,
        "auxiliary_loss": True,
    }
    network: Any = DetrForObjectDetection(DetrConfig(**options))
    _initialise(network)
    if pretrained or backbone_weights is not None:
        source = timm.create_model(backbone, pretrained=pretrained)
        if backbone_weights is not None:
            load_backbone_weights(source, backbone_weights)
        encoder = next(part for part in network.modules() if isinstance(part, DetrConvEncoder))
        target, weights = getattr(encoder.model, "model", encoder.model), source.state_dict()
        target.load_state_dict({name: weights[name] for name in target.state_dict()})
    return Detr(network, score_thresh=score_thresh)


@torch.no_grad()
def _initialise(network: Any) -> None:
    """The start of DETR's own code: Xavier in the transformer, queries from N(0, 1). transformers draws all of them with a
    deviation of 0.02, from which narrow ones hardly learn and queries stay alike."""
    for part in (network.model.encoder, network.model.decoder):
        for weight in part.parameters():
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)
    nn.init.normal_(network.model.query_position_embeddings.weight)
    for part in (network.model.input_projection, network.class_labels_classifier, *network.bbox_predictor.layers):
        part.reset_parameters()
