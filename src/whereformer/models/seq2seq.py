"""The translation Transformer (Vaswani et al. 2017) with any position method in its self-attention."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from ..errors import InputError
from ..kernels import Positions
from ..kernels.cpu.products import project
from ..positions import Position, Sum, build_position
from .checks import check_shape
from .encoder import Attention, AttentionContext, Earlier, Layer
from .inputs import Seq2SeqInputs, SourceInputs, asks_for, takes
from .pooling import Tokens
from .seq2seq_config import Seq2SeqConfig
from .smoothed import IGNORED, smoothed_cross_entropy


class DecoderLayer(Layer):
    """A :class:`Layer` that between its two halves looks at the source."""

    def __init__(self, config: Seq2SeqConfig, *, content: bool, cross_content: bool) -> None:
        super().__init__(config, content=content)
        self.cross = Attention(config, content=cross_content)
        self.cross_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        source: Tensor,
        layer: int,
        contexts: tuple[AttentionContext, AttentionContext],
    ) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
        """Run on the target's hidden (batch, n, hidden_size) and the source's (batch, n_source, hidden_size).

        The contexts, and the weights that are returned, are those of self-attention and of the attention to the source.
        """
        hidden, weights = self._attend(hidden, layer, contexts[0])
        before = self.cross_norm(hidden) if self.pre else hidden
        out, cross_weights = self.cross(before, source, layer, contexts[1])
        hidden = hidden + self.dropout(out)
        return self._feed(hidden if self.pre else self.cross_norm(hidden)), (weights, cross_weights)


class _Stack(nn.Module):
    """What encoder and decoder have in common: embeddings with positions, layers, a last norm."""

    layers: nn.ModuleList

    def __init__(self, config: Seq2SeqConfig, embeddings: nn.Embedding, layers: int, *, causal: bool) -> None:
        super().__init__()
        self.config = config
        self.words = embeddings
        self.position = _position(config, config.position, config.position_options, layers, causal=causal)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.norm == "pre" else None

    def embed(self, words: Tensor, positions: Positions) -> Tensor:
        """Tokens (batch, n, hidden_size) with their positions; scaled for all methods as the paper does."""
        return self.dropout(self.position.embed(words * self.config.hidden_size**0.5, positions))

    def finish(self, hidden: Tensor) -> Tensor:
        """The hidden states as what follows reads them."""
        return hidden if self.norm is None else self.norm(hidden)


class Seq2SeqEncoder(_Stack):
    """Reads the source."""

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
        """States (batch, n, hidden_size) of tokens (batch, n); the mask is nonzero where they are real."""
        words = _words("input_ids", self.words, input_ids, inputs.get("inputs_embeds"))
        with_weights = asks_for("output_attentions", inputs, self.config)
        if attention_mask is not None:
            check_shape("attention_mask", attention_mask, tuple(words.shape[:2]))
        positions = Positions(0, 1, words.shape[1])
        tokens = Tokens(positions, None if attention_mask is None else attention_mask.bool())
        shared = self.position.shared(positions, positions)
        context = AttentionContext(self.position, tokens, tokens, shared, with_weights=with_weights)
        hidden = self.embed(words, positions)
        states, attentions = [hidden], []
        for number, layer in enumerate(self.layers):
            hidden, weights = layer(hidden, number, context)
            states.append(hidden)
            attentions.append(weights)
        states[-1] = hidden = self.finish(hidden)
        return BaseModelOutput(
            last_hidden_state=hidden,
            hidden_states=tuple(states) if asks_for("output_hidden_states", inputs, self.config) else None,
            attentions=tuple(attentions) if with_weights else None,
        )


class Seq2SeqDecoder(_Stack):
    """Writes the target, one token after the other or all at once."""

    def __init__(self, config: Seq2SeqConfig, embeddings: nn.Embedding) -> None:
        super().__init__(config, embeddings, config.decoder_layers, causal=True)
        self.cross_position = _position(
            config, config.cross_position, config.cross_position_options, config.decoder_layers, causal=False
        )
        parts = self.cross_position if isinstance(self.cross_position, Sum) else [self.cross_position]
        if any(type(part).embed is not Position.embed for part in parts):
            raise InputError(
                "cross_position",
                f"expected methods that act in attention, got {config.cross_position!r}, which adds to embeddings",
            )
        self.layers = nn.ModuleList(
            DecoderLayer(config, content=self.position.content, cross_content=self.cross_position.content)
            for _ in range(config.decoder_layers)
        )

    def forward(
        self,
        words: Tensor,
        key_mask: Tensor | None,
        source: Tensor,
        source_mask: Tensor | None,
        cache: EncoderDecoderCache | None,
        with_weights: bool,
    ) -> tuple[list[Tensor], list[tuple[Tensor | None, Tensor | None]]]:
        """Hidden states, the embeddings first, and weights of every layer.

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
        own, cross = (None, None) if cache is None else (cache.self_attention_cache, cache.cross_attention_cache)
        if cross is not None and cross.get_seq_length() > 0:
            # The cache holds all keys and values of the source.
            source = source[:, :0]
        unread = Positions(0, 1, source.shape[1])
        contexts = (
            _context(self.position, new, Tokens(every, key_mask), own, new, causal=True, with_weights=with_weights),
            _context(
                self.cross_position,
                new,
                Tokens(whole_source, source_mask),
                cross,
                unread,
                causal=False,
                with_weights=with_weights,
            ),
        )
        hidden = self.embed(words, new)
        states, attentions = [hidden], []
        for number, layer in enumerate(self.layers):
            hidden, weights = layer(hidden, source, number, contexts)
            states.append(hidden)
            attentions.append(weights)
        states[-1] = self.finish(hidden)
        return states, attentions


def _context(
    position: Position, queries: Positions, keys: Tokens, cache: Cache | None, new_keys: Positions, **options: bool
) -> AttentionContext:
    """The context of attention to keys of which the cache, if there is one, holds all but the new."""
    once = position.once()
    shared = position.shared(queries, keys.positions, once)
    earlier = None
    if cache is not None:
        among_new = shared if new_keys == keys.positions else position.shared(queries, new_keys, once)
        earlier = Earlier(cache, new_keys, among_new)
    return AttentionContext(position, Tokens(queries), keys, shared, earlier=earlier, **options)


def _position(
    config: Seq2SeqConfig, name: str, options: dict[str, Any] | None, layers: int, *, causal: bool
) -> Position:
    return build_position(
        name,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        num_layers=layers,
        max_length=config.max_position_embeddings,
        causal=causal,
        initializer_range=config.initializer_range,
        **(options or {}),
    )


def _words(name: str, embeddings: nn.Embedding, ids: Tensor | None, embedded: Tensor | None) -> Tensor:
    """Embedded tokens (batch, n, hidden_size), given either way."""
    if (ids is None) == (embedded is None):
        raise ValueError(f"{name} and {name.replace('input_ids', 'inputs_embeds')}: give exactly one of them")
    if embedded is not None:
        if embedded.dim() != 3 or embedded.shape[-1] != embeddings.embedding_dim:
            raise ValueError(
                f"{name.replace('input_ids', 'inputs_embeds')}: expected shape (batch, n, {embeddings.embedding_dim}), "
                f"got {tuple(embedded.shape)}"
            )
        return embedded
    assert ids is not None
    if ids.dim() != 2:
        raise InputError(name, f"expected shape (batch, n), got {tuple(ids.shape)}")
    return embeddings(ids)


class Seq2SeqForConditionalGeneration(PreTrainedModel, GenerationMixin):
    """An encoder and a decoder that translates, with ``config.position`` in the self-attention of both.

    Source, target and output share one table of embeddings. ``generate`` keeps keys and values of what is written, and
    position methods are asked about the new tokens only; the logits are those of a call with the whole target. Give
    ``generate`` an ``attention_mask`` where sources are padded: of models with an encoder it does not make its own.

    Args:
        config: sizes and options.
    Source: Vaswani et al. (2017), arXiv 1706.03762; with ``position="shaw"`` Shaw et al. (2018), arXiv 1803.02155.
    """

    config_class = Seq2SeqConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _tied_weights_keys = {  # noqa: RUF012
        "encoder.words.weight": "words.weight",
        "decoder.words.weight": "words.weight",
        "head.weight": "words.weight",
    }

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.encoder = Seq2SeqEncoder(config, self.words)
        self.decoder = Seq2SeqDecoder(config, self.words)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Glorot uniform for projections, as in tensor2tensor and fairseq; N(0, 1 / hidden_size) for embeddings."""
        if isinstance(module, Position):
            module.reset_parameters()
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, 0.0, self.config.hidden_size**-0.5)
            if module.padding_idx is not None:
                nn.init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.words

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.words = self.encoder.words = self.decoder.words = value

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.head = new_embeddings

    def get_encoder(self, *_: Any, **__: Any) -> Seq2SeqEncoder:
        return self.encoder

    def get_decoder(self) -> Seq2SeqDecoder:
        return self.decoder

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The target one place to the right, behind the start token (batch, n)."""
        start = torch.full_like(labels[:, :1], self.config.decoder_start_token_id)
        return torch.cat((start, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, self.config.pad_token_id)), 1)

    @takes(Seq2SeqInputs)
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        **inputs: Unpack[Seq2SeqInputs],
    ) -> Seq2SeqLMOutput:
        """Logits of every next token, and with labels the loss.

        Args:
            input_ids: (batch, n_source) source tokens, or ``inputs_embeds`` (batch, n_source, hidden_size).
            attention_mask: (batch, n_source), nonzero = a real token; every token is real by default.
            decoder_input_ids: (batch, n) target tokens that begin with the start token, or
                ``decoder_inputs_embeds``; by default the labels one place to the right.
            decoder_attention_mask: (batch, cached + n). Padding after the target needs none: nothing looks back at it.
            encoder_outputs: of an earlier call, in place of the source.
            past_key_values: keys and values of earlier calls; ``decoder_input_ids`` are then only what follows.
            labels: (batch, n) target tokens, -100 where nothing is to be predicted.
            use_cache: return a cache; without labels the configuration decides.
            output_hidden_states, output_attentions: also return those of both parts.
            return_dict: False for a plain tuple.
            num_items_in_batch: the loss is the sum over tokens divided by this; their mean by default.

        Returns:
            ``logits`` (batch, n, vocab_size), ``loss`` (cross-entropy in nats, in training with
            ``config.label_smoothing``; 0 where nothing is to be predicted), ``past_key_values`` and what was asked for.

        Raises:
            ValueError: for shapes that do not fit; the message names the argument.
        """
        read = self._read(input_ids, attention_mask, inputs)
        source = read.last_hidden_state
        words = self._target(decoder_input_ids, labels, inputs, len(source))
        cache = self._cache(inputs.get("past_key_values"), inputs.get("use_cache"), labels)
        if decoder_attention_mask is not None:
            past = 0 if cache is None else cache.get_seq_length()
            check_shape("decoder_attention_mask", decoder_attention_mask, (len(words), past + words.shape[1]))
        with_weights = asks_for("output_attentions", inputs, self.config)
        states, attentions = self.decoder(
            words,
            None if decoder_attention_mask is None else decoder_attention_mask.bool(),
            source,
            None if attention_mask is None else attention_mask.bool(),
            cache,
            with_weights,
        )
        logits = project(self.head, states[-1])
        return Seq2SeqLMOutput(
            loss=None if labels is None else self._loss(logits, labels, inputs.get("num_items_in_batch")),
            logits=logits,
            past_key_values=cache,
            decoder_hidden_states=tuple(states) if asks_for("output_hidden_states", inputs, self.config) else None,
            decoder_attentions=tuple(own for own, _ in attentions) if with_weights else None,
            cross_attentions=tuple(cross for _, cross in attentions) if with_weights else None,
            encoder_last_hidden_state=source,
            encoder_hidden_states=read.hidden_states,
            encoder_attentions=read.attentions,
        )

    def _read(self, input_ids: Tensor | None, attention_mask: Tensor | None, inputs: Seq2SeqInputs) -> BaseModelOutput:
        """Encode the source, or take what an earlier call made of it."""
        given = inputs.get("encoder_outputs")
        if given is None:
            asked = {name: inputs.get(name) for name in SourceInputs.__annotations__}
            return self.encoder(input_ids, attention_mask, **asked, return_dict=True)
        read: BaseModelOutput = given if isinstance(given, BaseModelOutput) else BaseModelOutput(*given)
        if attention_mask is not None:
            check_shape("attention_mask", attention_mask, tuple(read.last_hidden_state.shape[:2]))
        return read

    def _target(
        self, decoder_input_ids: Tensor | None, labels: Tensor | None, inputs: Seq2SeqInputs, sources: int
    ) -> Tensor:
        """The embedded target (batch, n, hidden_size), however it is given."""
        embedded = inputs.get("decoder_inputs_embeds")
        if labels is not None and decoder_input_ids is None and embedded is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        words = _words("decoder_input_ids", self.words, decoder_input_ids, embedded)
        if len(words) != sources:
            raise InputError("decoder_input_ids", f"expected a batch of {sources} as the source, got {len(words)}")
        return words

    def _cache(
        self, given: EncoderDecoderCache | None, use_cache: bool | None, labels: Tensor | None
    ) -> EncoderDecoderCache | None:
        if given is not None:
            own = given.self_attention_cache if isinstance(given, EncoderDecoderCache) else given
            # What is allocated in advance holds more keys than there are.
            if own is given or own.is_compileable:
                raise InputError(
                    "past_key_values", "expected an EncoderDecoderCache of dynamic caches, got a " + type(own).__name__
                )
            return given
        wanted = (self.config.use_cache and labels is None) if use_cache is None else use_cache
        # A layer that runs again in the backward would add its keys a second time.
        checkpointed = self.training and any(layer.gradient_checkpointing for layer in self.decoder.layers)
        if not wanted or checkpointed:
            return None
        return EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))

    def _loss(self, logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        check_shape("labels", labels, tuple(logits.shape[:2]))
        smoothing = self.config.label_smoothing if self.training else 0.0
        total = smoothed_cross_entropy(logits.flatten(0, 1), labels.flatten(), smoothing)
        # A batch, or the part of one that a device gets, may have nothing to predict; its loss is 0 then.
        return total / torch.as_tensor((labels != IGNORED).sum() if count is None else count).clamp(min=1)
