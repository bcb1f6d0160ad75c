"""The published tables, cell by cell."""

import pytest
import timm
import torch

from nearsight.models.flops import count_flops, count_parameters
from nearsight.models.listing import model_names
from nearsight.models.published import PAPERS, TABLES, Cell, compare, paper_of

ALL = [(name, table) for name, tables in TABLES.items() for table in tables]


def rows_of(paper, index=0):
    return {c.row.label: c for c in compare(TABLES[paper][index])}


@pytest.mark.parametrize(("paper", "table"), ALL, ids=[table.title for _, table in ALL])
def test_every_cell_agrees_or_says_why(paper, table):
    for comparison in compare(table):
        for name, cell in comparison.cells.items():
            where = f"{comparison.row.label}, {name}: published {cell.published}, ours {cell.ours}"
            assert cell.agrees != bool(cell.note), where
        assert set(comparison.row.notes) <= set(comparison.cells)
        for note in comparison.row.notes.values():
            assert table.notes[note]


@pytest.mark.parametrize(("paper", "table"), ALL, ids=[table.title for _, table in ALL])
def test_every_row_is_a_call(paper, table):
    assert table.source
    for row in table.rows:
        assert row.params or row.flops or row.results, row.label


def test_sasa_flops_of_all_nine_cells_within_their_rounding():
    cells = {label: c.cells["flops"] for label, c in rows_of("sasa").items()}
    assert len(cells) == 9
    assert all(cell.agrees and cell.note is None for cell in cells.values())


@pytest.mark.parametrize(
    ("label", "millions"),
    [
        ("ResNet-26 baseline", 13.697),
        ("ResNet-38 baseline", 19.627),
        ("ResNet-50 baseline", 25.557),
        ("ResNet-26 conv-stem + attention", 10.331),
        ("ResNet-38 conv-stem + attention", 14.173),
        ("ResNet-50 conv-stem + attention", 18.016),
    ],
)
def test_sasa_parameters(label, millions):
    assert rows_of("sasa")[label].parameters / 1e6 == pytest.approx(millions, abs=0.001)


@pytest.mark.parametrize(
    ("name", "parameters", "giga"),
    [
        ("qna_vit_tiny", 15_715_560, 2.42),
        ("qna_vit_tiny_7x7", 15_753_960, 2.51),
        ("qna_vit_small", 24_971_560, 4.35),
        ("qna_vit_base", 55_670_008, 9.51),
    ],
)
def test_qna_as_the_authors_code_counts(name, parameters, giga):
    row = rows_of("qna")[name]
    assert row.parameters == parameters
    assert round(row.flops["qna"] / 1e9, 2) == giga


@pytest.mark.parametrize(
    ("label", "millions"),
    [
        ("Gaussian ExpAtt ResNet-34", 17.317),
        ("Gaussian ExpAtt ResNet-50", 24.618),
        ("Gaussian ExpAtt ResNet-101", 42.785),
        ("Gaussian ExpAtt ResNet-152", 57.732),
        ("AA ResNet-50", 25.786),
        ("AA ResNet-101", 45.363),
        ("AA ResNet-152", 61.562),
    ],
)
def test_expatt_and_aa_parameters(label, millions):
    assert rows_of("expatt")[label].parameters / 1e6 == pytest.approx(millions, abs=0.002)


@pytest.mark.parametrize(("depth", "printed"), [(50, "24.5"), (101, "42.7"), (152, "57.6")])
def test_the_wider_attention_that_gives_the_printed_counts(depth, printed):
    with torch.device("meta"):
        network = timm.create_model(f"expatt_resnet{depth}", dv=(None, None, None, 56))
    assert Cell(printed, count_parameters(network) / 1e6, None).agrees


def test_expatt_flops_agree_where_the_paper_counted_itself():
    ours = {label: c.cells["flops"] for label, c in rows_of("expatt").items() if "ExpAtt" in label}
    assert len(ours) == 4
    assert all(cell.agrees for cell in ours.values())


def test_eca_is_printed_in_other_units():
    for label, c in rows_of("expatt").items():
        if label.startswith("ECA"):
            assert Cell(c.row.params, c.parameters / 2**20, None).agrees, label


def test_the_first_convolution_that_gives_cifars_flops():
    with torch.device("meta"):
        networks = {
            "1.31": timm.create_model("expatt_resnet50_cifar", num_classes=100, stem_kernel=3, stages="cccc"),
            "1.45": timm.create_model("aa_resnet50_cifar", num_classes=100, stem_kernel=3),
            "1.25": timm.create_model("expatt_resnet50_cifar", num_classes=100, stem_kernel=3),
        }
    for printed, network in networks.items():
        assert Cell(printed, count_flops(network, 32, "expatt") / 1e9, None).agrees, printed


def test_table_4_has_its_twelve_networks():
    rows = next(table for table in TABLES["qna"] if "Table 4" in table.source).rows
    assert len({str(row.options) for row in rows}) == 12


def test_every_family_has_a_paper():
    for name in model_names():
        assert paper_of(name) in (*PAPERS.values(), None)
        assert (paper_of(name) is None) == name.startswith("resnet"), name


@pytest.mark.parametrize(
    ("published", "ours", "agrees"),
    [
        ("4.7", 4.7499, True),
        ("4.7", 4.65, True),
        ("4.7", 4.751, False),
        ("4.70", 4.7051, False),
        ("16", 15.6, True),
        ("15.715560", 15.71556, True),
        ("15.715560", 15.715561, False),
    ],
)
def test_agreement_is_to_the_printed_digit(published, ours, agrees):
    assert Cell(published, ours, None).agrees is agrees
