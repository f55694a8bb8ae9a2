"""The reference backend against attention written as loops over single numbers."""

import math
from itertools import product

import pytest
import torch

from whereformer import attention, attention_weights
from whereformer.kernels.terms import (
    DenseBias,
    DistanceDecay,
    FactorPair,
    OffsetBias,
    OffsetKeys,
    OffsetQueries,
    OffsetValues,
    Positions,
)

BATCH, HEADS, DIM = 2, 3, 4

LENGTHS = [(1, 1), (2, 2), (1, 6), (5, 7), (7, 5), (2, 9)]  # (n_q, n_k)


def content(n_q, n_k, value_dim=DIM, dtype=torch.float64):
    shapes = (BATCH, HEADS, n_q, DIM), (BATCH, HEADS, n_k, DIM), (BATCH, HEADS, n_k, value_dim)
    return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


def random(*shape):
    return torch.randn(shape, dtype=torch.float64)


TERMS = {
    "offset_bias": lambda n_q, n_k: OffsetBias(random(HEADS, 5), -2),
    "offset_bias_of_one_number": lambda n_q, n_k: OffsetBias(random(HEADS, 1), 3),
    "offset_bias_right_of_all_offsets": lambda n_q, n_k: OffsetBias(random(HEADS, 4), 50),
    "offset_bias_wider_than_the_grid": lambda n_q, n_k: OffsetBias(random(HEADS, 41), -20),
    "offset_keys_shared": lambda n_q, n_k: OffsetKeys(random(1, 5, DIM), -3),
    "offset_keys_per_head": lambda n_q, n_k: OffsetKeys(random(HEADS, 4, DIM), -1),
    "offset_keys_with_factors": lambda n_q, n_k: OffsetKeys(
        random(1, 6, 3), -4, query_factors=random(BATCH, HEADS, n_q, 3)
    ),
    "offset_keys_with_a_gate": lambda n_q, n_k: OffsetKeys(
        random(HEADS, 4, 1), -1, query_factors=random(1, HEADS, n_q, 1)
    ),
    "offset_queries_shared": lambda n_q, n_k: OffsetQueries(random(1, 5, DIM), -2),
    "offset_queries_per_head": lambda n_q, n_k: OffsetQueries(random(HEADS, 4, DIM), -2),
    "offset_queries_with_factors": lambda n_q, n_k: OffsetQueries(
        random(HEADS, 5, 3), -3, key_factors=random(BATCH, HEADS, n_k, 3)
    ),
    "offset_queries_with_a_gate": lambda n_q, n_k: OffsetQueries(
        random(1, 3, 1), 0, key_factors=random(1, HEADS, n_k, 1)
    ),
    "distance_decay": lambda n_q, n_k: DistanceDecay(random(BATCH, HEADS, n_q), random(BATCH, HEADS, n_k)),
    "distance_decay_of_all_rows": lambda n_q, n_k: DistanceDecay(random(1, HEADS, n_q), random(BATCH, HEADS, n_k)),
    "offset_values_shared": lambda n_q, n_k: OffsetValues(random(1, 5, DIM), -3),
    "offset_values_per_head": lambda n_q, n_k: OffsetValues(random(HEADS, 4, DIM), -1),
    "factor_pair": lambda n_q, n_k: FactorPair(random(BATCH, HEADS, n_q, 2), random(BATCH, HEADS, n_k, 2)),
    "factor_pair_of_all_rows": lambda n_q, n_k: FactorPair(random(1, HEADS, n_q, 3), random(1, HEADS, n_k, 3)),
    "factor_pair_half_shared": lambda n_q, n_k: FactorPair(random(BATCH, HEADS, n_q, 2), random(1, HEADS, n_k, 2)),
    "dense_bias": lambda n_q, n_k: DenseBias(random(BATCH, HEADS, n_q, n_k)),
    "dense_bias_of_all_rows": lambda n_q, n_k: DenseBias(random(1, HEADS, n_q, n_k)),
    "dense_bias_that_forbids": lambda n_q, n_k: DenseBias(forbid(random(1, HEADS, n_q, n_k))),
}


def forbid(scores):
    """Every third pair forbidden, and the first row of head 0 altogether."""
    every_third = torch.arange(scores.numel()).view(scores.shape) % 3 == 1
    scores = scores.masked_fill(every_third, -math.inf)
    scores[:, 0, 0] = -math.inf
    return scores


def position_table(positions, default_start, length):
    """Positions of every row as nested lists, positions[b][index]."""
    if positions is None:
        positions = [default_start + index for index in range(length)]
    elif isinstance(positions, Positions):
        positions = [positions.start + positions.stride * index for index in range(length)]
    else:
        positions = positions.tolist()
    rows = positions if length and isinstance(positions[0], list) else [positions]
    return rows * BATCH if len(rows) == 1 else rows


def naive(
    query,
    key,
    value,
    terms=(),
    *,
    n_q=None,
    key_mask=None,
    causal=False,
    scale=None,
    query_positions=None,
    key_positions=None,
    query_documents=None,
    key_documents=None,
):
    """Attention, one (batch, head, query) at a time and one key at a time."""
    n_q = n_q if query is None else query.shape[2]
    n_k = value.shape[2]
    scale = 1 / math.sqrt(DIM) if scale is None else scale
    query_at = position_table(query_positions, n_k - n_q, n_q)
    key_at = position_table(key_positions, 0, n_k)
    out = torch.zeros(BATCH, HEADS, n_q, value.shape[3], dtype=torch.float64)
    for b, h, i in product(range(BATCH), range(HEADS), range(n_q)):
        seen, scores = [], []
        for j in range(n_k):
            offset = key_at[b][j] - query_at[b][i]
            score = 0.0 if query is None else scale * float(query[b, h, i] @ key[b, h, j])
            for term in terms:
                if isinstance(term, OffsetBias):
                    score += float(term.table[h, column(term, offset)])
                elif isinstance(term, OffsetKeys) and term.query_factors is not None:
                    score += float(row(term.query_factors, b)[h, i] @ vector(term, h, offset))
                elif isinstance(term, OffsetKeys):
                    score += scale * float(query[b, h, i] @ vector(term, h, offset))
                elif isinstance(term, OffsetQueries) and term.key_factors is not None:
                    score += float(row(term.key_factors, b)[h, j] @ vector(term, h, offset))
                elif isinstance(term, OffsetQueries):
                    score += scale * float(key[b, h, j] @ vector(term, h, offset))
                elif isinstance(term, DistanceDecay):
                    score -= abs(float(row(term.query_levels, b)[h, i] - row(term.key_levels, b)[h, j]))
                elif isinstance(term, FactorPair):
                    score += float(row(term.query_factors, b)[h, i] @ row(term.key_factors, b)[h, j])
                elif isinstance(term, DenseBias):
                    score += float(row(term.scores, b)[h, i, j])
            masked = key_mask is not None and not key_mask[b, j]
            future = causal and offset > 0
            foreign = query_documents is not None and query_documents[b, i] != key_documents[b, j]
            if not (masked or future or foreign or score == -math.inf):
                seen.append((j, offset))
                scores.append(score)
        exponentials = [math.exp(score - max(scores)) for score in scores]
        for (j, offset), exponential in zip(seen, exponentials, strict=True):
            vectors = value[b, h, j].clone()
            for term in terms:
                if isinstance(term, OffsetValues):
                    vectors += vector(term, h, offset)
            out[b, h, i] += exponential / sum(exponentials) * vectors
    return out


def column(term, offset):
    last = term.first + term.table.shape[1] - 1
    return min(max(offset, term.first), last) - term.first


def vector(term, head, offset):
    return term.table[head if len(term.table) > 1 else 0, column(term, offset)]


def row(tensor, batch):
    return tensor[batch if len(tensor) > 1 else 0]


def reference(*args, **options):
    return attention(*args, **options, backend="reference")


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# --- what is computed


@pytest.mark.parametrize(("n_q", "n_k"), LENGTHS)
def test_content_alone(n_q, n_k):
    inputs = content(n_q, n_k)
    assert_same(reference(*inputs), naive(*inputs))


@pytest.mark.parametrize(("n_q", "n_k"), LENGTHS)
@pytest.mark.parametrize("term", TERMS)
def test_each_term_with_content(term, n_q, n_k):
    inputs, terms = content(n_q, n_k), [TERMS[term](n_q, n_k)]
    assert_same(reference(*inputs, terms), naive(*inputs, terms))


@pytest.mark.parametrize(("n_q", "n_k"), LENGTHS)
def test_causal_is_right_aligned(n_q, n_k):
    inputs = content(n_q, n_k)
    assert_same(reference(*inputs, causal=True), naive(*inputs, causal=True))


@pytest.mark.parametrize("term", TERMS)
def test_each_term_with_mask_and_causal(term):
    inputs, terms = content(5, 7), [TERMS[term](5, 7)]
    options = {"causal": True, "key_mask": torch.tensor([[1, 1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 1, 1, 1]]).bool()}
    assert_same(reference(*inputs, terms, **options), naive(*inputs, terms, **options))


def test_terms_add_up():
    inputs = content(5, 7)
    terms = [term(5, 7) for term in TERMS.values()]
    options = {"causal": True, "key_mask": torch.rand(BATCH, 7) > 0.3, "scale": 0.3}
    assert_same(reference(*inputs, terms, **options), naive(*inputs, terms, **options))


def test_the_same_term_twice_counts_twice():
    inputs, bias = content(5, 7), TERMS["offset_bias"](5, 7)
    twice = OffsetBias(2 * bias.table, bias.first)
    assert_same(reference(*inputs, [bias, bias]), reference(*inputs, [twice]))


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.7, 2.5])
def test_scale_is_the_factor_on_content_and_vectors_of_offsets_alone(scale):
    inputs = content(5, 7)
    names = ("offset_keys_per_head", "offset_queries_shared", "offset_keys_with_factors", "offset_queries_with_factors")
    terms = [TERMS[name](5, 7) for name in (*names, "offset_bias", "factor_pair", "distance_decay", "dense_bias")]
    assert_same(reference(*inputs, terms, scale=scale), naive(*inputs, terms, scale=scale))


def test_value_may_have_a_width_of_its_own():
    inputs = content(5, 7, value_dim=6)
    terms = [OffsetValues(random(HEADS, 3, 6), -1), OffsetKeys(random(1, 3, DIM), -1)]
    out = reference(*inputs, terms)
    assert out.shape == (BATCH, HEADS, 5, 6)
    assert_same(out, naive(*inputs, terms))


# --- where queries and keys are

POSITIONS = {
    "strided_queries": (Positions(0, 2, 4), None),
    "pooled_queries_after_a_cls": (Positions(-1, 2, 4), Positions(0, 1, 7)),
    "strided_keys": (None, Positions(1, 3, 7)),
    "strides_that_differ": (Positions(2, 3, 4), Positions(-5, 2, 7)),
    "cache": (Positions(100, 1, 4), Positions(97, 1, 7)),
    "ids_for_all_rows": (torch.tensor([3, 0, 9, 4]), torch.tensor([0, 5, 1, 2, 8, 4, 4])),
    "ids_with_a_batch_of_one": (torch.tensor([[3, 0, 9, 4]]), torch.tensor([[0, 5, 1, 2, 8, 4, 4]])),
    "ids_per_row": (torch.tensor([[3, 0, 9, 4], [0, 1, 2, 3]]), torch.tensor([[0, 1, 2, 3, 0, 1, 2], [*range(7)]])),
    "ids_per_row_for_keys_alone": (torch.tensor([3, 0, 9, 4]), torch.tensor([[6, 1, 2, 3, 0, 1, 2], [*range(7)]])),
    "ids_for_queries_alone": (torch.tensor([3, 0, 9, 4]), None),
    "ids_for_keys_alone": (None, torch.tensor([6, 1, 2, 3, 0, 1, 2])),
    "ids_against_a_range": (Positions(1, 2, 4), torch.tensor([[6, 1, 2, 3, 0, 1, 2], [*range(7)]])),
    "negative_ids": (torch.tensor([-3, 0, -9, 4]), torch.arange(-7, 0)),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", POSITIONS)
def test_positions(case, causal):
    query_positions, key_positions = POSITIONS[case]
    inputs = content(4, 7)
    names = ("offset_bias", "offset_keys_per_head", "offset_values_shared")
    mirrored = ("offset_queries_per_head", "offset_queries_with_factors", "offset_keys_with_factors")
    terms = [TERMS[name](4, 7) for name in (*names, *mirrored)]
    options = {"causal": causal, "query_positions": query_positions, "key_positions": key_positions}
    assert_same(reference(*inputs, terms, **options), naive(*inputs, terms, **options))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_narrow_ids_mean_the_same_as_int64(dtype):
    inputs, ids = content(7, 7), torch.tensor([0, 100, 3, 127, 4, 90, 1])
    terms = [
        OffsetBias(random(HEADS, 401), -200),
        TERMS["offset_keys_shared"](7, 7),
        TERMS["offset_values_shared"](7, 7),
    ]
    wide, narrow = (
        reference(*inputs, terms, causal=True, query_positions=positions, key_positions=positions)
        for positions in (ids, ids.to(dtype))
    )
    assert torch.equal(narrow, wide)


def test_causal_with_fractional_positions():
    inputs = content(3, 4)
    options = {"query_positions": torch.tensor([0.5, 1.5, -1.0]), "key_positions": torch.tensor([0.0, 0.5, 0.75, 2.0])}
    assert_same(reference(*inputs, causal=True, **options), naive(*inputs, causal=True, **options))


@pytest.mark.parametrize("causal", [False, True])
def test_packed_rows_equal_their_documents_run_apart(causal):
    lengths = [3, 1, 4]
    documents = torch.repeat_interleave(torch.tensor([7, 2, 5]), torch.tensor(lengths)).expand(BATCH, -1)
    ids = torch.cat([torch.arange(length) for length in lengths])
    query, key, value = content(8, 8)
    terms = [TERMS[name](8, 8) for name in ("offset_bias", "offset_keys_per_head", "offset_values_shared")]
    packed = reference(
        *(query, key, value, terms),
        causal=causal,
        query_positions=ids,
        key_positions=ids,
        query_documents=documents,
        key_documents=documents,
    )
    apart = [
        reference(*document, terms, causal=causal)
        for document in zip(*(tensor.split(lengths, 2) for tensor in (query, key, value)), strict=True)
    ]
    assert_same(packed, torch.cat(apart, 2))


def test_documents_may_be_interleaved_and_differ_between_rows_of_the_batch():
    inputs = content(4, 7)
    options = {
        "query_documents": torch.tensor([[0, 1, 0, 1], [2, 2, 2, 9]]),
        "key_documents": torch.tensor([[0, 1, 0, 1, 0, 1, 0], [2, 2, 2, 3, 3, 3, 3]]),
        "key_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]]).bool(),
    }
    terms = [TERMS["offset_bias"](4, 7)]
    out = reference(*inputs, terms, **options)
    assert_same(out, naive(*inputs, terms, **options))
    assert (out[1, :, 3] == 0).all()  # document 9 has no keys


# --- without content scores


NEEDS_CONTENT = {f"offset_{rows}_{which}" for rows in ("keys", "queries") for which in ("shared", "per_head")}


@pytest.mark.parametrize("term", [term for term in TERMS if term not in NEEDS_CONTENT])
def test_each_term_without_content(term):
    value, terms = content(6, 6)[2], [TERMS[term](6, 6)]
    assert_same(reference(None, None, value, terms), naive(None, None, value, terms, n_q=6))


def test_nothing_at_all_is_the_mean_of_the_values():
    value = content(5, 5)[2]
    assert_same(reference(None, None, value), value.mean(2, keepdim=True).expand_as(value))


@pytest.mark.parametrize(
    ("positions", "terms"),
    [
        (Positions(3, 1, 2), ["offset_bias"]),
        (torch.tensor([3, 9]), ["offset_bias"]),
        (torch.tensor([[3, 9], [0, 1]]), ["offset_bias"]),
        (None, ["offset_bias", "dense_bias"]),
        (None, ["factor_pair_of_all_rows", "offset_values_shared"]),
    ],
)
def test_without_content_the_number_of_queries_follows_from_positions_or_terms(positions, terms):
    value, terms = content(2, 5)[2], [TERMS[name](2, 5) for name in terms]
    out = reference(None, None, value, terms, query_positions=positions)
    assert out.shape == (BATCH, HEADS, 2, DIM)
    assert_same(out, naive(None, None, value, terms, n_q=2, query_positions=positions))


# --- sizes at the edge


@pytest.mark.parametrize("term", [None, *TERMS])
def test_no_queries(term):
    terms = [] if term is None else [OffsetBias(random(HEADS, 2), 0)] if "forbids" in term else [TERMS[term](0, 5)]
    assert reference(*content(0, 5), terms, causal=True).shape == (BATCH, HEADS, 0, DIM)


@pytest.mark.parametrize("term", [None, "offset_bias", "offset_keys_shared", "offset_values_per_head"])
def test_no_keys_give_zeros(term):
    terms = [] if term is None else [TERMS[term](3, 0)]
    assert torch.equal(reference(*content(3, 0), terms, causal=True), torch.zeros(BATCH, HEADS, 3, DIM).double())


@pytest.mark.parametrize("term", [None, "offset_bias", "offset_keys_shared", "offset_values_per_head"])
def test_an_empty_batch(term):
    inputs = [tensor[:0] for tensor in content(4, 5)]
    terms = [] if term is None else [TERMS[term](4, 5)]
    out = reference(*inputs, terms, key_mask=torch.ones(0, 5, dtype=torch.bool))
    assert out.shape == (0, HEADS, 4, DIM)


def test_memory_layout_does_not_matter():
    inputs = content(5, 7)
    terms = [
        TERMS[name](5, 7) for name in ("offset_bias", "offset_keys_shared", "offset_values_per_head", "dense_bias")
    ]
    spread = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs]
    spread_terms = [
        OffsetBias(terms[0].table.T.contiguous().T, terms[0].first),
        OffsetKeys(terms[1].table.flip(1).clone().flip(1), terms[1].first),
        OffsetValues(terms[2].table.mT.contiguous().mT, terms[2].first),
        DenseBias(terms[3].scores.mT.contiguous().mT),
    ]
    assert not any(tensor.is_contiguous() for tensor in spread)
    assert_same(reference(*spread, spread_terms), reference(*inputs, terms))


# --- rows that may not attend to anything

NOTHING_TO_SEE = {
    "key_mask": {"key_mask": torch.tensor([[False] * 4, [True] * 4])},
    "causal": {
        "causal": True,
        "query_positions": torch.tensor([[-1, -2, -3], [9, 9, 9]]),
        "key_positions": torch.arange(4),
    },
    "documents": {
        "query_documents": torch.tensor([[1, 1, 1], [0, 0, 0]]),
        "key_documents": torch.zeros(BATCH, 4, dtype=torch.long),
    },
    "minus_infinity": {},
}


@pytest.mark.parametrize("case", NOTHING_TO_SEE)
def test_rows_that_may_attend_nothing_are_zero_and_send_no_gradient(case):
    inputs = [tensor.requires_grad_() for tensor in content(3, 4)]
    bias, keys, values, factors = (
        random(HEADS, 3).requires_grad_(),
        random(1, 3, DIM).requires_grad_(),
        random(HEADS, 3, DIM).requires_grad_(),
        random(BATCH, HEADS, 3, 2).requires_grad_(),
    )
    scores = random(BATCH, HEADS, 3, 4)
    if case == "minus_infinity":
        scores[0] = -math.inf
    scores.requires_grad_()
    other = random(BATCH, HEADS, 4, 2).requires_grad_()
    terms = [OffsetBias(bias, -1), OffsetKeys(keys, -1), OffsetValues(values, -1), FactorPair(factors, other)]
    out = reference(*inputs, [*terms, DenseBias(scores)], **NOTHING_TO_SEE[case])
    assert (out[0] == 0).all()
    assert (out[1] != 0).all()
    per_row = (*inputs, factors, other, scores)
    for gradient in torch.autograd.grad(out[0].sum(), (*per_row, bias, keys, values), retain_graph=True):
        assert (gradient == 0).all()
    gradients = torch.autograd.grad(out.square().sum(), (*per_row, bias, keys, values))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all((gradient[0] == 0).all() and (gradient[1] != 0).any() for gradient in gradients[: len(per_row)])


def test_forbidden_pairs_send_no_gradient_however_large_the_scores():
    query, key, value = (tensor.requires_grad_() for tensor in content(4, 4))
    scores = torch.full((1, HEADS, 4, 4), 1e30, dtype=torch.float64)
    scores[..., 2] = -math.inf
    out = reference(query, key, value, [DenseBias(scores.requires_grad_())], causal=True)
    gradients = torch.autograd.grad(out.sum(), (query, key, value, scores))
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[2][:, :, 2] == 0).all()


# --- gradients

DIFFERENTIABLE = [term for term in TERMS if "forbids" not in term]


def parts(term):
    """A term's tensors, and a function that makes the term from tensors like them."""
    match term:
        case FactorPair():
            return [term.query_factors, term.key_factors], FactorPair
        case DistanceDecay():
            return [term.query_levels, term.key_levels], DistanceDecay
        case DenseBias():
            return [term.scores], DenseBias
        case OffsetKeys(query_factors=torch.Tensor() as factors):
            return [term.table, factors], lambda table, given: OffsetKeys(table, term.first, query_factors=given)
        case OffsetQueries(key_factors=torch.Tensor() as factors):
            return [term.table, factors], lambda table, given: OffsetQueries(table, term.first, key_factors=given)
        case _:
            return [term.table], lambda table: type(term)(table, term.first)


@pytest.mark.parametrize("term", DIFFERENTIABLE)
def test_gradients_of_each_term(term):
    tensors, make = parts(TERMS[term](2, 3))
    options = {"causal": True, "key_mask": torch.tensor([[True, False, True], [False] * 3])}

    def call(query, key, value, *tensors):
        return reference(query, key, value, [make(*tensors)], **options)

    inputs = [tensor.requires_grad_() for tensor in (*content(2, 3), *tensors)]
    assert torch.autograd.gradcheck(call, inputs)


def test_gradients_of_all_terms_at_once():
    terms = [parts(TERMS[name](2, 3)) for name in ("offset_bias", "offset_keys_per_head", "offset_values_shared")]

    def call(query, key, value, *tensors):
        made = [make(tensor) for tensor, (_, make) in zip(tensors, terms, strict=True)]
        ids = torch.tensor([[5, 0], [1, 1]])
        return reference(query, key, value, made, query_positions=ids, key_positions=Positions(0, 2, 3))

    inputs = [tensor.requires_grad_() for tensor in (*content(2, 3), *(tensors[0] for tensors, _ in terms))]
    assert torch.autograd.gradcheck(call, inputs)


def test_second_derivatives():
    inputs = [tensor[:1, :2].requires_grad_() for tensor in content(2, 3)]
    table = random(2, 3).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda *x: reference(*x[:3], [OffsetBias(x[3], -1)]), (*inputs, table))


# --- dtypes


def plain(query, key, value, terms):
    """The same arithmetic in the dtype of the input, as one would write it in PyTorch."""
    scores = query @ key.mT / math.sqrt(DIM)
    offsets = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None] - (key.shape[2] - query.shape[2])
    extra = 0
    for term in terms:
        if isinstance(term, FactorPair):
            scores = scores + term.query_factors @ term.key_factors.mT
        elif isinstance(term, DenseBias):
            scores = scores + term.scores
        elif isinstance(term, DistanceDecay):
            scores = scores - (term.query_levels.unsqueeze(-1) - term.key_levels.unsqueeze(-2)).abs()
        else:
            columns = (offsets - term.first).clamp(0, term.table.shape[1] - 1)
            if isinstance(term, OffsetBias):
                scores = scores + term.table[:, columns]
            elif isinstance(term, OffsetKeys):
                rows = query / math.sqrt(DIM) if term.query_factors is None else term.query_factors
                scores = scores + (rows.unsqueeze(-2) @ term.table[:, columns].mT).squeeze(-2)
            elif isinstance(term, OffsetQueries):
                rows = key / math.sqrt(DIM) if term.key_factors is None else term.key_factors
                scores = scores + torch.einsum(
                    "bhjd,hijd->bhij", rows, term.table[:, columns].expand(HEADS, -1, -1, -1)
                )
            else:
                extra = term.table[:, columns]
    weights = scores.softmax(-1)
    out = weights @ value
    return out if isinstance(extra, int) else out + (weights.unsqueeze(-2) @ extra).squeeze(-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("term", [None, *DIFFERENTIABLE])
def test_half_precision_is_at_least_as_good_as_plain_torch(term, dtype):
    inputs = [tensor.to(dtype) for tensor in content(9, 33)]
    terms = []
    if term is not None:
        tensors, make = parts(TERMS[term](9, 33))
        terms = [make(*(tensor.to(dtype) for tensor in tensors))]
    exact_terms = [make(*(tensor.double() for tensor in parts(term)[0])) for term in terms]
    exact = reference(*(tensor.double() for tensor in inputs), exact_terms)
    out = reference(*inputs, terms)
    assert out.dtype == dtype
    ours, theirs = ((result.double() - exact).abs().max() for result in (out, plain(*inputs, terms)))
    assert ours <= 2 * theirs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_dtypes_of_output_and_gradients_are_those_of_the_input(dtype):
    inputs = [tensor.to(dtype).requires_grad_() for tensor in content(4, 6)]
    table = random(HEADS, 3).float().requires_grad_()  # tables may stay in float32
    out = reference(*inputs, [OffsetBias(table, -1)], causal=True)
    out.float().square().sum().backward()
    assert out.dtype == dtype
    assert [tensor.grad.dtype for tensor in inputs] == [dtype] * 3
    assert table.grad.dtype == torch.float32
    assert all(tensor.grad.isfinite().all() for tensor in (*inputs, table))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_autocast_changes_nothing(dtype):
    terms = [TERMS[name](4, 6) for name in ("offset_bias", "offset_keys_shared", "offset_values_shared", "factor_pair")]

    start = [tensor.to(dtype).requires_grad_() for tensor in content(4, 6)]

    def forward():
        return reference(*start, terms), attention_weights(*start, terms)

    plain_outputs = forward()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = forward()
    for plain_output, output in zip(plain_outputs, outputs, strict=True):
        assert output.dtype == dtype
        assert torch.equal(output, plain_output)
    gradients, plain_gradients = (torch.autograd.grad(out.square().sum(), start) for out, _ in (outputs, plain_outputs))
    for plain_gradient, gradient in zip(plain_gradients, gradients, strict=True):
        assert torch.equal(gradient, plain_gradient)


# --- the weights


def test_weights_are_those_of_the_output():
    inputs = content(4, 6)
    terms = [
        TERMS[name](4, 6) for name in ("offset_bias", "offset_keys_shared", "factor_pair", "dense_bias_that_forbids")
    ]
    options = {"causal": True, "key_mask": torch.tensor([[1, 1, 1, 0, 1, 1], [0, 0, 0, 0, 1, 1]]).bool()}
    weights = attention_weights(*inputs, terms, **options)
    assert weights.shape == (BATCH, HEADS, 4, 6)
    assert_same(weights @ inputs[2], reference(*inputs, terms, **options))
    identity = torch.eye(6, dtype=torch.float64).expand(BATCH, HEADS, 6, 6)
    assert_same(weights, naive(*inputs[:2], identity, terms, **options))
    sums = weights.sum(-1)
    assert ((sums - 1).abs() < 1e-12).logical_or(sums == 0).all()
    assert (sums[:, 0, 0] == 0).all()


def test_weights_of_half_precision_come_in_float32():
    inputs = content(4, 6, dtype=torch.bfloat16)
    weights = attention_weights(*inputs)
    assert weights.dtype == torch.float32
    assert (weights.sum(-1) - 1).abs().max() < 1e-6
