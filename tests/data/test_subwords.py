"""The joint vocabulary: every script, spaces back, nothing in text is special."""

import hashlib
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.recipes.parallel_text import pairs
from whereformer.data import subwords


@pytest.fixture(scope="module")
def tokenizer():
    source, target = pairs()
    return subwords.fit(source + target, 400)


@pytest.fixture(scope="module")
def loaded(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def normalized(text):
    # Rust's and Python's white space differ in the separators that begin at 0x1c.
    return " ".join(unicodedata.normalize("NFC", text).split())


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x1c\x1d\x1e\x1f"))


@given(TEXT | st.sampled_from(["</s> <pad>", "日本語 текст", "e\u0301 a\u00a0b", " a \t b ", "Üdog. 'tis", "a , b ."]))
def test_text_comes_back_normalized_in_every_script(loaded, text):
    [ids] = subwords.encode(loaded, [text])
    assert ids[-1] == subwords.END
    assert all(token > subwords.END for token in ids[:-1])
    assert loaded.decode(ids, skip_special_tokens=True) == normalized(text)
    assert loaded(text)["input_ids"] == ids


def test_what_is_saved_is_what_was_made(tokenizer, loaded):
    source, target = pairs()
    for text in (*source[:5], *target[:5], "</s>", ""):
        assert next(subwords.encode(tokenizer, [text])) == loaded(text)["input_ids"]
    assert [loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id] == [0, 1, 2]
    # Little text has few pieces that are there twice.
    assert 300 < len(loaded) < 400


def test_a_word_is_the_same_piece_at_the_beginning(loaded):
    first, second = (next(subwords.encode(loaded, [text])) for text in ("dog", "the dog"))
    assert second[-len(first) :] == first


@pytest.mark.slow
def test_the_vocabulary_is_the_same_in_every_process():
    code = (
        "from tests.recipes.parallel_text import pairs; from whereformer.data import subwords; import hashlib; "
        "s, t = pairs(); text = subwords.fit(s + t, 400).backend_tokenizer.to_str(); "
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    expected = subwords.fit([line for side in pairs() for line in side], 400).backend_tokenizer.to_str()
    assert printed == hashlib.sha256(expected.encode()).hexdigest()
