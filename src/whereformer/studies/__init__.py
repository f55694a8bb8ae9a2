"""The studies behind the commands, one folder each. The package's root has a Python function for each of them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..lab.study import Study

STUDIES = {
    "compare": "compare.settings:Compare",
    "pretrain": "pretrain.settings:Pretrain",
}
"""Where the dataclass of each study's options is. It is imported on first use, and without torch."""


def options(name: str) -> type[Study]:
    """Return the dataclass of a study's options."""
    module, _, found = STUDIES[name].partition(":")
    study: type[Study] = getattr(import_module(f"{__name__}.{module}"), found)
    return study


def as_function(name: str) -> Callable[..., Any]:
    """Return the function that does a study and returns its results."""
    from ..lab.study import function

    return function(options(name), name)
