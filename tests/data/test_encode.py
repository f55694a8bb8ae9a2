"""The cache of encoded text: the same ids as without one, whatever happens to it or to the text."""

import errno
import json
import os

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from tests.data.harm import DAMAGE, contents, damage, load_documents, only_folder, stop_before_the_end
from whereformer import files
from whereformer.data import encode
from whereformer.data.corpus import Text
from whereformer.data.encode import TokenizerChoice, open_or_encode
from whereformer.data.read import fetched
from whereformer.data.streams import TokenFile, packed
from whereformer.data.tokenizers import fit_tokenizer
from whereformer.errors import InputError
from whereformer.manifest import fingerprint

CHOICE = TokenizerChoice(None, 120)


@pytest.fixture(autouse=True)
def _small_lots(monkeypatch):
    monkeypatch.setattr(encode, "LOT", 2)


@pytest.fixture
def file(tmp_path):
    """A text of about 20 pages that was written long ago."""
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"the {number} cats saw {number * 7} dogs near an old house." for number in range(1600)))
    os.utime(path, (1e9, 1e9))
    return path


def made(file, cache, choice=CHOICE):
    """The encoded text, and what was said."""
    said = []
    return open_or_encode(cache, Text([file]), choice, said.append), said


def whole(stream):
    return stream[0 : len(stream)]


def same(first, second):
    return all(
        torch.equal(whole(getattr(first, part)), whole(getattr(second, part))) for part in ("training", "held_out")
    )


def test_the_cache_holds_the_ids_that_encoding_in_memory_gives(file, tmp_path):
    encoded, said = made(file, tmp_path / "cache")
    training, pages = [*Text([file])], [*Text([file]).pages()]
    held_out = [page for page in pages if page not in training]
    tokenizer = fit_tokenizer(training, 120)
    assert encoded.tokenizer.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    for stream, pages in ((encoded.training, training), (encoded.held_out, held_out)):
        found = tokenizer.backend_tokenizer.encode_batch(pages, add_special_tokens=False)
        expected = torch.tensor([token for page in found for token in (*page.ids, encoded.vocabulary.sep)])
        assert torch.equal(whole(stream), expected)
        assert torch.equal(stream.counts(encoded.vocabulary.size), expected.bincount(minlength=encoded.vocabulary.size))
    assert said == ["learning the vocabulary", "encoding the text"]


def test_an_interrupted_encoding_leaves_nothing_and_begins_again(file, tmp_path):
    expected, _ = made(file, tmp_path / "whole")
    stop_before_the_end(lambda: made(file, tmp_path / "cache"))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]
    again, _ = made(file, tmp_path / "cache")
    assert same(expected, again)
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")


def test_what_a_killed_command_left_is_not_taken_for_an_encoding(file, tmp_path):
    expected, _ = made(file, tmp_path / "cache")
    folder = only_folder(tmp_path / "cache")
    before = contents(tmp_path / "cache")
    partial = folder.with_name(folder.name + ".partial")
    folder.rename(partial)
    damage(partial / "training.ids", "longer")
    (partial / "other").write_text("left")
    again, _ = made(file, tmp_path / "cache")
    assert same(expected, again)
    assert contents(tmp_path / "cache") == before


@pytest.mark.parametrize("name", ["training.ids", "held_out.ids", "manifest.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_cache_is_noticed_and_mended(file, tmp_path, name, kind):
    expected, _ = made(file, tmp_path / "cache")
    before = contents(tmp_path / "cache")
    folder = only_folder(tmp_path / "cache")
    damage(folder / name, kind)
    again, said = made(file, tmp_path / "cache")
    assert same(expected, again)
    assert said[0].startswith(f"{folder} is damaged (")
    assert "manifest" in said[0] or name in said[0]
    assert contents(tmp_path / "cache") == before


@pytest.mark.parametrize("change", ["content", "time"])
def test_a_changed_text_is_noticed(file, tmp_path, change):
    """Also one that has the size and the time of the other."""
    first, _ = made(file, tmp_path / "cache")
    if change == "content":
        file.write_text(file.read_text().replace("cats", "rats"))
        os.utime(file, (1e9, 1e9))
    else:
        file.touch()
    again, said = made(file, tmp_path / "cache")
    assert (said == []) == (change == "time")
    assert same(first, again) == (change == "time")
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == (1 if change == "time" else 2)


def test_a_text_that_changes_while_it_is_encoded_is_refused(file, tmp_path, monkeypatch):
    real = encode.fit_tokenizer

    def change_meanwhile(*given):
        file.write_text(file.read_text() + "\nmore of it")
        return real(*given)

    monkeypatch.setattr(encode, "fit_tokenizer", change_meanwhile)
    with pytest.raises(InputError, match="the text changed while it was read"):
        made(file, tmp_path / "cache")
    monkeypatch.setattr(encode, "fit_tokenizer", real)
    assert len(made(file, tmp_path / "cache")[0].training)


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
    with pytest.raises(InputError, match="too little text to hold some out, expected more than 20000 characters"):
        made(file, tmp_path / "cache")


def test_no_more_of_a_text_is_read_than_is_asked_for(tmp_path, monkeypatch):
    """Pages are yielded while the file is read; a list of the text would need all of it."""
    file = tmp_path / "long.txt"
    file.write_text("a word and another word\n" * 200_000)
    with file.open("ab") as end:
        end.write(b"\xff")  # which would be refused if it were read
    assert next(Text([file]).pages()).startswith("a word")


def test_a_slice_of_a_file_is_its_ids(tmp_path):
    ids, path = [0, 70_000, 5], tmp_path / "a.ids"
    path.write_bytes(packed(ids))
    stream = TokenFile(path)
    assert len(stream) == 3
    assert stream[0:3].tolist() == ids
    assert stream[1:99].tolist() == ids[1:]
    assert stream[3:5].tolist() == []
    assert stream[0:3].dtype == torch.long
    assert stream.counts(70_001).nonzero().flatten().tolist() == sorted(ids)
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
    said = []
    paths = fetched([f"hub:{hub}", "other.txt"], said.append)
    assert paths[-1] == "other.txt"
    assert load_documents(paths[:-1]) == ["one \U0001f600", "two"]
    assert said == [f"getting hub:{hub}"]
    assert fetched([f"hub:{hub}"], print) == paths[:-1]
    assert all(path.startswith(str(tmp_path / "library")) for path in paths[:-1])
    with pytest.raises(InputError, match=r"data: cannot read hub:.*from the Hugging Face Hub"):
        fetched([f"hub:{tmp_path / 'gone'}"], print)
    with pytest.raises(InputError, match="expected hub:NAME, hub:NAME:CONFIG"):
        fetched(["hub:"], print)


@pytest.mark.parametrize("place", [(files, "move_folder"), (encode, "packed")])
def test_a_full_disk_is_one_line_and_leaves_room(file, tmp_path, monkeypatch, place):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(*place, full)
        with pytest.raises(InputError, match=r"^cannot write .*/ids-.*: no space left on the disk; make room"):
            made(file, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]
    assert len(made(file, tmp_path / "cache")[0].training)
