"""The tables of "Learned Queries for Efficient Local Attention" that name a network."""

from __future__ import annotations

from nearsight.models.published.schema import Row, Table

__all__ = ["TABLES"]

NOTES = {
    "rule": "The paper does not say how it counts; ours is what the authors' released code computes",
    "table4": "The networks of this table cannot be rebuilt to the digit from the released code: no match is claimed",
}


def _main() -> tuple[Row, ...]:
    published = {
        "qna_vit_tiny": ("15.715560", "2.5", "81.7"),
        "qna_vit_tiny_7x7": ("15.753960", "2.6", "82.0"),
        "qna_vit_small": ("24.971560", "4.4", "83.2"),
        "qna_vit_base": ("55.670008", "9.7", "83.9"),
    }
    return tuple(
        Row(name, name, {}, params, flops, {"top-1": top1}, {"flops": "rule"})
        for name, (params, flops, top1) in published.items()
    )


def _block_counts() -> tuple[Row, ...]:
    published = (
        ((1, 1, 4, 0), (3, 3, 3, 2), 14, "16.62", "3.200", "81.70"),
        ((2, 2, 4, 0), (2, 2, 3, 2), 14, "16.51", "2.909", "81.74"),
        ((3, 3, 4, 0), (1, 1, 3, 2), 14, "16.40", "2.875", "81.86"),
        ((4, 4, 4, 0), (0, 0, 3, 2), 14, "16.30", "2.584", "81.83"),
        ((4, 4, 7, 0), (0, 0, 0, 2), 14, "16.00", "2.631", "80.8"),
        ((4, 4, 5, 0), (0, 0, 2, 2), 14, "16.25", "2.698", "81.30"),
        ((4, 4, 3, 0), (0, 0, 4, 2), 14, "16.40", "2.628", "81.9"),
        ((4, 4, 1, 0), (0, 0, 6, 2), 14, "16.55", "2.714", "81.9"),
        ((1, 1, 1, 0), (2, 2, 6, 2), 7, "16.38", "2.568", "80.0"),
        ((2, 2, 2, 0), (1, 1, 5, 2), 7, "16.3", "2.491", "80.6"),
        ((2, 2, 3, 0), (1, 1, 4, 2), 7, "16.23", "2.471", "80.7"),
        ((2, 2, 4, 0), (1, 1, 3, 2), 7, "16.16", "2.450", "80.8"),
    )
    return tuple(
        Row(
            f"QnA {list(qna)}, SA {list(sa)}, window {window}",
            "qna_vit_tiny",
            {"qna_depths": qna, "sa_depths": sa, "sa_window": (window, window, window, 7)},
            params,
            flops,
            {"top-1": top1},
            {"params": "table4", "flops": "table4"},
        )
        for qna, sa, window, params, flops, top1 in published
    )


def _heads_alone() -> tuple[Row, ...]:
    published = (
        ((2, 2, 2, 2), (2, 2, 2, 2), "68.33"),
        ((2, 2, 2, 2), (4, 4, 4, 4), "69.05"),
        ((2, 2, 2, 2), (8, 8, 8, 8), "69.98"),
        ((2, 2, 2, 2), (2, 4, 8, 16), "70.08"),
        ((2, 2, 2, 2), (4, 8, 16, 32), "70.54"),
        ((2, 2, 2, 2), (8, 16, 32, 64), "71.12"),
        ((3, 4, 6, 3), (2, 4, 8, 16), "72.66"),
        ((3, 4, 6, 3), (4, 8, 16, 32), "72.82"),
        ((3, 4, 6, 3), (8, 16, 32, 64), "73.02"),
    )
    return tuple(
        Row(
            f"QnA {list(depths)}, heads {list(heads)}",
            "qna_vit_tiny",
            {"qna_depths": depths, "sa_depths": (0, 0, 0, 0), "qna_heads": heads},
            results={"top-1, 90 epochs": top1},
        )
        for depths, heads, top1 in published
    )


def _heads_both() -> tuple[Row, ...]:
    published = (
        ((2, 4, 8, 16), (2, 4, 8, 16), "90", "78.17"),
        ((4, 8, 16, 32), (4, 8, 16, 32), "90", "79.24"),
        ((8, 16, 32, 64), (8, 16, 32, 64), "90", "79.34"),
        ((8, 16, 32, 64), (2, 4, 8, 16), "90", "79.31"),
        ((8, 16, 32, 64), (4, 8, 16, 32), "90", "79.53"),
        ((8, 16, 32, 64), (2, 4, 8, 16), "300", "81.5"),
        ((8, 16, 32, 64), (4, 8, 16, 32), "300", "81.49"),
    )
    return tuple(
        Row(
            f"QnA heads {list(qna)}, SA heads {list(sa)}",
            "qna_vit_tiny",
            {"qna_depths": (1, 2, 3, 0), "sa_depths": (1, 1, 3, 2), "qna_heads": qna, "sa_heads": sa},
            results={"epochs": epochs, "top-1": top1},
        )
        for qna, sa, epochs, top1 in published
    )


def _autoencoders() -> tuple[Row, ...]:
    down = {"qna": "LN-QnA", "conv": "ConvS2-IN", "pool": "Conv-IN-Max"}
    up = {"qna": "LN-UQnA", "bilinear": "Bilinear-Conv-IN", "transposed": "ConvTranspose-IN"}
    used = {("qna", "qna"): "QnA", ("pool", "bilinear"): "baseline", ("pool", "transposed"): "baseline"}
    return tuple(
        Row(
            f"{down[encoder]}, {up[decoder]}",
            "qna_autoencoder",
            {"encoder": encoder, "decoder": decoder},
            results={"as": used.get((encoder, decoder), "–")},
        )
        for encoder in down
        for decoder in up
    )


TABLES = (
    Table(
        "QnA-ViT on ImageNet, 224 px",
        "QnA, ImageNet table; parameters as the authors' code counts them",
        "qna",
        _main(),
        NOTES,
    ),
    Table("QnA-ViT: heads, QnA blocks alone", "QnA, supplement, Table 2", "qna", _heads_alone()),
    Table(
        "QnA-ViT: heads of QnA and SA blocks ([1,2,3,0], [1,1,3,2])", "QnA, supplement, Table 3", "qna", _heads_both()
    ),
    Table("QnA-ViT: how much QnA?", "QnA, supplement, Table 4", "qna", _block_counts(), NOTES),
    Table(
        "Auto-encoders, five layers down and five up, 256 px",
        "QnA, supplement, section 7",
        "qna",
        _autoencoders(),
        remark="The supplement prints neither widths nor counts; ours have 32, 64, 128, 256, 512 channels",
    ),
)
