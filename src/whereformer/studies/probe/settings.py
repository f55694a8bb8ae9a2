"""The settings of probes. Importing them is fast, so that --help is."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import InputError
from ..settings import MOST_COUNT, MOST_SEED, MOST_SEEDS, check_range

LONGEST = 512
"""The longest rows to train on. The longest rows to judge have four times as many symbols."""


@dataclass(frozen=True)
class Sizes:
    """Everything that decides a result besides task, method and seed. Results of different sizes are never mixed.

    Apart from ``length`` and ``steps``, these are the sizes with which small models learn every task soonest.

    Args:
        length: symbols per training row; [CLS] comes on top.
        steps: training steps.
        batch_size: rows per step.
        layers, hidden_size, num_heads: depth and width of the encoder, and heads per layer.
        learning_rate: the peak, after a linear warm-up over a tenth of the steps; a linear decay to zero follows.
    """

    length: int
    steps: int
    batch_size: int = 32
    layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    learning_rate: float = 6e-3


@dataclass(frozen=True)
class ProbeTraining:
    """How the encoder of every method and task is trained."""

    length: int = 16
    """Symbols in a training row, an even number. Models are judged at this length and at two and four times it."""

    steps: int | None = None
    """Training steps of each model. Default: 500, or 100 for a quick look."""

    seeds: int = 1
    """Number of seeds to repeat everything with. With several, the tables show medians and ranges."""

    seed: int = 0
    """The first seed."""

    @property
    def all_seeds(self) -> range:
        """Every seed to train with."""
        return range(self.seed, self.seed + self.seeds)

    def sizes(self, default_steps: int) -> Sizes:
        """Check the settings and return the sizes, with ``default_steps`` if ``steps`` is None.

        Raises:
            InputError: if a field is out of range; it names the field.
        """
        check_range(self, length=(4, LONGEST), steps=(1, MOST_COUNT), seeds=(1, MOST_SEEDS))
        check_range(self, seed=(0, MOST_SEED + 1 - self.seeds))
        if self.length % 2:
            raise InputError("length", f"expected an even number, because some rows have two halves, got {self.length}")
        return Sizes(self.length, default_steps if self.steps is None else self.steps)
