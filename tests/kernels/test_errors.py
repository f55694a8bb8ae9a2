"""Errors for input that does not fit: messages name the argument, what it got and what it takes.

More of what is of another type altogether is in tests/test_strange_arguments.py.
"""

import math
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
    NESTED = [
        torch.nested.nested_tensor([zeros(H, N_K, D)] * B, layout=layout) for layout in (torch.strided, torch.jagged)
    ]
NO_CONTENT = {"query": None, "key": None}
BIAS, LEVELS, IDS = OffsetBias(zeros(H, 1), 0), zeros(1, H, N_K), zeros(B, N_Q).long()
PER_QUERY, PER_KEY = zeros(1, H, N_Q, 2), zeros(1, H, N_K, 2)
WHOLE_LEVELS = DistanceDecay(zeros(1, H, N_Q), LEVELS.long())

TYPE_ERRORS = [
    # query, key and value
    (r"value: expected a floating-point tensor, got list", {"value": [[1.0]]}),
    (r"value: expected a floating-point tensor, got torch.int64", {"value": zeros(B, H, N_K, D).long()}),
    (r"key: expected the value's dtype torch.float32, got .*float64", {"key": zeros(B, H, N_K, D).double()}),
    (r"query: expected the value's dtype .*float16, got .*float32", {"value": zeros(B, H, N_K, D).half()}),
    (r"value: expected a dense tensor, got a nested one; use attention_varlen for seq", {"value": NESTED[0]}),
    (r"value: expected a dense tensor, got a nested one; use attention_varlen", {"value": NESTED[1]}),
    # options
    (r"key_mask: expected .*bool.* True = may be attended, got torch.float32", {"key_mask": zeros(B, N_K)}),
    (r"return_lse: expected True or False, got 'no'", {"return_lse": "no"}),
    (r"causal: expected True or False, got 1", {"causal": 1}),
    (r"softcap: expected a number, got Tensor", {"softcap": zeros(H)}),
    (r"scale: expected a number, got bool", {"scale": True}),
    (r"scale: expected a number, got Tensor", {"scale": zeros()}),
    (r"dropout_p: expected a number, got bool", {"dropout_p": False}),
    (r"sinks: expected a floating-point tensor, got torch.int64", {"sinks": zeros(H).long()}),
    # positions
    (r"query_positions: expected a tensor of numbers, got list", {"query_positions": [0, 1, 2, 3]}),
    (r"key_positions: expected a tensor of numbers, got torch.bool", {"key_positions": zeros(6).bool()}),
    (r"key_positions: .*integer positions, got torch.float32", {"key_positions": zeros(6), "terms": [BIAS]}),
    # terms
    (r"terms: expected a sequence of terms, got a single OffsetBias", {"terms": BIAS}),
    (r"terms: expected OffsetBias, .*DenseBias, got Tensor", {"terms": [zeros(H, 3)]}),
    (r"OffsetBias.table: .*floating-point.*got torch.int32", {"terms": [OffsetBias(zeros(H, 2).int(), 0)]}),
    (r"OffsetKeys.query_factors: expected a float.* got list", {"terms": [OffsetKeys(zeros(1, 5, 2), 0, 1, [1.0])]}),
    (r"DistanceDecay.key_levels: expected a float.* got torch.int64", {"terms": [WHOLE_LEVELS]}),
    (r"FactorPair.query_factors: expected a float.* got NoneType", {"terms": [FactorPair(None, PER_KEY)]}),
    (r"DenseBias.scores: expected a float.* got torch.bool", {"terms": [DenseBias(zeros(1, H, N_Q, N_K).bool())]}),
]
VALUE_ERRORS = [
    # query, key and value
    (r"value: expected shape \(batch, heads, n_k, head_dim\), .* \(2, 6, 8\)", {"value": zeros(B, N_K, D)}),
    (r"query: expected shape \(batch 2, heads, n_q, .*got \(1, 3, 4, 8\)", {"query": zeros(1, H, N_Q, D)}),
    (r"key: .*n_k 6, head_dim 8\), got \(2, 3, 5, 8\)", {"key": zeros(B, H, 5, D)}),
    (r"key: expected the value's device cpu, got meta", {"key": zeros(B, H, N_K, D).to("meta")}),
    (r"query and key: give both, or neither", {"key": None}),
    (r"query: expected the value's 3 heads or a multiple, got 4", {"query": zeros(B, 4, N_Q, D)}),
    # options
    (r"key_mask: expected shape \(batch 2, n_k 6\), got \(6,\)", {"key_mask": zeros(N_K).bool()}),
    (r"dropout_p: expected a number from 0 to 0.999999, got 1.0", {"dropout_p": 1.0}),
    (r"window: expected an integer of at least 0, .* got \(3, -2\)", {"window": (3, -2)}),
    (r"window: expected an integer of at least 0, .* got 1.5", {"window": 1.5}),
    (r"window: expected an integer of at least 0, or two .* got \(3,\)", {"window": (3,)}),
    (r"softcap: expected a number from 1e-30 to 1e\+30, got 0", {"softcap": 0}),
    (r"softcap: needs a query, got query=None", {**NO_CONTENT, "softcap": 3.0}),
    (r"scale: expected a number from -3.40282e\+38 to 3.40282e\+38, got -1e\+39", {"scale": -1e39}),
    (r"scale: expected a number from -3.40282e\+38 to 3.40282e\+38, got nan", {"scale": math.nan}),
    (r"scale: needs a query, got query=None", {**NO_CONTENT, "scale": 1.0}),
    (r"sinks: expected shape \(heads 3\) or \(batch 2, heads 3, n_q 4\), got \(4,\)", {"sinks": zeros(H + 1)}),
    (r"sinks: expected the value's device cpu, got meta", {"sinks": zeros(H).to("meta")}),
    # positions
    (r"query_positions: expected length 4, got Positions\(.*h=6", {"query_positions": Positions(0, 1, 6)}),
    (r"query_positions: expected shape \(n 4\) or \(batch 1 or 2, n 4\), got \(6,\)", {"query_positions": zeros(6)}),
    # documents
    (r"query_documents and key_documents: give both or neither", {"query_documents": IDS}),
    (r"query_documents: expected shape \(batch 2, n_q 4\)", {"query_documents": IDS[:, :3], "key_documents": IDS}),
    (r"key_documents: expected shape \(batch 2, n_k 6\)", {"query_documents": IDS, "key_documents": IDS[0]}),
    # terms without content, where n_q is n_k
    (r"OffsetKeys: needs a query, got query=None", {**NO_CONTENT, "terms": [OffsetKeys(zeros(1, 3, D), -1)]}),
    (r"OffsetQueries: needs a key, got key=None", {**NO_CONTENT, "terms": [OffsetQueries(zeros(1, 3, D), -1)]}),
    (r"DenseBias.scores: .*, got \(3,\)", {**NO_CONTENT, "terms": [DenseBias(zeros(3))]}),
    (r"FactorPair.query_factors: .*got \(1,\)", {**NO_CONTENT, "terms": [FactorPair(zeros(1), zeros(1))]}),
    (r"DenseBias.scores: .*n_q 6, n_k 6\), got \(1, 3", {**NO_CONTENT, "terms": [DenseBias(zeros(1, H, 5, N_K))]}),
]
TERM_ERRORS = [
    # offset tables
    (r"OffsetBias.table: expected shape \(heads 3, T\), got \(3,\)", OffsetBias(zeros(3), 0)),
    (r"OffsetBias.table: needs at least one number, got shape \(3, 0\)", OffsetBias(zeros(H, 0), 0)),
    (r"OffsetKeys.table: .*heads 1 or 3, T, head_dim 8\), got", OffsetKeys(zeros(2, 5, D), 0)),
    (r"OffsetQueries.table: .*heads 1 or 3, T, head_dim 8", OffsetQueries(zeros(2, 5, D), 0)),
    (r"OffsetValues.table: .*heads 1 or 3, T, head_dim 8\)", OffsetValues(zeros(2, 5, D), 0)),
    (r"OffsetValues.table: .*head_dim 8\), got \(1, 5, 5\)", OffsetValues(zeros(1, 5, 5), 0)),
    (r"OffsetKeys.table: .*heads 1 or 3, T, r 2\), got \(1, 5, 8\)", OffsetKeys(zeros(1, 5, D), 0, 1, PER_QUERY)),
    (r"OffsetKeys.query_factors: .*n_q 4, r\), got \(1, 3, 6, 2\)", OffsetKeys(zeros(1, 5, 2), 0, 1, PER_KEY)),
    (r"OffsetQueries.key_factors: needs at least one number", OffsetQueries(zeros(1, 5, 0), 0, 1, PER_KEY[..., :0])),
    # levels
    (r"DistanceDecay.query_levels: .*heads 3, n_q 4\), got \(1, 1, 4\)", DistanceDecay(zeros(1, 1, N_Q), LEVELS)),
    # factors
    (r"FactorPair.query_factors: needs .*, got shape \(1, 3, 4, 0\)", FactorPair(PER_QUERY[..., :0], PER_KEY[..., :0])),
    (r"FactorPair.query_factors: .*heads 3.*, got \(1, 1, 4, 2\)", FactorPair(PER_QUERY[:, :1], PER_KEY)),
    (r"FactorPair.key_factors: .*n_k 6, r 2\), got \(1, 3, 6, 3", FactorPair(PER_QUERY, zeros(1, H, N_K, 3))),
    (r"FactorPair.key_factors: .*n_k 6, r 2\), got \(1, 3, 4, 2\)", FactorPair(PER_QUERY, PER_QUERY)),
    # dense scores
    (r"DenseBias.scores: .*1 or 3, n_q 4, n_k 6\), got \(2, 2, 4, 6\)", DenseBias(zeros(B, 2, N_Q, N_K))),
]
VALUE_ERRORS += [(message, {"terms": [term]}) for message, term in TERM_ERRORS]


@pytest.mark.parametrize(("message", "arguments"), TYPE_ERRORS, ids=[message for message, _ in TYPE_ERRORS])
def test_what_is_of_another_type_is_refused(message, arguments):
    with pytest.raises(TypeError, match=f"^{message}"):
        attention(**{**FITTING, **arguments})


@pytest.mark.parametrize(("message", "arguments"), VALUE_ERRORS, ids=[message for message, _ in VALUE_ERRORS])
def test_what_does_not_fit_is_refused(message, arguments):
    with pytest.raises(ValueError, match=f"^{message}"):
        attention(**{**FITTING, **arguments})


def test_what_the_cases_start_from_fits():
    assert attention(**FITTING).shape == (B, H, N_Q, D)


def test_weights_check_their_input_too():
    with pytest.raises(ValueError, match=r"^key_mask: expected shape \(batch 2, n_k 6\), got \(6,\)"):
        attention_weights(**FITTING, key_mask=torch.ones(6, dtype=torch.bool))


@pytest.mark.parametrize("function", [attention_weights, explain])
@pytest.mark.parametrize("name", ["softcaps", "sink_tokens"])
def test_functions_with_the_same_options_refuse_others(function, name):
    with pytest.raises(TypeError, match=rf"^{name}: not an argument of {function.__name__}"):
        function(**FITTING, **{name: 3})


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("is_causal", "write causal=True"),
        ("attn_mask", "write key_mask=, .*DenseBias"),
        ("dropout", "write dropout_p="),
        ("enable_gqa", "leave it out"),
        ("causl", "did you mean 'causal'"),
    ],
)
def test_arguments_of_other_libraries_have_an_answer(name, advice):
    with pytest.raises(TypeError, match=f"^{name}: not an argument of attention; {advice}"):
        attention(**FITTING, **{name: None})


def test_explain_knows_that_logs_of_sums_change_the_backend():
    with torch.autocast("cpu", torch.bfloat16):
        assert explain(**FITTING).backend == "sdpa"
        assert explain(**FITTING, return_lse=True).backend != "sdpa"


def test_positions_describe_themselves():
    positions = Positions(-3, 4, 5)
    assert positions.values().tolist() == [-3, 1, 5, 9, 13]
    assert positions.last == 13
    assert Positions(7, 2, 0).last == 5
    assert Positions(7, 2, 0).values().tolist() == []


@pytest.mark.parametrize(
    ("make", "numbers", "error", "message"),
    [
        (Positions, (0.5, 1, 3), TypeError, "Positions.start: expected an int"),
        (Positions, (0, 1.0, 3), TypeError, "Positions.stride: expected an int"),
        (Positions, (0, 1, "3"), TypeError, "Positions.length: expected an int"),
        (Positions, (True, 1, 3), TypeError, "Positions.start: expected an int"),
        (Positions, (0, True, 3), TypeError, "Positions.stride: expected an int"),
        (Positions, (0, 1, True), TypeError, "Positions.length: expected an int"),
        (Positions, (0, 1, -7), ValueError, "Positions.length: must be at least 0, got -7"),
        (Positions, (0, 0, 3), ValueError, "Positions.stride: must be at least 1, got 0"),
        (Positions, (0, -2, 3), ValueError, "Positions.stride: must be at least 1, got -2"),
        (OffsetBias, (zeros(H, 2), True), TypeError, "OffsetBias.first: expected an int, got True"),
        (OffsetBias, (zeros(H, 2), 0, True), TypeError, "OffsetBias.step: expected an int, got True"),
        (OffsetBias, (zeros(H, 2), 0, zeros(2)), TypeError, "OffsetBias.step: expected an int, got tensor"),
        (OffsetBias, (zeros(H, 2), 0, 0), ValueError, "OffsetBias.step: expected an int of at least 1, got 0"),
    ],
)
def test_positions_and_tables_begin_and_step_at_integers(make, numbers, error, message):
    with pytest.raises(error, match=f"^{message}"):
        make(*numbers)
