"""The arguments of transformers' Trainer."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import TrainingArguments

from .. import ranks


def training_arguments(
    folder: Path, steps: int, device: torch.device, *, run: str, dtype: str, seed: int, accumulate: int = 1
) -> TrainingArguments:
    """Build the arguments of a Trainer to which a callback says when to log, judge and save.

    Args:
        folder: folder for checkpoints.
        steps: optimizer steps in all.
        device: the only device that this process uses; a Trainer with several GPUs would give each its own batch, which
            changes the result.
        run: the name of the run in a tracker.
        dtype: "bfloat16" for mixed precision, or "float32".
        seed: the Trainer's seed.
        accumulate: batches in a step.
    """
    arguments = TrainingArguments(
        output_dir=str(folder),
        run_name=run,
        max_steps=steps,
        # Our loader makes the batches; to the Trainer, each is one item.
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=1.0,
        bf16=dtype == "bfloat16",
        use_cpu=device.type == "cpu",
        ddp_backend="gloo" if device.type == "cpu" and ranks.size() > 1 else None,
        seed=seed,
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        # A loss that is not finite must be seen.
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to="none",
        log_level="error",
    )
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def slow_dtype(dtype: str, device: torch.device) -> list[str]:
    """Return a note if the CPU has no instructions for a training in bfloat16, which is then slower than in float32."""
    from ...kernels.torch_private import multiplies_bfloat16

    if device.type == "cpu" and dtype == "bfloat16" and not multiplies_bfloat16():
        return ["note: this processor has no instructions for bfloat16; --dtype float32 is much faster here"]
    return []
