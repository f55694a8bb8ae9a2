"""Pretraining: windows of the user's text, masked LM or ELECTRA, Hugging Face's Trainer, and a folder to continue from.

A folder holds ``settings.json`` (what decides the result), ``results.json`` (losses, held-out scores, time),
``checkpoints/``, ``tensorboard/`` where that is installed and, once finished, ``model/`` with the tokenizer.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from ..analysis import Cost, cost
from ..errors import InputError
from ..files import write_atomically
from ..models import Electra, EncoderConfig, EncoderForMaskedLM, parse_blocks
from ..positions import Position, describe
from . import compare, corpus, masked_lm
from .compare import Progress
from .optimizer import build_optimizer, linear_schedule
from .pretrain_settings import ModelSettings, TrainingSettings
from .trainer import quiet_transformers, training_arguments
from .windows import Windows, body_length, collate, fit_tokenizer, load_tokenizer, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 1
HELD_OUT_WINDOWS = 1024
"""Held-out windows that are scored, at most; more would only take time."""
KEPT_CHECKPOINTS = 2
"""By default two, because the newest may be half written when the power fails."""
OPTIONS = {"num_attention_heads": "num-heads", "hidden_dropout_prob": "dropout"}
"""What fields of the configuration are called on the command line, where that differs."""

Judge = Callable[[nn.Module, dict[str, Tensor]], dict[str, tuple[float, int]]]
"""From a model and a batch to sums and what they are sums over, by name."""


@dataclass(frozen=True)
class Text:
    """The prepared text: a tokenizer and the two streams of its ids."""

    training: Tensor
    held_out: Tensor
    tokenizer: PreTrainedTokenizerFast
    vocabulary: masked_lm.Vocabulary
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
    vocabulary = vocabulary_of(chosen, "--vocab-size" if tokenizer is None else "--tokenizer")
    streams = [
        masked_lm.token_stream(chosen.backend_tokenizer, pieces, vocabulary.sep) for pieces in (training, held_out)
    ]
    facts = {
        "source": source,
        "documents": len(documents),
        "characters": sum(map(len, training)) + sum(map(len, held_out)),
        "training_tokens": len(streams[0]),
        "held_out_tokens": len(streams[1]),
        "vocabulary": vocabulary.size,
        "unigram_entropy": masked_lm.unigram_entropy(streams[0], streams[1], vocabulary.size),
    }
    return Text(streams[0], streams[1], chosen, vocabulary, facts)


def build_config(model: ModelSettings, length: int, vocabulary: masked_lm.Vocabulary | None = None) -> EncoderConfig:
    """The encoder's configuration; without a vocabulary, to check all else.

    Raises:
        InputError: for a combination that fits no model; the message names the option.
    """
    vocabulary = vocabulary or masked_lm.trained_vocabulary(64)
    options = model.parsed_options()
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
        check_options(model.position, options)
    except ValueError as error:
        raise _named(error) from None
    # Built here, so that what doesn't fit is told before the text is read and encoded, which may take long.
    count_parameters(config, model.objective)
    return config


def check_options(position: str, options: dict[str, Any]) -> None:
    """Raise unless values are of the same kind as the defaults of a position method's options.

    Raises:
        InputError: naming the option.
        ValueError: for an unknown method.
    """
    defaults = {name: value for part in position.split("+") for name, value in describe(part.strip())[1].items()}
    for name, value in options.items():
        # One that the method doesn't have is told when it is built.
        default = defaults.get(name)
        kinds = (float, int) if type(default) is float else (type(default),)
        if default is not None and type(value) not in kinds:
            raise InputError(
                f"--position-options: {name}: expected a value as {json.dumps(default)}, got {json.dumps(value)}"
            )


def _named(error: Exception, options: Iterable[str] = ()) -> InputError:
    """The same error by the option of the command that it is about; ``options`` are those of the position method."""
    field, _, rest = str(error).partition(": ")
    if isinstance(error, TypeError) or not set(field.split()).isdisjoint(options):
        return InputError(f"--position-options: {error}")
    if field in EncoderConfig.__dataclass_fields__:
        return InputError(f"--{OPTIONS.get(field, field.replace('_', '-'))}: {rest}")
    return InputError(f"--position: {error}")


def end_padding(config: EncoderConfig) -> int:
    """How many [PAD] end a window: as many as the poolings of a funnel that truncates drop, so that no text is lost."""
    poolings = len(parse_blocks(config.blocks)) - 1
    return 2**poolings - 1 if config.separate_cls and config.truncate_seq else 0


def build_model(config: EncoderConfig, objective: str) -> PreTrainedModel:
    """A fresh model of an objective.

    Raises:
        InputError: if the model can't be built from these options; the message names one.
    """
    try:
        return EncoderForMaskedLM(config) if objective == "mlm" else Electra(config)
    except (ValueError, TypeError) as error:
        raise _named(error, config.position_options or ()) from None


def count_parameters(config: EncoderConfig, objective: str) -> dict[str, int]:
    """Parameters of the model that is trained, in all and of its parts, without memory for them."""
    with torch.device("meta"):
        model = build_model(config, objective)
    positional = {
        id(parameter): parameter.numel()
        for module in model.modules()
        if isinstance(module, Position)
        for parameter in module.parameters()
    }
    total = sum(parameter.numel() for parameter in model.parameters())
    return {
        "parameters": total,
        "embedding_parameters": config.vocab_size * config.embedding_size,
        "positional_parameters": sum(positional.values()),
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
                f"--length: expected at least {6 + padding} for blocks {self.config.blocks!r}, got {length}"
            )
        body = self.body
        for name, stream in (("training", self.text.training), ("held-out", self.text.held_out)):
            if len(stream) < body:
                raise InputError(
                    f"--data: too little text: {len(stream)} {name} tokens, expected at least {body} for one window; "
                    "give more text or a smaller --length"
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
        return self._windows(self.text.held_out, rate=compare.HELD_OUT_RATE, rows=rows, seed=0, shuffled=False)

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
    from ..models.electra import generator_config

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


class Folder:
    """An output folder: what it was made with, its newest whole checkpoint, and its results.

    Args:
        out: the folder.
        settings: from :func:`settings_of`.
    Raises:
        InputError: if it holds a run with other settings, or something else.
    """

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        self.out = out
        self.settings = settings
        self.path = out / "results.json"
        self.checkpoints = out / "checkpoints"
        self.model = out / "model"
        file = out / "settings.json"
        if file.exists():
            old = _read_json(file)
            if old.get("format") != FORMAT or not isinstance(old.get("settings"), dict):
                raise InputError(f"--out: {file} is not of this command; choose another folder")
            compare.refuse_other_settings(out, old["settings"], settings)
        elif self.path.exists():
            raise InputError(f"--out: {self.path} is not of this command; choose another folder")

    def claim(self) -> None:
        """Keep the settings, so that later runs are held against them."""
        content = {"format": FORMAT, "settings": self.settings}
        write_atomically(self.out / "settings.json", json.dumps(content, indent=1, allow_nan=False))

    def finished(self) -> dict[str, Any] | None:
        """The results, if training is over and its model is there."""
        if not (self.path.exists() and (self.model / "config.json").exists()):
            return None
        results = _read_json(self.path)
        return results if results.get("finished") is True else None

    def newest_checkpoint(self) -> Path | None:
        """The last checkpoint that was written to its end; half-written ones are removed."""
        while self.checkpoints.exists():
            found = get_last_checkpoint(str(self.checkpoints))
            if found is None:
                return None
            try:
                # The Trainer writes this file last.
                TrainerState.load_from_json(str(Path(found) / "trainer_state.json"))
            except (OSError, ValueError, TypeError):
                shutil.rmtree(found)
            else:
                return Path(found)
        return None

    def write(self, results: dict[str, Any]) -> None:
        """Replace the results."""
        write_atomically(self.path, json.dumps(results, indent=1, allow_nan=False))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    except (OSError, ValueError):
        pass
    raise InputError(f"--out: {file} is not complete; move it away or choose another folder")


def judge_masked_lm(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
    """Loss in nats and accuracy of the masked tokens; the model predicts sparsely."""
    wanted = batch["labels"][batch["labels"] != masked_lm.IGNORED]
    logits = model(**batch).logits.float()
    loss = functional.cross_entropy(logits, wanted, reduction="sum")
    right = (logits.argmax(-1) == wanted).sum()
    return {"loss": (float(loss), len(wanted)), "accuracy": (float(right), len(wanted))}


def judge_electra(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
    """The means that :class:`ElectraOutput` holds, but for the joint loss, by what each of them is a mean over."""
    out, labels = model(**batch), batch["labels"]
    targets = labels != masked_lm.IGNORED
    real = int(batch["attention_mask"].sum()) if "attention_mask" in batch else labels.numel()
    counts = {
        "generator_loss": int(targets.sum()),
        "discriminator_loss": real,
        "accuracy": real,
        "replaced_recall": int((out.sampled_ids != labels)[targets].sum()),
    }
    return {name: (float(out[name]) * count, count) for name, count in counts.items() if count}


class Pretrainer(Trainer):
    """Hugging Face's Trainer with windows in their order, held-out scores of ours and the time of earlier runs.

    Args:
        job: what is trained.
        judge: scores a batch.
        seconds: that earlier runs took.
    """

    def __init__(self, *, job: Job, judge: Judge, seconds: float, **options: Any) -> None:
        self.control: TrainerControl
        self.job = job
        self.judge = judge
        self.started = time.perf_counter() - seconds
        super().__init__(**options)

    def get_train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        # Rows are shuffled already; the Trainer's own order would be another one after a resume.
        return self.accelerator.prepare(
            DataLoader(
                self.train_dataset,
                batch_size=self.job.training.batch_size,
                collate_fn=collate,
                pin_memory=self.job.device.type == "cuda",
            )
        )

    @torch.no_grad()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Means over what the held-out windows have in all, whatever the batches.

        The numbers that a run draws afterwards are the same as without.
        """
        windows = self.job.held_out_windows()
        self.model.eval()
        sums: dict[str, tuple[float, int]] = {}
        device = self.job.device
        with torch.random.fork_rng([torch.cuda.current_device()] if device.type == "cuda" else []):
            torch.manual_seed(0)  # ELECTRA's generator draws its tokens
            for batch in DataLoader(windows, batch_size=self.job.training.batch_size, collate_fn=collate):
                moved = {name: value.to(device) for name, value in batch.items()}
                with torch.autocast(device.type, torch.bfloat16, enabled=self.args.bf16):
                    for name, (value, count) in self.judge(self.model, moved).items():
                        before = sums.get(name, (0.0, 0))
                        sums[name] = before[0] + value, before[1] + count
        self.model.train()
        means = {name: value / count for name, (value, count) in sums.items()}
        if "loss" not in means:
            # The joint loss is no mean of its own: its two parts are means over different tokens.
            weight = self.job.config.discriminator_weight
            means = {"loss": means["generator_loss"] + weight * means["discriminator_loss"], **means}
        scores = {f"{metric_key_prefix}_{name}": mean for name, mean in means.items()}
        self.log(dict(scores))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, scores)
        return scores

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # To the Trainer all steps are one epoch; people mean passes over the text.
        self.state.epoch = self.state.global_step * self.job.rows_per_step / self.job.rows_per_pass
        super().log({**logs, "seconds": time.perf_counter() - self.started}, start_time)


class Watch(TrainerCallback):
    """Says when to log, judge and save, shows it, keeps the results and stops where that was asked for.

    Args:
        job: what is trained.
        folder: where the results go.
        facts: what they say from the start.
        progress: is told.
    """

    def __init__(self, job: Job, folder: Folder, facts: dict[str, Any], progress: Progress) -> None:
        self.job = job
        self.folder = folder
        self.facts = facts
        self.progress = progress
        self.interrupted = False
        self.loss = ""
        # A few hundred points make a curve, however long it takes.
        self.log_every = max(1, min(50, job.training.steps // 200))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        # Only what is left, or the time that it takes would be guessed from steps that were not taken.
        self.progress.start(state.max_steps - state.global_step)
        self.progress.begin("training")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        step = state.global_step
        judged = step % self.job.every == 0 or step == state.max_steps
        control.should_evaluate = judged
        control.should_save = judged or self.interrupted
        # Logging tells whether the loss is still a number, so it comes before every checkpoint.
        control.should_log = control.should_save or step % self.log_every == 0
        control.should_training_stop = step == state.max_steps or self.interrupted
        self.progress.step(1, f"step {step:,}/{state.max_steps:,}{self.loss}")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **others: Any,
    ) -> None:
        logs = logs or {}
        watched = {name: value for name, value in logs.items() if name == "grad_norm" or name.endswith("loss")}
        for name, value in watched.items():
            if not math.isfinite(value):
                rate = self.job.training.learning_rate
                raise InputError(
                    f"--learning-rate: {name} is not a number after {state.global_step} steps; {rate} is too high, "
                    f"try {rate / 4} (and another --out), or more --warmup"
                )
        if "loss" in logs:
            self.loss = f", loss {logs['loss']:.3f}"
        if "eval_loss" in logs:
            told = ", ".join(score_text(name[5:], value) for name, value in logs.items() if name.startswith("eval_"))
            self.progress.line(f"step {state.global_step:,}: held-out {told}")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        self.folder.write(self.results(state))

    def results(self, state: TrainerState, finished: bool = False) -> dict[str, Any]:
        """What there is to tell after ``state.global_step`` steps."""
        logs = state.log_history
        return {
            "format": FORMAT,
            "finished": finished,
            "settings": self.folder.settings,
            **self.facts,
            "step": state.global_step,
            "tokens_seen": state.global_step * self.job.rows_per_step * (self.job.body + 2),
            "seconds": round(_seconds(logs), 1),
            "losses": [{"step": log["step"], "loss": round(log["loss"], 4)} for log in logs if "loss" in log],
            "held_out": [
                {
                    "step": log["step"],
                    **{name[5:]: round(value, 4) for name, value in log.items() if name.startswith("eval_")},
                }
                for log in logs
                if "eval_loss" in log
            ],
        }


def score_text(name: str, value: float) -> str:
    """A held-out number for people: shares in percent."""
    shown = f"{value:.1%}" if name.endswith(("accuracy", "recall")) else f"{value:.3f}"
    return f"{name.replace('_', ' ')} {shown}"


def _seconds(logs: Sequence[dict[str, float]]) -> float:
    return max((log.get("seconds", 0.0) for log in logs), default=0.0)


@contextmanager
def _stopped_by_signals(watch: Watch) -> Iterator[None]:
    """Ctrl-C (or SIGTERM) finishes the step and saves; a second one stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if watch.interrupted:
            raise KeyboardInterrupt
        watch.interrupted = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(job: Job, folder: Folder, progress: Progress) -> dict[str, Any]:
    """Train from the newest checkpoint or the start, save the model and return the results.

    Raises:
        InputError: if the loss stops being a number.
        KeyboardInterrupt: if it was interrupted; a checkpoint is there then.
    """
    with quiet_transformers():
        return _run(job, folder, progress)


def _run(job: Job, folder: Folder, progress: Progress) -> dict[str, Any]:
    training, objective = job.training, job.model.objective
    torch.manual_seed(training.seed)
    model = build_model(job.config, objective).to(job.device)
    folder.claim()
    checkpoint = folder.newest_checkpoint()
    seconds, step = 0.0, 0
    if checkpoint is not None:
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        seconds, step = _seconds(state.log_history), state.global_step
        progress.line(f"continuing after step {step:,} of {training.steps:,}")
    facts = {"text": job.text.facts, "machine": compare.machine(job.device), **job.facts()}
    watch = Watch(job, folder, facts, progress)
    optimizer = build_optimizer(model, training.learning_rate)
    arguments = training_arguments(
        folder.checkpoints,
        training,
        training.steps,
        job.device,
        training.seed,
        gradient_accumulation_steps=training.accumulate,
        save_total_limit=job.keep,
    )
    trainer = Pretrainer(
        job=job,
        judge=judge_masked_lm if objective == "mlm" else judge_electra,
        seconds=seconds,
        model=model,
        args=arguments,
        train_dataset=job.training_windows(),
        callbacks=[watch, *_tensorboard(folder.out / "tensorboard", step)],
        optimizers=(optimizer, linear_schedule(optimizer, training.warmup or 1, training.steps)),
    )
    trainer.remove_callback(PrinterCallback)
    with _stopped_by_signals(watch):
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if trainer.state.global_step < training.steps:
        progress.line(f"stopped after step {trainer.state.global_step:,}, which is kept in {folder.checkpoints}")
        raise KeyboardInterrupt
    save_model(model, objective, job.text.tokenizer, folder.model)
    results = watch.results(trainer.state, finished=True)
    folder.write(results)
    return results


def _tensorboard(folder: Path, step: int) -> list[TrainerCallback]:
    """The callback that writes TensorBoard's files, if TensorBoard is installed; what came after ``step`` is hidden."""
    if find_spec("tensorboard") is None:
        return []
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    return [TensorBoardCallback(SummaryWriter(str(folder), purge_step=step + 1 if step else None))]


def save_model(model: PreTrainedModel, objective: str, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write what is for use, model and tokenizer, to ``folder``, whole or not at all: ELECTRA's encoder alone."""
    trained = model if objective == "mlm" else model.discriminator
    # For use, logits are wanted at every token.
    trained.config.sparse_prediction = False
    vars(trained.config).pop("use_cache", None)  # the Trainer's, for decoders
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    trained.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
