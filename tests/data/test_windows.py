"""Windows of text and the tokenizers they come from."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models

from tests.data.token_streams import token_stream
from whereformer.data.masks import IGNORED
from whereformer.data.tokenizers import (
    CLS,
    Vocabulary,
    fit_tokenizer,
    load_tokenizer,
    trained_vocabulary,
    vocabulary_of,
)
from whereformer.data.windows import Windows
from whereformer.errors import InputError

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog"] * 20
VOCABULARY = Vocabulary(2000, pad=1999, cls=1, sep=2, mask=3, special=(1, 2, 3, 1999))


def rows_of(tokens=500, rate=0.2, **options):
    return Windows(torch.arange(10, 10 + tokens), VOCABULARY, length=16, rate=rate, **options)


def text_of(item):
    """The row before it was masked."""
    return torch.where(item["labels"] == IGNORED, item["input_ids"], item["labels"])


def test_a_window_is_cls_text_and_sep():
    item = rows_of()[0]
    assert set(item) == {"input_ids", "labels"}
    text = text_of(item)
    assert text.shape == (16,)
    assert (text[0], text[-1]) == (1, 2)
    steps = text[1:-1].diff()
    assert ((steps == 1) | (steps == -499)).all()
    assert (item["labels"] != IGNORED).sum() == 3


def test_padding_ends_a_window_and_is_not_attended_to():
    item = rows_of(padding=3)[0]
    assert text_of(item)[-4:].tolist() == [2, 1999, 1999, 1999]
    assert item["attention_mask"].tolist() == [1] * 13 + [0] * 3


def test_hidden_masks_are_not_attended_to():
    for padding in (0, 3):
        item = rows_of(padding=padding, hide_masked=True, rate=0.5)[0]
        hidden = (item["input_ids"] == 3) | (item["input_ids"] == 1999)
        assert (item["input_ids"] == 3).any()
        assert torch.equal(item["attention_mask"] == 0, hidden)


def test_every_pass_reads_the_whole_text_once_in_another_order():
    rows = rows_of(tokens=504)
    per_pass = rows.per_pass
    assert per_pass == 36
    passes = [
        torch.cat([text_of(rows[row])[1:-1] for row in range(first, first + per_pass)]) for first in (0, per_pass)
    ]
    for read in passes:
        assert torch.equal(read.sort().values, torch.arange(10, 514))
    assert not torch.equal(*passes)


def test_a_row_depends_on_its_number_and_the_seed_alone():
    rows, again = rows_of(), rows_of()
    later = [again[row] for row in (99, 40, 7)][-1]
    assert torch.equal(rows[7]["input_ids"], later["input_ids"])
    assert torch.equal(rows[7]["labels"], later["labels"])
    assert not torch.equal(rows[7]["input_ids"], rows[8]["input_ids"])
    assert not torch.equal(rows[7]["input_ids"], rows_of(seed=1)[7]["input_ids"])


def test_rows_that_are_not_shuffled_are_spread_over_the_text():
    rows = rows_of(spread=5, tokens=14 * 10)
    starts = [int(text_of(rows[row])[1]) - 10 for row in range(5)]
    assert starts == [0, 28, 56, 84, 112]


def test_a_text_of_one_window_is_enough():
    rows = rows_of(tokens=14)
    assert torch.equal(text_of(rows[3])[1:-1].sort().values, torch.arange(10, 24))


def test_a_trained_tokenizer_puts_cls_and_sep_around_text_and_decodes():
    tokenizer = fit_tokenizer(TEXTS, 100)
    vocabulary = vocabulary_of(tokenizer, "vocab_size")
    assert vocabulary == trained_vocabulary(len(tokenizer))
    ids = tokenizer("The cat")["input_ids"]
    assert (ids[0], ids[-1]) == (vocabulary.cls, vocabulary.sep)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the cat"
    stream = token_stream(tokenizer.backend_tokenizer, TEXTS[:2], vocabulary.sep)
    assert (stream == vocabulary.cls).sum() == 0
    assert (stream == vocabulary.sep).sum() == 2


def roberta_like(folder):
    """A tokenizer whose special tokens have other names and numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for text in TEXTS for word in text.split()})
    names = [*words, "<mask>", "<unk>", "</s>", "<s>", "<pad>"]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(4)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        cls_token="<s>",
        sep_token="</s>",
        mask_token="<mask>",
    ).save_pretrained(folder)
    return len(words)


@pytest.mark.parametrize("described", [True, False])
def test_special_tokens_are_found_by_what_they_are(tmp_path, described):
    words = roberta_like(tmp_path)
    if not described:
        (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path)
    vocabulary = vocabulary_of(tokenizer, "tokenizer")
    assert vocabulary == Vocabulary(words + 5, words + 4, words + 3, words + 2, words, tuple(range(words, words + 5)))
    stream = token_stream(tokenizer.backend_tokenizer, TEXTS[:1], vocabulary.sep)
    assert len(stream) == 7


def test_a_tokenizer_file_alone_is_enough(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(fit_tokenizer(TEXTS, 100).backend_tokenizer.to_str())
    assert vocabulary_of(load_tokenizer(file), "tokenizer").cls == CLS


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "tokenizer: expected a tokenizer.json or a folder with one"),
        ("{", "tokenizer: cannot read"),
        ("no mask", "has no mask_token, which pretraining needs"),
    ],
)
def test_what_is_no_tokenizer_is_refused(tmp_path, content, expected):
    if content == "no mask":
        content = fit_tokenizer(TEXTS, 100).backend_tokenizer.to_str().replace("[MASK]", "[NOTHING]")
        json.loads(content)
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match=r"^tokenizer") as error:
        load_tokenizer(tmp_path)
    assert expected in str(error.value)


@pytest.mark.parametrize("kind", [models.WordPiece, models.WordLevel])
def test_a_token_for_the_unknown_that_is_not_in_the_vocabulary_is_one_line(kind, tmp_path):
    vocabulary = {name: number for number, name in enumerate(["[PAD]", "[CLS]", "[SEP]", "[MASK]", "a", "b"])}
    file = tmp_path / "tokenizer.json"
    Tokenizer(kind(vocabulary, unk_token="[UNK]")).save(str(file))
    with pytest.raises(InputError, match=r"^tokenizer: cannot read .*: Word.* Missing \[UNK\] token from the"):
        load_tokenizer(file)
