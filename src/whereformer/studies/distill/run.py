"""Fit TISA kernels to a model's position embeddings, and score the result before any training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ...analysis.distilling import distill_positions
from ...analysis.fit import TisaFit
from ...data import corpus
from ...errors import InputError
from ...files import new_folder
from ...lab import manifest
from ...lab.jobs import threads
from ...lab.progress import Progress
from ...lab.provenance import provenance
from ...lab.training.card import write_changed_card
from ...lab.training.trainer import quiet_transformers
from ...models.checkpoints.sentences import keep_sentence_settings
from ..analyze.loading import load, tokenizer_of
from ..analyze.text import pages_of, text_windows
from .judge import load_with_head, make_judge, rows_of_a_batch
from .pairs import LikenessPairs
from .results import DROPPED, TRAINED, DistillResults, DistillText, PairsFacts

HELD_OUT_EVERY = 4
"""One window in this number is held out for judging; kernels are fitted to the others."""


@dataclass(frozen=True, kw_only=True)
class DistillJob:
    """Everything that a distillation needs.

    Args:
        path: the model's folder or id on the Hub.
        kernels: numbers of kernels per head to try, ascending.
        length: tokens per window; None for 128, or the model's maximum if that is less.
        tokens: tokens of text to fit to and to judge on.
        data: where the text is, as in :class:`DistillPositions`.
        column: the column of tables that holds the text.
        pairs: pairs of texts that also judge the models, or None.
        threads: threads on the CPU; None for torch's.
    """

    path: str
    kernels: Sequence[int]
    length: int | None
    tokens: int
    data: tuple[str, ...]
    column: str | None
    pairs: LikenessPairs | None
    threads: int | None

    def run(self, folder: Path, progress: Progress) -> DistillResults:
        """Fit and judge every number of kernels, and save the model with the most, and its tokenizer, in ``model``.

        Raises:
            InputError: if the model or the text is not suitable.
        """
        with nullcontext() if self.threads is None else threads(self.threads):
            return self._distill(folder, progress)

    def _distill(self, folder: Path, progress: Progress) -> DistillResults:
        teacher, kind = load(self.path)
        config = teacher.config
        if "-" in config.blocks:
            raise InputError("model", "expected a model that doesn't pool, got a funnel, whose queries and keys differ")
        if config.position == "none":
            raise InputError("model", "it knows no positions, so there is nothing to turn into kernels")
        tokenizer, why_not = tokenizer_of(self.path)
        if tokenizer is None:
            raise InputError("model", f"{why_not}, and fitting kernels needs text")
        progress.begin("reading the text")
        pages = pages_of(corpus.load_documents(self.data, self.column))
        length = min(config.max_position_embeddings, self.length or 128)
        windows, _ = text_windows(pages, tokenizer, teacher, length, self.tokens, self.path)
        held_out = torch.arange(len(windows)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        if not held_out.any():
            raise InputError(
                "tokens",
                f"expected at least {HELD_OUT_EVERY} windows of {length} tokens, the text gives {len(windows)}",
            )
        progress.start((2 + len(self.kernels)) * (1 + len(teacher.passes)) - len(teacher.passes) * 2)
        judge = make_judge(self.path, teacher, tokenizer, windows[held_out], self.pairs)
        scores: dict[str, dict[str, float]] = {}
        explained: dict[str, list[list[float]]] = {}
        for name, position, sizes in (
            (TRAINED, None, {}),
            (DROPPED, "none", {}),
            *((f"S={count}", "tisa", {"num_kernels": count}) for count in self.kernels),
        ):
            progress.begin(name)
            model, encoder = load_with_head(self.path, position, sizes)
            if position == "tisa":
                fit = distill_positions(
                    teacher, encoder, windows[~held_out], rows_of_a_batch(windows), lambda _: progress.step()
                )
                explained[name] = _explained(fit)
            scores[name] = judge(model, encoder)
            progress.step()
            progress.line(f"{name}: {score_text(scores[name])}")
        text = DistillText(corpus.source_of(self.data), len(windows), windows.shape[1], int(held_out.sum()))
        results = DistillResults(
            model=self.path,
            kind=kind,
            position=config.position,
            text=text,
            pairs=None if self.pairs is None else PairsFacts(self.pairs.source, len(self.pairs.likeness)),
            scores=scores,
            explained=explained,
            **provenance(),
        )
        facts = {"model": self.path, "kernels": max(self.kernels), "text": asdict(text)}
        with quiet_transformers(), new_folder(folder / "model") as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            keep_sentence_settings(self.path, partial)
            write_changed_card(partial, model, self.path, facts, results)
            manifest.write(partial, {"settings": facts})
        progress.line(f"saved {folder / 'model'}, with {max(self.kernels)} kernels per head")
        return results


def score_text(scores: dict[str, float]) -> str:
    """Format scores on one line."""
    return ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in scores.items())


def _explained(fit: TisaFit) -> list[list[float]]:
    """Return the share of each curve that its kernels explain, [layer][head]."""
    return [[round(value, 4) for value in layer] for layer in fit.explained.tolist()]
