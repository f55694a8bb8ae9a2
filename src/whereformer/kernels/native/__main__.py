"""``python -m whereformer.kernels.native``: what was built, what is used here, and why."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from .build import LIBRARY, BuildError, build
from .library import level, why_not


def main() -> int:
    """Print the state of the kernel, or build it.

    Returns:
        0 if it can be used or was built, 1 if it cannot be used, and 2 if it could not be built.
    """
    parser = argparse.ArgumentParser(
        prog="python -m whereformer.kernels.native",
        description="Say whether the compiled kernel for the CPU can be used here, and why. "
        "Without it, attention on the CPU runs on PyTorch's operations, which is slower.",
        epilog="Exit codes: 0 it can be used, or was built, 1 it cannot be used, 2 bad arguments or a failed build.",
    )
    parser.add_argument(
        "--build",
        action="store_true",
        help="build it where the package is installed; $CXX chooses the compiler, and $CXXFLAGS adds to its flags",
    )
    if parser.parse_args().build:
        try:
            print(build())
        except BuildError as error:
            print(f"the kernel for the CPU is not built: {error}", file=sys.stderr)
            return 2
        return 0
    path = Path(os.environ.get("WHEREFORMER_NATIVE_LIBRARY", LIBRARY))
    print(f"library   {path if path.exists() else 'none'}")
    if reason := why_not():
        print(f"not used  the kernel {reason}")
        return 1
    print(f"used      {level()}")
    print(f"threads   {torch.get_num_threads()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
