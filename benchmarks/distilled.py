"""How much of masked language modelling do distilled positions keep, and how much does a short training bring back?

Run: .venv/bin/python benchmarks/distilled.py --models runs/learned/0/model runs/learned/1/model --data 'text/*.parquet'

The models are encoders with position embeddings and a masked-LM head, such as `whereformer pretrain --position learned`
makes; several of them, which differ in their seed, give the spread. In each, `whereformer.analysis.distill_positions`
replaces the embeddings by TISA's kernels, with each number of them. It is judged on held-out text as it is, after a
short training of the kernels alone, and after one of all weights. The same trainings of the model as it was, without
any positions, and with kernels that were not fitted say what the positions, the fit and the training are worth.
Kernels have no longest position, so fitted ones are also judged, without any training, on longer windows.

Every finished model and variant is a file in --out and is not repeated. Writes results.json and plot.svg.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from lists import listed_numbers
from matplotlib.figure import Figure
from parts import kept, spread
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from whereformer import EncoderForMaskedLM, load_pretrained
from whereformer.analysis import distill_positions
from whereformer.analysis.held_out import lm_score
from whereformer.cli.main import execute
from whereformer.data.corpus import TextSource
from whereformer.data.encode import EncodedText, TokenizerChoice, open_or_encode
from whereformer.data.streams import Stream
from whereformer.data.tokenizers import Vocabulary
from whereformer.data.windows import HELD_OUT_RATE, Stage, Windows, mask_tokens
from whereformer.errors import InputError
from whereformer.lab.loading import quiet_transformers
from whereformer.lab.optimizer import build_optimizer, build_schedule
from whereformer.models import Encoder
from whereformer.provenance import write_results

BATCH_TOKENS = 2048
"""About this number of tokens is read at a time in judging."""

TRAINED, DROPPED = "as trained", "without positions"
STAGES = {"at once": "#d55e00", "positions trained": "#0072b2", "all trained": "#009e73"}
"""When a variant is judged: before any training, after one of its positions alone, and after one of all weights."""


@dataclass(frozen=True)
class Distilled:
    """Measure the masked-LM loss of models whose position embeddings were turned into kernels."""

    models: Annotated[list[Path], tyro.conf.arg(metavar="FOLDER")]
    """Models with position embeddings and a masked-LM head."""
    data: Annotated[list[str], tyro.conf.arg(metavar="PATH")]
    """The text that the models were trained on. Its held-out part is the same as in pretraining."""
    kernels: str = "1,2,3,5,8"
    """Numbers of kernels per head."""
    fresh: str = "5"
    """Numbers of kernels per head that are trained without having been fitted."""
    steps: int = 200
    """Steps of each training."""
    batch_size: int = 32
    """Windows in a step."""
    mask_rate: float = 0.3
    """Share of tokens that are masked in training."""
    learning_rate: float = 1e-3
    """Peak of the learning rate of all weights but kernels."""
    kernel_learning_rate: float = 5e-3
    """Peak of the learning rate of kernels."""
    fit_tokens: int = 32768
    """Number of tokens that kernels are fitted to."""
    held_out_tokens: int = 65536
    """Number of tokens that models are judged by."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the trainings; bfloat16 is mixed precision."""
    length: int | None = None
    """Tokens in a window. Default: the most that the model takes."""
    longer: str = "128,256"
    """Tokens in the longer windows that fitted kernels are judged on too."""
    out: Path = Path("runs/distilled")
    """Folder for the results and the plot."""

    def run(self, console: Console) -> None:
        """Make the missing results, then print and write everything."""
        torch.set_num_threads(1)
        lengths = listed_numbers("longer", self.longer, 3, 2**20)
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for path in self.models:
            name = _name_of(path)
            if name in found:
                raise InputError("models", f"expected folders with different names, got {name} twice")
            found[name] = {}
            for variant in self._variants:
                file = self.out / "models" / name / f"{variant.replace(' ', '-')}.json"
                settings = {**self._settings, "weights": _fingerprint(path)}
                one = kept(file, settings, partial(self._scores, path, variant))
                found[name][variant] = one
                if self._variants[variant][2]:
                    beside = file.with_name(f"{file.stem}-in-{'-'.join(map(str, lengths))}.json")
                    longer = kept(beside, settings, partial(self._by_length, path, variant, lengths))
                    one["by_length"] = {name: longer[name] for name in ("date", "commit", "losses")}
                shown = ", ".join(f"{stage} {scores['masked_lm_loss']:.3f}" for stage, scores in one["scores"].items())
                console.print(f"{name}, {variant}: {shown}", highlight=False)
        write_results(self.out / "results.json", {"settings": self._settings, "models": found})
        self._print(console, list(found.values()))
        self._plot(list(found.values()))
        console.print(f"wrote {self.out / 'results.json'} and {self.out / 'plot.svg'}", highlight=False)

    @cached_property
    def _variants(self) -> dict[str, tuple[str | None, dict[str, int], bool]]:
        """Each variant's position method, the method's options, and whether it is fitted."""
        fitted, fresh = (listed_numbers("kernels", text, 1, 64) for text in (self.kernels, self.fresh))
        return {
            TRAINED: (None, {}, False),
            DROPPED: ("none", {}, False),
            **{f"S={count}": ("tisa", {"num_kernels": count}, True) for count in sorted(fitted)},
            **{f"S={count} not fitted": ("tisa", {"num_kernels": count}, False) for count in sorted(fresh)},
        }

    @cached_property
    def _settings(self) -> dict[str, Any]:
        left_out = ("models", "data", "out", "kernels", "fresh", "longer")
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    def _text(self, path: Path) -> EncodedText:
        """Return the text in tokens of a model; models with the same tokenizer share a cache."""
        text, cache = TextSource(self.data), self.out / "cache"
        return open_or_encode(cache, text, TokenizerChoice(path, 0))

    def _scores(self, path: Path, variant: str) -> dict[str, Any]:
        """Return a variant's scores before any training and after both, and how many numbers its positions have."""
        text, teacher, length = self._opened(path)
        windows = _spread_windows(text.held_out, text, length, self.held_out_tokens)
        states = _states(teacher, windows)
        position, sizes, fitted = self._variants[variant]
        scores: dict[str, dict[str, float]] = {}
        explained: list[list[float]] = []
        kernels: dict[str, Tensor] = {}
        for stage in STAGES:
            model, encoder = _loaded(path, position, sizes)
            if fitted and not kernels:
                explained = self._fit(teacher, encoder, text, length)
                kernels = {name: tensor.clone() for name, tensor in encoder.position.state_dict().items()}
            if fitted:
                encoder.position.load_state_dict(kernels)
            own = list(encoder.position.parameters())
            if stage == "positions trained" and not own:
                continue
            if stage != "at once":
                self._train(model, encoder, text, length, alone=stage == "positions trained")
            similar = functional.cosine_similarity(_states(encoder, windows), states, -1).mean()
            scores[stage] = {"similarity": float(similar), **_masked_lm_scores(model, windows, text.vocabulary)}
        return {"numbers": sum(parameter.numel() for parameter in own), "scores": scores, "explained": explained}

    def _by_length(self, path: Path, variant: str, longer: Sequence[int]) -> dict[str, Any]:
        """Return the loss of a variant as it is fitted, in windows of the trained length and in longer ones."""
        text, teacher, length = self._opened(path)
        position, sizes, _ = self._variants[variant]
        model, encoder = _loaded(path, position, sizes)
        self._fit(teacher, encoder, text, length)
        losses = {}
        for each in (length, *longer):
            windows = _spread_windows(text.held_out, text, each, self.held_out_tokens)
            losses[each] = _masked_lm_scores(model, windows, text.vocabulary)["masked_lm_loss"]
        return {"losses": losses}

    def _opened(self, path: Path) -> tuple[EncodedText, Encoder, int]:
        """Return the text in tokens of a model, its encoder, and the number of tokens in a window."""
        _, teacher = _loaded(path, None, {})
        return self._text(path), teacher, self.length or teacher.config.max_position_embeddings

    def _fit(self, teacher: Encoder, encoder: Encoder, text: EncodedText, length: int) -> list[list[float]]:
        """Fit an encoder's kernels to the teacher's embeddings, and return how much of them each head explains."""
        windows = _spread_windows(text.training, text, length, self.fit_tokens)
        return distill_positions(teacher, encoder, windows, _rows_of_a_batch(windows)).explained.tolist()

    def _train(self, model: PreTrainedModel, encoder: Encoder, text: EncodedText, length: int, *, alone: bool) -> None:
        """Train a model, or its positions alone, on the same masked windows in the same order as all others."""
        torch.manual_seed(0)
        model.requires_grad_(not alone)
        for parameter in encoder.position.parameters():
            parameter.requires_grad_(True)
        optimizer = build_optimizer(model, self.learning_rate, self.kernel_learning_rate)
        schedule = build_schedule(optimizer, "linear", max(1, self.steps // 10), self.steps)
        # Pretraining had other seeds, so these are other masks.
        stages = [Stage(length, self.steps, self.batch_size)]
        end = (text.vocabulary.sep,)
        windows = Windows(text.training, text.vocabulary, stages, self.mask_rate, seed=1_000_003, end=end)
        model.train()
        for step in range(self.steps):
            batch = windows.batch(step)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bfloat16"):
                loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        model.eval()

    def _print(self, console: Console, models: Sequence[dict[str, dict[str, Any]]]) -> None:
        """Print the median and range of the loss of each variant, when it is judged, over all models."""
        table = Table("masked-LM loss", "numbers", *STAGES, "similarity at once")
        for variant in self._variants:
            found = [model[variant] for model in models]
            losses = [
                [one["scores"][stage]["masked_lm_loss"] for one in found if stage in one["scores"]] for stage in STAGES
            ]
            similar = [one["scores"]["at once"]["similarity"] for one in found]
            cells = (*(spread(column, 3) for column in losses), spread(similar, 3))
            table.add_row(variant, str(found[0]["numbers"]), *cells)
        console.print(table)
        fitted = [variant for variant, (_, _, is_fitted) in self._variants.items() if is_fitted]
        lengths = list(models[0][fitted[0]]["by_length"]["losses"])
        table = Table("loss at once, in windows of", *lengths)
        for variant in fitted:
            table.add_row(
                variant,
                *(spread([model[variant]["by_length"]["losses"][each] for model in models], 3) for each in lengths),
            )
        console.print(table)

    def _plot(self, models: Sequence[dict[str, dict[str, Any]]]) -> None:
        """Draw the loss against the number of numbers: a thin line for each model, a thick one for the median.

        The ends are level lines: dotted with the whole table of embeddings, dashed without positions.
        """
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.add_subplot()
        fitted = [variant for variant, (_, _, is_fitted) in self._variants.items() if is_fitted]
        numbers = [models[0][variant]["numbers"] for variant in fitted]
        for stage, color in STAGES.items():
            lines = [[model[variant]["scores"][stage]["masked_lm_loss"] for variant in fitted] for model in models]
            for line in lines:
                axes.plot(numbers, line, color=color, linewidth=0.7)
            middle = [statistics.median(values) for values in zip(*lines, strict=True)]
            axes.plot(numbers, middle, color=color, marker="o", markersize=3, linewidth=2.2, label=stage)
            for end, line_style in ((TRAINED, ":"), (DROPPED, "--")):
                ends = [model[end]["scores"].get(stage) for model in models]
                if None not in ends:
                    height = statistics.median(scores["masked_lm_loss"] for scores in ends)
                    axes.axhline(height, color=color, linewidth=1, linestyle=line_style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [f"{count}\n{variant}" for count, variant in zip(numbers, fitted, strict=True)])
        axes.minorticks_off()
        axes.set_xlabel(f"numbers in all kernels (the table: {models[0][TRAINED]['numbers']}, dotted; none: dashed)")
        axes.set_ylabel("held-out masked-LM loss, nats")
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(self.out / "plot.svg", metadata={"Date": None})


def _name_of(path: Path) -> str:
    """Name a model by the last two folders, without the ``model`` in which ``whereformer pretrain`` leaves it."""
    folder = path.resolve()
    return "-".join((folder.parent if folder.name == "model" else folder).parts[-2:])


def _fingerprint(path: Path) -> str:
    file = path / "model.safetensors"
    if not file.exists():
        raise InputError("models", f"expected a folder with model.safetensors, got {path}")
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _loaded(path: Path, position: str | None, sizes: dict[str, Any]) -> tuple[EncoderForMaskedLM, Encoder]:
    with quiet_transformers():
        model = load_pretrained(path, position, **sizes)
    if not isinstance(model, EncoderForMaskedLM):
        raise InputError("models", f"{path} has no masked-LM head")
    return model, model.encoder


@torch.no_grad()
def _states(encoder: Encoder, windows: Tensor) -> Tensor:
    return torch.cat([encoder(rows).last_hidden_state for rows in windows.split(_rows_of_a_batch(windows))])


def _masked_lm_scores(model: EncoderForMaskedLM, windows: Tensor, vocabulary: Vocabulary) -> dict[str, float]:
    """Return the mean loss and the accuracy at masked tokens, with the same masks for every model."""
    inputs, labels = mask_tokens(windows, HELD_OUT_RATE, vocabulary, torch.Generator().manual_seed(0))
    parts = zip(*(part.split(_rows_of_a_batch(windows)) for part in (inputs, labels)), strict=True)
    found = lm_score(model, ({"input_ids": rows, "labels": wanted} for rows, wanted in parts))
    return {"masked_lm_loss": found.loss, "masked_lm_accuracy": found.accuracy}


def _rows_of_a_batch(windows: Tensor) -> int:
    return max(1, BATCH_TOKENS // windows.shape[1])


def _spread_windows(stream: Stream, text: EncodedText, length: int, tokens: int) -> Tensor:
    """Return about this many tokens in windows [CLS] text [SEP], (rows, length), spread evenly over a stream."""
    body = length - 2
    rows = max(1, min(tokens // length, len(stream) // body))
    starts = [row * (len(stream) - body) // rows for row in range(rows)]
    parts = torch.stack([stream[start : start + body] for start in starts])
    ends = [torch.full((rows, 1), token) for token in (text.vocabulary.cls, text.vocabulary.sep)]
    return torch.cat((ends[0], parts, ends[1]), 1)


if __name__ == "__main__":
    execute(tyro.cli(Distilled))
