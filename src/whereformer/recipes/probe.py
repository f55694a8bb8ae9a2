"""The probe recipe: synthetic tasks with known answers, which show what each position method can do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from ..errors import InputError, join_words, short_repr, suggest
from ..lab.options import MOST_COUNT, MOST_RUNS
from ..lab.recipe import Free, ManyRuns, Names, Range, lazily
from ..lab.sheet import Cell, Column, Sheet

with lazily(__name__):
    import torch
    from torch import Tensor
    from torch.nn import functional

    from ..lab import methods
    from ..lab import train as training
    from ..lab.report.report import Report
    from ..lab.run import Run
    from . import small_encoders as encoders

# Tasks: rows of symbols drawn from a seed, with their exact answers and the best guess without positions.

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
        guess: predicts every label as well as anyone can who does not know positions, (rows, length).
        shortest: the fewest symbols in a row.
    """

    asks: str
    needs: str
    example: tuple[str, str]
    draw: Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]]
    guess: Callable[[Tensor, Tensor], Tensor]
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


def _most_common(inputs: Tensor, labels: Tensor) -> Tensor:
    """Guess the most common symbol of a row."""
    return _counts(inputs).argmax(-1, keepdim=True).expand_as(inputs)


def _most_common_other(inputs: Tensor, labels: Tensor) -> Tensor:
    """Guess the most common symbol among the other tokens of a row."""
    others = _counts(inputs)[:, None] - functional.one_hot(inputs, VOCABULARY)
    return others.argmax(-1)


def _most_common_other_symbol(inputs: Tensor, labels: Tensor) -> Tensor:
    """Guess the most common symbol of a row that is not the token's own."""
    own = functional.one_hot(inputs, VOCABULARY).bool()
    return _counts(inputs)[:, None].masked_fill(own, -1).argmax(-1)


def _most_common_depth(inputs: Tensor, labels: Tensor) -> Tensor:
    """Guess the depth that is the most common below an equal bracket in rows with as many opening ones.

    This is counted in the labels, so the guess is, if anything, too good.
    """
    length = inputs.shape[1]
    opens = (inputs == OPEN).sum(1, keepdim=True)
    known = 2 * opens + (inputs == OPEN)
    asked = labels != IGNORED
    cells = torch.bincount((known * VOCABULARY + labels)[asked], minlength=2 * (length + 1) * VOCABULARY)
    return cells.view(-1, VOCABULARY).argmax(1)[known]


def _the_key(inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the key, which shows by itself."""
    return inputs.amax(1, keepdim=True).expand_as(inputs)


def _counts(inputs: Tensor) -> Tensor:
    """Return how often each symbol occurs in each row, (rows, VOCABULARY); other tokens count as never."""
    counts = torch.zeros(len(inputs), VOCABULARY, dtype=torch.long)
    counts.scatter_add_(1, inputs, torch.ones_like(inputs))
    counts[:, :FIRST] = -1
    return counts


TASKS = {
    "copy": Task(
        "The second half repeats the first. It is masked.",
        "relative offset, half the length",
        ("d a c b _ _ _ _", ". . . . d a c b"),
        _masked_half(lambda first: first),
        _most_common,
    ),
    "previous": Task(
        "Which symbol is to the left of this one?",
        "relative offset, -1",
        ("d a c b", ". d a c"),
        _previous,
        _most_common_other,
    ),
    "match": Task(
        "Which symbol followed the last earlier occurrence of this one?",
        "relative offset, -1, and order",
        ("d a c d b d", ". . . a . b"),
        _match,
        _most_common_other_symbol,
        shortest=8,
    ),
    "reverse": Task(
        "Which symbol stands here if the row is read from its end?",
        "absolute position",
        ("d a c b", "b c a d"),
        _reverse,
        _most_common_other,
    ),
    "sort": Task(
        "The second half is the first half in order. It is masked.",
        "absolute position",
        ("d a c b _ _ _ _", ". . . . a b c d"),
        _masked_half(lambda first: first.sort(1).values),
        _most_common,
    ),
    "brackets": Task(
        f"How many brackets are open here, counted up to {DEEPEST}?",
        "order only",
        ("( ( ) ( ) )", "1 2 1 2 1 0"),
        _brackets,
        _most_common_depth,
    ),
    "passkey": Task(
        "One symbol is a key, and the others are noise. Which key is it?",
        "content only",
        ("d a K b _", ". . . . K"),
        _passkey,
        _the_key,
    ),
}
"""The tasks by name, in the order of the table."""


# The recipe.

LENGTH_FACTORS = (1, 2, 4)  # models are judged on rows of these multiples of the training length
JUDGED_ROWS = 512
JUDGED_SEED = 2**62  # the seed of the rows to judge on, plus their length; no seed of training leads so far
TOKENS = 2**15  # the most tokens that a model reads at a time while it is judged
SOLVED = 0.95  # the accuracy from which a task counts as solved
ERRORS = 4  # how many standard errors a method has to be ahead of guessing: chance does that once in 30,000 cells
LAYERS, WIDTH, HEADS, ROWS, RATE = 2, 64, 4, 32, 6e-3  # with these, small models learn every task soonest
READING = (
    f"* solved: at least {SOLVED:.0%} with every seed. ( ): no better than guessing without positions. "
    "?: better than guessing with some seeds only. guessing: the best guess without positions. "
    "cannot: the method has no positions at this length."
)


@dataclass(frozen=True)
class Outcome:
    """A trained model.

    Args:
        scores: at each length, its accuracy, how far that is ahead of guessing on the same rows, and the standard error
            of that over the rows; or the reason why there is none.
        failed: why training ended without a model.
    """

    scores: Annotated[list[Any], list[tuple[float, float, float] | str]]
    failed: str = ""


@dataclass(frozen=True, kw_only=True)
class Probe(ManyRuns):
    """What can each position method do? Synthetic tasks with known answers tell in minutes.

    Trains a small encoder for each method and task, and tests it at the trained length and at two and four times it. A
    task needs absolute positions, relative offsets, order, or content only; compare with the accuracy of guessing
    without positions. The tasks: copy, previous (the left neighbor), match (what followed the last occurrence of this
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
                raise InputError("tasks", f"expected {', '.join(TASKS)}, got {short_repr(task)}{suggest(task, TASKS)}")
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
        outcomes = run.each(keys, self.train, kind=Outcome, steps=self.steps, problem=self.problem)
        return self.report(outcomes, seeds)

    def problem(self, key: tuple[int, str, str], outcome: Outcome) -> str | None:
        """Return why an outcome does not count, or None if it does."""
        whole = outcome.failed or len(outcome.scores) == len(self.lengths)
        return None if whole else "its record lacks scores"

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
            guesses = [Rows.of(task, length).guess for task in self.tasks]
            rows: list[list[Cell | str]] = [
                ["guessing", *(Cell(f"{guess:.1%}", style=colors(guess)) for guess in guesses), ""]
            ]
            for name, row in judged.items():
                rows.append([name, *(each.cell for each in row), f"{sum(each.solved for each in row)}/{len(row)}"])
            times = f"{LENGTH_FACTORS[index]} times as many as trained" if index else "as trained"
            sheets.append(
                Sheet.of(
                    f"Accuracy at {length} symbols, {times}",
                    ["position", *self.tasks, "solved"],
                    rows,
                    notes=(READING,) if length == self.lengths[-1] else (),
                    looks={0: "dim"},
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


@dataclass(frozen=True)
class Rows:
    """The rows that all models of a task are judged on at one length, (JUDGED_ROWS, 1 + length) each.

    ``guessed`` says at each label whether the best guess without positions is right.
    """

    inputs: Tensor
    labels: Tensor
    guessed: Tensor

    @classmethod
    def of(cls, task: str, length: int) -> Rows:
        """Draw the rows of a task at one length, which are always the same."""
        inputs, labels = TASKS[task].rows(JUDGED_ROWS, length, JUDGED_SEED + length)
        guess = TASKS[task].guess(inputs[:, 1:], labels[:, 1:])
        return cls(inputs, labels, functional.pad(guess, (1, 0), value=PAD) == labels)

    @property
    def guess(self) -> float:
        """The accuracy of the best guess without positions."""
        return float(self.guessed.sum() / (self.labels != IGNORED).sum())


def judge(model: Any, task: str, length: int) -> Any:
    """Return a model's accuracy, how far it is ahead of guessing, and the standard error of that; or why not.

    Raises:
        PositionRangeError: if the position method has no positions so far out.
    """
    rows, right = Rows.of(task, length), []
    asked = rows.labels != IGNORED
    with torch.no_grad():
        for chosen in torch.arange(len(rows.inputs)).split(max(1, TOKENS // rows.inputs.shape[1])):
            logits = model(rows.inputs[chosen].to(model.device), labels=rows.labels[chosen].to(model.device)).logits
            if not logits.isfinite().all():
                return "the output is not finite (NaN or inf) at this length"
            right.append(logits.argmax(-1).cpu() == rows.labels[chosen][asked[chosen]])
    correct = torch.zeros_like(asked).masked_scatter(asked, torch.cat(right))
    # Answers in the same row depend on each other, so the rows are what varies.
    gaps = (correct.double() - rows.guessed.double()).sum(1) / asked.sum() * len(asked)
    return [float(correct.sum() / asked.sum()), float(gaps.mean()), float(gaps.std() / len(gaps) ** 0.5)]


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
        accuracies = [accuracy for accuracy, _, _ in scores]
        low, style = min(accuracies), colors(statistics.median(accuracies))
        clear = [ahead > ERRORS * error for _, ahead, error in scores]
        template = "{:.1%}*" if low >= SOLVED else "{:.1%}" if all(clear) else "{:.1%}?" if any(clear) else "({:.1%})"
        return cls(Cell.of_seeds(accuracies, template.format, "{:.0%}".format, style=style), low >= SOLVED)


def most(judged: Mapping[str, Sequence[Judged]], total: int, length: int, advice: str) -> str:
    """Return which methods solve the most tasks at a length."""
    counts = {name: sum(each.solved for each in row) for name, row in judged.items()}
    best, at = max(counts.values()), f"at {length} symbols"
    if not best:
        return f"No method solves a task {at}{advice}."
    leaders = [name for name, count in counts.items() if count == best]
    solve = f"{join_words(leaders)} {'solves' if len(leaders) == 1 else 'solve'}"
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
