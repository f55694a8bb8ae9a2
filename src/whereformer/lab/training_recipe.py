"""The base of recipes that train one model for long: its options, the training itself, and how the model is saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from .. import ranks
from ..errors import InputError
from . import tensorboard
from .options import MAX_RUNS, MAX_SEED, MAX_SIZE
from .recipe import MayChange, Range, Trains, lazy_modules
from .sheet import Column, Sheet

if TYPE_CHECKING:
    from .. import manifest
    from . import examples, loading
    from . import train as training
    from .report import report, score_report
    from .run import Run
else:
    manifest, loading, training = lazy_modules("manifest", "lab.loading", "lab.train")
    score_report, report, examples = lazy_modules("lab.report.score_report", "lab.report.report", "lab.examples")


@dataclass(frozen=True)
class PreparedTraining:
    """The data and settings of a training, which recipes extend: hashes of its inputs, and its number of steps."""

    hashes: Mapping[str, object]
    steps: int


@dataclass(frozen=True)
class TrainingResult:
    """A finished training."""

    losses: list[tuple[int, float]]  # steps with the training loss, a moving average
    scores: Annotated[list[Any], list[tuple[int, dict[str, float]]]]  # the held-out scores by name, each with its step
    saved: dict[str, float]  # the held-out scores of the saved model
    about: dict[str, Any]  # sizes of the model and of the data
    # Answers of the saved model, in the columns of the recipe's ANSWERS; earlier versions recorded none.
    examples: list[list[str]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether it has losses, and scores with the same names after each step and for the saved model."""
        names = {tuple(scores) for scores in (self.saved, *(scores for _, scores in self.scores))}
        return bool(self.losses and self.scores) and len(names) == 1 and "loss" in self.saved


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe(Trains):
    """Base class of recipes that train one model for long, on text that is encoded once."""

    MANY: ClassVar = True
    MAKES_FILES: ClassVar = True
    ANSWERS: ClassVar[tuple[str, Sequence[str], str]]
    """The title, the columns and the note of the table of examples."""

    position_options: str | None = None
    """The method's options as a JSON object, such as '{"num_kernels": 3}'; `whereformer positions` lists these too."""
    accumulate: Annotated[int, Range(1, MAX_SIZE)] = 1
    """Number of batches in a step. With more than one, a step can have more text than fits into memory at a time."""
    seed: Annotated[int, Range(0, MAX_SEED)] = 0
    """Seed of the weights and of all other random numbers."""
    cache: Annotated[Path | None, MayChange] = None
    """Folder for the encoded text, which is made once and then read a part at a time. Runs on the same text can share
    it. Default: cache/ in --out."""
    threads: Annotated[int | None, Range(1, MAX_RUNS), MayChange] = None
    """Threads on the CPU. Default: torch's."""
    report_to: Annotated[Literal["tensorboard", "none"] | None, MayChange] = None
    """Where to report losses and scores, besides the report. Default: tensorboard, if it is installed."""

    @property
    def outputs(self) -> tuple[str, ...]:
        caches = ("cache/text/",) if self.cache is None else ()
        tracked = ("tensorboard/events/",) if self.reports_to_tensorboard else ()
        return ("model/", "checkpoints/checkpoint-1/", *caches, *tracked)

    @property
    def reports_to_tensorboard(self) -> bool:
        """Whether losses and scores are written for TensorBoard."""
        return self.report_to != "none" and find_spec("tensorboard") is not None

    def check(self) -> None:
        if self.report_to == "tensorboard" and not self.reports_to_tensorboard:
            raise InputError("report_to", "tensorboard is not installed; try `pip install tensorboard`")
        if self.dry_run and ranks.size() > 1:
            raise InputError("dry_run", f"expected one process, got {ranks.size()}")

    def run(self, run: Run) -> report.Report:
        prepared = self.prepare(run, run.folder / "cache" if self.cache is None or self.dry_run else self.cache)
        plan = Sheet.of("Plan", ["", Column("", left=True, wraps=True)], self.plan(prepared))
        if self.dry_run:
            return report.Report("What would be trained?", [self.DRY], [plan])
        run.log(plan)
        facts = {"options": run.options, **prepared.hashes}
        damage = ranks.from_main(lambda: manifest.find_problem(run.folder / "model", facts))

        def problem(key: object, result: TrainingResult) -> str | None:
            return damage or (None if result.is_complete else "its record lacks losses or scores")

        with loading.quiet_transformers():
            result = run.map(
                *([()], self.train, prepared, facts),
                task="train",
                kind=TrainingResult,
                steps=prepared.steps,
                problem=problem,
            )[()]
        title, sentences = self.headline(prepared, result)
        last = {} if result.saved == result.scores[-1][1] else {"saved": result.saved}
        title_of, columns, note = self.ANSWERS
        sections = score_report.build_sections(result.losses, result.scores, last)
        sections += [*examples.build_sheet(title_of, result.examples, note, columns), replace(plan, folded=True)]
        return report.Report(title, sentences, sections, asdict(result))

    def prepare(self, run: Run, cache: Path) -> Any:
        """Read the text, and return the recipe's :class:`PreparedTraining`. ``cache``: the folder for encoded text."""
        raise NotImplementedError

    def plan(self, prepared: Any) -> Sequence[tuple[str, str]]:
        """Describe the data and the training, as the rows of a table."""
        raise NotImplementedError

    def train(self, run: Run, prepared: Any, facts: Mapping[str, object]) -> TrainingResult:
        """Train from the newest valid checkpoint, or from the start, and save the model."""
        raise NotImplementedError

    def headline(self, prepared: Any, result: TrainingResult) -> tuple[str, list[str]]:
        """Return the report's question and its sentences."""
        raise NotImplementedError

    def fit(
        self,
        run: Run,
        model: Any,
        batches: Callable[[int], Any],
        plan: training.Training,
        score: Callable[[int], dict[str, float]],
        interval: int,
        facts: Mapping[str, object],
        save_extra: Callable[[Path], object] = lambda folder: None,
    ) -> training.Progress:
        """Train a model from the newest valid checkpoint, or from the start, and log its losses and scores.

        There are ``interval`` steps between checkpoints, each with a score. ``facts`` is JSON that identifies the
        training. Other arguments are as in :func:`.train.train` and :class:`.train.Checkpoints`.
        """
        folder = self.out / "tensorboard" if self.reports_to_tensorboard else None
        with tensorboard.open_writer(folder) as log_metrics:

            def score_and_log(step: int) -> dict[str, float]:
                scores = score(step)
                run.log(f"step {step:,}: held-out {score_report.format_scores(scores)}")
                log_metrics(step, {f"eval/{name}": value for name, value in scores.items()})
                return scores

            return training.train(
                model,
                batches,
                plan,
                device=run.device,
                score=score_and_log,
                score_at=eval_steps(interval, plan.steps),
                checkpoints=training.Checkpoints(
                    *(run.folder / "checkpoints", interval, facts, run.log),
                    max_checkpoints=getattr(self, "keep", 2),
                    save_extra=save_extra,
                ),
                on_log=run.advance,
                log_metrics=log_metrics,
            )

    def save(self, run: Run, model: Any, tokenizer: Any, facts: Mapping[str, object]) -> None:
        """Save the trained model in transformers' format, with its tokenizer and a manifest with ``facts``."""
        if run.is_main:
            loading.save(model, tokenizer, run.folder / "model", facts)
        ranks.wait()


def eval_steps(interval: int, steps: int) -> list[int]:
    """Return the steps after which a training is scored: the multiples of ``interval``, and the last step."""
    return [*range(interval, steps, interval), steps]
