"""What is special about ``backend="blockwise"``: its memory, its pieces and its operator."""

import contextlib
import importlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.cases import (
    BATCH,
    EVERY_KIND,
    HEADS,
    TABLES,
    check,
    content,
    error,
    output_gradient,
    random,
    run,
    terms_of,
)
from tests.onednn import need_onednn, without_onednn
from whereformer import DenseBias, OffsetBias, OffsetKeys, OffsetValues, Positions, attention
from whereformer.kernels import tuning
from whereformer.kernels.call import make_call
from whereformer.kernels.cpu.pieces import split
from whereformer.kernels.cpu.plan import plans_of
from whereformer.kernels.problem import GRADIENTS, Problem
from whereformer.runs.memory import peak_memory

blockwise = importlib.import_module("whereformer.kernels.cpu.blockwise")
matmul = importlib.import_module("whereformer.kernels.cpu.matmul")
workspace = importlib.import_module("whereformer.kernels.cpu.workspace")


# --- memory


def problem(length, dim=8, **tables):
    """A problem of one head; ``tables`` are fields of ``Problem``."""
    query, key, value = torch.randn(3, 1, 1, length, dim).unbind()
    fields = dict.fromkeys(Problem.__dataclass_fields__)
    fields |= {"query": query, "key": key, "value": value, "n_q": length, "first": [-length, -4, -4]}
    fields |= {"affine": [0, 1, 0, 1], "scale": 1.0, "dropout_p": 0.0, "wants_lse": False, "keeps": "nothing"}
    fields["deterministic"] = True
    return Problem(**fields | tables)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bias", "keys and values"])
def test_memory_grows_with_the_length_and_not_with_its_square(kind, monkeypatch):
    monkeypatch.setattr(tuning, "KEPT_BYTES", -1)
    workspace.Workspace(torch.device("cpu")).close()
    peaks = []
    for length in (4096, 8192, 16384):
        tables = {"bias": torch.randn(1, 2 * length)} if kind == "bias" else {"key_table": torch.randn(1, 9, 8)}
        if kind != "bias":
            tables["value_table"] = torch.randn(1, 9, 8)
        given = problem(length, **tables)
        needed = [getattr(given, name) is not None for name in GRADIENTS]

        def train(given=given, needed=needed):
            output, _, _ = blockwise.forward(given)
            blockwise.backward(given, torch.ones_like(output), None, output, needed)

        # As many rows in a tile at every length
        with tuning.use(tile_scores=1):
            peaks.append(peak_memory(train, torch.device("cpu")))
    # Twice the length adds as much again as half of it did, or less: tiles are a fixed share.
    assert peaks[2] - peaks[1] <= 2.1 * (peaks[1] - peaks[0]) + 2**16
    assert peaks[2] < 16384**2 / 8


def test_memory_that_is_kept_stays_small():
    for length in (600, 3000):
        table = torch.randn(2, 2 * length - 1, requires_grad=True)
        inputs = torch.randn(3, 1, 2, length, 64).unbind()
        attention(*inputs, [OffsetBias(table, 1 - length)], backend="blockwise").sum().backward()
        kept = getattr(workspace.Workspace._kept, "cpu", [])
        assert sum(memory.numel() for memory in kept) <= tuning.KEPT_BYTES


def test_memory_kept_from_inference_serves_training():
    workspace.Workspace._kept.cpu = []
    inputs, terms = content(70, 70), terms_of(TABLES, 70, 70)
    with torch.inference_mode():
        attention(*inputs, [OffsetBias(random(HEADS, 5), -2)], backend="blockwise")
    check("blockwise", inputs, terms)


@pytest.mark.parametrize("tiles", [{}, {"kept_scores": 0}, {"kept_scores": 0, "tile_scores": 1, "tile_rows": 7}])
@pytest.mark.parametrize("terms", [EVERY_KIND, ("bias",), ()], ids=str)
def test_memory_may_hold_anything_when_it_is_taken(terms, tiles, monkeypatch):
    take = workspace.Workspace.take
    monkeypatch.setattr(workspace.Workspace, "take", lambda self, size, dtype: take(self, size, dtype).fill_(torch.nan))
    with tuning.use(band_share=1e9, band_rows=5, **tiles):
        check("blockwise", content(33, 40), terms_of(terms, 33, 40), causal=len(terms) != 1)


def test_what_is_taken_is_free_only_after_its_scope():
    memory = workspace.Workspace(torch.device("cpu"))
    outer = memory.take((3,), torch.float32)
    with memory.scope():
        inner = memory.take((3,), torch.bfloat16)
        assert inner.data_ptr() != outer.data_ptr()
    assert memory.take((2,), torch.float64).data_ptr() not in (0, outer.data_ptr())


# --- pieces


def pieces_of(batch, n_q, n_k, key_mask=None, documents=None, query_positions=None, key_positions=None):
    query = Positions(0, 1, n_q) if query_positions is None else query_positions
    key = Positions(0, 1, n_k) if key_positions is None else key_positions
    return split(batch, query, key, key_mask, documents, documents)


def test_a_batch_without_gaps_is_one_piece():
    [piece] = pieces_of(5, 7, 9, torch.ones(5, 9, dtype=torch.bool))
    assert (piece.batch, piece.queries, piece.keys, piece.key_mask) == (range(5), range(7), range(9), None)


def test_padding_is_left_out_and_equal_lengths_stay_together():
    mask = torch.arange(9) < torch.tensor([9, 4, 4, 0, 1]).unsqueeze(1)
    pieces = pieces_of(5, 9, 9, mask)
    assert [(piece.batch, piece.keys) for piece in pieces] == [
        (range(1), range(9)),
        (range(1, 3), range(4)),
        (range(4, 5), range(1)),
    ]
    assert all(piece.key_mask is None for piece in pieces)


def test_an_item_without_keys_is_not_swallowed_by_its_neighbors():
    mask = torch.tensor([[True, True], [False, False], [True, True]])
    assert [piece.batch for piece in pieces_of(3, 2, 2, mask)] == [range(1), range(2, 3)]
    check("blockwise", content(5, 2, batch=3), [(OffsetBias, [random(HEADS, 3)], -1)], key_mask=mask)


def test_padding_on_the_left_keeps_the_positions():
    [piece] = pieces_of(1, 6, 6, torch.tensor([[False, False, True, True, True, False]]))
    assert (piece.keys, piece.key_positions, piece.key_mask) == (range(2, 5), Positions(2, 1, 3), None)


def test_gaps_between_real_keys_stay_a_mask():
    [piece] = pieces_of(1, 4, 4, torch.tensor([[True, False, True, False]]))
    assert piece.keys == range(3)
    assert piece.key_mask.tolist() == [[True, False, True]]


def test_each_document_is_a_piece_with_affine_positions():
    documents = torch.tensor([[3, 3, 3, 8, 8]])
    ids = torch.tensor([0, 1, 2, 0, 1])
    first, second = pieces_of(1, 5, 5, documents=documents, query_positions=ids, key_positions=ids)
    assert (first.queries, first.keys, first.query_positions) == (range(3), range(3), Positions(0, 1, 3))
    assert (second.queries, second.keys, second.key_positions) == (range(3, 5), range(3, 5), Positions(0, 1, 2))


def test_a_document_in_two_places_stays_masked():
    [piece] = pieces_of(1, 3, 3, documents=torch.tensor([[1, 2, 1]]))
    assert piece.query_documents.tolist() == [[1, 2, 1]]


# --- sizes at the edge


@pytest.mark.parametrize(("n_q", "n_k"), [(0, 3), (3, 0), (0, 0)])
def test_documents_of_nothing(n_q, n_k):
    documents = [torch.zeros(BATCH, n, dtype=torch.long) for n in (n_q, n_k)]
    check("blockwise", content(n_q, n_k), query_documents=documents[0], key_documents=documents[1])


def test_no_heads():
    tensors = [torch.zeros(2, 0, n, 8, requires_grad=True) for n in (3, 4, 4)]
    out = attention(*tensors, backend="blockwise")
    out.sum().backward()
    assert out.shape == (2, 0, 3, 8)


def test_positions_far_apart_take_no_memory_for_what_lies_between():
    options = {"query_positions": torch.tensor([0, 10**11]), "key_positions": torch.tensor([0, 1, 10**11])}
    check("blockwise", content(2, 3), terms_of(TABLES, 2, 3), **options)


def test_tables_far_apart_take_no_memory_for_what_lies_between():
    terms = [(OffsetBias, [random(HEADS, 3)], first) for first in (-1, 10**11, -(10**11))]
    check("blockwise", content(5, 6), terms)


# --- laws


lengths = st.integers(1, 40)


@given(n_q=lengths, n_k=lengths, shift=st.integers(-1000, 1000), stride=st.integers(1, 3))
def test_moving_all_positions_changes_nothing(n_q, n_k, shift, stride):
    inputs, terms = content(n_q, n_k), terms_of(TABLES, n_q, n_k)
    places = [
        {"query_positions": Positions(start, stride, n_q), "key_positions": Positions(start + 2, 1, n_k)}
        for start in (0, shift)
    ]
    outs = [run("blockwise", torch.float64, inputs, terms, options | {"causal": True}) for options in places]
    assert all(torch.equal(*pair) for pair in zip(*outs, strict=True))


@given(length=lengths, padding=st.integers(1, 70), left=st.booleans())
def test_padding_never_changes_the_answer(length, padding, left):
    inputs, terms = content(length, length), terms_of(TABLES, length, length)
    plain = run("blockwise", torch.float64, inputs, terms, {})
    query, key, value = inputs
    filler = torch.full((BATCH, HEADS, padding, key.shape[3]), 1e3, dtype=torch.float64)
    ends = (filler, key), (filler, value)
    padded = [query, *(torch.cat(pair if left else pair[::-1], 2) for pair in ends)]
    real = torch.ones(BATCH, length, dtype=torch.bool)
    gap = torch.zeros(BATCH, padding, dtype=torch.bool)
    start = padding if left else 0
    options = {
        "key_mask": torch.cat((gap, real) if left else (real, gap), 1),
        "query_positions": Positions(start, 1, length),
    }
    found = run("blockwise", torch.float64, padded, terms, options)
    for index in (2, 3):
        assert (found[index].sum((0, 1, 3)) != 0).sum() <= length
        found[index] = found[index][:, :, start : start + length]
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


@given(order=st.permutations(range(4)))
def test_items_of_a_batch_do_not_see_one_another(order):
    inputs = content(19, 19, batch=4)
    mask = torch.arange(19) < torch.tensor([19, 7, 7, 1]).unsqueeze(1)
    terms = [(OffsetBias, [random(HEADS, 9)], -4), (OffsetValues, [random(1, 3, 16)], -1)]
    plain = run("blockwise", torch.float64, inputs, terms, {"key_mask": mask})
    moved = [tensor[list(order)] for tensor in inputs]
    d_out = output_gradient(plain[0])[list(order)]
    found = run("blockwise", torch.float64, moved, terms, {"key_mask": mask[list(order)]}, d_out)
    for ours, theirs in zip(found[:4], plain[:4], strict=True):
        torch.testing.assert_close(ours, theirs[list(order)])
    for ours, theirs in zip(found[4:], plain[4:], strict=True):
        torch.testing.assert_close(ours, theirs)


# --- long sequences, in tiles of their real size


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({}, {"query_positions": Positions(0, 2, 700)})),
    ],
    ids=str,
)
def test_sequences_of_many_tiles(options):
    inputs = [random(1, HEADS, n, 16) for n in (700, 1500, 1500)]
    terms = [(OffsetBias, [random(HEADS, 40)], -20), *terms_of(["keys", "values"], 700, 1500)]
    check("blockwise", inputs, terms, **options)


def test_long_tables_of_vectors():
    terms = [(OffsetKeys, [random(HEADS, 599, 16)], -299), (OffsetValues, [random(1, 300, 16)], -100)]
    check("blockwise", content(300, 300), terms)


# --- windows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize(
    ("n_q", "n_k", "options"),
    [
        (101, 101, {"window": 5}),
        (101, 101, {"window": (9, 0), "causal": True}),
        # The first queries have no keys.
        (120, 97, {"window": (3, 8)}),
        (90, 131, {"window": (0, 20), "softcap": 3.0}),
        # All keys are to the left or to the right of the queries.
        (60, 60, {"window": 200, "query_positions": Positions(190, 1, 60)}),
        (101, 101, {"window": (None, 4)}),
        # Blocks of queries with a step between them do not go together.
        (40, 80, {"window": 6, "query_positions": Positions(0, 2, 40)}),
    ],
)
@pytest.mark.parametrize("names", [(), TABLES], ids=["no terms", "tables"])
def test_windows_in_blocks(names, n_q, n_k, options, key_heads, dtype):
    with tuning.use(kept_scores=0, tile_rows=7):
        check("blockwise", content(n_q, n_k, key_heads=key_heads), terms_of(names, n_q, n_k), dtype, **options)


def by_fused_windows(names, n_q, n_k, key_heads=HEADS, **options):
    """Whether torch's kernels compute the blocks of a call's window."""
    built = [kind(*tensors) if first is None else kind(*tensors, first) for kind, tensors, first in names]
    problem = Problem.of(make_call(*content(n_q, n_k, key_heads=key_heads), built, **options))
    return blockwise.keeps(problem, problem.value.device) == "norm of blocks"


def test_which_windows_are_computed_by_torchs_kernels():
    with tuning.use(kept_scores=0, tile_rows=7, tile_scores=2**12):
        assert by_fused_windows([], 101, 101, window=5)
        assert by_fused_windows([], 101, 140, window=(9, 0), causal=True)
        assert not by_fused_windows(terms_of(["bias"], 101, 101), 101, 101, window=5)
        # The first queries have no keys; too wide for two blocks in a tile; no window; shared keys.
        assert not by_fused_windows([], 120, 97, window=(3, 8))
        assert not by_fused_windows([], 300, 300, window=100)
        assert not by_fused_windows([], 101, 101, causal=True)
        assert not by_fused_windows([], 101, 101, key_heads=1, window=5)
        for options in ({"softcap": 2.0}, {"dropout_p": 0.1}, {"return_lse": True}):
            assert not by_fused_windows([], 101, 101, window=5, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("as_it_is", [True, False])
@pytest.mark.parametrize("tile_scores", [1, 400, 2**14])
def test_windows_by_torchs_kernels(tile_scores, as_it_is, dtype, monkeypatch):
    # With few scores, one block goes at a time.
    monkeypatch.setattr(
        importlib.import_module("whereformer.kernels.cpu.fused_windows"), "tile_scores", lambda _: tile_scores
    )
    dtypes = {torch.float32, torch.bfloat16} if as_it_is else {torch.float32}
    with tuning.use(kept_scores=0, tile_rows=7, fused_dtypes=frozenset(dtypes)):
        assert by_fused_windows([], 101, 110, window=(9, 4))
        check("blockwise", content(101, 110), (), dtype, window=(9, 4))
        query, key, value = content(101, 110)
        turned = [query.mT.contiguous().mT, key.transpose(1, 2).contiguous().transpose(1, 2), value]
        check("blockwise", turned, (), dtype, window=(9, 4))


def test_gradients_that_a_window_does_not_need():
    inputs = [tensor.float() for tensor in content(101, 101)]
    with tuning.use(kept_scores=0, tile_rows=7):
        expected = run("blockwise", torch.float32, inputs, [], {"window": 5})[1:]
        for place, whole in enumerate(expected):
            leaves = [tensor.clone().requires_grad_(index == place) for index, tensor in enumerate(inputs)]
            out = attention(*leaves, window=5, backend="blockwise")
            out.backward(output_gradient(out).float())
            assert torch.equal(leaves[place].grad, whole)


def blocks_of(n_q, n_k, **options):
    """The pieces of a call that are computed in blocks: queries, keys and repetitions of each."""
    inputs = [tensor.float() for tensor in content(n_q, n_k)]
    pieces = [plan.piece for plan in plans_of(Problem.of(make_call(*inputs, **options)))]
    queries = [row for piece in pieces if 0 in piece.batch for row in _queries(piece)]
    assert sorted(queries) == list(range(n_q))
    return [(piece.batch, piece.queries, piece.keys, piece.repeats) for piece in pieces if piece.repeats > 1]


def _queries(piece):
    return range(piece.queries.start, piece.queries.start + piece.repeats * len(piece.queries))


def test_which_windows_are_computed_in_blocks():
    with tuning.use(tile_rows=7, tile_scores=2**12):
        # Queries 5 .. 95 reach keys on both sides; 13 blocks of 7 queries and 17 keys fit.
        expected = [(range(item, item + 1), range(5, 12), range(17), 13) for item in range(BATCH)]
        assert blocks_of(101, 101, window=5) == expected
        # Too short, too wide for two blocks in a tile, without a limit on one side, and with a step.
        assert blocks_of(20, 20, window=5) == []
        assert blocks_of(300, 300, window=100) == []
        assert blocks_of(101, 101, window=(5, None)) == []
        assert blocks_of(50, 101, window=5, query_positions=Positions(0, 2, 50)) == []
        for length in (1, 2):
            assert blocks_of(length, length, window=5) == []


# --- as an operator of torch


@pytest.mark.parametrize(
    ("explicit", "lse"),
    [(True, False), *(pytest.param(False, lse, marks=pytest.mark.slow) for lse in (False, True))],
)
def test_operator_contract(explicit, lse):
    inputs = [tensor.float().requires_grad_() for tensor in content(7, 9)]
    built = [
        kind(*(tensor.float().requires_grad_() for tensor in tensors), *(() if first is None else (first,)))
        for kind, tensors, first in terms_of(EVERY_KIND, 7, 9)
    ]
    options = {"query_positions": torch.arange(7)} if explicit else {}
    options |= {"window": 4, "softcap": 2.0} if lse else {}
    problem = Problem.of(make_call(*inputs, built, dropout_p=0.1, causal=True, return_lse=lse, **options))
    problem = replace(problem, keeps=blockwise.keeps(problem, problem.value.device))
    arguments = [
        argument.detach().requires_grad_(argument.is_floating_point())
        if isinstance(argument, torch.Tensor)
        else argument
        for argument in problem.arguments()
    ]
    torch.library.opcheck(blockwise._forward, arguments)


def test_the_operator_is_the_function_behind_it():
    """In eager mode the operator is passed by; wherever something watches, it is called."""
    watched = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            watched.append(str(function))
            return function(*arguments, **(options or {}))

    inputs, table = [tensor.float() for tensor in content(40, 40)], random(HEADS, 9).float()
    results = []
    for mode in (contextlib.nullcontext(), Watch()):
        leaves = [tensor.clone().requires_grad_() for tensor in (*inputs, table)]
        with mode:
            out, lse = attention(*leaves[:3], [OffsetBias(leaves[3], -4)], return_lse=True, backend="blockwise")
            loss = out.sin().sum() + lse.sin().sum()
            results.append([out, lse, *torch.autograd.grad(loss, leaves)])
    for passed_by, called in zip(*results, strict=True):
        assert torch.equal(passed_by, called)
    assert {name for name in watched if "whereformer" in name} == {
        "whereformer.blockwise_forward.default",
        "whereformer.blockwise_backward.default",
    }
    out = attention(*leaves[:3], [OffsetBias(leaves[3], -4)], backend="blockwise")
    (gradient,) = torch.autograd.grad(out.sin().sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="only 'reference' has second derivatives"):
        torch.autograd.grad(gradient.sum(), leaves[0])


LAYOUTS = {
    "contiguous": lambda n: torch.randn(2, 3, n, 16),
    "projected": lambda n: torch.randn(2, n, 3, 16).transpose(1, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keeps", ["weights", "norm", "nothing", "nothing, by rows"])
def test_outputs_are_laid_out_as_compiled_programs_are_told(keeps, layout):
    n = 60 if keeps == "weights" else 150
    changes = {"kept_scores": 2**12, "unturned_scores": 2**12}
    if keeps == "nothing, by rows":
        changes["fused_dtypes"] = frozenset()
    inputs = [LAYOUTS[layout](n).requires_grad_() for _ in range(3)]
    term = OffsetBias(torch.randn(3, 9, requires_grad=keeps != "norm"), -4)
    with tuning.use(**changes):
        call = make_call(*inputs, [term])
        found = Problem.of(call)
        found = replace(found, keeps=blockwise.keeps(found, found.value.device))
        assert found.keeps == keeps.partition(",")[0]
        arguments = [
            argument.detach().requires_grad_(argument.requires_grad) if isinstance(argument, torch.Tensor) else argument
            for argument in found.arguments()
        ]
        torch.library.opcheck(blockwise._forward, arguments)


@pytest.mark.parametrize("length", [20, 400])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout_p": 0.1}], ids=str)
def test_outputs_may_be_changed_in_place(length, options):
    """As those of torch's attention, by a hook for one; only a backward that needs what was there is refused."""
    query, key, value = (random(1, 2, length, 8).requires_grad_() for _ in range(3))
    bias = OffsetBias(random(2, 5).requires_grad_(), -2)
    torch.manual_seed(1)
    expected = attention(query, key, value, [bias], backend="blockwise", **options).detach()
    torch.manual_seed(1)
    output = attention(query, key, value, [bias], backend="blockwise", **options)
    output[0, :, 0] = 0.0
    output.mul_(2.0)
    expected[0, :, 0] = 0.0
    assert torch.equal(output, 2 * expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize(("n_q", "n_k"), [(4096, 4), (4096, 16)])
@pytest.mark.parametrize("training", [False, True])
def test_few_keys_take_no_memory_by_the_square_of_queries(n_q, n_k, training):
    query, key, value = (torch.randn(1, 2, n, 8, requires_grad=training) for n in (n_q, n_k, n_k))
    table = torch.randn(2, 9, requires_grad=training)

    def attend():
        out = attention(query, key, value, [OffsetBias(table, -4)], backend="blockwise")
        if training:
            out.sum().backward()

    with tuning.use(tile_scores=2**16):
        assert peak_memory(attend, torch.device("cpu")) < n_q * n_q


def test_gradients_of_dense_biases_that_a_batch_shares_are_summed_in_float32():
    inputs = [tensor.bfloat16() for tensor in content(60, 200, batch=64)]
    scores = random(1, HEADS, 60, 200).bfloat16().requires_grad_()
    exact = scores.detach().double().requires_grad_()
    d_out = output_gradient(inputs[0]).bfloat16()
    out = attention(*inputs, [DenseBias(scores)], backend="blockwise")
    expected = attention(*(tensor.double() for tensor in inputs), [DenseBias(exact)], backend="reference")
    (found,) = torch.autograd.grad(out, scores, d_out)
    (truth,) = torch.autograd.grad(expected, exact, d_out.double())
    # Rounded once where it is stored, and what rounding of the output does to delta.
    assert error(found, truth) <= 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("length", [20, 300])
def test_a_second_derivative_is_refused_and_not_wrong(length):
    inputs = [tensor.requires_grad_() for tensor in content(length, length)]
    out = attention(*inputs, [OffsetBias(random(HEADS, 5), -2)], backend="blockwise")
    (gradient,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^backend: only 'reference' has second derivatives; use backend="):
        gradient.sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of torch's own jvp
def test_a_forward_derivative_is_refused_and_auto_takes_the_reference():
    inputs, term = tuple(content(100, 100)), OffsetBias(random(HEADS, 5), -2)

    def attend(backend):
        return torch.func.jvp(
            lambda query: attention(query, *inputs[1:], [term], backend=backend), inputs[:1], inputs[:1]
        )

    with pytest.raises(ValueError, match=r"^backend: 'blockwise' has no forward-mode derivative; use"):
        attend("blockwise")
    assert torch.equal(attend("auto")[1], attend("reference")[1])


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing_but_rounding(threads):
    inputs, terms = content(90, 130), terms_of(TABLES, 90, 130)
    plain = run("blockwise", torch.float64, inputs, terms, {})
    torch.set_num_threads(threads)
    try:
        found = run("blockwise", torch.float64, inputs, terms, {})
    finally:
        torch.set_num_threads(1)
    assert all(error(ours, theirs) < 1e-12 for ours, theirs in zip(found, plain, strict=True))


# --- oneDNN's products


@pytest.fixture
def products(monkeypatch):
    """How many products oneDNN computes, on any processor that has it."""
    need_onednn()
    count = []
    real = matmul.product_transposed
    monkeypatch.setattr(matmul, "product_transposed", lambda *factors: count.append(1) or real(*factors))
    with tuning.use(onednn=True, fused_dtypes=frozenset()):
        yield count


@pytest.mark.parametrize("length", [192, 512])
def test_large_products_of_float32_are_onednns(length, products):
    terms = [(OffsetBias, [random(HEADS, 40)], -20), *terms_of(["keys", "values"], length, length)]
    wide = [
        (kind, [torch.cat([t] * 4, -1) if t.dim() == 3 else t for t in parts], first) for kind, parts, first in terms
    ]
    inputs = content(length, length, 64, batch=1)
    check("blockwise", inputs, wide)
    # Two forward, four or, where the weights are made again, five backward.
    assert len(products) == HEADS * (6 if length == 192 else 7)


def test_small_and_other_products_are_not(products):
    run("blockwise", torch.float32, content(100, 100, 64), [], {})
    run("blockwise", torch.float32, content(512, 512, 16), [], {})
    run("blockwise", torch.float64, content(512, 512, 64), [], {})
    run("blockwise", torch.float32, content(530, 530, 64), [], {})  # not regular
    with without_onednn():
        run("blockwise", torch.float32, content(512, 512, 64), [], {})
    assert not products
