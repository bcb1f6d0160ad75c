"""Networks as programs of their own: their numbers elsewhere, what they carry, what is refused and what is left of it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import nearsight
from nearsight.errors import UserError
from nearsight.export import program
from nearsight.export.program import FACTS, FORMATS, Graph, export
from tests.models.zoo import NAMES, NANO, awake, images
from tests.support.torch_versions import POOLS_ASK_PARITY

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def network(name: str = "resnet_nano", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return awake(timm.create_model(name, num_classes=5, **options)).eval()


def loaded(file: Path) -> Any:
    """The program as somebody else would run it."""
    if file.suffix == ".pt2":
        return torch.export.load(file).module()
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(["logits"], {"images": x.numpy()})[0])


def own_rounding(model: nn.Module, rows: int, columns: int) -> float:
    """How far the network itself is from float64, at most among images: 152 layers by more than 1e-5 of the largest."""
    x = images(rows, columns, batch=16, seed=rows)
    return float((model(x) - copy.deepcopy(model).double()(x.double())).abs().max())


def assert_same(model: nn.Module, file: Path, *sizes: tuple[int, int], batches: tuple[int, ...] = (1, 3)) -> None:
    run = loaded(file)
    with torch.no_grad():
        for rows, columns in sizes:
            for batch in batches:
                x = images(rows, columns, batch=batch, seed=rows)
                wanted, found = model(x), run(x)
                limit = 1e-5 * float(wanted.abs().max())
                if float((found - wanted).abs().max()) > limit:
                    limit = max(limit, 2 * own_rounding(model, rows, columns))
                torch.testing.assert_close(found, wanted, rtol=0, atol=limit)


# The shortest networks that have every mechanism and, past the first stage, its down-sampling.
FREE = [
    pytest.param(name, kind, marks=() if name in NANO and kind == ".onnx" else pytest.mark.slow)
    for name in NAMES
    for kind in FORMATS
]


@pytest.mark.parametrize(("name", "kind"), FREE)
def test_any_batch_and_any_size(name: str, kind: str, tmp_path: Path) -> None:
    """ONNX and torch.export, one file each, at sizes that it was not made at: odd, wide, tall."""
    model, file = network(name), tmp_path / f"program{kind}"
    # In .pt2 files no stage's map may be a single row or column: torch.export keeps 1 apart from other lengths.
    size, others = ((32, 32), [(32, 32), (33, 71)]) if kind == ".onnx" else ((64, 64), [(64, 96), (97, 70)])
    if name not in NANO:
        size, others = (64, 64), [(64, 96), (97, 70)]
    made = export(Graph(model), file, channels=3, size=size, any_size=True)
    assert made.shape == ["batch", 3, "rows", "columns"]
    assert made.file == file
    assert_same(model, file, *others)


LAYERS = {
    "local": lambda: nearsight.LocalAttention2d(3, 8, (3, 5), stride=2, num_heads=2),
    "stem": lambda: nearsight.AttentionStem2d(3, 8),
    "qna": lambda: nearsight.QnA2d(3, 8, (3, 4), stride=(2, 3), num_heads=2),
    "upsample": lambda: nearsight.QnAUpsample2d(3, 8, num_heads=2),
    "window": lambda: nearsight.WindowAttention2d(3, 8, (3, 4), num_heads=2),
    "explicit": lambda: nearsight.ExplicitAugmentedConv2d(3, 8, stride=2, ratio=0.5, num_heads=2),
    "aa": lambda: nearsight.AttentionAugmentedConv2d(3, 8, feature_size=(6, 8), stride=2, ratio=0.5, num_heads=2),
    # On small maps its values are wider than its queries with their positions, on larger ones not.
    "wide aa": lambda: nearsight.AttentionAugmentedConv2d(
        3, 128, feature_size=(6, 8), attention_channels=96, key_channels=4, num_heads=2
    ),
    # A single value per head: what is put beside it to fill up a product is of any length, on 12×10 pixels 1.
    "narrow aa": lambda: nearsight.AttentionAugmentedConv2d(
        3, 8, feature_size=(6, 8), attention_channels=2, key_channels=2, num_heads=2
    ),
}
POOLED = ("local", "explicit", "aa")  # those of the list with a stride that they pool by


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_hold_for_any_size(name: str, kind: str, tmp_path: Path) -> None:
    """Traced on a map that whole windows and strides fill, run where they do not, and the other way round."""
    torch.manual_seed(0)
    layer, file = LAYERS[name]().eval(), tmp_path / f"program{kind}"
    if POOLS_ASK_PARITY and kind == ".pt2" and name in POOLED:
        with pytest.raises(UserError, match=r"the program does not run on .* leave out --any-size"):
            export(Graph(layer), file, channels=3, size=(6, 8), any_size=True)
        return
    made = export(Graph(layer), file, channels=3, size=(6, 8), any_size=True)
    assert made.shape == ["batch", 3, "rows", "columns"]
    assert_same(layer, file, (7, 13), (12, 10), (24, 24), (30, 80))


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("name", ["window", "aa"])
def test_another_machine_may_take_other_kernels(name: str, kernel: SDPBackend, tmp_path: Path) -> None:
    """What torch's attention gives lies in memory as the kernel likes; the graph must not rely on the one of here."""
    torch.manual_seed(0)
    layer, file = LAYERS[name]().eval(), tmp_path / "program.pt2"
    export(Graph(layer), file, channels=3, size=(12, 24))
    with sdpa_kernel(kernel):
        assert_same(layer, file, (12, 24))


@pytest.mark.parametrize("name", ["sasa_resnet_nano", "qna_vit_nano", "expatt_resnet_nano"])
def test_one_size(name: str, tmp_path: Path) -> None:
    """A rectangle of its own and any batch, for torch.export."""
    model, file = network(name), tmp_path / "program.pt2"
    made = export(Graph(model), file, channels=3, size=(24, 40))
    assert made.shape == ["batch", 3, 24, 40]
    assert made.checked == [(1, 3, 24, 40), (3, 3, 24, 40)]
    assert_same(model, file, (24, 40))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_fixed_batch_is_the_only_one(kind: str, tmp_path: Path) -> None:
    model, file = network(), tmp_path / f"program{kind}"
    made = export(Graph(model), file, channels=3, size=(16, 24), batch=2)
    assert made.shape == [2, 3, 16, 24]
    assert made.checked == [(2, 3, 16, 24)]
    assert_same(model, file, (16, 24), batches=(2,))
    run = loaded(file)
    for wrong in (images(16, 24, batch=1), images(24, 16, batch=2)):
        with pytest.raises(Exception, match=r"(?i)images|dimension|shape"):
            run(wrong)


@pytest.mark.parametrize("kind", FORMATS)
def test_pixels_are_normalised_inside(kind: str, tmp_path: Path) -> None:
    model, file = network(), tmp_path / f"program{kind}"
    export(Graph(model, (MEAN, STD)), file, channels=3, size=(16, 24))
    pixels = images(16, 24) / 2 + 0.5
    mean, std = (torch.tensor(t).view(3, 1, 1) for t in (MEAN, STD))
    with torch.no_grad():
        wanted = model((pixels - mean) / std)
    torch.testing.assert_close(loaded(file)(pixels), wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(wanted, model(pixels), atol=1e-2)


def test_a_network_that_rebuilds_gives_pixels() -> None:
    pixels = images(8, 8) / 2 + 0.5
    graph = Graph(nn.Identity(), (MEAN, STD), rebuilds=True)
    torch.testing.assert_close(graph(pixels), pixels)
    twice = Graph(nn.Conv2d(3, 3, 1), (MEAN, STD), rebuilds=True)
    nn.init.constant_(twice.network.weight, 50.0)  # type: ignore[arg-type]
    rebuilt = twice(pixels)
    assert (rebuilt.min().item(), rebuilt.max().item()) == (0.0, 1.0)
    assert torch.equal(Graph(nn.Identity(), rebuilds=True)(pixels - 1), pixels - 1)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_says_what_it_is(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"program{kind}"
    export(Graph(network()), file, channels=3, size=(16, 24), any_size=True, facts={"classes": ["Möwe", "cat"]})
    if kind == ".pt2":
        kept = {FACTS: ""}
        torch.export.load(file, extra_files=kept)
        text = kept[FACTS]
    else:
        made = onnx.load(file)
        onnx.checker.check_model(made, full_check=True)
        text = {entry.key: entry.value for entry in made.metadata_props}[FACTS]
        (images_in,), (logits,) = made.graph.input, made.graph.output
        axes = [d.dim_param or d.dim_value for d in images_in.type.tensor_type.shape.dim]
        assert (images_in.name, axes) == ("images", ["batch", 3, "rows", "columns"])
        assert logits.name == "logits"
    found = json.loads(text)
    assert found["classes"] == ["Möwe", "cat"]
    assert (found["shape"], found["output"]) == (["batch", 3, "rows", "columns"], "logits")


ALONE = {
    ".onnx": "import onnxruntime as o; y = o.InferenceSession(F).run(None, {'images': x})[0]",
    ".pt2": "import torch; y = torch.export.load(F).module()(torch.from_numpy(x)).detach().numpy()",
}


@pytest.mark.parametrize("kind", FORMATS)
def test_neither_nearsight_nor_for_onnx_torch_is_needed(kind: str, tmp_path: Path) -> None:
    model, file = network("sasa_resnet_nano", layers=(1, 1, 1, 1)), tmp_path / f"program{kind}"
    export(Graph(model), file, channels=3, size=(16, 24), batch=2)
    x = images(16, 24)
    np.save(tmp_path / "x.npy", x.numpy())
    absent = ["nearsight", "timm", "torchvision", *(["torch"] if kind == ".onnx" else [])]
    code = f"""
import sys
sys.modules |= dict.fromkeys({absent})
import numpy as np
x, F = np.load(sys.argv[1] + "/x.npy"), sys.argv[1] + "/program{kind}"
{ALONE[kind]}
np.save(sys.argv[1] + "/y.npy", y)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "y.npy")), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda run: lambda x: run(x) * 1.001, r"gives other numbers than the network for 1×3×16×24 \(off by 1"),
        (lambda run: lambda x: run(x) * torch.nan, r"gives other numbers than the network .*nan"),
        (lambda run: lambda x: run(x)[:, :4], r"gives \(1, 4\) for 1×3×16×24, the network \(1, 5\); not kept"),
        (lambda run: lambda x: run(x[:, :2]), r"does not run on 1×3×16×24 .*not kept; try the other format"),
    ],
    ids=["a thousandth off", "not numbers", "another shape", "does not run"],
)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_program_that_differs_is_not_kept(
    kind: str, broken: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"program{kind}"
    file.write_text("an older program")
    name = f"_load_{kind[1:]}"
    load = getattr(program, name)
    monkeypatch.setattr(program, name, lambda part: broken(load(part)))
    with pytest.raises(UserError, match=words):
        export(Graph(network()), file, channels=3, size=(16, 24))
    assert [f.name for f in tmp_path.iterdir()] == [file.name]
    assert file.read_text() == "an older program"


@pytest.mark.parametrize("kind", FORMATS)
def test_what_cannot_be_written_is_no_fault_of_torch(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk torch's own writer of .pt2 files ended the process."""
    folder, traced = tmp_path / "gone", program._traced

    def losing(*args: Any) -> Any:
        folder.rmdir()
        return traced(*args)

    monkeypatch.setattr(program, "_traced", losing)
    with pytest.raises(FileNotFoundError):
        export(Graph(nn.Flatten()), folder / f"a{kind}", channels=3, size=(16, 24), batch=1)


def test_weights_that_no_single_onnx_file_holds(tmp_path: Path) -> None:
    huge = nn.Linear(20_000, 20_000, bias=False, device="meta")
    with pytest.raises(
        UserError, match=r"has 1\.6 GB of weights, wanted at most 1\.5 for one \.onnx file; write a \.pt2"
    ):
        export(Graph(huge), tmp_path / "a.onnx", channels=3, size=(16, 24))
    assert not list(tmp_path.iterdir())


class Picky(nn.Module):
    """Asks about the values of its input, which no graph can hold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) if x.sum() > 0 else x.amax((2, 3))


class Particular(nn.Module):
    """Takes every size and treats one as no other: what is traced at it holds for it alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) if x.shape[3] == 96 else x.amax((2, 3))


def test_what_no_graph_can_hold_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^the network cannot be exported at 16×24 \(.+\)\.$"):
        export(Graph(Picky()), tmp_path / "a.pt2", channels=3, size=(16, 24))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (
            RuntimeError("no such operator"),
            r"^ONNX lacks what the network does \(RuntimeError: no such operator\); write a",
        ),
        (
            ModuleNotFoundError("No module named 'onnxscript.new'"),
            r"does not work with the onnxscript .*pip install -U",
        ),
    ],
    ids=["an operator", "an old onnxscript"],
)
def test_what_onnx_lacks(reason: Exception, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("an exporter's own words") from reason

    monkeypatch.setattr(torch.onnx, "export", refuse)
    with pytest.raises(UserError, match=words):
        export(Graph(network()), tmp_path / "program.onnx", channels=3, size=(16, 24))
    assert not list(tmp_path.iterdir())


def test_a_network_of_one_size_says_so(tmp_path: Path) -> None:
    vit = network("vit_tiny_patch16_224", img_size=32, depth=1)
    words = r"^the network takes no other sizes than 32×32 \(AssertionError: Input height.*; leave out --any-size\.$"
    with pytest.raises(UserError, match=words):
        export(Graph(vit), tmp_path / "a.onnx", channels=3, size=(32, 32), any_size=True)
    with pytest.raises(UserError, match=r"^the network holds for 96 columns alone; leave out --any-size\.$"):
        export(Graph(Particular()), tmp_path / "a.pt2", channels=3, size=(16, 32), any_size=True)
    assert not list(tmp_path.iterdir())


class Halves(nn.Module):
    """Takes multiples of 8, as a network does that goes down and up again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[2] % 8 == 0
        assert x.shape[3] % 8 == 0
        return x.unflatten(3, (-1, 8)).unflatten(2, (-1, 8)).amax((3, 5)).mean((2, 3))


@pytest.mark.parametrize("kind", FORMATS)
def test_multiples_are_named(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"program{kind}"
    made = export(Graph(Halves()), file, channels=3, size=(16, 32), any_size=True)
    assert made.shape == ["batch", 3, "8·rows", "8·columns"]
    assert made.checked == [(1, 3, 16, 32), (3, 3, 16, 32), (2, 3, 24, 56), (1, 3, 40, 24)]
    assert_same(Halves(), file, (16, 56))


class OneImage(nn.Module):
    """Mixes the images of a batch of two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) @ torch.ones(3, 2) @ x.new_ones(2, 2) @ x.mean((2, 3))


def test_a_network_of_one_batch_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^the network holds for a batch of 2 alone; name it with --batch\.$"):
        export(Graph(OneImage()), tmp_path / "a.pt2", channels=3, size=(16, 24))


def test_a_name_that_says_no_format(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"wanted a name that ends in \.onnx or \.pt2\.$"):
        export(Graph(network()), tmp_path / "program.pt", channels=3, size=(16, 24))
    (tmp_path / "folder.pt2").mkdir()
    with pytest.raises(UserError, match=r"folder\.pt2', which is a folder; wanted the name of a file\.$"):
        export(Graph(network()), tmp_path / "folder.pt2", channels=3, size=(16, 24))
