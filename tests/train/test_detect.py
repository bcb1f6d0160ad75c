"""Detection on the engine: the same runs, checkpoints, resumption and processes as classification; eval, predict, push."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from nearsight.cli import main
from nearsight.errors import UserError
from nearsight.train import checkpoints
from nearsight.train.config import merge
from nearsight.train.data.batches import Where
from nearsight.train.engine import fit
from nearsight.train.inference import detect, evaluate, load_network, push
from nearsight.train.log import read_log
from nearsight.train.tasks import build_task, config_from, task_class
from tests.detect.shapes import CLASSES, COLOURS
from tests.support.scenes import IDS, coco_keys, scene, write_coco
from tests.train.support import processes, train

TRAIN = [scene(seed, 50 + 2 * seed, 66 - seed) for seed in range(8)]
VAL = [scene(seed, 72 - 4 * n, 50 + 5 * n) for n, seed in enumerate((21, 25, 30))]
CPU = Where(torch.device("cpu"))
SMALL: dict[str, Any] = {
    "task": "detect",
    # Frozen BatchNorm: one batch of four and two of two learn the same.
    "model": {
        "name": "retinanet_nano",
        "options": {"width": 16, "depth": 1, "backbone_norm": "frozen", "score_thresh": 0.0},
    },
    "data": {
        "batch_size": 4,
        "eval_batch_size": 2,
        "workers": 0,
        "long_side": 64,
        "augment": {"scale": [0.8, 1.2], "crop": 64, "flip": 0.5},
    },
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "schedule": {"epochs": 9},
    "train": {"seed": 3, "deterministic": True, "device": "cpu", "max_steps": 5, "eval_every": 9},
    "checkpoint": {"every_steps": 3},
    "log": {"every": 1, "tensorboard": False},
}


@pytest.fixture(scope="module")
def coco(tmp_path_factory: Any) -> Path:
    return write_coco(tmp_path_factory.mktemp("coco"), TRAIN, VAL)


def small(coco: Path, **sections: Any) -> Any:
    return config_from(merge(merge(SMALL, {"data": {"source": f"coco:{coco}"}}), sections), "test")


@pytest.fixture(scope="module")
def run(coco: Path, tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("run") / "run"
    return folder, fit(small(coco, ema={"decay": 0.9}), folder, quiet=True)


class ColourDetector(nn.Module):
    """Finds the shapes by their colours, exactly: what it reports tells where the task's coordinates are."""

    score_thresh = 0.05

    def forward(self, images: list[Tensor], targets: Any = None) -> list[dict[str, Tensor]]:
        found = []
        for image in images:
            boxes, labels = [], []
            for label, colour in enumerate(COLOURS):
                where = ((image - colour[:, None, None]).abs().amax(0) < 0.2).nonzero()
                if len(where):
                    (y0, x0), (y1, x1) = where.amin(0).tolist(), where.amax(0).tolist()
                    boxes.append([x0, y0, x1 + 1, y1 + 1])
                    labels.append(label)
            score = torch.linspace(0.9, 0.8, len(labels))
            found.append(
                {"boxes": torch.tensor(boxes).reshape(-1, 4).float(), "scores": score, "labels": torch.tensor(labels)}
            )
        return found


# ---- the run ----


def test_what_a_run_leaves(run: Any) -> None:
    folder, result = run
    rows = read_log(folder)
    assert {"loss", "classification", "bbox_regression", "lr", "images_per_s"} <= set(rows[1])
    assert rows[1]["loss"] == pytest.approx(rows[1]["classification"] + rows[1]["bbox_regression"], abs=2e-6)
    assert rows[-1]["images"] == 3
    assert {"mAP", "mAP50", "mAP75", "AR100", "ema_mAP"} <= set(result.metrics)
    state = checkpoints.load_checkpoint(result.checkpoint).state
    assert state["task"] == "detect"
    assert state["score"] == result.metrics["ema_mAP"]
    assert state["card"]["classes"] == list(CLASSES)
    assert state["card"]["input"] == {"short_side": None, "long_side": 64}


def test_every_option_of_the_engine(coco: Path, tmp_path: Path) -> None:
    """bfloat16, accumulation, an average, clipping, channels-last, skipped steps, a network with attention, in one run."""
    options = {"width": 16, "depth": 1, "num_heads": 2, "window": 3, "backbone_norm": None}
    model = {"name": "sasa_retinanet_nano", "channels_last": True, "bn_decay": 0.9, "options": options}
    settings = {"precision": "bf16", "accumulate": 2, "clip": 1.0, "bad_steps": 1, "max_steps": 2}
    config = small(coco, model=model, train=settings, ema={"decay": 0.5}, data={"batch_size": 2})
    result = fit(config, tmp_path, quiet=True)
    assert result.step == 2
    assert all(0 < loss < 20 for loss in result.losses)
    assert load_network(tmp_path).weights == "ema"


@pytest.mark.slow
def test_the_pipeline_learns(coco: Path, tmp_path: Path) -> None:
    """Folder to average precision: a few images learnt by heart are found again, at another size than the file's."""
    options = {"width": 64, "depth": 2, "backbone_norm": None}
    keys = {
        "model": {"options": options},
        "data": {"long_side": 96, "batch_size": 8, "eval_split": "train", "augment": None},
    }
    keys["data"]["augment"] = {"scale": [1, 1], "crop": None, "flip": 0.5}
    settings = {"max_steps": None, "deterministic": False, "eval_every": 100, "clip": 1.0}
    config = small(
        coco,
        **keys,
        train=settings,
        optimizer={"lr": 2e-3},
        schedule={"epochs": 200, "warmup_epochs": 5},
        checkpoint={"every_steps": None, "every_epochs": 100},
    )
    assert fit(config, tmp_path, quiet=True).metrics["mAP50"] >= 0.9


def test_a_killed_run_resumes_to_the_same_bits(coco: Path, tmp_path: Path) -> None:
    config = small(coco, ema={"decay": 0.9})
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train(config, whole) == 0
    assert train(config, broken, die_at=4) == -signal.SIGKILL
    assert checkpoints.listed(broken)[-1].name == "step-00000003"
    assert train(config, broken, resume=str(broken)) == 0
    for name in ("model", "ema", "optimizer", "random"):
        file = f"{checkpoints.FOLDER}/step-00000005/{name}.safetensors"
        assert (broken / file).read_bytes() == (whole / file).read_bytes(), name


def test_two_processes_learn_and_measure_what_one_does(coco: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert train(small(coco, optimizer={"base_batch": 4}), one) == 0
    assert processes(small(coco, optimizer={"base_batch": 4}, data={"batch_size": 2}), two, 2) == [0, 0]

    def rows(folder: Path, kind: str, key: str) -> list[float]:
        return [row[key] for row in read_log(folder) if row["kind"] == kind]

    assert rows(two, "train", "loss") == pytest.approx(rows(one, "train", "loss"), rel=1e-4)
    # Three images on two processes in batches of two: each counted once.
    assert rows(two, "eval", "images") == rows(one, "eval", "images") == [3]
    for key in ("mAP", "mAP50", "AR100"):
        assert rows(two, "eval", key) == pytest.approx(rows(one, "eval", key), abs=2e-3)
    assert rows(one, "eval", "AR100")[0] > 0


# ---- coordinates ----


@pytest.mark.parametrize("sides", [{"long_side": 96}, {"long_side": 200}, {"long_side": 160, "short_side": 100}])
def test_detections_are_measured_in_the_files_pixels(coco: Path, sides: Any) -> None:
    task: Any = build_task(small(coco, data={**sides, "augment": {"scale": [1, 1]}}), CPU, lambda text: None)
    metrics = task.evaluate(ColourDetector())
    assert metrics["images"] == 3
    assert metrics["mAP50"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["mAP75"] == pytest.approx(1.0, abs=1e-6)


def test_what_is_found_in_a_crowd_is_neither_right_nor_wrong(tmp_path: Path) -> None:
    """One shape of each image is told as a crowd four times its size: found inside, and left out of account."""
    folder = write_coco(tmp_path, TRAIN, VAL)
    file = folder / "annotations" / "instances_val.json"

    def measure(crowd: int, area: float) -> dict[str, float]:
        keys = json.loads(file.read_text())
        for one in keys["annotations"][::2]:
            x, y, width, height = coco_box[one["id"]]
            one.update(bbox=[x - width / 2, y - height / 2, 2 * width, 2 * height], iscrowd=crowd)
        for one in keys["annotations"][1::2]:
            one["area"] = area
        file.write_text(json.dumps(keys))
        config = small(folder, data={"long_side": 160, "augment": {"scale": [1, 1]}})
        task: Any = build_task(config, CPU, lambda text: None)
        metrics: dict[str, float] = task.evaluate(ColourDetector())
        return metrics

    coco_box = {one["id"]: one["bbox"] for one in json.loads(file.read_text())["annotations"]}
    assert measure(0, 300)["mAP50"] < 0.8
    counted = measure(1, 300)
    assert counted["mAP50"] == pytest.approx(1.0, abs=1e-6)
    # The file's own areas decide what is small.
    assert counted["mAP_small"] > 0
    assert "mAP_small" not in measure(1, 5000)


def test_a_split_without_a_single_image_is_refused(coco: Path, tmp_path: Path) -> None:
    folder = write_coco(tmp_path, TRAIN, VAL)
    for file in (folder / "images" / "val").iterdir():
        file.write_text("no image")
    notes: list[str] = []
    task: Any = build_task(small(folder, data={"on_bad": "skip"}), CPU, notes.append)
    with pytest.raises(UserError, match="none of the evaluation's files is an image"):
        task.evaluate(ColourDetector())
    assert notes[-1].endswith("no image (3 so far)")


# ---- eval, predict, push ----


def test_evaluation_repeats_the_runs_own(run: Any, coco: Path) -> None:
    folder, result = run
    averaged, raw = evaluate(folder, device="cpu"), evaluate(folder, average=False, device="cpu")
    assert (averaged["weights"], raw["weights"]) == ("ema", "model")
    assert averaged["mAP"] == pytest.approx(result.metrics["ema_mAP"])
    assert raw["mAP"] == pytest.approx(result.metrics["mAP"])
    assert averaged["notes"] == ["val: 3 images, 6 objects"]
    assert evaluate(folder, ["data.eval_split=train"], device="cpu")["images"] == 8


def test_evaluation_wants_the_same_classes(run: Any, tmp_path: Path) -> None:
    other = write_coco(tmp_path, TRAIN[:1], VAL[:1])
    file = other / "annotations" / "instances_val.json"
    file.write_text(file.read_text().replace("disc", "ball"))
    with pytest.raises(
        UserError, match=r"has 3 classes, the checkpoint 3; wanted the same ones; they differ in ball, disc"
    ):
        evaluate(run[0], [f"data.source=coco:{other}"], device="cpu")
    # In another order, or some of them: by name, as the run itself does.
    found = []
    for ids in (IDS, IDS[::-1]):
        file.write_text(json.dumps(coco_keys(VAL[:1], ids=ids)))
        found.append(evaluate(run[0], [f"data.source=coco:{other}"], device="cpu"))
    assert found[0] == found[1]
    assert found[0]["mAP"] > 0
    keys = coco_keys(VAL[:1])
    used = {annotation["category_id"] for annotation in keys["annotations"]}
    keys["categories"] = [category for category in keys["categories"] if category["id"] in used]
    assert len(keys["categories"]) == 2
    file.write_text(json.dumps(keys))
    assert evaluate(run[0], [f"data.source=coco:{other}"], device="cpu") == {
        **found[0],
        "notes": ["val: 1 image, 2 objects"],
    }


def test_predictions_are_in_the_files_pixels(run: Any, tmp_path: Path) -> None:
    network = load_network(run[0])._replace(model=ColourDetector())
    files = []
    for number, one in enumerate(VAL):
        files.append(tmp_path / f"{number}.png")
        one.image.save(files[-1])
    for found, one in zip(detect(network, files), VAL, strict=True):
        wanted = sorted(zip([CLASSES[label] for label in one.labels], one.boxes, strict=True))
        assert len(set(one.labels)) == 2  # else the detector would join two shapes of one colour
        for (name, box), (label, truth) in zip(sorted(zip(found.names, found.boxes, strict=True)), wanted, strict=True):
            assert name == label
            assert box == pytest.approx(truth, abs=1.5)
        assert found.scores == sorted(found.scores, reverse=True)
    assert [len(one.boxes) for one in detect(network, files, threshold=0.85)] == [1, 1, 1]
    assert [len(one.boxes) for one in detect(network, files, threshold=0.9)] == [1, 1, 1]  # at least so sure
    # What the detector itself leaves out is found where less is asked for.
    own = load_network(run[0])
    own.model.score_thresh = 0.05  # torchvision's
    few, all_of_them = (detect(own, files[:1], threshold=wanted)[0].scores for wanted in (0.05, 0.0))
    assert all_of_them[: len(few)] == few
    assert all_of_them[-1] < 0.05 == own.model.score_thresh
    with pytest.raises(UserError, match="no image file"):
        detect(network, [tmp_path / "gone.png"])
    files[0].write_text("no image")
    with pytest.raises(UserError, match=r"0\.png: not an image\.$"):
        detect(network, files)


def test_the_verbs(run: Any, coco: Path, tmp_path: Path, capsys: Any) -> None:
    folder = str(run[0])
    files = [str(coco / "images" / "val" / "0.png"), str(coco / "images" / "train" / "0.png")]
    assert main(["predict", folder, *files, "--threshold", "0", "-o", str(tmp_path / "found"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["file"] for row in rows] == files
    assert set(rows[0]["objects"][0]) == {"label", "score", "box"}
    assert [Path(row["picture"]).name for row in rows] == ["0.png", "0-1.png"]
    (coco / "images" / "val" / "0-2.png").write_bytes(Path(files[0]).read_bytes())
    three = [files[0], str(coco / "images" / "val" / "0-2.png"), files[1]]
    assert main(["predict", folder, *three, "-o", str(tmp_path / "three"), "--json"]) == 0
    assert len({row["picture"] for row in json.loads(capsys.readouterr().out)}) == 3
    with Image.open(rows[0]["picture"]) as picture, Image.open(files[0]) as before:
        assert picture.size == before.size
        assert picture.tobytes() != before.convert("RGB").tobytes()
    assert main(["predict", folder, files[0], "--threshold", "1"]) == 0
    assert "none" in capsys.readouterr().out
    assert main(["eval", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 3
    assert main(["eval", folder]) == 0
    assert capsys.readouterr().out.endswith("val: 3 images, 6 objects\n")
    assert main(["push", folder, f"local-dir:{tmp_path / 'hub'}"]) == 2
    got = capsys.readouterr()
    assert got.err.startswith(
        f"nearsight push: {folder} is a checkpoint of task 'detect', and timm's hub format holds classifiers; copy "
    )
    assert got.err.count("\n") == 1
    assert not (tmp_path / "hub").exists()


def test_a_bad_annotation_ends_before_anything_is_written(coco: Path, tmp_path: Path, capsys: Any) -> None:
    folder = write_coco(tmp_path / "set", TRAIN, VAL)
    file = folder / "annotations" / "instances_val.json"
    keys = json.loads(file.read_text())
    keys["annotations"][4]["bbox"] = [1, 2]
    file.write_text(json.dumps(keys))
    words = [f"data.source=coco:{folder}", "train.device=cpu", "--out", str(tmp_path / "run")]
    for extra in ([], ["--dry-run"]):
        assert main(["train", "bccd/sasa_retinanet", *words, *extra]) == 2
        got = capsys.readouterr()
        assert (
            got.err
            == f"nearsight train: {file}: annotations[4]: bbox is [1, 2], wanted four finite numbers: x, y, width, height.\n"
        )
        assert got.out == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            {"name": "sasa_retinanet5O"},
            r"create_detector: got 'sasa_retinanet5O', wanted one of .* Did you mean 'sasa_ret",
        ),
        ({"options": {"wdith": 3}}, r"^RetinaNet: got an unknown option 'wdith'\. Did you mean 'width'\?$"),
        ({"drop_path": 0.1}, r"model\.drop_path: got 0\.1, wanted it in model\.options"),
        ({"grad_checkpointing": True}, r"model\.grad_checkpointing: retinanet_nano does not offer it"),
    ],
)
def test_models_that_cannot_be_built(model: Any, sentence: str, coco: Path) -> None:
    with pytest.raises(Exception, match=sentence):
        build_task(small(coco, model=model), CPU, lambda text: None)


def test_a_checkpoint_does_not_need_the_weights_it_started_from(coco: Path, tmp_path: Path) -> None:
    import timm
    from safetensors.torch import save_file

    source = timm.create_model("resnet_nano", stem="conv")
    save_file(source.state_dict(), tmp_path / "start.safetensors")
    config = small(
        coco, model={"options": {"backbone_weights": str(tmp_path / "start.safetensors")}}, train={"max_steps": 1}
    )
    task = build_task(config, CPU, lambda text: None)
    started, card = task.model.state_dict(), task.card()
    first = next(name for name in started if name.endswith("conv1.weight"))
    assert torch.equal(started[first], source.state_dict()["conv1.weight"])
    (tmp_path / "start.safetensors").unlink()
    assert task_class("detect").network(card).state_dict().keys() == started.keys()
    save_file(source.state_dict(), tmp_path / "start.safetensors")
    fit(config, tmp_path / "run", quiet=True)
    (tmp_path / "start.safetensors").unlink()
    assert evaluate(tmp_path / "run", device="cpu")["images"] == 3


def test_detr_trains_and_is_pushed_in_transformers_format(coco: Path, tmp_path: Path) -> None:
    from nearsight.detect.detr import Detr

    options = {"width": 32, "depth": None, "backbone_norm": None, "hidden": 32, "num_queries": 10}
    config = small(
        coco,
        model={"name": "detr_qna_vit_nano", "options": options},
        optimizer={"lr_scale": {"network.model.backbone.*": 0.1}},
        train={"max_steps": 1, "clip": 0.1},
    )
    fit(config, tmp_path / "run", quiet=True)
    folder = push(tmp_path / "run", f"local-dir:{tmp_path / 'hub'}")
    back, network = Detr.from_pretrained(folder).eval(), load_network(tmp_path / "run")
    images = [torch.rand(3, 40, 64)]
    for key, value in network.model(images)[0].items():
        assert torch.equal(back(images)[0][key], value)
    assert list(back.network.config.id2label.values()) == list(CLASSES)
