"""A labeled table in a comparison: every method's trained encoder is fine-tuned on it and judged by other rows."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy import stats
from torch import nn

from ...data.batches import by_length, shuffled
from ...data.corpus import Text
from ...data.fingerprint import fingerprint
from ...data.glue import Data, OwnTask
from ...data.read import Document
from ...data.rows import RowCache, Rows
from ...data.windows import end_padding
from ...errors import InputError
from ...lab.training.finite import check_finite
from ...lab.training.optimizer import build_optimizer, linear_schedule
from ...models import EncoderConfig, EncoderForMaskedLM, EncoderForSequenceClassification
from .models import encoder_config
from .results import BASELINE, CompareTask, TaskScore
from .settings import Sizes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TUNING_SHARE = 0.25
"""Steps of fine-tuning, as a share of those of masked LM."""
MOST_EPOCHS = 10
"""Fine-tuning reads no row more often."""
ROWS_PER_STEP = 32
RATE_SHARE = 1 / 8
"""The learning rate of fine-tuning, as a share of the method's own for masked LM."""


class TableText(Text):
    """The texts of a task's training rows, one document per row, to train on as masked LM."""

    field = "train"

    def __init__(self, task: OwnTask, data: Data) -> None:
        super().__init__([task.train])
        self.column = ",".join(task.texts)  # Its columns are checked where the table is read, be it CSV or another.
        self._rows = data.train.texts

    def documents(self) -> Iterator[Document]:
        for row in self._rows:
            text = "\n\n".join(row)
            if text.strip():
                self.progress.step(len(text))
                yield [text]


@dataclass(frozen=True)
class TaskRows:
    """A task's tokenized rows, and facts about them."""

    train: Rows
    validation: Rows
    facts: CompareTask

    @property
    def outputs(self) -> int:
        """Number of logits of a row."""
        return len(self.facts.classes or [0])


def identity(data: Data) -> str:
    """Return a short hash that tells a task from others."""
    task = data.task
    return fingerprint([data.facts.fingerprint, *task.texts, task.label, str(task.classes)])


def prepare_rows(
    own: OwnTask, data: Data, tokenizer: PreTrainedTokenizerFast, sizes: Sizes, vocab_size: int, cache: Path
) -> TaskRows:
    """Tokenize a task's rows, each cut to the training length, or find them in the cache.

    Raises:
        InputError: for ``label``, if all training rows have the same number.
    """
    if own.regression and len(set(data.train.labels)) < 2:
        raise InputError("label", f"expected at least two different numbers in {own.train}, got one")
    config = encoder_config(sizes, BASELINE, vocab_size)
    train, validation = RowCache(cache).rows(
        [identity(data), tokenizer.backend_tokenizer.to_str()],
        [data.train, *data.judged.values()],
        tokenizer,
        sizes.length - end_padding(config),
        config,
        regression=own.regression,
    )
    classes = data.task.classes
    commonest = Counter(train.labels).most_common(1)[0][0]
    facts = CompareTask(
        train=str(own.train),
        validation=str(own.validation),
        text=list(own.texts),
        label=own.label,
        classes=None if classes is None else list(classes),
        metric="spearman" if classes is None else "accuracy",
        training_rows=len(train),
        validation_rows=len(validation),
        cut_rows=train.cut + validation.cut,
        guessing=0.0 if classes is None else statistics.fmean(label == commonest for label in validation.labels),
    )
    return TaskRows(train, validation, facts)


def tuning_steps(sizes: Sizes, rows: TaskRows | None) -> int:
    """Return the steps of fine-tuning, none without a task."""
    if rows is None:
        return 0
    return min(max(1, round(TUNING_SHARE * sizes.steps)), math.ceil(MOST_EPOCHS * len(rows.train) / ROWS_PER_STEP))


def tune(
    rows: TaskRows,
    sizes: Sizes,
    position: str,
    seed: int,
    rate: float,
    trained: EncoderForMaskedLM,
    on_step: Callable[[float], None],
) -> TaskScore:
    """Fine-tune a trained encoder on a task, and judge it by the validation rows.

    Args:
        rows: the task.
        sizes: the comparison's sizes.
        position: the method, for errors.
        seed: seed of the new classifier, which is the same for all methods, and of the order of rows.
        rate: the method's learning rate for masked LM.
        trained: the encoder; it stays as it is.
        on_step: is told the loss of each step.

    Raises:
        InputError: for ``learning_rate``, if a loss or a prediction is not a number.
    """
    steps, rate = tuning_steps(sizes, rows), rate * RATE_SHARE
    model = _classifier(rows, sizes, seed, trained).to(trained.device)
    optimizer = build_optimizer(model, rate)
    schedule = linear_schedule(optimizer, max(1, steps // 10), steps)
    numbers = rows.facts.classes is None
    # Numbers of any size are as easy to learn as those around zero, and their order is all that is judged.
    mean, deviation = (statistics.fmean(rows.train.labels), statistics.pstdev(rows.train.labels)) if numbers else (0, 1)
    model.train()
    for step, batch in enumerate(shuffled(rows.train.lengths, ROWS_PER_STEP, steps, seed)):
        inputs = {
            name: each.to(model.device) for name, each in rows.train.padded([rows.train[row] for row in batch]).items()
        }
        if numbers:
            inputs["labels"] = (inputs["labels"] - mean) / deviation
        loss = model(**inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        told = float(loss.detach())
        check_finite(f"the loss of fine-tuning {position!r}", told, step, rate)
        schedule.step()
        on_step(told)
    logits = predict(model, rows.validation)
    check_finite(f"a prediction of {position!r}", float(np.abs(logits).max()), steps, rate)
    return judged(rows.facts, rows.validation.labels, logits)


def _classifier(
    rows: TaskRows, sizes: Sizes, seed: int, trained: EncoderForMaskedLM
) -> EncoderForSequenceClassification:
    """Build a model for a task from a trained encoder. With the same seed, all methods have the same new classifier."""
    problem = "regression" if rows.facts.classes is None else "single_label_classification"
    choices = {"num_labels": rows.outputs, "problem_type": problem}

    def build(config: EncoderConfig) -> EncoderForSequenceClassification:
        torch.manual_seed(seed)
        # The names of an encoder's labels are for two of them.
        fields = {name: value for name, value in config.to_dict().items() if name not in ("id2label", "label2id")}
        return EncoderForSequenceClassification(EncoderConfig.from_dict({**fields, **choices}))

    baseline = build(encoder_config(sizes, BASELINE, trained.config.vocab_size))
    model = build(trained.config)
    known = trained.encoder.state_dict()
    model.encoder.load_state_dict({name: known[name] for name in model.encoder.state_dict()})
    model.classifier.load_state_dict(baseline.classifier.state_dict())
    return model


@torch.no_grad()
def predict(model: EncoderForSequenceClassification, rows: Rows) -> np.ndarray:
    """Return the logits, (rows, outputs), in the order of the rows."""
    model.eval()
    logits = np.empty((len(rows), model.config.num_labels))
    for batch in by_length(rows.lengths, 4 * ROWS_PER_STEP):
        inputs = rows.padded([rows[row] for row in batch])
        del inputs["labels"]
        found = model(**{name: each.to(model.device) for name, each in inputs.items()}).logits
        logits[batch] = found.float().cpu().numpy()
    return logits


def judged(facts: CompareTask, labels: Sequence[float], logits: np.ndarray) -> TaskScore:
    """Return the score of predictions, and each row's share of it: their mean is the score.

    Accuracy is the mean of rows that are right (1) or not (0). Spearman's correlation is that of ranks. There, a row's
    share is its influence: the product of both standardized ranks, less half the correlation times what their squares
    exceed 1 by. Its standard deviation over rows therefore gives the standard error.
    """
    if facts.classes is not None:
        right = logits.argmax(1) == np.asarray(labels)
        return TaskScore(float(right.mean()), [int(each) for each in right])
    ranks = [stats.rankdata(values) for values in (labels, logits[:, 0])]
    if min(np.ptp(each) for each in ranks) == 0:
        return TaskScore(0.0, [0.0] * len(ranks[0]))
    first, second = ((each - each.mean()) / each.std() for each in ranks)
    score = float((first * second).mean())
    shares = score + first * second - score * (first**2 + second**2) / 2
    return TaskScore(score, [round(float(each), 4) for each in shares])
