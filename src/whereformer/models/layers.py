"""Layers of encoders and decoders: self-attention with a position method, and a feed-forward network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import InputError
from ..kernels import FactorPair, Term, attention, attention_and_weights
from ..kernels.torch_private import checkpoints_reentrantly
from ..positions import PositionMethod, Site, build_position
from .config import EncoderConfig
from .seq2seq_config import Seq2SeqConfig


def layer_norm(config: EncoderConfig | Seq2SeqConfig, width: int) -> nn.LayerNorm:
    """Return a norm over the last dimension, which is ``width`` wide."""
    return nn.LayerNorm(width, eps=config.layer_norm_eps, bias=config.biases)


def build_position_for(config: EncoderConfig | Seq2SeqConfig, num_layers: int, **sizes: object) -> PositionMethod:
    """Build the position method of some layers with fresh parameters; ``sizes`` are other fields of its ModelShape."""
    return build_position(
        config.position,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        num_layers=num_layers,
        max_length=config.max_position_embeddings,
        initializer_range=config.initializer_range,
        **sizes,
        **(config.position_options or {}),
    )


class Attention(nn.Module):
    """The projections around :func:`whereformer.attention`; the position method acts through its hooks."""

    def __init__(self, config: EncoderConfig | Seq2SeqConfig, *, content: bool) -> None:
        super().__init__()
        width, inner, biases = config.hidden_size, config.num_attention_heads * config.head_dim, config.biases
        if not content and config.attention_scale is not None:
            reason = "expected None with a position method that replaces queries and keys"
            raise InputError("attention_scale", f"{reason}, got {config.attention_scale}")
        self.num_heads = config.num_attention_heads
        self.dropout_p = config.attention_probs_dropout_prob
        self.backend = config.attention_backend
        # A Synthesizer that replaces content scores needs no query and key.
        self.query = nn.Linear(width, inner, bias=config.query_bias and biases) if content else None
        self.key = nn.Linear(width, inner, bias=biases) if content else None
        self.value = nn.Linear(width, inner, bias=biases)
        self.out = nn.Linear(inner, width, bias=biases)
        self.scale = config.attention_scale
        self.sinks = nn.Parameter(torch.empty(self.num_heads)) if config.sinks else None
        attend_to_types = content and config.type_vocab_size and config.segments == "attention"
        self.segments = SegmentScores(config) if attend_to_types else None

    def forward(
        self,
        queries: Tensor,
        keys: Tensor | None,
        position: PositionMethod,
        site: Site,
        cache: Cache | None = None,
        with_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from (batch, n_q, hidden_size) to (batch, n_k, hidden_size), as :meth:`attention_arguments` describes.

        Returns:
            (batch, n_q, hidden_size), and with ``with_weights`` the weights (batch, heads, n_q, n_k).
        """
        arguments, options = self.attention_arguments(queries, keys, position, site, cache)
        options |= {"dropout_p": self.dropout_p if self.training else 0.0}
        if with_weights:
            out, weights = attention_and_weights(*arguments, **options)
        else:
            out, weights = attention(*arguments, backend=self.backend, **options), None
        return self.out(out.transpose(1, 2).flatten(-2)), weights

    def attention_arguments(
        self, queries: Tensor, keys: Tensor | None, position: PositionMethod, site: Site, cache: Cache | None = None
    ) -> tuple[tuple[Tensor | None, Tensor | None, Tensor, tuple[Term, ...]], dict[str, Any]]:
        """Return the arguments for :func:`whereformer.attention`: query, key, value and terms, and the options.

        A cache has the keys and values of earlier calls: after ``PositionMethod.transform_qkv`` if the new keys have
        their own positions (``site.new_key_positions``), otherwise before it. The new keys and values are added to it.
        If ``keys`` is None, the cache already has all keys and values, and does not change.
        """
        site = replace(site, scale=self.scale)
        query = None if self.query is None else self._heads(self.query(queries))
        types: tuple[Term, ...] = ()
        if keys is None:
            assert cache is not None
            key, value = cache.layers[site.layer].keys, cache.layers[site.layer].values
            cache = None
        else:
            key = None if self.key is None else self._heads(self.key(keys))
            value = self._heads(self.value(keys))
        if query is not None:
            if cache is not None and site.new_key_positions is None:
                key, value = cache.update(key, value, site.layer)
                cache = None
            if self.segments is not None and site.query_segments is not None:
                types = (self.segments(query, site),)
        query, key, value, terms = position.apply_hooks(queries, query, key, value, site)
        if cache is not None:
            # A cache needs pairs; without keys, it gets the values twice.
            key, value = cache.update(value if key is None else key, value, site.layer)
            key = None if query is None else key
        sinks = {} if self.sinks is None else {"sinks": self.sinks}
        return (query, key, value, (*terms, *types)), {**site.options(query), **sinks}

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


CLS_TYPE = 2
"""The token type of [CLS] if types act as scores; it equals every type."""


def count_types(config: EncoderConfig) -> int:
    """Return the number of token types if types act as scores."""
    return max(config.type_vocab_size, CLS_TYPE + 1)


def check_types(types: Tensor, kinds: int) -> None:
    """Raise a ValueError for a token type without a score; on the CPU only, since other devices would have to wait."""
    if types.device.type == "cpu" and not torch.compiler.is_compiling() and types.numel():
        low, high = int(types.min()), int(types.max())
        if low < 0 or high >= kinds:
            raise InputError("token_type_ids", f"expected types from 0 to {kinds - 1}, got {low if low < 0 else high}")


class SegmentScores(nn.Module):
    """One score for tokens of the same type, another for tokens of different types (Dai et al. 2020, and its code).

    ``score_ij += scale * <q_i + bias, same>`` if the types are equal or one is [CLS]'s, else with ``different``. A
    separate [CLS], the first token of a row or of each packed document, gets nothing in its row and column.

    Shape:
        bias: (num_attention_heads, head_dim). different, same: ``weight`` (2, num_attention_heads, head_dim).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        heads = (config.num_attention_heads, config.head_dim)
        self.kinds = count_types(config)
        self.scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.separate_cls = config.separate_cls
        self.bias = nn.Parameter(torch.empty(*heads))
        self.weight = nn.Parameter(torch.empty(2, *heads))

    def forward(self, query: Tensor, site: Site) -> FactorPair:
        """Return the scores as factors of rank ``kinds`` + 1: a key holds its type, a query the score of each type.

        The query is (batch, heads, n_q, head_dim), and the site has segments.
        """
        assert site.query_segments is not None
        assert site.key_segments is not None
        weight = (self.weight * self.scale).to(query.dtype)
        # Not computed from query + bias, which the backward would need, too; nor with "@", which would copy the query.
        from_query = torch.einsum("bhqd,khd->bhqk", query, weight)
        from_bias = torch.einsum("hd,khd->hk", self.bias.to(query.dtype), weight).unsqueeze(1)
        unlike, like = (from_query + from_bias).split(1, -1)  # each of shape (batch, heads, n_q, 1)
        kinds = torch.arange(self.kinds, device=query.device)
        is_type, query_type = (types[:, None, :, None] for types in (site.key_segments, site.query_segments))
        accepted = (query_type == kinds) | (query_type == CLS_TYPE) | (kinds == CLS_TYPE)
        query_factors = torch.cat((unlike, (like - unlike) * accepted), -1)
        key_factors = torch.cat((torch.ones_like(is_type, dtype=torch.bool), is_type == kinds), -1).to(query.dtype)
        if self.separate_cls:
            query_factors = without_cls(query_factors, site.query_starts)
            key_factors = without_cls(key_factors, site.key_starts)
        return FactorPair(query_factors, key_factors.expand(-1, query.shape[1], -1, -1))


def without_cls(factors: Tensor, starts: Tensor | None) -> Tensor:
    """Return factors (batch, heads or 1, n, rank) with zeros for every separate [CLS]: the first token, or starts."""
    if starts is None:
        return functional.pad(factors[:, :, 1:], (0, 0, 1, 0))
    return factors.masked_fill(starts[:, None, :, None], 0.0)


def can_share(layers: nn.ModuleList) -> bool:
    """Return whether layers can share results that are computed once, with their gradients.

    Reentrant checkpointing runs the backward of each layer separately, but a shared result could run backward only
    once. So every layer then computes its own results.
    """
    return not any(
        isinstance(layer, GradientCheckpointingLayer)
        and layer.gradient_checkpointing
        and layer.training
        and checkpoints_reentrantly(layer)
        for layer in layers
    )


class Layer(GradientCheckpointingLayer):
    """Self-attention and a feed-forward network, each with a residual and a norm before or after it."""

    def __init__(self, config: EncoderConfig | Seq2SeqConfig, *, content: bool) -> None:
        super().__init__()
        self.is_pre_norm, self.first_norm = config.norm == "pre", config.first_norm
        self.attention = Attention(config, content=content)
        self.attention_norm = layer_norm(config, config.hidden_size)
        # A gated network projects the activated half and the gate at once (Shazeer 2020, arXiv 2002.05202).
        self.gated = config.feed_forward == "gated"
        self.up = nn.Linear(config.hidden_size, (1 + self.gated) * config.intermediate_size, bias=config.biases)
        self.activation = ACT2FN[config.hidden_act]
        self.activation_dropout = nn.Dropout(config.activation_dropout_prob)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.biases)
        self.feed_forward_norm = layer_norm(config, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        hidden: Tensor,
        position: PositionMethod,
        site: Site,
        memory: Tensor | None = None,
        with_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Run as attention layer ``site.layer`` on hidden (batch, n, hidden_size); ``with_weights`` adds the weights.

        Keys and values come from ``memory`` (batch, n_k, hidden_size), by default from ``hidden``.
        """
        hidden, weights = self._attend(hidden, position, site, memory, with_weights=with_weights)
        return self._feed(hidden), weights

    def _attend(
        self,
        hidden: Tensor,
        position: PositionMethod,
        site: Site,
        memory: Tensor | None = None,
        cache: Cache | None = None,
        with_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention with its residual and norm, the first half of a layer."""
        queries = self.attention_norm(hidden) if self.is_pre_norm and (site.layer or self.first_norm) else hidden
        keys = queries if memory is None else self.attention_norm(memory) if self.is_pre_norm else memory
        out, weights = self.attention(queries, keys, position, site, cache, with_weights)
        hidden = hidden + self.dropout(out)
        return hidden if self.is_pre_norm else self.attention_norm(hidden), weights

    def _feed(self, hidden: Tensor) -> Tensor:
        """The feed-forward network with its residual and norm, the second half of a layer."""
        features, gate = self.up(self.feed_forward_norm(hidden) if self.is_pre_norm else hidden), None
        if self.gated:
            features, gate = features.chunk(2, -1)
        features = self.activation(features)
        out = self.down(self.activation_dropout(features if gate is None else features * gate))
        out = hidden + self.dropout(out)
        return out if self.is_pre_norm else self.feed_forward_norm(out)
