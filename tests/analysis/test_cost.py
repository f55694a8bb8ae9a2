"""The cost of an encoder: equal to what the model really does, and to the figures of the Funnel-Transformer paper."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import whereformer
from benchmarks.peak import peak_memory
from whereformer import positions
from whereformer.analysis import cost, count_parameters
from whereformer.kernels import FactorPair, attention, blockwise
from whereformer.kernels.call import make_call
from whereformer.models import EncoderConfig, EncoderForMaskedLM, layers, parse_blocks
from whereformer.positions import Position

CPU = torch.device("cpu")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

TABLE = """
6        768   0.5         0.524        0.5         0.559
3-4-4    768   0.507/0.674 0.529/0.703  0.497/0.664 0.546/0.733
4-4-4    768   0.590/0.757 0.616/0.791  0.581/0.747 0.639/0.826
6-3x2-3x2 768  0.880/1.047 0.918/1.092  0.865/1.032 0.951/1.138
6-6-6    768   0.880/1.047 0.918/1.092  0.865/1.032 0.951/1.138
24       1024  3.532       3.676        3.467       3.801
10-10-10 1024  2.581/2.875 2.676/2.983  2.499/2.788 2.700/3.016
"""
"""Relative FLOPs by the code of the Funnel-Transformer's authors: blocks and width, and after a slash with two decoder
layers; at 128 tokens without positions and with theirs, and both at 512."""


def small_config(**changes):
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "blocks": "3"}
    return EncoderConfig(**{**sizes, "max_position_embeddings": 64, **changes})


def funnel(blocks, width=768, decoder_layers="0", **changes):
    """A model of the paper."""
    sizes = {"hidden_size": width, "num_attention_heads": width // 64, "query_bias": False}
    relative = {"position": "transformer_xl", "segments": "attention"}
    return EncoderConfig(**{**sizes, **relative, "blocks": blocks, "decoder_layers": decoder_layers, **changes})


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=() if line.startswith("6 ") else pytest.mark.slow)
        for line in TABLE.strip().splitlines()
    ],
)
def test_the_papers_table_comes_out(line):
    blocks, width, *cells = line.split()
    without = {"position": "none", "segments": "embedding"}
    columns = ((length, changes) for length in (128, 512) for changes in (without, {}))
    for (length, changes), cell in zip(columns, cells, strict=True):
        for decoder, figure in zip(("0", "2"), cell.split("/"), strict=False):
            # The authors project the distances once for eight sequences.
            found = cost(funnel(blocks, int(width), decoder, **changes), length, 8, predictions=0).relative
            digits = len(figure.partition(".")[2])
            # Their relative terms are computed with an offset more.
            assert round(found, digits) == pytest.approx(float(figure), rel=0 if changes else 0.01)


def test_a_berts_operations():
    for length, expected in ((128, 22.35), (512, 96.64)):
        found = cost(EncoderConfig(), length)
        assert found.flops.layers / 1e9 == pytest.approx(expected, abs=0.005)
        assert found.relative == 1
        assert found.flops.training == 3 * found.flops.forward


def counted(config, length=40, types=2, **options):
    """The operations that torch counts in the real model, where the reference writes every product out."""
    config = EncoderConfig.from_dict({**config.to_dict(), "attention_backend": "reference"})
    model = (EncoderForMaskedLM if config.full_length else whereformer.Encoder)(config, **options).train()
    types = torch.randint(types, (2, length))
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(1, 50, (2, length)), token_type_ids=types)
    return counter.get_total_flops()


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
        {"position": "shaw", "attention_backend": "reference"},
        {"embedding_size": 8, "intermediate_size": 48, "blocks": "1x3"},
        {"feed_forward": "gated", "intermediate_size": 24, "lm_head": "tied", "biases": False},
        {"position": "t5", "segments": "attention", "type_vocab_size": 2},
        {"position": "t5+transformer_xl", "segments": "attention", "separate_cls": False},
        {"position": "transformer_xl", "position_options": {"form": "factorized"}},
        *(
            pytest.param({"blocks": "2-1x2-1", "position": name}, marks=pytest.mark.slow)
            for name in whereformer.position_names()
        ),
        *({"blocks": "1x2-2-1", "decoder_layers": "1x2", "position": name} for name in ("tisa", "tupe", "floater")),
        *(
            {"blocks": "2-2x2-2", "position": "transformer_xl", **more}
            for more in (
                {"segments": "attention", "decoder_layers": "2", "head_dim": 4},
                {"segments": "attention", "truncate_seq": False, "decoder_layers": "1"},
                {"pool_query_only": False, "decoder_layers": "1", "position_options": {"form": "factorized"}},
            )
        ),
        {"blocks": "2-2", "position": "shaw", "pool_query_only": False, "truncate_seq": False},
    ],
    ids=str,
)
def test_operations_are_those_that_torch_counts_in_the_real_model(changes):
    config = small_config(**changes)
    assert cost(config, 40, 2).flops.forward == counted(config)


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

    config = small_config(windows=windows, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "attention", count)
        everywhere = counted(config, 21)
    found, everything = (sum(each) for each in zip(*calls, strict=True))
    assert found < everything
    assert cost(config, 21, 2).flops.forward == everywhere - (everything - found)


class Projected(Position):
    """A toy with work of every kind: for a pair of sequences, and in a layer."""

    def __init__(self, model):
        super().__init__(model)
        self.table = torch.nn.Parameter(torch.randn(model.max_length, model.hidden_size))
        self.square = torch.nn.Parameter(torch.randn(model.hidden_size, model.num_heads * model.head_dim))

    def prepare_for(self, site):
        prepared = self.table @ self.square
        heads = (self.model.num_heads, self.model.head_dim)
        rows = [prepared[at.values(prepared.device).clamp(min=0)] @ self.square for at in (site.queries, site.keys)]
        return FactorPair(*(each.unflatten(-1, heads).transpose(0, 1).unsqueeze(0) for each in rows))

    def rotate(self, query, key, value, site):
        width = self.model.head_dim
        return query @ self.square[:width, :width], key, value

    def terms(self, hidden, site):
        return (site.shared,)


@pytest.mark.parametrize("changes", [{}, {"blocks": "2-2x2-1"}, {"blocks": "2-2", "decoder_layers": "2"}], ids=str)
def test_a_users_method_is_counted_as_it_is(changes, monkeypatch):
    monkeypatch.setitem(positions.METHODS, "projected", Projected)
    config = small_config(position="projected+tisa", **changes)
    found = cost(config, 40, 2)
    assert found.flops.forward == counted(config)
    assert found.parameters.position == 64 * 32 + 32 * 32 + 3 * 4 * 5 * len(config.passes)


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
        found = count_parameters(funnel(blocks, width, decoder)).encoder
        assert found == layers * layer + 30522 * width + 2 * width
        assert round(found / 1e6, 1) == expected


@pytest.mark.parametrize(
    ("length", "changes"),
    [
        (300, {"position": "t5"}),
        (256, {"position": "t5", "blocks": "2-2-2", "decoder_layers": "1"}),
        (256, {"position": "shaw", "norm": "pre", **NO_DROPOUT}),
        (300, {"position": "t5", "windows": "32,32,0"}),
        (256, {"position": "learned", "feed_forward": "gated", **NO_DROPOUT}),
        (256, {"position": "transformer_xl", "segments": "attention", "blocks": "2-2"}),
        (24, {"position": "floater"}),
        (128, {"position": "t5", "attention_backend": "reference"}),
        (256, {"position": "t5", "dtype": torch.bfloat16}),
        (256, {"position": "tupe", "dtype": torch.bfloat16, **NO_DROPOUT}),
    ],
    ids=str,
)
def test_memory_is_about_what_a_real_forward_keeps(length, changes, monkeypatch):
    """Its peak is at most an eighth above what is kept, for what lives for a moment, and never below."""
    # Blocks are what attention needs for a moment, where the compiled kernel is missing.
    monkeypatch.setattr(blockwise, "BLOCK_SCORES", 2**12)
    dtype = changes.get("dtype", torch.float32)
    config = small_config(**{"hidden_size": 128, "blocks": "4", "max_position_embeddings": 512, **changes})
    model = whereformer.Encoder(config).to(dtype)
    ids = torch.randint(1, 50, (4, length))
    types = torch.zeros_like(ids)

    def forward():
        return model(ids, token_type_ids=types).last_hidden_state

    forward().sum().backward()
    outputs = []
    peak = peak_memory(lambda: outputs.append(forward()), CPU)
    # What lives for a moment in float32 counts double beside bfloat16.
    most = 1.125 if dtype == torch.float32 else 1.25
    assert 1.0 <= peak / cost(config, length, 4, dtype=dtype).memory.activations <= most


def test_memory_by_hand():
    """A layer keeps no number for a pair of tokens, and the head what each of its steps reads."""
    config = EncoderConfig(position="tisa", max_position_embeddings=8192)
    kept = {length: cost(config, length).memory for length in (1024, 2048)}
    assert kept[2048].activations == pytest.approx(2 * kept[1024].activations, rel=0.001)
    assert kept[1024].weights == 4 * count_parameters(config).total
    # The inputs of the dense layer, the activation, the norm and the last product, the norm's mean and deviation, the
    # logarithmic softmax, and the number of labels.
    assert cost(config, 1024, predictions=1).memory.head == 4 * (4 * 768 + 2 + 30522 + 1)


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
    with pytest.raises(whereformer.PositionRangeError, match="0 to 511"):
        cost(EncoderConfig(position="tupe"), 513)


def test_a_funnel_without_a_decoder_has_no_masked_lm_head():
    printed = str(cost(small_config(blocks="2-2", position="transformer_xl"), 16))
    assert "1 x 16 tokens, blocks of 16, 8" in printed
    assert "no masked-LM head" in printed
    with pytest.raises(ValueError, match="predictions: blocks that pool need a decoder to predict tokens, got 1"):
        cost(small_config(blocks="1-1"), 16, predictions=1)


def test_windows_by_hand():
    windowed, everything = (cost(small_config(position="tisa", **more), 16) for more in ({"windows": "2,0"}, {}))
    # Of 16 x 16 pairs, at most two apart: five keys for each query, but three at the ends and four beside them. Two of
    # three layers have such a window, and scores and sums of values are two products of width 32.
    pairs = 16 * 5 - 2 * (2 + 1)
    assert everything.flops.layers - windowed.flops.layers == 2 * (2 * 2 * 32) * (256 - pairs)
