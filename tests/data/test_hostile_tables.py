"""Tables that nobody meant well with: read, or refused in one short line that names the option."""

import json
import struct

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.data.harm import load_documents
from whereformer.data import glue
from whereformer.data import read as tables
from whereformer.data.parallel import Pairs
from whereformer.errors import InputError, one_line

READ = {
    "a NUL": b"a,b,label\nx\0,y,0\nz,w,1\n",
    "a mark": b"\xef\xbb\xbfa,b,label\nx,y,0\nz,w,1\n",
    "old line ends": b"a,b,label\rx,y,0\rz,w,1\r",
    "many quotes": b'a,b,label\n"' + b'""' * 100_000 + b'",y,0\nz,w,1\n',
    "line ends in a cell": b'a,b,label\n"' + b"\n" * 100_000 + b'.",y,0\nz,w,1\n',
    "a formula": b"a,b,label\n=cmd|' /C calc'!A0,\x1b[31my,0\nz,w,1\n",
}
REFUSED = {
    "nothing": b"",
    "blank lines": b"\n\n\n",
    "a header alone": b"a,b,label\n",
    "an open quote": b'a,b,label\n"x,y,0\nz,w,1\n',
    "a short row": b"a,b,label\nx,y,0\nz,w\n",
    "a long row": b"a,b,label\nx,y,0,9\n",
    "another encoding": "a,b,label\nx,y,0\nz,w,1\n".encode("utf-16"),
    "Latin cells": "a,b,label\nf\xfcnf,y,f\xfcnf\nz,w,1\n".encode("latin-1"),
    "a Latin header": "a,b,l\xfc,label\nf,y,f,0\nz,w,1,1\n".encode("latin-1"),
    "one name twice": b"a,a,b,label\nx,x,y,0\n",
    "one name often": (",".join(["name"] * 10_000) + "\n").encode(),
    "many columns": (",".join(f"c{n}" for n in range(5000)) + "\n" + ",".join("x" * 5000) + "\n").encode(),
    "a huge cell": b"a,b,label\n" + b"x" * 3_000_000 + b",y,0\nz,w,1\n",
    "a huge header": b"a,b,label," + b"n" * 2_000_000 + b"\nx,y,0,1\nz,w,1,1\n",
    "no labels": b"a,b,label\nx,y,\nz,w,\n",
    "no numbers": b"a,b,label\nx,y,nan\nz,w,inf\n",
    "dates": b"a,b,label\nx,y,2020-01-01\nz,w,9999-01-01\n",
    "long classes": b"a,b,label\n" + b"".join(b"x,y,%s%d\n" % (b"c" * 3000, n) for n in range(50)),
}


def readers(file, good):
    return [
        lambda: glue.load_own(file, good, ("a", "b"), "label", regression=False),
        lambda: glue.load_own(file, good, ("a", "b"), "label", regression=True),
        lambda: glue.load_own(good, file, ("a", "b"), "label", regression=False),
    ]


@pytest.fixture
def good(tmp_path):
    file = tmp_path / "good.csv"
    file.write_text("a,b,label\nx,y,0\nz,w,1\n")
    return file


def written(folder, content, suffix):
    file = folder / f"table{suffix}"
    file.write_bytes(content.replace(b",", b"\t") if suffix == ".tsv" else content)
    return file


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("content", READ.values(), ids=READ)
def test_what_can_be_read_is_read(content, suffix, tmp_path, good):
    for read in readers(written(tmp_path, content, suffix), good):
        read()


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("content", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_one_short_line(content, suffix, tmp_path, good):
    for read in readers(written(tmp_path, content, suffix), good):
        with pytest.raises(InputError) as error:
            read()
        assert error.value.field in ("train", "validation", "label", "text")
        assert len(str(error.value)) < 1200
        assert len(one_line(str(error.value))) <= 1003


def test_a_cell_that_is_too_long_says_what_to_do(tmp_path, good):
    file = written(tmp_path, REFUSED["a huge cell"], ".csv")
    with pytest.raises(InputError, match=r"train: .* field larger than field limit \(131072\)"):
        readers(file, good)[0]()


def test_a_cell_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    """It may take little room in the file, and much more in a tokenizer than in the table."""
    monkeypatch.setattr(tables, "MAX_CELL", 1000)
    table = pa.table({"text": ["a short one", "x" * 1001], "label": [0, 1]})
    for suffix in (".parquet", ".jsonl"):
        file = tmp_path / f"t{suffix}"
        if suffix == ".parquet":
            parquet.write_table(table, file)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
        expected = r"row 2, 'text': expected at most 1,000 characters in a cell, got 1,001"
        with pytest.raises(InputError, match=f"^train: .*{expected}"):
            glue.load_own(file, file, ("text",), "label", regression=False)
    with pytest.raises(InputError, match=f"^data: .*{expected}"):
        load_documents([tmp_path / "t.parquet"])


def test_long_cells_that_compress_well_are_read_one_at_a_time(tmp_path, monkeypatch):
    """One cell in the file may be all of the rows that are read together."""
    monkeypatch.setattr(tables, "MAX_BATCH_BYTES", 100_000)
    file = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"text": ["x" * 50_000] * 9}), file, dictionary_pagesize_limit=1 << 20)
    assert file.stat().st_size < 10_000
    table = tables.Table("data", file)
    assert [len(batch) for batch in table._batches(["text"])] == [1] * 9
    assert [len(text) for (text,) in table.rows(["text"])] == [50_000] * 9


def test_offsets_of_cells_that_lie_are_one_line(tmp_path):
    file, cells = tmp_path / "t.arrow", pa.array(["a" * 1000, "b" * 1000])
    with pa.OSFile(str(file), "wb") as out, pa.ipc.new_stream(out, pa.schema([("text", pa.string())])) as stream:
        stream.write_batch(pa.record_batch([cells], names=["text"]))
    written, offsets = file.read_bytes(), struct.pack("<3i", 0, 1000, 2000)
    assert written.count(offsets) == 1
    file.write_bytes(written.replace(offsets, struct.pack("<3i", 0, 1 << 30, 2000)))
    with pytest.raises(InputError, match=r"^data: cannot read .*t.arrow': .*offset"):
        load_documents([file])


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_a_line_without_an_end_is_not_read_to_its_end(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(tables, "MAX_LINE", 1000)
    file = tmp_path / f"t{suffix}"
    with file.open("wb") as hole:
        hole.truncate(1 << 40)
    for read in (
        lambda: glue.load_own(file, file, ("text",), "label"),
        lambda: load_documents([file]),
        lambda: [*Pairs("data", (file,))],
    ):
        with pytest.raises(InputError, match=r"a line has 1,000 characters or more"):
            read()


@pytest.mark.parametrize("kind", [".parquet", ".csv"])
def test_of_two_columns_of_one_name_none_can_be_named_and_others_can(kind, tmp_path):
    file = tmp_path / f"twice{kind}"
    schema = pa.schema([("text", pa.string()), ("x", pa.int64()), ("x", pa.string()), ("label", pa.string())])
    columns = [pa.array(["a", "b"]), pa.array([1, 2]), pa.array(["c", "d"]), pa.array(["1", "0"])]
    if kind == ".csv":
        file.write_text("text,x,x,label\na,1,c,1\nb,2,d,0\n")
    else:
        parquet.write_table(pa.Table.from_arrays(columns, schema=schema), file)
    assert load_documents([file]) == ["a", "b"]
    assert glue.load_own(file, file, ("text",), "label", regression=False).train.texts == [("a",), ("b",)]
    for field, read in (
        ("data", lambda: load_documents([file], "x")),
        ("train", lambda: glue.load_own(file, file, ("text",), "x", regression=False)),
    ):
        with pytest.raises(InputError, match=f"^{field}: .*has several columns named 'x'; rename them"):
            read()


@pytest.mark.parametrize(("kind", "mark"), [(".csv", ","), (".tsv", "\t")])
def test_columns_without_a_name_are_passed_over(kind, mark, tmp_path):
    """As in the well-known spam.csv, whose first row is ``v1,v2,,,``."""
    file = tmp_path / f"spam{kind}"
    file.write_text("class,message,,,\nham,Go now,,,\nspam,win,a,b,c\nham,short".replace(",", mark))
    table = tables.Table("train", file)
    assert table.names == ["class", "message"]
    assert list(table.rows(["class", "message"])) == [("ham", "Go now"), ("spam", "win"), ("ham", "short")]
    file.write_text(file.read_text() + "\nspam")
    with pytest.raises(InputError, match=r"line 5: expected 5 cells as in the first row"):
        list(table.rows(["class"]))
    with pytest.raises(InputError, match=r"has no column ''; name one of class, message"):
        list(tables.Table("train", file).rows([""]))
