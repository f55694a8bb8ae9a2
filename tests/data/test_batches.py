"""Which rows meet in a batch: each row once an epoch, alike in length, by rows or by tokens."""

from itertools import chain, islice

import torch
from hypothesis import given
from hypothesis import strategies as st

from whereformer.data import batches


def test_every_row_is_read_once_an_epoch():
    lengths = torch.randint(3, 30, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    drawn = batches.shuffled(lengths, 8, 30, seed=1)
    found = [*drawn]
    assert len(drawn) == 30
    assert sorted(chain(*found[:13])) == sorted(chain(*found[13:26])) == list(range(100))
    assert found[:13] != found[13:26]
    assert found == [*batches.shuffled(lengths, 8, 30, seed=1)]
    assert found != [*batches.shuffled(lengths, 8, 30, seed=2)]
    assert found[:5] == [*batches.shuffled(lengths, 8, 5, seed=1)]


def test_rows_of_a_batch_are_alike_in_length():
    lengths = torch.randint(3, 60, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    padding = sum(max(lengths[row] for row in batch) * len(batch) for batch in batches.shuffled(lengths, 16, 125, 0))
    assert padding < 1.05 * sum(lengths)
    # Neither the shortest nor the longest come first.
    means = [sum(lengths[row] for row in batch) for batch in batches.shuffled(lengths, 16, 125, 0)]
    assert means != sorted(means)


def test_judging_reads_every_row_once():
    assert sorted(chain(*batches.by_length([3, 1, 2, 5, 4], 2))) == [0, 1, 2, 3, 4]


PAIRS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=300)


def epoch_of(drawn, rows):
    found = []
    while sum(map(len, found)) < rows:
        found.append(next(drawn))
    return found


@given(PAIRS, st.integers(1, 200), st.integers(0, 5))
def test_batches_by_tokens_hold_every_row_once_and_no_side_has_more_tokens(lengths, batch_tokens, seed):
    lengths = torch.tensor(lengths)
    drawn = batches.shuffled_by_tokens(lengths, batch_tokens, seed)
    epochs = [epoch_of(drawn, len(lengths)) for _ in range(2)]
    for found in (*epochs, batches.by_length_and_tokens(lengths, batch_tokens)):
        assert sorted(chain(*found)) == list(range(len(lengths)))
        for batch in found:
            padded = lengths[batch].amax(0) * len(batch)
            assert len(batch) == 1 or int(padded.max()) <= batch_tokens


def some_lengths():
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(3, 40, (4000,), generator=generator)
    return torch.stack((source, (source + torch.randint(-3, 4, (4000,), generator=generator)).clamp(2)), 1)


def test_batches_by_tokens_are_full_and_have_little_padding():
    lengths = some_lengths()
    found = list(islice(batches.shuffled_by_tokens(lengths, 512, 0), 200))
    padded = sum(int(lengths[batch].amax(0).sum()) * len(batch) for batch in found)
    real = sum(int(lengths[batch].sum()) for batch in found)
    assert padded < 1.2 * real
    assert real > 0.75 * 2 * 512 * len(found)
    means = [float(lengths[batch].float().mean()) for batch in found]
    assert means != sorted(means)


def test_the_seed_decides_which_batches_come():
    lengths = some_lengths()
    first, again, other = (list(islice(batches.shuffled_by_tokens(lengths, 256, seed), 300)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_batches_by_length_begin_with_the_shortest():
    lengths = some_lengths()
    widths = [int(lengths[batch].max()) for batch in batches.by_length_and_tokens(lengths, 256)]
    assert widths == sorted(widths)
