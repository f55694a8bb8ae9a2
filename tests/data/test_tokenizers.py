"""Tokenizers that are trained or loaded, and their special tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from whereformer.data import corpus, windows
from whereformer.data.tokenizers import Vocabulary, build_vocabulary, fit_tokenizer, load_tokenizer, read_vocabulary
from whereformer.errors import InputError

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog"] * 20


def test_a_trained_tokenizer_puts_cls_and_sep_around_text_and_decodes():
    tokenizer = fit_tokenizer(TEXTS, 100)
    vocabulary = read_vocabulary(tokenizer, "vocab_size")
    assert vocabulary == build_vocabulary(len(tokenizer))
    ids = tokenizer("The cat")["input_ids"]
    assert (ids[0], ids[-1]) == (vocabulary.cls, vocabulary.sep)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the cat"
    assert tokenizer.tokenize("The CAT") == ["the", "cat"]


def test_rare_letters_do_not_crowd_words_out_of_the_vocabulary():
    rare = [chr(0x4E00 + index) for index in range(90)]
    tokenizer = fit_tokenizer(["the house near the river"] * 10_000 + rare, 100)
    tokens = set(tokenizer.get_vocab())
    assert {"the", "house", "near", "river"} <= tokens
    assert tokens.isdisjoint(rare)
    assert tokenizer.tokenize("the house 一") == ["the", "house", "[UNK]"]


def test_frequent_letters_of_any_script_are_in_the_vocabulary():
    letters = [chr(0x4E00 + index) for index in range(300)]
    tokenizer = fit_tokenizer(["".join(letters)] * 20, 1000)
    assert tokenizer.tokenize("".join(letters)) == letters


def test_letters_take_at_most_half_of_the_vocabulary():
    letters = [chr(0x4E00 + index) for index in range(300)]
    tokens = fit_tokenizer(["".join(letters)] * 20 + ["the house"] * 50, 100).get_vocab()
    assert 20 <= sum(token in letters for token in tokens) <= 50


@pytest.mark.slow
def test_the_vocabulary_is_the_same_in_every_process():
    """The trainer's own order changes with the process, so a fresh one has to agree with this one."""
    script = (
        "from whereformer.data import corpus, windows\n"
        "from whereformer.data.tokenizers import fit_tokenizer\n"
        "texts = corpus.__doc__, windows.__doc__, open(windows.__file__).read(), open(corpus.__file__).read()\n"
        "print(fit_tokenizer(texts, 600).backend_tokenizer.to_str())"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    texts = corpus.__doc__, windows.__doc__, Path(windows.__file__).read_text(), Path(corpus.__file__).read_text()
    assert printed == fit_tokenizer(texts, 600).backend_tokenizer.to_str()
    assert len(printed) > 1000


def roberta_like(folder):
    """A tokenizer whose special tokens have other names and numbers."""
    from tokenizers import pre_tokenizers
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


def test_special_tokens_are_found_by_what_they_are(tmp_path):
    words = roberta_like(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    vocabulary = read_vocabulary(tokenizer, "tokenizer")
    assert vocabulary == Vocabulary(words + 5, words + 4, words + 3, words + 2, words, tuple(range(words, words + 5)))
    assert len(tokenizer.backend_tokenizer.encode(TEXTS[0], add_special_tokens=False)) == 6  # not truncated


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("gone", "tokenizer: expected the folder of a saved tokenizer, got"),
        ("{", "tokenizer: no tokenizer can be read"),
        ("no mask", "has no mask_token, which pretraining needs"),
        ("no length", "tokenizer: no tokenizer can be read"),
    ],
)
def test_what_is_no_tokenizer_is_refused(tmp_path, broken, expected):
    fit_tokenizer(TEXTS, 100).save_pretrained(tmp_path)
    if broken.startswith("no "):
        config, entry = tmp_path / "tokenizer_config.json", {"no mask": "mask_token", "no length": "model_max_length"}
        value = None if broken == "no mask" else "x"
        config.write_text(json.dumps({**json.loads(config.read_text()), entry[broken]: value}))
    else:
        (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"^tokenizer") as error:
        load_tokenizer(tmp_path / "gone" if broken == "gone" else tmp_path)
    assert expected in str(error.value)
