"""The options and the settings of a comparison. Importing them is fast, so that --help is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from ...errors import InputError, shown
from ...lab.options import (
    MOST_COUNT,
    MOST_JOBS,
    MOST_RATE,
    MOST_SEED,
    MOST_SEEDS,
    MOST_SIZE,
    Jobs,
    TextOptions,
    check_positive,
    check_range,
    find_device,
    listed,
    listed_numbers,
)
from ...lab.study import Study

if TYPE_CHECKING:
    from .run import CompareJob

DEFAULT_POSITIONS = "none,sinusoidal,learned,rope,t5,shaw,tisa,learned+tisa"
QUICK_POSITIONS = "none,learned,rope,tisa"
DEFAULT_STEPS, QUICK_STEPS = 1800, 400
QUICK_CHARACTERS = 3_000_000
"""The characters that a quick comparison reads, from the beginning of the text."""
LENGTH_FACTORS = (1, 2, 4)
"""Held-out text is read in windows of these multiples of the training length, if nothing else is said."""
MOST_LENGTHS = 5
"""The most lengths to judge at."""


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """What decides a result besides method and seed. Results of different settings are never mixed.

    The fields are the options of :class:`Compare`, and:

    Args:
        lengths: held-out text is read in windows of these numbers of tokens; the first is ``length``.
        text: the text's fingerprint; empty until the text has been read.
        device: the kind of device, such as "cpu".
    """

    blocks: str
    decoder_layers: str
    length: int
    steps: int
    batch_size: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    mask_rate: float
    learning_rate: float
    rate_factors: tuple[float, ...]
    preset: str | None = None
    lengths: tuple[int, ...] = ()
    text: str = ""
    device: str = "cpu"
    causal: bool = False

    def __post_init__(self) -> None:
        if not self.lengths:
            object.__setattr__(self, "lengths", tuple(factor * self.length for factor in LENGTH_FACTORS))


@dataclass(frozen=True, kw_only=True)
class Compare(Jobs, TextOptions, Study):
    """Which position method suits your text? Trains the same small encoder once per method and compares them.

    Without --data, the text is the documentation that comes with Python: about 2 MB, and nothing is downloaded. All
    methods start from the same weights and see the same batches and masks, so the models differ only in their position
    method.

    Writes report.html (open it in a browser), results.json and the trained models (models/METHOD-SEED, for
    EncoderForMaskedLM.from_pretrained, or with --causal for EncoderForCausalLM). After an interruption, the same
    command continues with the missing runs.
    """

    FLAGS: ClassVar = {"num_attention_heads": "--num-heads"}

    positions: str | None = None
    """Methods to compare, separated by commas. "a+b" uses both at once; "all" means every method for text. Default:
    none, sinusoidal, learned, rope, t5, shaw, tisa, learned+tisa (with --quick: none, learned, rope, tisa)."""

    out: Path = Path("runs/compare")
    """Folder for the results."""

    plugin: Path | None = None
    """Your own Python file that registers position methods, to compare them too."""

    quick: bool = False
    """Take a first look in a minute or two: fewer methods and steps, and the first 3 million characters of the text.
    Too short to reveal small differences."""

    minutes: float | None = None
    """Time for the whole comparison, instead of --steps. A short measurement decides how many steps fit into it, as
    many for every method. Reading a large text may take longer than planned."""

    preset: Literal["bert", "albert", "electra", "funnel", "modernbert"] | None = None
    """Build the encoder like a published model: its norms, activation, biases, windows, and shared or pooled layers,
    but in a small size. Default: BERT with pre-layer normalization."""

    blocks: str | None = None
    """Layers: "4" is four layers, "1x4" one layer used four times, and "2-2" a funnel that halves the sequence between
    its two blocks. Default: the preset's, or 4."""

    decoder_layers: str | None = None
    """Layers at full length after the blocks of a funnel. Default: the preset's, or 1 for a funnel, otherwise 0."""

    length: int = 64
    """Tokens in a training window; the first 40% of the steps use windows of 8 tokens. Methods are ranked at this
    length."""

    lengths: str | None = None
    """More lengths at which to evaluate every method on held-out text. Default: two and four times `length`."""

    steps: int | None = None
    """Training steps of each method. Default: 1800, or 400 for a quick comparison."""

    seeds: int | None = None
    """How many seeds to repeat everything with. With several, the table shows medians and ranges. Default: 1, or with
    --minutes up to 3 if there is time."""

    seed: int = 0
    """The first seed."""

    batch_size: int = 16
    """Training windows in a step. While windows are shorter, a step has more of them."""

    hidden_size: int = 64
    """Width of the encoder."""

    num_heads: int = 2
    """Number of attention heads. It must divide the width."""

    vocab_size: int = 1024
    """Size of the WordPiece vocabulary, which is learned from the text."""

    causal: bool = False
    """Train causal models, which predict every token from those before it, instead of masked ones."""

    mask_rate: float = 0.4
    """Share of tokens that are masked in training. In held-out text, 15% always are. Causal models mask none."""

    learning_rate: float = 8e-3
    """Peak learning rate."""

    rate_factors: str = "0.5,1,2"
    """Multiples of the learning rate to try for each method, in short runs. A method keeps the usual rate unless
    another is clearly better. "1" skips this search."""

    def job(self) -> CompareJob:
        self._check()
        lengths, rate_factors = self._lengths(), self._rate_factors()

        # What somebody may have misspelled is looked at before the imports that take seconds.
        from ...data.corpus import Text
        from ...lab.methods import known_methods
        from ...lab.plugins import load_plugin

        load_plugin(self.plugin)
        usual = QUICK_POSITIONS if self.quick else DEFAULT_POSITIONS
        positions = known_methods(usual if self.positions is None else self.positions)
        device = find_device(self.device)
        text = Text(self.data, self.column, characters=QUICK_CHARACTERS if self.quick else None)

        from ...lab.jobs import number_of_jobs
        from .models import check_positions, layers_of
        from .run import CompareJob

        blocks, decoder_layers = layers_of(self.preset, self.blocks, self.decoder_layers)
        settings = CompareSettings(
            blocks=blocks,
            decoder_layers=decoder_layers,
            length=self.length,
            steps=self.steps or (QUICK_STEPS if self.quick else DEFAULT_STEPS),
            batch_size=self.batch_size,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            vocab_size=self.vocab_size,
            mask_rate=self.mask_rate,
            causal=self.causal,
            learning_rate=self.learning_rate,
            rate_factors=rate_factors,
            preset=self.preset,
            lengths=lengths,
            device=device.type,
        )
        check_positions(positions, settings)
        return CompareJob(
            settings=settings,
            positions=positions,
            seeds=range(self.seed, self.seed + (self.seeds or 1)),
            device=device,
            jobs=number_of_jobs(self.jobs, device, small=True),
            text=text,
            minutes=self.minutes,
            plugin=self.plugin,
            free_seeds=self.seeds is None,
        )

    def _check(self) -> None:
        if self.minutes is not None and self.steps is not None:
            raise InputError("minutes", "expected either `minutes` or `steps`, got both")
        check_range(self, jobs=(1, MOST_JOBS), steps=(1, MOST_COUNT), length=(8, MOST_SIZE), vocab_size=(64, MOST_SIZE))
        check_range(self, **dict.fromkeys(("batch_size", "hidden_size", "num_heads"), (1, MOST_SIZE)))
        check_range(self, seeds=(1, MOST_SEEDS))
        check_range(self, seed=(0, MOST_SEED + 1 - (self.seeds or 1)))
        check_positive(self, "minutes", "learning_rate")
        if not 0 < self.mask_rate < 1:
            raise InputError("mask_rate", f"expected a share between 0 and 1, got {self.mask_rate}")

    def _lengths(self) -> tuple[int, ...]:
        """Return the lengths to judge at, the training length first; none stand for the default."""
        if self.lengths is None:
            return ()
        found = listed_numbers("lengths", self.lengths, self.length, MOST_SIZE)
        if len(found) > MOST_LENGTHS:
            raise InputError("lengths", f"expected at most {MOST_LENGTHS}, got {shown(self.lengths)}")
        return tuple(sorted({self.length, *found}))

    def _rate_factors(self) -> tuple[float, ...]:
        found = []
        for part in listed("rate_factors", self.rate_factors):
            try:
                found.append(float(part))
            except ValueError:
                found.append(math.nan)
            if not 0 < found[-1] * self.learning_rate <= MOST_RATE:
                expected = f"positive numbers such as '0.5,1,2' and learning rates of at most {MOST_RATE:g}"
                raise InputError("rate_factors", f"expected {expected}, got {shown(part)}")
        return tuple(dict.fromkeys(found))
