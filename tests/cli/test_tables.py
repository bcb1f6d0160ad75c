import json

from nearsight.cli import main
from nearsight.models.published import TABLES


def test_published_beside_ours(capsys):
    assert main(["tables", "sasa"]) == 0
    out = capsys.readouterr().out
    lines = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]]
        for line in out.splitlines()
        if "│" in line
    }
    assert lines["ResNet-26 full attention"] == ["10.3", "10.324", "=", "4.7", "4.719", "=", "4.614", "74.8"]
    assert lines["ResNet-38 conv-stem + attention"][:3] == ["14.1", "14.173", "+0.073¹"]
    assert "G: a multiply and an add as two, positions as q·(k + r), 5 per softmax logit" in out
    assert "¹ The printed number looks truncated" in out
    assert "QnA-ViT" not in out


def test_every_footnote_mark_has_its_footnote(capsys):
    assert main(["tables"]) == 0
    for block in capsys.readouterr().out.split("\n\n"):
        for mark in "¹²³⁴⁵⁶":
            assert (f"{mark} │" in block) == any(line.startswith(f"{mark} ") for line in block.splitlines()), block


def test_for_a_program(capsys):
    assert main(["tables", "qna", "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert [table["title"] for table in tables] == [table.title for table in TABLES["qna"]]
    row = tables[0]["rows"][0]
    assert row["ours"]["parameters"] == 15715560
    assert row["published"]["flops"] == "2.5"
    assert row["cells"]["params"] == {"difference": 0.0, "agrees": True, "note": None}
    assert row["cells"]["flops"]["note"] in tables[0]["notes"]


def test_an_unknown_paper(capsys):
    assert main(["tables", "sassa"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("nearsight tables: no tables of 'sassa'. Did you mean 'sasa'? There are: sasa, qna")
