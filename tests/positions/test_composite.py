"""Patterns over layers: every method acts in its own layers as it would in a model of these alone."""

import pytest
import torch
from transformers import Cohere2Config, Cohere2Model, SmolLM3Config, SmolLM3Model

from tests.positions.stack import HEADS, WIDTH, build, embeddings
from whereformer import Encoder, EncoderConfig, Positions, Site, attach, build_position, detach, load_pretrained
from whereformer.analysis.position_scores import find_acting_layers, read_layer_scores
from whereformer.positions import CompositeMethod, canonical_name, component_names, layer_pattern, method_class
from whereformer.positions.testing import attend, check_position, randomize_parameters

SIZES = {"hidden_size": WIDTH, "num_heads": HEADS, "max_length": 24}


PATTERNS = [
    "rope/none",
    "tisa/shaw",
    "learned+tisa/learned",
    "fox/rope+logn",
    "transformer_xl/none",
    "floater/t5/floater/none",
]


def check_pattern(name, **options):
    check_position(name, **options, **({"floater": {"substeps": 1}} if "floater" in name else {}))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_patterns_keep_the_laws(name, causal):
    check_pattern(name, causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_compile(name):
    check_pattern(name, causal=True, compiles=True)


def test_every_layer_is_that_of_its_method_alone():
    position = build("tisa/rope/tisa/shaw", 8, shaw={"clip": 2})
    tisa, rope, shaw = position.parts
    assert tisa.amplitude.shape[0] == 4
    assert shaw.keys.shape[:2] == (2, 5)
    assert position.layers == [[0, 2, 4, 6], [1, 5], [3, 7]]
    words = embeddings(9)
    for layer, (part, part_layer) in enumerate(
        [(tisa, 0), (rope, 0), (tisa, 1), (shaw, 0), (tisa, 2), (rope, 1), (tisa, 3), (shaw, 1)]
    ):
        assert position.components(layer) == (part,)
        assert torch.equal(attend(position, words, layer=layer), attend(part, words, layer=part_layer))


def test_a_shared_layer_is_counted_among_the_passes_of_its_method():
    position = build("transformer_xl/none/transformer_xl/transformer_xl", 8, layer_of_pass=[0, 0, 0, 0, 1, 1, 2, 2])
    assert position.parts[0].model.layer_of_pass == (0, 0, 0, 1, 2, 2)
    assert len(position.parts[0].kernel) == 3


def test_one_pattern_of_one_method_is_that_method():
    assert type(build_position("tisa", **SIZES)) is type(build("tisa/tisa", 2))
    assert canonical_name(" rope / rope") == "rope"
    assert canonical_name("nope/rope+nope") == "none/rope+none"
    assert layer_pattern("a + b/c") == [["a", "b"], ["c"]]
    assert component_names("rope+logn/rope/none") == ["rope", "logn", "none"]


def test_a_method_of_the_embeddings_is_below_all_layers():
    position = build("learned+tisa/learned/rope+learned/learned", 4)
    assert [type(part).__name__ for part in position.components()] == ["Learned", "Tisa", "Rope"]
    words, positions = embeddings(5), Positions(0, 1, 5)
    assert torch.equal(position.embed(words, positions), position.parts[0].embed(words, positions))
    message = r"^position: learned acts on the embeddings, so it must appear in every layer"
    with pytest.raises(ValueError, match=message):
        build("learned+tisa/rope", 2)


def test_options_of_one_part_win_over_those_for_all():
    position = build("tisa/t5+rope", 2, max_distance=40, t5={"max_distance": 20}, tisa={"num_kernels": 2})
    assert position.parts[0].amplitude.shape[-1] == 2
    assert position.parts[1].max_distance == 20
    with pytest.raises(TypeError, match=r"^position 't5' has no option 'clip'; it has max_distance, num_buckets"):
        build("tisa/t5", 2, t5={"clip": 3})
    with pytest.raises(TypeError, match=r"^position 'tisa/t5' has no option 'shaw'"):
        build("tisa/t5", 2, shaw={"clip": 3})
    with pytest.raises(ValueError, match=r"^rope: expected a dictionary with options of only this method, got 3$"):
        build("rope/none", 2, rope=3)


def test_curves():
    position = build("tisa/none/rope", 3)
    assert position.curve([-1, 0, 1]).equal(position.parts[0].curve([-1, 0, 1]))
    assert position.curve([-1, 0, 1], layer=1).equal(torch.zeros(HEADS, 3, dtype=torch.float64))
    assert position.curve([-1, 0, 1], layer=2) is None


def test_a_method_in_several_places_is_one():
    """It has its own layers wherever it stands, and acts in the order of each place."""
    position = build("tisa+rope/rope/rope+tisa", 5)
    assert [type(part).__name__ for part in position.components()] == ["Tisa", "Rope"]
    assert position.layers == [[0, 2, 3], [0, 1, 2, 3, 4]]
    assert [len(position.components(layer)) for layer in range(5)] == [2, 1, 2, 2, 1]
    assert position.layer_parts[2] == [(1, 2), (0, 1)]


def test_a_pattern_is_cut_where_the_layers_end():
    position = build("rope/rope/rope/none", 6)
    assert position.layers == [[0, 1, 2, 4, 5], [3]]
    assert type(build("rope/tisa", 1)) is method_class("rope")


@pytest.mark.parametrize(
    ("name", "layers", "message"),
    [
        ("rope//none", 3, "a method name is missing in 'rope//none'; "),
        ("rope, rope,none", 3, "unknown position method 'rope, rope,none'"),
        ("rope/tisa+tisa", 2, r"'rope/tisa\+tisa' names a method twice"),
        ("synthesizer/rope", 2, r"a Synthesizer with content='none' replaces query \. key in all layers or in none"),
    ],
)
def test_patterns_that_do_not_fit_are_refused(name, layers, message):
    with pytest.raises(ValueError, match=f"^position: {message}"):
        build(name, layers)
    with pytest.raises(ValueError, match=f"^position: {message}"):
        Encoder(EncoderConfig(hidden_size=8, num_attention_heads=2, vocab_size=9, blocks=str(layers), position=name))


# --- in models


def encoder(position, blocks="4", **options):
    config = EncoderConfig(
        vocab_size=20,
        hidden_size=16,
        num_attention_heads=2,
        max_position_embeddings=24,
        blocks=blocks,
        position=position,
        initializer_range=0.3,
        **options,
    )
    return Encoder(config).double().eval()


def test_an_encoder_has_the_pattern():
    ids = torch.randint(1, 20, (2, 9))
    mixed, alone = encoder("tisa/none"), encoder("none")
    alone.load_state_dict(mixed.state_dict(), strict=False)
    hidden = mixed(ids, output_hidden_states=True).hidden_states
    positions = Positions(0, 1, 9)
    assert not mixed.position.terms(hidden[1], Site(positions, positions, 1))
    assert mixed.position.terms(hidden[1], Site(positions, positions, 2))
    randomize_parameters(mixed.position)
    assert (mixed(ids)[0] - alone(ids)[0]).abs().max() > 1e-3
    mixed.position.parts[0].amplitude.data.zero_()
    torch.testing.assert_close(mixed(ids)[0], alone(ids)[0])


@pytest.mark.parametrize("options", [{"blocks": "1x4"}, {"blocks": "2-2"}, {"blocks": "2-1", "decoder_layers": "1"}])
def test_other_shapes_of_encoders(options):
    model = encoder("rope/shaw", **options)
    out = model(torch.randint(1, 20, (2, 9)))[0]
    out.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.position.parameters())


def test_saved_and_loaded(tmp_path):
    model = encoder("tisa/rope", position_options={"tisa": {"num_kernels": 2}})
    model.save_pretrained(tmp_path)
    ids = torch.randint(1, 20, (2, 9))
    for loaded in (Encoder.from_pretrained(tmp_path).double(), load_pretrained(tmp_path).double()):
        torch.testing.assert_close(loaded.eval()(ids)[0], model(ids)[0], rtol=1e-5, atol=1e-5)
    changed = load_pretrained(tmp_path, position="tisa")
    assert changed.position.amplitude.shape == (4, 2, 2)
    assert any("position." in name for name in changed.loading_report.initialized)


def test_which_layers_use_position():
    assert find_acting_layers(encoder("rope/none/none/tisa").position) == [0, 3]
    assert find_acting_layers(encoder("learned+rope/learned").position) == [0, 2]
    assert [actual.layer for actual in read_layer_scores(encoder("rope/none/none/tisa"), 5)] == [0, 3]
    assert not list(read_layer_scores(encoder("none"), 5))
    assert [actual.layer for actual in read_layer_scores(encoder("learned/learned+tisa"), 5)] == [0, 1, 3]


def outputs(model, ids, mask):
    with torch.no_grad():
        return model(ids, attention_mask=mask).last_hidden_state


THEIRS = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8}
THEIRS |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("config", "model_class", "options"),
    [
        (SmolLM3Config(**THEIRS, use_sliding_window=False), SmolLM3Model, {"base": 2_000_000.0}),
        (Cohere2Config(**THEIRS, sliding_window=5), Cohere2Model, {"layout": "interleaved"}),
    ],
    ids=["SmolLM3", "Cohere2"],
)
def test_parity_with_models_that_rotate_in_some_layers(config, model_class, options):
    """Their own rotations, switched off and attached again, give the same numbers; in all layers they do not."""
    torch.manual_seed(0)
    model = model_class(config).double().eval()
    ids = torch.randint(1, 40, (2, 13))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0  # on the left: the positions of all tokens move
    token_mask = mask.bool()
    expected = outputs(model, ids, mask)[token_mask]
    base = {"base": config.rope_parameters["rope_theta"]}
    attach(model, "rope/rope/rope/none", keep_absolute=False, **{**options, **base})
    assert isinstance(model.whereformer, CompositeMethod)
    assert find_acting_layers(model.whereformer) == [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(
        outputs(model, ids, mask)[token_mask], expected, rtol=1e-5, atol=1e-6
    )  # theirs is in float32
    attach(detach(model), "rope", keep_absolute=False, **{**options, **base})
    assert (outputs(model, ids, mask)[token_mask] - expected).abs().max() > 1e-3
