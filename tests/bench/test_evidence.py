"""The runner and the page behind docs/results.md: rows that exist, orderly ends, verdicts computed from runs alone."""

from __future__ import annotations

import fnmatch
import importlib
import json
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nearsight import recipes
from nearsight.train.config import given
from nearsight.train.tasks import load_config
from nearsight.train.tasks.classify import create_network

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("benchmarks/ is not part of a source distribution", allow_module_level=True)
sys.path.insert(0, str(ROOT / "benchmarks"))
evidence, maps, report, rows = (
    importlib.import_module(name) for name in ("evidence", "evidence_maps", "evidence_report", "evidence_rows")
)

TABLES = rows.read_tables()
ROWS = [row for table in TABLES.values() for row in table.rows.values()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_rows_are_valid_runs(row: Any) -> None:
    """Each row's recipe is shipped and takes its changes; within a table only what the row changes differs."""
    assert row.recipe in recipes.names()
    config = load_config(row.recipe, list(row.set))
    assert config.train.eval_every > config.schedule.epochs, "the test set is looked at once"
    if row.table in ("sasa", "sasa40", "expatt", "qna"):
        other = next(iter(TABLES[row.table].rows.values()))
        first: Any = load_config(other.recipe, list(other.set))
        for section in ("schedule", "loss", "train", "data"):
            assert getattr(config, section) == getattr(first, section), section
        # Attention has weights that convolution has not, and they may have a rate and a decay of their own.
        free: dict[str, Any] = {"lr_scale": {}, "decay_scale": {}}
        assert config.optimizer.model_copy(update=free) == first.optimizer.model_copy(update=free)
    scales = given({**config.optimizer.lr_scale, **config.optimizer.decay_scale})
    assert set(scales) <= {"*.rel_*", "*.qkv.weight", "*.key_weight", "*.query", "*.tap_scale_weight"}
    if config.task == "classify" and scales:
        with torch.device("meta"):
            names = [name for name, _ in create_network(config.model, num_classes=10, in_chans=3).named_parameters()]
        for pattern in scales:
            assert fnmatch.filter(names, pattern), pattern


@pytest.mark.parametrize("key", ["detect/bccd", "faces/qna"])
def test_rows_of_other_tasks_know_their_networks(key: str) -> None:
    (row,) = rows.chosen([key])
    facts = evidence.facts(row)
    assert facts["parameters"] > 1_000_000
    assert (facts["macs"] is None) == (row.table == "detect")
    assert row.at("X").endswith(":X")
    assert " data.source=" in row.command(0)


def test_claims_name_rows() -> None:
    for table in TABLES.values():
        for claim in table.claims:
            assert set(claim.order) <= set(table.rows)
            assert len(claim.order) > 1


def test_networks_of_the_rows_are_what_they_say() -> None:
    rows = {**TABLES["sasa"].rows, **TABLES["sasa_ablations"].rows}
    facts = {key: evidence.facts(rows[key]) for key in ("conv", "attention", "positions_only")}
    assert facts["attention"]["parameters"] < 0.75 * facts["conv"]["parameters"]
    assert facts["positions_only"]["parameters"] < facts["attention"]["parameters"]
    assert facts["conv"]["split"] == "test"
    assert evidence.facts(TABLES["gap"].rows["conv"])["split"] == "held out: 10% of train"
    changed = evidence.facts(rows["attention"], ["model.options.window=3", "schedule.epochs=5"])
    assert changed["parameters"] < facts["attention"]["parameters"]
    assert changed["epochs"] == 5


def put(out: Path, row: str, accuracy: float | None, seed: int = 0, **more: Any) -> None:
    table, name = row.split("/")
    result = {"row": row, "seed": seed, "ok": accuracy is not None, "command": TABLES[table].rows[name].command(seed)}
    result |= {
        "machine": "A GPU",
        "torch": "2",
        "commit": "abc",
        "date": "2026-01-01",
        "images": 10000,
        "split": "test",
    }
    result |= {
        "parameters": 2_000_000,
        "macs": 3_000_000_000,
        "seconds": 60.0,
        "steps": 100,
        "batch": 512,
        "epochs": 12,
    }
    result |= {"reason": "the loss is not finite at step 7"} if accuracy is None else {"accuracy": accuracy}
    rows.write_result(out / table / f"{name}-s{seed}.jsonl", {**result, **more})


@pytest.mark.parametrize(
    ("attention", "said"),
    [(0.955, "agrees"), (0.9455, "too close to call"), (0.90, "**does not agree**"), (None, "not run yet")],
)
def test_verdicts_follow_from_the_runs(tmp_path: Path, attention: float | None, said: str) -> None:
    for seed, accuracy in enumerate((0.944, 0.945, 0.946)):
        put(tmp_path, "sasa/conv", accuracy, seed)
    put(tmp_path, "sasa/attention", attention)
    table = TABLES["sasa"]
    scores = report.scores_of(table, tmp_path)
    assert report.verdict(table.claims[0], scores)[1] == said
    text = report.section(table, tmp_path)
    assert "94.50 ± 0.10 (3 seeds)" in text
    assert ("Runs that did not end well" in text) == (attention is None)
    assert ("| no result, see below |" in text) == (attention is None)
    assert (f"| {said} |" in text) == (attention is not None), "a claim nobody can judge yet has no line"


def test_the_page_begins_with_every_verdict(tmp_path: Path) -> None:
    assert report.in_short(TABLES, tmp_path) == ""
    for table in ("sasa", "sasa40"):  # the second is about our settings, not about the paper
        put(tmp_path, f"{table}/conv", 0.90)
        put(tmp_path, f"{table}/attention", 0.95)
    put(tmp_path, "faces/qna", 0.0, l1=0.02, psnr=28.0, epochs=20)
    lines = report.in_short(TABLES, tmp_path).splitlines()[4:]
    link = "[Stand-alone local self-attention (SASA)](#stand-alone-local-self-attention-sasa)"
    assert lines[0] == f"| {link} | attention is ahead of convolution | 74.5 < 75.8 | 90.00 → 95.00 | agrees |"
    assert [line.startswith("|  | ") for line in lines] == [False, True], (
        "of four claims two speak of rows without a run"
    )
    text = report.page(tmp_path, {})
    assert (
        text.index("## In short") < text.index("## The papers' claims") < text.index("## How the settings were chosen")
    )
    assert text.index("## How the settings") < text.index("### SASA, a first schedule")


def test_what_nobody_has_run_is_named_and_has_no_line(tmp_path: Path) -> None:
    table = TABLES["sasa_ablations"]
    assert "|" not in report.section(table, tmp_path)
    put(tmp_path, "sasa_ablations/attention", 0.95)
    rows.write_result(
        tmp_path / "speed" / "sasa_ablations-late.jsonl", {"ok": True, "images_per_s": 1024.0, "peak_memory_bytes": 1}
    )
    text = report.section(table, tmp_path)
    (line,) = [line for line in text.splitlines() if line.startswith("Not run yet: ")]
    assert line.count("; ") == len(table.rows) - 3
    assert "absolute (absolute positions); none (no positions)" in line
    assert "attention (" not in line
    assert "| attention in stages 3 and 4 only | not run yet | – | – | – | 1,024 |" in text


def test_other_tasks_show_their_own_numbers(tmp_path: Path) -> None:
    put(tmp_path, "faces/qna", 0.0, l1=0.02345, psnr=28.765, epochs=20, macs=150_000_000)
    text = report.section(TABLES["faces"], tmp_path)
    assert "|  | L1 | PSNR, dB | params, M | mult-adds, G | epochs | s |" in text
    assert "| QnA down and up | 0.0234 | 28.77 | 2.00 | 0.150 | 20 | 60 |" in text
    assert "→ 0.0234 in 60 s" in text
    (line,) = [line for line in text.splitlines() if line.startswith("Not run yet: ")]
    assert line.count("; ") == len(TABLES["faces"].rows) - 2 + sum(
        ";" in row.says for row in TABLES["faces"].rows.values()
    )
    put(tmp_path, "detect/bccd", 0.0, mAP50=0.8125, mAP=0.5, epochs=80, macs=None)
    assert "| 81.25 % | 50.00 % | 2.00 | – | 80 | 60 |" in report.section(TABLES["detect"], tmp_path)


def test_a_step_back_anywhere_breaks_a_chain(tmp_path: Path) -> None:
    for name, accuracy in (("window3", 0.90), ("window5", 0.93), ("attention", 0.92), ("window9", 0.95)):
        put(tmp_path, f"sasa_ablations/{name}", accuracy)
    table = TABLES["sasa_ablations"]
    scores = report.scores_of(table, tmp_path)
    chain = next(claim for claim in table.claims if len(claim.order) == 4)
    assert report.verdict(chain, scores) == ("90.00 → 93.00 → 92.00 → 95.00", "**does not agree**")


def test_the_page_repeats_itself(tmp_path: Path) -> None:
    put(tmp_path / "r", "expatt/gaussian", 0.95, radius={"layer1.0.conv2.attention": [0.5], "layer1.1.x": [0.7]})
    put(tmp_path / "r", "expatt/conv", 0.94)
    page = tmp_path / "docs" / "results.md"
    page.parent.mkdir()
    words = ["--out", str(tmp_path / "r"), "--page", str(page)]
    assert report.main([*words, "--check"]) == 1
    assert report.main(words) == 0
    assert report.main([*words, "--check"]) == 0
    assert "results-radius.png" in page.read_text()
    assert (page.parent / "images" / "results-cost.png").is_file()
    file, caption = TABLES["faces"].picture
    assert caption not in page.read_text()
    (page.parent / "images" / file).touch()
    assert report.main([*words, "--check"]) == 1
    assert report.main(words) == 0
    assert f"![{TABLES['faces'].title}](images/{file})\n\n{caption}.\n" in page.read_text()
    put(tmp_path / "r", "expatt/gaussian", 0.951)
    assert report.main([*words, "--check"]) == 1


def test_costs_and_radii_come_from_the_runs(tmp_path: Path) -> None:
    for seed, radius in enumerate((0.4, 0.6)):
        put(tmp_path, "expatt/gaussian", 0.95, seed, radius={"layer1": [radius], "layer2": [1.0]}, parameters=5_000_000)
    put(tmp_path, "expatt/conv", 0.94, epochs=9, replanned=[{"from": 40, "to": 9}])
    put(tmp_path, "expatt/per_head", 0.94, radius={"layer1": [0.1, 0.2]}, split="held out: 10% of train")
    speed = {"ok": True, "images_per_s": 1024.0}
    rows.write_result(tmp_path / "speed" / "expatt-conv.jsonl", speed)
    (conv, _, costs), (says, score, others) = report.cost_points(TABLES["expatt"], tmp_path)
    assert (conv, costs) == ("convolution, 9 epochs", [2.0, 3.0, 50.0])
    assert (says, score.runs, others) == ("gaussian", 2, [5.0, 3.0, None])
    assert report.cost_figure(TABLES, tmp_path, tmp_path / "i") == "results-cost.png"
    assert report.radius_figure(TABLES, tmp_path, tmp_path / "i") == "results-radius.png"
    assert (tmp_path / "i" / "results-radius.png").stat().st_size > 5000


def test_the_page_in_the_repository_is_what_its_files_say() -> None:
    assert report.main(["--check"]) == 0


def test_thin_keeps_the_end_and_every_evaluation() -> None:
    log = [{"kind": "train", "step": i, "time": 1.0} for i in range(100)]
    log.insert(50, {"kind": "eval", "step": 49, "time": 1.0})
    kept = rows.thin(log, 10)
    assert len(kept) == 11
    assert kept[-1] == {"kind": "train", "step": 99}
    assert {"kind": "eval", "step": 49} in kept


def job(folder: Path, code: str, limit: float = 60) -> Any:
    return evidence.start(ROWS[0], 0, folder, ["-c", code], limit, 1)


def test_jobs_run_together_and_late_ones_are_stopped(tmp_path: Path) -> None:
    codes = ["print('fine')", "raise SystemExit('it broke')", "import time; time.sleep(60)"]
    began = time.monotonic()
    queue = (job(tmp_path / str(i), code, 3 if i == 2 else 60) for i, code in enumerate(codes))
    looks: list[float] = []
    tended = evidence.tend(queue, 3, began + 60, lambda: looks.append(time.monotonic()))
    ended = {done.folder.name: done for done in tended}
    assert len(looks) > 5, "whoever waits is told how far they are"
    assert time.monotonic() - began < 30
    assert [ended[str(i)].process.returncode for i in range(2)] == [0, 1]
    assert ended["2"].stopped
    assert ended["2"].process.returncode != 0
    assert evidence.last_line(tmp_path / "1" / "stderr") == "it broke"
    result, log = evidence.outcome(ended["1"], {}, 3)
    assert (result["ok"], result["reason"], log) == (False, "it broke", [])
    assert evidence.outcome(ended["2"], {}, 3)[0]["reason"].startswith("stopped after")


@pytest.mark.parametrize("key", ["expatt/gaussian", "detect/bccd"])
def test_an_outcome_is_the_averaged_networks(tmp_path: Path, key: str) -> None:
    """Metrics of the moving average where there is one, the row's own metrics and no others, and the learned radii."""
    import torch
    from safetensors.torch import save_file

    (row,) = rows.chosen([key])
    done = job(tmp_path, "pass")
    assert done.process.wait() == 0
    (tmp_path / "run").mkdir()
    save_file({"a.log_radius": torch.tensor([0.0]), "b.weight": torch.ones(2)}, tmp_path / "run" / "model.safetensors")
    (tmp_path / "run" / "summary.json").write_text('{"peak_memory_bytes": 5}')
    told = {"images": 9.0, "step": 3, "seconds": 1.5, "images_per_s": 2.0, "checkpoint": str(tmp_path / "run")}
    for number, name in enumerate(("accuracy", "loss", "mAP", "mAP50")):
        told |= {name: 0.1 * number, f"ema_{name}": 0.1 * number + 0.05}
    (tmp_path / "stdout").write_text(json.dumps(told))
    done.row = row
    result, _ = evidence.outcome(done, {}, 2)
    wanted = {"accuracy": 0.05, "loss": 0.15} if row.table == "expatt" else {"mAP": 0.25, "mAP50": 0.35}
    assert {name: result[name] for name in ("accuracy", "loss", "mAP", "mAP50") if name in result} == wanted
    assert (result["radius"], result["images"], result["peak_memory_bytes"]) == ({"a": [1.0]}, 9, 5)


def test_after_the_deadline_nothing_starts(tmp_path: Path) -> None:
    queue = (job(tmp_path / "x", "pass") for _ in range(1))
    assert list(evidence.tend(queue, 1, time.monotonic() - 1)) == []
    assert not (tmp_path / "x").exists()


def test_done_rows_are_skipped_and_unknown_ones_refused(tmp_path: Path, capsys: Any) -> None:
    put(tmp_path, "nano/conv", 0.9)
    options = evidence.parser().parse_args(["train", "nano/conv", "--out", str(tmp_path)])
    assert options.run(options) == 0
    assert capsys.readouterr().out == "nano/conv seed 0: done, 90.00 %\n"
    with pytest.raises(SystemExit, match="no row 'nano/con'"):
        rows.chosen(["nano/con"])


def test_the_archive_holds_everything(tmp_path: Path) -> None:
    put(tmp_path / "r", "nano/conv", 0.9)
    evidence.pack(tmp_path / "r", tmp_path / "all.tgz")
    with tarfile.open(tmp_path / "all.tgz") as tar:
        assert "evidence/nano/conv-s0.jsonl" in tar.getnames()


def test_shipped_networks_are_drawn_on_test_images(cifar: Path) -> None:
    """An image and two maps per attention network in each line; what they show is tested where it is made."""
    figure = maps.draw(str(cifar))
    networks = [row for row in rows.chosen(["nano/*"]) if row.name != "conv"]
    assert len(figure.axes) == len(maps.SHOWN) * (1 + 2 * len(networks))
    titles = [axis.get_title() for axis in figure.axes[1 : 1 + 2 * len(networks) : 2]]
    assert titles == [f"{row.says}\nfirst layer, one pixel" for row in networks]


@pytest.mark.slow
def test_a_row_from_command_to_shipped_weights(tmp_path: Path, cifar: Path) -> None:
    """Two steps of a nano network through the whole runner: result, log, float16 weights with their card."""
    words = [
        "train",
        "nano/conv",
        "--data",
        str(cifar),
        "--out",
        str(tmp_path / "r"),
        "--pack",
        str(tmp_path / "a.tgz"),
    ]
    changes = ("train.max_steps=2", "data.batch_size=8", "model.compile=false", "train.precision=fp32")
    for change in (*changes, "data.eval_batch_size=8", "train.device=cpu"):
        words += ["--set", change]
    options = evidence.parser().parse_args(words)
    assert options.run(options) == 0
    result, *log = [json.loads(line) for line in (tmp_path / "r" / "nano" / "conv-s0.jsonl").read_text().splitlines()]
    assert result["ok"]
    assert result["steps"] == 2
    assert result["images"] == 16
    assert log[-1]["kind"] == "eval"
    assert result["shipped"]["accuracy"] == result["accuracy"]
    card = (tmp_path / "r" / "weights" / "resnet_nano.cifar10" / "README.md").read_text()
    assert "cifar10/nano_conv" in card
    assert str(cifar) not in (tmp_path / "r" / "weights" / "resnet_nano.cifar10" / "state.json").read_text()


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Noise in CIFAR-10's Parquet form."""
    import io

    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    monkeypatch.setenv("NEARSIGHT_CACHE", str(tmp_path / "cache"))
    noise = np.random.default_rng(0)
    folder = tmp_path / "cifar10"
    folder.mkdir()
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    features = {"img": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    meta = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    for split, count in (("train", 24), ("test", 16)):
        images = []
        for _ in range(count):
            file = io.BytesIO()
            Image.fromarray(noise.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(file, "PNG")
            images.append({"bytes": file.getvalue(), "path": None})
        table = pa.table({"img": images, "label": [i % 10 for i in range(count)]}).replace_schema_metadata(meta)
        pq.write_table(table, folder / f"{split}-00000-of-00001.parquet")
    return folder
