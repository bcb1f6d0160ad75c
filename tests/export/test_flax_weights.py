"""The authors' Flax weights: their network's numbers after conversion, and every way a file can be wrong."""

import struct
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.models import register_model

from nearsight.cli.app import main
from nearsight.cli.convert import convert
from nearsight.errors import UserError
from nearsight.export.flax_msgpack import unpack
from nearsight.export.flax_weights import convert_flax, flax_sources, read_flax
from nearsight.layers import WindowAttention2d
from nearsight.models.qna_vit import QnAViT, _create_qna_vit
from tests.models.test_qna_vit import MICRO

VECTORS = Path(__file__).parents[1] / "vectors"
PARAMETERS = VECTORS / "qna_micro_params.npz"


@register_model
def qna_vit_test_micro(pretrained=False, **options):
    """The network of the vectors; registered by the tests, not by the package."""
    return _create_qna_vit("qna_vit_test_micro", pretrained, **{**MICRO, **options})


@pytest.fixture(autouse=True, scope="module")
def _forget_the_test_network():
    """A registered name would otherwise join the package's list in tests that come later."""
    yield
    from timm.models import _registry

    for table in (_registry._model_entrypoints, _registry._model_to_module):
        table.pop("qna_vit_test_micro", None)
    for names in _registry._module_to_models.values():
        names.discard("qna_vit_test_micro")


def micro():
    return QnAViT(**MICRO).eval()


def their_outputs():
    with np.load(VECTORS / "qna_micro_io.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def run_with_stages(model, x):
    """Logits and what each of the authors' stages returns, NHWC."""
    stages = {}

    def keep(name):
        def hook(module, arguments, output):
            stages[f"stage/{name}"] = output.permute(0, 2, 3, 1)

        return hook

    model.patch_embed.register_forward_hook(keep("StemBlock_0"))
    for i, stage in enumerate(model.stages):
        if stage.downsample is not None:
            stage.downsample.register_forward_hook(keep(f"QnAStage_{i - 1}"))
        for block in stage.blocks:
            if isinstance(block.mixer, WindowAttention2d):
                block.register_forward_hook(keep(f"LSAStage_{i}"))
    model.stages[-1].register_forward_hook(keep(f"QnAStage_{len(model.stages) - 1}"))
    with torch.no_grad():
        logits = model(x.permute(0, 3, 1, 2))
    # A stage without window attention hands on what it got.
    stages.setdefault("stage/LSAStage_0", stages["stage/StemBlock_0"])
    return {"logits": logits, **stages}


def test_the_authors_network_after_conversion(tmp_path):
    """Logits and every stage, whose activations reach 9: the released code's float32 numbers are within 5e-6 of ours in float64,
    and ours in float32, whose last digits depend on the processor, at most twice as far from those."""
    out = tmp_path / "micro.safetensors"
    convert(PARAMETERS, "qna_vit_test_micro", out, num_classes=10)
    model = timm.create_model("qna_vit_test_micro", checkpoint_path=str(out)).eval()
    theirs = their_outputs()
    x = theirs.pop("x")
    ours = run_with_stages(model, x)
    truth = run_with_stages(model.double(), x.double())
    assert ours.keys() == truth.keys() == theirs.keys()
    for name, want in theirs.items():
        their_error = (want - truth[name]).abs().max().item()
        our_error = (ours[name] - truth[name]).abs().max().item()
        assert their_error <= 5e-6, f"{name}: {their_error:.2e}"
        assert our_error <= 2 * their_error, f"{name}: {our_error:.2e}, theirs {their_error:.2e}"


def test_every_source_is_used_once_and_every_target_filled():
    model, params = micro(), read_flax(PARAMETERS)
    sources = [source.name for source in flax_sources(model).values()]
    assert len(sources) == len(set(sources)) == len(params)
    state = convert_flax(params, model)
    assert state.keys() == model.state_dict().keys()
    assert sum(t.numel() for t in state.values()) == sum(t.numel() for t in params.values())


@pytest.mark.parametrize("name", ["qna_vit_tiny", "qna_vit_tiny_7x7", "qna_vit_small", "qna_vit_base", "qna_vit_nano"])
def test_every_network_has_a_source_for_every_parameter(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    sources, state = flax_sources(model), model.state_dict()
    assert sources.keys() == state.keys()
    for target, source in sources.items():
        assert source.bring(torch.empty(source.shape, device="meta")).shape == state[target].shape


def test_all_that_is_wrong_is_listed():
    params = read_flax(PARAMETERS)
    del params["StemBlock_0/conv_1x1/kernel"]
    params["extra/kernel"] = torch.zeros(3)
    name = "ClassificationHead_0/head_logits/kernel"
    params[name] = params[name].T
    with pytest.raises(UserError) as caught:
        convert_flax(params, micro())
    text = str(caught.value)
    assert "missing: StemBlock_0/conv_1x1/kernel" in text
    assert "unused: extra/kernel" in text
    assert f"wrong shape: {name} [10, 128] (wanted [128, 10])" in text


def test_other_networks_and_forms_are_refused():
    with pytest.raises(UserError, match="got a ResNet, wanted a QnA-ViT"):
        convert_flax({}, timm.create_model("resnet18"))
    with pytest.raises(UserError, match=r"parameters that the authors' code has not: .*rel_col"):
        convert_flax({}, QnAViT(**MICRO, mixer="sasa"))


# ── Files ──


def pack(value):
    """A small msgpack writer, with Flax's extension for arrays; written from the format's description."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return struct.pack(">Bq", 0xD3, value)
    if isinstance(value, float):
        return struct.pack(">Bd", 0xCB, value)
    if isinstance(value, str):
        data = value.encode()
        return struct.pack(">BB", 0xD9, len(data)) + data
    if isinstance(value, bytes):
        return struct.pack(">BI", 0xC6, len(value)) + value
    if isinstance(value, list | tuple):
        return struct.pack(">BH", 0xDC, len(value)) + b"".join(map(pack, value))
    if isinstance(value, dict):
        return struct.pack(">BH", 0xDE, len(value)) + b"".join(pack(k) + pack(v) for k, v in value.items())
    array = np.asarray(value)
    data = pack((list(array.shape), array.dtype.name, array.tobytes()))
    return struct.pack(">BIb", 0xC9, len(data), 1) + data


def tree(flat):
    nested = {}
    for name, array in flat.items():
        *folders, leaf = name.split("/")
        place = nested
        for folder in folders:
            place = place.setdefault(folder, {})
        place[leaf] = array
    return nested


def test_a_msgpack_train_state_gives_what_the_npz_gives(tmp_path):
    with np.load(PARAMETERS) as arrays:
        flat = {name: arrays[name] for name in arrays.files}
    optimizer = {"0": {"count": 7, "mu": tree(flat)}, "1": {}}
    state = {"step": 300, "params": tree(flat), "opt_state": optimizer, "batch_stats": None, "dynamic_scale": None}
    (tmp_path / "checkpoint_300").write_bytes(pack(state))
    (tmp_path / "bare").write_bytes(pack(tree(flat)))
    want = read_flax(PARAMETERS)
    for name in ("checkpoint_300", "bare"):
        got = read_flax(tmp_path / name)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], want[key]) for key in want)


def test_msgpack_values():
    assert unpack(pack({"a": [1, -2, True, None, 2.5, "text", b"bytes"]})) == {
        "a": [1, -2, True, None, 2.5, "text", b"bytes"]
    }
    short = (
        bytes([0x83, 0xA1]) + b"a" + bytes([0x07, 0xA1]) + b"b" + bytes([0xFF, 0xA1]) + b"c" + bytes([0x91, 0xCC, 200])
    )
    assert unpack(short) == {"a": 7, "b": -1, "c": [200]}
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert torch.equal(unpack(pack({"x": array}))["x"], torch.from_numpy(array))
    bits = pack(([2], "bfloat16", b"\x80\x3f\x00\xc0"))
    assert unpack(struct.pack(">BBb", 0xC7, len(bits), 1) + bits).tolist() == [1.0, -2.0]
    chunked = {"__msgpack_chunked_array__": True, "shape": {"0": 2, "1": 3}, "chunks": {"0": array[0], "1": array[1]}}
    assert torch.equal(unpack(pack({"x": chunked}))["x"], torch.from_numpy(array))


def nested_extensions(count):
    data = b"\x00"
    for _ in range(count):
        data = struct.pack(">BIb", 0xC9, len(data), 1) + data
    return data


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "it ends at byte 0, in the middle of a value"),
        (pack({"a": 1})[:-3], "in the middle of a value"),
        (pack({"a": 1}) + b"\x00", "1 bytes after its end"),
        (b"\xc1", "byte 0xc1 at 0 starts no value"),
        (b"\x91" * 100, "nested deeper than 64"),
        (b"\xd4\x05\x00", "extension 5 is none of Flax's"),
        (struct.pack(">BBb", 0xC7, 1, 1) + b"\x01", "an array is not (shape, dtype, bytes)"),
        (b"\x81\xc0\x01", "a map has a key of type NoneType"),
        (b"\xd4\x02\x00", "a complex number is not (real, imaginary)"),
        (nested_extensions(2000), "nested deeper than 64"),
        (pack({"__msgpack_chunked_array__": True, "shape": [6]}), "an array's chunks do not fit together"),
        (pack({"__msgpack_chunked_array__": True, "shape": [6], "chunks": [1, 2]}), "an array's chunks do not fit"),
    ],
)
def test_msgpack_refusals(data, text):
    with pytest.raises(UserError) as caught:
        unpack(data)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (([2], "object", b"12345678"), "a Flax array of dtype 'object', wanted one of float16"),
        (([3], "float32", b"1234"), "an array of shape [3] and dtype float32 in 4 bytes"),
    ],
)
def test_msgpack_arrays_are_checked(parts, text):
    data = pack(parts)
    with pytest.raises(UserError) as caught:
        unpack(struct.pack(">BBb", 0xC7, len(data), 1) + data)
    assert text in str(caught.value)


def test_nothing_is_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    np.savez(tmp_path / "bomb.npz", x=np.array([Bomb()], dtype=object))
    with pytest.raises(UserError, match="cannot read 'x' as an array of numbers"):
        read_flax(tmp_path / "bomb.npz")
    torch.save(Bomb(), tmp_path / "bomb.pt")
    with pytest.raises(UserError, match="which is no array of numbers"):
        read_flax(tmp_path / "bomb.pt")
    assert not (tmp_path / "exploded").exists()


def test_leading_collection_name_is_dropped(tmp_path):
    with np.load(PARAMETERS) as arrays:
        np.savez(tmp_path / "p.npz", **{f"params/{name}": arrays[name] for name in arrays.files})
    assert read_flax(tmp_path / "p.npz").keys() == read_flax(PARAMETERS).keys()


# ── The command ──


def test_the_command(tmp_path, capsys):
    out = tmp_path / "micro.safetensors"
    code = main(["convert", str(PARAMETERS), "-m", "qna_vit_test_micro", "-o", str(out), "--num-classes", "10"])
    assert code == 0
    assert "tensors" in capsys.readouterr().out
    assert load_file(out).keys() == micro().state_dict().keys()


def test_a_folder_that_is_not_there(tmp_path, capsys):
    out = tmp_path / "none" / "micro.safetensors"
    words = ["convert", str(PARAMETERS), "-m", "qna_vit_test_micro", "-o", str(out), "--num-classes", "10"]
    assert main(words) == 2
    assert capsys.readouterr().err == f"nearsight convert: cannot open '{out}': No such file or directory.\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "qna_vit_tiny", "-o", "x.pt"], "wanted a file name that ends in .safetensors"),
        (["--model", "qna_vit_tini", "-o", "x.safetensors"], "no model 'qna_vit_tini'. Did you mean 'qna_vit_tiny'?"),
        (["--model", "qna_vit_nano", "-o", "x.safetensors", "--num-classes", "10"], "do not fit the model; missing: "),
        (
            ["--model", "qna_vit_tiny.moon", "-o", "x.safetensors"],
            "got --model 'qna_vit_tiny.moon', wanted a QnA-ViT such as",
        ),
        (
            ["--model", "qna_autoencoder", "-o", "x.safetensors"],
            "got --model 'qna_autoencoder', wanted a QnA-ViT such as",
        ),
    ],
)
def test_mistakes_are_one_line(arguments, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", str(PARAMETERS), *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert text in lines[0]
    assert not list(tmp_path.iterdir())
