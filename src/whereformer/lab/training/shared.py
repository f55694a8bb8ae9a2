"""Training steps that several processes share: each reads its rows, and together they take the step of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import PrinterCallback, Trainer

from ...errors import InputError
from .. import ranks
from ..train import NotFiniteError

SPARE = "spare"
"""Marks a batch of one row that another process has too, and that must not count."""
WEIGHTS = "weights"
"""A batch's weight in its step, for each part of the loss."""

Batch = dict[str, Any]
Count = Callable[[Batch], dict[str, int]]
"""Returns, for each part of the loss, the number of items over which it is a mean in this batch."""


def check_rows(rows: int) -> None:
    """Check that the rows of a batch can be divided among the processes.

    Raises:
        InputError: for ``batch_size``.
    """
    if rows % ranks.size():
        raise InputError("batch_size", f"expected a multiple of {ranks.size()}, the number of processes, got {rows}")


def shared_loader(
    rows: Dataset[Any], batches: Any, collate: Callable[[list[Any]], Batch], *, pinned: bool = False
) -> DataLoader[Batch]:
    """Return a loader of this process's share of each batch.

    Args:
        rows: all rows.
        batches: the rows of each batch, in order; it has a length. A process without a row in a batch gets a spare
            one, which does not count.
        collate: makes a batch of rows.
        pinned: whether to put batches into pinned memory.
    """
    sampler: Any = _Shares(batches)  # a DataLoader's types ask for a list, which would take long for large texts
    return DataLoader(_Collated(rows, collate), batch_sampler=sampler, collate_fn=dict, pin_memory=pinned)


class _Shares:
    """A batch sampler of the rows of this process; a spare row's number is -1 minus its own."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Sequence[int]]:
        for batch in self.batches:
            yield ranks.share(batch) or [-1 - batch[0]]


class _Collated(Dataset[Batch]):
    """Rows that are read a batch at a time."""

    def __init__(self, rows: Any, collate: Callable[[list[Any]], Batch]) -> None:
        self.rows, self.collate = rows, collate

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, numbers: Sequence[int]) -> Batch:
        if numbers[0] < 0:
            return {**self.collate([self.rows[-1 - numbers[0]]]), SPARE: True}
        return self.collate([self.rows[number] for number in numbers])


class SharedTrainer(Trainer):
    """Hugging Face's Trainer for steps whose loss is a mean over all their items, whatever batches they come in.

    The Trainer takes the mean of the means of a step's batches and processes. That differs when these have different
    numbers of items, so each batch's mean is weighted by its share of the step's items. A loss or a norm of gradients
    that is not finite stops the training.

    Args:
        training: this process's batches of all steps, from :func:`shared_loader`.
        count: counts the items of a batch. Its names are those of the model's outputs that make up the loss.
        factors: the factor of a part in the loss, if it is not 1.
    """

    ADVICE = " and another `out`"
    """What else to do when the learning rate is too high, for the error message."""

    def __init__(
        self,
        *,
        training: DataLoader[Batch],
        count: Count,
        factors: Mapping[str, float] | None = None,
        **options: Any,
    ) -> None:
        self.training = training
        self.count = count
        self.factors = factors or {}
        super().__init__(train_dataset=training.dataset, **options)
        self.remove_callback(PrinterCallback)
        # Or the Trainer would count in its own way, which knows one kind of items.
        self.model_accepts_loss_kwargs = False

    def get_train_dataloader(self) -> DataLoader[Batch]:
        # Not prepared by Accelerate, which would divide the batches again.
        return self.training

    def get_batch_samples(self, *arguments: Any, **options: Any) -> tuple[list[Batch], None]:
        """Return the batches of a step, each with its weights."""
        batches, _ = super().get_batch_samples(*arguments, **options)
        counts = [
            dict.fromkeys(found, 0) if batch.pop(SPARE, False) else found
            for batch, found in ((batch, self.count(batch)) for batch in batches)
        ]
        names = list(counts[0]) if counts else []
        totals = ranks.totals([sum(found[name] for found in counts) for name in names])
        # The Trainer divides by the number of batches in a step, and takes the mean over processes.
        equal = ranks.size() * self.args.gradient_accumulation_steps
        for batch, found in zip(batches, counts, strict=True):
            batch[WEIGHTS] = {
                name: self.factors.get(name, 1.0) * (found[name] * equal / max(1, total))
                for name, total in zip(names, totals, strict=True)
            }
        return batches, None

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        weights = inputs[WEIGHTS]
        outputs = model(**{name: value for name, value in inputs.items() if name != WEIGHTS})
        loss: Tensor = sum(outputs[name] * weight for name, weight in weights.items())
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        for name, value in logs.items():
            if name == "grad_norm" or name.endswith("loss"):
                rate = self.lr_scheduler.base_lrs[0]
                if not math.isfinite(value):
                    raise NotFiniteError.after(self.state.global_step, rate, name, self.ADVICE)
        super().log(logs, start_time)
