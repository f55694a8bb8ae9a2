"""One run of fine-tuning: train a model on a task, score it, and record what its heads learned."""

from __future__ import annotations

import re
import time
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState

from ...analysis.curves import head_curves
from ...data import batches
from ...data.rows import Rows
from ...errors import InputError
from ...lab import ranks
from ...lab.progress import Progress
from ...lab.training import metrics
from ...lab.training.optimizer import build_optimizer, build_schedule
from ...lab.training.results import LossPoint, losses_of
from ...lab.training.shared import SharedTrainer, shared_loader
from ...lab.training.trackers import tracker
from ...lab.training.trainer import training_arguments
from ...models import EncoderForSequenceClassification
from .models import fresh
from .results import KeptCurves, TunedModel
from .settings import TuningSettings
from .variants import Variant

if TYPE_CHECKING:
    from .prepare import Encoded
    from .run import FinetuneJob

REACH = 32
"""Learned curves are kept at this number of offsets on each side."""
POINTS = 50
"""About this number of points of the training loss is kept."""


class LossWatch(TrainerCallback):
    """The callback that shows progress and decides when the loss is logged."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        step, steps = state.global_step, state.max_steps
        control.should_log = step % max(1, steps // POINTS) == 0 or step == steps
        self.progress.step(1, f"loss {state.log_history[-1]['loss']:.3f}" if state.log_history else "")


def train(
    model: EncoderForSequenceClassification,
    encoded: Encoded,
    job: FinetuneJob,
    seed: int,
    out: Path,
    name: str,
    progress: Progress,
) -> list[LossPoint]:
    """Fine-tune a model in place, and return the training loss at some steps.

    Args:
        model: the model.
        encoded: the rows to train on.
        job: the options.
        seed: the seed of the order of rows and dropout.
        out: the results' folder.
        name: the run's name for a tracker, which can be a file's name, too.
        progress: receives the progress.

    Raises:
        InputError: if the loss is not finite.
    """
    tuning, steps = job.tuning, job.steps(encoded)
    optimizer = build_optimizer(model, tuning.learning_rate, tuning.kernel_learning_rate, name=tuning.optimizer)
    trainer = SharedTrainer(
        training=shared_loader(
            encoded.train,
            batches.shuffled(encoded.train.lengths, tuning.batch_size, steps, seed),
            encoded.train.packed if tuning.packed else encoded.train.padded,
            pinned=job.device.type == "cuda",
        ),
        count=lambda batch: {"loss": len(batch["labels"])},
        model=model,
        args=training_arguments(
            out, steps, job.device, run=f"{out.resolve().name}-{name}", dtype=tuning.dtype, seed=seed
        ),
        callbacks=[LossWatch(progress), *tracker(job.report_to, out / "tensorboard" / name)],
        optimizers=(optimizer, build_schedule(optimizer, tuning.schedule, steps // 10, steps)),
    )
    trainer.train()
    return losses_of(trainer.state)


@torch.no_grad()
def predict(
    model: EncoderForSequenceClassification, split: Rows, tuning: TuningSettings
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the logits of all rows, (rows, classes)."""
    model.eval()
    collate = split.packed if tuning.packed else split.padded
    found: list[tuple[int, np.ndarray[Any, np.dtype[np.float32]]]] = []
    for batch in ranks.share(batches.by_length(split.lengths, tuning.batch_size)):
        inputs = collate([split[row] for row in batch])
        del inputs["labels"]
        with torch.autocast(model.device.type, torch.bfloat16, enabled=tuning.dtype == "bfloat16"):
            logits = model(**{name: value.to(model.device) for name, value in inputs.items()}).logits.float().cpu()
        found += zip(batch, logits.numpy(), strict=True)
    return np.stack(
        [row for _, row in sorted((each for part in ranks.gather(found) for each in part), key=itemgetter(0))]
    )


def finetune_one(
    job: FinetuneJob, encoded: Encoded, variant: Variant, seed: int, out: Path, progress: Progress
) -> tuple[TunedModel, KeptCurves | None]:
    """Do one run: fine-tune, score, and read the curves that the heads add to scores, if they add any.

    Raises:
        InputError: if a loss or prediction is not finite.
    """
    task = encoded.data.task
    classes = None if task.classes is None else len(task.classes)
    model = fresh(job.model, variant, classes, seed).to(job.device)
    started, cpu = time.perf_counter(), time.process_time()
    run = re.sub(r"[^\w.+=]+", "-", f"{task.name}-{variant.name}-seed{seed}")
    losses = train(model, encoded, job, seed, out, run, progress)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    scores = {}
    for name, split in encoded.judged.items():
        logits = predict(model, split, job.tuning)
        if not np.isfinite(logits).all():
            problem = f"{variant.name} predicts values that are not finite (NaN or inf)"
            raise InputError("learning_rate", f"{problem}; try a lower one")
        scores[name] = metrics.score(task.metrics, split.labels, logits)
    curves = head_curves(model.encoder, REACH)
    kept = None if curves is None else KeptCurves(variant.name, seed, curves)
    return TunedModel(scores, round(seconds, 2), round(cpu_seconds, 2), losses), kept
