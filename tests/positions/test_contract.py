"""The promises of every position method in the registry, alone and in compositions.

Most are laws of ``check_position``, which tests/test_testing.py checks for each of these methods.
"""

import shutil
from functools import partial

import pytest
import torch

from tests.positions.layers import scores
from tests.positions.stack import (
    EACH_METHOD,
    HEADS,
    LAYERS,
    MAX_LENGTH,
    METHODS,
    WIDTH,
    build,
    embeddings,
    make,
    parts_of,
)
from whereformer import OffsetBias, PositionRangeError, Positions, Site, build_position, position_names, positions
from whereformer.positions import ModelShape, PositionMethod, method_class, register
from whereformer.positions.floater import integrate
from whereformer.positions.testing import attend

FIXED_LENGTH = {name for name in position_names() if not method_class(name).extrapolates}

NEEDS_COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler"
)
all_methods = pytest.mark.parametrize("method", METHODS)
each_method = pytest.mark.parametrize("method", EACH_METHOD)
"""The same, for what one set of options of each method tells well enough every day."""


def assert_close(actual, expected, tolerance=1e-11):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# --- parameters


@all_methods
def test_a_layer_reads_its_own_parameters_alone(method):
    position, words = make(method), embeddings(8).requires_grad_()
    for layer in range(LAYERS):
        out = attend(position, words, layer=layer)
        parameters = dict(position.named_parameters())
        gradients = torch.autograd.grad(out.square().sum(), [words, *parameters.values()])
        for name, gradient in zip(parameters, gradients[1:], strict=True):
            if LAYERS in gradient.shape:
                of_other_layers = gradient.movedim(gradient.shape.index(LAYERS), 0).roll(-layer, 0)[1:]
                assert not of_other_layers.any(), name


# --- where queries and keys are

LIMITED = {*FIXED_LENGTH, "floater"}


@pytest.mark.parametrize("method", [method for method in METHODS if parts_of(method) & LIMITED])
def test_positions_out_of_range_are_named(method):
    position, words, (name,) = make(method), embeddings(3), parts_of(method) & LIMITED
    for start, wrong in ((MAX_LENGTH - 3, None), (MAX_LENGTH - 2, MAX_LENGTH), (-2, -2)):
        affine = Positions(start, 1, 3)
        for line in (affine, affine.values(), affine.values().expand(2, -1)):
            # Floater integrates further, but not backwards and not to explicit positions.
            if wrong is None or (name == "floater" and wrong > 0 and line is affine):
                assert attend(position, words, line, line).isfinite().all()
                continue
            message = rf"^{name} covers positions 0 to .* \(.*\), got position {wrong}; raise "
            with pytest.raises(PositionRangeError, match=message):
                attend(position, words, line, line)


def test_positions_of_other_tokens_and_numbers_are_refused():
    with pytest.raises(ValueError, match=r"^positions: expected those of 2 tokens, got 3$"):
        make("learned").embed(embeddings(2), Positions(0, 1, 3))
    with pytest.raises(ValueError, match=r"^key_positions: expected Positions\(start, stride, length\) .*, got 10$"):
        Site(Positions(0, 1, 3), 10)


def test_compiled_code_reads_no_row_from_the_end_for_a_negative_position():
    embed = torch.compile(make("learned").embed, backend="eager")
    with pytest.raises(IndexError, match="index 24 is out of bounds"):
        embed(embeddings(2), torch.tensor([0, -1]))


@each_method
def test_a_method_that_is_not_built_causal_sees_all(method):
    position, words = make(method, causal=False), embeddings(8)
    changed = torch.cat((words[:, :5], embeddings(3)), 1)
    difference = (attend(position, changed) - attend(position, words))[:, :5].abs().amax(-1)
    assert (difference > 1e-12).all()  # softmax may leave little of a token
    with pytest.raises(ValueError, match=r"^causal: the method was built with causal=True, got False$"):
        attend(make(method, causal=True), words, causal=False)


# --- precision


def hooks(position, positions, hidden, heads):
    """Everything a method gives for one layer, as a list of tensors."""
    site, n = position.with_shared(Site.self_attention(positions, layer=1)), positions.length
    # A table may end where it no longer changes by more than rounding, which depends on the precision.
    tensors = [
        scores([term], n, n) if isinstance(term, OffsetBias) else tensor
        for term in position.terms(hidden, site)
        for tensor in vars(term).values()
        if isinstance(tensor, torch.Tensor)
    ]
    return [position.embed(hidden, positions), *position.transform_qkv(*heads, site), *tensors]


def test_fire_in_half_precision_does_not_round_its_threshold():
    position, site = (
        build("fire", dtype=torch.bfloat16, initial_threshold=777.0),
        Site.self_attention(Positions(0, 1, 9)),
    )
    [term] = position.terms(torch.zeros(1, 9, WIDTH), site)
    [exact] = position.double().terms(torch.zeros(1, 9, WIDTH), site)
    torch.testing.assert_close(term.scores.double(), exact.scores, rtol=1e-6, atol=1e-6)


def test_floater_in_half_precision_does_not_lose_its_small_steps():
    position = make("floater", dtype=torch.bfloat16)
    trajectory = position.trajectory(30)
    exact = position.double().trajectory(30)
    assert (trajectory - exact).abs().max() < 1e-5 * exact.abs().max()


PROJECT = {"transformer_xl", "deberta", "tupe", "inkling"}
"""Methods whose terms come from products with trained matrices, which autocast rounds like those of a linear layer."""


@each_method
def test_autocast_does_not_round_positions(method):
    position, positions = make(method, dtype=torch.float32), Positions(0, 1, 9)
    hidden, heads = torch.randn(1, 9, WIDTH), torch.randn(3, 1, HEADS, 9, WIDTH // HEADS)
    expected = hooks(position, positions, hidden, heads)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = hooks(position, positions, hidden, heads)
        out = attend(position, hidden)
    for ours, exact in zip(under_autocast, expected, strict=True):
        if parts_of(method) & PROJECT or "dense" in method:
            assert (ours.float() - exact).abs().max() <= 0.02 * exact.abs().max()
        else:
            assert torch.equal(ours, exact)
    exact = attend(position, hidden)
    assert (out.float() - exact).abs().max() < 0.06 * exact.abs().max()


# --- torch.compile


@pytest.mark.parametrize("backend", ["count", pytest.param("inductor", marks=[pytest.mark.slow, NEEDS_COMPILER])])
def test_compiled_floater_does_not_grow_with_the_length(backend):
    position, graphs = build("floater+tisa+t5" if backend == "inductor" else "floater", substeps=1), []

    def count(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    for length in (4, MAX_LENGTH):
        torch.compiler.reset()
        compiled = torch.compile(
            partial(attend, position), fullgraph=True, backend=count if backend == "count" else backend
        )
        words = embeddings(length)
        assert_close(compiled(words), attend(position, words), 1e-9)
    if graphs:
        assert len(graphs[0]) == len(graphs[1])
        assert graphs[1].count("whereformer.floater_trajectory.default") == 1


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("solver", ["rk4", "midpoint"])
def test_the_floater_operator_is_the_solver(solver, length):
    position = make("floater", solver=solver)
    weights = [position.initial, *position.hidden.parameters(), *position.out.parameters()]
    operator = torch.ops.whereformer.floater_trajectory
    out, plain = (solve(weights, length, solver, 2) for solve in (operator, integrate))
    assert_close(out, plain)
    direction = torch.randn(out.shape, dtype=torch.float64)
    gradients, plain_gradients = (
        torch.autograd.grad((result * direction).sum(), weights, allow_unused=True, materialize_grads=True)
        for result in (out, plain)
    )
    for ours, expected in zip(gradients, plain_gradients, strict=True):
        assert_close(ours, expected)


@pytest.mark.parametrize("length", [1, 3])
def test_the_floater_operators_are_well_formed(length):
    position = make("floater")
    weights = [position.initial, *position.hidden.parameters(), *position.out.parameters()]
    operators, settings = torch.ops.whereformer, (length, "rk4", 2)
    torch.library.opcheck(operators.floater_trajectory.default, (weights, *settings))
    inputs = (torch.randn(length, *position.initial.shape), [weight.detach() for weight in weights])
    torch.library.opcheck(operators.floater_trajectory_backward.default, (*inputs, *settings))


# --- curves


@pytest.mark.parametrize("causal", [False, True])
def test_the_curve_of_fire_is_what_it_adds_up_to_its_threshold(causal):
    position, positions = build("fire", initial_threshold=1e4, causal=causal), Positions(4, 1, 9)
    (term,) = position.terms(embeddings(9), Site(positions, positions, 2))
    assert_close(term.scores[0], position.curve(positions.values() - positions.values().unsqueeze(-1), layer=2))


def test_curve_of_a_composition_is_the_sum_of_its_parts():
    position = make("tisa", share_layers=True)
    both = build("alibi+tisa", share_layers=True)
    both.load_state_dict({f"parts.1.{name}": value for name, value in position.state_dict().items()})
    assert_close(both.curve(range(-3, 4)), position.curve(range(-3, 4)) + make("alibi").curve(range(-3, 4)))


def test_t5_has_no_curve_between_whole_offsets():
    with pytest.raises(TypeError, match="only at integer offsets"):
        make("t5").curve([0.5])


# --- lists


def test_methods_are_listed_by_pattern():
    assert position_names("l*") == [name for name in position_names() if name.startswith("l")]
    assert {"learned", "logn"} <= set(position_names("l*"))
    assert position_names("nope") == position_names("none") == ["none"]
    assert "nope" not in position_names()
    assert type(build_position("nope", **SIZES)) is method_class("none")


@pytest.mark.parametrize("name", position_names())
def test_every_method_has_a_source(name):
    method = method_class(name)
    assert method.paper, f"{method.__name__} needs the attribute paper, its authors, such as 'Su et al.'"
    assert method.year, f"{method.__name__} needs the attribute year, that of the paper"
    assert str(method.year) in method.__doc__, f"the docstring of {method.__name__} needs a Source, of {method.year}"


# --- building

SIZES = {"hidden_size": 16, "num_heads": 2, "max_length": 24}
LENGTH = "original_max_position_embeddings"
YARN = {"factor": 2, LENGTH: 512}
LONG = {"long_factor": [1.0] * 4, LENGTH: 512}


def scaled(kind, message, **numbers):
    return "rope", {"scaling": {"rope_type": kind, **numbers}}, f"scaling: {message}"


def divided(sections, arrangement, message, **sizes):
    return "rope", {"sections": sections, "arrangement": arrangement, **sizes}, f"sections: {message}"


WRONG_OPTIONS = [
    ("sinusoidal", {"layout": "half"}, r"layout: expected one of interleaved, blocks, got 'half'"),
    ("sinusoidal", {"embedding_size": 7}, r"layout: 'interleaved' needs an even embedding size, got 7"),
    ("sinusoidal", {"min_timescale": 0.0}, r"min_timescale: .*, got 0.0 and 10000.0"),
    ("learned", {"initializer_range": 0.0}, r"initializer_range: expected a positive number, got 0.0"),
    ("shaw", {"clip": -1}, r"clip: expected at least 0, got -1"),
    ("shaw", {"keys": False, "values": False}, r"keys: expected keys or values to be True"),
    ("t5", {"num_buckets": 7}, r"num_buckets: expected an even number of at least 4, got 7"),
    ("t5", {"num_buckets": 1, "causal": True}, r"num_buckets: expected at least 2, got 1"),
    ("t5", {"max_distance": 8}, r"max_distance: expected more than 8 \(the exact buckets\), got 8"),
    ("floater", {"solver": "euler"}, r"solver: expected one of rk4, midpoint, got 'euler'"),
    ("floater", {"substeps": 0}, r"substeps: expected at least 1, got 0"),
    ("synthesizer", {"variant": "sparse"}, r"variant: expected one of random, .*, got 'sparse'"),
    ("synthesizer", {"variant": "dense+dense"}, r"variant: 'dense\+dense' names a variant twice"),
    ("synthesizer", {"mixture": "mean"}, r"mixture: expected one of softmax, sum, got 'mean'"),
    ("synthesizer", {"rank": 0}, r"rank: expected at least 1, got 0"),
    ("rope", {"layout": "blocks"}, r"layout: expected one of half, interleaved, got 'blocks'"),
    ("rope", {"base": 0.0}, r"base: expected a positive number, got 0.0"),
    ("rope", {"rotary_dim": 10}, r"rotary_dim: expected an even number up to head_dim 8, got 10"),
    ("rope", {"scaling": {}}, r"scaling: expected a rope_type of default, linear, ntk, .*, proportional, got None"),
    ("rope", {"scaling": "yarn"}, r"scaling: expected a dictionary with rope_type and its numbers, got 'yarn'"),
    scaled("dynamic", r"expected a rope_type of .*, got 'dynamic'"),
    scaled("linear", r"'linear' needs factor"),
    scaled("linear", r"factor: expected a positive number from 1 to inf, got 0.5", factor=0.5),
    scaled("linear", r"factor: expected a number, got '2'", factor="2"),
    scaled("ntk", r"'ntk' has no 'beta'; it has factor", factor=2, beta=1),
    scaled("yarn", rf"{LENGTH}: expected a positive number from 2 to inf, got -1", factor=2, **{LENGTH: -1}),
    # Bounds in the wrong order would scale the short waves and keep the long ones.
    scaled("yarn", r"expected beta_slow < beta_fast, got 32 and 1", beta_fast=1, beta_slow=32, **YARN),
    scaled("llama3", r"expected low_freq_factor < high_freq_factor, got 4.0 and 4.0", low_freq_factor=4.0, **YARN),
    scaled("proportional", r"partial_rotary_factor: .* from 0 to 1, got 1.5", partial_rotary_factor=1.5),
    scaled("longrope", r"expected short_factor as 4 numbers, one per pair, got \[1\]", short_factor=[1], **LONG),
    scaled("longrope", r"short_factor: expected a positive number from 0", short_factor=[1, 1, 1, 0], **LONG),
    ("rope", {"arrangement": "mixed"}, r"arrangement: expected one of blocks, interleaved, axial, got 'mixed'"),
    divided([5, -1], "blocks", r"expected a list of integers from 1 on, got \[5, -1\]"),
    divided([2, 1], "blocks", r"expected 4 pairs together, half of rotary_dim, got \[2, 1\]"),
    divided([3, 1], "axial", r"expected equal numbers with 'axial', got \[3, 1\]"),
    divided([1, 3], "interleaved", r"expected no number above the first with 'interleaved', got \[1, 3\]"),
    divided(
        [3, 2, 3], "interleaved", r"'interleaved' would give the axes \[4, 2, 2\] pairs, got \[3, 2, 3\]", head_dim=16
    ),
    ("deberta", {"max_distance": 0, "num_buckets": None}, r"max_distance: expected at least 1, got 0"),
    ("deberta", {"num_buckets": 7}, r"num_buckets: expected an even number of at least 4, or None, got 7"),
    ("deberta", {"max_distance": 129}, r"max_distance: expected more than 129 \(num_buckets / 2 \+ 1\), got 129"),
    ("deberta", {"c2p": False, "p2c": False}, r"c2p: expected c2p or p2c to be True, got False for both"),
    ("inkling", {"rank": 0}, r"rank: expected at least 1, got 0"),
    ("logn", {"kind": "log"}, r"kind: expected one of ssmax, su, llama4, inkling, got 'log'"),
    ("logn", {"kind": "su"}, r"train_length: 'su' needs the length of the texts in training, got None"),
    ("logn", {"kind": "llama4"}, r"train_length: 'llama4' needs the length of the texts in training, got None"),
    ("logn", {"kind": "su", "train_length": 1}, r"train_length: expected at least 2, got 1"),
    ("logn", {"train_length": 8}, r"train_length: 'ssmax' trains its factor; expected None, got 8"),
    ("logn", {"kind": "llama4", "train_length": 8, "alpha": -1.0}, r"alpha: expected at least 0, got -1\.0"),
    ("inkling", {"alpha": -1.0}, r"alpha: expected at least 0, got -1\.0"),
    ("tisa", {"num_kernels": -1}, r"num_kernels: expected at least 0, got -1"),
    ("kerple", {"variant": "linear"}, r"variant: expected one of log, power, got 'linear'"),
    ("fire", {"width": 0}, r"width: expected at least 1, got 0"),
    ("fire", {"initial_threshold": 0}, r"initial_threshold: expected a positive number, got 0"),
    ("synthesizer", {"rank": "zzz"}, r"rank: expected an integer, got 'zzz'"),
    ("floater", {"solver": ["rk4"]}, r"solver: expected text, got \['rk4'\]"),
    ("sinusoidal", {"max_timescale": 10**400}, r"max_timescale: expected a finite number, got 1000"),
    ("tisa", {"num_kernels": -(10**5000)}, r"num_kernels: expected at least -1048576, got a huge int"),
    ("tisa", {"num_layers": 2**31}, r"num_layers: expected at most 1048576, got 2147483648"),
    ("tisa", {"causal": 1}, r"causal: expected True or False, got 1"),
    ("tisa", {"layer_of_pass": 3}, r"layer_of_pass: expected a number for each of 1 layers, got 3"),
    ("tisa", {"layer_of_pass": [-1]}, r"layer_of_pass: expected a number for each of 1 layers, got \[-1\]"),
    ([], {}, r"position: expected the name of a method, got \[\]"),
    ("none", {"hidden_size": 0}, r"hidden_size: expected at least 1, got 0"),
    ("none", {"num_heads": 3}, r"num_heads: 3 heads do not divide hidden_size 16"),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG_OPTIONS, ids=[case[2] for case in WRONG_OPTIONS])
def test_options_out_of_range_are_refused_by_name(name, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        build_position(name, **{**SIZES, **options})


@pytest.mark.parametrize("std", [0.02, 0.5])
@pytest.mark.parametrize(("name", "parameter"), [("learned", "weight"), ("tupe", "table")])
def test_absolute_tables_start_as_the_models_own_weights(name, parameter, std):
    position = build_position(name, hidden_size=64, num_heads=2, max_length=200, initializer_range=std)
    weight = getattr(position, parameter).detach()
    assert weight.std() == pytest.approx(std, rel=0.15)
    assert weight.mean().abs() < 0.1 * std


def test_the_message_for_an_unknown_option_lists_the_known():
    with pytest.raises(TypeError, match=r"no option 'kernels'; it has .*num_kernels, share_layers"):
        build_position("learned+tisa", **SIZES, kernels=3)
    with pytest.raises(TypeError, match=r"no option 'kernels'; it has no options$"):
        build_position("none", **SIZES, kernels=3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "tsia",
            r"unknown position method 'tsia'; did you mean 'tisa'\? known: none, sinusoidal, .*, a\+b, and the methods",
        ),
        ("learned+Tisa", r"unknown position method 'Tisa'; did you mean 'tisa'\?"),
        ("RoPE", r"did you mean 'rope'\?"),
        ("tisa+rotary", r"unknown position method 'rotary'; did you mean 'rope'\?"),
        ("T5 bias", r"did you mean 't5'\?"),
        ("relative", r"did you mean 'shaw', 't5' or 'rope'\?"),
        ("zzzz", r"unknown position method 'zzzz'; known: none, "),
        ("learned+", r"a method name is missing in 'learned\+'; 'none' means no positions$"),
        ("tisa+learned+tisa", r"'tisa\+learned\+tisa' names a method twice"),
        ("none+nope", "names a method twice"),
    ],
)
def test_unknown_names_suggest_the_nearest(name, message):
    with pytest.raises(ValueError, match=message):
        build_position(name, **SIZES)


def test_options_go_to_every_part_that_has_them():
    composed = build_position("sinusoidal+shaw+tisa", **SIZES, layout="blocks", clip=3, num_kernels=2)
    sinusoidal, shaw, tisa = composed.parts
    assert sinusoidal.layout == "blocks"
    assert shaw.keys.shape == (1, 7, 8)
    assert tisa.center.shape == (1, 2, 2)
    assert composed.embedding_scale == 4.0


def test_tupe_asks_t5_for_a_bucket_for_cls():
    assert build_position("tupe+t5", **SIZES).parts[1].weight.shape == (2, 33)
    assert build_position("t5+tupe", **SIZES).parts[0].weight.shape == (2, 33)
    assert build_position("tupe+t5", **SIZES, reset_cls=False).parts[1].weight.shape == (2, 32)
    assert build_position("t5", **SIZES).weight.shape == (2, 32)


@pytest.mark.parametrize("name", ["learned+synthesizer", "synthesizer+inkling"])
def test_a_composition_that_replaces_content_has_none(name):
    assert not build_position(name, **SIZES).uses_query_key
    assert build_position(name, **SIZES, content="add").uses_query_key


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(positions, "METHODS", dict(positions.METHODS))


class Loudness(PositionMethod):
    """A toy: the query is multiplied by a trained number."""

    def __init__(self, model: ModelShape, *, start: float = 2.0) -> None:
        super().__init__(model)
        self.gain = torch.nn.Parameter(torch.tensor(start))

    def transform_qkv(self, query, key, value, site):
        return query * self.gain, key, value


@pytest.mark.usefixtures("registry")
def test_a_registered_method_is_one_of_the_family():
    register("loudness", Loudness)
    assert position_names()[-1] == "loudness"
    assert isinstance(build_position("loudness", **SIZES), Loudness)
    composed = build_position("loudness+tisa", **SIZES, start=3.0).double()
    assert composed.parts[0].gain == 3.0
    words = embeddings(5)
    scaled = build("none")
    scaled.transform_qkv = lambda query, key, value, *_, **__: (3 * query, key, value)
    composed.parts[1].amplitude.data.zero_()
    assert_close(attend(composed, words), attend(scaled, words))
    with pytest.raises(ValueError, match="did you mean 'loudness'"):
        build_position("loudnes", **SIZES)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("name", ["tisa", "none", "nope", "loudness"])
def test_names_can_be_taken_once(name):
    if name == "loudness":
        register(name, Loudness)
    with pytest.raises(ValueError, match=rf"^name: '{name}' is already the name of "):
        register(name, PositionMethod)


@pytest.mark.usefixtures("registry")
def test_a_class_that_is_defined_again_takes_its_own_place():
    register("loudness", Loudness)
    again = type("Loudness", (Loudness,), {"__module__": __name__})
    register("loudness", again)
    assert method_class("loudness") is again


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("name", ["a+b", "a/b", "a,b", "a b", ""])
def test_names_must_fit_into_compositions_and_lists(name):
    with pytest.raises(ValueError, match=r"^name: expected a word without '\+', '/'"):
        register(name, Loudness)


@pytest.mark.usefixtures("registry")
def test_only_methods_can_be_registered():
    with pytest.raises(TypeError, match=r"^method: expected a subclass of PositionMethod, got Linear"):
        register("linear", torch.nn.Linear)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((f"synthesizer+{name}", {}) for name in ("rope", "floater", "shaw", "logn")),
        ("synthesizer+inkling", {"log_scaling": 4}),
        ("floater+synthesizer", {}),
    ],
)
def test_nothing_is_left_to_rotate_without_content_scores(name, options):
    with pytest.raises(ValueError, match=r"^position: .* acts on query and key"):
        build_position(name, **SIZES, **options)
    assert build_position(name, **SIZES, **options, content="add").uses_query_key


def test_what_a_method_prints_says_its_sizes():
    assert repr(build_position("tisa", hidden_size=768, num_heads=12)) == "Tisa(heads=12, layers=1, num_kernels=5)"
    assert repr(build_position("alibi", hidden_size=8, num_heads=2, num_layers=3)) == "Alibi(heads=2, layers=3)"
