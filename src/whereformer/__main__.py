"""Entry point of the ``whereformer`` command: checks that its dependencies are installed, then runs it."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. If a dependency is missing, print one line and exit with code 2."""
    try:
        from ._extras import STUDIES, require

        try:
            require("train", *STUDIES)
        except ImportError as error:
            print(f"whereformer: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        from .cli.main import main as run
    except KeyboardInterrupt:
        print("whereformer: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
