"""One clear error for what an optional dependency is missing from."""

from __future__ import annotations

from importlib.util import find_spec


def require(extra: str, *modules: str) -> None:
    """Raise unless every module can be imported.

    Raises:
        ImportError: naming the missing modules and the extra that brings them.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ImportError(
            f"this needs {', '.join(missing)}, which is not installed; run: pip install 'whereformer[{extra}]'"
        )
