"""`nearsight explore`: what it opens, and what it answers to mistakes."""

import re
import shutil
import socket
import sys

import pytest

from nearsight import weights
from nearsight.cli import explore, main
from nearsight.errors import UserError
from nearsight.train.checkpoints import write_folder


@pytest.fixture
def served(monkeypatch):
    """Every call that would have shown a page."""
    from nearsight.viz.explore import serve

    calls = []
    monkeypatch.setattr(serve, "serve", lambda *args, **options: calls.append((args, options)))
    return calls


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_shows_named_networks_to_this_machine_alone(served, port, capsys):
    assert main(["explore", "sasa_resnet_nano", "expatt_resnet_nano", "sasa_resnet_nano", "--port", str(port)]) == 0
    ((subjects, host, at), options) = served[0]
    assert [subject.name for subject in subjects] == ["sasa_resnet_nano", "expatt_resnet_nano"]
    assert (host, at, options) == ("127.0.0.1", port, {"browser": False})
    assert not any(subject.trained for subject in subjects)
    assert {subject.note for subject in subjects} == {explore.UNTRAINED}
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"http://127.0.0.1:{port}: sasa_resnet_nano, expatt_resnet_nano. Stop with Ctrl+C.\n"


def test_says_what_another_host_means(served, port, capsys):
    assert main(["explore", "sasa_resnet_nano", "--port", str(port), "--host", "0.0.0.0", "--browser"]) == 0
    assert served[0][0][1:] == ("0.0.0.0", port)
    assert served[0][1] == {"browser": True}
    assert (
        capsys.readouterr().err.splitlines()[1]
        == "Everyone who can reach 0.0.0.0 can use this page: there is no password."
    )


def test_this_machine_by_another_name_is_this_machine(served, port, capsys):
    assert main(["explore", "sasa_resnet_nano", "--port", str(port), "--host", "localhost"]) == 0
    assert capsys.readouterr().err == f"http://localhost:{port}: sasa_resnet_nano. Stop with Ctrl+C.\n"


def test_a_note_does_not_tell_where_a_folder_lies(tmp_path):
    state = {
        "step": 1,
        "config": {"data": {"source": "folder:/home/somebody/flowers"}},
        "metrics": {"accuracy": 0.5, "images": 1200},
    }
    write_folder(tmp_path / "net", state, {})
    wanted = (
        "Trained on flowers: 50.0 % of 1,200 test images right. It names one of its 3 classes whatever it is shown."
    )
    assert explore.trained_note(str(tmp_path / "net"), 3) == wanted


def test_by_default_what_ships_and_the_other_mechanisms(monkeypatch):
    monkeypatch.setattr(weights, "names", list)
    assert explore.default_sources() == ["qna_vit_nano", "sasa_resnet_nano", "expatt_resnet_nano"]
    monkeypatch.setattr(weights, "DEFAULT", "qna_vit_nano.a")
    monkeypatch.setattr(weights, "names", lambda: ["expatt_resnet_nano.a", "qna_vit_nano.a", "resnet_nano.a"])
    assert explore.default_sources() == ["qna_vit_nano.a", "expatt_resnet_nano.a", "sasa_resnet_nano"]


def test_a_runs_network_is_prepared_as_it_was_trained(tmp_path):
    run = tmp_path / "a" / "digits"
    words = ["train", "digits/qna_nano", "--out", str(run), "--json", "train.device=cpu", "train.max_steps=2"]
    assert main(words) == 0
    other = tmp_path / "b" / "digits"
    shutil.copytree(run, other)
    first, second = explore.open_subjects([str(run), str(other)])
    assert (first.name, second.name) == ("digits", str(other))
    named = run.rename(run.with_name("sasa_resnet_nano"))
    pair = explore.open_subjects([str(named), "sasa_resnet_nano"])
    assert [(one.name, one.trained) for one in pair] == [("sasa_resnet_nano", True), ("sasa_resnet_nano (2)", False)]
    assert first.trained
    wanted = (
        r"Trained on digits: \d+\.\d % of 450 test images right\. It names one of its 10 classes whatever it is shown\."
    )
    assert re.fullmatch(wanted, first.note)
    assert list(first.classes) == [str(n) for n in range(10)]
    from nearsight.viz.explore.images import built_in
    from nearsight.viz.explore.views import look, predict

    seven = built_in()[9].image
    view = look(first, seven, first.layers[0], (0.5, 0.5))
    assert view.shown.shape == (16, 16)
    assert (view.shown.min(), view.shown.max()) == (0, pytest.approx(1, abs=0.1))
    assert sum(predict(first, seven).values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["qna_vit_nanno"], "no run, checkpoint or network 'qna_vit_nanno'. Did you mean 'qna_vit_nano'? Ours:"),
        (["runs/none"], "no run or checkpoint 'runs/none'."),
        (["resnet_nano"], "resnet_nano has no attention layer to look into; wanted a network with some"),
        (["sasa_resnet_nano", "--host", "not an address"], "--host: no such address 'not an address' ("),
    ],
)
def test_mistakes_are_one_line(served, port, capsys, words, said):
    assert main(["explore", *words, "--port", str(port)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"nearsight explore: {said}")
    assert err.count("\n") == 1
    assert served == []


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"^--port: {port} is in use on 127.0.0.1; choose another, as in --port"):
            explore.check_port("127.0.0.1", port)


def test_without_gradio_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "nearsight.viz.explore.serve", raising=False)
    assert main(["explore", "no_such_network"]) == 2
    wanted = "nearsight explore: needs gradio, which is not installed; run: pip install 'nearsight[explore]'.\n"
    assert capsys.readouterr().err == wanted
