"""Held-out text, and the scores of models on it."""

import pytest
import torch
from torch.nn import functional

from tests.data.test_windows import stream
from whereformer import EncoderConfig, EncoderForCausalLM, EncoderForMaskedLM
from whereformer.analysis.held_out import HeldOut, held_out_scores, lm_score
from whereformer.data.tokenizers import CLS, PAD, build_vocabulary
from whereformer.data.windows import IGNORED


@pytest.mark.parametrize("length", [8, 64, 100, 5000])
def test_every_length_predicts_the_same_tokens(length):
    held_out = HeldOut(stream(1000), 0.15, build_vocabulary(100))
    batches = list(held_out.windows(length, 512))
    inputs, labels = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
    assert inputs.shape[1] == length
    assert torch.equal(labels[labels != IGNORED], held_out.labels[held_out.labels != IGNORED])
    assert (inputs != PAD).sum() == len(held_out.inputs) + len(inputs)
    assert all("attention_mask" not in batch for batch in batches[:-1])
    last = batches[-1].get("attention_mask", torch.ones(1, length))
    assert torch.equal(last == 1, batches[-1]["input_ids"] != PAD)


SMALL = {"vocab_size": 100, "hidden_size": 16, "num_attention_heads": 2, "blocks": "1", "position": "t5"}


def test_the_score_is_the_mean_loss_and_does_not_depend_on_batching():
    torch.manual_seed(0)
    model = EncoderForMaskedLM(EncoderConfig(**SMALL, sparse_prediction=True))
    held_out = HeldOut(stream(1000), 0.15, build_vocabulary(100))
    score = lm_score(model, held_out.windows(32, 4096))
    assert model.training
    assert score.loss == pytest.approx(float(score.losses.mean()))
    assert len(score.losses) == (held_out.labels != IGNORED).sum()
    in_small_batches = lm_score(model, held_out.windows(32, 64))
    torch.testing.assert_close(in_small_batches.losses, score.losses, rtol=1e-4, atol=1e-4)
    assert 4 < score.loss < 6
    assert 0 <= score.accuracy <= 0.1
    model.config.label_share = 0.4  # more places than labels
    scores = held_out_scores(model, held_out.windows(32, 64))
    assert scores == pytest.approx({"loss": score.loss, "accuracy": score.accuracy}, rel=1e-4)


def test_causal_models_are_scored_by_every_token_after_the_first_of_a_row():
    torch.manual_seed(0)
    model = EncoderForCausalLM(EncoderConfig(**SMALL, causal=True, sparse_prediction=True)).eval()
    held_out = HeldOut(stream(1000), None, build_vocabulary(100))
    score = lm_score(model, held_out.windows(32, 4096))
    losses, right = [], []
    with torch.no_grad():
        for start in range(0, 960, 31):
            text = stream(1000)[start : min(start + 31, 960)]
            states = model.encoder(torch.cat((torch.tensor([CLS]), text))[None]).last_hidden_state
            logits = model.head(states)[0, :-1]
            losses.append(functional.cross_entropy(logits, text, reduction="none"))
            right.append(logits.argmax(-1) == text)
    torch.testing.assert_close(score.losses, torch.cat(losses), rtol=1e-4, atol=1e-4)
    assert score.accuracy == pytest.approx(float(torch.cat(right).double().mean()))
    model.config.sparse_prediction = False
    assert torch.equal(lm_score(model, held_out.windows(32, 4096)).losses, score.losses)
