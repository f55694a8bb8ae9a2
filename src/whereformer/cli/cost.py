"""The command ``whereformer cost``: an encoder's FLOPs, parameters and memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Literal

from rich.console import Console

from ..lab.options import MOST_SIZE
from ..lab.recipe import Range, WithPlugin, check_markers

Size = Annotated[int, Range(1, MOST_SIZE)]


@dataclass(frozen=True)
class Cost(WithPlugin):
    """What does an encoder cost? FLOPs, parameters and memory, measured without data.

    A multiply-add of a matrix product counts as two FLOPs. The total is compared with BERT-base at the same length.
    whereformer.analysis.cost takes any configuration.
    """

    FLAGS: ClassVar = {"num_attention_heads": "--num-heads", "batch": "--batch-size"}

    preset: Literal["bert", "albert", "electra", "funnel", "modernbert", "hybrid"] | None = None
    """Options of a published model, without its sizes. Of the options below, those that differ from their defaults
    win."""

    blocks: str = "12"
    """Layers: "12" is twelve layers, "1x12" one layer used twelve times, and "4-4-4" pools between its blocks."""

    decoder_layers: str = "0"
    """Full-length layers after pooled blocks, such as "2" or "1x2"."""

    windows: str | None = None
    """How far layers attend to each side, in tokens: "64,64,0" gives two layers windows of 64 and the third none, and
    so on in turn. Default: no windows."""

    hidden_size: Size = 768
    """Width of the encoder."""

    num_heads: Size = 12
    """Attention heads."""

    head_dim: Annotated[int | None, Range(1, MOST_SIZE)] = None
    """Width of a head. Default: the encoder's width divided by the number of heads."""

    intermediate_size: Annotated[int | None, Range(1, MOST_SIZE)] = None
    """Width within the feed-forward networks. Default: four times the encoder's width."""

    embedding_size: Annotated[int | None, Range(1, MOST_SIZE)] = None
    """Width of the token embeddings. Default: the encoder's width."""

    vocab_size: Size = 30522
    """Tokens in the vocabulary."""

    position: str = "learned"
    """A position method, several joined by "+", or a pattern over layers: rope/rope/rope/none."""

    length: Size = 512
    """Tokens in a sequence."""

    batch_size: Size = 1
    """Sequences at a time."""

    predictions: int | None = None
    """Tokens in a sequence that the masked-LM head predicts. Default: all. Blocks that pool without a decoder have no
    such head."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of parameters and activations."""

    def run(self, console: Console) -> None:
        """Measure, then print the numbers."""
        import torch

        from ..analysis import cost
        from ..lab.methods import as_setting
        from ..lab.terminal import say
        from ..models import EncoderConfig

        check_markers(self)
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        changed = {
            each.name: given[each.name]
            for each in fields(self)
            if each.name in EncoderConfig.__dataclass_fields__ and given[each.name] != each.default
        }
        sizes = {"num_attention_heads": self.num_heads, "max_position_embeddings": max(512, self.length)}
        try:
            config = EncoderConfig.preset(self.preset or "bert", **sizes, **changed)
            found = cost(
                config, self.length, self.batch_size, dtype=getattr(torch, self.dtype), predictions=self.predictions
            )
        except ValueError as error:
            raise as_setting(error, given.keys() | self.FLAGS.keys()) from None
        say(console, str(found))
