"""The encoder's configuration, and the block notation that makes it BERT, ALBERT or a funnel."""

import re
from typing import Any, NamedTuple

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN


class Block(NamedTuple):
    """``layers`` distinct layers, each run ``repeats`` times in a row."""

    layers: int
    repeats: int


def parse_blocks(blocks: str) -> tuple[Block, ...]:
    """Read Funnel's notation: blocks split by "-", ``DxR`` for D distinct layers each run R times in a row.

    "12" is BERT-base, "1x12" ALBERT (one layer twelve times), "4-4-4" and "6-3x2-3x2" are funnels.

    Raises:
        ValueError: for anything else.
    """
    parsed = []
    for part in str(blocks).split("-"):
        match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", part.strip())
        if match is None:
            raise ValueError(f"blocks: expected layers as '12', '1x12' or '4-4-4', got {blocks!r}")
        parsed.append(Block(int(match[1]), int(match[2] or 1)))
    return tuple(parsed)


class EncoderConfig(PreTrainedConfig):
    """Sizes and options of an :class:`~whereformer.Encoder`; names as in Hugging Face's BERT where it has them.

    Args:
        vocab_size: tokens in the vocabulary.
        hidden_size: width of the hidden states.
        embedding_size: width of the token embeddings; below hidden_size they are projected up (ALBERT). None: equal.
        num_attention_heads: heads; they must divide hidden_size.
        intermediate_size: hidden width of the feed-forward layers; 4 * hidden_size if None.
        blocks: layers, as :func:`parse_blocks` reads them.
        position: a position method, or several joined by "+".
        position_options: the method's options.
        max_position_embeddings: positions that methods with a fixed number of them cover.
        norm: "post" (BERT: normalise after adding) or "pre" (normalise a layer's input, and once more at the end).
        hidden_act: activation of the feed-forward layers and of the masked-LM head.
        hidden_dropout_prob, attention_probs_dropout_prob: dropout on hidden states and on attention weights.
        type_vocab_size: token types (segments); 0 for none.
        initializer_range: standard deviation of freshly drawn weights.
        layer_norm_eps: epsilon of the layer norms.
        sparse_prediction: give masked-LM logits only where there is a label; logits are then (labels, vocab_size).
        attention_backend: backend of :func:`whereformer.attention`.

    Raises:
        ValueError: for a combination that fits no model; the message names the field.
    """

    model_type = "whereformer"

    vocab_size: int = 30522
    hidden_size: int = 768
    embedding_size: int = None  # type: ignore[assignment]  # filled in below, as intermediate_size
    num_attention_heads: int = 12
    intermediate_size: int = None  # type: ignore[assignment]
    blocks: str = "12"
    position: str = "learned"
    position_options: dict[str, Any] | None = None
    max_position_embeddings: int = 512
    norm: str = "post"
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    sparse_prediction: bool = False
    attention_backend: str = "auto"
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        self.blocks = str(self.blocks)
        parse_blocks(self.blocks)
        if "num_hidden_layers" in kwargs:
            raise ValueError(f"num_hidden_layers: say blocks={str(kwargs['num_hidden_layers'])!r} instead")
        if self.num_attention_heads < 1:
            raise ValueError(f"num_attention_heads: expected at least 1, got {self.num_attention_heads}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act: expected one of {', '.join(ACT2FN)}, got {self.hidden_act!r}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads: {self.num_attention_heads} heads do not divide hidden_size {self.hidden_size}"
            )
        if self.norm not in ("post", "pre"):
            raise ValueError(f"norm: expected 'post' or 'pre', got {self.norm!r}")
        if self.embedding_size is None:
            self.embedding_size = self.hidden_size
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.position_options is None:
            self.position_options = {}
        super().__post_init__(**kwargs)

    @property
    def num_hidden_layers(self) -> int:
        """Layers as they run, a shared layer counted once per pass."""
        return sum(block.layers * block.repeats for block in parse_blocks(self.blocks))
