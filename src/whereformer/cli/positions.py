"""The command ``whereformer positions``: list the position methods."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

from rich.console import Console

from ..lab.recipe import WithPlugin


@dataclass(frozen=True)
class ListPositions(WithPlugin):
    """List the position methods, and the options of each with defaults in JSON."""

    FLAGS: ClassVar = {"pattern": "PATTERN"}
    EXAMPLE: ClassVar = 'whereformer positions "rope*"'

    pattern: str | None = None
    """Only methods whose name matches, such as "rope*"."""

    def run(self, console: Console) -> None:
        """Print the table of methods."""
        from rich.table import Table
        from rich.text import Text

        from ..errors import InputError
        from ..positions import ALIASES, describe, method_class, position_names, suggest_methods
        from ..positions.base import ACTS_ON

        names = position_names(self.pattern)
        if not names:
            hint = suggest_methods(self.pattern or "")
            raise InputError(None, f"no method has a name such as {self.pattern!r}{hint}")
        groups: dict[str, list[str]] = {}
        for name in names:
            changed = [on for on in ACTS_ON if on in method_class(name).acts_on]
            groups.setdefault(", ".join(changed) or "nothing", []).append(name)
        for acts_on, of_group in groups.items():
            title = f"Methods that act on {acts_on}"
            table = Table("name", "longer text", "what it is", title=title, title_justify="left", show_edge=False)
            for name in of_group:
                summary, options = describe(name)
                what = Text(summary.replace("``", ""))
                if options:
                    shown = ", ".join(f"{option}={json.dumps(default)}" for option, default in options.items())
                    what.append(f"\noptions: {shown}", "dim")
                known = " or ".join([name, *(alias for alias, method in ALIASES.items() if method == name)])
                table.add_row(known, "yes" if method_class(name).extrapolates else "no", what)
            console.print(table, "")
        console.print(
            "Join several by '+': learned+tisa, tupe+t5. Give layers different ones by '/': rope/rope/rope/none."
        )
