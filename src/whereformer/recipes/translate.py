"""The translate recipe: train a translation model on parallel text, with any position method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from ..errors import InputError
from ..lab import options, ranks
from ..lab.recipe import Between, Free, Range, Schedule, lazily
from ..lab.sheet import Column, Sheet
from .long_run import LongRun, scored_steps

with lazily(__name__):
    import torch

    from .. import models
    from ..data import batches as drawing
    from ..data import parallel, subwords
    from ..data.streams import RowFile
    from ..lab import held_out, manifest, methods
    from ..lab import optimizer as optimizers
    from ..lab import train as training
    from ..lab.report import losses, report
    from ..lab.run import Run
    from . import translating

SIZES = ("hidden_size", "num_heads", "intermediate_size", "encoder_layers", "decoder_layers")
DROPOUT = {"small": 0.2, "base": 0.1, "big": 0.3}  # by preset


@dataclass(frozen=True)
class Pairs:
    """Facts about pairs of lines.

    Args:
        pairs: number of pairs that are used.
        empty, too_long: number of pairs left out for these reasons.
        source_tokens, target_tokens: tokens in all, including the ends of lines.
        longest: tokens in the longest line.
    """

    pairs: int
    empty: int
    too_long: int
    source_tokens: int
    target_tokens: int
    longest: int


@dataclass(frozen=True)
class Work:
    """What is trained on what: the pairs of short enough lines, each a row of source and target, and facts on them."""

    source: str
    rows: dict[str, RowFile]
    pairs: dict[str, Pairs]
    tokenizer: Any
    config: models.Seq2SeqConfig
    drawn: drawing.Drawn
    steps: int

    def text(self) -> dict[str, Any]:
        """Return facts about the text."""
        parts = {name: asdict(found) for name, found in self.pairs.items()}
        return {"source": self.source, **parts, "vocabulary": len(self.tokenizer)}


@dataclass(frozen=True)
class Outcome:
    """A finished training.

    Args:
        losses: steps with the training loss, a moving average.
        scores: the held-out scores by name, each with its step.
        averaged, averaged_steps: the scores of the saved model, and the steps whose weights it is the mean of.
        epochs: how many times the text was read.
        parameters, positional_parameters: those of the model.
        training, held_out: what :class:`Pairs` says of the two parts of the text.
    """

    losses: list[Any]
    scores: list[Any]
    averaged: dict[str, float]
    averaged_steps: list[int]
    epochs: float
    parameters: int
    positional_parameters: int
    training: dict[str, int]
    held_out: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Translate(LongRun):
    """Train a translation Transformer on parallel text, with any position method.

    The text is two aligned files (--source, --target) or tables (--data, --columns). A subword vocabulary for both
    languages is learned from it. Pairs with a line that is empty or too long are left out and counted.

    The text may be larger than memory: it is encoded once, into cache/, and read from there a pair at a time. Also
    writes model/ (the mean of the last scored weights, and the tokenizer), report.html, records.jsonl, checkpoints/
    and, unless --report-to says otherwise, tensorboard/. Ctrl-C finishes the current step and saves it; the same
    command then continues and ends with the same weights.
    """

    NAME = "translate train"
    FLAGS: ClassVar = {"num_attention_heads": "--num-heads", "hidden_dropout_prob": "--dropout"}

    source: Annotated[Path | None, Free] = None
    """Lines to translate from, in UTF-8."""
    target: Annotated[Path | None, Free] = None
    """Their translations, line by line."""
    data: Annotated[tuple[Path, ...], Free] = ()
    """Tables with both languages, instead of two files: .parquet, .jsonl, .csv or .tsv."""
    columns: Annotated[str | None, Free] = None
    """Columns of the tables, such as en,de. Default: both, if there are only two. A .tsv file begins with
    a header if names are given; without, or with 1,2, its first line is text."""
    validation: Annotated[tuple[Path, ...], Free] = ()
    """Validation text, for scores during training: tables with the same columns. Default: one pair in twenty is held
    out, at most 2000."""
    validation_source: Annotated[Path | None, Free] = None
    """Validation text as two aligned files: the lines to translate."""
    validation_target: Annotated[Path | None, Free] = None
    """Their translations, line by line."""
    out: Annotated[Path, Free] = Path("runs/translate")
    """Folder for the model, checkpoints and results."""

    preset: Literal["small", "base", "big"] = "small"
    """Model size: small (3+3 layers of width 256) can be trained on two CPU cores; base (6+6 of 512) and big (6+6 of
    1024) are those of Vaswani et al. and Shaw et al."""
    position: str = "shaw"
    """Position method of the self-attention in encoder and decoder, several joined by "+", or a pattern over layers;
    `whereformer positions` lists them."""
    position_options: str | None = None
    """The method's options as a JSON object, such as '{"clip": 8}'; `whereformer positions` lists these too."""
    hidden_size: Annotated[int | None, Range(1, options.MOST_SIZE)] = None
    """Width. The default of this option and the next four is the preset's."""
    num_heads: Annotated[int | None, Range(1, options.MOST_SIZE)] = None
    """Number of attention heads. It must divide the width."""
    intermediate_size: Annotated[int | None, Range(1, options.MOST_SIZE)] = None
    """Width within the feed-forward layers."""
    encoder_layers: Annotated[int | None, Range(1, options.MOST_SIZE)] = None
    """Number of layers of the encoder."""
    decoder_layers: Annotated[int | None, Range(1, options.MOST_SIZE)] = None
    """Number of layers of the decoder."""
    norm: Literal["pre", "post"] = "pre"
    """Where a layer normalizes: at its input (pre, which is easier to train) or after the sum (post, as in the
    papers)."""
    dropout: Annotated[float | None, Range(0, 0.9)] = None
    """Dropout on embeddings and on the output of each sublayer. Default: 0.2 for small, 0.1 for base, 0.3 for big."""
    label_smoothing: Annotated[float, Range(0, 0.9)] = 0.1
    """Share of a target that is spread over all tokens."""
    vocab_size: Annotated[int, Range(300, options.MOST_SIZE)] = 8000
    """Number of subwords. Both languages share them, and they are learned from the text (byte-pair encoding over bytes,
    for any script). For large texts, use 32000."""
    max_length: Annotated[int, Range(4, options.MOST_SIZE)] = 128
    """Tokens in a line, including its end. Pairs with a longer line are left out and counted."""

    batch_tokens: Annotated[int, Range(4, options.MOST_SIZE)] = 2048
    """Tokens in a batch on either side, including padding. A batch has lines of similar length. For large texts, use
    25000."""
    accumulate: Annotated[int, Range(1, options.MOST_SIZE)] = 1
    """Number of batches in a step. With more than one, a step can have more tokens than fit into memory at a time."""
    steps: Annotated[int | None, Range(1, options.MOST_COUNT)] = None
    """Number of training steps. Default: follows from ``epochs``."""
    epochs: Annotated[float | None, Between(0, options.MOST_RATE)] = None
    """How many times the text is read. Default: 20."""
    learning_rate: Annotated[float, Between(0, options.MOST_RATE)] = 2e-3
    """Peak learning rate. Large models need a lower one (base: 7e-4)."""
    warmup: Annotated[int, Range(0, options.MOST_COUNT)] = 1000
    """Number of steps in which the learning rate rises. For large models, use 4000."""
    schedule: Schedule = "inverse_sqrt"
    average: Annotated[int, Range(1, options.MOST_COUNT)] = 5
    """The final model is the mean of the weights at this number of last scores. With 1 it has the last weights."""
    every: Annotated[int | None, Range(1, options.MOST_COUNT)] = None
    """Number of steps between checkpoints, each with a held-out score. Default: a twentieth of the steps."""
    seed: Annotated[int, Range(0, options.MOST_SEED)] = 0
    """Seed of the weights, dropout and the order of the text."""

    def check(self) -> None:
        if self.batch_tokens < self.max_length:
            raise InputError("batch_tokens", f"expected at least {self.max_length}, got {self.batch_tokens}")
        if self.steps is not None and self.epochs is not None:
            raise InputError("epochs", "either `steps` or `epochs`")
        options.canonical_options(self.position_options)
        super().check()

    def resolved(self) -> Translate:
        usual: dict[str, Any] = {"dropout": DROPOUT[self.preset], **({} if self.steps else {"epochs": 20.0})}
        found = replace(
            self,
            position_options=options.canonical_options(self.position_options),
            **{name: value for name, value in usual.items() if getattr(self, name) is None},
        )
        found.config(self.vocab_size)  # what does not fit is said before the text is read and encoded
        _ = self.files
        return found

    @property
    def files(self) -> tuple[parallel.PairFiles, parallel.PairFiles | None]:
        """The text to train on, and that to judge by, if it is given."""
        given = (self.validation_source, self.validation_target, self.validation)
        return (
            parallel.PairFiles(self.source, self.target, self.data, self.columns),
            parallel.PairFiles(*given, self.columns, validation=True) if any(given) else None,
        )

    def config(self, vocab_size: int) -> models.Seq2SeqConfig:
        """Return the configuration of the model, which is built without memory for it.

        Raises:
            InputError: if the options do not fit together.
        """
        method = options.parsed_options(self.position_options)
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
            with torch.device("meta"):
                models.Seq2SeqForConditionalGeneration(config)
        except (ValueError, TypeError) as error:
            raise methods.as_setting(error, models.Seq2SeqConfig.__dataclass_fields__, method) from None
        return config

    def run(self, run: Run) -> report.Report:
        cache = self.begin(run)
        text = parallel.ParallelText(*self.files)
        run.identify("text", text.fingerprint, text.pairs.field)
        with ranks.main_first():
            work = self.prepare(run, text, cache)
        plan = self.plan(work)
        if self.dry_run:
            return report.Report("What would be trained?", [self.DRY], [plan])
        run.say(plan)
        facts = {"options": run.options, "text": text.fingerprint}
        problem = ranks.from_main(lambda: manifest.problem(run.folder / "model", facts))
        outcomes = run.each([()], self.train, work, facts, kind=Outcome, steps=work.steps, problem=lambda key: problem)
        return self.report(outcomes[()], plan)

    def prepare(self, run: Run, text: parallel.ParallelText, cache: Path) -> Work:
        """Open the encoded pairs or encode them, and leave those with an empty or too long line out."""
        encoded, tokenizer = parallel.open_or_encode(cache, text, self.vocab_size, run.say)
        rows, pairs = {}, {}
        for name, source in zip(parallel.PARTS, text.sources, strict=True):
            every = encoded[name]
            full = (every.lengths > 0).all(1)
            fits = full & (every.lengths <= self.max_length).all(1)
            if not fits.any():
                wanted = f"text on both sides and at most {self.max_length} tokens on each"
                raise InputError("max_length", f"no {name.replace('_', '-')} pair of {source} has {wanted}")
            rows[name] = every.chosen(fits.nonzero().flatten())
            lengths = rows[name].lengths
            pairs[name] = Pairs(
                pairs=len(lengths),
                empty=len(every) - int(full.sum()),
                too_long=int(full.sum()) - len(lengths),
                source_tokens=int(lengths[:, 0].sum()),
                target_tokens=int(lengths[:, 1].sum()),
                longest=int(lengths.max()),
            )
        drawn = drawing.Drawn(rows["training"].lengths, self.batch_tokens * self.accumulate, self.seed)
        steps = self.steps or max(1, math.ceil((self.epochs or 0) * drawn.per_epoch))
        config = self.config(len(tokenizer))
        return Work(text.sources[0], rows, pairs, tokenizer, config, drawn, steps)

    def plan(self, work: Work) -> Sheet:
        """Return what is read and trained, as a table."""
        rows = []
        for name, part in work.pairs.items():
            tokens = f"{part.source_tokens:,} and {part.target_tokens:,} tokens, at most {part.longest} per line"
            rows.append((name.replace("_", "-"), f"{part.pairs:,} pairs, {tokens}"))
            reasons = {"with an empty line": part.empty, f"of more than {self.max_length} tokens": part.too_long}
            left = ", ".join(f"{count:,} {why}" for why, count in reasons.items() if count)
            rows += [("", f"left out: {left}")] if left else []
        sizes, embedded = sizes_of(work.config), work.config.vocab_size * work.config.hidden_size
        words = f"embeddings of {len(work.tokenizer):,} tokens and {sizes['positional_parameters']:,} for position"
        rows.append(("model", f"{sizes['parameters']:,} parameters, including {embedded:,} for {words}"))
        found, epochs = work.pairs["training"], work.steps / work.drawn.per_epoch
        tokens = f"{round((found.source_tokens + found.target_tokens) / work.drawn.per_epoch):,} tokens"
        passes = f"the text takes {work.drawn.per_epoch:,} steps and is read {epochs:,.1f} times"
        rows.append(("steps", f"{work.steps:,} of about {tokens}; {passes}"))
        return Sheet.of("Plan", ["", Column("", left=True, wraps=True)], rows)

    def train(self, run: Run, work: Work, facts: Mapping[str, Any]) -> Outcome:
        """Train from the newest checkpoint that counts, or from the start, and save the model."""
        torch.manual_seed(self.seed)
        model = models.Seq2SeqForConditionalGeneration(work.config)
        trained, pairs = optimizers.Averaged(model), work.rows["training"]
        if ranks.rank():  # or the rows of all processes would drop the same states
            torch.manual_seed(hash((self.seed, ranks.rank())))
        every = self.every or max(1, work.steps // 20)
        last = scored_steps(every, work.steps)[-self.average :]

        def score(step: int) -> dict[str, float]:
            if step in last:
                trained.add()
            return self.held_out_scores(trained, work)

        def optimizer(model: Any) -> Any:
            # No decay, and Adam's epsilon, as in Vaswani et al.
            kind, rate = self.optimizer, self.learning_rate
            built = optimizers.build_optimizer(model, rate, name=kind, weight_decay=0.0, eps=1e-9)
            return built, optimizers.build_schedule(built, self.schedule, self.warmup, work.steps)

        plan = training.Training(
            steps=work.steps,
            rate=self.learning_rate,
            optimizer=optimizer,
            accumulate=self.accumulate,
            bfloat16=self.bfloat16(run.device),
        )

        def batch(step: int) -> dict[str, Any]:
            return parallel.collate([pairs[row] for row in work.drawn(step)])

        done = self.fit(run, trained, batch, plan, score, every, facts)
        trained.take_mean()
        sizes = sizes_of(work.config)
        outcome = Outcome(
            losses.smoothed(done.losses),
            done.scores,
            self.held_out_scores(trained, work),
            last,
            work.steps / work.drawn.per_epoch,
            sizes["parameters"],
            sizes["positional_parameters"],
            asdict(work.pairs["training"]),
            asdict(work.pairs["held_out"]),
        )
        model.generation_config = translating.generation_config(work.config, self.max_length)
        about = {"parameters": outcome.parameters, "text": work.text(), "scores": outcome.averaged}
        self.save(run, model, work.tokenizer, facts, **about)
        return outcome

    def held_out_scores(self, model: Any, work: Work) -> dict[str, float]:
        """Return mean cross-entropy in nats and accuracy of each held-out next token, given those before it.

        Each process reads its share of the batches. Afterwards the model is in evaluation mode.
        """
        model.eval()
        rows, device = work.rows["held_out"], next(model.parameters()).device
        found: list[tuple[str, float, int]] = []
        for chosen in ranks.share(drawing.by_length_and_tokens(rows.lengths, self.batch_tokens)):
            batch = {name: each.to(device) for name, each in parallel.collate([rows[row] for row in chosen]).items()}
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=self.bfloat16(device.type)):
                out = model(**batch)
            asked = batch["labels"] >= 0
            count, right = int(asked.sum()), float((out.logits.argmax(-1) == batch["labels"])[asked].sum())
            found += [("loss", float(out.loss) * count, count), ("accuracy", right, count)]
        return held_out.means(found)

    def report(self, outcome: Outcome, plan: Sheet) -> report.Report:
        """Return the last scores in words, and all of them as a table and as curves."""
        mean = len(outcome.averaged_steps)
        of_what = f" (mean of the weights at the last {mean} scores)" if mean > 1 else ""
        sentences = [
            f"{outcome.scores[-1][0]:,} steps; held-out {losses.in_words(outcome.averaged)}{of_what}",
            f"This translates lines: whereformer translate run {self.out / 'model'} < lines.txt",
        ]
        last = {"mean": outcome.averaged} if mean > 1 else {}
        parts = [*losses.course(outcome.losses, outcome.scores, last), replace(plan, folded=True)]
        return report.Report("How well does the model translate held-out lines?", sentences, parts, asdict(outcome))


def sizes_of(config: models.Seq2SeqConfig) -> dict[str, int]:
    """Count the model's parameters, without memory for them."""
    with torch.device("meta"):
        return methods.parameters(models.Seq2SeqForConditionalGeneration(config))
