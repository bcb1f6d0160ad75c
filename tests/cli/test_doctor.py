import json

import pytest

from nearsight.cli import doctor, extras, main
from nearsight.cli.extras import Need
from nearsight.ops import dispatch


def test_report_for_a_program(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is True
    assert {"core", "train", "viz", "detect", "export", "explore", "data", "dev"} == set(report["needs"])
    for op, devices in report["ops"].items():
        assert devices["cpu"]["backends"]["reference"] == "usable", op
        loops = devices["cpu"]["backends"].get("native") == "usable"
        assert devices["cpu"]["chosen"] == ("native" if loops else "torch")
    assert "native" in report["ops"]["qna"]["cpu"]["backends"]


def test_every_op_has_a_typical_call():
    assert set(doctor.TYPICAL) == set(dispatch._OPS)


def test_report_for_a_person(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("Machine", "Triton", "local_attention", "used", "complete", "scikit-learn"):
        assert word in out


def test_a_refusing_backend_says_why(capsys, monkeypatch):
    entry = dispatch._OPS["qna"]
    refusing = dispatch.Backend("triton", entry.backends[0].run, lambda call: "needs CUDA tensors, got cpu")
    monkeypatch.setitem(dispatch._OPS, "qna", entry._replace(backends=(refusing, *entry.backends[-1:])))
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)["ops"]["qna"]["cpu"]
    assert answer["chosen"] == "reference"
    assert answer["backends"]["triton"] == "needs CUDA tensors, got cpu"
    assert main(["doctor"]) == 0
    assert "needs CUDA tensors, got cpu" in capsys.readouterr().out


def test_what_is_missing_is_named_with_its_cure(capsys, monkeypatch):
    found = [Need("torch", None, ">=2.11", "2.15.0"), Need("gradio", "explore", ">=6.0", None)]
    monkeypatch.setattr(doctor, "needs", lambda: found)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "gradio>=6.0 (found none): pip install 'nearsight[explore]'" in out


def test_an_old_core_package_is_no_success(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "needs", lambda: [Need("torch", None, ">=2.11", "2.10.1")])
    assert main(["doctor"]) == 1
    assert "torch>=2.11 (found 2.10.1): pip install nearsight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("installed", "met"), [("2.11.0", True), ("2.12.0.dev1", True), ("2.10.9", False), (None, False)]
)
def test_a_need_is_met_by_its_version(installed, met):
    assert Need("torch", None, ">=2.11", installed).met is met


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("sklearn.datasets", "train"),
        ("matplotlib", "viz"),
        ("faster_coco_eval", "detect"),
        ("torch", None),
        ("no", None),
    ],
)
def test_the_extra_of_a_module(module, extra):
    assert extras.extra_of(module) == extra
