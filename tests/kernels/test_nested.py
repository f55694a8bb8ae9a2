"""``attention`` of nested tensors: the same as torch's own, and as that of each sequence by itself."""

import pytest
import torch
from torch.nn import functional

import whereformer.kernels.varlen
from tests.kernels.cases import DEVICE, HEADS, random
from whereformer import OffsetBias, attention, attention_weights, explain, merge_attention
from whereformer.kernels import native

DIM = 8
LENGTHS = [3, 6, 1, 4]


def nested(lengths=LENGTHS, heads=HEADS, like=None):
    """A nested tensor (batch, heads, ragged, DIM), whose lengths torch knows to be those of another."""
    if like is not None:
        return torch.nested.nested_tensor_from_jagged(random(like.values().shape[1], heads, DIM), like.offsets())
    return torch.nested.nested_tensor([random(n, heads, DIM) for n in lengths], layout=torch.jagged)


def content(of_queries=LENGTHS, of_keys=None, key_heads=HEADS):
    query = nested(of_queries)
    key = nested(of_queries if of_keys is None else of_keys, key_heads)
    value = torch.nested.nested_tensor_from_jagged(random(*key.values().shape), key.offsets())
    if of_keys is None:
        query = torch.nested.nested_tensor_from_jagged(query.values(), key.offsets())
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    return leaves, [leaf.transpose(1, 2) for leaf in leaves]


def gradients(output, leaves):
    rows = output.transpose(1, 2).values()
    loss = (rows * torch.arange(rows.numel(), device=DEVICE).view(rows.shape).sin()).sum()
    return [gradient.values() for gradient in torch.autograd.grad(loss, leaves)]


def one_by_one(tensors, *terms, **options):
    """The outputs of the sequences and their log-sum-exps, one after another."""
    parts = [
        attention(*(rows[None] for rows in sequence), terms, return_lse=True, backend="reference", **options)
        for sequence in zip(*(tensor.unbind() for tensor in tensors), strict=True)
    ]
    return [torch.cat(found, 2)[0].transpose(0, 1) for found in zip(*parts, strict=True)]


PROTOTYPE = "ignore:The PyTorch API of nested tensors is in prototype stage"


# Torch's own makes strided ones, of which it warns.
@pytest.mark.filterwarnings(PROTOTYPE)
@pytest.mark.parametrize("lengths", [LENGTHS, [4, 4]])
def test_the_same_as_torchs_own(lengths):
    leaves, tensors = content(lengths)
    ours = attention(*tensors)
    theirs = functional.scaled_dot_product_attention(*tensors)
    assert (ours.is_nested, ours.layout, ours.shape) == (True, torch.jagged, theirs.shape)
    torch.testing.assert_close(ours.values(), theirs.values(), rtol=0, atol=1e-11)
    for mine, other in zip(gradients(ours, leaves), gradients(theirs, leaves), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("options", [{}, {"window": 1}, {"causal": True, "softcap": 2.0}])
@pytest.mark.parametrize("of_keys", [None, [5, 6, 3, 4]])
@pytest.mark.parametrize("key_heads", [HEADS, 1])
def test_the_same_as_one_by_one(key_heads, of_keys, options):
    _, tensors = content(of_keys=of_keys, key_heads=key_heads)
    table = random(HEADS, 7).requires_grad_()
    ours, lse = attention(*tensors, [OffsetBias(table, -3)], return_lse=True, **options)
    output, sums = one_by_one(tensors, OffsetBias(table, -3), **options)
    torch.testing.assert_close(ours.transpose(1, 2).values(), output, rtol=0, atol=1e-11)
    torch.testing.assert_close(lse.transpose(1, 2).values(), sums, rtol=0, atol=1e-11)
    found, expected = (
        torch.autograd.grad(rows.sin().sum(), table)[0] for rows in (ours.transpose(1, 2).values(), output)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def test_the_output_joins_the_query():
    """It has the query's lengths, as torch knows them, so a residual connection is a plain sum."""
    _, (query, key, value) = content(of_keys=[5, 6, 3, 4])
    output, lse = attention(query, key, value, return_lse=True)
    torch.testing.assert_close((output + query).values(), output.values() + query.values())
    assert output.shape == query.shape
    assert lse.shape == query.shape[:3]


def test_lengths_may_be_equal_without_torch_knowing():
    key, value = (nested().transpose(1, 2) for _ in range(2))
    assert key.shape[2] != value.shape[2]
    query = nested().transpose(1, 2)
    output, _ = one_by_one([query, key, value])
    torch.testing.assert_close(attention(query, key, value).transpose(1, 2).values(), output, rtol=0, atol=1e-11)


def test_heads_first_in_memory():
    """Sequences of (heads, n, DIM) can be nested as they are."""
    sequences = [[random(HEADS, n, DIM) for n in LENGTHS] for _ in range(3)]
    tensors = [torch.nested.nested_tensor([*each], layout=torch.jagged) for each in sequences]
    output, _ = one_by_one(tensors)
    torch.testing.assert_close(attention(*tensors).transpose(1, 2).values(), output, rtol=0, atol=1e-11)


@pytest.mark.slow
def test_compiled():
    torch.compiler.reset()

    def attend(*leaves):
        return attention(*(leaf.transpose(1, 2) for leaf in leaves), causal=True)

    leaves, _ = content()
    found, expected = torch.compile(attend, fullgraph=True, backend="aot_eager")(*leaves), attend(*leaves)
    torch.testing.assert_close(found.values(), expected.values(), rtol=0, atol=1e-11)
    for ours, theirs in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def ragged(*lengths, **options):
    return nested([*lengths], **options).transpose(1, 2)


def with_gaps():
    rows = torch.nested.nested_tensor_from_jagged(
        random(9, HEADS, DIM), torch.tensor([0, 3, 9], device=DEVICE), lengths=torch.tensor([2, 4], device=DEVICE)
    )
    return rows.transpose(1, 2)


WRONG = {
    "a dense value": (
        {"value": random(2, HEADS, 3, DIM)},
        "value: expected a nested tensor like the others, got a dense tensor",
    ),
    "a dense query": (
        {"query": random(2, HEADS, 3, DIM)},
        "query: expected a nested tensor like the others, got a dense tensor",
    ),
    "no key": ({"key": None}, "key: expected a nested tensor like the others, got NoneType"),
    "other lengths of values": (
        {"value": ragged(2, 3)},
        "value: expected sequences as long as those of key, got other lengths",
    ),
    "other batches": ({"query": ragged(3, 2, 1)}, "key: expected a batch of 3 as in query, got 2"),
    "heads last": (
        {"query": nested([3, 2])},
        "query: expected (batch, heads, ragged length, head_dim), got (2, j",
    ),
    "other heads of queries": (
        {"query": ragged(3, 2, heads=HEADS + 1)},
        f"query: expected {HEADS} heads or a multiple as in value, got {HEADS + 1}",
    ),
    "other heads of keys": (
        {"key": ragged(3, 2, heads=1)},
        f"key: expected {HEADS} heads of {DIM} numbers as in value and query, got 1 of {DIM}",
    ),
    "gaps": ({"query": with_gaps()}, "query: expected a nested tensor without gaps between sequences; call"),
    "a key mask": ({"key_mask": torch.ones(2, 3, dtype=torch.bool)}, "key_mask: sequences without padding"),
    "documents": ({"query_documents": torch.ones(2, 3).long()}, "query_documents: not taken here"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_are_one_clear_line(wrong):
    changes, message = WRONG[wrong]
    given = dict(zip(("query", "key", "value"), (ragged(3, 2) for _ in range(3)), strict=True))
    with pytest.raises((TypeError, ValueError)) as error:
        attention(**{**given, **changes})
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_what_the_error_about_gaps_says_to_do_works():
    query = with_gaps().transpose(1, 2).contiguous().transpose(1, 2)
    assert attention(query, ragged(3, 2), ragged(3, 2)).shape[0] == 2


@pytest.mark.filterwarnings(PROTOTYPE)
def test_the_strided_layout_is_refused():
    strided = torch.nested.nested_tensor([random(HEADS, 3, DIM), random(HEADS, 2, DIM)], layout=torch.strided)
    with pytest.raises(
        ValueError, match=r"^query: expected a nested tensor with layout=torch.jagged, got torch.strided$"
    ):
        attention(strided, strided, strided)


def test_weights_say_what_to_call_instead():
    tensors = [ragged(3, 2) for _ in range(3)]
    message = (
        r"^query, key, value: expected dense tensors, got nested ones; attention_weights takes one of their sequences"
    )
    with pytest.raises(TypeError, match=message):
        attention_weights(*tensors)
    assert attention_weights(*(tensor.unbind()[1][None] for tensor in tensors)).shape == (1, HEADS, 2, 2)


def test_a_choice_is_that_of_the_call_inside(monkeypatch):
    """Lengths that differ make a packed row; equal ones make a batch."""
    seen = []
    unavailable = native.unavailable
    monkeypatch.setattr(native, "unavailable", lambda call, device: seen.append(call) or unavailable(call, device))
    chosen = []
    for lengths in ([200, 193], [200, 200]):
        tensors = [ragged(*lengths) for _ in range(3)]
        rows = [tensor.transpose(1, 2).values() for tensor in tensors]
        starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
        given = whereformer.kernels.varlen.as_batch(*rows, (), starts, None, {"causal": True})
        chosen.append(explain(*tensors, causal=True))
        assert chosen[-1] == explain(given.query, given.key, given.value, **given.options)
    assert {call.is_packed for call in seen} == {False, True}


def test_parts_that_are_nested_are_refused():
    output, lse = attention(*(ragged(3, 2) for _ in range(3)), return_lse=True)
    with pytest.raises(TypeError, match=r"^outputs: expected dense tensors, got a nested one$"):
        merge_attention([output, output], [lse, lse])


def test_explain_checks_nested_tensors_too():
    with pytest.raises(ValueError, match=r"^key_mask: sequences without padding"):
        explain(*(ragged(3, 2) for _ in range(3)), key_mask=torch.ones(2, 3, dtype=torch.bool))
