"""Does a funnel pay? Give plain encoders and funnels the same time to pretrain and fine-tune, and compare accuracy.

Run: .venv/bin/python benchmarks/funnel_pays.py --text imdb/train.parquet --data FOLDER [--inputs imdb:512,imdb:1024]

Pretraining is masked language modelling, with short windows first. Every model gets the same CPU time of one thread.
Then each is fine-tuned on every input, again for the same time, and judged on the test rows at intervals. The result is
accuracy over time, for several seeds. Writes results.json and a plot for each input.

Tables with a class for each word, such as those of benchmarks/restored_text.py, are learned word by word. There, the
model "without decoder" is the funnel whose decoder has lost its layers: it repeats the last states and adds those of
the first block.

Before the first training, a step of every model is timed in turns with the others. From then on a step counts as much
as it took there, so that a machine with other work to do gives no model fewer steps.

Every finished part, a pretraining or a fine-tuning, is a file in --out/models/MODEL/SEED and is not repeated. So an
interrupted run loses only the part that it was in, and processes with different seeds can share --out, if the first has
already timed the steps. The last of them to end gathers all parts, and so does the same command when it is run again.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import pyarrow.parquet as parquet
import torch
import tyro
from matplotlib.figure import Figure
from parts import kept, spread
from rich.console import Console
from rich.table import Table
from side_by_side import time_by_turns
from sklearn.metrics import f1_score
from torch import Tensor, nn

from whereformer import (
    Encoder,
    EncoderConfig,
    EncoderForMaskedLM,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
    load_pretrained,
)
from whereformer.analysis import count_flops
from whereformer.analysis.held_out import HeldOut, lm_score
from whereformer.cli.main import execute
from whereformer.data.batches import RandomBatches, by_length
from whereformer.data.corpus import TextSource
from whereformer.data.encode import EncodedText, TokenizerChoice, open_or_encode
from whereformer.data.tokenizers import CLS, PAD, SEP
from whereformer.data.windows import HELD_OUT_RATE, IGNORED, Stage, Windows
from whereformer.errors import InputError
from whereformer.files import new_folder
from whereformer.lab.loading import quiet_transformers
from whereformer.lab.optimizer import build_optimizer
from whereformer.provenance import write_results

# The funnels' blocks cost as much as the plain encoder's. In pretraining, funnels have one more layer, the decoder.
FUNNEL = {"blocks": "2-3-2", "decoder_layers": "1"}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"blocks": "4", "position": "transformer_xl"},
    "funnel": {**FUNNEL, "position": "transformer_xl"},
    "plain+tisa": {"blocks": "4", "position": "tisa"},
    "funnel+tisa": {**FUNNEL, "position": "tisa"},
    "plain+tisa+mean": {"blocks": "4", "position": "tisa", "classifier_pooling": "mean"},
    "funnel+tisa, decoder of 2": {**FUNNEL, "decoder_layers": "2", "position": "tisa"},
    "funnel+tisa, without decoder": {**FUNNEL, "position": "tisa"},
}
PRETRAINED = {"funnel+tisa, without decoder": "funnel+tisa"}
"""Models that begin as another one."""
COLORS = dict(zip(MODELS, ("#7a7a7a", "#cc79a7", "#0072b2", "#d55e00", "#009e73", "#e69f00", "#56b4e9"), strict=True))
WARMUP = 0.1
"""Share of the time in which the learning rate rises."""
ROUNDS = 12
"""How many times a step of each model is timed."""
HELD_OUT_TOKENS = 65536
TUNING = ("finetune_seconds", "finetune_learning_rate", "dropout", "judgements", "test_rows", "column")
"""The settings that do not concern pretraining."""
TIMING = ("column", "vocab_size", "hidden_size", "batch_tokens", "mask_rate", "dtype")
"""The settings that a step's time depends on."""

Example = tuple[list[int], int | list[int]]
"""Token ids, and a class, or one for each token."""
Batch = dict[str, Tensor]


class Undecoded(Encoder):
    """A funnel whose decoder has no layers: the last states are repeated, and the first block's are added."""

    has_decoder = True


def without_layers(model: Any) -> None:
    """Take the layers from a model's decoder."""
    model.encoder.__class__ = Undecoded
    model.encoder.decoder = range(0)


def on_tokens(words: Sequence[str], classes: Sequence[int], places: Sequence[tuple[int, int]]) -> list[int]:
    """Return the class of each token: that of the word that it begins, else ``IGNORED``.

    A word without a token, such as a character that the tokenizer leaves out, has no class among the result.

    Args:
        words: the words; the tokens are those of all of them with a space between two.
        classes: the class of each word.
        places: where each token begins and ends in that text; (0, 0) for special tokens.
    """
    ends, end = [], -1
    for each in words:
        end += 1 + len(each)
        ends.append(end)
    word, found = 0, []
    for start, stop in places:
        while word < len(words) and ends[word] <= start:
            word += 1
        begins = word < len(words) and ends[word] - len(words[word]) < stop
        found.append(classes[word] if begins else IGNORED)
        word += begins
    return found


@dataclass(frozen=True)
class Pays:
    """Measure accuracy over time for plain encoders and funnels that are pretrained and fine-tuned the same way."""

    text: Annotated[list[str], tyro.conf.arg(metavar="PATH")]
    """Text to pretrain on."""
    data: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder with a folder for each task, which holds train.parquet and test.parquet (or validation.parquet)."""
    inputs: Annotated[str, tyro.conf.arg(metavar="TASK:N,...")] = "imdb:512"
    """Tasks to fine-tune on, each with the most tokens in a row."""
    column: Annotated[str, tyro.conf.arg(metavar="A,B")] = "text"
    """The column with the texts; the first of these that a table has. The column "label" has whole numbers from 0 on,
    or a text with a class for each word."""
    test_rows: int = 2000
    """Number of rows to judge by, drawn at random but the same for all models."""
    models: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = ("plain+tisa", "funnel+tisa")
    """The models to train, and to time in turns."""
    seeds: int = 1
    """Number of seeds. All models are trained with one seed before the next."""
    first_seed: int = 0
    """The first seed of weights and batches."""
    lengths: str = "8:0.5,16:0.2,32:0.15,64:0.15"
    """Tokens in a pretraining window, each with its share of the time."""
    vocab_size: int = 4096
    """Size of the vocabulary."""
    hidden_size: int = 128
    """Width; heads have 32 channels."""
    batch_tokens: int = 2048
    """Tokens in a step of pretraining and, at most, of fine-tuning."""
    mask_rate: float = 0.3
    """Share of tokens that are masked in pretraining."""
    dropout: float = 0.0
    """Dropout on hidden states in fine-tuning."""
    learning_rate: float = 5e-3
    """Peak of the learning rate of pretraining."""
    finetune_learning_rate: float = 1e-3
    """Peak of the learning rate of fine-tuning."""
    dtype: Annotated[str, tyro.conf.arg(metavar="NAME")] = "bfloat16"
    """Matrix products are in "bfloat16" or "float32"."""
    pretrain_seconds: float = 480.0
    """CPU seconds to pretrain each model, as steps took when they were timed."""
    finetune_seconds: float = 300.0
    """CPU seconds to fine-tune each model on each input."""
    judgements: int = 4
    """How many times the model is judged during fine-tuning. Judging does not count."""
    out: Path = Path("runs/funnel_pays")
    """Folder for the models, the results and the plots."""

    def run(self, console: Console) -> None:
        """Make the missing parts, then gather all that are there."""
        torch.set_num_threads(1)
        names = self._names
        for seed in range(self.first_seed, self.first_seed + self.seeds):
            for name in names:
                if name not in PRETRAINED:
                    trained = self._part(name, seed, "pretraining", partial(self._pretrain, name, seed))
                    console.print(f"{name} {seed}: held-out loss {trained['held_out_loss']:.3f}", highlight=False)
                for task, length in self._inputs:
                    make = partial(self._tune, name, seed, task, length)
                    found = self._part(name, seed, f"{task}-{length}", make)
                    score = found["accuracy"][-1][1]
                    console.print(f"{name} {seed}: {task}, {length} tokens: {score:.1%}", highlight=False)
        found = {name: self._gathered(name) for name in MODELS if (self.out / "models" / name).is_dir()}
        write_results(self.out / "results.json", {"settings": self._settings, "models": found})
        self._print(console, found)
        for task, length in self._inputs:
            self._plot(found, f"{task}-{length}")
        console.print(f"wrote {self.out / 'results.json'} and a plot for each input", highlight=False)

    @cached_property
    def _names(self) -> list[str]:
        for name in self.models:
            if name not in MODELS or PRETRAINED.get(name, name) not in self.models:
                raise InputError("models", f"expected some of {list(MODELS)}, and what they begin as, got {name!r}")
        return list(self.models)

    @cached_property
    def _inputs(self) -> list[tuple[str, int]]:
        """The tasks, each with the most tokens in a row."""
        try:
            parts = [part.strip().rsplit(":", 1) for part in self.inputs.split(",")]
            return [(task, int(length)) for task, length in parts]
        except ValueError:
            raise InputError("inputs", f"expected tasks and lengths such as imdb:512, got {self.inputs!r}") from None

    @cached_property
    def _settings(self) -> dict[str, Any]:
        left_out = ("out", "models", "seeds", "first_seed", "data", "inputs", "text")
        # The text is named without its place, which differs between machines.
        text = ["/".join(Path(path).parts[-2:]) for path in self.text]
        return {"text": text, **{name: value for name, value in asdict(self).items() if name not in left_out}}

    @cached_property
    def _encoded(self) -> EncodedText:
        text, cache = TextSource(self.text), self.out / "cache"
        return open_or_encode(cache, text, TokenizerChoice(None, self.vocab_size))

    def _folder(self, name: str, seed: int) -> Path:
        return self.out / "models" / name / str(seed)

    def _part(self, name: str, seed: int, part: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the results of a part, which is made first if need be.

        Raises:
            InputError: if the part was made with other settings.
        """
        settings = {**self._settings, "seed": seed, **MODELS[name]}
        if part == "pretraining":
            settings = {name: value for name, value in settings.items() if name not in TUNING}
        return kept(self._folder(name, seed) / f"{part}.json", settings, make)

    def _gathered(self, name: str) -> list[dict[str, Any]]:
        """Return the results of all seeds of a model that are there, each with its parts by name."""
        folders = sorted((self.out / "models" / name).glob("[0-9]*"), key=lambda folder: int(folder.name))
        return [
            {
                "seed": int(folder.name),
                **{file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))},
            }
            for folder in folders
        ]

    def _config(self, name: str, **more: Any) -> EncoderConfig:
        settings: dict[str, Any] = {
            "vocab_size": self._encoded.vocabulary.size,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.hidden_size // 32,
            "norm": "pre",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "type_vocab_size": 0,
            "max_position_embeddings": self._stages[-1][0],
            "sparse_prediction": True,
        }
        return EncoderConfig(**{**settings, **MODELS[name], **more})

    @property
    def _stages(self) -> list[tuple[int, float]]:
        """The lengths of windows, each with its share of the time."""
        pairs = (part.split(":") for part in self.lengths.split(","))
        return [(int(length), float(share)) for length, share in pairs]

    def _windows(self, length: int, seed: int, step: int) -> Batch:
        """Return the batch of a step of pretraining."""
        text, stages = self._encoded, [Stage(length, step + 1, max(1, self.batch_tokens // length))]
        return Windows(text.training, text.vocabulary, stages, self.mask_rate, seed).batch(step)

    def _pretrain(self, name: str, seed: int) -> dict[str, Any]:
        """Pretrain a model, save it, and return what there is to know about it."""
        text, stages = self._encoded, self._stages
        longest = stages[-1][0]
        config = self._config(name)
        torch.manual_seed(seed)
        model = EncoderForMaskedLM(config)

        def timed(length: int, name: str) -> tuple[nn.Module, Iterator[Batch]]:
            return EncoderForMaskedLM(self._config(name)), (self._windows(length, 0, step) for step in count())

        seconds = {length: self._seconds(str(length), partial(timed, length)) for length, _ in stages}
        steps = self._train(
            model,
            lambda step, spent: self._windows(_length_at(stages, spent), seed, step),
            lambda spent: seconds[_length_at(stages, spent)][name] / self.pretrain_seconds,
            self.learning_rate,
        )
        held_out = HeldOut(text.held_out[:HELD_OUT_TOKENS], HELD_OUT_RATE, text.vocabulary)
        score = lm_score(model, held_out.windows(longest, 8192))
        with quiet_transformers(), new_folder(self._folder(name, seed) / "model") as folder:
            model.save_pretrained(folder)
        return {
            "steps": steps,
            "seconds_of_a_step": {length: times[name] for length, times in seconds.items()},
            "held_out_loss": score.loss,
            "held_out_accuracy": score.accuracy,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "gflops_of_a_window": _gflops(config, longest, round(self.mask_rate * longest)),
        }

    def _tune(self, name: str, seed: int, task: str, length: int) -> dict[str, Any]:
        """Fine-tune a pretrained model on a task, and return its accuracy over time."""
        train, test = self._examples(task, length)
        per_word = isinstance(train[0][1], list)
        kind = EncoderForTokenClassification if per_word else EncoderForSequenceClassification
        classes = 1 + max(max(label) if isinstance(label, list) else label for _, label in train)
        torch.manual_seed(seed)
        with quiet_transformers():
            model = load_pretrained(
                self._folder(PRETRAINED.get(name, name), seed) / "model",
                model_class=kind,
                num_labels=classes,
                hidden_dropout_prob=self.dropout,
            )
        if per_word and name in PRETRAINED:
            without_layers(model)
        lengths = torch.tensor([[len(ids)] for ids, _ in train])

        def batches(seed: int) -> Iterator[Batch]:
            for rows in RandomBatches(lengths, self.batch_tokens, seed, tokens=True):
                yield _padded([train[row] for row in rows])

        def timed(name: str) -> tuple[nn.Module, Iterator[Batch]]:
            model = kind(self._config(name, num_labels=classes, hidden_dropout_prob=self.dropout))
            if per_word and name in PRETRAINED:
                without_layers(model)
            return model, batches(0)

        seconds = self._seconds(f"{task}-{length}", timed)[name]
        order = batches(seed)
        curve: list[tuple[float, float]] = []
        macro_f1: list[float] = []

        def judge(spent: float) -> None:
            if spent >= (len(curve) + 1) / self.judgements:
                wanted, found = self._predictions(model, test)
                accuracy = float((wanted == found).double().mean())
                curve.append((self.finetune_seconds * spent, accuracy))
                macro_f1.append(float(f1_score(wanted.numpy(), found.numpy(), average="macro", zero_division=0)))

        counted = model.config.without_decoder() if per_word and name in PRETRAINED else model.config
        steps = self._train(
            model,
            lambda step, spent: next(order),
            lambda spent: seconds / self.finetune_seconds,
            self.finetune_learning_rate,
            judge,
        )
        return {
            "steps": steps,
            "seconds_of_a_step": seconds,
            "train_rows": len(train),
            "test_rows": len(test),
            "gflops_of_a_row": _gflops(counted, length, 0),
            "accuracy": curve,
            "macro_f1": macro_f1[-1],
        }

    def _examples(self, task: str, length: int) -> tuple[list[Example], list[Example]]:
        """Return the training rows of a task and the test rows to judge by."""
        files = [self.data / task / f"{name}.parquet" for name in ("train", "test", "validation")]
        train, test = [file for file in files if file.exists()][:2]
        found: list[list[Example]] = []
        names: list[str] = []
        for file, most in ((train, None), (test, self.test_rows)):
            table = parquet.read_table(file)
            column = next((name for name in self.column.split(",") if name in table.column_names), self.column)
            rows = list(zip(table[column].to_pylist(), table["label"].to_pylist(), strict=True))
            if isinstance(rows[0][1], str):
                names = names or sorted({name for _, label in rows for name in label.split()})
                rows = [(text, [names.index(name) for name in label.split()]) for text, label in rows]
            if most is not None:
                rows = random.Random(0).sample(rows, min(most, len(rows)))
            encoded = self._encoded.tokenizer.backend_tokenizer.encode_batch(
                [text for text, _ in rows], add_special_tokens=False
            )
            ids = ([CLS, *one.ids[: length - 2], SEP] for one in encoded)
            labels = (
                [IGNORED, *on_tokens(text.split(), label, one.offsets)[: length - 2], IGNORED]
                if isinstance(label, list)
                else label
                for (text, label), one in zip(rows, encoded, strict=True)
            )
            found.append(list(zip(ids, labels, strict=True)))
        return found[0], found[1]

    def _train(
        self,
        model: Any,
        batch: Callable[[int, float], Batch],
        share: Callable[[float], float],
        learning_rate: float,
        after: Callable[[float], None] = lambda spent: None,
    ) -> int:
        """Train until the time is used up, and return the number of steps. The learning rate follows the time.

        Args:
            model: the model.
            batch: returns the batch of a step; it is told the share of the time that is spent.
            share: returns the share of the time that the next step takes; it is told what is spent.
            learning_rate: its peak.
            after: is called after every step with the share of the time that is spent.
        """
        optimizer = build_optimizer(model, learning_rate)
        spent, step = 0.0, 0
        while spent < 1:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * min((spent + 0.01) / WARMUP, (1 - spent) / (1 - WARMUP))
            self._step(model, optimizer, batch(step, spent))
            spent += share(spent)
            step += 1
            after(spent)
        return step

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        model.train()
        with self._precision():
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def _seconds(self, part: str, make: Callable[[str], tuple[nn.Module, Iterator[Batch]]]) -> dict[str, float]:
        """Return the CPU seconds of a training step of each model, timed in turns unless a file has them.

        Args:
            part: what is trained; names the file.
            make: returns a model, by its name, and its batches.

        Raises:
            InputError: if a model was not among those that were timed.
        """

        def step(model: nn.Module, batches: Iterator[Batch]) -> Callable[[], None]:
            optimizer = build_optimizer(model, self.learning_rate)
            return lambda: self._step(model, optimizer, next(batches))

        def measure() -> dict[str, Any]:
            made = {name: make(name) for name in self._names}
            models, baseline = {name: model for name, (model, _) in made.items()}, self._names[0]
            times = time_by_turns({name: step(*each) for name, each in made.items()}, models, ROUNDS, baseline)
            # Ratios within a round are steadier than times.
            return {"seconds": {name: times[baseline].seconds * found.ratio for name, found in times.items()}}

        file = self.out / "seconds" / f"{part}.json"
        settings = {name: value for name, value in self._settings.items() if name in TIMING}
        seconds: dict[str, float] = kept(file, settings, measure)["seconds"]
        if missing := set(self._names) - set(seconds):
            raise InputError(
                "models", f"expected some of {', '.join(seconds)}, which {file} has timed, got {', '.join(missing)}"
            )
        return seconds

    def _precision(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bfloat16")

    @torch.no_grad()
    def _predictions(self, model: Any, test: Sequence[Example]) -> tuple[Tensor, Tensor]:
        """Return the classes of all rows, or of all words, and those that the model predicts."""
        model.eval()
        wanted, found = [], []
        for rows in by_length(torch.tensor([[len(ids)] for ids, _ in test]), self.batch_tokens, tokens=True):
            batch = _padded([test[row] for row in rows])
            with self._precision():
                predicted = model(**batch).logits.argmax(-1)
            labeled = batch["labels"] != IGNORED
            wanted.append(batch["labels"][labeled])
            found.append(predicted[labeled])
        return torch.cat(wanted), torch.cat(found)

    def _print(self, console: Console, found: dict[str, list[dict[str, Any]]]) -> None:
        """Print the median and range of each model's held-out loss and of its last accuracy on each input."""
        inputs = [f"{task}-{length}" for task, length in self._inputs]
        table = Table("", "held-out loss", *(f"{name}, %" for name in inputs))
        for name, runs in found.items():
            losses = [run["pretraining"]["held_out_loss"] for run in _having(runs, "pretraining")]
            scores = [[100 * run[part]["accuracy"][-1][1] for run in _having(runs, part)] for part in inputs]
            table.add_row(name, spread(losses, 2), *(spread(column, 1) for column in scores))
        console.print(table)

    def _plot(self, found: dict[str, list[dict[str, Any]]], part: str) -> None:
        """Draw accuracy over time: a thin line for each seed, a thick one for the median."""
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.add_subplot()
        for name, runs in found.items():
            curves = [run[part]["accuracy"] for run in _having(runs, part)]
            if not curves:
                continue
            for curve in curves:
                axes.plot([x for x, _ in curve], [100 * y for _, y in curve], color=COLORS[name], linewidth=0.7)
            # A step may end a little after its judgement is due, so times differ between seeds too.
            points = [
                [statistics.median(values) for values in zip(*point, strict=True)]
                for point in zip(*curves, strict=True)
            ]
            axes.plot(
                [x for x, _ in points],
                [100 * y for _, y in points],
                color=COLORS[name],
                marker="o",
                markersize=3,
                linewidth=2.2,
                label=name,
            )
        axes.set_xlabel("seconds of fine-tuning (one thread, as steps took side by side)")
        axes.set_ylabel("accuracy, %")
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(self.out / f"{part}.svg", metadata={"Date": None})


def _length_at(stages: Sequence[tuple[int, float]], spent: float) -> int:
    """Return the tokens in a window when a share of the time is spent."""
    end = 0.0
    for length, share in stages:
        end += share
        if spent < end:
            return length
    return stages[-1][0]


def _padded(rows: Sequence[Example]) -> Batch:
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [PAD] * (longest - len(row)) for row, _ in rows])
    labels = [label + [IGNORED] * (longest - len(label)) if isinstance(label, list) else label for _, label in rows]
    return {"input_ids": ids, "attention_mask": ids != PAD, "labels": torch.tensor(labels)}


def _gflops(config: EncoderConfig, length: int, predictions: int) -> float:
    return count_flops(config, length, predictions=predictions).training / 1e9


def _having(runs: Sequence[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    return [run for run in runs if part in run]


if __name__ == "__main__":
    execute(tyro.cli(Pays))
