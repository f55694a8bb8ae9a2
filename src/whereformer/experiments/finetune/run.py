"""Fine-tuning: one pretrained model with several position methods on labelled text, seed by seed, and what it gains."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState

from ...data import batches, rows
from ...data.corpus import fingerprint
from ...data.glue import Data
from ...data.rows import Rows
from ...errors import InputError
from ...files import write_atomically
from ...models import EncoderConfig, EncoderForSequenceClassification, load_pretrained
from ...positions import PositionRangeError
from ...runs.progress import Progress
from ...runs.provenance import provenance
from ...runs.results import read_results, refuse_other_settings
from ...training import metrics
from ...training.model_options import about_method
from ...training.optimizer import build_optimizer, linear_schedule
from ...training.trainer import quiet_transformers, training_arguments
from .settings import TuningSettings
from .variants import BASELINE, OWN, Setting, Variant, distinct

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = "finetune 1"
REACH = 32
"""Offsets to each side at which the learned curves are kept."""
POINTS = 50
"""Of the training loss that are kept, about."""


@dataclass(frozen=True)
class Job:
    """What is fine-tuned, and how.

    Args:
        model: a folder or an id on the Hub.
        tokenizer: of the model.
        tasks: what to learn.
        settings: the position methods.
        seeds: of the head, the new kernels, the order of rows and dropout.
        tuning: how to train.
        device: where.
    """

    model: str
    tokenizer: PreTrainedTokenizerBase
    tasks: list[Data]
    settings: list[Setting]
    seeds: list[int]
    tuning: TuningSettings
    device: torch.device

    def runs(self) -> Iterator[tuple[Data, int, Variant]]:
        """All runs; every model has one seed of a task before any has the next."""
        for data in self.tasks:
            for seed in self.seeds:
                for variant in distinct(self.settings):
                    yield data, seed, variant

    def steps(self, encoded: Encoded) -> int:
        """Of a run."""
        return max(1, round(self.tuning.epochs * math.ceil(len(encoded.train) / self.tuning.batch_size)))


@dataclass(frozen=True)
class Encoded:
    """A task's rows as tokens."""

    data: Data
    train: Rows
    judged: dict[str, Rows]

    @property
    def all(self) -> list[Rows]:
        """Every split."""
        return [self.train, *self.judged.values()]

    def facts(self) -> dict[str, Any]:
        """What there is to tell about them."""
        lengths = sorted(self.train.lengths)
        return {
            **self.data.facts,
            "judged": list(self.judged),
            "metrics": list(self.data.task.metrics),
            "classes": None if self.data.task.classes is None else list(self.data.task.classes),
            "tokens_of_a_row": {
                "median": lengths[len(lengths) // 2],
                "most": max(max(split.lengths) for split in self.all),
            },
            "cut_rows": sum(split.cut for split in self.all),
        }


def load_tokenizer(model: str, path: str | None) -> PreTrainedTokenizerBase:
    """The model's tokenizer, or that of another path.

    Raises:
        InputError: if there is none.
    """
    field, where = ("model", model) if path is None else ("tokenizer", path)
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except Exception as error:
        # The libraries raise what they like for a missing or broken file.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(field, f"no tokenizer can be read from {where!r} ({reason})") from None


def load(
    model: str, variant: Variant, classes: int | None, device: torch.device | None = None
) -> EncoderForSequenceClassification:
    """A pretrained model of a variant, with a head.

    Args:
        model: a folder or an id on the Hub.
        variant: the position method.
        classes: how many; None for a number.
        device: where to put it.

    Raises:
        InputError: if it can't be read, or the method is none.
    """
    problem = "regression" if classes is None else "single_label_classification"
    try:
        found = load_pretrained(
            model,
            position=variant.position,
            model_class=EncoderForSequenceClassification,
            num_labels=classes or 1,
            problem_type=problem,
            **variant.options,
        )
    except OSError as error:
        raise InputError("model", str(error)) from None
    except (ValueError, TypeError) as error:
        if variant.position is None:
            raise InputError("model", str(error)) from None
        # What is wrong with the model is wrong without the method as well.
        own = load(model, Variant(OWN, None), classes)
        if variant.kernels is not None and "tisa" in own.config.position.split("+"):
            raise InputError(
                "kernels",
                "the model was pretrained with TISA, whose kernels stay as many as they are; `position` own "
                "takes it as it is",
            ) from None
        raise about_method(error, "position") from None
    assert isinstance(found, EncoderForSequenceClassification)
    return found if device is None else found.to(device)


def fresh(model: str, variant: Variant, classes: int | None, seed: int) -> EncoderForSequenceClassification:
    """A model to be trained; all variants of a seed start from the same weights, those of the new head included."""
    torch.manual_seed(seed)
    common = load(model, Variant("", "none"), classes).state_dict()
    torch.manual_seed(seed)
    found = load(model, variant, classes)
    found.load_state_dict({n: x for n, x in common.items() if not n.startswith("encoder.position.")}, strict=False)
    return found


def encode(job: Job, data: Data, config: EncoderConfig) -> Encoded:
    """A task's tokens, for a model with this configuration."""
    train, *judged = (
        rows.encode(split, job.tokenizer, job.tuning.max_length, config, regression=data.task.classes is None)
        for split in (data.train, *data.judged.values())
    )
    return Encoded(data, train, dict(zip(data.judged, judged, strict=True)))


@torch.no_grad()
def prepare(job: Job) -> tuple[list[Encoded], dict[str, Any]]:
    """All tokens, and what is known about the models, every one of which has read the longest row.

    Returns:
        The tasks; and the fingerprint of the weights and each variant's number of parameters.

    Raises:
        InputError: for a model, a method or a tokenizer that doesn't fit, and rows that are too long.
    """
    with quiet_transformers():
        facts: dict[str, Any] = {"weights": "", "parameters": {}}
        tasks: list[Encoded] = []
        for variant in distinct(job.settings):
            model = load(job.model, variant, 2)
            if not tasks:
                rows.check_tokenizer(job.tokenizer, model.config.vocab_size)
                if job.tuning.packed and "-" in model.config.blocks:
                    raise InputError("packed", "a funnel would pool over the ends of rows; leave it out")
                facts["weights"] = _hash(model)
                tasks = [encode(job, data, model.config) for data in job.tasks]
                splits = [split for task in tasks for split in task.all]
                lengths = [length for split in splits for length in split.lengths]
                widest = max(splits, key=lambda split: max(split.lengths))
                longest = widest.padded([widest[widest.lengths.index(max(lengths))]])
                del longest["labels"]
            try:
                model(**longest)
            except PositionRangeError as error:
                limit = model.config.max_position_embeddings - tasks[0].train.end
                raise InputError(
                    "max_length",
                    f"{sum(length > limit for length in lengths):,} rows are longer than the {limit} "
                    f"tokens that the model covers, the longest has {max(lengths)}; say `max_length` {limit} to cut "
                    f"them ({error})",
                ) from None
            positional = {
                name: parameter.numel()
                for name, parameter in model.named_parameters()
                if name.startswith("encoder.position.")
            }
            assert model.loading_report is not None
            facts["parameters"][variant.name] = {
                "all": sum(parameter.numel() for parameter in model.parameters()),
                "position": sum(positional.values()),
                "fresh": sum(positional.get(name, 0) for name in model.loading_report.initialised),
            }
    return tasks, facts


def _hash(model: EncoderForSequenceClassification) -> str:
    """Of the pretrained weights, so that results of another model are told apart."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.encoder.state_dict().items()):
        # Position may be fresh.
        if not name.startswith("position."):
            digest.update(name.encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


class Results:
    """``results.json`` of an output folder: written after every finished run, and taken up again.

    Args:
        out: the folder.
        job: what is done now.
        tasks: its tasks.
        facts: from :func:`prepare`.
    Raises:
        InputError: if the folder holds results of other settings, of other rows or classes of a task, or something
            else.
    """

    def __init__(self, out: Path, job: Job, tasks: list[Encoded], facts: dict[str, Any]) -> None:
        self.path = out / "results.json"
        settings = {"weights": facts["weights"], **asdict(job.tuning), "device": job.device.type}
        settings["tokenizer"] = fingerprint(
            f"{token} {number}" for token, number in sorted(job.tokenizer.get_vocab().items())
        )
        self.data: dict[str, Any] = {"format": FORMAT, "settings": settings, "tasks": {}, "runs": {}, "curves": {}}
        found = read_results(self.path, FORMAT)
        if found is not None:
            refuse_other_settings(out, found["settings"], settings)
            for task in tasks:
                name = task.data.task.name
                new = task.facts()
                old = found["tasks"].get(name, new)
                if old["fingerprint"] != new["fingerprint"]:
                    raise InputError("out", f"{out} holds results of other rows of {name}; choose another folder")
                for fact in ("classes", "metrics"):
                    if old[fact] != new[fact]:
                        raise InputError(
                            "out",
                            f"{out} holds results of {name} with {fact} {old[fact]}, not {new[fact]}; choose "
                            "another folder",
                        )
            self.data = found
        self.data["model"] = job.model
        self.data["tasks"] |= {task.data.task.name: task.facts() for task in tasks}
        self.data["parameters"] = {**self.data.get("parameters", {}), **facts["parameters"]}
        self.data |= provenance(job.device)
        self.data["versions"] |= {name: version(name) for name in ("tokenizers", "scikit-learn", "scipy")}
        variants = [variant for setting in job.settings for variant in setting.variants]
        self.data["shown"] = {
            "positions": [setting.position for setting in job.settings],
            "kernels": sorted(
                {0 for variant in variants if variant.label == BASELINE} | {v.kernels for v in variants if v.kernels}
            ),
            "seeds": job.seeds,
        }

    def get(self, task: str, variant: Variant, seed: int) -> dict[str, Any] | None:
        """The finished run, if there is one."""
        run: dict[str, Any] | None = self.data["runs"].get(task, {}).get(variant.name, {}).get(str(seed))
        return run

    def add(self, task: str, variant: Variant, seed: int, run: dict[str, Any], curves: Any) -> None:
        """Keep a finished run, and the curves of the last one with this position method."""
        self.data["runs"].setdefault(task, {}).setdefault(variant.name, {})[str(seed)] = run
        if curves is not None:
            kept = self.data["curves"].setdefault(task, {})
            kept[variant.position or "own"] = {"variant": variant.name, "seed": seed, "heads": curves}
        self.save()

    def save(self) -> None:
        """Write the file."""
        write_atomically(self.path, json.dumps(self.data, allow_nan=False))


class Finetuner(Trainer):
    """Hugging Face's Trainer with our batches and optimizer.

    Args:
        batches: which rows each step reads.
        collate: makes a batch of them.
    """

    def __init__(self, *, batches: list[list[int]], collate: Any, **options: Any) -> None:
        self.control: TrainerControl
        self.batches = batches
        self.collate = collate
        super().__init__(**options)

    def get_train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        pinned = self.args.device.type == "cuda"
        return DataLoader(self.train_dataset, batch_sampler=self.batches, collate_fn=self.collate, pin_memory=pinned)


class Watch(TrainerCallback):
    """Shows progress, keeps the loss and stops where it is no number.

    Args:
        steps: of the run.
        progress: is told.
        rate: the learning rate, for advice.
    """

    def __init__(self, steps: int, progress: Progress, rate: float) -> None:
        self.steps, self.progress, self.rate = steps, progress, rate
        self.losses: list[dict[str, float]] = []
        self.every = max(1, steps // POINTS)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        control.should_log = state.global_step % self.every == 0 or state.global_step == self.steps
        self.progress.step(1, f"loss {self.losses[-1]['loss']:.3f}" if self.losses else "")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **others: Any,
    ) -> None:
        for name, value in (logs or {}).items():
            if name in ("loss", "grad_norm") and not math.isfinite(value):
                raise InputError(
                    "learning_rate",
                    f"{name} is not a number after {state.global_step} steps; {self.rate} is too "
                    f"high, try {self.rate / 4} and another `out`",
                )
        if logs and "loss" in logs:
            self.losses.append({"step": state.global_step, "loss": round(logs["loss"], 4)})


def train(
    model: EncoderForSequenceClassification, encoded: Encoded, job: Job, seed: int, out: Path, progress: Progress
) -> list[dict[str, float]]:
    """Fine-tune a model in place.

    Returns:
        The training loss at some steps.
    Raises:
        InputError: if the loss stops being a number.
    """
    tuning, steps = job.tuning, job.steps(encoded)
    watch = Watch(steps, progress, tuning.learning_rate)
    optimizer = build_optimizer(model, tuning.learning_rate, tuning.kernel_learning_rate)
    arguments = training_arguments(out, tuning, steps, job.device, seed)
    trainer = Finetuner(
        batches=batches.shuffled(encoded.train.lengths, tuning.batch_size, steps, seed),
        collate=encoded.train.packed if tuning.packed else encoded.train.padded,
        model=model,
        args=arguments,
        train_dataset=encoded.train,
        callbacks=[watch],
        optimizers=(optimizer, linear_schedule(optimizer, max(1, steps // 10), steps)),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return watch.losses


@torch.no_grad()
def predict(
    model: EncoderForSequenceClassification, split: Rows, tuning: TuningSettings
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits (rows, classes) in the order of the rows, whatever the batches."""
    model.eval()
    collate = split.packed if tuning.packed else split.padded
    order = batches.by_length(split.lengths, tuning.batch_size)
    found = []
    for batch in order:
        inputs = collate([split[row] for row in batch])
        del inputs["labels"]
        with torch.autocast(model.device.type, torch.bfloat16, enabled=tuning.dtype == "bfloat16"):
            logits = model(**{name: value.to(model.device) for name, value in inputs.items()}).logits
        found.append(logits.float().cpu())
    logits = torch.cat(found)
    return logits[torch.tensor([row for batch in order for row in batch]).argsort()].numpy()


@torch.no_grad()
def head_curves(model: EncoderForSequenceClassification) -> list[list[list[float]]] | None:
    """What each head adds to scores at offsets -REACH .. REACH, [layer][head][offset]; None without such a curve."""
    offsets = torch.arange(-REACH, REACH + 1, device=model.device)
    curves = []
    for layer in range(model.config.num_hidden_layers):
        curve = model.encoder.position.curve(offsets, layer=layer)
        if curve is None:
            return None
        curves.append([[round(value, 4) for value in head] for head in curve.tolist()])
    return curves


def finetune(
    job: Job, encoded: Encoded, variant: Variant, seed: int, out: Path, progress: Progress
) -> tuple[dict[str, Any], Any]:
    """One run: fine-tune, score, and read off what the heads add.

    Returns:
        What ``results.json`` keeps, and the curves.
    """
    task = encoded.data.task
    classes = None if task.classes is None else len(task.classes)
    model = fresh(job.model, variant, classes, seed).to(job.device)
    started, cpu = time.perf_counter(), time.process_time()
    losses = train(model, encoded, job, seed, out, progress)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    scores = {}
    for name, split in encoded.judged.items():
        logits = predict(model, split, job.tuning)
        if not np.isfinite(logits).all():
            raise InputError("learning_rate", f"{variant.name} predicts what is not a number; try a lower one")
        scores[name] = metrics.score(task.metrics, split.labels, logits)
    run = {"scores": scores, "seconds": round(seconds, 2), "cpu_seconds": round(cpu_seconds, 2), "train_loss": losses}
    return run, head_curves(model)


def run(job: Job, tasks: list[Encoded], results: Results, out: Path, progress: Progress) -> None:
    """Every run that ``results`` lacks; each is kept as soon as it is finished.

    Raises:
        InputError: if a loss stops being a number.
    """
    by_name = {encoded.data.task.name: encoded for encoded in tasks}
    every = [(by_name[data.task.name], seed, variant) for data, seed, variant in job.runs()]
    missing = [
        (encoded, seed, variant)
        for encoded, seed, variant in every
        if results.get(encoded.data.task.name, variant, seed) is None
    ]
    progress.start(sum(job.steps(encoded) for encoded, _, _ in missing))
    if len(missing) < len(every):
        progress.line(f"{len(every) - len(missing)} of {len(every)} runs are there already")
    results.save()
    for number, (encoded, seed, variant) in enumerate(missing, 1):
        name = encoded.data.task.name
        progress.begin(f"{name}, {variant.name} ({number}/{len(missing)})")
        with quiet_transformers():
            found, curves = finetune(job, encoded, variant, seed, out, progress)
        results.add(name, variant, seed, found, curves)
        scores = ", ".join(
            f"{judged} {metric} {100 * value:.1f}".strip()
            for judged, by_metric in found["scores"].items()
            for metric, value in by_metric.items()
        )
        progress.line(f"{name}, {variant.name}, seed {seed}: {scores}; {found['seconds']:.0f} s")
