"""One encoder for BERT (``blocks="12"``) and ALBERT (``blocks="1x12"``), with any position method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

from ..attention import Positions, PositionsLike, attention, attention_weights
from ..positions import Position, build_position
from .config import EncoderConfig, parse_blocks


def position_of(config: EncoderConfig) -> Position:
    """The position method of an encoder with this configuration, freshly drawn."""
    return build_position(
        config.position,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        num_layers=config.num_hidden_layers,
        max_length=config.max_position_embeddings,
        embedding_size=config.embedding_size,
        initializer_range=config.initializer_range,
        **(config.position_options or {}),
    )


@dataclass(frozen=True)
class Place:
    """Where the tokens of one attention layer are: all that attention needs besides the hidden states.

    Queries and keys are told apart because pooling between blocks makes them differ.
    """

    query_positions: PositionsLike
    key_positions: PositionsLike
    key_mask: Tensor | None
    query_documents: Tensor | None
    key_documents: Tensor | None
    shared: Any


class Embeddings(nn.Module):
    """Token, type and position embeddings, normalised; projected to hidden_size where they are narrower."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.embedding_size
        self.word = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.token_type = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.projection = nn.Linear(width, config.hidden_size) if width != config.hidden_size else None

    def forward(
        self, words: Tensor, token_type_ids: Tensor | None, position: Position, positions: PositionsLike
    ) -> Tensor:
        """Embed words (batch, n, embedding_size) into (batch, n, hidden_size)."""
        hidden = words * position.embedding_scale
        if self.token_type is not None:
            # BERT's default is type 0 for every token.
            types = self.token_type.weight[0] if token_type_ids is None else self.token_type(token_type_ids)
            hidden = hidden + types
        hidden = self.dropout(self.norm(position.embed(hidden, positions)))
        return hidden if self.projection is None else self.projection(hidden)


class SelfAttention(nn.Module):
    """Projections around :func:`whereformer.attention`; position comes in through the method's hooks."""

    def __init__(self, config: EncoderConfig, *, content: bool) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.dropout_p = config.attention_probs_dropout_prob
        self.backend = config.attention_backend
        # A Synthesizer that replaces content scores has no use for query and key.
        self.query = nn.Linear(width, width) if content else None
        self.key = nn.Linear(width, width) if content else None
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(
        self, hidden: Tensor, position: Position, layer: int, place: Place, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within hidden (batch, n, hidden_size); weights (batch, heads, n, n) if asked for."""
        value = self._heads(self.value(hidden))
        query, key = None, None
        if self.query is not None and self.key is not None:
            query, key, value = position.rotate(
                self._heads(self.query(hidden)),
                self._heads(self.key(hidden)),
                value,
                place.query_positions,
                place.key_positions,
                layer=layer,
                shared=place.shared,
            )
        terms = position.terms(hidden, place.query_positions, place.key_positions, layer=layer, shared=place.shared)
        options: dict[str, Any] = {
            "key_mask": place.key_mask,
            "query_positions": place.query_positions,
            "key_positions": place.key_positions,
            "query_documents": place.query_documents,
            "key_documents": place.key_documents,
        }
        out = attention(
            query,
            key,
            value,
            terms,
            dropout_p=self.dropout_p if self.training else 0.0,
            backend=self.backend,
            **options,
        )
        weights = attention_weights(query, key, value, terms, **options) if with_weights else None
        return self.out(out.transpose(1, 2).flatten(-2)), weights

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class Layer(GradientCheckpointingLayer):
    """Self-attention and a feed-forward network, each with a residual and a norm before or after it."""

    def __init__(self, config: EncoderConfig, *, content: bool) -> None:
        super().__init__()
        self.pre = config.norm == "pre"
        self.attention = SelfAttention(config, content=content)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, hidden: Tensor, position: Position, layer: int, place: Place, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Run as attention layer ``layer`` on hidden (batch, n, hidden_size)."""
        before = self.attention_norm(hidden) if self.pre else hidden
        out, weights = self.attention(before, position, layer, place, with_weights)
        hidden = hidden + self.dropout(out)
        if self.pre:
            return hidden + self._feed_forward(self.feed_forward_norm(hidden)), weights
        hidden = self.attention_norm(hidden)
        return self.feed_forward_norm(hidden + self._feed_forward(hidden)), weights

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        return self.dropout(self.down(self.activation(self.up(hidden))))


class EncoderPreTrainedModel(PreTrainedModel):
    """What Hugging Face needs to know about every model of this family."""

    config_class = EncoderConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    # The loss is a mean over the batch's own labels, so Trainer has to scale it for accumulation and data parallelism.
    accepts_loss_kwargs = False

    def _wants_dict(self, return_dict: bool | None) -> bool:
        return self.config.return_dict if return_dict is None else return_dict

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Position):
            module.reset_parameters()


class Encoder(EncoderPreTrainedModel):
    """A Transformer encoder whose notion of position is ``config.position``.

    Layers are shared as ``config.blocks`` says, positions never are: a method with parameters in every layer has its
    own in every *pass*, also where the passes share one layer (as the TISA paper does with ALBERT).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        blocks = parse_blocks(config.blocks)
        if len(blocks) > 1:
            # Pooling between blocks belongs here: forward() below already keeps query and key positions apart.
            raise NotImplementedError(f"blocks: pooling between blocks is not implemented yet, got {config.blocks!r}")
        self.position = position_of(config)
        self.embeddings = Embeddings(config)
        content = self.position.content
        self.layers = nn.ModuleList(Layer(config, content=content) for block in blocks for _ in range(block.layers))
        self.passes = [
            index
            for index, block in enumerate(block for block in blocks for _ in range(block.layers))
            for _ in range(block.repeats)
        ]
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.norm == "pre" else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings.word = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        document_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput | tuple[Tensor, ...]:
        """Encode a batch.

        Args:
            input_ids: (batch, n) token ids; or give ``inputs_embeds`` (batch, n, embedding_size).
            attention_mask: (batch, n), nonzero = a real token; every token is real by default.
            token_type_ids: (batch, n), 0 by default.
            position_ids: (n,) or (batch, n), whole or (where the method is defined there) fractional; 0 .. n - 1 by
                default.
            document_ids: (batch, n) for packed rows: tokens attend only within their own document. Give position_ids
                that start again with each.
            output_hidden_states, output_attentions: also return all hidden states (the embeddings first), or all
                attention weights (batch, heads, n, n).
            return_dict: False for a plain tuple.

        Returns:
            ``last_hidden_state`` (batch, n, hidden_size), and what was asked for.

        Raises:
            ValueError: for shapes that do not fit; the message names the argument.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids and inputs_embeds: give exactly one of them")
        if input_ids is not None and input_ids.dim() != 2:
            raise ValueError(f"input_ids: expected shape (batch, n), got {tuple(input_ids.shape)}")
        words = self.embeddings.word(input_ids) if inputs_embeds is None else inputs_embeds
        batch, length = words.shape[:2]
        for name, ids in (
            ("attention_mask", attention_mask),
            ("token_type_ids", token_type_ids),
            ("document_ids", document_ids),
        ):
            if ids is not None and ids.shape != (batch, length):
                raise ValueError(f"{name}: expected shape {(batch, length)}, got {tuple(ids.shape)}")
        if position_ids is not None and position_ids.shape not in ((length,), (1, length), (batch, length)):
            raise ValueError(
                f"position_ids: expected shape {(length,)} or {(batch, length)}, got {tuple(position_ids.shape)}"
            )
        positions = Positions(0, 1, length) if position_ids is None else position_ids
        place = Place(
            query_positions=positions,
            key_positions=positions,
            key_mask=None if attention_mask is None else attention_mask.bool(),
            query_documents=document_ids,
            key_documents=document_ids,
            shared=self.position.shared(positions, positions),
        )
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden = self.embeddings(words, token_type_ids, self.position, positions)
        # Only what is asked for stays alive.
        states, attentions = [], []
        for layer, index in enumerate(self.passes):
            if output_hidden_states:
                states.append(hidden)
            hidden, weights = self.layers[index](hidden, self.position, layer, place, output_attentions)
            if output_attentions:
                attentions.append(weights)
        if self.norm is not None:
            hidden = self.norm(hidden)
        if output_hidden_states:
            states.append(hidden)
        output = BaseModelOutput(
            last_hidden_state=hidden,
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )
        return output if self._wants_dict(return_dict) else output.to_tuple()


class MaskedLMHead(nn.Module):
    """BERT's: a dense layer, activation and norm at the embeddings' width, then the tied embeddings and a bias."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.embedding_size)
        self.activation = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(config.embedding_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.embedding_size, config.vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits (..., vocab_size) from hidden (..., hidden_size)."""
        return self.decoder(self.norm(self.activation(self.dense(hidden))))


class EncoderForMaskedLM(EncoderPreTrainedModel):
    """An :class:`Encoder` with BERT's masked-LM head, tied to the token embeddings."""

    _tied_weights_keys = {"head.decoder.weight": "encoder.embeddings.word.weight"}  # noqa: RUF012

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.encoder = Encoder(config)
        self.head = MaskedLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.head.decoder = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> MaskedLMOutput | tuple[Tensor, ...]:
        """Predict tokens; arguments as :meth:`Encoder.forward`.

        Args:
            labels: (batch, n) the original ids where a token is to be predicted, -100 elsewhere.

        Returns:
            ``loss``, the mean cross-entropy in nats over the labels, if there are any; ``logits`` (batch, n,
            vocab_size), or (labels, vocab_size) with ``config.sparse_prediction``.
        """
        outputs = self.encoder(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            document_ids,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        hidden = outputs.last_hidden_state
        if labels is not None and self.config.sparse_prediction:
            predicted = labels != -100
            hidden, labels = hidden[predicted], labels[predicted]
        logits = self.head(hidden)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())
        output = MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
        return output if self._wants_dict(return_dict) else output.to_tuple()
