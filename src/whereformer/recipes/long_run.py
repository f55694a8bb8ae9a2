"""What recipes share that train one model for long: their options, the training itself, and how the model is saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from .. import ranks
from ..errors import InputError
from ..files import new_folder
from ..lab import trackers
from ..lab.options import MOST_RUNS, MOST_SEED, MOST_SIZE
from ..lab.recipe import Free, Range, Trains, lazily
from ..lab.sheet import Column, Sheet

with lazily(__name__):
    from .. import manifest
    from ..lab import loading
    from ..lab import train as training
    from ..lab.report.report import Report
    from ..lab.run import Run
    from . import score_report


@dataclass(frozen=True)
class Work:
    """What is trained on what.

    Args:
        read: hashes of what was read.
        steps: the number of training steps.
    """

    read: dict[str, Any]
    steps: int


@dataclass(frozen=True)
class Outcome:
    """A finished training.

    Args:
        losses: steps with the training loss, a moving average.
        scores: the held-out scores by name, each with its step.
        saved: those of the saved model.
        about: sizes of the model, and of what was read.
    """

    losses: list[tuple[int, float]]
    scores: Annotated[list[Any], list[tuple[int, dict[str, float]]]]
    saved: dict[str, float]
    about: dict[str, Any]

    @property
    def is_complete(self) -> bool:
        """Whether it has losses, and the same scores after each step and of the saved model."""
        names = {tuple(scores) for scores in (self.saved, *(scores for _, scores in self.scores))}
        return bool(self.losses and self.scores) and len(names) == 1 and "loss" in self.saved


@dataclass(frozen=True, kw_only=True)
class LongRun(Trains):
    """Base class of recipes that train one model for long, on text that is encoded once."""

    MANY: ClassVar = True
    MAKES_FILES: ClassVar = True

    position_options: str | None = None
    """The method's options as a JSON object, such as '{"num_kernels": 3}'; `whereformer positions` lists these too."""
    accumulate: Annotated[int, Range(1, MOST_SIZE)] = 1
    """Number of batches in a step. With more than one, a step can have more text than fits into memory at a time."""
    seed: Annotated[int, Range(0, MOST_SEED)] = 0
    """Seed of the weights and of everything that is drawn."""
    cache: Annotated[Path | None, Free] = None
    """Folder for the encoded text, which is made once and then read a part at a time. Runs on the same text can share
    it. Default: cache/ in --out."""
    threads: Annotated[int | None, Range(1, MOST_RUNS), Free] = None
    """Threads on the CPU. Default: torch's."""
    report_to: Annotated[Literal["trackio", "wandb", "tensorboard", "none"] | None, Free] = None
    """Program to report losses and scores to. The run is named after --out. Default: tensorboard if it is
    installed."""

    @property
    def outputs(self) -> tuple[str, ...]:
        caches = ("cache/text/",) if self.cache is None else ()
        tracked = ("tensorboard/events/",) if self.tracker == "tensorboard" else ()
        return ("model/", "checkpoints/checkpoint-1/", *caches, *tracked)

    @property
    def tracker(self) -> str:
        """The program to report to, or "none"."""
        return self.report_to or ("tensorboard" if find_spec("tensorboard") else "none")

    def check(self) -> None:
        trackers.check_installed(self.report_to or "none")
        if self.dry_run and ranks.size() > 1:
            raise InputError("dry_run", f"expected one process, got {ranks.size()}")

    def run(self, run: Run) -> Report:
        run.threads = self.threads or run.threads
        work = self.prepare(run, run.folder / "cache" if self.cache is None or self.dry_run else self.cache)
        plan = Sheet.of("Plan", ["", Column("", left=True, wraps=True)], self.plan(work))
        if self.dry_run:
            return Report("What would be trained?", [self.DRY], [plan])
        run.say(plan)
        facts = {"options": run.options, **work.read}
        damage = ranks.from_main(lambda: manifest.find_problem(run.folder / "model", facts))

        def problem(key: Any, outcome: Outcome) -> str | None:
            return damage or (None if outcome.is_complete else "its record lacks losses or scores")

        with loading.quiet_transformers():
            found = run.each([()], self.train, work, facts, kind=Outcome, steps=work.steps, problem=problem)
        outcome = found[()]
        title, sentences = self.told(work, outcome)
        last = {} if outcome.saved == outcome.scores[-1][1] else {"saved": outcome.saved}
        parts = [*score_report.build_sections(outcome.losses, outcome.scores, last), replace(plan, folded=True)]
        return Report(title, sentences, parts, asdict(outcome))

    def prepare(self, run: Run, cache: Path) -> Any:
        """Read the text, and return the recipe's :class:`Work`. Encoded text is in the folder ``cache``."""
        raise NotImplementedError

    def plan(self, work: Any) -> Sequence[tuple[str, str]]:
        """Return what is read and trained, as the rows of a table."""
        raise NotImplementedError

    def train(self, run: Run, work: Any, facts: Mapping[str, Any]) -> Outcome:
        """Train from the newest checkpoint that counts, or from the start, and save the model."""
        raise NotImplementedError

    def told(self, work: Any, outcome: Outcome) -> tuple[str, list[str]]:
        """Return what the report asks, and its sentences."""
        raise NotImplementedError

    def fit(
        self,
        run: Run,
        model: Any,
        batches: Callable[[int], Any],
        plan: training.Training,
        score: Callable[[int], dict[str, float]],
        every: int,
        facts: Mapping[str, Any],
        also: Callable[[Path], object] = lambda folder: None,
    ) -> training.Trained:
        """Train a model from the newest checkpoint that counts, or from the start, and tell its losses and scores.

        Args:
            run: the run.
            model: the model.
            batches: returns the batch of a step.
            plan: how it is trained.
            score: returns the held-out scores after a step.
            every: steps between checkpoints, each with a score.
            facts: what the training is of, as JSON.
            also: writes more into the folder of each checkpoint.
        """
        with trackers.reporting(self.tracker, self.out, run.say) as tell:

            def scored(step: int) -> dict[str, float]:
                scores = score(step)
                run.say(f"step {step:,}: held-out {score_report.format_scores(scores)}")
                tell(step, {f"eval/{name}": value for name, value in scores.items()})
                return scores

            return training.train(
                model,
                batches,
                plan,
                device=run.device,
                score=scored,
                score_at=scored_steps(every, plan.steps),
                checkpoints=training.Checkpoints(
                    run.folder / "checkpoints", every, facts, run.say, getattr(self, "keep", 2), also, run.keeps
                ),
                on_log=run.step,
                tell=tell,
            )

    def save(self, run: Run, model: Any, tokenizer: Any, facts: Mapping[str, Any]) -> None:
        """Save the trained model as transformers reads it, with its tokenizer and its manifest of ``facts``."""
        if run.is_main:
            with loading.quiet_transformers(), new_folder(run.folder / "model") as partial:
                model.save_pretrained(partial)
                tokenizer.save_pretrained(partial)
                manifest.write(partial, facts)
        ranks.wait()


def scored_steps(every: int, steps: int) -> list[int]:
    """Return the steps after which a training is scored: each so many, and the last."""
    return [*range(every, steps, every), steps]
