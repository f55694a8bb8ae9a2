"""Which rows meet in a batch: each row once an epoch, alike in length, by rows or by tokens."""

from itertools import chain, islice

import torch
from hypothesis import given
from hypothesis import strategies as st

from whereformer.data.batches import RandomBatches, by_length

PAIRS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=300)


def epoch_of(drawn, rows):
    found = []
    while sum(map(len, found)) < rows:
        found.append(next(drawn))
    return found


@given(PAIRS, st.integers(1, 200), st.booleans(), st.integers(0, 5))
def test_an_epoch_has_every_row_once_and_no_batch_has_more_than_is_asked_for(lengths, most, tokens, seed):
    lengths = torch.tensor(lengths)
    drawn = iter(RandomBatches(lengths, most, seed, tokens=tokens))
    epochs = [epoch_of(drawn, len(lengths)) for _ in range(2)]
    for found in (*epochs, by_length(lengths, most, tokens=tokens)):
        assert sorted(chain(*found)) == list(range(len(lengths)))
        for batch in found:
            padded = lengths[batch].amax(0) * len(batch)
            assert len(batch) == 1 or (int(padded.max()) if tokens else len(batch)) <= most
    if not tokens:
        assert len(epochs[0]) == -(-len(lengths) // most)


def some_lengths():
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(3, 40, (4000,), generator=generator)
    return torch.stack((source, (source + torch.randint(-3, 4, (4000,), generator=generator)).clamp(2)), 1)


def test_batches_have_little_padding_and_come_in_any_order():
    lengths = some_lengths()
    for drawn in (RandomBatches(lengths, 512, 0, tokens=True), RandomBatches(lengths, 16, 0)):
        found = list(islice(drawn, 200))
        padded = sum(int(lengths[batch].amax(0).sum()) * len(batch) for batch in found)
        real = sum(int(lengths[batch].sum()) for batch in found)
        assert padded < 1.2 * real
        if drawn.tokens:
            assert real > 0.75 * 2 * 512 * len(found)
        means = [float(lengths[batch].float().mean()) for batch in found]
        assert means != sorted(means)


def test_the_seed_decides_which_batches_come():
    lengths = some_lengths()
    first, again, other = (list(islice(RandomBatches(lengths, 256, seed, tokens=True), 300)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_batches_by_length_begin_with_the_shortest():
    lengths = some_lengths()
    for tokens in (False, True):
        widths = [int(lengths[batch].max()) for batch in by_length(lengths, 256, tokens=tokens)]
        assert widths == sorted(widths)
