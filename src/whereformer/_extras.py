"""A clear error for optional dependencies that are not installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec

STUDIES = (
    *("rich", "tokenizers", "pyarrow", "matplotlib", "jinja2", "transformers", "accelerate"),
    *("datasets", "sklearn", "scipy", "sacrebleu"),
)
"""The modules that commands import, some of them only when all work is done."""


def require(extra: str, *modules: str) -> None:
    """Check that every module can be imported.

    Raises:
        ImportError: if one cannot; it names the missing modules and the extra that installs them. Also for transformers
            where Python removes docstrings: its Funnel models are built from theirs.
    """
    if "transformers" in modules and sys.flags.optimize > 1:
        raise ImportError("transformers needs its docstrings, which python -OO removes; use python -O")
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ImportError(
            f"this needs {', '.join(missing)}, which is not installed; in whereformer's clone run: "
            f'pip install ".[{extra}]"'
        )
