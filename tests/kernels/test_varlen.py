"""``attention_varlen``: the same as attention of each sequence by itself, in outputs and in every gradient."""

import pytest
import torch

import whereformer
from tests.kernels.cases import DEVICE, HEADS, random
from whereformer import (
    DenseBias,
    DistanceDecay,
    FactorPair,
    OffsetBias,
    OffsetKeys,
    OffsetQueries,
    OffsetValues,
    attention,
    attention_varlen,
)
from whereformer.kernels import varlen

DIM = 8
SEQUENCES = {
    "different": ([3, 1, 6, 4], None),
    "with empty ones": ([0, 5, 0, 0, 2, 0], None),
    "one": ([7], None),
    "equal": ([4, 4, 4], None),
    "fewer queries": ([1, 2, 5], [4, 2, 6]),
    "more queries": ([5, 3, 2], [2, 3, 0]),
    "equal, fewer queries": ([2, 2], [5, 5]),
    "no keys": ([2, 1], [0, 0]),
    "none": ([], None),
}
"""The lengths of queries, and of keys if they differ."""

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "soft cap": {"softcap": 1.5, "scale": 0.7},
    "sinks": {"sinks": torch.tensor([0.3, -1.0], dtype=torch.float64, device=DEVICE)},
    "sinks of queries": {"sinks": "one for each"},
}


def seqlens(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)


def content(lengths, key_heads=HEADS):
    of_queries, of_keys = lengths[0], lengths[0] if lengths[1] is None else lengths[1]
    total_q, total_k = sum(of_queries), sum(of_keys)
    leaves = [random(total_q, HEADS, DIM), random(total_k, key_heads, DIM), random(total_k, key_heads, DIM)]
    return of_queries, of_keys, [leaf.requires_grad_() for leaf in leaves]


def term_tensors(total_q, total_k):
    shapes = (HEADS, 7), (1, 5, DIM), (HEADS, 4, DIM), (1, HEADS, total_q, 3), (1, HEADS, total_k, 3)
    levels = (1, HEADS, total_q), (1, HEADS, total_k)
    return [random(*shape).requires_grad_() for shape in (*shapes, *levels, (1, HEADS, total_q, total_k))]


def terms_of(tensors, queries=slice(None), keys=slice(None)):
    """One term of each kind, for some rows of queries and of keys."""
    bias, of_keys, of_values, query_factors, key_factors, query_levels, key_levels, scores = tensors
    return [
        OffsetBias(bias, -3),
        OffsetKeys(of_keys, -2),
        OffsetKeys(of_values[..., :3], -3, query_factors=query_factors[:, :, queries]),
        OffsetQueries(of_keys, -1),
        OffsetQueries(of_values[..., :3], -1, key_factors=key_factors[:, :, keys]),
        OffsetValues(of_values, -1),
        FactorPair(query_factors[:, :, queries], key_factors[:, :, keys]),
        DistanceDecay(query_levels[:, :, queries], key_levels[:, :, keys]),
        DenseBias(scores[:, :, queries, keys]),
    ]


def one_by_one(leaves, tensors, of_queries, of_keys, backend="reference", sinks=None, **options):
    """What attention gives for each sequence by itself, and its log-sum-exps."""
    results = []
    first_q = first_k = 0
    for n_q, n_k in zip(of_queries, of_keys, strict=True):
        queries, keys = slice(first_q, first_q + n_q), slice(first_k, first_k + n_k)
        rows = [leaf[part].transpose(0, 1)[None] for leaf, part in zip(leaves, (queries, keys, keys), strict=True)]
        terms = () if tensors is None else terms_of(tensors, queries, keys)
        if sinks is not None:
            options["sinks"] = sinks[queries].mT[None] if sinks.dim() == 2 else sinks
        results.append(attention(*rows, terms, return_lse=True, backend=backend, **options))
        first_q, first_k = first_q + n_q, first_k + n_k
    empty = leaves[0].new_zeros(1, HEADS, 0, DIM), leaves[0].new_zeros(1, HEADS, 0)
    return [torch.cat(parts, 2)[0].transpose(0, 1) for parts in zip(empty, *results, strict=True)]


def both(lengths, options, with_terms, backend, key_heads=HEADS):
    """Outputs, log-sum-exps and all gradients: of the sequences together, and one by one."""
    torch.manual_seed(0)
    of_queries, of_keys, leaves = content(lengths, key_heads)
    tensors = term_tensors(sum(of_queries), sum(of_keys)) if with_terms else None
    if (sinks := options.get("sinks")) is not None:
        sinks = random(sum(of_queries), HEADS) if sinks == "one for each" else sinks.clone()
        options = {"sinks": sinks.requires_grad_()}
    with_gradients = [*leaves, *(tensors or ()), *([options["sinks"]] if "sinks" in options else ())]
    together = attention_varlen(
        *leaves,
        () if tensors is None else terms_of(tensors),
        cu_seqlens_q=seqlens(of_queries),
        cu_seqlens_k=None if lengths[1] is None else seqlens(of_keys),
        return_lse=True,
        backend=backend,
        **options,
    )
    results = []
    for output, lse in (together, one_by_one(leaves, tensors, of_queries, of_keys, **options)):
        attended = lse.isfinite()
        loss = (output * torch.arange(output.numel(), device=DEVICE).view(output.shape).sin()).sum()
        loss = loss + (lse[attended] * torch.arange(int(attended.sum()), device=DEVICE).cos()).sum()
        loss = loss + 0 * sum(leaf.sum() for leaf in with_gradients)  # without sequences, the loop has no graph
        results.append([output, lse, *torch.autograd.grad(loss, with_gradients)])
    return results


def check(*arguments, **options):
    together, apart = both(*arguments, **options)
    for ours, theirs in zip(together, apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
    return together


@pytest.mark.parametrize("backend", ["auto", "blockwise"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", SEQUENCES)
def test_sequences_do_not_see_each_other(lengths, options, backend):
    check(SEQUENCES[lengths], OPTIONS[options], True, backend)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", SEQUENCES)
def test_without_terms(lengths, options):
    check(SEQUENCES[lengths], OPTIONS[options], False, "auto")


@pytest.mark.parametrize("lengths", ["different", "equal", "fewer queries"])
def test_heads_in_groups(lengths):
    check(SEQUENCES[lengths], {"causal": True}, True, "auto", key_heads=1)


@pytest.mark.parametrize("lengths", [[2, 3], [3, 3]])
def test_given_positions_are_those_in_each_sequence(lengths):
    _, _, leaves = content((lengths, None))
    tensors = term_tensors(sum(lengths), sum(lengths))[:1]
    positions = torch.randint(0, 5, (sum(lengths),), device=DEVICE)
    output = attention_varlen(
        *leaves,
        [OffsetBias(tensors[0], -3)],
        cu_seqlens_q=seqlens(lengths),
        query_positions=positions,
        key_positions=positions,
    )
    first = 0
    for n in lengths:
        rows, ids = [leaf[first : first + n].transpose(0, 1)[None] for leaf in leaves], positions[first : first + n]
        apart = attention(*rows, [OffsetBias(tensors[0], -3)], query_positions=ids, key_positions=ids)
        torch.testing.assert_close(output[first : first + n], apart[0].transpose(0, 1), rtol=0, atol=1e-11)
        first += n


@pytest.mark.parametrize("lengths", [[2, 3], [3, 3]])
def test_attention_without_content_scores(lengths):
    value, table = random(sum(lengths), HEADS, DIM), random(HEADS, 7)
    output = attention_varlen(None, None, value, [OffsetBias(table, -3)], cu_seqlens_q=seqlens(lengths))
    parts = [
        attention(None, None, part.transpose(0, 1)[None], [OffsetBias(table, -3)]) for part in value.split(lengths)
    ]
    torch.testing.assert_close(output, torch.cat(parts, 2)[0].transpose(0, 1), rtol=0, atol=1e-11)


@pytest.mark.parametrize("lengths", ["different", "equal"])
def test_dropout_is_that_of_the_seed(lengths):
    of_queries, _, leaves = content(SEQUENCES[lengths])
    outputs = []
    for backend in ("reference", "blockwise"):
        torch.manual_seed(1)
        outputs.append(attention_varlen(*leaves, cu_seqlens_q=seqlens(of_queries), dropout_p=0.5, backend=backend))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-11)
    assert not torch.allclose(outputs[0], attention_varlen(*leaves, cu_seqlens_q=seqlens(of_queries)))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    """Compiled code does not read lengths, so it serves sequences of any."""
    torch.compiler.reset()
    compiled = torch.compile(attention_varlen, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for lengths in ([3, 1, 6], [4, 4, 2], [5, 5], [2, 5, 4, 1]):
        leaves = [random(sum(lengths), HEADS, DIM).requires_grad_() for _ in range(3)]
        tables = random(HEADS, 7).requires_grad_()
        results = []
        for attend in (compiled, attention_varlen):
            output = attend(*leaves, [OffsetBias(tables, -3)], cu_seqlens_q=seqlens(lengths), causal=True)
            results.append([output, *torch.autograd.grad(output.sin().sum(), [*leaves, tables])])
        torch.testing.assert_close(*results, rtol=0, atol=1e-11)


def rows(n=4, heads=2, dim=3):
    return torch.ones(n, heads, dim, device=DEVICE)


WRONG = {
    "begins elsewhere": (
        {"cu_seqlens_q": seqlens([4]) + 1},
        "cu_seqlens_q: expected non-decreasing integers from 0 to 4 (the rows of query), got [1, 5]",
    ),
    "falls": ({"cu_seqlens_q": seqlens([3, -1, 2])}, "cu_seqlens_q: expected non-decreasing integers from 0 to 4"),
    "ends early": ({"cu_seqlens_q": seqlens([1, 2])}, "cu_seqlens_q: expected non-decreasing integers from 0 to 4"),
    "two axes": (
        {"cu_seqlens_q": seqlens([2, 2])[None]},
        "cu_seqlens_q: expected shape (number of sequences + 1), got (1, 3)",
    ),
    "fractions": (
        {"cu_seqlens_q": seqlens([4]).float()},
        "cu_seqlens_q: expected an integer tensor, got torch.float32",
    ),
    "other numbers of sequences": (
        {"cu_seqlens_k": seqlens([1, 1, 2])},
        "cu_seqlens_k: expected 3 numbers as cu_seqlens_q has, got 4",
    ),
    "unequal without lengths of keys": (
        {"key": rows(5), "value": rows(5)},
        "cu_seqlens_k: needed, because query has 4 rows and value has 5",
    ),
    "key mask": ({"key_mask": torch.ones(1, 4).bool()}, "key_mask: not an argument of attention_varlen; sequences"),
    "torch's name": ({"cu_seq_k": seqlens([4])}, "cu_seq_k: not an argument of attention_varlen; write cu_seqlens_k="),
    "flash attention's length": ({"max_seqlen_q": 4}, "max_seqlen_q: not an argument of attention_varlen; leave it"),
    "affine positions": (
        {"query_positions": whereformer.Positions(0, 1, 4)},
        "query_positions: expected a tensor of numbers, got Positions",
    ),
    "too few positions": ({"key_positions": torch.arange(3)}, "key_positions: expected shape (total_k 4), got (3,)"),
    "a batch": ({"query": rows()[None]}, "query: expected shape (total tokens, heads, head_dim), got (1, 4, 2, 3)"),
    "other keys": ({"key": rows(dim=5)}, "key: expected shape (batch 1, heads 2, n_k 4, head_dim 3), got (1, 2, 4, 5)"),
    "other heads": ({"query": rows(heads=3)}, "query: expected the value's 2 heads or a multiple, got 3"),
    "a table with steps": (
        {"terms": [OffsetBias(torch.ones(2, 3), 0, 2)]},
        "OffsetBias.step: expected 1 for sequences without padding, got 2",
    ),
    "an unknown option": ({"sink_tokens": 0.1}, "sink_tokens: not an argument of attention_varlen"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_are_one_clear_line(wrong):
    changes, message = WRONG[wrong]
    arguments = {"query": rows(), "key": rows(), "value": rows(), "terms": (), "cu_seqlens_q": seqlens([2, 2])}
    with pytest.raises((TypeError, ValueError)) as error:
        attention_varlen(**{**arguments, **changes})
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_triton_knows_positions_where_offsets_are_those_of_the_row():
    """Its kernels mask pairs and load positions only where they must."""
    rows, lengths = [torch.zeros(20, 2, 16)] * 3, torch.tensor([0, 7, 20], dtype=torch.int32)
    positions = torch.arange(20)

    def known(cu_seqlens_k=None, affine=True, **options):
        *_, call_options = varlen.pack_sequences(*rows, (), lengths, cu_seqlens_k, options, affine)
        assert torch.equal(call_options["query_documents"], (positions >= 7).long().unsqueeze(0))
        return "key_positions" not in call_options

    assert known()
    assert known(lengths, window=3)
    assert not known(affine=False)
    assert not known(torch.tensor([0, 9, 20], dtype=torch.int32))
    assert not known(query_positions=positions)
