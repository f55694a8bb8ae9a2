"""The training loop: one process or several, on a CPU or GPUs, and from any checkpoint to the same bits.

No step waits for the device. Losses stay there, and are fetched every ``log_every`` steps; that is when NaN is found.
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
from ..errors import InputError, join_words, one_line
from ..files import new_folder, remove
from ..provenance import this_version
from .optimizer import build_optimizer, build_schedule
from .run import handling

Batch = dict[str, Tensor]
MOST_NORM = 1.0
"""The most that the norm of all gradients may be."""
PARTS = ("model", "optimizer", "scheduler")  # whose states a checkpoint has


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained.

    Args:
        steps: the number of steps.
        rate: the peak of the learning rate.
        kernel_rate: that of position methods' ``kernel_parameters``; None is ``rate``.
        optimizer: builds an optimizer for a model, with its schedule; None is AdamW with ``schedule``.
        schedule: how the rate goes on after the warm-up, a name in ``SCHEDULES``.
        warmup: steps in which the rate rises to its peak; None is a tenth of all.
        accumulate: parts of a batch that are computed one after another, in less memory.
        bfloat16: whether to compute in it; None is on a GPU.
        log_every: steps between looks at the losses.
        compiled: whether to compile the model, for each shape of batches, with CUDA graphs on a GPU; in one process,
            and without ``accumulate``.
    """

    steps: int
    rate: float
    kernel_rate: float | None = None
    optimizer: Callable[[nn.Module], tuple[Optimizer, LambdaLR]] | None = None
    schedule: str = "linear"
    warmup: int | None = None
    accumulate: int = 1
    bfloat16: bool | None = None
    log_every: int = 20
    compiled: bool = False

    def build(self, model: nn.Module) -> tuple[Optimizer, LambdaLR]:
        """Return the optimizer and its schedule."""
        if self.optimizer is not None:
            return self.optimizer(model)
        optimizer = build_optimizer(model, self.rate, self.kernel_rate)
        warmup = self.steps // 10 if self.warmup is None else self.warmup
        return optimizer, build_schedule(optimizer, self.schedule, warmup, self.steps)


@dataclass
class Trained:
    """A training so far.

    Args:
        step: the number of steps.
        losses: the loss of each step.
        scores: the held-out scores, each with its step.
        versions: the versions of this package that took the steps.
    """

    step: int = 0
    losses: list[float] = field(default_factory=list)
    scores: list[list[Any]] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often a training is saved.

    Args:
        folder: the folder, for this training alone.
        every: steps between checkpoints. After Ctrl-C or SIGTERM there is one more.
        what: JSON that says which training it is; a checkpoint of another one is passed over.
        say: is told which training continues, and which checkpoints are passed over, and why.
        keep: how many checkpoints to keep.
        keeps: says whether a checkpoint of a version of this package counts, as :meth:`.run.Run.keeps` does.
        also: writes more into the folder of each, such as the model as other programs read it.
    """

    folder: Path
    every: int
    what: Any = None
    say: Callable[[str], None] = print
    keep: int = 1
    also: Callable[[Path], object] = lambda folder: None
    keeps: Callable[[str], bool] = lambda version: version == this_version()


class NotFiniteError(InputError):
    """A loss is not finite. It names ``learning_rate``, and says what to try."""

    @classmethod
    def after(cls, step: int, rate: float) -> NotFiniteError:
        """Return the error of a loss after some steps with a peak learning rate."""
        told = f"the loss is not finite (NaN or inf) after {step} steps; {rate:g} is too high, try {rate / 4:g}"
        return cls("learning_rate", told)

    @property
    def problem(self) -> str:
        """What is not finite, without the advice."""
        return self.reason.partition(";")[0]


def train(
    model: nn.Module,
    batches: Callable[[int], Batch],
    training: Training,
    *,
    device: str = "cpu",
    score: Callable[[int], Any] | None = None,
    score_at: Container[int] = (),
    checkpoints: Checkpoints | None = None,
    on_log: Callable[[int, float], None] = lambda steps, loss: None,
    tell: Callable[[int, Mapping[str, float]], None] = lambda step, values: None,
) -> Trained:
    """Train a model that returns its loss, the mean over the labels of a batch.

    Args:
        model: the model; it is moved to the device.
        batches: returns the batch of each step from 0 on: tensors on the CPU, a row for each example, with "labels".
            Of several processes, each takes its rows of it.
        training: how it is trained.
        device: "cpu" or "cuda".
        score: computes a held-out score after a step.
        score_at: the numbers of steps after which it is computed.
        checkpoints: where to save, and to continue from.
        on_log: is told how many more steps are done, and the last loss.
        tell: is told the last loss by its name, and after which step, as a tracker is.

    Raises:
        NotFiniteError: if a loss is not finite.
        InputError: if it is not finite since its batch has no label.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once the training is saved.
    """
    state = _State.of(model, training, device)
    if ranks.rank():  # or dropout would be the same in the rows of all processes
        torch.manual_seed(hash((torch.initial_seed(), ranks.rank())))
    done = Trained() if checkpoints is None else state.load(checkpoints)
    if checkpoints is not None and done.step:
        checkpoints.say(f"{checkpoints.folder}: continuing after step {done.step:,} of {training.steps:,}")
        on_log(done.step, done.losses[-1])
    done.versions = sorted({*done.versions, this_version()})
    losses = torch.zeros(training.steps, device=state.device)
    model.train()
    interrupts: list[int] = []
    with handling(lambda number, frame: interrupts.append(number), signal.SIGINT, signal.SIGTERM):
        for step in range(done.step + 1, training.steps + 1):
            parts = _parts(batches(step - 1), training.accumulate)
            losses[step - 1] = state.step(parts, training)
            saves = checkpoints is not None and step % checkpoints.every == 0
            scores = score is not None and step in score_at
            stops = bool(interrupts) and ranks.size() == 1  # several processes agree below
            if step % training.log_every and step < training.steps and not (saves or scores or stops):
                continue
            # From here on, it waits for the device.
            found = ranks.gather((losses[done.step : step].tolist(), bool(interrupts)))
            stops = any(interrupted for _, interrupted in found)
            new = [fmean(each) for each in zip(*(values for values, _ in found), strict=True)]
            for number, loss in enumerate(new, done.step + 1):
                if not math.isfinite(loss):
                    _check_labels(batches(number - 1), number)
                    raise NotFiniteError.after(number - 1, training.rate)
            on_log(step - done.step, new[-1])
            tell(step, {"train/loss": new[-1]})
            done.step, done.losses = step, [*done.losses, *new]
            if score is not None and scores:
                done.scores.append([step, score(step)])
                model.train()
            if checkpoints is not None and (saves or stops) and step < training.steps:
                state.save(checkpoints, done)
            if stops:
                raise KeyboardInterrupt
    return done


@dataclass(frozen=True)
class _State:
    """What changes with a step: a model, its optimizer and schedule, and torch's random numbers."""

    model: nn.Module
    wrapped: nn.Module
    parameters: list[nn.Parameter]
    optimizer: Optimizer
    scheduler: LambdaLR
    device: torch.device

    @classmethod
    def of(cls, model: nn.Module, training: Training, name: str) -> _State:
        device = torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)
        model.to(device)
        optimizer, scheduler = training.build(model)
        wrapped = model
        if training.compiled:
            graphs = "reduce-overhead" if device.type == "cuda" else None
            wrapped = cast(nn.Module, torch.compile(model, mode=graphs, dynamic=False))
        if ranks.size() > 1:  # parameters that no row of a process used must stay equal everywhere, too
            wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        return cls(model, wrapped, list(model.parameters()), optimizer, scheduler, device)

    def step(self, parts: Sequence[tuple[float | None, Batch]], training: Training) -> Tensor:
        """Take one step on the parts of a batch. Return this process's loss, on the device."""
        wide = self.device.type == "cpu" if training.bfloat16 is None else not training.bfloat16
        total = torch.zeros((), device=self.device)
        for number, (share, part) in enumerate(parts, 1):
            pinned = {name: each.pin_memory() if self.device.type == "cuda" else each for name, each in part.items()}
            inputs = {name: each.to(self.device, non_blocking=True) for name, each in pinned.items()}
            waits = number < len(parts) and isinstance(self.wrapped, DistributedDataParallel)
            with self.wrapped.no_sync() if waits else nullcontext():  # type: ignore[operator]
                with nullcontext() if wide else torch.autocast(self.device.type, torch.bfloat16):
                    loss = self.wrapped(**inputs).loss
                if share is not None:
                    loss = loss * share
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.parameters, MOST_NORM)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return total

    def save(self, to: Checkpoints, done: Trained) -> None:
        """Save a training as a folder, which gets its name when all of it is on the disk."""
        numbers = ranks.gather(_random_numbers(self.device))
        if ranks.is_main():
            with new_folder(to.folder / f"checkpoint-{done.step}") as partial:
                parts = {name: getattr(self, name).state_dict() for name in PARTS}
                torch.save({**parts, "random": numbers}, partial / "state.pt")
                to.also(partial)
                manifest.write(partial, {"what": to.what, "done": asdict(done)})
            # Later ones were passed over. They stay until this training gets so far, and must not push this one out.
            for older in _folders(to.folder, done.step)[: -to.keep]:
                remove(older)
        ranks.wait()

    def load(self, of: Checkpoints) -> Trained:
        """Continue from the last whole checkpoint of this training, if there is one."""
        chosen = ranks.from_main(lambda: _newest(of))
        if chosen is None:
            return Trained()
        folder, done = chosen
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
                torch.manual_seed(hash((done.step, ranks.rank())))  # no two processes may draw the same numbers
        except Exception as error:  # of all kinds, if somebody wrote it who knows how manifests are made
            reason = one_line(str(error)).partition(". ")[0][:200] or type(error).__name__
            raise InputError(None, f"{folder} cannot be loaded ({reason}); move it away") from None
        return done

    def _check_sizes(self) -> None:
        """Check the means of a fused AdamW, which takes them to be as large as the parameters."""
        for parameter, kept in self.optimizer.state.items() if isinstance(self.optimizer, AdamW) else ():
            sizes = {"step": torch.Size(), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
            if {name: mean.shape for name, mean in kept.items()} != sizes:
                raise ValueError("the optimizer has means of other sizes")


def _random_numbers(device: torch.device) -> dict[str, Tensor]:
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def _folders(folder: Path, last: float = math.inf) -> list[Path]:
    """Return the folders of checkpoints, in the order of their steps, up to a last step."""
    found = {int(path.name[11:]): path for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal()}
    return [found[step] for step in sorted(found) if step <= last]


def _newest(of: Checkpoints) -> tuple[Path, Trained] | None:
    """Return the last whole checkpoint of a training. Say which are passed over."""
    for folder in reversed(_folders(of.folder)):
        if (problem := manifest.find_problem(folder, {"what": of.what})) is None:
            done: Any = manifest.read(folder).get("done")
            if manifest.matches_type(Trained, done) and (found := Trained(**done)).step == len(found.losses) > 0:
                found.versions = found.versions or [manifest.version(folder)]
                refused = [version for version in found.versions if not of.keeps(version)]
                if not refused:
                    return folder, found
                problem = f"it is of whereformer {join_words(refused)} (--keep-versions continues it)"
            else:
                problem = "its manifest has something else"
        of.say(f"passing over {folder}: {problem}")
    return None


def _parts(batch: Batch, accumulate: int) -> list[tuple[float | None, Batch]]:
    """Return the parts of a step's batch for this process, each with its share of the labels.

    The loss of a part is the mean over its labels. Times its share, and with the mean over processes that
    DistributedDataParallel takes, gradients and losses are those of the batch's mean. A batch in one part has none. A
    part without a label, whose mean is no number, reads a row that has one, and counts nothing.
    """
    count = ranks.size() * accumulate
    if count == 1:
        return [(None, batch)]
    parts: list[tuple[float | None, Batch]] = []
    for at in range(ranks.rank(), count, ranks.size()):
        part = {name: each[at::count] for name, each in batch.items()}
        share = _labels(part["labels"]) * ranks.size() / _labels(batch["labels"])
        if not share:
            row = max(range(len(batch["labels"])), key=lambda row: _labels(batch["labels"][row]))
            part = {name: each[[row] * max(1, len(part["labels"]))] for name, each in batch.items()}
        parts.append((share, part))
    return parts


def _check_labels(batch: Batch, step: int) -> None:
    """Check that a batch has a label, if it has labels at all. A mean over zero labels is not a number."""
    if "labels" in batch and not _labels(batch["labels"]):
        raise InputError(None, f"step {step:,} has nothing to predict, so its loss is not a number; give other data")


def _labels(labels: Tensor) -> int:
    """Count labels. Numbers to predict may be any."""
    return labels.numel() if labels.is_floating_point() else int(np.count_nonzero(labels.numpy() != IGNORED))
