"""Shared by the tests of backends: terms by name, a call with all its gradients, and their expected accuracy."""

import contextlib
import os
from dataclasses import replace

import pytest
import torch

from tests.kernels.rounding import allowed_errors
from whereformer import (
    DenseBias,
    DistanceDecay,
    FactorPair,
    OffsetBias,
    OffsetKeys,
    OffsetQueries,
    OffsetValues,
    attention,
)
from whereformer.kernels import native
from whereformer.kernels.call import GRADIENTS
from whereformer.kernels.make_call import make_call

CPU = torch.device("cpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, DIM = 2, 2, 16
SEED = 3  # of dropout


def no_native():
    """Why the compiled kernel is missing here; None if it is not."""
    rows = torch.zeros(1, 1, 1, DIM)
    return native.backend.unsupported_reason(make_call(rows, rows, rows), CPU)


def need_native():
    """Skip a test where the compiled kernel is missing, or would not be what is tested."""
    if DEVICE != "cpu":
        pytest.skip("needs a CPU")
    if missing := no_native():
        pytest.skip(f"the compiled kernel {missing}")


def need_triton():
    """Skip a test where Triton's kernels can't run; without a GPU, its interpreter runs them."""
    pytest.importorskip("triton")
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a CUDA device or TRITON_INTERPRET=1")
    from tests.kernels import interpreter

    interpreter.mend()


NATIVE = pytest.param("native", marks=pytest.mark.skipif(no_native() is not None, reason=f"native {no_native()}"))
FAST = ("blockwise", NATIVE)
"""The CPU's own fast backends, to parametrize tests with."""


def content(n_q, n_k, head_dim=DIM, value_dim=None, batch=BATCH, key_heads=HEADS):
    value_dim = head_dim if value_dim is None else value_dim
    shapes = (batch, HEADS, n_q, head_dim), (batch, key_heads, n_k, head_dim), (batch, key_heads, n_k, value_dim)
    return [random(*shape) for shape in shapes]


def random(*shape):
    return torch.randn(shape, dtype=torch.float64, device=DEVICE)


def with_factors(kind, first):
    """What builds an ``OffsetKeys`` or ``OffsetQueries`` of its table and factors."""
    return lambda table, factors: kind(table, first, 1, factors)


# A term as its class, its tensors and its first offset, so that tests can put other tensors in their place.
TERMS = {
    "bias": lambda n_q, n_k: (OffsetBias, [random(HEADS, 9)], -4),
    "bias_of_one_number": lambda n_q, n_k: (OffsetBias, [random(HEADS, 1)], 3),
    "bias_of_two_numbers": lambda n_q, n_k: (OffsetBias, [random(HEADS, 2)], -1),
    "bias_left_of_all_offsets": lambda n_q, n_k: (OffsetBias, [random(HEADS, 7)], -90),
    "bias_right_of_all_offsets": lambda n_q, n_k: (OffsetBias, [random(HEADS, 7)], 90),
    "bias_with_a_tail_on_the_left_alone": lambda n_q, n_k: (OffsetBias, [random(HEADS, 60)], -3),
    "bias_for_all_offsets": lambda n_q, n_k: (OffsetBias, [random(HEADS, n_q + n_k)], -n_q),
    "keys": lambda n_q, n_k: (OffsetKeys, [random(1, 9, DIM)], -5),
    "keys_per_head": lambda n_q, n_k: (OffsetKeys, [random(HEADS, 2, DIM)], 0),
    "keys_with_factors": lambda n_q, n_k: (
        with_factors(OffsetKeys, -7),
        [random(HEADS, 9, 5), random(BATCH, HEADS, n_q, 5)],
        None,
    ),
    "keys_with_a_gate": lambda n_q, n_k: (
        with_factors(OffsetKeys, -20),
        [random(1, 41, 1), random(1, HEADS, n_q, 1)],
        None,
    ),
    "queries": lambda n_q, n_k: (OffsetQueries, [random(1, 9, DIM)], -5),
    "queries_per_head": lambda n_q, n_k: (OffsetQueries, [random(HEADS, 2, DIM)], 0),
    "queries_for_all_offsets": lambda n_q, n_k: (OffsetQueries, [random(1, n_q + n_k, DIM)], -n_q),
    "queries_with_factors": lambda n_q, n_k: (
        with_factors(OffsetQueries, -30),
        [random(HEADS, 50, 17), random(BATCH, HEADS, n_k, 17)],
        None,
    ),
    "queries_with_a_gate": lambda n_q, n_k: (
        with_factors(OffsetQueries, 3),
        [random(1, 6, 1), random(1, HEADS, n_k, 1)],
        None,
    ),
    "decay": lambda n_q, n_k: (DistanceDecay, [random(BATCH, HEADS, n_q), random(BATCH, HEADS, n_k)], None),
    "decay_of_all_rows": lambda n_q, n_k: (DistanceDecay, [random(1, HEADS, n_q), random(1, HEADS, n_k)], None),
    "values": lambda n_q, n_k: (OffsetValues, [random(1, 7, DIM)], -2),
    "values_per_head": lambda n_q, n_k: (OffsetValues, [random(HEADS, 20, DIM)], -9),
    "values_of_one_vector": lambda n_q, n_k: (OffsetValues, [random(1, 1, DIM)], 4),
    "factors": lambda n_q, n_k: (FactorPair, [random(BATCH, HEADS, n_q, 3), random(1, HEADS, n_k, 3)], None),
    "factors_of_all_rows": lambda n_q, n_k: (FactorPair, [random(1, HEADS, n_q, 17), random(1, HEADS, n_k, 17)], None),
    "dense": lambda n_q, n_k: (DenseBias, [random(BATCH, HEADS, n_q, n_k)], None),
    "dense_of_all_rows": lambda n_q, n_k: (DenseBias, [random(1, HEADS, n_q, n_k)], None),
}
REFUSED = {"native": (), "triton": ()}
"""The classes of terms that a backend does not compute: it has to refuse them, and their tests end there."""
EVERY_KIND = ("bias", "keys", "values", "factors", "dense_of_all_rows")
TABLES = ("bias", "keys", "values")
MIRRORED = ("bias", "keys_with_factors", "queries", "decay")
JOINED = ("keys", "keys_with_factors", "queries", "queries_with_factors", "decay", "decay_of_all_rows")


def terms_of(names, n_q, n_k):
    return [TERMS[name](n_q, n_k) for name in names]


def output_gradient(out):
    """A gradient that is neither constant nor random."""
    return (torch.arange(out.numel(), dtype=torch.float64, device=DEVICE) * 1.7).sin().view(out.shape)


def run(name, dtype, inputs, terms, options, only=None):
    """The output, the log-sum-exps if options ask for them, and all gradients, those of sinks last.

    With ``only``, the tensor of that number needs a gradient, and it is the only gradient.
    """
    leaves = [None if tensor is None else tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    built = []
    for kind, tensors, first in terms:
        parts = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
        leaves += parts
        built.append(kind(*parts) if first is None else kind(*parts, first))
    if options.get("sinks") is not None:
        leaves.append(options["sinks"].detach().to(dtype).requires_grad_())
        options = {**options, "sinks": leaves[-1]}
    if only is not None:
        for number, leaf in enumerate(leaves):
            leaf.requires_grad_(number == only)
    if any(isinstance(term, REFUSED.get(name, ())) for term in built):
        with pytest.raises(ValueError, match="does not support"):
            attention(*leaves[:3], built, **options, backend=name)
        pytest.skip(f"{name} refuses a term")
    torch.manual_seed(SEED)
    results = attention(*leaves[:3], built, **options, backend=name)
    results = results if options.get("return_lse") else (results,)
    # Where nothing is attended to, there is nothing to differentiate.
    finite = [result.masked_fill(result.isneginf(), 0.0) for result in results]
    d_results = [output_gradient(result).to(result.dtype) for result in finite]
    leaves = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    # The log of sums, for one, does not depend on values.
    pairs = [pair for pair in zip(finite, d_results, strict=True) if pair[0].requires_grad]
    finite, d_results = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(finite, leaves, d_results, materialize_grads=True)
    return [*(result.detach() for result in results), *gradients]


def with_log_sums(name, dtype, inputs, terms, sinks=None, **options):
    return run(name, dtype, inputs, terms, {**options, "sinks": sinks, "return_lse": True})


def call_of(inputs, terms, **options):
    """The call as backends get it, in float32, with the seed of its dropout."""
    built = [
        kind(*(tensor.float() for tensor in tensors), *(() if first is None else (first,)))
        for kind, tensors, first in terms
    ]
    call = make_call(*(tensor.float() for tensor in inputs), built, **options)
    return replace(call, seed=torch.tensor(5, device=DEVICE)) if call.dropout_p else call


def check_operators(operators, call, **opcheck):
    """Check what torch asks of the operators of a call and its gradients, and that they fill their outputs."""
    plain = call.arguments()
    leaves = [
        argument.clone().requires_grad_(argument.is_floating_point())
        if isinstance(argument, torch.Tensor)
        else argument
        for argument in plain
    ]
    torch.library.opcheck(operators.forward, leaves, **opcheck)
    with unwritten_memory_is_nan():
        output, forward_state, lse = operators.forward(*plain)
        needed = [getattr(call, name) is not None for name in GRADIENTS]
        d_lse = torch.ones_like(lse[1]) if call.wants_lse else None
        arguments = (output_gradient(output).to(output.dtype), d_lse, output, forward_state, needed, *plain)
        gradients = operators.backward(*arguments)
    assert not any(tensor.isnan().any() for tensor in (output, forward_state, lse, *gradients))
    torch.library.opcheck(operators.backward, arguments, **opcheck)


@contextlib.contextmanager
def unwritten_memory_is_nan():
    """As it is where algorithms have to be deterministic."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@torch.no_grad()
def error(actual, expected):
    """The error of a tensor, relative to its norm or to that of as many ones."""
    if expected.numel() == 0:
        return 0.0
    return float((actual.double() - expected).norm() / max(expected.norm(), expected.numel() ** 0.5))


@torch.no_grad()
def relative_error(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


def check(fast, inputs, terms=(), dtype=torch.float32, **options):
    """The same as float64 up to rounding, in every number of the output and of every gradient.

    Float64 gets the inputs as the dtype rounds them: what rounding them does to the output is no backend's error.
    """
    options = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    inputs = [None if tensor is None else tensor.to(dtype).double() for tensor in inputs]
    terms = [(kind, [tensor.to(dtype).double() for tensor in tensors], first) for kind, tensors, first in terms]
    expected = run("reference", torch.float64, inputs, terms, options)
    results = run(fast, dtype, inputs, terms, options)
    allowed = allowed_errors(inputs, terms, options, output_gradient(expected[0]), SEED, dtype)
    for index, (ours, theirs, bound) in enumerate(zip(results, expected, allowed, strict=True)):
        assert ours.dtype == dtype
        assert ours.isfinite().all()
        assert ours.shape == theirs.shape
        errors = (ours.double() - theirs).abs()
        excess = (errors / bound)[errors > bound]
        assert not len(excess), f"tensor {index}: {len(excess)} numbers off, by up to {excess.max():.1f} times too much"
    return results
