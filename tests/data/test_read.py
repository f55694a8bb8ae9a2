"""Tables that are read some rows at a time hold what they hold when they are read at once."""

import json
from collections import deque

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv, parquet

from whereformer.data import read
from whereformer.data.read import read_documents
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
        patched.setattr(read, "MAX_ROWS", 2)
        for kind in KINDS:
            table = read.Table("data", write(folder / f"t{kind}", columns))
            assert table.names == ["a", "b", "n"]
            assert [*table.rows(["b", "a"])] == [(b, a) for a, b, _ in rows]
            assert [int(n) for (n,) in table.rows(["n"])] == columns["n"]


def test_rows_may_lack_what_others_have(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text('{"a": "x", "b": "y"}\n\n{"b": "\\ud800"}\n')
    table = read.Table("data", file)
    assert table.names == ["a", "b"]
    assert [*table.rows(["a", "b"])] == [("x", "y"), (None, "?")]
    with pytest.raises(InputError, match=r"^data: .*t.jsonl has no column 'c'; name one of a, b$"):
        deque(table.rows(["a", "c"]))
    file.write_text('{"a": "x"}\n3\n')
    with pytest.raises(InputError, match=r"^data: .*t.jsonl, line 2: expected an object or a string, got 3$"):
        deque(table.rows(["a"]))


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())])
def test_text_has_many_types_in_parquet(tmp_path, kind):
    parquet.write_table(pa.table({"n": [1, 2], "t": pa.array(["a", "b"]).cast(kind)}), tmp_path / "a.parquet")
    assert [list(document) for document in read_documents(tmp_path / "a.parquet", "t")] == [["a"], ["b"]]


def test_quotation_marks_are_text_where_that_is_asked_for(tmp_path):
    file = tmp_path / "t.tsv"
    file.write_text('\n"a\tb"\n"c\td"\n')
    assert [*read.Table("data", file, quotes=False).rows(['b"', '"a'])] == [('d"', '"c')]
    assert [*read.Table("data", file).rows(["a\tb"])] == [("c\td",)]


# --- tables of strangers: what cannot be read is refused in a line that names the file

LATIN = "caf\xe9".encode("latin-1")


def raw(data):
    """A column with one row of text, in bytes that nobody checks."""
    ends = pa.array([0, len(data)], pa.int32()).buffers()[1]
    return pa.Array.from_buffers(pa.string(), 1, [None, ends, pa.py_buffer(data)])


@pytest.mark.parametrize(
    ("name", "message"), [("a.parquet", r"': 'utf-8' codec can't decode"), ("a.jsonl", r", line 1: not UTF-8 text \(")]
)
def test_text_that_is_not_utf8_is_refused_by_both_readers(tmp_path, name, message):
    file = tmp_path / name
    if file.suffix == ".parquet":
        parquet.write_table(pa.table({"text": raw(LATIN), "label": [1]}), file)
    else:
        file.write_bytes(b'{"text": "' + LATIN + b'", "label": 1}\n')
    with pytest.raises(InputError, match=rf"^train: .*{name}{message}"):
        deque(read.Table("train", file).rows(["text"]))
    with pytest.raises(InputError, match=rf"^data: .*{name}{message}"):
        list(read_documents(file))


@pytest.mark.parametrize(("number", "kind"), [(2**40, pa.timestamp("s")), (2**62, pa.duration("s"))])
def test_dates_that_python_cannot_express_are_refused(tmp_path, number, kind):
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["a"], "day": pa.array([number], kind)}), file)
    with pytest.raises(InputError, match=r"^train: cannot read .*a\.parquet': "):
        deque(read.Table("train", file).rows(["day"]))
    # Pages of text are read from their own column alone.
    assert [list(document) for document in read_documents(file)] == [["a"]]
