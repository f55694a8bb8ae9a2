"""The cache of labeled rows: the same rows as in memory, whatever happens to it or to the tables."""

import json
import os
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from tests.data.harm import DAMAGE, contents, damage, only_folder, stop_before_the_end
from tests.data.told import Told
from tests.studies.finetuning import save_model
from whereformer import EncoderConfig
from whereformer.data import glue, rows
from whereformer.data.rows import RowCache
from whereformer.errors import InputError

PAIRS = [(f"the cat saw dog {n}", " ".join(["again"] * (n % 9))) for n in range(50)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One that tells the texts of a pair apart."""
    found = AutoTokenizer.from_pretrained(save_model(tmp_path_factory.mktemp("model")))
    found.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return found


@pytest.fixture(autouse=True)
def _small_lots(monkeypatch):
    monkeypatch.setattr(rows, "LOT", 8)


@pytest.fixture
def data(tmp_path):
    files = {"train": tmp_path / "train.jsonl", "validation": tmp_path / "validation.jsonl"}
    for name, some in (("train", PAIRS[:30]), ("validation", PAIRS[30:])):
        lines = [json.dumps({"a": one, "b": other, "y": len(other)}) for one, other in some]
        files[name].write_text("\n".join(lines))
    return glue.OwnTask(**files, texts=("a", "b"), label="y", regression=True)


def made(data, tokenizer, cache, max_length=14, key=None, scratch=None):
    """The rows of both splits, and what the progress was told."""
    told, found = Told(), data.load()
    key = [found.facts.fingerprint] if key is None else key
    splits = [found.train, *found.judged.values()]
    return RowCache(cache, scratch, told).rows(
        key, splits, tokenizer, max_length, EncoderConfig(), regression=True
    ), told


def test_the_cache_holds_the_rows_that_tokenizing_in_memory_gives(data, tokenizer, tmp_path):
    found, told = made(data, tokenizer, tmp_path / "cache")
    expected = tokenizer([a for a, _ in PAIRS], [b for _, b in PAIRS], truncation=True, max_length=14)
    ids, types = ([row[name] for split in found for row in split] for name in ("ids", "types"))
    assert ids == expected["input_ids"]
    assert types == expected["token_type_ids"]
    assert {kind for row in types for kind in row} == {0, 1}
    assert [len(split) for split in found] == [30, 20]
    assert [*found[0].labels, *found[1].labels] == [len(b) for _, b in PAIRS]
    whole = tokenizer([a for a, _ in PAIRS], [b for _, b in PAIRS], truncation=False)["input_ids"]
    assert 0 < sum(split.cut for split in found) == sum(len(row) > 14 for row in whole)
    assert (told.parts, told.characters) == (["tokenizing the rows"], 50)


def test_an_interrupted_tokenizing_begins_again_with_the_same_bytes(data, tokenizer, tmp_path):
    made(data, tokenizer, tmp_path / "whole")
    stop_before_the_end(lambda: made(data, tokenizer, tmp_path / "cache"))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]
    made(data, tokenizer, tmp_path / "cache")
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")


@pytest.mark.parametrize("name", ["0.ids", "1.lengths"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_cache_is_noticed_and_mended(data, tokenizer, tmp_path, name, kind):
    before, _ = made(data, tokenizer, tmp_path / "cache")
    expected, bytes_before = [[*split] for split in before], contents(tmp_path / "cache")
    damage(only_folder(tmp_path / "cache") / name, kind)
    found, told = made(data, tokenizer, tmp_path / "cache")
    assert name in told.lines[0]
    assert contents(tmp_path / "cache") == bytes_before
    assert [[*split] for split in found] == expected
    assert [split.cut for split in found] == [split.cut for split in before]


def test_what_is_there_is_opened_without_tokenizing_and_another_key_or_length_is_not(data, tokenizer, tmp_path):
    cache = tmp_path / "cache"
    found, _ = made(data, tokenizer, cache)
    again, told = made(data, SimpleNamespace(pad_token_id=tokenizer.pad_token_id), cache)
    assert [[*split] for split in again] == [[*split] for split in found]
    assert told.parts == []
    for options in ({"max_length": 12}, {"max_length": None}, {"key": ["another"]}):
        _, told = made(data, tokenizer, cache, **options)
        assert told.parts == ["tokenizing the rows"]
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 4


def test_each_process_of_a_dry_run_tokenizes_for_itself(data, tokenizer, tmp_path, monkeypatch):
    expected, _ = made(data, tokenizer, tmp_path / "cache")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    [found, _], _ = made(data, tokenizer, tmp_path / "other", scratch=tmp_path / "scratch")
    assert list(found) == list(expected[0])
    assert not (tmp_path / "other").exists()


def test_a_table_that_changes_while_it_is_read_is_refused(data, tokenizer, tmp_path):
    found = data.load()
    cache = RowCache(tmp_path / "cache")
    data.train.write_text(data.train.read_text().replace("cat", "king"))
    os.utime(data.train, (1e9, 1e9))

    def encoded(splits):
        return cache.rows(["x"], splits, tokenizer, None, EncoderConfig(), regression=True)

    with pytest.raises(InputError, match="a table changed while it was read; run the same command again"):
        encoded([found.train])
    (again,) = encoded([data.load().train])
    assert [row["ids"] for row in again] == tokenizer(
        [a.replace("cat", "king") for a, _ in PAIRS[:30]], [b for _, b in PAIRS[:30]]
    )["input_ids"]
