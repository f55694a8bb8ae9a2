"""Pretrain a masked LM or ELECTRA on windows of text, with transformers' Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader
from transformers import TrainerCallback

from ...data.masks import IGNORED
from ...data.windows import collate
from ...lab import ranks
from ...lab.progress import Progress
from ...lab.provenance import provenance
from ...lab.training.folder import Folder
from ...lab.training.judged import Course, JudgedTrainer, TrainingWatch, train
from ...lab.training.optimizer import build_optimizer, linear_schedule
from ...lab.training.shared import shared_loader
from ...lab.training.trainer import quiet_transformers, training_arguments
from .job import PretrainJob
from .model import build_model
from .results import PretrainResults


def judge_masked_lm(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
    """Score a batch: loss in nats and accuracy over the masked tokens, the only ones that the model predicts."""
    wanted = batch["labels"][batch["labels"] != IGNORED]
    logits = model(**batch).logits.float()
    loss = functional.cross_entropy(logits, wanted, reduction="sum")
    right = (logits.argmax(-1) == wanted).sum()
    return {"loss": (float(loss), len(wanted)), "accuracy": (float(right), len(wanted))}


def count_masked_lm(batch: dict[str, Tensor]) -> dict[str, int]:
    """Count the tokens that a masked LM's loss is a mean over."""
    return {"loss": int((batch["labels"] != IGNORED).sum())}


def count_electra(batch: dict[str, Tensor]) -> dict[str, int]:
    """Count the tokens that each of ELECTRA's losses is a mean over: the targets, and all real tokens."""
    labels = batch["labels"]
    real = int(batch["attention_mask"].sum()) if "attention_mask" in batch else labels.numel()
    return {"generator_loss": int((labels != IGNORED).sum()), "discriminator_loss": real}


def judge_electra(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
    """Score a batch: every mean in :class:`ElectraOutput` but the joint loss, with the number of tokens it covers."""
    out, labels = model(**batch), batch["labels"]
    counts = count_electra(batch)
    counts["accuracy"] = counts["discriminator_loss"]
    counts["replaced_recall"] = int((out.sampled_ids != labels)[labels != IGNORED].sum())
    return {name: (float(out[name]) * count, count) for name, count in counts.items() if count}


class Pretrainer(JudgedTrainer):
    """The trainer of masked LM and ELECTRA. ``weight`` weights the discriminator's loss; None for masked LM."""

    def __init__(self, *, weight: float | None, **options: Any) -> None:
        self.weight = weight
        super().__init__(**options)

    def means(self, found: dict[str, float]) -> dict[str, float]:
        if self.weight is None:
            return found
        # The joint loss is not itself a mean: its two parts are means over different tokens.
        return {"loss": found["generator_loss"] + self.weight * found["discriminator_loss"], **found}


@quiet_transformers()
def pretrain(job: PretrainJob, folder: Folder[PretrainResults], progress: Progress) -> PretrainResults:
    """Train from the newest checkpoint or the start, save the model and return the results.

    Raises:
        InputError: if the loss stops being a number.
        KeyboardInterrupt: if the training was interrupted; a checkpoint has been saved.
    """
    training, objective = job.training, job.model.objective
    torch.manual_seed(training.seed)
    model = build_model(job.config, objective).to(job.device)
    course = Course(
        steps=training.steps,
        every=job.every,
        learning_rate=training.learning_rate,
        epochs=job.epochs,
        tokens_seen=job.tokens_seen,
    )
    start = PretrainResults(**vars(job.plan()), settings=folder.settings, text=job.text.facts, **provenance(job.device))
    watch = TrainingWatch(course, folder, start, progress)

    def make(seconds: float, callbacks: list[TrainerCallback]) -> Pretrainer:
        optimizer = build_optimizer(model, training.learning_rate)
        windows, held_out = job.training_windows(), job.held_out_windows()
        judged = BatchSampler(range(len(held_out)), job.stages[-1].batch_size, drop_last=False)
        return Pretrainer(
            weight=job.model.discriminator_weight,
            folder=folder,
            keep=job.keep,
            course=course,
            training=shared_loader(windows, job.training_batches(), collate, pinned=job.device.type == "cuda"),
            count=count_masked_lm if objective == "mlm" else count_electra,
            factors={"discriminator_loss": job.model.discriminator_weight or 0.0},
            held_out=DataLoader(held_out, batch_sampler=ranks.share(list(judged)), collate_fn=collate),
            judge=judge_masked_lm if objective == "mlm" else judge_electra,
            seconds=seconds,
            model=model,
            args=training_arguments(
                folder.checkpoints,
                training,
                training.steps,
                job.device,
                training.seed,
                gradient_accumulation_steps=training.accumulate,
            ),
            callbacks=callbacks,
            optimizers=(optimizer, linear_schedule(optimizer, training.warmup or 1, training.steps)),
        )

    state = train(make, watch, folder, progress)
    trained = model if objective == "mlm" else model.discriminator
    # The saved model gives logits at every token.
    trained.config.sparse_prediction = False
    vars(trained.config).pop("use_cache", None)  # the Trainer sets it, for decoders
    # What loads the tokenizer truncates to the length that the model was trained at.
    job.text.tokenizer.model_max_length = training.longest
    results = watch.results(state, finished=True)
    if ranks.is_main():
        folder.finish(trained, job.text.tokenizer, results)
    ranks.wait()
    return results
