"""Time a translation model's training and decoding with each position method, relative to sinusoidal positions.

Run: .venv/bin/python benchmarks/translation_speed.py [--methods shaw,rope] [--lengths 16,32] [--dtype bfloat16]

Shaw et al. (2018) report 7% fewer training steps per second than with sinusoidal positions. Here, all methods take the
same steps (forward, loss, backward, update) on the same batches, with the small preset, in turns, on one thread. Ratios
are taken within rounds, because the machine may be shared. ``shaw`` has vectors for keys and values, clipped at 16.
Then decoding steps are timed, with a given number of tokens already written and cached. Writes results.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from lists import listed, listed_numbers
from rich.console import Console
from rich.table import Table
from side_by_side import Times, time_by_turns
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from whereformer import Seq2SeqConfig, Seq2SeqForConditionalGeneration, position_names
from whereformer.cli.main import execute
from whereformer.data.parallel import collate
from whereformer.lab.optimizer import build_optimizer
from whereformer.models.inputs import CACHE
from whereformer.provenance import write_results

BASELINE = "sinusoidal"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "shaw": ("shaw", {"clip": 16}),
    "shaw-keys": ("shaw", {"clip": 16, "values": False}),
    "shaw-clip-4": ("shaw", {"clip": 4}),
    "shaw-clip-2": ("shaw", {"clip": 2}),
}
"""Names that stand for a method with options."""


@dataclass(frozen=True)
class Speed:
    """Measure training steps per second with each position method, relative to sinusoidal positions."""

    methods: Annotated[str, tyro.conf.arg(metavar="A,B")] = "all"
    """Position methods. "all" means every method, and also shaw with keys only and with clips of 4 and 2."""
    lengths: Annotated[str, tyro.conf.arg(metavar="N,N")] = "16,32"
    """Median tokens in a line. A batch has lines of about that length, as a bucket does."""
    written: str = "16,128,1024"
    """Tokens of a line that are already written, in decoding."""
    batch_tokens: int = 2048
    """Tokens in a batch on either side, including padding."""
    preset: Literal["small", "base", "big"] = "small"
    """Size of the model."""
    vocab_size: int = 8000
    """Size of the vocabulary."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """float32, or bfloat16 for mixed precision."""
    rounds: int = 9
    """Number of rounds that count. One more comes first."""
    out: Path = Path("runs/translation_speed")
    """Folder for results.json."""

    def run(self, console: Console) -> None:
        torch.set_num_threads(1)
        known = [*VARIANTS, *(name for name in position_names() if name not in VARIANTS)]
        names = known if self.methods == "all" else listed("methods", self.methods, known)
        names = [BASELINE, *(name for name in names if name != BASELINE)]
        lengths, written = (listed_numbers(name, getattr(self, name), 1, 2**20) for name in ("lengths", "written"))
        models = {name: self._model(name, max(128, *written) + 1) for name in names}
        training, decoding = {}, {}
        for length in lengths:
            batch = self._batch(length)
            steps = {name: self._step(model.train(), batch) for name, model in models.items()}
            training[length] = time_by_turns(steps, models, self.rounds, BASELINE)
            self._print(console, f"training, about {length} tokens a line", training[length])
        for length in written:
            steps = {name: self._decoding_step(model.eval(), length) for name, model in models.items()}
            decoding[length] = time_by_turns(steps, models, self.rounds, BASELINE)
            self._print(console, f"decoding, {length} tokens written", decoding[length])
        settings = {name: value for name, value in asdict(self).items() if name != "out"}
        results = {
            "settings": settings,
            "training": self._as_json(training),
            "decoding": self._as_json(decoding),
        }
        write_results(self.out / "results.json", results)
        console.print(f"wrote {self.out / 'results.json'}", highlight=False)

    def _as_json(self, found: dict[int, dict[str, Times]]) -> dict[str, Any]:
        return {
            str(length): {
                name: {"steps_per_second_by_sinusoidals": round(1 / times.ratio, 4), **asdict(times)}
                for name, times in each.items()
            }
            for length, each in found.items()
        }

    def _model(self, name: str, longest: int) -> Seq2SeqForConditionalGeneration:
        position, options = VARIANTS.get(name, (name, {}))
        torch.manual_seed(0)
        config = Seq2SeqConfig.preset(
            self.preset,
            vocab_size=self.vocab_size,
            position=position,
            position_options=options,
            max_position_embeddings=longest,
        )
        return Seq2SeqForConditionalGeneration(config)

    def _batch(self, length: int) -> dict[str, Tensor]:
        """Return pairs of lines whose lengths differ a little, as in a bucket."""
        generator = torch.Generator().manual_seed(length)
        widest = length + max(1, length // 16)
        rows = []
        for _ in range(self.batch_tokens // widest):
            sizes = torch.randint(length - max(1, length // 16), widest + 1, (2,), generator=generator).tolist()
            rows.append(tuple(torch.randint(3, self.vocab_size, (size,), generator=generator) for size in sizes))
        return collate(rows)

    def _step(self, model: Seq2SeqForConditionalGeneration, batch: dict[str, Tensor]) -> Callable[[], object]:
        # The rate is so small that nothing is learned, so batches do not affect each other.
        optimizer = build_optimizer(model, 1e-9)

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bfloat16"):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()

        return step

    def _decoding_step(self, model: Seq2SeqForConditionalGeneration, written: int) -> Callable[[], object]:
        """Return a step that decodes the next token of four lines, always the same token."""
        generator = torch.Generator().manual_seed(written)
        source, target = (torch.randint(3, self.vocab_size, (4, n), generator=generator) for n in (16, written))
        cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
        with torch.no_grad():
            read = model(input_ids=source, decoder_input_ids=target, **{CACHE: cache}, use_cache=True)

        @torch.no_grad()
        def step() -> None:
            model(
                encoder_outputs=(read.encoder_last_hidden_state,),
                decoder_input_ids=target[:, -1:],
                **{CACHE: cache},
                use_cache=True,
            )
            cache.self_attention_cache.crop(-1)

        return step

    def _print(self, console: Console, title: str, found: dict[str, Times]) -> None:
        table = Table("", "ms per step", "steps/s / sinusoidal's", "rounds", title=title)
        for name, times in found.items():
            spread = f"{1 / times.highest:.2f}-{1 / times.lowest:.2f}"
            table.add_row(name, f"{1000 * times.seconds:.1f}", f"{1 / times.ratio:.3f}", spread)
        console.print(table)


if __name__ == "__main__":
    execute(tyro.cli(Speed))
