"""Reading text: every format, every way it can be wrong, and a split that never changes."""

import json
import os

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.data.harm import load_documents
from whereformer.data import corpus, read
from whereformer.errors import InputError
from whereformer.manifest import fingerprint, fingerprint_of_files


@pytest.mark.slow
def test_the_default_text_is_python_s_own_documentation():
    documents = corpus.default_documents()
    assert sum(map(len, documents)) > 1_000_000
    assert any("Doc/reference" in document or "statement" in document for document in documents)
    assert all(document.strip() for document in documents)


def test_every_format_is_read(tmp_path):
    (tmp_path / "a.txt").write_text("plain text")
    (tmp_path / "b.md").write_text("\ufeffmarked", encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"text": "one", "other": "x"}\n\n"two"\n')
    parquet.write_table(pa.table({"text": ["three", None, "four"], "n": [1, 2, 3]}), tmp_path / "d.parquet")
    (tmp_path / "ignored.bin").write_bytes(b"\0\1")
    assert load_documents([tmp_path]) == ["plain text", "marked", "one", "two", "three", "four"]


def test_the_column_is_named_text_or_as_asked(tmp_path):
    table = tmp_path / "pairs.parquet"
    parquet.write_table(pa.table({"en": ["a"], "de": ["b"], "n": [1]}), table)
    assert load_documents([table], column="de") == ["b"]
    for column in (None, "fr"):
        expected = f"data: .*pairs.parquet has no column '{column or 'text'}'; name one of en, de, n"
        with pytest.raises(InputError, match=expected):
            load_documents([table], column=column)
    with pytest.raises(InputError, match=r"data: .*pairs.parquet is empty"):
        load_documents([table], column="n")
    lines = tmp_path / "one.jsonl"
    lines.write_text(json.dumps({"body": "hello", "id": 3}))
    assert load_documents([lines], column="body") == ["hello"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, "no such file or folder: .*gone.txt"),
        ("empty.txt", b"", "empty.txt is empty"),
        ("blank.txt", b" \n\n ", "blank.txt is empty"),
        ("picture.txt", b"PNG\0\0", "picture.txt is a binary file"),
        ("latin.txt", "caf\xe9".encode("latin-1"), r"cannot read .*latin.txt': not UTF-8 text; iconv -f LATIN1"),
        ("utf-16.txt", "text".encode("utf-16"), r"utf-16.txt is UTF-16 text; iconv -f UTF-16 -t UTF-8 converts it"),
        ("a.txt.gz", b"\x1f\x8b\0", r"a.txt.gz is compressed; gunzip unpacks it"),
        ("a.pdf", b"%PDF-1.7", r"a.pdf is a PDF; save it as plain text"),
        ("a.docx", b"PK\x03\x04\0", r"a.docx is a ZIP archive, as .docx files are"),
        ("a.json", b"[]", r"a.json is JSON; write JSON Lines \(.jsonl\)"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": ', r"broken.jsonl, line 2: not JSON"),
        ("numbers.jsonl", b"3", "line 1: expected an object or a string"),
        ("no.parquet", b"PAR0", r"cannot read .*no.parquet': "),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_documents([path])


def test_a_folder_without_text_is_named(tmp_path):
    with pytest.raises(InputError, match=r"holds no \.txt"):
        load_documents([tmp_path])
    with pytest.raises(InputError, match="no such file or folder: ''"):
        load_documents([""])


def split(paths):
    """The training and the held-out pages."""
    text = corpus.TextSource(paths)
    return [*text], [page for number, page in enumerate(text.pages()) if corpus.is_held_out(number)]


def test_the_split_keeps_every_character_once_and_is_always_the_same(tmp_path):
    texts = [f"document {number}. " + "word and another word\n" * 900 for number in range(12)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02}.txt").write_text(text)
    training, held_out = split([tmp_path])
    assert (training, held_out) == split([tmp_path])
    total = sum(map(len, texts))
    assert sum(map(len, training)) + sum(map(len, held_out)) == total
    assert 0.05 < sum(map(len, held_out)) / total < 0.15
    assert max(map(len, training)) <= corpus.PAGE_LENGTH


def test_the_fingerprint_tells_texts_apart():
    assert fingerprint(["a", "b"]) != fingerprint(["ab"])
    assert fingerprint(["a", "b"]) == fingerprint(["a", "b"])
    # No character ends a text.
    assert fingerprint(["a\0b"]) != fingerprint(["a", "b"])
    assert fingerprint(["a\0", "b"]) != fingerprint(["a", "\0b"])


def test_the_fingerprint_of_files_is_that_of_their_bytes(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    fingerprints = {fingerprint_of_files(*files) for files in ([[a, b]], [[b, a]], [[a]], [[a, b], ["column"]])}
    assert len(fingerprints) == 4
    before = corpus.TextSource([a]).fingerprint
    moved = a.rename(tmp_path / "c.txt")
    assert corpus.TextSource([moved]).fingerprint == before
    status = moved.stat()
    moved.write_text("A.txt")
    os.utime(moved, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert corpus.TextSource([moved]).fingerprint != before


def test_a_column_needs_a_table(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("words")
    with pytest.raises(InputError, match=r"column: only for \.csv, \.tsv, .* files; .* none in .*a\.txt"):
        corpus.TextSource([file], column="text")
    with pytest.raises(InputError, match=r"column: only for .* none in the documentation inside this Python"):
        corpus.TextSource(column="text")


def test_json_lines_have_one_text_column_and_may_miss_it(tmp_path):
    lines = tmp_path / "rows.jsonl"
    lines.write_text('{"id": "0"}\n{"text": "a", "id": "1"}\n{}\n{"text": null}\n{"text": "b\u2028c \\ud83d"}\n')
    assert load_documents([lines]) == ["a", "b\u2028c ?"]


def test_patterns_match_files_in_order_and_none_is_an_error(tmp_path):
    for name in ("b.txt", "a.txt", "inner/c.txt", "inner/deep/d.md", "blank.txt"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("" if name == "blank.txt" else name)
    assert load_documents([f"{tmp_path}/*.txt"]) == ["a.txt", "b.txt"]
    assert load_documents([f"{tmp_path}/**/*.txt"]) == ["a.txt", "b.txt", "inner/c.txt"]
    assert load_documents([f"{tmp_path}/**/[cd].*", tmp_path / "b.txt"]) == ["inner/c.txt", "inner/deep/d.md", "b.txt"]
    with pytest.raises(InputError, match=r"data: no file matches '.*\*\.json'"):
        load_documents([f"{tmp_path}/*.json"])
    with pytest.raises(InputError, match="no text in"):
        load_documents([f"{tmp_path}/blank*"])
    # A file whose name looks like a pattern is that file.
    (tmp_path / "x[1].txt").write_text("itself")
    assert load_documents([tmp_path / "x[1].txt"]) == ["itself"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_a_text_read_in_blocks_is_the_text(tmp_path, monkeypatch, size):
    monkeypatch.setattr(read, "BLOCK_CHARACTERS", size)
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeff \n caf\xe9 \u4e2d \U0001f600\r\nend".encode())
    assert load_documents([file]) == [" \n caf\xe9 \u4e2d \U0001f600\r\nend"]
    file.write_bytes(b"good text " + "caf\xe9".encode("latin-1"))
    with pytest.raises(InputError, match="not UTF-8 text"):
        load_documents([file])
    file.write_bytes(b" " * 100)
    with pytest.raises(InputError, match="is empty"):
        load_documents([file])


@pytest.mark.parametrize("size", [1, 999, 4000, 4001, 100_000])
def test_pages_do_not_depend_on_the_parts_of_a_document(size):
    document = "\n\n".join("lorem ipsum " * count for count in range(150))
    parts = [document[start : start + size] for start in range(0, len(document), size)]
    assert list(corpus.split_pages(parts)) == list(corpus.split_pages([document]))


def test_tables_are_read_row_by_row(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "MAX_ROWS", 2)
    parquet.write_table(pa.table({"text": [str(row) for row in range(9)]}), tmp_path / "a.parquet", row_group_size=3)
    lines = "".join(json.dumps({"text": str(row)}) + "\n" for row in range(9, 12))
    (tmp_path / "b.jsonl").write_text(lines + "no JSON\n")
    documents = corpus.TextSource([tmp_path]).documents()
    assert ["".join(next(documents)) for _ in range(12)] == [str(row) for row in range(12)]
    with pytest.raises(InputError, match=r"b.jsonl, line 4: not JSON"):
        next(documents)


@pytest.mark.parametrize("line", ['{"text": "a", "n": ' + "9" * 5000 + "}", "[" * 100_000 + "]" * 100_000])
def test_strange_json_is_refused_in_a_line(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(InputError, match=r"a.jsonl, line 1: not JSON"):
        load_documents([tmp_path])
