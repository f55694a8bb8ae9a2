"""Tables between grids against transformers' own modules, and what holds for all of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import FAST, random
from whereformer import GridPositions, OffsetBias2d, attention, attention_weights, decomposed_offset_keys, explain
from whereformer.kernels import grids, reference
from whereformer.kernels.call import make_call
from whereformer.kernels.problem import Problem

BACKENDS = ("reference", *FAST)


def rows(*sizes):
    """Query, key and value, (2, 3, n, 8) each."""
    return [random(2, 3, n, 8).requires_grad_() for n in sizes]


def gradients(out, *leaves):
    weights = torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()
    return torch.autograd.grad((out * weights).sum(), leaves)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def by_torch(query, key, value, scores):
    """Attention with dense scores."""
    return (query @ key.mT / 8**0.5 + scores).softmax(-1) @ value


# --- other libraries' modules


@pytest.mark.parametrize("backend", BACKENDS)
def test_swins_windows(backend):
    """Their table is over query - key."""
    transformers = pytest.importorskip("transformers")
    sizes = {"embed_dim": 6, "depths": [1], "num_heads": [3]}
    model = transformers.SwinModel(transformers.SwinConfig(image_size=28, patch_size=4, window_size=7, **sizes))
    own = next(module for module in model.modules() if hasattr(module, "relative_position_bias_table"))
    table = torch.randn(own.relative_position_bias_table.shape, dtype=torch.float64, requires_grad=True)
    scores = table[own.relative_position_index.reshape(-1)].view(49, 49, 3).permute(2, 0, 1)
    query, key, value = rows(49, 49, 49)
    window = GridPositions(7, 7)
    ours = attention(
        *(query, key, value),
        [OffsetBias2d(table.T.unflatten(1, (13, 13)).flip(1, 2), (-6, -6), window, window)],
        backend=backend,
    )
    theirs = by_torch(query, key, value, scores)
    assert_close(ours, theirs)
    leaves = query, key, value, table
    assert_close(gradients(ours, *leaves), gradients(theirs, *leaves))


def shifted_windows(rows, shift):
    """Cut (batch, height, width, ...) into windows of 3 x 4 as Swin does, (batch * windows, 12, ...)."""
    _, height, width, *rest = rows.shape
    rows = rows.roll((-shift[0], -shift[1]), (1, 2)).unflatten(2, (width // 4, 4)).unflatten(1, (height // 3, 3))
    return rows.transpose(2, 3).reshape(-1, 12, *rest)


@pytest.mark.parametrize("shift", [(0, 0), (1, 2)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_torchvisions_shifted_windows(backend, shift):
    """Their whole layer, with its own weights. A shift brings cells from opposite edges into one window: documents."""
    try:
        from torchvision.models.swin_transformer import ShiftedWindowAttention
    except (ImportError, RuntimeError) as error:
        # Its operators exist only beside the very build of torch that it was compiled for.
        pytest.skip(f"torchvision cannot be imported: {error}")
    own = ShiftedWindowAttention(24, [3, 4], list(shift), 3).double()
    table = own.relative_position_bias_table
    torch.nn.init.normal_(table)
    hidden = random(2, 6, 8, 24).requires_grad_()
    theirs = shifted_windows(own(hidden), shift)
    query, key, value = own.qkv(shifted_windows(hidden, shift)).view(8, 12, 3, 3, 8).permute(2, 0, 3, 1, 4)
    edges = torch.zeros(2, 6, 8, dtype=torch.int64)
    edges[:, : shift[0]] += 1
    edges[:, :, : shift[1]] += 2
    documents, window = shifted_windows(edges, shift), GridPositions(3, 4)
    term = OffsetBias2d(table.T.unflatten(1, (5, 7)).flip(1, 2), (-2, -3), window, window)
    out = attention(*(query, key, value), [term], query_documents=documents, key_documents=documents, backend=backend)
    ours = own.proj(out.transpose(1, 2).flatten(2))
    assert_close(ours, theirs)
    leaves = hidden, table
    assert_close(gradients(ours, *leaves), gradients(theirs, *leaves))


@pytest.mark.parametrize("backend", BACKENDS)
def test_beits_bias_with_three_numbers_for_cls(backend):
    transformers = pytest.importorskip("transformers")
    from transformers.models.beit.modeling_beit import BeitRelativePositionBias

    # Their module mixes up the sides of images that are not square.
    config = transformers.BeitConfig(hidden_size=24, num_attention_heads=3, image_size=20, patch_size=4)
    own = BeitRelativePositionBias(config).double()
    torch.nn.init.normal_(own.relative_position_bias_table)
    table = own.relative_position_bias_table
    query, key, value = rows(26, 26, 26)
    grid = GridPositions(5, 5, prefix=1)
    cells, prefix = table[:-3].T.unflatten(1, (9, 9)).flip(1, 2), table[-3:].T
    ours = attention(query, key, value, [OffsetBias2d(cells, (-4, -4), grid, grid, prefix)], backend=backend)
    theirs = by_torch(query, key, value, own((5, 5)))
    assert_close(ours, theirs)
    leaves = query, key, value, table
    assert_close(gradients(ours, *leaves), gradients(theirs, *leaves))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sams_decomposed_positions(backend):
    """Their whole layer, with its own weights; their other class takes the softmax in float32."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.sam.modeling_sam import SamVisionSdpaAttention

    config = transformers.SamVisionConfig(hidden_size=24, num_attention_heads=3, image_size=20, patch_size=4)
    own = SamVisionSdpaAttention(config, window_size=0).double()
    for table in (own.rel_pos_h, own.rel_pos_w):
        torch.nn.init.normal_(table)
    hidden = random(2, 5, 5, 24).requires_grad_()
    theirs = own(hidden)[0]
    query, key, value = own.qkv(hidden).reshape(2, 25, 3, 3, 8).permute(2, 0, 3, 1, 4)
    grid = GridPositions(5, 5)
    vectors = own.rel_pos_h.flip(0)[None], own.rel_pos_w.flip(0)[None]
    term = decomposed_offset_keys(query, *vectors, (-4, -4), grid, grid)
    ours = own.proj(attention(query, key, value, [term], backend=backend).transpose(1, 2).reshape(2, 5, 5, 24))
    assert_close(ours, theirs)
    leaves = hidden, own.rel_pos_h, own.rel_pos_w
    assert_close(gradients(ours, *leaves), gradients(theirs, *leaves))


def test_decomposed_positions_pair_by_pair():
    """With tables per head, a prefix, sides that differ and offsets beyond the tables."""
    queries, keys = GridPositions(2, 3, 1, (1, 0)), GridPositions(3, 4, 2, (0, -1))
    query, row_table, column_table = random(2, 3, 7, 8), random(3, 3, 8), random(3, 2, 8)
    term = decomposed_offset_keys(query, row_table, column_table, (-1, -1), queries, keys)
    found = term.query_factors @ term.key_factors.mT
    assert (found[:, :, 0] == 0).all()
    assert (found[..., :2] == 0).all()
    for i, j in ((0, 0), (2, 11), (5, 3), (4, 8)):
        row = (j // 4 + 0) - (i // 3 + 1) + 1
        column = (j % 4 - 1) - (i % 3) + 1
        vector = row_table[:, min(max(row, 0), 2)] + column_table[:, min(max(column, 0), 1)]
        assert_close(found[:, :, i + 1, j + 2], (query[:, :, i + 1] * vector).sum(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decomposed_positions_take_tables_in_another_dtype(dtype):
    query, row_table, column_table = (random(*shape).to(dtype) for shape in ((2, 3, 7, 8), (1, 3, 8), (1, 5, 8)))
    tables = [table.float().requires_grad_() for table in (row_table, column_table)]
    found = decomposed_offset_keys(query, *tables, (-1, -2), GRID, GRID)
    expected = decomposed_offset_keys(query, row_table, column_table, (-1, -2), GRID, GRID)
    assert_close(found.query_factors, expected.query_factors)
    found.query_factors.sum().backward()
    assert [table.grad.dtype for table in tables] == [torch.float32, torch.float32]


# --- what holds for all tables

SIDES = st.tuples(st.integers(1, 5), st.integers(1, 5), st.sampled_from([0, 1, 5]))


@pytest.mark.parametrize("fast", FAST)
@settings(max_examples=40, deadline=None)
@given(SIDES, SIDES, st.tuples(st.integers(-9, 9), st.integers(-9, 9)), st.data())
def test_shifting_both_origins_changes_nothing(fast, queries, keys, shift, data):
    starts = [data.draw(st.tuples(st.integers(-3, 3), st.integers(-3, 3))) for _ in range(2)]
    first = data.draw(st.tuples(st.integers(-4, 2), st.integers(-4, 2)))
    query, key, value, table, prefix = *rows(*(g[0] * g[1] + g[2] for g in (queries, keys, keys))), *numbers()
    found = []
    for by in ((0, 0), shift):
        moved = [
            GridPositions(*sides, tuple(map(sum, zip(start, by, strict=True))))
            for sides, start in zip((queries, keys), starts, strict=True)
        ]
        out = attention(query, key, value, [OffsetBias2d(table, first, *moved, prefix)], backend=fast)
        found.append([out, *gradients(out, query, key, value, table, prefix)])
    assert all(map(torch.equal, *found))
    # Shifting one of them is another question, which moving the table answers.
    other = [
        GridPositions(*queries, starts[0]),
        GridPositions(*keys, tuple(map(sum, zip(starts[1], shift, strict=True)))),
    ]
    moved_first = tuple(map(sum, zip(first, shift, strict=True)))
    out = attention(query, key, value, [OffsetBias2d(table, moved_first, *other, prefix)], backend="reference")
    assert_close(out, found[0][0])


def numbers():
    return random(3, 4, 3).requires_grad_(), random(3, 3).requires_grad_()


@settings(max_examples=40, deadline=None)
@given(SIDES, SIDES, st.data())
def test_a_table_between_grids_is_a_table_over_one_offset(queries, keys, data):
    """This is the form in which backends get it that know positions in a row only."""
    starts = [data.draw(st.tuples(st.integers(-3, 3), st.integers(-3, 3))) for _ in range(2)]
    grid = [GridPositions(*sides, start) for sides, start in zip((queries, keys), starts, strict=True)]
    table, prefix = numbers()
    term = OffsetBias2d(table, data.draw(st.tuples(st.integers(-4, 2), st.integers(-4, 2))), *grid, prefix)
    call = make_call(*rows(*(each.length for each in (*grid, grid[1]))), [term])
    flat = grids.in_one_dimension(call)
    assert flat.terms[0].table.numel() == 3 * (
        (grid[0].rows + grid[1].rows - 1) * (grid[0].columns + grid[1].columns - 1) + 3
    )
    (ours, _), (theirs, _) = reference.attend(flat), reference.attend(call)
    assert torch.equal(ours, theirs)
    assert_close(gradients(ours, table, prefix), gradients(theirs, table, prefix))


def test_one_row_is_a_table_over_one_offset():
    from whereformer import OffsetBias

    query, key, value = rows(9, 9, 9)
    table, line = random(3, 5), GridPositions(1, 9)
    expected = attention(query, key, value, [OffsetBias(table, -2)])
    assert_close(attention(query, key, value, [OffsetBias2d(table[:, None], (0, -2), line, line)]), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_derivatives_are_those_of_finite_differences(backend):
    queries, keys = GridPositions(2, 3, 1), GridPositions(3, 2, 2)
    query, key, value = rows(7, 8, 8)
    table, prefix = numbers()

    def call(*tensors):
        term = OffsetBias2d(tensors[3], (-2, -1), queries, keys, tensors[4])
        return attention(*tensors[:3], [term], backend=backend)

    assert torch.autograd.gradcheck(call, (query, key, value, table, prefix), fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_forbidden_offsets_and_rows(backend):
    grid = GridPositions(3, 3, 1)
    table, prefix = random(3, 5, 5), torch.full((3, 3), -torch.inf, dtype=torch.float64)
    table[:, :, :2] = -torch.inf  # nothing to the left
    term = OffsetBias2d(table, (-2, -2), grid, grid, prefix)
    inputs = rows(10, 10, 10)
    weights = attention_weights(*inputs, [term])
    assert (weights[:, :, 0] == 0).all()  # the prefix may attend to nothing
    columns = torch.arange(9) % 3
    left = columns[None, :] < columns[:, None]
    assert (weights[:, :, 1:, 1:][:, :, left] == 0).all()
    assert_close(weights[:, :, 1:].sum(-1), torch.ones(2, 3, 9, dtype=torch.float64))
    out = attention(*inputs, [term], backend=backend)
    assert_close(out, weights @ inputs[2])
    assert all(each.isfinite().all() for each in gradients(out, *inputs))


def test_memory_grows_with_the_tokens_not_with_their_pairs():
    """What a call with 64 x 64 tokens lays out per head is a fraction of its 16 million scores."""
    grid = GridPositions(64, 64)
    with torch.device("meta"):
        query, table = torch.empty(1, 2, 4096, 8), torch.empty(2, 127, 127)
    problem = Problem.of(make_call(query, query, query, [OffsetBias2d(table, (-63, -63), grid, grid)]))
    assert problem.grid_bias.shape == (2, 127 * 127 + 3)
    assert all(
        dim < 4096 * 16 for tensor in problem.arguments() if isinstance(tensor, torch.Tensor) for dim in tensor.shape
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fast", FAST)
def test_half_precision_rounds_the_output_alone(fast, dtype):
    grid = GridPositions(9, 11, 1)
    query, key, value = (each.detach().to(dtype) for each in rows(100, 100, 100))
    table = random(3, 17, 21).to(dtype)
    out = attention(query, key, value, [OffsetBias2d(table, (-8, -10), grid, grid)], backend=fast)
    term = OffsetBias2d(table.double(), (-8, -10), grid, grid)
    exact = attention(query.double(), key.double(), value.double(), [term], backend="reference")
    assert out.dtype == dtype
    assert (out.double() - exact).norm() < 2 * torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize("fast", FAST)
@pytest.mark.parametrize(
    "options", [{"softcap": 2.0}, {"sinks": random(3)}, {"return_lse": True}], ids=lambda options: next(iter(options))
)
def test_grids_in_other_kinds_of_attention(fast, options):
    """With fewer heads of keys and values than of queries, too."""
    grid = GridPositions(3, 5, 1)
    query, table, prefix = random(2, 3, 16, 8).requires_grad_(), *numbers()
    key, value = (random(2, 1, 16, 8).requires_grad_() for _ in range(2))
    leaves, found = (query, key, value, table, prefix), []
    for backend in ("reference", fast):
        term = OffsetBias2d(table, (-2, -2), grid, grid, prefix)
        out = attention(query, key, value, [term], backend=backend, **options)
        out = torch.cat((out[0], out[1].unsqueeze(-1)), -1) if isinstance(out, tuple) else out
        found.append([out, *gradients(out, *leaves)])
    assert_close(*found)


@pytest.mark.parametrize("fast", FAST)
def test_empty_batches_and_strange_layouts(fast):
    grid = GridPositions(3, 5)
    table = random(3, 9, 5).mT.requires_grad_()
    empty = attention(*(random(0, 3, 15, 8) for _ in range(3)), [OffsetBias2d(table, (-2, -4), grid, grid)])
    assert empty.shape == (0, 3, 15, 8)
    query, key, value = rows(15, 15, 15)
    strange = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (query, key, value.expand(2, -1, -1, -1))]
    found = [
        attention(*inputs, [OffsetBias2d(each, (-2, -4), grid, grid)], backend=fast)
        for inputs, each in (((query, key, value), table.contiguous()), (strange, table))
    ]
    assert_close(*found)
    assert_close(*(gradients(out, query, table) for out in found))


# --- what is refused

GRID = GridPositions(2, 3, 1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GridPositions(0, 3), ValueError, "GridPositions: rows must be at least 1, got 0"),
        (lambda: GridPositions(2, 1.5), TypeError, "GridPositions: columns must be an int, got 1.5"),
        (lambda: GridPositions(2, 3, -1), ValueError, "GridPositions: prefix must be at least 0, got -1"),
        (lambda: GridPositions(2, 3, start=4), TypeError, "GridPositions: start must be a row and a column"),
        (lambda: OffsetBias2d(random(3, 3, 5), -1, GRID, GRID), TypeError, "OffsetBias2d: first must be a row and"),
        (
            lambda: term(random(3, 5)),
            ValueError,
            r"OffsetBias2d.table: expected shape \(heads 3, row offsets, column offsets\), got \(3, 5\)",
        ),
        (lambda: term(random(3, 0, 5)), ValueError, "OffsetBias2d.table: needs at least one offset"),
        (lambda: term([1.0]), TypeError, "OffsetBias2d.table: expected a floating-point tensor, got list"),
        (
            lambda: term(random(3, 3, 5), keys=GridPositions(3, 3)),
            ValueError,
            "OffsetBias2d.keys: expected 7 tokens, got a prefix of 0 and 3 x 3 cells, which are 9 tokens",
        ),
        (lambda: term(random(3, 3, 5), keys=(2, 3)), TypeError, "OffsetBias2d.keys: expected GridPositions, got tuple"),
        (
            lambda: term(random(3, 3, 5), prefix=random(3, 2)),
            ValueError,
            r"OffsetBias2d.prefix: expected shape \(heads 3, kinds of pairs 3\), got \(3, 2\)",
        ),
    ],
)
def test_what_is_refused(make, error, message):
    with pytest.raises(error, match=f"^{message}"):
        attention(*rows(7, 7, 7), [make()])


def term(table, queries=GRID, keys=GRID, prefix=None):
    return OffsetBias2d(table, (-1, -2), queries, keys, prefix)


def test_terms_between_different_grids_are_refused():
    other = GridPositions(1, 6, 1)
    with pytest.raises(
        ValueError, match=r"^OffsetBias2d.keys: expected the same grid in all terms, got \(a prefix of 1"
    ):
        attention(*rows(7, 7, 7), [term(random(3, 3, 5)), term(random(3, 3, 5), keys=other)])


def test_decomposed_positions_refuse_what_does_not_fit():
    query = random(2, 3, 7, 8)
    with pytest.raises(
        ValueError, match=r"^column_table: expected shape \(heads 1 or 3, T, head_dim 8\), got \(2, 3, 8\)"
    ):
        decomposed_offset_keys(query, random(1, 3, 8), random(2, 3, 8), (0, 0), GRID, GRID)
    with pytest.raises(ValueError, match=r"^queries: expected 7 tokens, got a prefix of 0 and 2 x 3"):
        decomposed_offset_keys(query, random(1, 3, 8), random(1, 3, 8), (0, 0), GridPositions(2, 3), GRID)
    with pytest.raises(
        TypeError, match=r"^decomposed_offset_keys: first must be a row and a column, .* got \(0.5, 0\)"
    ):
        decomposed_offset_keys(query, random(1, 3, 8), random(1, 3, 8), (0.5, 0), GRID, GRID)
    with pytest.raises(TypeError, match=r"^keys: expected GridPositions, got tuple"):
        decomposed_offset_keys(query, random(1, 3, 8), random(1, 3, 8), (0, 0), GRID, (2, 3))
    with pytest.raises(TypeError, match=r"^row_table: expected a floating-point tensor, got list"):
        decomposed_offset_keys(query, [0.0], random(1, 3, 8), (0, 0), GRID, GRID)
    with pytest.raises(TypeError, match=r"^row_table: expected a floating-point tensor, got torch.int64"):
        decomposed_offset_keys(query, random(1, 3, 8).long(), random(1, 3, 8), (0, 0), GRID, GRID)
    with pytest.raises(ValueError, match=r"^column_table: needs at least one offset, got \(1, 0, 8\)"):
        decomposed_offset_keys(query, random(1, 3, 8), random(1, 0, 8), (0, 0), GRID, GRID)
    with pytest.raises(ValueError, match=r"^row_table: expected the query's device .*, got meta"):
        decomposed_offset_keys(query, random(1, 3, 8).to("meta"), random(1, 3, 8), (0, 0), GRID, GRID)
    with pytest.raises(ValueError, match=r"^query: expected \(batch, heads, length, head_dim\)"):
        decomposed_offset_keys(query[0], random(1, 3, 8), random(1, 3, 8), (0, 0), GRID, GRID)


def test_truth_values_are_no_numbers_of_a_grid():
    with pytest.raises(TypeError, match=r"^GridPositions: rows must be an int, got True"):
        GridPositions(True, 3)
    with pytest.raises(TypeError, match=r"^OffsetBias2d: first must be .*, got \(True, 0\)"):
        OffsetBias2d(random(3, 3, 5), (True, 0), GRID, GRID)


def test_triton_says_what_it_cannot_mix():
    call = make_call(*rows(7, 7, 7), [term(random(3, 3, 5))], causal=True)
    assert call.mixes_positions
    assert "triton" in explain(*rows(7, 7, 7), [term(random(3, 3, 5))], causal=True).unavailable
