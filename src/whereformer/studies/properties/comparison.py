"""Load a finished comparison with its trained models and its held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from ...data.corpus import Pages, Text
from ...data.fingerprint import look_at
from ...data.masks import HELD_OUT_RATE, HeldOut
from ...data.tokenizers import token_stream
from ...errors import InputError
from ...lab.training.trainer import quiet_transformers
from ...models import EncoderForMaskedLM, load_pretrained
from ..compare.models import model_folder, model_problem
from ..compare.results import BASELINE, CompareResults
from ..compare.settings import Sizes


@dataclass(frozen=True)
class Comparison:
    """A finished comparison: its folder, its results, and the text that its models were judged on.

    Args:
        folder: the folder that holds ``models/``.
        results: the results of ``whereformer compare``.
        held_out: masked text that the models were not trained on.
    """

    folder: Path
    results: CompareResults
    held_out: HeldOut

    @property
    def positions(self) -> list[str]:
        """The methods that can be judged, which are all but the baseline."""
        return [name for name in self.results.runs if name != BASELINE]

    def seed(self, position: str) -> int:
        """Return the seed whose model is measured, which is the first."""
        return min(self.results.runs[position])

    def model(self, position: str) -> EncoderForMaskedLM:
        """Load the trained model of a method.

        Raises:
            InputError: if it is not there, or not as the comparison saved it.
        """
        seed = self.seed(position)
        folder = model_folder(self.folder, position, seed)
        if (problem := model_problem(self.folder, self.results.settings, position, seed)) is not None:
            raise InputError(
                "results",
                f"{self.folder} has no trained model of {position!r} ({folder}: {problem}); "
                "run the same whereformer compare as before to train it again",
            )
        try:
            with quiet_transformers():
                model = load_pretrained(folder, model_class=EncoderForMaskedLM)
        except (OSError, ValueError, TypeError) as error:
            raise InputError("results", f"the model in {folder} can't be read ({error})") from None
        assert isinstance(model, EncoderForMaskedLM)
        return model


def load_comparison(folder: Path, positions: Sequence[str] | None) -> tuple[Comparison, list[str]]:
    """Load a folder that ``whereformer compare`` wrote, and choose the methods to judge.

    Args:
        folder: the command's ``--out`` folder.
        positions: the methods; None for all but the baseline.

    Raises:
        InputError: if the folder is something else, holds a funnel or lacks a method, or its text has changed.
    """
    path = folder / "results.json"
    try:
        results = CompareResults.load(path)
    except InputError:
        raise InputError("results", f"{path} is missing, or not a result of whereformer compare") from None
    if results.task is not None:
        raise InputError("results", f"expected a comparison on a text, got one on a labeled table in {folder}")
    if 4 * results.settings.length not in results.settings.lengths:
        reason = f"expected losses at 4 times the training length, got {results.settings.lengths} tokens in {folder}"
        raise InputError("results", reason)
    check_one_block(results.settings, "results")
    comparison = Comparison(folder, results, _held_out(folder, results))
    names = comparison.positions if positions is None else list(positions)
    for name in names:
        if name not in comparison.positions:
            raise InputError(
                "positions", f"{folder} has no {name!r} to judge; it has {', '.join(comparison.positions) or 'none'}"
            )
    if not names:
        raise InputError("results", f"{folder} has no method besides the baseline")
    return comparison, names


def check_one_block(sizes: Sizes, field: str) -> None:
    """Check that the encoder does not pool.

    Raises:
        InputError: if it does; it names ``field``.
    """
    if "-" in sizes.blocks:
        raise InputError(field, f"expected encoders of one block, got blocks {sizes.blocks!r}")


def _held_out(folder: Path, results: CompareResults) -> HeldOut:
    """Read the held-out text of a comparison again."""
    try:
        text = Text(results.text.data, results.text.column)
        seen = look_at(text, folder / "cache")
    except InputError as error:
        raise InputError("results", f"the text of {folder} can't be read again ({error.reason})") from None
    if seen.summary.fingerprint != results.settings.text:
        raise InputError("results", f"the text of {folder} has changed; run whereformer compare again")
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise InputError("results", f"cannot read {folder / 'tokenizer.json'} ({error})") from None
    stream = token_stream(tokenizer, Pages(text, held_out=True))
    return HeldOut(stream, HELD_OUT_RATE, tokenizer.get_vocab_size())
