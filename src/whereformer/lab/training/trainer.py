"""The arguments of transformers' Trainer, and how its own output is silenced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers import logging as transformers_logging

from .. import ranks


def training_arguments(
    folder: Path, steps: int, device: torch.device, *, dtype: str, seed: int, rows: int = 1, **others: Any
) -> TrainingArguments:
    """Build the Trainer's arguments for a training in which our callback decides when to log, judge and save.

    Args:
        folder: folder for checkpoints.
        steps: optimizer steps in all.
        device: the only device that this process uses; a Trainer with several GPUs would give each its own batch, which
            changes the result.
        dtype: "bfloat16" for mixed precision, or "float32".
        seed: the Trainer's seed.
        rows: rows in a batch of all processes together; 1 if each of our batches is one item to the Trainer.
        others: further arguments of ``TrainingArguments``.
    """
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=max(1, rows // ranks.size()),
        max_grad_norm=1.0,
        bf16=dtype == "bfloat16",
        use_cpu=device.type == "cpu",
        ddp_backend="gloo" if device.type == "cpu" and ranks.size() > 1 else None,
        seed=seed,
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        # A loss that is not a number must be seen.
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to="none",
        log_level="error",
        **others,
    )
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def slow_dtype(dtype: str, device: torch.device) -> str | None:
    """Return a note if the CPU has no instructions for a training in bfloat16, which is then slower than in float32."""
    from ...kernels.torch_private import multiplies_bfloat16

    if device.type == "cpu" and dtype == "bfloat16" and not multiplies_bfloat16():
        return "note: this processor has no instructions for bfloat16; --dtype float32 is much faster here"
    return None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and notes, which would garble ours."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
