"""Pretrain a masked LM or ELECTRA on windows of text, with transformers' Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from ...data.masks import IGNORED
from ...data.windows import collate
from ...runs.progress import Progress
from ...runs.provenance import provenance
from ...training.folder import Folder
from ...training.judged import Course, JudgedTrainer, TrainingWatch, train
from ...training.optimizer import build_optimizer, linear_schedule
from ...training.trainer import quiet_transformers, training_arguments
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


def judge_electra(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
    """Score a batch: every mean in :class:`ElectraOutput` but the joint loss, with the number of tokens it covers."""
    out, labels = model(**batch), batch["labels"]
    targets = labels != IGNORED
    real = int(batch["attention_mask"].sum()) if "attention_mask" in batch else labels.numel()
    counts = {
        "generator_loss": int(targets.sum()),
        "discriminator_loss": real,
        "accuracy": real,
        "replaced_recall": int((out.sampled_ids != labels)[targets].sum()),
    }
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
        return Pretrainer(
            weight=job.model.discriminator_weight,
            folder=folder,
            keep=job.keep,
            course=course,
            training=DataLoader(
                job.training_windows(),
                batch_sampler=job.training_batches(),
                collate_fn=collate,
                pin_memory=job.device.type == "cuda",
            ),
            held_out=DataLoader(job.held_out_windows(), batch_size=job.stages[-1].batch_size, collate_fn=collate),
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
    folder.finish(trained, job.text.tokenizer, results)
    return results
