"""Reconstruction: overfit, metrics by hand, images without labels, resume, pictures, the verbs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from nearsight import recipes
from nearsight.cli import main
from nearsight.errors import UserError
from nearsight.train import checkpoints
from nearsight.train.config import merge, to_yaml
from nearsight.train.data.batches import Where
from nearsight.train.data.config import DataConfig
from nearsight.train.data.decoded import materialise
from nearsight.train.data.sources import open_source
from nearsight.train.engine import fit
from nearsight.train.inference import evaluate, load_network
from nearsight.train.schedule import build_optimizer, learning_rates
from nearsight.train.tasks import build_task, config_from, load_config
from nearsight.train.tasks.reconstruct import compare, per_image, side_by_side

CPU = Where(torch.device("cpu"))
NARROW = [8, 8, 8, 16, 16]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("NEARSIGHT_CACHE", str(tmp_path_factory.mktemp("cache")))


def save_noise(path: Path, seed: int, size: tuple[int, int] = (40, 33), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)).save(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """Images without classes: some at the top, some deeper."""
    root: Path = tmp_path_factory.mktemp("images")
    for number in range(10):
        save_noise(root / ("train" if number % 2 else "train/deeper/still") / f"{number}.png", number)
    for number in range(7):
        save_noise(root / "val" / f"{number}.png", 100 + number)
    return root


def config(source: Path | str, **sections: Any) -> Any:
    keys: dict[str, Any] = {
        "task": "reconstruct",
        "model": {"name": "qna_autoencoder", "options": {"widths": NARROW}},
        "data": {"source": f"folder:{source}", "image_size": 32, "batch_size": 5, "workers": 0, "cache": False},
        "optimizer": {"name": "adam", "lr": 1e-3},
        "schedule": {"epochs": 4},
        "train": {"seed": 3, "deterministic": True, "device": "cpu"},
        "log": {"every": 1, "tensorboard": False},
    }
    return config_from(merge(keys, sections), "test")


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: Any) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("runs") / "one"
    return path, fit(config(folder, ema={"decay": 0.5}), path, quiet=True)


# ── It learns ──


def crops(root: Path, size: int) -> Path:
    """16 crops of scikit-learn's two photos, to train on and to look at."""
    photos = pytest.importorskip("sklearn.datasets").load_sample_images().images
    draw = np.random.default_rng(0)
    for number in range(16):
        photo = photos[number % 2]
        y, x = (int(draw.integers(side - size)) for side in photo.shape[:2])
        for split in ("train", "val"):
            path = root / split / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(photo[y : y + size, x : x + size]).save(path)
    return root


def overfit(root: Path, out: Path, size: int, steps: int, **options: Any) -> tuple[float, float]:
    settings = config(
        crops(root, size),
        model={"options": options},
        data={"image_size": size, "batch_size": 16},
        optimizer={"lr": 4e-3},
        schedule={"epochs": steps, "warmup_epochs": 5},
        train={"eval_every": steps, "clip": 1.0},
        checkpoint={"every_epochs": steps},
    )
    result = fit(settings, out, quiet=True)
    return result.losses[0], result.metrics["l1"]


def test_l1_falls_five_times_on_crops_of_two_photos(tmp_path: Path) -> None:
    first, last = overfit(tmp_path / "crops", tmp_path / "run", 32, 160, widths=[16, 32, 64, 128, 256])
    assert last < first / 5


@pytest.mark.slow
def test_l1_falls_five_times_on_larger_crops(tmp_path: Path) -> None:
    first, last = overfit(tmp_path / "crops", tmp_path / "run", 64, 200, widths=[32, 64, 128, 256, 512])
    assert last < first / 5


# ── What it measures ──


def test_only_the_first_images_are_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearsight.train.tasks.reconstruct.SHOWN", 3)
    task: Any = build_task(config(folder, data={"batch_size": 2}), CPU, print)
    for _ in range(2):
        assert task.evaluate(task.model)["images"] == 7
        assert len(task.shown) == 3


def test_loss_is_the_mean_error_of_pixels_in_0_to_1(folder: Path) -> None:
    task: Any = build_task(config(folder, data={"mean": [0.4, 0.5, 0.6], "std": [0.1, 0.2, 0.5]}), CPU, print)
    batch = next(iter(task.train.epoch(0)))
    loss, shown = task.loss(task.model, batch, 0)
    std = torch.tensor([0.1, 0.2, 0.5]).view(1, 3, 1, 1)
    error = (task.model(batch.images) - batch.images) * std
    error = error.detach()
    assert loss.item() == pytest.approx(float(error.abs().mean()), rel=1e-6)
    assert float(shown["psnr"]) == pytest.approx(-10 * np.log10(float(error.square().mean())), rel=1e-5)


def test_metrics_are_those_of_each_held_out_image_once(folder: Path) -> None:
    task: Any = build_task(config(folder, data={"eval_batch_size": 4}), CPU, print, evaluation_only=True)
    metrics = task.evaluate(task.model)
    l1, psnr = [], []
    for path in sorted((folder / "val").iterdir()):
        # The evaluation's own preparation: short side to 32, then the centre.
        image = Image.open(path).resize((int(32 * 40 / 33), 32), Image.Resampling.BILINEAR)
        left = round((image.width - 32) / 2)
        pixels = torch.from_numpy(np.asarray(image)[:, left : left + 32].copy()).permute(2, 0, 1)[None] / 255
        out = (task.model.eval()(pixels * 2 - 1) / 2 + 0.5).clamp(0, 1).detach()
        l1.append(float((out - pixels).abs().mean()))
        psnr.append(-10 * np.log10(float((out - pixels).square().mean())))
    assert metrics["images"] == 7
    assert metrics["l1"] == pytest.approx(np.mean(l1), rel=1e-4)
    assert metrics["psnr"] == pytest.approx(np.mean(psnr), rel=1e-4)


def test_a_perfect_image_has_a_finite_psnr() -> None:
    black = torch.zeros(1, 3, 4, 4)
    assert per_image(black, black)[1].tolist() == [100.0]


def test_training_order_and_flips_do_not_reach_the_evaluation(folder: Path) -> None:
    one, two = (
        build_task(config(folder, train={"seed": n}, data={"augment": {"flip": float(n)}}), CPU, print) for n in (0, 1)
    )
    batches = [next(iter(task.evaluation.epoch(0))).images for task in (one, two)]  # type: ignore[attr-defined]
    assert torch.equal(*batches)


# ── Images without labels ──


def test_any_folder_any_parquet(folder: Path, tmp_path: Path) -> None:
    source = open_source(DataConfig(source=f"folder:{folder}"), labelled=False)
    assert (len(source.train), len(source.evaluation), source.classes) == (10, 7, [])
    flat = open_source(DataConfig(source=f"folder:{folder / 'val'}"), labelled=False)
    assert (len(flat.train), flat.evaluation) == (7, None)
    with pytest.raises(UserError, match=r"has no evaluation split; hold some of train out: data\.holdout=0\.1\.$"):
        build_task(config(folder / "val"), CPU, print)
    held: Any = build_task(config(folder / "val", data={"holdout": 0.3}), CPU, print)
    assert (held.train.images, held.evaluation.images) == (5, 2)
    with pytest.raises(UserError, match=r"no folder 'gone'; wanted folder:PATH with images\.$"):
        open_source(DataConfig(source="folder:gone"), labelled=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty' has no images\.$"):
        open_source(DataConfig(source=f"folder:{tmp_path / 'empty'}"), labelled=False)


def test_parquet_without_a_label_column(folder: Path, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    files = [path.read_bytes() for path in sorted((folder / "val").iterdir())]
    cells = [{"bytes": data, "path": None} for data in files]
    pq.write_table(pa.table({"image": cells, "age": list(range(7))}), tmp_path / "train-0.parquet")
    data = DataConfig(source=f"parquet:{tmp_path}", image_size=8)
    with pytest.raises(UserError, match=r"has columns image, age, wanted label or"):
        open_source(data)
    source = open_source(data, labelled=False)
    assert len(source.train) == 7
    # The cache of decoded images holds labels: the set without them must not be taken for the one with.
    pq.write_table(pa.table({"image": cells, "label": [0, 1, 1, 0, 1, 0, 1]}), tmp_path / "train-0.parquet")
    assert materialise(open_source(data, labelled=False).train, data)[1].tolist() == [0] * 7
    assert materialise(open_source(data).train, data)[1].tolist() == [0, 1, 1, 0, 1, 0, 1]


def test_a_file_that_is_no_image_is_left_out_and_named(folder: Path, tmp_path: Path) -> None:
    for number in range(6):
        save_noise(tmp_path / f"{number}.png", number)
    (tmp_path / "bad.png").write_text("no image")
    notes: list[str] = []
    task: Any = build_task(config(tmp_path, data={"holdout": 0.2, "on_bad": "skip"}), CPU, notes.append)
    assert task.train.images == 5
    assert "bad.png" in " ".join(notes)
    with pytest.raises(UserError, match=r"bad\.png: not an image"):
        build_task(config(tmp_path, data={"holdout": 0.2}), CPU, print)


# ── One engine: checkpoints, resume, evaluation ──


def test_resume_is_exact(folder: Path, run: tuple[Path, Any], tmp_path: Path) -> None:
    straight = checkpoints.listed(run[0])[-1]
    average = {"ema": {"decay": 0.5}}
    fit(config(folder, train={"max_steps": 3}, **average), tmp_path / "two", quiet=True)
    fit(config(folder, **average), tmp_path / "two", resume=tmp_path / "two", quiet=True)
    again = checkpoints.listed(tmp_path / "two")[-1]
    assert straight.name == again.name == "step-00000008"
    for name in ("model", "ema", "optimizer"):
        assert (straight / f"{name}.safetensors").read_bytes() == (again / f"{name}.safetensors").read_bytes()


def test_evaluation_repeats_the_runs_own(run: tuple[Path, Any], folder: Path) -> None:
    path, result = run
    averaged, raw = evaluate(path, device="cpu"), evaluate(path, average=False, device="cpu")
    assert (averaged["l1"], averaged["psnr"]) == (result.metrics["ema_l1"], result.metrics["ema_psnr"])
    assert raw["l1"] == pytest.approx(result.metrics["l1"], rel=1e-6)
    assert averaged["images"] == 7
    other = evaluate(path, [f"data.source=folder:{folder / 'train'}", "data.holdout=0.5"], device="cpu")
    assert other["images"] == 5


def test_the_card_says_how_to_prepare_an_image(run: tuple[Path, Any]) -> None:
    network = load_network(run[0])
    assert network.card["input"] == {
        "image_size": 32,
        "channels": 3,
        "crop_pct": 1.0,
        "interpolation": "bilinear",
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
    }
    saved = load_file(network.checkpoint.path / "ema.safetensors")
    assert all(torch.equal(value, saved[key]) for key, value in network.model.state_dict().items())


# ── Pictures ──


def test_a_run_ends_with_its_picture(run: tuple[Path, Any], folder: Path) -> None:
    sheet = np.asarray(Image.open(run[0] / "reconstructions.png"))
    assert sheet.shape == (2 * (128 + 2) + 2, 76 + 7 * (128 + 2), 3)
    found = compare([load_network(run[0])], sorted((folder / "val").iterdir()))
    tile = sheet[2 : 2 + 128 : 4, 76 + 130 : 76 + 130 + 128 : 4]
    wanted = (found.images[1].permute(1, 2, 0) * 255).round().byte()
    assert np.array_equal(tile, wanted.numpy())
    below = sheet[132 : 132 + 128 : 4, 76 + 130 : 76 + 130 + 128 : 4].astype(int)
    rebuilt = (found.rebuilt["qna qna"][1].permute(1, 2, 0) * 255).round().numpy().astype(int)
    assert abs(below - rebuilt).max() <= 1


def test_a_sheet_breaks_its_lines_and_takes_rectangles() -> None:
    grey = torch.rand(5, 1, 32, 64)
    sheet = side_by_side([("input", grey), ("a b", grey), ("c", grey)], columns=3)
    assert sheet.size == (76 + 3 * (128 + 2), 2 * 3 * (64 + 2) + 2)


def test_networks_beside_each_other(run: tuple[Path, Any], folder: Path, tmp_path: Path, capsys: Any) -> None:
    options = {"widths": NARROW, "encoder": "pool", "decoder": "transposed"}
    fit(config(folder, model={"options": options}, train={"max_steps": 1}), tmp_path / "base", quiet=True)
    words = ["predict", str(run[0]), "--beside", str(tmp_path / "base"), "-o", str(tmp_path / "out")]
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["file"] for row in rows] == [f"held-out image {n}" for n in range(7)]
    assert [one["network"] for one in rows[0]["reconstructions"]] == ["qna qna", "pool transposed"]
    mean = np.mean([row["reconstructions"][0]["l1"] for row in rows])
    assert mean == pytest.approx(evaluate(run[0], device="cpu")["l1"], rel=1e-4)
    assert Image.open(tmp_path / "out" / "reconstructions.png").height == 3 * 130 + 2
    assert main(["predict", str(run[0]), str(folder / "val" / "3.png")]) == 0
    assert "qna qna L1" in capsys.readouterr().out
    again = load_network(run[0])
    assert list(compare([again, again], [folder / "val" / "3.png"]).rebuilt) == ["qna qna one"]
    other = again._replace(checkpoint=again.checkpoint._replace(path=tmp_path / "b" / "one" / "checkpoints" / "step-1"))
    # Runs of one name in different folders: neither takes the other's place.
    assert list(compare([again, other], [folder / "val" / "3.png"]).rebuilt) == [
        f"qna qna {network.checkpoint.path}" for network in (again, other)
    ]


def test_each_network_sees_the_images_in_its_own_units(run: tuple[Path, Any], folder: Path) -> None:
    seen = []

    class Same(torch.nn.Module):
        encoder_kind = decoder_kind = "none"

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen.append(images)
            return images

    first = load_network(run[0])
    facts = {**first.card["input"], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    state = {**first.checkpoint.state, "card": {**first.card, "input": facts}}
    other = first._replace(model=Same(), checkpoint=first.checkpoint._replace(state=state))
    found = compare([first, other], [folder / "val" / "3.png"])
    mean, std = (torch.tensor(facts[key]).view(3, 1, 1) for key in ("mean", "std"))
    torch.testing.assert_close(seen[0] * std + mean, found.images)
    torch.testing.assert_close([*found.rebuilt.values()][-1], found.images)


# ── Mistakes ──


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"data": {"image_size": 40}}, r"^data\.image_size: got 40, wanted a multiple of 32, .*; the nearest is 32\.$"),
        ({"data": {"image_size": 50}}, r"^data\.image_size: got 50, wanted a multiple of 32, .*; the nearest is 64\.$"),
        ({"model": {"name": "test_resnet", "options": {"widths": None}}}, r"^model\.name: test_resnet gives no images"),
        ({"model": {"options": {"encoder": "max"}}}, r"got encoder='max', wanted one of 'qna', 'conv', 'pool'"),
        ({"model": {"drop_path": 0.1}}, r"^model: qna_autoencoder cannot be built with"),
    ],
)
def test_wrong_keys_are_one_sentence(folder: Path, sections: Any, text: str) -> None:
    with pytest.raises(Exception, match=text):
        build_task(config(folder, **sections), CPU, print)


def test_evaluation_wants_the_same_task(run: tuple[Path, Any], folder: Path) -> None:
    classes = folder.parent / "classes"
    for split in ("train", "val"):
        for name in ("a", "b"):
            (classes / split / name).mkdir(parents=True)
            Image.new("RGB", (32, 32)).save(classes / split / name / "x.png")
    keys = ["task=classify", f"data.source=folder:{classes}"]
    with pytest.raises(
        UserError, match=r"got a checkpoint of task 'reconstruct' with task=classify, wanted the same\.$"
    ):
        evaluate(run[0], keys, device="cpu")


def test_networks_of_other_sizes_are_not_compared(run: tuple[Path, Any], folder: Path, tmp_path: Path) -> None:
    fit(config(folder, data={"image_size": 64}, train={"max_steps": 1}), tmp_path / "wide", quiet=True)
    with pytest.raises(UserError, match=r"got 64 px × 3 channels beside 32 px × 3, wanted the same images for all"):
        compare([load_network(run[0]), load_network(tmp_path / "wide")], [])


def test_predict_wants_images_for_the_other_tasks(tmp_path: Path, capsys: Any) -> None:
    quick = ["model.name=test_resnet", "data.image_size=8", "train.max_steps=1", "train.device=cpu"]
    assert main(["train", "digits/conv_nano", *quick, "--out", str(tmp_path / "run"), "--json"]) == 0
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == "nearsight predict: no image files given; name some after the checkpoint.\n"
    assert main(["predict", str(tmp_path / "run"), "x.png", "--beside", str(tmp_path / "run")]) == 2
    assert "--beside: got it for a network of task 'classify', wanted auto-encoders" in capsys.readouterr().err


# ── Recipes ──

RECIPES = [name for name in recipes.names() if load_config(name).task == "reconstruct"]


def test_what_the_supplement_needs_is_there() -> None:
    wanted = {"celeba/qna_autoencoder", "folder/qna_autoencoder", "faces/qna_autoencoder"}
    assert wanted | {f"faces/pool_{up}_autoencoder" for up in ("bilinear", "transposed")} <= set(RECIPES)
    celeba: Any = load_config("celeba/qna_autoencoder")
    assert (celeba.data.image_size, celeba.schedule.epochs, celeba.optimizer.name) == (256, 10, "adam")


@pytest.mark.parametrize("name", RECIPES)
def test_builds_and_steps(name: str, folder: Path) -> None:
    settings: Any = load_config(name)
    assert config_from(recipes.read_yaml(to_yaml(settings), name), name) == settings
    source = [f"data.source=folder:{folder}", "data.batch_size=1", "data.workers=0", "data.cache=false"]
    # One size for all: the recipe's own passes by in --dry-run below.
    settings = load_config(name, [*source, "data.image_size=64", "train.device=cpu"])
    task: Any = build_task(settings, CPU, print)
    optimizer = build_optimizer(task.model, settings.optimizer, 1)
    before = [p.clone() for p in task.model.parameters()]
    loss, _ = task.loss(task.model.train(), next(iter(task.train.epoch(0))), 0)
    loss.backward()
    assert torch.isfinite(loss)
    optimizer.step()
    same = [n for (n, p), b in zip(task.model.named_parameters(), before, strict=True) if torch.equal(p, b)]
    assert not [n for n in same if "norm" not in n]
    rates = [lr for _, lr in learning_rates(settings, 1, steps_per_epoch=100)]
    assert max(rates) > rates[-1] >= 0


def test_dry_run(capsys: Any) -> None:
    assert main(["train", "celeba/qna_autoencoder", "--dry-run", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["parameters"], facts["classes"], facts["steps_per_epoch"]) == (1_150_779, None, 5086)
    assert facts["memory_bytes"]["activations"] > 50_000_000
    assert "sizes taken from the recipe" in facts["notes"][0]
    assert main(["train", "faces/pool_bilinear_autoencoder", "--dry-run"]) == 0
    assert "3,155,107" in capsys.readouterr().out
