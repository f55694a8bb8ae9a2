"""The command ``whereformer positions``: list the position methods."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class ListPositions:
    """List the position methods and the options of each, with defaults in JSON."""

    def run(self, console: Console) -> None:
        """Print the table of methods."""
        from rich.table import Table

        from ..positions import ALIASES, describe, position_names

        table = Table("name", "what it is", "options", show_edge=False)
        for name in position_names():
            summary, options = describe(name)
            shown = (f"{option}={json.dumps(default)}" for option, default in options.items())
            names = [name, *(alias for alias, method in ALIASES.items() if method == name)]
            table.add_row(" or ".join(names), summary, ", ".join(shown))
        console.print(table)
        console.print(
            "Join several by '+': learned+tisa, tupe+t5. Give layers different ones by '/': rope/rope/rope/none."
        )
