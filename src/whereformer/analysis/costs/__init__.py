"""``cost``: an encoder's floating-point operations, parameters and memory, computed without running it."""

from .devices import Hardware, Way, ways
from .memory import Memory
from .operations import Flops, count_flops, linear_flops
from .paper import PaperRow, funnel_config, paper_table
from .parameters import Parameters, count_parameters
from .total import Cost, cost

__all__ = [
    "Cost",
    "Flops",
    "Hardware",
    "Memory",
    "PaperRow",
    "Parameters",
    "Way",
    "cost",
    "count_flops",
    "count_parameters",
    "funnel_config",
    "linear_flops",
    "paper_table",
    "ways",
]
