"""What the site's pages say is true: their Python runs, every method has a page, and every public name is listed."""

import re
import tomllib
from pathlib import Path

import pytest

import whereformer
import whereformer.analysis
import whereformer.models
import whereformer.positions

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if BLOCK.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_code_of_a_page_runs(page):
    namespace = {}
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        exec(block, namespace)


def test_every_method_has_a_page():
    pages = {page.stem for page in (DOCS / "methods").glob("*.md")} - {"index"}
    assert pages == set(whereformer.position_names()) - {"none"}


def test_the_reference_lists_every_public_name():
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    listed = {name.rpartition(".")[2] for name in re.findall(r"auto\w+:: ([\w.]+)", text)}
    modules = whereformer, whereformer.positions, whereformer.models, whereformer.analysis
    assert {name for module in modules for name in module.__all__} - listed == set()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/compatibility.md"])
def test_versions_are_those_of_the_package(page):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / page).read_text(encoding="utf-8")
    torch = project["dependencies"][0].removeprefix("torch>=")
    python = project["requires-python"].removeprefix(">=")
    assert re.search(rf"PyTorch\W*{re.escape(torch)}\b", text)
    assert re.search(rf"Python\W*{re.escape(python)}\b", text)
    if "transformers (" in text:
        (transformers,) = re.findall(r"transformers>=([\d.]+)", " ".join(project["optional-dependencies"]["hf"]))
        assert f"{transformers} and newer" in text
