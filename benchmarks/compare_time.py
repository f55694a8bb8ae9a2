"""How many steps does ``whereformer compare`` take in the time that another version needs? Both run in turns.

Run: .venv/bin/python benchmarks/compare_time.py --before ../older/src [--steps 1800] [--positions none,rope,shaw,tisa]

Each version compares the methods in a process of its own, in a folder that is empty at first. The processor's time
counts, for all that belongs to a comparison: reading the text, trying learning rates, training and judging. Others on
the machine disturb it less than the time that passes.

Prints the time of each round, and the steps in today's time: the ratio of the medians.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from whereformer.provenance import write_results

AFTER = Path(__file__).parent.parent / "src"


@dataclass(frozen=True)
class CompareTime:
    """Time comparisons of two versions."""

    before: Path
    """The src folder of the other version, with its compiled kernel."""
    steps: int = 1800
    """Steps of each method."""
    positions: Annotated[str, tyro.conf.arg(metavar="A,B")] = "none,rope,shaw,tisa"
    """The methods."""
    rounds: int = 3
    """Comparisons of each version."""
    options: Annotated[str, tyro.conf.arg(metavar="JSON")] = "{}"
    """More options of whereformer.compare, such as '{"causal": true}'."""
    out: Path = Path("runs/compare_time.json")
    """The file for the results."""

    def run(self, console: Console) -> None:
        """Run the comparisons, print their times and write the results."""
        times: dict[str, list[float]] = {"before": [], "after": []}
        for number in range(1, self.rounds + 1):
            for name, source in (("before", self.before), ("after", AFTER)):
                times[name].append(self._seconds(source))
                console.print(f"round {number}, {name}: {times[name][-1]:.1f} s")
        ratio = statistics.median(times["before"]) / statistics.median(times["after"])
        console.print(f"{ratio:.2f} times the steps in the same time")
        settings = {"steps": self.steps, "positions": self.positions, "options": json.loads(self.options)}
        write_results(self.out, {"settings": settings, "seconds": times, "ratio": ratio})

    def _seconds(self, source: Path) -> float:
        """Return the processor's time for one comparison by the version in a folder."""
        options = {"positions": self.positions, "steps": self.steps, **json.loads(self.options)}
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        with tempfile.TemporaryDirectory() as folder:
            code = f"import whereformer; whereformer.compare(**{options!r}, out={folder + '/compare'!r})"
            program = f"if __name__ == '__main__':\n    {code}\n"
            script = Path(folder) / "run.py"
            script.write_text(program)
            environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
            subprocess.run([sys.executable, script], env=environment, check=True, stdout=subprocess.DEVNULL)
        done = resource.getrusage(resource.RUSAGE_CHILDREN)
        return done.ru_utime + done.ru_stime - used.ru_utime - used.ru_stime


if __name__ == "__main__":
    tyro.cli(CompareTime).run(Console())
