"""Fit TISA kernels to a model's position embeddings, and score the result before any training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ...analysis.distilling import distill_positions
from ...analysis.fit import TisaFit
from ...errors import InputError
from ...files import new_folder
from ...lab.progress import Progress
from ...lab.provenance import provenance
from ...lab.training import manifest
from ...lab.training.trainer import quiet_transformers
from ..analyze.loading import load, tokenizer_of
from ..analyze.text import text_windows
from .judge import load_with_head, make_judge, rows_of_a_batch
from .pairs import LikenessPairs
from .results import DistillResults, DistillText, PairsFacts

TRAINED, DROPPED = "as trained", "without positions"
HELD_OUT_EVERY = 4
"""One window in this number is held out for judging; kernels are fitted to the others."""


@dataclass(frozen=True)
class DistillOptions:
    """The options of a distillation.

    Args:
        path: the model's folder or id on the Hub.
        kernels: numbers of kernels per head to try.
        length: tokens per window; None for 128, or the model's maximum if that is less.
        tokens: tokens of text to fit to and to judge on.
        pages: the text.
        text_source: where it comes from.
        pairs: pairs of texts that also judge the models, or None.
    """

    path: str
    kernels: Sequence[int]
    length: int | None
    tokens: int
    pages: Sequence[str]
    text_source: str
    pairs: LikenessPairs | None


def distill(options: DistillOptions, out: Path, progress: Progress) -> DistillResults:
    """Fit and judge every number of kernels, and save the model with the most, and its tokenizer, in ``out/model``.

    Raises:
        InputError: if the model or the text is not suitable.
    """
    teacher, kind = load(options.path)
    config = teacher.config
    if "-" in config.blocks:
        raise InputError("model", "expected a model that doesn't pool, got a funnel, whose queries and keys differ")
    if config.position == "none":
        raise InputError("model", "it knows no positions, so there is nothing to turn into kernels")
    tokenizer, why_not = tokenizer_of(options.path)
    if tokenizer is None:
        raise InputError("model", f"{why_not}, and fitting kernels needs text")
    length = min(config.max_position_embeddings, options.length or 128)
    windows = text_windows(options.pages, tokenizer, teacher, length, options.tokens, options.path).rows
    held_out = torch.arange(len(windows)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    if not held_out.any():
        raise InputError(
            "tokens", f"expected at least {HELD_OUT_EVERY} windows of {length} tokens, the text gives {len(windows)}"
        )
    progress.start((2 + len(options.kernels)) * (1 + len(teacher.passes)) - len(teacher.passes) * 2)
    judge = make_judge(options.path, teacher, tokenizer, windows[held_out], options.pairs)
    scores: dict[str, dict[str, float]] = {}
    explained: dict[str, list[list[float]]] = {}
    for name, position, sizes in (
        (TRAINED, None, {}),
        (DROPPED, "none", {}),
        *((f"S={count}", "tisa", {"num_kernels": count}) for count in sorted(options.kernels)),
    ):
        progress.begin(name)
        model, encoder = load_with_head(options.path, position, sizes)
        if position == "tisa":
            fit = distill_positions(
                teacher, encoder, windows[~held_out], rows_of_a_batch(windows), lambda _: progress.step()
            )
            explained[name] = _explained(fit)
        scores[name] = judge(model, encoder)
        progress.step()
        progress.line(f"{name}: {score_text(scores[name])}")
    text = DistillText(options.text_source, len(windows), windows.shape[1], int(held_out.sum()))
    with quiet_transformers(), new_folder(out / "model") as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        manifest.write(
            partial, {"settings": {"model": options.path, "kernels": max(options.kernels), "text": asdict(text)}}
        )
    results = DistillResults(
        model=options.path,
        kind=kind,
        position=config.position,
        text=text,
        pairs=None if options.pairs is None else PairsFacts(options.pairs.source, len(options.pairs.likeness)),
        scores=scores,
        explained=explained,
        **provenance(),
    )
    results.write(out / "results.json")
    return results


def score_text(scores: dict[str, float]) -> str:
    """Format scores on one line."""
    return ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in scores.items())


def _explained(fit: TisaFit) -> list[list[float]]:
    """Return the share of each curve that its kernels explain, [layer][head]."""
    return [[round(value, 4) for value in layer] for layer in fit.explained.tolist()]
