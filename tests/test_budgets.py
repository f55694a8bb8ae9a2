"""How many lines, files and uses of ``Any`` there may be. Docstrings and blank lines count, too."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = {"src": 31_000, "src/whereformer/kernels": 8_700, "tests": 30_000}
MAX_FILES = 199
MAX_ANY = 350
"""How often the package may say ``Any``, which switches type checks off."""


def _source_files(folder):
    return [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cpp", ".h")]


pytestmark = pytest.mark.skipif(not (ROOT / "src").exists(), reason="the source is not next to the tests")


@pytest.mark.parametrize("folder", MAX_LINES)
def test_lines_stay_within_the_budget(folder):
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in _source_files(folder))
    assert lines <= MAX_LINES[folder]


def test_the_number_of_files_stays_within_the_budget():
    assert len(_source_files("src")) <= MAX_FILES


def test_any_stays_rare():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in _source_files("src") if path.suffix == ".py"]
    names = [node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)]
    assert names.count("Any") <= MAX_ANY
