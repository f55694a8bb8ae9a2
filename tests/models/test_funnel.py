"""Funnels with every position method: what they compute, what they must not depend on, and how they are used."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.funnels import funnel_config, inputs_of, strong, written_out
from tests.models.test_encoder import POSITIONS
from whereformer import Encoder, EncoderConfig, Site

LENGTHS = [*range(1, 10), 16, 17, 33]

# Any two options meet in some row.
SETTINGS = [
    {"blocks": "1-1-1", "segments": "attention"},
    {"blocks": "1-1-1", "decoder_layers": "1", "pooling": "max", "norm": "pre", "windows": "4,0"},
    {"blocks": "1x2-2", "decoder_layers": "1x2", "truncate_seq": False, "segments": "attention", "windows": "2,3,5"},
    {"blocks": "1x2-2", "pool_query_only": False, "pooling": "min", "mask_pooling": "all"},
    {"blocks": "1-1-1", "pool_query_only": False, "truncate_seq": False, "norm": "pre", "segments": "attention"},
    {"blocks": "1-1-1", "separate_cls": False, "decoder_layers": "1", "mask_pooling": "all", "segments": "attention"},
    {"blocks": "1x2-2", "separate_cls": False, "pooling": "max", "norm": "pre"},
    {"blocks": "1-1-1", "pool_query_only": False, "decoder_layers": "1", "pooling": "min", "segments": "attention"},
    {"blocks": "1-1-1", "separate_cls": False, "pool_query_only": False, "truncate_seq": False, "pooling": "min"},
]
NAMES = ["-".join(str(value) for value in row.values()) for row in SETTINGS]

# Every method with every setting; a sixth of them, which has each of both, is not slow.
PRODUCT = [
    pytest.param(position, row, id=f"{position}-{name}", marks=[] if (turn + column) % 6 == 0 else pytest.mark.slow)
    for turn, (row, name) in enumerate(zip(SETTINGS, NAMES, strict=True))
    for column, position in enumerate(POSITIONS)
]


def build(position, **changes):
    quick = {"floater": {"substeps": 1}, "fire": {"initial_threshold": 8.0}}
    config = funnel_config(position=position, type_vocab_size=3, position_options=quick.get(position), **changes)
    return strong(Encoder(config))


def states_of(model, inputs):
    return model(**inputs, output_hidden_states=True).hidden_states


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def loss_of(*states):
    """A number that depends on all of them, differently."""
    return sum((state * torch.arange(state.numel()).sin().view_as(state)).sum() for state in states)


def gradients(states, model):
    loss = loss_of(*states)
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize(("position", "changes"), PRODUCT)
def test_it_computes_what_the_definition_says(position, changes):
    model = build(position, **changes)
    # All lengths where positions have two forms, others elsewhere in turn.
    turn = SETTINGS.index(changes) + POSITIONS.index(position)
    lengths = LENGTHS if position == "transformer_xl" else LENGTHS[turn % 6 :: 6]
    for length in lengths:
        inputs = inputs_of(length)
        states, expected = states_of(model, inputs), written_out(model, **inputs)
        close(states, tuple(expected))
        pairs = zip(model.config.block_lengths(length), model.blocks, strict=True)
        pooled = [count for count, block in pairs for _ in block]
        # With a decoder the states end with its input and its layers', at full length.
        decoded = [length] * (len(model.decoder) + 1 if model.has_decoder else 0)
        assert [state.shape[1] for state in states] == [length, *pooled, *decoded]
    for ours, theirs in zip(gradients(states, model), gradients(expected, model), strict=True):
        assert ours.isfinite().all()
        close(ours, theirs, 1e-8)


some_funnel = st.sampled_from([row for row in SETTINGS if "norm" not in row])


INVARIANT = ["none", "shaw", "t5", "rope", "tisa", "alibi", "kerple", "deberta", "fox"]


@settings(max_examples=25)
@given(st.sampled_from(INVARIANT), some_funnel, st.integers(1, 20), st.integers(1, 50))
def test_a_common_shift_of_all_positions_changes_nothing(position, changes, length, shift):
    model, inputs = build(position, **changes), inputs_of(length)
    position_ids = torch.arange(length)
    out = model(**inputs, position_ids=position_ids).last_hidden_state
    close(model(**inputs, position_ids=position_ids + shift).last_hidden_state, out)


def depends_on_distance_to_cls(model):
    """Whether attention changes when [CLS] moves from position 0 to -1.

    Pooling moves [CLS] away from the other tokens, unless the caller passes positions.
    """
    config, generator = model.config, torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 4, config.hidden_size, generator=generator).double()
    heads = torch.randn(
        3, 1, config.num_attention_heads, 4, model.position.model.head_dim, generator=generator
    ).double()
    near, far = (
        model.position.attend(hidden, *heads, Site(positions, positions, min_position=-1))
        for positions in (torch.tensor([0, 1, 2, 3]), torch.tensor([-1, 1, 2, 3]))
    )
    return not torch.allclose(near, far)


@pytest.mark.parametrize(("position", "changes"), PRODUCT)
def test_given_positions_are_the_default_ones_but_for_cls(position, changes):
    # A window is wide enough for [CLS] in one place and not in the other.
    model, inputs = build(position, **{**changes, "windows": None}), inputs_of(16)
    out = model(**inputs).last_hidden_state
    for position_ids in (torch.arange(16), torch.arange(16).expand(3, -1)):
        actual = model(**inputs, position_ids=position_ids).last_hidden_state
        if model.config.separate_cls and depends_on_distance_to_cls(model):
            assert not torch.allclose(actual, out)
        else:
            close(actual, out)


def test_examples_of_lengths():
    def lengths(n, **options):
        return EncoderConfig(blocks="1-1-1", **options).block_lengths(n)

    assert lengths(512) == (512, 256, 128)
    assert lengths(13) == lengths(13, truncate_seq=False) == lengths(13, separate_cls=False) == (13, 7, 4)
    assert lengths(16) == lengths(16, separate_cls=False) == (16, 8, 4)
    assert lengths(16, truncate_seq=False) == (16, 9, 5)
    assert EncoderConfig(blocks="12").block_lengths(7) == (7,)
    with pytest.raises(ValueError, match="length: expected at least 1, got 0"):
        lengths(0)


@pytest.mark.parametrize("separate", [True, False])
def test_more_halvings_than_tokens(separate):
    """What cannot be halved stays as it is."""
    model = build("transformer_xl", blocks="1-1-1-1-1", separate_cls=separate, decoder_layers="1")
    shortest = 2 if separate else 1
    for length in (1, 2, 3):
        inputs = inputs_of(length)
        states = states_of(model, inputs)
        assert states[5].shape[1] == min(length, shortest)
        close(states, tuple(written_out(model, **inputs)))


@pytest.mark.parametrize("position", ["tisa", "transformer_xl", "tupe+t5", "shaw"])
def test_half_precision_stays_close(position):
    config = {"blocks": "1-1-1", "decoder_layers": "1", "segments": "attention", "position": position}
    model, inputs = Encoder(funnel_config(**config)).eval(), inputs_of(17, types=2)
    expected = model(**inputs).last_hidden_state
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(**inputs).last_hidden_state
        mixed.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    half = model.bfloat16()(**inputs).last_hidden_state
    assert half.dtype == torch.bfloat16
    for out in (mixed, half):
        assert (out.float() - expected).abs().mean() < 0.03


def compile_and_count(model):
    """The model compiled for all lengths, and a list that grows with every compilation."""
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    return torch.compile(model, fullgraph=True, dynamic=True, backend=backend), graphs


@pytest.mark.slow
@pytest.mark.parametrize("position", ["tisa", "transformer_xl"])
def test_one_graph_serves_all_lengths(position):
    model = build(position, blocks="1-1", decoder_layers="1", max_position_embeddings=100)
    compiled, graphs = compile_and_count(model)
    with torch.no_grad():
        for length in (16, 17, 9, 13, 24, 33, 70):
            inputs = inputs_of(length)
            close(compiled(**inputs).last_hidden_state, model(**inputs).last_hidden_state)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": None}, "blocks: expected text, got None"),
        ({"blocks": "2", "decoder_layers": "1"}, "decoder_layers: there is no pooling to undo"),
        ({"blocks": "2-2", "decoder_layers": "1-1"}, "decoder_layers: expected one block"),
        ({"blocks": "2-2", "decoder_layers": "1x0"}, "decoder_layers: expected layers as"),
        ({"pooling": "median"}, "pooling: expected one of mean, max, min, got 'median'"),
        ({"mask_pooling": "some"}, "mask_pooling: expected one of any, all, got 'some'"),
    ],
)
def test_bad_configurations_are_named(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        funnel_config(**changes)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("attention_mask", torch.ones(1, 3), r"expected shape \(1, 8\), got \(1, 3\)"),
        ("attention_mask", torch.ones(1, 5), r"expected shape \(1, 8\), got \(1, 5\)"),
        ("token_type_ids", torch.ones(8).long(), r"expected shape \(1, 8\), got \(8,\)"),
        ("position_ids", torch.arange(5), r"expected shape \(8,\) or \(1, 8\), got \(5,\)"),
    ],
)
def test_bad_inputs_are_named(name, value, message):
    model = Encoder(funnel_config(blocks="1-1"))
    with pytest.raises(ValueError, match=f"^{name}: {message}"):
        model(torch.ones(1, 8, dtype=torch.long), **{name: value})
