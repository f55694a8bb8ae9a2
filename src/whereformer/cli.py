"""The command line: parse, call, print. Bad input gives one line (or the parser's own box) and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from . import __version__
from .errors import InputError


@dataclass(frozen=True)
class Compare:
    """Which position method suits your text? Trains the same small encoder once per method and compares.

    By default the text is the documentation inside the running Python: about 2 MB, nothing is downloaded. All methods
    start from the same weights and see the same batches and masks, so that only position differs. Writes report.html
    (open it in a browser) and results.json. If it is interrupted, the same command continues with what is missing.
    """

    positions: Annotated[str | None, tyro.conf.arg(metavar="A,B,C+D")] = None
    """Methods to compare, split by commas; "a+b" uses both at once, "all" takes every method. Default: none,
    sinusoidal, learned, rope, t5, shaw, tisa, learned+tisa (with --quick: none, learned, rope, tisa)."""

    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATH [PATH ...]")] = ()
    """Text to train on: files or folders with .txt, .md, .rst, .parquet, .jsonl."""

    column: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """The text column of Parquet and JSON Lines files, if it isn't "text" or the only one."""

    out: Path = Path("runs/compare")
    """Folder for the results."""

    quick: bool = False
    """A first look in about a minute: fewer methods and steps; too few for small differences."""

    blocks: str = "4"
    """Layers: "4" are four, "1x4" is one layer used four times."""

    length: int = 64
    """Tokens of a training window. Held-out text is judged at this length and at 2 and 4 times it."""

    steps: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Training steps of each method. Default: 2400, with --quick 400."""

    seeds: int = 1
    """Repeat everything with so many seeds; the table then shows medians and ranges."""

    seed: int = 0
    """The first seed."""

    batch_size: int = 16
    """Windows of a training step."""

    hidden_size: int = 64
    """Width of the encoder."""

    num_heads: int = 2
    """Attention heads; they must divide the width."""

    vocab_size: int = 1024
    """Size of the WordPiece vocabulary that is trained on the text."""

    mask_rate: float = 0.4
    """Share of tokens to predict in training. Held-out text always has 15%."""

    learning_rate: float = 8e-3
    """The learning rate's peak."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; "auto" takes a GPU if there is one."""

    def run(self, console: Console) -> None:
        """Do it."""
        import torch

        from .positions import position_names
        from .report import write_report
        from .tasks import compare, corpus, ranking
        from .terminal import Bar, print_ranking

        self._check()
        names: Sequence[str] = compare.QUICK_POSITIONS if self.quick else compare.DEFAULT_POSITIONS
        if self.positions is not None:
            names = position_names() if self.positions == "all" else self.positions.split(",")
        sizes = compare.Sizes(
            blocks=self.blocks,
            length=self.length,
            steps=self.steps or (compare.QUICK_STEPS if self.quick else compare.DEFAULT_STEPS),
            batch_size=self.batch_size,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            vocab_size=self.vocab_size,
            mask_rate=self.mask_rate,
            learning_rate=self.learning_rate,
        )
        names = compare.check_positions(names, sizes)
        device = torch.device(self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
        with compare.open_folder(self.out):
            with console.status("reading the text and training a tokenizer"):
                documents = corpus.load_documents(self.data, self.column) if self.data else corpus.default_documents()
                results = compare.Results(self.out, sizes, corpus.fingerprint(documents), device.type)
                text = compare.prepare_text(documents, sizes, self.data, self.column, self.out)
            console.print(
                f"{text.facts['training_tokens']:,} training and {text.facts['held_out_tokens']:,} held-out tokens "
                f"from {text.facts['source']}; guessing by frequency: loss {text.facts['unigram_entropy']:.2f}",
                highlight=False,
            )
            with Bar(console) as progress:
                compare.run(results, sizes, names, range(self.seed, self.seed + self.seeds), text, device, progress)
            rows = ranking.rank(results.data)
            report = self.out / "report.html"
            write_report(results.data, report)
            print_ranking(console, rows, self.length)
            console.print(ranking.verdict(rows, results.data), style="bold", highlight=False)
            console.print(f"wrote {report} (open it in a browser) and {results.path}", highlight=False, soft_wrap=True)

    def _check(self) -> None:
        import torch

        from .models import parse_blocks

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
                raise InputError(f"--{name.replace('_', '-')}: expected at least {smallest}, got {value}")
        if self.hidden_size % self.num_heads:
            raise InputError(f"--num-heads: {self.num_heads} heads do not divide hidden_size {self.hidden_size}")
        try:
            pooled = len(parse_blocks(self.blocks)) > 1
        except ValueError as error:
            raise InputError(f"--{error}") from None
        if pooled:
            raise InputError(f"--blocks: expected one block as '4' or '1x4', got {self.blocks!r}; pooling comes later")
        if not 0 < self.mask_rate < 1:
            raise InputError(f"--mask-rate: expected a share between 0 and 1, got {self.mask_rate}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError("--device: expected cpu or auto, got cuda, which torch does not find here")
        if not 0 < self.learning_rate < float("inf"):
            raise InputError(f"--learning-rate: expected a positive number, got {self.learning_rate}")


@dataclass(frozen=True)
class ListPositions:
    """List the position methods, and the options that each takes from Python."""

    def run(self, console: Console) -> None:
        """Do it."""
        from rich.table import Table

        from .positions import describe, position_names

        table = Table("name", "what it is", "options", show_edge=False)
        for name in position_names():
            summary, options = describe(name)
            table.add_row(name, summary, ", ".join(options))
        console.print(table)
        console.print("Join several by '+': learned+tisa, tupe+t5.")


COMMANDS: dict[str, Callable[..., Any]] = {"compare": Compare, "positions": ListPositions}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the ``whereformer`` command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        print(f"whereformer {__version__}")
        return
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="whereformer",
        description="Where a token is, as a swappable, inspectable, fast part of self-attention.",
        args=given,
    )
    try:
        # Without markup, because paths may hold brackets.
        command.run(Console(markup=False, width=None if sys.stdout.isatty() else 100))
    except (InputError, OSError) as error:
        raise SystemExit(_fail(str(error))) from None
    except KeyboardInterrupt:
        raise SystemExit(_fail("interrupted; what is finished is kept, the same command continues", 130)) from None


def _fail(message: str, code: int = 2) -> int:
    """Print one line to stderr and give the exit code back: 2 for bad input."""
    print(f"whereformer: {' '.join(message.split())}", file=sys.stderr)
    return code
