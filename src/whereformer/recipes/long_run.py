"""What recipes share that train one model for long: their options, the training itself, and how the model is saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from ..errors import InputError
from ..files import new_folder
from ..lab import ranks, trackers
from ..lab.options import MOST_THREADS
from ..lab.recipe import Free, Range, Trains, lazily

with lazily(__name__):
    from ..kernels import torch_private
    from ..lab import card, loading, manifest
    from ..lab import train as training
    from ..lab.report import losses
    from ..lab.run import Run


@dataclass(frozen=True, kw_only=True)
class LongRun(Trains):
    """Base class of recipes that train one model for long, on text that is encoded once."""

    MANY: ClassVar = True
    MAKES_FILES: ClassVar = True

    cache: Annotated[Path | None, Free] = None
    """Folder for the encoded text, which is made once and then read a part at a time. Runs on the same text can share
    it. Default: cache/ in --out."""
    threads: Annotated[int | None, Range(1, MOST_THREADS), Free] = None
    """Threads on the CPU. Default: torch's."""
    report_to: Annotated[Literal["trackio", "wandb", "tensorboard", "none"] | None, Free] = None
    """Program to report losses and scores to. The run is named after --out. Default: tensorboard if it is
    installed."""

    def check(self) -> None:
        trackers.check_installed(self.report_to or "none")
        if self.dry_run and ranks.size() > 1:
            raise InputError("dry_run", f"expected one process, got {ranks.size()}")

    def begin(self, run: Run) -> Path:
        """Set the threads, say so if bfloat16 is slow on this processor, and return the folder for the encoded text."""
        run.threads = self.threads or run.threads
        if self.bfloat16(run.device) and run.device == "cpu" and not torch_private.multiplies_bfloat16():
            run.say("note: this processor has no instructions for bfloat16; --dtype float32 is much faster here")
        return run.folder / "cache" if self.cache is None or self.dry_run else self.cache

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
        tracker = self.report_to or ("tensorboard" if find_spec("tensorboard") else "none")
        with trackers.reporting(tracker, self.out) as tell:

            def scored(step: int) -> dict[str, float]:
                scores = score(step)
                run.say(f"step {step:,}: held-out {losses.in_words(scores)}")
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
                    run.folder / "checkpoints", every, facts, run.say, getattr(self, "keep", 2), also
                ),
                on_log=run.step,
                tell=tell,
            )

    def save(self, run: Run, model: Any, tokenizer: Any, facts: Mapping[str, Any], **about: Any) -> None:
        """Save the trained model as transformers reads it, with its tokenizer, its manifest of ``facts`` and its card.

        ``about`` is what the card tells: the number of ``parameters``, facts about the ``text``, and the last
        ``scores``.
        """
        if run.is_main:
            with loading.quiet_transformers(), new_folder(run.folder / "model") as partial:
                model.save_pretrained(partial)
                tokenizer.save_pretrained(partial)
                card.write_card(partial, model, self.record(), run.provenance, command=self.command(), **about)
                manifest.write(partial, facts)
        ranks.wait()


def scored_steps(every: int, steps: int) -> list[int]:
    """Return the steps after which a training is scored: each so many, and the last."""
    return [*range(every, steps, every), steps]
