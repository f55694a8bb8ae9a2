"""Prepare a comparison: read and encode the text, and train its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ...data.corpus import Text
from ...data.encode import TokenizerChoice, open_or_encode
from ...data.fingerprint import look_at
from ...data.glue import OwnTask
from ...data.masks import HELD_OUT_RATE, Batches, HeldOut
from ...data.read import Document
from ...data.streams import Stream
from ...errors import InputError
from ...files import write_atomically
from ...lab.progress import Progress
from ...lab.training.text import text_facts
from .results import CompareResults, CompareText
from .settings import CompareSettings
from .task import TableText, TaskRows, identity, prepare_rows


@dataclass(frozen=True)
class Material:
    """What every run of a comparison is trained and judged on.

    Args:
        settings: the settings that all runs share, with the text's fingerprint.
        training: the encoded training text.
        held_out: the masked held-out text.
        vocab_size: size of the vocabulary.
        facts: facts about the text.
        characters: how many characters were read of a longer text; None if all of it was.
        rows: the labeled table to rank by; None ranks by held-out text.
    """

    settings: CompareSettings
    training: Stream
    held_out: HeldOut
    vocab_size: int
    facts: CompareText
    characters: int | None = None
    rows: TaskRows | None = None

    @property
    def device(self) -> torch.device:
        """Where to train."""
        return torch.device(self.settings.device)

    def batches(self, seed: int) -> Batches:
        """Return the training batches of a seed, at full length. They are the same for every method."""
        of = self.settings
        return Batches(self.training, of.batch_size, of.length, of.mask_rate, self.vocab_size, seed)


class FirstPart(Text):
    """The beginning of a text.

    Args:
        whole: the text.
        characters: how many characters of it there are, or all if it has fewer.
    """

    def __init__(self, whole: Text, characters: int) -> None:
        vars(self).update(vars(whole))
        self.field = whole.field
        self.whole = whole
        self.characters = characters

    @property
    def names(self) -> list[str]:
        return [*self.whole.names, f"the first {self.characters} characters"]

    def documents(self) -> Iterator[Document]:
        left = self.characters

        def cut(document: Document) -> Iterator[str]:
            nonlocal left
            for part in document:
                yield part[:left]
                left -= min(left, len(part))
                if not left:
                    return

        for document in self.whole.documents():
            yield cut(document)
            if not left:
                return


def text_of(data: Sequence[str], column: str | None, characters: int | None) -> Text:
    """Return a text, or its first characters.

    Raises:
        InputError: if there is no such file.
    """
    text = Text(data, column)
    return text if characters is None else FirstPart(text, characters)


def prepare(
    settings: CompareSettings,
    folder: Path,
    progress: Progress,
    data: Sequence[str] = (),
    column: str | None = None,
    characters: int | None = None,
    table: OwnTask | None = None,
) -> Material:
    """Read the text, train a tokenizer and save it in the folder, and encode the text.

    Args:
        settings: the settings that all runs share.
        folder: the run's folder.
        progress: is told which files of ``data`` are read.
        data: the text's paths; none means Python's documentation.
        column: the text column of tables.
        characters: how many characters of the text to read; None for all.
        table: a labeled table, whose training rows are the text.

    Raises:
        InputError: if the text can't be read or is too short, or the folder holds results for other settings.
    """
    loaded = None if table is None else table.load()
    try:
        if table is None or loaded is None:
            text = text_of(data, column, characters)
            if data:
                progress.line(text.about_files)
        else:
            text = TableText(table, loaded)
            text = text if characters is None else FirstPart(text, characters)
        seen = look_at(text, folder / "cache")
        task = None if loaded is None else identity(loaded)
        settings = replace(settings, text=seen.summary.fingerprint, task=task)
        # Checked before anything in the folder changes.
        CompareResults.earlier(folder, settings=settings)
        encoded = open_or_encode(folder / "cache", text, seen, TokenizerChoice(None, settings.vocab_size))
        _check_enough(encoded.training, encoded.held_out, settings)
    except InputError as error:
        # Whoever gave a table gave no --data.
        raise InputError("train" if table and error.field == "data" else error.field, error.reason) from None
    write_atomically(folder / "tokenizer.json", encoded.tokenizer.backend_tokenizer.to_str())
    if characters is not None and seen.summary.characters < characters:
        characters = None
    source = text.source if characters is None else f"the first {characters:,} characters of {text.source}"
    facts = text_facts(source, seen.summary, encoded.counts)
    vocab_size = encoded.vocabulary.size
    rows = None
    if table is not None and loaded is not None:
        rows = prepare_rows(table, loaded, encoded.tokenizer, settings, vocab_size, folder / "cache")
    return Material(
        settings,
        encoded.training,
        HeldOut(encoded.held_out, HELD_OUT_RATE, vocab_size),
        vocab_size,
        CompareText(**asdict(facts), data=list(text.paths), column=text.column),
        characters,
        rows,
    )


def _check_enough(training: Stream, held_out: Stream, settings: CompareSettings) -> None:
    """Check that there is enough text for the longest length to judge.

    Raises:
        InputError: if there is too little.
    """
    longest = max(*settings.lengths, HeldOut.GROUP)
    if len(held_out) < longest or len(training) < longest:
        raise InputError(
            "data",
            f"too little text: {len(training)} training and {len(held_out)} held-out tokens, "
            f"expected at least {longest} of each to judge {longest} tokens at a time; give more text or "
            "a smaller `length`",
        )
