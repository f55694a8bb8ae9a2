"""The translation Transformer (Vaswani et al. 2017) with any position method in its self-attention."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from ..errors import InputError
from ..kernels import Positions
from ..positions import PositionMethod, Site
from ..positions.none import NoPosition
from .checks import OneDeviceModel, check_integers, check_shape, classification_loss, embed_tokens, to_token_mask
from .inputs import CACHE, Seq2SeqInputs, SourceInputs, accepts, is_requested
from .layers import Attention, Layer, build_position_for, can_share, layer_norm
from .seq2seq_config import Seq2SeqConfig


class DecoderLayer(Layer):
    """A :class:`Layer` with attention to the source between its two halves."""

    def __init__(self, config: Seq2SeqConfig, *, content: bool) -> None:
        super().__init__(config, content=content)
        self.cross = Attention(config, content=True)
        self.cross_norm = layer_norm(config, config.hidden_size)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        position: PositionMethod,
        site: Site,
        source: Tensor | None,
        no_position: NoPosition,
        cross: Site,
        caches: tuple[Cache, Cache] | tuple[None, None],
        with_weights: bool,
    ) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
        """Run on the target's hidden (batch, n, hidden_size) and the source's (batch, n_source, hidden_size).

        The target attends to itself in ``site``, and without positions to the source in ``cross``. The source is None
        if the cache already has all its keys and values. ``caches`` and the returned weights are in this order, too.
        """
        hidden, weights = self._attend(hidden, position, site, cache=caches[0], with_weights=with_weights)
        queries = self.cross_norm(hidden) if self.is_pre_norm else hidden
        cross = cross.at_layer(site.layer)
        out, cross_weights = self.cross(queries, source, no_position, cross, caches[1], with_weights)
        hidden = hidden + self.dropout(out)
        return self._feed(hidden if self.is_pre_norm else self.cross_norm(hidden)), (weights, cross_weights)


class _Stack(nn.Module):
    """The common part of encoder and decoder: embeddings with positions, layers, and a last norm."""

    def __init__(self, config: Seq2SeqConfig, embeddings: nn.Embedding, layers: int, *, causal: bool) -> None:
        super().__init__()
        self.config = config
        # A separate module, tied later: with a shared one, transformers would not notice that a checkpoint lacks it.
        tokens, width = embeddings.weight.shape
        self.words = nn.Embedding(tokens, width, embeddings.padding_idx, _weight=embeddings.weight)
        self.position = build_position_for(config, layers, causal=causal)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.norm = layer_norm(config, config.hidden_size) if config.norm == "pre" else None
        kind = DecoderLayer if causal else Layer
        self.layers = nn.ModuleList(kind(config, content=self.position.uses_query_key) for _ in range(layers))

    def run(self, words: Tensor, site: Site, *layer_arguments: object) -> tuple[list[Tensor], list[Any]]:
        """Return the hidden states, embeddings first, and the attention weights that each layer returns.

        Args:
            words: (batch, n, hidden_size), embedded tokens. They are scaled as in the paper, whatever the method is.
            site: the site of self-attention.
            layer_arguments: the layers' arguments after the site.
        """
        if can_share(self.layers):
            site = self.position.with_shared(site)
        hidden = self.dropout(self.position.embed(words * self.config.hidden_size**0.5, site.query_positions))
        states, weights = [hidden], []
        for number, layer in enumerate(self.layers):
            hidden, layer_weights = layer(hidden, self.position, site.at_layer(number), *layer_arguments)
            states.append(hidden)
            weights.append(layer_weights)
        if self.norm is not None:
            states[-1] = self.norm(hidden)
        return states, weights


class Seq2SeqEncoder(_Stack):
    """The encoder, which reads the source."""

    main_input_name = "input_ids"

    @accepts(SourceInputs)
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **inputs: Unpack[SourceInputs]
    ) -> BaseModelOutput:
        """Return states (batch, n, hidden_size) of tokens (batch, n); the mask is nonzero for tokens, 0 for padding."""
        words = embed_tokens("input_ids", self.words, self.config.hidden_size, input_ids, inputs.get("inputs_embeds"))
        with_weights = is_requested("output_attentions", inputs, self.config)
        if attention_mask is not None:
            check_shape("attention_mask", attention_mask, tuple(words.shape[:2]))
        positions = Positions(0, 1, words.shape[1])
        site = Site(positions, positions, key_mask=to_token_mask(attention_mask))
        states, attentions = self.run(words, site, None, with_weights)
        return BaseModelOutput(
            last_hidden_state=states[-1],
            hidden_states=tuple(states) if is_requested("output_hidden_states", inputs, self.config) else None,
            attentions=tuple(attentions) if with_weights else None,
        )


class Seq2SeqDecoder(_Stack):
    """The decoder, which writes the target, token by token or all at once."""

    def __init__(self, config: Seq2SeqConfig, embeddings: nn.Embedding) -> None:
        super().__init__(config, embeddings, config.decoder_layers, causal=True)
        self.no_position = NoPosition(self.position.model)

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
            words: (batch, n, hidden_size), embedded tokens that follow the cached ones.
            key_mask: (batch, cached + n) bool, True = a token, False = padding.
            source: (batch, n_source, hidden_size).
            source_mask: (batch, n_source) bool.
            cache: keys and values of earlier calls; this call's are added.
            with_weights: whether to return attention weights.
        """
        past = 0 if cache is None else cache.get_seq_length()
        new, all_positions = Positions(past, 1, words.shape[1]), Positions(0, 1, past + words.shape[1])
        cross = Site(new, Positions(0, 1, source.shape[1]), key_mask=source_mask)
        caches = (None, None) if cache is None else (cache.self_attention_cache, cache.cross_attention_cache)
        is_cached = caches[1] is not None and caches[1].get_seq_length() > 0
        # A method that reads keys needs unrotated keys in the cache, and rotates all of them in each call.
        new_keys = None if cache is None or self.position.reads_keys else new
        site = Site(new, all_positions, key_mask=key_mask, causal=True, new_key_positions=new_keys)
        return self.run(words, site, None if is_cached else source, self.no_position, cross, caches, with_weights)


class Seq2SeqForConditionalGeneration(OneDeviceModel, GenerationMixin):
    """An encoder and a decoder that translates, with ``config.position`` in the self-attention of both.

    Source, target and output share one table of embeddings. ``generate`` caches keys and values, and position methods
    only see the new tokens; the logits equal the logits of a call with the whole target. If sources are padded, pass
    ``generate`` an ``attention_mask``: for models with an encoder it does not build one.

    Args:
        config: sizes and options.
    Source: Vaswani et al. (2017), arXiv 1706.03762; with ``position="shaw"`` Shaw et al. (2018), arXiv 1803.02155.
    """

    config_class = Seq2SeqConfig
    base_model_prefix = "model"
    _input_embed_layer = "words"
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
        self.encoder = Seq2SeqEncoder(config, self.words, config.encoder_layers, causal=False)
        self.decoder = Seq2SeqDecoder(config, self.words)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw projections Glorot uniform (as tensor2tensor and fairseq), embeddings from N(0, 1 / hidden_size)."""
        if isinstance(module, PositionMethod):
            module.reset_parameters()
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif module is self.words:
            nn.init.normal_(module.weight, 0.0, self.config.hidden_size**-0.5)
            if module.padding_idx is not None:
                nn.init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.words = self.encoder.words = self.decoder.words = value

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.head = new_embeddings

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shift the target one place to the right, after the start token (batch, n)."""
        start = torch.full_like(labels[:, :1], self.config.decoder_start_token_id)
        return torch.cat((start, labels[:, :-1].masked_fill(labels[:, :-1] == -100, self.config.pad_token_id)), 1)

    @accepts(Seq2SeqInputs)
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
        """Compute the logits of every next token and, with labels, the loss.

        Args:
            input_ids: (batch, n_source) source tokens, or ``inputs_embeds`` (batch, n_source, hidden_size).
            attention_mask: (batch, n_source), nonzero = a token, 0 = padding; None: all are tokens.
            decoder_input_ids: (batch, n) target tokens that begin with the start token, or
                ``decoder_inputs_embeds``; by default the labels one place to the right.
            decoder_attention_mask: (batch, cached + n). Padding after the target needs none, because no target token
                attends to it.
            encoder_outputs: the outputs of an earlier call, instead of the source.
            cache, past_key_values: two names of keys and values of earlier calls, since transformers 5.24 renamed
                them; ``decoder_input_ids`` are then only the new tokens.
            labels: (batch, n) target tokens, -100 for tokens that are not predicted.
            use_cache: return a cache; without labels the configuration decides.
            output_hidden_states, output_attentions: also return the hidden states or weights of encoder and decoder.
            return_dict: False for a plain tuple.
            num_items_in_batch: the loss is the sum over tokens divided by this number; by default it is their mean.

        Returns:
            ``logits`` (batch, n, vocab_size), ``loss`` (cross-entropy in nats, in training with
            ``config.label_smoothing``; 0 if there is nothing to predict), the cache (``CACHE`` of
            ``whereformer.models.inputs`` is its name), and the requested outputs.

        Raises:
            ValueError: for shapes that do not fit; the message names the argument.
        """
        if labels is not None:
            labels = check_integers("labels", labels)
        read = self._read(input_ids, attention_mask, inputs)
        source = read.last_hidden_state
        words = self._target(decoder_input_ids, labels, inputs, len(source))
        passed_cache = inputs.get("past_key_values") if inputs.get("cache") is None else inputs.get("cache")
        cache = self._cache(passed_cache, inputs.get("use_cache"), labels)
        if decoder_attention_mask is not None:
            past = 0 if cache is None else cache.get_seq_length()
            check_shape("decoder_attention_mask", decoder_attention_mask, (len(words), past + words.shape[1]))
        with_weights = is_requested("output_attentions", inputs, self.config)
        states, attentions = self.decoder(
            words, to_token_mask(decoder_attention_mask), source, to_token_mask(attention_mask), cache, with_weights
        )
        logits = self.head(states[-1])
        return Seq2SeqLMOutput(
            loss=None if labels is None else self._loss(logits, labels, inputs.get("num_items_in_batch")),
            logits=logits,
            **{CACHE: cache},
            decoder_hidden_states=tuple(states) if is_requested("output_hidden_states", inputs, self.config) else None,
            decoder_attentions=tuple(weights for weights, _ in attentions) if with_weights else None,
            cross_attentions=tuple(cross for _, cross in attentions) if with_weights else None,
            encoder_last_hidden_state=source,
            encoder_hidden_states=read.hidden_states,
            encoder_attentions=read.attentions,
        )

    def _read(self, input_ids: Tensor | None, attention_mask: Tensor | None, inputs: Seq2SeqInputs) -> BaseModelOutput:
        """Encode the source, or return the encoder's output of an earlier call."""
        outputs = inputs.get("encoder_outputs")
        if outputs is None:
            source_inputs = {name: inputs.get(name) for name in SourceInputs.__annotations__}
            return self.encoder(input_ids, attention_mask, **source_inputs, return_dict=True)
        read = outputs if isinstance(outputs, BaseModelOutput) else BaseModelOutput(*outputs[:3])
        if attention_mask is not None:
            check_shape("attention_mask", attention_mask, tuple(read.last_hidden_state.shape[:2]))
        return read

    def _target(
        self, decoder_input_ids: Tensor | None, labels: Tensor | None, inputs: Seq2SeqInputs, sources: int
    ) -> Tensor:
        """Return the embedded target (batch, n, hidden_size), from ids, embeddings or labels."""
        embedded = inputs.get("decoder_inputs_embeds")
        if labels is not None and decoder_input_ids is None and embedded is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        words = embed_tokens("decoder_input_ids", self.words, self.config.hidden_size, decoder_input_ids, embedded)
        if len(words) != sources:
            raise InputError("decoder_input_ids", f"expected a batch of {sources} like the source, got {len(words)}")
        return words

    def _cache(
        self, cache: EncoderDecoderCache | None, use_cache: bool | None, labels: Tensor | None
    ) -> EncoderDecoderCache | None:
        """Return the cache that was passed, or else a new one; None if the call does not cache."""
        if cache is not None:
            self_cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
            # A cache that is allocated in advance has room for keys that do not exist yet.
            if self_cache is cache or self_cache.is_compileable:
                kind = type(self_cache).__name__
                raise InputError(CACHE, f"expected an EncoderDecoderCache of dynamic caches, got a {kind}")
            return cache
        caches = (self.config.use_cache and labels is None) if use_cache is None else use_cache
        # A layer that runs again in the backward would add its keys a second time.
        is_checkpointed = self.training and any(layer.gradient_checkpointing for layer in self.decoder.layers)
        if not caches or is_checkpointed:
            return None
        return EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))

    def _loss(self, logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        check_shape("labels", labels, tuple(logits.shape[:2]))
        smoothing = self.config.label_smoothing if self.training else 0.0
        logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        total = classification_loss(logits, labels.flatten(), reduction="sum", label_smoothing=smoothing)
        # A batch, or a device's part of it, may have no label; its loss is then 0.
        return total / torch.as_tensor((labels != -100).sum() if count is None else count).clamp(min=1)
