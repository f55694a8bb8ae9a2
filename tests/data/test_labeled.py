"""Batches of labeled rows."""

from dataclasses import replace

import pytest
import torch
from tokenizers import processors
from transformers import AutoTokenizer

from tests.recipes.finetuning import save_model
from whereformer import EncoderConfig
from whereformer.data import labeled as rows
from whereformer.data.glue import Split
from whereformer.errors import InputError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_model(tmp_path_factory.mktemp("model")))


TEXTS = ["the cat saw the dog", "the dog", "the king met the queen again again", "a horse"]


@pytest.fixture
def encoded(tokenizer):
    def encode(max_length=None, regression=False, **config):
        labels = [0, 1, 1, 0]
        split = Split([(text,) for text in TEXTS], [*map(float, labels)] if regression else labels)
        return rows.tokenize(split, tokenizer, max_length, EncoderConfig(blocks="2", **config))

    return encode


def test_pairs_are_tokenized_as_their_tokenizer_does(tokenizer, monkeypatch):
    monkeypatch.setattr(rows, "CHUNK", 8)
    pairs = [(f"the cat saw dog {n}", " ".join(["again"] * (n % 9))) for n in range(50)]
    typed = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    typed.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    split = Split(pairs, [len(b) for _, b in pairs])
    tokenized = rows.tokenize(split, typed, 14, EncoderConfig())
    sides = [[*side] for side in zip(*pairs, strict=True)]
    expected = typed(*sides, truncation=True, max_length=14)
    assert [list(ids) for ids, _ in tokenized.rows] == expected["input_ids"]
    assert [list(types) for _, types in tokenized.rows] == expected["token_type_ids"]
    assert {kind for _, types in tokenized.rows for kind in types} == {0, 1}
    assert tokenized.labels == [len(b) for _, b in pairs]
    assert 0 < tokenized.num_truncated == sum(len(row) > 14 for row in typed(*sides)["input_ids"])


def test_padded_batches(encoded):
    data = encoded()
    padded = data.collate([0, 1])
    long, short = data.lengths.flatten().tolist()[:2]
    assert padded["input_ids"].shape == (2, long)
    assert padded["attention_mask"].tolist() == [[1] * long, [1] * short + [0] * (long - short)]
    assert padded["labels"].tolist() == [0, 1]
    assert "attention_mask" not in data.collate([0])
    assert padded["labels"].dtype == torch.int64
    assert encoded(regression=True).collate([0])["labels"].dtype == torch.float32


def test_a_funnel_drops_only_padding(encoded, tokenizer):
    data = encoded()
    funnel = replace(data, end=3)
    batch = funnel.collate([0])
    assert batch["attention_mask"].tolist() == [[1] * int(data.lengths[0]) + [0] * 3]
    blocks = EncoderConfig(blocks="1-1-1")
    data = rows.tokenize(Split([("the cat",)], [0]), tokenizer, 9, blocks)
    assert data.end == 3


def test_rows_are_cut_where_that_is_asked_for(encoded, tokenizer):
    assert encoded().num_truncated == 0
    data = encoded(max_length=6)
    assert data.num_truncated == 2
    assert data.lengths.max() == 6
    assert all(ids[-1] == tokenizer.sep_token_id for ids, _ in data.rows)


def test_the_fingerprint_is_of_all_tokens_and_labels_and_of_the_weights(encoded):
    def fingerprint(data, weights="w"):
        return rows.fingerprint_rows([encoded(), data], weights)

    full = encoded()
    assert fingerprint(full) == fingerprint(encoded())
    variants = [encoded(max_length=6), encoded(regression=True), replace(full, labels=[1, 1, 1, 0])]
    prints = [fingerprint(full), fingerprint(full, "other"), *map(fingerprint, variants)]
    assert len(set(prints)) == len(prints)


def test_token_types_that_the_model_lacks_are_left_out():
    class Typed:
        pad_token_id = 0

        def __call__(self, *texts, **options):
            return {"input_ids": [[2, 3, 4]], "token_type_ids": [[0, 0, 1]]}

    def encoded(config):
        return rows.tokenize(Split([("a", "b")], [0]), Typed(), None, config)

    for kinds in (2, 1, 0):
        batch = encoded(EncoderConfig(type_vocab_size=kinds)).collate([0])
        assert ("token_type_ids" in batch) == (kinds == 2)
    batch = encoded(EncoderConfig()).collate([0])
    assert batch["token_type_ids"].tolist() == [[0, 0, 1]]


def test_a_tokenizer_has_to_fit(tokenizer):
    rows.check_tokenizer(tokenizer, 200)
    with pytest.raises(InputError, match=r"tokenizer: it does not match .* the vocabulary has 50 tokens"):
        rows.check_tokenizer(tokenizer, 50)
    bare = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    bare.backend_tokenizer.post_processor = processors.TemplateProcessing("$A")
    with pytest.raises(InputError, match="no special token before text"):
        rows.check_tokenizer(bare, 200)
    bare.pad_token = None
    with pytest.raises(InputError, match="no padding token"):
        rows.check_tokenizer(bare, 200)
