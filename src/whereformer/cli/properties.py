"""``whereformer properties``: Table 1 of the TISA paper, measured."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..errors import InputError
from .compare import Compare

if TYPE_CHECKING:
    from ..experiments.properties.run import Comparison
    from ..experiments.properties.summary import Row


@dataclass(frozen=True)
class Properties:
    """What can each position method do? Table 1 of the TISA paper, measured instead of claimed.

    For every method: is longer text than the trained read as well (inductive), do gradients reach its parameters
    (data-driven), how many are there and how do they grow (parameter efficient), does a common shift of all positions
    change anything (translation invariant), does a chain of operations grow with the length (parallelizable), and is
    what it does to scores a curve over offsets (interpretable)? A tick follows from a stated threshold and stands above
    its number; where it is not the paper's, the output says why.

    Trains a small encoder per method, as `whereformer compare` does (some ten minutes on two cores, almost half
    of them for floater), or takes the models of a finished comparison. Writes results.json, results.md and report.html;
    if it is interrupted, the same command continues with what is missing.
    """

    positions: str | None = None
    """Methods to judge, split by commas; "a+b" uses both at once. Default: every method, or all that --results has."""

    results: Path | None = None
    """The folder of a finished `whereformer compare`, instead of training: its losses and its models."""

    data: tuple[str, ...] = ()
    """Text to train on: files or folders with .txt, .md, .rst, .parquet, .jsonl. Default: the documentation inside
    the running Python."""

    column: str | None = None
    """The text column of Parquet and JSON Lines files, if it isn't "text" or the only one."""

    out: Path = Path("runs/properties")
    """Folder for the results."""

    quick: bool = False
    """A first look in about two minutes; methods have then learned little that longer text could spoil."""

    length: int | None = None
    """Tokens of a training window; longer text has 4 times as many. Default: 64."""

    steps: int | None = None
    """Training steps of each method. Default: 800, with --quick 200."""

    seeds: int | None = None
    """Train with so many seeds; medians decide "inductive", all else is measured on the first. Default: 1."""

    seed: int | None = None
    """The first seed. Default: 0."""

    def run(self, console: Console) -> None:
        """Do it."""
        from ..experiments.properties import run as properties
        from ..runs.folder import open_folder
        from .terminal import Bar, print_properties

        names = self._names()
        for name in ("data", "column", "quick", "length", "steps", "seeds", "seed"):
            if self.results is not None and getattr(self, name) not in (None, (), False):
                raise InputError(name, "only without `results`, which is trained already")
        with ExitStack() as stack:
            if self.results is None:
                comparison, names = self._train(console, names, stack)
            else:
                with console.status("reading the comparison and its text"):
                    comparison, names = properties.load_comparison(self.results, names)
                stack.enter_context(open_folder(self.out))
            results = properties.Results(self.out, comparison)
            with Bar(console) as progress:
                properties.run(results, names, progress)
            rows = results.finish(names)
            print_properties(console, rows)
            self._write(console, results.data, rows)

    def _names(self) -> list[str] | None:
        if self.positions is None:
            return None
        from ..experiments.compare.run import BASELINE
        from ..experiments.settings import listed

        names = ["".join(name.split()) for name in listed("positions", self.positions)]
        if BASELINE in names:
            raise InputError("positions", f"{BASELINE!r} has no properties; it is what the others are compared with")
        return names

    def _train(self, console: Console, names: list[str] | None, stack: ExitStack) -> tuple[Comparison, list[str]]:
        """A comparison of its own, within the output folder."""
        import torch

        from ..data import corpus
        from ..data.masks import HeldOut
        from ..experiments.compare import run as compare
        from ..experiments.properties import run as properties
        from ..positions import position_names
        from ..runs.folder import open_folder
        from .terminal import Bar

        given: dict[str, Any] = {name: getattr(self, name) for name in ("length", "seeds", "seed")}
        default = properties.QUICK_STEPS if self.quick else properties.DEFAULT_STEPS
        job = Compare(
            steps=default if self.steps is None else self.steps,
            **{name: value for name, value in given.items() if value is not None},
        )
        sizes = job.sizes()
        chosen = names or [name for name in position_names() if name != compare.BASELINE]
        chosen = compare.check_positions(chosen, sizes)
        stack.enter_context(open_folder(self.out))
        folder = self.out / "comparison"
        stack.enter_context(open_folder(folder))
        with console.status("reading the text and training a tokenizer"):
            documents = corpus.documents_of(self.data, self.column)
            results = compare.Results(folder, sizes, corpus.fingerprint(documents), "cpu")
            text = compare.prepare_text(documents, sizes, self.data, self.column, folder)
        seeds = range(job.seed, job.seed + job.seeds)
        with Bar(console) as progress:
            compare.run(
                results,
                sizes,
                [compare.BASELINE, *chosen],
                seeds,
                text,
                torch.device("cpu"),
                progress,
                speed=False,
            )
        held_out = HeldOut(text.held_out, compare.HELD_OUT_RATE, text.vocab_size)
        return properties.Comparison(folder, results.data, held_out), chosen

    def _write(self, console: Console, data: dict[str, Any], rows: list[Row]) -> None:
        """The table as text and as a page."""
        from ..experiments.properties import report
        from ..files import write_atomically
        from .terminal import say

        files = {"results.md": report.build_markdown(data, rows), "report.html": report.build_report(data, rows)}
        for name, text in files.items():
            write_atomically(self.out / name, text)
        written = " and ".join(str(self.out / name) for name in ("results.json", "results.md"))
        say(console, f"wrote {self.out / 'report.html'} (open it in a browser), {written}")
