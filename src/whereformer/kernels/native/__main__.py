"""``python -m whereformer.kernels.native``: whether the compiled kernel is used here, or why not."""

from __future__ import annotations

import argparse
import sys

import torch

from .build import FOLDER, LIBRARY, attempt, is_current
from .library import level, unsupported_reason


def main() -> int:
    """Print the state of the kernel, or build it; return 0 if it can be used or was built, else 1."""
    parser = argparse.ArgumentParser(prog="python -m whereformer.kernels.native", description=__doc__)
    parser.add_argument("--build", action="store_true", help="$CXX chooses the compiler, $CXXFLAGS adds to its flags")
    if parser.parse_args().build:
        print(attempt())
        return 0 if is_current(FOLDER, LIBRARY) else 1
    reason = unsupported_reason()
    print(f"not used: the kernel {reason}" if reason else f"used: {level()}, {torch.get_num_threads()} threads")
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
