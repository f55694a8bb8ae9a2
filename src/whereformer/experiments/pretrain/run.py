"""Pretraining: windows of the user's text, masked LM or ELECTRA, on transformers' Trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback

from ...analysis import Cost, cost
from ...data import corpus
from ...data.masks import HELD_OUT_RATE, IGNORED
from ...data.tokenizers import (
    Vocabulary,
    fit_tokenizer,
    load_tokenizer,
    token_stream,
    trained_vocabulary,
    vocabulary_of,
)
from ...data.windows import Windows, body_length, collate, end_padding
from ...errors import InputError
from ...models import Electra, EncoderConfig, EncoderForMaskedLM
from ...runs.progress import Progress
from ...runs.provenance import provenance
from ...training.folder import KEPT_CHECKPOINTS, Folder, save_model
from ...training.held_out import unigram_entropy
from ...training.judged import Course, JudgedTrainer, Watch, train
from ...training.model_options import as_setting, check_position_options, parameters
from ...training.optimizer import build_optimizer, linear_schedule
from ...training.trainer import quiet_transformers, training_arguments
from .settings import ModelSettings, TrainingSettings, parsed_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HELD_OUT_WINDOWS = 1024
"""Held-out windows that are scored, at most; more would only take time."""


@dataclass(frozen=True)
class Text:
    """The prepared text: a tokenizer and the two streams of its ids."""

    training: Tensor
    held_out: Tensor
    tokenizer: PreTrainedTokenizerFast
    vocabulary: Vocabulary
    facts: dict[str, Any]


def prepare_text(documents: Sequence[str], source: str, tokenizer: Path | None, vocab_size: int) -> Text:
    """Split and encode, with a tokenizer trained on the training part if none is given.

    Args:
        documents: the text.
        source: where it came from, for people.
        tokenizer: the path of one, as :func:`~.windows.load_tokenizer` takes it.
        vocab_size: of the one that is trained.

    Raises:
        InputError: for too little text, or a tokenizer that does not fit.
    """
    training, held_out = corpus.split_documents(documents)
    chosen = fit_tokenizer(training, vocab_size) if tokenizer is None else load_tokenizer(tokenizer)
    vocabulary = vocabulary_of(chosen, "vocab_size" if tokenizer is None else "tokenizer")
    streams = [token_stream(chosen.backend_tokenizer, pieces, vocabulary.sep) for pieces in (training, held_out)]
    facts = {
        "source": source,
        "documents": len(documents),
        "characters": sum(map(len, training)) + sum(map(len, held_out)),
        "training_tokens": len(streams[0]),
        "held_out_tokens": len(streams[1]),
        "vocabulary": vocabulary.size,
        "unigram_entropy": unigram_entropy(streams[0], streams[1], vocabulary.size),
    }
    return Text(streams[0], streams[1], chosen, vocabulary, facts)


def build_config(model: ModelSettings, length: int, vocabulary: Vocabulary | None = None) -> EncoderConfig:
    """The encoder's configuration; without a vocabulary, to check all else.

    Raises:
        InputError: for a combination that fits no model; naming the field.
    """
    vocabulary = vocabulary or trained_vocabulary(64)
    options = parsed_options(model.position_options)
    extra: dict[str, Any] = {}
    if model.objective == "electra":
        extra = {"generator_size": model.generator_size, "discriminator_weight": model.discriminator_weight}
    try:
        config = EncoderConfig(
            vocab_size=vocabulary.size,
            hidden_size=model.hidden_size,
            embedding_size=model.embedding_size,
            num_attention_heads=model.num_heads,
            blocks=model.blocks,
            decoder_layers=model.decoder_layers,
            position=model.position,
            position_options=options,
            max_position_embeddings=length,
            norm=model.norm,
            hidden_dropout_prob=model.dropout,
            attention_probs_dropout_prob=model.dropout,
            # A window is one stretch of text; what belongs to which sentence is told by [SEP] alone.
            type_vocab_size=0,
            layer_norm_eps=1e-6,
            # BERT's 0.02 is made for a width of 768; narrow layers that start as wide start learning sooner.
            initializer_range=0.02 * math.sqrt(768 / model.hidden_size),
            pad_token_id=vocabulary.pad,
            sparse_prediction=True,
            **extra,
        )
        check_position_options(model.position, options)
    except ValueError as error:
        raise as_setting(error, EncoderConfig.__dataclass_fields__) from None
    # Built here, so that what doesn't fit is told before the text is read and encoded, which may take long.
    count_parameters(config, model.objective)
    return config


def build_model(config: EncoderConfig, objective: str) -> PreTrainedModel:
    """A fresh model of an objective.

    Raises:
        InputError: if the model can't be built from these options; the message names one.
    """
    try:
        return EncoderForMaskedLM(config) if objective == "mlm" else Electra(config)
    except (ValueError, TypeError) as error:
        raise as_setting(error, EncoderConfig.__dataclass_fields__, config.position_options or ()) from None


def count_parameters(config: EncoderConfig, objective: str) -> dict[str, int]:
    """Parameters of the model that is trained, in all and of its parts, without memory for them."""
    with torch.device("meta"):
        model = build_model(config, objective)
    counts = parameters(model)
    return {
        "parameters": counts["parameters"],
        "embedding_parameters": config.vocab_size * config.embedding_size,
        "positional_parameters": counts["positional_parameters"],
    }


@dataclass(frozen=True)
class Job:
    """All that a run needs, checked.

    Args:
        model, training: the settings, resolved.
        text: what to train on.
        config: the model's configuration.
        device: where.
        every: steps between checkpoints, each with a held-out score.
        keep: the newest of them that are kept.
    Raises:
        InputError: if the text or a window is too short.
    """

    model: ModelSettings
    training: TrainingSettings
    text: Text
    config: EncoderConfig
    device: torch.device
    every: int
    keep: int = KEPT_CHECKPOINTS

    def __post_init__(self) -> None:
        length, padding = self.training.length, end_padding(self.config)
        if body_length(length, padding) < 4:
            raise InputError(
                "length", f"expected at least {6 + padding} for blocks {self.config.blocks!r}, got {length}"
            )
        body = self.body
        for name, stream in (("training", self.text.training), ("held-out", self.text.held_out)):
            if len(stream) < body:
                raise InputError(
                    "data",
                    f"too little text: {len(stream)} {name} tokens, expected at least {body} for one window; "
                    "give more text or a smaller `length`",
                )

    @property
    def body(self) -> int:
        """Tokens of text in a window."""
        return body_length(self.training.length, end_padding(self.config))

    @property
    def rows_per_step(self) -> int:
        """Windows of a step."""
        return self.training.batch_size * self.training.accumulate

    @property
    def rows_per_pass(self) -> int:
        """Windows in the training text."""
        return len(self.text.training) // self.body

    def facts(self) -> dict[str, Any]:
        """What is known before training."""
        return {
            **count_parameters(self.config, self.model.objective),
            "block_lengths": list(self.config.block_lengths(self.training.length)),
            "tokens_per_step": self.rows_per_step * self.training.length,
            "steps_per_epoch": self.rows_per_pass / self.rows_per_step,
            "epochs": self.training.steps * self.rows_per_step / self.rows_per_pass,
        }

    def training_windows(self) -> Windows:
        """The rows of all steps."""
        return self._windows(
            self.text.training,
            rate=self.training.mask_rate,
            rows=self.training.steps * self.rows_per_step,
            seed=self.training.seed,
            shuffled=True,
        )

    def held_out_windows(self) -> Windows:
        """The same rows with the same masks, whatever the seed and the rate in training."""
        rows = min(HELD_OUT_WINDOWS, len(self.text.held_out) // self.body)
        return self._windows(self.text.held_out, rate=HELD_OUT_RATE, rows=rows, seed=0, shuffled=False)

    def _windows(self, stream: Tensor, *, rate: float, rows: int, seed: int, shuffled: bool) -> Windows:
        return Windows(
            stream,
            self.text.vocabulary,
            length=self.training.length,
            padding=end_padding(self.config),
            hide_masked=self.training.hide_masked,
            rate=rate,
            rows=rows,
            seed=seed,
            shuffled=shuffled,
        )


def batch_costs(job: Job) -> dict[str, Cost]:
    """What a batch costs each model that is trained, by its name; memory as in float32, autocast needs less."""
    training = job.training
    targets = max(1, round(training.mask_rate * training.length))

    def of(config: EncoderConfig, predictions: int) -> Cost:
        length, batch_size, device = training.length, training.batch_size, job.device.type
        return cost(config, length, batch_size, predictions=predictions, device=device)

    if job.model.objective == "mlm":
        return {"model": of(job.config, targets)}
    from ...models.electra import generator_config

    return {"generator": of(generator_config(job.config), targets), "discriminator": of(job.config, 0)}


def settings_of(
    model: ModelSettings, training: TrainingSettings, documents: Sequence[str], tokenizer: str, device: torch.device
) -> dict[str, Any]:
    """All that decides a result; a folder holds one of these only. ``tokenizer``: its hash, or how it is trained."""
    text = corpus.fingerprint(documents)
    return {**asdict(model), **asdict(training), "tokenizer": tokenizer, "text": text, "device": device.type}


def tokenizer_setting(path: Path | None, vocab_size: int) -> str:
    """What :func:`settings_of` keeps about the tokenizer.

    Raises:
        InputError: if there is none at ``path``.
    """
    if path is None:
        return f"trained, {vocab_size} tokens"
    return corpus.fingerprint([load_tokenizer(path).backend_tokenizer.to_str()])


def judge_masked_lm(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
    """Loss in nats and accuracy of the masked tokens; the model predicts sparsely."""
    wanted = batch["labels"][batch["labels"] != IGNORED]
    logits = model(**batch).logits.float()
    loss = functional.cross_entropy(logits, wanted, reduction="sum")
    right = (logits.argmax(-1) == wanted).sum()
    return {"loss": (float(loss), len(wanted)), "accuracy": (float(right), len(wanted))}


def judge_electra(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
    """The means that :class:`ElectraOutput` holds, but for the joint loss, by what each of them is a mean over."""
    out, labels = model(**batch), batch["labels"]
    targets = labels != IGNORED
    real = int(batch["attention_mask"].sum()) if "attention_mask" in batch else labels.numel()
    counts = {
        "generator_loss": int(targets.sum()),
        "discriminator_loss": real,
        "accuracy": real,
        "replaced_recall": int((out.sampled_ids != labels)[targets].sum()),
    }
    return {name: (float(out[name]) * count, count) for name, count in counts.items() if count}


class Pretrainer(JudgedTrainer):
    """Masked LM's or ELECTRA's; ``weight`` is what the discriminator's loss counts for."""

    def __init__(self, *, weight: float, **options: Any) -> None:
        self.weight = weight
        super().__init__(**options)

    def means(self, found: dict[str, float]) -> dict[str, float]:
        if "loss" in found:
            return found
        # The joint loss is no mean of its own: its two parts are means over different tokens.
        return {"loss": found["generator_loss"] + self.weight * found["discriminator_loss"], **found}


@quiet_transformers()
def run(job: Job, folder: Folder, progress: Progress) -> dict[str, Any]:
    """Train from the newest checkpoint or the start, save the model and return the results.

    Raises:
        InputError: if the loss stops being a number.
        KeyboardInterrupt: if it was interrupted; a checkpoint is there then.
    """
    training, objective = job.training, job.model.objective
    torch.manual_seed(training.seed)
    model = build_model(job.config, objective).to(job.device)
    course = Course(
        steps=training.steps,
        every=job.every,
        learning_rate=training.learning_rate,
        epochs=lambda step: step * job.rows_per_step / job.rows_per_pass,
        tokens_seen=lambda step: step * job.rows_per_step * (job.body + 2),
    )
    facts = {"text": job.text.facts, **provenance(job.device), **job.facts()}
    watch = Watch(course, folder, facts, progress)

    def loader(windows: Windows, *, pinned: bool = False) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(windows, batch_size=training.batch_size, collate_fn=collate, pin_memory=pinned)

    def make(seconds: float, callbacks: list[TrainerCallback]) -> Pretrainer:
        optimizer = build_optimizer(model, training.learning_rate)
        return Pretrainer(
            weight=job.config.discriminator_weight,
            course=course,
            training=loader(job.training_windows(), pinned=job.device.type == "cuda"),
            held_out=loader(job.held_out_windows()),
            judge=judge_masked_lm if objective == "mlm" else judge_electra,
            seconds=seconds,
            model=model,
            args=training_arguments(
                folder.checkpoints,
                training,
                training.steps,
                job.device,
                training.seed,
                gradient_accumulation_steps=training.accumulate,
                save_total_limit=job.keep,
            ),
            callbacks=callbacks,
            optimizers=(optimizer, linear_schedule(optimizer, training.warmup or 1, training.steps)),
        )

    state = train(make, watch, folder, progress)
    trained = model if objective == "mlm" else model.discriminator
    # For use, logits are wanted at every token.
    trained.config.sparse_prediction = False
    vars(trained.config).pop("use_cache", None)  # the Trainer's, for decoders
    save_model(trained, job.text.tokenizer, folder.model)
    results = watch.results(state, finished=True)
    folder.write(results)
    return results
