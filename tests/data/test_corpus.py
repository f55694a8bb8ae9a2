"""Reading text: every format, every way it can be wrong, and a split that never changes."""

import ast
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from whereformer.data import corpus
from whereformer.errors import InputError


@pytest.mark.slow
def test_the_default_text_is_python_s_own_documentation():
    documents = corpus.default_documents()
    assert sum(map(len, documents)) > 1_000_000
    assert any("Doc/reference" in document or "statement" in document for document in documents)
    assert all(document.strip() for document in documents)


def test_docstrings_are_found_in_every_statement_that_may_hold_one(tmp_path):
    source = """'a module'
class Thing:
    'a class'
    def method(self):
        'a method'
if True:
    try:
        def first(): 'in try'
    except ValueError:
        async def second(): 'in a handler'
    else:
        with open('x') as file:
            def third(): 'in with'
    finally:
        for _ in ():
            def fourth(): 'in a loop'
match 1:
    case 1:
        def fifth(): 'in a case'
"""
    (tmp_path / "module.py").write_text(source)
    walked = [
        ast.get_docstring(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert len(walked) == 8
    assert list(corpus._docstrings(tmp_path / "module.py")) == walked


def test_every_format_is_read(tmp_path):
    (tmp_path / "a.txt").write_text("plain text")
    (tmp_path / "b.md").write_text("\ufeffmarked", encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"text": "one", "other": "x"}\n\n"two"\n')
    parquet.write_table(pa.table({"text": ["three", None, "four"], "n": [1, 2, 3]}), tmp_path / "d.parquet")
    (tmp_path / "ignored.bin").write_bytes(b"\0\1")
    assert corpus.load_documents([tmp_path]) == ["plain text", "marked", "one", "two", "three", "four"]


def test_the_column_is_the_only_one_of_strings_or_the_one_named(tmp_path):
    table = tmp_path / "pairs.parquet"
    parquet.write_table(pa.table({"en": ["a"], "de": ["b"], "n": [1]}), table)
    with pytest.raises(InputError, match=r"which column is the text\? .*strings: en, de"):
        corpus.load_documents([table])
    assert corpus.load_documents([table], column="de") == ["b"]
    with pytest.raises(InputError, match=r"column: .* has no string column 'fr'; it has en, de"):
        corpus.load_documents([table], column="fr")
    lines = tmp_path / "one.jsonl"
    lines.write_text(json.dumps({"body": "hello", "id": 3}))
    assert corpus.load_documents([lines]) == ["hello"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, "no such file or folder: .*gone.txt"),
        ("empty.txt", b"", "empty.txt is empty"),
        ("blank.txt", b" \n\n ", "blank.txt is empty"),
        ("picture.txt", b"\x89PNG\0\0", "picture.txt is a binary file"),
        ("latin.txt", "caf\xe9".encode("latin-1"), r"latin.txt is not UTF-8 text \(byte 3"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": ', r"broken.jsonl, line 2: not JSON"),
        ("numbers.jsonl", b"3", "line 1: expected an object or a string"),
        ("no.parquet", b"PAR0", "no.parquet is not a Parquet file"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        corpus.load_documents([path])


def test_a_folder_without_text_is_named(tmp_path):
    with pytest.raises(InputError, match=r"holds no \.txt"):
        corpus.load_documents([tmp_path])
    with pytest.raises(InputError, match="no such file or folder: ''"):
        corpus.load_documents([""])


def test_the_split_keeps_every_character_once_and_is_always_the_same():
    documents = [f"document {number}. " + "word and another word\n" * 900 for number in range(12)]
    training, held_out = corpus.split_documents(documents)
    assert (training, held_out) == corpus.split_documents(documents)
    total = sum(map(len, documents))
    assert sum(map(len, training)) + sum(map(len, held_out)) == total
    assert 0.05 < sum(map(len, held_out)) / total < 0.15
    assert max(map(len, training)) <= corpus.PIECE


def test_pages_end_at_words_where_they_can():
    pieces = list(corpus.pages_of(["lorem ipsum " * 1000]))
    assert "".join(pieces) == "lorem ipsum " * 1000
    assert all(piece.startswith((" ", "lorem")) for piece in pieces)
    assert [len(piece) for piece in corpus.pages_of(["x" * 9000])] == [4000, 4000, 1000]


def test_too_little_text_to_split():
    with pytest.raises(InputError, match="too little text to hold some out: 5 characters"):
        corpus.split_documents(["short"])


def test_the_fingerprint_tells_texts_apart():
    assert corpus.fingerprint(["a", "b"]) != corpus.fingerprint(["ab"])
    assert corpus.fingerprint(["a", "b"]) == corpus.fingerprint(["a", "b"])


def test_json_lines_have_one_text_column_and_may_miss_it(tmp_path):
    lines = tmp_path / "rows.jsonl"
    lines.write_text('{"text": "a", "id": "1"}\n{"text": null, "id": "2"}\n{"id": "3"}\n{"text": "b\u2028c \\ud83d"}\n')
    assert corpus.load_documents([lines]) == ["a", "b\u2028c ?"]
