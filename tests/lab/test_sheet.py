"""Tables in a terminal: every column is shown in full, in as many tables as it takes."""

import io

import pytest

from whereformer.lab.sheet import Column, Sheet
from whereformer.lab.terminal import Terminal

SHEET = Sheet.of(
    "Losses",
    [Column("#"), Column("position", left=True), *(Column(f"loss {number}") for number in range(6))],
    [["1", "tisa", *("1.234-5.678",) * 6], ["2", "rope/none", *("2.345-6.789",) * 6]],
    named=1,
    notes=("Lower is better.",),
)


def drawn(sheet, width):
    stream = io.StringIO()
    Terminal(file=stream, width=width).print(sheet)
    return stream.getvalue()


@pytest.mark.parametrize(("width", "tables"), [(200, 1), (80, 2), (40, 6)])
def test_columns_without_room_come_in_more_tables_with_the_names(width, tables):
    found = drawn(SHEET, width)
    assert max(map(len, found.splitlines())) <= width
    assert "…" not in found
    assert found.count("position") == tables
    assert found.count("  tisa") == tables
    assert all(found.count(f"loss {number}") == 1 for number in range(6))
    assert found.count("1.234-5.678") == 6
    assert found.count("Losses") == found.count("Lower is better.") == 1


def test_text_that_wraps_stays_in_one_table():
    sheet = Sheet.of("Methods", ["name", Column("what it does", wraps=True)], [["tisa", "adds kernels " * 20]])
    found = drawn(sheet, 40)
    assert found.count("name") == 1
    assert found.count("kernels") == 20
    assert max(map(len, found.splitlines())) <= 40
