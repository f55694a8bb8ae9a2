"""The options of a benchmark. Importing them is fast, so that --help is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...errors import InputError
from ...lab.options import MOST_SIZE, MOST_THREADS, check_positive, check_range, find_device, listed, listed_numbers
from ...lab.study import Study

if TYPE_CHECKING:
    from .run import BenchJob

LONGEST = 10_000_000
"""The most tokens in a sequence; calls that need too much memory are not tried."""
LONG = 2048
"""With more tokens than this, the default batch is one sequence."""


@dataclass(frozen=True, kw_only=True)
class Bench(Study):
    """How fast is attention with positions on this machine, compared with attention that has none?

    The output and the gradients of every way are first checked against a float64 reference. Then all ways are timed in
    turns, and each time is divided by the time of torch's own attention without positions ("sdpa") in the same round.
    At 1.00 positions cost nothing; at 2.00 they double the time. "sdpa+bias" is what most code does today: it passes an
    (n, n) bias to torch's attention. "sdpa" is over all keys, also beside a causal case. Forward is without gradients;
    training is forward and backward with all gradients.

    Writes results.json and results.csv. Ctrl-C keeps what has been measured, and a later run with other terms
    or lengths adds to the folder.
    """

    terms: str | None = None
    """What positions add: none, bias (a number per head and offset), t5, tisa, shaw (vectors for keys and values),
    inkling (16 numbers of each query meet vectors over offsets), deberta (vectors meet queries and keys), factors (a
    product of rank 66, as in TUPE), or a bias in a batch of different lengths (padded) or with causal attention
    (causal). "all" means every one of these. Default: bias,t5,shaw (with --quick: bias)."""

    lengths: str | None = None
    """Tokens in a sequence. Default: 128,512,2048 (with --quick: 128,512)."""

    dtypes: str | None = None
    """float32, bfloat16 or float16. Default: float32, or bfloat16 on a GPU."""

    backends: str = "auto"
    """Backends of whereformer.attention: "auto" chooses one for each call, "reference" is the plain formula."""

    rounds: int | None = None
    """Number of times to time each way. Default: 7 (with --quick: 3)."""

    quick: bool = False
    """Take a first look in less than a minute."""

    batch: int | None = None
    """Sequences at a time. Default: 4, or 1 for more than 2048 tokens."""

    heads: int = 12
    """Attention heads."""

    head_dim: int = 64
    """Width of a head."""

    threads: int = 1
    """Threads on the CPU. With one thread, time is the process's CPU time, which other programs disturb least."""

    memory_limit: float | None = None
    """GiB of memory. A call that would need more is not tried, and the table says so. Default: half the free memory."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute. "auto" is a GPU if there is one."""

    out: Path = Path("runs/bench")
    """Folder for the results."""

    def job(self) -> BenchJob:
        from ...kernels.choose import BACKENDS
        from .cases import DTYPES, KINDS, Case
        from .run import BenchJob
        from .timing import free_memory
        from .ways import CAUSAL, DENSE, backend, check

        check_range(self, **dict.fromkeys(("rounds", "batch", "heads", "head_dim"), (1, MOST_SIZE)))
        check_range(self, threads=(1, MOST_THREADS))
        check_positive(self, "memory_limit")
        device = find_device(self.device)
        usual = "float32" if device.type == "cpu" else "bfloat16"
        kinds = ("bias" if self.quick else "bias,t5,shaw") if self.terms is None else self.terms
        lengths = ("128,512" if self.quick else "128,512,2048") if self.lengths is None else self.lengths
        dtypes = listed("dtypes", usual if self.dtypes is None else self.dtypes, list(DTYPES), spaces=True)
        ways = [backend(name) for name in listed("backends", self.backends, BACKENDS, spaces=True)]
        for way in ways:
            for dtype in dtypes:
                found = check(way, "bias", self.head_dim, dtype, "forward", device)
                if isinstance(found, str):
                    raise InputError("backends", f"{way.name} can't run here: {found}")
        return BenchJob(
            cases=[
                Case(kind, n, self.batch or (4 if n <= LONG else 1), self.heads, self.head_dim, dtype, direction)
                for dtype in dtypes
                for kind in (KINDS if kinds == "all" else listed("terms", kinds, list(KINDS), spaces=True))
                for n in listed_numbers("lengths", lengths, 1, LONGEST)
                for direction in ("forward", "training")
            ],
            ways=[*ways, DENSE, CAUSAL],
            device=device,
            memory_limit=int(self.memory_limit * 2**30) if self.memory_limit else free_memory(device) // 2,
            rounds=self.rounds or (3 if self.quick else 7),
            threads=self.threads,
        )
