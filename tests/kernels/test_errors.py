"""Errors for input that does not fit: messages name the argument, what it got and what it takes.

More of what is of another type altogether is in tests/test_strange_arguments.py.
"""

import warnings

import pytest
import torch

from whereformer import attention, attention_weights, explain
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

B, H, N_Q, N_K, D = 2, 3, 4, 6, 8


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


FITTING = {"query": zeros(B, H, N_Q, D), "key": zeros(B, H, N_K, D), "value": zeros(B, H, N_K, D)}
with warnings.catch_warnings(action="ignore"):  # Torch warns of strided ones.
    NESTED = [torch.nested.nested_tensor([zeros(H, N_K, D)] * B, layout=of) for of in (torch.strided, torch.jagged)]
NO_CONTENT = {"query": None, "key": None}

CASES = [
    # query, key and value
    ({"value": [[1.0]]}, TypeError, r"value: expected a floating-point tensor, got list"),
    ({"value": zeros(B, N_K, D)}, ValueError, r"value: expected shape \(batch, heads, n_k, head_dim\), .* \(2, 6, 8\)"),
    ({"value": zeros(B, H, N_K, D).long()}, TypeError, r"value: expected a floating-point tensor, got torch.int64"),
    ({"query": zeros(1, H, N_Q, D)}, ValueError, r"query: expected shape \(batch 2, heads, n_q, .*got \(1, 3, 4, 8\)"),
    ({"key": zeros(B, H, 5, D)}, ValueError, r"key: .*n_k 6, head_dim 8\), got \(2, 3, 5, 8\)"),
    ({"key": zeros(B, H, N_K, D).double()}, TypeError, r"key: expected the value's dtype torch.float32, got .*float64"),
    ({"value": zeros(B, H, N_K, D).half()}, TypeError, r"query: expected the value's dtype .*float16, got .*float32"),
    ({"key": zeros(B, H, N_K, D).to("meta")}, ValueError, r"key: expected the value's device cpu, got meta"),
    ({"key": None}, ValueError, r"query and key: give both, or neither"),
    *(
        ({"value": nested}, TypeError, r"value: expected a dense tensor, got a nested one; use attention_varlen")
        for nested in NESTED
    ),
    # options
    ({"key_mask": zeros(B, N_K)}, TypeError, r"key_mask: expected .*bool.* True = may be attended, got torch.float32"),
    ({"key_mask": zeros(N_K).bool()}, ValueError, r"key_mask: expected shape \(batch 2, n_k 6\), got \(6,\)"),
    ({"dropout_p": 1.0}, ValueError, r"dropout_p: expected a number from 0 to 0.999999, got 1.0"),
    ({"window": (3, -2)}, ValueError, r"window: expected an integer of at least 0, .* got \(3, -2\)"),
    ({"window": 1.5}, ValueError, r"window: expected an integer of at least 0, .* got 1.5"),
    ({"window": (3,)}, ValueError, r"window: expected an integer of at least 0, or two .* got \(3,\)"),
    ({"return_lse": "no"}, TypeError, r"return_lse: expected True or False, got 'no'"),
    ({"causal": 1}, TypeError, r"causal: expected True or False, got 1"),
    ({"softcap": 0}, ValueError, r"softcap: expected a number from 1e-30 to 1e\+30, got 0"),
    ({"softcap": zeros(H)}, TypeError, r"softcap: expected a number, got Tensor"),
    ({**NO_CONTENT, "softcap": 3.0}, ValueError, r"softcap: needs a query, got query=None"),
    ({"scale": -1e39}, ValueError, r"scale: expected a number from -3.40282e\+38 to 3.40282e\+38, got -1e\+39"),
    ({"scale": True}, TypeError, r"scale: expected a number, got bool"),
    ({"dropout_p": False}, TypeError, r"dropout_p: expected a number, got bool"),
    ({**NO_CONTENT, "scale": 1.0}, ValueError, r"scale: needs a query, got query=None"),
    ({"sinks": zeros(H).long()}, TypeError, r"sinks: expected a floating-point tensor, got torch.int64"),
    (
        {"sinks": zeros(H + 1)},
        ValueError,
        r"sinks: expected shape \(heads 3\) or \(batch 2, heads 3, n_q 4\), got \(4,\)",
    ),
    ({"sinks": zeros(H).to("meta")}, ValueError, r"sinks: expected the value's device cpu, got meta"),
    ({"query": zeros(B, 4, N_Q, D)}, ValueError, r"query: expected the value's 3 heads or a multiple, got 4"),
    # positions
    ({"query_positions": [0, 1, 2, 3]}, TypeError, r"query_positions: expected a tensor of numbers, got list"),
    ({"query_positions": Positions(0, 1, 6)}, ValueError, r"query_positions: expected length 4, got Positions\(.*h=6"),
    (
        {"query_positions": zeros(6)},
        ValueError,
        r"query_positions: expected shape \(n 4\) or \(batch 1 or 2, n 4\), got \(6,\)",
    ),
    ({"key_positions": zeros(6).bool()}, TypeError, r"key_positions: expected a tensor of numbers, got torch.bool"),
    (
        {"key_positions": zeros(6), "terms": [OffsetBias(zeros(H, 1), 0)]},
        TypeError,
        r"key_positions: .*integer positions, got torch.float32",
    ),
    # documents
    ({"query_documents": zeros(B, N_Q).long()}, ValueError, r"query_documents and key_documents: give both or neither"),
    (
        {"query_documents": zeros(B, N_K).long(), "key_documents": zeros(B, N_K)},
        ValueError,
        r"query_documents: expected shape \(batch 2, n_q 4\), got \(2, 6\)",
    ),
    (
        {"query_documents": zeros(B, N_Q).long(), "key_documents": zeros(N_K).long()},
        ValueError,
        r"key_documents: expected shape \(batch 2, n_k 6\), got \(6,\)",
    ),
    # the sequence of terms
    ({"terms": OffsetBias(zeros(H, 1), 0)}, TypeError, r"terms: expected a sequence of terms, got a single OffsetBias"),
    (
        {**NO_CONTENT, "terms": [OffsetKeys(zeros(1, 3, D), -1)]},
        ValueError,
        r"OffsetKeys: needs a query, got query=None",
    ),
    (
        {**NO_CONTENT, "terms": [OffsetQueries(zeros(1, 3, D), -1)]},
        ValueError,
        r"OffsetQueries: needs a key, got key=None",
    ),
    (
        {"value": zeros(B, H, N_K, 5), "terms": [OffsetValues(zeros(1, 5, D), 0)]},
        ValueError,
        r"OffsetValues.table: .*head_dim 5\), got \(1, 5, 8\)",
    ),
    # without content, where n_q is n_k
    ({**NO_CONTENT, "terms": [DenseBias(zeros(3))]}, ValueError, r"DenseBias.scores: .*, got \(3,\)"),
    ({**NO_CONTENT, "terms": [FactorPair(zeros(1), zeros(1))]}, ValueError, r"FactorPair.query_factors: .*got \(1,\)"),
    (
        {**NO_CONTENT, "terms": [DenseBias(zeros(1, H, 5, N_K))]},
        ValueError,
        r"DenseBias.scores: .*n_q 6, n_k 6\), got \(1, 3, 5, 6\)",
    ),
]
PER_QUERY, PER_KEY = zeros(1, H, N_Q, 2), zeros(1, H, N_K, 2)
TERMS = [
    (zeros(H, 3), TypeError, r"terms: expected OffsetBias, .*DenseBias, got Tensor"),
    # offset tables
    (OffsetBias(zeros(3), 0), ValueError, r"OffsetBias.table: expected shape \(heads 3, T\), got \(3,\)"),
    (OffsetBias(zeros(H, 0), 0), ValueError, r"OffsetBias.table: needs at least one number, got shape \(3, 0\)"),
    (OffsetBias(zeros(H, 2).int(), 0), TypeError, r"OffsetBias.table: .*floating-point.*got torch.int32"),
    (OffsetKeys(zeros(2, 5, D), 0), ValueError, r"OffsetKeys.table: .*heads 1 or 3, T, head_dim 8\), got"),
    (OffsetQueries(zeros(2, 5, D), 0), ValueError, r"OffsetQueries.table: .*heads 1 or 3, T, head_dim 8"),
    (
        OffsetKeys(zeros(1, 5, D), 0, query_factors=PER_QUERY),
        ValueError,
        r"OffsetKeys.table: .*heads 1 or 3, T, r 2\), got \(1, 5, 8\)",
    ),
    (
        OffsetKeys(zeros(1, 5, 2), 0, query_factors=PER_KEY),
        ValueError,
        r"OffsetKeys.query_factors: .*heads 3, n_q 4, r\), got \(1, 3, 6, 2\)",
    ),
    (
        OffsetKeys(zeros(1, 5, 2), 0, query_factors=[1.0]),
        TypeError,
        r"OffsetKeys.query_factors: expected a float.* got list",
    ),
    (
        FactorPair(zeros(1, H, N_Q, 0), zeros(1, H, N_K, 0)),
        ValueError,
        r"FactorPair.query_factors: needs at least one number, got shape \(1, 3, 4, 0\)",
    ),
    (
        OffsetQueries(zeros(1, 5, 0), 0, key_factors=zeros(1, H, N_K, 0)),
        ValueError,
        r"OffsetQueries.key_factors: needs at least one number",
    ),
    # levels
    (
        DistanceDecay(zeros(1, 1, N_Q), zeros(1, H, N_K)),
        ValueError,
        r"DistanceDecay.query_levels: .*heads 3, n_q 4\), got \(1, 1, 4\)",
    ),
    (
        DistanceDecay(zeros(1, H, N_Q), zeros(1, H, N_K).long()),
        TypeError,
        r"DistanceDecay.key_levels: expected a float.* got torch.int64",
    ),
    (OffsetValues(zeros(2, 5, D), 0), ValueError, r"OffsetValues.table: .*heads 1 or 3, T, head_dim 8\)"),
    # factors
    (
        FactorPair(zeros(1, 1, N_Q, 2), PER_KEY),
        ValueError,
        r"FactorPair.query_factors: .*heads 3.*, got \(1, 1, 4, 2\)",
    ),
    (
        FactorPair(PER_QUERY, zeros(1, H, N_K, 3)),
        ValueError,
        r"FactorPair.key_factors: .*n_k 6, r 2\), got \(1, 3, 6, 3",
    ),
    (FactorPair(PER_QUERY, PER_QUERY), ValueError, r"FactorPair.key_factors: .*n_k 6, r 2\), got \(1, 3, 4, 2\)"),
    (FactorPair(None, PER_KEY), TypeError, r"FactorPair.query_factors: expected a float.* got NoneType"),
    # dense scores
    (
        DenseBias(zeros(B, 2, N_Q, N_K)),
        ValueError,
        r"DenseBias.scores: .*heads 1 or 3, n_q 4, n_k 6\), got \(2, 2, 4, 6\)",
    ),
    (DenseBias(zeros(1, H, N_Q, N_K).bool()), TypeError, r"DenseBias.scores: expected a float.* got torch.bool"),
]


@pytest.mark.parametrize(("given", "error", "message"), CASES, ids=[case[2] for case in CASES])
def test_message(given, error, message):
    with pytest.raises(error, match=f"^{message}"):
        attention(**{**FITTING, **given})


@pytest.mark.parametrize(("term", "error", "message"), TERMS, ids=[case[2] for case in TERMS])
def test_message_about_a_term(term, error, message):
    with pytest.raises(error, match=f"^{message}"):
        attention(**FITTING, terms=[term])


def test_what_the_cases_start_from_fits():
    assert attention(**FITTING).shape == (B, H, N_Q, D)


def test_weights_check_their_input_too():
    with pytest.raises(ValueError, match=r"^key_mask: expected shape \(batch 2, n_k 6\), got \(6,\)"):
        attention_weights(**FITTING, key_mask=torch.ones(6, dtype=torch.bool))


@pytest.mark.parametrize("function", [attention_weights, explain])
@pytest.mark.parametrize("name", ["softcaps", "sink_tokens"])
def test_functions_with_the_same_options_refuse_others(function, name):
    with pytest.raises(TypeError, match=rf"^{name}: {function.__name__} has no such argument"):
        function(**FITTING, **{name: 3})


def test_explain_knows_that_logs_of_sums_change_the_backend():
    with torch.autocast("cpu", torch.bfloat16):
        assert explain(**FITTING).backend == "sdpa"
        assert explain(**FITTING, return_lse=True).backend != "sdpa"


@pytest.mark.parametrize("length", [-1, -7])
def test_positions_refuse_a_negative_length(length):
    with pytest.raises(ValueError, match=rf"^Positions.length: must be at least 0, got {length}"):
        Positions(0, 1, length)


@pytest.mark.parametrize("stride", [0, -2])
def test_positions_refuse_a_stride_that_does_not_advance(stride):
    with pytest.raises(ValueError, match=rf"^Positions.stride: must be at least 1, got {stride}"):
        Positions(0, stride, 3)


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        ((True,), TypeError, "first: expected an int, got True"),
        ((0, True), TypeError, "step: expected an int, got True"),
        ((0, zeros(2)), TypeError, "step: expected an int, got tensor"),
        ((0, 0), ValueError, "step: expected an int of at least 1, got 0"),
    ],
)
def test_tables_begin_and_step_at_whole_offsets(numbers, error, message):
    with pytest.raises(error, match=f"^OffsetBias.{message}"):
        OffsetBias(zeros(H, 2), *numbers)


def test_positions_describe_themselves():
    positions = Positions(-3, 4, 5)
    assert positions.values().tolist() == [-3, 1, 5, 9, 13]
    assert positions.last == 13
    assert Positions(7, 2, 0).last == 5
    assert Positions(7, 2, 0).values().tolist() == []


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ((0.5, 1, 3), "start"),
        ((0, 1.0, 3), "stride"),
        ((0, 1, "3"), "length"),
        ((True, 1, 3), "start"),
        ((0, True, 3), "stride"),
        ((0, 1, True), "length"),
    ],
)
def test_affine_positions_are_whole(numbers, name):
    with pytest.raises(TypeError, match=f"^Positions.{name}: expected an int"):
        Positions(*numbers)
