"""What ``whereformer pretrain`` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from ..terminal import say


def print_plan(console: Console, text: dict[str, Any], blocks: str, steps: int, plan: dict[str, Any]) -> None:
    """What a pretraining run is about to do: the text, the model and how often it reads the text."""
    lengths = ", ".join(f"{length:,}" for length in plan["block_lengths"])
    lines = (
        f"text: {text['training_tokens']:,} training and {text['held_out_tokens']:,} held-out tokens from "
        f"{text['source']}; guessing by frequency: loss {text['unigram_entropy']:.2f}",
        f"model: {plan['parameters']:,} parameters, of them {plan['embedding_parameters']:,} embeddings of "
        f"{text['vocabulary']:,} tokens and {plan['positional_parameters']:,} of position; "
        f"blocks {blocks} of {lengths} tokens",
        f"training: {steps:,} steps of {plan['tokens_per_step']:,} tokens; the text is {plan['steps_per_epoch']:,.1f} "
        f"steps long and read {plan['epochs']:,.1f} times",
    )
    say(console, *lines)
