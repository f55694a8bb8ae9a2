"""The analyze recipe: reads the learned effect of position from a model's weights, head by head."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from ..errors import InputError
from ..files import write_atomically
from ..lab.recipe import LazyModule, MayChange, Range, Recipe, lazy_modules

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .. import positions
    from ..analysis import findings, fit, position_scores, toeplitz
    from ..data import read
    from ..lab import loading
    from ..lab.report.report import Report
    from ..lab.run import Run
    from . import head_report
else:
    torch = LazyModule("torch")
    findings, fit, head_report = lazy_modules("analysis.findings", "analysis.fit", "recipes.head_report")
    position_scores, toeplitz = lazy_modules("analysis.position_scores", "analysis.toeplitz")
    positions, loading, read = lazy_modules("positions", "lab.loading", "data.read")

FINDINGS = "findings.json"
"""The file of the numbers, in a run's folder."""
MAX_POSITIONS = 512
"""The most positions that are analyzed by default."""
MAX_TOKENS = 48
"""The most tokens of the sentence that the report shows."""
EVEN = 1e-4
"""A head counts as a pure curve if its scores differ from the curve by at most this share of its range, which is about
what rounding in float32 causes."""


@dataclass(frozen=True, kw_only=True)
class Analyze(Recipe):
    """What did a model learn about position? Reads it off the weights, fits and names every head, and draws it.

    The analysis follows the TISA paper. It measures how close the position embeddings are to Toeplitz (whether they
    know more than distances) and shows what only position adds to each head's scores: as a heatmap, as a curve over
    offsets and as TISA's kernels, in every layer if the method acts in every layer.

    It reads the checkpoints of transformers that `load_pretrained` reads, such as BERT's, and models of this library.
    Several models are compared, such as the checkpoint-* folders of a run. Writes report.html (open it in a browser),
    report.md with its figures, and findings.json.
    """

    NAME = "analyze"
    EXAMPLE = "whereformer analyze bert-base-uncased"
    FLAGS: ClassVar = {"model": "MODEL"}

    model: Annotated[tuple[str, ...], MayChange] = ()
    """Folders, or ids on the Hugging Face Hub."""
    length: Annotated[int | None, Range(2, 2**16), MayChange] = None
    """Number of positions to analyze. Default: all positions of the model, at most 512."""
    max_kernels: Annotated[int, Range(1, 16), MayChange] = 5
    """Largest number of TISA kernels to fit to each head's curve, from 1 up."""
    text: Annotated[str, MayChange] = "The keys to the old cabinet are on the table next to the window."
    """A sentence. In the report, one points at a token of it and sees where position makes each head look."""
    scores: Annotated[Path | None, MayChange] = None
    """A table (.csv) with the columns model and score, to draw the models' scores over their Toeplitzness, as in the
    TISA paper's Figure 2. A model is named by its folder or id, or by the last part of it."""
    out: Annotated[Path, MayChange] = Path("runs/analyze")
    """Folder for the results."""

    outputs = (FINDINGS,)

    def check(self) -> None:
        if not self.model:
            raise InputError("model", "expected at least one folder or id on the Hugging Face Hub, got none")
        if len(set(self.model)) < len(self.model):
            raise InputError("model", f"expected different ones, got {' '.join(self.model)}")

    def run(self, run: Run) -> Report:
        models: list[findings.ModelFindings] = []
        folders = [Path(path).resolve() for path in self.model]  # "model" is the name of every trained model
        short = ["/".join(path.parts[-2:]) if path.name == "model" else path.name for path in folders]
        names = short if len(set(short)) == len(short) else self.model
        for path in self.model:
            loading.check_exists(path)  # before work on other models begins
        for path, name, score in zip(self.model, names, self.read_scores(), strict=True):
            run.log(f"analyzing {name}")
            with torch.no_grad():
                models.append(replace(analyze_model(path, name, self, run.device), score=score))
        content = {"models": [model.to_dict() for model in models]}
        write_atomically(self.out / FINDINGS, json.dumps(content, allow_nan=False, indent=1) + "\n")
        return head_report.build_report(models)

    def read_scores(self) -> list[float | None]:
        """Return the score of each model in the table; None without a table. A missing score is an InputError."""
        if self.scores is None:
            return [None for _ in self.model]
        table = {str(name): score for name, score in read.Table("scores", self.scores).rows(("model", "score"))}
        scores: list[float | None] = []
        for path in self.model:
            score = table.get(path, table.get(Path(path).name))
            try:
                scores.append(float(str(score)))
            except ValueError:
                cell = f"{score!r}; it has {', '.join(table)}"
                raise InputError("scores", f"expected a number for {path} in {self.scores}, got {cell}") from None
        return scores


def split_text(path: str, text: str) -> list[str]:
    """Return the tokens of a text by the tokenizer that was saved with a model; its words if there is none."""
    try:
        tokenizer = loading.load_tokenizer(path, None)
    except InputError:
        return text.split()
    return list(tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]))


def analyze_model(path: str, name: str, options: Analyze, device: str) -> findings.ModelFindings:
    """Analyze the model in a folder, or with an id on the Hugging Face Hub; ``name`` is its name in the report."""
    encoder = loading.load(path)
    encoder.to(device)
    max_length = encoder.config.max_position_embeddings
    length = min(max_length, MAX_POSITIONS) if options.length is None else options.length
    heads: list[findings.HeadFindings] = []
    try:
        vectors = position_scores.read_position_vectors(encoder, length)
        for layer_scores in position_scores.read_layer_scores(encoder, length):
            heads += _analyze_heads(layer_scores, options.max_kernels)
    except positions.PositionRangeError:
        reason = f"expected at most {max_length}, the number of positions of {path}, got {length}"
        raise InputError("length", reason) from None
    return findings.ModelFindings(
        name=name,
        position=encoder.config.position,
        length=length,
        num_layers=len(encoder.passes),
        table=None if vectors is None else _analyze_table(vectors.cpu()),
        heads=tuple(heads),
        tokens=tuple(split_text(path, options.text)[: min(length, MAX_TOKENS)]),
    )


def _analyze_table(vectors: Tensor) -> findings.TableFindings:
    gram = vectors @ vectors.T
    diagonals = toeplitz.diagonals(gram)
    means = toeplitz.from_diagonals(diagonals.mean)
    return findings.TableFindings(gram, means, float(diagonals.explained), vectors.shape[1])


def _analyze_heads(layer: position_scores.LayerScores, max_kernels: int) -> list[findings.HeadFindings]:
    scores = layer.scores.float().cpu()
    diagonals = toeplitz.diagonals(scores.double())
    n = scores.shape[-1]
    fits = [
        replace(kernels, sharpness=kernels.sharpness / layer.stride**2, center=kernels.center * layer.stride)  # tokens
        for kernels in fit.fit_tisa_up_to(diagonals.mean, max_kernels, constant=True)[1:]
    ]
    heads = []
    for head, curve in enumerate(diagonals.mean):
        span = float(curve.max() - curve.min())
        is_curve = float(diagonals.spread[head].max()) <= EVEN * max(span, EVEN)
        heads.append(
            findings.HeadFindings(
                layer=layer.layer,
                head=head,
                offsets=torch.arange(1 - n, n) * layer.stride,
                curve=curve,
                toeplitzness=1.0 if is_curve else float(diagonals.explained[head]),
                scores=None if is_curve else scores[head],
                fits=tuple(kernels[head] for kernels in fits),
            )
        )
    return heads
