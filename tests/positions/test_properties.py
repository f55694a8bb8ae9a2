"""What follows from the methods' formulas, for any sizes, positions and parameters."""

import cmath
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.every import EVERY
from tests.positions.layers import scores
from tests.positions.stack import EACH_METHOD, HEADS, MAX_LENGTH, METHODS, WIDTH, build, embeddings, make, parts_of
from tests.positions.test_contract import assert_close
from whereformer import (
    DenseBias,
    OffsetBias,
    Positions,
    Site,
    attention,
    attention_weights,
    build_position,
    position_names,
)
from whereformer.positions import method_class
from whereformer.positions.alibi import slopes
from whereformer.positions.t5 import buckets
from whereformer.testing import attend

HEAD_DIM = WIDTH // HEADS

lengths = st.integers(1, 10)
shifts = st.integers(-400, 400)
strides = st.integers(1, 5)
seeds = st.integers(0, 2**32 - 1)
all_methods = pytest.mark.parametrize("method", EACH_METHOD)
few = settings(max_examples=10 if EVERY else 4)
some = settings(max_examples=30 if EVERY else 10)


# --- translation invariance

INVARIANT = [
    method
    for method in METHODS
    if all(method_class(part).shift_invariant for part in parts_of(method)) and "without [CLS]" not in method
]
"""By their claims; that the others are not, tests/test_testing.py tests. [CLS] is found by its position, 0."""


def shifted(positions, shift, explicit):
    positions = Positions(positions.start + shift, positions.stride, positions.length)
    return positions.values() if explicit else positions


@pytest.mark.parametrize(
    "method", [name if name in position_names() else pytest.param(name, marks=pytest.mark.slow) for name in INVARIANT]
)
@some
@given(length=lengths, start=shifts, stride=strides, shift=shifts, explicit=st.booleans(), seed=seeds)
def test_a_common_shift_changes_nothing(method, length, start, stride, shift, explicit, seed):
    torch.manual_seed(seed)
    position, words, at = make(method), embeddings(length), Positions(start, stride, length)
    moved = shifted(at, shift, explicit)
    assert_close(attend(position, words, moved, moved), attend(position, words, at, at))
    last, moved_last = Positions(at.last, 1, 1), shifted(Positions(at.last, 1, 1), shift, explicit)
    assert_close(
        attend(position, words, moved_last, moved, rows=slice(-1, None)),
        attend(position, words, last, at, rows=slice(-1, None)),
    )


@few
@given(length=lengths, shift=st.integers(0, 280), explicit=st.booleans(), seed=seeds)
def test_a_common_shift_changes_nothing_for_fire_up_to_its_threshold(length, shift, explicit, seed):
    torch.manual_seed(seed)
    position, words = make("fire", initial_threshold=1000.0), embeddings(length)  # at least 300 in every layer
    at, moved = Positions(0, 1, length), shifted(Positions(0, 1, length), shift, explicit)
    assert_close(attend(position, words, moved, moved), attend(position, words, at, at))


def test_a_common_shift_matters_to_fire_beyond_its_threshold():
    position, words, far = make("fire"), embeddings(9), Positions(90, 1, 9)
    assert (attend(position, words) - attend(position, words, far, far)).abs().max() > 1e-3


# --- batches and padding


@all_methods
@few
@given(seed=seeds)
def test_permuting_the_batch_permutes_the_outputs(method, seed):
    torch.manual_seed(seed)
    position, words, order = make(method), embeddings(6, batch=4), torch.randperm(4)
    assert_close(attend(position, words[order]), attend(position, words)[order])
    ids = torch.stack([torch.randperm(MAX_LENGTH)[:6] for _ in range(4)])
    permuted = attend(position, words[order], ids[order], ids[order])
    assert_close(permuted, attend(position, words, ids, ids)[order])


@all_methods
@few
@given(length=lengths, padding=st.integers(1, 8), seed=seeds)
def test_padding_on_the_right_changes_nothing(method, length, padding, seed):
    torch.manual_seed(seed)
    position, words = make(method), embeddings(length)
    padded = torch.cat((words, 100 * embeddings(padding)), 1)
    mask = (torch.arange(length + padding) < length).expand(2, -1)
    assert_close(attend(position, padded, key_mask=mask)[:, :length], attend(position, words))


@all_methods
@few
@given(length=lengths, padding=st.integers(1, 8), seed=seeds)
def test_padding_on_the_left_changes_nothing_when_positions_say_so(method, length, padding, seed):
    torch.manual_seed(seed)
    position, words = make(method), embeddings(length)
    padded = torch.cat((100 * embeddings(padding), words), 1)
    at = torch.arange(-padding, length)
    ids = at.clamp(min=0).expand(2, -1)
    mask = (at >= 0).expand(2, -1)
    assert_close(attend(position, padded, ids, ids, key_mask=mask)[:, padding:], attend(position, words))


@all_methods
def test_padding_gets_no_gradient(method):
    position, words = make(method), embeddings(8).requires_grad_()
    mask = (torch.arange(8) < 5).expand(2, -1)
    attend(position, words, key_mask=mask)[:, :5].square().sum().backward()
    assert (words.grad[:, 5:] == 0).all()
    assert (words.grad[:, :5] != 0).any(-1).all()


@some
@given(n_q=lengths, n_k=lengths, seed=seeds)
def test_a_number_added_to_all_scores_of_a_row_changes_nothing(n_q, n_k, seed):
    torch.manual_seed(seed)
    query, key, value = (torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (n_q, n_k, n_k))
    table = torch.randn(2, 5, dtype=torch.float64)
    per_head = 10 * torch.randn(2, 1, dtype=torch.float64)
    assert_close(
        attention(query, key, value, [OffsetBias(table + per_head, -2)]),
        attention(query, key, value, [OffsetBias(table, -2)]),
    )


# --- rotary


@pytest.mark.parametrize("method", ["rope", "rope interleaved", "rope partial"])
def test_rope_at_position_zero_is_the_identity(method):
    query, key, value = torch.randn(3, 2, HEADS, 5, HEAD_DIM)
    ids = torch.zeros(5, dtype=torch.long)
    assert all(map(torch.equal, make(method).rotate(query, key, value, Site(ids, ids)), (query, key, value)))


@some
@given(rotary_dim=st.sampled_from([2, 4, 6, 8]), start=shifts, stride=strides, base=st.floats(2, 1e6), seed=seeds)
def test_rope_layouts_agree_after_permuting_features(rotary_dim, start, stride, base, seed):
    torch.manual_seed(seed)
    half, interleaved = (
        build("rope", layout=layout, rotary_dim=rotary_dim, base=base) for layout in ("half", "interleaved")
    )
    pairs = [feature for pair in range(rotary_dim // 2) for feature in (pair, pair + rotary_dim // 2)]
    order = torch.tensor([*pairs, *range(rotary_dim, HEAD_DIM)])
    heads, at = torch.randn(3, 2, HEADS, 5, HEAD_DIM, dtype=torch.float64), Positions(start, stride, 5)
    for one, other in zip(
        half.rotate(*heads, Site(at, at))[:2], interleaved.rotate(*heads[..., order], Site(at, at))[:2], strict=True
    ):
        assert_close(other, one[..., order])


@some
@given(position=shifts, rotary_dim=st.sampled_from([2, 4, 6, 8]), base=st.floats(2, 1e6), seed=seeds)
def test_rope_turns_each_pair_as_a_complex_number(position, rotary_dim, base, seed):
    torch.manual_seed(seed)
    query, key, value = torch.randn(3, 1, HEADS, 1, HEAD_DIM, dtype=torch.float64)
    rope = build("rope", layout="interleaved", rotary_dim=rotary_dim, base=base)
    turned, _, same = rope.rotate(query, key, value, Site(torch.tensor([position]), torch.tensor([0])))
    assert same is value
    turns = [cmath.exp(1j * position * base ** (-2 * pair / rotary_dim)) for pair in range(rotary_dim // 2)]
    pairs = query[..., :rotary_dim].unflatten(-1, (-1, 2)).contiguous()
    expected = torch.view_as_complex(pairs) * torch.tensor(turns, dtype=torch.complex128)
    assert_close(turned[..., :rotary_dim], torch.view_as_real(expected).flatten(-2))
    assert torch.equal(turned[..., rotary_dim:], query[..., rotary_dim:])


# --- buckets

bucket_options = st.booleans().flatmap(
    lambda bidirectional: st.tuples(
        st.integers(2, 40).map(lambda half: 2 * half) if bidirectional else st.integers(2, 80),
        st.integers(1, 300),
        st.just(bidirectional),
    )
)


@some
@given(bucket_options)
def test_buckets_are_in_range_and_monotone_in_distance(options):
    num_buckets, beyond_exact, bidirectional = options
    exact = num_buckets // (4 if bidirectional else 2)
    max_distance = exact + beyond_exact
    table = dict(
        zip(range(-max_distance, max_distance + 1), buckets(num_buckets, max_distance, bidirectional), strict=True)
    )
    assert set(table.values()) <= set(range(num_buckets))
    left = [table[-distance] for distance in range(max_distance + 1)]
    right = [table[distance] for distance in range(1, max_distance + 1)]
    assert left == sorted(left)
    assert right == sorted(right)
    assert left[:exact] == list(range(exact))
    if bidirectional:
        assert max(left) == num_buckets // 2 - 1
        assert right == [bucket + num_buckets // 2 for bucket in left[1:]]
    else:
        assert max(left) == num_buckets - 1
        assert set(right) == {0}


@few
@given(distance=st.integers(128, 10**9))
def test_t5_offsets_beyond_max_distance_are_alike(distance):
    position = make("t5")
    assert torch.equal(position.curve([-distance, distance]), position.curve([-128, 128]))


# --- TISA

numbers = st.floats(-3, 3)
kernels = st.lists(st.tuples(numbers, numbers, st.floats(-20, 20)), max_size=4)


def tisa(kernels):
    """One layer and one head with these (amplitude, sharpness, center)."""
    position = build_position("tisa", hidden_size=4, num_heads=1, num_kernels=len(kernels)).double()
    amplitude, sharpness, center = torch.tensor(kernels, dtype=torch.float64).view(-1, 3).unbind(-1)
    with torch.no_grad():
        position.amplitude.copy_(amplitude)
        position.sharpness.copy_(sharpness)
        position.center.copy_(center)
    return position


@some
@given(kernels=kernels, offsets=st.lists(st.integers(-30, 30), min_size=1, max_size=9))
def test_tisa_is_its_formula(kernels, offsets):
    expected = [sum(a * math.exp(-abs(b) * (k - c) ** 2) for a, b, c in kernels) for k in offsets]
    assert_close(tisa(kernels).curve(offsets), torch.tensor([expected], dtype=torch.float64))


@few
@given(amplitude=numbers, center=numbers, length=lengths, seed=seeds)
def test_tisa_without_sharpness_is_constant_and_so_changes_nothing(amplitude, center, length, seed):
    torch.manual_seed(seed)
    curve = tisa([(amplitude, 0.0, center)]).curve(range(-50, 51))
    assert_close(curve, torch.full_like(curve, amplitude))
    position, words = make("tisa"), embeddings(length)
    nn.init.zeros_(position.sharpness)
    assert_close(attend(position, words), attend(build("none"), words))


@few
@given(length=lengths, seed=seeds)
def test_tisa_without_kernels_is_no_position_at_all(length, seed):
    torch.manual_seed(seed)
    words = embeddings(length)
    assert_close(attend(make("tisa without kernels"), words), attend(build("none"), words))


# --- Shaw


@few
@given(length=lengths, clip=st.integers(0, 4), per_head=st.booleans(), seed=seeds)
def test_shaw_is_attention_to_keys_and_values_of_their_own_for_every_query(length, clip, per_head, seed):
    torch.manual_seed(seed)
    position = build("shaw", clip=clip, per_head=per_head)
    query, key, value = torch.randn(3, 1, HEADS, length, HEAD_DIM, dtype=torch.float64)
    at = Positions(0, 1, length)
    out = attention(query, key, value, position.terms(embeddings(length), Site(at, at, 1)))
    for i in range(length):
        rows = (torch.arange(length) - i).clamp(-clip, clip) + clip
        seen = key + position.keys[1][..., rows, :], value + position.values[1][..., rows, :]
        assert_close(out[:, :, i : i + 1], attention(query[:, :, i : i + 1], *seen))


# --- FIRE


@some
@given(length=st.integers(1, 24), threshold=st.floats(0.5, 40), layer=st.integers(0, 3), seed=seeds)
def test_fire_equals_the_paper(length, threshold, layer, seed):
    """Li et al. (2023): b(i, j) = f(log(|c (i - j)| + 1) / (log(|c max(i, L)| + 1) + 1e-6)) for j up to i."""
    torch.manual_seed(seed)
    position = build("fire", causal=True, initial_threshold=threshold, width=5)
    network = nn.Sequential(nn.Linear(1, 5), nn.ReLU(), nn.Linear(5, HEADS)).double()
    network.load_state_dict(
        {
            "0.weight": position.hidden_weight[layer].unsqueeze(-1),
            "0.bias": position.hidden_bias[layer],
            "2.weight": position.out_weight[layer],
            "2.bias": position.out_bias[layer],
        }
    )
    c, trained_threshold = position.scale[layer].item(), abs(position.threshold[layer].item() * threshold)
    at = Positions(0, 1, length)
    [term] = position.terms(embeddings(length), Site(at, at, layer))
    for i in range(length):
        for j in range(i + 1):
            distance = math.log(abs(c * (i - j)) + 1)
            furthest = math.log(abs(c * max(i, trained_threshold)) + 1) + 1e-6
            expected = network(torch.tensor([distance / furthest], dtype=torch.float64))
            assert_close(term.scores[0, :, i, j], expected)


# --- ALiBi


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),
        (16, [2 ** (-head / 2) for head in range(1, 17)]),
        (12, [2**-head for head in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
        (3, [2**-4, 2**-8, 2**-2]),
    ],
)
def test_alibi_has_the_slopes_of_the_paper(heads, expected):
    assert slopes(heads) == pytest.approx(expected, rel=1e-12)


@few
@given(heads=st.integers(1, 64))
def test_alibi_has_a_slope_of_its_own_for_every_head(heads):
    assert len(set(slopes(heads))) == heads
    assert all(2**-8 <= slope < 1 for slope in slopes(heads))


@few
@given(n_q=lengths, n_k=lengths)
def test_causal_alibi_is_the_authors_bias(n_q, n_k):
    """Theirs adds slope * key position to the scores of a causal model: the same up to a number per row."""
    position = build_position("alibi", hidden_size=24, num_heads=12, causal=True)
    value = torch.randn(1, 12, n_k, 2, dtype=torch.float64)
    at = Positions(n_k - n_q, 1, n_q), Positions(0, 1, n_k)
    terms = position.terms(torch.zeros(1, n_q, 24), Site(*at))
    where = dict(zip(("query_positions", "key_positions"), at, strict=True))
    theirs = torch.tensor(slopes(12)).view(1, 12, 1, 1) * torch.arange(n_k)
    call = partial(attention, None, None, value, causal=True, **where)
    assert_close(call(terms), call([DenseBias(theirs.expand(1, 12, n_q, n_k))]), 1e-6)


def test_learned_alibi_trains_a_factor_of_each_slope():
    """As in data2vec 2.0: the fixed slopes to begin with, and then times a number at or above zero."""
    sizes = {"hidden_size": 24, "num_heads": 12, "num_layers": 2}
    fixed, learned = (build_position("alibi", **sizes, learned=each).double() for each in (False, True))
    offsets = [-7, -1.5, 0, 2, 40]
    assert_close(learned.curve(offsets), fixed.curve(offsets).double(), 1e-6)
    learned.scale.data.uniform_(-2.0, 2.0)
    curve, distance = learned.curve(offsets, layer=1), torch.tensor(offsets, dtype=torch.float64).abs()
    scale = learned.scale.detach().clone().requires_grad_()
    expected = -(torch.tensor(slopes(12), dtype=torch.float64) * scale.abs()).unsqueeze(1) * distance
    assert_close(curve, expected)
    direction = torch.randn_like(curve)
    (found,) = torch.autograd.grad((curve * direction).sum(), learned.scale)
    assert_close(found, torch.autograd.grad((expected * direction).sum(), scale)[0])


# --- Synthesizer and FLOATER


@pytest.mark.parametrize("variant", ["random", "factorized_random"])
def test_random_synthesizer_weights_do_not_depend_on_the_input(variant):
    position, at = build("synthesizer", variant=variant), Positions(0, 1, 7)
    value = torch.zeros(2, HEADS, 7, 1, dtype=torch.float64)
    one, other = (
        attention_weights(None, None, value, position.terms(embeddings(7), Site(at, at, 1))) for _ in range(2)
    )
    assert torch.equal(one, other)
    assert one.std() > 0.01


@pytest.mark.parametrize("variant", ["dense", "factorized_dense"])
def test_dense_synthesizer_scores_depend_on_the_querys_token_alone(variant):
    position, at = build("synthesizer", variant=variant), Positions(0, 1, 7)
    value, words = torch.zeros(2, HEADS, 7, 1, dtype=torch.float64), embeddings(7)
    changed = words.clone()
    changed[:, 3] += 1
    one, other = (
        attention_weights(None, None, value, position.terms(hidden, Site(at, at, 1))) for hidden in (words, changed)
    )
    assert ((one != other).any(-1).any(1) == (torch.arange(7) == 3)).all()


@pytest.mark.parametrize(("near_size", "a", "b"), [(None, 6, 4), (4, 4, 6), (1, 1, 24), (24, 24, 1)])
@pytest.mark.parametrize("tiling", ["pairs", "tile"])
def test_factorized_dense_synthesizer_is_a_product_of_two_short_rows(tiling, near_size, a, b):
    position = build("synthesizer", variant="factorized_dense", tiling=tiling, near_size=near_size)  # of 24 positions
    hidden, queries, keys = embeddings(5), Positions(3, 2, 5), Positions(0, 1, MAX_LENGTH)
    [term] = position.terms(hidden, Site(queries, keys, 2))
    assert (position.near_size, position.far_size) == (a, b)
    near = nn.functional.linear(hidden, position.near[2], position.near_bias[2]).unflatten(-1, (HEADS, a))
    far = nn.functional.linear(hidden, position.far[2], position.far_bias[2]).unflatten(-1, (HEADS, b))
    for j in range(MAX_LENGTH):
        expected = near[..., j % a] * far[..., j // a if tiling == "pairs" else j % b]  # (batch, n_q, heads)
        assert_close(term.scores[..., j], expected.mT)


@pytest.mark.parametrize("variant", ["random", "factorized_random", "dense", "factorized_dense"])
def test_mixing_in_equal_shares_is_the_mean_of_both_scores(variant):
    mix, add = (build("synthesizer", variant=variant, content=content) for content in ("mix", "add"))
    add.load_state_dict({name: value for name, value in mix.state_dict().items() if name != "alpha"})
    nn.init.zeros_(mix.alpha)
    at, hidden = Positions(0, 1, 7), embeddings(7)
    query, key, value = torch.randn(3, 2, HEADS, 7, HEAD_DIM, dtype=torch.float64)
    halved, _, _ = mix.rotate(query, key, value, Site(at, at))
    assert_close(halved, query / 2)
    # Twice the mean is the sum: content at twice the scale, and the synthetic term counted twice.
    doubled = attention(halved, key, value, mix.terms(hidden, Site(at, at)) * 2, scale=2 * HEAD_DIM**-0.5)
    assert_close(doubled, attention(query, key, value, add.terms(hidden, Site(at, at))))


VARIANTS = ("random", "factorized_random", "dense", "factorized_dense")


@pytest.mark.parametrize("content", ["none", "add", "mix"])
@pytest.mark.parametrize("mixture", ["softmax", "sum"])
@pytest.mark.parametrize("variants", [("random", "dense"), ("dense", "factorized_dense"), VARIANTS], ids="+".join)
def test_a_mixture_of_synthesizers_is_the_weighted_sum_of_its_parts(variants, mixture, content):
    position = build("synthesizer", variant="+".join(variants), mixture=mixture, content=content)
    at, hidden = Positions(0, 1, 7), embeddings(7)
    query, key, value = torch.randn(3, 2, HEADS, 7, HEAD_DIM, dtype=torch.float64)
    parts = []
    for variant in variants:
        part = build("synthesizer", variant=variant)
        given = position.state_dict()
        part.load_state_dict({name: given[name] for name in part.state_dict()})
        parts.append(scores(part.terms(hidden, Site(at, at, 1)), 7, 7))
    alpha = position.alpha
    if mixture == "softmax":
        shares = torch.cat((torch.zeros(int(content == "mix"), dtype=torch.float64), alpha[1])).softmax(-1)
        of_content, shares = (shares[0], shares[1:]) if content == "mix" else (1.0, shares)
    else:
        share = torch.sigmoid(alpha[1]) if content == "mix" else 1.0
        of_content, shares = (1 - share if content == "mix" else 1.0), [share] * len(variants)
    expected = sum(share * part for share, part in zip(shares, parts, strict=True))
    assert_close(scores(position.terms(hidden, Site(at, at, 1)), 7, 7), expected)
    assert_close(position.rotate(query, key, value, Site(at, at, 1))[0], query * of_content)


def test_a_mixture_starts_with_equal_shares():
    for content, count in (("none", 2), ("add", 2), ("mix", 3)):
        position = build_position(
            "synthesizer", hidden_size=8, num_heads=2, max_length=6, variant="random+dense", content=content
        )
        assert_close(torch.stack(list(position._shares(0))), torch.full((count,), 1 / count))


def test_floater_without_a_velocity_stays_where_it_starts():
    position = make("floater")
    nn.init.zeros_(position.out.weight)
    nn.init.zeros_(position.out.bias)
    assert_close(position.trajectory(6), position.initial.expand(6, -1, -1, -1))


@few
@given(length=st.integers(1, 12), more=st.integers(0, 8))
def test_floater_vectors_do_not_depend_on_the_length(length, more):
    position = make("floater")
    assert torch.equal(position.trajectory(length + more)[:length], position.trajectory(length))
