"""The analyze recipe: what models learned about position, read off their weights, head by head."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from ..errors import InputError
from ..files import write_atomically
from ..lab.recipe import Free, Range, Recipe, lazily

with lazily(__name__):
    import torch
    from torch import Tensor

    from .. import positions
    from ..analysis import findings, fit, position_scores, toeplitz
    from ..lab import loading
    from ..lab.report.report import Report
    from ..lab.run import Run
    from .head_report import build_report

FINDINGS = "findings.json"
"""The file of the numbers, in a run's folder."""
MOST_POSITIONS = 512
"""The most positions that are analyzed by default."""
EVEN = 1e-4
"""A head counts as a pure curve if its scores differ from the curve by at most this share of its range, which is about
what rounding in float32 causes."""


@dataclass(frozen=True, kw_only=True)
class Analyze(Recipe):
    """What did a model learn about position? Reads it off the weights, fits and names every head, and draws it.

    The analysis is that of the TISA paper. It measures how close the position embeddings are to Toeplitz (whether they
    know more than distances) and shows what position alone adds to each head's scores: as a heatmap, as a curve over
    offsets and as TISA's kernels, in every layer if the method acts in every layer.

    It reads the checkpoints of transformers that `load_pretrained` reads, such as BERT's, and models of this library.
    Several models are compared, such as the checkpoint-* folders of a run. Writes report.html (open it in a browser),
    report.md with its figures, and findings.json.
    """

    NAME = "analyze"
    FLAGS: ClassVar = {"model": "MODEL"}

    model: Annotated[tuple[str, ...], Free] = ()
    """Folders, or ids on the Hugging Face Hub."""
    length: Annotated[int | None, Range(2, 2**16), Free] = None
    """Number of positions to look at. Default: those of the model, at most 512."""
    max_kernels: Annotated[int, Range(1, 16), Free] = 5
    """Largest number of TISA kernels to fit to each head's curve, from 1 up."""
    out: Annotated[Path, Free] = Path("runs/analyze")
    """Folder for the results."""

    outputs = (FINDINGS,)

    def check(self) -> None:
        if not self.model:
            raise InputError("model", "expected at least one folder or id on the Hugging Face Hub, got none")
        if len(set(self.model)) < len(self.model):
            raise InputError("model", f"expected different ones, got {' '.join(self.model)}")

    def run(self, run: Run) -> Report:
        models: list[findings.ModelFindings] = []
        short = [Path(path).resolve().name for path in self.model]
        names = short if len(set(short)) == len(short) else self.model
        for path in self.model:
            loading.check_there(path)
        for path, name in zip(self.model, names, strict=True):
            run.say(f"analyzing {name}")
            with torch.no_grad():
                models.append(analyze_model(path, name, self, run.device))
        kept = {"models": [model.to_dict() for model in models]}
        write_atomically(self.out / FINDINGS, json.dumps(kept, allow_nan=False, indent=1) + "\n")
        return build_report(models)


def analyze_model(path: str, name: str, options: Analyze, device: str) -> findings.ModelFindings:
    """Analyze one model.

    Args:
        path: a folder, or an id on the Hugging Face Hub.
        name: what the report calls it.
        options: the options.
        device: where the model runs.
    """
    encoder = loading.load(path)
    encoder.to(device)
    most = encoder.config.max_position_embeddings
    length = min(most, MOST_POSITIONS) if options.length is None else options.length
    heads: list[findings.HeadFindings] = []
    try:
        vectors = position_scores.read_position_vectors(encoder, length)
        for read in position_scores.read_layer_scores(encoder, length):
            heads += _heads(read, options.max_kernels)
    except positions.PositionRangeError:
        told = f"expected at most {most}, the number of positions of {path}, got {length}"
        raise InputError("length", told) from None
    return findings.ModelFindings(
        name=name,
        position=encoder.config.position,
        length=length,
        table=None if vectors is None else _table(vectors.cpu()),
        heads=tuple(heads),
    )


def _table(vectors: Tensor) -> findings.TableFindings:
    gram = vectors @ vectors.T
    found = toeplitz.diagonals(gram)
    return findings.TableFindings(gram, toeplitz.from_diagonals(found.mean), float(found.explained), vectors.shape[1])


def _heads(read: position_scores.LayerScores, max_kernels: int) -> list[findings.HeadFindings]:
    scores = read.scores.float().cpu()
    found = toeplitz.diagonals(scores.double())
    n = scores.shape[-1]
    fits = [
        replace(each, sharpness=each.sharpness / read.stride**2, center=each.center * read.stride)  # in tokens
        for each in fit.fit_tisa_up_to(found.mean, max_kernels, constant=True)[1:]
    ]
    heads = []
    for head, curve in enumerate(found.mean):
        span = float(curve.max() - curve.min())
        is_curve = float(found.spread[head].max()) <= EVEN * max(span, EVEN)
        heads.append(
            findings.HeadFindings(
                layer=read.layer,
                head=head,
                offsets=torch.arange(1 - n, n) * read.stride,
                curve=curve,
                toeplitzness=1.0 if is_curve else float(found.explained[head]),
                scores=None if is_curve else scores[head],
                fits=tuple(each[head] for each in fits),
            )
        )
    return heads
