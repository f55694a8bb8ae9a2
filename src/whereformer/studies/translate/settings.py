"""The options of translation: text, model, training and search. Importing them is fast, so that --help is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from ...errors import InputError
from ...lab.options import (
    MOST_COUNT,
    MOST_SEED,
    MOST_SIZE,
    LongRun,
    Optimization,
    canonical_options,
    check_positive,
    check_range,
    find_device,
    part,
)
from ...lab.study import Study, command_line

if TYPE_CHECKING:
    from .run import TranslateJob


SIZES = ("hidden_size", "num_heads", "intermediate_size", "encoder_layers", "decoder_layers")


def columns_of(field: str, text: str | None) -> tuple[str, str] | None:
    """Parse the names of two columns, source first; None stays None.

    Raises:
        InputError: if there are not two different names.
    """
    if text is None:
        return None
    found = tuple(part.strip() for part in text.split(","))
    if len(found) != 2 or found[0] == found[1] or not all(found):
        raise InputError(field, f"expected two columns, such as en,de, got {text!r}")
    return found


@dataclass(frozen=True)
class ParallelData:
    """Parallel text: two aligned files, or tables with a column for each language."""

    source: Path | None = None
    """Lines to translate from, in UTF-8."""

    target: Path | None = None
    """Their translations, line by line."""

    data: tuple[Path, ...] = ()
    """Tables with both languages, instead of two files: .parquet, .jsonl, .csv or .tsv."""

    columns: str | None = None
    """Columns of the tables, such as en,de. Default: both, if there are only two. The first line of a .tsv file is a
    header if it has these names; without names, or with 1,2, it is text."""

    NAMES: ClassVar[dict[str, str]] = {}
    """The names that errors use for fields, where they are not the fields' own."""

    def name(self, field: str) -> str:
        """Return the name that errors use for a field."""
        return self.NAMES.get(field, field)

    def checked_pairs(self) -> ParallelData:
        """Check that either tables or two files are given, and return the settings.

        Raises:
            InputError: if not; it names the field.
        """
        data, source, target = map(self.name, ("data", "source", "target"))
        columns_of(self.name("columns"), self.columns)
        if self.data and (self.source is not None or self.target is not None):
            raise InputError(data, f"either tables or `{source}` and `{target}`, got both")
        if not self.data and self.source is None and self.target is None:
            raise InputError(data, f"expected tables, or `{source}` and `{target}`, got none")
        if not self.data and (self.source is None or self.target is None):
            missing, other = (source, target) if self.source is None else (target, source)
            raise InputError(missing, f"expected a file to go with `{other}`, got none")
        return self


@dataclass(frozen=True)
class ValidationData:
    """Validation text, for scores during training."""

    validation: tuple[Path, ...] = ()
    """Tables with the same columns. Default: one pair in twenty is held out, at most 2000."""

    validation_source: Path | None = None
    """Validation text as two aligned files: the lines to translate."""

    validation_target: Path | None = None
    """Their translations, line by line."""

    def parallel(self, columns: str | None) -> ParallelData | None:
        """Return the text as checked :class:`ParallelData`, or None if there is none.

        Raises:
            InputError: if the fields do not fit together; it names one.
        """
        given = (self.validation_source, self.validation_target, self.validation)
        return _Validation(*given, columns).checked_pairs() if any(given) else None


class _Validation(ParallelData):
    NAMES: ClassVar = {"source": "validation_source", "target": "validation_target", "data": "validation"}


@dataclass(frozen=True)
class TranslationSettings(Optimization):
    """The model, and how it is trained."""

    preset: Literal["small", "base", "big"] = "small"
    """Model size: small (3+3 layers of width 256) can be trained on two CPU cores; base (6+6 of 512) and big (6+6 of
    1024) are those of Vaswani et al. and Shaw et al."""

    position: str = "shaw"
    """Position method of the self-attention in encoder and decoder, several joined by "+", or a pattern over layers;
    `whereformer positions` lists them."""

    position_options: str | None = None
    """The method's options as a JSON object, such as '{"clip": 8}'; `whereformer positions` lists these too."""

    cross_position: str = "none"
    """Position method of the attention from target to source. The papers have none."""

    hidden_size: int | None = None
    """Width. The default of this option and the next four is the preset's."""

    num_heads: int | None = None
    """Number of attention heads. It must divide the width."""

    intermediate_size: int | None = None
    """Width within the feed-forward layers."""

    encoder_layers: int | None = None
    """Number of layers of the encoder."""

    decoder_layers: int | None = None
    """Number of layers of the decoder."""

    norm: Literal["pre", "post"] = "pre"
    """Where a layer normalizes: at its input (pre, which is easier to train) or after the sum (post, as in the
    papers)."""

    dropout: float | None = None
    """Dropout on embeddings and on the output of each sublayer. Default: 0.2 for small, 0.1 for base, 0.3 for big."""

    label_smoothing: float = 0.1
    """Share of a target that is spread over all tokens."""

    vocab_size: int = 8000
    """Number of subwords. Both languages share them, and they are learned from the text (byte-pair encoding over bytes,
    for any script). For large texts, use 32000."""

    max_length: int = 128
    """Tokens in a line, including its end. Pairs with a longer line are left out and counted."""

    batch_tokens: int = 2048
    """Tokens in a batch on either side, including padding. A batch has lines of similar length. For large texts, use
    25000."""

    accumulate: int = 1
    """Number of batches in a step. With more than one, a step can have more tokens than fit into memory at a time."""

    steps: int | None = None
    """Number of training steps. Default: follows from ``epochs``."""

    epochs: float | None = None
    """How many times the text is read. Default: 20."""

    learning_rate: float = 2e-3
    """Peak learning rate. Large models need a lower one (base: 7e-4)."""

    warmup: int = 1000
    """Number of steps in which the learning rate rises. For large models, use 4000."""

    schedule: Literal["linear", "cosine", "wsd", "inverse_sqrt"] = "inverse_sqrt"

    average: int = 5
    """The final model is the mean of this number of last checkpoints, which stay on the disk. With 1 it is the last
    checkpoint itself."""

    every: int | None = None
    """Number of steps between checkpoints, each with a held-out score. Default: a twentieth of the steps."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the arithmetic. bfloat16 is mixed precision, for GPUs and CPUs that are fast at it; the weights stay
    float32."""

    seed: int = 0
    """Seed of the weights, dropout and the order of the text."""

    def checked(self) -> TranslationSettings:
        """Check what can be checked without a model, and return the settings with defaults and canonical options.

        Raises:
            InputError: if a field is invalid; it names the field.
        """
        check_range(self, dropout=(0, 0.9), label_smoothing=(0, 0.9))
        # 4 tokens are at least two of text, the end token, and one to spare.
        check_range(self, vocab_size=(300, MOST_SIZE), max_length=(4, MOST_SIZE), accumulate=(1, MOST_SIZE))
        check_range(self, batch_tokens=(self.max_length, MOST_SIZE), warmup=(0, MOST_COUNT), seed=(0, MOST_SEED))
        check_range(self, **dict.fromkeys(("steps", "average", "every"), (1, MOST_COUNT)))
        check_range(self, **dict.fromkeys(SIZES, (1, MOST_SIZE)))
        check_positive(self, "learning_rate", "epochs")
        if self.steps is not None and self.epochs is not None:
            raise InputError("epochs", "either `steps` or `epochs`")
        return replace(
            self,
            position_options=canonical_options(self.position_options),
            dropout={"small": 0.2, "base": 0.1, "big": 0.3}[self.preset] if self.dropout is None else self.dropout,
            epochs=20.0 if self.epochs is None and self.steps is None else self.epochs,
        )


@dataclass(frozen=True, kw_only=True)
class TranslateTrain(LongRun, TranslationSettings, ValidationData, ParallelData, Study):
    """Train a translation Transformer on parallel text, with any position method.

    The text is two aligned files (--source, --target) or tables (--data, --columns). A subword vocabulary for both
    languages is learned from it. Pairs with a line that is empty or too long are left out and counted.

    The text may be larger than memory: it is encoded once, into cache/, and read from there a pair at a time. Also
    writes model/ (the mean of the last checkpoints, and the tokenizer), results.json, checkpoints/ (the last two, and
    those of the mean) and, unless --report-to says otherwise, tensorboard/. Ctrl-C finishes the current step and saves
    it; the same command then continues and ends with the same weights.
    """

    FLAGS: ClassVar = {"num_attention_heads": "--num-heads", "hidden_dropout_prob": "--dropout"}
    MANY: ClassVar = True
    MAKES_FILES: ClassVar = True

    out: Path = Path("runs/translate")
    """Folder for the model, checkpoints and results."""

    def job(self) -> TranslateJob:
        data = part(self, ParallelData).checked_pairs()
        settings = part(self, TranslationSettings).checked()
        validation = self.parallel(self.columns)
        self.check_threads()
        self.check_report_to()

        from ...lab import ranks
        from .model import build_config
        from .run import TranslateJob

        device = find_device(self.device)
        ranks.join(device)
        # Check the settings before the text is read and encoded, which may take long.
        build_config(settings, settings.vocab_size)
        command = command_line(self, "translate train")
        return TranslateJob(settings, data, validation, device, self.cache, self.threads, self.report_to, command)

    def usage(self) -> str:
        return f"whereformer translate run {self.out / 'model'} < lines.txt"
