"""One encoder for BERT (``blocks="12"``), ALBERT (``"1x12"``) and funnels (``"4-4-4"``), with any position method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from ..errors import InputError, short_repr
from ..kernels import Positions, PositionsLike
from ..kernels.tracing import can_read
from ..positions import PositionMethod, Site
from ..positions.visible_keys import positions_from_mask, positions_in_documents, steps_between_tokens
from .blocks import parse_blocks
from .checkpoints.loading import LoadingReport
from .checks import (
    OneDeviceModel,
    check_integers,
    check_positions,
    check_shape,
    embed_tokens,
    name_index_error,
    to_token_mask,
)
from .config import EncoderConfig
from .inputs import EncoderInputs, accepts, is_requested, packed_document_ids
from .layers import Attention, Layer, SegmentScores, build_position_for, can_share, check_types, count_types, layer_norm
from .pooling import FunnelState, PackedDocuments

if TYPE_CHECKING:
    from jaxtyping import Integer, Shaped


class Embeddings(nn.Module):
    """Token, type and position embeddings with a norm, projected to hidden_size if they are narrower."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.embedding_size
        self.word = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        typed = config.type_vocab_size and config.segments == "embedding"
        self.token_type = nn.Embedding(config.type_vocab_size, width) if typed else None
        self.norm = layer_norm(config, width)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        projects = config.embedding_projection or width != config.hidden_size
        self.projection = nn.Linear(width, config.hidden_size, bias=config.biases) if projects else None

    def forward(
        self, words: Tensor, token_type_ids: Tensor | None, position: PositionMethod, positions: PositionsLike
    ) -> Tensor:
        """Embed words (batch, n, embedding_size) into (batch, n, hidden_size)."""
        hidden = words * position.embedding_scale
        if self.token_type is not None:
            # BERT's default is type 0 for every token.
            types = words.new_zeros((), dtype=torch.int64) if token_type_ids is None else token_type_ids
            table = self.token_type
            hidden = hidden + name_index_error("token_type_ids", types, table.num_embeddings, lambda: table(types))
        hidden = position.embed(hidden, positions)
        hidden = self.dropout(self.norm(hidden))
        return hidden if self.projection is None else self.projection(hidden)


@dataclass
class EncoderOutput(BaseModelOutput):
    """The output of an :class:`Encoder`, with the document ids of packed rows; pooling leaves fewer tokens."""

    documents: Tensor | None = None


class EncoderPreTrainedModel(OneDeviceModel):
    """The base class of this library's encoders, with the settings that transformers reads."""

    config_class = EncoderConfig
    base_model_prefix = "encoder"
    _input_embed_layer = "word"
    supports_gradient_checkpointing = True
    # The loss is a mean over the batch's labels, so the Trainer must scale it for accumulation and data parallelism.
    accepts_loss_kwargs = False

    loading_report: LoadingReport | None = None
    """The tensors that :func:`whereformer.load_pretrained` loaded, dropped and initialized; None for other models."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PositionMethod):
            module.reset_parameters()
        if isinstance(module, Attention) and module.sinks is not None:
            nn.init.normal_(module.sinks, std=self.config.initializer_range)
        if isinstance(module, SegmentScores):
            std = self.config.initializer_range
            for parameter in module.parameters():
                nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)


class Encoder(EncoderPreTrainedModel):
    """A Transformer encoder with the position method ``config.position``.

    ``config.blocks`` may share layers, but not positions: a method with parameters in every layer has its own in every
    *pass*, even if the passes share one layer (as in the TISA paper's ALBERT). The exception is transformer_xl, whose
    parameters belong to the layer.

    With several blocks it is a Funnel-Transformer: each block after the first begins with a layer whose queries are
    pooled, which halves the sequence. Pooled tokens are at every second, fourth, ... position, so every method works
    with them. A decoder (``config.decoder_layers``) repeats the last states to full length, adds the first block's and
    runs a few more layers. Without a decoder, the output is as short as the last block. Pooling includes padding, so
    outputs, also at [CLS], depend on how much padding follows, up to the 2 ** poolings tokens of one pooled token.

    With ``config.separate_cls`` the first token of every row, or of every packed document, counts as [CLS]. Pad such
    rows on the right: with padding on the left, a [PAD] would be kept separate and [CLS] pooled with its neighbor.

    Args:
        config: sizes and options. If ``with_decoder`` is False, a decoder's weights in a checkpoint are ignored.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        blocks = parse_blocks(config.blocks)
        self.position = build_position_for(
            config,
            config.num_hidden_layers,
            causal=config.causal,
            embedding_size=config.embedding_size,
            separate_cls=config.separate_cls,
            layer_of_pass=config.passes,
        )
        self.embeddings = Embeddings(config)
        self.pooling = config.make_pooling()
        ends = (0, *accumulate(block.layers * block.repeats for block in blocks))
        # Indices of passes: first the blocks', then the decoder's.
        self.blocks = [range(*block) for block in pairwise(ends)]
        self.passes = config.passes if config.with_decoder else config.passes[: ends[-1]]
        self.decoder = range(ends[-1], len(self.passes))
        self.windows = config.layer_windows()
        content = self.position.uses_query_key
        self.layers = nn.ModuleList(Layer(config, content=content) for _ in range(max(self.passes) + 1))
        if not config.first_norm and self.passes.count(0) == 1:
            # No pass would use it.
            self.layers[0].attention_norm = nn.Identity()
        # A checkpoint may have a decoder that is left out here; its layers come last.
        left_out = range(len(self.layers), max(config.passes) + 1)
        self._keys_to_ignore_on_load_unexpected = [rf"(^|\.)layers\.{layer}\." for layer in left_out]
        self.norm = layer_norm(config, config.hidden_size) if config.norm == "pre" else None
        self.post_init()

    @property
    def has_decoder(self) -> bool:
        """Whether there are layers after the blocks, which restore the full length."""
        return len(self.decoder) > 0

    def extra_repr(self) -> str:
        names = "blocks", "hidden_size", "num_attention_heads", "position"
        sizes = [f"{name}={getattr(self.config, name)!r}" for name in names]
        return ", ".join([*sizes, f"parameters={sum(parameter.numel() for parameter in self.parameters()):,}"])

    @accepts(EncoderInputs)
    def forward(
        self,
        input_ids: Integer[Tensor, "batch n"] | None = None,
        attention_mask: Shaped[Tensor, "batch n"] | None = None,
        **inputs: Unpack[EncoderInputs],
    ) -> EncoderOutput:
        """Encode a batch.

        Args:
            input_ids: (batch, n) token ids; or give ``inputs_embeds`` (batch, n, embedding_size).
            attention_mask: (batch, n), nonzero = a token, 0 = padding; None: all are tokens.
            token_type_ids: (batch, n). By default 0; with ``segments="attention"`` types then add no score.
            position_ids: (n,) or (batch, n), or for rope with sections (batch, n, axes); integers or (if the method
                allows it) fractions, up to 2 ** 31 - 1; by default 0 .. n - 1, or without padding
                (``config.count_padding``). In every pooling, a pooled token gets the ``position_ids`` of its first
                token, and [CLS] keeps its position. Without ``position_ids``, [CLS] moves so that all neighbors are
                equally far apart. The two differ for methods with a score for that distance (shaw, t5, rope, tisa,
                alibi, fire).
            document_ids: (batch, n) for packed rows: tokens attend only within their document, whose ids are adjacent.
                Positions start again with each run of equal ids by default. In a causal model, position_ids that start
                again at a token that is not padding are enough, with or without an attention_mask. A model that pools
                accepts one row without padding, and pools each document separately.
            cu_seq_lens_q, seq_idx: instead of document_ids, the arguments that transformers' collators pass for packed
                rows: the index at which each text of one row begins, then the end of the last one, (texts + 1,), or a
                number for each text, (batch, n). position_ids then have to start at 0 in each text, which is checked on
                the CPU. ``cu_seq_lens_k`` equals ``cu_seq_lens_q``. Accelerators and compiled code read
                ``max_length_q``; ``max_length_k`` is never read.
            use_cache: False or None; some trainers pass it.
            output_hidden_states, output_attentions: also return all hidden states (the embeddings first), or all
                attention weights (batch, heads, n, n). If gradients are on, the weights have gradients, and the
                reference backend computes the output from the weights.
            return_dict: False for a plain tuple.

        Returns:
            ``last_hidden_state`` (batch, n, hidden_size), which is shorter than the input after pooling without a
            decoder, its ``documents`` (batch, n) in packed rows, and the requested outputs. The hidden states include
            the input of a decoder.

        Raises:
            ValueError: for shapes that do not fit; the message names the argument.
        """
        if inputs.get("use_cache"):
            raise InputError("use_cache", "expected False or None, since an encoder caches nothing, got True")
        words = embed_tokens(
            "input_ids", self.embeddings.word, self.config.embedding_size, input_ids, inputs.get("inputs_embeds")
        )
        site, packed = self._make_site(words, input_ids, attention_mask, inputs)
        positions = site.query_positions
        if site.position_stop is not None and packed is None and self.position.depends_on_offsets_only():
            # Documents do not see each other, so positions in the row give the same offsets, and faster terms. Not if
            # documents are pooled: each [CLS] moves on its own, and short documents stay as they are.
            row_positions = Positions(0, 1, words.shape[1])
            site = replace(site, query_positions=row_positions, key_positions=row_positions, position_stop=None)
        share = self.position.with_shared if can_share(self.layers) else lambda site: site
        funnel = FunnelState(self.pooling, site, packed, share, pool_query_only=self.config.pool_query_only)
        with_weights = is_requested("output_attentions", inputs, self.config)
        attentions: list[Tensor | None] = []
        states: list[Tensor] | None = [] if is_requested("output_hidden_states", inputs, self.config) else None

        def run_layer(number: int, queries: Tensor, layer_site: Site, memory: Tensor | None = None) -> Tensor:
            layer_site = replace(layer_site, layer=number, window=self.windows[number])
            layer = self.layers[self.passes[number]]
            hidden, weights = layer(queries, self.position, layer_site, memory, with_weights)
            attentions.append(weights)
            if states is not None:
                states.append(hidden)
            return hidden

        # Below, no variable holds the embeddings after the first layer has run, so that their memory is freed.
        hidden = self.embeddings(words, inputs.get("token_type_ids"), self.position, positions)
        if states is not None:
            states.append(hidden)
        first_block_states = None
        for index, block in enumerate(self.blocks):
            if index == 1 and self.has_decoder:
                first_block_states = hidden
            for number in block:
                if index > 0 and number == block.start:
                    hidden = run_layer(number, *funnel.pool(hidden))
                else:
                    hidden = run_layer(number, hidden, funnel.site)
        if first_block_states is not None:
            hidden = funnel.unpool(hidden, 2 ** (len(self.blocks) - 1), words.shape[1]) + first_block_states
            first_block_states = None
            if states is not None:
                states.append(hidden)
        for number in self.decoder:
            hidden = run_layer(number, hidden, funnel.site)
        if self.norm is not None:
            hidden = self.norm(hidden)
            if states is not None:
                states[-1] = hidden
        return EncoderOutput(
            last_hidden_state=hidden,
            hidden_states=None if states is None else tuple(states),
            attentions=tuple(attentions) if with_weights else None,
            documents=funnel.site.query_documents,
        )

    def _make_site(
        self, words: Tensor, input_ids: Tensor | None, attention_mask: Tensor | None, inputs: EncoderInputs
    ) -> tuple[Site, PackedDocuments | None]:
        """Check the inputs; return the site of full length, and the documents that are pooled separately."""
        shape = batch, length = tuple(words.shape[:2])
        positions, types = inputs.get("position_ids"), inputs.get("token_type_ids")
        rows = {"attention_mask": attention_mask, "token_type_ids": types, "document_ids": inputs.get("document_ids")}
        for name, ids in rows.items():
            if ids is not None:
                check_shape(name, ids, shape)
        if positions is not None:
            check_positions("position_ids", positions, batch, length)
            self.position.check_axes("position_ids", positions)
        token_mask = to_token_mask(attention_mask)
        documents = self._documents(words, token_mask, inputs)
        packed = self._packed_documents(documents, token_mask)
        # Pooled documents are numbered, and their ids are not used.
        documents = documents if packed is None else packed.ids
        if self.config.segments != "attention":
            types = None
        elif types is not None:
            check_types(types, count_types(self.config))
        starts = None
        if documents is not None and types is not None:
            # Padding does not belong to a document, whatever its id is.
            is_first = positions_in_documents(documents, token_mask)[0] == 0
            starts = is_first if token_mask is None else is_first & token_mask
        token_positions, position_stop = self._token_positions(input_ids, length, documents, inputs)
        site = Site.self_attention(
            token_positions,
            documents=documents,
            segments=types,
            starts=starts,
            key_mask=token_mask,
            causal=self.config.causal,
            position_stop=position_stop,
        )
        return site, packed

    def _documents(self, words: Tensor, token_mask: Tensor | None, inputs: EncoderInputs) -> Tensor | None:
        """Return the document ids of packed rows, (batch, n), in causal models also from positions; None: not packed.

        A document begins at a token if the token before it has the same position or a larger one. Padding between them
        is skipped, since its positions may repeat.
        """
        documents, positions = inputs.get("document_ids"), inputs.get("position_ids")
        batch, length = words.shape[:2]
        texts = packed_document_ids(inputs, words, length, length)
        if documents is not None and texts is not None:
            raise InputError("document_ids", "expected None with cu_seq_lens_q or seq_idx, which have the same meaning")
        if documents is not None or texts is not None:
            return texts if documents is None else check_integers("document_ids", documents)
        if positions is None or positions.dim() == 3 or not self.config.causal:
            return None
        rows = torch.atleast_2d(positions if positions.is_floating_point() else positions.long())
        begins = steps_between_tokens(rows, token_mask)[0] <= 0
        if can_read(begins) and not begins.any():
            return None
        return begins.cumsum(1).expand(batch, -1)

    def _packed_documents(self, documents: Tensor | None, token_mask: Tensor | None) -> PackedDocuments | None:
        """Return the documents of a row that are pooled separately; None if rows are not packed, or nothing pools."""
        if documents is None or len(self.blocks) == 1:
            return None
        if token_mask is not None or len(documents) != 1:
            name = "attention_mask" if len(documents) == 1 else "document_ids"
            raise InputError(name, "a model that pools accepts packed texts only in one row without padding")
        return PackedDocuments.from_ids(documents, self.pooling)

    def _token_positions(
        self, input_ids: Tensor | None, length: int, documents: Tensor | None, inputs: EncoderInputs
    ) -> tuple[PositionsLike, int | None]:
        """Return token positions and, for packed rows without free positions, a bound that they stay below."""
        position_ids = inputs.get("position_ids")
        is_collated = inputs.get("cu_seq_lens_q") is not None or inputs.get("seq_idx") is not None
        if position_ids is not None and not is_collated:
            return position_ids, None
        token_mask = None if input_ids is None or self.config.count_padding else input_ids != self.config.pad_token_id
        if documents is None:
            positions = None if token_mask is None else positions_from_mask(token_mask)
            return Positions(0, 1, length) if positions is None else positions, None
        max_length = inputs.get("max_length_q")
        positions, stop = positions_in_documents(documents, token_mask, max_length)
        if max_length is not None and (not isinstance(max_length, int) or (can_read(positions) and max_length < stop)):
            reason = f"expected the length of the longest text, {stop}, got {short_repr(max_length)}"
            raise InputError("max_length_q", reason)
        if position_ids is not None and can_read(position_ids) and not (position_ids == positions).all():
            raise InputError("position_ids", "expected 0, 1, ... in each text, got others")
        return positions, stop
