"""The command ``whereformer check``: identify the position method that a function computes."""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from runpy import run_path
from typing import TYPE_CHECKING, Annotated, ClassVar

from rich.console import Console

from ..errors import InputError, short_repr
from ..files import check_regular
from ..lab.recipe import Range, WithPlugin

if TYPE_CHECKING:
    from ..positions.base import PositionMethod


@dataclass(frozen=True, kw_only=True)
class Check(WithPlugin):
    """Say which position method your code computes, and how it differs: "rope, but offsets are off by +1".

    The function gets random queries and keys, each (1, heads, n, head dim) in float64, and returns their scores before
    softmax, (1, heads, n, n). If it has a third parameter, the values, it returns the output of softmax attention.
    """

    FLAGS: ClassVar = {"function": "FILE:FUNCTION"}
    EXAMPLE: ClassVar = "whereformer check my_model.py:attention_scores"

    function: str
    """The Python file and the name of the function in it. If the file has a dict METHODS of methods by name, with the
    code's parameters, these are tried; otherwise all methods without parameters."""
    heads: Annotated[int, Range(1, 256)] = 2
    """Number of heads, unless METHODS has it."""
    head_dim: Annotated[int, Range(2, 1024)] = 16
    """Width of a head, an even number, unless METHODS has it."""

    def run(self, console: Console) -> None:
        """Print the method."""
        from ..analysis.ports import identify
        from ..positions.base import PositionMethod

        path, _, name = self.function.rpartition(":")
        if not path or not name.isidentifier():
            raise InputError("function", f"expected FILE:FUNCTION, such as model.py:scores, got {self.function!r}")
        check_regular("function", Path(path))
        names = run_path(path)
        function, methods = names.get(name), names.get("METHODS", {})
        if not callable(function):
            raise InputError("function", f"{path} has no function {name!r}")
        if not isinstance(methods, dict) or not all(isinstance(method, PositionMethod) for method in methods.values()):
            raise InputError("function", f"expected METHODS to be position methods by name, got {short_repr(methods)}")
        num_parameters = len(inspect.signature(function).parameters)
        if num_parameters not in (2, 3):
            expected = "a function of query and key, or of query, key and value"
            raise InputError("function", f"expected {expected}, got one of {num_parameters} parameters")
        methods = methods or self._methods_without_parameters()
        console.print(identify(function, methods, returns_weights=num_parameters == 3), highlight=False, soft_wrap=True)

    def _methods_without_parameters(self) -> dict[str, PositionMethod]:
        from ..positions import build_position, position_names

        methods = {}
        for name in position_names():
            with suppress(InputError):  # the method does not have these sizes
                methods[name] = build_position(name, hidden_size=self.heads * self.head_dim, num_heads=self.heads)
        acting = {name: method for name, method in methods.items() if "embeddings" not in method.acts_on}
        return {name: method for name, method in acting.items() if not list(method.parameters())}
