"""The cache of encoded pairs: the same rows as in memory, whatever happens to it or to the text."""

import json
import os
from collections import deque
from dataclasses import replace

import pytest
import torch

from tests.data.test_parallel import held_out_in_memory
from tests.recipes.parallel_text import pairs as some_pairs
from whereformer.data import parallel, subwords
from whereformer.data.parallel import Pairs
from whereformer.errors import InputError

VOCABULARY = 320


@pytest.fixture(autouse=True)
def _small_lots(monkeypatch):
    monkeypatch.setattr(subwords, "CHUNK", 64)


def lines():
    """Pairs of which some have an empty line."""
    source, target = some_pairs()
    source[::11] = [""] * len(source[::11])
    target[::13] = [" \t"] * len(target[::13])
    return source, target


@pytest.fixture
def data(tmp_path):
    """Aligned files that were written long ago."""
    files = tmp_path / "text.en", tmp_path / "text.de"
    for file, side in zip(files, lines(), strict=True):
        file.write_text("".join(f"{line}\n" for line in side))
        os.utime(file, (1e9, 1e9))
    return Pairs("data", files)


def encode_pairs(data, cache, validation=None, vocabulary=VOCABULARY):
    """The encoded pairs, and the messages."""
    messages, parts = [], {"training": data, "held_out": validation}
    if validation is None:
        parts = {name: replace(data, held_out=name == "held_out") for name in parts}
    return parallel.open_or_encode(cache, parts, parallel.fingerprint(parts), vocabulary, messages.append), messages


def listed(rows):
    return [[part.tolist() for part in rows[row]] for row in range(len(rows))]


@pytest.mark.parametrize("has_validation", [False, True])
def test_the_cache_holds_the_rows_that_encoding_in_memory_gives(data, tmp_path, has_validation):
    (encoded, saved_tokenizer), messages = encode_pairs(data, tmp_path / "cache", data if has_validation else None)
    all_pairs = [*zip(*lines(), strict=True)]
    rows = (range(len(all_pairs)),) * 2 if has_validation else held_out_in_memory(all_pairs)
    parts = [[all_pairs[row] for row in part] for part in rows]
    full = [pair for pair in parts[0] if parallel.has_text(*pair)]
    tokenizer = subwords.fit([pair[side] for side in (0, 1) for pair in full], VOCABULARY)
    assert saved_tokenizer.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    for encoded_part, part in zip(encoded.values(), parts, strict=True):
        sides = [[*subwords.encode(tokenizer, [pair[side] for pair in part])] for side in (0, 1)]
        expected = [
            [side[row] for side in sides] if parallel.has_text(*pair) else [[], []] for row, pair in enumerate(part)
        ]
        assert listed(encoded_part) == expected
        assert encoded_part.lengths.tolist() == [[len(line) for line in row] for row in expected]
        chosen = torch.tensor([2, 0, 2])
        assert listed(encoded_part.select(chosen)) == [expected[row] for row in chosen]
    assert messages == ["learning the vocabulary", "encoding the text"]


def test_another_text_or_vocabulary_has_an_entry_of_its_own(data, tmp_path):
    cache = tmp_path / "cache"
    first, _ = encode_pairs(data, cache)
    _, messages = encode_pairs(data, cache, vocabulary=330)
    assert messages == ["learning the vocabulary", "encoding the text"]
    encode_pairs(data, cache, validation=data)
    data.files[1].write_text(data.files[1].read_text().replace("Ücat", "Ürat"))
    os.utime(data.files[1], (1e9, 1e9))
    second, _ = encode_pairs(data, cache)
    one, another = (tokenizer.decode(encoded["training"][3][1]) for encoded, tokenizer in (first, second))
    assert one != another
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 4


def test_columns_and_the_part_that_a_file_belongs_to_decide_which_text_it_is(tmp_path):
    tables = []
    for number in range(3):
        file = tmp_path / f"{number}.jsonl"
        rows = [{"en": f"{word} {number}", "de": f"{word}en"} for word in "abcdefg"]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(file, (1e9, 1e9))
        tables.append(file)
    results = [
        encode_pairs(Pairs("data", tuple(tables[:2]), "en,de"), tmp_path, Pairs("data", (tables[2],))),
        encode_pairs(Pairs("data", tuple(tables[:1]), "en,de"), tmp_path, Pairs("data", tuple(tables[1:]))),
        encode_pairs(Pairs("data", tuple(tables[:1]), "de,en"), tmp_path, Pairs("data", tuple(tables[1:]))),
    ]
    assert [[*map(len, encoded.values())] for (encoded, _), _ in results] == [[14, 7], [7, 14], [7, 14]]
    sources = [tokenizer.decode(encoded["training"][0][0]) for (encoded, tokenizer), _ in results]
    assert sources == ["a 0</s>", "a 0</s>", "aen</s>"]


def test_a_text_that_changes_while_it_is_encoded_is_refused(data, tmp_path, monkeypatch):
    real = subwords.fit

    def change_meanwhile(*arguments):
        tokenizer = real(*arguments)
        for file in data.files:
            file.write_text(file.read_text() + "one more\n")
        return tokenizer

    monkeypatch.setattr(subwords, "fit", change_meanwhile)
    with pytest.raises(InputError, match=r"^data: the text changed while it was read"):
        encode_pairs(data, tmp_path / "cache")
    monkeypatch.setattr(subwords, "fit", real)
    assert len(encode_pairs(data, tmp_path / "cache")[0][0]["training"]) == 288


def as_second_process(patched):
    patched.setenv("RANK", "1")
    patched.setenv("WORLD_SIZE", "2")


def test_only_the_main_process_writes_to_a_cache(data, tmp_path, monkeypatch):
    (expected, _), _ = encode_pairs(data, tmp_path / "cache")
    as_second_process(monkeypatch)
    (again, _), messages = encode_pairs(data, tmp_path / "cache")
    assert listed(again["training"]) == listed(expected["training"])
    assert messages == []
    with pytest.raises(InputError, match=r"^cache: .* lacks files that the main process wrote"):
        encode_pairs(data, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_no_more_of_a_text_is_read_than_is_asked_for(data):
    with data.files[0].open("a") as source, data.files[1].open("ab") as target:
        source.write("a word\n" * 100)
        target.write(b"\xff")  # which is refused when it is read
    pairs = iter(data)
    assert next(pairs)
    with pytest.raises(InputError, match="not UTF-8 text"):
        deque(pairs)
