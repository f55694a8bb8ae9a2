"""Disentangled attention against the module of DeBERTa-v2 in transformers, in float64, and against its formula."""

import pytest
import torch
from transformers import DebertaV2Config
from transformers.models.deberta_v2 import modeling_deberta_v2 as theirs

from tests.positions.layers import split_heads
from tests.positions.stack import HEADS, LAYERS, WIDTH, build
from whereformer import OffsetKeys, OffsetQueries, Positions, Site, attention, attention_weights, build_position
from whereformer.positions.deberta import table_row

INNER = HEADS * (WIDTH // HEADS)
SETTINGS = [(None, 3), (None, 20), (4, 6), (8, 9), (8, 40), (16, 30)]


def module(buckets, distance, kinds):
    config = DebertaV2Config(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        relative_attention=True,
        position_buckets=-1 if buckets is None else buckets,
        max_relative_positions=distance,
        pos_att_type=kinds,
        share_att_key=False,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(1)
    return theirs.DisentangledSelfAttention(config).double()


@pytest.fixture(autouse=True)
def their_scale_in_float64(monkeypatch):
    """They compute the square root in float32."""

    def scaled_size_sqrt(query, terms):
        return torch.tensor(query.shape[-1] * terms, dtype=torch.float64).sqrt()

    monkeypatch.setattr(theirs, "scaled_size_sqrt", scaled_size_sqrt)


def load(position, module, layer):
    """Copy their projections into ours. Their bias for keys adds the same number to all keys, which changes nothing."""
    with torch.no_grad():
        if position.key_weight is not None:
            position.key_weight[layer].copy_(module.pos_key_proj.weight)
        if position.query_weight is not None:
            position.query_weight[layer].copy_(module.pos_query_proj.weight)
            position.query_bias[layer].copy_(module.pos_query_proj.bias)


@pytest.mark.parametrize("kinds", [["c2p", "p2c"], ["c2p"], ["p2c"]], ids="+".join)
@pytest.mark.parametrize(("buckets", "distance"), SETTINGS)
def test_attention_and_gradients_are_those_of_deberta_v2(buckets, distance, kinds):
    n, layer = 25, 2
    original = module(buckets, distance, kinds)
    options = {kind: kind in kinds for kind in ("c2p", "p2c")}
    position = build("deberta", max_distance=distance, num_buckets=buckets, **options)
    load(position, original, layer)
    hidden = torch.randn(2, n, WIDTH, dtype=torch.float64)
    table = position.table.detach().clone().requires_grad_()
    expected, weights = original(
        hidden, torch.ones(1, 1, n, n), output_attentions=True, rel_embeddings=table, relative_pos=None
    )
    query, key, value = (
        split_heads(project(hidden), HEADS) for project in (original.query_proj, original.key_proj, original.value_proj)
    )
    site = position.with_shared(Site.self_attention(Positions(0, 1, n), layer=layer))
    terms = position.terms(hidden, site) + position.content_terms(query, key, site)
    call = *position.transform_qkv(query, key, value, site), terms
    actual = attention(*call, backend="reference").transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention_weights(*call), weights, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    direction = torch.randn_like(actual)
    ours, names = [position.table], []
    if "c2p" in kinds:
        ours, names = [*ours, position.key_weight], [*names, original.pos_key_proj.weight]
    if "p2c" in kinds:
        ours = [*ours, position.query_weight, position.query_bias]
        names = [*names, original.pos_query_proj.weight, original.pos_query_proj.bias]
    gradients = torch.autograd.grad((actual * direction).sum(), [*ours, original.key_proj.weight], retain_graph=True)
    originals = torch.autograd.grad((expected * direction).sum(), [table, *names, original.key_proj.weight])
    for gradient, golden in zip(gradients, originals, strict=True):
        gradient = gradient[layer] if gradient.dim() == golden.dim() + 1 else gradient
        torch.testing.assert_close(gradient, golden, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("buckets", "distance"), [*SETTINGS, (256, 512), (32, 128), (64, 1000)])
def test_rows_are_those_of_deberta_v2(buckets, distance):
    span = distance if buckets is None else buckets
    offsets = torch.arange(-3 * distance, 3 * distance + 1)
    relative = -offsets if buckets is None else theirs.make_log_bucket_position(-offsets, buckets, distance).long()
    expected = (relative + span).clamp(0, 2 * span - 1)
    actual = [table_row(max(-distance, min(distance, offset)), buckets, distance) for offset in offsets.tolist()]
    assert actual == expected.tolist()


def test_the_formula_with_queries_and_keys_anywhere():
    position = build("deberta", max_distance=9, num_buckets=8, layer_of_pass=(0, 1, 1, 0))
    assert position.key_weight.shape == (2, INNER, WIDTH)
    queries, keys = torch.tensor([[3, 7, -4], [0, 0, 30]]), torch.tensor([5, 2, 11, 0])
    query, key = torch.randn(2, HEADS, 3, 8).double(), torch.randn(2, HEADS, 4, 8).double()
    site = Site(queries, keys, LAYERS - 2)
    terms = position.terms(torch.zeros(0), site) + position.content_terms(query, key, site)
    value = torch.randn(2, HEADS, 4, 8).double()
    call = *position.transform_qkv(query, key, value, site), terms
    actual = attention_weights(*call, query_positions=queries, key_positions=keys)
    query_rows = position.table @ position.query_weight[1].T + position.query_bias[1]
    key_rows, query_rows = (
        rows.unflatten(-1, (HEADS, -1)) for rows in (position.table @ position.key_weight[1].T, query_rows)
    )
    scores = torch.zeros(2, HEADS, 3, 4).double()
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, scores.shape)).tolist():
        row = table_row(max(-9, min(9, int(keys[j] - queries[b, i]))), 8, 9)
        q, k = query[b, h, i], key[b, h, j]
        scores[b, h, i, j] = (q @ k + q @ key_rows[row, h] + k @ query_rows[row, h]) / (3 * 8) ** 0.5
    torch.testing.assert_close(actual, scores.softmax(-1), rtol=1e-11, atol=1e-11)


def test_only_the_rows_that_occur_are_projected():
    position = build("deberta")
    rows = position.compute_shared(Site(Positions(0, 1, 10), Positions(0, 1, 10)))
    assert rows.first == -9
    assert torch.equal(rows.vectors.flip(0), position.table[256 - 9 : 256 + 9 + 1])


def test_no_term_has_a_number_for_each_pair():
    position = build_position("deberta", hidden_size=16, num_heads=2)
    assert [type(term) for term in position.terms(torch.zeros(1, 5, 16), Site.self_attention(Positions(0, 1, 5)))] == [
        OffsetKeys,
        OffsetQueries,
    ]
    assert not position.reads_keys
