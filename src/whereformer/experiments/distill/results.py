"""What ``results.json`` of a distillation holds."""

from __future__ import annotations

from dataclasses import dataclass

from ...runs.results import Results


@dataclass(frozen=True)
class DistillText:
    """The text that kernels were fitted over: windows of some length, of which ``held_out`` were judged on."""

    source: str
    windows: int
    length: int
    held_out: int


@dataclass(frozen=True)
class PairsFacts:
    """Where the pairs of texts came from, and how many there are."""

    source: str
    rows: int


@dataclass(frozen=True, kw_only=True)
class DistillResults(Results):
    """What is left of a model when kernels take the place of its positions.

    Args:
        model: a folder or an id on the Hub.
        kind: transformers' name for it.
        position: its own method.
        text: that kernels were fitted over.
        scores: by model ("as trained", "S=3"...) and name.
        explained: the share of each curve that its kernels explain, [layer][head], by model.
        pairs: that it was judged by as well, if there were any.
    """

    FORMAT = "distill-positions 1"
    INDENT = 1

    model: str
    kind: str
    position: str
    text: DistillText
    scores: dict[str, dict[str, float]]
    explained: dict[str, list[list[float]]]
    pairs: PairsFacts | None = None
