"""Masks, batches and the held-out score."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from torch.nn import functional

from tests.data.token_streams import token_stream
from whereformer import EncoderConfig, EncoderForCausalLM, EncoderForMaskedLM
from whereformer.data import corpus, masks
from whereformer.data.encode import unigram_entropy
from whereformer.data.masks import IGNORED, Batches, HeldOut, mask_tokens
from whereformer.data.tokenizers import (
    CLS,
    MASK,
    PAD,
    SEP,
    SPECIAL_TOKENS,
    Vocabulary,
    fit_tokenizer,
    trained_vocabulary,
)
from whereformer.data.windows import Stage, growing
from whereformer.lab.held_out import lm_score

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog"] * 20


def stream(tokens=5000, vocab=100):
    return torch.randint(5, vocab, (tokens,), generator=torch.Generator().manual_seed(0))


def test_the_tokenizer_lowers_case_and_survives_saving(tmp_path):
    tokenizer = fit_tokenizer(TEXTS, 100).backend_tokenizer
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert tokenizer.encode("The CAT", add_special_tokens=False).tokens == ["the", "cat"]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = token_stream(loaded, TEXTS[:2])
    assert ids.tolist() == token_stream(tokenizer, TEXTS[:2]).tolist()
    assert (ids == SEP).sum() == 2
    assert ids[-1] == SEP


def test_masking_follows_bert():
    tokens = stream(200_000).view(-1, 100)
    inputs, labels = mask_tokens(tokens, 0.15, trained_vocabulary(100), torch.Generator().manual_seed(1))
    chosen = labels != IGNORED
    assert (chosen.sum(1) == 15).all()
    assert torch.equal(labels[chosen], tokens[chosen])
    assert torch.equal(inputs[~chosen], tokens[~chosen])
    masked = inputs[chosen] == MASK
    kept = inputs[chosen] == tokens[chosen]
    assert masked.float().mean() == pytest.approx(0.8, abs=0.01)
    # One random token in 95 is the right one.
    assert kept.float().mean() == pytest.approx(0.1 + 0.1 / 95, abs=0.01)
    assert inputs.min() >= MASK


def test_special_tokens_are_never_masked():
    tokens = torch.tensor([[CLS, 7, SEP, PAD, 8], [CLS, SEP, SEP, PAD, PAD]])
    for seed in range(20):
        _, labels = mask_tokens(tokens, 0.5, trained_vocabulary(100), torch.Generator().manual_seed(seed))
        assert (labels[tokens < 5] == IGNORED).all()


def test_masking_finds_special_tokens_wherever_they_are():
    vocabulary = Vocabulary(100, pad=99, cls=50, sep=98, mask=7, special=(7, 50, 98, 99))
    tokens = torch.randint(100, (500, 40), generator=torch.Generator().manual_seed(0))
    inputs, labels = mask_tokens(tokens, 0.3, vocabulary, torch.Generator().manual_seed(1))
    special = torch.isin(tokens, torch.tensor(vocabulary.special))
    assert (labels[special] == IGNORED).all()
    changed = inputs != tokens
    assert (labels[changed] == tokens[changed]).all()
    assert not torch.isin(inputs[changed], torch.tensor([50, 98, 99])).any()
    assert (inputs[changed] == 7).float().mean() == pytest.approx(0.8 / 0.9, abs=0.02)


def test_a_batch_depends_on_seed_and_step_alone():
    batches = Batches(stream(), 4, 16, 0.3, 100, seed=3)
    inputs, labels = batches[7]
    again = batches[7]
    assert torch.equal(inputs, again[0])
    assert torch.equal(labels, again[1])
    assert inputs.shape == (4, 16)
    assert (inputs[:, 0] == CLS).all()
    assert not torch.equal(inputs, batches[8][0])
    assert not torch.equal(inputs, Batches(stream(), 4, 16, 0.3, 100, seed=4)[7][0])


def test_a_batch_can_be_as_long_as_the_text():
    inputs, labels = Batches(stream(15), 2, 16, 0.3, 100, seed=0)[0]
    assert torch.equal(torch.where(labels == IGNORED, inputs, labels)[0, 1:], stream(15))


@pytest.mark.parametrize("length", [8, 64, 100, 5000])
def test_every_length_predicts_the_same_tokens(length):
    held_out = HeldOut(stream(1000), 0.15, 100)
    inputs, labels, mask = (torch.cat(parts) for parts in zip(*held_out.windows(length, 512), strict=True))
    assert inputs.shape[1] == length
    assert torch.equal(labels[labels != IGNORED], held_out.labels[held_out.labels != IGNORED])
    assert mask.sum() == len(held_out.inputs) + len(inputs)
    assert torch.equal(mask, inputs != PAD)


def test_the_score_is_the_mean_loss_and_does_not_depend_on_batching():
    torch.manual_seed(0)
    model = EncoderForMaskedLM(
        EncoderConfig(
            vocab_size=100, hidden_size=16, num_attention_heads=2, blocks="1", position="t5", sparse_prediction=True
        )
    )
    held_out = HeldOut(stream(1000), 0.15, 100)
    score = lm_score(model, held_out.windows(32, 4096))
    assert model.training
    assert score.loss == pytest.approx(float(score.losses.mean()))
    assert len(score.losses) == (held_out.labels != IGNORED).sum()
    other = lm_score(model, held_out.windows(32, 64))
    torch.testing.assert_close(other.losses, score.losses, rtol=1e-4, atol=1e-4)
    assert 4 < score.loss < 6
    assert 0 <= score.accuracy <= 0.1


def test_causal_models_are_scored_by_every_token_after_the_first_of_a_row():
    torch.manual_seed(0)
    config = {"vocab_size": 100, "hidden_size": 16, "num_attention_heads": 2, "blocks": "1", "position": "t5"}
    model = EncoderForCausalLM(EncoderConfig(**config, causal=True, sparse_prediction=True)).eval()
    held_out = HeldOut(stream(1000), None, 100)
    score = lm_score(model, held_out.windows(32, 4096))
    wanted, right = [], []
    with torch.no_grad():
        for start in range(0, 960, 31):
            text = stream(1000)[start : min(start + 31, 960)]
            states = model.encoder(torch.cat((torch.tensor([CLS]), text))[None]).last_hidden_state
            logits = model.head(states)[0, :-1]
            wanted.append(functional.cross_entropy(logits, text, reduction="none"))
            right.append(logits.argmax(-1) == text)
    torch.testing.assert_close(score.losses, torch.cat(wanted), rtol=1e-4, atol=1e-4)
    assert score.accuracy == pytest.approx(float(torch.cat(right).double().mean()))
    model.config.sparse_prediction = False
    assert torch.equal(lm_score(model, held_out.windows(32, 4096)).losses, score.losses)


def test_causal_batches_have_all_tokens_as_labels():
    inputs, labels = Batches(stream(), 4, 16, None, 100, seed=3)[7]
    masked, wanted = Batches(stream(), 4, 16, 0.3, 100, seed=3)[7]
    assert torch.equal(inputs, labels)
    assert torch.equal(inputs, torch.where(wanted == IGNORED, masked, wanted))


def test_unigram_entropy_of_uniform_text_is_the_log_of_its_vocabulary():
    entropy = unigram_entropy(*(stream(count).bincount(minlength=100) for count in (200_000, 50_000)))
    assert entropy == pytest.approx(torch.log(torch.tensor(95.0)).item(), abs=0.01)


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
        "from whereformer.data import corpus, masks\n"
        "from whereformer.data.tokenizers import fit_tokenizer\n"
        "texts = corpus.__doc__, masks.__doc__, open(masks.__file__).read(), open(corpus.__file__).read()\n"
        "print(fit_tokenizer(texts, 600).backend_tokenizer.to_str())"
    )
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    texts = corpus.__doc__, masks.__doc__, Path(masks.__file__).read_text(), Path(corpus.__file__).read_text()
    assert there == fit_tokenizer(texts, 600).backend_tokenizer.to_str()
    assert len(there) > 1000


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (8, [(8, 100, 4)]),
        (16, [(8, 40, 8), (16, 60, 4)]),
        (64, [(8, 40, 32), (16, 10, 16), (32, 10, 8), (64, 40, 4)]),
        (100, [(8, 40, 50), (16, 7, 25), (32, 6, 12), (64, 7, 6), (100, 40, 4)]),
    ],
)
def test_lengths_double_until_the_last(length, expected):
    assert growing(length, 4, 100) == [Stage(*each) for each in expected]


@given(st.integers(8, 4096), st.integers(1, 300))
def test_windows_never_shrink_and_end_at_full_length(length, steps):
    stages = growing(length, 4, steps)
    lengths = [stage.length for stage in stages]
    assert sum(stage.steps for stage in stages) == steps
    assert lengths == sorted(set(lengths))
    assert steps == 1 or lengths[-1] == length
