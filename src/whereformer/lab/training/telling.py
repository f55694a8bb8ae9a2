"""What commands that train one model say: when it is done, when it was done before, and when it will be slow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from .. import ranks
from ..terminal import say
from .results import TrainingResults

if TYPE_CHECKING:
    import torch

    from .folder import Folder

Kind = TypeVar("Kind", bound=TrainingResults)


def tell_training(console: Console, out: Path, results: TrainingResults, detail: str, *usage: str) -> None:
    """Print the time and the scores of a training, the files that were written, and how to use the model.

    Args:
        console: the terminal.
        out: the run's folder.
        results: the finished training's results.
        detail: what follows the held-out scores on the first line.
        usage: lines that show how to use the model, below an empty one.
    """
    from .judged import score_text

    scores = ", ".join(score_text(name, value) for name, value in results.scores.items())
    took = f"{results.step:,} steps, {results.tokens_seen:,} tokens in {results.seconds:.0f} s"
    wrote = f"wrote {out / 'model'} (model and tokenizer), {out / 'results.json'} and {out / 'checkpoints'}"
    say(console, f"{took}; held-out {scores}{detail}", f"{wrote}\n", *usage)


def tell_slow_dtype(console: Console, dtype: str, device: torch.device) -> None:
    """Say so if the CPU has no instructions for a training in bfloat16, which is then much slower than in float32."""
    from ...kernels.torch_private import multiplies_bfloat16

    if device.type == "cpu" and dtype == "bfloat16" and not multiplies_bfloat16():
        say(console, "note: this processor has no instructions for bfloat16; --dtype float32 is much faster here")


def tell_finished(console: Console, folder: Folder[Kind], tell: Callable[[Console, Kind], None]) -> bool:
    """If a run has finished before, say so and call ``tell`` with its results; return whether it has."""
    results = ranks.from_main(folder.finished)
    if results is None:
        return False
    say(console, f"{folder.path} is already finished; nothing to do")
    tell(console, results)
    return True
