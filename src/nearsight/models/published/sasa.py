"""The tables of "Stand-Alone Self-Attention in Vision Models" that name parameters or FLOPs."""

from __future__ import annotations

from nearsight.models.published.schema import Row, Table

__all__ = ["TABLES"]

NOTES = {
    "truncated": "The printed number looks truncated instead of rounded; the paper's other rows follow from the same layer",
}


def _imagenet() -> tuple[Row, ...]:
    published = {
        "baseline": (("13.7", "4.7", "74.5"), ("19.6", "6.5", "76.2"), ("25.6", "8.2", "76.9")),
        "conv-stem + attention": (("10.3", "4.5", "75.8"), ("14.1", "5.7", "77.1"), ("18.0", "7.0", "77.4")),
        "full attention": (("10.3", "4.7", "74.8"), ("14.1", "6.0", "76.9"), ("18.0", "7.2", "77.6")),
    }
    rows = []
    for kind, cells in published.items():
        for depth, (params, flops, top1) in zip((26, 38, 50), cells, strict=True):
            rows.append(
                Row(
                    f"ResNet-{depth} {kind}",
                    f"sasa_resnet{depth}" if kind == "full attention" else f"sasa_resnet{depth}_convstem",
                    {"stages": "cccc"} if kind == "baseline" else {},
                    params,
                    flops,
                    {"top-1": top1},
                    {"params": "truncated"} if params == "14.1" else {},
                )
            )
    return tuple(rows)


def _stages() -> tuple[Row, ...]:
    published = {
        "aaaa": ("18.0", "80.2"),
        "caaa": ("18.1", "80.7"),
        "ccaa": ("18.5", "80.7"),
        "ccca": ("20.8", "80.2"),
        "cccc": ("25.6", "79.5"),
        "accc": ("25.5", "79.7"),
        "aacc": ("25.0", "79.6"),
        "aaac": ("22.7", "79.9"),
    }
    return tuple(
        Row(
            "".join(str(i + 1) for i, kind in enumerate(stages) if kind == "a") or "none",
            "sasa_resnet50_convstem",
            {"stages": stages},
            params,
            None,
            {"top-1": top1},
            {"params": "truncated"} if stages == "aacc" else {},
        )
        for stages, (params, top1) in published.items()
    )


def _windows() -> tuple[Row, ...]:
    published = {3: ("6.6", "76.4"), 5: ("6.7", "77.2"), 7: ("7.0", "77.4"), 9: ("7.3", "77.7"), 11: ("7.7", "77.6")}
    return tuple(
        Row(f"{k}×{k}", "sasa_resnet50_convstem", {"window": k}, None, flops, {"top-1": top1})
        for k, (flops, top1) in published.items()
    )


TABLES = (
    Table("SASA on ImageNet, 224 px", "SASA, ImageNet table", "sasa", _imagenet(), NOTES),
    Table(
        "SASA: stages with attention (ResNet-50, convolution stem)",
        "SASA, ablation of stages",
        "sasa",
        _stages(),
        NOTES,
    ),
    Table("SASA: spatial extent (ResNet-50, convolution stem)", "SASA, ablation of k", "sasa", _windows()),
    Table(
        "SASA: what the logits are made of (ResNet-50, convolution stem)",
        "SASA, ablations of positions and content",
        "sasa",
        (
            Row("no position", "sasa_resnet50_convstem", {"position": "none"}, results={"top-1": "77.6"}),
            Row("absolute position", "sasa_resnet50_convstem", {"position": "absolute"}, results={"top-1": "78.2"}),
            Row("relative position", "sasa_resnet50_convstem", {"position": "relative"}, results={"top-1": "80.2"}),
            Row(
                "q·r only",
                "sasa_resnet50_convstem",
                {"content": False},
                "16.7",
                results={"top-1": "76.9"},
                notes={"params": "truncated"},
            ),
            Row("q·k + q·r", "sasa_resnet50_convstem", {}, "18.0", results={"top-1": "77.4"}),
        ),
        NOTES,
        remark="The first three accuracies were measured on 4 % of the training set: compare them only with each other",
    ),
    Table(
        "SASA: the values of the attention stem (ResNet-50)",
        "SASA, ablation of the stem",
        "sasa",
        (
            Row("stand-alone", "sasa_resnet50", {"stem_values": "plain"}, results={"top-1": "76.2"}),
            Row("spatial convolution", "sasa_resnet50", {"stem_values": "conv"}, results={"top-1": "77.2"}),
            Row("spatially aware", "sasa_resnet50", {"stem_values": "mixture"}, results={"top-1": "77.6"}),
        ),
    ),
)
