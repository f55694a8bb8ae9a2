"""The command ``whereformer positions``: list the position methods."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar, Literal

from rich.console import Console


@dataclass(frozen=True)
class ListPositions:
    """List the position methods, or those with some properties, and the options of each with defaults in JSON."""

    FLAGS: ClassVar = {"pattern": "PATTERN"}

    pattern: str | None = None
    """Only methods whose name matches, such as "rope*"."""

    acts_on: Literal["embeddings", "queries", "keys", "values", "scores"] | None = None
    """Only methods that act on this."""

    extrapolates: bool = False
    """Only methods that take text longer than max_length."""

    shift_invariant: bool = False
    """Only methods for which the same number added to all positions changes nothing."""

    def run(self, console: Console) -> None:
        """Print the table of methods."""
        from rich.table import Table

        from ..errors import InputError
        from ..positions import ALIASES, describe, method_class, position_names
        from ..positions.base import ACTS_ON

        names = position_names(
            self.pattern,
            acts_on=self.acts_on,
            extrapolates=self.extrapolates or None,
            shift_invariant=self.shift_invariant or None,
        )
        if not names:
            raise InputError(None, "no method has this name and these properties; leave some out")
        table = Table("name", "acts on", "longer text", "what it is", "options", show_edge=False)
        for name in names:
            method, (summary, options) = method_class(name), describe(name)
            shown = (f"{option}={json.dumps(default)}" for option, default in options.items())
            known = [name, *(alias for alias, other in ALIASES.items() if other == name)]
            longer = "yes" if method.extrapolates else "no"
            acts_on = ", ".join(on for on in ACTS_ON if on in method.acts_on)
            table.add_row(" or ".join(known), acts_on, longer, summary, ", ".join(shown))
        console.print(table)
        console.print(
            "Join several by '+': learned+tisa, tupe+t5. Give layers different ones by '/': rope/rope/rope/none."
        )
