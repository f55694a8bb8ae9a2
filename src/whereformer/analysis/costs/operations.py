"""The floating-point operations of an encoder's forward.

Operations are those of matrix products, two for each multiply-add. Norms, activations, softmax and dropout are not
counted, as in the Funnel-Transformer paper (Dai et al. 2020, arXiv 2006.03236): they are less than one percent of a
usual model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...models import EncoderConfig, parse_blocks
from .passes import decoder_depth
from .trace import Trace


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one forward of the whole batch.

    Args:
        linear: projections and feed-forward networks of the blocks' layers.
        attention: their scores and weighted sums of values.
        position: what their positions add, by whatever method.
        segments: what "attention" segments add to their scores, the tokens' types being given.
        decoder: all of the same in the decoder's layers.
        embeddings: the projection of embeddings that are narrower than the model.
        head: the masked-LM head; an encoder that pools without a decoder has none.
    """

    linear: int
    attention: int
    position: int
    segments: int
    decoder: int
    embeddings: int
    head: int

    @property
    def layers(self) -> int:
        """Without embeddings and head: what models are compared by, here as in the paper."""
        return self.linear + self.attention + self.position + self.segments + self.decoder

    @property
    def forward(self) -> int:
        """Everything."""
        return self.layers + self.embeddings + self.head

    @property
    def training(self) -> int:
        """Forward and backward: each product has two gradients of the same size."""
        return 3 * self.forward


def count_flops(config: EncoderConfig, length: int, batch: int = 1, predictions: int = 0) -> Flops:
    """Operations of a forward; ``predictions`` tokens of every sequence go through the masked-LM head."""
    # They are the same by every backend, and with a device in mind one may not be to be had.
    return flops_of(Trace(config, length, batch, torch.float32, torch.device("cpu"), "auto"), predictions)


def linear_flops(config: EncoderConfig) -> float:
    """The paper's relative FLOPs: layers by their length and squared width, in units of BERT-base's twelve.

    ``sum_b depth_b / 2 ** b`` plus the decoder's depth, times ``(hidden_size / 768) ** 2 / 12``: right where
    projections and feed-forward networks of the usual proportions are all that costs.
    """
    depth = sum(block.layers * block.repeats / 2**index for index, block in enumerate(parse_blocks(config.blocks)))
    return (depth + decoder_depth(config)) * (config.hidden_size / 768) ** 2 / 12


def flops_of(trace: Trace, predictions: int) -> Flops:
    """The operations of a traced forward, and of the masked-LM head on ``predictions`` tokens of every sequence."""
    config, batch, passes = trace.config, trace.batch, trace.passes
    width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
    encoder = len(passes) - decoder_depth(config)
    parts = []
    for place, position, segments in zip(passes, trace.flops, trace.segment_flops, strict=True):
        n_q, n_k = place.n_q, place.n_k
        # The projections of queries and of the output are of queries, those of keys and values of keys.
        of_queries, of_keys = (2, 2) if trace.content else (1, 1)
        linear = width * inner * (of_queries * n_q + of_keys * n_k) + 2 * n_q * width * config.intermediate_size
        attention = (2 if trace.content else 1) * n_q * n_k * inner
        parts.append((2 * batch * linear, 2 * batch * attention, position, segments))
    linear, attention, position, segments = (sum(part) for part in zip(*parts[:encoder], strict=True))
    narrow = config.embedding_size if config.embedding_size != width else 0
    transform = width * config.embedding_size if config.lm_head == "bert" else narrow * width
    return Flops(
        linear=linear,
        attention=attention,
        position=position,
        segments=segments,
        decoder=sum(map(sum, parts[encoder:])),
        embeddings=2 * batch * trace.length * narrow * width + trace.embed_flops,
        head=2 * batch * predictions * (transform + config.embedding_size * config.vocab_size),
    )
