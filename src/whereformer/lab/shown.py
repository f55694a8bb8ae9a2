"""What shows itself on a terminal and in a notebook: tables and sentences, of results or of a plan."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..errors import InputError
    from .sheet import Sheet


class Shown:
    """Base class of what has tables and sentences: printing it, or ending a notebook's cell with it, shows them."""

    def sheets(self) -> Sequence[Sheet]:
        """Return the tables to show on a terminal and in a notebook."""
        return ()

    def sentences(self) -> Sequence[str]:
        """Return what the numbers say. The first sentence is the headline."""
        return ()

    def problem(self) -> InputError | None:
        """Return what a command has to end with although there are results, or None."""
        return None

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.styled import Styled

        # Strings, not rich's texts: the terminal escapes what strings from outside hold.
        headlines, others = self.sentences()[:1], self.sentences()[1:]
        return Group(*self.sheets(), *(Styled(line, "bold") for line in headlines), *others)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=100, markup=False, emoji=False, highlight=False)
        console.print(self)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]  # it is a StringIO
        return text

    def _repr_html_(self) -> str:
        from .report.page import fragment

        return fragment(self.sentences(), self.sheets())


@dataclass(frozen=True)
class Plan(Shown):
    """What a study would do, as a table, and as sentences what more there is to know before it begins."""

    sheet: Sheet
    notes: tuple[str, ...] = ()

    def sheets(self) -> Sequence[Sheet]:
        return (self.sheet,)

    def sentences(self) -> Sequence[str]:
        return ("A dry run: nothing was trained or written.", *self.notes)
