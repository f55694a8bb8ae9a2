"""Counts of a model's parameters and operations, and measurements of how a model uses position.

Toeplitzness and fits need only torch. Counts also need transformers; without it, using
their names raises an error that says so.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .._extras import require
from .fit import TisaFit, fit_tisa, fit_tisa_up_to
from .toeplitz import Diagonals, diagonals, toeplitz_part, toeplitzness

if TYPE_CHECKING:
    from .costs import Flops, Parameters, count_flops, count_parameters

__all__ = [
    "Diagonals",
    "Flops",
    "Parameters",
    "TisaFit",
    "count_flops",
    "count_parameters",
    "diagonals",
    "fit_tisa",
    "fit_tisa_up_to",
    "toeplitz_part",
    "toeplitzness",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("hf", "transformers", "safetensors")
    return getattr(import_module(f"{__name__}.costs"), name)
