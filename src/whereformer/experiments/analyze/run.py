"""What models learned about position: read from their weights, fitted, named, and measured over text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer

from ...analysis.curves import OFFSETS_SHOWN
from ...analysis.findings import AttentionFindings, HeadFindings, ModelFindings, TableFindings
from ...analysis.fit import fit_tisa_up_to
from ...analysis.measured import OffsetStatistics
from ...analysis.naming import RULES, name_heads
from ...analysis.reading import LayerScores, acts_in_layers, acts_on_input, position_scores, position_vectors
from ...analysis.tables import bucket_curves, embedding_table
from ...analysis.toeplitz import diagonals, from_diagonals, pairs, toeplitz_part, toeplitzness
from ...data import corpus
from ...errors import InputError
from ...files import write_atomically
from ...models import Encoder, load_pretrained
from ...models.checkpoints.files import find_config, read_weights
from ...models.checkpoints.pretrained import read_config
from ...models.checkpoints.sources import KINDS
from ...positions import PositionRangeError
from ...runs.progress import Progress
from ...training.trainer import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
MOST_POSITIONS = 512
"""Positions that are looked at by default, at most."""
TOKENS = 8192
"""Tokens of text over which attention is measured by default."""
TOKENS_OF_A_BATCH = 512
"""And of so many at a time, since the weights of all layers are there at once."""
EVEN = 1e-4
"""A head whose scores differ from their curve by no more of its range is a curve; float32 rounds by so much."""
OTHER_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}
"""What GPT-2 calls these sizes."""
MAY_DIFFER = {"_name_or_path", "dtype", "torch_dtype", "transformers_version"}
"""Entries of a configuration that say nothing about the model itself."""


@dataclass(frozen=True)
class Source:
    """A model to be analysed.

    Args:
        path: a folder, or an id on the Hugging Face Hub.
        name: short and unique.
        score: that the user gave.
        step: of training, for checkpoints of one run.
    """

    path: str
    name: str
    score: float | None = None
    step: int | None = None


@dataclass(frozen=True)
class Options:
    """What is looked at.

    Args:
        length: positions; None for what the model was made for, up to ``MOST_POSITIONS``.
        max_kernels: S of the largest fit.
        pages: of text, or None to measure no attention.
        text_source: where they come from, for people.
        text_needed: whether a model without a tokenizer is an error, because the user gave the text.
        tokens: that are read, about.
    """

    length: int | None
    max_kernels: int
    pages: Sequence[str] | None
    text_source: str
    text_needed: bool
    tokens: int = TOKENS


def sources_of(models: Sequence[str], scores: Sequence[float] | None) -> list[Source]:
    """The models that are meant: a folder with checkpoints stands for all of them, in the order of their steps.

    Raises:
        InputError: for a folder without a model, or another number of scores.
    """
    paths = [path for given in models for path in _expanded(given)]
    places = [Path(path).resolve() if Path(path).exists() else path for path in paths]
    if len(set(places)) < len(places):
        twice = next(path for path, place in zip(paths, places, strict=True) if places.count(place) > 1)
        raise InputError("model", f"expected different ones, got {twice!r} twice")
    if scores is not None and len(scores) != len(paths):
        raise InputError("scores", f"expected one for each of {len(paths)} models, got {len(scores)}")
    steps = [_step(path) for path in paths]
    runs = {Path(path).resolve().parent for path, step in zip(paths, steps, strict=True) if step is not None}
    if len(runs) > 1 or steps.count(None) == len(steps):
        steps = [None] * len(steps)
    names = _names(paths)
    return [
        Source(path, name, None if scores is None else scores[index], step)
        for index, (path, name, step) in enumerate(zip(paths, names, steps, strict=True))
    ]


def _expanded(given: str) -> list[str]:
    folder = Path(given)
    if not given.strip():
        raise InputError("model", "expected a folder, or an id on the Hugging Face Hub, got ''")
    if folder.is_file():
        raise InputError("model", f"expected a folder, or an id on the Hugging Face Hub, got the file {given!r}")
    if not folder.is_dir() or (folder / "config.json").exists():
        return [given]
    for place in (folder, folder / "checkpoints"):
        found = [path for path in place.glob("checkpoint-*") if _step(str(path)) is not None and path.is_dir()]
        if found:
            return [str(path) for path in sorted(found, key=lambda path: _step(str(path)) or 0)]
    if (folder / "model" / "config.json").exists():
        return [str(folder / "model")]
    raise InputError("model", f"expected a folder with a config.json, or with checkpoint-* folders, got {given!r}")


def _step(path: str) -> int | None:
    match = re.fullmatch(r"checkpoint-(\d+)", Path(path).resolve().name)
    return int(match[1]) if match else None


def _names(paths: Sequence[str]) -> list[str]:
    """The ends of paths, as long as is needed to tell them apart; a run's "model" is called as the run."""
    parts = []
    for path in paths:
        own = Path(path).resolve().parts if Path(path).exists() else tuple(path.split("/"))
        parts.append(own[:-1] if own[-1] == "model" and len(own) > 2 else own)
    names = ["/".join(own[-1:]) for own in parts]
    for count in range(2, max(map(len, parts)) + 1):
        if len(set(names)) == len(names):
            break
        names = [
            "/".join(own[-count:]) if names.count(name) > 1 else name for own, name in zip(parts, names, strict=True)
        ]
    return names if len(set(names)) == len(names) else list(paths)


def load(path: str) -> tuple[Encoder, str]:
    """The encoder of a checkpoint, and transformers' name for its kind.

    Raises:
        InputError: if it can't be read, or has weights that are no numbers.
    """
    with _told(path), quiet_transformers():
        kind = read_config(path, Encoder)["model_type"]
        encoder = load_pretrained(path, model_class=Encoder)
    assert isinstance(encoder, Encoder)
    for name, parameter in encoder.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise InputError("model", f"{path}: {name} has numbers that are not finite; this checkpoint is broken")
    return encoder, kind


@contextmanager
def _told(path: str) -> Iterator[None]:
    """What is wrong with a checkpoint in one line that names it."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split()).removeprefix("path_or_id: ")
        where = "" if path in reason else f"{path}: "
        raise InputError("model", f"{where}{reason}") from None


def analyze(sources: Sequence[Source], options: Options, progress: Progress) -> tuple[list[ModelFindings], list[str]]:
    """Read every model; and notes on what was left out.

    Raises:
        InputError: for a model that can't be read, or checkpoints of one run that are of different models.
    """
    _check(sources)
    progress.start(100 * len(sources))
    found: list[ModelFindings] = []
    notes: list[str] = []
    for source in sources:
        progress.begin(source.name)
        model, own = analyze_model(source, options, progress)
        for note in own:
            notes.append(note)
            progress.line(note)
        found.append(model)
    return found, notes


def _check(sources: Sequence[Source]) -> None:
    """Raise for what can be known to be wrong before the first model is read, which may take long."""
    configs = []
    for source in sources:
        with _told(source.path):
            config = find_config(source.path)
            configs.append(read_config(source.path, Encoder) if config.get("model_type") in KINDS else config)
    run = [(source.path, config) for source, config in zip(sources, configs, strict=True) if source.step is not None]
    for path, config in run:
        first_path, first = run[0]
        for name in sorted((first.keys() | config.keys()) - MAY_DIFFER):
            if first.get(name) != config.get(name):
                raise InputError(
                    "model",
                    f"checkpoints of a run are of one model, but {first_path} has {name} {first.get(name)!r} "
                    f"and {path} {config.get(name)!r}",
                )


@torch.no_grad()
def analyze_model(source: Source, options: Options, progress: Progress) -> tuple[ModelFindings, list[str]]:
    """Everything about one model, and notes on what could not be measured or says nothing; 100 steps of progress."""
    report = _Share(progress)
    with _told(source.path):
        config_found = find_config(source.path)
    if config_found.get("model_type") not in KINDS:
        findings = _tables_of(source, options, config_found)
        report.upto(100)
        return findings, [f"{source.path}: of a {findings.kind} model only the tables of positions are looked at"]
    encoder, kind = load(source.path)
    report.upto(10)
    config = encoder.config
    positions = config.max_position_embeddings
    length = min(positions, MOST_POSITIONS) if options.length is None else options.length
    try:
        vectors = position_vectors(encoder, length)
        table = None if vectors is None else _table(vectors)
        heads: list[HeadFindings] = []
        layers = len(encoder.passes) if acts_in_layers(encoder.position) else 1
        for index, read in enumerate(position_scores(encoder, length)):
            heads += _heads(read, options.max_kernels)
            report.upto(10 + 60 * (index + 1) / layers)
    except PositionRangeError:
        raise InputError(
            "length", f"expected at most {positions}, which are the positions of {source.path}, got {length}"
        ) from None
    report.upto(70)
    attention, notes = None, []
    if length == 1:
        notes.append(
            f"{source.path}: one position has no distance to another, so its Toeplitzness and fits say nothing"
        )
    if options.pages is not None:
        tokenizer, why_not = tokenizer_of(source.path)
        if tokenizer is None and options.text_needed:
            raise InputError("data", f"{why_not}, so its attention can't be measured")
        if tokenizer is None:
            notes.append(f"attention over text is not measured: {why_not}")
        else:
            attention = _measure(
                encoder, tokenizer, source, options, min(length, positions), lambda part: report.upto(70 + 30 * part)
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


def _tables_of(source: Source, options: Options, config: dict[str, Any]) -> ModelFindings:
    """What can be said of a model that this library does not run: from its tables of positions alone."""
    with _told(source.path):
        weights = read_weights(source.path)
    kind = str(config.get("model_type"))
    found = embedding_table(weights, config)
    positions = MOST_POSITIONS if found is None else len(found[1])
    length = min(positions, MOST_POSITIONS) if options.length is None else options.length
    offsets = torch.arange(1 - length, length)
    curves = bucket_curves(weights, config, offsets)
    if found is None and curves is None:
        raise InputError(
            "model",
            f"{source.path}: expected a checkpoint of model_type {', '.join(KINDS)}, or one with a table of "
            f"position embeddings or T5's buckets; this one of {kind!r} has neither",
        )
    if length > positions:
        raise InputError(
            "length", f"expected at most {positions}, which are the positions of {source.path}, got {length}"
        )
    read = [] if found is None else [found[1]]
    part, layers = curves or ("", {})
    if not all(bool(each.isfinite().all()) for each in (*read, *layers.values())):
        raise InputError("model", f"{source.path}: its positions have numbers that are not finite")
    heads = [
        head
        for layer, curve in layers.items()
        for head in _heads(LayerScores(layer, 1, from_diagonals(curve)), options.max_kernels)
    ]
    names = [found[0]] if found is not None else []
    how = [f"P is E E^T of the rows of {name} that are positions." for name in names]
    if heads:
        how.append(f"Curves are those of the {part}'s buckets, which layers without a table of their own share.")
        how.append("Fits have a constant, which no softmax sees; offsets count as often as they occur.")
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
        no_heads="" if heads else f"what heads of a {kind} model make of positions is not read",
        attention=None,
    )


class _Share:
    """Whole steps of the progress, out of 100 that a model has."""

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
    """What was done, in sentences."""
    parts = []
    embedded = acts_on_input(encoder.position)
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
            "A score by position is the mean over pairs of words from the vocabulary, drawn independently, through all "
            f"that the model does: {', '.join(steps)}."
        )
        if embedded:
            parts.append("In the first layer the mean over all pairs is taken off, which no softmax sees.")
        if acts_in_layers(encoder.position):
            parts.append(
                "In deeper layers every token is the mean state that the layer reads from words at random, and what "
                "two of them score without position is taken off: what is left is what the method does in that layer."
            )
        parts.append("Fits have a constant, which no softmax sees; offsets count as often as they occur.")
    if has_attention:
        parts.append(
            "Measured attention leaves out the first and the last token of a window where these are special; what they "
            "draw is missing from the shares. Explained is the variance of log weights that is left within rows."
        )
    return tuple(parts)


def _no_table(encoder: Encoder) -> str:
    method = encoder.config.position
    if not (acts_on_input(encoder.position) or acts_in_layers(encoder.position)):
        return f"position method {method!r} tells the model nothing about position"
    return f"position method {method!r} has no vector for each position; it acts on queries, keys or scores"


def tokenizer_of(path: str) -> tuple[PreTrainedTokenizerBase | None, str]:
    """The model's tokenizer; for a checkpoint of ``whereformer pretrain`` that of its run. Or None and why."""
    folder = Path(path)
    places = [path]
    if folder.is_dir():
        places += [str(near) for near in (folder.parent, folder.parent.parent / "model") if near.is_dir()]
    reason = ""
    for place in places:
        if Path(place).is_dir() and not any(Path(place).glob("*token*")) and not (Path(place) / "vocab.txt").exists():
            reason = reason or "there is none beside it"
            continue
        try:
            with quiet_transformers():
                return AutoTokenizer.from_pretrained(place, trust_remote_code=False), ""
        except Exception as error:
            # The libraries raise what they like for a missing or broken file.
            reason = (str(error).splitlines() or [type(error).__name__])[0]
    return None, f"no tokenizer can be read for {path} ({reason})"


def _measure(
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerBase,
    source: Source,
    options: Options,
    length: int,
    on_part: Callable[[float], None],
) -> AttentionFindings:
    """Attention over windows ``[CLS] text [SEP]`` of so many tokens, without its first and last."""
    windows = text_windows(options.pages or (), tokenizer, encoder, length, options.tokens, source.path)
    body = windows.rows.shape[1] - 2 * windows.ends
    statistics = OffsetStatistics(encoder.config.num_hidden_layers, encoder.config.num_attention_heads, body)
    part = slice(windows.ends, windows.ends + body)
    batches = windows.rows.split(max(1, TOKENS_OF_A_BATCH // body))
    for index, rows in enumerate(batches):
        attentions = encoder(rows.to(encoder.device), output_attentions=True).attentions
        for layer, weights in enumerate(attentions):
            if weights.shape[-2:] == (rows.shape[1], rows.shape[1]):
                statistics.add(layer, weights[..., part, part])
        on_part((index + 1) / len(batches))
    reach = min(OFFSETS_SHOWN, body - 1)
    return AttentionFindings(
        source=options.text_source,
        tokens=len(windows.rows) * body,
        offsets=torch.arange(-reach, reach + 1),
        shares=statistics.shares(reach).float(),
        explained=statistics.explained().float(),
    )


class Windows(NamedTuple):
    """Text as rows of tokens that are all real.

    Args:
        rows: (count, n) token ids.
        ends: 1 if [CLS] and [SEP] stand at the ends of a row, else 0.
    """

    rows: Tensor
    ends: int


def text_windows(
    pages: Sequence[str], tokenizer: PreTrainedTokenizerBase, encoder: Encoder, length: int, tokens: int, path: str
) -> Windows:
    """About so many tokens of text in windows ``[CLS] text [SEP]`` of ``length``, or shorter if there is less text.

    Raises:
        InputError: if there are no tokens, or some that the model of this path does not know.
    """
    special = tokenizer.cls_token_id, tokenizer.sep_token_id
    ends = 1 if None not in special else 0
    body = length - 2 * ends
    if body < 1:
        ends, body = 0, length
    ids = _text_ids(pages, tokenizer, max(body, tokens))
    if not len(ids):
        raise InputError("data", f"the tokenizer of {path} finds no tokens in the text")
    words = len(encoder.embeddings.word.weight)
    if int(ids.max()) >= words:
        raise InputError(
            "model",
            f"the tokenizer of {path} is another model's: it has a token {int(ids.max())}, the model {words} tokens",
        )
    body = min(body, len(ids))
    rows = functional.pad(ids[: len(ids) // body * body].view(-1, body), (ends, ends))
    if ends:
        rows[:, 0], rows[:, -1] = special
    return Windows(rows, ends)


def _text_ids(pages: Sequence[str], tokenizer: PreTrainedTokenizerBase, count: int) -> Tensor:
    """About ``count`` tokens of pages spread evenly over the text; fewer if there are no more."""
    # A page has about a thousand tokens; where it has fewer, pages in between follow.
    every = max(1, len(pages) * 500 // max(count, 1))
    ids: list[int] = []
    for page in (page for start in range(every) for page in pages[start::every]):
        if len(ids) >= count:
            break
        ids += tokenizer(page, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids[:count], dtype=torch.int64)


def pages_of(documents: Sequence[str]) -> list[str]:
    """The text in pages."""
    return [piece for document in documents for piece in corpus.pieces_of(document)]


def write_results(models: Sequence[ModelFindings], facts: dict[str, Any], path: Path) -> None:
    """Write ``results.json``: ``format``, ``facts`` and ``models``, each as :meth:`ModelFindings.to_dict` has it."""
    data = {"format": FORMAT, "facts": facts, "models": [model.to_dict() for model in models]}
    write_atomically(path, json.dumps(data, allow_nan=False) + "\n")


def facts_of(options: Options, command: Sequence[str], notes: Sequence[str], machine: dict[str, Any]) -> dict[str, Any]:
    """What the report says besides the findings."""
    return {
        "command": list(command),
        "rules": dict(RULES),
        "score": "score",
        "notes": list(notes),
        "text": options.text_source if options.pages is not None else "none",
        "machine": machine,
    }


def parsed_scores(text: str | None) -> list[float] | None:
    """Numbers split by commas.

    Raises:
        InputError: if one is no finite number.
    """
    if text is None:
        return None
    scores = []
    for part in text.split(","):
        try:
            score = float(part)
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise InputError("scores", f"expected numbers split by commas, got {part.strip()!r}")
        scores.append(score)
    return scores
