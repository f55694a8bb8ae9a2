"""How many lines there may be, docstrings and blank lines included. These numbers only fall."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUDGETS = {
    "src": 31_250,
    "src/whereformer/analysis": 2_300,
    "src/whereformer/cli": 600,
    "src/whereformer/data": 2_160,
    "src/whereformer/kernels": 8_500,
    "src/whereformer/lab": 2_871,
    "src/whereformer/models": 7_150,
    "src/whereformer/positions": 3_800,
    "src/whereformer/recipes": 3_900,
    "tests": 29_000,
}


@pytest.mark.parametrize("folder", BUDGETS)
def test_lines_stay_within_their_budget(folder):
    if not (ROOT / folder).exists():
        pytest.skip("the source is not beside the tests")
    files = (file for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".cpp", ".h"))
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= BUDGETS[folder]
