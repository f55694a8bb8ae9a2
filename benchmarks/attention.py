"""Time attention with positions against other code that people use today. README's speed figures come from here.

Run: make bench, or: .venv/bin/python benchmarks/attention.py --help

The output and the gradients of every way are first checked against a float64 reference; a wrong way is reported and not
timed. Then all ways take turns on the CPU, and the CPU time of each, in one thread, is divided by the time of torch's
own attention without positions ("sdpa") in the same round. At 1.00 positions cost nothing. "sdpa+bias" is the common
way today: it passes an (n, n) bias to torch's attention. attention_peers.py has the ways of other libraries. "forward"
is without gradients; "training" is forward and backward with all gradients.

results.json has a row for each case and way: the median and the range of its times relative to plain attention, the
milliseconds and peak memory in bytes of a call, the largest relative error in the check, the seconds of each round, and
a note if something is missing. goals.md has a table of the times next to the goals for this processor.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from attention_kinds import DTYPES, KINDS, POSITIONS, Case, make_problem
from attention_peers import PEERS
from attention_ways import FLOOR, TORCH, Way, backend, check, in_a_line, make_step, mean_seconds
from benchmark import Among, Benchmark, main
from goals import write_goals
from peak import peak_of_first_call
from result_files import write_results
from rich.console import Console
from side_by_side import by_turns, summarize

from whereformer.errors import InputError
from whereformer.lab.recipe import Counts, Names
from whereformer.provenance import commit, machine, provenance

LONG = 2048
"""With more tokens than this, the default batch is one sequence."""
KEY = ("terms", "n", "batch", "heads", "head_dim", "dtype", "direction", "way")
"""The columns that identify a measurement; of two rows that have the same ones, the later one counts."""

Row = dict[str, Any]


def measure(case: Case, ways: Sequence[Way], rounds: int) -> list[Row]:
    """Check all ways on a case, and time those that are right, in a changing order."""
    rows: dict[Way, Row] = {}
    steps: dict[Way, Callable[[], object]] = {}
    problem = make_problem(case)
    origin = {"measured": date.today().isoformat(), "commit": commit(), "note": "", "ratio": None}
    for way in (FLOOR, *(way for way in ways if way.does(case.terms))):
        rows[way] = {**vars(case), "way": way.name, **origin}
        error = check(way, case.terms, case.head_dim, case.dtype, case.direction)
        if isinstance(error, str):
            rows[way]["note"] = error
            continue
        rows[way]["error"] = error
        try:
            step = make_step(way, problem)
            step()  # the first call compiles and fills caches
            rows[way]["memory"], steps[way] = peak_of_first_call(step), step
        except Exception as failure:  # another library's failure is also a result
            rows[way]["note"] = in_a_line(failure)
    seconds = by_turns({way: partial(mean_seconds, step) for way, step in steps.items()}, rounds)
    for way, times in summarize(seconds, FLOOR).items():
        rows[way] |= {"ratio": times.ratio, "lowest": times.lowest, "highest": times.highest}
        rows[way] |= {"milliseconds": 1000 * times.seconds, "seconds": seconds[way]}
    return list(rows.values())


def format_row(row: Row) -> str:
    """Return a row as a line: the ratio with its range, the time and the memory, or why there are none."""
    case = f"{row['terms']:9}{row['dtype']:9} n={row['n']:<6}{row['direction']:9}{row['way']:19}"
    if row["ratio"] is None:
        return f"{case}cannot: {row['note']}"
    ratio = f"{row['ratio']:.2f} ({row['lowest']:.2f}-{row['highest']:.2f})"
    return f"{case}{ratio} {row['milliseconds']:9.3g} ms {row['memory'] / 2**20:8.1f} MiB"


def read_rows(file: Path, origin: dict[str, Any]) -> list[Row]:
    """Return the rows that a file of results already has.

    Raises:
        InputError: if they were measured on another machine or with other versions.
    """
    if not file.exists():
        return []
    before = json.loads(file.read_text())
    old, new = ({**results["machine"], **results["versions"]} for results in (before, origin))
    if changed := [name for name in {**old, **new} if old.get(name) != new.get(name)]:
        raise InputError("out", f"{file} has results with another {', '.join(changed)}; choose another folder")
    return list(before["rows"])


def folder_of(facts: dict[str, Any]) -> Path:
    """Return the folder for a machine's results."""
    name = f"{facts['cpu']} {os.cpu_count()} cores {facts['instructions']}"
    return Path(__file__).parent / "results" / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@dataclass(frozen=True, kw_only=True)
class Attention(Benchmark):
    """Time attention with positions in whereformer and in other libraries, relative to attention without positions.

    Everything takes hours on one core. You can measure in parts, because each run adds to the folder: --lengths 128,512
    first, then --lengths 2048 --no-peers.
    """

    terms: Annotated[Names, Among(KINDS)] = tuple(POSITIONS)
    """Terms of positions: none, bias (a number per head and offset), t5, tisa, shaw (vectors for keys and values),
    inkling (16 numbers of each query meet vectors over offsets), deberta (vectors meet queries and keys), factors (a
    product of rank 66, as in TUPE), dense (a number per pair), or a bias in a batch of different lengths (padded), with
    causal attention (causal) or where only every second token is a query (funnel). Also other options of attention:
    window (128 tokens on each side), grouped (four heads share keys), lse, softcap, sinks and varlen (different lengths
    without padding)."""

    lengths: Counts = (128, 512, 2048)
    """Tokens in a sequence."""

    dtypes: Annotated[Names, Among(DTYPES)] = ("float32", "bfloat16")
    """Types of the inputs."""

    backends: Names = ("auto", "blockwise")
    """Backends of whereformer.attention: "auto" chooses one for each call, "blockwise" needs no compiler."""

    peers: bool = True
    """Whether to measure other libraries too."""

    rounds: int = 7
    """How many times each way is timed."""

    batch: int | None = None
    """Sequences at a time. Default: 4, or 1 for more than 2048 tokens."""

    heads: int = 12
    """Attention heads."""

    head_dim: int = 64
    """Width of a head."""

    out: Path | None = None  # type: ignore[assignment]
    """Folder for the results. Default: a folder in benchmarks/results/ named after the machine."""

    def cases(self) -> Iterator[Case]:
        """Yield the cases in the order of their measurement."""
        for dtype in self.dtypes:
            for kind in self.terms:
                for n in self.lengths:
                    batch = self.batch or (4 if n <= LONG else 1)
                    for direction in ("forward", "training"):
                        yield Case(kind, n, batch, self.heads, self.head_dim, dtype, direction)

    def run(self, console: Console) -> None:
        """Measure all cases, and write the results after each."""
        torch.set_num_threads(1)
        out = self.out or folder_of(machine(torch.device("cpu")))
        rows = {_key(row): row for row in read_rows(out / "results.json", provenance("cpu"))}
        ways = [*map(backend, self.backends), *TORCH, *(PEERS if self.peers else ())]
        for case in self.cases():
            measured = measure(case, ways, self.rounds)
            rows |= {_key(row): row for row in measured}
            print(*map(format_row, measured), sep="\n", flush=True)
            write_results(out / "results.json", {"rows": list(rows.values())})
        print(write_goals(rows.values(), out / "goals.md"))


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


if __name__ == "__main__":
    main(Attention)
