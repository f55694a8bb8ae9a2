"""The work of a pretraining: open the text, and train on it unless that was done before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...data.corpus import Text, source_of
from ...data.encode import TokenizerChoice, open_or_encode
from ...data.hub import fetched
from ...lab import ranks
from ...lab.progress import Progress
from ...lab.training.long_run import LongJob
from .model import build_config
from .pretraining import Pretraining
from .results import PretrainResults
from .settings import ModelSettings, PretrainTraining


@dataclass(frozen=True)
class PretrainJob(LongJob[PretrainResults]):
    """The options of a pretraining, checked and with defaults filled in."""

    model: ModelSettings
    training: PretrainTraining
    data: Sequence[str]
    column: str | None
    tokenizer: TokenizerChoice
    device: torch.device
    every: int
    keep: int
    cache: Path | None
    threads: int | None
    report_to: str | None
    command: str

    RESULTS = PretrainResults

    def read(self, progress: Progress) -> Text:
        with ranks.main_first():
            paths = fetched(self.data, progress)
        text = Text(paths, self.column, progress, source_of(self.data))
        self.tokenizer.check()
        if self.data and ranks.is_main():
            progress.line(text.about_files)
        return text

    def settings(self, text: str) -> dict[str, Any]:
        decided = {"tokenizer": self.tokenizer.setting, "text": text, "device": self.device.type}
        return {**asdict(self.model), **asdict(self.training), **decided}

    def prepared(self, text: Text, cache: Path) -> Pretraining:
        prepared = open_or_encode(cache, text, self.tokenizer)
        config = build_config(self.model, self.training.longest, prepared.vocabulary)
        return Pretraining(self.model, self.training, prepared, config, self.device, self.every, self.keep)
