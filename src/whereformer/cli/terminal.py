"""What commands show in a terminal: progress with the time left, and the ranked table."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..experiments.bench.results import BenchRow
from ..experiments.bench.ways import FLOOR
from ..experiments.compare.ranking import RankedMethod
from ..experiments.seeds import Spread
from ..runs.progress import Progress as Listener

if TYPE_CHECKING:
    from ..analysis import PaperRow
    from ..analysis.findings import HeadFindings, ModelFindings
    from ..experiments.bench.tune import TuneRow
    from ..experiments.distill.results import DistillResults
    from ..experiments.finetune.gains import GainsTable
    from ..experiments.finetune.prepare import Checked, Job
    from ..experiments.pretrain.results import PretrainPlan
    from ..experiments.properties.ticks import MethodTicks
    from ..experiments.translate.results import TranslationFacts, TranslationPlan
    from ..training.results import TrainingPlan
    from ..training.text import TextFacts


class Bar(Listener):
    """A progress bar over the whole job; finished parts leave a line each."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console,
            speed_estimate_period=120,
            refresh_per_second=2,
            transient=True,
        )
        self.task = self.bar.add_task("", total=None, detail="")

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def start(self, steps: int) -> None:
        self.bar.update(self.task, total=steps)

    def begin(self, label: str) -> None:
        self.bar.update(self.task, description=label, detail="")

    def step(self, steps: int = 1, detail: str = "") -> None:
        self.bar.update(self.task, advance=steps, detail=detail)

    def line(self, text: str) -> None:
        self.console.print(text, highlight=False)


def print_ranking(console: Console, rows: Sequence[RankedMethod], length: int) -> None:
    """The table of a comparison, at most 100 columns wide."""
    table = Table(
        title=f"Held-out masked-LM loss, trained on {length} tokens at a time (lower is better)",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("position", no_wrap=True)
    lengths = sorted(rows[0].loss)
    for tried in lengths:
        table.add_column(f"loss\n@{tried}", justify="right", no_wrap=True)
    for title in ("accu-\nracy", "speed", "MiB", "params"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.rank),
            row.position,
            *(_loss(row.loss[tried]) for tried in lengths),
            f"{row.accuracy.median:.1%}",
            "-" if row.relative_speed.median is None else f"{row.relative_speed.median:.2f}",
            "-" if row.peak_memory is None else f"{row.peak_memory / 2**20:.0f}",
            f"{row.positional_parameters:,}",
        )
    console.print(table)
    console.print(
        "Methods with the same # can't be told apart. speed: of training, relative to none; MiB: peak memory of a "
        "training step; params: those of position.",
        style="dim",
        highlight=False,
    )


def _loss(cell: Spread) -> str:
    if cell.median is None or cell.low is None or cell.high is None:
        return "cannot"
    if cell.low == cell.high:
        return f"{cell.median:.3f}"
    return f"{cell.median:.3f}\n{cell.low:.2f}-{cell.high:.2f}"


def print_bench(console: Console, rows: Sequence[BenchRow]) -> None:
    """The table of a benchmark: a line for each case and way, with why something is missing below it."""
    dtypes = {row.dtype for row in rows}
    table = Table(title="Time relative to torch's attention without positions", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("terms", no_wrap=True)
    if len(dtypes) > 1:
        table.add_column("dtype", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("way", no_wrap=True)
    for title in ("forward", "training"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("training\nMiB", justify="right", no_wrap=True)
    found: dict[tuple[str, str, int, str], dict[str, BenchRow]] = {}
    for row in rows:
        found.setdefault((row.dtype, row.terms, row.n, row.way), {})[row.direction] = row
    notes: dict[str, int] = {}
    previous = None
    for (dtype, kind, n, way), both in found.items():
        if previous not in (None, (dtype, kind)):
            table.add_section()
        previous = dtype, kind
        cells = [_time(both.get(direction), notes) for direction in ("forward", "training")]
        training = both.get("training")
        memory = "-" if training is None or training.memory is None else _mebibytes(training.memory)
        table.add_row(kind, *([dtype] if len(dtypes) > 1 else []), str(n), way, *cells, memory)
    console.print(table)
    for note, number in notes.items():
        console.print(f"[{number}] {note}", style="dim", highlight=False)
    console.print(
        "Medians of the rounds' ratios (lowest-highest); sdpa is torch's attention without positions, MiB what a call "
        "needs beyond its inputs.",
        style="dim",
        highlight=False,
    )


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f}" if size < 10 * 2**20 else f"{size / 2**20:,.0f}"


def _time(row: BenchRow | None, notes: dict[str, int]) -> str:
    """A cell: the time of plain attention, how much longer another way takes, or the number of a note."""
    if row is None:
        return "-"
    if row.milliseconds is None:
        return f"cannot [{notes.setdefault(row.note, len(notes) + 1)}]"
    if row.way == FLOOR.name:
        return f"{row.milliseconds:.3g} ms" if row.milliseconds < 1000 else f"{row.milliseconds:.0f} ms"
    return f"{row.ratio:.2f} ({row.lowest:.2f}-{row.highest:.2f})"


def print_tuning(console: Console, rows: Sequence[TuneRow]) -> None:
    """The table of measured thresholds, at most 80 columns wide, and what would change in ``tuning.py``."""
    from ..experiments.bench.tune import lines, show
    from ..kernels import tuning

    processor = tuning.current().processor
    table = Table(title=f"Thresholds of attention for {processor}, measured here", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for title in ("now", "best\nhere", "time by\nbest / now"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        same = row.best == row.now
        ratio = "-" if same else f"{row.ratio:.2f} ({row.lowest:.2f}-{row.highest:.2f})"
        verdict = "keep" if same else "change" if row.better else "noise"
        table.add_row(row.label, show(row.now), show(row.best), ratio, verdict)
    console.print(table)
    console.print(
        "Medians of the rounds' ratios (lowest-highest). noise: less than 3% faster, or not in every round: keep.",
        style="dim",
        highlight=False,
    )
    for failure in dict.fromkeys(failure for row in rows for failure in row.failed):
        console.print(f"can't: {failure}", style="dim", highlight=False)
    changed = lines(rows)
    if changed:
        say(console, f"for {processor} in src/whereformer/kernels/tuning.py:", *(f"    {line}" for line in changed))
    else:
        say(console, "nothing to change in src/whereformer/kernels/tuning.py")


def say(console: Console, *lines: str) -> None:
    """Lines as they are: the terminal breaks them where they end, so that paths and code can be copied."""
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def print_plan(console: Console, text: TextFacts, blocks: str, steps: int, plan: PretrainPlan) -> None:
    """What a pretraining run is about to do: the text, the model and how often it reads the text."""
    lengths = ", ".join(f"{length:,}" for length in plan.block_lengths)
    lines = (
        f"text: {text.training_tokens:,} training and {text.held_out_tokens:,} held-out tokens from "
        f"{text.source}; guessing by frequency: loss {text.unigram_entropy:.2f}",
        f"{_model_size(plan, text.vocabulary)}; blocks {blocks} of {lengths} tokens",
        f"training: {steps:,} steps of {plan.tokens_per_step:,} tokens; {_passes(plan)}",
    )
    say(console, *lines)


def _model_size(plan: TrainingPlan, vocabulary: int) -> str:
    return (
        f"model: {plan.parameters:,} parameters, of them {plan.embedding_parameters:,} embeddings of "
        f"{vocabulary:,} tokens and {plan.positional_parameters:,} of position"
    )


def _passes(plan: TrainingPlan) -> str:
    return f"the text is {plan.steps_per_epoch:,.1f} steps long and read {plan.epochs:,.1f} times"


def print_paper_flops(console: Console, rows: Sequence[PaperRow]) -> None:
    """The relative FLOPs of the Funnel-Transformer paper's models."""
    table = Table(title="FLOPs relative to BERT-base", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", no_wrap=True)
    for column in rows[0].relative:
        length, _, form = column.rpartition(" ")
        table.add_column(f"n={length}\n{form}" if length else form, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.model, *(f"{value:.3f}" for value in row.relative.values()))
    console.print(table)
    console.print(
        "linear: the paper's own figure, layers by length and squared width. Otherwise every product in the layers at "
        "that length, with relative attention in the form named as the authors' code computes it, batch 8; ours costs "
        "the same shifted and less factorized. +D2: with two decoder layers.",
        style="dim",
        highlight=False,
    )


def print_finetuning(console: Console, job: Job, checked: Checked) -> None:
    """What a fine-tuning is about to do: its tasks and models."""
    for encoded in checked.tasks:
        found = encoded.facts()
        rows = ", ".join(f"{split} {count:,}" for split, count in found.rows.items())
        tokens = found.tokens_of_a_row
        lines = [
            f"{encoded.data.task.name}: {rows} rows from {found.source}; median {tokens['median']} tokens, "
            f"longest {tokens['most']}; {job.steps(encoded):,} steps a run"
        ]
        if found.subsets:
            lines.append(f"  only a part of {', '.join(found.subsets)}: not to be compared with published scores")
        if found.cut_rows:
            lines.append(f"  {found.cut_rows:,} rows cut to {job.tuning.max_length} tokens")
        say(console, *lines)
    models = []
    for name, count in checked.parameters.items():
        # Trained positions that another method replaces are not to go without a word.
        fresh = f", {count.fresh:,} of them fresh" if count.fresh else ""
        models.append(f"{name} ({count.all:,} parameters, {count.position:,} of position{fresh})")
    total = len(checked.tasks) * len(models) * len(job.seeds)
    say(
        console,
        f"models: {'; '.join(models)}",
        f"{total} runs: {len(checked.tasks)} tasks, {len(models)} models, {len(job.seeds)} seeds",
    )


def print_gains(console: Console, tables: Sequence[GainsTable]) -> None:
    """The tables of a fine-tuning, in the TISA paper's form."""
    for each in tables:
        table = Table(title=f"{each.position}: scores in percent", box=box.SIMPLE_HEAD, pad_edge=False)
        for title in ("task", "metric"):
            table.add_column(title, no_wrap=True)
        for title in (*each.columns, "gain", "error\nreduction"):
            table.add_column(title, justify="right", no_wrap=True)
        for row in each.rows:
            gain = "-" if row.gain is None else f"{row.gain:+z.1f}{'*' if row.clear else ''}"
            reduction = "-" if row.error_reduction is None else f"{row.error_reduction:+z.1f}%"
            table.add_row(row.task, row.metric, *map(_score, row.cells), gain, reduction)
        console.print(table)
    console.print(
        "Medians over seeds (their range below); gain: the largest over the baseline, error reduction: that by the "
        "baseline's distance from 100. *: every seed is better than every seed of the baseline.",
        style="dim",
        highlight=False,
    )


def _score(cell: Spread | None) -> str:
    if cell is None or cell.median is None or cell.low is None or cell.high is None:
        return "-"
    return f"{cell.median:.1f}" + (f"\n{cell.low:.1f} to {cell.high:.1f}" if cell.low != cell.high else "")


def print_translation_plan(console: Console, text: TranslationFacts, plan: TranslationPlan, max_length: int) -> None:
    """What a translation training is about to do: the text, the model and how often it reads the text."""
    lines = []
    for name, part in (("training", text.training), ("held-out", text.held_out)):
        left_out = [
            f"{count:,} {why}"
            for count, why in (
                (part.empty, "with an empty line"),
                (part.too_long, f"of more than {max_length} tokens"),
            )
            if count
        ]
        lines.append(
            f"{name}: {part.pairs:,} pairs, {part.source_tokens:,} and {part.target_tokens:,} tokens, a line "
            f"at most {part.longest}" + (f"; left out: {', '.join(left_out)}" if left_out else "")
        )
    say(
        console,
        *lines,
        _model_size(plan, text.vocabulary),
        f"training: {plan.steps:,} steps of about {plan.tokens_per_step:,} tokens; {_passes(plan)}",
    )


def print_scores(console: Console, found: dict[str, Any]) -> None:
    """BLEU, chrF and BLEU by length."""
    table = Table("words of the source", box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("lines", "BLEU"):
        table.add_column(title, justify="right")
    for part in found["bleu_by_words"]:
        words = f"{part['from']} and more" if part["to"] is None else f"{part['from'] or 'up'} to {part['to']}"
        table.add_row(words, f"{part['lines']:,}", f"{part['bleu']:.1f}")
    console.print(table)
    say(
        console,
        f"BLEU {found['bleu']:.2f} ({found['bleu_signature']}), lengths {found['length_ratio']:.3f} of the references'",
        f"chrF {found['chrf']:.2f} ({found['chrf_signature']})",
    )


MOST_HEADS = 24
"""Heads that have a line each; of more, their layers have."""


def print_analysis(console: Console, models: Sequence[ModelFindings]) -> None:
    """What an analysis found: a line for each model, and for one alone also for its heads or their layers."""
    table = Table(title="Position", box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("model", "method"):
        table.add_column(title, overflow="fold")
    for title in ("step", "score", "length", "Toeplitz-\nness of P"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("heads", overflow="fold")
    for model in models:
        table.add_row(
            model.name,
            model.position,
            "-" if model.step is None else f"{model.step:,}",
            "-" if model.score is None else f"{model.score:g}",
            str(model.length),
            "-" if model.table is None else f"{model.table.toeplitzness:.3f}",
            _names(model.heads) or "-",
        )
    console.print(table)
    for model in models:
        for missing in (model.no_table, model.no_heads):
            if missing:
                console.print(f"{model.name}: {missing}", style="dim", highlight=False)
    if len(models) == 1 and models[0].heads:
        (_print_heads if len(models[0].heads) <= MOST_HEADS else _print_layers)(console, models[0])
        console.print(
            "Toeplitzness: the share of a head's scores by position that a curve over offsets explains; fit: the share "
            "of the curve that so many TISA kernels explain"
            + (
                "; text: the share of its log weights over text that the offset explains."
                if _measured(models[0])
                else "."
            ),
            style="dim",
            highlight=False,
        )


def _measured(model: ModelFindings) -> bool:
    return model.attention is not None


def _names(heads: Sequence[HeadFindings]) -> str:
    """How many heads have which name, the most frequent first."""
    return ", ".join(f"{count} {name}" for name, count in Counter(head.name for head in heads).most_common())


def _print_heads(console: Console, model: ModelFindings) -> None:
    shown = [fit.num_kernels for fit in model.heads[0].fits if fit.num_kernels in (1, 3, len(model.heads[0].fits))]
    table = _head_table("layer", "head", "name", shown, model)
    for head in model.heads:
        table.add_row(
            str(head.layer),
            str(head.head),
            head.name,
            f"{head.toeplitzness:.2f}",
            *(f"{float(head.fits[count - 1].explained):.3f}" for count in shown),
            *_explained(model, [head]),
        )
    console.print(table)


def _print_layers(console: Console, model: ModelFindings) -> None:
    most = len(model.heads[0].fits)
    table = _head_table("layer", "heads", "names", [most], model)
    for layer in dict.fromkeys(head.layer for head in model.heads):
        heads = [head for head in model.heads if head.layer == layer]
        table.add_row(
            str(layer),
            str(len(heads)),
            _names(heads),
            f"{_mean([head.toeplitzness for head in heads]):.2f}",
            f"{_mean([float(head.fits[-1].explained) for head in heads]):.3f}",
            *_explained(model, heads),
        )
    console.print(table)


def _head_table(first: str, second: str, names: str, fits: Sequence[int], model: ModelFindings) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in (first, second):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column(names, overflow="fold")
    titles = ["Toeplitz-\nness", *(f"fit\nS={count}" for count in fits), *(["text"] if _measured(model) else [])]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _explained(model: ModelFindings, heads: Sequence[HeadFindings]) -> list[str]:
    """What the offset explains of the attention of some heads, on average, if it was measured."""
    if model.attention is None:
        return []
    shares = [float(model.attention.explained[head.layer, head.head]) for head in heads]
    return [f"{_mean(shares):.2f}" if math.isfinite(sum(shares)) else "-"]


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def print_distilling(console: Console, results: DistillResults) -> None:
    """What is left of a model whose position embeddings became kernels."""
    names = {
        "similarity": ("states alike\n(cosine)", "{:.3f}"),
        "masked_lm_loss": ("masked-LM\nloss", "{:.3f}"),
        "masked_lm_accuracy": ("masked-LM\naccuracy", "{:.1%}"),
        "spearman": ("pairs\n(Spearman)", "{:.3f}"),
    }
    table = Table(title="Before any training", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("positions", no_wrap=True)
    shown = [name for name in names if name in next(iter(results.scores.values()))]
    for title in (*(names[name][0] for name in shown), "curves\nexplained"):
        table.add_column(title, justify="right", no_wrap=True)
    for model, scores in results.scores.items():
        explained = [value for layer in results.explained.get(model, ()) for value in layer]
        table.add_row(
            model,
            *(names[name][1].format(scores[name]) for name in shown),
            f"{statistics.mean(explained):.0%}" if explained else "-",
        )
    console.print(table)


def print_properties(console: Console, rows: Sequence[MethodTicks]) -> None:
    """What each method can do, at most 100 columns wide, and where that is not what the paper says."""
    from ..experiments.properties import ticks

    table = Table(title="What each position method can do, measured", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("position", no_wrap=True)
    for heading in ("inductive", "data-\ndriven", "parameter\nefficient", "translation\ninvariant"):
        table.add_column(heading, no_wrap=True)
    for heading in ("paralleliz-\nable", "interpret-\nable"):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        marks = (f"{tick.word}{'*' if tick.differs else ''}\n{tick.number}" for tick in row.ticks.values())
        table.add_row(row.position, *marks)
    console.print(table)
    for name, meaning in ticks.MEANINGS.items():
        console.print(f"{ticks.title(name)}: {meaning}", style="dim", highlight=False)
    for heading, lines in (
        ("Not decided, or not possible:", ticks.open_ticks(rows)),
        ("* Where Table 1 of the TISA paper says otherwise:", ticks.disagreements(rows)),
    ):
        if lines:
            console.print(f"\n{heading}", style="bold", highlight=False)
        for line in lines:
            console.print(f"- {line}", highlight=False)
