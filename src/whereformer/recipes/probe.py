"""The probe recipe: synthetic tasks with known answers, which show what each position method can do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from ..errors import InputError, listed, shown
from ..lab.options import MOST_COUNT, MOST_RUNS
from ..lab.recipe import Free, ManyRuns, Names, Range, lazily
from ..lab.sheet import Cell, Column, Sheet

with lazily(__name__):
    import torch
    from torch import Tensor
    from torch.nn import functional

    from ..lab import encoders, methods
    from ..lab import train as training
    from ..lab.report.report import Report
    from ..lab.run import Run

# Tasks: rows of symbols drawn from a seed, with their exact answers.

IGNORED = -100  # the label where nothing is asked
PAD, CLS, MASK, FIRST = range(4)  # FIRST is the id of the first symbol
SYMBOLS = 16
VOCABULARY = FIRST + SYMBOLS
KEYS = 8  # of the symbols, the last ones are keys in passkey; the others are noise
OPEN, CLOSE, DEPTH = FIRST, FIRST + 1, FIRST + 2  # brackets, and depth 0
DEEPEST = 4  # greater depths have the answer of this one
OPENING = 0.4  # the probability that a bracket opens where both may follow; below 0.5, so that long rows are no deeper


@dataclass(frozen=True)
class Task:
    """A question about rows of symbols.

    Args:
        asks: what has to be predicted, in words.
        needs: what a model has to know about positions.
        example: an input and its answers, a word each; "_" is [MASK], and "." is where nothing is asked.
        draw: draws input ids and labels, (rows, length) each, given these two and the source of randomness.
        shortest: the fewest symbols in a row.
    """

    asks: str
    needs: str
    example: tuple[str, str]
    draw: Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]]
    shortest: int = 4

    def rows(self, count: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Draw rows that begin with [CLS], (count, 1 + length) ids and labels. Equal seeds give equal rows."""
        inputs, labels = self.draw(count, length, torch.Generator().manual_seed(seed))
        return functional.pad(inputs, (1, 0), value=CLS), functional.pad(labels, (1, 0), value=IGNORED)


def _symbols(count: int, length: int, generator: torch.Generator, kinds: int = SYMBOLS) -> Tensor:
    return torch.randint(FIRST, FIRST + kinds, (count, length), generator=generator)


def _masked_half(answers: Callable[[Tensor], Tensor]) -> Any:
    """Draw rows whose second half is masked, and asked for: the answers to the first."""

    def draw(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        first = _symbols(count, length // 2, generator)
        inputs = torch.cat((first, torch.full_like(first, MASK)), 1)
        return inputs, torch.cat((torch.full_like(first, IGNORED), answers(first)), 1)

    return draw


def _previous(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = _symbols(count, length, generator)
    return inputs, functional.pad(inputs[:, :-1], (1, 0), value=IGNORED)


def _reverse(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = _symbols(count, length, generator)
    return inputs, inputs.flip(1)


def _match(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = _symbols(count, length, generator)
    labels = torch.full_like(inputs, IGNORED)
    follows = torch.full((count, VOCABULARY), IGNORED)  # what came after the last occurrence of each symbol
    for at in range(2, length):
        # The token before this one is known to follow its own left neighbor only from here on, so an answer is
        # never the token that asks.
        follows.scatter_(1, inputs[:, at - 2 : at - 1], inputs[:, at - 1 : at])
        labels[:, at] = follows.gather(1, inputs[:, at : at + 1])[:, 0]
    twice = inputs[:, 1:] == inputs[:, :-1]
    labels[:, 1:].masked_fill_(twice, IGNORED)
    return inputs, labels


def _brackets(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    opens = torch.rand(count, length, generator=generator) < OPENING
    depth = torch.zeros(count, dtype=torch.long)
    depths = []
    for at in range(length):
        opens[:, at] |= depth == 0
        depth = depth + torch.where(opens[:, at], 1, -1)
        depths.append(depth)
    return torch.where(opens, OPEN, CLOSE), DEPTH + torch.stack(depths, 1).clamp(max=DEEPEST)


def _passkey(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = _symbols(count, length, generator, SYMBOLS - KEYS)
    key = _symbols(count, 1, generator, KEYS) + SYMBOLS - KEYS
    inputs.scatter_(1, torch.randint(length - 1, (count, 1), generator=generator), key)
    inputs[:, -1] = MASK
    labels = torch.full_like(inputs, IGNORED)
    labels[:, -1:] = key
    return inputs, labels


TASKS = {
    "copy": Task(
        "The second half repeats the first. It is masked.",
        "relative offset, half the length",
        ("d a c b _ _ _ _", ". . . . d a c b"),
        _masked_half(lambda first: first),
    ),
    "previous": Task(
        "Which symbol is to the left of this one?",
        "relative offset, -1",
        ("d a c b", ". d a c"),
        _previous,
    ),
    "match": Task(
        "Which symbol followed the last earlier occurrence of this one?",
        "relative offset, -1, and order",
        ("d a c d b d", ". . . a . b"),
        _match,
        shortest=8,
    ),
    "reverse": Task(
        "Which symbol stands here if the row is read from its end?",
        "absolute position",
        ("d a c b", "b c a d"),
        _reverse,
    ),
    "sort": Task(
        "The second half is the first half in order. It is masked.",
        "absolute position",
        ("d a c b _ _ _ _", ". . . . a b c d"),
        _masked_half(lambda first: first.sort(1).values),
    ),
    "brackets": Task(
        f"How many brackets are open here, counted up to {DEEPEST}?",
        "order only",
        ("( ( ) ( ) )", "1 2 1 2 1 0"),
        _brackets,
    ),
    "passkey": Task(
        "One symbol is a key, and the others are noise. Which key is it?",
        "content only",
        ("d a K b _", ". . . . K"),
        _passkey,
    ),
}
"""The tasks by name, in the order of the table."""


# The recipe.

LENGTH_FACTORS = (1, 2, 4)  # models are judged on rows of these multiples of the training length
JUDGED_ROWS = 512
JUDGED_SEED = 2**62  # the seed of the rows to judge on, plus their length; no seed of training leads so far
TOKENS = 2**15  # the most tokens that a model reads at a time while it is judged
SOLVED = 0.95  # the accuracy from which a task counts as solved
LAYERS, WIDTH, HEADS, ROWS, RATE = 2, 64, 4, 32, 6e-3  # with these, small models learn every task soonest
READING = (
    f"* solved: at least {SOLVED:.0%} with every seed. none, which has no positions, can only guess. "
    "cannot: the method has no positions at this length."
)


@dataclass(frozen=True)
class Outcome:
    """A trained model.

    Args:
        scores: at each length, its accuracy, or the reason why there is none.
        failed: why training ended without a model.
    """

    scores: list[Any]
    failed: str = ""


@dataclass(frozen=True, kw_only=True)
class Probe(ManyRuns):
    """What can each position method do? Synthetic tasks with known answers tell in minutes.

    Trains a small encoder for each method and task, and tests it at the trained length and at two and four times it. A
    task needs absolute positions, relative offsets, order, or content only; the method none has no positions and can
    only guess. The tasks: copy, previous (the left neighbor), match (what followed the last occurrence of this
    symbol), reverse, sort, brackets (how many are open), passkey (a key in noise).

    Takes less than ten minutes on two cores. Writes report.html (open it in a browser) and records.jsonl. After an
    interruption, the same command continues with the missing runs.
    """

    NAME = "probe"
    QUICK: ClassVar = {"positions": ("none", "learned", "rope", "tisa"), "steps": 100, "out": Path("runs/probe-quick")}

    positions: Annotated[Names, Free] = ("none", "learned", "rope", "alibi", "t5", "shaw", "tisa")
    """Methods to try, separated by commas. "a+b" uses both at once, "rope+sinks" has a trained sink per head, too, and
    "hybrid" has the positions and windows of this preset; "all" means every method."""
    tasks: Annotated[Names, Free] = tuple(TASKS)
    """Tasks to try, separated by commas."""
    out: Annotated[Path, Free] = Path("runs/probe")
    """Folder for the results."""
    quick: Annotated[bool, Free] = False
    """Take a first look in about a minute, with fewer methods and steps, which are too few to learn hard tasks."""
    length: Annotated[int, Range(4, 512)] = 16
    """Symbols in a training row, an even number. Models are tested at this length and at two and four times it."""
    steps: Annotated[int, Range(1, MOST_COUNT)] = 500
    """Training steps of each model."""
    seeds: Annotated[int, Range(1, MOST_RUNS), Free] = 1
    """How many seeds to repeat everything with. With several, the tables show medians and ranges."""

    small = True

    def check(self) -> None:
        if self.length % 2:
            raise InputError("length", f"expected an even number, because some rows have two halves, got {self.length}")
        for task in self.tasks:
            if task not in TASKS:
                raise InputError("tasks", f"expected {', '.join(TASKS)}, got {shown(task)}")
            if self.length < TASKS[task].shortest:
                shortest = f"at least {TASKS[task].shortest} for the task {task}"
                raise InputError("length", f"expected {shortest}, got {self.length}")

    def resolved(self) -> Probe:
        names = methods.known_methods(self.positions)
        methods.check_methods(names, hidden_size=WIDTH, num_heads=HEADS, num_layers=LAYERS, max_length=self.length + 1)
        return replace(self, positions=names)

    @property
    def lengths(self) -> list[int]:
        """The lengths to judge at, that of training first."""
        return [factor * self.length for factor in LENGTH_FACTORS]

    def run(self, run: Run) -> Report:
        seeds = range(self.seed, self.seed + self.seeds)
        keys = product(seeds, self.tasks, self.positions)
        outcomes = run.each(keys, self.train, kind=Outcome, steps=self.steps)
        return self.report(outcomes, seeds)

    def train(self, run: Run, seed: int, task: str, position: str) -> Outcome:
        """Train a method on a task with a seed, and judge it at every length."""
        model = self.build(position, seed)

        def batch(step: int) -> dict[str, Tensor]:
            inputs, labels = TASKS[task].rows(ROWS, self.length, seed * 1_000_003 + step)
            return {"input_ids": inputs, "labels": labels}

        plan = training.Training(steps=self.steps, rate=RATE)
        try:
            training.train(model, batch, plan, device=run.device, on_log=run.step)
        except training.NotFiniteError as error:
            run.say(f"{task}, {position}, seed {seed}: failed, {error.problem}")
            return Outcome([], error.problem)
        return Outcome(encoders.at_lengths(self.lengths, lambda length: judge(model.eval(), task, length)))

    def build(self, position: str, seed: int) -> Any:
        """Build a method's untrained model. It has no dropout: rows are new at every step."""
        config = encoders.small_config(
            vocab_size=VOCABULARY,
            pad_token_id=PAD,
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            intermediate_size=2 * WIDTH,
            blocks=str(LAYERS),
            position=position,
            max_position_embeddings=self.length + 1,
        )
        return encoders.build(config, seed)

    def report(self, outcomes: Mapping[tuple[int, str, str], Outcome], seeds: range) -> Report:
        """Return a table for each length, and which methods solve the most tasks."""
        sheets, sentences = [], []
        for index, length in enumerate(self.lengths):
            judged = {
                name: [Judged.of([outcomes[seed, task, name] for seed in seeds], index) for task in self.tasks]
                for name in self.positions
            }
            if index in (0, len(self.lengths) - 1):
                sentences.append(most(judged, len(self.tasks), length, "" if index else "; train longer"))
            rows: list[list[Cell | str]] = [
                [name, *(each.cell for each in row), f"{sum(each.solved for each in row)}/{len(row)}"]
                for name, row in judged.items()
            ]
            times = f"{LENGTH_FACTORS[index]} times as many as trained" if index else "as trained"
            sheets.append(
                Sheet.of(
                    f"Accuracy at {length} symbols, {times}",
                    ["position", *self.tasks, "solved"],
                    rows,
                    notes=(READING,) if length == self.lengths[-1] else (),
                )
            )
        if len(seeds) == 1:
            about = (
                "This is one seed. With another seed or more steps, a method may learn a task that it has not learned "
            )
            about += "here; several seeds show how often."
        else:
            about = f"Solved means solved with each of {len(seeds)} seeds. More steps may change what was not learned."
        asked = [(name, TASKS[name].asks, TASKS[name].needs, Cell(*TASKS[name].example)) for name in self.tasks]
        columns: list[Column | str] = [
            "task",
            *(Column(name, left=True, wraps=True) for name in ("question", "needs", "example")),
        ]
        sheets.append(Sheet.of("The tasks", columns, asked))
        return Report("What can each position method do?", [*sentences, about], sheets, outcomes)


def judge(model: Any, task: str, length: int) -> float | str:
    """Return a model's accuracy on the rows of a task at one length, which are always the same; or why there is none.

    Raises:
        PositionRangeError: if the position method has no positions so far out.
    """
    inputs, labels = TASKS[task].rows(JUDGED_ROWS, length, JUDGED_SEED + length)
    asked, right = labels != IGNORED, 0
    with torch.no_grad():
        for rows in torch.arange(len(inputs)).split(max(1, TOKENS // inputs.shape[1])):
            logits = model(inputs[rows].to(model.device), labels=labels[rows].to(model.device)).logits
            if not logits.isfinite().all():
                return "the output is not finite (NaN or inf) at this length"
            right += int((logits.argmax(-1).cpu() == labels[rows][asked[rows]]).sum())
    return right / int(asked.sum())


class Judged(NamedTuple):
    """A method on a task at one length. ``solved``: at least SOLVED of the answers are right with every seed."""

    cell: Cell
    solved: bool

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], index: int) -> Judged:
        """Judge a method by the outcomes of all seeds, at the length of an index."""
        for outcome in outcomes:
            if outcome.failed:
                return cls(Cell("failed", title=outcome.failed), False)
            if isinstance(outcome.scores[index], str):
                return cls(Cell("cannot", title=outcome.scores[index]), False)
        scores = [outcome.scores[index] for outcome in outcomes]
        solved, style = min(scores) >= SOLVED, colors(statistics.median(scores))
        shown = "{:.1%}*" if solved else "{:.1%}"
        return cls(Cell.of_seeds(scores, shown.format, "{:.0%}".format, style=style), solved)


def most(judged: Mapping[str, Sequence[Judged]], total: int, length: int, advice: str) -> str:
    """Return which methods solve the most tasks at a length."""
    counts = {name: sum(each.solved for each in row) for name, row in judged.items()}
    best, at = max(counts.values()), f"at {length} symbols"
    if not best:
        return f"No method solves a task {at}{advice}."
    leaders = [name for name, count in counts.items() if count == best]
    solve = f"{listed(leaders)} {'solves' if len(leaders) == 1 else 'solve'}"
    if best == total or len(leaders) == len(counts):
        return f"{solve} {best} of {total} tasks {at}."
    return f"{solve} the most tasks {at}, {best} of {total}."


def colors(accuracy: float) -> str:
    """Return the colors of an accuracy as CSS: from dark to bright, with text that can be read on it."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    color = colormaps["cividis"](accuracy)
    luminance = sum(share * part**2.2 for share, part in zip((0.2126, 0.7152, 0.0722), color[:3], strict=True))
    return f"background: {to_hex(color)}; color: {'#000' if luminance >= 0.18 else '#fff'}"
