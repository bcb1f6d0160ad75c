"""The package as a whole: what it ships, what an import costs, and which folder may use which."""

import ast
import itertools
import subprocess
import sys
import tomllib
from importlib import metadata, resources
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import nearsight

ROOT = Path(nearsight.__file__).parent
LOWEST = ROOT.parents[1] / "constraints-lowest.txt"
FILES = sorted(ROOT.rglob("*.py"))

# cli → train, viz, bench, export → detect → models → layers → ops: a folder may use those of lower rank.
RANK = {
    "ops": 0,
    "weights": 0,
    "layers": 1,
    "models": 2,
    "detect": 3,
    "train": 4,
    "viz": 4,
    "bench": 4,
    "export": 4,
    "cli": 5,
}
# Never imported by `import nearsight`: the extras, and what only a verb needs.
HEAVY = (
    "matplotlib",
    "gradio",
    "transformers",
    "accelerate",
    "pydantic",
    "typer",
    "rich",
    "sklearn",
    "onnx",
    "datasets",
)


def imports(path: Path) -> set[str]:
    """Modules a file names in its import statements, wherever they stand."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def folder_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "nearsight" and len(parts) > 1 else None


def test_version_is_the_packages():
    assert nearsight.__version__ == metadata.version("nearsight")


def test_types_are_shipped():
    assert resources.files("nearsight").joinpath("py.typed").is_file()


def test_every_public_name_exists():
    for name in nearsight.__all__:
        assert hasattr(nearsight, name), name


def test_import_is_lean():
    # torch and timm may bring some of these themselves: that is not ours to judge, so they come first.
    code = (
        f"import sys, torch, timm, torchvision; before = set(sys.modules); import nearsight; "
        f"print(*sorted(m for m in sys.modules if m not in before and m.partition('.')[0] in {HEAVY!r}))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_import_loads_no_kernel():
    """Triton's kernels are compiled when first used, and a Python without Triton imports nearsight all the same."""
    code = (
        "import sys; sys.modules['triton'] = None; import nearsight; "
        "print(*sorted(m for m in sys.modules if m.startswith('nearsight') and m.endswith('.kernels')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    folder = path.relative_to(ROOT).parts[0]
    if folder not in RANK:
        return
    for module in imports(path):
        used = folder_of(module)
        if used in RANK and used != folder:
            assert RANK[used] < RANK[folder], f"{folder} may not use {used}: {module}"


@pytest.mark.parametrize("path", sorted((ROOT / "ops").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_ops_need_torch_and_triton_only(path):
    tops = {module.partition(".")[0] for module in imports(path)}
    assert tops <= {"torch", "triton", "nearsight", *sys.stdlib_module_names}


def test_every_folder_has_its_place():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders - {"recipes"} <= set(RANK)


def test_no_model_file_is_named_like_one_of_timms():
    """timm keys modules by file name: a second `resnet.py` would mix with its own."""
    import timm.models

    theirs = {path.stem for path in Path(timm.models.__file__).parent.glob("*.py") if not path.stem.startswith("_")}
    assert not theirs & {path.stem for path in (ROOT / "models").glob("*.py") if not path.stem.startswith("_")}


@pytest.mark.skipif(not LOWEST.exists(), reason="not part of a distribution")
def test_lower_bounds_are_those_tested():
    """`make test-lowest` installs the versions that pyproject.toml promises to work with."""
    project = tomllib.loads(LOWEST.with_name("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = itertools.chain.from_iterable(project["optional-dependencies"].values())
    needs = [Requirement(need) for need in (*project["dependencies"], *extras)]
    wanted = {need.name: f"=={bound.version}" for need in needs for bound in need.specifier if bound.operator == ">="}
    pins = map(Requirement, LOWEST.read_text(encoding="utf-8").splitlines()[1:])
    assert {pin.name: str(pin.specifier) for pin in pins} == wanted
