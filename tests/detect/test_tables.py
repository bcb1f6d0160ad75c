"""The published detection table, cell by cell."""

import json

import pytest

from nearsight.cli import main
from nearsight.detect.dense import dense_retinanet
from nearsight.models.published import compare
from nearsight.models.published.detection import TABLES

(TABLE,) = TABLES


@pytest.fixture(scope="module")
def rows():
    return compare(TABLE, dense_retinanet)


def test_every_cell_agrees_or_says_why(rows):
    assert len(rows) == 5
    for comparison in rows:
        for name, cell in comparison.cells.items():
            where = f"{comparison.row.label}, {name}: published {cell.published}, ours {cell.ours}"
            assert cell.agrees != bool(cell.note), where
            assert cell.note is None or TABLE.notes[cell.note]


def test_convolution_heads_to_the_printed_digit(rows):
    conv = [c for c in rows if c.row.label.startswith("convolution")]
    assert len(conv) == 3
    for comparison in conv:
        assert abs(comparison.cells["params"].difference) <= 0.05
        assert abs(comparison.flops["matmul"] / 1e9 - float(comparison.row.flops)) < 0.8


def test_the_literal_reading_of_the_attention_heads(rows):
    """Ten attentions of the heads, five of the pyramid, and two pointwise convolutions, by hand."""
    by_label = {c.row.label: c.parameters for c in rows}
    attention = 3 * 256**2 + 2 * 7 * 16
    pointwise = 256 * 6 * (91 + 4) + 6 * (91 + 4)
    convolution = 9 * 256**2 + 256
    predict = 9 * 256 * 6 * (91 + 4) + 6 * (91 + 4)
    difference = (5 + 10) * attention + pointwise - (5 + 8) * convolution - predict
    for backbone in ("conv-stem + attention", "full attention"):
        assert by_label[f"attention; {backbone}"] - by_label[f"convolution; {backbone}"] == difference


def test_the_program_prints_both(capsys):
    assert main(["tables", "detection"]) == 0
    out = capsys.readouterr().out
    lines = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]]
        for line in out.splitlines()
        if "│" in line
    }
    assert lines["convolution"][:3] == ["33.4", "33.411", "="]
    assert lines["attention; full attention"][:2] == ["22.0", "19.976"]
    assert "nothing was added to meet its number" in out.replace("\n", " ")
    assert main(["tables", "detection", "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    assert table["rows"][0]["model"] == "retinanet50"
