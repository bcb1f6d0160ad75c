"""Detection's data: COCO and Pascal VOC folders, what is wrong with them, boxes that follow their pixels, batches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from nearsight.errors import UserError
from nearsight.train.data.batches import Where
from nearsight.train.data.boxes import AnnotatedImages, Objects
from nearsight.train.data.detection import (
    DetectionBatches,
    DetectionDataConfig,
    KeptImages,
    TrainTransform,
    eval_resize,
    open_detection,
)
from nearsight.train.data.images import BadImageError
from tests.detect.shapes import CLASSES
from tests.support.scenes import coco_keys, scene, write_coco, write_voc

CPU = Where(torch.device("cpu"))
TRAIN = [scene(seed, 50 + 3 * seed, 80 - 2 * seed) for seed in range(5)]
VAL = [scene(10 + seed, 60, 44 + seed, objects=seed) for seed in range(3)]


def settings(folder: Path, kind: str = "coco", **keys: Any) -> DetectionDataConfig:
    keys = {"batch_size": 2, "workers": 0, "long_side": 96, **keys}
    return DetectionDataConfig.model_validate({"source": f"{kind}:{folder}", **keys})


def opened(data: DetectionDataConfig) -> tuple[Any, list[str]]:
    notes: list[str] = []
    return open_detection(data, notes.append), notes


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    return write_coco(tmp_path / "set", TRAIN, VAL)


# ---- what is read ----


@pytest.mark.parametrize("kind", ["coco", "voc"])
def test_both_formats_say_the_same(kind: str, tmp_path: Path) -> None:
    write = write_coco if kind == "coco" else write_voc
    source, notes = opened(settings(write(tmp_path / "set", TRAIN, VAL), kind))
    assert notes == ["train: 5 images, 10 objects", "val: 3 images, 3 objects; 1 image without objects"]
    names = list(CLASSES) if kind == "coco" else sorted(CLASSES)
    assert source.classes == names
    for split, scenes in ((source.train, TRAIN), (source.evaluation, VAL)):
        assert len(split) == len(scenes)
        for i, one in enumerate(scenes):
            image, objects = split.read(i)
            assert image.size == one.image.size
            assert image.tobytes() == one.image.tobytes()
            assert objects.boxes.tolist() == [list(map(float, box)) for box in one.boxes]
            assert [names[label] for label in objects.labels] == [CLASSES[label] for label in one.labels]
            assert objects.areas.tolist() == [float((b[2] - b[0]) * (b[3] - b[1])) for b in one.boxes]
            assert not objects.crowd.any()


def rename(coco: Path, old: str, new: str, images: str) -> None:
    (coco / "annotations" / f"instances_{old}.json").rename(coco / "annotations" / f"instances_{new}.json")
    (coco / "images" / old).rename(coco / images)


def test_the_usual_names_are_found(coco: Path) -> None:
    rename(coco, "train", "train2017", "train2017")
    rename(coco, "val", "val2017", "val2017")
    source, notes = opened(settings(coco))
    assert (len(source.train), len(source.evaluation)) == (5, 3)
    assert [note.partition(":")[0] for note in notes] == ["train2017", "val2017"]
    assert source.train.read(0)[0].size == TRAIN[0].image.size


def test_two_years_of_a_split_are_not_guessed_between(coco: Path) -> None:
    file = coco / "annotations" / "instances_train.json"
    for year in ("2014", "2017"):
        (coco / "annotations" / f"instances_train{year}.json").write_text(file.read_text())
    file.unlink()
    with pytest.raises(UserError, match=r"has no split train \(it has train2014, train2017, val\)"):
        opened(settings(coco))
    assert len(opened(settings(coco, train_split="train2014"))[0].train) == 5


def test_classes_come_in_the_order_of_their_ids(coco: Path) -> None:
    for name, scenes in (("train", TRAIN), ("val", VAL)):
        keys = coco_keys(scenes, ids=(8, 3, 7))
        (coco / "annotations" / f"instances_{name}.json").write_text(json.dumps(keys))
    source, _ = opened(settings(coco))
    assert source.classes == [CLASSES[1], CLASSES[2], CLASSES[0]]
    assert source.train.objects_of(1).labels.tolist() == [{0: 2, 1: 0, 2: 1}[label] for label in TRAIN[1].labels]


def test_annotations_beside_the_images(coco: Path) -> None:
    for name, place in (("train", "train"), ("val", "valid")):
        (coco / "images" / name).rename(coco / place)
        (coco / "annotations" / f"instances_{name}.json").rename(coco / place / "_annotations.coco.json")
    source, _ = opened(settings(coco))
    assert (len(source.train), len(source.evaluation)) == (5, 3)
    assert source.evaluation.read(2)[0].size == VAL[2].image.size


def test_splits_by_name_and_held_out(coco: Path) -> None:
    data = settings(coco, eval_split="train")
    assert len(opened(data)[0].evaluation) == 5
    uneven = [scene(seed, objects=seed % 3) for seed in range(5)]
    write_coco(coco, uneven, VAL)
    held, _ = opened(settings(coco, holdout=0.4))
    assert (len(held.train), len(held.evaluation)) == (3, 2)
    seen = sorted(held.train.files + held.evaluation.files)
    assert seen == sorted(opened(data)[0].train.files)
    for split in (held.train, held.evaluation):
        for i in range(len(split)):
            one = uneven[int(Path(split.name(i)).stem)]
            assert split.read(i)[1].boxes.tolist() == [list(map(float, box)) for box in one.boxes]
    with pytest.raises(UserError, match=r"has no split test \(it has train, val\); wanted annotations/instances_SPLIT"):
        opened(settings(coco, eval_split="test"))
    with pytest.raises(UserError, match=r"^data\.source: no folder '.*gone'; wanted coco:FOLDER\.$"):
        opened(settings(coco / "gone"))
    with pytest.raises(UserError, match=r"data\.source: got 'digits', wanted coco:FOLDER or voc:FOLDER"):
        opened(DetectionDataConfig(source="digits"))


def edit(coco: Path, change: Any, split: str = "train") -> Path:
    file = coco / "annotations" / f"instances_{split}.json"
    keys = json.loads(file.read_text())
    change(keys)
    file.write_text(json.dumps(keys))
    return file


def test_odd_boxes_are_counted_and_handled(coco: Path) -> None:
    def change(keys: Any) -> None:
        boxes = [a["bbox"] for a in keys["annotations"]]
        width, height = keys["images"][0]["width"], keys["images"][0]["height"]
        boxes[0][2] = 0  # no width
        boxes[1][:] = [width, 3, 5, 5]  # outside, to the right
        boxes[2][3] = -4
        boxes[3][0] = -6  # reaches over the left border
        keys["annotations"][4]["bbox"] = []
        keys["annotations"][5]["iscrowd"] = 1
        del keys["annotations"][6]["area"]
        keys["annotations"].reverse()  # any order
        assert height != width

    edit(coco, change)
    source, notes = opened(settings(coco))
    assert notes[0] == (
        "train: 5 images, 6 objects; left out 2 boxes without area, 1 box outside the image, 1 annotation without a box; "
        "1 box reaches over the border, cut in training; 1 crowd, not trained on and not counted; 1 image without objects"
    )
    assert len(source.train.objects_of(0).boxes) == 0
    crowded = source.train.objects_of(2)
    assert (len(crowded.boxes), crowded.crowd.tolist()) == (1, [True])
    over = source.train.objects_of(1)
    assert float(over.boxes[0, 0]) == -6  # evaluation compares with the file's own box
    _, target = TrainTransform(settings(coco))(*picture_of(source.train, 1))
    assert float(target["boxes"][0, 0]) == 0
    _, target = TrainTransform(settings(coco))(*picture_of(source.train, 2))
    assert len(target["boxes"]) == len(target["labels"]) == 0


def picture_of(split: Any, index: int) -> tuple[torch.Tensor, Objects]:
    from nearsight.train.data.detection import pixels_of

    image, objects = split.read(index)
    return pixels_of(image), objects


def test_classes_are_matched_by_name(coco: Path) -> None:
    """The evaluation's file may number its categories differently, or list fewer."""
    (coco / "annotations" / "instances_val.json").write_text(json.dumps(coco_keys(VAL, ids=(2, 5, 1))))
    source, _ = opened(settings(coco))
    assert source.classes == list(CLASSES)
    assert source.evaluation.objects_of(2).labels.tolist() == VAL[2].labels
    edit(coco, lambda keys: keys["categories"][0].update(name="cube"), "val")
    with pytest.raises(
        UserError, match=r"has 3 classes in train and 3 in evaluation, wanted the same ones; train lacks cube"
    ):
        opened(settings(coco))


# ---- what is wrong: one line that names file and entry ----


def drop(key: str, part: str, number: int) -> Any:
    return lambda keys: keys[part][number].pop(key)


def put(part: str, number: int, **values: Any) -> Any:
    return lambda keys: keys[part][number].update(values)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda keys: keys.pop("images"), "no list 'images', wanted COCO's images, annotations and categories."),
        (drop("bbox", "annotations", 3), "annotations[3]: no bbox, wanted image_id, category_id, bbox."),
        (
            put("annotations", 1, bbox=[1, 2, 3]),
            "annotations[1]: bbox is [1, 2, 3], wanted four finite numbers: x, y, wid",
        ),
        (
            put("annotations", 1, bbox=[1, 2, "3", 4]),
            "annotations[1]: bbox is [1, 2, '3', 4], wanted four finite numbers",
        ),
        (
            put("annotations", 1, bbox=[1, float("nan"), 3, 4]),
            "annotations[1]: bbox is [1, nan, 3, 4], wanted four fini",
        ),
        (put("annotations", 2, image_id=999), "annotations[2]: image_id 999 is none of its images."),
        (put("annotations", 2, image_id=[]), "annotations[2]: image_id is [], wanted a number."),
        (put("annotations", 9, category_id=1), "annotations[9]: category_id 1 is none of its categories."),
        (drop("width", "images", 4), "images[4]: no width, wanted id, file_name, width, height."),
        (put("images", 1, height=0), "images[1]: got 78×0, wanted width and height in whole pixels."),
        (put("images", 1, id=10), "images[1]: id 10 is given twice, wanted an id of its own."),
        (put("images", 1, file_name=7), "images[1]: file_name is 7, wanted text."),
        (put("categories", 1, id=3), "categories[1]: id is 3, wanted a whole number of its own."),
        (put("annotations", 1, iscrowd="0"), "annotations[1]: iscrowd is '0', wanted 0 or 1."),
        (put("annotations", 0, bbox=[1, 2, 10**400, 4]), "annotations[0]: bbox is [1, 2, 1000"),
        (lambda keys: keys["categories"].clear(), "no categories, wanted at least one."),
        (lambda keys: keys["annotations"].insert(0, "x"), "annotations[0]: got str, wanted an object with image_id"),
        (lambda keys: keys["annotations"].clear(), "no object in 5 images, wanted at least one box."),
        (lambda keys: (keys["images"].clear(), keys["annotations"].clear()), "no images, wanted at least one."),
    ],
)
def test_bad_coco_files(change: Any, sentence: str, coco: Path) -> None:
    file = edit(coco, change)
    with pytest.raises(UserError) as caught:
        opened(settings(coco))
    assert str(caught.value).startswith(f"{file}: {sentence}")
    assert "\n" not in str(caught.value)


def test_files_that_are_no_json(coco: Path) -> None:
    file = coco / "annotations" / "instances_train.json"
    file.write_text('{"images": [\n1, }')
    with pytest.raises(UserError, match=rf"^{re.escape(str(file))}: not valid JSON in line 2, column 4: "):
        opened(settings(coco))
    file.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(UserError, match="not valid JSON"):
        opened(settings(coco))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("<annotation>", "<annotation><", "Annotations/train0.xml: not valid XML in line 1, column "),
        ("<width>", "<w>", "Annotations/train0.xml: not valid XML"),
        (
            "<width>80</width>",
            "",
            "Annotations/train0.xml: no size, wanted <size> with <width> and <height> in whole pixels.",
        ),
        (
            "<xmin>",
            "<xmin>x",
            "Annotations/train0.xml: object[0]: wanted four numbers in <bndbox>: xmin, ymin, xmax, ymax.",
        ),
        (r"<name>\w+</name>", "", "Annotations/train0.xml: object[0]: no <name>."),
        ("<width>80", "<width>inf", "Annotations/train0.xml: no size, wanted"),
        (
            "^",
            '<?xml version="1.0" encoding="moon"?>',
            "Annotations/train0.xml: not valid XML (unknown encoding: moon).",
        ),
    ],
)
def test_bad_voc_files(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    folder = write_voc(tmp_path / "set", TRAIN, VAL)
    file = folder / "Annotations" / "train0.xml"
    changed = re.sub(old, new, file.read_text(), count=1)
    assert changed != file.read_text()
    file.write_text(changed)
    with pytest.raises(UserError) as caught:
        opened(settings(folder, "voc"))
    assert str(caught.value).startswith(f"{folder}/{sentence}")


def test_voc_lists_of_windows_editors(tmp_path: Path) -> None:
    folder = write_voc(tmp_path / "set", TRAIN, VAL)
    listed = folder / "ImageSets" / "Main" / "train.txt"
    listed.write_text("train0\r\ntrain1\r\n", encoding="utf-8-sig")
    assert len(opened(settings(folder, "voc"))[0].train) == 2
    listed.write_bytes("träin0".encode("latin-1"))
    with pytest.raises(UserError, match=r"train\.txt: not UTF-8 \("):
        opened(settings(folder, "voc"))


def test_voc_lists_and_difficult_objects(tmp_path: Path) -> None:
    folder = write_voc(tmp_path / "set", TRAIN, VAL)
    file = folder / "Annotations" / "train1.xml"
    file.write_text(file.read_text().replace("<difficult>0", "<difficult>1", 1))
    source, notes = opened(settings(folder, "voc"))
    assert notes[0] == "train: 5 images, 10 objects; 1 crowd, not trained on and not counted"
    assert source.train.objects_of(1).crowd.tolist() == [True, False]
    listed = folder / "ImageSets" / "Main" / "train.txt"
    listed.write_text("train0 1\n\nghost\n")
    with pytest.raises(UserError, match=rf"^{re.escape(str(listed))}: line 3: no annotation .*ghost\.xml\.$"):
        opened(settings(folder, "voc"))
    listed.unlink()
    with pytest.raises(UserError, match=r"has no split train \(it has val\); wanted Annotations/, JPEGImages/"):
        opened(settings(folder, "voc"))
    with pytest.raises(UserError, match=r"Annotations names no object; wanted Pascal VOC's XML files"):
        opened(settings(tmp_path, "voc"))


# ---- one image ----


def marked(rows: int, columns: int, box: tuple[int, int, int, int]) -> tuple[torch.Tensor, Objects]:
    """A black image, white inside its box."""
    pixels = torch.zeros(3, rows, columns, dtype=torch.uint8)
    x0, y0, x1, y1 = box
    pixels[:, y0:y1, x0:x1] = 255
    area = torch.tensor([float((x1 - x0) * (y1 - y0))])
    return pixels, Objects(torch.tensor([box]).float(), torch.tensor([1]), area, torch.tensor([False]))


def bright(pixels: torch.Tensor) -> list[float]:
    where = (pixels[0] > 127).nonzero()
    if not len(where):
        return []
    (y0, x0), (y1, x1) = where.min(0).values.tolist(), where.max(0).values.tolist()
    return [float(x0), float(y0), float(x1 + 1), float(y1 + 1)]


@pytest.mark.parametrize(
    ("sides", "augment", "largest"),
    [
        ({"long_side": 200}, {"scale": [0.5, 1.5], "flip": 0.5, "flip_rows": 0.5}, 300),
        ({"long_side": 200}, {"scale": [0.7, 1.6], "crop": 90, "flip": 0.5}, 90),
        ({"long_side": 250, "short_side": 120}, {"short_sides": [60, 90, 120], "flip": 1.0}, 250),
        ({"long_side": 150}, {"color_jitter": 0.3, "flip_rows": 1.0}, 150),
    ],
)
def test_boxes_follow_their_pixels(sides: Any, augment: Any, largest: int) -> None:
    """Whatever is done to the image, the box bounds what it bounded before; where it is cut, so is the box."""
    data = DetectionDataConfig.model_validate({"source": "coco:x", **sides, "augment": augment})
    transform = TrainTransform(data)
    seen, lost = set(), 0
    for seed in range(40):
        torch.manual_seed(seed)
        image, target = transform(*marked(100, 160, (30, 20, 130, 50)))
        assert image.dtype == torch.uint8
        assert max(image.shape[-2:]) <= largest
        assert target["labels"].tolist() == [1] * len(target["boxes"])
        if len(target["boxes"]):
            assert target["boxes"][0].tolist() == pytest.approx(bright(image), abs=1.01)
            seen.add(tuple(target["boxes"][0].int().tolist()))
        else:
            lost += 1
            assert not bright(image)
    assert len(seen) >= (1 if augment.get("color_jitter") else 3)
    assert lost == 0 or "crop" in augment


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_boxes_at_the_border_stay(flip: float) -> None:
    """Scaled in float32, the last of 304 columns ends behind the 480 that there are then."""
    keys = {"source": "coco:x", "long_side": 480, "augment": {"flip": flip, "flip_rows": flip}}
    transform = TrainTransform(DetectionDataConfig.model_validate(keys))
    for columns in range(300, 460):
        image, target = transform(*marked(250, columns, (40, 30, columns, 250)))
        rows, wide = image.shape[-2:]
        (x0, y0, x1, y1), *_ = target["boxes"].tolist()
        ends = (x0, y0) if flip else (x1 - wide, y1 - rows)
        assert ends == pytest.approx((0.0, 0.0), abs=1e-3)


def test_colours_change_when_told() -> None:
    pixels, objects = marked(30, 40, (5, 6, 20, 25))
    grey = pixels // 2 + 20
    for strength in (0.0, 0.9):
        data = DetectionDataConfig.model_validate(
            {"source": "coco:x", "long_side": 40, "augment": {"color_jitter": strength}}
        )
        images = [TrainTransform(data)(grey, objects)[0] for _ in range(2)]
        assert torch.equal(images[0], grey) == (strength == 0)
        assert torch.equal(images[0], images[1]) == (strength == 0)


def test_the_evaluations_size() -> None:
    for sides, rows, columns, wanted in (
        ({"long_side": 64}, 30, 100, (19, 64)),
        ({"long_side": 64}, 100, 30, (64, 19)),
        ({"short_side": 40, "long_side": 64}, 30, 36, (40, 48)),
        ({"short_side": 40, "long_side": 64}, 30, 90, (21, 64)),
        ({"long_side": 64}, 1, 500, (1, 64)),
    ):
        data = DetectionDataConfig.model_validate({"source": "coco:x", **sides})
        assert tuple(eval_resize(data)(torch.zeros(3, rows, columns)).shape[1:]) == wanted


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        (
            {"augment": {"scale": [1.2, 0.8]}},
            "data.augment.scale: got [1.2, 0.8], wanted two positive factors, the small",
        ),
        (
            {"augment": {"scale": [0.5, 1], "short_sides": [9]}},
            "data.augment.short_sides: got it with data.augment.scale",
        ),
        ({"augment": {"short_sides": [0]}}, "data.augment.short_sides: got [0], wanted positive numbers"),
        (
            {"holdout": 0.1, "eval_split": "test"},
            "data.eval_split: got test with data.holdout=0.1, whose images are evaluated; wanted data.holdout=0 with it",
        ),
        ({"short_side": 900}, "data.short_side: got 900, wanted at most data.long_side=640"),
        (
            {"short_side": 90, "augment": {"scale": [0.5, 1]}},
            "data.augment.scale: got it with data.short_side, wanted d",
        ),
    ],
)
def test_faults_between_keys(keys: Any, fault: str) -> None:
    (found,) = DetectionDataConfig.model_validate({"source": "coco:x", **keys}).faults()
    assert found.startswith(fault)


# ---- batches ----

AUGMENT = {"scale": [0.5, 1.5], "crop": 64, "flip": 0.5}


def epoch(coco: Path, number: int = 0, start: int = 0, where: Where = CPU, **keys: Any) -> list[Any]:
    data = settings(coco, augment=AUGMENT, **keys)
    split = opened(data)[0].train
    return list(DetectionBatches(split, data, where, seed=5, training=True).epoch(number, start))


def same(one: Any, other: Any) -> bool:
    return all(
        torch.equal(a, b) and all(torch.equal(s[k], t[k]) for k in s)
        for a, b, s, t in zip(one.images, other.images, one.targets, other.targets, strict=True)
    )


def test_batches_depend_on_seed_epoch_and_position_alone(coco: Path) -> None:
    first = epoch(coco)
    assert len(first) == 2
    assert all(same(a, b) for a, b in zip(first, epoch(coco, keep=False, workers=2), strict=True))
    assert same(epoch(coco, start=1)[0], first[1])
    assert not same(epoch(coco, 1)[0], first[0])
    images = first[0].images[0]
    assert images.dtype == torch.float32
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    # Two processes share one process's batch of twice the size.
    (whole,) = epoch(coco, batch_size=4)
    parts = [epoch(coco, batch_size=2, where=Where(CPU.device, rank, 2))[0] for rank in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(whole.images, parts[0].images + parts[1].images, strict=True))


def test_images_stay_on_disk_where_they_are_too_many(coco: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = settings(coco)
    split = opened(data)[0].train
    pixels = 3 * sum(one.image.width * one.image.height for one in TRAIN)
    for room, wanted in ((pixels, KeptImages), (pixels - 1, AnnotatedImages)):
        monkeypatch.setattr("nearsight.train.data.detection.ON_DEVICE_BYTES", room)
        batches: Any = DetectionBatches(split, data, CPU, seed=0, training=True)
        assert type(batches.loader.dataset.split) is wanted


def test_evaluation_sees_every_image_once(coco: Path) -> None:
    data = settings(coco, long_side=32, eval_batch_size=2)
    split = opened(data)[0].evaluation
    seen = []
    for rank in range(2):
        batches = DetectionBatches(split, data, Where(CPU.device, rank, 2), seed=0, training=False)
        (batch,) = batches.epoch(0)
        seen += [target for target, valid in zip(batch.targets, batch.valid, strict=True) if valid]
        assert len(batch.images) == 2  # the last one only fills up
        assert all(max(image.shape) == 32 for image in batch.images)
    assert [target["boxes"].tolist() for target in seen] == [[list(map(float, b)) for b in one.boxes] for one in VAL]
    assert [target["size"].tolist() for target in seen] == [[one.image.height, one.image.width] for one in VAL]


@pytest.mark.parametrize("keep", [True, False])
def test_files_that_are_no_images(keep: bool, coco: Path) -> None:
    (coco / "images" / "train" / "1.png").write_text("no image")
    (coco / "images" / "train" / "2.png").unlink()
    Image.new("RGB", (9, 9)).save(coco / "images" / "train" / "3.png")
    with pytest.raises(
        UserError, match=r"[123]\.png: .*; mend or remove it, or leave such files out with data\.on_bad"
    ):
        epoch(coco, batch_size=5, keep=keep)
    (batch,) = epoch(coco, batch_size=5, keep=keep, on_bad="skip")
    names = {"1.png", "2.png", "3.png"}
    assert {Path(file).name for file in batch.bad} == names
    assert len(batch.images) == 5
    data = settings(coco, eval_split="train", keep=keep, on_bad="skip", eval_batch_size=5)
    (batch,) = DetectionBatches(opened(data)[0].evaluation, data, CPU, seed=0, training=False).epoch(0)
    assert batch.valid == [True, False, False, False, True]
    assert {Path(file).name for file in batch.bad} == names
    width, height = TRAIN[3].image.size
    with pytest.raises(BadImageError, match=rf"^9×9 pixels, its annotation says {width}×{height}$"):
        opened(data)[0].evaluation.read(3)


def test_annotated_photographs_lie_as_stored(coco: Path) -> None:
    """Boxes count the pixels of the file, whichever way the camera was held."""
    held = Image.Exif()
    held[0x0112] = 6
    TRAIN[3].image.save(coco / "images" / "train" / "3.png", exif=held)
    image, _ = opened(settings(coco, eval_split="train"))[0].evaluation.read(3)
    assert image.tobytes() == TRAIN[3].image.tobytes()
