"""Table 1 of the TISA paper (Wennberg & Henter 2021), measured on the models of a finished `whereformer compare`.

`position_properties.py` measures; a threshold here decides each tick. A property is "open" if the measurement
does not decide it, and has an asterisk if the tick differs from the paper's.

Run: python benchmarks/properties.py FOLDER [--out FILE]
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import position_properties as measures
from benchmark import Benchmark, main
from rich.console import Console
from rich.table import Table

from whereformer import EncoderForMaskedLM, build_position
from whereformer.analysis.held_out import HeldOut
from whereformer.data.corpus import TextSource
from whereformer.data.encode import TokenizerChoice, open_or_encode
from whereformer.data.windows import HELD_OUT_RATE
from whereformer.errors import InputError
from whereformer.lab import small_encoders as encoders
from whereformer.recipes.compare import Compare, load
from whereformer.recipes.comparison_report import ComparisonResult

WINDOWS = 16
"""Windows of held-out text that measurements of a trained model use."""
MAX_RISE = 0.11
"""In nats. Longer text has more information about a masked token, so the loss has no reason to rise; the threshold is
above the difference between seeds. If a method is better than no positions by less than that, it has little to lose on
longer text. Then a loss that does not rise proves nothing, and the tick stays open."""
MIN_REACHED = 0.1
"""The gradient of one batch need not reach all, because a text may lack some offsets and some hidden units may be
off."""
MAX_SHARE, MAX_POWER = 0.01, 0.1
"""The share of the parameters of BERT-base's attention layers (28 million), and the power of the length."""
MAX_CHANGE = 1e-6
"""Rounding changes float64 by 1e-13, absolute positions change it by several percent."""
MIN_CURVE = 0.9

PROPERTIES = {
    "inductive": f"loss at 4 times the training length minus loss at the training length: at most {MAX_RISE} nats",
    "data-driven": f"positional parameters that the gradient of one batch reaches: at least {MIN_REACHED:.0%}",
    "parameter efficient": f"parameters at BERT-base's sizes, and the power of the length with which they grow: below "
    f"{MAX_SHARE:.0%} of the attention layers' parameters, without growth",
    "translation invariant": f"largest relative change of scores and outputs under a shift: at most {MAX_CHANGE:.0e}",
    "parallelizable": f"operations of a layer at {measures.LENGTHS[0]} and {measures.LENGTHS[1]} tokens: no growth",
    "interpretable": f"share of the effect on scores that a curve over offsets explains: at least {MIN_CURVE:.0%}",
}
"""The properties, and the measured number and the threshold of each."""
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
"""Table 1 of the paper, in the order of :data:`PROPERTIES`."""


class Tick(NamedTuple):
    """A property of a method: whether it has it, None if the measurement does not decide; and the measured number."""

    has_property: bool | None
    number: str

    def format(self, paper: str) -> str:
        """Return a word and the number; ``paper``: "y", "n", or "-" for a method that is not in the paper."""
        word = "open" if self.has_property is None else "yes" if self.has_property else "no"
        differs = (self.has_property, paper) in ((True, "n"), (False, "y"))
        return f"{word}{'*' * differs}\n{self.number}"


def inductive(runs: Mapping[int, ComparisonResult], baseline: Mapping[int, ComparisonResult], longest: int) -> Tick:
    """Decide whether a method reads text beyond the training length equally well, by medians over seeds.

    ``longest`` is the index of the score at four times that length.
    """
    scores = [run.scores[longest] for run in runs.values()]
    if any(isinstance(score, str) for score in scores):
        return Tick(False, "cannot")
    rise = statistics.median(float(score[0]) - run.loss for score, run in zip(scores, runs.values(), strict=True))
    gains = [baseline[seed].loss - run.loss for seed, run in runs.items() if seed in baseline]
    is_open = rise <= MAX_RISE and gains and statistics.median(gains) < MAX_RISE
    return Tick(None if is_open else rise <= MAX_RISE, f"{rise:+z.2f}")


def measure(
    recipe: Compare, runs: Mapping[str, Mapping[int, ComparisonResult]], held_out: HeldOut, name: str
) -> list[Tick]:
    """Measure a method's properties: its losses with every seed, and the model of the first."""
    seed = min(runs[name])
    trained = EncoderForMaskedLM.from_pretrained(recipe.model_folder(name, seed))
    untrained: Any = encoders.build(recipe.config(name, trained.config.vocab_size), seed).eval()
    batch = next(held_out.windows(recipe.length, WINDOWS * recipe.length))
    is_full = batch["input_ids"][:, -1] != held_out.vocabulary.pad
    inputs, labels = batch["input_ids"][is_full], batch["labels"][is_full]
    method = trained.config.position  # a row's name may have "+sinks" besides
    sizes = {"hidden_size": recipe.hidden_size, "num_heads": recipe.num_heads}
    sizes["num_layers"] = trained.config.num_hidden_layers
    short, long = (
        measures.count_operations(build_position(method, **sizes, max_length=length), length)
        for length in measures.LENGTHS
    )
    reached, total = measures.reached_parameters(trained, inputs, labels)
    count, power = measures.parameter_growth(method, sinks=trained.config.sinks)
    # Half the length, so that there is room to shift even if the method has a last position.
    moved = [measures.shift_change(model.encoder, inputs[:, : recipe.length // 2]) for model in (untrained, trained)]
    change = float("inf") if None in moved else max(change for change in moved if change is not None)
    share = measures.curve_share(trained.encoder, inputs)
    small = count < MAX_SHARE * measures.ATTENTION and power <= MAX_POWER
    return [
        inductive(runs[name], runs.get(encoders.BASELINE, {}), recipe.eval_lengths.index(4 * recipe.length)),
        Tick(0 < total <= reached / MIN_REACHED, f"{reached:,}/{total:,}"),
        Tick(small, f"{count:,}" + f" n^{power:.1f}" * (power > MAX_POWER)),
        Tick(change <= MAX_CHANGE, f"{change:.2g}"),
        Tick(long <= short, f"{short:,}, {long:,}"),
        Tick(None if share is None else share >= MIN_CURVE, "no effect" if share is None else f"{share:.0%}"),
    ]


@dataclass(frozen=True, kw_only=True)
class Properties(Benchmark):
    """Measure Table 1 of the TISA paper on the models of a finished comparison of masked language models."""

    FLAGS: ClassVar = {"folder": "FOLDER"}

    folder: Path
    """The folder of `whereformer compare`."""
    out: Path = Path("runs/properties.json")

    def measure(self, console: Console) -> dict[str, Any]:
        recipe, runs = load(self.folder)
        if recipe.causal or 4 * recipe.length not in recipe.eval_lengths:
            raise InputError("folder", f"expected masked language models, with losses at {4 * recipe.length} tokens")
        text = TextSource(recipe.data, recipe.column, characters=recipe.characters)
        choice = TokenizerChoice(None, recipe.vocab_size)
        encoded = open_or_encode(recipe.out / "cache", text, choice, lambda version: True)  # as it was for the models
        held_out = HeldOut(encoded.held_out, HELD_OUT_RATE, encoded.vocabulary)
        table, results = Table("position", *PROPERTIES), {}
        for name in [name for name in runs if name != encoders.BASELINE]:
            ticks = measure(recipe, runs, held_out, name)
            results[name] = dict(zip(PROPERTIES, ticks, strict=True))
            letters = PAPER.get(name, "-" * len(ticks))
            table.add_row(name, *(tick.format(letter) for tick, letter in zip(ticks, letters, strict=True)))
        console.print(table)
        for name, meaning in PROPERTIES.items():
            console.print(f"{name}: {meaning}", highlight=False)
        return {"settings": self.settings("folder"), "properties": results}


if __name__ == "__main__":
    main(Properties)
