"""The finetune recipe: fine-tune a pretrained model with several position methods, on GLUE or a task of your own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import InputError
from ..files import check_regular_in
from ..lab.options import MAX_COUNT, MAX_RATE, MAX_RUNS, MAX_SIZE
from ..lab.recipe import Between, Counts, LazyModule, ManyRuns, MayChange, Names, Range, Trains, lazy_modules
from ..lab.sheet import DASH, MINUS, Cell, Column, Sheet, decimals

if TYPE_CHECKING:
    import torch

    from .. import positions
    from ..analysis import metrics, verdicts
    from ..data import batches, glue, labeled
    from ..lab import examples, loading
    from ..lab import train as training
    from ..lab.report import report, score_report
    from ..lab.run import Run
else:
    torch = LazyModule("torch")
    metrics, verdicts, examples = lazy_modules("analysis.metrics", "analysis.verdicts", "lab.examples")
    positions, batches = lazy_modules("positions", "data.batches")
    glue, labeled, loading = lazy_modules("data.glue", "data.labeled", "lab.loading")
    training, score_report, report = lazy_modules("lab.train", "lab.report.score_report", "lab.report.report")

OWN = "own"  # the name of the model's own positions, as it was pretrained
BASELINE = "baseline"
MAX_ANSWERS = 1000
"""Rows whose answers are kept, for examples."""
EXPLANATION = (
    "Gain is the largest gain over the baseline, in points. Error reduction is that gain divided by the baseline's "
    "distance from 100. * means that every seed is better than every seed of the baseline; other gains may be chance."
)


@dataclass(frozen=True)
class Variant:
    """One model that is fine-tuned."""

    label: str  # its name in the table of a setting
    position: str | None  # the method, as in `load_pretrained`; None keeps the checkpoint's positions
    kernels: int | None = None  # the number of TISA's kernels, if it has any

    @property
    def name(self) -> str:
        """Its unique name. Variants of two settings share it if they are the same model."""
        name = OWN if self.position is None else self.position
        return name if self.kernels is None else f"{name}, S={self.kernels}"


def build_variants(position: str, kernels: Sequence[int]) -> list[Variant]:
    """Return the models of one position method, which differ in TISA's kernels; the baseline is first if there is one.

    With TISA there is a variant for each number of kernels; 0 kernels is the baseline, the same method without TISA.
    Other methods have a baseline only if 0 is among the numbers: learned positions for a method that is added to them
    ("learned+t5"), else no positions. "own" is the unchanged checkpoint. With TISA, a number has to be above 0.
    """
    parts = positions.component_names(position)
    if "tisa" in parts:
        layers = positions.layer_pattern(position)
        without_tisa = ("+".join(part for part in layer if part != "tisa") for layer in layers)
        baseline = positions.canonical_name("/".join(layer or "none" for layer in without_tisa))
        variants = [Variant(f"S = {number}", position, number) for number in kernels if number]
    else:
        baseline = "learned" if "learned" in parts and len(parts) > 1 else "none"
        variants = [Variant(position, None if position == OWN else position)]
    if not variants:
        raise InputError("kernels", "expected a number above 0 besides the baseline, got 0")
    has_baseline = 0 in kernels and position not in (OWN, baseline)
    return [Variant(BASELINE, baseline), *variants] if has_baseline else variants


@dataclass(frozen=True)
class FinetuneResult:
    """A fine-tuned model."""

    scores: dict[str, dict[str, float]]  # the scores by split and metric, at most 1
    losses: list[tuple[int, float]]  # steps with the training loss, a moving average
    # The classes of the first rows of the first split; none for numbers, and earlier versions recorded none.
    answers: list[int] = field(default_factory=list)


Results = Mapping[tuple[str, str, int], FinetuneResult]
"""Fine-tuned models, by task, model and seed."""


@dataclass(frozen=True)
class Prepared:
    """The data that all runs start from. Every model has read the longest row."""

    tasks: dict[str, glue.Data]  # the tokenized rows of each task
    hashes: dict[str, str]  # for each task, a hash of the pretrained weights and the rows
    # For each model, the number of all parameters, of positional ones, and of those not in the checkpoint.
    sizes: dict[str, tuple[int, int, int]]
    tokenizer: Any = None


@dataclass(frozen=True, kw_only=True)
class Finetune(ManyRuns, Trains):
    """What does a position method add to a pretrained model? Fine-tunes with and without it, on GLUE or your own task.

    This is Table 3 of the TISA paper. By default, 0, 1, 3 and 5 TISA kernels are added to the model's position
    embeddings, and each model is fine-tuned on each task with several seeds. The tables show medians and ranges, the
    largest gain over the baseline, and the share of the baseline's errors that it removes. With several methods, one
    more table ranks them.

    Writes report.html (open it in a browser), report.md and records.jsonl. After an interruption, the same command
    continues with the missing runs.
    """

    NAME = "finetune"
    EXAMPLE = "whereformer finetune --model my_model --task rte"

    task: Annotated[Names, MayChange] = ()
    """GLUE tasks, separated by commas: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli; or "all"."""
    data: Annotated[Path | None, MayChange] = None
    """A folder with GLUE as Parquet: cola/train.parquet, cola/validation.parquet... (train_subset.parquet for a part of
    it). Default: nyu-mll/glue from the Hugging Face Hub."""
    train_rows: Annotated[int | None, Range(1, MAX_COUNT), MayChange] = None
    """Number of rows of each task to train on, drawn once for all runs. Default: all of them."""
    train: Annotated[Path | None, MayChange] = None
    """Your own task: training rows, as .csv, .tsv, .jsonl or .parquet."""
    validation: Annotated[Path | None, MayChange] = None
    """Your own task: validation rows."""
    text: Annotated[Names, MayChange] = ()
    """Your own task: the column with the text, or two for a pair of texts, such as question,answer."""
    label: Annotated[str | None, MayChange] = None
    """Your own task: the column of classes, or with ``regression`` the numbers."""
    regression: Annotated[bool, MayChange] = False
    """Your own task: predict a number instead of a class."""
    model: Annotated[str, MayChange]
    """The pretrained model: a folder, or an id on the Hugging Face Hub."""
    tokenizer: Annotated[str | None, MayChange] = None
    """The tokenizer. Default: the one that was saved with the model."""
    position: Annotated[Names, MayChange] = ("learned+tisa",)
    """Position methods; each gets its own table. "learned+tisa" adds to the model's position embeddings, "tisa"
    replaces them, and "own" leaves the model as it is; `whereformer positions` lists others."""
    kernels: Annotated[Counts, Range(0, 1024), MayChange] = (0, 1, 3, 5)
    """Numbers of TISA kernels per head. 0 is the baseline, the same model without TISA."""
    seeds: Annotated[int, Range(1, MAX_RUNS), MayChange] = 5
    """How many seeds to repeat every run with: of the head, new kernels, the order of rows and dropout."""
    epochs: Annotated[float, Between(0, MAX_RATE)] = 3.0
    """How many times each row is read."""
    batch_size: Annotated[int, Range(1, MAX_SIZE)] = 32
    """Rows in a training step."""
    learning_rate: Annotated[float, Between(0, MAX_RATE)] = 3e-5
    """Peak learning rate. It rises in the first tenth of the steps."""
    kernel_learning_rate: Annotated[float | None, Between(0, MAX_RATE)] = None
    """Peak learning rate of TISA's kernels, which are new, while the rest is pretrained. Default: the same."""
    max_length: Annotated[int | None, Range(4, MAX_SIZE)] = None
    """Number of tokens to truncate longer rows to. Default: no row is truncated, and a row that is too long for the
    model is an error."""
    out: Annotated[Path, MayChange] = Path("runs/finetune")
    """Folder for the results."""

    def check(self) -> None:
        task_options = {"validation": self.validation, "text": self.text, "label": self.label}
        if self.train is None:
            for name, value in {**task_options, "regression": self.regression}.items():
                if value:
                    raise InputError(name, "only with `train`, for a task of your own")
            if not self.task:
                raise InputError("task", "expected a GLUE task (or `train` FILE for a task of your own), got none")
        else:
            for name, value in task_options.items():
                if not value:
                    raise InputError(name, "a task of your own (`train`) needs it")
            if len(self.text) > 2:
                raise InputError("text", f"expected one column or two, got {', '.join(self.text)}")
            for name in ("task", "data"):
                if getattr(self, name):
                    raise InputError(name, "GLUE tasks and a task of your own (`train`) need separate runs")

    def resolve(self) -> Finetune:
        """Return the recipe, prepared before its folder is made, because an error may be about an option."""
        check_regular_in("model", self.model)
        names = tuple(dict.fromkeys("".join(name.split()) for name in self.position))
        recipe = replace(self, position=names, kernels=tuple(sorted(self.kernels)))
        recipe.prepared  # noqa: B018  # a cached property
        return recipe

    @cached_property
    def settings(self) -> dict[str, list[Variant]]:
        """The models of each position method."""
        return {position: build_variants(position, self.kernels) for position in self.position}

    @property
    def variants(self) -> dict[str, Variant]:
        """Every different model, by name."""
        return {variant.name: variant for setting in self.settings.values() for variant in setting}

    @cached_property
    def prepared(self) -> Prepared:
        """Load all tasks, tokenize their text, and let every model read the longest row.

        Raises:
            InputError: if a task can't be loaded, a model, method or tokenizer does not fit, or rows are too long.
        """
        if self.train is None:
            loaded = glue.load_glue(self.task, self.data, self.train_rows)
        else:
            assert self.validation is not None
            assert self.label is not None
            arguments = self.train, self.validation, self.text, self.label
            loaded = [glue.load_own(*arguments, regression=self.regression, train_rows=self.train_rows)]
        tasks: dict[str, glue.Data] = {}
        hashes, sizes = dict[str, str](), {}
        for variant in self.variants.values():
            model = loading.load_classifier(self.model, variant.position, variant.kernels, 2)
            if not tasks:
                tokenizer = loading.load_tokenizer(self.model, self.tokenizer)
                labeled.check_tokenizer(tokenizer, model.config.vocab_size)
                options = {"tokenizer": tokenizer, "max_length": self.max_length, "config": model.config}
                tokenize = partial(labeled.tokenize, **options)
                tasks = {data.task.name: data.convert(tokenize) for data in loaded}
                weights = loading.fingerprint(self.model)
                hashes = {name: labeled.fingerprint_rows(rows.splits.values(), weights) for name, rows in tasks.items()}
            labeled.check_lengths(model, [split for task in tasks.values() for split in task.splits.values()])
            sizes[variant.name] = loading.count_parameters_by_origin(model)
        return Prepared(tasks, hashes, sizes, tokenizer)

    def run(self, run: Run) -> report.Report:
        if self.dry_run:
            return report.Report("What would be fine-tuned?", [self.DRY], [self.plan()])
        hashes = self.prepared.hashes
        for task, value in hashes.items():
            run.record_hash(f"model or other rows of {task}", value)
        run.log(self.plan())
        # Every model is trained with one seed before the next.
        seeds = range(self.seed, self.seed + self.seeds)
        keys = [(task, name, seed) for task in hashes for seed in seeds for name in self.variants]
        steps = {task: self.steps(task) for task in hashes}
        results = run.map(
            keys, self.tune, task="tune", kind=FinetuneResult, steps=lambda task, *_: steps[task], problem=self.problem
        )
        return self.report(results, seeds)

    def steps(self, task: str) -> int:
        """Return the number of training steps of a run."""
        rows = len(self.prepared.tasks[task].train.rows)
        return max(1, round(self.epochs * math.ceil(rows / self.batch_size)))

    def problem(self, key: tuple[str, str, int], result: FinetuneResult) -> str | None:
        """Return why a recorded result is not valid, or None if it is."""
        rows = self.prepared.tasks[key[0]]
        metrics = [set(scores) for scores in result.scores.values()]
        expected = [set(rows.task.metrics)] * len(rows.eval_splits)
        is_complete = result.losses and result.scores.keys() == rows.eval_splits.keys() and metrics == expected
        return None if is_complete else "its record lacks losses or scores"

    def tune(self, run: Run, task: str, name: str, seed: int) -> FinetuneResult:
        """Fine-tune a model on a task with a seed, and score it."""
        rows, steps = self.prepared.tasks[task], self.steps(task)
        variant, classes = self.variants[name], len(rows.task.classes or ()) or None
        model = loading.load_for_training(self.model, variant.position, variant.kernels, classes, seed)
        row_numbers = batches.RandomBatches(rows.train.lengths, self.batch_size, seed)
        plan = training.Training(
            steps=steps,
            rate=self.learning_rate,
            kernel_rate=self.kernel_learning_rate,
            schedule=self.schedule,
            bfloat16=self.uses_bfloat16(run.device),
        )
        torch.manual_seed(seed)  # for dropout: the number of random weights depends on the model

        def batch(step: int) -> Any:
            return rows.train.collate(row_numbers(step))

        progress = training.train(model, batch, plan, device=run.device, on_log=run.advance)
        scores, answers = {}, list[int]()
        for split_name, split in rows.eval_splits.items():
            logits = self.predict(model, split)
            if not logits.isfinite().all():
                problem = f"{name} predicts values that are not finite (NaN or inf); try a lower one"
                raise InputError("learning_rate", problem)
            if classes is not None:
                answers = answers or logits.argmax(-1)[:MAX_ANSWERS].tolist()
            scores[split_name] = metrics.score(rows.task.metrics, split.labels, logits.numpy())
        words = [f"{split} {metric} {100 * value:.1f}".strip() for split, metric, value in iter_scores(scores)]
        run.log(f"{task}, {name}, seed {seed}: {', '.join(words)}")
        return FinetuneResult(scores, score_report.smooth(progress.losses), answers)

    def predict(self, model: Any, split: labeled.Rows) -> Any:
        """Return the logits of all rows, (rows, classes)."""
        model.eval()
        row_numbers, outputs = list(batches.by_length(split.lengths, self.batch_size)), []
        with (
            torch.no_grad(),
            torch.autocast(model.device.type, torch.bfloat16, enabled=self.uses_bfloat16(model.device.type)),
        ):
            for numbers in row_numbers:
                batch = split.collate(numbers)
                del batch["labels"]
                outputs.append(model(**{name: tensor.to(model.device) for name, tensor in batch.items()}).logits)
        order = torch.tensor([number for numbers in row_numbers for number in numbers]).argsort()
        return torch.cat(outputs).float().cpu()[order]

    def plan(self) -> Sheet:
        """Return the tasks and models of the recipe."""
        rows = []
        for name, task in self.prepared.tasks.items():
            lengths = sorted(task.train.lengths.flatten().tolist())
            counts = ", ".join(f"{split} {count:,}" for split, count in task.counts.items())
            longest = max(int(split.lengths.max()) for split in task.splits.values())
            data = f"{counts} rows from {task.source}; median {lengths[len(lengths) // 2]} tokens, longest {longest}"
            rows.append((name, f"{data}; {self.steps(name):,} steps per run"))
            rows += [("", note) for note in self.caveats(task)]
        for name, (total, positional, new) in self.prepared.sizes.items():
            note = f", {new:,} of them new" if new else ""  # as if another method replaces trained positions
            rows.append((name, f"{total:,} parameters, {positional:,} of them positional{note}"))
        parts = (len(self.prepared.tasks), "task"), (len(self.prepared.sizes), "model"), (self.seeds, "seed")
        words = ", ".join(f"{number} {word}{'' if number == 1 else 's'}" for number, word in parts)
        rows.append(("runs", f"{math.prod(number for number, _ in parts)}: {words}"))
        return Sheet.of("Plan", ["", Column("", left=True, wraps=True)], rows)

    def caveats(self, task: glue.Data) -> list[str]:
        """Return notes about the scores of a task: truncated rows."""
        num_truncated = sum(split.num_truncated for split in task.splits.values())
        return [f"{num_truncated:,} rows were truncated to {self.max_length} tokens"] if num_truncated else []

    def report(self, results: Results, seeds: range) -> report.Report:
        """Return the tables, laid out as in the TISA paper, and conclusions."""
        scores: dict[tuple[str, str], dict[str, list[float]]] = {}
        for (task, name, _), result in results.items():
            for split, metric, value in iter_scores(result.scores):
                row = scores.setdefault((f"{task} {split}".strip(), metric), {})
                row.setdefault(name, []).append(100 * value)
        sheets, labeled_gains = [], []
        for position, setting in self.settings.items():
            rows = {key: [row[variant.name] for variant in setting] for key, row in scores.items()}
            has_baseline = setting[0].label == BASELINE
            gains = {key: verdicts.Gain(row[0], row[1:]) for key, row in rows.items() if has_baseline}
            labeled_gains += [(gain, position, *key) for key, gain in gains.items()]
            sheets.append(table(position, [variant.label for variant in setting], rows, gains))
        explained = f"Scores in percent{f', medians over {len(seeds)} seeds with their range' * (len(seeds) > 1)}. "
        sheets[-1] = replace(sheets[-1], notes=(explained + EXPLANATION,))
        tasks = self.prepared.tasks
        if len(self.settings) > 1:
            sheets.append(ranking(results, list(tasks), list(self.variants), seeds))
        for task in tasks:
            sheets += self.build_examples(task, results, seeds[0])
        notes = [f"{name}: {note}" for name, task in tasks.items() for note in self.caveats(task)]
        sheets.append(replace(self.plan(), title="Rows and models", folded=True))
        sentences = [verdicts.choose_method(labeled_gains, len(seeds)), *notes]
        return report.Report(f"What does position add to {self.model}?", sentences, sheets, results)

    def build_examples(self, task: str, results: Results, seed: int) -> list[Sheet]:
        """Return a table of a task's inputs whose answer depends on the model, by the models of one seed."""
        answers_of = {name: results[task, name, seed].answers for name in self.variants}
        data, rows = self.prepared.tasks[task], list[list[str]]()
        split, classes = next(iter(data.eval_splits.values())), data.task.classes or ()
        for row, label, *answers in zip(split.rows, split.labels, *answers_of.values(), strict=False):
            if len(set(answers)) > 1:
                text = examples.decode(self.prepared.tokenizer, torch.tensor(row[0]))
                words = {name: classes[answer] for name, answer in zip(answers_of, answers, strict=True)}
                rows.append(examples.compare_answers(text, classes[int(label)], words))
        title, note = f"Inputs of {task} whose answer changes", f"Of seed {seed}, the first such inputs."
        return examples.build_sheet(title, rows[: examples.MAX_ROWS], note)


# Tables.


def table(
    position: str,
    labels: Sequence[str],
    scores: Mapping[tuple[str, str], Sequence[Sequence[float]]],
    gains: Mapping[tuple[str, str], verdicts.Gain],
) -> Sheet:
    """Return the table of one position method: the scores of its models by task and metric, and gains by the same."""
    columns: list[Column | str] = ["task", Column("metric", left=True), *labels, "gain", "error reduction"]
    rows: list[list[Cell | str]] = []
    for (task, metric), models in scores.items():
        best = max(map(median, models)) if len(models) > 1 else None
        gain = gains.get((task, metric))
        last = [Cell(DASH), Cell(DASH)]
        if gain is not None:
            last = [signed(gain.points, "*" if gain.is_clear else ""), signed(gain.error_reduction, "%")]
        rows.append([task, metric, *(score_cell(values, best) for values in models), *last])
    return Sheet.of(f"{position}: scores in percent", columns, rows)


def ranking(results: Results, tasks: Sequence[str], names: Sequence[str], seeds: Sequence[int]) -> Sheet:
    """Return the table of all models, the best mean first: of a task's scores, and of tasks, as in GLUE."""
    columns = {}
    for name in names:
        by_task = [
            [100 * fmean(value for _, _, value in iter_scores(results[task, name, seed].scores)) for seed in seeds]
            for task in tasks
        ]
        columns[name] = [*by_task, list(map(fmean, zip(*by_task, strict=True)))]
    order = sorted(names, key=lambda name: -median(columns[name][-1]))
    rows: list[list[Cell | str]] = [[name, *map(score_cell, columns[name])] for name in order]
    note = "A task's score is the mean of its scores. Models whose ranges overlap may differ by chance."
    return Sheet.of("All models, the best first", ["model", *tasks, "mean"], rows, notes=(note,))


def score_cell(values: Sequence[float], best: float | None = None) -> Cell:
    """Return the cell of a median over seeds with its range. The best one is bold."""
    style = "font-weight: bold" if median(values) == best else ""
    show = partial(decimals, style=".1f")
    return Cell.of_seeds(values, show, show, style=style)


def signed(number: float | None, mark: str) -> Cell:
    """Return the cell of a number with its sign, and a mark after it."""
    return Cell(DASH if number is None else f"{number:+z.1f}{mark}".replace("-", MINUS), order=number)


def iter_scores(scores: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str, float]]:
    """Return the split, the metric and the value of each score."""
    return [(split, metric, value) for split, values in scores.items() for metric, value in values.items()]
