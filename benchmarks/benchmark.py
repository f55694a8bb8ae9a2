"""The skeleton of a benchmark: options as in the package's own commands, and results with the machine and the commit.

A benchmark is a dataclass of options that measures in ``measure``, and ends with ``main(TheClass)``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from result_files import write_results
from rich.console import Console

from whereformer.checks import check_choice
from whereformer.cli.exit_codes import exit_on_error
from whereformer.cli.flags import parse
from whereformer.cli.main import execute
from whereformer.lab.recipe import WithPlugin


@dataclass(frozen=True)
class Among:
    """Marks options whose values must be some of a few names."""

    names: Iterable[str]

    def check(self, name: str, values: Iterable[str]) -> None:
        """Raise an InputError for another name."""
        for value in values:
            check_choice(name, value, self.names)


@dataclass(frozen=True, kw_only=True)
class Benchmark(WithPlugin):
    """Options of every benchmark."""

    out: Path
    """JSON file for the results, or folder for results.json."""

    def run(self, console: Console) -> None:
        """Measure, then write the results with the date, the machine, the commit and the versions."""
        torch.set_num_threads(1)
        file = self.out if self.out.suffix == ".json" else self.out / "results.json"
        write_results(file, self.measure(console))
        console.print(f"wrote {file}", highlight=False, soft_wrap=True)

    def measure(self, console: Console) -> Mapping[str, Any]:
        """Measure and print the numbers, and return the results."""
        raise NotImplementedError

    def settings(self, *left_out: str) -> dict[str, Any]:
        """Return the options that decide about the results, as JSON has them: all except ``left_out``."""
        options = {name: value for name, value in asdict(self).items() if name not in (*left_out, "out", "plugin")}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def main(kind: type[Any]) -> None:
    """Read the options from the command line and run; a wrong option is one line, as in ``whereformer``."""
    with exit_on_error(kind):
        command = kind(**parse(kind, sys.argv[1:], sys.argv[0]))
    execute(command)
