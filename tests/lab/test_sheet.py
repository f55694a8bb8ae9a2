"""Tables in a terminal, where every cell that is shown is complete, and in files."""

import io

import pytest

from whereformer.lab.report.report import Report
from whereformer.lab.sheet import Cell, Column, Sheet
from whereformer.lab.terminal import Terminal

SHEET = Sheet.of(
    "Losses",
    [Column("#"), Column("position", left=True), *(Column(f"loss {number}") for number in range(6))],
    [["1", "tisa", *("1.234",) * 6], ["2", "rope/none", *("2.345",) * 6]],
    name_column=1,
    notes=("Lower is better.",),
)


@pytest.mark.parametrize(("width", "left_out"), [(200, 0), (69, 0), (60, 1), (30, 5)])
def test_columns_are_left_out_and_nothing_is_cut(width, left_out):
    stream = io.StringIO()
    Terminal(file=stream, width=width).print(SHEET)
    printed = stream.getvalue()
    assert max(map(len, printed.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed
    assert printed.count("1.234") == printed.count("2.345") == 6 - left_out
    assert printed.count("Losses") == printed.count("tisa") == printed.count("Lower is better.") == 1
    assert ("report.md has all columns" in " ".join(printed.split())) == (left_out > 0)


def test_optional_columns_are_left_out_first_and_words_stay_whole():
    columns = [Column("head"), Column("rate", optional=True), Column("is", left=True), Column("range")]
    stream = io.StringIO()
    Terminal(file=stream, width=25).print(Sheet.of("Heads", columns, [["0", "0.0123", "previous token", "1,234"]]))
    assert [line.split() for line in stream.getvalue().splitlines()[4:6]] == [["0", "previous", "1,234"], ["token"]]
    assert "no room for rate;" in " ".join(stream.getvalue().split())


def test_a_file_has_all_digits_and_ranges_apart():
    row = [Cell("a,b"), Cell.of_seeds([1.23456, 2.0], "{:.1f}".format, "{:.1f}".format)]
    sheet = Sheet.of("It's x/y", ["name", Column("loss", "@8")], [row])
    assert sheet.csv() == 'name,loss @8,detail\n"a,b",1.61728,1.2\N{EN DASH}2.0\n'
    assert Report("", [""], [sheet, sheet, Sheet.of("Plan", ["", ""], [["a", "b"]])]).files == [
        "it-s-x-y.csv",
        "1-it-s-x-y.csv",
        "",
    ]
