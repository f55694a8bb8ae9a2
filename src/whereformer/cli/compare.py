"""``whereformer compare``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from rich.console import Console

from ..errors import InputError
from .arguments import find_device

if TYPE_CHECKING:
    from ..experiments.compare.results import Sizes


@dataclass(frozen=True)
class Compare:
    """Which position method suits your text? Trains the same small encoder once per method and compares.

    Without --data, the text is the documentation that comes with Python: about 2 MB, and nothing is downloaded. All
    methods start from the same weights and see the same batches and masks, so that they differ in position alone.

    Writes report.html (open it in a browser), results.json and the trained models (models/METHOD-SEED, for
    EncoderForMaskedLM.from_pretrained). After an interruption, the same command does the runs that are missing.
    """

    FLAGS: ClassVar = {"num_attention_heads": "--num-heads"}

    positions: str | None = None
    """Methods to compare, separated by commas. "a+b" uses both at once; "all" stands for every method. Default: none,
    sinusoidal, learned, rope, t5, shaw, tisa, learned+tisa (with --quick: none, learned, rope, tisa)."""

    data: tuple[str, ...] = ()
    """Text to train on: files or folders with .txt, .md, .rst, .parquet, .jsonl. Default: the documentation that comes
    with Python."""

    column: str | None = None
    """The column of Parquet and JSON Lines files that holds the text. Default: "text", or the only column of text."""

    out: Path = Path("runs/compare")
    """Folder for the results."""

    quick: bool = False
    """Take a first look in about a minute, with fewer methods and steps. Small differences will not show."""

    blocks: str = "4"
    """Layers: "4" is four layers, "1x4" one layer used four times, and "2-2" a funnel that halves the sequence between
    its two blocks."""

    decoder_layers: str | None = None
    """Layers at full length after the blocks of a funnel. Default: 1 for a funnel, otherwise 0."""

    length: int = 64
    """Tokens in a training window. Held-out text is judged at this length, twice and four times it."""

    steps: int | None = None
    """Training steps of each method. Default: 2400, with --quick 400."""

    seeds: int = 1
    """Number of seeds to repeat everything with. With several, the table shows medians and ranges."""

    seed: int = 0
    """The first seed."""

    batch_size: int = 16
    """Windows in a training step."""

    hidden_size: int = 64
    """Width of the encoder."""

    num_heads: int = 2
    """Number of attention heads. It must divide the width."""

    vocab_size: int = 1024
    """Size of the WordPiece vocabulary, which is learned from the text."""

    mask_rate: float = 0.4
    """Share of tokens that are masked in training. In held-out text it is always 15%."""

    learning_rate: float = 8e-3
    """Peak of the learning rate."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train. "auto" is a GPU if there is one."""

    def run(self, console: Console) -> None:
        """Train, judge and time every method, then print the ranking and write the report."""
        from ..experiments.compare.prepare import Source, check_positions, prepare_job
        from ..experiments.compare.ranking import rank
        from ..experiments.compare.report import write_report
        from ..experiments.compare.run import DEFAULT_POSITIONS, QUICK_POSITIONS, compare
        from ..positions import position_names
        from ..runs.folder import open_folder
        from .tables.compare import print_ranking
        from .terminal import Bar, say

        names: Sequence[str] = QUICK_POSITIONS if self.quick else DEFAULT_POSITIONS
        if self.positions is not None:
            names = position_names() if self.positions == "all" else self.positions.split(",")
        sizes = self.sizes()
        names = check_positions(names, sizes)
        device = find_device(self.device)
        seeds = range(self.seed, self.seed + self.seeds)
        with open_folder(self.out):
            with console.status("reading the text and training a tokenizer"):
                job = prepare_job(Source(self.data, self.column), sizes, names, seeds, device, self.out)
            text = job.text.facts
            console.print(
                f"{text.training_tokens:,} training and {text.held_out_tokens:,} held-out tokens from {text.source}; "
                f"guessing by frequency: loss {text.unigram_entropy:.2f}",
                highlight=False,
            )
            with Bar(console) as progress:
                results = compare(job, self.out, progress)
            ranking = rank(results)
            report = self.out / "report.html"
            write_report(results, ranking, report)
            print_ranking(console, ranking.rows, self.length, "CPU time" if device.type == "cpu" else "time")
            console.print(ranking.verdict, style="bold", highlight=False)
            say(console, f"wrote {report} (open it in a browser) and {self.out / 'results.json'}")

    def sizes(self) -> Sizes:
        """All that decides a result besides text, method and seed.

        Raises:
            InputError: for an option out of range.
        """
        from ..experiments.compare.results import Sizes
        from ..experiments.compare.run import DEFAULT_STEPS, QUICK_STEPS

        self._check()
        return Sizes(
            blocks=self.blocks,
            decoder_layers=self._decoder_layers(),
            length=self.length,
            steps=self.steps or (QUICK_STEPS if self.quick else DEFAULT_STEPS),
            batch_size=self.batch_size,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            vocab_size=self.vocab_size,
            mask_rate=self.mask_rate,
            learning_rate=self.learning_rate,
        )

    def _decoder_layers(self) -> str:
        if self.decoder_layers is not None:
            return self.decoder_layers
        return "1" if "-" in self.blocks else "0"

    def _check(self) -> None:
        from ..models import EncoderConfig

        least = {
            "length": 8,
            "seeds": 1,
            "seed": 0,
            "batch_size": 1,
            "hidden_size": 1,
            "num_heads": 1,
            "vocab_size": 64,
            "steps": 1,
        }
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise InputError(name, f"expected at least {smallest}, got {value}")
        if self.hidden_size % self.num_heads:
            raise InputError("num_heads", f"{self.num_heads} heads do not divide hidden_size {self.hidden_size}")
        try:
            EncoderConfig(blocks=self.blocks, decoder_layers=self._decoder_layers()).require_full_length()
        except ValueError:
            raise
        if not 0 < self.mask_rate < 1:
            raise InputError("mask_rate", f"expected a share between 0 and 1, got {self.mask_rate}")
        if not 0 < self.learning_rate < float("inf"):
            raise InputError("learning_rate", f"expected a positive number, got {self.learning_rate}")
