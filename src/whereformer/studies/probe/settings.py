"""The options and the settings of probes. Importing them is fast, so that --help is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InputError
from ...lab.options import MOST_COUNT, MOST_JOBS, Jobs, Seeds, check_range, find_device, listed
from ...lab.study import Study

if TYPE_CHECKING:
    from .run import ProbeJob

LONGEST = 512
"""The longest rows to train on. The longest rows to judge have four times as many symbols."""
DEFAULT_POSITIONS = "none,learned,rope,alibi,t5,shaw,tisa"
QUICK_POSITIONS = "none,learned,rope,tisa"
DEFAULT_STEPS, QUICK_STEPS = 500, 100


@dataclass(frozen=True)
class ProbeSettings:
    """What decides a result besides task, method and seed. Results of different settings are never mixed.

    Apart from ``length`` and ``steps``, these are the sizes with which small models learn every task soonest.

    Args:
        length: symbols per training row; [CLS] comes on top.
        steps: training steps.
        batch_size: rows per step.
        layers, hidden_size, num_heads: depth and width of the encoder, and heads per layer.
        learning_rate: the peak, after a linear warm-up over a tenth of the steps; a linear decay to zero follows.
        device: the kind of device, such as "cpu".
    """

    length: int
    steps: int
    batch_size: int = 32
    layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    learning_rate: float = 6e-3
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Probe(Jobs, Seeds, Study):
    """What can each position method do? Synthetic tasks with known answers tell in minutes.

    Trains a small encoder for each method and task, and tests it at the trained length and at two and four times it. A
    task needs absolute positions, relative offsets, order, or content only; compare with the accuracy of guessing
    without positions. The tasks: copy, previous (the left neighbor), match (what followed the last occurrence of this
    symbol), reverse, sort, brackets (how many are open), passkey (a key in noise).

    Takes less than ten minutes on two cores. Writes report.html (open it in a browser) and results.json. After an
    interruption, the same command continues with the missing runs.
    """

    positions: str | None = None
    """Methods to try, separated by commas. "a+b" uses both at once; "all" means every method for text. Default: none,
    learned, rope, alibi, t5, shaw, tisa (with --quick: none, learned, rope, tisa)."""

    tasks: str | None = None
    """Tasks to try, separated by commas. Default: all."""

    out: Path = Path("runs/probe")
    """Folder for the results."""

    quick: bool = False
    """Take a first look in about a minute, with fewer methods and steps, which are too few to learn hard tasks."""

    length: int = 16
    """Symbols in a training row, an even number. Models are tested at this length and at two and four times it."""

    steps: int | None = None
    """Training steps of each model. Default: 500, or 100 for a quick look."""

    def job(self) -> ProbeJob:
        check_range(self, jobs=(1, MOST_JOBS), length=(4, LONGEST), steps=(1, MOST_COUNT))
        self.check_seeds()
        if self.length % 2:
            raise InputError("length", f"expected an even number, because some rows have two halves, got {self.length}")
        from ...lab.methods import check_methods, known_methods

        usual = QUICK_POSITIONS if self.quick else DEFAULT_POSITIONS
        names = known_methods(usual if self.positions is None else self.positions)

        from ...lab.jobs import number_of_jobs
        from .run import ProbeJob
        from .tasks import TASKS

        tasks = tuple(TASKS) if self.tasks is None else listed("tasks", self.tasks, tuple(TASKS))
        for task in tasks:
            if self.length < TASKS[task].shortest:
                shortest = f"at least {TASKS[task].shortest} for the task {task}"
                raise InputError("length", f"expected {shortest}, got {self.length}")
        device = find_device(self.device)
        steps = self.steps or (QUICK_STEPS if self.quick else DEFAULT_STEPS)
        settings = ProbeSettings(self.length, steps, device=device.type)
        check_methods(
            names,
            hidden_size=settings.hidden_size,
            num_heads=settings.num_heads,
            num_layers=settings.layers,
            max_length=settings.length + 1,
        )
        jobs = number_of_jobs(self.jobs, device, small=True)
        return ProbeJob(settings, tasks, names, self.all_seeds, device, jobs)
