"""Long runs: a study that trains one model, with held-out scores along the way, safe to interrupt and resume.

A :class:`LongJob` leads from a study's options to a finished folder, in one process or several. What a study trains is
a :class:`LongTraining`. Both run on transformers' Trainer, whose own intervals are off: one callback decides when to
log, judge and save.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState

from ...errors import InputError, one_line
from ...files import naming
from .. import ranks
from ..jobs import threads
from ..loading import quiet_transformers
from ..progress import Progress
from ..provenance import provenance
from ..sheet import Sheet
from ..shown import Plan
from .folder import KEPT_CHECKPOINTS, Folder, Kind
from .results import TrainingPlan, losses_of, score_texts
from .shared import Batch, Count, SharedTrainer
from .trackers import tracker
from .trainer import slow_dtype, training_arguments

Judge = Callable[[nn.Module, dict[str, Tensor]], dict[str, tuple[float, int]]]
"""Scores a batch: takes a model and a batch, and returns a sum and the number of items summed for each score."""


@dataclass(frozen=True)
class Course:
    """The length of a training, and what a number of steps means in epochs and tokens.

    Args:
        steps: optimizer steps in all.
        every: steps between checkpoints; each checkpoint comes with a held-out score.
        epochs: maps a number of steps to passes over the data.
        tokens_seen: maps a number of steps to tokens read.
    """

    steps: int
    every: int
    epochs: Callable[[int], float]
    tokens_seen: Callable[[int], int]

    def is_judged(self, step: int) -> bool:
        """Return whether a checkpoint and a held-out score follow this step."""
        return step % self.every == 0 or step == self.steps


class LongTraining(ABC, Generic[Kind]):
    """What a long run trains and how, once its text is encoded. Subclasses say what differs between studies."""

    training: Any
    """The settings, with ``dtype``, ``seed`` and ``accumulate``."""
    text: Any
    """The encoded text, with ``facts`` and ``tokenizer``."""
    device: torch.device
    keep: int = KEPT_CHECKPOINTS
    """How many checkpoints to keep."""

    @property
    def pinned(self) -> Sequence[int]:
        """The steps whose checkpoints are kept besides."""
        return ()

    @property
    @abstractmethod
    def course(self) -> Course:
        """The length of the training, and what its steps mean."""

    @property
    @abstractmethod
    def plan(self) -> TrainingPlan:
        """The facts that are known before training."""

    @abstractmethod
    def sheet(self) -> Sheet:
        """Return the plan as a table."""

    def costs(self) -> tuple[str, ...]:
        """Return what a dry run tells besides the plan."""
        return ()

    @abstractmethod
    def build(self) -> PreTrainedModel:
        """Build the untrained model; its weights follow from torch's random numbers."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> tuple[Optimizer, LRScheduler]:
        """Return the optimizer and the schedule of its learning rate."""

    @abstractmethod
    def batches(self) -> DataLoader[Batch]:
        """Return this process's share of the batches of all steps."""

    @abstractmethod
    def held_out(self) -> DataLoader[Batch]:
        """Return this process's batches to judge by. Each row is in a batch of one process."""

    @property
    @abstractmethod
    def count(self) -> Count:
        """Counts the items of a batch that each part of the loss is a mean over."""

    @property
    @abstractmethod
    def judge(self) -> Judge:
        """Scores a batch."""

    @property
    def factors(self) -> dict[str, float]:
        """The factor of a part in the loss, if it is not 1."""
        return {}

    def means(self, scores: dict[str, float]) -> dict[str, float]:
        """Return the held-out means to report, "loss" first."""
        return scores

    def unusable(self, folder: Folder[Kind], step: int, model: nn.Module) -> str | None:
        """Return why a step's checkpoint, which is what its manifest says, can't be used by a model; or None."""
        return None

    def finished(self, model: Any, folder: Folder[Kind], results: Kind) -> tuple[PreTrainedModel, Kind]:
        """Return the model to save, and the results with what is known after training."""
        return model, results


class LongJob(ABC, Generic[Kind]):
    """The work of a study that trains one model: its checked options, before the text is read."""

    command: str
    """The command line, for the model card."""
    RESULTS: ClassVar[type[Any]]
    cache: Path | None
    threads: int | None
    report_to: str | None
    """Where to report losses and scores; None is TensorBoard if that is installed."""

    @abstractmethod
    def read(self, progress: Progress) -> Any:
        """Return the text, which has a ``fingerprint``."""

    @abstractmethod
    def settings(self, text: str) -> dict[str, Any]:
        """Return everything that decides a result, given the text's hash. All runs in a folder share it."""

    @abstractmethod
    def prepared(self, text: Any, cache: Path) -> LongTraining[Kind]:
        """Encode the text, or open it in the cache, and return the training on it."""

    def run(self, folder: Path, progress: Progress) -> Kind:
        """Train from the newest checkpoint or the start, unless the folder has the finished model.

        Raises:
            InputError: if something does not fit, the folder holds another run, or the loss is not finite.
            KeyboardInterrupt: if the training was interrupted; a checkpoint has been saved.
        """
        with threads(self.threads):
            cache = self.cache or folder / "cache"
            progress.begin("reading the text")
            text = self.read(progress)
            kept: Folder[Kind] = Folder(folder, self.settings(text.fingerprint), self.RESULTS, self.command)
            if (results := ranks.from_main(lambda: kept.finished(progress))) is not None:
                progress.line(f"{kept.path} is already finished; nothing to do")
                return results
            with ranks.main_first():
                training = self.prepared(text, cache)
            progress.line(training.sheet())
            for note in slow_dtype(training.training.dtype, training.device):
                progress.line(note)
            return train(training, kept, progress, self.report_to)

    def plan(self, folder: Path, progress: Progress) -> Plan:
        """Return what :meth:`run` would do; see there for errors."""
        with threads(self.threads), TemporaryDirectory() as place:
            training = self.prepared(self.read(progress), Path(place))
            notes = slow_dtype(training.training.dtype, training.device)
            return Plan(training.sheet(), (*notes, *training.costs()))


class LongTrainer(SharedTrainer, Generic[Kind]):
    """Hugging Face's Trainer with our batch order, held-out scores and checkpoints, and the time of earlier runs added.

    Args:
        long: what is trained.
        folder: the run's folder, where checkpoints count only once they are complete.
        model: the model.
        start: the results before the first step.
        seconds: time that earlier runs took.
        callbacks: the Trainer's callbacks.
    """

    ADVICE = " (and another `out`), or more `warmup`"
    control: TrainerControl

    def __init__(
        self,
        long: LongTraining[Kind],
        folder: Folder[Kind],
        model: nn.Module,
        start: Kind,
        seconds: float,
        callbacks: Sequence[TrainerCallback],
    ) -> None:
        self.long, self.folder, self.start = long, folder, start
        self.held_out = long.held_out()
        self.started = time.perf_counter() - seconds
        of = long.training
        super().__init__(
            training=long.batches(),
            count=long.count,
            factors=long.factors,
            model=model,
            optimizers=long.optimizer(model),
            args=training_arguments(
                folder.beside,
                long.course.steps,
                long.device,
                run=folder.out.resolve().name,
                dtype=of.dtype,
                seed=of.seed,
                accumulate=of.accumulate,
            ),
            callbacks=callbacks,
        )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint beside its place, and put it there when it is complete."""
        step = self.state.global_step
        with naming(self.folder.checkpoint(step)):
            super()._save_checkpoint(model, trial)
            ranks.wait()  # until every process has written its random state
            if ranks.is_main():
                self.folder.accept(step, self.long.keep, self.long.pinned)
                self.results().write(self.folder.path)
            ranks.wait()  # until the checkpoint counts

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Log and return mean scores over all held-out data, however it is batched and divided among processes."""
        found = judge_all(self.model, self.held_out, self.long.judge, self.args.device, bf16=self.args.bf16)
        scores = {f"eval_{name}": mean for name, mean in self.long.means(found).items()}
        self.log(scores)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, scores)
        return scores

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # The Trainer counts all steps as one epoch; people mean passes over the data.
        self.state.epoch = self.long.course.epochs(self.state.global_step)
        super().log({**logs, "seconds": time.perf_counter() - self.started}, start_time)

    def results(self, finished: bool = False) -> Kind:
        """Return the results after the steps so far."""
        step, logs = self.state.global_step, self.state.log_history
        judged = [(log["step"], _scores(log)) for log in logs if "eval_loss" in log]
        return replace(
            self.start,
            finished=finished,
            step=step,
            tokens_seen=self.long.course.tokens_seen(step),
            seconds=round(_seconds(self.state), 1),
            losses=losses_of(self.state),
            held_out=[
                {"step": at, **{name: round(value, 4) for name, value in scores.items()}} for at, scores in judged
            ],
        )


class TrainingWatch(TrainerCallback):
    """The callback that decides when to log, judge and save, reports progress, and stops on request."""

    def __init__(self, course: Course, progress: Progress) -> None:
        self.course, self.progress = course, progress
        self.interrupted = self.began = False
        self.loss = ""
        # A few hundred points make a curve, however long the training.
        self.log_every = max(1, min(50, course.steps // 200))

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        self.began = True
        # Count only the remaining steps, or the time left would be estimated from steps that this run did not take.
        self.progress.start(state.max_steps - state.global_step)
        self.progress.begin("training")

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        step = state.global_step
        # All processes stop after the same step.
        stopped = ranks.totals([self.interrupted]) != [0]
        control.should_evaluate = self.course.is_judged(step)
        control.should_save = control.should_evaluate or stopped
        # Logging checks that the loss is finite, so it comes before every checkpoint.
        control.should_log = control.should_save or step % self.log_every == 0
        control.should_training_stop = step == state.max_steps or stopped
        self.progress.step(1, f"step {step:,}/{state.max_steps:,}{self.loss}")

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        logs = state.log_history[-1]
        if "loss" in logs:
            self.loss = f", loss {logs['loss']:.3f}"
        if scores := _scores(logs):
            self.progress.line(f"step {state.global_step:,}: held-out {score_texts(scores)}")


def _scores(logs: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}


def _seconds(state: TrainerState) -> float:
    return max((log.get("seconds", 0.0) for log in state.log_history), default=0.0)


@torch.no_grad()
def judge_all(
    model: nn.Module, batches: Iterable[dict[str, Tensor]], judge: Judge, device: torch.device, *, bf16: bool = False
) -> dict[str, float]:
    """Return mean scores over all batches of all processes, by name. Random numbers drawn afterwards are unaffected.

    Args:
        model: the model; after the call it is in training or evaluation as before.
        batches: this process's batches, on the CPU.
        judge: scores a batch.
        device: where the model is.
        bf16: whether to use mixed precision.
    """
    was_training = model.training
    model.eval()
    found = []
    # A DataLoader draws a random number.
    with torch.random.fork_rng([torch.cuda.current_device()] if device.type == "cuda" else []):
        for batch in batches:
            moved = {name: value.to(device) for name, value in batch.items()}
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                found.append(judge(model, moved))
    model.train(was_training)
    sums: dict[str, tuple[float, int]] = {}
    for scores in chain.from_iterable(ranks.gather(found)):
        for name, (value, count) in scores.items():
            before = sums.get(name, (0.0, 0))
            sums[name] = before[0] + value, before[1] + count
    return {name: value / count for name, (value, count) in sums.items()}


@quiet_transformers()
def train(long: LongTraining[Kind], folder: Folder[Kind], progress: Progress, report_to: str | None = None) -> Kind:
    """Train from the folder's newest checkpoint that counts, or from the start; see :meth:`LongJob.run`."""
    seed, steps = long.training.seed, long.course.steps
    torch.manual_seed(seed)
    model = long.build().to(long.device)
    plan = vars(long.plan)
    start = folder.kind(**plan, settings=folder.settings, text=long.text.facts, **provenance(long.device))
    if ranks.is_main():
        folder.claim(start)
    checkpoint = ranks.from_main(lambda: folder.newest_checkpoint(lambda step: long.unusable(folder, step, model)))
    if folder.passed_over:
        passed = "; ".join(f"{name}: {reason}" for name, reason in folder.passed_over.items())
        progress.line(f"passing over {passed}{'' if checkpoint else '. Starting again from the first step'}")
    before, seconds, watch = TrainerState(), 0.0, TrainingWatch(long.course, progress)
    with _stopped_by_signals(watch):
        if checkpoint is not None:
            with _loading(checkpoint, watch):
                before = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
                seconds = _seconds(before)
            progress.line(f"continuing after step {before.global_step:,} of {steps:,}")
        callbacks = [watch, *tracker(report_to, folder.out / "tensorboard", before.global_step)]
        trainer = LongTrainer(long, folder, model, start, seconds, callbacks)
        if before.global_step or ranks.rank():
            # For dropout, if the checkpoint has no state for this process: numbers that no other process and step has.
            torch.manual_seed(hash((seed, before.global_step, ranks.rank())))
        try:
            with _loading(checkpoint, watch):
                trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            if ranks.is_main():
                shutil.rmtree(folder.beside, ignore_errors=True)
    if (step := trainer.state.global_step) < steps:
        progress.line(f"stopped after step {step:,}; its checkpoint is in {folder.checkpoints}")
        raise KeyboardInterrupt
    saved, results = long.finished(model, folder, trainer.results(finished=True))
    if ranks.is_main():
        folder.finish(saved, long.text.tokenizer, results)
    ranks.wait()
    return results


@contextmanager
def _stopped_by_signals(watch: TrainingWatch) -> Iterator[None]:
    """Make Ctrl-C (or SIGTERM) finish the step, save and stop; a second one stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return

    def stop(number: int, frame: FrameType | None) -> None:
        # A launcher passes on the signal that its processes may have got already.
        if watch.interrupted and ranks.size() == 1:
            raise KeyboardInterrupt
        watch.interrupted = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _loading(checkpoint: Path | None, watch: TrainingWatch) -> Iterator[None]:
    """Name a checkpoint that does not load, although it is what its manifest says."""
    try:
        yield
    except Exception as error:
        if checkpoint is None or watch.began or isinstance(error, InputError):
            raise
        reason = one_line(str(error))[:200] or type(error).__name__
        told = f"{checkpoint} does not load ({reason}); delete it, then the same command continues without it"
        raise InputError("out", told) from error
