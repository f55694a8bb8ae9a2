"""CoPE against the authors' formula in causal models, and against its definition elsewhere, in float64."""

import pytest
import torch

from tests.positions.stack import HEADS, WIDTH, build
from whereformer import Place, Positions

D = WIDTH // HEADS
LAYER = 1


def causal_formula(query, key, vectors, real=None):
    """Listing 1 of the paper: gates of masked keys are 0, and positions are counted from the end."""
    n_q, n_k = query.shape[-2], key.shape[-2]
    logits = (query @ key.mT / D**0.5).masked_fill(torch.ones(n_q, n_k).triu(n_k - n_q + 1) == 1, -torch.inf)
    if real is not None:
        logits = logits.masked_fill(~real[:, None, None], -torch.inf)
    counts = logits.sigmoid().flip(-1).cumsum(-1).flip(-1).clamp(max=len(vectors) - 1)
    products = query @ vectors.mT
    upper, lower = (products.gather(-1, whole.long()) for whole in (counts.ceil(), counts.floor()))
    part = counts - counts.floor()
    return upper * part + lower * (1 - part)


def definition(position, query, key, queries, keys, runs):
    """The count of each pair by a loop over the keys between its two positions, in the same run."""
    scores = torch.zeros(HEADS, len(queries), len(keys), dtype=torch.float64)
    left, right = position.left[LAYER], position.right[LAYER]
    for h, i, j in torch.cartesian_prod(*map(torch.arange, scores.shape)).tolist():
        low, high = sorted((queries[i], keys[j]))
        count = sum(
            torch.sigmoid(query[h, i] @ key[h, m] / D**0.5)
            for m in range(len(keys))
            if low <= keys[m] <= high and runs[m] == runs[j]
        )
        count = min(count, torch.tensor(position.num_positions - 1.0).double())
        vectors = right if keys[j] > queries[i] else left
        below = int(count)
        above = min(below + 1, position.num_positions - 1)
        scores[h, i, j] = query[h, i] @ torch.lerp(vectors[below], vectors[above], count - below)
    return scores


def heads(n, batch=1):
    return torch.randn(batch, HEADS, n, D, dtype=torch.float64)


@pytest.mark.parametrize("num_positions", [3, 6, 64])
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (2, 2), (12, 12), (5, 12)])
def test_a_causal_model_has_the_authors_scores_and_gradients(n_q, n_k, num_positions):
    position = build("cope", causal=True, num_positions=num_positions)
    query, key = heads(n_q, 2).requires_grad_(), heads(n_k, 2).requires_grad_()
    place = Place(Positions(n_k - n_q, 1, n_q), Positions(0, 1, n_k), LAYER)
    (term,) = position.content_terms(query, key, place)
    expected = causal_formula(query, key, position.left[LAYER])
    seen = torch.ones(n_q, n_k).tril(n_k - n_q).double()
    torch.testing.assert_close(term.scores * seen, expected * seen, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(expected) * seen
    found, wanted = (
        torch.autograd.grad((each * direction).sum(), (position.left, query, key)) for each in (term.scores, expected)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_padding_has_the_authors_gate_of_0():
    position = build("cope", causal=True, num_positions=4)
    query, key = heads(9, 3).requires_grad_(), heads(9, 3).requires_grad_()
    real = torch.ones(3, 9, dtype=torch.bool)
    real[0, 6:], real[1, :4], real[2, [1, 3, 4]] = False, False, False
    at = Positions(0, 1, 9)
    (term,) = position.content_terms(query, key, Place(at, at, LAYER, key_mask=real))
    expected = causal_formula(query, key, position.left[LAYER], real)
    seen = torch.ones(9, 9).tril().double()
    torch.testing.assert_close(term.scores * seen, expected * seen, rtol=1e-12, atol=1e-12)
    found, wanted = (
        torch.autograd.grad((each * seen).square().sum(), (position.left, query, key))
        for each in (term.scores, expected)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    assert not found[2][0, :, 6:].any()


@pytest.mark.parametrize(
    ("queries", "keys", "runs"),
    [
        (Positions(0, 1, 6), Positions(0, 1, 6), [0] * 6),
        (Positions(1, 3, 3), Positions(0, 1, 9), [0] * 9),
        (Positions(-2, 1, 5), Positions(1, 2, 4), [0] * 4),
        # Two documents, and a third of one token
        (torch.tensor([0, 1, 2, 0, 1, 2, 3, 0]), torch.tensor([0, 1, 2, 0, 1, 2, 3, 0]), [0, 0, 0, 1, 1, 1, 1, 2]),
        (torch.tensor([0.5, 3.0]), torch.tensor([-1.0, 0.5, 2.75, 3.5, 9.0]), [0] * 5),
    ],
    ids=["whole", "pooled", "apart", "packed", "fractional"],
)
@pytest.mark.parametrize("num_positions", [2, 5])
def test_counts_are_sums_of_gates_between_two_positions(queries, keys, runs, num_positions):
    position = build("cope", num_positions=num_positions)
    values = [at.values() if isinstance(at, Positions) else at for at in (queries, keys)]
    query, key = heads(len(values[0])), heads(len(values[1]))
    (term,) = position.content_terms(query, key, Place(queries, keys, LAYER))
    expected = definition(position, query[0], key[0], *(at.tolist() for at in values), runs)
    torch.testing.assert_close(term.scores[0], expected, rtol=1e-12, atol=1e-12)


def test_what_a_query_finds_is_what_it_counts():
    """Gates of 0 or 1 make counts: the second of the marked keys to the left is at 2, wherever it is."""
    position = build("cope", num_positions=4)
    marked = torch.tensor([0, 1, 0, 0, 1, 0, 0, 0])
    key = torch.zeros(1, HEADS, 8, D, dtype=torch.float64)
    key[..., 0] = marked * 2e3 - 1e3
    query = torch.zeros(1, HEADS, 8, D, dtype=torch.float64)
    query[..., 0] = 1.0
    at = Positions(0, 1, 8)
    (term,) = position.content_terms(query, key, Place(at, at, LAYER))
    vectors = position.left[LAYER, :, 0]
    torch.testing.assert_close(term.scores[0, 0, 7], vectors[[2, 2, 1, 1, 1, 0, 0, 0]])
    torch.testing.assert_close(term.scores[0, 0, 0, 1:], position.right[LAYER, [1, 1, 1, 2, 2, 2, 2], 0])


def test_a_causal_model_has_no_vectors_to_the_right():
    assert build("cope", causal=True).right is None
    assert build("cope").right.shape == (4, 64, D)
