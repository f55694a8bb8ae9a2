"""Prepare a comparison: read and encode the text, and train its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...data.encode import TokenizerChoice, open_or_encode
from ...data.masks import HELD_OUT_RATE, Batches, HeldOut
from ...data.streams import Stream
from ...errors import InputError
from ...files import write_atomically
from ...lab.progress import Progress
from .results import CompareResults, CompareText
from .settings import CompareSettings

if TYPE_CHECKING:
    from .run import CompareJob


@dataclass(frozen=True)
class Material:
    """What every run of a comparison is trained and judged on.

    Args:
        settings: the settings that all runs share, with the text's fingerprint.
        training: the encoded training text.
        held_out: the held-out text, masked unless models are causal.
        facts: facts about the text.
        characters: how many characters were read of a longer text; None if all of it was.
    """

    settings: CompareSettings
    training: Stream
    held_out: HeldOut
    facts: CompareText
    characters: int | None = None

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return self.facts.vocabulary

    @property
    def device(self) -> torch.device:
        """Where to train."""
        return torch.device(self.settings.device)

    def batches(self, seed: int) -> Batches:
        """Return the training batches of a seed, at full length. They are the same for every method."""
        of = self.settings
        rate = None if of.causal else of.mask_rate
        return Batches(self.training, of.batch_size, of.length, rate, self.vocab_size, seed)


def prepare(job: CompareJob, folder: Path, progress: Progress) -> Material:
    """Read the text, train a tokenizer and save it in the run's folder, and encode the text.

    Raises:
        InputError: if the text can't be read or is too short, or the folder holds results for other settings.
    """
    text, characters = job.text, job.text.characters
    if text.paths:
        progress.line(text.about_files)
    settings = replace(job.settings, text=text.fingerprint)
    # Checked before anything in the folder changes.
    CompareResults.earlier(folder, settings=settings)
    encoded = open_or_encode(folder / "cache", text, TokenizerChoice(None, settings.vocab_size))
    training, held_out = len(encoded.training), len(encoded.held_out)
    if min(training, held_out) < (longest := max(*settings.lengths, HeldOut.GROUP)):
        raise InputError(
            "data",
            f"too little text: {training} training and {held_out} held-out tokens, expected at least {longest} of "
            f"each to judge {longest} tokens at a time; give more text or a smaller `length`",
        )
    write_atomically(folder / "tokenizer.json", encoded.tokenizer.backend_tokenizer.to_str())
    if characters is not None and encoded.characters < characters:
        characters = None
    source = text.source if characters is None else f"the first {characters:,} characters of {text.source}"
    facts = replace(encoded.facts, source=source)
    return Material(
        settings,
        encoded.training,
        HeldOut(encoded.held_out, None if settings.causal else HELD_OUT_RATE, facts.vocabulary),
        CompareText(**vars(facts), data=list(text.paths), column=text.column),
        characters,
    )
