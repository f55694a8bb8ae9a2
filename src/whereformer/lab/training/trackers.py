"""Trackers: programs that a training reports its losses and scores to, through transformers' own callbacks."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

from .. import ranks


def tracker(report_to: str | None, curves: Path, step: int = 0) -> list[TrainerCallback]:
    """Return the callback that reports to a tracker, if there is one. Of several processes, the main one reports.

    Args:
        report_to: "trackio", "wandb", "tensorboard" or "none"; None is TensorBoard if that is installed.
        curves: the folder for TensorBoard's files.
        step: steps taken before; TensorBoard hides what was reported of later ones.
    """
    if report_to is None:
        report_to = "none" if find_spec("tensorboard") is None else "tensorboard"
    if report_to == "none" or not ranks.is_main():
        return []
    if report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        return [TensorBoardCallback(SummaryWriter(str(curves), purge_step=step + 1 if step else None))]
    return [_Wandb() if report_to == "wandb" else TrackioCallback()]


class _Wandb(WandbCallback):
    def on_train_end(self, *arguments: Any, **others: Any) -> None:
        super().on_train_end(*arguments, **others)
        # Or the next training in this process would report to the same run.
        import_module("wandb").finish()
