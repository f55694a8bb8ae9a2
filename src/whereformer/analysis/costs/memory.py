"""Estimates the memory of an encoder's activations from what each layer keeps for the backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.activations import ACT2FN

from ...models.layers import GatedActivation
from .attention import kept_by
from .kept import KeptTensors
from .parameters import Parameters
from .trace import META, Trace


@dataclass(frozen=True)
class Memory:
    """The estimated bytes of one batch's activations, checked against measurements on the CPU.

    Training keeps for the backward: inputs of products, norms and activations, dropout masks (which the CPU keeps
    as numbers, a GPU as bytes) and what attention and the position method keep. Temporary tensors and gradients are not
    counted. The peak of a forward in training was 1 to 13% above the estimate in float32 (23% for an activation of
    several steps, and more if tables of numbers per pair are trained, as in a random Synthesizer), and 3 to 25% in
    bfloat16. Inference was within 5% for most methods. For methods with large temporary tensors (tupe, fire, floater,
    synthesizer, transformer_xl in bfloat16, and below about 90 tokens all methods with terms), it may be off by half.
    Memory that a backend uses only during a call is not counted either. The batch is assumed to have no padding.

    Args:
        weights: the parameters; training needs four times this, with their gradients and Adam's two moments.
        layers: kept by the layers, except attention's scores.
        scores: kept by attention with a number per query and key, as by the reference.
        position: kept by the position method and by "attention" segments.
        embeddings: kept by the embeddings.
        head: kept by the masked-LM head and its loss, including the logits.
        inference: the most that the encoder needs at once without gradients.
    """

    weights: int
    layers: int
    scores: int
    position: int
    embeddings: int
    head: int
    inference: int

    @property
    def training(self) -> int:
        """What the encoder keeps for the backward, excluding the head."""
        return self.layers + self.scores + self.position + self.embeddings


def memory_of(trace: Trace, predictions: int, parameters: Parameters) -> Memory:
    """Estimate the memory of a traced forward, and of the masked-LM head on ``predictions`` tokens per sequence."""
    item, batch, layers = _Item(trace), trace.batch, range(len(trace.passes))
    return Memory(
        weights=parameters.total * item.size,
        layers=round(batch * (sum(map(item.kept, layers)) + item.kept_at_the_end())),
        scores=batch * sum(map(item.scores, layers)),
        position=trace.kept,
        embeddings=batch * trace.length * item.kept_of_a_word(),
        head=round(batch * predictions * item.kept_of_a_prediction()),
        inference=round(batch * max(map(item.needed, layers))),
    )


class _Item:
    """The bytes of one sequence of the batch, by place in the model."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.config = trace, trace.config
        # Norms and the softmax keep float32 or wider.
        self.size, self.exact = trace.dtype.itemsize, max(4, trace.dtype.itemsize)
        self.inner = self.config.num_attention_heads * self.config.head_dim
        self.mask = self.size if trace.device.type == "cpu" else 1
        self.hidden_mask = self.mask if self.config.hidden_dropout_prob else 0
        drops = self.config.attention_probs_dropout_prob > 0
        self.attention = [
            kept_by(backend, drops, window is not None, trace.dtype, trace.device)
            for backend, window in zip(trace.trained, trace.windows, strict=True)
        ]
        # The backward computes the activation again, unless dropout acted on it. A gated one has twice as much input.
        gated = self.config.feed_forward == "gated"
        self.per_wide: float = 2 * self.size if gated else self.size
        if self.config.activation_dropout_prob > 0:
            self.per_wide = self._activation(with_output=False, gated=gated) + self.mask + self.size
        # An activation temporarily needs about as much as it would keep, and never less than its input and output.
        self.wide_copies = max(2.0, self._activation(with_output=True, gated=gated) / self.size)

    def kept(self, layer: int) -> float:
        """Return what a layer keeps for the backward, except attention's scores."""
        config, at, attention = self.config, self.trace.passes[layer], self.attention[layer]
        width, heads = config.hidden_size, config.num_attention_heads
        # Two residual sums with their norms and dropout masks, and what goes into the feed-forward network
        kept: float = self.size * (self._inputs(layer) * width + at.n_q * self.inner + 3 * at.n_q * width)
        kept += (self.exact if attention.widens else self.size) * self._projected(layer)
        of_query = 2 * self.hidden_mask * width + 4 * self.exact + attention.row_numbers * self.exact * heads
        kept += at.n_q * (of_query + self.per_wide * config.intermediate_size)
        if config.norm == "pre" and at.n_q != at.n_k:
            # The states before and after pooling differ, and both are normalized.
            kept += at.n_k * (self.size * width + 2 * self.exact)
        return kept

    def scores(self, layer: int) -> int:
        """Return what attention keeps in a layer with a number per query and key."""
        at = self.trace.passes[layer]
        return self.config.num_attention_heads * at.n_q * at.n_k * self.attention[layer].score_bytes

    def needed(self, layer: int) -> float:
        """Return what a layer needs at once without gradients: in attention, or in the feed-forward network."""
        config, trace, at = self.config, self.trace, self.trace.passes[layer]
        width = config.hidden_size
        words = self.size * trace.length * config.embedding_size
        # In attention: the words, the input, projections, the output twice, what the last projection makes and what
        # the method needs. In the feed-forward network: the words, the layer's input, the network's own input, with
        # norms before them what that was made of too, and the wide ones.
        numbers = self._inputs(layer) * width + self._projected(layer) + 2 * at.n_q * self.inner + at.n_q * width
        attending = words + self.size * numbers + trace.kept_by_pass[layer] / trace.batch
        if trace.inferred[layer] == "reference":
            attending += 2 * self.exact * config.num_attention_heads * at.n_q * at.n_k
        own = 3 if config.norm == "pre" else 2
        feeding = words + self.size * at.n_q * (own * width + self.wide_copies * config.intermediate_size)
        return max(attending, feeding)

    def kept_at_the_end(self) -> int:
        """What follows the last layer keeps."""
        width = self.config.hidden_size
        states = width * self.size
        return self.trace.passes[-1].n_q * (states + (states + 2 * self.exact if self.config.norm == "pre" else 0))

    def kept_of_a_word(self) -> int:
        """What the embeddings keep of each token."""
        narrow = self.config.embedding_size
        projected = narrow * self.size if narrow != self.config.hidden_size else 0
        return narrow * (self.size + self.hidden_mask) + 2 * self.exact + projected

    def kept_of_a_prediction(self) -> float:
        """What the masked-LM head and its loss keep of each token that they predict."""
        # The logits, and their logarithmic softmax
        kept: float = self.config.vocab_size * (self.size + self.exact)
        if self.config.lm_head == "bert":
            kept += (self._activation(with_output=True) + self.size) * self.config.embedding_size
            kept += 2 * self.exact
            kept += self.config.hidden_size * self.size if self.config.sparse_prediction else 0
        return kept

    def _inputs(self, layer: int) -> int:
        """How many states keys are made of, and queries where they are not the same tokens."""
        at = self.trace.passes[layer]
        return at.n_k + (at.n_q if at.n_q != at.n_k else 0)

    def _projected(self, layer: int) -> int:
        """How many numbers query, key and value have."""
        at = self.trace.passes[layer]
        return self.inner * (at.n_q + 2 * at.n_k if self.trace.content else at.n_k)

    def _activation(self, *, with_output: bool, gated: bool = False) -> float:
        """Bytes that an activation keeps for each number of its output, ``with_output`` if what follows keeps that."""
        kept = KeptTensors()
        activation = ACT2FN[self.config.hidden_act]
        given = torch.empty(2048 if gated else 1024, dtype=self.trace.dtype, device=META, requires_grad=True)
        with kept.hooks():
            output = (GatedActivation(activation) if gated else activation)(given)
        if with_output:
            kept.add(output)
        return kept.size() / output.numel()
