"""One run of fine-tuning: train a model on a task, score it, and record what its heads learned."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PrinterCallback, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState

from ...analysis.curves import head_curves
from ...data import batches
from ...data.rows import Rows
from ...errors import InputError
from ...lab import ranks
from ...lab.progress import Progress
from ...lab.training import metrics
from ...lab.training.finite import FiniteWatch
from ...lab.training.optimizer import build_optimizer, linear_schedule
from ...lab.training.results import LossPoint
from ...lab.training.shared import SharedTrainer, shared_loader
from ...lab.training.trainer import training_arguments
from ...models import EncoderForSequenceClassification
from .models import fresh
from .results import KeptCurves, Tuned, TunedModel
from .settings import TuningSettings
from .variants import Variant

if TYPE_CHECKING:
    from .prepare import Encoded
    from .run import FinetuneJob

REACH = 32
"""Learned curves are kept at this number of offsets on each side."""
POINTS = 50
"""About this number of points of the training loss is kept."""


class LossWatch(FiniteWatch):
    """The callback that shows progress, records the loss, and raises an error if it is not a number.

    Args:
        steps: training steps of the run.
        progress: shows the progress.
        rate: the learning rate, for the advice in the error message.
    """

    def __init__(self, steps: int, progress: Progress, rate: float) -> None:
        super().__init__(rate, " and another `out`")
        self.steps, self.progress = steps, progress
        self.losses: list[LossPoint] = []
        self.every = max(1, steps // POINTS)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        control.should_log = state.global_step % self.every == 0 or state.global_step == self.steps
        self.progress.step(1, f"loss {self.losses[-1].loss:.3f}" if self.losses else "")

    def logged(self, step: int, logs: dict[str, float]) -> None:
        if "loss" in logs:
            self.losses.append(LossPoint(step, round(logs["loss"], 4)))


def train(
    model: EncoderForSequenceClassification,
    encoded: Encoded,
    job: FinetuneJob,
    seed: int,
    out: Path,
    progress: Progress,
) -> list[LossPoint]:
    """Fine-tune a model in place.

    Returns:
        The training loss at some steps.
    Raises:
        InputError: if the loss stops being a number.
    """
    tuning, steps = job.tuning, job.steps(encoded)
    watch = LossWatch(steps, progress, tuning.learning_rate)
    optimizer = build_optimizer(model, tuning.learning_rate, tuning.kernel_learning_rate)
    arguments = training_arguments(out, steps, job.device, dtype=tuning.dtype, seed=seed, rows=tuning.batch_size)
    trainer = SharedTrainer(
        training=shared_loader(
            encoded.train,
            batches.shuffled(encoded.train.lengths, tuning.batch_size, steps, seed),
            encoded.train.packed if tuning.packed else encoded.train.padded,
            pinned=job.device.type == "cuda",
        ),
        count=lambda batch: {"loss": len(batch["labels"])},
        model=model,
        args=arguments,
        callbacks=[watch],
        optimizers=(optimizer, linear_schedule(optimizer, max(1, steps // 10), steps)),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return watch.losses


@torch.no_grad()
def predict(
    model: EncoderForSequenceClassification, split: Rows, tuning: TuningSettings
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the logits, (rows, classes), in the order of the rows."""
    model.eval()
    collate = split.packed if tuning.packed else split.padded
    order = batches.by_length(split.lengths, tuning.batch_size)
    found = []
    for batch in ranks.share(order):
        inputs = collate([split[row] for row in batch])
        del inputs["labels"]
        with torch.autocast(model.device.type, torch.bfloat16, enabled=tuning.dtype == "bfloat16"):
            logits = model(**{name: value.to(model.device) for name, value in inputs.items()}).logits
        found.append((batch, logits.float().cpu().numpy()))
    parts = [part for each in ranks.gather(found) for part in each]
    rows = np.concatenate([batch for batch, _ in parts])
    return np.concatenate([logits for _, logits in parts])[rows.argsort()]


def finetune_one(
    job: FinetuneJob, encoded: Encoded, variant: Variant, seed: int, out: Path, progress: Progress
) -> Tuned:
    """Do one run: fine-tune, score, and read the curves that the heads add to scores.

    Raises:
        InputError: if a loss or prediction is not a number.
    """
    task = encoded.data.task
    classes = None if task.classes is None else len(task.classes)
    model = fresh(job.model, variant, classes, seed).to(job.device)
    started, cpu = time.perf_counter(), time.process_time()
    losses = train(model, encoded, job, seed, out, progress)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    scores = {}
    for name, split in encoded.judged.items():
        logits = predict(model, split, job.tuning)
        if not np.isfinite(logits).all():
            raise InputError("learning_rate", f"{variant.name} predicts values that are not numbers; try a lower one")
        scores[name] = metrics.score(task.metrics, split.labels, logits)
    curves = head_curves(model.encoder, REACH)
    return Tuned(
        TunedModel(scores, round(seconds, 2), round(cpu_seconds, 2), losses),
        None if curves is None else KeptCurves(variant.name, seed, curves),
    )
