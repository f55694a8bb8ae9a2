"""What ``whereformer translate`` prints."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..terminal import say


def print_translation_plan(console: Console, text: dict[str, Any], plan: dict[str, Any], max_length: int) -> None:
    """What a translation training is about to do: the text, the model and how often it reads the text."""
    lines = []
    for name, part in (("training", text["training"]), ("held-out", text["held_out"])):
        left_out = [
            f"{part[kind]:,} {told}"
            for kind, told in (("empty", "with an empty line"), ("too_long", f"of more than {max_length} tokens"))
            if part[kind]
        ]
        lines.append(
            f"{name}: {part['pairs']:,} pairs, {part['source_tokens']:,} and {part['target_tokens']:,} tokens, a line "
            f"at most {part['longest']}" + (f"; left out: {', '.join(left_out)}" if left_out else "")
        )
    say(
        console,
        *lines,
        f"model: {plan['parameters']:,} parameters, of them {plan['embedding_parameters']:,} embeddings of "
        f"{text['vocabulary']:,} tokens and {plan['positional_parameters']:,} of position",
        f"training: {plan['steps']:,} steps of about {plan['tokens_per_step']:,} tokens; the text is "
        f"{plan['steps_per_epoch']:,.1f} steps long and read {plan['epochs']:,.1f} times",
    )


def print_scores(console: Console, found: dict[str, Any]) -> None:
    """BLEU, chrF and BLEU by length."""
    table = Table("words of the source", box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("lines", "BLEU"):
        table.add_column(title, justify="right")
    for part in found["bleu_by_words"]:
        words = f"{part['from']} and more" if part["to"] is None else f"{part['from'] or 'up'} to {part['to']}"
        table.add_row(words, f"{part['lines']:,}", f"{part['bleu']:.1f}")
    console.print(table)
    say(
        console,
        f"BLEU {found['bleu']:.2f} ({found['bleu_signature']}), lengths {found['length_ratio']:.3f} of the references'",
        f"chrF {found['chrf']:.2f} ({found['chrf_signature']})",
    )
