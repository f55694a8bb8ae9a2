"""A labeled table in a comparison: every method's trained encoder is fine-tuned on it and judged by other rows."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from ...data.batches import by_length, shuffled
from ...data.corpus import Text
from ...data.glue import Data, OwnTask
from ...data.read import Document
from ...data.rows import Rows, tokenized
from ...data.windows import end_padding
from ...errors import InputError
from ...lab.encoders import BASELINE
from ...lab.fit import check_finite, fit
from ...models import EncoderConfig, EncoderForSequenceClassification
from ...models.heads import EncoderWithLMHead
from .models import encoder_config
from .results import CompareTask, TaskScore
from .settings import CompareSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TUNING_SHARE = 0.25
"""Steps of fine-tuning, as a share of those of masked LM."""
MOST_EPOCHS = 10
"""Fine-tuning reads no row more often."""
ROWS_PER_STEP = 32
SAMPLED = 1000
"""Rows whose length is measured before they are cut."""
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


def prepare_rows(own: OwnTask, data: Data, tokenizer: PreTrainedTokenizerFast, settings: CompareSettings) -> TaskRows:
    """Tokenize a task's rows, each cut to the training length.

    Raises:
        InputError: for ``label``, if all training rows have the same number.
    """
    if own.regression and len(set(data.train.labels)) < 2:
        raise InputError("label", f"expected at least two different numbers in {own.train}, got one")
    config = encoder_config(settings, BASELINE, len(tokenizer))
    length = settings.length - end_padding(config)
    train, validation = (
        tokenized(split, tokenizer, length, config, regression=own.regression)
        for split in (data.train, *data.judged.values())
    )
    classes = data.task.classes
    commonest = Counter(train.labels).most_common(1)[0][0]
    cut = train.cut + validation.cut
    facts = CompareTask(
        train=str(own.train),
        validation=str(own.validation),
        text=list(own.texts),
        label=own.label,
        classes=None if classes is None else list(classes),
        metric="spearman" if classes is None else "accuracy",
        training_rows=len(train),
        validation_rows=len(validation),
        cut_rows=cut,
        guessing=0.0 if classes is None else statistics.fmean(label == commonest for label in validation.labels),
        whole_length=_whole_length(data, tokenizer, settings.length) if cut else None,
    )
    return TaskRows(train, validation, facts)


def _whole_length(data: Data, tokenizer: PreTrainedTokenizerFast, length: int) -> int | None:
    """Return a length at which nine rows in ten are whole, by SAMPLED training rows; None if they are so already."""
    every = max(1, len(data.train.labels) // SAMPLED)
    sides = zip(*data.train.texts[::every], strict=True)
    found = tokenizer(*map(list, sides), return_attention_mask=False, verbose=False)["input_ids"]
    needed = math.ceil(float(np.quantile([len(row) for row in found], 0.9)))
    return 1 << (needed - 1).bit_length() if needed > length else None


def tuning_steps(settings: CompareSettings, rows: TaskRows) -> int:
    """Return the steps of fine-tuning."""
    return min(max(1, round(TUNING_SHARE * settings.steps)), math.ceil(MOST_EPOCHS * len(rows.train) / ROWS_PER_STEP))


def tune(
    rows: TaskRows,
    settings: CompareSettings,
    position: str,
    seed: int,
    rate: float,
    trained: EncoderWithLMHead,
    on_step: Callable[[float], None],
) -> TaskScore:
    """Fine-tune a trained encoder, which stays as it is, on a task, and judge it by the validation rows.

    ``seed`` is that of the new classifier and of the order of rows, and ``rate`` the method's own for masked LM.

    Raises:
        DivergedError: if a loss or a prediction is not finite.
    """
    steps, rate = tuning_steps(settings, rows), rate * RATE_SHARE
    model = _classifier(rows, settings, seed, trained).to(trained.device)
    numbers = rows.facts.classes is None
    # Numbers of any size are as easy to learn as those around zero, and their order is all that is judged.
    mean, deviation = (statistics.fmean(rows.train.labels), statistics.pstdev(rows.train.labels)) if numbers else (0, 1)

    def batches() -> Iterator[dict[str, Tensor]]:
        for batch in shuffled(rows.train.lengths, ROWS_PER_STEP, steps, seed):
            inputs = rows.train.padded([rows.train[row] for row in batch])
            if numbers:
                inputs["labels"] = (inputs["labels"] - mean) / deviation
            yield inputs

    fit(model, batches(), steps, rate, what=f"the loss of fine-tuning {position!r}", on_step=on_step)
    logits = predict(model, rows.validation)
    check_finite(f"a prediction of {position!r}", float(np.abs(logits).max()), steps, rate)
    return judged(rows.facts, rows.validation.labels, logits)


def _classifier(
    rows: TaskRows, settings: CompareSettings, seed: int, trained: EncoderWithLMHead
) -> EncoderForSequenceClassification:
    """Build a model for a task from a trained encoder. With the same seed, all methods have the same new classifier."""
    classes = rows.facts.classes
    problem = "regression" if classes is None else "single_label_classification"
    choices = {"num_labels": len(classes or [0]), "problem_type": problem}

    def build(config: EncoderConfig) -> EncoderForSequenceClassification:
        torch.manual_seed(seed)
        # The names of an encoder's labels are for two of them.
        fields = {name: value for name, value in config.to_dict().items() if name not in ("id2label", "label2id")}
        return EncoderForSequenceClassification(EncoderConfig.from_dict({**fields, **choices}))

    baseline = build(encoder_config(settings, BASELINE, trained.config.vocab_size))
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
