"""Run an analysis: read positions from models' weights, fit and name their heads, and measure attention over text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...analysis.findings import HeadFindings, ModelFindings, TableFindings
from ...analysis.fit import fit_tisa_up_to
from ...analysis.naming import RULES, name_heads
from ...analysis.reading import (
    LayerScores,
    layers_with_position,
    position_scores,
    position_vectors,
)
from ...analysis.tables import bucket_curves, embedding_table
from ...analysis.toeplitz import diagonals, from_diagonals, pairs, toeplitz_part, toeplitzness
from ...data import corpus
from ...errors import InputError
from ...lab.jobs import threads
from ...lab.progress import Progress
from ...lab.provenance import provenance
from ...models import Encoder
from ...models.checkpoints.files import find_config, read_weights
from ...models.checkpoints.loading import check_weights
from ...models.checkpoints.pretrained import read_config
from ...models.checkpoints.sources import KINDS
from ...positions import PositionRangeError
from .loading import load, named_errors, tokenizer_of
from .results import AnalyzeResults
from .settings import MOST_POSITIONS, AnalyzeSettings
from .sources import ModelSource
from .text import measure_attention, pages_of

EVEN = 1e-4
"""A head counts as a pure curve if its scores differ from the curve by at most this share of its range, which is about
what rounding in float32 causes."""
OTHER_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}
"""GPT-2's names for these sizes."""
MAY_DIFFER = {"_name_or_path", "dtype", "torch_dtype", "transformers_version"}
"""Entries of a configuration that say nothing about the model itself."""


@dataclass(frozen=True)
class AnalyzeJob:
    """Everything that an analysis needs.

    Args:
        sources: the models.
        settings: what decides the findings, without the text.
        data: where the text is, as in :class:`Analyze`; None to measure no attention.
        column: the column of tables that holds the text.
        threads: threads on the CPU; None for torch's.
        command: the words of the command that repeats the analysis.
    """

    sources: Sequence[ModelSource]
    settings: AnalyzeSettings
    data: tuple[str, ...] | None
    column: str | None
    threads: int | None
    command: list[str]

    def run(self, folder: Path, progress: Progress) -> AnalyzeResults:
        """Analyze every model.

        Raises:
            InputError: if a model or the text can't be read, or checkpoints of one run belong to different models.
        """
        settings = self.settings
        if self.data is not None:
            progress.begin("reading the text")
            pages = pages_of(corpus.load_documents(self.data, self.column))
            settings = replace(settings, pages=pages, text_source=corpus.source_of(self.data))
        with nullcontext() if self.threads is None else threads(self.threads):
            models, notes = analyze(self.sources, settings, progress)
        origin = provenance()
        facts = {
            "command": self.command,
            "rules": dict(RULES),
            "score": "score",
            "notes": notes,
            "text": settings.text_source,
            "machine": origin["machine"],
        }
        return AnalyzeResults(models=models, facts=facts, **origin)


def analyze(
    sources: Sequence[ModelSource], settings: AnalyzeSettings, progress: Progress
) -> tuple[list[ModelFindings], list[str]]:
    """Analyze every model.

    Returns:
        the findings, and notes on what was left out.

    Raises:
        InputError: if a model can't be read, or checkpoints of one run belong to different models.
    """
    _check(sources)
    progress.start(100 * len(sources))
    found: list[ModelFindings] = []
    notes: list[str] = []
    for source in sources:
        progress.begin(source.name)
        model, own = analyze_model(source, settings, progress)
        notes += own
        found.append(model)
    return found, notes


def _check(sources: Sequence[ModelSource]) -> None:
    """Find the errors that can be found before the first model is read, which may take long."""
    configs = []
    for source in sources:
        with named_errors(source.path):
            config = find_config(source.path)
            configs.append(read_config(source.path, Encoder) if config.get("model_type") in KINDS else config)
    run = [(source.path, config) for source, config in zip(sources, configs, strict=True) if source.step is not None]
    for path, config in run:
        first_path, first = run[0]
        for name in sorted((first.keys() | config.keys()) - MAY_DIFFER):
            if first.get(name) != config.get(name):
                raise InputError(
                    "model",
                    f"checkpoints of a run must be of one model, but {first_path} has {name} {first.get(name)!r} "
                    f"and {path} {config.get(name)!r}",
                )


@torch.no_grad()
def analyze_model(
    source: ModelSource, settings: AnalyzeSettings, progress: Progress
) -> tuple[ModelFindings, list[str]]:
    """Analyze one model, in 100 steps of progress.

    Returns:
        the findings, and notes on what could not be measured or is meaningless.
    """
    report = _Share(progress)
    with named_errors(source.path):
        config_found = find_config(source.path)
    if config_found.get("model_type") not in KINDS:
        findings = _tables_of(source, settings, config_found)
        report.upto(100)
        return findings, [f"{source.path}: for a {findings.kind} model, only the position tables are analyzed"]
    encoder, kind = load(source.path)
    report.upto(10)
    config = encoder.config
    positions = config.max_position_embeddings
    length = min(positions, MOST_POSITIONS) if settings.length is None else settings.length
    try:
        vectors = position_vectors(encoder, length)
        table = None if vectors is None else _table(vectors)
        heads: list[HeadFindings] = []
        acting = [layer for layer in layers_with_position(encoder.position) if layer < len(encoder.passes)]
        for index, read in enumerate(position_scores(encoder, length)):
            heads += _heads(read, settings.max_kernels)
            report.upto(10 + 60 * (index + 1) / max(1, len(acting)))
    except PositionRangeError:
        raise InputError(
            "length", f"expected at most {positions}, the number of positions of {source.path}, got {length}"
        ) from None
    report.upto(70)
    attention, notes = None, []
    if 0 < len(acting) < len(encoder.passes):
        without = ", ".join(str(layer) for layer in range(len(encoder.passes)) if layer not in acting)
        notes.append(f"{source.path}: the position method acts in some layers alone; not in {without}")
    if length == 1:
        notes.append(f"{source.path}: a single position has no distances, so its Toeplitzness and fits mean nothing")
    if settings.pages is not None:
        tokenizer, why_not = tokenizer_of(source.path)
        if tokenizer is None and settings.text_needed:
            raise InputError("data", f"{why_not}, so its attention can't be measured")
        if tokenizer is None:
            notes.append(f"attention over text is not measured: {why_not}")
        else:
            attention = measure_attention(
                encoder, tokenizer, source, settings, min(length, positions), lambda part: report.upto(70 + 30 * part)
            )
    report.upto(100)
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
        how=_how(encoder, table is not None, bool(heads), attention is not None),
        score=source.score,
        step=source.step,
        table=table,
        no_table="" if table is not None else _no_table(encoder),
        heads=tuple(heads),
        no_heads="" if heads else f"position method {config.position!r} adds nothing to any score",
        attention=attention,
    )
    return findings, notes


def _tables_of(source: ModelSource, settings: AnalyzeSettings, config: dict[str, Any]) -> ModelFindings:
    """Analyze a model that this library cannot run, from its position tables alone."""
    kind = str(config.get("model_type"))
    with named_errors(source.path):
        weights = read_weights(source.path)
        found = embedding_table(weights, config)
        positions = MOST_POSITIONS if found is None else len(found[1])
        length = min(positions, MOST_POSITIONS) if settings.length is None else settings.length
        offsets = torch.arange(1 - length, length)
        curves = bucket_curves(weights, config, offsets)
    if found is None and curves is None:
        raise InputError(
            "model",
            f"{source.path}: expected a checkpoint of model_type {', '.join(KINDS)}, or one with a table of "
            f"position embeddings or T5's buckets; this {kind!r} checkpoint has neither",
        )
    if length > positions:
        raise InputError(
            "length", f"expected at most {positions}, the number of positions of {source.path}, got {length}"
        )
    part, layers = curves or ("", {})
    with named_errors(source.path):
        check_weights(dict(filter(None, [found])) | {f"layer {layer}": curve for layer, curve in layers.items()})
    heads = [
        head
        for layer, curve in layers.items()
        for head in _heads(LayerScores(layer, 1, from_diagonals(curve)), settings.max_kernels)
    ]
    names = [found[0]] if found is not None else []
    how = [f"P is E E^T, where E has the rows of {name} that are positions." for name in names]
    if heads:
        how.append(f"Curves are those of the {part}'s buckets, which layers without their own table share.")
        how.append("Fits include a constant, which softmax ignores. Each offset counts as often as it occurs.")
    sizes = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "hidden_size": "hidden_size"}
    known = {name: config.get(field, config.get(OTHER_NAMES.get(field, ""))) for name, field in sizes.items()}
    return ModelFindings(
        name=source.name,
        source=source.path,
        kind=kind,
        position="t5" if found is None else "learned",
        sizes={**{name: value for name, value in known.items() if isinstance(value, int)}, "positions": positions},
        length=length,
        how=tuple(how),
        score=source.score,
        step=source.step,
        table=None if found is None else _table(found[1][:length]),
        no_table="" if found is not None else "its positions are numbers for offsets, not vectors",
        heads=tuple(heads),
        no_heads="" if heads else f"the effect of positions on the heads of a {kind} model is not analyzed",
        attention=None,
    )


class _Share:
    """Reports a model's progress in whole steps, 100 per model."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.done = 0

    def upto(self, step: float) -> None:
        if int(step) > self.done:
            self.progress.step(int(step) - self.done)
            self.done = int(step)


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
    parts = []
    embedded = "embeddings" in encoder.position.acts_on
    if has_table:
        parts.append("P is E E^T of the position embeddings as they are stored, before any norm or projection.")
    if has_heads:
        steps = [
            "the embeddings of words",
            *(["token type 0"] if encoder.embeddings.token_type is not None else []),
            *(["positions"] if embedded else []),
            "the norm",
            *(["the projection to the model's width"] if encoder.embeddings.projection is not None else []),
            *(["the layer's own norm"] if encoder.config.norm == "pre" else []),
            "queries and keys with their biases, divided by the square root of the head's width",
        ]
        parts.append(
            "A score by position is the mean over pairs of words drawn independently from the vocabulary. It includes "
            f"everything that the model does: {', '.join(steps)}."
        )
        if embedded:
            parts.append("In the first layer, the mean over all pairs is subtracted, which softmax ignores.")
        if encoder.position.acts_in_attention():
            parts.append(
                "In deeper layers, every token is the mean state that the layer reads from random words. The score of "
                "two such tokens without position is subtracted, so what is left is the method's effect in that layer."
            )
        parts.append("Fits include a constant, which softmax ignores. Each offset counts as often as it occurs.")
    if has_attention:
        parts.append(
            "Measured attention leaves out the first and the last token of a window if they are special; the attention "
            "that they receive is missing from the shares. The variance explained is that of log weights within rows."
        )
    return tuple(parts)


def _no_table(encoder: Encoder) -> str:
    method = encoder.config.position
    if not encoder.position.acts_on:
        return f"position method {method!r} tells the model nothing about position"
    return f"position method {method!r} has no vector for each position; it acts on queries, keys or scores"
