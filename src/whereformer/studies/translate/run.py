"""Train a translation model on transformers' Trainer, and average its last checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ...lab import ranks
from ...lab.progress import Progress
from ...lab.provenance import provenance
from ...lab.training.folder import KEPT_CHECKPOINTS, Folder
from ...lab.training.judged import JudgedTrainer, TrainingWatch, judge_all, train
from ...lab.training.optimizer import build_optimizer, inverse_sqrt_schedule
from ...lab.training.trainer import quiet_transformers, training_arguments
from ...models import Seq2SeqForConditionalGeneration
from ...models.seq2seq.smoothed import IGNORED
from .averaging import Averaging
from .job import TranslationJob
from .model import generation_config
from .results import TranslationResults
from .settings import Decoding


def judge(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
    """Score a batch: cross-entropy in nats and accuracy of each next token, given those before it."""
    out, labels = model(**batch, use_cache=False), batch["labels"]
    wanted = labels != IGNORED
    count = int(wanted.sum())
    right = (out.logits.argmax(-1) == labels)[wanted].sum()
    return {"loss": (float(out.loss) * count, count), "accuracy": (float(right), count)}


def count(batch: dict[str, Tensor]) -> dict[str, int]:
    """Count the target tokens of a batch, which the loss is a mean over."""
    return {"loss": int((batch["labels"] != IGNORED).sum())}


@quiet_transformers()
def train_translator(job: TranslationJob, folder: Folder[TranslationResults], progress: Progress) -> TranslationResults:
    """Train from the newest checkpoint or the start, save the model and return the results.

    Raises:
        InputError: if the loss stops being a number.
        KeyboardInterrupt: if the training was interrupted; a checkpoint has been saved.
    """
    training, course = job.training, job.course
    torch.manual_seed(training.seed)
    model = Seq2SeqForConditionalGeneration(job.config).to(job.device)
    start = TranslationResults(
        **vars(job.plan()), settings=folder.settings, text=job.text.facts, **provenance(job.device)
    )
    watch = TrainingWatch(course, folder, start, progress)
    averaging = Averaging(folder, job.averaged_steps)

    def make(seconds: float, callbacks: list[TrainerCallback]) -> JudgedTrainer:
        # No decay, and Adam's epsilon, as in Vaswani et al.
        optimizer = build_optimizer(model, training.learning_rate, weight_decay=0.0, eps=1e-9)
        return JudgedTrainer(
            folder=folder,
            keep=KEPT_CHECKPOINTS,
            course=course,
            training=job.training_batches(),
            count=count,
            held_out=job.held_out_batches(),
            judge=judge,
            seconds=seconds,
            model=model,
            args=training_arguments(
                folder.checkpoints,
                _Arguments(training.dtype),
                course.steps,
                job.device,
                training.seed,
                gradient_accumulation_steps=training.accumulate,
            ),
            callbacks=[averaging, *callbacks],
            optimizers=(optimizer, inverse_sqrt_schedule(optimizer, training.warmup)),
        )

    state = train(make, watch, folder, progress, averaging.problem)
    results = watch.results(state, finished=True)
    if training.average > 1:
        ranks.wait()  # until the main process has copied the last weights
        averaging.load_mean(model)
        scores = judge_all(model, job.held_out_batches(), judge, job.device, bf16=training.dtype == "bfloat16")
        rounded = {name: round(value, 4) for name, value in scores.items()}
        results = replace(results, averaged={"steps": job.averaged_steps, **rounded})
    model.config.use_cache = True  # the Trainer turns it off
    model.generation_config = generation_config(job.config, Decoding(), max_length=training.max_length)
    if ranks.is_main():
        folder.finish(model, job.text.tokenizer, results)
    ranks.wait()
    return results


@dataclass(frozen=True)
class _Arguments:
    """The settings that the Trainer needs. Its batch size is 1 because each of our batches is one item to it."""

    dtype: str
    batch_size: int = 1
