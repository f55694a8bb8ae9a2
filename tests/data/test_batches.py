"""Which rows meet in a batch: each row once an epoch, alike in length, by rows or by tokens."""

from itertools import chain, islice

import torch
from hypothesis import given
from hypothesis import strategies as st

from whereformer.data.batches import RandomBatches, by_length

PAIRS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=300)


def epoch_of(batches, rows):
    epoch = []
    while sum(map(len, epoch)) < rows:
        epoch.append(next(batches))
    return epoch


@given(PAIRS, st.integers(1, 200), st.booleans(), st.integers(0, 5))
def test_an_epoch_has_every_row_once_and_no_batch_has_more_than_is_asked_for(lengths, limit, tokens, seed):
    lengths = torch.tensor(lengths)
    batches = iter(RandomBatches(lengths, limit, seed, tokens=tokens))
    epochs = [epoch_of(batches, len(lengths)) for _ in range(2)]
    for epoch in (*epochs, by_length(lengths, limit, tokens=tokens)):
        assert sorted(chain(*epoch)) == list(range(len(lengths)))
        for batch in epoch:
            padded = lengths[batch].amax(0) * len(batch)
            assert len(batch) == 1 or (int(padded.max()) if tokens else len(batch)) <= limit
    if not tokens:
        assert len(epochs[0]) == -(-len(lengths) // limit)


def some_lengths():
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(3, 40, (4000,), generator=generator)
    return torch.stack((source, (source + torch.randint(-3, 4, (4000,), generator=generator)).clamp(2)), 1)


def test_batches_have_little_padding_and_come_in_any_order():
    lengths = some_lengths()
    for source in (RandomBatches(lengths, 512, 0, tokens=True), RandomBatches(lengths, 16, 0)):
        batches = list(islice(source, 200))
        padded = sum(int(lengths[batch].amax(0).sum()) * len(batch) for batch in batches)
        num_tokens = sum(int(lengths[batch].sum()) for batch in batches)
        assert padded < 1.2 * num_tokens
        if source.tokens:
            assert num_tokens > 0.75 * 2 * 512 * len(batches)
        means = [float(lengths[batch].float().mean()) for batch in batches]
        assert means != sorted(means)


def test_the_seed_decides_which_batches_come():
    lengths = some_lengths()
    first, again, of_other_seed = (
        list(islice(RandomBatches(lengths, 256, seed, tokens=True), 300)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != of_other_seed


def test_batches_by_length_begin_with_the_shortest():
    lengths = some_lengths()
    for tokens in (False, True):
        widths = [int(lengths[batch].max()) for batch in by_length(lengths, 256, tokens=tokens)]
        assert widths == sorted(widths)
