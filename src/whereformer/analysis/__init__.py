"""What a model costs, before it is paid, and what it learned about position.

Toeplitzness and fits need torch alone. Costs need transformers too; without it their names say so when they are used.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .._extras import require
from .fit import TisaFit, fit_loss, fit_tisa, fit_tisa_up_to
from .toeplitz import Diagonals, diagonal_means, diagonals, toeplitz_part, toeplitzness

_NEEDED = ("transformers", "safetensors")

# Not on first use: then the module "cost" would stand where the function is to be found.
if TYPE_CHECKING or all(map(find_spec, _NEEDED)):
    from .cost import (
        Cost,
        Flops,
        Memory,
        PaperRow,
        Parameters,
        cost,
        count_flops,
        count_parameters,
        funnel_config,
        linear_flops,
        paper_table,
    )

__all__ = [
    "Cost",
    "Diagonals",
    "Flops",
    "Memory",
    "PaperRow",
    "Parameters",
    "TisaFit",
    "cost",
    "count_flops",
    "count_parameters",
    "diagonal_means",
    "diagonals",
    "fit_loss",
    "fit_tisa",
    "fit_tisa_up_to",
    "funnel_config",
    "linear_flops",
    "paper_table",
    "toeplitz_part",
    "toeplitzness",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        require("hf", *_NEEDED)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
