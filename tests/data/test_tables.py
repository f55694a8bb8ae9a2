"""Tables that are read some rows at a time hold what they hold when they are read at once."""

import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv, parquet

from whereformer.data import tables
from whereformer.errors import InputError

KINDS = (".csv", ".tsv", ".jsonl", ".parquet")
# Not what a CSV file cannot tell from something else: no text and an empty one.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), min_size=1, max_size=8)
ROWS = st.lists(st.tuples(TEXT, TEXT, st.integers(-9, 9)), min_size=1, max_size=9)


def write(file, columns):
    if file.suffix == ".parquet":
        parquet.write_table(pa.table(columns), file, row_group_size=4)
    elif file.suffix == ".jsonl":
        rows = zip(*columns.values(), strict=True)
        file.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))
    else:
        options = csv.WriteOptions(delimiter="\t" if file.suffix == ".tsv" else ",")
        csv.write_csv(pa.table(columns), file, options)
    return file


@settings(deadline=None, max_examples=25)
@given(ROWS)
def test_all_kinds_hold_the_same_rows(tmp_path_factory, rows):
    columns = dict(zip(("a", "b", "n"), map(list, zip(*rows, strict=True)), strict=True))
    folder = tmp_path_factory.mktemp("tables")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tables, "ROWS", 2)
        for kind in KINDS:
            table = tables.open_table("data", write(folder / f"t{kind}", columns), ("a", "b"))
            assert table.names == ["a", "b", "n"]
            assert [*table.rows(["b", "a"])] == [(b, a) for a, b, _ in rows]
            assert table.column("n") == columns["n"]
            assert table.column("a") == columns["a"]
            assert tables.read_table("data", table.file, ("a", "b")) == columns


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_has_the_type_that_all_of_it_has(tmp_path, kind):
    # A CSV file's first million bytes hold whole numbers only.
    numbers = [*range(200_000 if kind in (".csv", ".tsv") else 9), 0.5]
    whole = [float(number) for number in numbers] if kind == ".parquet" else numbers
    table = tables.open_table("data", write(tmp_path / f"t{kind}", {"n": whole}))
    found = table.column("n")
    assert (found[0], found[-1], {*map(type, found)}) == (0.0, 0.5, {float})


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_is_noticed(tmp_path, kind):
    table = tables.open_table("data", write(tmp_path / f"t{kind}", {"n": [1, 2]}))
    assert table.unchanged()
    write(table.file, {"n": [1, 2, 3]})
    assert not table.unchanged()


def test_rows_may_lack_what_others_have(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text('{"a": "x"}\n\n{"b": "\\ud800"}\n')
    table = tables.open_table("data", file)
    assert table.names == ["a", "b"]
    assert [*table.rows(["a", "b"])] == [("x", None), (None, "?")]
    assert table.column("b") == [None, "?"]
    file.write_text('{"a": "x"}\n"b"\n')
    with pytest.raises(InputError, match=r"^data: cannot read .*t.jsonl \(line 2: expected an object, got 'b'\)$"):
        table.column("a")
