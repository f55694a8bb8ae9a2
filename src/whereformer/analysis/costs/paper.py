"""The Funnel-Transformer paper's table of relative FLOPs, counted as its authors' code does (arXiv 2006.03236)."""

from __future__ import annotations

from typing import NamedTuple

from ...models import EncoderConfig
from .operations import count_flops, linear_flops
from .passes import Pass, layer_passes


class PaperRow(NamedTuple):
    """A model of the paper, and its relative FLOPs by column."""

    model: str
    relative: dict[str, float]
    """The columns are "linear", then length and form of position as in "128 shifted"."""


PAPER_MODELS = (
    ("12", 768),
    ("6", 768),
    ("3-4-4", 768),
    ("4-4-4", 768),
    ("6-3x2-3x2", 768),
    ("6-6-6", 768),
    ("24", 1024),
    ("8-8-8", 1024),
    ("10-10-10", 1024),
)
"""The blocks and the width of each model."""

HEAD_DIM = 64
"""The width of a head in all models."""

PAPER_BATCH = 8
"""The number of sequences that share a projection of the distances."""


def bert(length: int) -> EncoderConfig:
    """Return BERT-base, the baseline of comparisons, for at least this many tokens."""
    return EncoderConfig(max_position_embeddings=max(512, length))


def paper_table() -> list[PaperRow]:
    """Return the Funnel-Transformer paper's relative FLOPs (the column "linear"), and those of its own code.

    All are relative to BERT-base. "none" leaves out all relative terms; in the other two columns segments act in
    attention.
    """
    baselines = {length: count_flops(bert(length), length, PAPER_BATCH).layers for length in (128, 512)}
    rows = []
    for blocks, width in PAPER_MODELS:
        for decoder in ("0", "2") if "-" in blocks else ("0",):
            config = funnel_config(blocks, width, decoder, "none")
            relative = {"linear": linear_flops(config)}
            for length, baseline in baselines.items():
                passes = layer_passes(config, length)
                for form in ("none", "shifted", "factorized"):
                    terms = 0 if form == "none" else sum(_paper_terms(place, width, form) for place in passes)
                    flops = count_flops(config, length, PAPER_BATCH).layers + 2 * terms
                    relative[f"{length} {form}"] = flops / baseline
            name = f"{'B' if '-' in blocks else 'L'}{blocks}H{width}"
            rows.append(PaperRow(name if decoder == "0" else f"{name}+D{decoder}", relative))
    return rows


def _paper_terms(place: Pass, width: int, form: str) -> int:
    """Count the multiply-adds of relative attention and segments in the authors' code, for its batch.

    "shifted": every layer projects the sinusoids of all distances, once for the batch, and multiplies them with every
    query. "factorized": the queries go through the projection instead, and are multiplied with the keys' sinusoids
    twice, each time over the whole width. :class:`~whereformer.positions.TransformerXL` needs no more than half of the
    latter.
    """
    n_q, n_k = place.n_q, place.n_k
    if form == "factorized":
        rotated = PAPER_BATCH * n_q * width // HEAD_DIM * width
        terms = PAPER_BATCH * n_q * width**2 + 2 * rotated * n_k + 2 * rotated
    else:
        distances = place.queries.stride // place.keys.stride * n_q + n_k
        terms = distances * width * (width + PAPER_BATCH * n_q)
    return terms + PAPER_BATCH * 2 * n_q * width


def funnel_config(blocks: str, width: int = 768, decoder_layers: str = "0", form: str = "shifted") -> EncoderConfig:
    """Return a model of the paper: heads of 64, and relative attention in one of its two forms, or none ("none")."""
    relative = form != "none"
    return EncoderConfig(
        hidden_size=width,
        num_attention_heads=width // HEAD_DIM,
        blocks=blocks,
        decoder_layers=decoder_layers,
        position="transformer_xl" if relative else "none",
        position_options={"form": form} if relative else None,
        segments="attention" if relative else "embedding",
        query_bias=False,
    )
