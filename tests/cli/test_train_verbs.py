"""nearsight train, eval, predict, push from the outside: what they print, their exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from nearsight import recipes
from nearsight.cli import main
from nearsight.train.preview import activation_bytes, preview
from nearsight.train.tasks import load_config, task_class

QUICK = [
    "model.name=test_resnet",
    "data.image_size=8",
    "train.max_steps=3",
    "train.device=cpu",
    "log.tensorboard=false",
]

BARE = ["data.batch_size=2", "ema.decay=null", "optimizer.name=sgd"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", "digits/conv_nano", *QUICK, "--out", str(folder), "--json"]) == 0
    return folder


def test_list_show_copy(capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    assert main(["train", "--list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == recipes.names()
    assert all(row["hardware"] and row["expected"] for row in rows)
    assert main(["train", "--show", "digits/sasa_nano"]) == 0
    assert capsys.readouterr().out == recipes.text_of("digits/sasa_nano")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--copy", "digits/sasa_nano"]) == 0
    assert (tmp_path / "digits-sasa_nano.yaml").read_text() == recipes.text_of("digits/sasa_nano")
    assert main(["train", "--copy", "digits/sasa_nano"]) == 2
    assert main(["train", "digits-sasa_nano.yaml", "--dry-run", "--json"]) == 0


def test_dry_run(capsys: Any) -> None:
    assert main(["train", "digits/sasa_nano", "--dry-run", "--json", "schedule.epochs=4"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["images_per_epoch"], facts["steps_per_epoch"], facts["steps"]) == (1344, 21, 84)
    assert facts["config"]["schedule"]["epochs"] == 4
    assert facts["parameters"] > 100_000
    assert facts["memory_bytes"]["activations"] > 1_000_000
    assert max(lr for _, lr in facts["lr_curve"]) == pytest.approx(3e-3, rel=0.01)
    assert main(["train", "imagenet/qna_vit_tiny", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "data not opened, sizes taken from the recipe" in out
    assert "15,715,560" in out


def test_a_dry_run_counts_processes_micro_batches_and_what_is_held_out() -> None:
    keys = [
        "data.holdout=0.5",
        "data.batch_size=8",
        "train.accumulate=2",
        "optimizer.lr=0.1",
        "optimizer.base_batch=32",
    ]
    facts = preview(load_config("digits/conv_nano", [*keys, "schedule.epochs=3", "train.max_steps=40"]), world=3)
    # 673 of 1347 images are left: 28 batches of 3 × 8, two of which make a step.
    wanted = {"batch": 48, "steps_per_epoch": 14, "images_per_epoch": 14 * 48, "steps": 40, "processes": 3}
    assert {key: facts[key] for key in wanted} == wanted
    assert facts["lr"] == pytest.approx(0.15)
    # The rates of the steps it would do: of the 42 two are cut off.
    assert [step for step, _ in facts["lr_curve"]] == list(range(40))


def test_a_dry_run_refuses_the_data_that_a_run_would(tmp_path: Path, capsys: Any) -> None:
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.new("L", (4, 4)).save(tmp_path / name / "a.png")
    words = ["train", "imagenet/plain90", f"data.source=folder:{tmp_path}", "--dry-run"]
    assert main(words) == 2
    assert "has no evaluation split; hold some of train out" in capsys.readouterr().err
    # The sizes that a recipe states stand for data that is elsewhere, not for what is here and wrong.
    (tmp_path / "cat" / "a.png").unlink()
    assert main(words) == 2
    assert capsys.readouterr().err == f"nearsight train: data.source: class folder '{tmp_path}/cat' has no images.\n"


def test_a_dry_run_adds_up_memory() -> None:
    config: Any = load_config("digits/conv_nano", BARE)
    task = task_class("classify").facts(config)
    kept = activation_bytes(task.model, task.forward)
    assert kept is not None

    def estimate(*keys: str) -> dict[str, Any]:
        memory: dict[str, Any] = preview(load_config("digits/conv_nano", [*BARE, *keys]))["memory_bytes"]
        return memory

    weights = 4 * sum(p.numel() for p in task.model.parameters())
    # Weights, gradients and a moment; two moments and an average more.
    assert estimate() == {"weights_and_moments": 3 * weights, "activations": kept, "activations_with_kernels": kept}
    more = ("optimizer.name=adamw", "ema.decay=0.9", "data.batch_size=32", "train.precision=bf16")
    kept = 16 * kept // 2
    assert estimate(*more) == {
        "weights_and_moments": 5 * weights,
        "activations": kept,
        "activations_with_kernels": kept,
    }


def test_a_dry_run_counts_what_the_kernels_keep(capsys: Any) -> None:
    """AA-Net's ResNet-50, 512 images: 21.7 GiB by torch's operators and 8.5 by the kernels, both measured on an H200."""
    assert main(["train", "cifar10/short_aa_resnet50", "--dry-run", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory_bytes"]
    assert 0.9 < memory["activations"] / (21.7 * 2**30) < 1.1
    assert 0.9 < memory["activations_with_kernels"] / (8.5 * 2**30) < 1.1
    assert main(["train", "cifar10/short_aa_resnet50", "--dry-run"]) == 0
    assert re.search(
        r"activations \(estimate\) .* 8,\d\d\d MiB with the kernels for GPUs, 22,\d\d\d MiB without",
        capsys.readouterr().out,
    )


def test_train_prints_and_resumes(run: Path, capsys: Any) -> None:
    assert main(["train", "--resume", str(run), "train.max_steps=5", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["step"] == 5
    assert 0 <= summary["accuracy"] <= 1
    assert summary["run"] == str(run)
    assert main(["train", "digits/conv_nano", *QUICK, "--out", str(run)]) == 2
    assert "has checkpoints already; go on with --resume" in capsys.readouterr().err


def test_eval(run: Path, capsys: Any) -> None:
    assert main(["eval", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["images"] == 450
    assert main(["eval", str(run)]) == 0
    assert "95 % interval" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "average"), [([], True), (["--raw"], False)])
def test_eval_takes_the_average_or_the_weights_themselves(words: list[str], average: bool, monkeypatch: Any) -> None:
    from nearsight.train import inference

    asked: list[Any] = []

    def evaluate(path: Path, overrides: Any, **options: Any) -> dict[str, Any]:
        asked.append((path, overrides, options))
        return {"accuracy": 0.5, "images": 4}

    monkeypatch.setattr(inference, "evaluate", evaluate)
    assert main(["eval", "a", "data.root=b", *words]) == 0
    assert asked == [(Path("a"), ["data.root=b"], {"average": average})]


def test_predict(run: Path, tmp_path: Path, capsys: Any) -> None:
    Image.new("L", (20, 13), 90).save(tmp_path / "x.png")
    assert main(["predict", str(run), str(tmp_path / "x.png"), "--top", "3", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert one["file"].endswith("x.png")
    assert len(one["classes"]) == 3
    assert main(["predict", str(run), str(tmp_path / "x.png")]) == 0
    assert "x.png" in capsys.readouterr().out
    assert main(["predict", str(run), str(tmp_path / "x.png"), "-o", "found"]) == 2
    wanted = "nearsight predict: -o: got 'found', but a network of task 'classify' draws nothing; leave it out.\n"
    assert capsys.readouterr() == ("", wanted)


def test_push(run: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["push", str(run), f"local-dir:{tmp_path / 'hub'}"]) == 0
    assert (tmp_path / "hub" / "model.safetensors").is_file()
    assert capsys.readouterr().out == f"wrote {tmp_path / 'hub'}\n"
    (tmp_path / "file").touch()
    assert main(["push", str(run), f"local-dir:{tmp_path / 'file'}"]) == 2
    assert capsys.readouterr().err == f"nearsight push: cannot open '{tmp_path / 'file'}': File exists.\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train"], "nearsight train: no recipe given; choose one with: nearsight train --list."),
        (["train", "digits/sasa"], "nearsight train: no recipe 'digits/sasa'. Did you mean 'digits/sasa_nano'?"),
        (["train", "digits/sasa_nano", "optimizer.lrr=1"], "unknown key optimizer.lrr (the nearest is optimizer.lr)"),
        (["train", "--resume", "nowhere"], "no run or checkpoint at 'nowhere'"),
        (["eval", "nowhere"], "nearsight eval: no run or checkpoint at 'nowhere'."),
        (
            ["eval", "qna_vit_nano.cifar"],
            "no run or checkpoint at 'qna_vit_nano.cifar'. Did you mean 'qna_vit_nano.cifar10'?",
        ),
        (["predict", "nowhere.JPG"], "nearsight predict: no image file 'nowhere.JPG'."),
        (["predict", "weights.pth", "x.png"], "is a pickled file, which nearsight never opens"),
    ],
)
def test_mistakes_are_one_line_and_code_2(words: list[str], line: str, capsys: Any) -> None:
    assert main(words) == 2
    got = capsys.readouterr()
    assert line in got.err
    assert got.err.count("\n") == 1
    assert got.out == ""


@pytest.mark.parametrize("dry", [True, False])
def test_images_that_a_network_cannot_take_are_one_line(dry: bool, tmp_path: Path, capsys: Any) -> None:
    words = ["train", "digits/conv_nano", "model.name=vit_tiny_patch16_224", "--out", str(tmp_path), "train.device=cpu"]
    assert main([*words, "--json", *(["--dry-run"] if dry else [])]) == 2
    got = capsys.readouterr()
    assert got.out == ""
    assert got.err.startswith(
        "nearsight train: model: vit_tiny_patch16_224 cannot take data.batch_size=64 images of 16×16 (Input height"
    )
    assert got.err.count("\n") == 1


def test_a_file_of_weights_is_no_checkpoint(run: Path, capsys: Any) -> None:
    file = str(next(run.rglob("model.safetensors")))
    for words in (["eval", file], ["predict", file, "x.png"], ["train", "--resume", file]):
        assert main(words) == 2
        assert (
            capsys.readouterr().err == f"nearsight {words[0]}: {file} is a file, wanted a run or a checkpoint folder.\n"
        )


def test_a_recipe_that_is_no_text(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "x.yaml").write_bytes(b"model: \x93\xff")
    assert main(["train", str(tmp_path / "x.yaml")]) == 2
    assert capsys.readouterr().err == f"nearsight train: {tmp_path / 'x.yaml'}: got no text, wanted YAML in UTF-8.\n"


def test_a_second_interrupt_gives_its_code(monkeypatch: Any, tmp_path: Path) -> None:
    from nearsight.train import engine

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "fit", interrupted)
    assert main(["train", "digits/conv_nano", "--out", str(tmp_path)]) == 130


def test_one_process_of_many_tells_the_outcome(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    from nearsight.train import engine

    result = engine.Result(tmp_path, 3, {"accuracy": 0.5}, 0.5, 1.0, 1.0, 9.0, 77)
    monkeypatch.setattr(engine, "fit", lambda *args, **kwargs: result)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert main(["train", "digits/conv_nano", "--out", str(tmp_path), "--json"]) == 0
        assert capsys.readouterr().out.count('"parameters": 77') == (rank == "0")


def test_a_checkpoint_goes_on_in_its_own_run(monkeypatch: Any, run: Path) -> None:
    from nearsight.train import engine

    asked: list[Any] = []

    def stopped(config: Any, folder: Path, *, resume: Path, **options: Any) -> None:
        asked.append((config.train.max_steps, folder, resume))
        raise engine.Stopped(2, 7, folder, None)

    monkeypatch.setattr(engine, "fit", stopped)
    path = next((run / "checkpoints").glob("step-*"))
    assert main(["train", "train.max_steps=9", "--resume", str(path)]) == 130
    assert asked == [(9, run, path)]
    for folder, name in ((path.parent, path.name), (path, ".")):
        monkeypatch.chdir(folder)
        assert main(["train", "train.max_steps=9", "--resume", name]) == 130
        assert asked.pop()[1].resolve() == run.resolve()


def test_a_signal_gives_its_code(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    from nearsight.train import engine

    def stopped(*args: Any, **kwargs: Any) -> None:
        raise engine.Stopped(15, 7, tmp_path, None)

    monkeypatch.setattr(engine, "fit", stopped)
    assert main(["train", "digits/conv_nano", "--out", str(tmp_path)]) == 143
    assert (
        capsys.readouterr().err
        == f"nearsight train: stopped by SIGTERM after step 7; resume with --resume {tmp_path}.\n"
    )
