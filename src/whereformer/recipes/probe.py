"""The probe recipe: synthetic tasks with known answers, which show the abilities of each position method."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from ..checks import check_choice
from ..errors import InputError
from ..lab.options import MAX_COUNT, MAX_RUNS
from ..lab.recipe import LazyModule, ManyRuns, MayChange, Names, Range, lazy_modules
from ..lab.sheet import Cell, Column, Sheet

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import functional

    from ..analysis import verdicts
    from ..lab import examples, methods
    from ..lab import small_encoders as encoders
    from ..lab import train as training
    from ..lab.report import report
    from ..lab.run import Run
else:
    torch, functional = LazyModule("torch"), LazyModule("torch.nn.functional")
    methods, encoders, training = lazy_modules("lab.methods", "lab.small_encoders", "lab.train")
    verdicts, report, examples = lazy_modules("analysis.verdicts", "lab.report.report", "lab.examples")

# Tasks: rows of symbols drawn from a seed, with their exact answers and the best guess without positions.

IGNORED = -100  # the label of tokens without a question
PAD, CLS, MASK, FIRST = range(4)  # FIRST is the id of the first symbol
SYMBOLS = 16
VOCABULARY = FIRST + SYMBOLS
KEYS = 8  # of the symbols, the last ones are keys in passkey; the others are noise
OPEN, CLOSE, DEPTH = FIRST, FIRST + 1, FIRST + 2  # brackets, and depth 0
DEEPEST = 4  # greater depths have the answer of this one
OPENING = 0.4  # the chance of an opening bracket where both may follow; below 0.5, so that long rows are not deeper


@dataclass(frozen=True)
class Task:
    """A question about rows of symbols."""

    question: str  # the question that a model has to answer
    needs: str  # the knowledge about positions that the answer needs
    example: tuple[str, str]  # an input and its answers, a word each; "_" is [MASK], and "." has no answer
    # Draws input ids and labels, each (rows, length); its arguments are rows, length and a generator.
    draw: Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]]
    # Predicts the labels as well as possible without knowing positions, (rows, length).
    guess: Callable[[Tensor, Tensor], Tensor]
    min_length: int = 4  # the fewest symbols in a row

    def rows(self, count: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Draw rows that begin with [CLS], (count, 1 + length) ids and labels. Equal seeds give equal rows."""
        inputs, labels = self.draw(count, length, torch.Generator().manual_seed(seed))
        return functional.pad(inputs, (1, 0), value=CLS), functional.pad(labels, (1, 0), value=IGNORED)


def _symbols(count: int, length: int, generator: torch.Generator, kinds: int = SYMBOLS) -> Tensor:
    return torch.randint(FIRST, FIRST + kinds, (count, length), generator=generator)


def _masked_half(answers: Callable[[Tensor], Tensor]) -> Any:
    """Draw rows whose second half is masked. The labels there are the answers to the first half."""

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
    followers = torch.full((count, VOCABULARY), IGNORED)  # the symbol after the last occurrence of each symbol
    for index in range(2, length):
        # The pair of the last two tokens becomes known only now, so an answer is never the token itself.
        followers.scatter_(1, inputs[:, index - 2 : index - 1], inputs[:, index - 1 : index])
        labels[:, index] = followers.gather(1, inputs[:, index : index + 1])[:, 0]
    is_repeated = inputs[:, 1:] == inputs[:, :-1]
    labels[:, 1:].masked_fill_(is_repeated, IGNORED)
    return inputs, labels


def _brackets(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    is_open = torch.rand(count, length, generator=generator) < OPENING
    depth = torch.zeros(count, dtype=torch.long)
    depths = []
    for index in range(length):
        is_open[:, index] |= depth == 0
        depth = depth + torch.where(is_open[:, index], 1, -1)
        depths.append(depth)
    return torch.where(is_open, OPEN, CLOSE), DEPTH + torch.stack(depths, 1).clamp(max=DEEPEST)


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
    return _count_symbols(inputs).argmax(-1, keepdim=True).expand_as(inputs)


def _most_common_other(inputs: Tensor, labels: Tensor) -> Tensor:
    """Guess the most common symbol among the other tokens of a row."""
    counts = _count_symbols(inputs)[:, None] - functional.one_hot(inputs, VOCABULARY)
    return counts.argmax(-1)


def _most_common_other_symbol(inputs: Tensor, labels: Tensor) -> Tensor:
    """Guess the most common symbol of a row except the token's own symbol."""
    is_same = functional.one_hot(inputs, VOCABULARY).bool()
    return _count_symbols(inputs)[:, None].masked_fill(is_same, -1).argmax(-1)


def _most_common_depth(inputs: Tensor, labels: Tensor) -> Tensor:
    """Guess the most common depth after the same kind of bracket in rows with the same number of opening brackets.

    This is counted in the labels, so the guess is, if anything, too good.
    """
    length = inputs.shape[1]
    num_open = (inputs == OPEN).sum(1, keepdim=True)
    known = 2 * num_open + (inputs == OPEN)
    has_label = labels != IGNORED
    cells = torch.bincount((known * VOCABULARY + labels)[has_label], minlength=2 * (length + 1) * VOCABULARY)
    return cells.view(-1, VOCABULARY).argmax(1)[known]


def _count_symbols(inputs: Tensor) -> Tensor:
    """Count each symbol in each row, (rows, VOCABULARY); the counts of other tokens are -1."""
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
        min_length=8,
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
        lambda inputs, labels: inputs.amax(1, keepdim=True).expand_as(inputs),  # the key is the only one of its kind
    ),
}
"""The tasks by name, in the order of the table."""


# The recipe.

LENGTH_FACTORS = (1, 2, 4)  # models are evaluated on rows of these multiples of the training length
EVAL_ROWS = 512
EVAL_SEED = 2**62  # the seed of the rows to evaluate on, plus their length; seeds of training rows are smaller
TOKENS = 2**15  # the most tokens that a model reads at a time in the evaluation
SOLVED = 0.95  # with at least this accuracy, a task counts as solved
SHADE = "--share: {:.1%}"  # an accuracy as CSS; a page makes the color of a cell from it
ERRORS = 4  # a method must be better than guessing by this many standard errors; chance does that once in 30,000 cells
LAYERS, WIDTH, HEADS, ROWS, RATE = 2, 64, 4, 32, 6e-3  # with these, small models learn every task soonest
READING = (
    f"* solved: at least {SOLVED:.0%} with every seed. ( ): not better than guessing without positions. "
    "?: better than guessing with some seeds only. guessing: the best guess without positions. "
    "n/a: the method has no positions at this length. solved: of the tasks that none does not solve too."
)


@dataclass(frozen=True)
class ProbeResult:
    """A trained model."""

    # For each length, the accuracy, its difference from the accuracy of guessing on the same rows, and the standard
    # error of the difference over the rows; or the reason for a missing score.
    scores: Annotated[list[Any], list[tuple[float, float, float] | str]]
    failed: str = ""  # why training ended without a model
    # A row of the training length that is solved and one that is not, if there are: whether it is, the input, the
    # answers, and the model's. Earlier versions recorded none.
    examples: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Probe(ManyRuns):
    """What can each position method do? Synthetic tasks with known answers show it in minutes.

    Trains a small encoder for each method and task, and tests it at the trained length and at two and four times it. A
    task needs absolute positions, relative offsets, order, or content only; compare with the accuracy of guessing
    without positions. The tasks: copy, previous (the left neighbor), match (what followed the last occurrence of this
    symbol), reverse, sort, brackets (how many are open), passkey (a key in noise).

    Takes less than ten minutes on two cores. Writes report.html (open it in a browser) and records.jsonl. After an
    interruption, the same command continues with the missing runs.
    """

    NAME = "probe"
    EXAMPLE = "whereformer probe --positions rope,tisa --quick"
    QUICK: ClassVar = {"positions": ("none", "learned", "rope", "tisa"), "steps": 100, "out": Path("runs/probe-quick")}

    positions: Annotated[Names, MayChange] = ("none", "learned", "rope", "alibi", "t5", "shaw", "tisa")
    """Methods to try, separated by commas. "a+b" uses both at once, "rope+sinks" has a trained sink per head, too, and
    "hybrid" has the positions and windows of this preset; "all" means every method."""
    tasks: Annotated[Names, MayChange] = tuple(TASKS)
    """Tasks to try, separated by commas."""
    out: Annotated[Path, MayChange] = Path("runs/probe")
    """Folder for the results."""
    quick: Annotated[bool, MayChange] = False
    """Take a first look in about a minute, with fewer methods and steps, which are too few to learn hard tasks."""
    length: Annotated[int, Range(4, 512)] = 16
    """Symbols in a training row, an even number. Models are tested at this length and at two and four times it."""
    steps: Annotated[int, Range(1, MAX_COUNT)] = 500
    """Training steps of each model."""
    seeds: Annotated[int, Range(1, MAX_RUNS), MayChange] = 1
    """How many seeds to repeat everything with. With several, the tables show medians and ranges."""

    has_small_models = True

    def check(self) -> None:
        if self.length % 2:
            raise InputError("length", f"expected an even number, because some rows have two halves, got {self.length}")
        for task in self.tasks:
            check_choice("tasks", task, TASKS)
            if self.length < TASKS[task].min_length:
                expected = f"at least {TASKS[task].min_length} for the task {task}"
                raise InputError("length", f"expected {expected}, got {self.length}")

    def resolve(self) -> Probe:
        names = methods.resolve_methods(self.positions)
        methods.check_methods(names, hidden_size=WIDTH, num_heads=HEADS, num_layers=LAYERS, max_length=self.length + 1)
        return replace(self, positions=names)

    @property
    def lengths(self) -> list[int]:
        """The lengths to evaluate at; the training length is the first."""
        return [factor * self.length for factor in LENGTH_FACTORS]

    def run(self, run: Run) -> report.Report:
        seeds = range(self.seed, self.seed + self.seeds)
        keys = product(seeds, self.tasks, self.positions)
        results = run.map(keys, self.train, task="train", kind=ProbeResult, steps=self.steps, problem=self.problem)
        return self.report(results, seeds)

    def problem(self, key: tuple[int, str, str], result: ProbeResult) -> str | None:
        """Return why a recorded result is not valid, or None if it is."""
        is_complete = result.failed or len(result.scores) == len(self.lengths)
        return None if is_complete else "its record lacks scores"

    def train(self, run: Run, seed: int, task: str, position: str) -> ProbeResult:
        """Train a method on a task with a seed, and evaluate it at every length."""
        model = self.build(position, seed)

        def batch(step: int) -> dict[str, Tensor]:
            inputs, labels = TASKS[task].rows(ROWS, self.length, seed * 1_000_003 + step)
            return {"input_ids": inputs, "labels": labels}

        plan = training.Training(steps=self.steps, rate=RATE)
        try:
            training.train(model, batch, plan, device=run.device, on_log=run.advance)
        except training.NotFiniteError as error:
            run.log(f"{task}, {position}, seed {seed}: failed, {error.problem}")
            return ProbeResult([], error.problem)
        scores = encoders.at_lengths(self.lengths, lambda length: evaluate(model.eval(), task, length))
        return ProbeResult(scores, examples=find_examples(model, task, self.length))

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

    def report(self, results: Mapping[tuple[int, str, str], ProbeResult], seeds: range) -> report.Report:
        """Return a table for each length, and which methods solve the most tasks."""
        sheets, sentences = [], []
        for index, length in enumerate(self.lengths):
            cells = {
                name: [CellResult.of([results[seed, task, name] for seed in seeds], index) for task in self.tasks]
                for name in self.positions
            }
            solved = {
                name: {task: result.is_solved for task, result in zip(self.tasks, row, strict=True)}
                for name, row in cells.items()
            }
            counting = verdicts.find_counting_tasks(solved)
            if index in (0, len(self.lengths) - 1):
                sentence = verdicts.compare_solved(solved, length, self.steps, trained=index == 0)
                sentences += [sentence] if sentence else []
            guesses = [Rows.of(task, length).guess for task in self.tasks]
            rows: list[list[Cell | str]] = [
                ["guessing", *(Cell(f"{guess:.1%}", style=SHADE.format(guess)) for guess in guesses), ""]
            ]
            for name, row in cells.items():
                count = sum(solved[name][task] for task in counting)
                rows.append([name, *(result.cell for result in row), f"{count}/{len(counting)}"])
            times = f"{LENGTH_FACTORS[index]} times the training length" if index else "the training length"
            title, notes = f"Accuracy at {length} symbols, {times}", (READING,) if length == self.lengths[-1] else ()
            heads: list[Column | str] = ["position", *(Column(task, optional=True) for task in self.tasks), "solved"]
            sheets.append(Sheet.of(title, heads, rows, notes=notes, looks={0: "dim"}))
        one = "This is one seed. With more seeds or steps, a method may solve a task that it failed here."
        several = f"Solved means solved with each of {len(seeds)} seeds. With more steps, more may be solved."
        about = one if len(seeds) == 1 else several
        tasks = [(name, TASKS[name].question, TASKS[name].needs, Cell(*TASKS[name].example)) for name in self.tasks]
        texts = (Column(name, left=True, wraps=True) for name in ("question", "needs"))
        sheets.append(Sheet.of("The tasks", ["task", *texts, Column("example", left=True, aligned=True)], tasks))
        shown: dict[tuple[str, str], list[str]] = {}
        for (_, task, name), result in results.items():
            for word, *parts in result.examples:
                shown[task, word] = [task, word, name, *parts]  # the baseline's only if no other method has one
        symbols = (Column(name, left=True, aligned=True) for name in ("input", "right answers", "its answers"))
        columns: list[Column | str] = ["task", "", "method", *symbols]
        sheets += examples.build_sheet("A solved and a failed input of each task", [*shown.values()], columns=columns)
        sentences = sentences or ["Nothing to compare: no method but none was tried, or none solves every task too."]
        answer = report.Report("What can each position method do?", [*sentences, about], sheets, results)
        if self.steps >= verdicts.PROBE_STEPS:
            return answer
        longer = {"steps": verdicts.PROBE_STEPS, "out": self.name_folder(verdicts.PROBE_STEPS)}
        command = self.format_command(quick=False, **longer)
        return replace(answer, advice="To train longer", next_command=command)


@dataclass(frozen=True)
class Rows:
    """The rows that all models of a task are evaluated on at one length, each tensor (EVAL_ROWS, 1 + length).

    ``is_guessed``: whether the best guess without positions is right, for each label.
    """

    inputs: Tensor
    labels: Tensor
    is_guessed: Tensor

    @classmethod
    def of(cls, task: str, length: int) -> Rows:
        """Draw the rows of a task at one length, which are always the same."""
        inputs, labels = TASKS[task].rows(EVAL_ROWS, length, EVAL_SEED + length)
        guess = TASKS[task].guess(inputs[:, 1:], labels[:, 1:])
        return cls(inputs, labels, functional.pad(guess, (1, 0), value=PAD) == labels)

    @property
    def guess(self) -> float:
        """The accuracy of the best guess without positions."""
        return float(self.is_guessed.sum() / (self.labels != IGNORED).sum())


def evaluate(model: Any, task: str, length: int) -> Any:
    """Return a model's accuracy, its difference from guessing, and the difference's standard error; or why not.

    Raises:
        PositionRangeError: if the position method has too few positions.
    """
    rows, answers = Rows.of(task, length), []
    has_label = rows.labels != IGNORED
    with torch.no_grad():
        for indices in torch.arange(len(rows.inputs)).split(max(1, TOKENS // rows.inputs.shape[1])):
            logits = model(rows.inputs[indices].to(model.device), labels=rows.labels[indices].to(model.device)).logits
            if not logits.isfinite().all():
                return "the output is not finite (NaN or inf) at this length"
            answers.append(logits.argmax(-1).cpu() == rows.labels[indices][has_label[indices]])
    is_correct = torch.zeros_like(has_label).masked_scatter(has_label, torch.cat(answers))
    # Answers in the same row depend on each other, so the standard error treats each row as one sample.
    gaps = (is_correct.double() - rows.is_guessed.double()).sum(1) / has_label.sum() * len(has_label)
    return [float(is_correct.sum() / has_label.sum()), float(gaps.mean()), float(gaps.std() / len(gaps) ** 0.5)]


def find_examples(model: Any, task: str, length: int) -> list[list[str]]:
    """Return the first row of a task that a model solves and the first that it fails, as in :class:`ProbeResult`."""
    rows = Rows.of(task, length)
    inputs, labels = rows.inputs, rows.labels
    with torch.no_grad():
        logits = model(inputs.to(model.device), labels=labels.to(model.device)).logits
    answers = labels.masked_scatter(labels != IGNORED, logits.argmax(-1).cpu())
    is_solved = (answers == labels).all(1)
    return [
        [word, *(write_symbols(ids[row, 1:], task) for ids in (inputs, labels, answers))]
        for word, which in (("solved", is_solved), ("failed", ~is_solved))
        for row in which.nonzero().flatten().tolist()[:1]
    ]


def write_symbols(ids: Tensor, task: str) -> str:
    """Write the ids of a row as in :attr:`Task.example`: letters, or brackets and depths; keys are capital letters."""
    letters = "()01234" if task == "brackets" else "abcdefghijklmnop"
    letters = letters[: SYMBOLS - KEYS] + letters[SYMBOLS - KEYS :].upper() if task == "passkey" else letters
    names = {IGNORED: ".", MASK: "_", **dict(enumerate(letters, FIRST))}
    return " ".join(names.get(number, "?") for number in ids.tolist())


class CellResult(NamedTuple):
    """A method on a task at one length. ``is_solved``: at least SOLVED of the answers are right with every seed."""

    cell: Cell
    is_solved: bool

    @classmethod
    def of(cls, results: Sequence[ProbeResult], index: int) -> CellResult:
        """Return the cell of a method from the results with all seeds, at the length with an index."""
        for result in results:
            if result.failed:
                return cls(Cell("failed", title=result.failed), False)
            if isinstance(result.scores[index], str):
                return cls(Cell("n/a", title=result.scores[index]), False)
        scores = [result.scores[index] for result in results]
        accuracies = [accuracy for accuracy, _, _ in scores]
        low, style = min(accuracies), SHADE.format(statistics.median(accuracies))
        is_clear = [gap > ERRORS * error for _, gap, error in scores]
        if low >= SOLVED:
            text = "{:.1%}*"
        elif all(is_clear):
            text = "{:.1%}"
        else:
            text = "{:.1%}?" if any(is_clear) else "({:.1%})"
        return cls(Cell.of_seeds(accuracies, text.format, "{:.0%}".format, style=style), low >= SOLVED)
