"""How fast is a translation model's training step with each position method, relative to sinusoidal positions?

Run: .venv/bin/python benchmarks/translation_speed.py [--methods shaw,rope] [--lengths 16,32] [--dtype bfloat16]

Shaw et al. (2018) trained at 7% fewer steps per second than sinusoidal positions. All methods take the same steps
(forward, loss, backward, update) on the same batches of the small preset by turns, on one thread; ratios are within
rounds, because the machine may be shared. ``shaw`` has vectors for keys and values, clipped at 16. Writes results.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from side_by_side import Times, time_by_turns
from torch import Tensor

from whereformer import Seq2SeqConfig, Seq2SeqForConditionalGeneration, position_names
from whereformer.cli import execute
from whereformer.commands.arguments import split
from whereformer.errors import InputError
from whereformer.files import write_atomically
from whereformer.tasks.compare import machine
from whereformer.tasks.optimizer import build_optimizer
from whereformer.tasks.translation import collate

BASELINE = "sinusoidal"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "shaw": ("shaw", {"clip": 16}),
    "shaw-keys": ("shaw", {"clip": 16, "values": False}),
    "shaw-clip-4": ("shaw", {"clip": 4}),
    "shaw-clip-2": ("shaw", {"clip": 2}),
}
"""What some names mean: a method and its options."""


@dataclass(frozen=True)
class Speed:
    """Training steps by second with each position method, relative to sinusoidal positions."""

    methods: Annotated[str, tyro.conf.arg(metavar="A,B")] = "all"
    """Position methods; "all" takes every one, and shaw with keys only and with a clip of 2."""
    lengths: Annotated[str, tyro.conf.arg(metavar="N,N")] = "16,32"
    """Median tokens of a line; a batch has lines of nearly that length, as buckets have."""
    batch_tokens: int = 2048
    """Tokens of a batch on either side, padding included."""
    preset: Literal["small", "base", "big"] = "small"
    """Sizes of the model."""
    vocab_size: int = 8000
    """Of the model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: mixed precision."""
    rounds: int = 9
    """How often; one more comes first and does not count."""
    out: Path = Path("runs/translation_speed")
    """Folder for results.json."""

    def run(self, console: Console) -> None:
        torch.set_num_threads(1)
        known = [*VARIANTS, *(name for name in position_names() if name not in VARIANTS)]
        names = known if self.methods == "all" else split("methods", self.methods, known)
        names = [BASELINE, *(name for name in names if name != BASELINE)]
        lengths = [int(text) for text in split("lengths", self.lengths) if text.isdecimal()]
        if not lengths:
            raise InputError(f"--lengths: expected numbers, got {self.lengths!r}")
        models, found = {name: self._model(name) for name in names}, {}
        for length in lengths:
            batch = self._batch(length)
            steps = {name: self._step(model, batch) for name, model in models.items()}
            found[length] = time_by_turns(steps, models, self.rounds, BASELINE)
            self._print(console, length, found[length])
        self.out.mkdir(parents=True, exist_ok=True)
        settings = {name: value for name, value in asdict(self).items() if name != "out"}
        results = {
            "settings": settings,
            "machine": machine(torch.device("cpu")),
            "steps_per_second_by_sinusoidals": {
                str(length): {name: round(1 / times.ratio, 4) for name, times in each.items()}
                for length, each in found.items()
            },
            "times": {str(length): {name: asdict(t) for name, t in each.items()} for length, each in found.items()},
        }
        write_atomically(self.out / "results.json", json.dumps(results, indent=1))
        console.print(f"wrote {self.out / 'results.json'}", highlight=False)

    def _model(self, name: str) -> Seq2SeqForConditionalGeneration:
        position, options = VARIANTS.get(name, (name, {}))
        torch.manual_seed(0)
        config = Seq2SeqConfig.preset(
            self.preset,
            vocab_size=self.vocab_size,
            position=position,
            position_options=options,
            max_position_embeddings=128,
        )
        return Seq2SeqForConditionalGeneration(config).train()

    def _batch(self, length: int) -> dict[str, Tensor]:
        """Pairs of lines whose lengths differ by a little, as in a bucket."""
        generator = torch.Generator().manual_seed(length)
        widest = length + max(1, length // 16)
        rows = []
        for _ in range(self.batch_tokens // widest):
            sizes = torch.randint(length - max(1, length // 16), widest + 1, (2,), generator=generator).tolist()
            rows.append(tuple(torch.randint(3, self.vocab_size, (size,), generator=generator) for size in sizes))
        return collate(rows)

    def _step(self, model: Seq2SeqForConditionalGeneration, batch: dict[str, Tensor]) -> Callable[[], object]:
        # So small a rate that nothing is learned, and no batch becomes another one's lesson.
        optimizer = build_optimizer(model, 1e-9)

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bfloat16"):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()

        return step

    def _print(self, console: Console, length: int, found: dict[str, Times]) -> None:
        table = Table("", "ms a step", "steps/s by sinusoidal's", "rounds", title=f"about {length} tokens a line")
        for name, times in found.items():
            spread = f"{1 / times.highest:.2f}-{1 / times.lowest:.2f}"
            table.add_row(name, f"{1000 * times.seconds:.0f}", f"{1 / times.ratio:.3f}", spread)
        console.print(table)


if __name__ == "__main__":
    execute(tyro.cli(Speed).run)
