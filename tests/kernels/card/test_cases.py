"""Calls and their gradients by replays on the card: their numbers, and the parameters of every launch."""

import importlib

import pytest
import torch

from tests.kernels import fuzz
from tests.kernels.card import card
from tests.kernels.cases import (
    BATCH,
    DIM,
    EVERY_KIND,
    HEADS,
    JOINED,
    MIRRORED,
    check,
    content,
    random,
    terms_of,
    with_log_sums,
)
from whereformer import OffsetBias, OffsetKeys, OffsetQueries, OffsetValues, Positions

arguments, plan = (importlib.import_module(f"whereformer.kernels.triton.{name}") for name in ("arguments", "plan"))

N_Q, N_K = 70, 90


def bools(*size):
    return torch.rand(size) > 0.3


def ids(*size):
    return torch.randint(0, 3, size)


def shaw(width):
    """Tables whose offsets are compiled into the kernels."""
    return [(OffsetKeys, [random(1, 33, width)], -16), (OffsetValues, [random(1, 33, width)], -16)]


# The terms, by their names or as they are; how the content differs; the dtype; and options that have tensors.
CASES = {
    "none": ([], {}, torch.bfloat16, dict),
    "none, of everything": (
        [],
        {"key_heads": 1},
        torch.float32,
        lambda: {
            "key_mask": bools(BATCH, N_K),
            "query_documents": ids(BATCH, N_Q),
            "key_documents": ids(BATCH, N_K),
            "dropout_p": 0.7,
            "causal": True,
            "softcap": 2.0,
        },
    ),
    "bias": (["bias"], {}, torch.float32, dict),
    "bias for all offsets": (["bias_for_all_offsets"], {"head_dim": 64}, torch.bfloat16, lambda: {"causal": True}),
    "bias at positions": (
        ["bias", "values"],
        {},
        torch.float32,
        lambda: {
            "query_positions": torch.randint(0, 40, (N_Q,)),
            "key_positions": torch.randint(0, 40, (BATCH, N_K)),
            "causal": True,
        },
    ),
    "bias by strides": (["bias"], {}, torch.float16, lambda: {"query_positions": Positions(-1, 2, N_Q)}),
    "vectors": (shaw, {"head_dim": 40}, torch.bfloat16, lambda: {"window": (40, 7)}),
    "vectors per head": (["keys_per_head", "queries_per_head", "values_per_head"], {}, torch.float32, dict),
    "every kind": (EVERY_KIND, {}, torch.bfloat16, lambda: {"dropout_p": 0.2}),
    "mirrored": (MIRRORED, {}, torch.float16, lambda: {"key_mask": bools(BATCH, N_K)}),
    "joined": (JOINED, {}, torch.float32, lambda: {"scale": -0.3}),
    "factors": (["factors_of_all_rows", "dense"], {"head_dim": 17, "value_dim": 33}, torch.float32, dict),
    "without content": (["bias"], None, torch.float32, dict),
    "no key attends": ([], {}, torch.float32, lambda: {"key_mask": torch.zeros(BATCH, N_K, dtype=torch.bool)}),
}


def run_twice(records, run):
    """Run a call with other numbers; the second time by replays, with the parameters that Triton passes by itself."""
    launches = []
    for _ in range(2):
        del card.launches[:]
        run()
        launches.append(list(card.launches))
    assert records == [True, True], "a forward and a backward, recorded once"
    compare(*launches)


def compare(recorded, replayed):
    """Compare launches parameter by parameter. Only addresses may differ, and the same ones in the same way."""
    moved = {}
    for ours, theirs in zip(replayed, recorded, strict=True):
        assert (ours.name, ours.grid, ours.stream) == (theirs.name, theirs.grid, theirs.stream)
        assert ours.kernel.metadata.enable_fp_fusion
        addresses = ours.addresses()
        assert ours.numbers.keys() == theirs.numbers.keys()
        for path, number in theirs.numbers.items():
            # Tensors without numbers have no address, except in replays, where they are parts of others.
            expected = moved.setdefault(number, ours.numbers[path]) if path in addresses and number else number
            assert ours.numbers[path] == expected or (path in addresses and not number), (ours.name, path)


@pytest.mark.parametrize("case", CASES)
def test_plans_compute_what_was_recorded(case, records):
    terms, sizes, dtype, options = CASES[case]

    def run():
        inputs = content(N_Q, N_K, **(sizes or {}))
        if sizes is None:
            inputs[:2] = None, None
        built = terms(sizes["head_dim"]) if callable(terms) else terms_of(terms, N_Q, N_K)
        check("triton", inputs, built, dtype, **options())

    run_twice(records, run)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("terms", "dtype", "options"),
    [
        (["bias_for_all_offsets"], torch.bfloat16, {"causal": True}),
        (["bias"], torch.float32, {"window": (40, 7)}),
        (["keys", "values"], torch.bfloat16, {}),
        (["queries", "dense_of_all_rows"], torch.bfloat16, {}),
    ],
    ids=str,
)
def test_tiles_of_every_gpu(capability, terms, dtype, options, records):
    """Several of them, each GPU's of other sizes."""
    card.set_capability(capability)
    try:
        run_twice(
            records, lambda: check("triton", content(140, 150, batch=1), terms_of(terms, 140, 150), dtype, **options)
        )
        assert {launch.kernel.metadata.target.arch for launch in card.launches} == {capability}
    finally:
        card.set_capability(90)


@pytest.mark.parametrize("terms", [("bias",), ("keys", "queries")], ids=str)
def test_sinks_and_log_sums(terms, records):
    def run():
        call, options = (content(N_Q, N_K), terms_of(terms, N_Q, N_K), random(HEADS)), {"window": (9, 3)}
        results, expected = (
            with_log_sums(name, dtype, *call, **options)
            for name, dtype in (("triton", torch.float32), ("reference", torch.float64))
        )
        for ours, theirs in zip(results, expected, strict=True):
            torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-4)

    run_twice(records, run)


def test_memory_of_large_calls(records, monkeypatch):
    """Scratch memory that is freed where it is last used, as only large calls do."""
    monkeypatch.setattr(plan, "_SMALL", 0)
    run_twice(records, lambda: check("triton", content(20, 20), terms_of((*EVERY_KIND, "queries"), 20, 20)))


@pytest.mark.parametrize("explicit", [False, True])
def test_long_tables_go_in_parts(explicit, records, monkeypatch):
    monkeypatch.setattr(arguments, "MAX_PRODUCTS_PER_QUERY", 64)
    monkeypatch.setattr(arguments, "MIN_PART_ROWS", 20)

    def run():
        terms = [(OffsetKeys, [random(1, 140, DIM)], -40), (OffsetQueries, [random(HEADS, 140, DIM)], -35)]
        terms += [(OffsetBias, [random(HEADS, 140)], -70), (OffsetValues, [random(1, 140, DIM)], -30)]
        terms += terms_of(["factors", "dense_of_all_rows", "decay", "decay_of_all_rows"], 37, 30)
        options = {"key_mask": bools(BATCH, 30)}
        if explicit:
            options = {"query_documents": ids(BATCH, 37), "key_documents": ids(BATCH, 30)}
            options["query_positions"] = torch.randint(0, 37, (37,))
        check("triton", content(37, 30), terms, causal=True, dropout_p=0.2, **options)

    run_twice(records, run)


@pytest.mark.parametrize("seed", range(20))
def test_random_calls(seed, records, monkeypatch):
    """A replay is compared with the oracle, and bit by bit with the call that was recorded, whose tensors are NaN."""
    compute = fuzz.results

    def replay(built, backend):
        recorded, count = compute(built, backend), len(records)
        for tensor in (*built.leaves.values(), built.value, built.query, built.key):
            if tensor is not None:
                tensor.untyped_storage().fill_(0xFF)
        replayed = compute(fuzz.Built(built.case), backend)
        assert all(records), "not every call became a function"
        assert len(records) == count, "a replay was not used"
        for name, tensor in recorded.items():
            assert torch.equal(tensor, replayed[name]), name
        return replayed

    monkeypatch.setattr(fuzz, "results", replay)
    assert fuzz.report(seed, "triton") == ""
