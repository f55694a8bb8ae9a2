"""``logn`` has the factors of papers and models, counts the keys that a query sees, and reaches its products."""

import math

import pytest
import torch
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

from tests.positions.stack import HEADS, QUICK, WIDTH, build, embeddings
from tests.positions.test_contract import assert_close
from whereformer import OffsetKeys, Positions, Site, attention, attention_weights, build_position
from whereformer.kernels.terms import position_values
from whereformer.positions.testing import attend
from whereformer.positions.visible_keys import count_visible_keys

SIZES = {"hidden_size": 16, "num_heads": 2, "num_layers": 2, "max_length": 24}
# --- the number of keys


def counted(site, causal):
    """The pairs that attention would compute, one by one."""
    queries, keys = map(torch.atleast_2d, map(position_values, (site.query_positions, site.key_positions)))
    allowed = torch.ones(1, queries.shape[-1], keys.shape[-1], dtype=torch.bool)
    if causal:
        allowed = allowed & (keys[:, None] <= queries[..., None])
    if site.key_mask is not None:
        allowed = allowed & site.key_mask[:, None]
    if site.query_documents is not None:
        allowed = allowed & (site.query_documents[..., None] == site.key_documents[:, None])
    return allowed.sum(-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kind", ["affine", "strided", "row", "batch", "fractions"])
def test_the_keys_that_a_query_sees_are_counted(kind, documents, masked, causal):
    n_q, n_k = 7, 11
    positions = {
        "affine": (Positions(4, 1, n_q), Positions(0, 1, n_k)),
        "strided": (Positions(-3, 4, n_q), Positions(1, 2, n_k)),
        "row": (torch.randint(-3, 9, (n_q,)), torch.randint(-3, 9, (n_k,))),
        "batch": (torch.randint(-3, 9, (3, n_q)), torch.randint(-3, 9, (3, n_k))),
        "fractions": (torch.rand(3, n_q) * 5, torch.rand(n_k) * 5),
    }[kind]
    mask = torch.rand(3, n_k) < 0.6 if masked else None
    # In any order, and some documents without keys
    ids = (torch.randint(0, 4, (3, n_q)) * 5 - 3, torch.randint(0, 3, (3, n_k)) * 5 - 3) if documents else (None, None)
    site = Site(*positions, key_mask=mask, query_documents=ids[0], key_documents=ids[1])
    actual, expected = count_visible_keys(site, causal=causal, device=torch.device("cpu")), counted(site, causal)
    assert torch.equal(*torch.broadcast_tensors(actual, expected))


@pytest.mark.parametrize("causal", [False, True])
def test_no_keys_are_none(causal):
    for keys in (Positions(0, 1, 0), torch.zeros(2, 0)):
        site = Site(Positions(0, 1, 3), keys)
        assert not count_visible_keys(site, causal=causal, device=torch.device("cpu")).any()


# --- the factors


def factors(position, n, layer=0):
    """The factors of a query that sees 1, 2, ... keys, (heads or 1, n)."""
    query, site = torch.zeros(1, 2, n, 8, dtype=torch.float64), Site.self_attention(Positions(0, 1, n), layer=layer)
    return position.query_factor(query, site)[0, ..., 0]


def test_ssmax_is_the_softmax_of_the_paper():
    """n ** (s z_i) over the sum of all n ** (s z_j), Nakanishi (2025), eq. 3."""
    position = build_position("logn", **SIZES, causal=True).double()
    torch.nn.init.uniform_(position.s, 0.2, 0.6)
    query, key = torch.randn(2, 3, 2, 9, 8, dtype=torch.float64)
    rotated, *_ = position.transform_qkv(query, key, key, Site.self_attention(Positions(0, 1, 9), layer=1))
    weights = attention_weights(rotated, key, key, causal=True)
    z = query @ key.mT / 8**0.5
    for row in range(9):
        powers = (row + 1.0) ** (position.s[1, :, None] * z[:, :, row, : row + 1])
        assert_close(weights[:, :, row, : row + 1], powers / powers.sum(-1, keepdim=True))


def test_ssmax_begins_as_plain_attention_at_max_length():
    assert_close(factors(build_position("logn", **SIZES, causal=True), 24)[:, -1], torch.ones(2).double(), 1e-6)
    assert build_position("logn", hidden_size=4, num_heads=1, max_length=1).s.isfinite().all()


def test_su_is_the_list_in_qwens_code():
    position = build_position("logn", **SIZES, causal=True, kind="su", train_length=5)
    expected = [math.log(i, 5) if i > 5 else 1 for i in range(1, 20)]
    assert_close(factors(position, 19), torch.tensor([expected], dtype=torch.float64))


def test_inkling_is_its_formula():
    position = build_position("logn", **SIZES, causal=True, kind="inkling", train_length=5, alpha=0.3)
    expected = [1 + 0.3 * math.log(max((i + 1) / 5, 1)) for i in range(19)]
    assert_close(factors(position, 19), torch.tensor([expected], dtype=torch.float64))


def test_llama4_is_the_attention_of_transformers():
    config = Llama4TextConfig(
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_hidden_layers=2,
        no_rope_layers=[1, 0],
        floor_scale=4,
        attn_scale=0.3,
        attn_implementation="eager",
    )
    theirs = Llama4TextAttention(config, 1).double()
    x = torch.randn(2, 13, 16, dtype=torch.float64)
    mask = torch.full((13, 13), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    expected = theirs(x, (None, None), mask)[0]
    position = build_position("logn", **SIZES, causal=True, kind="llama4", train_length=4, alpha=0.3)
    query, key, value = (
        projection(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        for projection in (theirs.q_proj, theirs.k_proj, theirs.v_proj)
    )
    query, key, value = position.transform_qkv(query, key, value, Site.self_attention(Positions(0, 1, 13)))
    out = attention(query, key, value, causal=True)
    assert_close(theirs.o_proj(out.transpose(1, 2).flatten(-2)), expected, 1e-6)  # their factor is in float32


def test_half_precision_counts_every_key():
    position = build_position("logn", **SIZES, causal=True, kind="inkling", train_length=2)
    positions, everything = Positions(5000, 1, 3), Positions(0, 1, 5003)
    query = torch.ones(1, 2, 3, 8, dtype=torch.bfloat16)
    factor = position.query_factor(query, Site(positions, everything))
    assert factor.dtype == torch.float32
    assert (factor.diff(dim=2) > 0).all()


# --- joined with others


@pytest.mark.parametrize("name", ["rope", "fox", "shaw", "transformer_xl", "deberta"])
def test_the_order_of_joined_methods_changes_nothing(name):
    first, second = (build(joined, **QUICK.get(name, {})) for joined in (f"{name}+logn", f"logn+{name}"))
    second.parts[0].load_state_dict(first.parts[1].state_dict())
    second.parts[1].load_state_dict(first.parts[0].state_dict())
    words = embeddings(7)
    assert_close(attend(first, words, layer=1), attend(second, words, layer=1))


def test_the_factor_reaches_products_with_the_query_and_no_others():
    """A longer query is the same as a factor, wherever the query takes part."""
    site = Site.self_attention(Positions(0, 1, 6), layer=1)
    query, key, value = torch.randn(3, 2, HEADS, 6, WIDTH // HEADS, dtype=torch.float64)
    for name in ("shaw", "transformer_xl"):
        joined = build(f"{name}+logn")
        alone, logn = joined.parts
        factor = logn.query_factor(query, site)
        outputs = []
        for position, q in ((joined, query), (alone, query * factor)):
            terms = position.terms(embeddings(6), site) + position.content_terms(q, key, site)
            assert any(isinstance(term, OffsetKeys) for term in terms)
            outputs.append(attention(*position.transform_qkv(q, key, value, site), terms))
        assert_close(*outputs)
