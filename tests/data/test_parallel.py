"""Parallel text from files and tables, and what is said where they do not belong together."""

import csv
import io
import json
from collections import deque
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from whereformer.data import parallel
from whereformer.data.parallel import Pairs
from whereformer.data.read import decode_lines, read_lines
from whereformer.errors import InputError

ENGLISH = ['He said "yes', "a\u2028b\x85c", "", "tab less", "last"]
GERMAN = ['Er sagte "ja', "a b c", "leer", "ohne Tab", "zuletzt"]


def load_pairs(data):
    """The source lines and the target lines."""
    return tuple([*side] for side in zip(*data, strict=True))


def aligned(folder, source, target, end="\n"):
    files = folder / "a.en", folder / "a.de"
    for file, lines in zip(files, (source, target), strict=True):
        file.write_bytes("".join(line + end for line in lines).encode())
    return Pairs("data", files)


def table(folder, kind):
    """The same pairs as a table."""
    file, names = folder / f"text{kind}", ("id", "en", "de")
    rows = [*zip("01234", ENGLISH, GERMAN, strict=True)]
    if kind == ".parquet":
        parquet.write_table(pa.table([*zip(*rows, strict=True)], names), file)
    elif kind == ".jsonl":
        file.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    else:
        with file.open("w", newline="") as written:
            # In .tsv files quotation marks are text.
            style = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None} if kind == ".tsv" else {}
            csv.writer(written, **style).writerows([names, *rows])
    return file


def test_only_line_feeds_end_lines(tmp_path):
    assert load_pairs(aligned(tmp_path, ENGLISH, GERMAN)) == (ENGLISH, GERMAN)
    assert load_pairs(aligned(tmp_path, ENGLISH, GERMAN, end="\r\n")) == (ENGLISH, GERMAN)


def test_a_mark_at_the_beginning_and_a_missing_line_feed_at_the_end(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"\xef\xbb\xbfone\ntwo")
    assert [*read_lines("source", file)] == ["one", "two"]
    file.write_bytes(b"one\n\n")
    assert [*read_lines("source", file)] == ["one", ""]
    for empty in (b"", b"\xef\xbb\xbf"):
        file.write_bytes(empty)
        assert [*read_lines("source", file)] == []


@given(st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"])), max_size=20))
def test_lines_come_back_as_they_were_written(lines):
    data = "".join(f"{line}\n" for line in lines).encode()
    assume_no_mark = data.removeprefix(b"\xef\xbb\xbf")
    expected = assume_no_mark.decode().split("\n")[:-1]
    assert [*decode_lines("source", "text", io.BytesIO(data))] == expected


@pytest.mark.parametrize("kind", [".parquet", ".jsonl", ".csv", ".tsv"])
@pytest.mark.parametrize("columns", ["en,de", "de, en"])
def test_tables_give_both_columns_in_the_order_asked_for(tmp_path, kind, columns):
    lines = load_pairs(Pairs("data", (table(tmp_path, kind),), columns))
    assert lines == ((ENGLISH, GERMAN) if columns == "en,de" else (GERMAN, ENGLISH))


def test_several_tables_follow_one_another(tmp_path):
    file = table(tmp_path, ".jsonl")
    assert load_pairs(Pairs("data", (file, file), "en,de")) == (ENGLISH * 2, GERMAN * 2)


def test_two_columns_need_no_names_and_nothing_is_an_empty_line(tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text('{"x": "one", "y": null}\n{"x": "two", "y": "zwei"}\n')
    assert load_pairs(Pairs("data", (file,))) == (["one", "two"], ["", "zwei"])


def held_out_in_memory(pairs):
    """The rows to train on and those held out, from lists of all rows."""
    full = [row for row, pair in enumerate(pairs) if all(line.strip() for line in pair)]
    held_out = full[:: parallel.HELD_OUT_EVERY][: parallel.MAX_HELD_OUT]
    return [row for row in range(len(pairs)) if row not in held_out], held_out


@pytest.mark.parametrize(("limit", "empty"), [(2000, ""), (2000, " "), (3, "")])
def test_pairs_with_text_are_held_out_the_same_ones_every_time(tmp_path, monkeypatch, limit, empty):
    monkeypatch.setattr(parallel, "MAX_HELD_OUT", limit)
    lines = [[empty if n % 7 == k else f"{side}{n}" for n in range(200)] for side, k in (("s", 3), ("t", 5))]
    pairs = [*zip(*lines, strict=True)]
    parts = [replace(aligned(tmp_path, *lines), held_out=held_out) for held_out in (False, True)]
    expected = [[pairs[row] for row in rows] for rows in held_out_in_memory(pairs)]
    assert [[*part] for part in parts] == [[*part] for part in parts] == expected
    assert len(expected[1]) == min(limit, -(-142 // 20))


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (["a", "b", "c"], ["x", "y"], "data: expected as many lines as translations, but .*a.de ends after 2"),
        (["a"], ["x", "y", "z"], "data: expected as many lines as translations, but .*a.en ends after 1"),
        (["", " "], ["x", "y"], "data: no text in"),
        ([], [], "data: no text in"),
    ],
)
def test_files_that_do_not_belong_together(tmp_path, source, target, message):
    with pytest.raises(InputError, match=message):
        load_pairs(aligned(tmp_path, source, target))


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_what_is_not_utf_8_is_told_by_line_and_byte(tmp_path, mark):
    file = tmp_path / "latin"
    file.write_bytes(mark + b"one\ntwo\nf\xfcnf\n")
    with pytest.raises(InputError, match=r"target: .*latin, line 3: not UTF-8 text \("):
        deque(read_lines("target", file))


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        ("a.tsv", "x\ty\tz\n", None, "columns: .*a.tsv has columns x, y, z; name two of them, such as en,de"),
        ("a.tsv", "x\ty\n", "x,z", "data: .*a.tsv has no column 'z'; name one of x, y"),
        ("a.jsonl", '{"en": "x", "de": 3}\n', "en,de", r"row 1: expected text in en and de, got \('x', 3\)"),
        ("a.jsonl", '{"en": "x", "de": "y"}\n', "en,fr", "has no column 'fr'; name one of en, de"),
        ("a.jsonl", '{"x": "a"}\n{"y": "b", "z": "c"}', None, "columns: .*a.jsonl has columns x; name two of"),
        ("a.jsonl", '{"x": "a"}\n', None, "columns: .*a.jsonl has columns x; name two of"),
        ("a.jsonl", "\n", None, "data: no text in .*a.jsonl"),
        ("a.csv", "en,de\nx\n", "en,de", "data: .*a.csv, line 2: expected 2 cells as in the first row"),
        ("a.parquet", "no", "en,de", "data: cannot read .*a.parquet"),
        ("a.txt", "x", "en,de", "data: expected .csv, .*, or two files of lines, got .*a.txt"),
        ("a.tsv", "", None, "data: no text in .*a.tsv"),
    ],
)
def test_tables_that_do_not_fit(tmp_path, name, content, columns, message):
    file = tmp_path / name
    file.write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=message):
        load_pairs(Pairs("data", (file,), columns))


@pytest.mark.parametrize(
    ("files", "columns", "message"),
    [
        ("", None, "valid: expected .csv, .*, or two files of lines, got none"),
        ("a b c", None, "valid: expected .csv, .*, or two files of lines, got a, b, c"),
        ("a b.csv", None, "valid: expected a .csv, .* file, got 'a'"),
        ("b.csv", "en", "columns: expected two columns, such as en,de, got 'en'"),
        ("b.csv", "en,en", "columns: expected two columns"),
        ("no.tsv", None, "valid: no such file"),
        ("no a", None, "valid: no such file"),
    ],
)
def test_files_that_do_not_go_together(files, columns, message):
    with pytest.raises(InputError, match=message):
        Pairs("valid", tuple(map(Path, files.split())), columns)
