"""Entry point of the ``whereformer`` command: checks that its dependencies are installed, then runs it."""

from __future__ import annotations

import sys

from ._extras import require


def main() -> None:
    """Run the command line. If a dependency is missing, print one line and exit with code 2."""
    try:
        require(
            "train",
            *("tyro", "rich", "tokenizers", "pyarrow", "matplotlib", "jinja2", "psutil", "transformers", "accelerate"),
            *("datasets", "sklearn", "scipy", "sacrebleu"),
        )
    except ImportError as error:
        print(f"whereformer: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    from .cli.main import main as run

    run()


if __name__ == "__main__":
    main()
