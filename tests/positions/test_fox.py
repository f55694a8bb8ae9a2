"""``fox`` against the naive formula of the Forgetting Transformer, pair by pair, with gates of the layer's input."""

import pytest
import torch
from torch.nn import functional

from tests.positions.layers import split_heads
from tests.positions.stack import HEADS, WIDTH, build
from whereformer import DistanceDecay, Positions, Site, attention

HEAD_DIM = WIDTH // HEADS
LAYER = 1


def forgotten(logs):
    """The sum of the tokens' logarithms (n,) between each query and key, one loop after the other: (n, n)."""
    n = len(logs)
    actual = torch.zeros(n, n, dtype=logs.dtype)
    for i in range(n):
        for j in range(n):
            actual[i, j] = logs[min(i, j) + 1 : max(i, j) + 1].sum()
    return actual


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_attention_is_that_of_the_forgetting_transformer(n, causal):
    """Theirs has gates of the layer's input, w x + b; ours of the keys W x, so that g = w W^-1."""
    position = build("fox", causal=causal)
    x = torch.randn(2, n, WIDTH, dtype=torch.float64)
    project = torch.randn(3, WIDTH, WIDTH, dtype=torch.float64)
    w = torch.randn(HEADS, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        position.weight[LAYER] = w @ torch.linalg.inv(project[1])
    query, key, value = (split_heads(functional.linear(x, weight), HEADS) for weight in project)
    logs = functional.linear(x, w, position.bias.detach()[LAYER]).sigmoid().log()
    bias = torch.stack([torch.stack([forgotten(logs[b, :, h]) for h in range(HEADS)]) for b in range(2)])
    scores = query @ key.mT / HEAD_DIM**0.5 + bias
    if causal:
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    site = Site.self_attention(Positions(0, 1, n), layer=LAYER)
    terms = position.content_terms(query, key, site)
    assert [type(term) for term in terms] == [DistanceDecay]
    actual = attention(*position.transform_qkv(query, key, value, site), terms, causal=causal)
    torch.testing.assert_close(actual, scores.softmax(-1) @ value, rtol=1e-9, atol=1e-9)


def levels(position, key, site):
    n_q = site.query_positions.length if isinstance(site.query_positions, Positions) else site.query_positions.shape[-1]
    (term,) = position.content_terms(key.new_zeros(len(key), HEADS, n_q, HEAD_DIM), key, site)
    return term.query_levels, term.key_levels


@pytest.mark.parametrize("documents", [False, True])
def test_levels_with_queries_and_keys_anywhere(documents):
    """What lies between two tokens are the real keys of their document, by position."""
    position = build("fox")
    n_q, n_k = 5, 8
    queries = torch.randint(-3, 12, (2, n_q))
    keys = torch.stack([torch.randperm(14)[:n_k] - 2 for _ in range(2)])
    ids = (torch.randint(0, 2, (2, n_q)), torch.randint(0, 2, (2, n_k))) if documents else (None, None)
    mask = torch.rand(2, n_k) < 0.7
    key = torch.randn(2, HEADS, n_k, HEAD_DIM, dtype=torch.float64)
    site = Site(queries, keys, LAYER, key_mask=mask, query_documents=ids[0], key_documents=ids[1])
    of_queries, of_keys = levels(position, key, site)
    weight, bias = position.weight.detach()[LAYER], position.bias.detach()[LAYER]
    logs = functional.linear(key.transpose(1, 2).flatten(2), weight, bias).sigmoid().log()
    for b, i, j in torch.cartesian_prod(torch.arange(2), torch.arange(n_q), torch.arange(n_k)).tolist():
        if documents and ids[0][b, i] != ids[1][b, j]:
            continue
        low, high = sorted((int(queries[b, i]), int(keys[b, j])))
        between = (keys[b] > low) & (keys[b] <= high) & mask[b]
        if documents:
            between &= ids[1][b] == ids[0][b, i]
        actual = (of_queries[b, :, i] - of_keys[b, :, j]).abs()
        torch.testing.assert_close(actual, -logs[b, between].sum(0), rtol=1e-10, atol=1e-10)


def test_sums_begin_in_each_document():
    """The rounding of packed documents is that of each alone: a few units of float32 in its own sums."""
    position = build("fox").float()
    lengths = (1500, 2, 1, 1700, 893)
    key = torch.randn(1, HEADS, sum(lengths), HEAD_DIM)
    positions = torch.cat([torch.arange(length) for length in lengths])
    ids = torch.repeat_interleave(torch.tensor([3, 1, 7, 4, 2]), torch.tensor(lengths))[None]
    packed = levels(position, key, Site.self_attention(positions, documents=ids, layer=LAYER))
    position = position.double()
    for document, of_queries, of_keys in zip(*(rows.split(lengths, -1) for rows in (ids, *packed)), strict=True):
        site = Site.self_attention(Positions(0, 1, document.shape[-1]), layer=LAYER)
        exact = levels(position, key[:, :, ids[0] == document[0, 0]].double(), site)
        for actual, expected in zip((of_queries, of_keys), exact, strict=True):
            torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-5)


def test_long_rows_in_half_precision():
    position = build("fox").bfloat16()
    key = torch.randn(1, HEADS, 3000, HEAD_DIM).bfloat16()
    positions = Positions(0, 1, 3000)
    of_queries, of_keys = levels(position, key, Site(positions, positions, LAYER))
    assert of_queries.dtype == torch.float32
    exact = levels(position.double(), key.double(), Site(positions, positions, LAYER))[1]
    assert (of_keys.diff(dim=-1).double() - exact.diff(dim=-1)).abs().max() < 2e-3
