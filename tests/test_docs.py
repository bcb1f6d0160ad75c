"""Every example runs: the doctests of every module, and the python blocks of the pages."""

import doctest
import importlib
import os
import pkgutil
import re
from pathlib import Path

import pytest

import nearsight

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Kernels are Triton's dialect, and __main__ runs the program.
MODULES = [
    module.name
    for module in pkgutil.walk_packages(nearsight.__path__, "nearsight.")
    if module.name.rpartition(".")[2] not in ("kernels", "__main__")
]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def python_blocks(page: Path) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("name", ["nearsight", *MODULES])
def test_docstrings(name):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages(page, tmp_path, monkeypatch):
    """The python blocks of a page are one program; a block of `>>>` lines is compared with what it prints."""
    source = python_blocks(page)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {**os.environ, "MPLBACKEND": "Agg"})
    if ">>>" in source:
        test = doctest.DocTestParser().get_doctest(source, {}, page.name, str(page), 0)
        runner = doctest.DocTestRunner(optionflags=FLAGS)
        runner.run(test)
        assert runner.failures == 0
    else:
        exec(compile(source, str(page), "exec"), {"__name__": "__main__"})


def test_the_pages_links_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(
    ("home", "name"),
    [(home, name) for home in (nearsight, nearsight.ops) for name in home.__all__ if callable(getattr(home, name))],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_public_function_and_layer_shows_an_example(home, name):
    public = getattr(home, name)
    if not issubclass(public if isinstance(public, type) else object, tuple):  # a record needs none
        assert ">>>" in (public.__doc__ or "")
