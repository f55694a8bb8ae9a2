"""The recipes behind the commands, one file each. The package's root has a Python function for each of them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..lab.recipe import Recipe

RECIPES = {
    "compare": "compare:Compare",
    "probe": "probe:Probe",
    "pretrain": "pretrain:Pretrain",
    "finetune": "finetune:Finetune",
    "translate": "translate:Translate",
    "analyze": "analyze:Analyze",
    "extend": "extend:Extend",
}
"""Where each recipe is, in the order of the commands. It is imported on first use, and without torch."""


def recipe_class(name: str) -> type[Recipe]:
    """Return a recipe by the name of its command."""
    module, _, class_name = RECIPES[name].partition(":")
    kind: type[Recipe] = getattr(import_module(f"{__name__}.{module}"), class_name)
    return kind
