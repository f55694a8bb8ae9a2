"""What position adds to scores, read off models."""

from itertools import product

import pytest
import torch

from tests.golden import check
from whereformer import Encoder, EncoderConfig, PositionRangeError
from whereformer.analysis.position_scores import read_layer_scores, read_position_vectors
from whereformer.analysis.toeplitz import from_diagonals, toeplitzness
from whereformer.positions import position_names


def encoder(position="learned", **options):
    """A small one in float64, with parameters so large that each one matters."""
    sizes = {"vocab_size": 3, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 16, "blocks": "2"}
    config = EncoderConfig(**{**sizes, "position": position, "initializer_range": 0.5, **options})
    model = Encoder(config).double().eval()
    with torch.no_grad():
        for parameter in model.embeddings.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model


METHODS = [name for name in position_names() if name != "none"]


@pytest.mark.parametrize("options", [{}, {"norm": "pre"}, {"embedding_size": 4}])
@pytest.mark.parametrize("position", [*METHODS, "learned+tisa", "tupe+t5"])
def test_scores_are_the_mean_over_words(position, options):
    """In the first layer, over all texts there are: log weights are scores less a constant of the row."""
    if position == "synthesizer" and options:
        pytest.skip("its random scores don't depend on the input")
    if position == "fox":
        pytest.skip("its scores are no products of a part from each word, so they have no such mean")
    model = encoder(position, **options)
    n = 4
    texts = torch.tensor(list(product(range(3), repeat=n)))
    weights = model(texts, output_attentions=True).attentions[0]
    expected = weights.log().mean(0)
    layer = next(iter(read_layer_scores(model, n)))
    assert (layer.layer, layer.stride) == (0, 1)
    # A token's score with itself is a mean over one word, not over pairs.
    off_diagonal = ~torch.eye(n, dtype=torch.bool)
    rows = [scores[:, off_diagonal].view(-1, n, n - 1) for scores in (layer.scores, expected)]
    check(*(scores - scores.mean(-1, keepdim=True) for scores in rows), 1e-6)


@pytest.mark.parametrize("position", ["tisa", "t5", "alibi", "fire"])
@pytest.mark.parametrize("blocks", ["3", "1x3", "1-1-1"])
def test_scores_of_curves_are_the_curves_in_every_layer(position, blocks):
    decoder = {"decoder_layers": "1"} if "-" in blocks else {}
    model = encoder(position, blocks=blocks, **decoder)
    layers = list(read_layer_scores(model, 12))
    assert [layer.layer for layer in layers] == list(range(model.config.num_hidden_layers))
    strides = [1, 2, 4, 1] if decoder else [1, 1, 1]
    assert [layer.stride for layer in layers] == strides
    for layer in layers:
        n = layer.scores.shape[-1]
        curve = model.position.curve(torch.arange(1 - n, n) * layer.stride, layer=layer.layer)
        check(layer.scores, from_diagonals(curve).double(), 1e-5)


@pytest.mark.parametrize("position", ["rope", "shaw", "transformer_xl"])
def test_relative_methods_are_curves_in_every_layer(position):
    layers = list(read_layer_scores(encoder(position, separate_cls=False), 7))
    assert len(layers) == 2
    for layer in layers:
        check(toeplitzness(layer.scores), torch.ones(2, dtype=torch.float64), 1e-9)
        assert layer.scores.std() > 1e-6
        if position == "rope":
            check(layer.scores.diagonal(0, 1, 2), torch.zeros(2, 7, dtype=torch.float64), 1e-9)


@pytest.mark.parametrize(("position", "layers"), [("learned", 1), ("sinusoidal", 1), ("learned+tisa", 2), ("none", 0)])
def test_which_layers(position, layers):
    model = encoder(position)
    by_layer = list(read_layer_scores(model, 5))
    assert len(by_layer) == layers
    if position == "learned+tisa":
        curve = model.position.curve(torch.arange(-4, 5), layer=1)
        check(by_layer[1].scores, from_diagonals(curve).double(), 1e-6)


def test_the_constant_that_no_softmax_sees_is_gone():
    layer = next(iter(read_layer_scores(encoder(), 6)))
    check(layer.scores.mean((1, 2)), torch.zeros(2, dtype=torch.float64), 1e-9)


def test_reading_changes_nothing():
    model = encoder("shaw")
    text = torch.tensor([[0, 1, 2]])
    before = model(text).last_hidden_state
    first, second = (torch.stack([layer.scores for layer in read_layer_scores(model, 5)]) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(model(text).last_hidden_state, before)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_vectors():
    model = encoder()
    check(read_position_vectors(model, 5), model.position.weight[:5], 1e-12)
    assert read_position_vectors(encoder("tisa"), 5) is None
    check(read_position_vectors(encoder("learned+tisa"), 2).std(), torch.tensor(0.5).double(), 0.5)
    table = read_position_vectors(encoder("sinusoidal"), 9)
    assert float(toeplitzness(table @ table.T)) == pytest.approx(1, abs=1e-9)
    tupe = encoder("tupe")
    check(read_position_vectors(tupe, 16), tupe.position.table[1:], 1e-12)


@pytest.mark.parametrize("position", ["learned", "tupe", "synthesizer"])
def test_more_positions_than_there_are(position):
    with pytest.raises(PositionRangeError, match="covers positions 0 to 15"):
        list(read_layer_scores(encoder(position), 17))


@pytest.mark.parametrize("position", METHODS)
@pytest.mark.parametrize("length", [1, 2])
def test_short_texts(position, length):
    for layer in read_layer_scores(encoder(position), length):
        assert layer.scores.shape == (2, length, length)
        assert layer.scores.isfinite().all()
