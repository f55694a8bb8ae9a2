"""The cache of encoded text: the same ids as without one, whatever happens to it or to the text."""

import errno
import json
import os

import pytest
import torch

from tests.data.interrupting import damage, index_of, only_folder, stop_at
from tests.data.told import Told
from whereformer.data import cache as caches
from whereformer.data import corpus, seen, shards, streams
from whereformer.data.cache import TokenizerChoice, open_encoded, open_or_encode
from whereformer.data.corpus import Text, fingerprint
from whereformer.data.hub import fetched
from whereformer.data.seen import look_at
from whereformer.data.streams import TokenFile, packed, width_of
from whereformer.data.tokenizers import fit_tokenizer, token_stream
from whereformer.errors import InputError
from whereformer.lab.progress import Progress

CHOICE = TokenizerChoice(None, 120)


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    monkeypatch.setattr(caches, "SHARD", 4)
    monkeypatch.setattr(caches, "LOT", 2)


@pytest.fixture
def file(tmp_path):
    """A text of about 30 pages that was written long ago."""
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"the {number} cats saw {number * 7} dogs near an old house." for number in range(2500)))
    os.utime(path, (1e9, 1e9))
    return path


def made(file, cache, choice=CHOICE):
    """The encoded text, and what the progress was told."""
    told = Told()
    text = Text([file], progress=told)
    looked = look_at(text, cache)
    return open_or_encode(cache, text, looked, choice), told


def whole(stream):
    return stream[0 : len(stream)]


def same(first, second):
    return all(
        torch.equal(whole(getattr(first, part)), whole(getattr(second, part))) for part in ("training", "held_out")
    )


def test_the_cache_holds_the_ids_that_encoding_in_memory_gives(file, tmp_path):
    encoded, told = made(file, tmp_path / "cache")
    training, held_out = corpus.split_documents(corpus.load_documents([file]))
    tokenizer = fit_tokenizer(training, 120)
    assert encoded.tokenizer.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    for stream, pages, counts in zip(
        (encoded.training, encoded.held_out), (training, held_out), encoded.counts, strict=True
    ):
        expected = token_stream(tokenizer.backend_tokenizer, pages, encoded.vocabulary.sep)
        assert torch.equal(whole(stream), expected)
        assert torch.equal(counts, expected.bincount(minlength=encoded.vocabulary.size))
    assert told.parts == ["reading the text", "learning the vocabulary", "encoding the text"]


def test_a_finished_cache_is_opened_without_reading_the_text(file, tmp_path):
    first, _ = made(file, tmp_path / "cache")
    again, told = made(file, tmp_path / "cache")
    assert same(first, again)
    assert torch.equal(first.counts, again.counts)
    assert (told.parts, told.characters) == ([], 0)


def test_an_interrupted_encoding_continues_after_its_last_shard(file, tmp_path, monkeypatch):
    expected, _ = made(file, tmp_path / "whole")
    pages = len(list(Text([file]).pages()))
    stop_at(3, lambda: made(file, tmp_path / "cache"))
    index = index_of(tmp_path / "cache")
    # Each shard ends in both streams, so the second one is not complete.
    assert [shard["items"] for shard in index["shards"]] == [4]
    asked, real_lots = [], shards.in_lots

    def lots(items, count):
        for lot in real_lots(items, count):
            asked.extend(lot)
            yield lot

    monkeypatch.setattr(shards, "in_lots", lots)
    again, told = made(file, tmp_path / "cache")
    assert same(expected, again)
    assert "continuing after encoded shard 1 " in told.lines[0]
    assert "learning the vocabulary" not in told.parts
    assert len(asked) == pages - 4


@pytest.mark.parametrize("name", ["training.ids", "held_out.ids", "index.json", "tokenizer.json"])
@pytest.mark.parametrize(
    "kind", ["flipped", *(pytest.param(name, marks=pytest.mark.slow) for name in ("missing", "cut", "empty"))]
)
def test_a_damaged_cache_is_noticed_and_mended(file, tmp_path, name, kind):
    expected, _ = made(file, tmp_path / "cache")
    damage(only_folder(tmp_path / "cache") / name, kind)
    text = Text([file])
    assert open_encoded(tmp_path / "cache", look_at(text, tmp_path / "cache"), CHOICE) is None
    again, told = made(file, tmp_path / "cache")
    assert same(expected, again)
    if name.endswith(".ids"):
        assert "is damaged after" in told.lines[0]
        intact = int(told.lines[0].split("damaged after ")[1].split()[0])
        # The first shard has no held-out page, so nothing of it can be missing there.
        assert (intact > 0) == (kind in ("cut", "flipped") or (kind, name) == ("empty", "held_out.ids"))


@pytest.mark.parametrize("change", ["content", "size", "time"])
def test_a_changed_text_is_noticed(file, tmp_path, change):
    first, _ = made(file, tmp_path / "cache")
    before = look_at(Text([file]), tmp_path / "cache").summary
    text = file.read_text()
    if change == "content":
        file.write_text(text.replace("cats", "rats"))
    elif change == "size":
        file.write_text(text + "\nmore of it")
        os.utime(file, (1e9, 1e9))
    else:
        file.touch()
    again, told = made(file, tmp_path / "cache")
    after = look_at(Text([file]), tmp_path / "cache").summary
    assert told.characters > 0
    assert (before == after) == (change == "time")
    assert same(first, again) == (change == "time")
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == (1 if change == "time" else 2)


def test_a_file_that_has_only_just_changed_is_not_remembered(file, tmp_path):
    file.touch()
    made(file, tmp_path / "cache")
    assert list((tmp_path / "cache").glob("text-*.json")) == []
    # In the same instant, with the same size.
    status = file.stat()
    file.write_text(file.read_text().replace("cats", "rats"))
    os.utime(file, ns=(status.st_mtime_ns, status.st_mtime_ns))
    _, told = made(file, tmp_path / "cache")
    assert "encoding the text" in told.parts


def test_a_text_that_changes_while_it_is_encoded_is_refused(file, tmp_path, monkeypatch):
    real = caches.fit_tokenizer

    def change_meanwhile(*given):
        file.write_text(file.read_text() + "\nmore of it")
        return real(*given)

    monkeypatch.setattr(caches, "fit_tokenizer", change_meanwhile)
    with pytest.raises(InputError, match="the text changed while it was read"):
        made(file, tmp_path / "cache")
    monkeypatch.setattr(caches, "fit_tokenizer", real)
    assert len(made(file, tmp_path / "cache")[0].training)


def test_a_tokenizer_that_splits_special_tokens_is_another(tmp_path):
    tokenizer = fit_tokenizer(["some text"], 64)
    tokenizer.save_pretrained(tmp_path)
    before = TokenizerChoice(tmp_path, 64).setting
    assert before == fingerprint([tokenizer.backend_tokenizer.to_str()])
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "split_special_tokens": True}))
    assert TokenizerChoice(tmp_path, 64).setting != before


def test_another_process_is_not_disturbed(file, tmp_path):
    made(file, tmp_path / "cache")
    folder = only_folder(tmp_path / "cache")
    (folder / "index.json").unlink()
    with shards.open_folder(folder), pytest.raises(InputError, match=r"^cache: another command is writing"):
        made(file, tmp_path / "cache")


def test_records_of_other_formats_are_not_used(file, tmp_path, monkeypatch):
    expected, _ = made(file, tmp_path / "cache")
    monkeypatch.setattr(shards, "FORMAT", 9)
    monkeypatch.setattr(seen, "FORMAT", 9)
    again, told = made(file, tmp_path / "cache")
    assert told.parts[0] == "reading the text"
    assert same(expected, again)


def test_a_record_that_was_changed_is_not_used(file, tmp_path):
    made(file, tmp_path / "cache")
    [record] = (tmp_path / "cache").glob("text-*.json")
    before = record.read_text()
    characters = json.loads(before)["summary"]["characters"]
    record.write_text(before.replace(str(characters), str(characters + 1)))
    _, told = made(file, tmp_path / "cache")
    assert told.parts == ["reading the text"]
    assert json.loads(record.read_text())["summary"]["characters"] == characters


def test_no_more_of_a_text_is_read_than_is_asked_for(tmp_path, monkeypatch):
    """Pages are yielded while the file is read; a list of the text would need all of it."""
    file = tmp_path / "long.txt"
    file.write_text("a word and another word\n" * 200_000)
    told = Told()
    text = Text([file], progress=told)
    assert next(text.pages()).startswith("a word")
    assert 0 < told.characters <= 1 << 20 < file.stat().st_size


def test_ids_take_two_bytes_where_they_fit(tmp_path):
    assert [width_of(size) for size in (64, 65536, 65537)] == [2, 2, 4]
    for width, ids in ((2, [0, 9, 65535]), (4, [0, 70_000, 5])):
        path = tmp_path / f"{width}.ids"
        path.write_bytes(packed(ids, width))
        stream = TokenFile(path, width, 3)
        assert stream[0:3].tolist() == ids
        assert stream[1:99].tolist() == ids[1:]
        assert stream[3:5].tolist() == []
        assert stream[0:3].dtype == torch.long
        assert stream.counts(70_001).nonzero().flatten().tolist() == sorted(ids)
    path.write_bytes(b"")
    with pytest.raises(OSError, match="is shorter than it was"):
        stream[0:3]
    with pytest.raises(ValueError, match="without a step"):
        stream[0:3:2]


def test_data_sets_of_the_hub_are_copied_once(tmp_path):
    """A local folder stands for a data set: the library opens both the same way."""
    import pyarrow as pa
    from pyarrow import parquet

    folder = tmp_path / "dataset"
    folder.mkdir()
    parquet.write_table(
        pa.table({"text": ["one \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "two"], "n": [1, 2]}),
        folder / "train.parquet",
    )
    told = Told()
    paths = fetched([f"hub:{folder}", "other.txt"], None, tmp_path / "cache", told)
    assert paths[1] == "other.txt"
    assert corpus.load_documents(paths[:1]) == ["one \U0001f600", "two"]
    assert told.parts == [f"copying hub:{folder}"]
    (folder / "train.parquet").unlink()
    assert fetched([f"hub:{folder}"], None, tmp_path / "cache", told) == paths[:1]
    with pytest.raises(InputError, match=r"data: cannot read hub:.*from the Hugging Face Hub"):
        fetched([f"hub:{tmp_path / 'gone'}"], None, tmp_path / "cache", told)
    with pytest.raises(InputError, match="expected hub:NAME, hub:NAME:CONFIG"):
        fetched(["hub:"], None, tmp_path / "cache", told)


def test_columns_of_data_sets(tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"en": "a", "de": "b"}\n{"en": "c", "de": null}\n')
    with pytest.raises(InputError, match=r"which column is the text\? .*strings: en, de"):
        fetched([f"hub:{folder}"], None, tmp_path / "cache", Progress())
    with pytest.raises(InputError, match=r"column: .* has no column 'fr'; it has en, de"):
        fetched([f"hub:{folder}"], "fr", tmp_path / "cache", Progress())
    [path] = fetched([f"hub:{folder}::train"], "de", tmp_path / "cache", Progress())
    assert corpus.load_documents([path], "de") == ["b"]
    assert [file.name for file in (tmp_path / "cache").iterdir()] == [path.split("/")[-1]]


def test_a_full_disk_is_one_line_and_the_next_command_continues(file, tmp_path, monkeypatch):
    expected, _ = made(file, tmp_path / "whole")
    left, real = [9], os.fsync

    def fsync(number):
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        real(number)

    monkeypatch.setattr(streams.os, "fsync", fsync)
    with pytest.raises(InputError, match=r"^cannot write .*held_out.ids: no space left on the disk; make room"):
        made(file, tmp_path / "cache")
    monkeypatch.setattr(streams.os, "fsync", real)
    again, told = made(file, tmp_path / "cache")
    assert same(expected, again)
    assert told.lines


def test_a_dry_run_leaves_the_cache_alone(file, tmp_path):
    expected, _ = made(file, tmp_path / "cache")
    before = sorted((tmp_path / "cache").rglob("*"))
    text = Text([file])
    looked = look_at(text, tmp_path / "cache")
    found = open_or_encode(tmp_path / "cache", text, looked, CHOICE, tmp_path / "scratch")
    assert same(expected, found)
    assert not (tmp_path / "scratch").exists()
    found = open_or_encode(tmp_path / "cache", text, looked, TokenizerChoice(None, 100), tmp_path / "scratch")
    assert found.training.path.is_relative_to(tmp_path / "scratch")
    assert sorted((tmp_path / "cache").rglob("*")) == before


def test_each_process_of_a_dry_run_encodes_for_itself(file, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    text = Text([file])
    found = open_or_encode(tmp_path / "cache", text, look_at(text, tmp_path), CHOICE, tmp_path / "scratch")
    assert len(found.training)
    assert not (tmp_path / "cache").exists()


def test_a_text_that_settles_is_remembered_when_the_cache_is_opened(file, tmp_path):
    file.touch()
    made(file, tmp_path / "cache")
    os.utime(file, (1e9, 1e9))
    made(file, tmp_path / "cache")
    assert made(file, tmp_path / "cache")[1].characters == 0
