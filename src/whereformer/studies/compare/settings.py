"""The settings of a comparison. Importing them is fast, so that --help is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from ...errors import InputError, shown
from ...lab.options import (
    MOST_COUNT,
    MOST_RATE,
    MOST_SEED,
    MOST_SEEDS,
    MOST_SIZE,
    check_positive,
    check_range,
    listed,
    listed_numbers,
)

LENGTH_FACTORS = (1, 2, 4)
"""Held-out text is read in windows of these multiples of the training length, if nothing else is said."""
MOST_LENGTHS = 5
"""The most lengths to judge at, which is as many as a terminal has room for."""


@dataclass(frozen=True)
class Sizes:
    """Everything that decides a result besides text, method and seed. Results of different sizes are never mixed.

    Args:
        blocks: layers, as in ``EncoderConfig.blocks``.
        decoder_layers: full-length layers after pooled blocks, as in ``EncoderConfig.decoder_layers``.
        length: tokens per training window, after shorter ones (``window_lengths``).
        steps: training steps.
        batch_size: windows per step; of shorter windows there are more.
        hidden_size, num_heads: width of the encoder and number of its heads.
        vocab_size: size of the WordPiece vocabulary.
        mask_rate: share of tokens that are masked in training; in held-out text it is always 15%.
        learning_rate: the peak, after a linear warm-up over a tenth of the steps; a linear decay to zero follows.
        rate_factors: what the learning rate is multiplied by, to find the best for each method.
        preset: the encoder's architecture, a name in ``whereformer.models.presets.PRESETS``; None is a BERT that
            normalizes before its layers.
        lengths: held-out text is read in windows of these numbers of tokens; the first is ``length``.
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
    preset: str | None = field(default=None, kw_only=True)
    lengths: tuple[int, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if not self.lengths:
            object.__setattr__(self, "lengths", tuple(factor * self.length for factor in LENGTH_FACTORS))


@dataclass(frozen=True)
class CompareTraining:
    """The encoder that is trained with every method, and how it is trained."""

    preset: Literal["bert", "albert", "electra", "funnel", "modernbert", "neobert"] | None = None
    """Norms, activation, biases and windows of a published model, and how its layers are shared or pooled. Sizes are
    not the published ones, and positions are what is compared. Default: a BERT that normalizes before its layers."""

    blocks: str | None = None
    """Layers: "4" is four layers, "1x4" one layer used four times, and "2-2" a funnel that halves the sequence between
    its two blocks. Default: the preset's, or 4."""

    decoder_layers: str | None = None
    """Layers at full length after the blocks of a funnel. Default: the preset's, or 1 for a funnel, otherwise 0."""

    length: int = 64
    """Tokens in a training window; the first 40% of the steps have windows of 8. Methods are ranked by held-out text
    at this length."""

    lengths: str | None = None
    """Longer windows of held-out text to judge every method at, too. Default: two and four times `length`."""

    steps: int | None = None
    """Training steps of each method. Default: 1800, or 400 for a quick comparison."""

    seeds: int | None = None
    """Number of seeds to repeat everything with. With several, the table shows medians and ranges. Default: 1; with
    --train, 3; with --minutes, up to 3 if there is time, and methods that are clearly worse are left out after a
    seed."""

    seed: int = 0
    """The first seed."""

    batch_size: int = 16
    """Windows in a training step. Of shorter ones, a step has more."""

    hidden_size: int = 64
    """Width of the encoder."""

    num_heads: int = 2
    """Number of attention heads. It must divide the width."""

    vocab_size: int = 1024
    """Size of the WordPiece vocabulary, which is learned from the text."""

    mask_rate: float = 0.4
    """Share of tokens that are masked in training. In held-out text it is always 15%."""

    learning_rate: float = 8e-3
    """Peak of the learning rate."""

    rate_factors: str = "0.5,1,2"
    """What the learning rate is multiplied by: each method tries them in short trainings, and takes one that is
    clearly better than the usual one. "1" skips this search."""

    @property
    def all_seeds(self) -> range:
        """Every seed to train with, which is one by default."""
        return self.seeds_from(self.seeds or 1)

    def seeds_from(self, count: int) -> range:
        """Return ``count`` seeds."""
        return range(self.seed, self.seed + count)

    def checked(self) -> CompareTraining:
        """Check the settings and return them, with the defaults of ``blocks`` and ``decoder_layers`` in place of None.

        Raises:
            InputError: if a field is out of range; it names the field.
        """
        from ...models import EncoderConfig
        from ...models.presets import PRESETS

        check_range(self, length=(8, MOST_SIZE), vocab_size=(64, MOST_SIZE), steps=(1, MOST_COUNT))
        check_range(self, **dict.fromkeys(("batch_size", "hidden_size", "num_heads"), (1, MOST_SIZE)))
        check_range(self, seeds=(1, MOST_SEEDS))
        check_range(self, seed=(0, MOST_SEED + 1 - (self.seeds or 1)))
        if self.hidden_size % self.num_heads:
            raise InputError("num_heads", f"{self.num_heads} heads do not divide hidden_size {self.hidden_size}")
        if not 0 < self.mask_rate < 1:
            raise InputError("mask_rate", f"expected a share between 0 and 1, got {self.mask_rate}")
        check_positive(self, "learning_rate")
        self._rate_factors()
        self._lengths()
        preset = {} if self.preset is None else PRESETS[self.preset]
        blocks = preset.get("blocks", "4") if self.blocks is None else self.blocks
        decoder_layers = self.decoder_layers
        if decoder_layers is None:
            decoder_layers = preset.get("decoder_layers", "1") if "-" in blocks else "0"
        config = EncoderConfig.preset(self.preset or "bert", blocks=blocks, decoder_layers=decoder_layers)
        config.require_full_length()
        return dataclasses.replace(self, blocks=blocks, decoder_layers=decoder_layers)

    def sizes(self, default_steps: int) -> Sizes:
        """Return the sizes of settings that are checked, with ``default_steps`` if ``steps`` is None."""
        assert self.blocks is not None
        assert self.decoder_layers is not None
        return Sizes(
            blocks=self.blocks,
            decoder_layers=self.decoder_layers,
            length=self.length,
            steps=default_steps if self.steps is None else self.steps,
            batch_size=self.batch_size,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            vocab_size=self.vocab_size,
            mask_rate=self.mask_rate,
            learning_rate=self.learning_rate,
            rate_factors=self._rate_factors(),
            preset=self.preset,
            lengths=self._lengths(),
        )

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
                factor = float(part)
            except ValueError:
                factor = 0.0
            if factor * self.learning_rate > MOST_RATE:
                raise InputError(
                    "rate_factors",
                    f"expected learning rates of at most {MOST_RATE:g}, got {shown(part)} times {self.learning_rate:g}",
                )
            if not factor > 0:
                raise InputError(
                    "rate_factors", f"expected positive numbers such as '0.5,1,2', or '1' alone, got {shown(part)}"
                )
            found.append(factor)
        return tuple(dict.fromkeys(found))
