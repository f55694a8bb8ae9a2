"""What ``import whereformer`` adds to ``import torch``: medians of fresh processes, taken in turns.

Run: python benchmarks/import_time.py
"""

import statistics
import subprocess
import sys
import time

ROUNDS = 7


def seconds(module: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.perf_counter() - started


def main() -> None:
    times: dict[str, list[float]] = {"torch": [], "whereformer": []}
    for module in times:
        seconds(module)  # bring the files into memory
    for _ in range(ROUNDS):
        for module, found in times.items():
            found.append(seconds(module))
    torch, ours = (statistics.median(found) for found in times.values())
    added = statistics.median(b - a for a, b in zip(*times.values(), strict=True))
    print(f"import torch {torch:.2f} s, import whereformer {ours:.2f} s, added {added:+.3f} s")


if __name__ == "__main__":
    main()
