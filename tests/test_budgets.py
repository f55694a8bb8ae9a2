"""How many lines there may be, docstrings and blank lines included. The sum only falls; packages may share it anew."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUDGETS = {
    "src": 28_530,
    "src/whereformer/analysis": 2_010,
    "src/whereformer/cli": 600,
    "src/whereformer/data": 1_500,
    "src/whereformer/kernels": 8_100,
    "src/whereformer/lab": 2_000,
    "src/whereformer/models": 6_000,
    "src/whereformer/positions": 3_750,
    "src/whereformer/recipes": 3_790,
    "tests": 28_000,
}


@pytest.mark.parametrize("folder", BUDGETS)
def test_lines_stay_within_their_budget(folder):
    if not (ROOT / folder).exists():
        pytest.skip("the source is not beside the tests")
    files = (file for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".cpp", ".h"))
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= BUDGETS[folder]
