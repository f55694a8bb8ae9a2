"""The training loop: one process or several, on a CPU or GPUs, and from any checkpoint to the same bits.

No step waits for the device. Losses stay there and are fetched every ``log_every`` steps, and only then checked for
NaN.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .. import manifest, ranks
from ..data.windows import IGNORED
from ..errors import InputError, one_line
from ..files import new_folder, remove
from ..provenance import this_version
from .optimizer import build_optimizer, build_schedule
from .run import handle_signals

Batch = dict[str, Tensor]
MAX_GRAD_NORM = 1.0
"""Gradients are scaled down if their joint norm is larger."""
PARTS = ("model", "optimizer", "scheduler")
"""The attributes of :class:`_State` whose states a checkpoint has."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained."""

    steps: int
    rate: float  # the peak of the learning rate
    kernel_rate: float | None = None  # the peak for position methods' `kernel_parameters`; if None, `rate`
    # Builds an optimizer for a model, with its schedule; if None, AdamW with `schedule`.
    optimizer: Callable[[nn.Module], tuple[Optimizer, LambdaLR]] | None = None
    schedule: str = "linear"  # how the rate falls after the warm-up, a name in `SCHEDULES`
    warmup: int | None = None  # steps until the rate reaches its peak; if None, a tenth of all
    accumulate: int = 1  # parts of a batch that are computed one after another, in less memory
    bfloat16: bool | None = None  # whether to compute in it; if None, only on a GPU
    log_every: int = 20  # steps between reports of the loss
    # Whether to compile the model, for each shape of batches, with CUDA graphs on a GPU; only in one process, and
    # without `accumulate`.
    compiled: bool = False

    def build(self, model: nn.Module) -> tuple[Optimizer, LambdaLR]:
        """Return the optimizer and its schedule."""
        if self.optimizer is not None:
            return self.optimizer(model)
        optimizer = build_optimizer(model, self.rate, self.kernel_rate)
        warmup = self.steps // 10 if self.warmup is None else self.warmup
        return optimizer, build_schedule(optimizer, self.schedule, warmup, self.steps)


@dataclass
class Progress:
    """The steps of a training so far: their number, the loss of each, and held-out scores, each with its step."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    scores: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often a training is saved."""

    folder: Path  # only this training uses it
    interval: int  # steps between checkpoints. After Ctrl-C or SIGTERM there is one more
    training_id: object = None  # JSON that identifies the training; checkpoints of other trainings are skipped
    # Called with messages: which training continues, and which checkpoints are skipped, and why.
    log: Callable[[str], None] = print
    max_checkpoints: int = 1  # how many checkpoints to keep
    # Writes more into each folder, such as the model in the format of other programs.
    save_extra: Callable[[Path], object] = lambda folder: None


class NotFiniteError(InputError):
    """A loss is not finite. The error is about ``learning_rate``, and suggests another value."""

    @classmethod
    def after(cls, step: int, rate: float) -> NotFiniteError:
        """Return the error of a loss after some steps with a peak learning rate."""
        reason = f"the loss is not finite (NaN or inf) after {step} steps; {rate:g} is too high, try {rate / 4:g}"
        return cls("learning_rate", reason)

    @property
    def problem(self) -> str:
        """The reason without the suggestion."""
        return self.reason.partition(";")[0]


def train(
    model: nn.Module,
    batches: Callable[[int], Batch],
    training: Training,
    *,
    device: str = "cpu",
    score: Callable[[int], object] | None = None,
    score_at: Container[int] = (),
    checkpoints: Checkpoints | None = None,
    on_log: Callable[[int, float], None] = lambda steps, loss: None,
    log_metrics: Callable[[int, Mapping[str, float]], None] = lambda step, values: None,
) -> Progress:
    """Train a model that returns its loss, the mean over the labels of a batch.

    Args:
        model: the model; it is moved to the device.
        batches: returns the batch of each step from 0 on: tensors on the CPU, a row for each example, with "labels".
            Each of several processes trains on its part of the rows.
        training: how it is trained.
        device: "cpu" or "cuda".
        score: computes a held-out score after a step.
        score_at: the numbers of steps after which it is computed.
        checkpoints: where to save, and to continue from.
        on_log: called with the number of new steps and the last loss.
        log_metrics: called with the step and the last loss by its name, for a tracker.

    Raises:
        NotFiniteError: if a loss is not finite.
        InputError: if it is not finite because its batch has no label.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once the training is saved if it has ``checkpoints``.
    """
    state = _State(model, training, device)
    if ranks.rank():  # or dropout would be the same in the rows of all processes
        torch.manual_seed(hash((torch.initial_seed(), ranks.rank())))
    progress = Progress() if checkpoints is None else state.load(checkpoints)
    if checkpoints is not None and progress.step:
        checkpoints.log(f"{checkpoints.folder}: continuing after step {progress.step:,} of {training.steps:,}")
        on_log(progress.step, progress.losses[-1])
    losses = torch.zeros(training.steps, device=state.device)
    model.train()
    interrupts: list[int] = []
    with handle_signals(lambda number, frame: interrupts.append(number), signal.SIGINT, signal.SIGTERM):
        for step in range(progress.step + 1, training.steps + 1):
            parts = _split_batch(batches(step - 1), training.accumulate)
            losses[step - 1] = state.step(parts, training)
            saves = checkpoints is not None and step % checkpoints.interval == 0
            scores = score is not None and step in score_at
            stops = bool(interrupts) and ranks.size() == 1  # several processes agree below
            if step % training.log_every and step < training.steps and not (saves or scores or stops):
                continue
            # From here on, it waits for the device.
            reports = ranks.gather((losses[progress.step : step].tolist(), bool(interrupts)))
            stops = any(interrupted for _, interrupted in reports)
            new_losses = [fmean(values) for values in zip(*(values for values, _ in reports), strict=True)]
            for number, loss in enumerate(new_losses, progress.step + 1):
                if not math.isfinite(loss):
                    _check_labels(batches(number - 1), number)
                    raise NotFiniteError.after(number - 1, training.rate)
            on_log(step - progress.step, new_losses[-1])
            log_metrics(step, {"train/loss": new_losses[-1]})
            progress.step, progress.losses = step, [*progress.losses, *new_losses]
            if score is not None and scores:
                progress.scores.append([step, score(step)])
                model.train()
            if checkpoints is not None and (stops or (saves and step < training.steps)):
                state.save(checkpoints, progress)
            if stops:
                raise KeyboardInterrupt
    return progress


class _State:
    """The state that a step changes: a model, its optimizer and schedule, and torch's random numbers."""

    def __init__(self, model: nn.Module, training: Training, device: str) -> None:
        self.device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        self.model = self.wrapped = model.to(self.device)
        self.parameters = list(model.parameters())
        self.optimizer, self.scheduler = training.build(model)
        if training.compiled:
            graphs = "reduce-overhead" if device == "cuda" else None
            self.wrapped = cast(nn.Module, torch.compile(model, mode=graphs, dynamic=False))
        if ranks.size() > 1:  # parameters that no row of a process used must stay equal in all processes, too
            self.wrapped = DistributedDataParallel(model, find_unused_parameters=True)

    def step(self, parts: Sequence[tuple[float | None, Batch]], training: Training) -> Tensor:
        """Take one step on the parts of a batch. Return this process's loss, on the device."""
        is_float32 = self.device.type == "cpu" if training.bfloat16 is None else not training.bfloat16
        total = torch.zeros((), device=self.device)
        for number, (share, part) in enumerate(parts, 1):
            if self.device.type == "cuda":
                part = {name: tensor.pin_memory() for name, tensor in part.items()}
            inputs = {name: tensor.to(self.device, non_blocking=True) for name, tensor in part.items()}
            waits = number < len(parts) and isinstance(self.wrapped, DistributedDataParallel)
            with self.wrapped.no_sync() if waits else nullcontext():  # type: ignore[operator]
                with nullcontext() if is_float32 else torch.autocast(self.device.type, torch.bfloat16):
                    loss = self.wrapped(**inputs).loss
                if share is not None:
                    loss = loss * share
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return total

    def save(self, checkpoints: Checkpoints, progress: Progress) -> None:
        """Save a training as a folder, which gets its name when all of it is on the disk."""
        random_state = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random_state["cuda"] = torch.cuda.get_rng_state(self.device)
        random_states = ranks.gather(random_state)
        if ranks.is_main():
            with new_folder(checkpoints.folder / f"checkpoint-{progress.step}") as partial:
                parts = {name: getattr(self, name).state_dict() for name in PARTS}
                torch.save({**parts, "random": random_states}, partial / "state.pt")
                checkpoints.save_extra(partial)
                manifest.write(partial, {"what": checkpoints.training_id, "done": asdict(progress)})
            # Checkpoints of later steps were skipped. They stay until this training reaches their steps, and must not
            # push this one out.
            for older in _folders(checkpoints.folder, progress.step)[: -checkpoints.max_checkpoints]:
                remove(older)
        ranks.wait()

    def load(self, checkpoints: Checkpoints) -> Progress:
        """Continue from the last complete checkpoint of this training, if there is one."""
        latest = ranks.from_main(lambda: _find_latest(checkpoints))
        if latest is None:
            return Progress()
        folder, progress = latest
        try:
            parts = torch.load(folder / "state.pt", map_location=self.device, weights_only=True)
            for name in PARTS:
                getattr(self, name).load_state_dict(parts[name])
            self._check_sizes()
            if len(parts["random"]) == ranks.size():
                mine = parts["random"][ranks.rank()]
                torch.set_rng_state(mine["cpu"].cpu())
                if self.device.type == "cuda":
                    torch.cuda.set_rng_state(mine["cuda"].cpu(), self.device)
            else:
                torch.manual_seed(hash((progress.step, ranks.rank())))  # no two processes may draw the same numbers
        except Exception as error:  # any kind of error, if a program that imitates manifests wrote the file
            reason = one_line(str(error)).partition(". ")[0][:200] or type(error).__name__
            raise InputError(None, f"{folder} cannot be loaded ({reason}); move it away") from None
        return progress

    def _check_sizes(self) -> None:
        """Check the means of a fused AdamW, which assumes that they are as large as the parameters."""
        for parameter, moments in self.optimizer.state.items() if isinstance(self.optimizer, AdamW) else ():
            sizes = {"step": torch.Size(), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
            if {name: moment.shape for name, moment in moments.items()} != sizes:
                raise ValueError("the optimizer's means have the wrong sizes")


def _folders(folder: Path, last: float = math.inf) -> list[Path]:
    """Return the folders of checkpoints, in the order of their steps, up to a last step."""
    folders = {int(path.name[11:]): path for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal()}
    return [folders[step] for step in sorted(folders) if step <= last]


def _find_latest(checkpoints: Checkpoints) -> tuple[Path, Progress] | None:
    """Return the last complete checkpoint of a training, and log which are skipped."""
    for folder in reversed(_folders(checkpoints.folder)):
        if (problem := manifest.find_problem(folder, {"what": checkpoints.training_id})) is None:
            content: Any = manifest.read(folder).get("done")
            progress = Progress(**content) if manifest.matches_type(Progress, content) else Progress()
            if (version := manifest.version(folder)) != this_version():
                problem = f"it is of whereformer {version} (that version continues it)"
            elif not progress.step == len(progress.losses) > 0:
                problem = "its manifest does not describe a checkpoint"
            else:
                return folder, progress
        checkpoints.log(f"skipping {folder}: {problem}")
    return None


def _split_batch(batch: Batch, accumulate: int) -> list[tuple[float | None, Batch]]:
    """Return the parts of a step's batch for this process, each with its share of the labels.

    The loss of a part is the mean over its labels. It is multiplied by the share, and DistributedDataParallel takes the
    mean over processes, so gradients and losses equal those for the mean over the batch. A batch in one part has no
    share. A part without a label has no mean loss: it reads a row that has a label instead, with a share of 0.
    """
    count = ranks.size() * accumulate
    if count == 1:
        return [(None, batch)]
    parts: list[tuple[float | None, Batch]] = []
    for index in range(ranks.rank(), count, ranks.size()):
        part = {name: tensor[index::count] for name, tensor in batch.items()}
        share = _count_labels(part["labels"]) * ranks.size() / _count_labels(batch["labels"])
        if not share:
            row = max(range(len(batch["labels"])), key=lambda row: _count_labels(batch["labels"][row]))
            part = {name: tensor[[row] * max(1, len(part["labels"]))] for name, tensor in batch.items()}
        parts.append((share, part))
    return parts


def _check_labels(batch: Batch, step: int) -> None:
    """Check that a batch has a label, if it has labels at all. A mean over zero labels is not a number."""
    if "labels" in batch and not _count_labels(batch["labels"]):
        raise InputError(None, f"step {step:,} has nothing to predict, so its loss is not a number; give other data")


def _count_labels(labels: Tensor) -> int:
    """Count labels. Every number to predict is a label."""
    return labels.numel() if labels.is_floating_point() else int(np.count_nonzero(labels.numpy() != IGNORED))
