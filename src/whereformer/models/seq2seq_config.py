"""``Seq2SeqConfig``: the configuration of the translation Transformer."""

from typing import ClassVar

from ..errors import InputError, short_repr
from .blocks import MAX_LAYERS
from .checks import MAX_IDS, StrictConfig

PRESETS: dict[str, dict[str, object]] = {
    "base": {},
    "big": {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "hidden_dropout_prob": 0.3},
    "small": {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "encoder_layers": 3,
        "decoder_layers": 3,
    },
}
"""Named sizes: "base" and "big" are from Vaswani et al. (2017, Table 3); "small" trains on two CPU cores."""


class Seq2SeqConfig(StrictConfig):
    """Sizes and options of a :class:`~whereformer.Seq2SeqForConditionalGeneration`; the defaults are the base model's.

    Args:
        vocab_size: tokens of the vocabulary that source, target and output share.
        encoder_layers, decoder_layers: the numbers of layers.
        position: the position method of the encoder's self-attention and, with separate parameters, the decoder's;
            attention from target to source has none, as in the papers.
        hidden_dropout_prob, attention_probs_dropout_prob, activation_dropout_prob: dropout on embeddings and what
            layers add, on attention weights, and between the feed-forward layers.
        label_smoothing: the share of the target that training spreads over all tokens.
        initializer_range: standard deviation that position methods draw tables of embeddings with; None:
            hidden_size ** -0.5, as for the token embeddings, which are multiplied by hidden_size ** 0.5.

    ``hidden_size``, ``num_attention_heads``, ``intermediate_size``, ``head_dim``, ``position_options``,
    ``max_position_embeddings``, ``norm``, ``hidden_act``, ``layer_norm_eps`` and ``attention_backend`` are as in
    :class:`EncoderConfig`.

    Raises:
        ValueError: for a combination that fits no model; the message names the field.
    """

    model_type = "whereformer_seq2seq"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]
    bounds: ClassVar[dict[str, tuple[float, float]]] = {
        **StrictConfig.bounds,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "decoder_start_token_id"), (-1, MAX_IDS)),
        "label_smoothing": (0.0, 0.99),
        **dict.fromkeys(("encoder_layers", "decoder_layers"), (1, MAX_LAYERS)),
    }
    # The number of layers that a cache has to hold.
    attribute_map: ClassVar[dict[str, str]] = {"num_hidden_layers": "decoder_layers"}

    # Layers read these fields; translation has no token types, and its layers are from Vaswani et al.
    type_vocab_size = 0
    segments = "embedding"
    feed_forward = "plain"
    query_bias = biases = first_norm = True
    sinks = False
    attention_scale = None

    vocab_size: int = 32000
    hidden_size: int = 512
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    encoder_layers: int = 6
    decoder_layers: int = 6
    position: str = "sinusoidal"
    hidden_act: str = "relu"
    attention_probs_dropout_prob: float = 0.0
    label_smoothing: float = 0.1
    initializer_range: float = None  # type: ignore[assignment]
    layer_norm_eps: float = 1e-6
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    decoder_start_token_id: int | None = 1
    is_encoder_decoder: bool = True
    use_cache: bool = True

    def __post_init__(self, **kwargs: object) -> None:
        super().__post_init__(**kwargs)
        for name in ("pad_token_id", "decoder_start_token_id"):
            token = getattr(self, name)
            if token is None or not 0 <= token < self.vocab_size:
                raise InputError(name, f"expected a token of the {self.vocab_size}, got {short_repr(token)}")
        if self.initializer_range is None:
            self.initializer_range = self.hidden_size**-0.5

    @classmethod
    def preset(cls, name: str, **changes: object) -> "Seq2SeqConfig":
        """Return a configuration with the papers' sizes ("base", "big") or "small"; ``changes`` replace fields.

        Raises:
            ValueError: for another name.
        """
        if name not in PRESETS:
            raise InputError("preset", f"expected one of {', '.join(PRESETS)}, got {name!r}")
        return cls(**{**PRESETS[name], **changes})
