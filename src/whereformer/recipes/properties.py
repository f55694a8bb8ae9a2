"""Table 1 of the TISA paper (Wennberg & Henter 2021), measured on the models of a finished comparison."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..analysis import properties as measure
from ..analysis.held_out import HeldOut
from ..data.corpus import TextSource
from ..data.encode import TokenizerChoice, open_or_encode
from ..data.windows import HELD_OUT_RATE
from ..errors import InputError
from ..lab import methods
from ..lab import small_encoders as encoders
from ..lab.loading import quiet_transformers
from ..lab.run import HASHES, RECORDS, VERSION, read_records
from ..lab.sheet import Cell, Column, Sheet
from ..models import EncoderForMaskedLM
from ..positions import build_position
from .compare import Compare, load
from .comparison_report import ComparisonResult

WINDOWS = 16
"""Windows of held-out text that measurements of a trained model use."""
INDUCTIVE_RISE = 0.11
"""In nats. Longer text has more information about a masked token, so the loss has no reason to rise; the threshold is
above the difference between seeds. If a method is better than no positions by less than that, it has little to lose on
longer text. Then a loss that does not rise proves nothing, and the tick stays open."""
REACHED_SHARE = 0.1
"""The gradient of one batch need not reach all, because a text may lack some offsets and some hidden units may be
off."""
ATTENTION_SHARE, LENGTH_POWER = 0.01, 0.1
"""The share of the parameters of BERT-base's attention layers (28 million), and the power of the length."""
INVARIANT_CHANGE = 1e-6
"""Rounding changes float64 by 1e-13, absolute positions change it by several percent."""
CURVE_SHARE = 0.9

MEANINGS = {
    "inductive": f"loss at 4 times the training length minus loss at the training length, in nats; yes up to "
    f"{INDUCTIVE_RISE}, open if the method gains less than that over no positions",
    "data-driven": f"positional parameters that the gradient of one batch reaches; yes from {REACHED_SHARE:.0%}",
    "parameter efficient": f"positional parameters at BERT-base's sizes, and the power of the length n with which they "
    f"grow; yes below {ATTENTION_SHARE:.0%} of the attention layers' parameters and without growth",
    "translation invariant": f"largest change of a score or output when all positions shift, relative to their "
    f"root mean square; yes up to {INVARIANT_CHANGE:.0e}",
    "parallelizable": f"operations of a layer's forward, at {measure.LENGTHS[0]} and at {measure.LENGTHS[1]} tokens; "
    "yes if their number does not grow",
    "interpretable": f"share of the method's effect on scores that a curve over offsets explains; yes from "
    f"{CURVE_SHARE:.0%}",
}
"""The properties, and the meaning of each number."""

PAPER = {
    "sinusoidal": "ynynyn",
    "learned": "nynnyn",
    "shaw": "nyyynn",
    "t5": "nyyyyy",
    "floater": "yyynnn",
    "synthesizer": "nyynyn",
    "tupe": "nynnyn",
    "rope": "ynyyyn",
    "tisa": "yyyyyy",
}
"""Table 1 of the paper, in the order of :data:`MEANINGS`."""


@dataclass(frozen=True)
class PropertyResult:
    """One property of one method."""

    has_property: bool | None  # whether the method has the property; None if the measurement does not decide it
    number: str  # the measured number
    note: str = ""  # why it could not be measured or decided

    @property
    def word(self) -> str:
        """The result in a word: yes, no or open."""
        return "open" if self.has_property is None else "yes" if self.has_property else "no"


Ticks = Mapping[str, PropertyResult]
"""The results of a method, by property."""


def build_table(folder: Path, pattern: str | None, track: Callable[[list[str]], Iterable[str]]) -> Sheet:
    """Measure the properties of the methods of a comparison.

    Args:
        folder: the folder of a finished ``whereformer compare``, with its models.
        pattern: only methods whose name matches.
        track: yields the names that are passed to it, and shows the progress.

    Raises:
        InputError: if the folder is not a comparison, or has no method that matches, or its text has changed.
    """
    try:
        recipe, runs = load(folder)
    except InputError as error:
        raise InputError("measure", error.reason) from None
    pooled = "-" in recipe.config(encoders.BASELINE, recipe.vocab_size).blocks
    if recipe.causal or pooled or 4 * recipe.length not in recipe.eval_lengths:
        expected = f"masked language models of one block, with losses at {4 * recipe.length} tokens"
        raise InputError("measure", f"expected {expected} in {folder}")
    names = [name for name in runs if name != encoders.BASELINE and (pattern is None or fnmatchcase(name, pattern))]
    if not names:
        raise InputError("measure", f"no method with positions in {folder} matches; it has {', '.join(runs)}")
    held_out = _held_out(recipe)
    return sheet({name: _measure(recipe, runs, held_out, name) for name in track(names)})


def _held_out(recipe: Compare) -> HeldOut:
    """Read the held-out text of a comparison again."""
    try:
        text = TextSource(recipe.data, recipe.column, characters=recipe.characters)
    except InputError as error:
        raise InputError("measure", f"the text of {recipe.out} can't be read again ({error.reason})") from None
    options, _, _ = read_records(recipe.out / RECORDS)
    if text.fingerprint != options[HASHES].get("text"):
        raise InputError("measure", f"the text of {recipe.out} has changed; run whereformer compare again")
    version = options[HASHES].get(f"{VERSION}plugin")
    if version is not None and f"{methods.PLUGIN}{version}" not in sys.modules:
        raise InputError("measure", f"{recipe.out} has models from a plugin; pass that file, unchanged, as `plugin`")
    choice = TokenizerChoice(None, recipe.vocab_size)
    encoded = open_or_encode(recipe.out / "cache", text, choice, keeps=lambda version: True)  # as it was for the models
    return HeldOut(encoded.held_out, HELD_OUT_RATE, encoded.vocabulary)


def _measure(
    recipe: Compare, runs: Mapping[str, Mapping[int, ComparisonResult]], held_out: HeldOut, name: str
) -> Ticks:
    """Measure a method: its losses with every seed, and the model of the first."""
    seed = min(runs[name])
    try:
        methods.resolve_methods([name])
    except InputError as error:
        raise InputError("measure", f"{error.reason}; `plugin` names the file that registers it") from None
    if (problem := recipe.find_problem((seed, name), runs[name][seed])) is not None:
        reason = f"{recipe.out} has no trained model of {name!r} ({problem}); run the same whereformer compare again"
        raise InputError("measure", reason)
    with quiet_transformers():
        trained = EncoderForMaskedLM.from_pretrained(recipe.model_folder(name, seed))
    untrained: Any = encoders.build(recipe.config(name, trained.config.vocab_size), seed).eval()
    batch = next(held_out.windows(recipe.length, WINDOWS * recipe.length))
    is_full = batch["input_ids"][:, -1] != held_out.vocabulary.pad
    inputs, labels = batch["input_ids"][is_full], batch["labels"][is_full]
    # Half the length, so that there is room to shift even if the method has a last position.
    short = inputs[:, : recipe.length // 2]
    sizes = {"hidden_size": recipe.hidden_size, "num_heads": recipe.num_heads}
    sizes["num_layers"] = trained.config.num_hidden_layers
    method = trained.config.position  # a row's name may have "+sinks" besides
    counts = [
        measure.count_operations(build_position(method, **sizes, max_length=length), length)
        for length in measure.LENGTHS
    ]
    ticks = (
        inductive(runs[name], runs.get(encoders.BASELINE, {}), recipe.eval_lengths.index(4 * recipe.length)),
        data_driven(*measure.reached_parameters(trained, inputs, labels)),
        parameter_efficient(*measure.parameter_growth(method, sinks=trained.config.sinks)),
        translation_invariant([measure.shift_change(model.encoder, short) for model in (untrained, trained)]),
        parallelizable(*counts),
        interpretable(measure.curve_share(trained.encoder, inputs)),
    )
    return dict(zip(MEANINGS, ticks, strict=True))


def inductive(
    runs: Mapping[int, ComparisonResult], baseline: Mapping[int, ComparisonResult], longest: int
) -> PropertyResult:
    """Decide whether a method reads text beyond the training length equally well, by medians over seeds.

    ``longest`` is the index of the score at four times that length.
    """
    rises, gains = [], []
    for seed, run in runs.items():
        if isinstance(run.scores[longest], str):
            return PropertyResult(False, "n/a", run.scores[longest])
        rises.append(run.scores[longest][0] - run.loss)
        if seed in baseline:
            gains.append(baseline[seed].loss - run.loss)
    rise = statistics.median(rises)
    number = f"{rise:+z.2f}"
    if rise <= INDUCTIVE_RISE and gains and statistics.median(gains) < INDUCTIVE_RISE:
        gain = statistics.median(gains)
        comparison = f"{abs(gain):.2f} nats {'better' if gain >= 0 else 'worse'} than no positions"
        return PropertyResult(None, number, f"after this training it is {comparison}, so it has little to lose")
    return PropertyResult(rise <= INDUCTIVE_RISE, number)


def data_driven(reached: int, total: int) -> PropertyResult:
    """Decide whether gradients reach the parameters."""
    number = f"{short_count(reached)}/{short_count(total)}" if total else "0"
    return PropertyResult(total > 0 and reached >= REACHED_SHARE * total, number)


def parameter_efficient(count: int, power: float) -> PropertyResult:
    """Decide whether there are few parameters, whose number does not grow with the length."""
    grows = power > LENGTH_POWER
    number = short_count(count) + (f" n^{power:.1f}" if grows else "")
    return PropertyResult(count < ATTENTION_SHARE * measure.ATTENTION and not grows, number)


def translation_invariant(changes: Sequence[float | None]) -> PropertyResult:
    """Decide whether a shift leaves scores and output unchanged, of an untrained and of the trained model."""
    if None in changes:
        return PropertyResult(False, "not finite")
    largest = max(change for change in changes if change is not None)
    number = f"{largest:.2g}" if largest == 0 or largest >= 1e-3 else f"{largest:.0e}"
    return PropertyResult(largest <= INVARIANT_CHANGE, number)


def parallelizable(short: int, long: int) -> PropertyResult:
    """Decide whether the longer text needs no more operations."""
    return PropertyResult(long <= short, f"{short:,}, {long:,}")


def interpretable(share: float | None) -> PropertyResult:
    """Decide whether the effect on scores is a curve over offsets."""
    if share is None:
        return PropertyResult(None, "no effect", "it does not change scores")
    return PropertyResult(share >= CURVE_SHARE, f"{share:.0%}")


def short_count(number: int) -> str:
    """Format a count in about four characters: 512, 5.5k, 394k, 37.7M."""
    for unit, size in (("M", 10**6), ("k", 10**3)):
        if number >= size:
            digits = 1 if number < 100 * size else 0
            return f"{number / size:.{digits}f}{unit}"
    return str(number)


def sheet(table: Mapping[str, Ticks]) -> Sheet:
    """Return the table of results, each above its number."""
    rows, notes, starred = [], [], False
    for position, ticks in table.items():
        cells = []
        for (name, tick), letter in zip(ticks.items(), PAPER.get(position, "-" * len(ticks)), strict=True):
            differs = (tick.has_property, letter) in ((True, "n"), (False, "y"))
            starred |= differs
            cells.append(Cell(tick.word + "*" * differs, tick.number))
            if tick.note:
                notes.append(f"{position}, {name}: {tick.note}")
        rows.append([Cell(position), *cells])
    return Sheet.of(
        "Table 1 of the TISA paper, measured",
        [
            Column("position", wraps=True),
            *(Column(word, detail) for word, _, detail in (name.partition(" ") for name in MEANINGS)),
        ],
        rows,
        notes=(
            *(f"{name}: {meaning}" for name, meaning in MEANINGS.items()),
            *notes,
            *(["*: differs from the paper"] if starred else []),
        ),
    )
