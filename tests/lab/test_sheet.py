"""Tables in a terminal: every cell is shown in full, whatever the width."""

import io

import pytest

from whereformer.lab.sheet import Column, Sheet
from whereformer.lab.terminal import Terminal

SHEET = Sheet.of(
    "Losses",
    [Column("#"), Column("position", left=True), *(Column(f"loss {number}") for number in range(6))],
    [["1", "tisa", *("1.234",) * 6], ["2", "rope/none", *("2.345",) * 6]],
    name_column=1,
    notes=("Lower is better.",),
)


@pytest.mark.parametrize("width", [200, 80, 60])
def test_nothing_is_cut(width):
    stream = io.StringIO()
    Terminal(file=stream, width=width).print(SHEET)
    printed = stream.getvalue()
    assert max(map(len, printed.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed
    assert printed.count("loss") == printed.count("1.234") == printed.count("2.345") == 6
    assert printed.count("Losses") == printed.count("tisa") == printed.count("Lower is better.") == 1
