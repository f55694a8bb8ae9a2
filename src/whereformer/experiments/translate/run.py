"""Training a translation model: text as batches, transformers' Trainer, and the mean of the last checkpoints.

Beside what every folder of a training has (see ``run_folder``), ``averaging/`` holds the weights that the model will
be the mean of.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import GenerationConfig, TrainerCallback

from ...data import batches, corpus, subwords
from ...data.parallel import Pairs
from ...data.subwords import Lines
from ...errors import InputError
from ...models import Seq2SeqConfig, Seq2SeqForConditionalGeneration
from ...models.smoothed import IGNORED
from ...positions import describe
from ...runs.progress import Progress
from ...runs.provenance import provenance
from ...training.folder import KEPT_CHECKPOINTS, Folder, save_model
from ...training.judged import Course, JudgedTrainer, Watch, judge_all, train
from ...training.model_options import about_method, as_setting, check_position_options, parameters
from ...training.optimizer import build_optimizer, inverse_sqrt_schedule
from ...training.trainer import quiet_transformers, training_arguments
from ..pretrain.settings import parsed_options
from .settings import Decoding, TranslationTraining, TranslatorSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Examples(Dataset[tuple[Tensor, Tensor]]):
    """Encoded pairs, each line with its end.

    Args:
        source: lines.
        target: as many.
    """

    source: Lines
    target: Lines

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.source[row].long(), self.target[row].long()

    @cached_property
    def lengths(self) -> Tensor:
        """(pairs, 2), tokens of source and target."""
        return torch.stack((self.source.lengths, self.target.lengths), 1)


def collate(pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """A batch: ``input_ids``, ``labels`` (-100 behind a target's end) and, where a source is shorter, their mask."""
    sources, targets = zip(*pairs, strict=True)
    lengths = torch.tensor([len(source) for source in sources])
    batch = {
        "input_ids": pad_sequence(list(sources), batch_first=True, padding_value=subwords.PAD),
        "labels": pad_sequence(list(targets), batch_first=True, padding_value=IGNORED),
    }
    width = batch["input_ids"].shape[1]
    if int(lengths.min()) < width:
        # Without a mask, attention is faster.
        batch["attention_mask"] = (torch.arange(width) < lengths.unsqueeze(1)).long()
    return batch


@dataclass(frozen=True)
class Text:
    """The prepared text: a vocabulary, and the pairs to train on and to judge by."""

    training: Examples
    held_out: Examples
    tokenizer: PreTrainedTokenizerFast
    facts: dict[str, Any]


def prepare(training: Pairs, held_out: Pairs, vocab_size: int, max_length: int) -> Text:
    """Learn a vocabulary from the training pairs and encode all; empty and too long lines are left out with their pair.

    Raises:
        InputError: if nothing is left.
    """
    facts: dict[str, Any] = {"source": training.name}
    parts = {"training": training.without_empty(), "held_out": held_out.without_empty()}
    both = (line for side in (parts["training"].source, parts["training"].target) for line in side)
    tokenizer = subwords.fit(both, vocab_size)
    found: dict[str, Examples] = {}
    for name, pairs in parts.items():
        given = len(training) if name == "training" else len(held_out)
        sides = [subwords.encode(tokenizer, texts) for texts in (pairs.source, pairs.target)]
        fits = (sides[0].lengths <= max_length) & (sides[1].lengths <= max_length)
        if not fits.any():
            raise InputError(
                "max_length",
                f"no {name.replace('_', '-')} pair of {pairs.name} has text on both sides and at most "
                f"{max_length} tokens on each",
            )
        chosen = fits.nonzero().flatten()
        found[name] = Examples(sides[0].chosen(chosen), sides[1].chosen(chosen))
        lengths = found[name].lengths
        facts[name] = {
            "pairs": len(found[name]),
            "empty": given - len(pairs),
            "too_long": len(pairs) - len(found[name]),
            "source_tokens": int(lengths[:, 0].sum()),
            "target_tokens": int(lengths[:, 1].sum()),
            "longest": int(lengths.max()),
        }
    facts["vocabulary"] = len(tokenizer)
    return Text(found["training"], found["held_out"], tokenizer, facts)


def build_config(model: TranslatorSettings, training: TranslationTraining, vocab_size: int) -> Seq2SeqConfig:
    """The model's configuration, after building the model without memory, so that what does not fit is told at once.

    Raises:
        InputError: for a combination that fits no model; naming the field.
    """
    options = parsed_options(model.position_options)
    for part in model.cross_position.split("+"):
        try:
            describe(part.strip())
        except ValueError as error:
            raise about_method(error, "cross_position") from None
    sizes = {
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.intermediate_size,
        "encoder_layers": model.encoder_layers,
        "decoder_layers": model.decoder_layers,
    }
    try:
        config = Seq2SeqConfig.preset(
            model.preset,
            **{name: size for name, size in sizes.items() if size is not None},
            vocab_size=vocab_size,
            position=model.position,
            position_options=options,
            cross_position=model.cross_position,
            norm=model.norm,
            hidden_dropout_prob=model.dropout,
            label_smoothing=model.label_smoothing,
            max_position_embeddings=training.max_length,
            pad_token_id=subwords.PAD,
            bos_token_id=subwords.START,
            eos_token_id=subwords.END,
            decoder_start_token_id=subwords.START,
        )
        check_position_options(model.position, options)
        with torch.device("meta"):
            Seq2SeqForConditionalGeneration(config)
    except (ValueError, TypeError) as error:
        raise as_setting(error, Seq2SeqConfig.__dataclass_fields__, options) from None
    return config


@dataclass(frozen=True)
class Job:
    """All that a run needs, checked.

    Args:
        model, training: the settings, checked.
        text: what to train on.
        config: the model's configuration.
        device: where.
    """

    model: TranslatorSettings
    training: TranslationTraining
    text: Text
    config: Seq2SeqConfig
    device: torch.device

    @cached_property
    def batches_per_epoch(self) -> int:
        """Of the first epoch; others have about as many."""
        count, left = 0, len(self.text.training)
        for batch in self._shuffled():
            count, left = count + 1, left - len(batch)
            if not left:
                break
        return count

    @cached_property
    def course(self) -> Course:
        """How long it trains."""
        training = self.training
        per_step = training.accumulate / self.batches_per_epoch
        steps = training.steps or max(1, math.ceil((training.epochs or 0) / per_step))
        tokens = int(self.text.training.lengths.sum())
        return Course(
            steps=steps,
            every=training.every or max(1, steps // 20),
            learning_rate=training.learning_rate,
            epochs=lambda step: step * per_step,
            tokens_seen=lambda step: round(step * per_step * tokens),
        )

    @property
    def averaged_steps(self) -> list[int]:
        """After which the weights are those that the model is the mean of."""
        judged = (step for step in range(self.course.steps, 0, -1) if self.course.is_judged(step))
        return sorted(islice(judged, self.training.average))

    def facts(self) -> dict[str, Any]:
        """What is known before training."""
        with torch.device("meta"):
            counts = parameters(Seq2SeqForConditionalGeneration(self.config))
        return {
            **counts,
            "embedding_parameters": self.config.vocab_size * self.config.hidden_size,
            "steps": self.course.steps,
            "tokens_per_step": self.course.tokens_seen(1),
            "steps_per_epoch": self.batches_per_epoch / self.training.accumulate,
            "epochs": self.course.epochs(self.course.steps),
        }

    def training_batches(self) -> DataLoader[dict[str, Tensor]]:
        """Those of all steps."""
        sampler = _Drawn(self, self.course.steps * self.training.accumulate)
        pinned = self.device.type == "cuda"
        return DataLoader(self.text.training, batch_sampler=sampler, collate_fn=collate, pin_memory=pinned)  # type: ignore[arg-type]  # a list of them would take long for large texts

    def held_out_batches(self) -> DataLoader[dict[str, Tensor]]:
        """Every held-out pair once."""
        drawn = batches.by_length_and_tokens(self.text.held_out.lengths, self.training.batch_tokens)
        return DataLoader(self.text.held_out, batch_sampler=drawn, collate_fn=collate)  # type: ignore[arg-type]

    def _shuffled(self) -> Iterator[list[int]]:
        return batches.shuffled_by_tokens(self.text.training.lengths, self.training.batch_tokens, self.training.seed)


class _Drawn:
    """The pairs of so many batches."""

    def __init__(self, job: Job, count: int) -> None:
        self.job, self.count = job, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self.job._shuffled(), self.count)


def settings_of(
    model: TranslatorSettings,
    training: TranslationTraining,
    pairs: Pairs,
    held_out: Pairs,
    device: torch.device,
) -> dict[str, Any]:
    """All that decides a result; a folder holds one of these only."""
    text = corpus.fingerprint(
        line for each in (pairs, held_out) for side in (each.source, each.target) for line in side
    )
    return {**asdict(model), **asdict(training), "text": text, "device": device.type}


def judge(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
    """Cross-entropy in nats and accuracy of each next token, given those before it."""
    out, labels = model(**batch, use_cache=False), batch["labels"]
    wanted = labels != IGNORED
    count = int(wanted.sum())
    right = (out.logits.argmax(-1) == labels)[wanted].sum()
    return {"loss": (float(out.loss) * count, count), "accuracy": (float(right), count)}


class Averaging(TrainerCallback):
    """Puts aside the weights that the model will be the mean of.

    Args:
        folder: of the run.
        steps: after which they are.
    """

    def __init__(self, folder: Folder, steps: Sequence[int]) -> None:
        self.folder = folder
        self.steps = frozenset(steps)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.keep(state.global_step)

    def keep(self, step: int) -> None:
        """Copy a checkpoint's weights, if they are wanted."""
        if step in self.steps:
            file = self.file(step)
            file.parent.mkdir(exist_ok=True)
            partial = file.with_name(file.name + ".partial")
            shutil.copyfile(self.folder.checkpoints / f"checkpoint-{step}" / "model.safetensors", partial)
            os.replace(partial, file)

    def complete(self, newest: int) -> None:
        """Make sure that nothing up to the newest checkpoint is missing.

        Raises:
            InputError: if something is.
        """
        # It may have been stopped between the checkpoint and its copy.
        self.keep(newest)
        for step in sorted(self.steps):
            if step <= newest and not self.file(step).exists():
                raise InputError("out", f"{self.file(step)} is missing, which the model is to be a mean of")

    def file(self, step: int) -> Path:
        """Where the weights after a step are."""
        return self.folder.out / "averaging" / f"step-{step}.safetensors"

    def load_mean(self, model: nn.Module) -> None:
        """Give a model the mean of the weights."""
        sums: dict[str, Tensor] = {}
        for step in sorted(self.steps):
            for name, weight in load_file(self.file(step)).items():
                sums[name] = sums[name] + weight.double() if name in sums else weight.double()
        means = {name: weight / len(self.steps) for name, weight in sums.items()}
        # Tied weights are saved once.
        unknown = model.load_state_dict(means, strict=False).unexpected_keys
        assert not unknown, unknown


@quiet_transformers()
def run(job: Job, folder: Folder, progress: Progress) -> dict[str, Any]:
    """Train from the newest checkpoint or the start, save the model and return the results.

    Raises:
        InputError: if the loss stops being a number.
        KeyboardInterrupt: if it was interrupted; a checkpoint is there then.
    """
    training, course = job.training, job.course
    torch.manual_seed(training.seed)
    model = Seq2SeqForConditionalGeneration(job.config).to(job.device)
    watch = Watch(course, folder, {"text": job.text.facts, **provenance(job.device), **job.facts()}, progress)
    averaging = Averaging(folder, job.averaged_steps)
    newest = folder.newest_checkpoint()
    if newest is not None:
        averaging.complete(int(newest.name.rpartition("-")[2]))

    def make(seconds: float, callbacks: list[TrainerCallback]) -> JudgedTrainer:
        # No decay, and Adam's epsilon, as in Vaswani et al.
        optimizer = build_optimizer(model, training.learning_rate, weight_decay=0.0, eps=1e-9)
        return JudgedTrainer(
            course=course,
            training=job.training_batches(),
            held_out=job.held_out_batches(),
            judge=judge,
            seconds=seconds,
            model=model,
            args=training_arguments(
                folder.checkpoints,
                _Arguments(training.dtype),
                course.steps,
                job.device,
                training.seed,
                gradient_accumulation_steps=training.accumulate,
                save_total_limit=KEPT_CHECKPOINTS,
            ),
            callbacks=[averaging, *callbacks],
            optimizers=(optimizer, inverse_sqrt_schedule(optimizer, training.warmup)),
        )

    state = train(make, watch, folder, progress)
    results = watch.results(state, finished=True)
    if training.average > 1:
        averaging.load_mean(model)
        scores = judge_all(model, job.held_out_batches(), judge, job.device, bf16=training.dtype == "bfloat16")
        results["averaged"] = {
            "steps": job.averaged_steps,
            **{name: round(value, 4) for name, value in scores.items()},
        }
    model.config.use_cache = True  # the Trainer turns it off
    model.generation_config = generation_config(job.config, Decoding(), max_length=training.max_length)
    save_model(model, job.text.tokenizer, folder.model)
    folder.write(results)
    return results


@dataclass(frozen=True)
class _Arguments:
    """What the Trainer has to know of the settings; its batch is one of ours."""

    dtype: str
    batch_size: int = 1


def generation_config(config: Seq2SeqConfig, decoding: Decoding, **limit: int) -> GenerationConfig:
    """How transformers' ``generate`` searches, with a ``max_length`` or ``max_new_tokens``."""
    return GenerationConfig(
        num_beams=decoding.beams,
        length_penalty=decoding.length_penalty if decoding.beams > 1 else None,
        **limit,
        do_sample=False,
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
    )
