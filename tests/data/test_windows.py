"""Windows of a text: their places and their masks."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whereformer.data.encode import unigram_entropy
from whereformer.data.streams import TokenFile, to_bytes
from whereformer.data.tokenizers import MASK, Vocabulary, build_vocabulary
from whereformer.data.windows import IGNORED, Stage, Windows, _order, growing_stages, mask_tokens
from whereformer.errors import InputError

VOCABULARY = Vocabulary(2000, pad=1999, cls=1, sep=2, mask=3, special=(1, 2, 3, 1999))
WINDOWS = Windows(torch.arange(10, 510), VOCABULARY, [Stage(16, 9, 5)], rate=0.2)


def stream(tokens=5000, vocab=100):
    return torch.randint(5, vocab, (tokens,), generator=torch.Generator().manual_seed(0))


def text_of(batch):
    """The rows before they were masked."""
    return torch.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"])


def test_masking_follows_bert():
    tokens = stream(200_000).view(-1, 100)
    inputs, labels = mask_tokens(tokens, 0.15, build_vocabulary(100), torch.Generator().manual_seed(1))
    chosen = labels != IGNORED
    assert (chosen.sum(1) == 15).all()
    assert torch.equal(labels[chosen], tokens[chosen])
    assert torch.equal(inputs[~chosen], tokens[~chosen])
    masked = inputs[chosen] == MASK
    unchanged = inputs[chosen] == tokens[chosen]
    assert masked.float().mean() == pytest.approx(0.8, abs=0.01)
    # One random token in 95 is the right one.
    assert unchanged.float().mean() == pytest.approx(0.1 + 0.1 / 95, abs=0.01)
    assert inputs.min() >= MASK


def test_special_tokens_are_never_masked_wherever_they_are():
    vocabulary = Vocabulary(100, pad=99, cls=50, sep=98, mask=7, special=(7, 50, 98, 99))
    tokens = torch.randint(100, (500, 40), generator=torch.Generator().manual_seed(0))
    tokens[-20:] = 99
    tokens[-20:, :2] = 8  # fewer than are to be chosen
    inputs, labels = mask_tokens(tokens, 0.3, vocabulary, torch.Generator().manual_seed(1))
    special = torch.isin(tokens, torch.tensor(vocabulary.special))
    assert (labels[special] == IGNORED).all()
    changed = inputs != tokens
    assert (labels[changed] == tokens[changed]).all()
    assert not torch.isin(inputs[changed], torch.tensor([50, 98, 99])).any()
    assert (inputs[changed] == 7).float().mean() == pytest.approx(0.8 / 0.9, abs=0.02)


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize(("length", "rows"), [(16, 5), (16, 70), (9, 1), (400, 3)])
def test_windows_are_at_places_that_each_pass_orders_anew(length, rows, in_file, tmp_path):
    """One window after another, by its number in the stage, from a tensor or a file; a step may read several passes."""
    tokens = stream(1000)
    path = tmp_path / "tokens"
    path.write_bytes(to_bytes(tokens.tolist()))
    windows = replace(
        WINDOWS, stream=TokenFile(path) if in_file else tokens, stages=[Stage(12, 2, 3), Stage(length, 9, rows)]
    )
    body = length - 1
    num_windows = max(1, len(tokens) // body - 1)
    for step in range(2, 11):
        starts = []
        for number in range((step - 2) * rows, (step - 1) * rows):
            order, shift = _order(windows.seed, 1, number // num_windows, num_windows, len(tokens) - num_windows * body)
            starts.append(int(order[number % num_windows]) * body + shift)
        expected = torch.stack([tokens[start : start + body] for start in starts])
        assert torch.equal(text_of(windows.batch(step))[:, 1:], expected)


def test_a_window_is_cls_and_text_and_what_ends_it():
    batch = WINDOWS.batch(0)
    assert set(batch) == {"input_ids", "labels"}
    text = text_of(batch)
    assert text.shape == (5, 16)
    assert (text[:, 0] == 1).all()
    assert (text[:, 1:].diff() == 1).all()
    assert len(set(text[:, 1].tolist())) == 5
    assert (batch["labels"] != IGNORED).sum(1).tolist() == [3] * 5
    padded = replace(WINDOWS, end=(2, 1999, 1999, 1999)).batch(0)
    assert text_of(padded)[:, -4:].tolist() == [[2, 1999, 1999, 1999]] * 5
    assert padded["attention_mask"].tolist() == [[1] * 13 + [0] * 3] * 5


def test_hidden_masks_are_not_attended_to():
    for end in ((), (2, 1999, 1999)):
        batch = replace(WINDOWS, end=end, hide_masked=True, rate=0.5).batch(0)
        hidden = (batch["input_ids"] == 3) | (batch["input_ids"] == 1999)
        assert (batch["input_ids"] == 3).any()
        assert torch.equal(batch["attention_mask"] == 0, hidden)


def test_a_batch_depends_on_the_step_and_the_seed_alone():
    first, again, of_other_seed = WINDOWS.batch(7), WINDOWS.batch(7), replace(WINDOWS, seed=1).batch(7)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first["input_ids"], WINDOWS.batch(8)["input_ids"])
    assert not torch.equal(first["input_ids"], of_other_seed["input_ids"])


def test_every_pass_reads_the_text_once_in_another_order_and_cut_at_other_places():
    windows = Windows(torch.arange(10, 1010), VOCABULARY, [Stage(11, 40, 9)], rate=None)
    passes = torch.cat([windows.batch(step)["input_ids"] for step in range(33)]).view(3, 99, 11)
    for rows in passes:
        assert sorted(rows[:, 1:].flatten().tolist()) == list(range(int(rows[:, 1:].min()), int(rows[:, 1:].max()) + 1))
    assert len({tuple((rows[:, 1] - rows[:, 1].min()).tolist()) for rows in passes}) == 3
    assert len({int(rows[:, 1].min()) for rows in passes}) > 1


def test_stages_follow_one_another():
    staged = replace(WINDOWS, stages=[Stage(8, 2, 4), Stage(16, 1, 2)])
    assert [tuple(staged.batch(step)["input_ids"].shape) for step in range(3)] == [(4, 8), (4, 8), (2, 16)]
    assert staged.tokens == 2 * 32 + 32
    assert staged.passes == (2 * 4 * 7 + 2 * 15) / 500


def test_held_out_windows_are_the_same_for_every_training(monkeypatch):
    stream = torch.arange(10, 160)
    batches = list(replace(WINDOWS, end=(2,), uniforms=True).held_out_windows(stream))
    assert sorted(text_of(batches[0])[:, 1].diff().abs().tolist()) != [14] * 8  # in no order
    assert sum(len(batch["labels"]) for batch in batches) == 150 // 14 - 1
    other_training = replace(
        WINDOWS, end=(2,), uniforms=True, stages=[Stage(8, 9, 7), Stage(16, 9, 2)], rate=0.5, seed=1
    )
    for batch, same in zip(batches, other_training.held_out_windows(stream), strict=True):
        assert all(torch.equal(tensor, same[name]) for name, tensor in batch.items())
    monkeypatch.setattr("whereformer.data.windows.HELD_OUT_TOKENS", 64)
    monkeypatch.setattr("whereformer.data.windows.MAX_HELD_OUT_WINDOWS", 8)
    assert [len(batch["labels"]) for batch in other_training.held_out_windows(stream)] == [4, 4]
    with pytest.raises(InputError, match="too little text: a part of it has 9 tokens, expected at least 15 for one"):
        WINDOWS.held_out_windows(torch.arange(10, 19))


def test_a_window_can_be_as_long_as_the_text():
    batch = replace(WINDOWS, stream=torch.arange(10, 25)).batch(0)
    assert (text_of(batch)[:, 1:] == torch.arange(10, 25)).all()


def test_causal_windows_have_all_tokens_as_labels():
    causal, masked = replace(WINDOWS, rate=None).batch(7), WINDOWS.batch(7)
    assert torch.equal(causal["input_ids"], causal["labels"])
    assert torch.equal(causal["input_ids"], text_of(masked))


def test_unigram_entropy_of_uniform_text_is_the_log_of_its_vocabulary():
    entropy = unigram_entropy(*(stream(count).bincount(minlength=100) for count in (200_000, 50_000)))
    assert entropy == pytest.approx(torch.log(torch.tensor(95.0)).item(), abs=0.01)


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
    assert growing_stages(length, 4, 100) == [Stage(*stage) for stage in expected]


@given(st.integers(8, 4096), st.integers(1, 300))
def test_windows_never_shrink_and_end_at_full_length(length, steps):
    stages = growing_stages(length, 4, steps)
    lengths = [stage.length for stage in stages]
    assert sum(stage.steps for stage in stages) == steps
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == length
