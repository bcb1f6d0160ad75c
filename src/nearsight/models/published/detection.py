"""The detection table of "Stand-Alone Self-Attention in Vision Models". `nearsight.detect` builds its networks, not timm."""

from __future__ import annotations

from nearsight.models.published.schema import Row, Table

__all__ = ["TABLES"]

# COCO's category numbers end at 90; an output for each from 0 on, as torchvision has them.
CLASSES = 91
NOTES = {
    "rule": "The paper states neither the image size, nor the anchors, nor the outputs per anchor, nor how it counts detectors; "
    "90 outputs instead of 91 would take off 0.24 G (and 0.014 M)",
    "heads": "The paper's text gives no more than this: every 3×3 convolution of pyramid and heads as an attention of width 256 "
    "without an output projection, and one pointwise convolution at the end of each head. What the printed network "
    "has beyond that is not known, and nothing was added to meet its number",
}


def _rows() -> tuple[Row, ...]:
    published = {
        "convolution": ("retinanet50", "33.4", "182", "36.5", None, "rule"),
        "convolution; conv-stem + attention": (
            "sasa_retinanet50_convstem_convheads",
            "25.9",
            "173",
            "36.8",
            None,
            None,
        ),
        "convolution; full attention": ("sasa_retinanet50_convheads", "25.9", "173", "36.2", None, "rule"),
        "attention; conv-stem + attention": ("sasa_retinanet50_convstem", "22.0", "111", "36.6", "heads", "heads"),
        "attention; full attention": ("sasa_retinanet50", "22.0", "110", "36.6", "heads", "heads"),
    }
    return tuple(
        Row(
            label,
            model,
            {"num_classes": CLASSES},
            params,
            flops,
            {"mAP": precision},
            {cell: why for cell, why in (("params", of_params), ("flops", of_flops)) if why},
        )
        for label, (model, params, flops, precision, of_params, of_flops) in published.items()
    )


TABLES = (
    Table(
        "SASA on COCO: RetinaNet, ResNet-50, 640×640 px",
        "SASA, detection table",
        "sasa",
        _rows(),
        NOTES,
        size=(640, 640),
        remark="The first word says what pyramid and heads are made of, the rest the backbone; 6 anchors per place, five "
        "levels, P6 made from P5",
    ),
)
