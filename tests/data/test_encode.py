"""The cache of encoded text: the same ids as without one, whatever happens to it or to the text."""

import errno
import json
import os
import random
import shutil

import numpy
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from tests.data.harm import DAMAGE, contents, damage, load_documents, only_folder, stop_before_the_end
from whereformer import files, manifest
from whereformer.data import encode
from whereformer.data.corpus import TextSource, is_held_out
from whereformer.data.encode import TokenizerChoice, open_or_encode
from whereformer.data.read import download
from whereformer.data.streams import TokenFile, to_bytes
from whereformer.data.tokenizers import check_predictable, fit_tokenizer
from whereformer.errors import InputError
from whereformer.manifest import fingerprint

CHOICE = TokenizerChoice(None, 120)


@pytest.fixture(autouse=True)
def _small_lots(monkeypatch):
    monkeypatch.setattr(encode, "CHUNK", 2)


@pytest.fixture
def file(tmp_path):
    """A text of about 20 pages that was written long ago."""
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"the {number} cats saw {number * 7} dogs near an old house." for number in range(1600)))
    os.utime(path, (1e9, 1e9))
    return path


def encode_file(file, cache, choice=CHOICE):
    """The encoded text, and the messages."""
    messages = []
    return open_or_encode(cache, TextSource([file]), choice, messages.append), messages


def all_ids(stream):
    return stream[0 : len(stream)]


def same(first, second):
    return all(
        torch.equal(all_ids(getattr(first, part)), all_ids(getattr(second, part))) for part in ("training", "held_out")
    )


def test_the_cache_holds_the_ids_that_encoding_in_memory_gives(file, tmp_path):
    encoded, messages = encode_file(file, tmp_path / "cache")
    training, pages = [*TextSource([file])], [*TextSource([file]).pages()]
    held_out = [page for page in pages if page not in training]
    tokenizer = fit_tokenizer(training, 120)
    assert encoded.tokenizer.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    for stream, pages in ((encoded.training, training), (encoded.held_out, held_out)):
        encodings = tokenizer.backend_tokenizer.encode_batch(pages, add_special_tokens=False)
        expected = torch.tensor([token for page in encodings for token in (*page.ids, encoded.vocabulary.sep)])
        assert torch.equal(all_ids(stream), expected)
        assert torch.equal(
            stream.count_ids(encoded.vocabulary.size), expected.bincount(minlength=encoded.vocabulary.size)
        )
    assert messages == ["learning the vocabulary", "encoding the text"]


def test_an_interrupted_encoding_leaves_nothing_and_begins_again(file, tmp_path):
    expected, _ = encode_file(file, tmp_path / "whole")
    stop_before_the_end(lambda: encode_file(file, tmp_path / "cache"))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]
    again, _ = encode_file(file, tmp_path / "cache")
    assert same(expected, again)
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")


def test_what_a_killed_command_left_is_not_taken_for_an_encoding(file, tmp_path):
    expected, _ = encode_file(file, tmp_path / "cache")
    folder = only_folder(tmp_path / "cache")
    before = contents(tmp_path / "cache")
    partial = folder.with_name(folder.name + ".partial")
    folder.rename(partial)
    damage(partial / "training.ids", "longer")
    (partial / "other").write_text("left")
    again, _ = encode_file(file, tmp_path / "cache")
    assert same(expected, again)
    assert contents(tmp_path / "cache") == before


@pytest.mark.parametrize("name", ["training.ids", "held_out.ids", "manifest.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_cache_is_noticed_and_mended(file, tmp_path, name, kind):
    expected, _ = encode_file(file, tmp_path / "cache")
    before = contents(tmp_path / "cache")
    folder = only_folder(tmp_path / "cache")
    damage(folder / name, kind)
    again, messages = encode_file(file, tmp_path / "cache")
    assert same(expected, again)
    assert messages[0].startswith(f"{folder} is damaged (")
    assert "manifest" in messages[0] or name in messages[0]
    assert contents(tmp_path / "cache") == before


@pytest.mark.parametrize("change", ["content", "time"])
def test_a_changed_text_is_noticed(file, tmp_path, change):
    """Also one that has the size and the time of the other."""
    first, _ = encode_file(file, tmp_path / "cache")
    if change == "content":
        file.write_text(file.read_text().replace("cats", "rats"))
        os.utime(file, (1e9, 1e9))
    else:
        file.touch()
    again, messages = encode_file(file, tmp_path / "cache")
    assert (messages == []) == (change == "time")
    assert same(first, again) == (change == "time")
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == (1 if change == "time" else 2)


def test_a_text_that_changes_while_it_is_encoded_is_refused(file, tmp_path, monkeypatch):
    real = encode.fit_tokenizer

    def change_meanwhile(*arguments):
        file.write_text(file.read_text() + "\nmore of it")
        return real(*arguments)

    monkeypatch.setattr(encode, "fit_tokenizer", change_meanwhile)
    with pytest.raises(InputError, match="the text changed while it was read"):
        encode_file(file, tmp_path / "cache")
    monkeypatch.setattr(encode, "fit_tokenizer", real)
    assert len(encode_file(file, tmp_path / "cache")[0].training)


def test_a_tokenizer_that_splits_special_tokens_is_another(tmp_path):
    tokenizer = fit_tokenizer(["some text"], 64)
    tokenizer.save_pretrained(tmp_path)
    before = TokenizerChoice(tmp_path, 64).setting
    assert before == fingerprint([tokenizer.backend_tokenizer.to_str()])
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "split_special_tokens": True}))
    assert TokenizerChoice(tmp_path, 64).setting != before


def test_a_text_that_is_too_short_to_hold_some_out(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("a short text")
    with pytest.raises(InputError, match="to hold some out: expected more than 20,000 characters, got 1"):
        encode_file(file, tmp_path / "cache")


def test_no_more_of_a_text_is_read_than_is_asked_for(tmp_path, monkeypatch):
    """Pages are yielded while the file is read; a list of the text would need all of it."""
    file = tmp_path / "long.txt"
    file.write_text("a word and another word\n" * 200_000)
    with file.open("ab") as end:
        end.write(b"\xff")  # which would be refused if it were read
    assert next(TextSource([file]).pages()).startswith("a word")


def test_a_slice_of_a_file_is_its_ids(tmp_path):
    ids, path = [0, 70_000, 5], tmp_path / "a.ids"
    path.write_bytes(to_bytes(ids))
    stream = TokenFile(path)
    assert len(stream) == 3
    assert stream[0:3].tolist() == ids
    assert stream[1:99].tolist() == ids[1:]
    assert stream[3:5].tolist() == []
    assert stream[0:3].dtype == torch.long
    assert stream.count_ids(70_001).nonzero().flatten().tolist() == sorted(ids)
    with pytest.raises(ValueError, match="without a step"):
        stream[0:3:2]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty folder that stands for a data set (the library opens both the same way), and a cache for the library."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "library")
    folder = tmp_path / "dataset"
    folder.mkdir()
    return folder


def test_data_sets_of_the_hub_are_read_where_their_library_keeps_them(hub, tmp_path):
    text = "one \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")
    parquet.write_table(pa.table({"text": [text, "two", None], "n": [1, 2, 3]}), hub / "train.parquet")
    messages = []
    paths = download([f"hub:{hub}", "other.txt"], messages.append)
    assert paths[-1] == "other.txt"
    assert load_documents(paths[:-1]) == ["one \U0001f600", "two"]
    assert messages == [f"downloading hub:{hub}"]
    assert download([f"hub:{hub}"], print) == paths[:-1]
    assert all(path.startswith(str(tmp_path / "library")) for path in paths[:-1])
    with pytest.raises(InputError, match=r"data: cannot read hub:.*from the Hugging Face Hub"):
        download([f"hub:{tmp_path / 'gone'}"], print)
    with pytest.raises(InputError, match="expected hub:NAME, hub:NAME:CONFIG"):
        download(["hub:"], print)


@pytest.mark.parametrize("function", [(files, "move_folder"), (encode, "to_bytes")])
def test_a_full_disk_is_one_line_and_leaves_room(file, tmp_path, monkeypatch, function):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(*function, full)
        with pytest.raises(InputError, match=r"^cannot write .*/ids-.*: no space left on the disk; make room"):
            encode_file(file, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]
    assert len(encode_file(file, tmp_path / "cache")[0].training)


def test_a_text_that_another_version_encoded_is_encoded_again_beside_it(file, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    expected, _ = encode_file(file, cache)
    older = only_folder(cache)
    before = {path: path.read_bytes() for path in older.iterdir()}
    monkeypatch.setattr(encode, "this_version", lambda: "9.9.9")
    again, messages = encode_file(file, cache)
    assert messages == ["learning the vocabulary", "encoding the text"]
    assert again.training.path.parent.name == older.name.replace(manifest.version(older), "9.9.9")
    assert same(expected, again)
    assert before == {path: path.read_bytes() for path in older.iterdir()}  # another command may be reading them


@pytest.mark.parametrize("facts", [{}, {"guessing": "x"}, {"guessing": 1.0, "more": 2}])
def test_forged_facts_of_a_text_are_damage(facts, file, tmp_path):
    expected, _ = encode_file(file, tmp_path / "cache")
    folder = only_folder(tmp_path / "cache")
    manifest.write(folder, facts)
    again, messages = encode_file(file, tmp_path / "cache")
    assert messages[0] == f"{folder} is damaged (its manifest.json has something else); encoding it again"
    assert again.guessing == expected.guessing


def test_what_cannot_be_replaced_is_refused_before_a_text_is_encoded(file, tmp_path):
    encode_file(file, tmp_path / "cache")
    folder = only_folder(tmp_path / "cache")
    shutil.rmtree(folder)
    folder.touch()
    with pytest.raises(InputError, match="expected a folder or nothing, got a file"):
        encode_file(file, tmp_path / "cache", TokenizerChoice(None, 120))


DNA = "".join(random.Random(0).choices("ACGT", k=60_000))
ENGLISH = "the cat saw the dog near an old house. " * 2000


PAGES = [(DNA if is_held_out(number) else ENGLISH)[:3000] for number in range(20)]


@pytest.mark.parametrize(
    ("parts", "share"),
    [
        ([DNA], "training text: 100.0%"),
        ([f"{ENGLISH[:2000]} {DNA[:1000]}"] * 12, None),
        ([DNA[: 4 * 1900], ENGLISH], None),
        ([ENGLISH[:30], DNA * 2], "training text: "),
        (PAGES, "held-out text: "),
    ],
)
def test_a_text_of_unknown_words_is_refused_with_their_share(parts, share, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(parts))
    if share is None:
        encode_file(file, tmp_path / "cache")
        return
    with pytest.raises(InputError, match=rf"^data: too little to predict in the {share}.* of its tokens are \[UNK\]"):
        encode_file(file, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("ids-*"))


def test_a_text_of_special_tokens_has_nothing_to_predict():
    tokenizer = fit_tokenizer([ENGLISH], 120)
    counts = torch.zeros(120, dtype=torch.long)
    for text in ("[MASK] [MASK]", ""):
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)
        with pytest.raises(InputError, match=r"^data: too little to predict in it: 0.0% of its tokens are \[UNK\]"):
            check_predictable(tokenizer, counts + ids.bincount(minlength=120), "it")
    ids = torch.tensor(tokenizer("the cat [MASK]", add_special_tokens=False)["input_ids"])
    check_predictable(tokenizer, ids.bincount(minlength=120), "it")


def test_a_stream_is_opened_by_text(tmp_path, monkeypatch):
    """C code that asks a path for its text takes Ctrl-C there for an error of its own, which would be a traceback."""
    (tmp_path / "training.ids").write_bytes(to_bytes([1, 2, 3]))
    stream, real = TokenFile(tmp_path / "training.ids"), numpy.fromfile
    monkeypatch.setattr(
        numpy, "fromfile", lambda file, *arguments, **options: real({str: file}[type(file)], *arguments, **options)
    )
    assert stream[1:].tolist() == [2, 3]
