"""Entry point of the ``whereformer`` command: checks that its dependencies are installed, then runs it."""

from __future__ import annotations

import os
import signal
import sys

# Type checkers take it to be true. Other modules are imported where Ctrl-C is looked after.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType


def main() -> None:
    """Run the command line. If a dependency is missing, print one line and exit with code 2."""
    # A process that ignores Ctrl-C, as one in the background does, stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from ._extras import require

    try:
        require(
            "train",
            *("tyro", "rich", "tokenizers", "pyarrow", "matplotlib", "jinja2", "transformers", "accelerate"),
            *("datasets", "sklearn", "scipy", "sacrebleu"),
        )
    except ImportError as error:
        print(f"whereformer: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    from .cli.main import main as run

    run()


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit at once after Ctrl-C. Before and after a command's own work there is nothing to keep."""
    os.write(2, b"whereformer: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
