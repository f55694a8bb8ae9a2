"""Tables of strangers: what cannot be read is refused in a line that names the file."""

import pyarrow as pa
import pytest
from pyarrow import parquet

from whereformer.data.documents import documents_in
from whereformer.data.tables import read_table
from whereformer.errors import InputError

LATIN = "caf\xe9".encode("latin-1")


def raw(data):
    """A column with one row of text, in bytes that nobody checks."""
    ends = pa.array([0, len(data)], pa.int32()).buffers()[1]
    return pa.Array.from_buffers(pa.string(), 1, [None, ends, pa.py_buffer(data)])


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_text_that_is_not_utf8_is_refused_by_both_readers(tmp_path, name):
    file = tmp_path / name
    if file.suffix == ".parquet":
        parquet.write_table(pa.table({"text": raw(LATIN), "label": [1]}), file)
    else:
        file.write_bytes(b'{"text": "' + LATIN + b'", "label": 1}\n')
    with pytest.raises(InputError, match=rf"^train: .*{name} is not UTF-8 text: b'caf\\xe9'"):
        read_table("train", file)
    with pytest.raises(InputError, match=rf"^data: .*{name} is not UTF-8 text"):
        list(documents_in(file))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", LATIN + b",label\nx,1\n"),
        ("a.tsv", LATIN + b"\tlabel\nx\t1\n"),
        ("a.jsonl", b'{"' + LATIN + b'": "x", "label": 1}\n'),
    ],
)
def test_names_of_columns_that_are_not_utf8_are_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"^train: .*{name} is not UTF-8 text: b'caf\\xe9'"):
        read_table("train", tmp_path / name)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (2**40, pa.timestamp("s")),
        (-(2**40), pa.timestamp("s")),
        (-(2**31), pa.date32()),
        (2**62, pa.duration("s")),
        (2**62, pa.time64("us")),
    ],
)
def test_dates_that_python_cannot_express_are_refused(tmp_path, number, kind):
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["a"], "day": pa.array([number], kind)}), file)
    with pytest.raises(InputError, match=r"^train: .*a\.parquet has values that can't be read \("):
        read_table("train", file)
    # Pages of text are read from their own column alone.
    assert [list(document) for document in documents_in(file)] == [["a"]]


def test_half_a_surrogate_pair_is_no_text(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a \\ud800 b"}\n')
    with pytest.raises(InputError, match=r"^train: cannot read .*a\.jsonl \(JSON parse error"):
        read_table("train", file)
    assert [list(document) for document in documents_in(file)] == [["a ? b"]]
