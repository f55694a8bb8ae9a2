"""Reads the effect of position on a model's scores, for any method, as the mean over words.

The score of a word at i with another at j depends on both words and on both positions. Averaged over random words,
independent at i and j, only the positions remain. A score is a product of a part from each word, so that mean is the
score of the two mean states. For embeddings without a norm, this is the average content of the TISA paper (its figure
8); here the mean is taken after the norm, whose scale depends on the words. This covers every method: embeddings
that are added to words, rotations, and terms of the scores. In deeper layers position embeddings are mixed with
everything else, but a method that acts in every layer can be read there in the same way. (A method that bends keys,
as fox does, is read at the mean states, which is not the mean of its scores.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels import Positions
from ..kernels.make_call import make_call
from ..kernels.reference import attention_scores
from ..models import Encoder
from ..models.layers import Layer
from ..positions import PositionMethod, Site

WORDS = 512
"""The number of words, spread evenly over the vocabulary, that represent it in the embeddings."""
WORDS_AT_A_TIME = 16
SEQUENCES = 4
"""The number of random word sequences that give the mean states of deeper layers."""


class LayerScores(NamedTuple):
    """The effect of position on the scores of a layer."""

    layer: int  # counted from 0 as the model runs, a shared layer once per pass
    stride: int  # tokens from one position to the next; more than 1 after pooling
    scores: Tensor  # (heads, n, n); row i is the query


def read_position_vectors(encoder: Encoder, length: int) -> Tensor | None:
    """Return the position embeddings E as stored, (length, width) float64; None for a method without embeddings.

    Raises:
        PositionRangeError: for more positions than the table has.
    """
    with torch.no_grad():
        vectors = encoder.position.vectors(Positions(0, 1, length))
    return None if vectors is None else vectors.double()


def find_acting_layers(position: PositionMethod) -> list[int]:
    """Return the layers where a method acts in attention; in the others, positions act only through the embeddings."""
    return [layer for layer in range(position.model.num_layers) if position.acts_in_attention(layer)]


@torch.no_grad()
def read_layer_scores(encoder: Encoder, length: int) -> Iterator[LayerScores]:
    """Yield the scores of the layers where position acts in attention, and of the first if it is in the embeddings.

    The mean is over words of type 0, after position embeddings, norm and ALBERT's projection; then come query and key
    with their biases, and the scale. In deeper layers every token is the mean state that the layer reads for random
    words, so that only the effect of the method *in* the layer remains.

    The score that two such tokens have without position is subtracted, one constant per head. If positions are in the
    embeddings, that score is unknown, and the mean over all pairs is subtracted. A softmax sees neither.

    Pooled layers are read between their queries, at the queries' positions.

    Raises:
        PositionRangeError: for more positions than the method covers.
    """
    embedded = "embeddings" in encoder.position.acts_on
    acting = set(find_acting_layers(encoder.position))
    if not (embedded or acting):
        return
    states = {0: (_mean_input(encoder, length), Positions(0, 1, length))}
    if acting:
        states |= _mean_states(encoder, length)
    for layer, (hidden, positions) in sorted(states.items()):
        if layer not in acting and not (embedded and layer == 0):
            continue
        attention = _layer(encoder, encoder.passes[layer]).attention
        in_input = embedded and layer == 0
        if not in_input:
            hidden = hidden.mean(1, keepdim=True).expand(-1, positions.length, -1)
        arguments, options = attention.attention_arguments(
            hidden, hidden, encoder.position, Site(positions, positions, layer)
        )
        scores, _ = attention_scores(make_call(*arguments, **options))
        scores = scores[0].clone()
        if in_input:
            scores -= scores.mean((-2, -1), keepdim=True)
        elif attention.query is not None and attention.key is not None:
            query, key = (
                part(hidden[0, 0]).unflatten(-1, (attention.num_heads, -1)) for part in (attention.query, attention.key)
            )
            scores -= (torch.linalg.vecdot(query, key) * query.shape[-1] ** -0.5)[:, None, None]
        yield LayerScores(layer, positions.stride if positions.length > 1 else 1, scores)


def _layer(encoder: Encoder, index: int) -> Layer:
    layer = encoder.layers[index]
    assert isinstance(layer, Layer)
    return layer


def _mean_input(encoder: Encoder, length: int) -> Tensor:
    """Return the mean over words of the first layer's attention input at each position, (1, n, hidden_size)."""
    words = encoder.embeddings.word.weight
    chosen = torch.linspace(0, len(words) - 1, min(len(words), WORDS), device=words.device).long()
    first = _layer(encoder, 0)
    total = torch.zeros((), device=words.device)
    for indices in chosen.split(WORDS_AT_A_TIME):
        inputs = words[indices].unsqueeze(1).expand(-1, length, -1)
        hidden = encoder.embeddings(inputs, None, encoder.position, Positions(0, 1, length))
        total = total + (first.attention_norm(hidden) if first.is_pre_norm else hidden).sum(0, keepdim=True)
    return total / len(chosen)


def _mean_states(encoder: Encoder, length: int) -> dict[int, tuple[Tensor, Positions]]:
    """Return the mean over words and positions of each deeper layer's attention input, (1, 1, hidden_size), and the
    positions of its queries."""
    states: dict[int, tuple[Tensor, Positions]] = {}

    def record(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        queries, _, _, site, *_ = arguments
        if site.layer:
            states[site.layer] = queries.mean((0, 1), keepdim=True), site.query_positions

    hooks = [_layer(encoder, index).attention.register_forward_pre_hook(record) for index in range(len(encoder.layers))]
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(len(encoder.embeddings.word.weight), (SEQUENCES, length), generator=generator)
    try:
        encoder(words.to(encoder.device))
    finally:
        for hook in hooks:
            hook.remove()
    return states
