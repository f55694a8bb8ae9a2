"""A clear error for optional dependencies that are not installed."""

from __future__ import annotations

from importlib.util import find_spec


def require(extra: str, *modules: str) -> None:
    """Check that every module can be imported.

    Raises:
        ImportError: if one cannot; it names the missing modules and the extra that installs them.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ImportError(
            f"this needs {', '.join(missing)}, which is not installed; run: pip install 'whereformer[{extra}]'"
        )
