import json

from nearsight.cli import main
from nearsight.models.listing import model_names


def test_one_network_for_a_person(capsys):
    assert main(["models", "sasa_resnet50_conv*"]) == 0
    out = capsys.readouterr().out
    for word in ("sasa_resnet50_convstem", "18.016", "6.966", "224 × 224", "1000", "arxiv.org/abs/1906.05909"):
        assert word in out
    assert "FLOPs: matrix products and convolutions" in out


def test_networks_for_a_program(capsys):
    assert main(["models", "*nano", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == model_names("*nano")
    baseline = next(row for row in rows if row["name"] == "resnet_nano")
    assert baseline["paper"] is None
    assert baseline["input_size"] == [3, 32, 32]
    assert baseline["convention"] == "matmul"
    assert 0 < baseline["parameters"] < 1e6


def test_a_part_of_a_name_is_enough(capsys):
    assert main(["models", "tiny_7x7", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["qna_vit_tiny_7x7"]


def test_nothing_matches(capsys):
    assert main(["models", "sasa_resnet5O"]) == 2
    wanted = (
        "nearsight models: no network matches 'sasa_resnet5O'. Did you mean 'sasa_resnet50'? All: nearsight models.\n"
    )
    assert capsys.readouterr() == ("", wanted)


def test_timms_own_networks_are_not_listed():
    assert not {"resnet50", "vit_base_patch16_224"} & set(model_names())
