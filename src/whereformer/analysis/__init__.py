"""What a model costs, before it is paid."""

from __future__ import annotations

from .._extras import require

require("hf", "transformers", "safetensors")

from .cost import (  # noqa: E402
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
    "Flops",
    "Memory",
    "PaperRow",
    "Parameters",
    "cost",
    "count_flops",
    "count_parameters",
    "funnel_config",
    "linear_flops",
    "paper_table",
]
