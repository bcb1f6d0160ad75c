"""What is printed and written: every column, every unit, and no number where there is none."""

import csv
import json
import re
import subprocess

import pytest
import torch
from rich.console import Console

import nearsight
from nearsight.bench import machine, report
from nearsight.bench.driver import Result
from nearsight.bench.models import NetworkResult
from nearsight.bench.plot import plot_contests, plot_networks
from nearsight.errors import UserError

STAMP = machine.stamp(torch.device("cpu"))


def results():
    sizes = {"batch": 8, "height": 6, "width": 5, "channels": 16, "heads": 2, "window": 3}
    ours = Result("local_attention", "6x5x16", "nearsight torch", True, "float32", dict(sizes))
    ours.forward_ms, ours.total_ms, ours.forward_bytes, ours.total_bytes = 0.5, 1.25, 2**20, 3 * 2**20
    ours.floor_forward_ms, ours.floor_total_ms, ours.total_over_floor = 0.1, 0.25, 5.0
    peer = Result("local_attention", "6x5x16", "unfold", False, "float32", dict(sizes), note="NCHW")
    peer.forward_ms, peer.total_ms, peer.total_bytes = 5.0, 12.5, 30 * 2**20
    peer.ours_over_this_total, peer.ours_over_this_bytes, peer.floor_total_ms = 0.1, 0.1, 0.25
    wrong = Result("local_attention", "6x5x16", "nearsight fast", True, "float32", dict(sizes), "wrong")
    wrong.note, wrong.floor_total_ms = "wrong, not timed: output: error 1 at [0, 1]", 0.25
    return [ours, peer, wrong]


def networks():
    peer = NetworkResult(
        "resnet50", None, False, "bfloat16", 4, 64, 25_557_032, eager_images_s=100.0, eager_bytes=2**30
    )
    ours = NetworkResult("sasa_resnet50", "resnet50", True, "bfloat16", 4, 64, 18_000_000, eager_images_s=80.0)
    ours.compiled_images_s, ours.eager_over_peer, ours.compiled_bytes = 150.0, 0.8, 2**31
    return [peer, ours]


def shown(tables):
    console = Console(width=180, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in tables:
        console.print(table)
    return console.export_text()


def test_a_row_carries_where_and_when():
    row = report.rows_of("ops", results(), STAMP)[0]
    for column in ("date", "commit", "machine", "torch", "triton", "nearsight", "python", "dtype", "device", "threads"):
        assert row[column] is not None, column
    assert row["suite"] == "ops"
    assert (row["batch"], row["height"], row["width"], row["heads"], row["window"]) == (8, 6, 5, 2, 3)
    assert "sizes" not in row


def test_csv_and_json_say_the_same(tmp_path):
    rows = report.rows_of("ops", results(), STAMP)
    report.write_csv(tmp_path / "new" / "x.csv", rows)
    report.write_json(tmp_path / "x.json", rows)
    with (tmp_path / "new" / "x.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    again = json.loads((tmp_path / "x.json").read_text())
    assert list(read[0]) == list(again[0]) == list(rows[0])
    assert [r["contender"] for r in read] == [r["contender"] for r in again]
    assert float(read[0]["total_ms"]) == again[0]["total_ms"] == 1.25
    assert read[2]["total_ms"] == ""
    assert again[2]["total_ms"] is None


def test_the_table_of_few_contenders():
    text = shown(report.contest_tables(results(), "a title"))
    assert "a title" in text
    assert "│ local_attention 6x5x16 " in text
    floor = next(row for row in text.splitlines() if "floor: bytes ÷ bandwidth" in row)
    assert [cell.strip() for cell in floor.strip("│ ").split("│")][1:3] == ["0.100", "0.250"]
    line = next(row for row in text.splitlines() if "unfold" in row)
    assert [cell.strip() for cell in line.strip("│ ").split("│")] == [
        "unfold",
        "5.00",
        "12.5",
        "",
        "30.0",
        "",
        "0.10",
        "0.10",
        "NCHW",
    ]
    wrong = next(row for row in text.splitlines() if "nearsight fast" in row)
    assert "wrong, not timed: output: error 1 at [0, 1]" in wrong
    assert not any(cell.strip() for cell in wrong.strip("│ ").split("│")[1:-1])


def test_many_contenders_become_one_row_per_shape():
    many = []
    for index in range(9):
        for result in results():
            result.shape = f"{index}x5x16"
            many.append(result)
    text = shown(report.contest_tables(many, "a title"))
    assert "local_attention: a title" in text
    assert sum("12.5 (5.00) [0.10]" in line for line in text.splitlines()) == 9
    assert sum("0.250" in line for line in text.splitlines()) == 9
    assert "not timed" in text
    assert "ms forward+backward (forward) [ours ÷ it]" in text
    many[0].total_eager_ms = 7.5
    many[2].note = "wrong, not timed: " + "x" * 200
    text = shown(report.contest_tables(many, "a title"))
    assert sum("eager 7.50" in line for line in text.splitlines()) == 1
    assert text.count("x" * 20) < 5, "a long note is cut"


def test_noise_is_said():
    found = results()
    found[0].spread, found[1].spread = 0.05, 0.38
    text = shown(report.contest_tables(found, "t"))
    assert "NCHW; spread 38%" in text
    assert text.count("spread") == 1


def test_eager_times_have_their_column():
    found = results()
    found[0].total_eager_ms = 2.5
    text = shown(report.contest_tables(found, "t"))
    assert "eager ms" in text
    assert "2.50" in text


def test_the_table_of_networks():
    text = shown([report.network_table(networks(), "t")])
    assert "compiled img/s" in text
    line = next(row for row in text.splitlines() if "sasa_resnet50" in row)
    assert [cell.strip() for cell in line.strip("│ ").split("│")][:5] == [
        "sasa_resnet50",
        "18.0",
        "80.0",
        "150",
        "2.00",
    ]
    assert "replayed" not in text
    assert "compiled img/s" not in shown([report.network_table(networks()[:1], "t")])
    peer, ours = networks()
    ours.replayed_images_s, ours.replayed_over_peer = 171.0, 1.34
    text = shown([report.network_table([peer, ours], "t")])
    assert "replayed img/s" in text
    assert "171" in text
    assert "1.34" in text


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_plots_are_drawn(tmp_path, name):
    plot_contests(tmp_path / name, results(), "t")
    plot_networks(tmp_path / f"n{name}", networks(), "t")
    assert (tmp_path / name).stat().st_size > 5000
    assert (tmp_path / f"n{name}").stat().st_size > 5000


def test_a_plot_shows_what_was_timed(tmp_path):
    plot_contests(tmp_path / "a.svg", results(), "a title")
    text = (tmp_path / "a.svg").read_text()
    for word in ("unfold", "nearsight torch", "12.5", "a title", "floor"):
        assert f"<!-- {word}" in text or word in text, word
    assert "nearsight fast" not in text


def test_nothing_timed_is_nothing_to_plot(tmp_path):
    with pytest.raises(UserError, match="nothing to plot"):
        plot_contests(tmp_path / "a.png", results()[2:], "t")
    with pytest.raises(UserError, match="nothing to plot"):
        plot_networks(tmp_path / "a.png", [NetworkResult("resnet50", None, False, "float32", 1, 8)], "t")


def test_the_commit_can_be_given_and_need_not_be_known(monkeypatch):
    monkeypatch.setenv(machine.COMMIT_VARIABLE, "abc1234")
    assert machine.stamp(torch.device("cpu"))["commit"] == "abc1234"
    monkeypatch.delenv(machine.COMMIT_VARIABLE)
    monkeypatch.setenv("PATH", "")
    assert machine.stamp(torch.device("cpu"))["commit"] == "unknown"


def test_a_changed_checkout_has_a_plus(monkeypatch, tmp_path):
    def git(*words):
        names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *names, *words], cwd=tmp_path, check=True, capture_output=True)

    source = tmp_path / "__init__.py"
    source.write_text("one = 1\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.delenv(machine.COMMIT_VARIABLE, raising=False)
    monkeypatch.setattr(nearsight, "__file__", str(source))
    commit = machine.stamp(torch.device("cpu"))["commit"]
    assert re.fullmatch("[0-9a-f]{7,}", commit)
    source.write_text("one = 2\n")
    assert machine.stamp(torch.device("cpu"))["commit"] == f"{commit}+"
