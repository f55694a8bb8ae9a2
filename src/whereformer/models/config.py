"""``EncoderConfig``: the sizes, options and position method of a BERT, ALBERT or funnel."""

from collections.abc import Collection, Mapping
from copy import deepcopy
from math import ceil
from typing import Any, ClassVar, Self

from ..errors import InputError, short_repr
from ..positions import component_names
from .blocks import Block, parse_blocks, parse_windows
from .checks import MAX_IDS, MAX_WIDTH, StrictConfig
from .pooling import Pooling

_WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

PRESETS: dict[str, dict[str, Any]] = {
    "bert": {},
    "albert": {"blocks": "1x12", "hidden_act": "gelu_pytorch_tanh", **_WITHOUT_DROPOUT},
    "electra": {"classifier_act": "gelu"},
    "funnel": {
        "blocks": "4-4-4",
        "decoder_layers": "2",
        "position": "transformer_xl",
        "segments": "attention",
        "query_bias": False,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-9,
    },
    "modernbert": {
        "position": "rope",
        "position_options": {"base": [160_000.0, 10_000.0, 10_000.0]},
        "windows": "0,64,64",
        "norm": "pre",
        "first_norm": False,
        "feed_forward": "gated",
        "biases": False,
        "classifier_act": "gelu",
        "classifier_norm": True,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-5,
        **_WITHOUT_DROPOUT,
    },
    "hybrid": {
        "position": "logn/rope/rope/rope",
        "windows": "0,64,64,64",
        "norm": "pre",
        "feed_forward": "gated",
        "biases": False,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-5,
        **_WITHOUT_DROPOUT,
    },
}
"""Fields of :class:`EncoderConfig` that differ from its defaults, by the name of a published model.

"hybrid" is an encoder in the style of many language models of 2025 and 2026: rotations in windows, and in every fourth
layer all tokens, no positions, and scores that grow with the length (Llama 4, SmolLM3, Command A).

Sources: Devlin et al. (2019, arXiv 1810.04805), Lan et al. (2020, 1909.11942; version 2 of the checkpoints), Clark et
al. (2020, 2003.10555), Dai et al. (2020, 2006.03236), Warner et al. (2024, 2412.13663).
"""


class EncoderConfig(StrictConfig):
    """Sizes and options of an :class:`~whereformer.Encoder`, named as in Hugging Face's BERT where it has them.

    Args:
        vocab_size: tokens in the vocabulary.
        hidden_size: width of the hidden states.
        embedding_size: width of the token embeddings; if below hidden_size, they are projected up (ALBERT). None:
            equal.
        embedding_projection: whether embeddings as wide as hidden_size are projected, too (ALBERT).
        num_attention_heads: heads; they must divide hidden_size.
        intermediate_size: hidden width of the feed-forward layers. None: 4 * hidden_size; if they are gated, two thirds
            of that, rounded up to a multiple of 8, so that the number of weights is about the same.
        head_dim: width of one head; hidden_size / num_attention_heads if None.
        blocks: the layers in the notation of :func:`parse_blocks`; each block after the first begins by halving the
            sequence.
        decoder_layers: full-length layers after the blocks, for a prediction at every token, such as "2" or "1x2"; "0"
            for none. They need more than one block.
        with_decoder: False leaves out the decoder that decoder_layers describes. Models built without it record that
            here, so that their checkpoints never become models with an untrained decoder. A position method still
            counts its layers, so that checkpoints of the whole model fit.
        windows: how far each layer attends, as "128,128,0": one number per layer, repeated over the layers in turn.
            There, two layers attend to at most 128 positions on each side, and the third to all (0: no window).
            ModernBERT's ``local_attention`` counts both sides together: its 128 is 64 here. A shared layer counts once
            per pass, and the decoder's layers come last. Windows count positions, so after pooling they hold fewer
            tokens. [CLS] is a token like any other, even if it is kept separate: a layer without a window lets it see
            all tokens, and be seen. None: no windows.
        pooling: how two neighbors become one: "mean", "max" or "min".
        pool_query_only: the layer that halves the sequence still attends to the whole one; else only to the pooled one.
        separate_cls: the first token is [CLS]: no pooling changes it, and positions are counted from the token after it
            (transformer_xl: it has none).
        truncate_seq: with a separate [CLS], every pooling drops the last token, so that 512 tokens become 256. Such
            a token may have a label all the same: the decoder has it again, with the last pooled state or zeros as
            its pooled state.
        mask_pooling: whether a pooled token counts as a token if "any" of its tokens does (Funnel-Transformer), or only
            if "all" of them do (transformers' FunnelModel, which therefore loses tokens before the padding).
        position: a position method, several joined by "+", or a pattern over layers such as "rope/rope/rope/none",
            repeated over the layers in turn, which are counted as for windows.
        position_options: the method's options; the options of one of several methods are a dictionary under its name.
        max_position_embeddings: the number of positions for methods that have a fixed number.
        count_padding: whether default positions count tokens that are ``pad_token_id``, as BERT's do. RoBERTa's and
            MPNet's do not, so that a row padded on the left has the positions that it has without the padding.
        norm: "post" (BERT: normalize after adding) or "pre" (normalize a layer's input, and once more at the end).
        first_norm: with norm "pre", whether the first layer normalizes its input; ModernBERT's does not, since the
            embeddings are normalized already. A first layer that is shared does so in its later passes.
        feed_forward: "plain" (a projection, the activation, a projection) or "gated" (the first projection is twice as
            wide, and the activated first half is multiplied by the second): GeGLU with hidden_act "gelu", SwiGLU with
            "silu".
        hidden_act: activation of the feed-forward layers and of the masked-LM head.
        biases: False leaves out the biases of all projections and norms (ModernBERT). The last layers of heads and
            position methods keep theirs.
        query_bias: whether the queries' projection has a bias (Funnel's has none).
        attention_scale: the factor on query . key; head_dim ** -0.5 if None (T5: 1.0). Products of a query or key with
            vectors of offsets or segments have it, too (shaw, transformer_xl, deberta); whatever else a position method
            adds to scores is not changed by it.
        sinks: whether every layer has a trained logit per head that takes part in the softmax but has no value, so that
            a token may attend to nothing (GPT-OSS).
        causal: whether tokens attend only to themselves and to earlier positions, for
            :class:`~whereformer.EncoderForCausalLM`. Blocks must not pool, which would mix a token with the next.
        hidden_dropout_prob, attention_probs_dropout_prob: dropout on hidden states, and on attention weights, at most
            0.99.
        activation_dropout_prob: dropout between the feed-forward layers.
        classifier_dropout: dropout before a classifier's last layer; hidden_dropout_prob if None.
        classifier_act: activation in the classifier of sequences (BERT: "tanh", ELECTRA: "gelu").
        classifier_norm: whether a norm follows that activation. Classifiers of tokens then have the dense layer,
            activation and norm too (ModernBERT).
        classifier_pooling: the state that classifies a sequence: the last state of the first token ("cls"), or the mean
            of all tokens' last states ("mean", for a single block).
        type_vocab_size: token types (segments); 0 for none.
        segments: how token types act: "embedding" adds to the token embeddings (BERT); "attention" has one score for
            pairs of the same type and another for pairs of different types (Funnel), where [CLS] has type 2, which
            equals every type.
        initializer_range: standard deviation of freshly drawn weights.
        layer_norm_eps: epsilon of the layer norms.
        lm_head: "bert": a dense layer, activation and norm before the tied embeddings; "tied": only those.
        tie_word_embeddings: False gives the masked-LM head a separate matrix instead of the embeddings.
        sparse_prediction: compute masked-LM logits only where there is a label; they are then (labels, vocab_size).
        label_share: with sparse_prediction, the largest number of labels in a row, as a share of its n tokens. Logits
            are then (batch * max(1, round(label_share * n)), vocab_size), and a GPU need not wait to count the labels.
        attention_backend: the backend of :func:`whereformer.attention`.

    Raises:
        ValueError: for a combination that fits no model; the message names the field.
    """

    model_type = "whereformer"
    bounds: ClassVar[dict[str, tuple[float, float]]] = {
        **StrictConfig.bounds,
        "embedding_size": (1, MAX_WIDTH),
        "type_vocab_size": (0, MAX_IDS),
        "classifier_dropout": (0.0, 1.0),
        "attention_scale": (0.0, 1e3),
        "label_share": (0.0, 1.0),
    }
    choices: ClassVar[dict[str, Collection[str]]] = {
        **StrictConfig.choices,
        "pooling": ("mean", "max", "min"),
        "mask_pooling": ("any", "all"),
        "segments": ("embedding", "attention"),
        "classifier_pooling": ("cls", "mean"),
        "lm_head": ("bert", "tied"),
        "feed_forward": ("plain", "gated"),
    }
    activations = ("hidden_act", "classifier_act")

    embedding_size: int = None  # type: ignore[assignment]  # filled in below
    embedding_projection: bool = False
    blocks: str = "12"
    decoder_layers: str = "0"
    with_decoder: bool = True
    windows: str | None = None
    pooling: str = "mean"
    pool_query_only: bool = True
    separate_cls: bool = True
    truncate_seq: bool = True
    mask_pooling: str = "any"
    count_padding: bool = True
    first_norm: bool = True
    feed_forward: str = "plain"
    biases: bool = True
    query_bias: bool = True
    attention_scale: float | None = None
    sinks: bool = False
    causal: bool = False
    classifier_dropout: float | None = None
    classifier_act: str = "tanh"
    classifier_norm: bool = False
    classifier_pooling: str = "cls"
    type_vocab_size: int = 2
    segments: str = "embedding"
    lm_head: str = "bert"
    sparse_prediction: bool = False
    label_share: float | None = None

    def __post_init__(self, **kwargs: object) -> None:
        # A single integer is accepted as a number, too.
        for name in ("blocks", "decoder_layers", "windows"):
            if type(getattr(self, name)) is int:
                setattr(self, name, short_repr(getattr(self, name)))
        if "num_hidden_layers" in kwargs:
            raise InputError("num_hidden_layers", f"use blocks={short_repr(kwargs['num_hidden_layers'])!r} instead")
        super().__post_init__(**kwargs)
        pools, decoder = len(parse_blocks(self.blocks)) > 1, self.decoder_blocks
        pad, blocks, pooling = self.pad_token_id, self.blocks, self.classifier_pooling
        for is_wrong, name, reason in (
            ((pad or 0) >= self.vocab_size, "pad_token_id", f"expected a token of the {self.vocab_size}, got {pad}"),
            (not self.count_padding and pad is None, "count_padding", "False needs a pad_token_id, got None"),
            (len(decoder) > 1, "decoder_layers", f"expected one block as '2' or '1x2', got {self.decoder_layers!r}"),
            (decoder and not pools, "decoder_layers", f"there is no pooling to undo, got blocks={blocks!r}"),
            (not self.first_norm and self.norm != "pre", "first_norm", f"False needs norm 'pre', got {self.norm!r}"),
            (pools and pooling != "cls", "classifier_pooling", f"{pooling!r} needs one block, got blocks={blocks!r}"),
            (pools and self.causal, "causal", f"pooling mixes a token with the next, got blocks={blocks!r}"),
            (self.segments == "attention" and not self.type_vocab_size, "segments", "'attention' needs types, got 0"),
        ):
            if is_wrong:
                raise InputError(name, reason)
        self.layer_windows()
        if self.embedding_size is None:
            self.embedding_size = self.hidden_size
        if self.intermediate_size is None:
            is_gated = self.feed_forward == "gated"
            self.intermediate_size = 8 * ceil(self.hidden_size / 3) if is_gated else 4 * self.hidden_size

    @classmethod
    def preset(cls, name: str, **changes: object) -> Self:
        """Return a configuration with the options of a published model; ``changes`` replace fields.

        A preset has the options of an architecture: layers, norms, biases, activation, positions, heads and dropout.
        Sizes stay the defaults; the published sizes are below. If ``changes`` have a ``position``, the options of the
        preset's method are dropped, unless the new method has the preset's method as a part.

        - "bert": 12 layers, width 768, 12 heads, intermediate_size 3072.
        - "albert": one layer used 12 times (blocks="1x12"), embedding_size 128, otherwise as BERT.
        - "electra": the discriminator, with BERT's sizes; a small one has width 256 and embedding_size 128.
        - "funnel": blocks "4-4-4" and a decoder of 2 layers, otherwise as BERT.
        - "modernbert": 22 layers, width 768, 12 heads, intermediate_size 1152, vocab_size 50368. Every third layer
          attends to all, the others to 64 positions on each side.

        Raises:
            ValueError: for another name, or if the changes do not fit a model.
        """
        return cls(**preset_fields(name, changes))

    @property
    def full_length(self) -> bool:
        """Whether the model has a state for every token, because no block pools or a decoder undoes it."""
        return len(parse_blocks(self.blocks)) == 1 or (self.decoder_layers != "0" and self.with_decoder)

    def without_decoder(self) -> "EncoderConfig":
        """Return the configuration of the same model without its decoder; this object if it has none."""
        if self.decoder_layers == "0":
            return self
        config = deepcopy(self)
        config.with_decoder = False
        return config

    @property
    def decoder_blocks(self) -> tuple[Block, ...]:
        """The decoder's layers, one block or none, including a decoder that is left out."""
        return () if self.decoder_layers == "0" else parse_blocks(self.decoder_layers, "decoder_layers")

    @property
    def passes(self) -> tuple[int, ...]:
        """The index of the distinct layer behind every pass, in order, including a decoder that is left out."""
        blocks = parse_blocks(self.blocks) + self.decoder_blocks
        repeats = [block.repeats for block in blocks for _ in range(block.layers)]
        return tuple(layer for layer, count in enumerate(repeats) for _ in range(count))

    def layer_windows(self) -> tuple[int | None, ...]:
        """Return the window of every pass, in order, including a decoder that is left out; None where there is none."""
        return parse_windows(self.windows, parse_blocks(self.blocks), self.decoder_blocks)

    def block_lengths(self, length: int) -> tuple[int, ...]:
        """Return the number of tokens in each block for ``length`` tokens: each block after the first halves them.

        A separate [CLS] and, with ``truncate_seq``, the last token are not part of the halving. The last pair may be
        a single token. A sequence that is too short to halve stays as it is.

        Raises:
            ValueError: if ``length`` is below 1.
        """
        if length < 1:
            raise InputError("length", f"expected at least 1, got {length}")
        lengths = [length]
        for _ in parse_blocks(self.blocks)[1:]:
            lengths.append(self.make_pooling().pooled_length(lengths[-1]))
        return tuple(lengths)

    def make_pooling(self) -> Pooling:
        """Return the pooling that halves sequences between blocks."""
        return Pooling(self.pooling, self.separate_cls, self.truncate_seq, self.mask_pooling)

    @property
    def num_hidden_layers(self) -> int:
        """The number of passes: a shared layer counts once per pass, and a decoder counts even if it is left out."""
        return len(self.passes)


def preset_fields(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of :meth:`EncoderConfig.preset`, with the same errors for names."""
    if not isinstance(name, str) or name not in PRESETS:
        raise InputError("preset", f"expected one of {', '.join(PRESETS)}, got {short_repr(name)}")
    preset = {field: value for field, value in PRESETS[name].items() if field not in changes}
    if "position" in changes and PRESETS[name].get("position") not in component_names(changes["position"]):
        preset.pop("position_options", None)
    return {**preset, **changes}
