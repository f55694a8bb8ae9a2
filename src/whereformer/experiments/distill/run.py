"""Position embeddings into TISA's kernels, and what is left of the model before any training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ...analysis.distilling import distill_positions
from ...analysis.fit import TisaFit
from ...data.masks import IGNORED, mask_tokens
from ...data.tables import read_table
from ...data.tokenizers import vocabulary_of
from ...errors import InputError
from ...models import Encoder, EncoderForMaskedLM, load_pretrained
from ...positions import PositionRangeError
from ...runs.progress import Progress
from ...runs.provenance import write_results
from ...training.metrics import METRICS
from ...training.trainer import quiet_transformers
from ..analyze.run import load, text_windows, tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = "distill-positions 1"
TRAINED, DROPPED = "as trained", "without positions"
MASK_RATE = 0.15
HELD_OUT_EVERY = 4
"""One window in this number is kept for judging, the others are fitted to."""
BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Pairs:
    """Pairs of texts with a number for how alike they are; a good model's cosines are in the same order.

    Args:
        source: where they are from.
        texts: the two columns.
        likeness: of each pair.
    """

    source: str
    texts: tuple[list[str], list[str]]
    likeness: list[float]


def read_pairs(file: Path, text: str | None, label: str | None) -> Pairs:
    """Pairs from a table.

    Raises:
        InputError: for a file that can't be read, a column that isn't there, or labels that are no numbers.
    """
    names = [part.strip() for part in (text or "").split(",") if part.strip()]
    if len(names) != 2:
        raise InputError("text", f"expected two columns as a,b, got {text!r}")
    if label is None:
        raise InputError("label", "expected the column with how alike the texts are, got none")
    columns = read_table("pairs", file, names)
    for field, name in (("text", names[0]), ("text", names[1]), ("label", label)):
        if name not in columns:
            raise InputError(field, f"{file} has no column {name!r}, but {', '.join(columns)}")
    likeness = columns[label]
    if len(likeness) < 2:
        raise InputError("pairs", f"expected at least 2 rows, {file} has {len(likeness)}")
    for row, value in enumerate(likeness):
        if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
            raise InputError("label", f"expected numbers, got {value!r} in row {row + 1} of {file}")
    texts = [[str(value or "") for value in columns[name]] for name in names]
    return Pairs(str(file), (texts[0], texts[1]), [float(value) for value in likeness])


@dataclass(frozen=True)
class Options:
    """What is done.

    Args:
        path: of the model.
        kernels: numbers of kernels a head.
        length: tokens of a window; None for 128, or what the model covers if that is less.
        tokens: of text to fit to and to judge on.
        pages: the text.
        text_source: where it is from.
        pairs: to judge by as well.
    """

    path: str
    kernels: Sequence[int]
    length: int | None
    tokens: int
    pages: Sequence[str]
    text_source: str
    pairs: Pairs | None


@dataclass(frozen=True)
class Judge:
    """What all models are judged by.

    Args:
        windows: (rows, n) tokens that were not fitted to.
        states: (rows, n, hidden_size), the trained model's last ones.
        masked, labels: (rows, n) for masked LM; None if the checkpoint has no head for it.
        pairs: rows of tokens for each side, and how alike they are.
    """

    windows: Tensor
    states: Tensor
    masked: tuple[Tensor, Tensor] | None
    pairs: tuple[list[list[int]], list[list[int]], list[float]] | None

    @torch.no_grad()
    def __call__(self, model: PreTrainedModel, encoder: Encoder) -> dict[str, float]:
        """Scores by name."""
        scores = {
            "similarity": float(functional.cosine_similarity(_states(encoder, self.windows), self.states, -1).mean())
        }
        if self.masked is not None:
            losses, right = [], 0
            for inputs, labels in zip(*(part.split(_rows(part)) for part in self.masked), strict=True):
                logits = model(inputs).logits[labels != IGNORED].float()
                wanted = labels[labels != IGNORED]
                losses.append(functional.cross_entropy(logits, wanted, reduction="none"))
                right += int((logits.argmax(-1) == wanted).sum())
            every = torch.cat(losses)
            scores |= {"masked_lm_loss": float(every.mean()), "masked_lm_accuracy": right / len(every)}
        if self.pairs is not None:
            first, second, likeness = self.pairs
            cosine = functional.cosine_similarity(_means(encoder, first), _means(encoder, second), -1)
            scores["spearman"] = METRICS["spearman"](np.asarray(likeness), cosine.double().numpy())
        return scores


def distill(options: Options, out: Path, progress: Progress) -> dict[str, Any]:
    """Fit, judge, and save the model with the most kernels with its tokenizer in ``out/model``; returns the results.

    Raises:
        InputError: for a model or text that does not fit.
    """
    teacher, kind = load(options.path)
    config = teacher.config
    if "-" in config.blocks:
        raise InputError("model", "expected a model that doesn't pool, got a funnel, whose queries and keys differ")
    if config.position == "none":
        raise InputError("model", "it knows no positions, so there is nothing to turn into kernels")
    tokenizer, why_not = tokenizer_of(options.path)
    if tokenizer is None:
        raise InputError("model", f"{why_not}, and kernels are fitted over text")
    length = min(config.max_position_embeddings, options.length or 128)
    windows = text_windows(options.pages, tokenizer, teacher, length, options.tokens, options.path).rows
    held_out = torch.arange(len(windows)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    if not held_out.any():
        raise InputError(
            "tokens", f"expected at least {HELD_OUT_EVERY} windows of {length} tokens, the text gives {len(windows)}"
        )
    progress.start((2 + len(options.kernels)) * (1 + len(teacher.passes)) - len(teacher.passes) * 2)
    judge = _judge(options, teacher, tokenizer, windows[held_out])
    results: dict[str, Any] = {
        "format": FORMAT,
        "model": options.path,
        "kind": kind,
        "position": config.position,
        "text": {
            "source": options.text_source,
            "windows": len(windows),
            "length": windows.shape[1],
            "held_out": int(held_out.sum()),
        },
        "pairs": None
        if options.pairs is None
        else {"source": options.pairs.source, "rows": len(options.pairs.likeness)},
        "scores": {},
        "explained": {},
    }
    for name, position, sizes in (
        (TRAINED, None, {}),
        (DROPPED, "none", {}),
        *((f"S={count}", "tisa", {"num_kernels": count}) for count in sorted(options.kernels)),
    ):
        progress.begin(name)
        model, encoder = _load(options.path, position, sizes)
        if position == "tisa":
            fit = distill_positions(teacher, encoder, windows[~held_out], _rows(windows), lambda layer: progress.step())
            results["explained"][name] = _explained(fit)
        results["scores"][name] = judge(model, encoder)
        progress.step()
        progress.line(f"{name}: {score_text(results['scores'][name])}")
    with quiet_transformers():
        model.save_pretrained(out / "model")
        tokenizer.save_pretrained(out / "model")
    write_results(out / "results.json", results)
    return results


def score_text(scores: dict[str, float]) -> str:
    """Scores in a line."""
    return ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in scores.items())


def _load(path: str, position: str | None, options: dict[str, Any]) -> tuple[PreTrainedModel, Encoder]:
    """A model, with its masked-LM head where it has one, and the encoder in it."""
    with quiet_transformers():
        model = load_pretrained(path, position, **options)
    encoder = model.base_model
    assert isinstance(encoder, Encoder)
    return model, encoder


def _judge(options: Options, teacher: Encoder, tokenizer: PreTrainedTokenizerBase, windows: Tensor) -> Judge:
    try:
        states = _states(teacher, windows)
    except PositionRangeError as error:
        raise InputError("length", str(error)) from None
    masked = None
    if isinstance(_load(options.path, None, {})[0], EncoderForMaskedLM) and tokenizer.mask_token_id is not None:
        masked = mask_tokens(windows, MASK_RATE, vocabulary_of(tokenizer, "model"), torch.Generator().manual_seed(0))
    pairs = None
    if options.pairs is not None:
        limit = teacher.config.max_position_embeddings
        sides = [tokenizer(side, truncation=True, max_length=limit)["input_ids"] for side in options.pairs.texts]
        pairs = sides[0], sides[1], options.pairs.likeness
    return Judge(windows, states, masked, pairs)


@torch.no_grad()
def _states(encoder: Encoder, windows: Tensor) -> Tensor:
    return torch.cat([encoder(rows).last_hidden_state for rows in windows.split(_rows(windows))])


@torch.no_grad()
def _means(encoder: Encoder, rows: Sequence[Sequence[int]]) -> Tensor:
    """The mean state of each row's tokens, (rows, hidden_size); rows of one length go together, so none is padded."""
    lengths = torch.tensor([len(row) for row in rows])
    means = torch.empty(len(rows), encoder.config.hidden_size)
    for length in lengths.unique().tolist():
        same = (lengths == length).nonzero().squeeze(-1)
        for some in same.split(max(1, BATCH_TOKENS // length)):
            means[some] = encoder(torch.tensor([rows[row] for row in some.tolist()])).last_hidden_state.mean(1)
    return means


def _rows(windows: Tensor) -> int:
    return max(1, BATCH_TOKENS // windows.shape[1])


def _explained(fit: TisaFit) -> list[list[float]]:
    """The share of each layer's and head's curve that its kernels explain."""
    return [[round(value, 4) for value in layer] for layer in fit.explained.tolist()]
