"""The settings of a pretraining: model and training. Importing them is fast, so that --help is."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import InputError, shown
from ...lab.options import MOST_COUNT, MOST_SEED, MOST_SIZE, check_positive, check_range
from .schedule import SHORTEST, Stage, parsed_lengths, stages_of


def parsed_options(text: str | None, field: str = "position_options") -> dict[str, Any]:
    """Parse a position method's options, a JSON object.

    Raises:
        InputError: if the text is not a JSON object; it names the field.
    """
    try:
        options = json.loads(text or "{}")
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise InputError(field, f"expected a JSON object such as '{{\"num_kernels\": 3}}', got {shown(text)}")
    return options


def canonical_options(text: str | None) -> str | None:
    """Return the options in one canonical form, so that they can be compared with a folder's settings."""
    return None if text is None else json.dumps(parsed_options(text), sort_keys=True)


@dataclass(frozen=True)
class ModelSettings:
    """The encoder and its objective."""

    objective: Literal["mlm", "electra"] = "mlm"
    """mlm: predict the masked tokens. electra: a small generator predicts them, and the encoder learns to tell which
    tokens were replaced."""

    preset: Literal["bert", "albert", "electra", "funnel", "modernbert", "neobert"] | None = None
    """Norms, activation, biases, positions and windows of a published model, and how its layers are shared or pooled.
    Sizes are not the published ones, and other options win. Default: a BERT that normalizes before its layers."""

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

    def resolved(self) -> ModelSettings:
        """Check what can be checked without a model, and return the settings with defaults in place of None.

        Raises:
            InputError: if a field is invalid; it names the field.
        """
        check_range(self, **dict.fromkeys(("hidden_size", "embedding_size", "num_heads"), (1, MOST_SIZE)))
        check_range(self, dropout=(0, 0.9))
        options = canonical_options(self.position_options)
        defaults: dict[str, Any] = {"blocks": "4", "position": "tisa", "norm": "pre"}
        if self.preset is not None:
            from ...models.presets import PRESETS

            defaults = {**defaults, "position": "learned", "norm": "post", **PRESETS[self.preset]}
        filled = {name: defaults[name] for name in ("blocks", "position", "norm") if getattr(self, name) is None}
        self = dataclasses.replace(self, position_options=options, **filled)
        decoder = self.decoder_layers
        funnel = "-" in str(self.blocks)
        if decoder is None:
            decoder = "2" if funnel else "0"
        elif funnel and decoder == "0":
            raise InputError(
                "decoder_layers",
                f"expected at least 1, got 0: blocks {self.blocks!r} shorten the sequence, "
                "and pretraining predicts at every token",
            )
        if self.objective == "electra":
            # A generator wider than the discriminator would leave it nothing to learn.
            check_range(self, generator_size=(0.01, 1), discriminator_weight=(0, 1e6))
            size = 0.25 if self.generator_size is None else self.generator_size
            weight = 50.0 if self.discriminator_weight is None else self.discriminator_weight
            return dataclasses.replace(
                self,
                decoder_layers=decoder,
                generator_size=size,
                discriminator_weight=weight,
            )
        for name in ("generator_size", "discriminator_weight"):
            if getattr(self, name) is not None:
                raise InputError(name, f"only for `objective` electra, got {self.objective}")
        return dataclasses.replace(self, decoder_layers=decoder)


@dataclass(frozen=True)
class PretrainTraining:
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
    """Peak of the learning rate. Large models need a lower one (BERT: 1e-4)."""

    warmup: int | None = None
    """Number of steps in which the learning rate rises; after that it falls to zero. Default: a tenth of the steps."""

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

    def resolved(self, objective: str) -> PretrainTraining:
        """Check the settings and return them, with defaults in place of None.

        Raises:
            InputError: if a field is invalid; it names the field.
        """
        if self.length is not None and self.lengths is not None:
            raise InputError("lengths", f"only without `length`, got {self.lengths!r} and {self.length}")
        check_range(self, length=(SHORTEST, MOST_SIZE), batch_size=(1, MOST_SIZE), accumulate=(1, MOST_SIZE))
        check_range(self, steps=(1, MOST_COUNT), seed=(0, MOST_SEED))
        check_range(self, warmup=(0, self.steps))
        check_positive(self, "learning_rate")
        if not 0 < self.mask_rate < 1:
            raise InputError("mask_rate", f"expected a share between 0 and 1, got {self.mask_rate}")
        if self.hide_masked and objective != "mlm":
            raise InputError(
                "hide_masked", f"only for `objective` mlm, got {objective}, which sees samples instead of [MASK]"
            )
        lengths, length = None, 128 if self.length is None else self.length
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
        """Return the stages of training, in order; the settings must be resolved.

        Raises:
            InputError: if a length gets no step.
        """
        assert self.length is not None
        lengths = [(self.length, 1.0)] if self.lengths is None else parsed_lengths(self.lengths)
        return stages_of(lengths, self.steps, self.batch_size, self.accumulate)
