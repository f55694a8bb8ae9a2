"""Long trainings on transformers' Trainer: with held-out scores along the way, and safe to interrupt and resume.

The Trainer's own intervals are off. One callback decides when to log, judge and save.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any, Generic

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState

from ...files import full_disk, naming
from .. import ranks
from ..progress import Progress
from .finite import FiniteWatch
from .folder import Folder, Kind
from .results import LossPoint
from .shared import SharedTrainer

Judge = Callable[[nn.Module, dict[str, Tensor]], dict[str, tuple[float, int]]]
"""Scores a batch: takes a model and a batch, and returns a sum and the number of items summed for each score."""


@dataclass(frozen=True)
class Course:
    """The length of a training, and what a number of steps means in epochs and tokens.

    Args:
        steps: optimizer steps in all.
        every: steps between checkpoints; each checkpoint comes with a held-out score.
        learning_rate: the peak learning rate, for the advice in error messages.
        epochs: maps a number of steps to passes over the data.
        tokens_seen: maps a number of steps to tokens read.
    """

    steps: int
    every: int
    learning_rate: float
    epochs: Callable[[int], float]
    tokens_seen: Callable[[int], int]

    def is_judged(self, step: int) -> bool:
        """Return whether a checkpoint and a held-out score follow this step."""
        return step % self.every == 0 or step == self.steps


class JudgedTrainer(SharedTrainer):
    """Hugging Face's Trainer with our batch order, held-out scores and checkpoints, and the time of earlier runs added.

    Args:
        folder: the run's folder, where checkpoints count only once they are complete.
        keep: how many checkpoints to keep.
        course: the length of the training.
        held_out: this process's batches to judge by, on the CPU.
        judge: scores a batch.
        seconds: time that earlier runs took.

    The other arguments are those of :class:`SharedTrainer`.
    """

    def __init__(
        self,
        *,
        folder: Folder[Any],
        keep: int,
        course: Course,
        held_out: Iterable[dict[str, Tensor]],
        judge: Judge,
        seconds: float,
        **options: Any,
    ) -> None:
        self.control: TrainerControl
        self.folder = folder
        self.keep = keep
        self.saving = False
        self.course = course
        self.held_out = held_out
        self.judge = judge
        self.started = time.perf_counter() - seconds
        super().__init__(**options)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint beside its place, and put it there when it is complete."""
        step, writes = self.state.global_step, self.args.should_save
        with naming(self.folder.checkpoint(step)):
            try:
                self.saving = True
                super()._save_checkpoint(model, trial)
                ranks.wait()  # until every process has written its random state
                if writes:
                    self.folder.accept(step, self.keep)
                ranks.wait()  # until the checkpoint counts
            finally:
                self.saving = False
                if writes:
                    shutil.rmtree(self.folder.beside, ignore_errors=True)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.folder.beside if self.saving else self.folder.checkpoints)

    @torch.no_grad()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return mean scores over all held-out data, however it is batched and divided among processes."""
        means = self.means(judge_all(self.model, self.held_out, self.judge, self.args.device, bf16=self.args.bf16))
        scores = {f"{metric_key_prefix}_{name}": mean for name, mean in means.items()}
        self.log(dict(scores))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, scores)
        return scores

    def means(self, found: dict[str, float]) -> dict[str, float]:
        """Return the means to report, "loss" first."""
        return found

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # The Trainer counts all steps as one epoch; people mean passes over the data.
        self.state.epoch = self.course.epochs(self.state.global_step)
        super().log({**logs, "seconds": time.perf_counter() - self.started}, start_time)


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


class TrainingWatch(FiniteWatch, Generic[Kind]):
    """The callback that decides when to log, judge and save, reports progress, saves results, and stops on request.

    Args:
        course: the length of the training.
        folder: where the results go.
        start: the results before the first step.
        progress: shows the progress.
    """

    def __init__(self, course: Course, folder: Folder[Kind], start: Kind, progress: Progress) -> None:
        super().__init__(course.learning_rate, " (and another `out`), or more `warmup`")
        self.course = course
        self.folder = folder
        self.start = start
        self.progress = progress
        self.interrupted = False
        self.loss = ""
        # A few hundred points make a curve, however long the training.
        self.log_every = max(1, min(50, course.steps // 200))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        # Count only the remaining steps, or the time left would be estimated from steps that this run did not take.
        self.progress.start(state.max_steps - state.global_step)
        self.progress.begin("training")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        step = state.global_step
        judged = self.course.is_judged(step)
        # All processes stop after the same step.
        stopped = ranks.totals([self.interrupted]) != [0]
        control.should_evaluate = judged
        control.should_save = judged or stopped
        # Logging checks that the loss is still a number, so it comes before every checkpoint.
        control.should_log = control.should_save or step % self.log_every == 0
        control.should_training_stop = step == state.max_steps or stopped
        self.progress.step(1, f"step {step:,}/{state.max_steps:,}{self.loss}")

    def logged(self, step: int, logs: dict[str, float]) -> None:
        if "loss" in logs:
            self.loss = f", loss {logs['loss']:.3f}"
        if "eval_loss" in logs:
            told = ", ".join(score_text(name[5:], value) for name, value in logs.items() if name.startswith("eval_"))
            self.progress.line(f"step {step:,}: held-out {told}")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        if ranks.is_main():
            self.results(state).write(self.folder.path)

    def results(self, state: TrainerState, finished: bool = False) -> Kind:
        """Return the results after ``state.global_step`` steps."""
        logs = state.log_history
        return replace(
            self.start,
            finished=finished,
            step=state.global_step,
            tokens_seen=self.course.tokens_seen(state.global_step),
            seconds=round(_seconds(logs), 1),
            losses=[LossPoint(log["step"], round(log["loss"], 4)) for log in logs if "loss" in log],
            held_out=[
                {
                    "step": log["step"],
                    **{name[5:]: round(value, 4) for name, value in log.items() if name.startswith("eval_")},
                }
                for log in logs
                if "eval_loss" in log
            ],
        )


def score_text(name: str, value: float) -> str:
    """Format a held-out score for people: accuracy and recall in percent."""
    shown = f"{value:.1%}" if name.endswith(("accuracy", "recall")) else f"{value:.3f}"
    return f"{name.replace('_', ' ')} {shown}"


def _seconds(logs: Sequence[dict[str, float]]) -> float:
    return max((log.get("seconds", 0.0) for log in logs), default=0.0)


def train(
    make: Callable[[float, list[TrainerCallback]], JudgedTrainer],
    watch: TrainingWatch[Kind],
    folder: Folder[Kind],
    progress: Progress,
    unusable: Callable[[int], str | None] = lambda step: None,
) -> TrainerState:
    """Train to the end, from the folder's newest checkpoint that is complete and unchanged, or from the start.

    Args:
        make: makes the trainer, given the seconds that earlier runs took and the callbacks.
        watch: the callback that watches the training.
        folder: the run's folder.
        progress: shows the progress.
        unusable: returns a further reason why a step's checkpoint can't be used, or None.

    Raises:
        InputError: if the loss stops being a number.
        KeyboardInterrupt: if the training was interrupted; a checkpoint has been saved.
    """
    if ranks.is_main():
        folder.claim()
    checkpoint = ranks.from_main(lambda: folder.newest_checkpoint(unusable))
    seconds, step = 0.0, 0
    if (lost := ranks.from_main(folder.damage)) is not None:
        progress.line(lost)
    if folder.passed_over:
        passed = "; ".join(f"{name}: {reason}" for name, reason in folder.passed_over.items())
        progress.line(f"passing over {passed}{'' if checkpoint else '. Starting again from the first step'}")
    if checkpoint is not None:
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        seconds, step = _seconds(state.log_history), state.global_step
        progress.line(f"continuing after step {step:,} of {watch.course.steps:,}")
    curves = folder.out / "tensorboard"
    # Whatever else is written names itself.
    with naming(curves), _full_disk_of_threads(), _stopped_by_signals(watch):
        trainer = make(seconds, [watch, *_tensorboard(curves, step)])
        trainer.remove_callback(PrinterCallback)
        if step or ranks.rank():
            # For dropout, if the checkpoint has no state for this process: numbers that no other process and step has.
            torch.manual_seed(hash((trainer.args.seed, step, ranks.rank())))
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if trainer.state.global_step < watch.course.steps:
        progress.line(f"stopped after step {trainer.state.global_step:,}; its checkpoint is in {folder.checkpoints}")
        raise KeyboardInterrupt
    return trainer.state


@contextmanager
def _stopped_by_signals(watch: TrainingWatch[Any]) -> Iterator[None]:
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
def _full_disk_of_threads() -> Iterator[None]:
    """Do not print the error of a full disk from a thread: TensorBoard's raises it again at the next write."""
    before = threading.excepthook

    def told(found: threading.ExceptHookArgs) -> None:
        if found.exc_value is None or full_disk(found.exc_value) is None:
            before(found)

    threading.excepthook = told
    try:
        yield
    finally:
        threading.excepthook = before


def _tensorboard(folder: Path, step: int) -> list[TrainerCallback]:
    """Return a callback that writes TensorBoard's files, if that is installed; it hides old entries after ``step``."""
    if find_spec("tensorboard") is None or not ranks.is_main():
        return []
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    return [TensorBoardCallback(SummaryWriter(str(folder), purge_step=step + 1 if step else None))]
