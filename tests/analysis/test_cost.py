"""The cost of an encoder: equal to what the model really does, and to the figures of the Funnel-Transformer paper."""

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import whereformer
from whereformer import positions
from whereformer.analysis import cost, count_flops, count_parameters, funnel_config, linear_flops, paper_table
from whereformer.analysis.costs.passes import Pass, layer_passes
from whereformer.analysis.costs.trace import Trace
from whereformer.cli.main import main
from whereformer.kernels import FactorPair, OffsetBias, Positions, attention, blockwise, explain
from whereformer.kernels.call import make_call
from whereformer.kernels.choose import choose
from whereformer.lab.memory import peak_memory
from whereformer.models import EncoderConfig, EncoderForMaskedLM, layers, parse_blocks
from whereformer.positions import ModelShape, Position, Work

CPU = torch.device("cpu")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

TABLE = """
L12H768         1           1           1.048       1.408 1           1.119       2.278
L6H768          0.5         0.5         0.524       0.704 0.5         0.559       1.139
B3-4-4H768      0.500/0.667 0.507/0.674 0.529/0.703 0.672 0.497/0.664 0.546/0.733 0.992
B4-4-4H768      0.583/0.750 0.590/0.757 0.616/0.791 0.789 0.581/0.747 0.639/0.826 1.182
B6-3x2-3x2H768  0.875/1.042 0.880/1.047 0.918/1.092 1.175 0.865/1.032 0.951/1.138 1.752
B6-6-6H768      0.875/1.042 0.880/1.047 0.918/1.092 1.175 0.865/1.032 0.951/1.138 1.752
L24H1024        3.556       3.532       3.676       4.983 3.467       3.801       8.009
B8-8-8H1024     2.074/2.370 2.069/2.363 2.146/2.452 2.762 2.003/2.292 2.165/2.482 4.086
B10-10-10H1024  2.593/2.889 2.581/2.875 2.676/2.983 3.444 2.499/2.788 2.700/3.016 5.089
"""
"""Encoder, and after a slash with two decoder layers: linear; at 128 and 512 tokens none, shifted, factorized."""

FIGURES = {"4-4-4": 0.58, "6-6-6": 0.88, "8-8-8": 2.07, "10-10-10": 2.60, "24": 3.56}
"""Relative FLOPs as the paper's figures show them; markers in a picture, so good to 0.01."""


def small_config(**changes):
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "blocks": "3"}
    return EncoderConfig(**{**sizes, "max_position_embeddings": 64, **changes})


@pytest.fixture(scope="module")
def rows():
    """The paper's table: relative FLOPs of each model."""
    return {row.model: row.relative for row in paper_table()}


def test_the_papers_table_comes_out_to_every_digit(rows):
    columns = list(rows["L12H768"])
    printed = 0
    for line in TABLE.strip().splitlines():
        model, *cells = line.split()
        for column, cell in zip(columns, cells, strict=True):
            for name, figure in zip((model, f"{model}+D2"), cell.split("/"), strict=False):
                digits = len(figure.partition(".")[2])
                assert round(rows[name][column], digits) == float(figure), (name, column)
                printed += 1
    assert printed == 93
    assert len(rows) == 15


@pytest.mark.parametrize(("blocks", "figure"), FIGURES.items())
def test_the_linear_rule_is_what_the_papers_figures_show(blocks, figure):
    width = 768 if blocks in ("4-4-4", "6-6-6") else 1024
    assert linear_flops(funnel_config(blocks, width)) == pytest.approx(figure, abs=0.01)


def test_a_berts_operations():
    counted = cost(EncoderConfig(), 512)
    lengths = {length: count_flops(EncoderConfig(), length) for length in (128, 512)}
    for length, expected in ((128, 22.35), (512, 96.64)):
        flops = lengths[length]
        assert flops.layers / 1e9 == pytest.approx(expected, abs=0.005)
        assert flops.training == 3 * flops.forward
    assert counted.relative == counted.linear == 1


def test_relative_to_a_baseline_that_has_relative_attention_itself(rows):
    for model, at_128, at_512 in (
        ("B4-4-4H768", 0.588, 0.571),
        ("B4-4-4H768+D2", 0.755, 0.738),
        ("B6-6-6H768", 0.876, 0.850),
        ("B6-6-6H768+D2", 1.043, 1.017),
    ):
        for column, expected in (("128 shifted", at_128), ("512 shifted", at_512)):
            assert round(rows[model][column] / rows["L12H768"][column], 3) == expected


@pytest.mark.parametrize("length", [128, pytest.param(512, marks=pytest.mark.slow)])
def test_our_relative_attention_costs_what_the_papers_does_or_less(rows, length):
    """An offset less and terms of low rank are nothing; one product does for two."""
    baseline = count_flops(EncoderConfig(), length, 8).layers
    for blocks, decoder, form, least, most in (
        ("12", "0", "shifted", 0.99, 1.01),
        ("4-4-4", "2", "shifted", 0.99, 1.01),
        ("6-3x2-3x2", "0", "shifted", 0.99, 1.01),
        ("4-4-4", "2", "factorized", 0.6, 0.9),
    ):
        name = f"{'B' if '-' in blocks else 'L'}{blocks}H768{'+D2' if decoder == '2' else ''}"
        ours = count_flops(funnel_config(blocks, 768, decoder, form), length, 8).layers / baseline
        assert least < ours / rows[name][f"{length} {form}"] < most


@pytest.mark.parametrize(
    "changes",
    [
        *({"position": name} for name in whereformer.position_names()),
        {"position": "learned+tisa"},
        {"position": "tupe+t5"},
        *(
            {"position": "synthesizer", "position_options": {"variant": variant, "content": content}}
            for variant in ("random", "factorized_random", "dense", "factorized_dense")
            for content in ("none", "mix")
        ),
        {"position": "floater", "position_options": {"solver": "midpoint", "substeps": 2}},
        {"position": "shaw", "position_options": {"values": False, "clip": 3}},
        {"embedding_size": 8, "intermediate_size": 48, "blocks": "1x3"},
        {"feed_forward": "gated", "intermediate_size": 24, "lm_head": "tied", "biases": False},
        {"position": "t5", "segments": "attention", "type_vocab_size": 5},
        {"position": "t5+transformer_xl", "segments": "attention", "separate_cls": False},
        {"position": "transformer_xl", "position_options": {"form": "factorized"}},
        *(
            pytest.param({"blocks": "2-1x2-1", "position": name}, marks=pytest.mark.slow)
            for name in whereformer.position_names()
        ),
        *(
            pytest.param(
                {"blocks": "1x2-2-1", "decoder_layers": "1x2", "position": name},
                marks=() if name in ("tisa", "transformer_xl", "tupe") else pytest.mark.slow,
            )
            for name in whereformer.position_names()
        ),
        *(
            pytest.param(
                {"blocks": "2-2x2-2", "position": "transformer_xl", "position_options": {"form": form}, **more},
                marks=pytest.mark.slow if form == "factorized" or "truncate_seq" in more else (),
            )
            for form in ("shifted", "factorized")
            for more in (
                {"segments": "attention"},
                {"segments": "attention", "decoder_layers": "2", "head_dim": 4},
                {"segments": "attention", "truncate_seq": False, "decoder_layers": "1"},
                {"separate_cls": False},
                {"pool_query_only": False, "decoder_layers": "1"},
            )
        ),
        {"blocks": "1-1-1-1", "decoder_layers": "1", "position": "t5+transformer_xl", "segments": "attention"},
        pytest.param(
            {"blocks": "1-1-1-1-1-1", "decoder_layers": "1", "position": "transformer_xl"}, marks=pytest.mark.slow
        ),
        {"blocks": "1-2-1", "position": "tupe", "decoder_layers": "1", "head_dim": 4, "segments": "attention"},
        {"blocks": "2-2", "position": "shaw", "pool_query_only": False, "truncate_seq": False},
    ],
    ids=str,
)
def test_operations_are_those_that_torch_counts_in_the_real_model(changes):
    """The reference writes every product out, so that torch sees them all."""
    config = small_config(attention_backend="reference", **changes)
    model = (EncoderForMaskedLM if config.full_length else whereformer.Encoder)(config).eval()
    types = torch.tensor([2, *[0] * 5, *[1] * 7]).expand(2, -1)
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(1, 50, (2, 13)), token_type_ids=types if config.type_vocab_size > 2 else types % 2)
    predictions = 13 if config.full_length else 0
    assert count_flops(config, 13, batch=2, predictions=predictions).forward == counter.get_total_flops()


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"position": "none"}, "3,0"),
        ({"position": "synthesizer", "position_options": {"variant": "factorized_random", "content": "mix"}}, "2"),
        ({"position": "tupe", "blocks": "2-2-1", "decoder_layers": "2"}, "4,6,9"),
        ({"position": "t5", "blocks": "2-2-1", "segments": "attention", "separate_cls": False}, "4,0"),
        ({"position": "tisa", "blocks": "2-2", "pool_query_only": False}, "2"),
        ({"position": "rope", "feed_forward": "gated", "causal": True}, "4,0"),
    ],
    ids=str,
)
def test_pairs_outside_of_windows_do_not_count(changes, windows):
    """The real model, which writes everything out, has as much more to do as the allowed pairs are fewer."""
    calls = []

    def count(query, key, value, terms, *, dropout_p, backend, **options):
        call = make_call(query, key, value, terms, **options)
        allowed = call.allowed()
        pairs = torch.ones(call.n_q, call.n_k) if allowed is None else allowed[0, 0]
        factors = sum(
            term.query_factors.shape[3] * max(len(term.query_factors), len(term.key_factors))
            for term in terms
            if isinstance(term, FactorPair)
        )
        per_pair = 4 * (2 * 2 * query.shape[3] + 2 * 2 * value.shape[3] + 2 * factors)
        calls.append((per_pair * int(pairs.sum()), per_pair * pairs.numel()))
        return attention(query, key, value, terms, backend=backend, **options)

    config = small_config(attention_backend="reference", windows=windows, **changes)
    model = whereformer.Encoder(config).eval()
    with pytest.MonkeyPatch.context() as patch, FlopCounterMode(display=False) as counter:
        patch.setattr(layers, "attention", count)
        model(torch.randint(1, 50, (2, 21)), token_type_ids=torch.zeros(2, 21, dtype=torch.int64))
    found, everything = (sum(each) for each in zip(*calls, strict=True))
    assert found < everything
    counted = count_flops(config, 21, batch=2)
    assert counted.forward == counter.get_total_flops() - (everything - found)
    assert counted.linear == count_flops(small_config(**changes), 21, batch=2).linear


def test_a_window_cuts_tables_too():
    def position(**changes):
        return count_flops(small_config(position="shaw", position_options={"clip": 60}, **changes), 64).position

    # Of 121 columns, each query needs those for 9 offsets.
    assert position(windows="4") * 121 == position() * 9
    assert position(windows="64") == position()


class Looped(Position):
    """A toy with work of every kind: once a forward, for a pair of sequences, in a layer, and too long to trace."""

    STEPS = 3

    def __init__(self, model: ModelShape) -> None:
        super().__init__(model)
        self.table = torch.nn.Parameter(torch.randn(model.max_length, model.hidden_size))
        self.square = torch.nn.Parameter(torch.randn(model.hidden_size, model.num_heads * model.head_dim))

    def uncounted_work(self, places):
        rows, width = self.table.shape
        products = self.STEPS * rows * width
        return Work(2 * products * self.square.shape[1], products * self.table.element_size())

    def prepare(self):
        table = self.table
        if table.device.type != "meta":
            for _ in range(self.STEPS):
                table = table @ self.square
        return table @ self.square

    def prepare_for(self, queries, keys, prepared=None):
        prepared = self.prepare() if prepared is None else prepared
        heads = (self.model.num_heads, self.model.head_dim)
        rows = [prepared[at.values(prepared.device).clamp(min=0)] @ self.square for at in (queries, keys)]
        return FactorPair(*(each.unflatten(-1, heads).transpose(0, 1).unsqueeze(0) for each in rows))

    def rotate(self, query, key, value, place):
        width = self.model.head_dim
        return query @ self.square[:width, :width], key, value

    def terms(self, hidden, place):
        return (place.shared,)


@pytest.mark.parametrize(
    "changes",
    [{}, {"blocks": "2-2x2-1"}, {"blocks": "2-2", "decoder_layers": "2"}],
    ids=str,
)
def test_a_users_method_is_counted_as_it_is(changes, monkeypatch):
    monkeypatch.setitem(positions.METHODS, "looped", Looped)
    config = small_config(**{"position": "looped+tisa", "attention_backend": "reference", **changes})
    model = whereformer.Encoder(config).eval()
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(1, 50, (2, 13)))
    found = cost(config, 13, 2, predictions=0)
    assert found.flops.forward == counter.get_total_flops()
    assert found.parameters.position == sum(parameter.numel() for parameter in model.position.parameters())
    without = cost(small_config(**{**changes, "position": "none", "attention_backend": "reference"}), 13, 2)
    assert found.memory.position - without.memory.position > Looped.STEPS * 64 * 32 * 4


@pytest.mark.parametrize(
    "changes",
    [
        *({"position": name} for name in whereformer.position_names()),
        {"blocks": "1x12"},
        {"blocks": "2x3", "embedding_size": 8, "norm": "pre", "type_vocab_size": 0},
        {"blocks": "2-1x2-1", "decoder_layers": "1x2", "position": "tisa"},
        {"blocks": "1-1", "position": "transformer_xl", "segments": "attention"},
        {"feed_forward": "gated", "norm": "pre", "first_norm": False, "biases": False},
        {"tie_word_embeddings": False, "embedding_size": 8},
    ],
    ids=str,
)
def test_parameters_are_those_of_the_real_model(changes):
    config = small_config(**changes)
    encoder = whereformer.Encoder(config)
    model = EncoderForMaskedLM(config) if config.full_length else encoder
    found = count_parameters(config)
    assert found.encoder == encoder.num_parameters()
    assert found.total == model.num_parameters()
    assert found.position == sum(parameter.numel() for parameter in encoder.position.parameters())


def test_the_command_counts_a_preset(tmp_path):
    """Options that differ from their defaults win over it."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    words = [
        "--hidden-size=64",
        "--num-heads=4",
        "--vocab-size=100",
        "--length=32",
        "--out",
        str(tmp_path / "cost.json"),
    ]
    main(["cost", "--preset=modernbert", "--blocks=3", *words])
    found = json.loads((tmp_path / "cost.json").read_text())
    config = EncoderConfig.preset("modernbert", blocks="3", **sizes)
    assert found["flops"]["linear"] == count_flops(config, 32).linear
    assert found["parameters"]["layers"] == count_parameters(config).layers
    # Of a gated network: three matrices of 64 x 176 in each of three layers, which a token passes once.
    plain = count_flops(EncoderConfig(blocks="3", intermediate_size=176, **sizes), 32).linear
    assert found["flops"]["linear"] - plain == 2 * 32 * 3 * 64 * 176


@pytest.mark.parametrize("position", ["tisa", "learned", "transformer_xl"])
def test_a_decoder_that_is_left_out_costs_nothing(position):
    config = small_config(blocks="2-1x2", decoder_layers="2", position=position, attention_backend="reference")
    model = whereformer.Encoder(config, decoder=False).eval()
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(1, 50, (2, 13)))
    found, whole = (cost(config, 13, 2, decoder=decoder) for decoder in (False, True))
    assert found.flops.forward == counter.get_total_flops()
    assert found.parameters.total == model.num_parameters()
    assert found.flops.decoder == found.parameters.head == 0
    for part in ("linear", "attention", "position"):
        assert getattr(found.flops, part) == getattr(whole.flops, part)
    assert found.linear < whole.linear
    assert found.memory.training < whole.memory.training


@pytest.mark.parametrize(
    ("blocks", "width", "alone", "with_decoder"),
    [
        ("4-4-4", 768, 115.6, 131.0),
        ("6-3x2-3x2", 768, 115.6, 131.0),
        ("6-6-6", 768, 161.7, 177.1),
        ("8-8-8", 1024, 358.8, 386.1),
        ("10-10-10", 1024, 440.7, 468.0),
    ],
)
def test_parameters_of_the_papers_models(blocks, width, alone, with_decoder):
    # Of a layer: five projections, q's without a bias, two biases and three more in attention, two vectors for
    # segments; a feed-forward network; two norms.
    layer = 5 * width**2 + 7 * width + 5 * width + 2 * width * 4 * width + 4 * width + width
    for decoder, expected in (("0", alone), ("2", with_decoder)):
        layers = sum(block.layers for block in parse_blocks(blocks)) + int(decoder)
        found = count_parameters(funnel_config(blocks, width, decoder)).encoder
        assert found == layers * layer + 30522 * width + 2 * width
        assert round(found / 1e6, 1) == expected


@pytest.mark.parametrize("separate_cls", [True, False])
@pytest.mark.parametrize("truncate_seq", [True, False])
def test_lengths_of_blocks_are_those_of_pooling(separate_cls, truncate_seq):
    config = EncoderConfig(blocks="1-1-1-1", separate_cls=separate_cls, truncate_seq=truncate_seq)
    for length in range(1, 70):
        lengths = [length]
        for _ in range(3):
            states = torch.zeros(1, 1, lengths[-1])
            if separate_cls and lengths[-1] > 2:
                rest = states[..., 1:-1] if truncate_seq else states[..., 1:]
                lengths.append(1 + functional.avg_pool1d(rest, 2, 2, ceil_mode=True).shape[-1])
            elif not separate_cls and lengths[-1] > 1:
                lengths.append(functional.avg_pool1d(states, 2, 2, ceil_mode=True).shape[-1])
            else:
                lengths.append(lengths[-1])
        assert list(config.block_lengths(length)) == lengths


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


def test_only_the_first_layer_of_a_block_pools_and_only_if_there_is_something_to_pool():
    config = EncoderConfig(blocks="1-2x2-1", decoder_layers="1")
    at = [Positions(0, 1, 16), Positions(-1, 2, 8), Positions(-3, 4, 4)]
    full, half, quarter = (Pass(positions, positions) for positions in at)
    assert layer_passes(config, 16) == [full, Pass(at[1], at[0]), half, half, half, Pass(at[2], at[1]), full]
    config.pool_query_only = False
    assert layer_passes(config, 16) == [full, *[half] * 4, quarter, full]
    assert layer_passes(config, 2) == [Pass(Positions(0, 1, 2), Positions(0, 1, 2))] * 7


def test_what_grows_with_the_batch_and_what_does_not():
    shaw, relative = (EncoderConfig(position=name) for name in ("shaw", "transformer_xl"))
    assert count_flops(shaw, 64, 8).forward == 8 * count_flops(shaw, 64).forward
    one, two, three = (count_flops(relative, 64, batch).position for batch in (1, 2, 3))
    # The distances are projected once, 127 of them in each of 12 layers, and so is what stands for w.
    assert three - two == two - one
    assert one - (two - one) == 2 * 12 * 127 * 768 * (768 + 1)


MEASURED = [
    (300, {"position": "t5"}),
    (128, {"position": "t5", **NO_DROPOUT, "norm": "pre", "hidden_act": "gelu_new"}),
    (256, {"position": "t5", "blocks": "2-2-2", "decoder_layers": "1"}),
    (64, {"position": "shaw"}),
    (32, {"position": "t5", "dtype": torch.bfloat16}),
    (300, {"position": "t5", "windows": "32,32,0"}),
    (256, {"position": "learned", "feed_forward": "gated", **NO_DROPOUT}),
]
ALSO_MEASURED = [
    (256, {"position": "learned"}),
    (256, {"position": "shaw"}),
    (256, {"position": "transformer_xl", "segments": "attention", "blocks": "2-2", **NO_DROPOUT}),
    (90, {"position": "transformer_xl"}),
    (256, {"position": "t5", "feed_forward": "gated", "norm": "pre"}),
    (300, {"position": "t5", "causal": True}),
    *((length, {"position": "t5"}) for length in (32, 128, 256, 512)),
    *((32, {"position": name, "dtype": torch.bfloat16, **NO_DROPOUT}) for name in ("learned", "shaw", "alibi")),
    *((300, {"position": name, "dtype": torch.bfloat16}) for name in ("learned", "t5", "alibi")),
    (300, {"position": "alibi"}),
    *((length, {"position": "learned", "windows": "8"}) for length in (32, 300, 512)),
    *((256, {"position": name, "windows": "20,0", **NO_DROPOUT}) for name in ("shaw", "tupe", "learned")),
    (256, {"position": "t5", "windows": "40", "attention_backend": "reference", **NO_DROPOUT}),
    (256, {"position": "t5", "windows": "40", "attention_backend": "reference"}),
    (256, {"position": "transformer_xl", "segments": "attention", "blocks": "2-2", "windows": "20,0"}),
    *((length, {"position": "learned"}) for length in (32, 128, 300, 512)),
    *((256, {"position": name}) for name in ("tupe", "rope", "tisa", "fire", "synthesizer")),
    (24, {"position": "floater"}),
    (256, {"position": "synthesizer", "position_options": {"variant": "factorized_dense", "content": "mix"}}),
    (300, {"position": "learned", **NO_DROPOUT}),
    (128, {"position": "t5", "hidden_act": "relu", "embedding_size": 32}),
    (128, {"position": "t5", "attention_backend": "reference"}),
    (300, {"position": "t5", "blocks": "2-2", "norm": "pre", "pooling": "max"}),
    (300, {"position": "tisa", "blocks": "2-2", "pool_query_only": False, "segments": "attention"}),
    (512, {"position": "transformer_xl", "segments": "attention", "blocks": "2-2", **NO_DROPOUT}),
    *(
        (length, {"position": "transformer_xl", "segments": "attention", "blocks": "2-2", **more})
        for length in (256, 512)
        for more in ({"decoder_layers": "1", "separate_cls": False}, {"position_options": {"form": "factorized"}})
    ),
]


@pytest.mark.parametrize(
    ("length", "changes"),
    [*MEASURED, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALSO_MEASURED)],
    ids=str,
)
def test_memory_is_about_what_is_measured(length, changes, monkeypatch):
    """A forward's peak is at most an eighth above what is kept, for what lives for a moment, and never below."""
    # Blocks are what attention needs for a moment, where the compiled kernel is missing.
    monkeypatch.setattr(blockwise, "BLOCK_SCORES", 2**12)
    sizes = {"hidden_size": 128, "blocks": "4", "max_position_embeddings": 512}
    config = small_config(**{**sizes, **changes})
    dtype = changes.get("dtype", torch.float32)
    model = whereformer.Encoder(config).to(dtype)
    ids = torch.randint(1, 50, (4, length))
    types = torch.zeros_like(ids)

    def forward():
        return model(ids, token_type_ids=types).last_hidden_state

    forward().sum().backward()
    outputs = []
    kept = peak_memory(lambda: outputs.append(forward()), CPU)
    estimate = cost(config, length, 4, dtype=dtype).memory
    # An activation of several steps needs more for a moment, and any activation more of the little that bfloat16 keeps.
    more = config.hidden_act == "gelu_new" or dtype == torch.bfloat16
    assert 1.0 <= kept / estimate.training <= (1.25 if more else 1.125)
    model.eval()
    with torch.no_grad():
        forward()
        inference = peak_memory(forward, CPU)
    # What much work of a method's own, n x n terms and scores written out need for a moment is only roughly known.
    rough = changes["position"] in ("tupe", "fire", "floater", "synthesizer") or length <= 90
    rough |= bool({"hidden_act", "attention_backend"} & changes.keys())
    assert inference / estimate.inference == pytest.approx(1.0, abs=0.5 if rough else 0.05)


WAYS = [
    *((name, 17, drops) for name in ("learned", "t5", "alibi", "shaw") for drops in (0.0, 0.1)),
    ("rope", 91, 0.1),
    ("synthesizer", 40, 0.0),
    ("tupe", 91, 0.0),
]


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        (torch.float32, "auto"),
        pytest.param(torch.bfloat16, "auto", marks=pytest.mark.slow),
        pytest.param(torch.float32, "blockwise", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "blockwise", marks=pytest.mark.slow),
        pytest.param(torch.float64, "auto", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("position", "length", "drops"), WAYS)
def test_attention_is_computed_as_is_assumed(position, length, drops, dtype, backend, monkeypatch):
    """The backend that the model really calls for."""
    found = []

    def watched(query, key, value, terms, *, backend, **options):
        found.append(explain(query, key, value, terms, backend=backend, **options).backend)
        return attention(query, key, value, terms, backend=backend, **options)

    monkeypatch.setattr(layers, "attention", watched)
    options = {"attention_probs_dropout_prob": drops, "max_position_embeddings": 300, "attention_backend": backend}
    config = small_config(blocks="1-1", position=position, **options)
    model = whereformer.Encoder(config).to(dtype)
    ids = torch.randint(1, 50, (2, length))
    model(ids)
    trace = Trace(config, length, 2, dtype, CPU, backend)
    assert trace.trained == found
    found.clear()
    with torch.no_grad():
        model.eval()(ids)
        # It is about training and inference, wherever one asks.
        assert Trace(config, length, 2, dtype, CPU, backend).trained == trace.trained
    assert trace.inferred == found


@pytest.mark.parametrize(
    ("position", "changes", "backend"),
    [
        ("learned", {}, "fused"),
        ("t5", {}, "triton"),
        ("t5", {"dtype": torch.float64}, "blockwise"),
        ("t5", {"num_attention_heads": 8}, "blockwise"),
        ("t5", {"attention_backend": "reference"}, "reference"),
    ],
)
def test_on_a_gpu_attention_is_computed_as_is_assumed(position, changes, backend):
    """On a machine without a GPU, by tensors that have a device but no memory."""
    dtype = changes.get("dtype", torch.float32)
    config = small_config(hidden_size=64, position=position, **changes)
    trace = Trace(config, 20, 2, dtype, torch.device("cuda"), config.attention_backend)
    assert trace.trained == [backend] * 3
    with FakeTensorMode():
        heads = config.num_attention_heads
        query = torch.empty(2, heads, 20, config.head_dim, dtype=dtype, device="cuda", requires_grad=True)
        terms = (OffsetBias(torch.empty(heads, 39, device="cuda"), -19),) if position == "t5" else ()
        call = make_call(query, query, query, terms, dropout_p=0.1)
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0):
            assert choose(call, config.attention_backend) == backend


def test_a_backend_that_is_out_of_reach_is_refused_as_by_attention(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config = small_config(position="t5", attention_backend="triton")
    with pytest.raises(ValueError, match=r"^backend: 'triton' needs"):
        cost(config, 20)
    assert count_flops(config, 20) == count_flops(small_config(position="t5"), 20)


def test_memory_of_attention_is_linear_where_sequences_are_long():
    config = EncoderConfig(position="tisa", max_position_embeddings=8192)

    def memory(length, **options):
        return cost(config, length, **options).memory

    assert memory(256).scores == 0
    # The reference keeps the weights, a mask of dropout and the weights that are left.
    written_out = EncoderConfig(position="tisa", attention_backend="reference")
    assert cost(written_out, 256).memory.scores == 12 * 12 * 256**2 * (4 + 1 + 4)
    assert memory(2048).training == pytest.approx(2 * memory(1024).training, rel=0.001)
    assert memory(256, device="cuda").scores == memory(256, dtype=torch.bfloat16).scores == 0
    # Dropout masks are bytes there.
    assert memory(1024, device="cuda").layers < memory(1024).layers


def test_it_is_quick_even_where_the_model_would_be_huge():
    config = EncoderConfig(hidden_size=12288, num_attention_heads=96, blocks="96", position="t5")
    found = cost(config, 512)
    assert 173e9 < found.parameters.layers < 175e9
    assert "174" in str(found)


def test_what_does_not_fit_is_named():
    config = EncoderConfig()
    with pytest.raises(ValueError, match="batch: expected at least 1, got 0"):
        cost(config, 8, 0)
    with pytest.raises(ValueError, match="predictions: expected 0 to length 8, got 9"):
        cost(config, 8, predictions=9)
    with pytest.raises(ValueError, match="device: expected 'cpu' or 'cuda', got 'tpu'"):
        cost(config, 8, device="tpu")
    with pytest.raises(whereformer.PositionRangeError, match="0 to 511"):
        cost(EncoderConfig(position="tupe"), 513)


SMALL = ("--hidden-size", "32", "--num-heads", "4", "--vocab-size", "50", "--length", "16")


def test_the_command_prints_and_writes_the_same_numbers(tmp_path, capsys):
    out = tmp_path / "cost.json"
    main(["cost", *SMALL, "--blocks", "1x3", "--position", "tisa", "--batch-size", "2", "--out", str(out)])
    printed = capsys.readouterr().out
    config = EncoderConfig(vocab_size=50, hidden_size=32, num_attention_heads=4, blocks="1x3", position="tisa")
    expected = cost(config, 16, 2)
    assert str(expected) in printed
    assert json.loads(out.read_text()) == expected.to_dict()
    assert [path.name for path in tmp_path.iterdir()] == ["cost.json"]


def test_a_funnel_without_a_decoder_has_no_masked_lm_head(capsys):
    main(["cost", *SMALL, "--blocks", "2-2", "--position", "transformer_xl", "--segments", "attention"])
    printed = capsys.readouterr().out
    assert "1 x 16 tokens, blocks of 16, 8" in printed
    assert "no masked-LM head" in printed
    found = cost(small_config(blocks="2-2"), 16)
    assert found.parameters.head == found.flops.head == found.memory.head == 0


def test_the_command_leaves_the_decoder_out(capsys):
    main(["cost", *SMALL, "--blocks", "2-2", "--decoder-layers", "1", "--position", "tisa", "--no-decoder"])
    config = small_config(blocks="2-2", decoder_layers="1", position="tisa")
    assert str(cost(config, 16, decoder=False)) in capsys.readouterr().out


def test_the_command_counts_windows(capsys):
    main(["cost", *SMALL, "--blocks", "3", "--position", "tisa", "--windows", "2,0"])
    windowed = cost(small_config(position="tisa", windows="2,0"), 16)
    assert str(windowed) in capsys.readouterr().out
    # Of 16 x 16 pairs, at most two apart: five keys for each query, but three at the ends and four beside them.
    everything = cost(small_config(position="tisa"), 16)
    assert windowed.flops.attention * 3 * 256 == everything.flops.attention * (2 * (16 * 5 - 2 * (2 + 1)) + 256)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "0"], "--length: expected at least 1, got 0"),
        (["--num-heads", "5"], "--num-heads: 5 heads do not divide hidden_size 32"),
        (["--windows", "2,-1"], "--windows: expected numbers as '128' or '128,128,0' (0: no window), got '2,-1'"),
        (["--blocks", "3y4"], "--blocks: expected layers as '12', '1x12' or '4-4-4', got '3y4'"),
        (["--decoder-layers", "2"], "--decoder-layers: a single block is never pooled"),
        (["--blocks", "99999999"], "--blocks: expected at most 1000 layers, got 99999999"),
        (["--blocks", "2-10x200"], "--blocks: expected at most 1000 layers, got 2002"),
        (["--blocks", "2-2", "--decoder-layers", "1x9999999"], "--decoder-layers: expected at most 1000 layers, got 9"),
        (
            ["--blocks", "1-1", "--decoder-layers", "1", "--no-decoder", "--predictions", "1"],
            "--predictions: blocks that pool need a decoder to predict tokens, got 1 without one",
        ),
        (["--position", "tsia"], "--position: unknown position method 'tsia'; did you mean 'tisa'?"),
        (["--predictions", "17"], "--predictions: expected 0 to length 16, got 17"),
        (["--blocks", "1-1", "--predictions", "1"], "--predictions: blocks that pool need a decoder to predict tokens"),
        (["--batch-size", str(10**20)], "--batch-size: expected at most 1048576, got 1"),
        (["--out", "."], "--out: expected a file or a new name, got a folder: '.'"),
        (["--out", "/nowhere/cost.json"], "No such file or directory: '/nowhere/cost.json"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["cost", *SMALL, *arguments])
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
