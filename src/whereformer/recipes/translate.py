"""The translate recipe: train a translation model on parallel text, with any position method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from .. import ranks
from ..errors import InputError
from ..lab import options
from ..lab.recipe import Between, LazyModule, MayChange, Range, Schedule, lazy_modules
from ..lab.training_recipe import PreparedTraining, TrainingRecipe, TrainingResult, eval_steps

if TYPE_CHECKING:
    import torch

    from .. import models
    from ..analysis import held_out
    from ..data import batches, parallel, subwords
    from ..data.streams import RowFile
    from ..lab import examples, methods, translation
    from ..lab import optimizer as optimizers
    from ..lab import train as training
    from ..lab.report import score_report
    from ..lab.run import Run
else:
    torch = LazyModule("torch")
    models, held_out, batches = lazy_modules("models", "analysis.held_out", "data.batches")
    parallel, subwords, methods = lazy_modules("data.parallel", "data.subwords", "lab.methods")
    translation, optimizers, examples = lazy_modules("lab.translation", "lab.optimizer", "lab.examples")
    training, score_report = lazy_modules("lab.train", "lab.report.score_report")

SIZES = ("hidden_size", "num_heads", "intermediate_size", "encoder_layers", "decoder_layers")
TRANSLATED = 100
"""Held-out lines that are translated at the end, for examples and BLEU."""
DROPOUT = {"small": 0.2, "base": 0.1, "big": 0.3}  # by preset


@dataclass(frozen=True)
class PreparedTranslation(PreparedTraining):
    """The pairs of short enough lines, each a row of source and target, and the model's configuration.

    ``pairs`` has counts for each part of the text: its pairs, the pairs that were left out, and its tokens.
    """

    rows: dict[str, RowFile]
    pairs: dict[str, dict[str, int]]
    tokenizer: Any
    config: models.Seq2SeqConfig
    train_batches: batches.RandomBatches


@dataclass(frozen=True, kw_only=True)
class Translate(TrainingRecipe):
    """Train a translation Transformer on parallel text, with any position method.

    The text is two files of lines, such as --data train.en train.de, or tables (--columns). A subword vocabulary for
    both languages is learned from it. Pairs with a line that is empty or too long are left out and counted.

    The text may be larger than memory: it is encoded once, into cache/, and read from there a pair at a time. Also
    writes model/ (the mean of the last scored weights, and the tokenizer), report.html, records.jsonl, checkpoints/
    and, unless --report-to says otherwise, tensorboard/. Ctrl-C finishes the current step and saves it; the same
    command then continues and ends with the same weights.
    """

    NAME = "translate train"
    EXAMPLE = "whereformer translate train --data en.txt de.txt"
    ANSWERS: ClassVar = (
        "What does it translate?",
        ("line", "reference", "translation"),
        "The first held-out lines, translated by the saved model.",
    )
    FLAGS: ClassVar = {"num_attention_heads": "--num-heads", "hidden_dropout_prob": "--dropout"}

    data: Annotated[tuple[Path, ...], MayChange] = ()
    """Two files in UTF-8, lines to translate from and their translations, line by line; or tables with both languages:
    .parquet, .jsonl, .csv or .tsv."""
    columns: Annotated[str | None, MayChange] = None
    """Columns of the tables, such as en,de. Default: both, if there are only two."""
    validation: Annotated[tuple[Path, ...], MayChange] = ()
    """Validation text, for scores during training: two files or tables with the same columns. Default: one pair in
    twenty is held out, at most 2000."""
    out: Annotated[Path, MayChange] = Path("runs/translate")
    """Folder for the model, checkpoints and results."""

    preset: Literal["small", "base", "big"] = "small"
    """Model size: small (3+3 layers of width 256) can be trained on two CPU cores; base (6+6 of 512) and big (6+6 of
    1024) are the models of Vaswani et al. and Shaw et al."""
    position: str = "shaw"
    """Position method of the self-attention in encoder and decoder, several joined by "+", or a pattern over layers;
    `whereformer positions` lists them."""
    hidden_size: Annotated[int | None, Range(1, options.MAX_SIZE)] = None
    """Width. Default: the preset's."""
    num_heads: Annotated[int | None, Range(1, options.MAX_SIZE)] = None
    """Number of attention heads. It must divide the width. Default: the preset's."""
    intermediate_size: Annotated[int | None, Range(1, options.MAX_SIZE)] = None
    """Width within the feed-forward layers. Default: the preset's."""
    encoder_layers: Annotated[int | None, Range(1, options.MAX_SIZE)] = None
    """Number of layers of the encoder. Default: the preset's."""
    decoder_layers: Annotated[int | None, Range(1, options.MAX_SIZE)] = None
    """Number of layers of the decoder. Default: the preset's."""
    norm: Literal["pre", "post"] = "pre"
    """Where a layer normalizes: at its input (pre, which is easier to train) or after the sum (post, as in the
    papers)."""
    dropout: Annotated[float | None, Range(0, 0.9)] = None
    """Dropout on embeddings and on the output of each sublayer. Default: 0.2 for small, 0.1 for base, 0.3 for big."""
    label_smoothing: Annotated[float, Range(0, 0.9)] = 0.1
    """Share of a target that is spread over all tokens."""
    vocab_size: Annotated[int, Range(300, options.MAX_SIZE)] = 8000
    """Number of subwords. Both languages share them, and they are learned from the text (byte-pair encoding over bytes,
    for any script). For large texts, use 32000."""
    max_length: Annotated[int, Range(4, options.MAX_SIZE)] = 128
    """Tokens in a line, including its end. Pairs with a longer line are left out and counted."""

    batch_tokens: Annotated[int, Range(4, options.MAX_SIZE)] = 2048
    """Tokens in a batch on either side, including padding. A batch has lines of similar length. For large texts, use
    25000."""
    steps: Annotated[int | None, Range(1, options.MAX_COUNT)] = None
    """Number of training steps, in place of ``epochs``."""
    epochs: Annotated[float, Between(0, options.MAX_RATE)] = 20.0
    """How many times the text is read."""
    learning_rate: Annotated[float, Between(0, options.MAX_RATE)] = 2e-3
    """Peak learning rate. Large models need a lower one (base: 7e-4)."""
    warmup: Annotated[int, Range(0, options.MAX_COUNT)] = 1000
    """Number of steps during which the learning rate rises. For large models, use 4000."""
    schedule: Schedule = "inverse_sqrt"
    average: Annotated[int, Range(1, options.MAX_COUNT)] = 5
    """The final model is the mean of the weights at this number of last scores. With 1 it has the last weights."""
    every: Annotated[int | None, Range(1, options.MAX_COUNT)] = None
    """Number of steps between checkpoints, each with a held-out score. Default: a twentieth of the steps."""

    def check(self) -> None:
        if self.batch_tokens < self.max_length:
            raise InputError("batch_tokens", f"expected at least {self.max_length}, got {self.batch_tokens}")
        super().check()

    def resolve(self) -> Translate:
        resolved = replace(
            self,
            position_options=options.canonical_options(self.position_options),
            dropout=DROPOUT[self.preset] if self.dropout is None else self.dropout,
        )
        resolved.config(self.vocab_size)  # options that do not fit are refused before the text is read and encoded
        _ = self.parts
        return resolved

    @property
    def parts(self) -> dict[str, parallel.Pairs]:
        """The pairs to train on, and the held-out ones."""
        pairs = parallel.Pairs("data", self.data, self.columns)
        if self.validation:
            return {"training": pairs, "held_out": parallel.Pairs("validation", self.validation, self.columns)}
        return {"training": replace(pairs, held_out=False), "held_out": replace(pairs, held_out=True)}

    def config(self, vocab_size: int) -> models.Seq2SeqConfig:
        """Return the configuration of the model, which is built without memory; an InputError if options do not fit."""
        method = options.parse_options(self.position_options)
        sizes = {name: getattr(self, name) for name in SIZES}
        sizes["num_attention_heads"] = sizes.pop("num_heads")
        try:
            config = models.Seq2SeqConfig.preset(
                self.preset,
                **{name: size for name, size in sizes.items() if size is not None},
                vocab_size=vocab_size,
                position=self.position,
                position_options=method,
                norm=self.norm,
                hidden_dropout_prob=self.dropout,
                label_smoothing=self.label_smoothing,
                max_position_embeddings=self.max_length,
                pad_token_id=subwords.PAD,
                bos_token_id=subwords.START,
                eos_token_id=subwords.END,
                decoder_start_token_id=subwords.START,
            )
            count_parameters(config)
        except (ValueError, TypeError) as error:
            raise methods.as_setting(error, models.Seq2SeqConfig.__dataclass_fields__, method) from None
        return config

    def prepare(self, run: Run, cache: Path) -> PreparedTranslation:
        """Open the encoded pairs or encode them, and leave those with an empty or too long line out."""
        text = parallel.fingerprint(self.parts)
        run.record_hash("text", text, "data")
        with ranks.main_first():
            encoded, tokenizer = parallel.open_or_encode(cache, self.parts, text, self.vocab_size, run.log)
        rows, pairs = {}, {}
        for name, all_rows in encoded.items():
            is_full = (all_rows.lengths > 0).all(1)
            fits = is_full & (all_rows.lengths <= self.max_length).all(1)
            if not fits.any():
                condition = f"text on both sides and at most {self.max_length} tokens on each"
                raise InputError(
                    "max_length", f"no {name.replace('_', '-')} pair of {self.parts[name].name} has {condition}"
                )
            rows[name] = all_rows.select(fits.nonzero().flatten())
            lengths = rows[name].lengths
            pairs[name] = {
                "pairs": len(lengths),
                "empty": len(all_rows) - int(is_full.sum()),
                "too_long": int(is_full.sum()) - len(lengths),
                "source_tokens": int(lengths[:, 0].sum()),
                "target_tokens": int(lengths[:, 1].sum()),
                "longest": int(lengths.max()),
            }
        batch_size = self.batch_tokens * self.accumulate
        train_batches = batches.RandomBatches(rows["training"].lengths, batch_size, self.seed, tokens=True)
        steps = self.steps or max(1, math.ceil(self.epochs * train_batches.per_epoch))
        config = self.config(len(tokenizer))
        return PreparedTranslation({"text": text}, steps, rows, pairs, tokenizer, config, train_batches)

    def plan(self, prepared: PreparedTranslation) -> list[tuple[str, str]]:
        rows = []
        for name, part in prepared.pairs.items():
            tokens = (
                f"{part['source_tokens']:,} and {part['target_tokens']:,} tokens, at most {part['longest']} per line"
            )
            rows.append((name.replace("_", "-"), f"{part['pairs']:,} pairs, {tokens}"))
            reasons = {"with an empty line": part["empty"], f"of more than {self.max_length} tokens": part["too_long"]}
            left_out = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)
            rows += [("", f"left out: {left_out}")] if left_out else []
        sizes, embedded = count_parameters(prepared.config), prepared.config.vocab_size * prepared.config.hidden_size
        words = f"embeddings of {len(prepared.tokenizer):,} tokens and {sizes['positional_parameters']:,} for position"
        rows.append(("model", f"{sizes['parameters']:,} parameters, including {embedded:,} for {words}"))
        counts, steps_per_epoch = prepared.pairs["training"], prepared.train_batches.per_epoch
        tokens = f"{round((counts['source_tokens'] + counts['target_tokens']) / steps_per_epoch):,} tokens"
        epochs = prepared.steps / steps_per_epoch
        passes = f"the text takes {steps_per_epoch:,} steps and is read {epochs:,.1f} times"
        rows.append(("steps", f"{prepared.steps:,} of about {tokens}; {passes}"))
        return rows

    def eval_interval(self, prepared: PreparedTranslation) -> int:
        """Return the number of steps between scores."""
        return self.every or max(1, prepared.steps // 20)

    def averaged_steps(self, prepared: PreparedTranslation) -> list[int]:
        """Return the steps whose weights are averaged."""
        return eval_steps(self.eval_interval(prepared), prepared.steps)[-self.average :]

    def train(self, run: Run, prepared: PreparedTranslation, facts: Mapping[str, Any]) -> TrainingResult:
        torch.manual_seed(self.seed)
        model = models.Seq2SeqForConditionalGeneration(prepared.config)
        trained, pairs = optimizers.WeightAverage(model), prepared.rows["training"]
        if ranks.rank():  # or the rows of all processes would drop the same states
            torch.manual_seed(hash((self.seed, ranks.rank())))
        interval, averaged = self.eval_interval(prepared), self.averaged_steps(prepared)
        rows = prepared.rows["held_out"]
        row_numbers = batches.by_length(rows.lengths, self.batch_tokens, tokens=True)
        eval_batches = [parallel.collate([rows[number] for number in numbers]) for numbers in row_numbers]

        def score(step: int) -> dict[str, float]:
            if step in averaged:
                trained.add()
            return held_out.held_out_scores(model, eval_batches, bfloat16=self.uses_bfloat16(run.device))

        def optimizer(model: Any) -> Any:
            # No decay, and Adam's epsilon, as in Vaswani et al.
            built = optimizers.build_optimizer(model, self.learning_rate, weight_decay=0.0, eps=1e-9)
            return built, optimizers.build_schedule(built, self.schedule, self.warmup, prepared.steps)

        plan = training.Training(
            steps=prepared.steps,
            rate=self.learning_rate,
            optimizer=optimizer,
            accumulate=self.accumulate,
            bfloat16=self.uses_bfloat16(run.device),
        )

        def batch(step: int) -> dict[str, Any]:
            return parallel.collate([pairs[row] for row in prepared.train_batches(step)])

        progress = self.fit(run, trained, batch, plan, score, interval, facts)
        trained.take_mean()
        saved = score(0)
        model.generation_config = translation.generation_config(prepared.config, self.max_length)
        self.save(run, model, prepared.tokenizer, facts)
        lines, bleu = translate_some(model, prepared)
        epochs = prepared.steps / prepared.train_batches.per_epoch
        about = {"bleu": bleu, "averaged_steps": averaged, "epochs": epochs, **prepared.pairs}
        about |= count_parameters(prepared.config)
        return TrainingResult(score_report.smooth(progress.losses), progress.scores, saved, about, lines)

    def headline(self, prepared: PreparedTranslation, result: TrainingResult) -> tuple[str, list[str]]:
        averaged = len(self.averaged_steps(prepared))
        note = f" (mean of the weights at the last {averaged} scores)" if averaged > 1 else ""
        return "How well does the model translate held-out lines?", [
            f"{prepared.steps:,} steps; held-out {score_report.format_scores(result.saved)}{note}",
            *([result.about["bleu"]] if "bleu" in result.about else []),
            f"This translates lines: whereformer translate run {self.out / 'model'} < lines.txt",
        ]


def translate_some(model: Any, prepared: PreparedTranslation) -> tuple[list[list[str]], str]:
    """Translate the first held-out lines; return those to show, with references, and the BLEU of all of them."""
    pairs = prepared.rows["held_out"]
    chosen = [pairs[number] for number in range(min(len(pairs), TRANSLATED))]
    sources, references = ([examples.decode(prepared.tokenizer, pair[side]) for pair in chosen] for side in (0, 1))
    translations = translation.translate_lines(model.eval(), prepared.tokenizer, sources)
    bleu, _ = translation.scores(translations, references)
    rows = [list(row) for row in zip(sources, references, translations, strict=True)]
    return rows[: examples.MAX_ROWS], f"{len(rows)} held-out lines: {bleu}."


def count_parameters(config: models.Seq2SeqConfig) -> dict[str, int]:
    """Count the model's parameters, without memory for them."""
    with torch.device("meta"):
        return methods.count_parameters(models.Seq2SeqForConditionalGeneration(config))
