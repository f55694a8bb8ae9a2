"""The pretrain recipe: train an encoder on text by masked language modeling or ELECTRA."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from .. import ranks
from ..errors import InputError, short_repr
from ..lab import options
from ..lab.recipe import Between, LazyModule, MayChange, Range, lazy_modules
from ..lab.training_recipe import PreparedTraining, TrainingRecipe, TrainingResult

if TYPE_CHECKING:
    import torch

    from .. import models
    from ..analysis import held_out
    from ..data import corpus, encode, read, tokenizers
    from ..data import windows as text_windows
    from ..lab import examples, methods
    from ..lab import train as training
    from ..lab.report import score_report
    from ..lab.run import Run
else:
    torch = LazyModule("torch")
    models, held_out, corpus = lazy_modules("models", "analysis.held_out", "data.corpus")
    encode, read, tokenizers = lazy_modules("data.encode", "data.read", "data.tokenizers")
    text_windows, methods, examples = lazy_modules("data.windows", "lab.methods", "lab.examples")
    training, score_report = lazy_modules("lab.train", "lab.report.score_report")


@dataclass(frozen=True)
class PreparedPretraining(PreparedTraining):
    """The encoded text, the model's configuration, and the windows to train and to evaluate on."""

    text: encode.EncodedText
    config: models.EncoderConfig
    windows: text_windows.Windows
    eval_windows: text_windows.Windows


@dataclass(frozen=True, kw_only=True)
class Pretrain(TrainingRecipe):
    """Pretrain an encoder on a folder of text, with any position method: masked LM or ELECTRA.

    The default model, a BERT with 4 layers of width 128, takes about nine minutes on one CPU core, whatever the text.
    For a larger model, raise --blocks, --hidden-size, --num-heads, --vocab-size and --steps, and lower --learning-rate.
    One page in ten is held out, and the model is scored on these pages during training.

    The text may be larger than memory: it is encoded once, into cache/, and read from there a window at a time. Also
    writes model/ (the model and its tokenizer, for Encoder.from_pretrained and AutoTokenizer), report.html,
    records.jsonl, checkpoints/ and, unless --report-to says otherwise, tensorboard/. Ctrl-C finishes the current step
    and saves it; the same command then continues and ends with the same weights.
    """

    NAME = "pretrain"
    EXAMPLE = "whereformer pretrain --data texts/ --position rope"
    ANSWERS: ClassVar = (
        "What does it get right?",
        ("text", "word", "answer", "is"),
        "Held-out text with a masked word (____), and the most likely answer; with electra, the generator's.",
    )
    FLAGS: ClassVar = {"num_attention_heads": "--num-heads", "hidden_dropout_prob": "--dropout"}

    data: Annotated[tuple[str, ...], MayChange] = ()
    """Text to train on: files, patterns such as 'data/**/*.txt' (in quotes), or folders with .txt, .md, .rst, .parquet,
    .jsonl; or a data set on the Hugging Face Hub, as hub:NAME or hub:NAME:CONFIG.
    Default: the documentation that comes with Python."""
    column: Annotated[str | None, MayChange] = None
    """The column of tables that holds the text. Default: text."""
    out: Annotated[Path, MayChange] = Path("runs/pretrain")
    """Folder for the model, checkpoints and results."""
    tokenizer: Annotated[Path | None, MayChange] = None
    """The folder of a saved Hugging Face tokenizer. Default: WordPiece, learned from the text."""
    vocab_size: Annotated[int, Range(64, options.MAX_SIZE)] = 4096
    """Size of the vocabulary that is learned from the text, without ``tokenizer``."""
    objective: Literal["mlm", "electra"] = "mlm"
    """mlm: predict the masked tokens. electra: a generator of a quarter of the width predicts them, and the encoder
    learns to detect which tokens were replaced; its loss has weight 50."""
    preset: Literal["bert", "albert", "electra", "funnel", "modernbert", "hybrid"] | None = None
    """Norms, activation, biases, positions and windows of a published model, and how its layers are shared or pooled.
    Sizes are not the published ones, and other options win. Default: BERT with pre-layer normalization."""
    blocks: str | None = None
    """Layers: "4" is four layers (BERT), "1x4" is one layer used four times (ALBERT), and "4-4-4" is three blocks; the
    second and the third halve the sequence first (Funnel-Transformer). Default: the preset's, or 4."""
    decoder_layers: str | None = None
    """Full-length layers after several blocks, such as "2" or "1x2". Default: 2, or 0 for a single block."""
    windows: str | None = None
    """How far layers attend to each side, in tokens: "64,64,0" gives two layers windows of 64 and the third none, and
    so on in turn. Default: the preset's, or no windows."""
    position: str | None = None
    """Position method, several joined by "+", or a pattern over layers as rope/rope/rope/none; `whereformer positions`
    lists them. Default: the preset's, or tisa."""
    hidden_size: Annotated[int, Range(1, options.MAX_SIZE)] = 128
    """Width of the encoder."""
    embedding_size: Annotated[int | None, Range(1, options.MAX_SIZE)] = None
    """Width of the token embeddings. Narrower embeddings are projected up (ALBERT). Default: the encoder's width."""
    num_heads: Annotated[int, Range(1, options.MAX_SIZE)] = 4
    """Number of attention heads. It must divide the width."""
    norm: Literal["pre", "post"] | None = None
    """Where a layer normalizes: at its input (pre, which is easier to train) or after the sum (post, as in BERT).
    Default: the preset's, or pre."""
    dropout: Annotated[float, Range(0, 0.9)] = 0.0
    """Dropout on hidden states and attention weights. Small models that read a text a few times do best without it; for
    large models, use 0.1."""
    length: Annotated[int, Range(8, options.MAX_SIZE)] = 128
    """Tokens in a window, including [CLS] and [SEP]."""
    grow: bool = False
    """Begin with windows of 8 tokens for 40% of the steps, and double them up to `length`, as `compare` does. Every
    step has about the same number of tokens, and absolute positions are learned sooner."""
    steps: Annotated[int, Range(1, options.MAX_COUNT)] = 2000
    """Number of training steps."""
    batch_size: Annotated[int, Range(1, options.MAX_SIZE)] = 16
    """Number of windows that go through the model at a time."""
    compile: bool = False
    """Compile the model, with CUDA graphs on a GPU. That takes about a minute for each length of windows, and may pay
    in long trainings. It needs one process, and no `accumulate`."""
    learning_rate: Annotated[float, Between(0, options.MAX_RATE)] = 2e-3
    """Peak learning rate. Large models need a lower one (BERT: 1e-4)."""
    warmup: int | None = None
    """Number of steps during which the learning rate rises. Default: a tenth of the steps."""
    mask_rate: Annotated[float, Between(0, 1)] = 0.15
    """Share of tokens that are masked in training. In held-out text it is always 15%."""
    hide_masked: bool = False
    """Let no token attend to a [MASK], as Funnel-Transformer's authors do. Off by default, as in BERT: windows then
    need no attention mask, which is faster, and the model can use where words are missing. Only for mlm."""
    every: Annotated[int | None, Range(1, options.MAX_COUNT), MayChange] = None
    """Number of steps between checkpoints, each with a held-out score. Default: a tenth of the steps."""
    keep: Annotated[int, Range(1, options.MAX_COUNT), MayChange] = 2
    """Number of newest checkpoints to keep. `whereformer analyze` compares their heads."""

    def check(self) -> None:
        if self.warmup is not None and not 0 <= self.warmup <= self.steps:
            raise InputError("warmup", f"expected 0 to {self.steps}, got {short_repr(self.warmup)}")
        if self.hide_masked and self.objective != "mlm":
            raise InputError("hide_masked", f"only for `objective` mlm, got {self.objective}, which sees no [MASK]")
        super().check()
        count = ranks.size()
        if self.compile and (count > 1 or self.accumulate > 1):
            raise InputError("compile", "only in one process and without `accumulate`; leave it out")
        if self.batch_size % count:
            expected = f"a multiple of {count}, the number of processes"
            raise InputError("batch_size", f"expected {expected}, got {self.batch_size}")

    def resolve(self) -> Pretrain:
        defaults: dict[str, Any] = {"blocks": "4", "position": "tisa", "norm": "pre"}
        if self.preset is not None:
            preset = {"position": "learned", "norm": "post", **models.config.PRESETS[self.preset]}
            defaults |= {name: preset[name] for name in defaults if name in preset}
        is_funnel = "-" in str(self.blocks or defaults["blocks"])
        if is_funnel and self.decoder_layers == "0":
            reason = f"blocks {self.blocks!r} shorten the sequence, and pretraining predicts at every token"
            raise InputError("decoder_layers", f"expected at least 1, got 0: {reason}")
        defaults |= {"decoder_layers": "2" if is_funnel else "0", "warmup": max(1, self.steps // 10)}
        resolved = replace(
            self,
            position_options=options.canonical_options(self.position_options),
            **{name: value for name, value in defaults.items() if getattr(self, name) is None},
        )
        # Options that do not fit are refused before the text is read and encoded, which may take long.
        config = resolved.config(tokenizers.build_vocabulary(64))
        shortest, min_length = resolved.stages[0].length, 6 + text_windows.count_end_padding(config)
        if shortest < min_length:
            reason = f"expected windows of at least {min_length} tokens for blocks {config.blocks!r}, got {shortest}"
            raise InputError("grow" if self.grow else "length", reason)
        return resolved

    @property
    def stages(self) -> list[text_windows.Stage]:
        """The stages of training, in order: one for each length of windows."""
        rows = self.batch_size * self.accumulate
        if self.grow:
            return text_windows.growing_stages(self.length, rows, self.steps)
        return [text_windows.Stage(self.length, self.steps, rows)]

    def config(self, vocabulary: tokenizers.Vocabulary) -> models.EncoderConfig:
        """Return the configuration of the model, which is built without memory; an InputError if options do not fit."""
        method = options.parse_options(self.position_options)
        # Without these options, the preset's values count.
        optional: dict[str, Any] = {"windows": self.windows, "position_options": method or None}
        kind = models.ElectraPretrainingConfig if self.objective == "electra" else models.EncoderConfig
        try:
            config = kind.preset(
                self.preset or "bert",
                vocab_size=vocabulary.size,
                hidden_size=self.hidden_size,
                embedding_size=self.embedding_size,
                num_attention_heads=self.num_heads,
                blocks=self.blocks,
                decoder_layers=self.decoder_layers,
                position=self.position,
                max_position_embeddings=self.length,
                norm=self.norm,
                hidden_dropout_prob=self.dropout,
                attention_probs_dropout_prob=self.dropout,
                # A window is one stretch of text. Only [SEP] marks where a document ends.
                type_vocab_size=0,
                segments="embedding",
                layer_norm_eps=1e-6,
                # BERT's 0.02 suits a width of 768. Narrow layers learn sooner with a larger range.
                initializer_range=0.02 * math.sqrt(768 / self.hidden_size),
                pad_token_id=vocabulary.pad,
                sparse_prediction=True,
                label_share=max(self.mask_rate, text_windows.HELD_OUT_RATE),
                **{name: value for name, value in optional.items() if value is not None},
            )
            count_parameters(config)
        except (ValueError, TypeError) as error:
            raise methods.as_setting(error, kind.__dataclass_fields__, method) from None
        return config

    def prepare(self, run: Run, cache: Path) -> PreparedPretraining:
        choice = encode.TokenizerChoice(self.tokenizer, self.vocab_size)
        with ranks.main_first():
            paths = read.download(self.data, run.log)
        text = corpus.TextSource(paths, self.column)
        run.log(text.about_files)
        hashes = {"text": text.fingerprint, "tokenizer": choice.setting}
        run.record_hash("text", hashes["text"], "data")
        run.record_hash("tokenizer", hashes["tokenizer"], "tokenizer")
        with ranks.main_first():
            encoded = encode.open_or_encode(cache, text, choice, run.log)
        config, ids = self.config(encoded.vocabulary), encoded.vocabulary
        windows = text_windows.Windows(
            encoded.training,
            ids,
            self.stages,
            rate=self.mask_rate,
            seed=self.seed,
            end=(ids.sep, *[ids.pad] * text_windows.count_end_padding(config)),
            hide_masked=self.hide_masked,
            uniforms=self.objective == "electra",
        )
        return PreparedPretraining(
            hashes, self.steps, encoded, config, windows, windows.held_out_windows(encoded.held_out)
        )

    def plan(self, prepared: PreparedPretraining) -> list[tuple[str, str]]:
        text, sizes, stage = prepared.text, count_parameters(prepared.config), prepared.windows.stages[-1]
        lengths = ", ".join(f"{length:,}" for length in prepared.config.block_lengths(self.length))
        words = f"embeddings of {text.vocabulary.size:,} tokens and {sizes['positional_parameters']:,} for position"
        size = f"{sizes['parameters']:,} parameters, including {sizes['embedding_parameters']:,} for {words}"
        tokens = f"{stage.rows * stage.length:,} tokens"
        return [
            ("text", f"{len(text.training):,} training and {len(text.held_out):,} held-out tokens"),
            ("", f"from {corpus.describe_source(self.data)}; guessing by frequency: loss {text.guessing:.2f}"),
            ("model", size),
            ("", f"blocks {prepared.config.blocks} of {lengths} tokens"),
            ("training", f"{self.steps:,} steps of {tokens}; the text is read {prepared.windows.passes:,.1f} times"),
        ]

    def train(self, run: Run, prepared: PreparedPretraining, facts: Mapping[str, Any]) -> TrainingResult:
        torch.manual_seed(self.seed)
        model, bfloat16 = build(prepared.config), self.uses_bfloat16(run.device)
        plan = training.Training(
            steps=self.steps,
            rate=self.learning_rate,
            schedule=self.schedule,
            warmup=self.warmup,
            accumulate=self.accumulate,
            bfloat16=bfloat16,
            compiled=self.compile,
        )

        def score(step: int) -> dict[str, float]:
            return held_out.held_out_scores(model, prepared.eval_windows, bfloat16=bfloat16)

        interval = self.every or max(1, self.steps // 10)
        progress = self.fit(
            *(run, model, prepared.windows.batch, plan, score, interval, facts), save_extra=model.save_pretrained
        )
        sizes, last_scores = count_parameters(prepared.config), progress.scores[-1][1]
        filled_in = fill_in(model if self.objective == "mlm" else model.generator, prepared)
        trained, tokenizer = model if self.objective == "mlm" else model.discriminator, prepared.text.tokenizer
        trained.config.sparse_prediction, trained.config.label_share = False, None  # logits at every token
        tokenizer.model_max_length = prepared.config.max_position_embeddings
        self.save(run, trained, tokenizer, facts)
        about = {"tokens": prepared.windows.tokens, **sizes}
        return TrainingResult(score_report.smooth(progress.losses), progress.scores, last_scores, about, filled_in)

    def headline(self, prepared: PreparedPretraining, result: TrainingResult) -> tuple[str, list[str]]:
        scores, guess = score_report.format_scores(result.saved), prepared.text.guessing
        folder = str(self.out / "model")
        return "How well does the model predict held-out text?", [
            f"{self.steps:,} steps, {prepared.windows.tokens:,} tokens; held-out {scores}",
            f"Guessing by frequency has a {'' if self.objective == 'mlm' else 'generator '}loss of {guess:.2f}.",
            f'After "import whereformer.models", AutoModel.from_pretrained({folder!r}) is the encoder, and '
            f"AutoTokenizer.from_pretrained({folder!r}) its tokenizer.",
        ]


def fill_in(model: Any, prepared: PreparedPretraining) -> list[list[str]]:
    """Return a masked word of each held-out window of a batch, and the answer of a masked language model."""
    tokenizer, rows = prepared.text.tokenizer, list[list[str]]()
    batch = prepared.eval_windows.batch(0)
    batch = {name: batch[name] for name in ("input_ids", "labels", "attention_mask") if name in batch}
    answers = held_out.lm_score(model, [batch]).answers.tolist()
    for inputs, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        count = int((labels != text_windows.IGNORED).sum())
        guesses, answers = answers[:count], answers[count:]
        for word in examples.find_words(tokenizer, inputs, labels, count)[:1]:
            text, (right, answer) = examples.fill_blank(tokenizer, inputs, labels, word, [guesses[word]])
            rows.append([text, right, answer, "right" if right == answer else "wrong"])
    return rows[: examples.MAX_ROWS]


def build(config: models.EncoderConfig) -> Any:
    """Build an untrained model."""
    electra = isinstance(config, models.ElectraPretrainingConfig)
    return models.Electra(config) if electra else models.EncoderForMaskedLM(config)


def count_parameters(config: models.EncoderConfig) -> dict[str, int]:
    """Count the trained model's parameters, in all and by part, without memory for them."""
    with torch.device("meta"):
        counts = methods.count_parameters(build(config))
    return {**counts, "embedding_parameters": config.vocab_size * config.embedding_size}
