"""Measure how much ``import whereformer`` and its attention add to ``import torch``: medians over fresh processes.

Run: python benchmarks/import_time.py [--rounds 7] [--out FILE]
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from whereformer.lab.provenance import write_results

CODE = {"torch": "import torch", "whereformer": "import whereformer; whereformer.attention"}


def seconds(module: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", CODE[module]], check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    given = parser.parse_args()
    times: dict[str, list[float]] = {module: [] for module in CODE}
    for module in times:
        seconds(module)  # load the files into the disk cache
    for _ in range(given.rounds):
        for module, found in times.items():
            found.append(seconds(module))
    torch, ours = (statistics.median(found) for found in times.values())
    added = statistics.median(b - a for a, b in zip(*times.values(), strict=True))
    print(f"import torch {torch:.2f} s, whereformer.attention {ours:.2f} s, added {added:+.3f} s")
    if given.out is not None:
        write_results(given.out, {"seconds": times, "added": added})


if __name__ == "__main__":
    main()
