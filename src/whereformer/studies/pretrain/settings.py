"""The options of a pretraining, of which model and training decide the result. Importing them is fast."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...errors import InputError
from ...lab.options import (
    MOST_COUNT,
    MOST_SEED,
    MOST_SIZE,
    LongRun,
    Optimization,
    TextOptions,
    canonical_options,
    check_positive,
    check_range,
    find_device,
    part,
)
from ...lab.study import Study, command_line
from .schedule import SHORTEST, Stage, parsed_lengths, stages_of

if TYPE_CHECKING:
    from .run import PretrainJob


@dataclass(frozen=True)
class ModelSettings:
    """The encoder and its objective."""

    objective: Literal["mlm", "electra"] = "mlm"
    """mlm: predict the masked tokens. electra: a small generator predicts them, and the encoder learns to tell which
    tokens were replaced."""

    preset: Literal["bert", "albert", "electra", "funnel", "modernbert"] | None = None
    """Norms, activation, biases, positions and windows of a published model, and how its layers are shared or pooled.
    Sizes are not the published ones, and other options win. Default: BERT with pre-layer normalization."""

    blocks: str | None = None
    """Layers: "4" is four layers (BERT), "1x4" is one layer used four times (ALBERT), and "4-4-4" is three blocks, each
    of which halves the sequence of the one before (Funnel-Transformer). Default: the preset's, or 4."""

    decoder_layers: str | None = None
    """Full-length layers after several blocks, such as "2" or "1x2". Default: 2, or 0 for a single block."""

    windows: str | None = None
    """How far layers attend to each side, in tokens: "64,64,0" gives two layers windows of 64 and the third none, and
    so on in turn. Default: the preset's, or no windows."""

    position: str | None = None
    """Position method, several joined by "+", or a pattern over layers as rope/rope/rope/none; `whereformer positions`
    lists them. Default: the preset's, or tisa."""

    position_options: str | None = None
    """The method's options as a JSON object, such as '{"num_kernels": 3}'; `whereformer positions` lists these too."""

    hidden_size: int = 128
    """Width of the encoder."""

    embedding_size: int | None = None
    """Width of the token embeddings. Narrower embeddings are projected up (ALBERT). Default: the encoder's width."""

    num_heads: int = 4
    """Number of attention heads. It must divide the width."""

    norm: Literal["pre", "post"] | None = None
    """Where a layer normalizes: at its input (pre, which is easier to train) or after the sum (post, as in BERT).
    Default: the preset's, or pre."""

    dropout: float = 0.0
    """Dropout on hidden states and attention weights. Small models that read a text a few times do best without it; for
    large models, use 0.1."""

    generator_size: float | None = None
    """electra: width of the generator, as a share of the encoder's. Default: 0.25."""

    discriminator_weight: float | None = None
    """electra: weight of the encoder's loss; the generator's loss has weight 1. Default: 50."""

    def resolved_model(self) -> ModelSettings:
        """Check what can be checked without a model, and return the settings with defaults in place of None."""
        check_range(self, **dict.fromkeys(("hidden_size", "embedding_size", "num_heads"), (1, MOST_SIZE)))
        check_range(self, dropout=(0, 0.9))
        defaults: dict[str, Any] = {"blocks": "4", "position": "tisa", "norm": "pre"}
        if self.preset is not None:
            from ...models.presets import PRESETS

            preset = {"position": "learned", "norm": "post", **PRESETS[self.preset]}
            defaults |= {name: preset[name] for name in defaults if name in preset}
        funnel = "-" in str(self.blocks or defaults["blocks"])
        if funnel and self.decoder_layers == "0":
            raise InputError(
                "decoder_layers",
                f"expected at least 1, got 0: blocks {self.blocks!r} shorten the sequence, "
                "and pretraining predicts at every token",
            )
        defaults["decoder_layers"] = "2" if funnel else "0"
        if self.objective == "electra":
            # A generator wider than the discriminator would leave it nothing to learn.
            check_range(self, generator_size=(0.01, 1), discriminator_weight=(0, 1e6))
            defaults |= {"generator_size": 0.25, "discriminator_weight": 50.0}
        elif given := [name for name in ("generator_size", "discriminator_weight") if getattr(self, name) is not None]:
            raise InputError(given[0], f"only for `objective` electra, got {self.objective}")
        filled = {name: default for name, default in defaults.items() if getattr(self, name) is None}
        return dataclasses.replace(self, position_options=canonical_options(self.position_options), **filled)


@dataclass(frozen=True)
class PretrainTraining(Optimization):
    """How the model is trained."""

    length: int | None = None
    """Tokens in a window, including [CLS] and [SEP]. Default: 128."""

    lengths: str | None = None
    """Several lengths instead, each with its share of the steps, such as 128:0.9,512:0.1 (as for BERT and ALBERT).
    Batches have fewer of the longer windows, so that every step has about the same number of tokens. Held-out text is
    scored at the last length."""

    steps: int = 2000
    """Number of training steps."""

    batch_size: int = 16
    """Number of windows that go through the model at a time; with `lengths`, of the first length."""

    accumulate: int = 1
    """Number of batches in a step. With more than one, a step can have more windows than fit into memory at a time."""

    learning_rate: float = 2e-3
    """Peak learning rate. Large models need a lower one (BERT: 1e-4)."""

    warmup: int | None = None
    """Number of steps in which the learning rate rises. Default: a tenth of the steps."""

    mask_rate: float = 0.15
    """Share of tokens that are masked in training. In held-out text it is always 15%."""

    hide_masked: bool = False
    """Let no token attend to a [MASK], as Funnel-Transformer's authors do. Off by default, as in BERT: windows then
    need no attention mask, which is faster, and the model can use where words are missing. Only for mlm."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the arithmetic. bfloat16 is mixed precision, for GPUs and CPUs that are fast at it; the weights stay
    float32."""

    seed: int = 0
    """Seed of the weights, the windows and the masks."""

    def resolved_training(self, objective: str) -> PretrainTraining:
        """Check the settings and return them, with defaults in place of None."""
        if self.length is not None and self.lengths is not None:
            raise InputError("lengths", f"only without `length`, got {self.lengths!r} and {self.length}")
        check_range(self, length=(SHORTEST, MOST_SIZE), batch_size=(1, MOST_SIZE), accumulate=(1, MOST_SIZE))
        check_range(self, steps=(1, MOST_COUNT), seed=(0, MOST_SEED))
        check_range(self, warmup=(0, self.steps))
        check_positive(self, "learning_rate")
        if not 0 < self.mask_rate < 1:
            raise InputError("mask_rate", f"expected a share between 0 and 1, got {self.mask_rate}")
        if self.hide_masked and objective != "mlm":
            raise InputError("hide_masked", f"only for `objective` mlm, got {objective}, which sees no [MASK]")
        lengths, length = None, self.length or 128
        if self.lengths is not None:
            pairs = parsed_lengths(self.lengths)
            lengths, length = ",".join(f"{length}:{share:g}" for length, share in pairs), pairs[-1][0]
        warmup = max(1, self.steps // 10 if self.warmup is None else self.warmup)
        found = dataclasses.replace(self, length=length, lengths=lengths, warmup=warmup)
        found.stages()
        return found

    @property
    def longest(self) -> int:
        """The most tokens in a window."""
        return max(stage.length for stage in self.stages())

    def stages(self) -> list[Stage]:
        """Return the stages of training, in order; the settings must be resolved."""
        lengths = parsed_lengths(self.lengths or f"{self.length}:1")
        return stages_of(lengths, self.steps, self.batch_size, self.accumulate)


@dataclass(frozen=True, kw_only=True)
class Pretrain(LongRun, TextOptions, PretrainTraining, ModelSettings, Study):
    """Pretrain an encoder on a folder of text, with any position method: masked LM or ELECTRA.

    The default model, a BERT with 4 layers of width 128, takes about nine minutes on one CPU core, whatever the text.
    For a larger model, raise --blocks, --hidden-size, --num-heads, --vocab-size and --steps, and lower --learning-rate.
    One page in ten is held out, and the model is scored on these pages during training.

    The text may be larger than memory: it is encoded once, into cache/, and read from there a window at a time. Also
    writes model/ (the model and its tokenizer, for Encoder.from_pretrained and AutoTokenizer), results.json,
    checkpoints/ and, unless --report-to says otherwise, tensorboard/. Ctrl-C finishes the current step and
    saves it; the same command then continues and ends with the same weights.
    """

    FLAGS: ClassVar = {"num_attention_heads": "--num-heads", "hidden_dropout_prob": "--dropout"}
    MANY: ClassVar = True
    MAKES_FILES: ClassVar = True

    data: tuple[str, ...] = ()
    """Text to train on: files, patterns such as 'data/**/*.txt' (in quotes), or folders with .txt, .md, .rst, .parquet,
    .jsonl; or a data set on the Hugging Face Hub, as hub:NAME, hub:NAME:CONFIG or hf://datasets/NAME/*.parquet.
    Default: the documentation that comes with Python."""

    out: Path = Path("runs/pretrain")
    """Folder for the model, checkpoints and results."""

    tokenizer: Path | None = None
    """A tokenizer.json, or the folder of a saved Hugging Face tokenizer. Default: WordPiece, learned from the text."""

    vocab_size: int | None = None
    """Size of the vocabulary that is learned from the text. Default: 4096."""

    every: int | None = None
    """Number of steps between checkpoints, each with a held-out score. Default: a tenth of the steps."""

    keep: int = 2
    """Number of newest checkpoints to keep. From several checkpoints, `whereformer analyze` shows how the model learned
    about position."""

    def job(self) -> PretrainJob:
        model = part(self, ModelSettings).resolved_model()
        training = part(self, PretrainTraining).resolved_training(model.objective)
        check_range(self, vocab_size=(64, MOST_SIZE), every=(1, MOST_COUNT), keep=(1, MOST_COUNT))
        self.check_threads()
        self.check_report_to()
        if self.tokenizer is not None and self.vocab_size is not None:
            raise InputError("vocab_size", f"only without `tokenizer`, which has its own size, got {self.vocab_size}")

        from ...data.encode import TokenizerChoice
        from ...lab import ranks
        from ...lab.training.shared import check_rows
        from .model import build_config
        from .run import PretrainJob

        check_rows(training.batch_size)
        device = find_device(self.device)
        ranks.join(device)
        # Check the settings before the text is read and encoded, which may take long.
        build_config(model, training.longest)
        return PretrainJob(
            model,
            training,
            self.data,
            self.column,
            TokenizerChoice(self.tokenizer, self.vocab_size or 4096),
            device,
            self.every or max(1, training.steps // 10),
            self.keep,
            self.cache,
            self.threads,
            self.report_to,
            command_line(self, "pretrain"),
        )

    def usage(self) -> str:
        model = str(self.out / "model")
        return f"""\
from transformers import AutoTokenizer; from whereformer import Encoder
tokenizer = AutoTokenizer.from_pretrained({model!r})
hidden = Encoder.from_pretrained({model!r})(**tokenizer("some text", return_tensors="pt")).last_hidden_state"""
