"""``python -m whereformer.kernels.native``: what was built, what is used here, and why."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from .build import LIBRARY, attempt, read_report
from .library import Native, found


def main() -> int:
    """Print the state of the kernel, after building it if that is asked for.

    Returns:
        0 if it can be used, 1 if not, and 2 if it could not be built.
    """
    parser = argparse.ArgumentParser(
        prog="python -m whereformer.kernels.native",
        description="Say whether the compiled kernel for the CPU can be used here, and why. "
        "Without it, attention on the CPU runs on PyTorch's operations, which is slower.",
        epilog="Exit codes: 0 it can be used, 1 it cannot, 2 bad arguments or a failed build.",
    )
    parser.add_argument(
        "--build",
        action="store_true",
        help="build it where the package is installed; $CXX chooses the compiler, and $CXXFLAGS adds to its flags",
    )
    if parser.parse_args().build:
        return _build()
    return _show(Path(os.environ.get("WHEREFORMER_NATIVE_LIBRARY", LIBRARY)))


def _build() -> int:
    start = time.monotonic()
    report = attempt(force=True)
    if report.reason:
        print(report, file=sys.stderr)
        return 2
    print(f"built in {time.monotonic() - start:.0f} seconds")
    # In a process of its own, because this one may have loaded the library that was replaced.
    return subprocess.run([sys.executable, "-m", "whereformer.kernels.native"], check=False).returncode


def _show(path: Path) -> int:
    state, report = found(), read_report(path)
    print(f"library   {path if path.exists() else 'none'}")
    if report is not None and not report.reason:
        print(f"compiler  {report.compiler}")
        for level, line in report.left_out.items():
            print(f"without   {level}: {line}")
    if not isinstance(state, Native):
        print(f"not used  the kernel {state}")
        return 1
    print(f"levels    {' '.join(state.levels)}")
    print(f"used      {state.level}{f' ({state.limit})' if state.limit else ''}")
    print(f"threads   {torch.get_num_threads()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
