"""Prepare a comparison: read and encode the text, train its tokenizer, and check the methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ...data.corpus import Text
from ...data.encode import EncodedText, TokenizerChoice, open_or_encode
from ...data.fingerprint import SeenText, look_at
from ...data.glue import OwnTask
from ...data.masks import Batches, HeldOut
from ...data.streams import Stream
from ...errors import InputError
from ...files import write_atomically
from ...lab.training.model_options import about_method
from ...lab.training.text import text_facts
from ...models.blocks import parse_blocks
from ...positions import build_position, own_name
from .results import Budget, CompareResults, CompareSettings, CompareText
from .settings import Sizes
from .task import TableText, TaskRows, identity, prepare_rows


@dataclass(frozen=True)
class PreparedText:
    """The encoded text: its training and held-out streams with facts about it."""

    training: Stream
    held_out: Stream
    vocab_size: int
    facts: CompareText


@dataclass(frozen=True)
class CompareJob:
    """Everything that a comparison needs, already checked.

    Args:
        settings: the settings that all runs share.
        positions: the methods.
        seeds: each method is trained once with each seed.
        text: the prepared text.
        device: where to train.
        budget: what was chosen for a number of minutes; None if the steps were given.
        halving: leave out methods that are clearly worse, after each seed.
        rows: the labeled table to rank by; None ranks by held-out text.
    """

    settings: CompareSettings
    positions: Sequence[str]
    seeds: Sequence[int]
    text: PreparedText
    device: torch.device
    budget: Budget | None = None
    halving: bool = False
    rows: TaskRows | None = None

    def batches(self, seed: int) -> Batches:
        """Return the training batches of a seed, at full length. They are the same for every method."""
        sizes, text = self.settings, self.text
        return Batches(text.training, sizes.batch_size, sizes.length, sizes.mask_rate, text.vocab_size, seed)


@dataclass(frozen=True)
class TextSource:
    """Where the text is: paths (none means Python's documentation), and the text column of tables.

    With a labeled table, the text is that of its training rows.
    """

    data: Sequence[str] = ()
    column: str | None = None
    table: OwnTask | None = None


def prepare_job(
    source: TextSource, sizes: Sizes, positions: Sequence[str], seeds: Sequence[int], device: torch.device, out: Path
) -> CompareJob:
    """Read the text, train a tokenizer and save it in ``out``, and encode the text.

    Raises:
        InputError: if the text can't be read or is too short, or ``out`` holds results for other settings.
    """
    table = source.table
    data = None if table is None else table.load()
    text = Text(source.data, source.column) if table is None or data is None else TableText(table, data)
    try:
        seen = look_at(text, out / "cache")
        task = None if data is None else identity(data)
        settings = CompareSettings(**asdict(sizes), text=seen.summary.fingerprint, device=device.type, task=task)
        # Checked before anything in the folder changes.
        CompareResults.earlier(out, settings=settings)
        encoded = open_or_encode(out / "cache", text, seen, TokenizerChoice(None, sizes.vocab_size))
        prepared = prepare_text(text, seen, encoded, sizes, out)
    except InputError as error:
        # Whoever gave a table gave no --data.
        raise InputError("train" if table and error.field == "data" else error.field, error.reason) from None
    rows = None
    if table is not None and data is not None:
        rows = prepare_rows(table, data, encoded.tokenizer, sizes, prepared.vocab_size, out / "cache")
    return CompareJob(settings, positions, seeds, prepared, device, rows=rows)


def prepare_text(text: Text, seen: SeenText, encoded: EncodedText, sizes: Sizes, out: Path) -> PreparedText:
    """Save the tokenizer in ``out``, and return the encoded text with facts about it.

    Raises:
        InputError: if there is too little text for the longest length to judge.
    """
    longest = max(*sizes.lengths, HeldOut.GROUP)
    if len(encoded.held_out) < longest or len(encoded.training) < longest:
        raise InputError(
            "data",
            f"too little text: {len(encoded.training)} training and {len(encoded.held_out)} held-out tokens, "
            f"expected at least {longest} of each to judge {longest} tokens at a time; give more text or "
            "a smaller `length`",
        )
    write_atomically(out / "tokenizer.json", encoded.tokenizer.backend_tokenizer.to_str())
    facts = text_facts(text.source, seen.summary, encoded.counts)
    about = CompareText(**asdict(facts), data=list(text.paths), column=text.column)
    return PreparedText(encoded.training, encoded.held_out, encoded.vocabulary.size, about)


def check_positions(names: Sequence[str], sizes: Sizes) -> list[str]:
    """Return the methods to compare, each built once so that errors appear before any training.

    Raises:
        InputError: if a method is unknown, or does not fit these sizes.
    """
    chosen = list(dict.fromkeys(own_name("".join(name.split())) for name in names if name.strip()))
    if not chosen:
        raise InputError("positions", "expected at least one method, got none")
    blocks = parse_blocks(sizes.blocks)
    if sizes.decoder_layers != "0":
        blocks += parse_blocks(sizes.decoder_layers, "decoder_layers")
    layers = sum(block.layers * block.repeats for block in blocks)
    for name in chosen:
        try:
            with torch.device("meta"):  # where tables of any size take no memory
                build_position(
                    name,
                    hidden_size=sizes.hidden_size,
                    num_heads=sizes.num_heads,
                    num_layers=layers,
                    max_length=sizes.length,
                )
        except (ValueError, TypeError) as error:
            problem = about_method(error, "positions")
            known = problem.reason if name in problem.reason else f"{name!r} does not fit: {problem.reason}"
            raise InputError("positions", known) from None
    return chosen
