"""What the compiled kernel alone has to get right: many tiles, any width, far positions, and the process it runs in."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from tests.kernels.cases import EVERY_KIND, HEADS, JOINED, MIRRORED, check, content, need_native, run, terms_of
from whereformer import OffsetBias, OffsetKeys, OffsetQueries, OffsetValues, Positions, attention
from whereformer.kernels import native


@pytest.fixture(autouse=True)
def _native():
    need_native()


def vectors(head_dim, value_dim):
    """Terms with vectors of these widths."""
    return [
        (OffsetBias, [torch.randn(HEADS, 9, dtype=torch.float64)], -4),
        (OffsetKeys, [torch.randn(1, 9, head_dim, dtype=torch.float64)], -4),
        (OffsetValues, [torch.randn(HEADS, 9, value_dim, dtype=torch.float64)], -4),
        (OffsetQueries, [torch.randn(1, 9, head_dim, dtype=torch.float64)], -4),
    ]


OPTIONS = {
    "plain": lambda n_q, n_k: {},
    "causal": lambda n_q, n_k: {"causal": True},
    "window": lambda n_q, n_k: {"window": (150, 20)},
    "softcap": lambda n_q, n_k: {"softcap": 2.0, "causal": True},
    "dropout": lambda n_q, n_k: {"dropout_p": 0.2},
    "mask": lambda n_q, n_k: {"key_mask": torch.arange(n_k).expand(2, -1) % 7 > 0},
    "documents": lambda n_q, n_k: {
        "query_documents": (4 * torch.arange(n_q) // n_q).expand(2, -1),
        "key_documents": (torch.arange(n_k) // 300).expand(2, -1),
    },
    "listed": lambda n_q, n_k: {
        "query_positions": torch.arange(n_q).flip(0) * (2 * n_k // n_q),
        "key_positions": torch.arange(n_k) * 2,
        "causal": True,
    },
}
MANY_TILES = [(150, 1050), pytest.param((600, 1100), marks=pytest.mark.slow)]
"""A tile has 128 queries and 512 keys."""


KINDS = EVERY_KIND, MIRRORED, ("queries_for_all_offsets", "queries_with_factors"), JOINED


def a_third_of_the_cases(which):
    """All options with all kinds of terms, of which two thirds are slow tests."""
    cases = [
        pytest.param(options, kinds, marks=() if (row + column) % 3 == which else pytest.mark.slow)
        for row, options in enumerate(OPTIONS)
        for column, kinds in enumerate(KINDS)
    ]
    return pytest.mark.parametrize(("options", "kinds"), cases)


@pytest.mark.parametrize("lengths", MANY_TILES)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@a_third_of_the_cases(0)
def test_many_tiles(options, dtype, kinds, lengths, monkeypatch):
    """Sequences longer than a tile, of which the last is not full; memory that nobody has written is not read."""
    monkeypatch.setattr(native, "poisons", True)
    check("native", content(*lengths), terms_of(kinds, *lengths), dtype, **OPTIONS[options](*lengths))


FEW = [(1, 1), (3, 100), (2, 700), (1, 2100), pytest.param((8, 8300), marks=pytest.mark.slow)]
"""A tile has 512 keys, and parts of the keys have 1024 at least. Eight queries are few where keys are many."""


@pytest.mark.parametrize("lengths", FEW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@a_third_of_the_cases(1)
def test_few_queries(options, dtype, kinds, lengths, monkeypatch):
    """Their keys and values are read where they lie."""
    monkeypatch.setattr(native, "poisons", True)
    check("native", content(*lengths), terms_of(kinds, *lengths), dtype, **OPTIONS[options](*lengths))


@pytest.mark.parametrize(("n_q", "n_k"), [(1, 5), (2, 700), (1, 3000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_queries_of_heads_that_share_keys(n_q, n_k, dtype):
    positions = {"query_positions": Positions(n_k - n_q, 1, n_q), "key_positions": Positions(0, 1, n_k)}
    options = {"causal": True, **positions}
    terms = terms_of(("bias_for_all_offsets", "values_per_head"), n_q, n_k)
    check("native", content(n_q, n_k, key_heads=1), terms, dtype, **options)


def test_rows_of_few_queries_that_may_not_attend_are_zeros():
    """In all parts of the keys, in one alone, or in none."""
    query, key, value = (tensor.float() for tensor in content(1, 3000))
    masks = torch.zeros(3, 3000, dtype=torch.bool)
    masks[1, 2990:] = True
    output, lse = attention(
        *(tensor[:1].expand(3, -1, -1, -1) for tensor in (query, key, value)),
        key_mask=masks,
        return_lse=True,
        backend="native",
    )
    assert torch.equal(output[0], torch.zeros(HEADS, 1, 16))
    assert lse[0].isneginf().all()
    expected = attention(query[:1], key[:1, :, 2990:], value[:1, :, 2990:], backend="reference")
    torch.testing.assert_close(output[1:2], expected)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(0, 5), (1, 0), (1, 1), (17, 33), (33, 2), (300, 280)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_widths(head_dim, value_dim, dtype, monkeypatch):
    monkeypatch.setattr(native, "poisons", True)
    for n_q in (70, 2):
        check("native", content(n_q, 75, head_dim, value_dim), vectors(head_dim, value_dim), dtype)


@pytest.mark.parametrize("stride", [2, 17, 10**6, 2**40, 2**54])
@pytest.mark.parametrize("side", ["query_positions", "key_positions"])
def test_positions_with_any_step(side, stride):
    """Most tables are crossed by few of the rows, and the time does not grow with the step."""
    n = 140
    options = {"query_positions": Positions(0, 1, n), "key_positions": Positions(0, 1, n)}
    options[side] = Positions(-stride * 70, stride, n)
    check("native", content(n, n), vectors(16, 16), **options)


@pytest.mark.parametrize(("queries", "keys"), [(2**62 - 150, -(2**62)), (-(2**62), 2**62 - 150), (2**62 - 70,) * 2])
@pytest.mark.parametrize("listed", [False, True])
def test_far_positions(queries, keys, listed):
    """All offsets are int64, but sums and differences of them are not."""
    options = {"query_positions": Positions(queries, 1, 70), "key_positions": Positions(keys, 1, 70)}
    if listed:
        options = {name: positions.values() for name, positions in options.items()}
    check("native", content(70, 70), vectors(16, 16), **options)
    for window in (5, (2**63 - 2, 0), (2**62, None)):
        check("native", content(70, 70), window=window, **options)


@pytest.mark.parametrize(("scale", "softcap"), [(1e30, 1e-30), (1e-30, 1e3), (0.0, 1.0)])
def test_a_soft_cap_of_any_steepness(scale, softcap):
    check("native", content(20, 30), scale=scale, softcap=softcap)


def test_ids_that_do_not_exist_are_only_numbers():
    """Nothing is read at them."""
    far = torch.iinfo(torch.int64)
    ids = torch.tensor([[far.min, far.max, 0, -1, 7] * 14])
    inputs = content(70, 70, batch=1)
    check("native", inputs, query_documents=ids, key_documents=ids.flip(1))
    terms = vectors(16, 16)
    wild = run("native", torch.float32, inputs, terms, {"query_positions": ids, "key_positions": ids.flip(1)})
    assert all(tensor.isfinite().all() for tensor in wild)


def in_a_process(script):
    """Run a script in a process of its own, which must succeed."""
    script = "import torch\nfrom whereformer import OffsetBias, attention\n" + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_fork_computes_the_same():
    """Also after the parent has used threads, which the child does not have."""
    in_a_process("""
        import os
        torch.set_num_threads(4)
        # Large enough for the kernel's threads, and too small for torch's, which do not survive a fork.
        leaves = [torch.randn(1, 2, 150, 64, requires_grad=True) for _ in range(3)]

        def results():
            out = attention(*leaves, backend="native")
            with torch.no_grad():
                again = attention(*leaves, backend="native")
            return out, again, *torch.autograd.grad(out.sum(), leaves)

        wanted = results()
        child = os.fork()
        if child == 0:
            os._exit(0 if all(map(torch.equal, results(), wanted)) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert all(map(torch.equal, results(), wanted))
    """)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the system does not tell")
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="sanitizers keep what is freed")
def test_lengths_leave_nothing_in_memory():
    in_a_process("""
        def pages():
            return int(open("/proc/self/statm").read().split()[1])

        def call(n):
            leaves = [torch.randn(1, 1, n, 8, requires_grad=True) for _ in range(3)]
            terms = [OffsetBias(torch.randn(1, 9), -4)]
            attention(*leaves, terms, backend="native").sum().backward()
            with torch.no_grad():
                attention(*leaves, terms, backend="native")

        for n in range(1, 302, 10):
            call(n)
        before = pages()
        for n in range(1, 302):
            call(n)
        assert (pages() - before) * 4096 < 20e6
    """)


def in_plain_torch(query, key, value, key_table, query_table, value_table):
    """Attention with tables over the offsets from ``1 - n`` to ``n - 1``, pair by pair."""
    n = query.shape[2]
    columns = torch.arange(n) - torch.arange(n)[:, None] + n - 1
    scores = query @ key.mT + (query @ key_table.mT).gather(3, columns.expand(1, query.shape[1], n, n))
    scores = scores + (key @ query_table.mT).gather(3, columns.mT.expand_as(scores)).mT
    weights = (scores * query.shape[3] ** -0.5).softmax(-1)
    return weights @ value + torch.einsum("bhij,hijd->bhid", weights, value_table[:, columns])


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("width", [48, 64])
def test_tables_are_as_exact_as_in_plain_torch(width, dtypes):
    n, draw = 70, torch.Generator().manual_seed(0)
    sizes = [(1, 2, n, width)] * 3 + [(2, 2 * n - 1, width)] * 3
    inputs = [torch.randn(size, generator=draw).mul(0.5).bfloat16() for size in sizes]

    def results(compute, dtype, table_dtype):
        dtypes = [getattr(torch, dtype)] * 3 + [getattr(torch, table_dtype)] * 3
        leaves = [tensor.to(kind, copy=True).requires_grad_() for tensor, kind in zip(inputs, dtypes, strict=True)]
        out = compute(*leaves)
        return [out, *torch.autograd.grad(out, leaves, inputs[0].to(dtypes[0]))]

    def ours(query, key, value, *tables):
        kinds = OffsetKeys, OffsetQueries, OffsetValues
        terms = [kind(table, 1 - n) for kind, table in zip(kinds, tables, strict=True)]
        return attention(query, key, value, terms, backend="native")

    exact, plain = (results(in_plain_torch, dtype, dtype) for dtype in ("float64", "bfloat16"))
    for result, expected, rounded in zip(results(ours, *dtypes), exact, plain, strict=True):
        assert (result - expected).norm() < 1.5 * (rounded - expected).norm()
