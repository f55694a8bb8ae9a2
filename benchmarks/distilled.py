"""Measure the masked-LM loss of models after TISA kernels replaced their position embeddings, without training.

Run: .venv/bin/python benchmarks/distilled.py --models runs/learned/0/model --data 'wikipedia/train-*.parquet'

Each variant is a model with fitted kernels (S per head), the model as it was trained, or the model without positions.
The held-out part of the text is the same as in pretraining, and the masks are the same for all variants. Only kernels
are also measured in longer windows, because embeddings end. Writes the results to --out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from benchmark import Benchmark, main
from distillation import distill_positions
from parts import spread
from rich.console import Console
from rich.table import Table
from torch import Tensor

from whereformer import EncoderForMaskedLM, load_pretrained
from whereformer.analysis.held_out import lm_score
from whereformer.data.corpus import TextSource
from whereformer.data.encode import EncodedText, TokenizerChoice, open_or_encode
from whereformer.data.streams import Stream
from whereformer.data.windows import HELD_OUT_RATE, mask_tokens
from whereformer.errors import InputError
from whereformer.lab.loading import quiet_transformers
from whereformer.lab.recipe import Counts, Range

BATCH_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class Distilled(Benchmark):
    """Measure the masked-LM loss of models whose position embeddings were turned into kernels."""

    models: tuple[Path, ...]
    """Folders of models with position embeddings and a masked-LM head."""
    data: tuple[str, ...]
    """The text that the models were trained on."""
    kernels: Annotated[Counts, Range(1, 64)] = (1, 2, 3, 5, 8)
    """Numbers of kernels per head."""
    longer: Annotated[Counts, Range(3, 2**20)] = (128, 256)
    """Tokens in the longer windows."""
    fit_tokens: int = 32768
    """Number of tokens that kernels are fitted to."""
    held_out_tokens: int = 65536
    """Number of tokens in the held-out windows."""
    out: Path = Path("runs/distilled")

    def measure(self, console: Console) -> dict[str, Any]:
        """Measure all variants of all models, then print the losses."""
        results = {str(path): self._measure(path) for path in self.models}
        table = Table("variant", "parameters of positions", "masked-LM loss by tokens in a window")
        for variant, measured in next(iter(results.values())).items():
            losses = (
                f"{length}: {spread([model[variant]['losses'][length] for model in results.values()], 3)}"
                for length in measured["losses"]
            )
            table.add_row(variant, str(measured["numbers"]), ", ".join(losses))
        console.print(table)
        return {"settings": self.settings("models", "data", "kernels", "longer"), "models": results}

    def _measure(self, path: Path) -> dict[str, dict[str, Any]]:
        """Return the number of position parameters and the losses of each variant, by the tokens in a window."""
        text = open_or_encode(self.out / "cache", TextSource(self.data), TokenizerChoice(path, 0))
        teacher = _load(path)
        length = teacher.config.max_position_embeddings
        fitting = partial(_windows, text.training, text, length, self.fit_tokens)
        variants: dict[str, dict[str, Any]] = {
            "as trained": self._variant(teacher, text, [length]),
            "without positions": self._variant(_load(path, "none"), text, [length]),
        }
        for count in self.kernels:
            student, windows = _load(path, "tisa", num_kernels=count), fitting()
            fit = distill_positions(teacher.encoder, student.encoder, windows, _rows_per_batch(windows))
            lengths = [length, *self.longer]
            variants[f"S={count}"] = {
                **self._variant(student, text, lengths),
                "explained": fit.explained.tolist(),
            }
        return variants

    def _variant(self, model: EncoderForMaskedLM, text: EncodedText, lengths: list[int]) -> dict[str, Any]:
        losses = {}
        for length in lengths:
            windows = _windows(text.held_out, text, length, self.held_out_tokens)
            masked = mask_tokens(windows, HELD_OUT_RATE, text.vocabulary, torch.Generator().manual_seed(0))
            batches = zip(*(part.split(_rows_per_batch(windows)) for part in masked), strict=True)
            losses[length] = lm_score(model, ({"input_ids": ids, "labels": labels} for ids, labels in batches)).loss
        return {"numbers": sum(tensor.numel() for tensor in model.encoder.position.parameters()), "losses": losses}


def _load(path: Path, position: str | None = None, **options: Any) -> EncoderForMaskedLM:
    with quiet_transformers():
        model = load_pretrained(path, position, **options)
    if not isinstance(model, EncoderForMaskedLM):
        raise InputError("models", f"{path} has no masked-LM head")
    return model


def _rows_per_batch(windows: Tensor) -> int:
    return max(1, BATCH_TOKENS // windows.shape[1])


def _windows(stream: Stream, text: EncodedText, length: int, tokens: int) -> Tensor:
    """Return about this many tokens in windows [CLS] text [SEP], (rows, length), spread evenly over a stream."""
    body = length - 2
    rows = max(1, min(tokens // length, len(stream) // body))
    starts = [row * (len(stream) - body) // rows for row in range(rows)]
    parts = torch.stack([stream[start : start + body] for start in starts])
    cls, sep = (torch.full((rows, 1), token) for token in (text.vocabulary.cls, text.vocabulary.sep))
    return torch.cat((cls, parts, sep), 1)


if __name__ == "__main__":
    main(Distilled)
