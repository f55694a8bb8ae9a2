"""Time attention with positions against what people use today. The README's speed figures come from this benchmark.

Run: make bench, or: .venv/bin/python benchmarks/attention.py --help

The output and the gradients of every way are first checked against a float64 reference; a wrong way is reported and not
timed. Then all ways are timed in turns, and each time is divided by that of torch's own attention without positions
("sdpa") in the same round. At 1.00 positions cost nothing. "sdpa+bias" is what most code does today: it passes an
(n, n) bias to torch's attention. attention_peers.py has the ways of other libraries. "forward" is without gradients;
"training" is forward and backward with all gradients.

results.json has a row for each case and way. goals.md has a table of what was reached beside the goals for this
processor, and plot.svg a picture of it.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from attention_kinds import DTYPES, KINDS, POSITIONS, Case, make_problem
from attention_peers import PEERS
from attention_plot import plot
from attention_ways import FLOOR, TORCH, Clock, Row, Way, backend, check, in_a_line, make_step
from goals import write_goals
from lists import listed, listed_numbers
from side_by_side import memory_of

from whereformer.errors import InputError
from whereformer.files import write_atomically
from whereformer.lab.options import find_device
from whereformer.lab.run import threads
from whereformer.provenance import commit, machine, provenance, write_results

LONG = 2048
"""With more tokens than this, the default batch is one sequence."""


def measure(case: Case, ways: Sequence[Way], device: torch.device, rounds: int) -> list[Row]:
    """Check all ways on a case, and time those that are right, in a changing order."""
    rows: dict[Way, Row] = {}
    steps: dict[Way, Callable[[], object]] = {}
    problem = make_problem(case, device)
    blank = Row(**vars(case), device=device.type, threads=torch.get_num_threads(), way="")
    for way in (FLOOR, *(way for way in ways if way.does(case.terms))):
        rows[way] = row = replace(blank, way=way.name, measured=date.today().isoformat(), commit=commit())
        error = check(way, case.terms, case.head_dim, case.dtype, case.direction, device)
        if isinstance(error, str):
            rows[way] = replace(row, note=error)
            continue
        try:
            step = make_step(way, problem)
            step()  # the first call compiles and fills caches
            rows[way], steps[way] = replace(row, error=error, memory=memory_of(step, device)), step
        except Exception as failure:  # another library's failure is also a result
            rows[way] = replace(row, error=error, note=in_a_line(failure))
    clock, order = Clock(device, blank.threads), random.Random(0)
    seconds: dict[Way, list[float]] = {way: [] for way in steps}
    for _ in range(rounds):
        for way in order.sample(list(steps), len(steps)):
            seconds[way].append(clock.seconds(steps[way]))
    return [replace(row, **timings(seconds[way], seconds[FLOOR])) if way in steps else row for way, row in rows.items()]


def timings(seconds: Sequence[float], floor: Sequence[float]) -> dict[str, Any]:
    """Return a row's timings over all rounds; ``floor`` has plain attention's times in the same rounds."""
    ratios = [own / plain for own, plain in zip(seconds, floor, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "milliseconds": 1000 * statistics.median(seconds),
        "seconds": tuple(seconds),
    }


def shown(row: Row) -> str:
    """Return a row as a line: the ratio with its range, the time and the memory, or why there are none."""
    case = f"{row.terms:9}{row.dtype:9} n={row.n:<6}{row.direction:9}{row.way:19}"
    if row.milliseconds is None:
        return f"{case}cannot: {row.note}"
    memory = (row.memory or 0) / 2**20
    return f"{case}{row.ratio:.2f} ({row.lowest:.2f}-{row.highest:.2f}) {row.milliseconds:9.3g} ms {memory:8.1f} MiB"


def earlier(file: Path, origin: dict[str, Any]) -> list[Row]:
    """Return the rows that a file of results already has.

    Raises:
        InputError: if they were measured on another machine or with other versions.
    """
    if not file.exists():
        return []
    before = json.loads(file.read_text())
    then, now = ({**found["machine"], **found["versions"]} for found in (before, origin))
    if changed := [name for name in {**then, **now} if name != "threads" and then.get(name) != now.get(name)]:
        raise InputError("out", f"{file} has results with another {', '.join(changed)}; choose another folder")
    names = {field.name for field in fields(Row)}
    return [Row(**{name: value for name, value in row.items() if name in names}) for row in before["rows"]]


def folder_of(facts: dict[str, Any]) -> Path:
    """Return the folder for a machine's results."""
    name = facts.get("gpu") or f"{facts['cpu']} {os.cpu_count()} cores {facts['instructions']}"
    return Path(__file__).parent / "results" / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Time attention with positions in whereformer and in what people use today, relative to attention without them.

    Everything takes hours on one core. You can measure in parts, because each run adds to the folder: --lengths 128,512
    first, then --lengths 2048 --no-peers.
    """

    terms: Annotated[str, tyro.conf.arg(metavar="A,B,C")] = ",".join(POSITIONS)
    """What positions add: none, bias (a number per head and offset), t5, tisa, shaw (vectors for keys and values),
    inkling (16 numbers of each query meet vectors over offsets), deberta (vectors meet queries and keys), factors (a
    product of rank 66, as in TUPE), dense (a number per pair), or a bias in a batch of different lengths (padded), with
    causal attention (causal) or where only every second token is a query (funnel). Also what attention offers besides:
    window (128 tokens on each side), grouped (four heads share keys), lse, softcap, sinks and varlen (different lengths
    without padding)."""

    lengths: Annotated[str, tyro.conf.arg(metavar="N,N")] = "128,512,2048"
    """Tokens in a sequence."""

    dtypes: Annotated[str, tyro.conf.arg(metavar="A,B")] = "float32,bfloat16"
    """float32, bfloat16 or float16."""

    backends: Annotated[str, tyro.conf.arg(metavar="A,B")] = "auto,blockwise"
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

    threads: int = 1
    """Threads on the CPU. With one thread, time is the process's CPU time, which other programs disturb least."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute. "auto" is a GPU if there is one."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Folder for the results. Default: a folder in benchmarks/results/ named after the machine."""

    def cases(self) -> Iterator[Case]:
        """Yield the cases in the order in which they are measured."""
        for dtype in listed("dtypes", self.dtypes, list(DTYPES)):
            for kind in listed("terms", self.terms, list(KINDS)):
                for n in listed_numbers("lengths", self.lengths, 1, 10_000_000):
                    batch = self.batch or (4 if n <= LONG else 1)
                    for direction in ("forward", "training"):
                        yield Case(kind, n, batch, self.heads, self.head_dim, dtype, direction)

    def run(self) -> None:
        """Measure all cases, and write the results after each."""
        device = find_device(self.device)
        out = self.out or folder_of(machine(device))
        rows = {row.key: row for row in earlier(out / "results.json", provenance(device))}
        ways = [*map(backend, listed("backends", self.backends)), *TORCH, *(PEERS if self.peers else ())]
        with threads(self.threads):
            for case in self.cases():
                found = measure(case, ways, device, self.rounds)
                rows |= {row.key: row for row in found}
                print(*map(shown, found), sep="\n", flush=True)
                write_results(out / "results.json", {"rows": list(map(asdict, rows.values()))}, device)
        for file, picture in plot(list(rows.values())).items():
            write_atomically(out / file, picture)
        print(write_goals(list(rows.values()), out / "goals.md"))


if __name__ == "__main__":
    try:
        tyro.cli(Attention).run()
    except InputError as error:
        raise SystemExit(str(error)) from None
