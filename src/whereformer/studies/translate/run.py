"""The work of a translation training: open the pairs, and train on them unless that was done before."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...lab.progress import Progress
from ...lab.training.long_run import LongJob
from .examples import prepare
from .model import build_config
from .pairs import open_text
from .parallel import ParallelText
from .results import TranslationResults
from .settings import ParallelData, TranslationSettings
from .training import TranslatorTraining


@dataclass(frozen=True)
class TranslateJob(LongJob[TranslationResults]):
    """Everything that a translation training needs, checked, before the text is read.

    Args:
        chosen: the checked settings.
        data: the text to train on.
        validation: the text to judge by; by default some of the other.
        device: where to train.
        cache: the folder for encoded text; by default ``cache`` in the run's folder.
        threads: threads on the CPU; by default torch's.
        report_to: where to report losses; by default TensorBoard if it is installed.
        command: the command line, for the model card.
    """

    chosen: TranslationSettings
    data: ParallelData
    validation: ParallelData | None
    device: torch.device
    cache: Path | None = None
    threads: int | None = None
    report_to: str | None = None
    command: str = ""

    RESULTS = TranslationResults

    def read(self, progress: Progress) -> ParallelText:
        return open_text(self.data, self.validation, progress)

    def settings(self, text: str) -> dict[str, Any]:
        return {**asdict(self.chosen), "text": text, "device": self.device.type}

    def prepared(self, text: ParallelText, cache: Path) -> TranslatorTraining:
        prepared = prepare(text, self.chosen.vocab_size, self.chosen.max_length, cache)
        config = build_config(self.chosen, prepared.facts.vocabulary)
        return TranslatorTraining(self.chosen, prepared, config, self.device)
