"""How fast is a translation model's training step with each position method, relative to sinusoidal positions?

Run: .venv/bin/python benchmarks/translation_speed.py [--methods shaw,rope] [--lengths 16,32] [--dtype bfloat16]

Shaw et al. (2018) trained at 7% fewer steps per second than sinusoidal positions. All methods take the same steps
(forward, loss, backward, update) on the same batches of the small preset by turns, on one thread; ratios are within
rounds, because the machine may be shared. ``shaw`` has vectors for keys and values, clipped at 16. Then the same for a
step of decoding, when so many tokens are written and kept in the cache. Writes results.json.
"""

from __future__ import annotations

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
from transformers import DynamicCache, EncoderDecoderCache

from whereformer import Seq2SeqConfig, Seq2SeqForConditionalGeneration, position_names
from whereformer.cli.arguments import split
from whereformer.cli.main import execute
from whereformer.errors import InputError
from whereformer.experiments.translate.examples import collate
from whereformer.runs.provenance import write_results
from whereformer.training.optimizer import build_optimizer

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
    """Position methods; "all" takes every one, and shaw with keys only and with clips of 4 and 2."""
    lengths: Annotated[str, tyro.conf.arg(metavar="N,N")] = "16,32"
    """Median tokens of a line; a batch has lines of nearly that length, as buckets have."""
    written: str = "16,128,1024"
    """Tokens of a line that are written already, in decoding."""
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
        lengths, written = self._numbers("lengths"), self._numbers("written")
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

    def _numbers(self, option: str) -> list[int]:
        texts = split(option, getattr(self, option))
        if not all(text.isdecimal() and int(text) for text in texts):
            raise InputError(f"--{option}: expected numbers, got {getattr(self, option)!r}")
        return [int(text) for text in texts]

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

    def _decoding_step(self, model: Seq2SeqForConditionalGeneration, written: int) -> Callable[[], object]:
        """The next token of four lines, always the same one."""
        generator = torch.Generator().manual_seed(written)
        source, target = (torch.randint(3, self.vocab_size, (4, n), generator=generator) for n in (16, written))
        cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
        with torch.no_grad():
            read = model(input_ids=source, decoder_input_ids=target, past_key_values=cache, use_cache=True)

        @torch.no_grad()
        def step() -> None:
            model(
                encoder_outputs=(read.encoder_last_hidden_state,),
                decoder_input_ids=target[:, -1:],
                past_key_values=cache,
                use_cache=True,
            )
            cache.self_attention_cache.crop(-1)

        return step

    def _print(self, console: Console, title: str, found: dict[str, Times]) -> None:
        table = Table("", "ms a step", "steps/s by sinusoidal's", "rounds", title=title)
        for name, times in found.items():
            spread = f"{1 / times.highest:.2f}-{1 / times.lowest:.2f}"
            table.add_row(name, f"{1000 * times.seconds:.1f}", f"{1 / times.ratio:.3f}", spread)
        console.print(table)


if __name__ == "__main__":
    execute(tyro.cli(Speed))
