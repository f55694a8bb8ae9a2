"""Operations and parameters of an encoder: as in the real model, and as in the Funnel-Transformer paper."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import whereformer
from whereformer import positions
from whereformer.analysis import count_flops, count_parameters
from whereformer.kernels import FactorPair
from whereformer.models import EncoderConfig, EncoderForMaskedLM
from whereformer.positions import PositionMethod

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
            model = funnel(blocks, int(width), decoder, **changes)
            ratio = count_flops(model, length, 8).layers / count_flops(EncoderConfig(), length, 8).layers
            digits = len(figure.partition(".")[2])
            # Their relative terms are computed with an offset more.
            assert round(ratio, digits) == pytest.approx(float(figure), rel=0 if changes else 0.01)


def test_a_berts_operations():
    for length, expected in ((128, 22.35), (512, 96.64)):
        flops = count_flops(EncoderConfig(), length)
        assert flops.layers / 1e9 == pytest.approx(expected, abs=0.005)
        assert flops.training == 3 * flops.forward


@torch.no_grad()
def counted(config, length=16, types=2, **options):
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
        *({"blocks": "1x2-2-1", "decoder_layers": "1x2", "position": name} for name in ("tisa", "tupe")),
        *(
            {"blocks": "2-2x2-2", "position": "transformer_xl", **options}
            for options in (
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
    assert count_flops(config, 16, 2).forward == counted(config)


class Projected(PositionMethod):
    """A toy with work of every kind: for a pair of sequences, and in a layer."""

    def __init__(self, model):
        super().__init__(model)
        self.table = torch.nn.Parameter(torch.randn(model.max_length, model.hidden_size))
        self.square = torch.nn.Parameter(torch.randn(model.hidden_size, model.num_heads * model.head_dim))

    def compute_shared(self, site):
        prepared = self.table @ self.square
        heads = (self.model.num_heads, self.model.head_dim)
        rows = [
            prepared[positions.values(prepared.device).clamp(min=0)] @ self.square
            for positions in (site.query_positions, site.key_positions)
        ]
        return FactorPair(*(vectors.unflatten(-1, heads).transpose(0, 1).unsqueeze(0) for vectors in rows))

    def transform_qkv(self, query, key, value, site):
        width = self.model.head_dim
        return query @ self.square[:width, :width], key, value

    def terms(self, hidden, site):
        return (site.shared,)


@pytest.mark.parametrize("changes", [{}, {"blocks": "2-2x2-1"}, {"blocks": "2-2", "decoder_layers": "2"}], ids=str)
def test_a_users_method_is_counted_as_it_is(changes, monkeypatch):
    monkeypatch.setitem(positions.METHODS, "projected", Projected)
    config = small_config(position="projected+tisa", **changes)
    assert count_flops(config, 16, 2).forward == counted(config)
    assert count_parameters(config).position == 64 * 32 + 32 * 32 + 3 * 4 * 5 * len(config.passes)


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
    parameters = count_parameters(config)
    assert parameters.encoder == encoder.num_parameters()
    assert parameters.total == model.num_parameters()
    assert parameters.position == sum(parameter.numel() for parameter in encoder.position.parameters())


def test_it_is_quick_even_where_the_model_would_be_huge():
    sizes = {"hidden_size": 12288, "num_attention_heads": 96, "position": "t5"}
    assert 173e9 < count_parameters(EncoderConfig(blocks="96", **sizes)).layers < 175e9
    # All layers are alike; a twelfth of them would not fit into memory, either.
    assert count_flops(EncoderConfig(blocks="8", **sizes), 512).training > 6 * 512 * 173e9 / 12


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"predictions: expected 0 to 8 .*, got 9"):
        count_flops(EncoderConfig(), 8, predictions=9)
    with pytest.raises(ValueError, match=r"predictions: expected 0 to 0 .*blocks without a decoder.*, got 1"):
        count_flops(small_config(blocks="1-1"), 16, predictions=1)
    with pytest.raises(whereformer.PositionRangeError, match="0 to 511"):
        count_flops(EncoderConfig(position="tupe"), 513)


def test_a_head_predicts_as_many_tokens_as_it_is_asked_for():
    one, all_of_them = (count_flops(EncoderConfig(), 128, predictions=count) for count in (1, None))
    assert one.head == 2 * 768 * (768 + 30522)
    assert all_of_them == count_flops(EncoderConfig(), 128, predictions=128)
    assert all_of_them.head == 128 * one.head
    assert count_flops(small_config(blocks="2-2"), 16).head == 0
