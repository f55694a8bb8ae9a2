"""Load a finished comparison with its trained models and its held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from ...data.corpus import FirstPart, Pages, Text
from ...data.masks import HELD_OUT_RATE, HeldOut
from ...data.tokenizers import token_stream
from ...errors import InputError
from ...lab.encoders import BASELINE
from ...lab.training.trainer import quiet_transformers
from ...models import EncoderForMaskedLM, load_pretrained
from ..compare.models import model_folder, model_problem
from ..compare.results import CompareResults


@dataclass(frozen=True)
class Comparison:
    """A finished comparison: its folder, its results, and masked text that its models were not trained on."""

    folder: Path
    results: CompareResults
    held_out: HeldOut

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
    """Load a folder that ``whereformer compare`` wrote, and choose the methods to judge: by default all with positions.

    Raises:
        InputError: if the folder is something else, holds a funnel or lacks a method, or its text has changed.
    """
    try:
        results = CompareResults.load(folder / "results.json")
    except InputError:
        reason = f"{folder / 'results.json'} is missing, or not a result of whereformer compare"
        raise InputError("results", reason) from None
    settings = results.settings
    if results.task is not None:
        raise InputError("results", f"expected a comparison on a text, got one on a labeled table in {folder}")
    if settings.causal:
        raise InputError("results", f"expected masked language models, got causal ones in {folder}")
    if 4 * settings.length not in settings.lengths:
        reason = f"expected losses at 4 times the training length, got {settings.lengths} tokens in {folder}"
        raise InputError("results", reason)
    if "-" in settings.blocks:
        raise InputError("results", f"expected encoders of one block, got blocks {settings.blocks!r}")
    judged = [name for name in results.runs if name != BASELINE]
    names = judged if positions is None else list(positions)
    for name in names:
        if name not in judged:
            has = ", ".join(judged) or "none"
            raise InputError("positions", f"{folder} has no {name!r} to judge; it has {has}")
    if not names:
        raise InputError("results", f"{folder} has no method besides the baseline")
    return Comparison(folder, results, _held_out(folder, results)), names


def _held_out(folder: Path, results: CompareResults) -> HeldOut:
    """Read the held-out text of a comparison again."""
    try:
        text = Text(results.text.data, results.text.column)
        text = text if results.characters is None else FirstPart(text, results.characters)
    except InputError as error:
        raise InputError("results", f"the text of {folder} can't be read again ({error.reason})") from None
    if text.fingerprint != results.settings.text:
        raise InputError("results", f"the text of {folder} has changed; run whereformer compare again")
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise InputError("results", f"cannot read {folder / 'tokenizer.json'} ({error})") from None
    return HeldOut(token_stream(tokenizer, Pages(text, held_out=True)), HELD_OUT_RATE, tokenizer.get_vocab_size())
