"""The encoder and the decoder of the translation Transformer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from ...kernels import Positions
from ...positions import Position, Site
from ...positions.none import NoPosition
from ..checks import check_shape, embedded_tokens
from ..inputs import SourceInputs, asks_for, takes
from ..layers import Attention, Layer, may_share, position_of
from .config import Seq2SeqConfig


class DecoderLayer(Layer):
    """A :class:`Layer` with attention to the source between its two halves."""

    def __init__(self, config: Seq2SeqConfig, position: Position) -> None:
        super().__init__(config, content=position.content)
        self.cross = Attention(config, content=True)
        self.cross_position = NoPosition(position.model)
        self.cross_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        position: Position,
        site: Site,
        source: Tensor,
        cross: Site,
        caches: tuple[Cache, Cache] | tuple[None, None],
        with_weights: bool,
    ) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
        """Run on the target's hidden (batch, n, hidden_size) and the source's (batch, n_source, hidden_size).

        The target attends to itself in ``site``, and to the source in ``cross``. Caches and the weights that are
        returned are those of both, in this order.
        """
        hidden, weights = self._attend(hidden, position, site, cache=caches[0], with_weights=with_weights)
        before = self.cross_norm(hidden) if self.pre else hidden
        cross = replace(cross, layer=site.layer)
        out, cross_weights = self.cross(before, source, self.cross_position, cross, caches[1], with_weights)
        hidden = hidden + self.dropout(out)
        return self._feed(hidden if self.pre else self.cross_norm(hidden)), (weights, cross_weights)


class _Stack(nn.Module):
    """The common part of encoder and decoder: embeddings with positions, layers, and a last norm."""

    layers: nn.ModuleList

    def __init__(self, config: Seq2SeqConfig, embeddings: nn.Embedding, layers: int, *, causal: bool) -> None:
        super().__init__()
        self.config = config
        # A module of its own, tied later: transformers would not see that a checkpoint lacks a shared one's table.
        tokens, width = embeddings.weight.shape
        self.words = nn.Embedding(tokens, width, embeddings.padding_idx, _weight=embeddings.weight)
        self.position = position_of(config, layers, causal=causal)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.norm == "pre" else None

    def run(self, words: Tensor, site: Site, *more: Any) -> tuple[list[Tensor], list[Any]]:
        """Return the hidden states, embeddings first, and what each layer returns beside them.

        Args:
            words: (batch, n, hidden_size), embedded tokens. They are scaled as in the paper, whatever the method.
            site: where they attend to one another.
            more: what the layers get behind the site.
        """
        if may_share(self.layers):
            site = self.position.share(site)
        hidden = self.dropout(self.position.embed(words * self.config.hidden_size**0.5, site.queries))
        states, weights = [hidden], []
        for number, layer in enumerate(self.layers):
            hidden, own = layer(hidden, self.position, replace(site, layer=number), *more)
            states.append(hidden)
            weights.append(own)
        if self.norm is not None:
            states[-1] = self.norm(hidden)
        return states, weights


class Seq2SeqEncoder(_Stack):
    """The encoder, which reads the source."""

    main_input_name = "input_ids"

    def __init__(self, config: Seq2SeqConfig, embeddings: nn.Embedding) -> None:
        super().__init__(config, embeddings, config.encoder_layers, causal=False)
        self.layers = nn.ModuleList(Layer(config, content=self.position.content) for _ in range(config.encoder_layers))

    @takes(SourceInputs)
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **inputs: Unpack[SourceInputs],
    ) -> BaseModelOutput:
        """Return states (batch, n, hidden_size) of tokens (batch, n); the mask is nonzero for real tokens."""
        words = embedded_tokens(
            "input_ids", self.words, self.config.hidden_size, input_ids, inputs.get("inputs_embeds")
        )
        with_weights = asks_for("output_attentions", inputs, self.config)
        if attention_mask is not None:
            check_shape("attention_mask", attention_mask, tuple(words.shape[:2]))
        positions = Positions(0, 1, words.shape[1])
        real = None if attention_mask is None else attention_mask.bool()
        states, attentions = self.run(words, Site(positions, positions, key_mask=real), None, with_weights)
        return BaseModelOutput(
            last_hidden_state=states[-1],
            hidden_states=tuple(states) if asks_for("output_hidden_states", inputs, self.config) else None,
            attentions=tuple(attentions) if with_weights else None,
        )


class Seq2SeqDecoder(_Stack):
    """The decoder, which writes the target, token by token or all at once."""

    def __init__(self, config: Seq2SeqConfig, embeddings: nn.Embedding) -> None:
        super().__init__(config, embeddings, config.decoder_layers, causal=True)
        self.layers = nn.ModuleList(DecoderLayer(config, self.position) for _ in range(config.decoder_layers))

    def forward(
        self,
        words: Tensor,
        key_mask: Tensor | None,
        source: Tensor,
        source_mask: Tensor | None,
        cache: EncoderDecoderCache | None,
        with_weights: bool,
    ) -> tuple[list[Tensor], list[tuple[Tensor | None, Tensor | None]]]:
        """Return the hidden states, embeddings first, and the weights of every layer.

        Args:
            words: (batch, n, hidden_size), embedded tokens that follow those in the cache.
            key_mask: (batch, cached + n) bool, True = real.
            source: (batch, n_source, hidden_size).
            source_mask: (batch, n_source) bool.
            cache: keys and values of earlier calls; those of this one are added.
            with_weights: whether attention weights are wanted.
        """
        past = 0 if cache is None else cache.get_seq_length()
        new, every = Positions(past, 1, words.shape[1]), Positions(0, 1, past + words.shape[1])
        whole_source = Positions(0, 1, source.shape[1])
        caches = (None, None) if cache is None else (cache.self_attention_cache, cache.cross_attention_cache)
        if caches[1] is not None and caches[1].get_seq_length() > 0:
            # The cache holds all keys and values of the source.
            source = source[:, :0]
        # A method that reads keys needs those in the cache as they are, and rotates them all.
        of_new = None if cache is None or self.position.reads_keys else new
        site = Site(new, every, key_mask=key_mask, causal=True, new_keys=of_new)
        cross = Site(new, whole_source, key_mask=source_mask)
        return self.run(words, site, source, cross, caches, with_weights)
