import csv
import json
import os
import signal
import sys
import time

import pytest

from nearsight.bench import driver, layers, models, ops
from nearsight.bench.ops import OpShape
from nearsight.cli import main


@pytest.fixture
def tiny(monkeypatch):
    """The suites on maps of a few pixels."""
    local, qna, explicit = OpShape(6, 5, 16, 2, 3), OpShape(5, 6, 16, 4, 3), OpShape(6, 5, 8)
    monkeypatch.setattr(ops, "LOCAL_CPU", (local,))
    monkeypatch.setattr(ops, "QNA_CPU", (qna,))
    monkeypatch.setattr(ops, "EXPLICIT_CPU", (explicit,))
    shapes = {"LocalAttention2d": local, "QnA2d": qna, "AttentionStem2d": OpShape(9, 7, 16)}
    entries = [e._replace(on_cpu=(shapes.get(e.subject, OpShape(6, 5, 16)),)) for e in layers.LAYERS]
    monkeypatch.setattr(layers, "LAYERS", tuple(entries))
    monkeypatch.setattr(models, "NETWORKS", {"resnet_nano": None, "qna_vit_nano": "resnet_nano"})


def bench(*words):
    return main(["bench", *words, "--device", "cpu", "--quick", "--batch", "3"])


def test_ops(tiny, capsys, tmp_path):
    files = [tmp_path / name for name in ("x.csv", "x.json", "x.png")]
    assert bench("ops", "--csv", str(files[0]), "--json", str(files[1]), "--plot", str(files[2])) == 0
    out = capsys.readouterr().out
    for word in (
        "local_attention 6x5x16",
        "qna 5x6x16",
        "explicit_attention 6x5x8",
        "unfold",
        "depthwise",
        "dense map",
    ):
        assert word in out
    assert "wrong" not in out
    with files[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {k: "" if v is None else str(v) for k, v in row.items()} for row in json.loads(files[1].read_text())
    ]
    assert {row["batch"] for row in rows} == {"3"}
    assert all(row["commit"] and row["date"] and row["machine"] and row["torch"] for row in rows)
    timed = [row for row in rows if row["status"] == "ok"]
    assert all(float(row[column]) > 0 for row in timed for column in ("forward_ms", "total_ms", "total_bytes"))
    assert files[2].stat().st_size > 5000

    assert main(["bench", "ops", "--from", str(files[0])]) == 0
    again = capsys.readouterr().out
    columns = [line for line in out.splitlines() if "│" in line]
    assert columns, "nothing was shown"
    assert [line for line in again.splitlines() if "│" in line] == columns
    assert main(["bench", "ops", "--from", str(files[0]), "--filter", "qna", "--plot", str(tmp_path / "q.png")]) == 0
    out = capsys.readouterr().out
    assert "depthwise" in out
    assert "unfold" not in out
    assert (tmp_path / "q.png").stat().st_size > 5000


def test_ended_early_it_keeps_what_was_timed(tiny, capsys, tmp_path, monkeypatch):
    """By SIGTERM, as `timeout` sends it, and in the same way by Ctrl-C; what kills it leaves that, too."""
    kept, calls = driver._run, []

    def run(*args):
        calls.append(args)
        if len(calls) == 2:
            written.extend(tmp_path.glob("*.csv"))
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        return kept(*args)

    written = []
    monkeypatch.setattr(driver, "_run", run)
    before = signal.getsignal(signal.SIGTERM)
    assert bench("ops", "--csv", str(tmp_path / "x.csv")) == 130
    assert [path.name for path in written] == ["x.csv"]
    assert "stopped early" in capsys.readouterr().err
    with (tmp_path / "x.csv").open(newline="") as file:
        assert {row["subject"] for row in csv.DictReader(file)} == {"local_attention"}
    assert signal.getsignal(signal.SIGTERM) is before
    calls[:] = [None]
    assert bench("ops", "--csv", str(tmp_path / "y.csv")) == 130
    assert not (tmp_path / "y.csv").exists()


def test_models_ended_early_say_so(tiny, capsys, monkeypatch):
    def never(result, *args):
        raise KeyboardInterrupt if result.network == "qna_vit_nano" else ValueError("no")

    monkeypatch.setattr(models, "_eager", never)
    assert bench("models") == 130
    assert "not timed: stopped early" in " ".join(capsys.readouterr().out.split())


def test_layers(tiny, capsys):
    assert bench("layers") == 0
    out = capsys.readouterr().out
    for entry in layers.LAYERS:
        assert f"nearsight {entry.subject}" in out
    assert "wrong" not in out
    assert "failed" not in out


def test_models(tiny, capsys, tmp_path):
    file = tmp_path / "m.json"
    assert bench("models", "--size", "16", "--json", str(file), "--plot", str(tmp_path / "m.svg")) == 0
    assert "qna_vit_nano" in capsys.readouterr().out
    peer, ours = json.loads(file.read_text())
    assert (peer["suite"], peer["size"], peer["batch"]) == ("models", 16, 3)
    assert ours["eager_over_peer"] > 0


def test_rows_read_again_must_be_the_suites(tmp_path, capsys):
    source, other = "benchmarks/results/models-h200.csv", tmp_path / "x.csv"
    assert main(["bench", "models", "--from", source, "--filter", "resnet50"]) == 0
    assert "sasa_resnet50" in capsys.readouterr().out
    other.write_text("suite,network\nmodels,resnet50\n")
    for suite, file, reason in (
        ("ops", source, "other content"),
        ("models", other, "other content"),
        ("ops", "no", "no such"),
    ):
        assert main(["bench", suite, "--from", str(file)]) == 2
        assert f"({reason}" in capsys.readouterr().err
    assert main(["bench", "models", "--from", source, "--csv", "x.csv"]) == 2
    assert "wanted --plot alone" in capsys.readouterr().err
    assert main(["bench", "models", "--from", source, "--filter", "nothing"]) == 2
    assert "nothing matches --filter 'nothing'" in capsys.readouterr().err


def test_a_filter_leaves_the_rest_out(tiny, capsys):
    assert bench("ops", "--filter", "explicit dense") == 0
    out = capsys.readouterr().out
    assert "dense map" in out
    assert "nearsight torch" in out, "what the ratio is formed with stays"
    assert "local_attention" not in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["ops", "--filter", "natten"],
            "nothing matches --filter 'natten'; all words of a filter must occur in a name",
        ),
        (["models", "--filter", "vgg"], "nothing matches --filter 'vgg'"),
        (["ops", "--device", "tpu"], "got --device 'tpu', wanted cpu or cuda."),
        (["ops", "--dtype", "int8"], "got --dtype 'int8', wanted one of float32, bfloat16, float16."),
        (["ops", "--size", "64"], "got --size 64 for ops, wanted it for models alone; choose shapes with --filter."),
        (["ops", "--plot", "x.xyz"], "got --plot 'x.xyz', wanted a name that ends in .png, .svg or .pdf."),
        (["nets"], "'nets' is not one of 'ops', 'layers', 'models'"),
        (["ops", "--batch", "0"], "--batch"),
    ],
)
def test_a_mistake_is_one_line(tiny, capsys, words, line):
    assert main(["bench", *words]) == 2
    captured = capsys.readouterr()
    assert line in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_no_cuda_is_said(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "ops", "--device", "cuda"]) == 2
    assert "torch finds no CUDA device here" in capsys.readouterr().err


def test_a_folder_is_no_file(tiny, capsys, tmp_path):
    assert bench("ops", "--csv", str(tmp_path)) == 2
    assert "wanted the name of a file to write" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--csv", "--json", "--plot"])
def test_an_impossible_folder_is_said_before_the_timing(monkeypatch, capsys, tmp_path, option):
    monkeypatch.setattr("nearsight.cli.bench.run_suite", lambda *args, **options: pytest.fail("timed"))
    (tmp_path / "file").touch()
    assert main(["bench", "ops", option, str(tmp_path / "file" / "rows.png")]) == 2
    assert "nearsight bench: cannot open" in capsys.readouterr().err


def test_what_a_plot_needs_is_said_before_the_timing(tiny, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("nearsight.cli.bench.run_suite", lambda *args, **options: pytest.fail("timed"))
    assert main(["bench", "ops", "--plot", "x.png"]) == 2
    assert "needs matplotlib, which is not installed" in capsys.readouterr().err


def test_help_has_examples(capsys):
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert "nearsight bench ops --quick --filter local" in out
