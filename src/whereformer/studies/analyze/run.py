"""Run an analysis: read positions from models' weights, fit and name their heads, and measure attention over text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...analysis.findings import HeadFindings, ModelFindings, TableFindings
from ...analysis.fit import fit_tisa_up_to
from ...analysis.naming import name_heads
from ...analysis.reading import LayerScores, layers_with_position, position_scores, position_vectors
from ...analysis.tables import bucket_curves, embedding_table
from ...analysis.toeplitz import diagonals, from_diagonals, pairs, toeplitz_part, toeplitzness
from ...data import corpus
from ...errors import InputError
from ...lab.jobs import threads
from ...lab.loading import load, named_errors, tokenizer_of
from ...lab.progress import Progress
from ...lab.provenance import provenance
from ...lab.study import command_line
from ...models import Encoder
from ...models.checkpoints.files import find_config, find_weights, read_tensors
from ...models.checkpoints.loading import check_weights
from ...models.checkpoints.sources import KINDS, source_of
from ...positions import PositionRangeError
from .results import AnalyzeResults
from .settings import Analyze
from .sources import ModelSource
from .text import measure_attention, pages_of

MOST_POSITIONS = 512
"""The most positions that are analyzed by default."""
EVEN = 1e-4
"""A head counts as a pure curve if its scores differ from the curve by at most this share of its range, which is about
what rounding in float32 causes."""
OTHER_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}
"""GPT-2's names for these sizes."""
FITS = "Fits include a constant, which softmax ignores. Each offset counts as often as it occurs."


@dataclass(frozen=True)
class AnalyzeJob:
    """The options, already checked, and the models to analyze."""

    options: Analyze
    sources: Sequence[ModelSource]

    def run(self, folder: Path, progress: Progress) -> AnalyzeResults:
        """Analyze every model, in 100 steps of progress each.

        Raises:
            InputError: if a model or the text can't be read.
        """
        options, pages = self.options, None
        for source in self.sources:  # errors that can be found before the first model is read, which may take long
            with named_errors(source.path):
                if (config := find_config(source.path)).get("model_type") in KINDS:
                    source_of(config, Encoder, {})
        if options.text:
            progress.begin("reading the text")
            pages = pages_of(corpus.load_documents(options.data, options.column))
        progress.start(100 * len(self.sources))
        models: list[ModelFindings] = []
        notes: list[str] = []
        with threads(options.threads):
            for source in self.sources:
                progress.begin(source.name)
                model, own = analyze_model(source, options, pages, progress)
                models.append(model)
                notes += own
        return AnalyzeResults(
            models=models,
            text=corpus.source_of(options.data) if options.text else "none",
            notes=notes,
            command=shlex.split(command_line(options, "analyze")),
            **provenance(),
        )


@torch.no_grad()
def analyze_model(
    source: ModelSource, options: Analyze, pages: Sequence[str] | None, progress: Progress
) -> tuple[ModelFindings, list[str]]:
    """Analyze one model.

    Returns:
        the findings, and notes on what could not be measured or is meaningless.
    """
    done = 0

    def upto(step: float) -> None:
        nonlocal done
        progress.step(int(step) - done)
        done = int(step)

    with named_errors(source.path):
        config_found = find_config(source.path)
    if config_found.get("model_type") not in KINDS:
        findings = _tables_of(source, options, config_found)
        upto(100)
        return findings, [f"{source.path}: for a {findings.kind} model, only the position tables are analyzed"]
    encoder, kind = load(source.path)
    upto(10)
    config, layers = encoder.config, len(encoder.passes)
    positions = config.max_position_embeddings
    length = _length(options, positions)
    acting = [layer for layer in layers_with_position(encoder.position) if layer < layers]
    heads: list[HeadFindings] = []
    try:
        vectors = position_vectors(encoder, length)
        for index, read in enumerate(position_scores(encoder, length)):
            heads += _heads(read, options.max_kernels)
            upto(10 + 60 * (index + 1) / max(1, len(acting)))
    except PositionRangeError:
        raise _too_long(source, positions, length) from None
    upto(70)
    attention, notes = None, []
    if 0 < len(acting) < layers:
        without = ", ".join(str(layer) for layer in range(layers) if layer not in acting)
        notes.append(f"{source.path}: the position method acts in some layers alone; not in {without}")
    if length == 1:
        notes.append(f"{source.path}: a single position has no distances, so its Toeplitzness and fits mean nothing")
    if pages is not None:
        tokenizer, why_not = tokenizer_of(source.path)
        if tokenizer is not None:
            within = min(length, positions)
            attention = measure_attention(
                encoder, tokenizer, source.path, options, pages, within, lambda part: upto(70 + 30 * part)
            )
        elif options.data:
            raise InputError("data", f"{why_not}, so its attention can't be measured")
        else:
            notes.append(f"attention over text is not measured: {why_not}")
    upto(100)
    findings = ModelFindings(
        name=source.name,
        source=source.path,
        kind=kind,
        position=config.position,
        sizes={
            "layers": config.num_hidden_layers,
            "heads": config.num_attention_heads,
            "head_dim": config.head_dim,
            "hidden_size": config.hidden_size,
            "embedding_size": config.embedding_size,
            "positions": positions,
        },
        length=length,
        how=_how(encoder, vectors is not None, bool(heads), attention is not None),
        score=source.score,
        step=source.step,
        table=None if vectors is None else _table(vectors),
        no_table="" if vectors is not None else _no_table(encoder),
        heads=tuple(heads),
        no_heads="" if heads else f"position method {config.position!r} adds nothing to any score",
        attention=attention,
    )
    return findings, notes


def _length(options: Analyze, positions: int) -> int:
    return min(positions, MOST_POSITIONS) if options.length is None else options.length


def _too_long(source: ModelSource, positions: int, length: int) -> InputError:
    return InputError("length", f"expected at most {positions}, the number of positions of {source.path}, got {length}")


def _tables_of(source: ModelSource, options: Analyze, config: dict[str, Any]) -> ModelFindings:
    """Analyze a model that this library cannot run, from its position tables alone."""
    kind = str(config.get("model_type"))
    with named_errors(source.path):
        weights = read_tensors(find_weights(source.path))
        name, table = embedding_table(weights, config) or ("", None)
        positions = MOST_POSITIONS if table is None else len(table)
        length = _length(options, positions)
        part, layers = bucket_curves(weights, config, torch.arange(1 - length, length)) or ("", {})
        tensors = {f"layer {layer}": curve for layer, curve in layers.items()}
        check_weights(tensors if table is None else {name: table, **tensors})
    if table is None and not layers:
        raise InputError(
            "model",
            f"{source.path}: expected a checkpoint of model_type {', '.join(KINDS)}, or one with a table of "
            f"position embeddings or T5's buckets; this {kind!r} checkpoint has neither",
        )
    if length > positions:
        raise _too_long(source, positions, length)
    heads = [
        head
        for layer, curve in layers.items()
        for head in _heads(LayerScores(layer, 1, from_diagonals(curve)), options.max_kernels)
    ]
    how = [] if table is None else [f"P is E E^T, where E has the rows of {name} that are positions."]
    if heads:
        how += [f"Curves are those of the {part}'s buckets, which layers without their own table share.", FITS]
    sizes = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "hidden_size": "hidden_size"}
    known = {size: config.get(field, config.get(OTHER_NAMES[field])) for size, field in sizes.items()}
    return ModelFindings(
        name=source.name,
        source=source.path,
        kind=kind,
        position="t5" if table is None else "learned",
        sizes={**{size: value for size, value in known.items() if isinstance(value, int)}, "positions": positions},
        length=length,
        how=tuple(how),
        score=source.score,
        step=source.step,
        table=None if table is None else _table(table[:length]),
        no_table="" if table is not None else "its positions are numbers for offsets, not vectors",
        heads=tuple(heads),
        no_heads="" if heads else f"the effect of positions on the heads of a {kind} model is not analyzed",
        attention=None,
    )


def _table(vectors: Tensor) -> TableFindings:
    gram = vectors @ vectors.T
    return TableFindings(gram, toeplitz_part(gram), float(toeplitzness(gram)), vectors.shape[1])


def _heads(read: LayerScores, max_kernels: int) -> list[HeadFindings]:
    scores = read.scores.float().cpu()
    found = diagonals(scores.double())
    n = scores.shape[-1]
    offsets = torch.arange(1 - n, n) * read.stride
    fits = fit_tisa_up_to(found.mean, max_kernels, offsets=offsets, weights=pairs(n), constant=True)[1:]
    heads = []
    for head, (name, reason) in enumerate(name_heads(scores)):
        span = float(found.mean[head].max() - found.mean[head].min())
        is_curve = float(found.spread[head].max()) <= EVEN * max(span, EVEN)
        heads.append(
            HeadFindings(
                layer=read.layer,
                head=head,
                offsets=offsets,
                curve=found.mean[head],
                spread=torch.zeros_like(found.spread[head]) if is_curve else found.spread[head],
                toeplitzness=1.0 if is_curve else float(found.explained[head]),
                scores=None if is_curve else scores[head],
                fits=tuple(fit[head] for fit in fits),
                name=name,
                reason=reason,
            )
        )
    return heads


def _how(encoder: Encoder, has_table: bool, has_heads: bool, has_attention: bool) -> tuple[str, ...]:
    """Describe in sentences what was measured and how."""
    embedded = "embeddings" in encoder.position.acts_on
    said = {
        "P is E E^T of the position embeddings as they are stored, before any norm or projection.": has_table,
        "A score by position is the mean over pairs of words drawn independently from the vocabulary. It includes "
        "everything that the model does: norms, projections, biases and the division by the square root of the head's "
        "width.": has_heads,
        "In the first layer, the mean over all pairs is subtracted, which softmax ignores.": has_heads and embedded,
        "In deeper layers, every token is the mean state that the layer reads from random words. The score of two such "
        "tokens without position is subtracted, so what is left is the method's effect in that layer.": has_heads
        and encoder.position.acts_in_attention(),
        FITS: has_heads,
        "Measured attention leaves out the first and the last token of a window if they are special; the attention "
        "that they receive is missing from the shares. The variance explained is that of log weights within rows."
        "": has_attention,
    }
    return tuple(sentence for sentence, holds in said.items() if holds)


def _no_table(encoder: Encoder) -> str:
    method = encoder.config.position
    if not encoder.position.acts_on:
        return f"position method {method!r} tells the model nothing about position"
    return f"position method {method!r} has no vector for each position; it acts on queries, keys or scores"
