"""The analyze recipe: what models learned about position, read off their weights, head by head."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from ..errors import InputError
from ..files import write_atomically
from ..lab.options import MOST_COUNT
from ..lab.recipe import Free, Range, Recipe, lazily

with lazily(__name__):
    import torch
    from torch import Tensor
    from torch.nn import functional
    from transformers import PreTrainedTokenizerBase

    from .. import models as ours
    from .. import positions
    from ..analysis import findings, fit, measured, naming, reading, tables, toeplitz
    from ..data import corpus
    from ..lab import loading
    from ..lab.report.report import Report
    from ..lab.run import Run
    from ..models import Encoder
    from ..models.checkpoints import files as checkpoint_files
    from ..models.checkpoints import loading as checkpoint_loading
    from ..models.checkpoints import sources as checkpoint_sources
    from . import analyze_report as drawing

FINDINGS = "findings.json"
"""The file of the numbers, in a run's folder."""
MOST_POSITIONS = 512
"""The most positions that are analyzed by default."""
EVEN = 1e-4
"""A head counts as a pure curve if its scores differ from the curve by at most this share of its range, which is about
what rounding in float32 causes."""
OTHER_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}
"""GPT-2's names for these sizes."""
OFFSETS_SHOWN = 16
"""The number of offsets on each side for which attention measured over text is kept and drawn."""
TOKENS_OF_A_BATCH = 512
"""Tokens that are read at a time; few, because the attention weights of all layers are in memory together."""


@dataclass(frozen=True, kw_only=True)
class Analyze(Recipe):
    """What did a model learn about position? Reads it off the weights, fits and names every head, and draws it.

    The analysis is that of the TISA paper. It measures how close the position embeddings are to Toeplitz (whether they
    know more than distances) and shows what position alone adds to each head's scores: as a heatmap, as a curve over
    offsets and as TISA's kernels, in every layer if the method acts in every layer. Over text, it measures how much of
    the attention the offset alone explains.

    It reads BERT, ALBERT, RoBERTa, ELECTRA and Funnel-Transformer checkpoints of transformers and models of this
    library. Of others, such as GPT-2, BART, DistilBERT, ViT or T5, it reads only the table of position embeddings or
    buckets. Several models are compared. A folder with checkpoint-* folders (as `whereformer pretrain` makes) shows how
    the model learned. Writes report.html (open it in a browser), report.md with its figures, and findings.json.
    """

    NAME = "analyze"
    FLAGS: ClassVar = {"model": "MODEL"}

    model: Annotated[tuple[str, ...], Free] = ()
    """Folders, or ids on the Hugging Face Hub."""
    scores: Annotated[str | None, Free] = None
    """A score for each model, such as its GLUE average, to compare Toeplitzness with."""
    length: Annotated[int | None, Range(1, 2**16), Free] = None
    """Number of positions to look at. Default: those of the model, at most 512."""
    no_text: Annotated[bool, Free] = False
    """Leave out the attention over text, which takes longer than the rest."""
    data: Annotated[tuple[str, ...], Free] = ()
    """Text to read: files, patterns such as 'data/**/*.txt' (in quotes), or folders with .txt, .md, .rst, .parquet,
    .jsonl. Default: the documentation that comes with Python."""
    column: Annotated[str | None, Free] = None
    """The column of tables that holds the text. Default: "text", or the only column of text."""
    tokens: Annotated[int, Range(1, MOST_COUNT), Free] = 8192
    """Number of tokens of text to measure it over."""
    max_kernels: Annotated[int, Range(1, 16), Free] = 5
    """Largest number of TISA kernels to fit to each head's curve, from 1 up."""
    out: Annotated[Path, Free] = Path("runs/analyze")
    """Folder for the results."""

    def check(self) -> None:
        if self.no_text and (self.data or self.column):
            raise InputError("no_text", "does not read text, so `data` and `column` can't be used with it")
        sources_of(self.model, self.scores)

    def run(self, run: Run) -> Report:
        sources = sources_of(self.model, self.scores)
        for source in sources:  # errors that can be found before the first model is read, which may take long
            with loading.named_errors(source.path):
                found = checkpoint_files.find_config(source.path)
                if found.get("model_type") in checkpoint_sources.KINDS:
                    checkpoint_sources.source_of(found, ours.Encoder, {})
        pages = None
        if not self.no_text:
            documents = corpus.load_documents(self.data, self.column)
            pages = [page for document in documents for page in corpus.pages_of([document])]
        models: list[findings.ModelFindings] = []
        notes: list[str] = []
        run.expect(100 * len(sources))
        for source in sources:
            with run.showing(source.name, 100) as upto, torch.no_grad():
                model, own = analyze_model(source, self, pages, upto, run.device)
            models.append(model)
            notes += own
        text = "none" if self.no_text else corpus.source_of(self.data)
        kept = {"text": text, "notes": notes, "rules": naming.RULES, "models": [model.to_dict() for model in models]}
        write_atomically(self.out / FINDINGS, json.dumps(kept, allow_nan=False, indent=1) + "\n")
        return drawing.report_of(models, notes)


@dataclass(frozen=True)
class ModelSource:
    """A model to analyze.

    Args:
        path: a folder, or an id on the Hugging Face Hub.
        name: a short and unique name.
        score: the score that the user gave, if any.
        step: the training step, for checkpoints of one run.
    """

    path: str
    name: str
    score: float | None = None
    step: int | None = None


def sources_of(given: Sequence[str], scores: str | None) -> list[ModelSource]:
    """Return the models to analyze. A folder with checkpoints means all of them, in the order of their steps.

    Raises:
        InputError: if there is none, a folder has no model, or the number of scores is not the number of models.
    """
    if not given:
        raise InputError("model", "expected at least one folder or id on the Hugging Face Hub, got none")
    paths = [path for each in given for path in _expanded(each)]
    places = [Path(path).resolve() if os.path.exists(path) else path for path in paths]
    if len(set(places)) < len(places):
        twice = next(path for path, place in zip(paths, places, strict=True) if places.count(place) > 1)
        raise InputError("model", f"expected different ones, got {twice!r} twice")
    own: list[float | None] = [None] * len(paths) if scores is None else [*_numbers(scores)]
    if len(own) != len(paths):
        raise InputError("scores", f"expected one for each of {len(paths)} models, got {len(own)}")
    steps = [_step(path) for path in paths]
    runs = {Path(path).resolve().parent for path, step in zip(paths, steps, strict=True) if step is not None}
    if len(runs) > 1 or steps.count(None) == len(steps):
        steps = [None] * len(steps)
    return [ModelSource(*each) for each in zip(paths, _names(paths), own, steps, strict=True)]


def _expanded(given: str) -> list[str]:
    folder = Path(given)
    if not given.strip():
        raise InputError("model", "expected a folder, or an id on the Hugging Face Hub, got ''")
    if os.path.isfile(given):
        raise InputError("model", f"expected a folder, or an id on the Hugging Face Hub, got the file {given!r}")
    if not os.path.isdir(given) or (folder / "config.json").exists():
        return [given]
    for place in (folder, folder / "checkpoints"):
        found = [path for path in place.glob("checkpoint-*") if _step(str(path)) is not None and path.is_dir()]
        if found:
            return sorted(map(str, found), key=lambda path: _step(path) or 0)
    if (folder / "model" / "config.json").exists():
        return [str(folder / "model")]
    raise InputError("model", f"expected a folder with a config.json, or with checkpoint-* folders, got {given!r}")


def _step(path: str) -> int | None:
    # What is not there, such as the id of a model on the Hub, need not be a path at all.
    match = re.fullmatch(r"checkpoint-(\d+)", (Path(path).resolve() if os.path.exists(path) else Path(path)).name)
    return int(match[1]) if match else None


def _names(paths: Sequence[str]) -> list[str]:
    """Name paths by their last parts, as many as tell them apart. A run's "model" folder is named after the run."""
    parts = []
    for path in paths:
        own = Path(path).resolve().parts if os.path.exists(path) else tuple(path.split("/"))
        parts.append(own[:-1] if own[-1] == "model" and len(own) > 2 else own)
    names = [own[-1] for own in parts]
    for count in range(2, max(map(len, parts)) + 1):
        longer = ["/".join(own[-count:]) for own in parts]
        names = [more if names.count(name) > 1 else name for more, name in zip(longer, names, strict=True)]
    return names if len(set(names)) == len(names) else list(paths)


def _numbers(text: str) -> list[float]:
    """Return the scores, which are separated by commas."""
    for part in text.split(","):
        try:
            finite = math.isfinite(float(part))
        except ValueError:
            finite = False
        if not finite:
            raise InputError("scores", f"expected numbers separated by commas, got {part.strip()!r}")
    return list(map(float, text.split(",")))


# One model.


def analyze_model(
    source: ModelSource, options: Analyze, pages: Sequence[str] | None, upto: Callable[[float], None], device: str
) -> tuple[findings.ModelFindings, list[str]]:
    """Analyze one model.

    Args:
        source: the model.
        options: the options.
        pages: pages of text to measure attention over; None for none.
        upto: is told how many of 100 steps are done.
        device: where the model runs.

    Returns:
        the findings, and notes on what could not be measured or is meaningless.
    """
    with loading.named_errors(source.path):
        told = checkpoint_files.find_config(source.path)
    if told.get("model_type") not in checkpoint_sources.KINDS:
        found, what = _tables_of(source, options, told)
        return found, [f"{source.path}: for a {found.kind} model, only {what} is analyzed"]
    encoder, kind = loading.load(source.path)
    encoder.to(device)
    upto(10)
    config, layers = encoder.config, len(encoder.passes)
    most = config.max_position_embeddings
    length = _length(options, most)
    acting = [layer for layer in reading.layers_with_position(encoder.position) if layer < layers]
    heads: list[findings.HeadFindings] = []
    try:
        vectors = reading.position_vectors(encoder, length)
        for index, read in enumerate(reading.position_scores(encoder, length)):
            heads += _heads(read, options.max_kernels)
            upto(10 + 60 * (index + 1) / max(1, len(acting)))
    except positions.PositionRangeError:
        raise _too_long(source, most, length) from None
    attention, notes = None, []
    if 0 < len(acting) < layers:
        without = ", ".join(str(layer) for layer in range(layers) if layer not in acting)
        notes.append(f"{source.path}: the position method acts in some layers alone; not in {without}")
    if length == 1:
        notes.append(f"{source.path}: a single position has no distances, so its Toeplitzness and fits mean nothing")
    if pages is not None:
        tokenizer, why_not = loading.tokenizer_of(source.path)
        if tokenizer is not None:
            windows, ends = text_windows(pages, tokenizer, encoder, min(length, most), options.tokens, source.path)
            attention = _attention(encoder, windows, ends, corpus.source_of(options.data), upto)
        elif options.data:
            raise InputError("data", f"{why_not}, so its attention can't be measured")
        else:
            notes.append(f"attention over text is not measured: {why_not}")
    sizes = {"layers": config.num_hidden_layers, "heads": config.num_attention_heads, "positions": most}
    sizes |= {name: getattr(config, name) for name in ("head_dim", "hidden_size", "embedding_size")}
    found = findings.ModelFindings(
        name=source.name,
        source=source.path,
        kind=kind,
        position=config.position,
        sizes=sizes,
        length=length,
        score=source.score,
        step=source.step,
        table=None if vectors is None else _table(vectors.cpu()),
        heads=tuple(heads),
        attention=attention,
    )
    return found, notes


def _length(options: Analyze, most: int) -> int:
    return min(most, MOST_POSITIONS) if options.length is None else options.length


def _too_long(source: ModelSource, most: int, length: int) -> InputError:
    return InputError("length", f"expected at most {most}, the number of positions of {source.path}, got {length}")


def _tables_of(source: ModelSource, options: Analyze, config: dict[str, Any]) -> tuple[findings.ModelFindings, str]:
    """Analyze a model that this library cannot run, from its position table or buckets, which are named."""
    kind = str(config.get("model_type"))
    with loading.named_errors(source.path):
        weights = checkpoint_files.read_tensors(checkpoint_files.find_weights(source.path))
        name, table = tables.embedding_table(weights, config) or ("", None)
        most = MOST_POSITIONS if table is None else len(table)
        length = _length(options, most)
        part, layers = tables.bucket_curves(weights, config, torch.arange(1 - length, length)) or ("", {})
        tensors = {f"layer {layer}": curve for layer, curve in layers.items()}
        checkpoint_loading.check_weights(tensors if table is None else {name: table, **tensors})
    if table is None and not layers:
        raise InputError(
            "model",
            f"{source.path}: expected a checkpoint of model_type {', '.join(checkpoint_sources.KINDS)}, or one with a "
            f"table of position embeddings or T5's buckets; this {kind!r} checkpoint has neither",
        )
    if length > most:
        raise _too_long(source, most, length)
    heads = [
        head
        for layer, curve in layers.items()
        for head in _heads(reading.LayerScores(layer, 1, toeplitz.from_diagonals(curve)), options.max_kernels)
    ]
    sizes = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "hidden_size": "hidden_size"}
    known = {size: config.get(field, config.get(OTHER_NAMES[field])) for size, field in sizes.items()}
    found = findings.ModelFindings(
        name=source.name,
        source=source.path,
        kind=kind,
        position="t5" if table is None else "learned",
        sizes={**{size: value for size, value in known.items() if isinstance(value, int)}, "positions": most},
        length=length,
        score=source.score,
        step=source.step,
        table=None if table is None else _table(table[:length]),
        heads=tuple(heads),
    )
    read = f"its table {name}" if table is not None else f"the curve of the {part}'s buckets, which its layers share,"
    return found, read


def _table(vectors: Tensor) -> findings.TableFindings:
    gram = vectors @ vectors.T
    part, share = toeplitz.toeplitz_part(gram), float(toeplitz.toeplitzness(gram))
    return findings.TableFindings(gram, part, share, vectors.shape[1])


def _heads(read: reading.LayerScores, max_kernels: int) -> list[findings.HeadFindings]:
    scores = read.scores.float().cpu()
    found = toeplitz.diagonals(scores.double())
    n = scores.shape[-1]
    offsets = torch.arange(1 - n, n) * read.stride
    weights = toeplitz.pairs(n)
    fits = fit.fit_tisa_up_to(found.mean, max_kernels, offsets=offsets, weights=weights, constant=True)[1:]
    heads = []
    for head, (name, reason) in enumerate(naming.name_heads(scores)):
        span = float(found.mean[head].max() - found.mean[head].min())
        is_curve = float(found.spread[head].max()) <= EVEN * max(span, EVEN)
        heads.append(
            findings.HeadFindings(
                layer=read.layer,
                head=head,
                offsets=offsets,
                curve=found.mean[head],
                spread=torch.zeros_like(found.spread[head]) if is_curve else found.spread[head],
                toeplitzness=1.0 if is_curve else float(found.explained[head]),
                scores=None if is_curve else scores[head],
                fits=tuple(each[head] for each in fits),
                name=name,
                reason=reason,
            )
        )
    return heads


# Attention over text.


def _attention(
    encoder: Encoder, windows: Tensor, ends: int, source: str, upto: Callable[[float], None]
) -> findings.AttentionFindings:
    """Measure attention over windows of tokens, without the special ones at each end."""
    body = windows.shape[1] - 2 * ends
    config = encoder.config
    statistics = measured.OffsetStatistics(config.num_hidden_layers, config.num_attention_heads, body)
    part = slice(ends, ends + body)
    batches = windows.split(max(1, TOKENS_OF_A_BATCH // body))
    for index, rows in enumerate(batches):
        attentions = encoder(rows.to(encoder.device), output_attentions=True).attentions
        for layer, weights in enumerate(attentions):
            if weights.shape[-2:] == (rows.shape[1], rows.shape[1]):
                statistics.add(layer, weights[..., part, part].cpu())
        upto(70 + 30 * (index + 1) / len(batches))
    reach = min(OFFSETS_SHOWN, body - 1)
    return findings.AttentionFindings(
        source=source,
        tokens=len(windows) * body,
        offsets=torch.arange(-reach, reach + 1),
        shares=statistics.shares(reach).float(),
        explained=statistics.explained().float(),
    )


def text_windows(
    pages: Sequence[str], tokenizer: PreTrainedTokenizerBase, encoder: Encoder, length: int, tokens: int, path: str
) -> tuple[Tensor, int]:
    """Return about ``tokens`` tokens of text in windows ``[CLS] text [SEP]`` of ``length``, shorter for less text.

    Returns:
        (count, n) token ids without padding, and the number of special tokens at each end, 0 or 1.

    Raises:
        InputError: if there are no tokens, or some that the model at ``path`` does not know.
    """
    special = tokenizer.cls_token_id, tokenizer.sep_token_id
    ends = 1 if None not in special else 0
    body = length - 2 * ends
    if body < 1:
        ends, body = 0, length
    ids = text_ids(pages, tokenizer, max(body, tokens))
    if not len(ids):
        raise InputError("data", f"the tokenizer of {path} finds no tokens in the text")
    loading.check_ids(int(ids.max()), len(encoder.embeddings.word.weight), path)
    body = min(body, len(ids))
    rows = functional.pad(ids[: len(ids) // body * body].view(-1, body), (ends, ends))
    if ends:
        rows[:, 0], rows[:, -1] = special
    return rows, ends


def text_ids(pages: Sequence[str], tokenizer: PreTrainedTokenizerBase, count: int) -> Tensor:
    """Return up to ``count`` tokens, from pages spread evenly over the text."""
    # A page has about a thousand tokens. If pages have fewer, those in between follow.
    every = max(1, len(pages) * 500 // max(count, 1))
    ids: list[int] = []
    for page in (page for start in range(every) for page in pages[start::every]):
        if len(ids) >= count:
            break
        ids += tokenizer(page, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids[:count], dtype=torch.int64)
