"""What the attributes of a method say of it, beside what it does: all methods with their options, and pairs of them."""

import itertools

import pytest
import torch

from tests.positions.stack import HEADS, LAYERS, MAX_LENGTH, METHODS, QUICK, WIDTH, build, embeddings, make
from whereformer import PositionRangeError, Positions, Site, attention, position_names
from whereformer.positions import PositionMethod
from whereformer.positions.base import OffsetFunction
from whereformer.positions.testing import attend

FIRST = Positions(0, 1, 9)


def random_heads(count):
    return torch.randn(count, 2, HEADS, 9, WIDTH // HEADS, dtype=torch.float64)


def are_close(ours, theirs):
    return torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def in_every_layer(check):
    return all(check(layer) for layer in range(LAYERS))


# --- what a method does, by the name of the attribute that states it


def is_shift_invariant(position, run=attend, layers=LAYERS, starts=(-3, 1, 5, 400)):
    """The same for positions that are all lower, higher or much higher, affine or explicit."""
    words = embeddings(9)

    def check(layer):
        expected = run(position, words, FIRST, FIRST, layer=layer)
        for start, explicit in itertools.product(starts, (False, True)):
            positions = Positions(start, 1, 9)
            positions = positions.values() if explicit else positions
            try:
                if not are_close(run(position, words, positions, positions, layer=layer), expected):
                    return False
            except PositionRangeError:
                pass
        return True

    return all(check(layer) for layer in range(layers))


def attend_alone(position, words, queries, keys, layer):
    """Attention without what a method does to embeddings."""
    torch.manual_seed(1)
    return position.attend(words, *random_heads(3), Site(queries, keys, layer))


def multiplies_query_and_key(position):
    """Scores depend on query and key."""
    words, (query, key, *other_heads, value) = embeddings(9), random_heads(5)
    return not in_every_layer(
        lambda layer: are_close(
            position.attend(words, query, key, value, Site(FIRST, FIRST, layer)),
            position.attend(words, *other_heads, value, Site(FIRST, FIRST, layer)),
        )
    )


def needs_query_key(position):
    """What the method does depends on query and key, other than by their own product."""
    words, (query, key, value) = embeddings(9), random_heads(3)
    zeros, causal = torch.zeros_like(query), position.model.causal

    def check(layer):
        site = Site(FIRST, FIRST, layer)
        _, _, changed, terms = position.apply_hooks(words, zeros, zeros, value, site)
        try:
            without = attention(None, None, changed, terms, causal=causal)
        except ValueError:  # a term is a product with query or key
            return False
        return are_close(without, attention(zeros, zeros, changed, terms, causal=causal)) and are_close(
            position.attend(words, query, key, value, site), attention(query, key, changed, terms, causal=causal)
        )

    return position.uses_query_key and not in_every_layer(check)


def extrapolates(position):
    try:
        attend(position, embeddings(2 * MAX_LENGTH))
    except PositionRangeError:
        return False
    return True


def scales_query(position):
    query, key, value = random_heads(3)
    if (
        type(position).query_factor is PositionMethod.query_factor
        or position.transform_qkv(query, key, value, Site(FIRST, FIRST))[0] is query
    ):
        return False
    return in_every_layer(
        lambda layer: are_close(
            position.transform_qkv(query, key, value, Site(FIRST, FIRST, layer))[0],
            query * position.query_factor(query, Site(FIRST, FIRST, layer)),
        )
    )


def reads_keys_before_they_are_rotated(position):
    """Terms depend on the keys, or a factor counts all of them."""
    query, key = random_heads(2)
    counts = any(method.scales_query for method in position.components())

    def terms(keys, layer):
        built = position.content_terms(query, keys, Site(FIRST, FIRST, layer))
        return [tensor for term in built for tensor in vars(term).values() if isinstance(tensor, torch.Tensor)]

    def check(layer):
        pairs = zip(terms(key, layer), terms(key.flip(2), layer), strict=True)
        return all(torch.equal(*pair) for pair in pairs)

    return position.uses_query_key and (counts or not in_every_layer(check))


def is_one_sided(position):
    """Built for causal attention, it tells earlier keys apart by their distance, and later ones not."""
    words, (query, key, value) = embeddings(1), random_heads(3)[..., :4, :]
    query_position = torch.tensor([10])

    def output_of(key_positions, layer):
        keys = torch.tensor(key_positions)
        new_query, new_key, new_value, terms = position.apply_hooks(
            words, query[:, :, :1], key, value, Site(query_position, keys, layer)
        )
        return attention(new_query, new_key, new_value, terms, query_positions=query_position, key_positions=keys)

    right = in_every_layer(
        lambda layer: are_close(output_of([11, 12, 13, 14], layer), output_of([11, 13, 16, 20], layer))
    )
    left = in_every_layer(lambda layer: are_close(output_of([6, 7, 8, 9], layer), output_of([2, 5, 7, 9], layer)))
    return position.model.causal and right and not left


def has_shared_curve(position):
    curves = [position.curve(range(-9, 10), layer=layer) for layer in range(LAYERS)]
    return all(torch.equal(curve, curves[0]) for curve in curves)


def acts_on_embeddings(position):
    return not torch.equal(position.embed(words := embeddings(9), FIRST), words)


def acts_on_values(position):
    """Values of zeros give outputs other than zeros."""
    words, (query, key, value) = embeddings(9), random_heads(3)
    return not in_every_layer(
        lambda layer: not position.attend(words, query, key, 0 * value, Site(FIRST, FIRST, layer)).any()
    )


def acts_on_scores(position):
    """Weights are not those of query . key alone."""
    words, (query, key, value) = embeddings(9), random_heads(3)

    def attended(value, layer):
        return position.attend(words, query, key, value, Site(FIRST, FIRST, layer))

    plain = attention(query, key, value, causal=position.model.causal)
    return not in_every_layer(lambda layer: are_close(attended(value, layer) - attended(0 * value, layer), plain))


FACTS = {
    "shift_invariant": is_shift_invariant,
    "depends_on_offsets_only": lambda position: is_shift_invariant(position, attend_alone),
    "uses_query_key": multiplies_query_and_key,
    "needs_query_key": needs_query_key,
    "reads_keys": reads_keys_before_they_are_rotated,
    "extrapolates": extrapolates,
    "scales_query": scales_query,
    "one_sided": is_one_sided,
    "shares_curve": has_shared_curve,
    "on embeddings": acts_on_embeddings,
    "on values": acts_on_values,
    "on weights": acts_on_scores,
}


def stated(position):
    """What the method's attributes say, by the names in ``FACTS``."""
    facts = {name: getattr(position, name) for name in FACTS if hasattr(position, name)}
    acts_on = position.acts_on
    return facts | {
        "depends_on_offsets_only": position.depends_on_offsets_only(),
        "on embeddings": "embeddings" in acts_on,
        "on values": "values" in acts_on,
        "on weights": bool(acts_on & {"queries", "keys", "scores"}),
    }


# Without kernels nothing is left of it, whatever it is made for.
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", [method for method in METHODS if method != "tisa without kernels"])
def test_a_method_does_what_its_attributes_say(method, causal):
    position = make(method, causal=causal).eval()
    if position.model.causal != causal:
        pytest.skip("it is causal by itself")
    facts = stated(position)
    if "+" in method:
        # Readers ask each of the methods that are joined.
        facts = {name: fact for name, fact in facts.items() if name not in ("scales_query", "one_sided")}
    assert {name: FACTS[name](position) for name in facts} == facts


def test_pairs_of_methods_are_shift_invariant_where_they_say_so():
    """Rope turns the queries that other methods' vectors meet: no shift changes rope or shaw, but one changes both."""
    silent = set()
    alone = [name for name in position_names() if make(name).depends_on_offsets_only()]
    for names in itertools.permutations(alone, 2):
        options = {name: QUICK[name] for name in names if name in QUICK}
        position = build("+".join(names), **options)
        for claimed, run in ((position.shift_invariant, attend), (position.depends_on_offsets_only(), attend_alone)):
            observed = is_shift_invariant(position, run, layers=1, starts=(-3, 5))
            assert observed or not claimed, names
            if observed and not claimed:
                silent.add(names)
    # It adds its bias to the query before rope turns both.
    assert silent == {("transformer_xl", "rope")}


@pytest.mark.parametrize("joined", ["rope+transformer_xl", "deberta+transformer_xl", "transformer_xl+floater"])
@pytest.mark.parametrize("reset_cls", [False, True])
def test_forms_of_transformer_xl_are_the_same_beside_methods_that_change_the_query(joined, reset_cls):
    options = {name: QUICK[name] for name in joined.split("+") if name in QUICK}
    shifted = build(joined, **options, transformer_xl={"form": "shifted", "reset_cls": reset_cls})
    factorized = build(joined, **options, transformer_xl={"form": "factorized", "reset_cls": reset_cls})
    factorized.load_state_dict(shifted.state_dict())
    words = embeddings(9)
    for layer in range(LAYERS):
        torch.testing.assert_close(
            attend(shifted, words, layer=layer), attend(factorized, words, layer=layer), rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("method", [method for method in METHODS if isinstance(make(method), OffsetFunction)])
def test_a_curve_is_constant_beyond_its_reach(method):
    position, offsets = make(method), torch.arange(-5, 6)
    # Layers that share their curve are one row, or as many.
    layers = range(1 if position.shares_curve else LAYERS)
    for layer, curve, reach in zip(
        layers, position.curve_per_layer(offsets), position.reach_per_layer(), strict=not position.shares_curve
    ):
        assert torch.equal(curve, position.curve(offsets, layer=layer))
        assert reach == position.reach(layer=layer)
        if reach is not None:
            far = torch.arange(reach, 3 * reach + 10)
            for side in (far, -far):
                values = position.curve(side, layer=layer)
                torch.testing.assert_close(values, values[:, :1].expand_as(values), rtol=0, atol=1e-15)
