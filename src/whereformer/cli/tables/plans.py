"""Print the plans that ``whereformer pretrain`` and ``whereformer translate train`` show before they start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from ...lab.terminal import say

if TYPE_CHECKING:
    from ...lab.training.results import TrainingPlan
    from ...lab.training.text import TextFacts
    from ...studies.pretrain.results import PretrainPlan
    from ...studies.pretrain.schedule import Stage
    from ...studies.translate.results import TranslationFacts, TranslationPlan


def print_plan(console: Console, text: TextFacts, blocks: str, stages: Sequence[Stage], plan: PretrainPlan) -> None:
    """Print the plan of a pretraining: the text, the model and how many times it reads the text."""
    lengths = ", ".join(f"{length:,}" for length in plan.block_lengths)
    lines = (
        f"text: {text.training_tokens:,} training and {text.held_out_tokens:,} held-out tokens from "
        f"{text.source}; guessing by frequency: loss {text.unigram_entropy:.2f}",
        f"{_model_size(plan, text.vocabulary)}; blocks {blocks} of {lengths} tokens",
        f"training: {sum(stage.steps for stage in stages):,} steps of {plan.tokens_per_step:,} tokens; {_passes(plan)}",
    )
    say(console, *lines)
    step = 0
    for stage in stages if len(stages) > 1 else ():
        say(
            console,
            f"steps {step + 1:,} to {step + stage.steps:,}: {stage.rows_per_step:,} windows of {stage.length:,} tokens",
        )
        step += stage.steps


def print_translation_plan(console: Console, text: TranslationFacts, plan: TranslationPlan, max_length: int) -> None:
    """Print the plan of a translation training: the text, the model and how many times it reads the text."""
    lines = []
    for name, part in (("training", text.training), ("held-out", text.held_out)):
        left_out = [
            f"{count:,} {why}"
            for count, why in (
                (part.empty, "with an empty line"),
                (part.too_long, f"of more than {max_length} tokens"),
            )
            if count
        ]
        lines.append(
            f"{name}: {part.pairs:,} pairs, {part.source_tokens:,} and {part.target_tokens:,} tokens, at most "
            f"{part.longest} per line" + (f"; left out: {', '.join(left_out)}" if left_out else "")
        )
    say(
        console,
        *lines,
        _model_size(plan, text.vocabulary),
        f"training: {plan.steps:,} steps of about {plan.tokens_per_step:,} tokens; {_passes(plan)}",
    )


def _model_size(plan: TrainingPlan, vocabulary: int) -> str:
    return (
        f"model: {plan.parameters:,} parameters, including {plan.embedding_parameters:,} for embeddings of "
        f"{vocabulary:,} tokens and {plan.positional_parameters:,} for position"
    )


def _passes(plan: TrainingPlan) -> str:
    return f"the text takes {plan.steps_per_epoch:,.1f} steps and is read {plan.epochs:,.1f} times"
